"""Sections of the learner: `learner.*` of the configuration."""

from typing import Annotated, Any, Literal, get_args

from pydantic import Field, model_validator

from qarl.configs.schema.base import Dtype, PathText, Section
from qarl.configs.schema.lora import LoraChoice, LoraConfig, NoLora
from qarl.configs.schema.objectives import (
    AggregationChoice,
    AnyObjective,
    CorrectionChoice,
    KlChoice,
    MeanAggregation,
    NoKl,
    ObjectiveChoice,
    TbpoConfig,
    TruncatedConfig,
    ratio_from,
)

_Beta = Annotated[float, Field(ge=0, lt=1)]


class OptimizerConfig(Section):
    """Optimizer that steps the masters."""

    name: Literal["adamw", "muon"] = Field(
        default="muon",
        description=(
            "Optimizer of the masters. With muon, matrices are stepped by Muon and the rest by"
            " AdamW; adamw is the usual choice elsewhere."
        ),
    )
    lr: float = Field(
        default=1e-6,
        gt=0,
        le=1,
        description=(
            "Learning rate (Muon's is scaled to AdamW's update size). Lower it if training is"
            " unstable."
        ),
    )
    weight_decay: float = Field(
        default=0.01,
        ge=0,
        le=1,
        description=(
            "Decoupled weight decay per step and unit of learning rate. Raise it if weights grow"
            " too large."
        ),
    )
    grad_clip: float = Field(
        default=1.0,
        gt=0,
        description=(
            "Upper bound on the global gradient norm. Lower it if single batches upset the policy."
        ),
    )
    warmup_steps: int = Field(
        default=0,
        ge=0,
        description=(
            "First steps, over which the learning rate rises linearly. Raise it if the start is"
            " unstable."
        ),
    )
    decay_steps: int = Field(
        default=0,
        ge=0,
        description=(
            "Last steps, over which the learning rate falls linearly so that the policy settles. A"
            " shorter run decays over all of its steps."
        ),
    )
    betas: tuple[_Beta, _Beta] = Field(
        default=(0.9, 0.95),
        description=(
            "Decay rates of AdamW's two moving averages. Raise them if gradients are noisy."
        ),
    )
    momentum: float = Field(
        default=0.95,
        ge=0,
        lt=1,
        description="Decay rate of Muon's moving average. Raise it if gradients are noisy.",
    )
    rounding: Literal["nearest", "stochastic"] | None = Field(
        default=None,
        description=(
            "Rounding of 16-bit masters after a step (docs/guide/precision.md). Default:"
            " stochastic, and nearest for float32."
        ),
    )
    offload: Literal["none", "cpu"] = Field(
        default="none",
        description=(
            "Where the optimizer state is kept between steps. Set cpu, the host's memory, if GPU"
            " memory is short."
        ),
    )

    def rounding_of(self, master_dtype: str) -> Literal["nearest", "stochastic"]:
        """Return the rounding of masters of `master_dtype`."""
        return self.rounding or ("nearest" if master_dtype == "float32" else "stochastic")


