"""Self-test before a run: is each kernel batch-invariant, so that a row depends on itself alone?

Every distinct linear kernel (name, scheme, columns, output rows), every shape of experts and every
shape of attention in the model is tested once, at its own shape, through the layers that the
learner multiplies with (the engine's own if they are shared). `quant.kernels.row_independence` has
the test itself. It finds CPUs and versions of vLLM on which nobody tried it before.

Axes: N tokens, O output rows, I input columns, H heads, G heads of keys and values, D head size.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from qarl.configs.words import few
from qarl.quant.kernels import make_factory
from qarl.quant.kernels.base import Scoring
from qarl.quant.kernels.cpu_attention import cpu_attention
from qarl.quant.kernels.latent_attention import COLUMNS, LatentHeads, latent_attention
from qarl.quant.kernels.row_independence import (
    ROWS_TESTED,
    Dependence,
    cancelling_inputs,
    find_dependence,
)
from qarl.quant.kernels.supported import kept_support
from qarl.quant.layers.context import LayerContext
from qarl.quant.layers.experts import RoutedLowBitExperts
from qarl.quant.layers.linear import LowBitLinear
from qarl.quant.layers.stack import LinearStack
from qarl.quant.materialize import materialize
from qarl.quant.model.layers import Layers
from qarl.quant.schemes import SCHEMES, get_scheme

_SEEN = 1024
"""Number of keys in the attention test: more than fit into the kernel's tiles for a whole
prompt.
"""


@dataclass(frozen=True)
class DependentKernel:
    """Kernel whose result for a row depends on what else is computed."""

    layer: str
    """Checkpoint name of the first layer that the kernel multiplies."""
    kernel: str
    """The kernel's name."""
    shape: str
    """The tested shape, in words."""
    difference: Dependence
    """The largest difference, and what it depends on."""

    def __str__(self) -> str:
        return f"{self.layer} ({self.kernel}, {self.shape}), {self.difference}"


@dataclass(frozen=True)
class RowCheck:
    """Result of the self-test."""

    kernels: int
    """Number of distinct kernels and shapes that were tested."""
    threads: int
    """Number of threads that torch computes on."""
    dependent: tuple[DependentKernel, ...]
    """Kernels that failed the test."""

    def __str__(self) -> str:
        if not self.dependent:
            threads = "on 1 thread" if self.threads == 1 else f"on 1 thread and on {self.threads}"
            return (
                f"rows are computed alike, alone and among others, {threads}: {self.kernels}"
                " kernels asked"
            )
        named = few([str(kernel) for kernel in self.dependent])
        return (
            f"{len(self.dependent)} of {self.kernels} kernels compute a row otherwise beside other"
            " rows or on other threads, so log-probs of learner and sampler are not equal to the"
            f" last bit here: {named}"
        )


@dataclass(frozen=True)
class _KernelTest:
    """Test of one kernel at one shape."""

    layer: str
    """Checkpoint name of the layer that it multiplies."""
    kernel: str
    """The kernel's name."""
    shape: str
    """The shape, in words."""
    run: Callable[[], Dependence | None]
    """Returns the largest difference; None if there is none."""


@torch.no_grad()
def check_rows(layers: Layers, context: LayerContext, graph: Any = None) -> RowCheck:
    """Test each distinct kernel of a model.

    This takes milliseconds for a model of hundreds of millions of parameters, and a second or two
    for an output head of 150,000 words and 4,096 columns.

    Args:
        layers: the model's layers.
        context: settings and state that they share.
        graph: the engine's model over the layers; None with transformers' operators.
    """
    tests = [
        *_linear_tests(layers, context),
        *_experts_tests(layers, context),
        *_attention_tests(graph, context),
    ]
    distinct: dict[tuple[str, str], _KernelTest] = {}
    for test in tests:
        distinct.setdefault((test.kernel, test.shape), test)
    dependent = []
    for test in distinct.values():
        difference = test.run()
        if difference is not None:
            dependent.append(DependentKernel(test.layer, test.kernel, test.shape, difference))
    return RowCheck(len(distinct), torch.get_num_threads(), tuple(dependent))


