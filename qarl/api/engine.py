"""A policy's engine: vLLM in this process, or servers. It is audited before it samples, and its
first batch must pass the gate.
"""

import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from qarl.api.policy import Policy, at_once
from qarl.configs.errors import ConfigError, PolicyError
from qarl.configs.load import config_from_tree
from qarl.configs.schema.run import RunConfig
from qarl.configs.words import quoted
from qarl.learner.processes import Processes
from qarl.quant.checkpoint.check_folder import check_context
from qarl.rollout.types import Completion, Prompt, Sampling
from qarl.run.prompts import open_prompter
from qarl.run.session import CANARY_SEQUENCES, connected, gate_of
from qarl.sync.publisher import Publish
from qarl.tasks import Problem

T = TypeVar("T")
AnyPrompt = str | Sequence[int] | Sequence[Mapping[str, str]] | Problem | Prompt
"""Text, token ids, a chat's messages, a task's problem, or a prompt by `Engine.prompt`."""
_CANARY_TOKENS = 32
"""Upper bound on their tokens."""


class Engine(AbstractContextManager["Engine"]):
    """Engine that samples from one policy.

    `qarl.engine` opens it; `close`, or the end of a `with`, closes it.
    """

    def __init__(self, policy: Policy, settings: RunConfig, folder: Path | None):
        self.policy = policy
        """Policy whose versions it loads."""
        self.settings = settings
        """Configuration with the settings of the engine."""
        self.prompter = open_prompter(policy.folder, settings.rollout, settings.task)
        self._lock = threading.RLock()
        self._running = 0
        """Number of threads in `generate`."""
        self._closed = False
        with ExitStack() as stack:
            if folder is None:
                temporary = tempfile.TemporaryDirectory(prefix="qarl-engine-")
                folder = Path(stack.enter_context(temporary))
            start = folder / "engine-start"
            tokens = min(len(self.prompter.tokenizer), policy.config.vocab_size)
            canary = _canary(tokens, settings)
            opened = connected(policy.low_bit, policy.folder, start, settings, canary, Processes())
            self._connection = connection = stack.enter_context(opened)
            self.audited = connection.audited
            """Layers and kernels that policy and engine agreed on."""
            self.multiplies = connection.multiplies
            """Layers that the policy multiplies with, in words."""
            self.rows = connection.row_check
            """Result of the kernels' self-test, None if the policy does not use the engine's."""
            self._shares = policy.low_bit.context.engine is not None
            self.published = connection.publisher.publish(0)
            """Version that it samples from, with the proof that it arrived."""
            self._version = policy.version
            """The policy's number of that version."""
            policy.run_while_idle = self._while_idle
            policy.gate = gate_of(settings, policy.low_bit, connection.row_check)
            self._stack = stack.pop_all()

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Free the engine, or disconnect from the servers.

        A policy that used the engine's layers makes its own when it needs them.
        """
        self.policy.run_while_idle = at_once
        self.policy.gate = None
        self._stack.close()
        self._closed = True

    def _refuse_closed(self) -> None:
        if self._closed:
            raise PolicyError("the engine is closed; open one: qarl.engine(policy)")

    def prompt(self, prompt: AnyPrompt, name: str = "") -> Prompt:
        """Return a prompt of token ids, made as `qarl train` makes it.

        Token ids are taken as they are. Everything else goes through the model's chat template, if
        it has one. name: id of the prompt. Raises `ConfigError` or `PolicyError` if it has no token
        or more than max_prompt_tokens.
        """
        if isinstance(prompt, Prompt):
            return prompt
        if isinstance(prompt, str):
            prompt = Problem(name, prompt, "")
        elif not isinstance(prompt, Problem) and any(isinstance(part, Mapping) for part in prompt):
            prompt = Problem(name, "", "", messages=tuple(prompt))  # type: ignore[arg-type]
        if isinstance(prompt, Problem):
            return self.prompter.prompt(prompt)
        limit = self.settings.rollout.max_prompt_tokens
        if not 0 < len(prompt) <= limit:
            raise PolicyError(
                f"prompt {name!r} has {len(prompt)} tokens; allowed are 1 to max_prompt_tokens,"
                f" {limit}"
            )
        return Prompt(name, "", tuple(map(int, prompt)))  # type: ignore[arg-type]

    def generate(
        self,
        prompts: Sequence[AnyPrompt],
        *,
        samples: int = 1,
        seed: int = 0,
        greedy: bool = False,
        first_prompt: int = 0,
    ) -> list[list[Completion]]:
        """Return `samples` completions of each prompt, in order of the prompts.

        A completion has token ids, their fp32 log-probs in nats, text and weight version. Sample k
        of prompt j draws from its own random stream, seeded with (seed, first_prompt + j, k).
        greedy: take the likeliest tokens instead. Raises `PolicyError` between a refresh and its
        publish if the engine shares the policy's layers; `EngineError` if the engine fails.
        """
        if samples < 1:
            raise PolicyError(f"samples {samples} must be 1 or more")
        if isinstance(prompts, str):
            raise PolicyError(f"prompts {quoted(prompts)} is one text; give a list of texts")
        inputs = [self.prompt(prompt, str(first_prompt + j)) for j, prompt in enumerate(prompts)]
        sampling = replace(Sampling.of(self.settings.rollout, seed, first_prompt), samples=samples)
        with self._lock:
            self._refuse_closed()
            if self._shares and self.policy.version != self._version:
                raise PolicyError(
                    f"generate: the engine's layers hold version {self.policy.version} of the"
                    f" policy, and version {self._version} was published; call"
                    " policy.publish(engine) after the last refresh"
                )
            self._running += 1
        try:
            if greedy:
                sampling = replace(sampling, temperature=0.0)
            return self._connection.engine.generate(inputs, sampling)
        finally:
            with self._lock:
                self._running -= 1

    def _while_idle(self, what: str, work: Callable[[], T]) -> T:
        """Return `work()`, called while nothing is sampled; raise `PolicyError` if something is.

        Servers may sample during any refresh, and during a publish with max_staleness 2 or more.
        what: "refresh" or "publish".
        """
        with self._lock:
            self._refuse_closed()
            may_overlap = not self._shares and (
                what == "refresh" or self.settings.rollout.max_staleness > 1
            )
            if self._running and not may_overlap:
                raise PolicyError(
                    f"{what}: generate is under way in {self._running} threads, and weights must"
                    " not change under it; wait for them, or sample on servers (urls) with"
                    " max_staleness 2"
                )
            return work()

    def admit(self, policy: Policy) -> Publish:
        """Load the policy's present version; see `Policy.publish`."""
        if policy is not self.policy:
            ours, other = (
                f"{p.settings.model!r} in {p.settings.scheme}" for p in (self.policy, policy)
            )
            raise PolicyError(
                f"the engine was opened for the policy {ours}, not for this one, {other}; open one:"
                " qarl.engine(policy)"
            )
        self.published = self._while_idle(
            "publish",
            lambda: self._connection.publisher.publish(self.published.version + 1),
        )
        self._version = policy.version
        return self.published


