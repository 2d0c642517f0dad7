"""How the policy is learned: `learner.*` of the configuration."""

from typing import Annotated, Any, Literal, get_args

from pydantic import Field, model_validator

from qarl.configs.schema.base import Dtype, Section, refuse
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
    """Which optimizer steps the masters."""

    name: Literal["adamw", "muon"] = Field(
        default="muon",
        description="muon: matrices by Muon, the rest by AdamW; adamw: the usual choice elsewhere",
    )
    lr: float = Field(
        default=1e-6,
        gt=0,
        le=1,
        description="learning rate (Muon's is scaled to AdamW's update size)",
    )
    weight_decay: float = Field(
        default=0.01,
        ge=0,
        le=1,
        description="decoupled, a step and unit of learning rate",
    )
    grad_clip: float = Field(default=1.0, gt=0, description="bound on the global gradient norm")
    warmup_steps: int = Field(
        default=0, ge=0, description="first steps, over which the rate rises linearly"
    )
    decay_steps: int = Field(
        default=0, ge=0, description="last steps, over which the rate falls linearly"
    )
    betas: tuple[_Beta, _Beta] = Field(
        default=(0.9, 0.95), description="AdamW: decay of its two moving averages"
    )
    momentum: float = Field(
        default=0.95, ge=0, lt=1, description="Muon: decay of its moving average"
    )
    rounding: Literal["nearest", "stochastic"] | None = Field(
        default=None,
        description=(
            "of 16-bit masters after their step (docs/guide/precision.md); without it stochastic, "
            "nearest for fp32"
        ),
    )
    offload: Literal["none", "cpu"] = Field(
        default="none", description="cpu: state in the host's memory between steps"
    )

    def rounding_of(self, master_dtype: str) -> Literal["nearest", "stochastic"]:
        """How masters of that dtype are rounded."""
        return self.rounding or ("nearest" if master_dtype == "float32" else "stochastic")


class LearnerConfig(Section):
    """How the policy is learned."""

    aligned: bool = Field(
        default=True,
        description="multiply the sampler's own codes; false: a plain 16-bit learner",
    )
    objective: ObjectiveChoice = Field(default_factory=TbpoConfig)
    correction: CorrectionChoice = Field(default_factory=TruncatedConfig)
    aggregation: AggregationChoice = Field(default_factory=MeanAggregation)
    kl: KlChoice = Field(default_factory=NoKl)
    lora: LoraChoice = Field(default_factory=NoLora)
    optimizer: OptimizerConfig = Field(default_factory=lambda: OptimizerConfig())
    zero_stage: Literal[0, 1, 2, 3] | None = Field(
        default=None,
        description="ZeRO stage, higher for larger models; without it 0; in one process, none",
    )
    advantage: Literal["grpo", "dr_grpo", "rloo"] = Field(
        default="grpo",
        description=(
            "reward minus group mean, grpo: over its deviation; dr_grpo: not over it; rloo: mean of"
            " the others"
        ),
    )
    ratio_fix: Literal["none", "shadow_forward"] = Field(
        default="none",
        description=(
            "shadow_forward: ratios from the published codes, for an unaligned learner whose clip"
            " cuts tokens for precision alone (docs/reference/objectives.md)"
        ),
    )
    mini_batches: int = Field(
        default=4,
        ge=1,
        description="optimizer steps a batch; 1 for strictly on-policy learning",
    )
    micro_batch_tokens: int = Field(
        default=16384,
        ge=1,
        description="tokens a forward, padding too unless packed; lower it where memory is short",
    )
    packing: bool | Literal["auto"] = Field(
        default="auto",
        description=(
            "sequences one after the other, without padding; auto: where learner.operators are the"
            " engine's"
        ),
    )
    share_prompts: bool | Literal["auto"] = Field(
        default="auto",
        description=(
            "compute a prompt once for all its completions in a forward; auto: packed on CPUs "
            "(docs/explain/learner.md)"
        ),
    )
    logprob_chunk_tokens: int = Field(
        default=512, ge=1, description="tokens whose logits are in memory at once"
    )
    gradient_checkpointing: bool | Literal["auto"] = Field(
        default="auto",
        description=(
            "compute decoder layers again in the backward: less memory, more time; auto: on GPUs"
            " where `qarl plan` needs it"
        ),
    )
    keep_codes: bool = Field(
        default=True,
        description=(
            "false: make low-bit codes again from the masters for every publish and backward; less"
            " memory, more time, and no flipped codes are counted"
        ),
    )
    keep_kernel_layout: bool = Field(
        default=True,
        description=(
            "false: lay codes out for the kernel again at every forward of a layer, where the"
            " engine is elsewhere (rollout.servers); with keep_codes false, a process holds one"
            " layer's"
        ),
    )
    input_gradients: Literal["auto", "exact", "compute"] = Field(
        default="auto",
        description=(
            "exact: through weights in fp32; compute: rounded to the compute dtype, as most kernels"
            " multiply them; auto: compute where the device multiplies that dtype natively"
            " (docs/explain/learner.md)"
        ),
    )
    reduce_dtype: Literal["float32", "bfloat16"] = Field(
        default="float32",
        description=(
            "in which ZeRO-3's processes send each other gradients, added up in fp32; bfloat16"
            " halves what is sent, for slow networks"
        ),
    )
    compile: bool | Literal["auto"] = Field(
        default="auto",
        description=(
            "torch.compile the backwards of norms and gated MLPs; start-up takes longer; auto: on"
            " GPUs with the engine's operators"
        ),
    )
    master_dtype: Dtype = Field(
        default="float32",
        description="bfloat16 halves their memory (docs/guide/precision.md)",
    )
    compute_dtype: Dtype | None = Field(
        default=None, description="an unaligned learner's; without it the run's dtype"
    )
    kernel: Literal["auto", "vllm", "reference"] = Field(
        default="auto",
        description=(
            "the learner's products; auto: vLLM's, without vLLM reference: of dequantized codes"
        ),
    )
    operators: Literal["auto", "engine", "transformers"] = Field(
        default="auto",
        description="engine: vLLM's own model; auto: where it can be (docs/explain/families.md)",
    )
    router_aux_loss: float | None = Field(
        default=None,
        ge=0,
        description=(
            "factor of the experts' load-balance loss, against unused ones; without it the model's"
        ),
    )
    diagnostics_every: int = Field(
        default=10,
        ge=0,
        description=(
            "steps between measurements of lost updates, codes and bfloat16 roundings that change,"
            " where the log-ratio comes from and, with ratio_from sampler, the update's size; 0:"
            " never, saves a little time"
        ),
    )

    @property
    def base_on_host(self) -> bool:
        """Whether LoRA's frozen matrices wait in the host's memory."""
        return isinstance(self.lora, LoraConfig) and self.lora.base == "host"

    @model_validator(mode="before")
    @classmethod
    def _objective_defaults(cls, data: Any) -> Any:
        """Correction and aggregation, where none is named, are the objective's own."""
        if not isinstance(data, dict):
            return data
        objective = data.get("objective", {})
        name = (
            objective.get("name", "tbpo")
            if isinstance(objective, dict)
            else getattr(objective, "name", None)
        )
        section = next((s for s in get_args(AnyObjective) if name in s.names()), TbpoConfig)
        defaults = {
            "correction": section.default_correction,
            "aggregation": {"name": section.default_aggregation},
        }
        filled = dict(data)
        for part, default in defaults.items():
            options = data.get(part, {})
            filled[part] = (
                {**default, **options}
                if isinstance(options, dict) and "name" not in options
                else options
            )
        return filled

    @model_validator(mode="after")
    def _compatible(self) -> "LearnerConfig":
        refuse(_contradictions(self))
        refuse(_idle_precisions(self))
        return self


