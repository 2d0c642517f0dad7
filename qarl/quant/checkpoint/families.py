"""Checkpoint names of a model's weights, according to transformers.

transformers 5 holds a layer's experts as two 3-D parameters, `experts.gate_up_proj` [E, 2I, H] and
`experts.down_proj` [E, H, I]. Checkpoints and vLLM name each of an expert's three matrices, and
name some modules differently. The conversions by which transformers loads and saves checkpoints
define these names. tests/quant/test_layout.py compares them with what `save_pretrained` writes.

gpt-oss has both parameters transposed, [E, H, 2I] and [E, I, H], with the columns of gate and up
alternating, and a bias of each. Its checkpoints have them as they are. Nemotron-H's experts have no
gate: the first parameter is `experts.up_proj` [E, I, H].

Axes: E experts, H hidden columns, I expert columns.
"""

import functools
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from torch.nn.modules.conv import _ConvNd
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.core_model_loading import Transpose

from qarl.quant.checkpoint.settings import EXPERTS_A_TOKEN
from qarl.quant.checkpoint.text_class import conversions
from qarl.quant.checkpoint.whole import whole_of
from qarl.quant.schemes import SchemeError

STACKED: Mapping[str, tuple[str, ...]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "in_proj_qkvz": ("in_proj_qkv", "in_proj_z"),
}
"""vLLM's `packed_modules_mapping` of most decoders: a module that it multiplies as one → its parts.

All parts of a module have one scheme and one tensor-wide scale.
"""

SWIGLUOAI = "swigluoai"
"""vLLM's name of gpt-oss's gate: rows of gate and up alternate, both are limited, and their product
is (up + 1) · gate · σ(slope · gate).
"""
SWIGLUOAI_SLOPE = 1.702
"""Slope of that gate. vLLM 0.32 has this one whatever config.json says."""
SWIGLUOAI_LIMIT = 7.0
"""Upper bound of that gate, and of the absolute value of up; likewise."""

_ACTIVATIONS = ("hidden_activation", "hidden_act", "mlp_hidden_act")
"""Fields of configurations that name the activation of experts."""

_EACH = re.compile(r"(.*)\.experts\.\*\.(\w+)\.weight")


@dataclass(frozen=True)
class ExpertLayout:
    """A checkpoint's names of an expert's matrices."""

    gate: str = "gate_proj"
    """Name of the gate projection; "" if experts have none (Nemotron-H)."""
    up: str = "up_proj"
    """Name of the up projection."""
    down: str = "down_proj"
    """Name of the down projection."""
    stacked: bool = False
    """True if an unquantized checkpoint has a layer's experts in two tensors, as transformers does
    (Granite, Gemma 4). Quantized checkpoints always name each matrix, as vLLM reads them.
    """
    transposed: bool = False
    """True if masters and checkpoint have the two tensors transposed, [E, H, 2I] and [E, I, H]."""
    stored_transposed: bool = False
    """True if an unquantized checkpoint has them transposed, and masters have not (Qwen3-VL)."""

    @property
    def projections(self) -> tuple[str, ...]:
        """Names of gate, if there is one, up and down, in checkpoint order."""
        return (self.gate, self.up, self.down) if self.gated else (self.up, self.down)

    @property
    def gated(self) -> bool:
        """Whether the first product has a gate beside the up projection."""
        return bool(self.gate)

    @property
    def first_stack(self) -> str:
        """transformers' name of the parameter with all experts' first matrices."""
        return "gate_up_proj" if self.gated else "up_proj"


@dataclass(frozen=True)
class ExpertsShape:
    """Sizes, activation and names of a layer's experts."""

    experts: int
    """Number of experts, E."""
    top_k: int
    """Number of experts a token is routed to, K."""
    hidden: int
    """Hidden columns, H."""
    intermediate: int
    """Expert columns, I."""
    activation: str
    """Activation of the gate, or of the up projection if there is no gate, by transformers' name
    ("silu"), or `SWIGLUOAI`.
    """
    layout: ExpertLayout
    """The checkpoint's names of the matrices."""
    biased: bool = False
    """True if both products have a bias."""


@dataclass(frozen=True)
class Family:
    """The checkpoint names of one architecture's weights."""

    experts: ExpertLayout = ExpertLayout(stacked=True)
    """Names of experts' matrices, if the architecture has experts."""
    renamed: tuple[tuple[str, str], ...] = ()
    """(transformers' name, the checkpoint's name) of other parts of names that differ."""
    prefixes: tuple[tuple[str, str], ...] = ()
    """(beginning of a name, beginning of the checkpoint's name) if the model is a part of another
    one (`quant.checkpoint.whole`). The first that fits is taken.
    """

    def checkpoint_name(self, name: str) -> str:
        """Return the checkpoint's name of a module or parameter."""
        dotted = f"{name}."
        for ours, written in self.renamed:
            dotted = dotted.replace(ours, written)
        for ours, written in self.prefixes:
            if dotted.startswith(ours):
                return (written + dotted.removeprefix(ours))[:-1]
        return dotted[:-1]


