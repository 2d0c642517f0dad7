"""Where a weight version's codes and scales come from: `quantization.*` of the configuration. docs/guide/scales.md"""

from collections.abc import Sequence
from typing import Literal

from pydantic import Field, model_validator

from qarl.configs.schema.base import Section, refuse
from qarl.configs.schema.learner import LearnerConfig

ScaleRule = Literal["minmax", "kept"]


class QuantizationConfig(Section):
    """How masters become codes within a scheme."""

    scale: ScaleRule = Field(
        default="minmax",
        description="minmax: of each version's extremes; kept: the first version's, for integer weights "
        "(docs/guide/scales.md)",
    )
    init: Literal["gptq"] | None = Field(
        default=None,
        description="gptq: start from llmcompressor's codes, calibrated on the task; without it from rounded masters",
    )
    kv_cache: Literal["fp8"] | None = Field(
        default=None,
        description="fp8: keys and values in e4m3, half their memory, of sampler, learner and export alike; without it "
        "in `dtype`",
    )

    @model_validator(mode="after")
    def _keeps_what_it_starts_from(self) -> "QuantizationConfig":
        if self.init is not None and self.scale != "kept":
            raise ValueError(
                f"quantization.init {self.init!r} needs quantization.scale 'kept', not {self.scale!r}, which would "
                "replace the calibrated codes by rounded ones at the first step"
            )
        return self


def refuse_calibrated_start(init: str, learner: LearnerConfig, layers: Sequence[object]) -> None:
    """Raise `ValueError` where llmcompressor cannot quantize so, or a learner has no place for masters that are not the
    model folder's. layers: the run's rules."""
    rules, kl, stage = ", ".join(map(str, layers)), learner.kl.name, learner.zero_stage
    faults = {
        f"with layers {rules}: llmcompressor quantizes a model in one scheme": layers,
        "with learner.lora.name 'lora': a checkpoint of adapters holds no base, and this one is not the model "
        "folder's": learner.lora.name != "none",
        f"with learner.kl.name {kl!r}: the penalty's reference is rounded from the model folder, and is not the policy "
        "that starts": kl != "none",
        f"is for one process without ZeRO, not for learner.zero_stage {stage}": stage is not None,
    }
    refuse({f"quantization.init {init!r} {fault}; leave one of them out": there for fault, there in faults.items()})
