"""Recorder of a step's completions, which chooses some (`record`) and fills the columns of a file.

Axes: B sequences, T tokens of a sequence; n tokens of all recorded completions laid end to end.
"""

from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal

import numpy as np
from tokenizers.decoders import DecodeStream

from qarl.learner.batching import Batch
from qarl.learner.diagnostics.token_log import TokenLog
from qarl.report.error_tokens import improbable_tokens, repeated_tokens
from qarl.report.token_files import PICTURES, TokenRows, array_bytes, drop_after, write_step
from qarl.rollout.pictures import thumbnail
from qarl.rollout.types import Completion, Group


class TokenRecorder:
    """Writes a step's completions of lowest and of highest reward to a folder."""

    def __init__(
        self,
        folder: Path,
        record: int | Literal["all"],
        tokenizer: Any,
        resume_step: int | None,
        first: bool,
    ):
        """Prepare the folder of a run.

        Args:
            folder: folder of the files.
            record: number of completions of each kind; "all" for every completion, 0 for none.
            tokenizer: transformers tokenizer that gives the tokens' texts.
            resume_step: step from which a run goes on; files of later steps are removed.
            first: whether this is the first process; the others take part and write nothing.
        """
        self._folder = folder
        self._record: int | Literal["all"] = record
        self._tokenizer = tokenizer
        self._first = first
        if resume_step is not None and first:
            drop_after(folder, resume_step)

    def log(self, batch: Batch, groups: Sequence[Group]) -> TokenLog | None:
        """Return the log that `Learner.learn` fills in for a batch of these groups.

        It is None if nothing is recorded.
        """
        if self._record == 0:
            return None
        rewards = [r for g in groups for r in g.rewards]
        # The mismatch, which breaks ties between equal rewards, is not known yet.
        rows = chosen_rows(rewards, np.zeros(len(rewards)), self._record)
        # Rows of lowest and of highest reward in turn: the learner may measure the first ones only.
        half = len(rows) // 2
        pairs = zip_longest(rows[:half], rows[half:])
        return TokenLog(batch, [row for pair in pairs for row in pair if row is not None])

    def write(self, step: int, groups: Sequence[Group], log: TokenLog | None) -> None:
        """Write the file of one step.

        groups: the groups of `log`'s batch; if `log` is None, groups that were sampled and not
        learned from.
        """
        if self._record == 0 or not self._first:
            return
        completions = [c for g in groups for c in g.completions]
        rewards = [r for g in groups for r in g.rewards]
        worst = worst_mismatch(log, len(completions))
        # Of equal rewards, prefer the completions that the unquantized policy was asked about.
        if log is not None:
            worst[log.unquantized.known.numpy()] = np.inf
        rows = chosen_rows(rewards, worst, self._record)
        samples = [
            (number, sample)
            for number, g in enumerate(groups)
            for sample in range(len(g.completions))
        ]
        recorded = [completions[row] for row in rows]
        token_columns = _token_columns(recorded, groups, samples, rows, log)
        texts = [text for c in recorded for text in token_texts(self._tokenizer, c.token_ids)]
        token_columns["token"] = np.array(texts, dtype=object)
        recorded_samples = [samples[row] for row in rows]
        columns = _completion_columns(step, groups, recorded_samples, token_columns["mismatch"])
        ages = [-1 if log is None else int(log.age[row]) for row in rows]
        columns["age"] = [None if age < 0 else age for age in ages]
        lengths = [len(c.token_ids) for c in recorded]
        file_rows = TokenRows(columns, token_columns, lengths)
        write_step(self._folder, step, file_rows, len(completions))


