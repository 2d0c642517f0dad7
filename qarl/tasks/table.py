"""Tasks made of rows: columns of questions and answers, rows that are left out, and splits."""

import dataclasses
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from qarl.configs.seeds import stable_hash
from qarl.configs.words import did_you_mean, quoted
from qarl.tasks.base import (
    PICTURE,
    Message,
    Picture,
    Problem,
    Split,
    TaskError,
    check_request,
    is_heldout,
)
from qarl.tasks.pictures import MessagePictures, column_of_pictures, pictures_of
from qarl.tasks.rows import HUB, Row

ROLES = ("system", "user", "assistant")
_QUESTIONS = ("question", "problem", "prompt", "query", "instruction", "message", "input")
"""Words in the names of columns that hold questions, the most usual first."""
_ANSWERS = (
    *("answer", "truth", "groundtruth", "solution", "target", "gold", "reference", "expected"),
    *("response", "completion", "output", "result", "label", "chosen", "rejected"),
)
"""Words in the names of columns that hold answers, the most usual first."""
_ABOUT = ("id", "type", "source", "level", "length", "split", "language", "format", "template")
"""Words in the names of columns that say something about a question or answer."""
_OTHER_INPUTS = ("video", "audio")
"""Names of columns, and kinds of parts of a message, that no prompt can have."""
_NAME_PART = re.compile(r"[A-Z]?[a-z]+|[A-Z]+")
"""Matches the words of a column's name, such as a_b or aB."""


@dataclass(frozen=True)
class Columns:
    """Names of a row's columns.

    A name may lead into a nested value, as in "reward_model.ground_truth", and into a list by a
    number, as in "final_answer.0".
    """

    prompt: str = "question"
    """Column of the question."""
    answer: str | None = "answer"
    """Column of the reference answer. None if rows have none; problems then have the answer ""."""
    missing: str | None = None
    """Column for which `prompt` is a substitute, or None."""


@dataclass(frozen=True)
class Counts:
    """Numbers of rows that were read and left out."""

    rows: int = 0
    """All rows."""
    unanswered: int = 0
    """Rows of a data set without a reference answer."""
    repeated: int = 0
    """Questions that an earlier row of their split has."""
    contradicting: int = 0
    """Repeated questions with another answer than the earlier row."""
    too_long: int = 0
    """Prompts above the limit of tokens."""


