"""A layer's routed experts: low-bit products forward, straight-through backward.

Forward: y = Σ_k w_k · down_e(act(gate_e(x)) · up_e(x)) over each token's K experts e, computed by
the engine's experts module. gpt-oss's products have biases, and another gate; Nemotron-H's experts
have no gate, down_e(act(up_e(x))) (`quant.kernels.gates`).

Backward: Expert after expert, the products are repeated in fp32 on the values for which the codes
stand, and differentiated with every rounding counted as identity. Only the layer's input is saved
between forward and backward, and at most one expert is dequantized at a time. In bfloat16 on CUDA
all experts are computed at once, through grouped products (`quant.layers.grouped_backward`).

Axes: N tokens, K experts a token, E experts, H hidden columns, I expert columns.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from qarl.quant.checkpoint.families import ExpertsShape
from qarl.quant.kernels.activations import multiplied_activation
from qarl.quant.kernels.base import ExpertsMatmul
from qarl.quant.kernels.experts_loop import ExpertsLoop
from qarl.quant.kernels.gates import gate_of
from qarl.quant.kernels.ranks import experts_of_ranks
from qarl.quant.kernels.reference import PlainMatmul
from qarl.quant.layers import grouped_backward
from qarl.quant.layers.context import Forward, LayerContext
from qarl.quant.layers.lora import Adapter
from qarl.quant.layers.low_bit_layer import LowBitLayer, restored_input
from qarl.quant.layers.straight_through import add_weight_gradient, input_values
from qarl.quant.materialize import LowBitWeight
from qarl.quant.materialize.activations import LowBitActivation
from qarl.quant.materialize.experts import LowBitExperts, materialize_experts
from qarl.quant.runtime.shards import shard_of, whole_value
from qarl.quant.schemes import Scheme

_AT_ONCE = 16
"""Number of experts that are dequantized together for grouped products."""


class RoutedLowBitExperts(LowBitLayer[LowBitExperts, ExpertsMatmul]):
    """Replacement for a module of fused experts.

    Args:
        layer: checkpoint name ("model.layers.0.mlp.experts").
        gate_up: masters [E, 2I, H], gate rows first; [E, H, 2I] if `shape.layout.transposed`;
            [E, I, H] without a gate.
        down: masters [E, H, I]; [E, I, H] if `shape.layout.transposed`.
        shape: sizes, activation and checkpoint names of the experts.
        scheme: scheme of all experts.
        context: settings and state shared by all layers of the model.
        biases: biases of the two products, [E, 2I] and [E, H]. Default: none.
        engine_name: vLLM's name of the experts. Default: `layer`.
    """

    def __init__(
        self,
        layer: str,
        gate_up: nn.Parameter,
        down: nn.Parameter,
        shape: ExpertsShape,
        scheme: Scheme,
        context: LayerContext,
        biases: tuple[nn.Parameter, ...] = (),
        engine_name: str = "",
    ):
        super().__init__(layer, scheme, context, gate_up, down)
        self.register_parameter(shape.layout.first_stack, gate_up)
        self.down_proj = down
        self._engine_name = engine_name or layer
        self.biases = biases
        for key, bias in zip(("gate_up_proj_bias", "down_proj_bias"), biases, strict=False):
            self.register_parameter(key, bias)
        self.low_bit_biases: tuple[Tensor, ...] = ()
        """This version's biases, in the engine's dtype; none before the first `refresh`."""
        self.shape = shape
        self.gated = gate_of(shape.activation, shape.layout.gated)
        self._casts: list[Tensor] = []
        self._bias_casts: tuple[Tensor, ...] = ()

    def refresh(self) -> None:
        """Materialize a new version of weights and biases; see `LowBitLayer.refresh`."""
        self.low_bit_biases = tuple(whole_value(bias, self.context.dtype) for bias in self.biases)
        super().refresh()

    def _rows_first(self, stack: Tensor) -> Tensor:
        """Return a stack of matrices [E, O, I] of values in a master's layout, as a view."""
        return stack.transpose(1, 2) if self.shape.layout.transposed else stack

    def _materialize(self, out: LowBitExperts | None) -> LowBitExperts:
        gate_up, down = map(self._rows_first, self.quantizer_inputs())
        scales = self._kept_scales()
        shards = [shard_of(master) for master in self.masters]
        if self.shape.layout.transposed:
            shards = [
                shard and replace(shard, shape=torch.Size((E, columns, rows)))
                for shard, (E, rows, columns) in zip(
                    shards, (master.shape for master in self.masters), strict=True
                )
            ]
        return materialize_experts(
            gate_up,
            down,
            self.scheme,
            self.context.dtype,
            self.layer,
            out,
            scales,
            shards,
        )

    def _prepare(self, low_bit: LowBitExperts) -> ExpertsMatmul:
        return experts_of_ranks(
            self.context.factory,
            self.context.ranks,
            self._engine_name,
            self.shape,
            low_bit,
            self.low_bit_biases,
        )

    def _cast(self) -> ExpertsMatmul:
        dtype = self.context.forward_dtype
        merged = self.merged()
        casts = [
            self._rows_first(whole_value(master, dtype, rows))
            for master, rows in zip(self.masters, merged, strict=True)
        ]
        biases = tuple(whole_value(bias, dtype) for bias in self.biases)
        # An aligned layer casts for one product only, and no gradient flows through that.
        if not self.context.aligned and self.context.forward is not Forward.FP32:
            self._casts = casts
            self._bias_casts = biases
        stacked = [
            zip(cast, bias, strict=True)
            for cast, bias in zip(casts, biases or ([None] * len(casts[0]),) * 2, strict=True)
        ]
        pairs = [
            (PlainMatmul(*gate_up), PlainMatmul(*down))
            for gate_up, down in zip(*stacked, strict=True)
        ]
        return ExpertsLoop(pairs, self.gated)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor):
        """Return the layer's output, compute dtype [N, H].

        The signature is that of the transformers modules replaced.

        Args:
            hidden_states: compute dtype [N, H].
            top_k_index: int64 [N, K].
            top_k_weights: floating [N, K].
        """
        weights = top_k_weights.to(torch.float32)
        kept = self.saved_input(hidden_states.detach()) if torch.is_grad_enabled() else ()
        return _StraightThrough.apply(
            hidden_states,
            weights,
            *self.masters,
            top_k_index,
            self,
            kept,
            *self.biases,
            *self.factors,
        )

    def weights_used(self) -> Callable[[int], tuple[Tensor, Tensor]]:
        """Return a function from an expert's number to its matrices as the forward multiplied them.

        The matrices are exact, fp32 [2I, H] and [H, I].
        """
        if not self.context.multiplies_codes:
            return lambda expert: (
                self._casts[0][expert].to(torch.float32),
                self._casts[1][expert].to(torch.float32),
            )
        experts = self.codes().experts
        return lambda expert: (
            experts[expert].gate_up.dequantized(),
            experts[expert].down.dequantized(),
        )

    def biases_used(self) -> tuple[Tensor, ...]:
        """Return the biases that the forward added, compute dtype [E, 2I] and [E, H], or none."""
        return self.low_bit_biases if self.context.multiplies_codes else self._bias_casts

    def multiplies_grouped(self, dy: Tensor) -> bool:
        """Return whether the backward for this output gradient computes all experts at once."""
        if self.biases or self.shape.layout.transposed or not self.shape.layout.gated:
            return False
        ranks = [adapter.rank for adapter in self.adapters if adapter is not None]
        sizes = self.shape.hidden, self.shape.intermediate, *ranks
        return dy.is_cuda and dy.dtype == torch.bfloat16 and grouped_backward.aligned(*sizes)

    def stacks_used(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return all experts' matrices as the forward multiplied them, [E, 2I, H] and [E, H, I].

        They are rounded once to `dtype`.
        """
        if not self.context.multiplies_codes:
            gate_up, down = (cast.to(dtype) for cast in self._casts)
            return gate_up, down
        codes = self.codes()
        pairs = codes.stacks or (None, None)
        matrices = zip(*((expert.gate_up, expert.down) for expert in codes.experts), strict=True)
        gate_up, down = (
            _dequantized(one, stack, dtype) for one, stack in zip(matrices, pairs, strict=True)
        )
        return gate_up, down


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weights: Tensor,
        gate_up: Tensor,
        down: Tensor,
        index: Tensor,
        experts: RoutedLowBitExperts,
        kept: tuple[Tensor, ...],
        *tensors: Tensor,
    ) -> Tensor:
        """Multiply, and save the input for the backward.

        tensors: biases, then factors of adapters.
        """
        ctx.experts = experts
        ctx.save_for_backward(weights, index, *kept)
        # `.data`, as in `quant.layers.linear`
        y = experts.kernel(x, weights, index)
        columns = experts.shape.hidden + experts.shape.intermediate
        return experts.context.rounded(y, experts.scheme, columns).data

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        experts: RoutedLowBitExperts = ctx.experts
        weights, index, *kept = ctx.saved_tensors
        dmasters, returned_gradients = _master_gradients(experts, ctx.needs_input_grad[2:4])
        dfactors = [_factor_zeros(adapter) for adapter in experts.adapters]
        dbiases = [
            torch.zeros(bias.shape, device=bias.device) if need else None
            for bias, need in zip(experts.biases, ctx.needs_input_grad[7:], strict=False)
        ]
        dy = grad_outputs[0]
        multiplied = restored_input(kept)
        if experts.multiplies_grouped(dy):
            dx, dweights = _grouped_backward(
                experts, multiplied, weights, index, dy, dmasters, dfactors
            )
        else:
            dx, dweights = _backward_by_expert(
                experts, multiplied, weights, index, dy, dmasters, dfactors, dbiases
            )
        parameters = (*experts.masters, *experts.biases)
        returned = [
            None
            if gradient is None
            else experts.context.gradients.start_reduction(parameter, gradient)
            for parameter, gradient in zip(parameters, (*returned_gradients, *dbiases), strict=True)
        ]
        dgate_up, ddown, *returned_biases = returned
        # index, experts and kept input have no gradient
        return (
            dx.to(experts.context.forward_dtype),
            dweights,
            dgate_up,
            ddown,
            None,
            None,
            None,
            *returned_biases,
            *dfactors[0],
            *dfactors[1],
        )


def _master_gradients(
    experts: RoutedLowBitExperts, needed: Sequence[bool]
) -> tuple[list[Tensor | None], list[Tensor | None]]:
    """Return the fp32 tensors to which the masters' gradients are added, and those for autograd.

    An entry of the first list is None if the gradient is not needed; of the second also if the
    gradient is accumulated in place.
    """
    gradients = experts.context.gradients
    in_place = [
        gradients.accumulator(m) if need else None
        for m, need in zip(experts.masters, needed, strict=True)
    ]
    gradients.wait_for_memory(*experts.masters)
    returned = [
        torch.zeros(master.shape, device=master.device) if need and total is None else None
        for master, need, total in zip(experts.masters, needed, in_place, strict=True)
    ]
    totals = [total if own is None else own for total, own in zip(in_place, returned, strict=True)]
    return totals, returned


def _factor_zeros(adapter: Adapter | None) -> tuple[Tensor, ...]:
    """Return tensors to add the gradients of an adapter's factors to; none without adapter."""
    if adapter is None:
        return ()
    factors = (adapter.lora_A, adapter.lora_B)
    return tuple(torch.zeros_like(factor, dtype=torch.float32) for factor in factors)


def _grouped_backward(
    experts: RoutedLowBitExperts,
    multiplied: Tensor | LowBitActivation,
    weights: Tensor,
    index: Tensor,
    dy: Tensor,
    dmasters: Sequence[Tensor | None],
    dfactors: Sequence[Sequence[Tensor]],
) -> tuple[Tensor, Tensor]:
    """Return the gradients of the input, fp32 [N, H], and of the routing weights, fp32 [N, K].

    They are computed by grouped products. The gradients of masters and adapters are added to
    `dmasters` and `dfactors` (None: not needed).
    """

    def as_multiplied(values: Tensor) -> Tensor:
        if not experts.quantizes_activations:
            return values
        ranks = experts.context.ranks
        return multiplied_activation(values, experts.scheme, ranks).dequantized(dy.dtype)

    x = input_values(multiplied, dy.dtype)
    unscale = 1.0 / experts.context.gradients.scale
    parts = []
    for part in grouped_backward.token_gradients(
        x,
        weights,
        index,
        dy,
        experts.stacks_used(dy.dtype),
        experts.gated,
        as_multiplied,
    ):
        parts.append((part.x, part.weights))
        for dmaster, matrix in zip(dmasters, part.matrices, strict=True):
            if dmaster is not None:
                dmaster.add_(matrix.dense(), alpha=unscale)
        for adapter, dfactor, matrix in zip(experts.adapters, dfactors, part.matrices, strict=True):
            if adapter is not None:
                a = adapter.lora_A.detach()
                b = adapter.lora_B.detach()
                for total, gradient in zip(dfactor, matrix.factors(a, b), strict=True):
                    total.add_(gradient, alpha=adapter.scale * unscale)
        # Free this part's tensors before the next part is computed.
        del part, matrix
    dx, dweights = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    return dx, dweights


def _backward_by_expert(
    experts: RoutedLowBitExperts,
    multiplied: Tensor | LowBitActivation,
    weights: Tensor,
    index: Tensor,
    dy: Tensor,
    dmasters: Sequence[Tensor | None],
    dfactors: Sequence[Sequence[Tensor]],
    dbiases: Sequence[Tensor | None],
) -> tuple[Tensor, Tensor]:
    """Compute the same as `_grouped_backward`, for one expert at a time and in fp32.

    dbiases: fp32, to which the gradients of biases are added (None: not needed).
    """
    gradients = experts.context.gradients
    transposed = experts.shape.layout.transposed
    biases = tuple(bias.to(torch.float32) for bias in experts.biases_used())
    x = input_values(multiplied, torch.float32)
    dy = dy.to(torch.float32)
    dx = torch.zeros_like(x)
    dweights = torch.zeros_like(weights)
    weights_used = experts.weights_used()
    for expert in index.unique().tolist():
        rows, slots = (index == expert).nonzero(as_tuple=True)
        drows, dweights[rows, slots], products = _expert_backward(
            experts,
            weights_used(expert),
            [bias[expert] for bias in biases],
            x[rows],
            weights[rows, slots],
            dy[rows],
        )
        dx.index_add_(0, rows, drows)
        for dbias, (dout, _) in zip(dbiases, products, strict=False):
            if dbias is not None:
                dbias[expert] = gradients.unscale(dout.sum(0))
        # (doutᵀ · used)ᵀ = usedᵀ · dout
        factors = [pair[::-1] if transposed else pair for pair in products]
        for dmaster, (left, right) in zip(dmasters, factors, strict=True):
            if dmaster is not None:
                add_weight_gradient(dmaster[expert], left, right, gradients)
        for adapter, dfactor, (left, right) in zip(
            experts.adapters, dfactors, factors, strict=True
        ):
            if adapter is not None:
                factor_gradients = adapter.gradients(left, right, expert)
                for total, gradient in zip(dfactor, factor_gradients, strict=True):
                    total[expert] = gradients.unscale(gradient)
    return dx, dweights


def _expert_backward(
    experts: RoutedLowBitExperts,
    matrices: tuple[Tensor, Tensor],
    biases: Sequence[Tensor],
    x: Tensor,
    weights: Tensor,
    dy: Tensor,
) -> tuple[Tensor, Tensor, list[tuple[Tensor, Tensor]]]:
    """Repeat one expert's forward and differentiate it.

    Args:
        experts: the layer.
        matrices: the expert's matrices, see `RoutedLowBitExperts.weights_used`.
        biases: the expert's biases, fp32 [2I] and [H], or none.
        x: fp32 [n, H], as multiplied.
        weights: routing weights, fp32 [n].
        dy: gradient of the layer's output, fp32 [n, H].

    Returns the gradient of x, the gradient of the routing weights, and a pair of tensors for the
    gradient of gate and up, then one for down. A pair holds the gradient of the product's output
    [n, O] and the product's input as multiplied [n, I]; the matrix's gradient is the first,
    transposed, times the second.
    """
    gate_up, down = matrices
    first_bias, second_bias = biases or (0.0, 0.0)
    with torch.enable_grad():
        # rounded to the compute dtype, as the forward's product is
        merged = (x @ gate_up.t() + first_bias).to(experts.context.forward_dtype)
        merged = merged.to(torch.float32).requires_grad_()
        activated = experts.gated(merged)
    used = activated.detach().to(experts.context.forward_dtype)
    if experts.quantizes_activations:
        ranks = experts.context.ranks
        used = multiplied_activation(used, experts.scheme, ranks).dequantized(torch.float32)
    used = used.to(torch.float32)
    dweights = (dy * (used @ down.t() + second_bias)).sum(-1)
    scaled = dy * weights[:, None]
    (dmerged,) = torch.autograd.grad(activated, merged, scaled @ down)
    return dmerged @ gate_up, dweights, [(dmerged, x), (scaled, used)]


def _dequantized(
    matrices: Sequence[LowBitWeight], stack: LowBitWeight | None, dtype: torch.dtype
) -> Tensor:
    """Return all experts' matrices, dequantized in fp32 and rounded once to `dtype`, [E, O, I].

    `_AT_ONCE` experts are dequantized at a time, or one if there is no stack of all.
    """
    rows, columns = matrices[0].shape
    experts = len(matrices)
    values = torch.empty(experts, rows, columns, dtype=dtype, device=matrices[0].codes.device)
    flat_values = values.view(-1, columns)
    for start in range(0, experts, 1 if stack is None else _AT_ONCE):
        stop = min(start + _AT_ONCE, experts)
        part = matrices[start] if stack is None else stack.rows(start * rows, stop * rows)
        first_row = start * rows
        target = flat_values[first_row : first_row + part.shape[0]]
        target.copy_(part.dequantized(dtype))
    return values
