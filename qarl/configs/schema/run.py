"""The typed configuration tree. Imports neither torch nor vllm; unknown keys are errors.

Core fields come first in each section, advanced ones after. Every field is set by YAML or by a
dotted override (`--learner.optimizer.lr 3e-4`).
"""

import re
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from qarl.configs.schema.base import (
    LARGEST_SEED,
    Dtype,
    PathText,
    Section,
    Text,
    pattern_fault,
    refuse,
)
from qarl.configs.schema.learner import LearnerConfig
from qarl.configs.schema.quantization import QuantizationConfig
from qarl.configs.schema.servers import Servers
from qarl.configs.schema.task import TaskConfig
from qarl.configs.schemes import UNQUANTIZED

_MOST_PROMPTS, LONGEST = 10**6, 2**24
"""Prompts, sequences or problems at once, and tokens of a sequence: bounds that only slips of the
hand exceed.
"""


class RolloutConfig(Section):
    """Sampling."""

    prompts: int = Field(
        default=32,
        ge=1,
        le=_MOST_PROMPTS,
        description="prompts a step; more for a steadier gradient",
    )
    samples: int = Field(
        default=8,
        ge=2,
        le=10_000,
        description="completions a prompt, whose rewards are compared",
    )
    max_prompt_tokens: int = Field(
        default=1024,
        ge=1,
        le=LONGEST,
        description=(
            "tokens a prompt may have; longer questions of a file or data set are left out, and of"
            " a built-in task an error"
        ),
    )
    max_new_tokens: int = Field(
        default=1024,
        ge=1,
        le=LONGEST,
        description="tokens a completion may have; raise it where many are truncated",
    )
    temperature: float = Field(
        default=1.0,
        gt=0,
        le=10,
        description="of completions; the learner's log-probs are of the same distribution",
    )
    stop: Annotated[
        tuple[Text, ...], BeforeValidator(lambda v: [v] if isinstance(v, str) else v)
    ] = Field(
        default=(),
        description=(
            "text that ends a completion and is left out of it, or a list of such, for models that"
            " do not end by themselves"
        ),
    )
    loop_limit: int | None = Field(
        default=None,
        ge=2,
        description=(
            "end a completion that repeats up to 8 tokens so many times in a row; without it loops"
            " go on"
        ),
    )
    max_num_seqs: int = Field(
        default=256,
        ge=1,
        le=_MOST_PROMPTS,
        description="sequences the engine decodes at once; lower it where memory is short",
    )
    kv_cache_gib: int | None = Field(
        default=None,
        ge=1,
        description=(
            "the engine's key/value cache, GiB; without it one longest sequence's, on GPUs what"
            " `qarl plan` finds free"
        ),
    )
    prefix_caching: bool = Field(
        default=True,
        description="reuse keys and values of shared prefixes within a version",
    )
    dynamic_sampling: int | None = Field(
        default=None,
        ge=0,
        description=(
            "rounds of sampling to replace groups whose rewards are all equal, where many are;"
            " without it all are kept"
        ),
    )
    router_replay: bool = Field(
        default=False,
        description=(
            "mixtures of experts on GPUs: learn with the experts the engine chose, where routing"
            " differs"
        ),
    )
    enforce_eager: bool | None = Field(
        default=None,
        description=(
            "decode without CUDA graphs; without it GPUs have them, and CPUs do not"
            " (docs/explain/cuda.md)"
        ),
    )
    servers: Servers | None = Field(
        default=None,
        description=(
            "sample on vLLM servers (docs/guide/servers.md): their URLs, or how many to start on"
            " this machine; without it inside the run"
        ),
    )
    server_key_file: PathText | None = Field(
        default=None,
        description="file with the servers' API key; without it the environment's QARL_SERVER_KEY",
    )
    server_folder: PathText | None = Field(
        default=None,
        description=(
            "folder where weight versions are written, in one of the run's own, and servers read"
            " them under the same path; without it in the run's folder"
        ),
    )
    server_transfer: Literal["files", "http"] = Field(
        default="files",
        description=(
            "how weight versions reach the servers: files, on a file system that they share with"
            " the run, or http, sent to each"
        ),
    )
    server_seconds: float = Field(
        default=600.0,
        gt=0,
        description="that a server's answer may take, and its start",
    )
    server_full_every: int = Field(
        default=50,
        ge=1,
        description=(
            "of so many weight versions one is sent to servers whole; the others are differences"
            " from the one before, which run and servers then hold in host memory; 1: all whole,"
            " none held"
        ),
    )
    max_staleness: int = Field(
        default=0,
        ge=0,
        le=16,
        description=(
            "batches that servers sample while the learner works on one: 1, by the weights before;"
            " from 2 on new weights reach them while they sample (docs/guide/servers.md)"
        ),
    )

    @model_validator(mode="after")
    def _served(self) -> "RolloutConfig":
        if self.servers is None:
            for name in (
                "server_key_file",
                "server_folder",
                "server_transfer",
                "server_full_every",
                "max_staleness",
            ):
                if getattr(self, name) != type(self).model_fields[name].default:
                    raise ValueError(
                        f"rollout.{name} {getattr(self, name)} is for sampling on servers: give"
                        " rollout.servers, their URLs or a number to start, or leave it out"
                    )
        elif self.router_replay:
            raise ValueError(
                "rollout.router_replay true needs an engine in process; leave rollout.servers out"
            )
        return self

    @property
    def longest(self) -> int:
        """Tokens a prompt and its completion may have together."""
        return self.max_prompt_tokens + self.max_new_tokens