def names_of(config: PreTrainedConfig) -> Family:
    """Return the names of a model in its checkpoint, which may have other parts beside it."""
    whole = whole_of(config)
    family = family_of(config.model_type)
    return family if whole is None else replace(family, prefixes=whole.prefixes)


@functools.cache
def family_of(model_type: str) -> Family:
    """Return the names of a transformers `model_type`.

    Architectures without conversions have transformers' own names.
    """
    experts = {}
    renamed = []
    turned = False
    conversion: Any
    for conversion in conversions(model_type):
        sources = conversion.source_patterns
        targets = conversion.target_patterns
        operations = getattr(conversion, "operations", None) or ()
        each = [_EACH.fullmatch(source) for source in sources]
        if len(targets) == 1 and all(each):
            experts[targets[0].rpartition(".")[2]] = [match[2] for match in each if match]
        elif targets == ["mlp.experts.gate_up_proj"] == sources:
            turned = [type(operation) for operation in operations] == [Transpose]
        elif len(sources) == len(targets) == 1 and not operations:
            # Of a parameter's name only its module's part counts.
            suffix = ".weight" if targets[0].endswith(".weight") else ""
            ours = _plain(targets[0], suffix)
            written = _plain(sources[0], suffix)
            if ours and written:
                renamed.append((ours, written))
    layout = replace(Family.experts, stored_transposed=turned)
    if experts.keys() == {"gate_up_proj", "down_proj"} and len(experts["gate_up_proj"]) == 2:
        layout = ExpertLayout(*experts["gate_up_proj"], *experts["down_proj"])
    elif experts.keys() == {"up_proj", "down_proj"}:
        layout = ExpertLayout("", *experts["up_proj"], *experts["down_proj"])
    return Family(layout, tuple(renamed))


def _plain(pattern: str, suffix: str) -> str:
    """Return a name in a pattern, with dots around it; "" if the pattern is no plain name.

    suffix: removed from the end first.
    """
    name = pattern.replace("\\.", ".").removesuffix(suffix).strip(".")
    return f".{name}." if re.fullmatch(r"[\w.]+", name) else ""


def experts_per_token(config: PreTrainedConfig) -> int:
    """Return K, the number of experts a token is routed to, whatever the configuration calls it."""
    return next(
        int(getattr(config, name)) for name in EXPERTS_A_TOKEN if getattr(config, name, None)
    )


def fused_experts(model: PreTrainedModel) -> Iterator[tuple[str, nn.Module]]:
    """Yield the name and module of every module of fused experts.

    A convolution is none, nor is anything in a model whose configuration knows no experts: such
    modules stay in the compute dtype, whatever the shape of their weights.

    Raises `SchemeError` for a mixture of experts with other 3-D parameters of an unknown layout,
    because these would be missed otherwise, and for gpt-oss's with another gate than vLLM's.
    """
    if not _has_experts(model.config):
        return
    for name, module in model.named_modules():
        stacks = {key for key, p in module.named_parameters(recurse=False) if p.ndim == 3}
        if not stacks or isinstance(module, _ConvNd):
            continue
        beside = sorted({key for key, _ in module.named_parameters()} - stacks)
        if is_gpt_oss(module):
            _refuse_other_gates(name, module)
            yield name, module
            continue
        layout = names_of(model.config).experts
        known = stacks == {layout.first_stack, "down_proj"} and _rows_first(module, layout)
        if not known or beside:
            others = f" beside {beside}" if beside else ""
            unknown = _unknown_layout(module, stacks)
            raise SchemeError(
                f"{name!r} of model type {model.config.model_type!r} is a {type(module).__name__}"
                f" of 3-D weights {sorted(stacks)}{others}{unknown}; known are"
                " mixtures of experts with gate_up_proj [E, 2I, H] and down_proj [E, H, I], and no"
                " biases, gpt-oss's, and Nemotron-H's without a gate; take another model"
            )
        yield name, module


def stacks_stored_transposed(model: PreTrainedModel) -> set[str]:
    """Return the names of the experts' stacks that the checkpoint has transposed, and masters not.

    Raises `SchemeError` for stacks of square matrices: transformers tells by their shape whether
    they are transposed, and vLLM always transposes.
    """
    if not names_of(model.config).experts.stored_transposed:
        return set()
    names = set()
    for layer, experts in fused_experts(model):
        for name, stack in experts.named_parameters():
            if stack.shape[1] == stack.shape[2]:
                raise SchemeError(
                    f"{layer}.{name} has square matrices of {stack.shape[1]} columns: transformers"
                    f" would read the checkpoint of a {model.config.model_type!r} as if it were not"
                    " transposed; take a model with other sizes (hidden_size,"
                    " moe_intermediate_size)"
                )
            names.add(f"{layer}.{name}")
    return names


