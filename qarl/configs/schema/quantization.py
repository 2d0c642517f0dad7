"""Section `quantization`: codes and scales of a weight version (docs/guide/scales.md)."""

from typing import Literal

from pydantic import Field, model_validator

from qarl.configs.schema.base import Section

ScaleRule = Literal["minmax", "kept"]


class QuantizationConfig(Section):
    """Quantization of masters to codes within a scheme."""

    scale: ScaleRule = Field(
        default="minmax",
        description=(
            "Scales of the codes (docs/guide/scales.md). With minmax, from each version's"
            " extremes; with kept, the first version's, for integer weights."
        ),
    )
    init: Literal["gptq"] | None = Field(
        default=None,
        description=(
            "Codes to start from. Set gptq for llmcompressor's, calibrated on the task. Default:"
            " rounded masters."
        ),
    )
    kv_cache: Literal["fp8"] | None = Field(
        default=None,
        description=(
            "Dtype of keys and values in sampler, learner and export alike. Set fp8, which is"
            " e4m3, to halve their memory. Default: `dtype`."
        ),
    )

    @model_validator(mode="after")
    def _keeps_what_it_starts_from(self) -> "QuantizationConfig":
        if self.init is not None and self.scale != "kept":
            raise ValueError(
                f"quantization.init {self.init!r} needs quantization.scale 'kept', not"
                f" {self.scale!r}, which would replace the calibrated codes by rounded ones at the"
                " first step"
            )
        return self