def check_machine_rows() -> RowCheck:
    """Test the kernels of this machine without a model.

    Shapes are those of a model of a few billion parameters, with 2,048 columns. Tests every scheme
    that vLLM runs here in bfloat16, and unquantized layers in every dtype. Imports vLLM.
    """
    supported = [name for name in SCHEMES if kept_support(name, torch.bfloat16).kernel]
    kernels = [(name, torch.bfloat16) for name in supported]
    kernels += [("bf16", dtype) for dtype in (torch.float16, torch.float32)]
    layer = "a layer"
    dependent = []
    for scheme, dtype in kernels:
        master = torch.randn(256, 2048, generator=torch.Generator().manual_seed(0))
        weight = materialize(master, get_scheme(scheme), dtype)
        kernel = make_factory("vllm", dtype).linear(layer, [weight], [None])
        few_rows = weight.rows(0, 128).dequantized(torch.float32)[:16]
        difference = find_dependence(kernel, cancelling_inputs(few_rows, dtype))
        if difference is not None:
            shape = f"{scheme} in {str(dtype).removeprefix('torch.')}, 2,048 columns to 256"
            dependent.append(DependentKernel(layer, kernel.name, shape, difference))
    difference = _attention_test((16, 8, 128), None, LayerContext(torch.bfloat16, "vllm"))()
    if difference is not None:
        dependent.append(
            DependentKernel("attention", "attention", "16 heads of 128, 8 of keys", difference)
        )
    return RowCheck(len(kernels) + 1, torch.get_num_threads(), tuple(dependent))


def _linear_tests(layers: Layers, context: LayerContext) -> Iterator[_KernelTest]:
    """Yield the tests of linear layers and stacks."""
    stacked = {part.layer for stack in layers.stacks.values() for part in stack.parts}
    alone = [layer for layer in layers.linears.values() if layer.layer not in stacked]
    multiplied: list[tuple[Sequence[LowBitLinear], LinearStack | LowBitLinear]] = [
        *((stack.parts, stack) for stack in layers.stacks.values()),
        *(((layer,), layer) for layer in alone),
    ]
    for parts, multiplying in multiplied:
        rows = sum(part.out_features for part in parts)
        columns = parts[0].master.shape[-1]
        shape = f"{parts[0].scheme.name}, {columns:,} columns to {rows:,}"
        yield _KernelTest(
            layer=parts[0].layer,
            kernel=multiplying.kernel.name,
            shape=shape,
            run=_linear_test(parts[0], multiplying, context),
        )


def _linear_test(
    part: LowBitLinear, multiplying: Any, context: LayerContext
) -> Callable[[], Dependence | None]:
    """Return the test of one layer's or stack's kernel."""

    def run() -> Dependence | None:
        codes = part.codes()
        # 16 rows are tested; a scheme of blocks dequantizes whole blocks of rows
        height = codes.scheme.block[0] if codes.scheme.block else 16
        block = codes.rows(0, min(height, codes.shape[0]))
        few_rows = block.dequantized(torch.float32)[:16]
        # each rank's product has to cancel, because it is rounded before the sum
        inputs = [
            cancelling_inputs(columns, context.forward_dtype)
            for columns in few_rows.chunk(part.ranks, dim=1)
        ]
        x = torch.cat(inputs, dim=1).to(few_rows.device)
        return find_dependence(multiplying.kernel, x, slice(len(few_rows)))

    return run


def _experts_tests(layers: Layers, context: LayerContext) -> Iterator[_KernelTest]:
    """Yield the tests of routed experts."""
    for layer in layers.experts.values():
        sizes = layer.shape
        shape = (
            f"{layer.scheme.name}, {sizes.experts} experts of {sizes.hidden:,} and"
            f" {sizes.intermediate:,} columns"
        )
        yield _KernelTest(
            layer=layer.layer,
            kernel=layer.kernel.name,
            shape=shape,
            run=_experts_test(layer, context),
        )


