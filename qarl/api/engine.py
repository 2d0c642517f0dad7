"""A policy's engine: vLLM in this process, or servers; audited before it samples, gated at its
first batch.
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
from qarl.quant.checkpoint.folder import check_context
from qarl.rollout.types import Completion, Prompt, Sampling
from qarl.run.prompts import open_prompter
from qarl.run.session import connected, gate_of
from qarl.sync.publisher import Publish
from qarl.tasks import Problem

T = TypeVar("T")
AnyPrompt = str | Sequence[int] | Sequence[Mapping[str, str]] | Problem | Prompt
"""Text, token ids, a chat's messages, a task's problem, or what `Engine.prompt` made of one."""
_CANARY_SEQUENCES, _CANARY_TOKENS = 8, 32


class Engine(AbstractContextManager["Engine"]):
    """What samples from one policy; `qarl.engine` opens it, `close` or the end of a `with` closes
    it.

    policy: whose versions it takes. audited: layers and kernels that both sides agreed on.
    multiplies: what the policy multiplies with, in words. rows: the self-test of these kernels,
    None where the engine has others. published: the version it samples from, with its proofs.
    """

    def __init__(self, policy: Policy, settings: RunConfig, folder: Path | None):
        self.policy, self.settings = policy, settings
        self.prompter = open_prompter(policy.folder, settings.rollout, settings.task)
        self._lock, self._running, self._closed = threading.RLock(), 0, False
        with ExitStack() as stack:
            place = folder or Path(
                stack.enter_context(tempfile.TemporaryDirectory(prefix="qarl-engine-"))
            )
            start, canary = (
                place / "engine-start",
                _canary(len(self.prompter.tokenizer), settings),
            )
            opened = connected(policy.low_bit, policy.folder, start, settings, canary, Processes())
            self._connection = connection = stack.enter_context(opened)
            self.audited, self.multiplies = connection.audited, connection.multiplies
            self.rows = connection.rows
            self._shares = policy.low_bit.context.engine is not None
            self.published, self._version = (
                connection.publisher.publish(0),
                policy.version,
            )
            policy.alone, policy.gate = (
                self._while_idle,
                gate_of(settings, policy.low_bit, connection.rows),
            )
            self._stack = stack.pop_all()

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Free the engine, or let go of the servers; the policy makes layers of its own where it
        needs any.
        """
        self.policy.alone, self.policy.gate = at_once, None
        self._stack.close()
        self._closed = True

    def _refuse_closed(self) -> None:
        if self._closed:
            raise PolicyError("the engine is closed; open one: qarl.engine(policy)")

    def prompt(self, prompt: AnyPrompt, name: str = "") -> Prompt:
        """Token ids as they are; all else by the model's chat template, plainly where there is
        none, as `qarl train` does. name: its id. Raises `ConfigError` or `PolicyError` for more
        than max_prompt_tokens, or none.
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
        """So many samples of each prompt, in order: token ids, their fp32 log-probs in nats, text,
        weight version.

        Sample k of prompt j draws from a stream of its own, of (seed, first_prompt + j, k). greedy:
        the likeliest tokens instead. Raises `PolicyError` between a refresh and its publish, where
        the engine shares the policy's layers; `EngineError` where the engine fails.
        """
        if samples < 1 or isinstance(prompts, str):
            raise PolicyError(
                f"samples {samples} must be 1 or more, and prompts a list, not {quoted(prompts)}"
            )
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
            return self._connection.engine.generate(
                inputs, replace(sampling, temperature=0.0) if greedy else sampling
            )
        finally:
            with self._lock:
                self._running -= 1

    def _while_idle(self, what: str, work: Callable[[], T]) -> T:
        """Do it while nothing is sampled; raises `PolicyError` where something is. Servers sample
        on through a publish with max_staleness 2 or more, and through any refresh.
        """
        with self._lock:
            self._refuse_closed()
            apart = not self._shares and (
                what == "refresh" or self.settings.rollout.max_staleness > 1
            )
            if self._running and not apart:
                raise PolicyError(
                    f"{what}: generate is under way in {self._running} threads, and weights must"
                    " not change under it; wait for them, or sample on servers (urls) with"
                    " max_staleness 2"
                )
            return work()

    def admit(self, policy: Policy) -> Publish:
        """Take its present version; see `Policy.publish`."""
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
    """Open an engine on a policy's present weight version, published as version 0: vLLM in this
    process, whose layers the policy then multiplies with, or the vLLM servers at `urls`.

    max_prompt_tokens, max_new_tokens: of a sequence. temperature: that all is sampled at. folder:
    for the engine's first checkpoint and versions for servers; without it a temporary one.
    tokenizer: to hold to the model's. options: other fields of `rollout.*`
    (docs/reference/options.md), such as max_num_seqs, kv_cache_gib, stop, server_key_file.

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
    # a rule of runs, whose micro-batches are long
    learner = {"micro_batch_tokens": max_prompt_tokens + max_new_tokens}
    checked = config_from_tree({"rollout": rollout, "learner": learner}).rollout
    check_context(policy.folder, checked.longest)
    return Engine(
        policy,
        policy.settings.model_copy(update={"rollout": checked}),
        Path(folder) if folder else None,
    )


def _canary(vocabulary: int, settings: RunConfig) -> list[list[int]]:
    """Token sequences that are the same in every run."""
    longest = min(_CANARY_TOKENS, settings.rollout.longest - 1)
    generator = torch.Generator().manual_seed(0)
    return torch.randint(
        vocabulary, (_CANARY_SEQUENCES, max(2, longest)), generator=generator
    ).tolist()
