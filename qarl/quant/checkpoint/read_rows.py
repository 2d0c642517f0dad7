"""Reading a checkpoint by a process that keeps some rows alone (`quant.runtime.shards`), and never
has all of it.

A parameter's rows are cut out as transformers sets it, and other processes' experts are not read:
the host has one whole matrix at a time. Its own way to divide, DeepSpeed's, reads all files in
every process: 438 GiB of a 235B mixture.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel, core_model_loading

from qarl.quant.runtime.replaced import replaced
from qarl.quant.runtime.shards import Share, cut, cut_rows, kept

_IN_TURN = "HF_DEACTIVATE_ASYNC_LOAD"  # else threads read parameters ahead


@contextmanager
def reading_rows(share: Share, experts: int) -> Iterator[None]:
    """Within this context `from_pretrained` leaves of each matrix and stack a process's rows, with
    their `shard`. Vectors stay whole, and embeddings and heads, which transformers compares and
    ties. experts: of each stack, or 0.
    """
    set_whole, read = (
        core_model_loading.set_param_for_module,
        core_model_loading.spawn_materialize,
    )
    ahead = os.environ.get(_IN_TURN)
    mine = range(*cut_rows(torch.Size((experts, 1, 1)), *share, turn=0).edges[share.rank :][:2])

    def read_mine(
        pool: Any, tensor: Any, *others: Any, tensor_idx: int | None = None, **more: Any
    ) -> Any:
        if tensor_idx is None or tensor_idx in mine or not mine:
            return read(pool, tensor, *others, tensor_idx=tensor_idx, **more)
        return lambda: None  # which is left out of the stack

    def set_rows(
        model: PreTrainedModel,
        name: str,
        value: torch.Tensor,
        info: Any,
        quantizer: Any,
    ) -> None:
        module, key = (
            model.get_submodule(name.rpartition(".")[0]),
            name.rpartition(".")[2],
        )
        there, tied = module._parameters.get(key), model.all_tied_weights_keys
        heads = (model.get_input_embeddings(), model.get_output_embeddings())
        if (
            there is not None
            and there.ndim == value.ndim == 3
            and len(value) == len(mine) < len(there) == experts
        ):
            rows = kept(value, cut_rows(there.shape, *share, turn=0), True)
            info.missing_keys.discard(name)
        else:
            set_whole(model, name, value, info, quantizer)
            whole = module._parameters.get(key)
            if whole is None or whole.is_meta or whole.ndim < 2 or name in tied or module in heads:
                return
            rows = cut(whole, share, turn=0)  # of vectors alone it says whose they are
        rows._is_hf_initialized = True  # type: ignore[attr-defined]  # else it would be, anew
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
        os.environ |= {} if ahead is None else {_IN_TURN: ahead}
