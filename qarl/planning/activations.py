"""The activations of a micro-batch: what layers keep for their backward, and what one layer's
backward takes on top of it.

Symbols in the derivations beside the formulas:

    N  tokens of a micro-batch          C  hidden columns
    V  vocabulary                       I  columns of the MLP, or of one expert
    E  experts of a layer               Q  columns of all queries, heads × head size
    T  experts a token is routed to     K  columns of all keys, and of all values
    b  bytes of a value in the compute dtype
    a  bytes of a value of a product's input, as it is multiplied: b unless the scheme quantizes
       activations and the learner multiplies codes

A formula marked "not derived" was fitted to a trace or assumed. The activations of a layer are held
to what autograd keeps on a CPU, and a whole backward to a trace of the GPU code on tensors without
values, by tests/qarl/test_plan_activations.py.
"""

from dataclasses import dataclass
from functools import cached_property

from qarl.configs.schema.run import RunConfig
from qarl.configs.schemes import SCHEME_SPECS
from qarl.planning.shapes import ITEMSIZE, Shapes
from qarl.quant.limits import GROUPED_TOKENS, LARGEST_PRODUCT

_FP32 = 4
_INT64 = 8

_TRANSFORMERS_FACTOR = 2.0
"""Activations of a layer with transformers' operators over those with the engine's.

An estimate of autograd's additional intermediates, not derived.
"""


