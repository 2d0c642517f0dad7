"""Tasks made of rows: which column is the question, which the answer, what is left out, and what is
held out.
"""

import dataclasses
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from qarl.configs.seeds import stable_hash
from qarl.configs.words import did_you_mean, quoted
from qarl.tasks.base import (
    Message,
    Problem,
    Split,
    TaskError,
    check_request,
    is_heldout,
)
from qarl.tasks.rows import HUB, Row

ROLES = ("system", "user", "assistant")


@dataclass(frozen=True)
class Columns:
    """Names of a row's columns. They may lead into nested values, as in
    "reward_model.ground_truth", and into a list by a number: "final_answer.0". answer: None where
    rows have none, and problems have "". missing: the column that `prompt` stands in for.
    """

    prompt: str = "question"
    answer: str | None = "answer"
    missing: str | None = None


@dataclass(frozen=True)
class Counts:
    """What became of the rows. unanswered: of a data set, without a reference answer. repeated:
    questions that an earlier row of their split has; contradicting: those of them with another
    answer. too_long: prompts above the limit of tokens.
    """

    rows: int = 0
    unanswered: int = 0
    repeated: int = 0
    contradicting: int = 0
    too_long: int = 0


@dataclass(frozen=True)
class Table:
    """A finite source of problems. Every split repeats endlessly, in a new order each time round.

    A row is held out as its split says ("split": "train" or "heldout" in a file, the data set's own
    otherwise), else by `is_heldout`. Columns other than question, answer and split become the
    problem's metadata.
    """

    name: str
    by_split: dict[Split, list[Problem]]
    counts: Counts = field(default_factory=Counts)
    columns: Columns = Columns()

    def problems(self, split: Split, start: int, count: int, seed: int) -> list[Problem]:
        """Problems start, …, start + count - 1 of the split for this seed, reshuffled in every pass
        over it.

        Raises:
            TaskError: bad request, or no row is in this split.
        """
        check_request(split, start, count)
        rows = self.by_split[split]
        if not rows:
            raise TaskError(
                f"{self.name} has no {split} questions{self._left_out()}; {self._remedy(split)}"
            )
        orders: dict[int, list[int]] = {}
        chosen = []
        for index in range(start, start + count):
            epoch, position = divmod(index, len(rows))
            if epoch not in orders:
                orders[epoch] = list(range(len(rows)))
                random.Random(stable_hash(split, seed, epoch)).shuffle(orders[epoch])
            chosen.append(rows[orders[epoch][position]])
        return chosen

    def shortened(self, fits: Callable[[Sequence[Problem]], list[bool]]) -> "Table":
        """Those whose prompts are short enough. fits: whether each is. Raises `TaskError` where
        none is left.
        """
        kept: dict[Split, list[Problem]] = {
            split: [problem for problem, fit in zip(rows, fits(rows), strict=True) if fit]
            for split, rows in self.by_split.items()
        }
        dropped = sum(len(self.by_split[split]) - len(rows) for split, rows in kept.items())
        return dataclasses.replace(
            self,
            by_split=kept,
            counts=dataclasses.replace(self.counts, too_long=dropped),
        )

    def behind(self, system: str) -> "Table":
        """With a system prompt before the problems that are text; those that are chats stay as they
        are.
        """
        by_split = {
            split: [problem if problem.messages else problem.behind(system) for problem in rows]
            for split, rows in self.by_split.items()
        }
        return dataclasses.replace(self, by_split=by_split)

    def describe(self) -> str:
        """One line: rows, what was left out and why, and the sizes of the splits."""
        train, heldout = (len(self.by_split[split]) for split in get_args(Split))
        missing, bare = (
            self.columns.missing,
            "" if self.columns.answer else ", prompts alone",
        )
        column = f", column {self.columns.prompt!r} for the missing {missing!r}" if missing else ""
        of_rows = f"{self.counts.rows} rows{column}{bare}{self._left_out()}"
        return f"{self.name}: {of_rows}; {train} to train on, {heldout} held out"

    def _left_out(self) -> str:
        counts, parts = self.counts, []
        if counts.unanswered:
            parts.append(f"{counts.unanswered} without an answer")
        if counts.repeated:
            other = f" ({counts.contradicting} with another answer)" if counts.contradicting else ""
            parts.append(f"{counts.repeated} repeated{other}")
        if counts.too_long:
            parts.append(f"{counts.too_long} longer than rollout.max_prompt_tokens")
        return f", left out {' and '.join(parts)}" if parts else ""

    def _remedy(self, split: Split) -> str:
        if self.counts.unanswered == self.counts.rows:
            return "name another column by --task.answer"
        if self.counts.too_long:
            return "raise --rollout.max_prompt_tokens, or give shorter questions"
        off = "switch evaluation off with --eval.problems 0"
        if self.name.startswith(HUB):
            return (
                f"name a split by --task.heldout, or {off}"
                if split == "heldout"
                else "name another by --task.split"
            )
        return f'add lines with "split": "{split}"' + (f", or {off}" if split == "heldout" else "")


