"""Tasks read from a file with one JSON object a line."""

import json
import random
from pathlib import Path
from typing import Any, get_args

from configs.seeds import stable_hash
from qarl.tasks.base import Problem, Split, TaskError, check_request, exact_reward, is_heldout


class JsonlTask:
    """Questions and answers from a .jsonl file, scored by exact match.

    Each line is {"question": str, "answer": str} with an optional "split" ("train" or "heldout"); a line
    without one is placed by `is_heldout`. Other keys become the problem's metadata. Every split repeats
    endlessly, in a new order each time round.
    """

    def __init__(self, path: str | Path) -> None:
        """Read and validate the whole file.

        Raises:
            TaskError: missing or empty file, a bad line (with its number), or a question in both splits.
        """
        self.path = Path(path)
        self.name = str(path)
        self._problems = _read(self.path)

    def problems(self, split: Split, start: int, count: int, seed: int) -> list[Problem]:
        """Problems start, …, start + count - 1 of the split for this seed, reshuffled in every pass over it.

        Raises:
            TaskError: bad request, or no line of the file is in this split.
        """
        check_request(split, start, count)
        rows = self._problems[split]
        if not rows:
            off = ", or switch evaluation off with --eval.problems 0" if split == "heldout" else ""
            raise TaskError(f'{self.path} has no {split} questions; add lines with "split": "{split}"{off}')
        orders: dict[int, list[int]] = {}
        chosen = []
        for index in range(start, start + count):
            epoch, position = divmod(index, len(rows))
            if epoch not in orders:
                orders[epoch] = _shuffled(len(rows), stable_hash(split, seed, epoch))
            chosen.append(rows[orders[epoch][position]])
        return chosen

    def score(self, problem: Problem, text: str) -> float:
        """1.0 for an exact match after stripping, else 0.0."""
        return exact_reward(problem, text)

    def correct(self, problem: Problem, text: str) -> bool:
        """Whether the completion matches the answer exactly after stripping."""
        return exact_reward(problem, text) == 1.0


def _read(path: Path) -> dict[str, list[Problem]]:
    if not path.is_file():
        raise TaskError(f"task file {path} {'is a folder' if path.is_dir() else 'does not exist'}")
    by_split: dict[str, list[Problem]] = {split: [] for split in get_args(Split)}
    split_of: dict[str, str] = {}
    for number, line in enumerate(_text(path).split("\n"), start=1):
        if not line.strip():
            continue
        split, problem = _parse(line, f"{path}:{number}", f"{path.name}:{number}")
        if split_of.setdefault(problem.question, split) != split:
            raise TaskError(f"{path}:{number}: question {problem.question!r} is in both splits; drop one")
        by_split[split].append(problem)
    if not split_of:
        raise TaskError(f'task file {path} is empty; give lines like {{"question": "1 + 1", "answer": "2"}}')
    return by_split


def _text(path: Path) -> str:
    """The file's text; the mark that some editors put before UTF-8 is left out."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise TaskError(
            f"{path}:{line}: not UTF-8 text (byte {error.object[error.start]:#04x}); save the file as UTF-8"
        ) from error
    except OSError as error:
        raise TaskError(f"task file {path} cannot be read: {error.strerror}") from error


def _parse(line: str, where: str, problem_id: str) -> tuple[str, Problem]:
    try:
        row: Any = json.loads(line)
    except json.JSONDecodeError as error:
        raise TaskError(f"{where}: not valid JSON: {error}") from error
    if not isinstance(row, dict):
        raise TaskError(f"{where}: expected a JSON object, got {type(row).__name__}")
    for key in ("question", "answer"):
        if key not in row:
            raise TaskError(f"{where}: missing key {key!r}; found: {', '.join(row) or 'none'}")
        if not isinstance(row[key], str):
            raise TaskError(f"{where}: {key!r} must be a string, got {row[key]!r}")
    split = row.get("split") or ("heldout" if is_heldout(row["question"]) else "train")
    if split not in get_args(Split):
        raise TaskError(f"{where}: unknown split {split!r}; allowed: {', '.join(get_args(Split))}")
    metadata = {key: value for key, value in row.items() if key not in ("question", "answer", "split")}
    return split, Problem(problem_id, row["question"], row["answer"], metadata)


def _shuffled(count: int, seed: int) -> list[int]:
    order = list(range(count))
    random.Random(seed).shuffle(order)
    return order