class LearnerConfig(Section):
    """Learning of the policy."""

    aligned: bool = Field(
        default=True,
        description=(
            "Multiply the sampler's own low-bit codes. Set false for the baseline, a plain 16-bit"
            " learner."
        ),
    )
    objective: ObjectiveChoice = Field(default_factory=TbpoConfig)
    correction: CorrectionChoice = Field(default_factory=TruncatedConfig)
    aggregation: AggregationChoice = Field(default_factory=MeanAggregation)
    kl: KlChoice = Field(default_factory=NoKl)
    lora: LoraChoice = Field(default_factory=NoLora)
    optimizer: OptimizerConfig = Field(default_factory=lambda: OptimizerConfig())
    deepspeed: PathText | None = Field(
        default=None,
        description=(
            "Your DeepSpeed configuration, a JSON file with ZeRO stage 1 or 2: DeepSpeed then"
            " divides, offloads and steps (docs/guide/processes.md). Default: several processes"
            " share masters, gradients and moments by rows."
        ),
    )
    advantage: Literal["grpo", "dr_grpo", "rloo"] = Field(
        default="grpo",
        description=(
            "Advantage of a completion: its reward minus the group's mean. With grpo it is divided"
            " by the group's deviation, with dr_grpo it is not; rloo subtracts the mean of the"
            " others."
        ),
    )
    ratio_fix: Literal["none", "shadow_forward"] = Field(
        default="none",
        description=(
            "Set shadow_forward to compute ratios from the published codes, if an unaligned"
            " learner's clip cuts tokens because of precision alone (docs/reference/objectives.md)."
        ),
    )
    mini_batches: int = Field(
        default=4,
        ge=1,
        description="Optimizer steps per batch. Set 1 for strictly on-policy learning.",
    )
    micro_batch_tokens: int = Field(
        default=16384,
        ge=1,
        description=(
            "Tokens per forward pass, padding included unless packed. Lower it if memory is short."
        ),
    )
    packing: bool | Literal["auto"] = Field(
        default="auto",
        description=(
            "Concatenate sequences instead of padding them. With auto, only if the learner runs"
            " the engine's operators (learner.operators)."
        ),
    )
    share_prompts: bool | Literal["auto"] = Field(
        default="auto",
        description=(
            "Compute a prompt once for all its completions in a forward pass. With auto, only for"
            " packed sequences on CPUs (docs/explain/learner.md)."
        ),
    )
    logprob_chunk_tokens: int = Field(
        default=512,
        ge=1,
        description=(
            "Response tokens whose logits are in memory at once. Lower it for a large vocabulary."
        ),
    )
    gradient_checkpointing: bool | Literal["auto"] = Field(
        default="auto",
        description=(
            "Compute decoder layers again in the backward pass, which saves memory and takes time."
            " With auto, only on GPUs if `qarl plan` finds that the run needs it."
        ),
    )
    keep_codes: bool = Field(
        default=True,
        description=(
            "Keep low-bit codes in memory. Set false to save memory: codes are made again from the"
            " masters for every publish and backward pass, which takes time, and flipped codes are"
            " not counted."
        ),
    )
    keep_kernel_layout: bool = Field(
        default=True,
        description=(
            "Keep codes in the kernel's layout. Set false to save memory if the engine is"
            " elsewhere (rollout.servers): every forward pass of a layer lays them out again, and"
            " with keep_codes false a process holds one layer's."
        ),
    )
    input_gradients: Literal["auto", "exact", "compute"] = Field(
        default="auto",
        description=(
            "Weights that input gradients are computed with: exact takes them in float32, compute"
            " rounds them to the compute dtype, as most kernels do. With auto, compute if the"
            " device multiplies that dtype natively (docs/explain/learner.md)."
        ),
    )
    reduce_dtype: Literal["float32", "bfloat16"] = Field(
        default="float32",
        description=(
            "Dtype in which several processes send each other gradients; they are summed in"
            " float32. Set bfloat16 to halve the traffic on a slow network."
        ),
    )
    compile: bool | Literal["auto"] = Field(
        default="auto",
        description=(
            "Compile the backward passes of norms and gated MLPs with torch.compile, which makes"
            " start-up longer. With auto, only on GPUs with the engine's operators."
        ),
    )
    master_dtype: Dtype = Field(
        default="float32",
        description=(
            "Dtype of the master weights. Set bfloat16 to halve their memory"
            " (docs/guide/precision.md)."
        ),
    )
    compute_dtype: Dtype | None = Field(
        default=None,
        description=(
            "Compute dtype of an unaligned learner, for comparisons. Default: the run's dtype."
        ),
    )
    kernel: Literal["auto", "vllm", "reference"] = Field(
        default="auto",
        description=(
            "Matrix kernels of the learner. With auto, vLLM's if it is installed, else reference,"
            " which multiplies dequantized codes."
        ),
    )
    operators: Literal["auto", "engine", "transformers"] = Field(
        default="auto",
        description=(
            "Operators of the learner's model. Those of engine are vLLM's own model, which auto"
            " takes wherever it can (docs/explain/families.md)."
        ),
    )
    router_aux_loss: float | None = Field(
        default=None,
        ge=0,
        description=(
            "Factor of the experts' load-balance loss. Raise it if some experts go unused."
            " Default: the model's own."
        ),
    )
    diagnostics_every: int = Field(
        default=10,
        ge=0,
        description=(
            "Steps between measurements of lost updates, of codes and bfloat16 roundings that"
            " change, of the sources of the log-ratio and, with ratio_from sampler, of the update's"
            " size. Set 0 for none, which saves a little time."
        ),
    )

    @property
    def base_on_host(self) -> bool:
        """Return whether LoRA's frozen matrices are offloaded to the host's memory."""
        return isinstance(self.lora, LoraConfig) and self.lora.base == "host"

    @model_validator(mode="before")
    @classmethod
    def _objective_defaults(cls, data: Any) -> Any:
        """Fill in the objective's own correction and aggregation if none is named."""
        if not isinstance(data, dict):
            return data
        objective = data.get("objective", {})
        if isinstance(objective, dict):
            name = objective.get("name", "tbpo")
        else:
            name = getattr(objective, "name", None)
        section = next((s for s in get_args(AnyObjective) if name in s.names()), TbpoConfig)
        defaults = {
            "correction": section.default_correction,
            "aggregation": {"name": section.default_aggregation},
        }
        filled = dict(data)
        for part, default in defaults.items():
            options = data.get(part, {})
            if isinstance(options, dict) and "name" not in options:
                options = {**default, **options}
            filled[part] = options
        return filled

    @model_validator(mode="after")
    def _compatible(self) -> "LearnerConfig":
        _check_objective(self)
        _check_precisions(self)
        return self