def _contradictions(learner: LearnerConfig) -> dict[str, bool]:
    """What is wrong where two settings of a learner contradict each other, or one would do
    nothing.
    """
    name, denominator, updates = (
        learner.objective.name,
        ratio_from(learner.correction),
        learner.mini_batches,
    )
    uses_ratio, shadow = (
        learner.objective.uses_ratio,
        learner.ratio_fix == "shadow_forward",
    )
    several, shared = (
        name == "on_policy" and updates != 1,
        learner.base_on_host and learner.zero_stage == 3,
    )
    return {
        f"objective 'on_policy' has one update a batch, but learner.mini_batches is {updates}; set it to 1": (
            several
        ),
        f"objective {name!r} has no ratio, so learner.correction.ratio_from {denominator!r} would do nothing; leave it out": (
            not uses_ratio and denominator != "learner"
        ),
        f"learner.ratio_fix 'shadow_forward' is for objectives with a ratio; {name!r} has none": (
            shadow and not uses_ratio
        ),
        "learner.lora.base 'host' with learner.zero_stage 3, which shares the frozen matrices out over GPUs already; leave one of them out": (
            shared
        ),
        "learner.ratio_fix 'shadow_forward' adds a forward in the engine's precision to one without, but with learner.aligned true the forward has that precision already; set ratio_fix none, or aligned false": (
            shadow and learner.aligned
        ),
    }


def _idle_precisions(learner: LearnerConfig) -> dict[str, bool]:
    """What is wrong with a precision option that the other options leave nothing to do."""
    rounding, reduced, stage = (
        learner.optimizer.rounding,
        learner.reduce_dtype,
        learner.zero_stage,
    )
    aligned, whole = (
        learner.aligned and learner.compute_dtype is not None,
        learner.master_dtype == "float32",
    )
    momentum, of_adamw = learner.optimizer.momentum, learner.optimizer.name == "adamw"
    return {
        f"learner.optimizer.momentum {momentum} is Muon's, and adamw has betas: leave it out": (
            of_adamw and momentum != OptimizerConfig.model_fields["momentum"].default
        ),
        f"learner.compute_dtype {learner.compute_dtype!r} with learner.aligned true: an aligned learner multiplies the engine's codes in the engine's dtype; set dtype for both, or learner.aligned false": (
            aligned
        ),
        f"learner.optimizer.rounding {rounding!r} is of 16-bit masters that are stepped; LoRA steps fp32 adapters over a frozen base: leave it out": (
            learner.lora.name == "lora" and rounding is not None
        ),
        f"learner.optimizer.rounding {rounding!r} is for 16-bit masters; learner.master_dtype 'float32' holds the updates as they are: leave the rounding out, or choose master_dtype bfloat16 or float16": (
            whole and rounding == "stochastic"
        ),
        f"learner.reduce_dtype {reduced!r} with learner.zero_stage {stage} has nothing to do: ZeRO-3 alone sends them in a dtype of its own; set learner.zero_stage 3, or leave it out": (
            reduced != "float32" and stage != 3
        ),
    }
