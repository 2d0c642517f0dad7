"""Rotary embedding on CPUs for queries and keys in three dimensions.

vLLM 0.32's operator for CPUs takes [N, heads · size]. It reads [N, heads, size], which latent
attention (DeepSeek, GLM-4.7-Flash, Kimi) and LFM2 give it, as one head of N · heads tokens, and
rotates by other tokens' positions; views of wider tensors it overwrites beside the view. Here such
tensors are rotated as [N, heads · size]. Remove this when the operator counts heads of three
dimensions.

Axes: N tokens.
"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor


def rotate_heads() -> None:
    """Make vLLM's rotary embedding rotate [N, heads, size] rightly; idempotent.

    This applies to layers that are built afterwards.
    """
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    rotate = RotaryEmbedding.forward_cpu
    if hasattr(rotate, "__wrapped__"):
        return

    @functools.wraps(rotate)
    def forward_cpu(
        self: Any, positions: Tensor, query: Tensor, key: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        with _in_two_dimensions(query) as q, _in_two_dimensions(key) as k:
            rotate(self, positions, q, k)
        return query, key

    RotaryEmbedding.forward_cpu = forward_cpu  # type: ignore[method-assign]


@contextmanager
def _in_two_dimensions(tensor: Tensor | None) -> Iterator[Any]:
    """Yield [N, heads, size] as contiguous [N, heads · size], and write what becomes of it back.

    Other tensors are yielded as they are.
    """
    if tensor is None or tensor.ndim != 3:
        yield tensor
        return
    rows = tensor.flatten(1).contiguous()
    yield rows
    if rows.data_ptr() != tensor.data_ptr():
        tensor.copy_(rows.view(tensor.shape))
