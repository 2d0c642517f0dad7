"""Weights of a running vLLM, in this process or behind a URL (`quant.kernels.held_weights`).

Tensor-parallel ranks each answer for their part of a layer, and the parts are put together here.

Axes: O output rows, I input columns, N fixed inputs of experts, H model width.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from qarl.verify.findings import VerifyInputError
from qarl.verify.names import Stored
from qarl.verify.server import VllmServer

if TYPE_CHECKING:
    import torch

    from qarl.quant.kernels.held_weights import HeldWeight

_PART = 2**24
"""Upper bound on the elements of a part that is read at once."""
_LONGEST_SIDE = 512
"""Upper bound on the columns or rows of a part."""
_EXTENSION = "VLLM_SERVER_DEV_MODE=1 vllm serve … --worker-extension-cls qarl.verify.HeldWeights"
"""The start of a server that can be read."""

Part = Callable[[str, str, int, int], "list[torch.Tensor]"]
"""Read a part of a layer from every rank: (layer, kind, start, count)."""


@dataclass(frozen=True)
class HeldExperts:
    """The routed experts of one layer, which can be asked for their outputs alone."""

    name: str
    """Their name, such as "model.layers.0.mlp.experts"."""
    count: int
    """Number of experts."""
    outputs: Callable[[int], "torch.Tensor"]
    """Read the outputs of an expert of the fixed inputs, fp32 [N, H]."""


@dataclass(frozen=True)
class RunningEngine:
    """What a running vLLM holds."""

    config: dict[str, Any]
    """Its settings of config.json."""
    quantization: dict[str, Any] | None
    """Its quantization_config; None if it has none."""
    tensors: dict[str, Stored]
    """Its tensors, by vLLM's names."""
    experts: tuple[HeldExperts, ...]
    """Its routed experts."""
    unread: tuple[str, ...]
    """What of it cannot be read, in sentences."""
    check: Callable[[], None]
    """Raises `VerifyInputError` if it took other weights while it was read."""


def read_llm(llm: Any) -> RunningEngine:
    """Return what vLLM's `LLM` in this process holds.

    Raises `VerifyInputError` if its workers divide the model otherwise than by tensor parallelism.
    """
    from qarl.quant.kernels.held_weights import (
        list_weights,
        quantization_settings,
        weight_part,
    )

    parallel = llm.llm_engine.vllm_config.parallel_config
    _require_tensor_parallel(parallel.pipeline_parallel_size, parallel.enable_expert_parallel)
    model_config = llm.llm_engine.model_config
    listed = llm.apply_model(list_weights)
    ranks = [weights for weights, _ in listed]
    others = listed[0][1]

    def part(layer: str, kind: Any, start: int, count: int) -> "list[torch.Tensor]":
        return llm.apply_model(partial(weight_part, layer, kind, start, count))

    return RunningEngine(
        config=model_config.hf_text_config.to_dict(),
        quantization=quantization_settings(model_config),
        tensors=_tensors(ranks, part),
        experts=_experts(ranks, part),
        unread=_unread(others, ranks),
        check=lambda: None,
    )


def read_server(url: str) -> RunningEngine:
    """Return what a vLLM server holds.

    Raises `VerifyInputError` if it does not answer, cannot be read, or divides the model otherwise
    than by tensor parallelism.
    """
    from qarl.quant.kernels.held_weights import HeldWeight

    server = VllmServer(url)
    name = server.model()
    answers = server.call("qarl_held_weights")
    if answers is None:
        raise VerifyInputError(
            f"the weights of server {url!r} (model {name!r}) cannot be read, and nothing was"
            f" compared: {server.why_not_called}. Start it with {_EXTENSION}; or compare the"
            " checkpoint that it loads, by its folder; or what it samples, by `qarl verify"
            " logprobs`"
        )
    listed = answers[0]
    tuples = ("shape", "parts", "repeats")
    try:
        divided = listed["stages"], listed["expert_parallel"]
        ranks = [
            [
                HeldWeight(**each | {name: tuple(each[name]) for name in tuples})
                for each in rank["tensors"]
            ]
            for rank in answers
        ]
        config, quantization = listed["config"], listed["quantization"]
        others = listed["others"]
    except (KeyError, TypeError) as error:  # an extension of another version
        raise server.unexpected("/collective_rpc", answers) from error
    _require_tensor_parallel(*divided)
    version = server.weight_version()

    def part(layer: str, kind: str, start: int, count: int) -> "list[torch.Tensor]":
        parts = server.call("qarl_weight_part", layer=layer, kind=kind, start=start, count=count)
        assert parts is not None
        try:
            return [_decoded(each) for each in parts]
        except (KeyError, TypeError, AttributeError, ValueError, RuntimeError) as error:
            raise server.unexpected("/collective_rpc", parts) from error

    def check() -> None:
        now = server.weight_version()
        if now != version:
            raise VerifyInputError(
                f"server {url!r} went from weight version {version!r} to {now!r} while it was read;"
                " pause training, and compare again"
            )

    return RunningEngine(
        config=config,
        quantization=quantization,
        tensors=_tensors(ranks, part),
        experts=_experts(ranks, part),
        unread=_unread(others, ranks),
        check=check,
    )


