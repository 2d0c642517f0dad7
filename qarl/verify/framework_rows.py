"""Rows of frameworks' own logs as rows of a dump.

Both frameworks write a row a sequence, prompt and completion together, with a mask of the tokens to
learn from.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qarl.verify.findings import VerifyInputError

_OF_PRIME_RL = {
    "token_ids": "completion_ids",
    "inference_logprobs": "sampler_logprobs",
    "trainer_logprobs": "trainer_logprobs",
    "advantages": "advantage",
}
"""Columns of prime-rl's token exports, a value a token, → columns of a dump."""
_PRIME_RL_MASK = "loss_mask"
"""Column of prime-rl's token exports that is true for the tokens that were sampled."""
_OF_NEMO_RL = {
    "token_ids": "completion_ids",
    "generation_logprobs": "sampler_logprobs",
    "prev_logprobs": "trainer_logprobs",
}
"""Columns of NeMo-RL's train_data_step*.jsonl, a value a token, → columns of a dump."""
_NEMO_RL_MASK = "token_loss_mask"
"""Column of NeMo-RL's log that is 1 for the tokens that were sampled."""
_NEMO_RL_FILE = re.compile(r"train_data_step(\d+)\.jsonl$")
FOLDER_PATTERNS = ("train_data_step*.jsonl", "**/step_*/rank_*.jsonl")
"""Names of the frameworks' files in the folder that they write to: NeMo-RL's, prime-rl's."""


def framework_row(row: dict[str, Any], file: Path, where: str) -> dict[str, Any]:
    """Return a row of prime-rl's or NeMo-RL's log as a row of a dump; other rows as they are.

    Args:
        row: A line of the file, from JSON.
        file: File that it is in. NeMo-RL's name says the step.
        where: Place of the row, for messages.

    Raises:
        VerifyInputError: The row lacks what a comparison needs.
    """
    if {*_OF_PRIME_RL, _PRIME_RL_MASK} <= row.keys():
        return _from_prime_rl(row, where)
    if {"generation_logprobs", "prev_logprobs"} <= row.keys():
        return _from_nemo_rl(row, file, where)
    return row


def _sampled(
    row: Mapping[str, Any], columns: Mapping[str, str], mask_name: str, where: str
) -> dict[str, list[Any]]:
    """Return columns of a dump, of the tokens where the mask is true.

    Raises `VerifyInputError` for columns that are not lists with a value a token.
    """
    names = (*columns, mask_name)
    for name in names:
        if not isinstance(row[name], list):
            raise VerifyInputError(
                f"{where}: {name} is {row[name]!r:.40}; it must be a list with a value a token"
            )
    lengths = {name: len(row[name]) for name in names}
    if len(set(lengths.values())) > 1:
        different = ", ".join(f"{name} {length}" for name, length in lengths.items())
        raise VerifyInputError(
            f"{where}: columns with a value a token differ in length: {different}"
        )
    mask = row[mask_name]
    return {
        column: [value for value, sampled in zip(row[name], mask, strict=True) if sampled]
        for name, column in columns.items()
    }


def _prompt(token_ids: list[int], mask: list[Any]) -> list[int]:
    """Return the tokens before the first that was sampled."""
    first = next((n for n, sampled in enumerate(mask) if sampled), len(mask))
    return token_ids[:first]


def _from_prime_rl(row: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return a row of prime-rl's token export: its sampled tokens alone."""
    mask = row[_PRIME_RL_MASK]
    columns: dict[str, Any] = _sampled(row, _OF_PRIME_RL, _PRIME_RL_MASK, where)
    if not any(mask):
        raise VerifyInputError(f"{where}: {_PRIME_RL_MASK} is true for no token; leave the row out")
    if None in columns["advantage"]:
        columns.pop("advantage")
    if row.get("step") is not None:
        columns["trainer_version"] = row["step"]
    return {"prompt_ids": _prompt(row["token_ids"], mask), **columns}


def _from_nemo_rl(row: Mapping[str, Any], file: Path, where: str) -> dict[str, Any]:
    """Return a row of NeMo-RL's log: its sampled tokens alone. NeMo-RL writes each column as a list
    with one value.
    """
    missing = [name for name in ("token_ids", _NEMO_RL_MASK) if name not in row]
    if missing:
        raise VerifyInputError(
            f"{where} is of NeMo-RL's log and has no {' and no '.join(missing)}, which its earlier"
            " versions did not write; update NeMo-RL, or write a dump (docs/guide/verify.md)"
        )
    names = (*_OF_NEMO_RL, _NEMO_RL_MASK)
    values = {name: row[name][0] if _is_nested(row[name]) else row[name] for name in names}
    mask = values[_NEMO_RL_MASK]
    columns: dict[str, Any] = _sampled(values, _OF_NEMO_RL, _NEMO_RL_MASK, where)
    trainer = columns["trainer_logprobs"]
    if len(trainer) > 1 and not any(trainer) and any(columns["sampler_logprobs"]):
        raise VerifyInputError(
            f"{where}: prev_logprobs is 0 for all {len(trainer)} sampled tokens, because NeMo-RL"
            " does not compute it with loss_fn.force_on_policy_ratio; set that to false for a step"
        )
    named = _NEMO_RL_FILE.search(file.name)
    if named:
        columns["trainer_version"] = int(named[1])
    return {"prompt_ids": _prompt(values["token_ids"], mask), **columns}


def _is_nested(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 1 and isinstance(value[0], list)
