"""Which completions of a step are recorded token by token (`record`), and what is written about
each token.

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
from qarl.report.token_files import TokenRows, array_bytes, drop_after, write_step
from qarl.rollout.types import Completion, Group


class TokenRecorder:
    """Writes a step's completions of least and of most reward to `folder`.

    record: how many of each; "all" for every completion, 0 for none. tokenizer: a transformers
    tokenizer, whose texts the tokens are shown with. resume_step: of a run that goes on from there;
    later steps are removed. first: whether this is the first process; the others take part and
    write nothing.
    """

    def __init__(
        self,
        folder: Path,
        record: int | Literal["all"],
        tokenizer: Any,
        resume_step: int | None,
        first: bool,
    ):
        self._folder = folder
        self._record: int | Literal["all"] = record
        self._tokenizer = tokenizer
        self._first = first
        if resume_step is not None and first:
            drop_after(folder, resume_step)

    def log(self, batch: Batch, groups: Sequence[Group]) -> TokenLog | None:
        """What `Learner.learn` is to fill in for this batch, made of these groups; None where
        nothing is recorded.
        """
        if self._record == 0:
            return None
        rewards = [r for g in groups for r in g.rewards]
        # what breaks a tie is not known yet
        rows = chosen_rows(rewards, np.zeros(len(rewards)), self._record)
        pairs = zip_longest(rows[: len(rows) // 2], rows[len(rows) // 2 :])
        return TokenLog(batch, [row for pair in pairs for row in pair if row is not None])

    def write(self, step: int, groups: Sequence[Group], log: TokenLog | None) -> None:
        """groups: those that `log`'s batch was made of; with None, any that were sampled and not
        learned from.
        """
        if self._record == 0 or not self._first:
            return
        completions = [c for g in groups for c in g.completions]
        rewards = [r for g in groups for r in g.rewards]
        worst = worst_mismatch(log, len(completions))
        # those the unquantized policy was asked about: what is compared is kept
        if log is not None:
            worst[log.unquantized.known.numpy()] = np.inf
        rows = chosen_rows(rewards, worst, self._record)
        places = [
            (number, sample)
            for number, g in enumerate(groups)
            for sample in range(len(g.completions))
        ]
        kept = [completions[row] for row in rows]
        columns = _token_columns(kept, groups, places, rows, log)
        texts = [text for c in kept for text in token_texts(self._tokenizer, c.token_ids)]
        about = _completion_columns(
            step, groups, [places[row] for row in rows], columns["mismatch"]
        )
        about["age"] = [
            None if log is None or log.age[row] < 0 else int(log.age[row]) for row in rows
        ]
        lengths = [len(c.token_ids) for c in kept]
        tokens = columns | {"token": np.array(texts, dtype=object)}
        write_step(self._folder, step, TokenRows(about, tokens, lengths), len(completions))


def token_texts(tokenizer: Any, token_ids: Sequence[int]) -> list[str]:
    """What each token adds to its completion's text, special tokens shown. A token that ends within
    a character adds nothing, and the one that completes it the whole of it.
    """
    backend, stream = (
        getattr(tokenizer, "backend_tokenizer", None),
        DecodeStream(skip_special_tokens=False),
    )
    if backend is None:  # a tokenizer in Python alone
        return [tokenizer.decode([token], skip_special_tokens=False) for token in token_ids]
    return [stream.step(backend, token) or "" for token in token_ids]


def worst_mismatch(log: TokenLog | None, count: int) -> np.ndarray:
    """Largest |log π_learner - log π_sampler| within each sequence, fp32 [B]; 0 where the learner's
    is not known.
    """
    if log is None:
        return np.zeros(count, dtype=np.float32)
    apart = (log.old - log.batch.sampler_logprobs).abs() * log.batch.response_mask
    return (apart.amax(-1) * log.known).numpy()


def chosen_rows(
    rewards: Sequence[float], worst: np.ndarray, record: int | Literal["all"]
) -> list[int]:
    """Rows of the `record` completions of least reward, then of as many others of most; all for
    "all". Among equal rewards those whose worst token is worst come first, then earlier ones.
    """
    count = len(rewards)
    if record == "all" or 2 * record >= count:
        return list(range(count))
    rising = sorted(range(count), key=lambda row: (rewards[row], -worst[row], row))
    falling = sorted(range(count), key=lambda row: (-rewards[row], -worst[row], row))
    least = rising[:record]
    return least + [row for row in falling[: 2 * record] if row not in set(least)][:record]


def _token_columns(
    kept: Sequence[Completion],
    groups: Sequence[Group],
    places: Sequence[tuple[int, int]],
    rows: Sequence[int],
    log: TokenLog | None,
) -> dict[str, np.ndarray]:
    """All token columns but the texts, as `TokenRows` has them."""
    environment = ~np.concatenate([np.asarray(c.sampled, dtype=bool) for c in kept])
    sampler = np.concatenate([np.asarray(c.logprobs, dtype=np.float32) for c in kept])
    sampler[environment] = np.nan  # by which its tokens are known again
    old = unquantized = ratio = advantage = np.full(len(sampler), np.nan, dtype=np.float32)
    clip = np.full(len(sampler), -1)
    if log is not None:
        lengths = [len(c.token_ids) for c in kept]
        starts = [len(groups[places[row][0]].prompt.token_ids) - 1 for row in rows]
        flags = (log.known, log.unquantized.known, log.updated)
        known, measured, updated = (np.repeat(each[list(rows)].numpy(), lengths) for each in flags)

        def taken(values: Any) -> np.ndarray:
            spans = zip(rows, starts, lengths, strict=True)
            return np.concatenate(
                [values[row, start : start + length].numpy() for row, start, length in spans]
            )

        old = np.where(known & ~environment, taken(log.old), np.float32(np.nan))
        unquantized = np.where(
            measured & ~environment, taken(log.unquantized.values), np.float32(np.nan)
        )
        ratio = np.where(updated & ~environment, taken(log.log_ratio), np.float32(np.nan))
        clip = np.where(updated & ~environment, taken(log.clip), -1)
        advantage = taken(log.batch.advantages)
    return {
        "token_id": np.concatenate([np.asarray(c.token_ids, dtype=np.int32) for c in kept]),
        "weight_version": np.concatenate([np.asarray(c.versions, dtype=np.int32) for c in kept]),
        "sampler_logprob": sampler,
        "learner_logprob": old,
        "unquantized_logprob": unquantized,
        "mismatch": old - sampler,
        "log_ratio": ratio,
        "clip": clip,
        "advantage": advantage,
        "improbable": improbable_tokens(kept),
        "repeated": repeated_tokens([c.token_ids for c in kept]) & ~environment,
    }


def _completion_columns(
    step: int,
    groups: Sequence[Group],
    places: Sequence[tuple[int, int]],
    mismatch: np.ndarray,
) -> dict[str, list[Any]]:
    kept = [(groups[number], sample) for number, sample in places]
    completions = [group.completions[sample] for group, sample in kept]
    ends = np.cumsum([len(c.token_ids) for c in completions])
    parts = [
        np.abs(mismatch[end - len(c.token_ids) : end])
        for c, end in zip(completions, ends, strict=True)
    ]
    return {
        "step": [step] * len(kept),
        "group": [number for number, _ in places],
        "sample": [sample for _, sample in places],
        "prompt_id": [group.prompt.id for group, _ in kept],
        "prompt": [group.prompt.text for group, _ in kept],
        "prompt_token_ids": [list(group.prompt.token_ids) for group, _ in kept],
        "completion": [c.text for c in completions],
        "finish_reason": [c.finish_reason for c in completions],
        "reward": [group.rewards[sample] for group, sample in kept],
        "group_rewards": [list(group.rewards) for group, _ in kept],
        "experts": [None if c.experts is None else array_bytes(c.experts) for c in completions],
        "worst_token": [
            None if np.isnan(part).all() else int(np.nanargmax(part)) for part in parts
        ],
    }