def _unknown_layout(experts: nn.Module, stacks: Collection[str]) -> str:
    """Return what is unknown about a layer's experts, in words after a comma; "" if only names are.

    stacks: names of the 3-D parameters.
    """
    if stacks != {"gate_up_proj", "down_proj"}:
        return ""
    merged, down = (experts.get_parameter(key).shape for key in ("gate_up_proj", "down_proj"))
    if len(merged) == len(down) == 3 and merged[0] != down[0]:
        return (
            f", of which {merged[0] - down[0]} return their input and have no down_proj (LongCat's"
            " zero experts)"
        )
    if "Llama4" in type(experts).__name__:
        return ", which are transposed and whose inputs the router weighs (Llama 4)"
    return ", which are transposed, [E, H, 2I] and [E, I, H]"


def _has_experts(config: PreTrainedConfig) -> bool:
    """Return whether a field of the configuration gives a number of experts, by any name."""
    fields = config.get_text_config().to_dict()
    return any("expert" in name and bool(value) for name, value in fields.items()) or any(
        fields.get(name) for name in EXPERTS_A_TOKEN
    )


def is_gpt_oss(experts: nn.Module) -> bool:
    """Return whether these experts have the layout of gpt-oss, by transformers' marks."""
    marks = ("is_transposed", "has_bias", "is_concatenated")
    is_alternating = [getattr(experts, mark, None) for mark in marks] == [True, True, False]
    names = {name for name, _ in experts.named_parameters()}
    stacks = {"gate_up_proj", "down_proj"}
    return is_alternating and names == stacks | {f"{stack}_bias" for stack in stacks}


def _refuse_other_gates(name: str, experts: nn.Module) -> None:
    """Raise `SchemeError` for a slope or a limit of gpt-oss's gate that vLLM would not compute."""
    gate = getattr(experts, "alpha", None), getattr(experts, "limit", None)
    if gate != (SWIGLUOAI_SLOPE, SWIGLUOAI_LIMIT):
        raise SchemeError(
            f"{name!r} has gates of slope {gate[0]} and limit {gate[1]} (swiglu_alpha, swiglu_limit"
            f" in config.json), and vLLM computes {SWIGLUOAI_SLOPE} and {SWIGLUOAI_LIMIT} whatever"
            " config.json says; take a model with these"
        )


def expert_sizes(experts: nn.Module) -> tuple[int, int, int]:
    """Return E, H and I of a module of fused experts."""
    count, rows, columns = experts.get_parameter("down_proj").shape
    return (count, columns, rows) if is_gpt_oss(experts) else (count, rows, columns)


def experts_shape(
    experts: nn.Module, layout: ExpertLayout, config: PreTrainedConfig
) -> ExpertsShape:
    """Return the sizes, names and activation of a module of fused experts.

    layout: names of the family's experts. config: the model's configuration. Raises `SchemeError`
    if the activation is unknown.
    """
    count, hidden, intermediate = expert_sizes(experts)
    alternates = is_gpt_oss(experts)
    names = (getattr(config, key, None) for key in _ACTIVATIONS)
    # LFM2's configuration has none, and its experts a function of torch's.
    plain = next(filter(None, names), None) or getattr(
        getattr(experts, "act_fn", None), "__name__", ""
    )
    if not plain and not alternates:
        raise SchemeError(
            f"model type {config.model_type!r} does not say which activation its experts have; name"
            " it as hidden_act in config.json"
        )
    return ExpertsShape(
        experts=count,
        top_k=experts_per_token(config),
        hidden=hidden,
        intermediate=intermediate,
        activation=SWIGLUOAI if alternates else plain,
        layout=replace(layout, transposed=alternates),
        biased=alternates,
    )


def _rows_first(experts: nn.Module, layout: ExpertLayout) -> bool:
    """Return whether these are [E, 2I, H] and [E, H, I] of the same experts, or [E, I, H] and
    [E, H, I] without a gate, and not transposed (Llama 4, gpt-oss).
    """
    (count, merged, hidden), (all_experts, rows, columns) = (
        experts.get_parameter(key).shape for key in (layout.first_stack, "down_proj")
    )
    matrices = 2 if layout.gated else 1
    is_plain = (count, merged, hidden) == (all_experts, matrices * columns, rows)
    return is_plain and not getattr(experts, "is_transposed", False)
