"""vLLM's model of an architecture, in this process, without an engine, a cache or weights.

It is the class the engine builds, by the same configuration, so whatever vLLM's Python does between
its layers is there. Large weights are on the meta device: the graph multiplies with layers of its
own, and whoever reads a weight behind its back fails loudly.
"""

import contextlib
import copy
import logging
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import PretrainedConfig
from vllm import ir
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers import rotary_embedding
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.model_executor.models.registry import ModelRegistry, _RegisteredModel
from vllm.utils.torch_utils import set_default_torch_dtype

from qarl.configs.errors import GraphError
from qarl.quant.kernels.vllm import alone
from qarl.quant.kernels.vllm_gpu import load_plugins
from qarl.quant.runtime.batch_invariance import kernel_arguments
from qarl.quant.runtime.replaced import replaced

_SMALL = 1 << 16
"""Elements of the largest tensor that is really there: cosines of few positions, correction biases,
sinks.
"""


class Skeleton:
    """vLLM's model and what it needs around it. module: the model, in eval mode. config: vLLM's."""

    def __init__(self, module: nn.Module, config: VllmConfig):
        self.module = module
        self.config = config

    @contextlib.contextmanager
    def running(self, tokens: int) -> Iterator[None]:
        """Within this context the model finds what its engine's step would give it. tokens: of this
        forward.
        """
        with alone(), set_forward_context(None, self.config, num_tokens=tokens):
            yield


def build_skeleton(
    config: PretrainedConfig,
    architecture: str,
    quantization: dict[str, Any] | None,
    dtype: torch.dtype,
    device: torch.device,
) -> Skeleton:
    """Build vLLM's model of a transformers configuration.

    architecture: the transformers class's name. quantization: the checkpoint's
    `quantization_config`. dtype: the engine's compute dtype. device: where the forward runs. Raises
    `GraphError` with vLLM's reason where it has no such model.
    """
    load_plugins()
    try:
        with quiet(), tempfile.TemporaryDirectory() as folder:
            written = copy.deepcopy(config)
            written.architectures = [architecture]
            if quantization is not None:
                written.quantization_config = quantization
            # config.json, as an export of this model has it
            written.save_pretrained(folder)
            skeleton = skeleton_of(Path(folder), architecture, dtype, device)
    except Exception as error:
        raise GraphError(
            f"vLLM builds no model of {architecture} to learn through: {_reason(error)}; set"
            " learner.operators to 'transformers', whose log-probs agree up to rounding, or take a"
            " model that vLLM runs"
        ) from error
    # an engine in this process has chosen already
    if not ir.ops.rms_norm.get_priority():
        skeleton.config.kernel_config.ir_op_priority.set_default()
    return skeleton


def skeleton_of(
    folder: Path, architecture: str, dtype: torch.dtype, device: torch.device
) -> Skeleton:
    """As `build_skeleton`, of the config.json in a folder. Raises whatever vLLM does."""
    _inspect_here(architecture)
    config = EngineArgs(
        model=str(folder),
        dtype=str(dtype).removeprefix("torch."),  # type: ignore[arg-type]
        enforce_eager=True,
        skip_tokenizer_init=True,
        load_format="dummy",
        kernel_config=kernel_arguments(),  # type: ignore[arg-type]
    ).create_engine_config()
    # vLLM keeps one rotary embedding of a kind in a process; the engine's is not ours to change.
    own_rotary = replaced(rotary_embedding, _ROPE_DICT={})
    with alone(), own_rotary, set_default_torch_dtype(dtype), device, _LargeOnMeta():
        module = initialize_model(config)
    return Skeleton(module.eval(), config)


def _reason(error: Exception) -> str:
    """vLLM's words on one line, those of a check of its own without pydantic's around them."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    own = (
        line.removeprefix("Value error, ").partition(" [type=")[0]
        for line in lines
        if "Value error, " in line
    )
    return next(own, lines[0] if lines else type(error).__name__).rstrip(".")


def _inspect_here(architecture: str) -> None:
    """Have vLLM look at its class in this process, which imports it anyway, and not in one that
    takes seconds.
    """
    for name in (architecture, "TransformersForCausalLM", "TransformersMoEForCausalLM"):
        entry = ModelRegistry.models.get(name)
        if entry is not None and not isinstance(entry, _RegisteredModel):
            ModelRegistry.models[name] = _RegisteredModel.from_model_cls(entry.load_model_cls())
        if name == architecture and entry is not None:
            return


class _LargeOnMeta(TorchFunctionMode):
    """Has vLLM's layers make room for large weights on the meta device, and for what is small where
    it is.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.empty:
            planned = func(*args, **{**kwargs, "device": "meta"})
            if planned.numel() > _SMALL:
                return planned
        return func(*args, **kwargs)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without vLLM's remarks on an engine that is none. Its loggers set their own levels as they
    are first used.
    """
    before = logging.root.manager.disable
    logging.disable(max(before, logging.WARNING))
    try:
        yield
    finally:
        logging.disable(before)
