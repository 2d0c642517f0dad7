"""Where a weight version's codes and scales come from: `quantization.*` of the configuration.
docs/guide/scales.md
"""

from typing import Literal

from pydantic import Field, model_validator

from qarl.configs.schema.base import Section

ScaleRule = Literal["minmax", "kept"]


class QuantizationConfig(Section):
    """How masters become codes within a scheme."""

    scale: ScaleRule = Field(
        default="minmax",
        description=(
            "minmax: of each version's extremes; kept: the first version's, for integer weights "
            "(docs/guide/scales.md)"
        ),
    )
    init: Literal["gptq"] | None = Field(
        default=None,
        description=(
            "gptq: start from llmcompressor's codes, calibrated on the task; without it from"
            " rounded masters"
        ),
    )
    kv_cache: Literal["fp8"] | None = Field(
        default=None,
        description=(
            "fp8: keys and values in e4m3, half their memory, of sampler, learner and export alike;"
            " without it in `dtype`"
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
