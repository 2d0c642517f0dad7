"""Section `learner.lora`: low-rank adapters on frozen masters, or none (docs/guide/lora.md)."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, field_validator

from qarl.configs.schema.base import COMMA_SEPARATED, Choice, chooser, pattern_fault

_LORA = (
    "What is trained. Set lora for low-rank adapters over frozen masters (docs/guide/lora.md); none"
    " trains the masters."
)


class NoLora(Choice):
    """All masters are trained."""

    name: Literal["none"] = Field(default="none", description=_LORA)


class LoraConfig(Choice):
    """Adapted weights W + alpha/rank · B A, without dropout, because sampler and learner have to be
    one policy.
    """

    name: Literal["lora"] = Field(default="lora", description=_LORA)
    rank: int = Field(
        default=16,
        ge=1,
        description=(
            "Rank of the adapters: rows of A and columns of B. Raise it if they learn too little."
        ),
    )
    alpha: float = Field(
        default=32.0,
        gt=0,
        description="Scale of the adapters: the product B A is multiplied by alpha / rank.",
    )
    targets: Annotated[tuple[str, ...], COMMA_SEPARATED] = Field(
        default=(),
        description=(
            "Layers to adapt, PATTERN,… as in `layers`. Default: every linear layer of the decoder."
        ),
    )
    base: Literal["device", "host"] = Field(
        default="device",
        description=(
            "Where the frozen matrices wait. Set host, the host's memory, for models that fill a"
            " GPU: they come a layer at a time when a version is made."
        ),
    )

    @field_validator("targets")
    @classmethod
    def _readable(cls, targets: tuple[str, ...]) -> tuple[str, ...]:
        for pattern in targets:
            fault = pattern_fault(pattern)
            if fault:
                raise ValueError(f"LoRA target {pattern!r} {fault}")
        return targets


AnyLora = NoLora | LoraConfig
LoraChoice = Annotated[
    AnyLora,
    Field(discriminator="name"),
    BeforeValidator(chooser("LoRA setting", "learner.lora", AnyLora, "none")),
]
