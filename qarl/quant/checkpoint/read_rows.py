"""Reading a checkpoint in a process that keeps only some rows (`quant.runtime.shards`).

The process never holds the whole checkpoint. A parameter's rows are cut out as transformers sets
it, and other processes' experts are not read, so the host holds one whole matrix at a time.
transformers' own way to shard, DeepSpeed's, reads all files in every process: 438 GiB for a 235B
mixture of experts.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel, core_model_loading

from qarl.quant.runtime.replaced import replaced
from qarl.quant.runtime.shards import Share, cut, cut_rows, kept

_IN_TURN = "HF_DEACTIVATE_ASYNC_LOAD"
"""Environment variable that stops transformers' threads from reading parameters ahead."""


@contextmanager
def reading_rows(share: Share, experts: int) -> Iterator[None]:
    """Make `from_pretrained` keep only a process's rows of matrices and stacks within this context.

    Each then has its `shard`. Vectors stay whole, and so do embeddings and output heads, which
    transformers compares and ties.

    Args:
        share: which process of how many.
        experts: number of experts in each stack, or 0.
    """
    set_whole = core_model_loading.set_param_for_module
    read = core_model_loading.spawn_materialize
    previous_setting = os.environ.get(_IN_TURN)
    edges = cut_rows(torch.Size((experts, 1, 1)), *share, turn=0).edges
    mine = range(edges[share.rank], edges[share.rank + 1])

    def read_mine(
        pool: Any, tensor: Any, *others: Any, tensor_idx: int | None = None, **more: Any
    ) -> Any:
        if tensor_idx is None or tensor_idx in mine or not mine:
            return read(pool, tensor, *others, tensor_idx=tensor_idx, **more)
        return lambda: None  # transformers leaves it out of the stack

    def set_rows(
        model: PreTrainedModel,
        name: str,
        value: torch.Tensor,
        info: Any,
        quantizer: Any,
    ) -> None:
        module_name, _, key = name.rpartition(".")
        module = model.get_submodule(module_name)
        empty = module._parameters.get(key)
        tied = model.all_tied_weights_keys
        heads = (model.get_input_embeddings(), model.get_output_embeddings())
        # a stack of this process's experts, which `read_mine` left
        if (
            empty is not None
            and empty.ndim == value.ndim == 3
            and len(value) == len(mine) < len(empty) == experts
        ):
            rows = kept(value, cut_rows(empty.shape, *share, turn=0), True)
            info.missing_keys.discard(name)
        else:
            set_whole(model, name, value, info, quantizer)
            whole = module._parameters.get(key)
            if whole is None or whole.is_meta or whole.ndim < 2 or name in tied or module in heads:
                return
            rows = cut(whole, share, turn=0)  # `turn` matters for vectors only
        # otherwise transformers would initialize it again
        rows._is_hf_initialized = True  # type: ignore[attr-defined]
        module._parameters[key] = rows

    os.environ[_IN_TURN] = "1"
    try:
        with replaced(
            core_model_loading,
            set_param_for_module=set_rows,
            spawn_materialize=read_mine,
        ):
            yield
    finally:
        del os.environ[_IN_TURN]
        if previous_setting is not None:
            os.environ[_IN_TURN] = previous_setting
