"""What passes between sampling and learning, and to a server. Imports neither torch nor vllm."""

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from qarl.configs.schema.run import EvalConfig, RolloutConfig


@dataclass(frozen=True)
class Prompt:
    """id: of the problem it states. token_ids: chat-templated prompt, int; of a later turn, all
    that was said before. draws: (prompt, sample, turn), the stream its completion draws from; None:
    by its place in the call. max_new_tokens: where fewer than the call's.
    """

    id: str
    text: str
    token_ids: tuple[int, ...]
    draws: tuple[int, int, int] | None = None
    max_new_tokens: int | None = None


@dataclass(frozen=True)
class Completion:
    """One sampled response, or a conversation after its prompt: the policy's turns and what was
    said between them.

    token_ids: generated tokens, the end token included when sampled. logprobs: the sampler's
    log-prob of each, in nats, computed in fp32. text: of the last turn. weight_version: of the
    weights that sampled its first token. switches: (token, version), from which token on later
    weights sampled it; none where no version was published meanwhile. finish_reason: "stop",
    "length" or "repetition", of the last turn. environment: spans [start, end) of `token_ids` that
    an environment wrote, between two turns each: their log-probs are 0, and nothing is learned from
    them. reward: what the rollout gave; None: the task's reward judges the text. events: what
    happened in a conversation, with its count, such as ("tool_errors", 2). experts: numpy integer
    [tokens of prompt and response that were routed, decoder layers, experts a token], or None where
    the engine was not asked for them.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    text: str
    weight_version: int
    finish_reason: str
    experts: Any = field(default=None, compare=False, repr=False)
    switches: tuple[tuple[int, int], ...] = ()
    environment: tuple[tuple[int, int], ...] = ()
    reward: float | None = None
    events: tuple[tuple[str, float], ...] = ()

    @property
    def sampled(self) -> list[bool]:
        """Which tokens are the policy's."""
        mask = [True] * len(self.token_ids)
        for start, end in self.environment:
            mask[start:end] = [False] * (end - start)
        return mask

    @property
    def truncated(self) -> bool:
        """Whether it was cut off: at its limit of tokens, or in a loop."""
        return self.finish_reason in ("length", "repetition")

    @property
    def versions(self) -> list[int]:
        """Of the weights that sampled each token."""
        begins = ((0, self.weight_version), *self.switches)
        ends = [*(token for token, _ in self.switches), len(self.token_ids)]
        return [
            version
            for (start, version), end in zip(begins, ends, strict=True)
            for _ in range(start, end)
        ]


@dataclass(frozen=True)
class Group:
    """One prompt's completions and their rewards, in the same order. unscored: further completions,
    left out because the reward had nothing to say of them.
    """

    prompt: Prompt
    completions: tuple[Completion, ...]
    rewards: tuple[float, ...]
    unscored: int = 0


@dataclass(frozen=True)
class Sampling:
    """temperature 0 is greedy. top_p, top_k, min_p: sample from the likeliest tokens alone, as
    vLLM's parameters of these names say; 1, 0 and 0 are all tokens. max_new_tokens bounds each
    completion. seed: of the whole call; sample k of prompt j draws from a stream that depends on
    (seed, first_prompt + j, k) only. first_prompt: how many prompts of the same seed other engines
    were given before these. stop: texts that end a completion; their tokens are its last ones, and
    its text ends before them. loop_limit: ends a completion in which up to 8 tokens come so many
    times in a row; None: none. ignore_end: sample on past the end token, to `max_new_tokens`, for
    benchmarks.
    """

    samples: int
    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    first_prompt: int = 0
    stop: tuple[str, ...] = ()
    loop_limit: int | None = None
    ignore_end: bool = False

    @classmethod
    def of(
        cls,
        rollout: RolloutConfig,
        seed: int,
        first_prompt: int = 0,
        asking: EvalConfig | None = None,
    ) -> "Sampling":
        """As a run's `rollout` section says; `asking`, an `eval` section, comes before it."""
        names = {field.name for field in fields(cls)}
        sections = rollout.model_dump(include=names) | (
            asking.model_dump(include=names) if asking else {}
        )
        return cls(**sections, seed=seed, first_prompt=first_prompt)


@dataclass(frozen=True)
class ServerSpec:
    """What a server is started on. folder: the checkpoint. name: the model's in requests. dtype:
    compute dtype, "bfloat16", "float16" or "float32". max_model_len: prompt and completion tokens;
    None: as many as the model has positions. kv_cache_gib: of the key/value cache on CPUs.
    """

    folder: Path
    name: str
    dtype: str
    max_model_len: int | None = None
    kv_cache_gib: int = 1
