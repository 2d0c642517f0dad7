"""Tracing of the checkpoint tensors that each of vLLM's modules takes, through vLLM's own loader.

The model's `load_weights` runs over tensors without values, with weight loaders that record what
they are given. Renamings, stacked projections and fused checkpoints are therefore vLLM's business,
and no table of ours names a family. Some models (gpt-oss) copy into parameters themselves, which is
recorded, too.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from qarl.configs.errors import GraphError, NoEngineModelError
from qarl.quant.graph.skeleton import Skeleton, quiet
from qarl.quant.kernels.vllm import alone

_AVAILABLE = ". The available parameters"
"""Words of vLLM's error before a list of all names."""


@dataclass(frozen=True)
class Loading:
    """What vLLM loads into a model. Keys are (module, parameter) by vLLM's names."""

    sources: Mapping[tuple[str, str], list[str]]
    """Key → checkpoint names of the tensors, in the order of their rows."""
    copied: frozenset[tuple[str, str]]
    """Keys of parameters into which the model copies by itself, without a weight loader."""


def trace_loading(
    skeleton: Skeleton, shapes: Mapping[str, Sequence[int]], in_order: bool = True
) -> Loading:
    """Return which checkpoint tensors vLLM loads into each parameter.

    Raises `NoEngineModelError` if vLLM cannot load such a checkpoint.

    Args:
        skeleton: vLLM's model.
        shapes: checkpoint name → shape of each tensor.
        in_order: also raise `GraphError` if loading changes values or their order, and
            `NoEngineModelError` if vLLM's layers have other sizes.
    """
    taken: dict[tuple[str, str], list[tuple[Any, str]]] = {}
    rows: Counter[tuple[str, str]] = Counter()
    copied: set[tuple[str, str]] = set()
    # Several modules may hold one tensor: a router's bias, tied weights.
    holders: dict[int, list[tuple[str, str]]] = {}

    def recorder(keys: list[tuple[str, str]]) -> Any:
        def load(*args: Any, **named: Any) -> bool:
            loaded = next((v for v in (*args, *named.values()) if isinstance(v, _Followed)), None)
            for key in keys:
                if in_order and not (
                    loaded is not None and (loaded.in_order or ".routed_experts" in key[0])
                ):
                    name = ".".join(key)
                    raise GraphError(
                        f"vLLM changes what it loads into {name!r}, and not as a cast or a view"
                        " does"
                    )
                if loaded is not None:
                    shard = next(iter(args[2:]), named.get("shard_id"))
                    taken.setdefault(key, []).append((shard, loaded.source))
                    rows[key] += loaded.shape[0] if loaded.ndim else 1
            return True

        return load

    by_storage: dict[int, list[tuple[str, str]]] = {}
    for module_name, module in skeleton.module.named_modules():
        for key, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                holders.setdefault(id(tensor), []).append((module_name, key))
                by_storage[_storage(tensor)] = holders[id(tensor)]
                tensor.weight_loader = recorder(holders[id(tensor)])  # type: ignore[attr-defined]
        # Some heads create their bias only when the checkpoint has one.
        if isinstance(module, VocabParallelEmbedding):
            module.__dict__["weight_loader"] = recorder([(module_name, "bias")])

    def copy(target: torch.Tensor, loaded: _Followed) -> None:
        keys = by_storage.get(_storage(target), [])
        if keys:
            copied.update(keys)
            recorder(keys)(target, loaded)

    followed = _followed(shapes, skeleton.config.model_config.dtype, copy)
    try:
        with alone(), quiet():
            skeleton.module.load_weights(followed.items())  # type: ignore[operator]
    except GraphError:
        raise
    # Models' own loaders raise anything for names they do not know.
    except Exception as error:
        raise _unloadable(skeleton.module, error) from error
    sources = {key: [name for _, name in _in_order(parts)] for key, parts in taken.items()}
    if in_order:
        _refuse_other_sizes(skeleton.module, sources, rows)
    return Loading(sources, frozenset(copied))


def _unloadable(model: nn.Module, error: Exception) -> NoEngineModelError:
    """Return the refusal of a checkpoint from which vLLM's loader raised an error."""
    kind = type(model).__name__
    own = _own_name(model, error)
    if own:
        return NoEngineModelError(
            f"vLLM's {kind} loads no checkpoint: its loader looks for {error.args[0]!r}, which its"
            f" class has as {own!r}, a fault of this release of vLLM; take another model"
        )
    reason = f"{type(error).__name__}: {error}".partition(_AVAILABLE)[0]
    return NoEngineModelError(
        f"vLLM's {kind} loads no checkpoint of such names: {reason}; take the checkpoint that its"
        " publisher wrote, or another model"
    )


