"""Typed configuration tree of a run. Imports neither torch nor vllm; unknown keys are errors.

Core fields come first in each section, advanced ones after. Every field can be set in YAML or by a
dotted override (`--learner.optimizer.lr 3e-4`).
"""

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from qarl.configs.errors import SchemeError
from qarl.configs.schema.base import (
    LARGEST_SEED,
    Dtype,
    PathText,
    Section,
    pattern_fault,
)
from qarl.configs.schema.learner import LearnerConfig
from qarl.configs.schema.quantization import QuantizationConfig
from qarl.configs.schema.rollout import MOST_PROMPTS, RolloutConfig
from qarl.configs.schema.task import TaskConfig
from qarl.configs.schemes import UNQUANTIZED, known_scheme


class SyncConfig(Section):
    """Publishing of weights, and the checks that prove it."""

    canary_every: int = Field(
        default=50,
        ge=1,
        description=(
            "Publishes between canaries, which compare log-probs of fixed sequences. The first"
            " publish has one."
        ),
    )
    canary_bound: float | None = Field(
        default=None,
        gt=0,
        description=(
            "Upper limit on the mean |Δ log p| of fixed sequences between learner and engine, in"
            " nats; beyond it the run stops. Default: 2 times the measured difference of two"
            " correct implementations of the model, or 0.1 times if both have the same exact"
            " kernels."
        ),
    )
    gate_bound: float | None = Field(
        default=None,
        gt=0,
        description=(
            "Upper limit on the mean |log w| of the first batch, in nats; beyond it the run stops."
            " Default: measured on the batch, as for canary_bound, and one on k3 with it."
        ),
    )


class EvalConfig(Section):
    """Evaluation on held-out problems."""

    problems: int = Field(
        default=256,
        ge=0,
        le=MOST_PROMPTS,
        description=(
            "Number of held-out problems. Raise it for finer accuracy; set 0 for no evaluation."
        ),
    )
    every: int = Field(
        default=50,
        ge=1,
        description=(
            "Steps between evaluations; the start and the last step have one. Raise it if"
            " evaluation takes long."
        ),
    )
    samples: int = Field(
        default=1,
        ge=1,
        le=10_000,
        description="Answers per problem, averaged over. Several need a temperature above 0.",
    )
    temperature: float = Field(
        default=0.0, ge=0, le=2, description="Sampling temperature of the answers. 0 is greedy."
    )
    top_p: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description=(
            "Sample answers from the likeliest tokens that together have this probability. 1 is"
            " all tokens."
        ),
    )
    top_k: int = Field(
        default=0,
        ge=0,
        description="Sample answers from this many of the likeliest tokens. 0 is all tokens.",
    )
    min_p: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description=(
            "Sample answers from tokens with at least this fraction of the likeliest token's"
            " probability. 0 is all tokens."
        ),
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
                    f"eval.{name} {getattr(self, name)} with eval.temperature 0 has no effect:"
                    " greedy answers take the likeliest token; give a temperature, or omit it"
                )
        return self


class CheckpointConfig(Section):
    """Checkpoints to resume a run from."""

    every: int = Field(
        default=50,
        ge=1,
        description=(
            "Steps between checkpoints to resume from; the last step has one. Lower it to lose"
            " less in a crash."
        ),
    )
    keep: int = Field(
        default=2,
        ge=1,
        description=(
            "Number of newest checkpoints to keep. Each takes the space of masters and optimizer"
            " state."
        ),
    )
    best: bool = Field(
        default=False,
        description=(
            "Write RUN/export-best, deployable as it is, whenever held-out accuracy is the highest"
            " so far."
        ),
    )


class LayerRule(Section):
    """Scheme of some layers. Written `PATTERN=SCHEME`, or as a mapping of the two fields."""

    match: str = Field(
        description=(
            "Exact layer name, shell pattern, re:EXPRESSION, or first:K or last:K decoder layers."
        )
    )
    scheme: str = Field(
        description="Scheme of these layers. Set bf16 to leave them in the compute dtype."
    )

    def __str__(self) -> str:
        return f"{self.match}={self.scheme}"

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        match, equals, scheme = value.strip().rpartition("=")
        if not equals:
            raise ValueError(f"{value!r} is not a layer rule; write PATTERN=SCHEME")
        return {"match": match, "scheme": scheme}

    @model_validator(mode="after")
    def _readable(self) -> "LayerRule":
        if not self.match or not self.scheme:
            raise ValueError(f"layer rule '{self}' needs a pattern and a scheme: PATTERN=SCHEME")
        fault = pattern_fault(self.match)
        if fault:
            raise ValueError(f"layer rule '{self}' {fault}")
        try:
            known_scheme(self.scheme)
        except SchemeError as error:
            raise SchemeError(f"layer rule '{self}': {error}") from error
        return self


def _rules_from_text(value: Any) -> Any:
    """Split `PATTERN=SCHEME,PATTERN=SCHEME` into its rules.

    A comma ends a rule only after a scheme, because patterns may contain commas.
    """
    if not isinstance(value, str):
        return value
    return re.sub(r"(=[\w.-]+)\s*,\s*", r"\1\n", value).splitlines()


