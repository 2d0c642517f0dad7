"""Pairs of a prompt and a completion: the rows of a file or data set, and their tokens.

Imports neither torch nor transformers, so that a wrong row is reported in milliseconds.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from qarl.configs.errors import ModelError
from qarl.configs.schema.task import TaskConfig
from qarl.configs.seeds import stable_hash
from qarl.configs.words import few, quoted
from qarl.rollout.types import Completion, Group, Prompt
from qarl.tasks.base import HELDOUT_ONE_IN, Message, Problem, Split, TaskError
from qarl.tasks.pictures import column_of_pictures
from qarl.tasks.rows import FILES, HUB, Row, file_rows, hub_rows, is_table
from qarl.tasks.table import ROLES

COLUMNS = (("messages",), ("prompt", "completion"), ("question", "answer"))
"""The forms of a row, by the columns that it must have."""
_HASHES = 2**64
"""Number of values of a hash."""


@dataclass(frozen=True)
class Pair:
    """One example."""

    problem: Problem
    """The prompt, with the completion's text as its answer."""
    heldout: bool
    """Whether it is held out, and so not learned from."""


def read_pairs(task: TaskConfig, heldout: float) -> list[Pair]:
    """Return the pairs of the file, or of the Hugging Face data set, that the task names.

    A row of a file may say itself whether it is held out ("split": "train" or "heldout"). Other
    rows are chosen by a hash of their question. At 1/8 they are those that `qarl train` holds out.
    If every row says "train", none is held out, whatever the fraction.

    Args:
        task: name, subset and split select the rows. The system prompt goes before prompts that are
            text.
        heldout: fraction of the questions to hold out.

    Raises:
        TaskError: a file is missing or empty, a row has none of the forms in `COLUMNS`, or no pair
            is left to learn from, or to measure on.
    """
    rows = _rows(task)
    if not rows:
        raise TaskError(
            f'--data {task.name} is empty; give lines like {{"prompt": "1 + 1 =", "completion":'
            ' "2"}'
        )
    pairs = []
    hashed = 0
    for row in rows:
        problem = _problem(row)
        split = None if task.name.startswith(HUB) else _own_split(row)
        if split is None:
            is_heldout = _is_heldout(problem.question, heldout)
            hashed += 1
        else:
            is_heldout = split == "heldout"
        if task.system is not None and not problem.messages:
            problem = problem.with_system_prompt(task.system)
        pairs.append(Pair(problem, is_heldout))
    heldout_count = sum(pair.heldout for pair in pairs)
    if heldout_count == len(pairs) and not hashed:
        raise TaskError(
            f'every row of --data {task.name} has "split": "heldout"; give the rows to learn from'
            ' "split": "train"'
        )
    if heldout_count == len(pairs) or (heldout and hashed and not heldout_count):
        part = "all" if heldout_count else "none"
        raise TaskError(
            f"--heldout {heldout:g} sets {part} of the {len(pairs)} pairs of {task.name} aside;"
            " give another fraction (0: none), or more pairs"
        )
    return pairs


def encode(
    prompter: Any,
    pairs: Sequence[Pair],
    longest: float | None,
) -> list[Group]:
    """Return the tokens of each pair as a group of one completion.

    The groups are for `learner.batching.make_batch`. Prompts are tokenized as `qarl train` does it.
    The tokenizer's end token follows a completion, as a sampler's completion ends.

    Args:
        prompter: a `qarl.run.prompts.Prompter`.
        longest: number of positions of the model; None if it does not say.

    Raises:
        TaskError: a completion has no token, or a pair is longer than `longest`.
        ModelError: the tokenizer has no end token, or the model lacks the row of a token.

    It also raises what `Prompter.prompt` does.
    """
    tokenizer = prompter.tokenizer
    end = tokenizer.eos_token_id
    if end is None:
        raise ModelError(
            "the tokenizer has no end token (eos_token), so that no completion would end; name one"
            " in its tokenizer_config.json"
        )
    groups = []
    too_long = []
    for problem in (pair.problem for pair in pairs):
        prompt = prompter.prompt(problem)
        answer = tuple(tokenizer(problem.answer, add_special_tokens=False)["input_ids"])
        if not answer:
            raise TaskError(
                f"{problem.id}: the completion {problem.answer!r} has no token; write one, or drop"
                " the row"
            )
        what = f"the completion of {problem.id} ({quoted(problem.answer)})"
        prompter.vocabulary.require([(*answer, end)], what, tokenizer)
        total = len(prompt.token_ids) + len(answer) + 1
        if longest is not None and total > longest:
            too_long.append(f"{problem.id} ({total} tokens)")
        groups.append(_group(prompt, (*answer, end), problem.answer))
    if too_long:
        count = f"{len(too_long)} of {len(pairs)} pairs"
        raise TaskError(
            f"{count} are longer than the model's {longest:g} positions: {few(too_long)}; shorten"
            " or drop them"
        )
    return groups


