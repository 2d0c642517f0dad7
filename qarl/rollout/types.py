"""Data that passes between sampling and learning, and to a server.

This module imports neither torch nor vllm.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from qarl.configs.schema.rollout import RolloutConfig
from qarl.configs.schema.run import EvalConfig

LONGEST_PERIOD = 8
"""Tokens of the longest n-gram that counts as a loop if it is repeated."""


@dataclass(frozen=True)
class Pictures:
    """The pictures of a prompt."""

    files: tuple[bytes, ...]
    """Contents of the picture files (PNG, JPEG, …), in the order of their places in the prompt."""
    token_ids: tuple[int, ...]
    """The prompt with one token in the place of each picture.

    In `Prompt.token_ids` each is replaced by the tokens that the model has for the picture.
    """


@dataclass(frozen=True)
class EmbeddedPictures:
    """What a tower made of a prompt's pictures: inputs of the language model."""

    rows: Any
    """torch.Tensor [P, C] in the compute dtype: the tower's output for all pictures, in order.

    If deeper layers of the language model have outputs of their own (deepstack), these follow in
    more columns.
    """
    places: Any
    """torch.Tensor, int64 [P]: the position in the prompt's tokens that each row stands at."""
    positions: Any = None
    """torch.Tensor, int64 [T, 3]: each prompt token's position in time, height and width, by which
    rotary embeddings turn (M-RoPE); None if the model counts tokens alone.
    """
    sees: Any = None
    """torch.Tensor, int64 [T]: the number of leading tokens of the prompt that each token sees. A
    token of a picture sees all of the picture. None if every token sees those before it and itself.
    """


@dataclass(frozen=True)
class Prompt:
    """One prompt: the first turn of a problem, or a later turn of its conversation."""

    id: str
    """Id of the problem that the prompt states."""
    text: str
    """The problem's question, before the chat template."""
    token_ids: tuple[int, ...]
    """Token ids of the chat-templated prompt. Those of a later turn include all earlier turns."""
    draws: tuple[int, int, int] | None = None
    """(prompt, sample, turn): the random stream that the completion draws from.

    Default: derived from the prompt's position in the call.
    """
    max_new_tokens: int | None = None
    """Limit of this prompt's completion, in tokens. Default: the call's limit."""
    pictures: Pictures | None = field(default=None, repr=False)
    """The prompt's pictures; None if it is text alone."""


@dataclass(frozen=True)
class Completion:
    """One sampled response, or a whole conversation after its prompt.

    A conversation consists of the policy's turns and the environment's text between them.
    """

    token_ids: tuple[int, ...]
    """Generated tokens, including the end token if it was sampled."""
    logprobs: tuple[float, ...]
    """The sampler's log-prob of each token, in nats, computed in fp32."""
    text: str
    """Text of the last turn."""
    weight_version: int
    """Version of the weights that sampled the first token."""
    finish_reason: str
    """Why the last turn ended: "stop", "length" or "repetition"."""
    experts: Any = field(default=None, compare=False, repr=False)
    """Experts that each token was routed to, or None if the engine was not asked for them.

    numpy integers [routed tokens of prompt and response, decoder layers, experts per token].
    """
    pictures: EmbeddedPictures | None = field(default=None, compare=False, repr=False)
    """What the engine's tower made of the prompt's pictures; None for a prompt of text."""
    switches: tuple[tuple[int, int], ...] = ()
    """(token, version) pairs: from this token on, later weights sampled the completion.

    Empty if no version was published while it was sampled.
    """
    environment: tuple[tuple[int, int], ...] = ()
    """Spans [start, end) of `token_ids` that an environment wrote, each between two turns.

    Their log-probs are 0, and nothing is learned from them.
    """
    reward: float | None = None
    """Reward that the rollout gave. If None, the task's reward judges the text."""
    events: tuple[tuple[str, float], ...] = ()
    """Events of a conversation with their counts, such as ("tool_errors", 2)."""

    @property
    def sampled(self) -> list[bool]:
        """Mask of the tokens that the policy sampled, one entry per token."""
        mask = [True] * len(self.token_ids)
        for start, end in self.environment:
            mask[start:end] = [False] * (end - start)
        return mask

    @property
    def truncated(self) -> bool:
        """True if the completion was cut off, by its token limit or because it looped."""
        return self.finish_reason in ("length", "repetition")

    @property
    def versions(self) -> list[int]:
        """Version of the weights that sampled each token."""
        starts = ((0, self.weight_version), *self.switches)
        ends = [*(token for token, _ in self.switches), len(self.token_ids)]
        versions = []
        for (start, version), end in zip(starts, ends, strict=True):
            versions += [version] * (end - start)
        return versions