class SyncConfig(Section):
    """Publishing and its proofs."""

    canary_every: int = Field(
        default=50, ge=1, description="publishes between comparisons of fixed sequences"
    )
    canary_bound: float | None = Field(
        default=None,
        gt=0,
        description=(
            "mean |Δ log p| in nats, of fixed sequences by learner and engine, beyond which the run"
            " stops; without it the run measures what two right implementations of its model are"
            " apart, and stops beyond 2 times that, or 0.1 times where both have the same exact"
            " kernels"
        ),
    )
    gate_bound: float | None = Field(
        default=None,
        gt=0,
        description=(
            "mean |log w| of the first batch in nats, beyond which the run stops; without it"
            " measured of the batch, as canary_bound is"
        ),
    )
    gate_k3_bound: float | None = Field(
        default=None,
        gt=0,
        description="the same of k3, an estimate of KL(sampler ‖ learner)",
    )


class EvalConfig(Section):
    """Held-out accuracy."""

    problems: int = Field(
        default=256,
        ge=0,
        le=_MOST_PROMPTS,
        description="held-out problems asked; more for finer accuracy, 0 for none",
    )
    every: int = Field(
        default=50,
        ge=1,
        description="steps between evaluations; the start and the last step have one",
    )
    samples: int = Field(
        default=1,
        ge=1,
        le=10_000,
        description="answers a problem, averaged over; several need a temperature",
    )
    temperature: float = Field(default=0.0, ge=0, le=10, description="of the answers; 0 is greedy")
    top_p: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="answers from the likeliest tokens that hold this probability together",
    )
    top_k: int = Field(
        default=0,
        ge=0,
        description="answers from so many of the likeliest tokens; 0 is all",
    )
    min_p: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="answers from tokens at least so probable, as a share of the likeliest's",
    )

    @model_validator(mode="after")
    def _differing(self) -> "EvalConfig":
        if self.temperature > 0:
            return self
        if self.samples > 1:
            raise ValueError(
                f"eval.samples {self.samples} with eval.temperature 0: greedy answers are all the"
                " same; give a temperature, or one sample"
            )
        for name, off in (("top_p", 1.0), ("top_k", 0), ("min_p", 0.0)):
            if getattr(self, name) != off:
                raise ValueError(
                    f"eval.{name} {getattr(self, name)} with eval.temperature 0 would do nothing:"
                    " greedy answers take the likeliest token; give a temperature, or leave it out"
                )
        return self


class CheckpointConfig(Section):
    """Checkpoints to resume from."""

    every: int = Field(
        default=50,
        ge=1,
        description="steps between checkpoints to resume from; the last step has one",
    )
    keep: int = Field(
        default=2,
        ge=1,
        description="newest checkpoints kept: masters and optimizer state",
    )
    best: bool = Field(
        default=False,
        description="write RUN/export-best where held-out accuracy is the highest so far",
    )


class LayerRule(Section):
    """Some layers in a scheme of their own. Written `PATTERN=SCHEME`, or as a mapping of the two
    fields.
    """

    match: str = Field(
        description=(
            "exact layer name, shell pattern, re:EXPRESSION, first:K or last:K decoder layers"
        )
    )
    scheme: str = Field(description="their scheme; bf16 leaves them in the compute dtype")

    def __str__(self) -> str:
        return f"{self.match}={self.scheme}"

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        match, equals, scheme = value.strip().rpartition("=")
        if not equals:
            raise ValueError(f"{value!r} is no layer rule; write PATTERN=SCHEME")
        return {"match": match, "scheme": scheme}

    @model_validator(mode="after")
    def _readable(self) -> "LayerRule":
        if not self.match or not self.scheme:
            raise ValueError(f"layer rule '{self}' needs a pattern and a scheme: PATTERN=SCHEME")
        fault = pattern_fault(self.match)
        if fault:
            raise ValueError(f"layer rule '{self}' {fault}")
        return self