def _group(prompt: Prompt, tokens: tuple[int, ...], text: str) -> Group:
    """Return a pair's tokens as a group of one completion.

    What a sampler would report, log-probs and reward, is 0.
    """
    nothing_sampled = (0.0,) * len(tokens)
    completion = Completion(tokens, nothing_sampled, text, weight_version=0, finish_reason="stop")
    return Group(prompt, (completion,), rewards=(0.0,))


def _rows(task: TaskConfig) -> list[Row]:
    """Return the rows of the task's file or data set."""
    if task.name.startswith(HUB):
        return hub_rows(task.name, task.subset, task.split or "train", None)
    if not is_table(task.name):
        raise TaskError(
            f"--data {task.name!r} must be a {', '.join(FILES)} file, or {HUB}ID of a Hugging Face"
            " data set"
        )
    for field in ("subset", "split"):
        value = getattr(task, field)
        if value is not None:
            raise TaskError(
                f"--task.{field} {value} is for a Hugging Face data set (hf:…), not for {task.name}"
            )
    return file_rows(Path(task.name))


def _problem(row: Row) -> Problem:
    """Return the row's prompt, with the last turn of the assistant as its answer."""
    columns = _form(row)
    turns: list[Message] = []
    for column, role in zip(columns, ("user", "assistant"), strict=False):
        turns += _turns(row, column, role)
    *before, last = turns
    if last["role"] != "assistant" or not before:
        raise TaskError(
            f"{row.where}: {columns[-1]!r} must end with a message of the assistant, after another"
            f" one; got {quoted(last)}"
        )
    is_text = len(before) == 1 and isinstance(row.values[columns[0]], str)
    return Problem(
        row.where,
        before[-1]["content"],
        last["content"],
        messages=() if is_text else tuple(before),
    )


def _form(row: Row) -> tuple[str, ...]:
    """Return the columns that the row is read from, one of `COLUMNS`."""
    forms = [columns for columns in COLUMNS if all(column in row.values for column in columns)]
    if len(forms) != 1:
        wanted = ", or ".join(" and ".join(columns) for columns in COLUMNS)
        columns = ", ".join(str(column) for column in row.values) or "none"
        raise TaskError(
            f"{row.where}: a row needs the columns {wanted}, one of these alone; it has {columns}"
        )
    if (pictures := column_of_pictures(row)) is not None:
        raise TaskError(
            f"{row.where}: column {pictures!r} holds pictures, and pairs are text alone; drop the"
            " column, or learn from pictures by rewards (qarl train --rollout.pictures)"
        )
    if row.values.get("tools"):
        raise TaskError(
            f"{row.where}: column 'tools' would not be shown to the model; drop the column, or"
            " the row"
        )
    return forms[0]


def _turns(row: Row, column: str, role: str) -> list[Message]:
    """Return a column's messages. Text, or a whole number, is one message of that role."""
    value = row.values[column]
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    if isinstance(value, str) and (value.strip() or role == "assistant"):
        return [{"role": role, "content": value}]
    shape = (
        f'{column!r} must be text, or a list of messages such as {{"role": "user", "content": "1 +'
        ' 1"}'
    )
    if not isinstance(value, list) or not value:
        raise TaskError(f"{row.where}: {shape}; got {quoted(value)}")
    for message in value:
        is_message = (
            isinstance(message, dict)
            and message.get("role") in ROLES
            and isinstance(message.get("content"), str)
        )
        if not is_message:
            raise TaskError(
                f"{row.where}: {shape}, of role {', '.join(ROLES)}; got {quoted(message)}"
            )
    return [{"role": message["role"], "content": message["content"]} for message in value]


def _own_split(row: Row) -> str | None:
    """Return what a row says of its own split, or None. Raise `TaskError` for an unknown split."""
    split = row.values.get("split") or None
    if split and split not in get_args(Split):
        raise TaskError(
            f"{row.where}: unknown split {split!r}; allowed: {', '.join(get_args(Split))}"
        )
    return split


def _is_heldout(question: str, fraction: float) -> bool:
    """Return whether a question without a split of its own is held out.

    Its hash is read so that a fraction of 1/`HELDOUT_ONE_IN` gives `qarl.tasks.base.is_heldout`.
    """
    # The remainder, which `is_heldout` looks at, is the high digit of a number in [0, 1), which is
    # compared with the fraction; the quotient refines it.
    quotient, remainder = divmod(stable_hash(question), HELDOUT_ONE_IN)
    return remainder + quotient * HELDOUT_ONE_IN / _HASHES < fraction * HELDOUT_ONE_IN