@dataclass(frozen=True)
class Group:
    """One prompt's completions and their rewards, in the same order."""

    prompt: Prompt
    completions: tuple[Completion, ...]
    rewards: tuple[float, ...]
    unscored: int = 0
    """Number of further completions that were left out because the reward could not score them."""


@dataclass(frozen=True)
class Sampling:
    """Settings of one sampling call. `top_p`, `top_k` and `min_p` have vLLM's meaning."""

    samples: int
    """Completions per prompt."""
    max_new_tokens: int
    """Upper bound on the tokens of each completion."""
    temperature: float = 1.0
    """Sampling temperature; 0 is greedy."""
    top_p: float = 1.0
    """Sample from the likeliest tokens whose probabilities add up to this; 1 allows all tokens."""
    top_k: int = 0
    """Sample from this many likeliest tokens; 0 allows all tokens."""
    min_p: float = 0.0
    """Least probability of a token, relative to the likeliest one; 0 allows all tokens."""
    seed: int = 0
    """Seed of the whole call.

    Sample k of prompt j draws from a stream that depends on (seed, first_prompt + j, k) only.
    """
    first_prompt: int = 0
    """Number of prompts of the same seed that other engines received before these."""
    stop: tuple[str, ...] = ()
    """Texts that end a completion. Its tokens include the stop text's, its text does not."""
    stop_tokens: tuple[int, ...] = ()
    """Ids of further tokens that end a completion. Its tokens include them, its text does not."""
    loop_limit: int | None = None
    """Number of repetitions in a row of up to 8 tokens that ends a completion; None: no limit."""
    ignore_end: bool = False
    """If true, sample past the end token, up to `max_new_tokens`. Used by benchmarks."""

    @classmethod
    def of(
        cls,
        rollout: RolloutConfig,
        seed: int,
        first_prompt: int = 0,
        evaluation: EvalConfig | None = None,
    ) -> "Sampling":
        """Return the settings of a run's `rollout` section.

        evaluation: an `eval` section, whose values override the `rollout` section's.
        """
        names = {field.name for field in fields(cls)}
        settings = rollout.model_dump(include=names)
        if evaluation:
            settings |= evaluation.model_dump(include=names)
        return cls(**settings, seed=seed, first_prompt=first_prompt)

    def with_stop_tokens(self, tokenizer: Any) -> "Sampling":
        """Return settings in which stop texts that are special tokens are token ids.

        vLLM leaves special tokens out of the text that it searches, so it would never see them.
        """
        added = getattr(tokenizer, "added_tokens_decoder", {}) if self.stop else {}
        special = {str(token): number for number, token in added.items() if token.special}
        return replace(
            self,
            stop=tuple(text for text in self.stop if text not in special),
            stop_tokens=(*self.stop_tokens, *(special[t] for t in self.stop if t in special)),
        )


@dataclass(frozen=True)
class RequestDefaults:
    """How a policy was asked in training and evaluation, and so how requests ask its export.

    Made without arguments, it says nothing.
    """

    chat: bool = True
    """Whether questions were put into a chat template; if not, they were the prompt itself."""
    system: str | None = None
    """System prompt before every conversation; None if there was none, or not one for all."""
    template: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the chat template, as JSON has them."""
    end_tokens: tuple[int, ...] = ()
    """Token ids that ended answers, beside those of the base's generation config."""
    stop: tuple[str, ...] = ()
    """Texts that ended answers, without special tokens, which are among `end_tokens`."""
    loop_limit: int | None = None
    """Number of repetitions in a row that ended answers."""
    sampling: Mapping[str, float] = field(default_factory=dict)
    """`temperature`, `top_p`, `top_k` and `min_p` of the evaluation, as in the section `eval`."""
    max_prompt_tokens: int | None = None
    """Upper bound on the tokens of a prompt."""
    max_new_tokens: int | None = None
    """Upper bound on the tokens of an answer."""

    @property
    def greedy(self) -> bool:
        """Return whether the evaluation took the likeliest tokens."""
        return self.sampling.get("temperature") == 0

    def record(self) -> dict[str, Any]:
        """Return the fields as plain data, for qarl.json."""
        return asdict(self)


@dataclass(frozen=True)
class ServerSpec:
    """Settings that a server is started with."""

    folder: Path
    """Checkpoint folder."""
    name: str
    """Name of the model in requests."""
    dtype: str
    """Compute dtype: "bfloat16", "float16" or "float32"."""
    max_model_len: int | None = None
    """Upper bound on prompt and completion tokens. Default: the model's number of positions."""
    kv_cache_gib: int = 1
    """Size of the key/value cache on CPUs, in GiB."""
    temperature: float | None = None
    """Sampling temperature of requests that give none. Default: the generation config's, else 1."""