@dataclass(frozen=True)
class Table:
    """A finite source of problems. Every split repeats endlessly, in a new order in each pass.

    A row is held out if its split says so: "split" ("train" or "heldout") in a file, otherwise the
    data set's own split. Rows without a split are decided by `is_heldout`. Columns other than
    question, answer and split become the problem's metadata.
    """

    name: str
    by_split: dict[Split, list[Problem]]
    counts: Counts = field(default_factory=Counts)
    columns: Columns = Columns()

    def problems(
        self,
        split: Split,
        start: int,
        count: int,
        seed: int,
    ) -> list[Problem]:
        """Return problems start, …, start + count - 1 of the split for this seed.

        The split is shuffled anew in every pass.

        Raises:
            TaskError: The request is invalid, or no row is in this split.
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

    def without_long_prompts(self, fits: Callable[[Sequence[Problem]], list[bool]]) -> "Table":
        """Return the table without prompts that are too long.

        fits: returns which prompts are short enough.
        """
        by_split: dict[Split, list[Problem]] = {}
        dropped = 0
        for split, rows in self.by_split.items():
            pairs = zip(rows, fits(rows), strict=True)
            by_split[split] = [problem for problem, fit in pairs if fit]
            dropped += len(rows) - len(by_split[split])
        counts = dataclasses.replace(self.counts, too_long=dropped)
        return dataclasses.replace(self, by_split=by_split, counts=counts)

    def with_system_prompt(self, system: str) -> "Table":
        """Return a table with a system prompt before the problems that are text.

        Problems that are chats stay as they are.
        """
        by_split: dict[Split, list[Problem]] = {}
        for split, rows in self.by_split.items():
            by_split[split] = [
                problem if problem.messages else problem.with_system_prompt(system)
                for problem in rows
            ]
        return dataclasses.replace(self, by_split=by_split)

    def describe(self) -> str:
        """Return one line: the rows, those left out and why, and the sizes of the splits."""
        train, heldout = (len(self.by_split[split]) for split in get_args(Split))
        missing = self.columns.missing
        column = f", column {self.columns.prompt!r} for the missing {missing!r}" if missing else ""
        unanswered = "" if self.columns.answer else ", prompts alone"
        rows = f"{self.counts.rows} rows{column}{unanswered}{self._left_out()}"
        return f"{self.name}: {rows}; {train} to train on, {heldout} held out"

    def _left_out(self) -> str:
        counts = self.counts
        parts = []
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
        if self.name.startswith(HUB) and split == "heldout":
            return f"name a split by --task.heldout, or {off}"
        if self.name.startswith(HUB):
            return "name another by --task.split"
        add = f'add lines with "split": "{split}"'
        return f"{add}, or {off}" if split == "heldout" else add


def make_table(name: str, rows: Sequence[Row], columns: Columns) -> Table:
    """Return the problems of all rows; of repeated questions in one split, only the first.

    Raises:
        TaskError: There are no rows, a column is missing, a value has the wrong kind, or a question
            is in both splits.
    """
    if not rows:
        kind = "data set" if name.startswith(HUB) else "task file"
        raise TaskError(
            f'{kind} {name} is empty; give lines like {{"question": "1 + 1", "answer": "2"}}'
        )
    by_split: dict[Split, list[Problem]] = {split: [] for split in get_args(Split)}
    first: dict[Any, tuple[Split, Problem]] = {}
    unanswered = repeated = contradicting = 0
    is_hub = name.startswith(HUB)
    for row in rows:
        # A row of somebody else's data set is left out, because the user cannot correct it.
        if is_hub and columns.answer and _value(row, columns.answer, "--task.answer") in (None, ""):
            unanswered += 1
            continue
        split, problem = _problem(row, columns, is_hub)
        turns = tuple((message["role"], message["content"]) for message in problem.chat)
        key = turns, tuple(picture.digest for picture in problem.pictures)
        if key not in first:
            first[key] = split, problem
            by_split[split].append(problem)
            continue
        earlier_split, earlier = first[key]
        if earlier_split != split:
            raise TaskError(
                f"{row.where}: question {quoted(problem.question)} is in both splits (also"
                f" {earlier.id}, {earlier_split}); drop one"
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
    _refuse_other_inputs(row, columns.prompt, prompt)
    picture_column = column_of_pictures(row)
    messages, pictures = _messages(row, columns.prompt, prompt, picture_column)
    question = messages[-1]["content"].replace(PICTURE, "").strip() if messages else prompt
    fields = {columns.prompt, picture_column}
    # An answer in a column of another name stays, because a reward may ask for it by that name.
    if columns.answer == "answer":
        fields.add("answer")
    if not hub:
        fields.add("split")
    metadata = {name: value for name, value in row.values.items() if name not in fields}
    where, _, number = row.where.rpartition(":")
    source = where if hub else Path(where).name
    split = _split(row, question, pictures, hub)
    return split, Problem(
        id=f"{source}:{number}",
        question=question,
        answer=_answer(row, columns.answer) if columns.answer else "",
        metadata=metadata,
        messages=messages,
        pictures=pictures,
    )


def _refuse_other_inputs(row: Row, column: str, prompt: Any) -> None:
    """Raise `TaskError` for a row with sound or video beside its text."""
    beside = [
        str(name)
        for name, value in row.values.items()
        if str(name).lower().removesuffix("s") in _OTHER_INPUTS and value not in (None, "", [])
    ]
    for message in prompt if isinstance(prompt, list) else ():
        content = message.get("content") if isinstance(message, dict) else None
        parts = content if isinstance(content, list) else ()
        kinds = {str(part.get("type")) for part in parts if isinstance(part, dict)}
        if kinds & {*_OTHER_INPUTS, *(f"{kind}_url" for kind in _OTHER_INPUTS)}:
            beside.append(column)
    if beside:
        raise TaskError(
            f"{row.where}: {beside[0]!r} holds sound or video, and prompts are text and pictures;"
            " take another data set, or drop the column if the questions can be answered without"
        )


def _split(row: Row, question: str, pictures: Sequence[Picture], hub: bool) -> Split:
    written = row.split or (None if hub else row.values.get("split"))
    if not written:
        return "heldout" if is_heldout(question, pictures) else "train"
    if written not in get_args(Split):
        raise TaskError(
            f"{row.where}: unknown split {written!r}; allowed: {', '.join(get_args(Split))}"
        )
    return written


def _value(row: Row, column: str, option: str) -> Any:
    """Return a column's value, or the nested value "a.b" or "a.0" if there is no such column."""
    if column in row.values:
        return row.values[column]
    value: Any = row.values
    for part in column.split("."):
        if isinstance(value, list) and part.isdecimal() and int(part) < len(value):
            value = value[int(part)]
            continue
        if not isinstance(value, dict) or part not in value:
            near = _column_hint(column, row.values, of_answers=option == "--task.answer")
            present = ", ".join(map(str, row.values)) or "none"
            hint = ""
            if column == Columns.answer:
                hint = ", or judge prompts without answers by --reward mine.py:name"
            raise TaskError(
                f"{row.where}: no column {column!r}; there are: {present}{near} (name it by"
                f" {option}{hint})"
            )
        value = value[part]
    return value