def token_texts(tokenizer: Any, token_ids: Sequence[int]) -> list[str]:
    """Return the text that each token adds to its completion, special tokens included.

    A token that ends within a character adds nothing, and the token that completes the character
    adds all of it.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:  # a tokenizer that is written in Python
        return [tokenizer.decode([token], skip_special_tokens=False) for token in token_ids]
    stream = DecodeStream(skip_special_tokens=False)
    return [stream.step(backend, token) or "" for token in token_ids]


def worst_mismatch(log: TokenLog | None, count: int) -> np.ndarray:
    """Return the largest |log π_learner - log π_sampler| within each sequence, fp32 [B].

    It is 0 if the learner's log-probs are unknown.
    """
    if log is None:
        return np.zeros(count, dtype=np.float32)
    mismatch = (log.old - log.batch.sampler_logprobs).abs() * log.batch.response_mask
    return (mismatch.amax(-1) * log.known).numpy()


def chosen_rows(
    rewards: Sequence[float], worst: np.ndarray, record: int | Literal["all"]
) -> list[int]:
    """Return the rows of the `record` completions of lowest reward, then of as many of highest.

    "all" gives all rows. Among equal rewards, rows with a larger worst mismatch come first, then
    earlier rows.
    """
    count = len(rewards)
    if record == "all" or 2 * record >= count:
        return list(range(count))
    rising = sorted(range(count), key=lambda row: (rewards[row], -worst[row], row))
    falling = sorted(range(count), key=lambda row: (-rewards[row], -worst[row], row))
    lowest = rising[:record]
    # If many rewards are equal, a row may be among the lowest and the highest.
    highest = [row for row in falling[: 2 * record] if row not in set(lowest)]
    return lowest + highest[:record]


def _token_columns(
    recorded: Sequence[Completion],
    groups: Sequence[Group],
    samples: Sequence[tuple[int, int]],
    rows: Sequence[int],
    log: TokenLog | None,
) -> dict[str, np.ndarray]:
    """Return all token columns but the texts, [n] each, as `TokenRows` has them.

    Args:
        recorded: completions to record.
        groups: all groups of the step.
        samples: (group's number, sample's number) of every completion of the step.
        rows: the batch's rows of the completions to record.
        log: the learner's values of the batch, or None.
    """
    environment = ~np.concatenate([np.asarray(c.sampled, dtype=bool) for c in recorded])
    sampler = np.concatenate([np.asarray(c.logprobs, dtype=np.float32) for c in recorded])
    sampler[environment] = np.nan  # marks the environment's tokens for readers
    old = unquantized = ratio = advantage = np.full(len(sampler), np.nan, dtype=np.float32)
    clip = np.full(len(sampler), -1)
    if log is not None:
        lengths = [len(c.token_ids) for c in recorded]
        # Column t of the learner's tensors is about token t + 1 of prompt and completion.
        starts = [len(groups[samples[row][0]].prompt.token_ids) - 1 for row in rows]
        spans = list(zip(rows, starts, lengths, strict=True))

        def token_flags(flags: Any) -> np.ndarray:
            """Repeat flags, [B], for each token of a sequence; the environment's have none."""
            return np.repeat(flags[list(rows)].numpy(), lengths) & ~environment

        def flat(values: Any) -> np.ndarray:
            """Lay the recorded completions' part of [B, T-1] values end to end."""
            parts = [values[row, start : start + length].numpy() for row, start, length in spans]
            return np.concatenate(parts)

        nan = np.float32(np.nan)
        old = np.where(token_flags(log.known), flat(log.old), nan)
        measured = token_flags(log.unquantized.known)
        unquantized = np.where(measured, flat(log.unquantized.values), nan)
        updated = token_flags(log.updated)
        ratio = np.where(updated, flat(log.log_ratio), nan)
        clip = np.where(updated, flat(log.clip), -1)
        advantage = flat(log.batch.advantages)
    token_ids = [np.asarray(c.token_ids, dtype=np.int32) for c in recorded]
    versions = [np.asarray(c.versions, dtype=np.int32) for c in recorded]
    return {
        "token_id": np.concatenate(token_ids),
        "weight_version": np.concatenate(versions),
        "sampler_logprob": sampler,
        "learner_logprob": old,
        "unquantized_logprob": unquantized,
        "mismatch": old - sampler,
        "log_ratio": ratio,
        "clip": clip,
        "advantage": advantage,
        "improbable": improbable_tokens(recorded),
        "repeated": repeated_tokens([c.token_ids for c in recorded]) & ~environment,
    }


def _completion_columns(
    step: int,
    groups: Sequence[Group],
    samples: Sequence[tuple[int, int]],
    mismatch: np.ndarray,
) -> dict[str, list[Any]]:
    """Return all completion columns but the age, as `TokenRows` has them.

    samples: (group's number, sample's number) of each recorded completion. mismatch: [n].
    """
    pairs = [(groups[number], sample) for number, sample in samples]
    completions = [group.completions[sample] for group, sample in pairs]
    ends = np.cumsum([len(c.token_ids) for c in completions])[:-1]
    columns = {
        "step": [step] * len(samples),
        "group": [number for number, _ in samples],
        "sample": [sample for _, sample in samples],
        "prompt_id": [group.prompt.id for group, _ in pairs],
        "prompt": [group.prompt.text for group, _ in pairs],
        "prompt_token_ids": [list(group.prompt.token_ids) for group, _ in pairs],
        "completion": [c.text for c in completions],
        "finish_reason": [c.finish_reason for c in completions],
        "reward": [group.rewards[sample] for group, sample in pairs],
        "group_rewards": [list(group.rewards) for group, _ in pairs],
        "experts": [None if c.experts is None else array_bytes(c.experts) for c in completions],
        "worst_token": [_worst_token(part) for part in np.split(np.abs(mismatch), ends)],
    }
    if any(group.prompt.pictures is not None for group in groups):
        small = {
            number: [] if pictures is None else [thumbnail(file) for file in pictures.files]
            for number in sorted({number for number, _ in samples})
            for pictures in (groups[number].prompt.pictures,)
        }
        columns[PICTURES] = [small[number] for number, _ in samples]
    return columns


def _worst_token(mismatch: np.ndarray) -> int | None:
    """Return the index of a completion's largest |mismatch|, or None if none is known."""
    return None if np.isnan(mismatch).all() else int(np.nanargmax(mismatch))