def _own_name(model: nn.Module, error: Exception) -> str:
    """Return the name of the experts' parameter that vLLM's loader looked for by an older name; ""
    if the error is another one.
    """
    looked_for = str(error.args[0]) if isinstance(error, KeyError) and error.args else ""
    names = (name for name, _ in model.named_parameters() if ".routed_experts." in name)
    older = ((name, name.replace(".routed_experts.", ".")) for name in names)
    return next(
        (name for name, old in older if looked_for and f".{old}".endswith(f".{looked_for}")), ""
    )


def _refuse_other_sizes(
    model: nn.Module,
    sources: Mapping[tuple[str, str], list[str]],
    rows: Mapping[tuple[str, str], int],
) -> None:
    """Raise `NoEngineModelError` if vLLM loads other rows into a linear layer than that has.

    vLLM's class then ignores a setting of config.json.

    sources: see `Loading`. rows: rows that are loaded into each parameter.
    """
    kind = type(model).__name__
    for name, module in model.named_modules():
        weight = module._parameters.get("weight")
        loaded = rows.get((name, "weight"), 0)
        if isinstance(module, LinearBase) and weight is not None and loaded not in (0, len(weight)):
            raise NoEngineModelError(
                f"vLLM's {kind} has {len(weight)} rows in {name!r}, and this model {loaded}, in"
                f" {', '.join(sources[name, 'weight'])}: vLLM does not heed a setting in"
                " config.json here (of heads, or tie_word_embeddings); take a model of those sizes"
            )


def _storage(tensor: torch.Tensor) -> int:
    """Return a number that is that of a tensor's views, and of no other tensor, on any device."""
    return tensor.untyped_storage()._cdata


def _in_order(
    parts: Iterable[tuple[Any, str]],
) -> list[tuple[Any, str]]:
    """Sort by shard: q, k, v, or numbers, or tuples of several numbers."""
    numbers = {"q": 0, "k": 1, "v": 2}

    def number(part: tuple[Any, str]) -> int:
        shard, _ = part
        shard = shard[0] if isinstance(shard, tuple) else shard
        return shard if isinstance(shard, int) else numbers.get(shard, 0)

    return sorted(parts, key=number)


class _Followed(torch.Tensor):
    """Tensor without values that knows the checkpoint tensor it was made from."""

    source = ""
    """Name of the checkpoint tensor that it was made from."""
    in_order = True
    """True if it was made by casts and views only, which leave values and their order unchanged."""
    on_copy: "Callable[[torch.Tensor, _Followed], None] | None" = None
    """Function to call with a tensor that this one is copied into, and this one."""

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        # `torch.cat` has a list of them (Falcon's queries, keys and values, in another order)
        flat = (part for a in args for part in (a if isinstance(a, tuple | list) else (a,)))
        first = next((part for part in flat if isinstance(part, _Followed)), None)
        if func is torch.Tensor.copy_ and not isinstance(args[0], _Followed):
            assert first is not None
            if first.on_copy is not None:
                first.on_copy(args[0], first)
            return args[0]
        result = super().__torch_function__(func, types, args, kwargs or {})
        for part in result if isinstance(result, tuple | list) else (result,):
            if first is not None and isinstance(part, _Followed):
                part.source = first.source
                part.on_copy = first.on_copy
                part.in_order = first.in_order and getattr(func, "__name__", "") in _IN_ORDER
        return result


_IN_ORDER = {
    "to",
    "float",
    "half",
    "bfloat16",
    "type",
    "detach",
    "contiguous",
    "clone",
    "cpu",
    "view",
    "view_as",
    "reshape",
    "squeeze",
    "unsqueeze",
    "flatten",
    "narrow",
    "chunk",
    "split",
    "__get__",
}
"""Names of torch's functions that keep values in their row-major order."""


def _followed(
    shapes: Mapping[str, Sequence[int]],
    dtype: torch.dtype,
    on_copy: Callable[[torch.Tensor, _Followed], None],
) -> dict[str, _Followed]:
    """Return tensors without values, of these shapes, by checkpoint name."""
    tensors = {}
    for name, shape in shapes.items():
        followed = torch.empty(tuple(shape), device="meta", dtype=dtype).as_subclass(_Followed)
        followed.source = name
        followed.on_copy = on_copy
        tensors[name] = followed
    return tensors