@dataclass(frozen=True)
class Activations:
    """The activations of a micro-batch of one process."""

    shapes: Shapes
    config: RunConfig

    device: str
    """"cpu" or "cuda"."""

    @cached_property
    def itemsize(self) -> int:
        """b: bytes of a value in the compute dtype."""
        return ITEMSIZE[self.config.dtype]

    @cached_property
    def tokens(self) -> int:
        """N: tokens of a micro-batch, at most all tokens of a mini-batch."""
        rollout = self.config.rollout
        learner = self.config.learner
        prompts = -(-rollout.prompts // learner.mini_batches)  # rounded up
        mini_batch = prompts * rollout.samples * rollout.longest
        return min(learner.micro_batch_tokens, mini_batch)

    @property
    def _input_itemsize(self) -> float:
        """a: bytes of a value of an input as the scheme's products take it."""
        return SCHEME_SPECS[self.config.scheme].input_bytes(self.itemsize)

    @cached_property
    def layer_kept(self) -> float:
        """Bytes a token that one decoder layer keeps for its backward, by the engine's operators.

        `quant.graph` defines them. Transformers' operators keep more: `_TRANSFORMERS_FACTOR`.
        """
        shapes = self.shapes
        learner = self.config.learner
        itemsize = self.itemsize
        hidden = shapes.hidden
        # Each of the two norms keeps what it normalizes, [N, C] (`graph.operators._Norm`).
        norms = 2 * itemsize * hidden
        layer = norms + self._attention_kept() + self._mlp_kept()
        engine_operators = learner.operators != "transformers" and learner.aligned
        return layer * (1.0 if engine_operators else _TRANSFORMERS_FACTOR)

    @property
    def _multiplied_itemsize(self) -> float:
        """a, for this learner: an unaligned one multiplies inputs in the compute dtype."""
        return self._input_itemsize if self.config.learner.aligned else self.itemsize

    def _attention_kept(self) -> float:
        """Bytes a token that attention keeps (`graph.attention`, `layers.linear`)."""
        input_itemsize = self._multiplied_itemsize
        itemsize = self.itemsize
        queries = self.shapes.query_columns
        keys = self.shapes.key_columns
        # The input of the q, k and v product as multiplied, a·C.
        # The product's output, b·(Q + 2·K): norms of queries and keys, and values, are views of it.
        # Queries and keys after their rotation, b·(Q + K).
        saved = input_itemsize * self.shapes.hidden + itemsize * (2 * queries + 3 * keys)
        # The input of the o product as multiplied, a·Q. On GPUs, if it is not quantized, it is the
        # output below and counts there.
        if self.device == "cpu" or input_itemsize < itemsize:
            saved += input_itemsize * queries
        # FlashAttention's backward reads its output, and the log-sum of each head's scores in fp32.
        # On CPUs the backward computes both again.
        if self.device != "cpu":
            saved += itemsize * queries + _FP32 * self.shapes.heads
        return saved

    def _mlp_kept(self) -> float:
        """Bytes a token that the MLP or the experts keep."""
        shapes = self.shapes
        input_itemsize = self._multiplied_itemsize
        itemsize = self.itemsize
        hidden = shapes.hidden
        intermediate = shapes.intermediate
        if not shapes.experts:
            # The input of gate and up as multiplied, a·C; gate and up, which the activation keeps,
            # b·2·I; the input of down as multiplied, a·I.
            return (
                input_itemsize * hidden
                + 2 * itemsize * intermediate
                + input_itemsize * intermediate
            )
        # Experts keep their input alone, not what is between their products (`layers.experts`).
        # The router reads the same input in the compute dtype, b·C, so that only quantized values
        # come on top, a·C.
        quantized_input = input_itemsize * hidden if input_itemsize < itemsize else 0
        return itemsize * hidden + quantized_input + self._router_kept()

    def _router_kept(self) -> int:
        """Bytes a token that the router's choice and weights keep (`graph.experts`)."""
        shapes = self.shapes
        if self.device == "cpu":
            # Of each chosen expert: `topk`'s int64 index, the experts' index, counted as int64 too,
            # the experts' weight in fp32 and the softmax's in the compute dtype.
            choice = _INT64 + _INT64 + _FP32 + self.itemsize
            return shapes.experts_a_token * choice
        # The router's logits in fp32. Of each chosen expert: `gather`'s int64 index, and two fp32
        # weights, of the formula and with the engine's bits.
        return _FP32 * shapes.experts + (_INT64 + 2 * _FP32) * shapes.experts_a_token

    def kept(self) -> int:
        """Activations kept between forward and backward."""
        layers = self.shapes.layers
        column = self.itemsize * self.shapes.hidden
        if self.config.learner.gradient_checkpointing is True:
            # A layer keeps its two inputs: the branch, and the residual that its norm adds it to.
            # One layer's activations come on top, because the backward computes them again.
            a_token = layers * 2 * column + self.layer_kept
        else:
            a_token = layers * self.layer_kept
        # The sum that the last norm normalizes, and its output, which the head is given.
        return int(self.tokens * (a_token + 2 * column))

    def layer_backward(self) -> float:
        """Bytes of a decoder layer's backward: the larger of the MLP's and attention's."""
        if self.shapes.experts:
            return self._mixture_layer_backward()
        return self._dense_layer_backward()

    @property
    def _gradient_between_modules(self) -> int:
        """Bytes of the gradients that a module's backward is given and passes on, [N, C].

        One is in the compute dtype and one in fp32, in a norm's backward. Taken from the trace; not
        derived.
        """
        return self.tokens * (_FP32 + self.itemsize) * self.shapes.hidden

    @property
    def _attention_backward_columns(self) -> int:
        """Columns a token of attention's backward.

        2·(Q + 2·K) are queries, keys and values, and their gradients. 4·Q are attention's output
        and its gradient, and two more tensors of that size; not derived.
        """
        queries = self.shapes.query_columns
        keys = self.shapes.key_columns
        return 4 * queries + 2 * (queries + 2 * keys)

    @property
    def _weight_backward(self) -> int:
        """Bytes of the largest matrix's two products, for the input's and the weight's gradient."""
        # Codes as fp32 values, the same times their scales, and rounded to the compute dtype
        # (`materialize.weight`).
        dequantized = (2 * _FP32 + self.itemsize) * self.shapes.largest_matrix
        if self.device != "cuda":
            return dequantized
        # A part of the weight's gradient, before it is added (`layers.straight_through`).
        return dequantized + _FP32 * min(self.shapes.largest_matrix, LARGEST_PRODUCT)

    def _mixture_layer_backward(self) -> float:
        """`layer_backward` of a mixture."""
        shapes = self.shapes
        itemsize = self.itemsize
        attention = self._attention_backward_columns
        if self.device == "cuda" and self.config.dtype == "bfloat16":
            grouped = self._experts_backward()
            attention_bytes = self.tokens * itemsize * attention
            return self._gradient_between_modules + max(grouped, attention_bytes)
        # One expert after another in fp32 (`layers.experts._backward_by_expert`).
        # [N, C] of the experts' input, of its gradient and of the output's.
        all_tokens = self.tokens * 3 * _FP32 * shapes.hidden
        # If tokens are spread evenly an expert has N·T/E rows. Each has gate and up (2·I), their
        # gradient (2·I), their product (I) and what is multiplied of it (I), and the row's input
        # and output gradient (2·C).
        row = 6 * shapes.intermediate + 2 * shapes.hidden
        expert_rows = self.tokens * shapes.experts_a_token / shapes.experts * _FP32 * row
        mlp = all_tokens + expert_rows + self._weight_backward
        attention_itemsize = itemsize if self.device == "cuda" else _FP32
        attention_bytes = self.tokens * attention_itemsize * attention
        return self._gradient_between_modules + max(mlp, attention_bytes)

    def _dense_layer_backward(self) -> float:
        """`layer_backward` of a layer with one gated MLP."""
        tokens = self.tokens
        itemsize = self.itemsize
        intermediate = self.shapes.intermediate
        input_gradient = tokens * itemsize * self.shapes.hidden
        attention = self._attention_backward_columns
        if self.device == "cuda":
            # Quantized inputs of down are dequantized for its weight's gradient: fp32 values, the
            # same times their scales, and rounded. Else the gradients of gate and up, 2·I.
            low_bit = SCHEME_SPECS[self.config.scheme].activations is not None
            column = 2 * _FP32 + itemsize if low_bit else 2 * itemsize
            mlp = tokens * column * intermediate
            # Gate and up, b·2·I, are freed when attention's backward begins, but `activations`
            # counts them.
            attention_bytes = tokens * itemsize * (attention - 2 * intermediate)
            return input_gradient + max(mlp, self._weight_backward, attention_bytes)
        # Gradients of gate and up, 2·I, and of their product, I.
        mlp = tokens * 3 * itemsize * intermediate + input_gradient + self._weight_backward
        # Attention's backward is in fp32 on CPUs (`graph.attention.torch_attention`).
        attention_bytes = tokens * _FP32 * attention
        return self._gradient_between_modules + max(mlp, attention_bytes)

    def _experts_backward(self) -> float:
        """Bytes of the grouped backward of one layer's experts (`layers.grouped_backward`).

        It takes `GROUPED_TOKENS` tokens at a time. All experts' matrices are dequantized for it.
        """
        shapes = self.shapes
        itemsize = self.itemsize
        hidden = shapes.hidden
        intermediate = shapes.intermediate
        group = min(self.tokens, GROUPED_TOKENS)
        rows = group * shapes.experts_a_token
        # Elements of one of gate, up and down, of all experts. Dequantized, all three are in the
        # compute dtype, bf16.
        matrices = shapes.experts * intermediate * hidden
        dequantized = 3 * itemsize * matrices
        # Bytes of a row apart from its columns: sorted expert, its order and token, int64 (24);
        # scale and weight's gradient, fp32 (8); and 8 more, not derived.
        indices = 40
        # When the gate is derived (`torch.autograd.grad`), a row's columns have in bytes
        #   gate and up, fp32                                    8·I
        #   activation(gate), fp32                               4·I
        #   activation(gate) · up, fp32                          4·I
        #   the same as multiplied, bf16                         2·I
        #   its gradient, and that times the token's weight      8·I
        #   gradients of activation(gate), of up and of gate    12·I
        #                                                       38·I
        # and the row's input and output gradient, b·2·C.
        derived = 2 * itemsize * hidden + 38 * intermediate + indices
        # When the matrices' gradients are made, all that is left is the input of down, I, and the
        # gradient of gate and up, 2·I, both bf16; and the input and scaled output gradient, b·2·C.
        summed = 2 * itemsize * hidden + 3 * itemsize * intermediate + indices
        # The gradient of gate and up of all experts, bf16, before it is added in fp32.
        merged_gradient = 2 * itemsize * matrices
        # A token's results in fp32: the gradient of its input, C, and of its weights, T. The second
        # T was taken from the trace; not derived.
        a_token = _FP32 * (hidden + 2 * shapes.experts_a_token)
        results = a_token * self.tokens
        results_before = results - a_token * group
        largest = max(
            results_before + rows * derived,
            results + rows * summed + merged_gradient,
            2 * results,  # at the end: parts, and their concatenation
        )
        # Quantized inputs are dequantized to the compute dtype, [N, C].
        quantized = self._input_itemsize < itemsize
        inputs = self.tokens * itemsize * hidden if quantized else 0
        return dequantized + largest + inputs
