"""Weights of a running vLLM, in this process or behind a URL (`quant.kernels.held_weights`).

Axes: O output rows, I input columns.
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

Part = Callable[[str, str, int, int], "torch.Tensor"]
"""Read a part of a layer: (layer, kind, start, count)."""


@dataclass(frozen=True)
class RunningEngine:
    """What a running vLLM holds."""

    config: dict[str, Any]
    """Its settings of config.json."""
    quantization: dict[str, Any] | None
    """Its quantization_config; None if it has none."""
    tensors: dict[str, Stored]
    """Its tensors, by vLLM's names."""
    unread: tuple[str, ...]
    """What of it cannot be read, in sentences."""
    check: Callable[[], None]
    """Raises `VerifyInputError` if it took other weights while it was read."""


def read_llm(llm: Any) -> RunningEngine:
    """Return what vLLM's `LLM` in this process holds.

    Raises `VerifyInputError` if its layers are split over several workers.
    """
    from qarl.quant.kernels.held_weights import (
        list_weights,
        quantization_settings,
        weight_part,
    )

    _require_one_worker(llm.llm_engine.vllm_config.parallel_config.world_size)
    model_config = llm.llm_engine.model_config
    ((weights, others),) = llm.apply_model(list_weights)

    def part(layer: str, kind: Any, start: int, count: int) -> "torch.Tensor":
        return llm.apply_model(partial(weight_part, layer, kind, start, count))[0]

    return RunningEngine(
        config=model_config.hf_text_config.to_dict(),
        quantization=quantization_settings(model_config),
        tensors=_tensors(weights, part),
        unread=_unread(others),
        check=lambda: None,
    )


def read_server(url: str) -> RunningEngine:
    """Return what a vLLM server holds.

    Raises `VerifyInputError` if it does not answer, cannot be read, or splits its layers over
    several workers.
    """
    from qarl.quant.kernels.held_weights import HeldWeight

    server = VllmServer(url)
    name = server.model()
    listed = server.call("qarl_held_weights")
    if listed is None:
        raise VerifyInputError(
            f"the weights of server {url!r} (model {name!r}) cannot be read, and nothing was"
            f" compared: {server.why_not_called}. Start it with {_EXTENSION}; or compare the"
            " checkpoint that it loads, by its folder; or what it samples, by `qarl verify"
            " logprobs`"
        )
    _require_one_worker(listed["workers"])
    weights = [HeldWeight(**{**each, "shape": tuple(each["shape"])}) for each in listed["tensors"]]
    version = server.weight_version()

    def part(layer: str, kind: str, start: int, count: int) -> "torch.Tensor":
        answer = server.call("qarl_weight_part", layer=layer, kind=kind, start=start, count=count)
        return _decoded(answer)

    def check() -> None:
        now = server.weight_version()
        if now != version:
            raise VerifyInputError(
                f"server {url!r} went from weight version {version!r} to {now!r} while it was read;"
                " pause training, and compare again"
            )

    return RunningEngine(
        config=listed["config"],
        quantization=listed["quantization"],
        tensors=_tensors(weights, part),
        unread=_unread(listed["others"]),
        check=check,
    )


def _require_one_worker(workers: int) -> None:
    if workers > 1:
        raise VerifyInputError(
            f"the engine has {workers} workers, each with a part of every layer; open it with"
            " tensor_parallel_size 1, or compare the checkpoint that it loads"
        )


def _tensors(weights: Sequence["HeldWeight"], part: Part) -> dict[str, Stored]:
    return {
        weight.name: Stored(weight.shape, partial(_read, weight, part), _no_part)
        for weight in weights
    }


def _read(weight: "HeldWeight", part: Part) -> "torch.Tensor":
    """Return a tensor, read in parts."""
    import torch

    if weight.kind == "vector":
        return part(weight.layer, weight.kind, 0, weight.shape[0])
    axis = 1 if weight.kind == "product" else 0
    length = weight.shape[axis]
    step = min(_LONGEST_SIDE, max(1, _PART // weight.shape[1 - axis]))
    return torch.cat(
        [
            part(weight.layer, weight.kind, start, min(step, length - start))
            for start in range(0, length, step)
        ],
        axis,
    )


def _no_part(index: int) -> "torch.Tensor":
    raise AssertionError("an engine's tensor is read whole")


def _unread(others: dict[str, list[str]]) -> tuple[str, ...]:
    return tuple(
        f"the engine's {kind} (such as {names[0]}): they have no product to ask, compare the"
        " checkpoint that the engine loads"
        for kind, names in others.items()
    )


def _decoded(answer: dict[str, Any]) -> "torch.Tensor":
    """Return a tensor from its dtype, shape and base64."""
    import base64

    import torch

    data = bytearray(base64.b64decode(answer["data"]))
    return torch.frombuffer(data, dtype=getattr(torch, answer["dtype"])).reshape(answer["shape"])
