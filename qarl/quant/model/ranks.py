"""Whether a model's layers can be divided among the ranks of a tensor-parallel engine.

Axes: O output rows, I input columns.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from qarl.configs.errors import ConfigError
from qarl.configs.schemes import SCHEME_SPECS
from qarl.quant.checkpoint.families import family_of
from qarl.quant.checkpoint.plan import LayerPlan
from qarl.quant.kernels.supported import packs_bias, shape_refusal
from qarl.quant.model.layers import EngineModel

_VOCABULARY_PADDING = 64
"""Multiple to which vLLM pads the vocabulary before it divides it."""


def require_ranks(
    ranks: int,
    engine: EngineModel,
    config: Any,
    plan: LayerPlan,
    shapes: Mapping[str, tuple[int, int]],
    dtype: torch.dtype,
) -> None:
    """Raise `ConfigError` if this many ranks cannot divide the model, with the sizes that can.

    Args:
        ranks: `rollout.tensor_parallel_size`, more than 1.
        engine: vLLM's modules for the model.
        config: the transformers configuration of the language model.
        plan: the scheme of each layer.
        shapes: checkpoint layer name → (O, I) of its weight.
        dtype: the engine's compute dtype.
    """
    option = f"rollout.tensor_parallel_size {ranks}"
    if engine.ranks_refusal:
        raise ConfigError(
            f"{option}: {engine.ranks_refusal}, and the learner does not compute it so; omit it, or"
            " take a dense model of attention and MLPs"
        )

    def misfits(size: int) -> Iterator[str]:
        yield from _misfits(size, engine, config, plan, shapes, dtype)

    problem = next(misfits(ranks), "")
    if problem:
        heads = config.num_attention_heads
        able = [size for size in range(1, heads + 1) if not next(misfits(size), "")]
        raise ConfigError(f"{option}: {problem}; sizes that do: {', '.join(map(str, able))}")


def _misfits(
    ranks: int,
    engine: EngineModel,
    config: Any,
    plan: LayerPlan,
    shapes: Mapping[str, tuple[int, int]],
    dtype: torch.dtype,
) -> Iterator[str]:
    """Yield what `ranks` ranks cannot divide, in words."""
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    if heads % ranks:
        yield f"the model has {heads} attention heads"
    if kv_heads % ranks and ranks % kv_heads:
        yield f"the model has {kv_heads} heads of keys and values"
    padded = -(-config.vocab_size // _VOCABULARY_PADDING) * _VOCABULARY_PADDING
    if padded % ranks:
        yield f"the vocabulary has {padded} rows, padding included"
    down = family_of(config.model_type).experts.down
    yield from _experts_misfits(ranks, engine, down, plan, shapes, dtype)
    for name, divided in engine.divided.items():
        biased = ranks > 1 and divided == "columns" and name in engine.biased
        for number, layer in enumerate(engine.stacked[name]):
            rows, columns = shapes[layer]
            repeated = divided == "heads" and number > 0
            parts = min(ranks, kv_heads) if repeated else ranks
            by_columns = divided == "columns"
            if (columns if by_columns else rows) % parts:
                side = f"{columns} input columns" if by_columns else f"{rows} output rows"
                yield f"layer {layer!r} has {side}"
                continue
            own = (rows, columns // parts) if by_columns else (rows // parts, columns)
            scheme = plan.schemes[layer].name
            misfit = _misfit(scheme, own, dtype)
            if misfit:
                yield f"layer {layer!r} in {scheme!r} would have on each rank {misfit}"
            elif biased and packs_bias(scheme, dtype):
                yield f"layer {layer!r} has a bias, which {scheme!r} would add on each rank"


def _experts_misfits(
    ranks: int,
    engine: EngineModel,
    down_name: str,
    plan: LayerPlan,
    shapes: Mapping[str, tuple[int, int]],
    dtype: torch.dtype,
) -> Iterator[str]:
    """Yield what ranks cannot divide of experts, which all have their first one's shapes.

    down_name: the checkpoint's name of an expert's down projection.
    """
    for experts in engine.experts.values():
        matrices = {
            name: shape for name, shape in shapes.items() if name.startswith(f"{experts}.0.")
        }
        down = f"{experts}.0.{down_name}"
        inner = matrices[down][1]
        if inner % ranks:
            yield f"experts {experts!r} have {inner} columns between their matrices"
            continue
        for name, (rows, columns) in matrices.items():
            own = (rows, columns // ranks) if name == down else (rows // ranks, columns)
            scheme = plan.schemes[name].name
            misfit = _misfit(scheme, own, dtype)
            if misfit:
                yield f"expert {name!r} in {scheme!r} would have on each rank {misfit}"


def _misfit(scheme: str, shape: tuple[int, int], dtype: torch.dtype) -> str:
    """Return why a rank's part of a matrix, (O, I), cannot be held or multiplied; "" if it can.

    vLLM is asked for a linear layer of that shape, for experts' matrices, too.
    """
    misfit = SCHEME_SPECS[scheme].misfit(shape)
    if misfit:
        return misfit
    refusal = shape_refusal(scheme, dtype, shape)
    return f"{shape[0]} output rows and {shape[1]} input columns: {refusal}" if refusal else ""