def make_table(name: str, rows: Sequence[Row], columns: Columns) -> Table:
    """The problems of all rows; of a question that is in one split twice, the first.

    Raises:
        TaskError: no rows, a column that is not there, a value of the wrong kind, or a question in
        both splits.
    """
    if not rows:
        kind = "data set" if name.startswith(HUB) else "task file"
        raise TaskError(
            f'{kind} {name} is empty; give lines like {{"question": "1 + 1", "answer": "2"}}'
        )
    by_split: dict[Split, list[Problem]] = {split: [] for split in get_args(Split)}
    first: dict[tuple[str, ...], tuple[Split, Problem]] = {}
    unanswered = repeated = contradicting = 0
    for row in rows:
        if (
            name.startswith(HUB)
            and columns.answer
            and _value(row, columns.answer, "--task.answer") in (None, "")
        ):
            unanswered += 1  # whoever uses another's data set cannot mend it
            continue
        split, problem = _problem(row, columns, name.startswith(HUB))
        key = tuple(
            turn for message in problem.chat for turn in (message["role"], message["content"])
        )
        if key not in first:
            first[key] = split, problem
            by_split[split].append(problem)
            continue
        other, earlier = first[key]
        if other != split:
            raise TaskError(
                f"{row.where}: question {quoted(problem.question)} is in both splits (also"
                f" {earlier.id}, {other}); drop one"
            )
        repeated += 1
        contradicting += earlier.answer != problem.answer
    counts = Counts(
        rows=len(rows),
        unanswered=unanswered,
        repeated=repeated,
        contradicting=contradicting,
    )
    return Table(name, by_split, counts, columns)


def _problem(row: Row, columns: Columns, hub: bool) -> tuple[Split, Problem]:
    prompt = _value(row, columns.prompt, "--task.prompt")
    messages = _messages(row, columns.prompt, prompt)
    question = messages[-1]["content"] if messages else prompt
    # by another name, a reward may ask for it by that
    named = ("answer",) if columns.answer == "answer" else ()
    own = {columns.prompt, *named, *(() if hub else ("split",))}
    metadata = {name: value for name, value in row.values.items() if name not in own}
    where, _, number = row.where.rpartition(":")
    problem_id = f"{where if hub else Path(where).name}:{number}"
    split = _split(row, question, hub)
    return split, Problem(
        id=problem_id,
        question=question,
        answer=_answer(row, columns.answer) if columns.answer else "",
        metadata=metadata,
        messages=messages,
    )


def _split(row: Row, question: str, hub: bool) -> Split:
    written = row.split or (None if hub else row.values.get("split"))
    if not written:
        return "heldout" if is_heldout(question) else "train"
    if written not in get_args(Split):
        raise TaskError(
            f"{row.where}: unknown split {written!r}; allowed: {', '.join(get_args(Split))}"
        )
    return written


def _value(row: Row, column: str, option: str) -> Any:
    """A column's value, or a nested one: "a.b" or "a.0" where there is no column of that very
    name.
    """
    if column in row.values:
        return row.values[column]
    value: Any = row.values
    for part in column.split("."):
        if isinstance(value, list) and part.isdecimal() and int(part) < len(value):
            value = value[int(part)]
            continue
        if not isinstance(value, dict) or part not in value:
            near = did_you_mean(column, row.values)
            there = ", ".join(map(str, row.values)) or "none"
            bare = (
                ", or judge prompts without answers by --reward mine.py:name"
                if column == Columns.answer
                else ""
            )
            raise TaskError(
                f"{row.where}: no column {column!r}; there are: {there}{near} (name it by"
                f" {option}{bare})"
            )
        value = value[part]
    return value


def _messages(row: Row, column: str, prompt: Any) -> tuple[Message, ...]:
    """The turns of a prompt that is a chat; () for text. Raises `TaskError` for anything else."""
    if isinstance(prompt, str):
        if not prompt.strip():
            raise TaskError(
                f"{row.where}: {column!r} is empty; write the question, or drop the row"
            )
        return ()
    shape = (
        f'{column!r} must be text, or a list of messages such as {{"role": "user", "content": "1 +'
        ' 1"}'
    )
    if not isinstance(prompt, list) or not prompt:
        raise TaskError(f"{row.where}: {shape}; got {quoted(prompt)}")
    for message in prompt:
        role, content = (
            (message.get("role"), message.get("content"))
            if isinstance(message, dict)
            else (None, None)
        )
        if role not in ROLES or not isinstance(content, str):
            raise TaskError(
                f"{row.where}: {shape}, of role {', '.join(ROLES)}; got {quoted(message)}"
            )
    if prompt[-1]["role"] != "user":
        raise TaskError(
            f"{row.where}: the last message of {column!r} must be the user's; got"
            f" {quoted(prompt[-1])}"
        )
    return tuple({"role": message["role"], "content": message["content"]} for message in prompt)


def _answer(row: Row, column: str) -> str:
    """A reference answer as text; a whole number is written one way, so it may be one, also where a
    column of fractions has it (27.0).
    """
    answer = _value(row, column, "--task.answer")
    if isinstance(answer, int | float) and not isinstance(answer, bool) and answer % 1 == 0:
        return str(int(answer))
    if not isinstance(answer, str) or not answer.strip():
        raise TaskError(
            f"{row.where}: {column!r} must be text that is not empty, or a whole number; got"
            f' {quoted(answer)}. Write it as a right completion has it, such as "0.5", or name'
            " another column by --task.answer"
        )
    return answer
