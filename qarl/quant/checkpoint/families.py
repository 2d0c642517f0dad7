"""How checkpoints name a model's weights, by transformers' own account of its architectures.

transformers 5 holds a layer's experts as two 3-D parameters, `experts.gate_up_proj` [E, 2I, H] and
`experts.down_proj` [E, H, I]. Checkpoints and vLLM name every expert's three matrices, and some
modules in other words; the conversions by which transformers loads and saves them say which.
tests/quant/test_layout.py holds the names to what `save_pretrained` writes.

Axes: E experts, H hidden columns, I expert columns.
"""

import functools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

from qarl.quant.checkpoint.folder import EXPERTS_A_TOKEN
from qarl.quant.runtime.shards import whole_shape
from qarl.quant.schemes import SchemeError

STACKED: Mapping[str, tuple[str, ...]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
"""vLLM's `packed_modules_mapping` of most decoders: what it multiplies as one, and so gives one
scheme and one tensor-wide scale → its parts.
"""

_EACH = re.compile(r"(.*)\.experts\.\*\.(\w+)\.weight")


@dataclass(frozen=True)
class ExpertLayout:
    """A checkpoint's names of an expert's matrices. stacked: an unquantized one has a layer's
    experts in two tensors, as transformers has them (Granite, Gemma 4); quantized ones name each
    matrix, as vLLM reads them.
    """

    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    stacked: bool = False

    @property
    def projections(self) -> tuple[str, str, str]:
        """Gate, up and down, in checkpoint order."""
        return self.gate, self.up, self.down


@dataclass(frozen=True)
class ExpertsShape:
    """A layer's experts. experts: E. top_k: K experts a token. hidden: H. intermediate: I.
    activation: between gate and down projection, by transformers' name ("silu"). layout: the
    checkpoint's names.
    """

    experts: int
    top_k: int
    hidden: int
    intermediate: int
    activation: str
    layout: ExpertLayout


@dataclass(frozen=True)
class Family:
    """The names of one architecture's weights. experts: of experts' matrices, where it has any.
    renamed: parts of other names that differ, (transformers', the checkpoint's).
    """

    experts: ExpertLayout = ExpertLayout(stacked=True)
    renamed: tuple[tuple[str, str], ...] = ()

    def checkpoint_name(self, name: str) -> str:
        """A module's or parameter's name as checkpoints have it."""
        dotted = f"{name}."
        for ours, written in self.renamed:
            dotted = dotted.replace(ours, written)
        return dotted[:-1]


@functools.cache
def family_of(model_type: str) -> Family:
    """The names of a transformers `model_type`. Those without conversions are in transformers' own
    names.
    """
    experts, renamed = {}, []
    conversion: Any
    for conversion in get_checkpoint_conversion_mapping(model_type) or ():
        sources, targets = conversion.source_patterns, conversion.target_patterns
        each = [_EACH.fullmatch(source) for source in sources]
        if len(targets) == 1 and all(each):
            experts[targets[0].rpartition(".")[2]] = [match[2] for match in each if match]
        elif len(sources) == len(targets) == 1 and not getattr(conversion, "operations", None):
            # of a module's name, not of a parameter's
            suffix = ".weight" if targets[0].endswith(".weight") else ""
            ours, written = (_plain(pattern, suffix) for pattern in (targets[0], sources[0]))
            if ours and written:
                renamed.append((ours, written))
    layout = Family.experts
    if experts.keys() == {"gate_up_proj", "down_proj"} and len(experts["gate_up_proj"]) == 2:
        layout = ExpertLayout(*experts["gate_up_proj"], *experts["down_proj"])
    return Family(layout, tuple(renamed))


def _plain(pattern: str, suffix: str) -> str:
    """A part of a name out of a pattern, dots around it; "" for what is no plain name. suffix: not
    to be in it.
    """
    name = pattern.replace("\\.", ".").removesuffix(suffix).strip(".")
    return f".{name}." if re.fullmatch(r"[\w.]+", name) else ""


def experts_per_token(config: PreTrainedConfig) -> int:
    """K, by whichever name a configuration has it."""
    return next(
        int(getattr(config, name)) for name in EXPERTS_A_TOKEN if getattr(config, name, None)
    )


def fused_experts(model: PreTrainedModel) -> Iterator[tuple[str, nn.Module]]:
    """Every module of fused experts, by name.

    Raises `SchemeError` for a model whose 3-D parameters are of no layout known here: they would be
    missed.
    """
    for name, module in model.named_modules():
        three = {
            key for key, p in module.named_parameters(recurse=False) if len(whole_shape(p)) == 3
        }
        if not three:
            continue
        known = three == {"gate_up_proj", "down_proj"} and _gate_rows_first(module)
        if not known or any(key not in three for key, _ in module.named_parameters()):
            beside = sorted({key for key, _ in module.named_parameters()} - three)
            raise SchemeError(
                f"{name!r} of model type {model.config.model_type!r} is a {type(module).__name__}"
                f" of 3-D weights {sorted(three)}{f' beside {beside}' if beside else ''}; known are"
                " mixtures of experts with gate_up_proj [E, 2I, H] and down_proj [E, H, I], and no"
                " biases"
            )
        yield name, module


def _gate_rows_first(experts: nn.Module) -> bool:
    """Whether these are [E, 2I, H] and [E, H, I], and not their transposes (Llama 4, gpt-oss)."""
    (_, merged, hidden), (_, rows, columns) = (
        whole_shape(experts.get_parameter(key)) for key in ("gate_up_proj", "down_proj")
    )
    return (merged, hidden) == (2 * columns, rows) and not getattr(experts, "is_transposed", False)