def _experts_test(
    layer: RoutedLowBitExperts, context: LayerContext
) -> Callable[[], Dependence | None]:
    """Return the test of one layer's experts."""

    def run() -> Dependence | None:
        generator = torch.Generator().manual_seed(0)
        device = layer.masters[0].device
        shape = layer.shape
        drawn = torch.randn(ROWS_TESTED, shape.hidden, generator=generator, dtype=torch.float32)
        x = drawn.to(device, context.forward_dtype)
        scores = torch.rand(ROWS_TESTED, shape.experts, generator=generator).to(device)
        weights, index = scores.topk(shape.top_k, dim=-1)
        # `find_dependence` passes row numbers as rows, so that each brings its own routing
        # along and any subset of them can be computed by itself.
        numbers = torch.arange(ROWS_TESTED, device=device)

        def multiply(rows: torch.Tensor) -> torch.Tensor:
            chosen = rows[:, 0].long()
            return layer.kernel(x[chosen], weights[chosen], index[chosen])

        return find_dependence(multiply, numbers[:, None].float(), slice(None))

    return run


def _attention_tests(graph: Any, context: LayerContext) -> Iterator[_KernelTest]:
    """Yield the tests of attention, on CPUs only.

    On GPUs the attention kernels are compared with the engine's by other means.
    """
    if graph is None:
        return
    from vllm.model_executor.layers.attention import Attention, MLAAttention

    for name, module in graph.module.named_modules():
        if isinstance(module, MLAAttention) and not torch.cuda.is_available():
            sizes = (module.num_heads, module.qk_nope_head_dim, module.v_head_dim)
            yield _KernelTest(
                layer=name,
                kernel="latent attention",
                shape=f"{sizes[0]} heads, keys of {sizes[1]} and values of {sizes[2]}",
                run=_latent_test(sizes, context),
            )
        if isinstance(module, Attention) and not torch.cuda.is_available():
            heads = (module.num_heads, module.num_kv_heads, module.head_size)
            window = module.sliding_window or None
            shape = f"{heads[0]} heads of {heads[2]}, {heads[1]} of keys, window {window or 'none'}"
            yield _KernelTest(
                layer=name,
                kernel="attention",
                shape=shape,
                run=_attention_test(heads, window, context),
            )


def _attention_test(
    heads: tuple[int, int, int], window: int | None, context: LayerContext
) -> Callable[[], Dependence | None]:
    """Return the test of attention with this many heads, heads of keys, and columns a head."""
    H, G, D = heads
    scoring = Scoring(
        scale=D**-0.5,
        window=window,
        fp8=context.kv_cache == "fp8" and context.multiplies_codes,
    )

    def run() -> Dependence | None:
        generator = torch.Generator().manual_seed(0)
        # Scores are of about equal size, so that values nearly cancel and the order of summation
        # shows in a 16-bit result.
        drawn = (
            torch.randn(_SEEN, n, D, generator=generator, dtype=torch.float32, device="cpu")
            for n in (H, G, G)
        )
        q, k, v = (t.to(context.forward_dtype) for t in drawn)
        first = _SEEN - ROWS_TESTED

        def attend(rows: torch.Tensor) -> torch.Tensor:
            start = int(rows[0, 0])
            stop = int(rows[-1, 0]) + 1
            return cpu_attention(
                q[start:stop], k[:stop], v[:stop], scoring, [stop - start], [stop]
            ).flatten(1)

        return find_dependence(attend, torch.arange(first, _SEEN).float()[:, None], slice(None))

    return run


def _latent_test(
    sizes: tuple[int, int, int], context: LayerContext
) -> Callable[[], Dependence | None]:
    """Return the test of latent attention with this many heads, and columns of a key and a value
    that are made from a latent.
    """
    H, P, V = sizes
    columns, rotated = COLUMNS

    def run() -> Dependence | None:
        generator = torch.Generator().manual_seed(0)

        def draw(*shape: int) -> torch.Tensor:
            drawn = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")
            return drawn.to(context.forward_dtype)

        q = draw(_SEEN, H, P + rotated)
        latents = draw(_SEEN, columns + rotated)
        heads = LatentHeads(draw(H * (P + V), columns), H, P)
        scale = (P * columns) ** -0.5  # scores are of about equal size, as in `_attention_test`
        first = _SEEN - ROWS_TESTED

        def attend(rows: torch.Tensor) -> torch.Tensor:
            start = int(rows[0, 0])
            stop = int(rows[-1, 0]) + 1
            return latent_attention(
                q[start:stop], latents[:stop], heads, scale, [stop - start], [stop]
            ).flatten(1)

        return find_dependence(attend, torch.arange(first, _SEEN).float()[:, None], slice(None))

    return run