def _column_hint(column: str, values: Mapping[str, Any], of_answers: bool) -> str:
    """Return "; did you mean 'problem'?" for a missing column, or "" if no other is meant.

    A name by which questions go elsewhere is never the hint for one of answers, nor the reverse.
    of_answers: whether the missing column is that of answers.
    """
    names = [str(name) for name in values]
    nested = {key: value for key, value in values.items() if isinstance(value, dict)}
    names += [f"{key}.{inner}" for key, value in nested.items() for inner in value]
    wanted, other = (_ANSWERS, _QUESTIONS) if of_answers else (_QUESTIONS, _ANSWERS)
    words = {name: _name_words(name) for name in names}
    fitting = [name for name in names if words[name].isdisjoint((*other, *_ABOUT))]
    misspelt = did_you_mean(column, fitting, 0.8)
    known = [name for word in wanted for name in fitting if word in words[name]]
    if misspelt or not known:
        return misspelt or did_you_mean(column, fitting)
    return f"; did you mean {min(known, key=lambda name: len(words[name]))!r}?"


def _name_words(name: str) -> set[str]:
    """Return the words of a column's name, in singular: groundTruths → {ground, truth}."""
    return {part.lower().removesuffix("s") for part in _NAME_PART.findall(name)}


def _messages(
    row: Row, column: str, prompt: Any, picture_column: str | None
) -> tuple[tuple[Message, ...], tuple[Picture, ...]]:
    """Return the turns of a prompt that is a chat, () for text, and the pictures.

    Raises `TaskError` for another kind of prompt, and if there are more or fewer places for
    pictures than pictures.
    """
    in_column = pictures_of(row, picture_column)
    if isinstance(prompt, str):
        if not prompt.strip():
            raise TaskError(
                f"{row.where}: {column!r} is empty; write the question, or drop the row"
            )
        return (), in_column
    shape = (
        f'{column!r} must be text, or a list of messages such as {{"role": "user", "content": "1 +'
        ' 1"}'
    )
    if not isinstance(prompt, list) or not prompt:
        raise TaskError(f"{row.where}: {shape}; got {quoted(prompt)}")
    messages = []
    pictures = MessagePictures(row, in_column)
    for message in prompt:
        role = content = None
        if isinstance(message, dict):
            role = message.get("role")
            content = message.get("content")
        if isinstance(content, list):
            content = pictures.text_of(content)
        if role not in ROLES or not isinstance(content, str):
            raise TaskError(
                f"{row.where}: {shape}, of role {', '.join(ROLES)}; got {quoted(message)}"
            )
        messages.append({"role": role, "content": content})
    if prompt[-1]["role"] != "user":
        raise TaskError(
            f"{row.where}: the last message of {column!r} must be the user's; got"
            f" {quoted(prompt[-1])}"
        )
    return tuple(messages), pictures.all()


def _answer(row: Row, column: str) -> str:
    """Return a reference answer as text.

    A whole number is accepted, too, because it can be written in one way only; also as 27.0, as in
    a column of fractions.
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