def _rules_from_text(value: Any) -> Any:
    """`PATTERN=SCHEME,PATTERN=SCHEME` → its parts. A comma ends a rule after a scheme alone:
    patterns have some.
    """
    return (
        re.sub(r"(=[\w.-]+)\s*,\s*", r"\1\n", value).splitlines()
        if isinstance(value, str)
        else value
    )


class RunConfig(Section):
    """A whole run."""

    model: PathText = Field(
        default="tiny-qwen3",
        description=(
            "an embedded model (tiny-qwen3, smollm2-135m), a transformers folder, or a hub id"
        ),
    )
    scheme: str = Field(
        default="w4a16",
        description="of sampler and learner; `qarl schemes` lists what runs here",
    )
    layers: Annotated[tuple[LayerRule, ...], BeforeValidator(_rules_from_text)] = Field(
        default=(),
        description=(
            "layers in other schemes (docs/guide/layers.md), first match wins: PATTERN=SCHEME,…"
        ),
    )
    dtype: Dtype = Field(
        default="bfloat16",
        description="of activations on both sides; float16 lowers mismatch",
    )
    bitwise: bool = Field(
        default=False,
        description=(
            "learner's and sampler's log-probs equal to the last bit, or the run stops; on GPUs by"
            " vLLM's batch-invariant kernels, which are slower (docs/explain/cuda.md)"
        ),
    )
    steps: int = Field(default=200, ge=1, le=10**9, description="training steps")
    seed: int = Field(
        default=0,
        ge=0,
        le=LARGEST_SEED,
        description="of problems, sampling and mini-batches",
    )
    record: Annotated[int, Field(ge=0, le=_MOST_PROMPTS)] | Literal["all"] = Field(
        default=4,
        description=(
            "completions of least and of most reward whose tokens each step records for `qarl"
            " report`; all, or 0 for none"
        ),
    )
    from_rollouts: PathText | None = Field(
        default=None,
        description=(
            "run recorded with --record all, whose completions are learned from again, without an"
            " engine"
        ),
    )
    early_warning: Literal["warn", "stop"] = Field(
        default="warn",
        description=(
            "at a sign that a run goes wrong (docs/guide/report.md): warn, once for each, or stop"
        ),
    )
    log: Literal["none", "wandb"] = Field(
        default="none",
        description=(
            "where metrics go besides metrics.jsonl and TensorBoard (docs/reference/metrics.md)"
        ),
    )
    output: PathText | None = Field(
        default=None,
        description="run folder to make; without it runs/MODEL-SCHEME-TIME",
    )
    quantization: QuantizationConfig = Field(default_factory=lambda: QuantizationConfig())
    task: TaskConfig = Field(default_factory=lambda: TaskConfig())
    rollout: RolloutConfig = Field(default_factory=lambda: RolloutConfig())
    learner: LearnerConfig = Field(default_factory=lambda: LearnerConfig())
    sync: SyncConfig = Field(default_factory=lambda: SyncConfig())
    eval: EvalConfig = Field(default_factory=lambda: EvalConfig())
    checkpoint: CheckpointConfig = Field(default_factory=lambda: CheckpointConfig())
    export: bool = Field(default=True, description="export the checkpoint at the end and verify it")

    @model_validator(mode="after")
    def _consistent(self) -> "RunConfig":
        learner, rollout, warmup = (
            self.learner,
            self.rollout,
            self.learner.optimizer.warmup_steps,
        )
        decay = min(learner.optimizer.decay_steps, self.steps)
        cache, unquantized = (
            self.quantization.kv_cache,
            self.scheme == UNQUANTIZED and not self.layers,
        )
        no_layout = not learner.keep_kernel_layout and self.shares_engine
        refuse(self._without_an_engine() if self.from_rollouts is not None else {})
        faults = {
            f"learner.mini_batches {learner.mini_batches} is more than rollout.prompts {rollout.prompts}; each mini-batch needs at least one prompt's group": (
                learner.mini_batches > rollout.prompts
            ),
            "rollout.router_replay true needs rollout.prefix_caching false: tokens found in the cache are not routed again, so the engine cannot tell their experts": (
                rollout.router_replay and rollout.prefix_caching
            ),
            f"learner.optimizer.warmup_steps {warmup} and decay_steps {decay} are more than steps {self.steps}, so the learning rate would never be reached; lower them or raise it": (
                warmup + max(decay, 1) > self.steps + 1
            ),
            "learner.keep_kernel_layout false, but the learner has none of its own: it multiplies with its masters, or with the layers of an engine in its process; give rollout.servers, or leave it out": (
                no_layout
            ),
            f"quantization.kv_cache {cache!r} with scheme {self.scheme!r}, whose checkpoint has no quantization to say so in; choose a low-bit scheme, or leave it out": (
                cache is not None and unquantized
            ),
            "checkpoint.best true with eval.problems 0: nothing says which is the best; give eval.problems, or leave it out": (
                self.checkpoint.best and not self.eval.problems
            ),
            f"learner.micro_batch_tokens {learner.micro_batch_tokens} is less than one longest sequence, rollout.max_prompt_tokens + rollout.max_new_tokens = {rollout.longest}; raise the first or lower the others": (
                learner.micro_batch_tokens < rollout.longest
            ),
        }
        refuse(faults)
        refuse(self._other_bits() if self.bitwise else {})
        if self.quantization.init is not None:
            refuse(self._from_other_codes(self.quantization.init))
        return self

    @property
    def engine_here(self) -> bool:
        """Whether the run has an engine in its own processes, not servers' or none."""
        return self.from_rollouts is None and self.rollout.servers is None

    @property
    def shares_engine(self) -> bool:
        """Whether the learner multiplies with that engine's layers, or else with its masters: no
        copy of its own.
        """
        learner = self.learner
        engines = learner.kernel in ("auto", "vllm") and learner.operators != "transformers"
        return not learner.aligned or (engines and self.engine_here)

    def _other_bits(self) -> dict[str, bool]:
        """What cannot be equal to the last bit."""
        learner, sync = self.learner, self.sync
        bounded = any((sync.gate_bound, sync.gate_k3_bound, sync.canary_bound))
        unequal = {
            "learner.aligned false multiplies other weights than the sampler": not learner.aligned,
            f"learner.kernel {learner.kernel!r} multiplies by other kernels": (
                learner.kernel not in ("auto", "vllm")
            ),
            "learner.operators 'transformers' rounds elsewhere": (
                learner.operators == "transformers"
            ),
            "rollout.servers samples in other processes": self.rollout.servers is not None,
            "rollout.router_replay true takes vLLM's other model runner": (
                self.rollout.router_replay
            ),
            "sync.gate_bound, gate_k3_bound or canary_bound allows a difference": bounded,
        }
        return {
            f"bitwise true: {reason}; leave one of them out": applies
            for reason, applies in unequal.items()
        }

    def _from_other_codes(self, init: str) -> dict[str, object]:
        """Where llmcompressor cannot quantize so, or a learner has no place for masters of another
        origin.
        """
        rules, kl, stage = (
            ", ".join(map(str, self.layers)),
            self.learner.kl.name,
            self.learner.zero_stage,
        )
        faults: dict[str, object] = {
            f"with layers {rules}: llmcompressor quantizes a model in one scheme": self.layers,
            "with learner.lora.name 'lora': a checkpoint of adapters holds no base, and this one is not the model folder's": (
                self.learner.lora.name != "none"
            ),
            f"with learner.kl.name {kl!r}: the penalty's reference is rounded from the model folder, and is not the policy that starts": (
                kl != "none"
            ),
            f"is for one process without ZeRO, not for learner.zero_stage {stage}": (
                stage is not None
            ),
        }
        return {
            f"quantization.init {init!r} {fault}; leave one of them out": there
            for fault, there in faults.items()
        }

    def _without_an_engine(self) -> dict[str, object]:
        """What a replay cannot do."""
        requests: dict[str, object] = {
            f"eval.problems {self.eval.problems}": self.eval.problems,
            "export true": self.export,
            f"quantization.init {self.quantization.init!r}": self.quantization.init,
        }
        why = (
            f"needs an engine, and from_rollouts {self.from_rollouts!r} learns without one; leave"
            " one of them out (`qarl export` and `qarl eval` take a replay's folder as any run's)"
        )
        return {f"{field} {why}": asks for field, asks in requests.items()}
