"""Reading a checkpoint by a process that keeps some rows alone (`quant.runtime.shards`), and never has all of it.

transformers reads a parameter's tensors (a stack's of experts) when it is that parameter's turn, stacks them and sets
it; here its rows are cut out as it is set. So the host has a process's rows and one whole parameter at a time, where
its own partitioning, DeepSpeed's, first reads all files in every process: 438 GiB each of a 235B mixture.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers import PreTrainedModel, core_model_loading

from qarl.quant.runtime.shards import Share, cut

_IN_TURN = "HF_DEACTIVATE_ASYNC_LOAD"
"""transformers' variable: no threads that read parameters ahead."""


@contextmanager
def reading_rows(share: Share) -> Iterator[None]:
    """Within this context `from_pretrained` leaves of each matrix and stack a process's rows, with their `shard`.
    Whole stay vectors, and what may be tied, for transformers compares the two: embeddings and heads."""
    set_whole, ahead = core_model_loading.set_param_for_module, os.environ.get(_IN_TURN)

    def set_rows(model: PreTrainedModel, name: str, *others: Any) -> None:
        set_whole(model, name, *others)
        module, key = model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]
        parameter, tied = module._parameters.get(key), model.all_tied_weights_keys
        heads = (model.get_input_embeddings(), model.get_output_embeddings())
        if parameter is None or parameter.is_meta or parameter.ndim < 2 or name in tied or module in heads:
            return
        rows = cut(parameter, share, turn=0)  # of vectors alone it says whose they are
        rows._is_hf_initialized = True  # type: ignore[attr-defined]  # else it would be, anew
        module._parameters[key] = rows

    core_model_loading.set_param_for_module = set_rows
    os.environ[_IN_TURN] = "1"
    try:
        yield
    finally:
        core_model_loading.set_param_for_module = set_whole
        os.environ.pop(_IN_TURN)
        if ahead is not None:
            os.environ[_IN_TURN] = ahead