def engine(
    policy: Policy,
    *,
    urls: Sequence[str] = (),
    max_prompt_tokens: int = 1024,
    max_new_tokens: int = 1024,
    temperature: float = 1.0,
    folder: str | Path | None = None,
    tokenizer: Any = None,
    **options: Any,
) -> Engine:
    """Open an engine on a policy's present weight version, which is published as version 0.

    The engine is vLLM in this process, whose layers the policy then multiplies with, or the vLLM
    servers at `urls`.

    max_prompt_tokens, max_new_tokens: limits of a sequence. temperature: temperature of all
    sampling. folder: folder for the engine's first checkpoint and for versions that servers read.
    Default: a temporary folder. tokenizer: tokenizer that must equal the model's. options: other
    fields of `rollout.*` (docs/reference/options.md), such as max_num_seqs, kv_cache_gib, stop,
    server_key_file.

    Raises `ConfigError` for options that cannot be, `PolicyError` for another tokenizer,
    `EngineError` where vLLM does not start or is open already, `AuditError` where both would not
    multiply alike (servers of another scheme or model, too), `PublishError` where the canary's
    log-probs differ.
    """
    for name in options.keys() & {"prompts", "samples", "dynamic_sampling"}:
        raise ConfigError(
            f"engine has no option {name!r}: each call of generate says what it samples"
        )
    policy.check(tokenizer=tokenizer)
    limits = {
        "max_prompt_tokens": max_prompt_tokens,
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
    }
    rollout = {
        **limits,
        **({"servers": urls if isinstance(urls, str) else list(urls)} if urls else {}),
        **options,
    }
    # A run's micro-batch must hold a longest sequence; this makes it so.
    learner = {"micro_batch_tokens": max_prompt_tokens + max_new_tokens}
    checked = config_from_tree({"rollout": rollout, "learner": learner}).rollout
    check_context(policy.folder, checked.longest)
    if checked.tensor_parallel_size > 1 and not urls:
        raise ConfigError(
            f"tensor_parallel_size {checked.tensor_parallel_size} without urls: an engine in this"
            " process has one rank; give the URLs of servers that have as many"
        )
    policy.low_bit.divide_among(checked.tensor_parallel_size)
    return Engine(
        policy,
        policy.settings.model_copy(update={"rollout": checked}),
        Path(folder) if folder else None,
    )


def _canary(vocabulary: int, settings: RunConfig) -> list[list[int]]:
    """Return token sequences for the canary, the same ones in every run."""
    longest = min(_CANARY_TOKENS, settings.rollout.longest - 1)
    generator = torch.Generator().manual_seed(0)
    return torch.randint(
        vocabulary, (CANARY_SEQUENCES, max(2, longest)), generator=generator
    ).tolist()