def _check_objective(learner: LearnerConfig) -> None:
    """Raise `ValueError` if two settings contradict each other, or if one would have no effect."""
    name = learner.objective.name
    uses_ratio = learner.objective.uses_ratio
    denominator = ratio_from(learner.correction)
    updates = learner.mini_batches
    shadow = learner.ratio_fix == "shadow_forward"
    if name == "on_policy" and updates != 1:
        raise ValueError(
            f"objective 'on_policy' has one update a batch, but learner.mini_batches is {updates};"
            " set it to 1"
        )
    if not uses_ratio and denominator != "learner":
        raise ValueError(
            f"objective {name!r} has no ratio, so learner.correction.ratio_from {denominator!r}"
            " has no effect; omit it"
        )
    if shadow and not uses_ratio:
        raise ValueError(
            f"learner.ratio_fix 'shadow_forward' is for objectives with a ratio; {name!r} has none"
        )
    if shadow and learner.aligned:
        raise ValueError(
            "learner.ratio_fix 'shadow_forward' adds a forward in the engine's precision to one"
            " without, but with learner.aligned true the forward has that precision already; set"
            " ratio_fix none, or aligned false"
        )


def _check_precisions(learner: LearnerConfig) -> None:
    """Raise `ValueError` if a precision option has no effect under the other options."""
    optimizer = learner.optimizer
    default_momentum = OptimizerConfig.model_fields["momentum"].default
    if optimizer.name == "adamw" and optimizer.momentum != default_momentum:
        raise ValueError(
            f"learner.optimizer.momentum {optimizer.momentum} is Muon's, and adamw has betas: omit"
            " it"
        )
    if learner.aligned and learner.compute_dtype is not None:
        raise ValueError(
            f"learner.compute_dtype {learner.compute_dtype!r} with learner.aligned true: an aligned"
            " learner multiplies the engine's codes in the engine's dtype; set dtype for both, or"
            " learner.aligned false"
        )
    if learner.lora.name == "lora" and optimizer.rounding is not None:
        raise ValueError(
            f"learner.optimizer.rounding {optimizer.rounding!r} is of 16-bit masters that are"
            " stepped; LoRA steps fp32 adapters over a frozen base: omit it"
        )
    if learner.master_dtype == "float32" and optimizer.rounding == "stochastic":
        raise ValueError(
            f"learner.optimizer.rounding {optimizer.rounding!r} is for 16-bit masters;"
            " learner.master_dtype 'float32' holds the updates as they are: leave the rounding out,"
            " or choose master_dtype bfloat16 or float16"
        )
    if learner.deepspeed is not None:
        _check_deepspeed(learner)
    if learner.lora.name == "lora" and learner.reduce_dtype != "float32":
        raise ValueError(
            f"learner.reduce_dtype {learner.reduce_dtype!r} is of masters that processes share;"
            " LoRA's factors are whole in each, and their gradients small: omit it"
        )


def _check_deepspeed(learner: LearnerConfig) -> None:
    """Raise `ValueError` for an option of the learner's own optimizer beside a DeepSpeed file."""
    optimizer = learner.optimizer
    rules = (
        ("learner.optimizer.name", optimizer.name, "adamw", "it steps by AdamW"),
        ("learner.optimizer.offload", optimizer.offload, "none", "its offload_optimizer decides"),
        ("learner.master_dtype", learner.master_dtype, "float32", "it steps float32 masters"),
        ("learner.reduce_dtype", learner.reduce_dtype, "float32", "it adds gradients in float32"),
    )
    for name, value, needed, reason in rules:
        if value != needed:
            raise ValueError(
                f"learner.deepspeed {learner.deepspeed!r} with {name} {value!r}: {reason}; set"
                f" {name} {needed}, or leave learner.deepspeed out"
            )