def _require_tensor_parallel(stages: int, expert_parallel: bool) -> None:
    for option, divides in (
        (f"pipeline_parallel_size {stages}", stages > 1),
        ("enable_expert_parallel", expert_parallel),
    ):
        if divides:
            raise VerifyInputError(
                f"the engine runs with {option}, by which each worker has some layers or experts"
                " alone; open it without, tensor_parallel_size may stay, or compare the checkpoint"
                " that it loads"
            )


def _tensors(ranks: Sequence[Sequence["HeldWeight"]], part: Part) -> dict[str, Stored]:
    """Return the tensors that all ranks hold together. Every rank lists them in the same order."""
    tensors = {}
    for of_ranks in zip(*ranks, strict=True):
        if of_ranks[0].kind != "experts":
            stored = Stored(_whole_shape(of_ranks), partial(_read, of_ranks, part), _no_part)
            tensors[of_ranks[0].name] = stored
    return tensors


def _experts(ranks: Sequence[Sequence["HeldWeight"]], part: Part) -> tuple[HeldExperts, ...]:
    if len(ranks) > 1:
        return ()

    def outputs(layer: str, expert: int) -> "torch.Tensor":
        return part(layer, "experts", expert, 1)[0][0]

    return tuple(
        HeldExperts(
            name=weight.name.removesuffix(".routed_experts"),
            count=weight.shape[0],
            outputs=partial(outputs, weight.layer),
        )
        for weight in ranks[0]
        if weight.kind == "experts"
    )


def _whole_shape(ranks: Sequence["HeldWeight"]) -> tuple[int, ...]:
    """Return the shape of a tensor of which each rank holds a part."""
    first = ranks[0]
    rows = first.shape[0]
    if first.parts:
        rows = sum(
            weight.parts[n] for n, repeat in enumerate(first.repeats) for weight in ranks[::repeat]
        )
    columns = first.shape[1:]
    if first.divided_columns:
        columns = (sum(weight.shape[1] for weight in ranks),)
    return (rows, *columns)


def _read(ranks: Sequence["HeldWeight"], part: Part) -> "torch.Tensor":
    """Return a tensor, read in parts from all ranks."""
    import torch

    first = ranks[0]
    if first.kind == "vector":
        return _joined(ranks, part(first.layer, first.kind, 0, first.shape[0]))
    axis = 1 if first.kind == "product" else 0
    length = max(weight.shape[axis] for weight in ranks)
    step = min(_LONGEST_SIDE, max(1, _PART // first.shape[1 - axis]))
    pieces = [
        part(first.layer, first.kind, start, min(step, length - start))
        for start in range(0, length, step)
    ]
    of_ranks = [torch.cat(of_rank, axis) for of_rank in zip(*pieces, strict=True)]
    return _joined(ranks, of_ranks)


def _joined(ranks: Sequence["HeldWeight"], parts: "list[torch.Tensor]") -> "torch.Tensor":
    """Return a tensor from the parts that the ranks hold."""
    import torch

    first = ranks[0]
    if first.divided_columns:
        return torch.cat(parts, 1)
    if not first.parts:
        return parts[0]
    begins = [0] * len(ranks)
    fused = []
    for n, repeat in enumerate(first.repeats):
        rows = [
            tensor[begin : begin + weight.parts[n]]
            for weight, tensor, begin in zip(ranks, parts, begins, strict=True)
        ]
        fused += rows[::repeat]
        begins = [begin + weight.parts[n] for begin, weight in zip(begins, ranks, strict=True)]
    return torch.cat(fused)


def _no_part(index: int) -> "torch.Tensor":
    raise AssertionError("an engine's tensor is read whole")


def _unread(
    others: dict[str, list[str]], ranks: Sequence[Sequence["HeldWeight"]]
) -> tuple[str, ...]:
    divided = [weight.name for weight in ranks[0] if weight.kind == "experts"]
    if divided and len(ranks) > 1:
        return (
            f"the engine's experts (such as {divided[0]}): {len(ranks)} ranks divide each; compare"
            " the checkpoint that the engine loads",
        )
    return tuple(
        f"the engine's {kind} (such as {names[0]}): their kernel routes tokens itself, or their"
        " activation is not silu; compare the checkpoint that the engine loads"
        for kind, names in others.items()
    )


def _decoded(answer: dict[str, Any]) -> "torch.Tensor":
    """Return a tensor from its dtype, shape and base64."""
    import base64

    import torch

    data = bytearray(base64.b64decode(answer["data"]))
    return torch.frombuffer(data, dtype=getattr(torch, answer["dtype"])).reshape(answer["shape"])