class RunConfig(Section):
    """Configuration of a whole run."""

    model: PathText = Field(
        default="tiny-qwen3",
        description="Embedded model (tiny-qwen3, smollm2-135m), transformers folder, or hub id.",
    )
    scheme: Annotated[str, AfterValidator(known_scheme)] = Field(
        default="w4a16",
        description=(
            "Low-bit scheme of sampler and learner. `qarl schemes` lists those that run here."
        ),
    )
    layers: Annotated[tuple[LayerRule, ...], BeforeValidator(_rules_from_text)] = Field(
        default=(),
        description=(
            "Layers in other schemes, PATTERN=SCHEME,… (docs/guide/layers.md). The first match"
            " wins."
        ),
    )
    dtype: Dtype = Field(
        default="bfloat16",
        description=(
            "Compute dtype of activations in learner and engine. Set float16 to lower the mismatch."
        ),
    )
    bitwise: bool = Field(
        default=False,
        description=(
            "Require the log-probs of learner and sampler to be equal to the last bit, or stop the"
            " run. On GPUs this needs vLLM's batch-invariant kernels, which are slower"
            " (docs/explain/cuda.md)."
        ),
    )
    steps: int = Field(
        default=200,
        ge=1,
        le=10**9,
        description="Number of training steps. Raise it if the reward still rises at the end.",
    )
    seed: int = Field(
        default=0,
        ge=0,
        le=LARGEST_SEED,
        description=(
            "Seed for problem order, sampling and mini-batch shuffling. Change it for an"
            " independent run."
        ),
    )
    record: Annotated[int, Field(ge=0, le=MOST_PROMPTS)] | Literal["all"] = Field(
        default=4,
        description=(
            "Completions of lowest reward, and as many of highest, whose tokens each step"
            " records for `qarl report`. Set all, or 0 for none."
        ),
    )
    from_rollouts: PathText | None = Field(
        default=None,
        description=(
            "Run recorded with --record all. Its completions are learned from again, without an"
            " engine."
        ),
    )
    early_warning: Literal["warn", "stop"] = Field(
        default="warn",
        description=(
            "Reaction to a sign that a run goes wrong (docs/guide/report.md): warn, once for each"
            " sign, or stop the run."
        ),
    )
    log: Literal["none", "wandb"] = Field(
        default="none",
        description=(
            "Where metrics go besides metrics.jsonl and TensorBoard (docs/reference/metrics.md)."
        ),
    )
    output: PathText | None = Field(
        default=None,
        description="Run folder to create. Default: runs/MODEL-SCHEME-TIME.",
    )
    quantization: QuantizationConfig = Field(default_factory=lambda: QuantizationConfig())
    task: TaskConfig = Field(default_factory=lambda: TaskConfig())
    rollout: RolloutConfig = Field(default_factory=lambda: RolloutConfig())
    learner: LearnerConfig = Field(default_factory=lambda: LearnerConfig())
    sync: SyncConfig = Field(default_factory=lambda: SyncConfig())
    eval: EvalConfig = Field(default_factory=lambda: EvalConfig())
    checkpoint: CheckpointConfig = Field(default_factory=lambda: CheckpointConfig())
    export: bool = Field(
        default=True,
        description=(
            "Export the deployable checkpoint at the end and verify it. Set false to save that"
            " time."
        ),
    )

    @property
    def engine_here(self) -> bool:
        """Return whether the run has an engine in its own processes, not servers or none."""
        return self.from_rollouts is None and self.rollout.servers is None

    @property
    def shares_engine(self) -> bool:
        """Return whether the learner keeps no kernel layout of its own, because it multiplies with
        the layers of an engine in its process, or with its masters.
        """
        learner = self.learner
        engines = learner.kernel in ("auto", "vllm") and learner.operators != "transformers"
        return not learner.aligned or (engines and self.engine_here)

    @model_validator(mode="after")
    def _consistent(self) -> "RunConfig":
        """Raise `ValueError` if settings of different sections contradict each other."""
        if self.from_rollouts is not None:
            self._check_replay(self.from_rollouts)
        learner = self.learner
        rollout = self.rollout
        kv_cache = self.quantization.kv_cache
        unquantized = self.scheme == UNQUANTIZED and not self.layers
        warmup = learner.optimizer.warmup_steps
        decay = min(learner.optimizer.decay_steps, self.steps)
        if learner.mini_batches > rollout.prompts:
            raise ValueError(
                f"learner.mini_batches {learner.mini_batches} is more than rollout.prompts"
                f" {rollout.prompts}; each mini-batch needs at least one prompt's group"
            )
        if rollout.router_replay and rollout.prefix_caching:
            raise ValueError(
                "rollout.router_replay true needs rollout.prefix_caching false: tokens found in the"
                " cache are not routed again, so the engine cannot tell their experts"
            )
        if warmup + max(decay, 1) > self.steps + 1:
            raise ValueError(
                f"learner.optimizer.warmup_steps {warmup} and decay_steps {decay} are more than"
                f" steps {self.steps}, so the learning rate would never be reached; lower them or"
                " raise it"
            )
        if not learner.keep_kernel_layout and self.shares_engine:
            raise ValueError(
                "learner.keep_kernel_layout false, but the learner has none of its own: it"
                " multiplies with its masters, or with the layers of an engine in its process; give"
                " rollout.servers, or omit it"
            )
        if kv_cache is not None and unquantized:
            raise ValueError(
                f"quantization.kv_cache {kv_cache!r} with scheme {self.scheme!r}, whose checkpoint"
                " has no quantization that could state it; choose a low-bit scheme, or omit it"
            )
        if self.checkpoint.best and not self.eval.problems:
            raise ValueError(
                "checkpoint.best true with eval.problems 0: nothing says which is the best; give"
                " eval.problems, or omit it"
            )
        if rollout.tensor_parallel_size > 1:
            self._check_ranks(rollout.tensor_parallel_size)
        if rollout.pictures:
            self._check_pictures(rollout.pictures)
        if learner.micro_batch_tokens < rollout.longest:
            raise ValueError(
                f"learner.micro_batch_tokens {learner.micro_batch_tokens} is less than one longest"
                " sequence, rollout.max_prompt_tokens + rollout.max_new_tokens ="
                f" {rollout.longest}; raise the first or lower the others"
            )
        if self.bitwise:
            self._check_bitwise()
        if self.quantization.init is not None:
            self._check_calibrated_start(self.quantization.init)
        return self

    def _check_ranks(self, ranks: int) -> None:
        """Raise `ValueError` if the learner cannot sum as this many ranks of an engine do."""
        learner = self.learner
        engines = learner.operators == "engine" or (learner.operators == "auto" and learner.aligned)
        if not engines:
            raise ValueError(
                f"rollout.tensor_parallel_size {ranks} needs the engine's model as the learner's,"
                " which sums the ranks' products; set learner.operators to 'engine', or omit it"
            )

    def _check_pictures(self, pictures: int) -> None:
        """Raise `ValueError` if settings do not go with prompts that have pictures."""
        engines = self.learner.operators == "engine" or (
            self.learner.operators == "auto" and self.learner.aligned
        )
        rules = (
            (
                not engines,
                "learner.operators 'transformers' (or learner.aligned false): only the engine's"
                " model takes what its part for pictures made of them",
            ),
            (
                self.task.speaks,
                "a task of several turns: later turns would have to carry the pictures",
            ),
            (
                self.from_rollouts is not None,
                "from_rollouts: a run records tokens and no pictures",
            ),
        )
        for broken, reason in rules:
            if broken:
                raise ValueError(f"rollout.pictures {pictures} with {reason}; omit one of them")

    def _check_bitwise(self) -> None:
        """Raise `ValueError` if learner and sampler cannot be equal to the last bit."""
        learner = self.learner
        sync = self.sync
        rules = (
            (
                not learner.aligned,
                "learner.aligned false multiplies other weights than the sampler",
            ),
            (
                learner.kernel not in ("auto", "vllm"),
                f"learner.kernel {learner.kernel!r} multiplies by other kernels",
            ),
            (
                learner.operators == "transformers",
                "learner.operators 'transformers' rounds elsewhere",
            ),
            (
                self.rollout.servers is not None,
                "rollout.servers samples in other processes",
            ),
            (
                self.rollout.router_replay,
                "rollout.router_replay true takes vLLM's other model runner",
            ),
            (
                sync.gate_bound or sync.canary_bound,
                "sync.gate_bound or canary_bound allows a difference",
            ),
        )
        for broken, reason in rules:
            if broken:
                raise ValueError(f"bitwise true: {reason}; omit one of them")

    def _check_calibrated_start(self, init: str) -> None:
        """Raise `ValueError` if llmcompressor cannot quantize as configured, or if the learner
        cannot start from masters other than the model folder's.
        """
        layers = ", ".join(map(str, self.layers))
        kl = self.learner.kl.name
        rules = (
            (
                self.layers,
                f"with layers {layers}: llmcompressor quantizes a model in one scheme",
            ),
            (
                self.learner.lora.name != "none",
                "with learner.lora.name 'lora': a checkpoint of adapters holds no base, and this"
                " one is not the model folder's",
            ),
            (
                kl != "none",
                f"with learner.kl.name {kl!r}: the penalty's reference is rounded from the model"
                " folder, and is not the policy that starts",
            ),
        )
        for broken, reason in rules:
            if broken:
                raise ValueError(f"quantization.init {init!r} {reason}; omit one of them")

    def _check_replay(self, recorded: str) -> None:
        """Raise `ValueError` if an option needs an engine, which a replay of `recorded` lacks."""
        rules = (
            (self.eval.problems, f"eval.problems {self.eval.problems}"),
            (self.export, "export true"),
            (self.quantization.init, f"quantization.init {self.quantization.init!r}"),
        )
        for needs_engine, option in rules:
            if needs_engine:
                raise ValueError(
                    f"{option} needs an engine, and from_rollouts {recorded!r} learns without one;"
                    " omit one of them (`qarl export` and `qarl eval` take a replay's folder"
                    " as any run's)"
                )
