"""Independent check of the engine's operators: its model against transformers', both in fp32.

Learner and engine compute with the same operators of vLLM, so that equal log-probs hide what both
get wrong: a rotary embedding, the epsilon of a norm, a setting of config.json that vLLM reads in
another way. Before a run the masters are therefore multiplied once in fp32 by vLLM's model and by
transformers', on a few short sequences, without quantization. What differs should be rounding
alone. How much that is depends on the model and is measured: vLLM's model is run a second time with
every product's results changed by up to one unit in the last place.

Blind spots: what only longer sequences show, as windows that are wider than them; operators that
vLLM has in 16-bit dtypes only; quantized products, which audit and canary compare.

Axes: B sequences, N tokens of all sequences, C hidden columns.
"""

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM
from transformers.modeling_layers import GradientCheckpointingLayer

from qarl.configs.errors import GraphError
from qarl.configs.words import error_text
from qarl.quant.graph.packing import Sequences
from qarl.quant.model.low_bit_model import LowBitModel
from qarl.quant.runtime.shards import fp32_value

_SEQUENCES = 2
"""Number of sequences that are compared."""
_TOKENS = 32
"""Most tokens of each, so that the check takes a second or two for a small model on a CPU."""
_SEED = 70
"""Seed of the random changes to products."""
TIMES_ROUNDING = 30.0
"""Multiple of the effect of rounding by which two right implementations may differ."""
_DELTA_KERNELS = "the kernels of gated delta nets, which have bfloat16 alone"
_SMALLEST = 1e-6
"""Bound where rounding has no effect that is measured, in nats and relative to a layer's output."""


@dataclass(frozen=True)
class OperatorCheck:
    """Result of the comparison."""

    difference: float
    """Mean |Δ log p| of vLLM's and transformers' model, in nats a token."""
    bound: float
    """Largest mean |Δ log p| that rounding explains, in nats a token."""
    tokens: int
    """Number of tokens that were compared."""
    diverges_in: str = ""
    """First part of the model after which the two differ by more than rounding; "" if none."""
    left_out: str = ""
    """Part of vLLM's model that was computed in another way in fp32; "" if none."""
    unknown: str = ""
    """Reason why nothing was compared, or ""."""

    @property
    def wrong(self) -> bool:
        """Return whether the models differ by more than rounding explains."""
        # A NaN is wrong, too.
        return not self.unknown and not self.difference <= self.bound

    def __str__(self) -> str:
        if self.unknown:
            return f"vLLM's operators were not compared with transformers': {self.unknown}"
        values = f"{self.difference:.1e} nats a token in float32, of {self.tokens} tokens"
        values += self.left_out and f", without {self.left_out}"
        if not self.wrong:
            return (
                f"vLLM's operators agree with transformers': {values} (rounding explains up to"
                f" {self.bound:.1e})"
            )
        return (
            f"vLLM's model and transformers' differ by {values}, where rounding explains"
            f" {self.bound:.1e}; they part in {self.diverges_in or 'no single layer'}"
        )


@dataclass(frozen=True)
class _Trace:
    """What a model computes for the sequences."""

    layers: list[tuple[Tensor, ...]]
    """The embeddings, then each decoder layer's output: alternatives, each fp32 [N, C]."""
    logprobs: Tensor
    """Log-probs of each token but the first of each sequence, fp32 [N - B]."""


@torch.no_grad()
def check_operators(model: LowBitModel, sequences: Sequence[Sequence[int]]) -> OperatorCheck | None:
    """Compare vLLM's model with transformers', on the masters of a model.

    Two forwards of vLLM's model and one of transformers', of 64 tokens at most; a layer's fp32
    weights exist one layer at a time. Collective: all processes that share masters call it
    together.

    Args:
        model: None is returned if it has transformers' operators.
        sequences: token ids. The first few are taken, and of each the first few tokens.
    """
    if model.operators != "engine":
        return None
    rows = [list(sequence[:_TOKENS]) for sequence in sequences if len(sequence) > 1][:_SEQUENCES]
    assert rows, "the canary has sequences"
    try:
        with model.fp32_graph() as graph:
            left_out = _DELTA_KERNELS if graph.delta_nets else ""
            ours = _engine_trace(graph, rows, model.device)
            with model.context.other_roundings(_SEED):
                rerounded = _engine_trace(graph, rows, model.device)
    except Exception as error:
        kind = f"{type(error).__name__}: " if str(error).strip() else ""
        words = kind + error_text(error).partition("\n")[0]
        # No GPU has run this comparison, and vLLM's kernels there have 16 bits more often.
        if model.device.type == "cpu" and not _about_dtypes(error):
            raise GraphError(
                f"vLLM's model could not be compared with transformers' in float32: {words}; report"
                " this one, or set learner.operators to 'transformers'"
            ) from error
        reason = f"its model does not run in float32 ({words})"
        return OperatorCheck(difference=0.0, bound=0.0, tokens=0, unknown=reason)
    theirs = _transformers_trace(model, rows)
    rounding = _mean_difference(rerounded.logprobs, ours.logprobs)
    return OperatorCheck(
        difference=_mean_difference(ours.logprobs, theirs.logprobs),
        bound=most_of_rounding(rounding),
        tokens=len(ours.logprobs),
        diverges_in=_first_divergence(ours, rerounded, theirs),
        left_out=left_out,
    )


def _about_dtypes(error: Exception) -> bool:
    """Return whether vLLM or torch says by this error that a kernel has no float32."""
    if isinstance(error, AttributeError | NameError):  # a fault of code, whatever its names
        return False
    words = re.compile(
        r"float32|bfloat16|BF16|\bhalf\b|'Float'|::Float\b|\bdtypes?\b", re.IGNORECASE
    )
    return isinstance(error, NotImplementedError) or bool(words.search(str(error)))


def _first_divergence(ours: _Trace, rerounded: _Trace, theirs: _Trace) -> str:
    """Return the first part after which two models differ by more than rounding; "" if none."""
    if len(ours.layers) != len(theirs.layers):
        return f"the number of layers: {len(ours.layers) - 1} and {len(theirs.layers) - 1}"
    for number, (ours_here, rerounded_here, (expected,)) in enumerate(
        zip(ours.layers, rerounded.layers, theirs.layers, strict=True)
    ):
        pairs = [
            (_relative(actual, expected), _relative(other, actual))
            for actual, other in zip(ours_here, rerounded_here, strict=True)
            if actual.shape == expected.shape
        ]
        if not pairs:
            continue
        difference, rounding = min(pairs)
        bound = most_of_rounding(rounding)
        if not difference <= bound:
            name = f"decoder layer {number - 1}" if number else "the embeddings"
            return f"{name}, whose output differs by {difference:.1e} of its size ({bound:.1e})"
    return "the last norm or the output head"


def most_of_rounding(rounding: float) -> float:
    """Return the largest difference taken for rounding, of what other roundings change."""
    return max(TIMES_ROUNDING * rounding, _SMALLEST)


def _relative(actual: Tensor, expected: Tensor) -> float:
    """Return ‖actual - expected‖ / ‖expected‖."""
    return float((actual - expected).norm() / expected.norm().clamp_min(1e-30))


def _mean_difference(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).abs().mean())


def _engine_trace(graph: Any, rows: list[list[int]], device: torch.device) -> _Trace:
    """Run vLLM's model on all sequences in one row.

    A layer returns its output, or two tensors whose sum it is and which the next layer adds; both
    are alternatives.
    """
    layers: list[tuple[Tensor, ...]] = []

    def embedded(module: Any, args: Any, kwargs: Any) -> None:
        layers.append(tuple(t.clone() for t in _hidden((*args, *kwargs.values()))))

    def output(module: Any, args: Any, result: Any) -> None:
        tensors = _hidden(result if isinstance(result, tuple) else (result,))
        layers.append((tensors[0].clone(), *([tensors[0] + tensors[1]] if tensors[1:] else [])))

    modules = graph.decoder_layers
    with _hooked(modules, embedded, output):
        tokens = torch.tensor([token for row in rows for token in row], device=device)
        sequences = Sequences.apart([len(row) for row in rows])
        hidden = graph.hidden(tokens, replace(sequences, prefilled=sequences.lengths))
        logits = graph.logits(hidden)
    parts = logits.float().split([len(row) for row in rows])
    return _Trace(layers, torch.cat([_logprobs(*p) for p in zip(parts, rows, strict=True)]))


def _transformers_trace(model: LowBitModel, rows: list[list[int]]) -> _Trace:
    """Run transformers' model of the same configuration.

    Sequences are padded on the right, which causal models do not see.
    """
    tokens = pad_sequence([torch.tensor(row) for row in rows], batch_first=True).to(model.device)
    lengths = torch.tensor([len(row) for row in rows], device=model.device)
    is_token = torch.arange(tokens.shape[1], device=model.device)[None] < lengths[:, None]
    layers: list[tuple[Tensor, ...]] = []

    def embedded(module: Any, args: Any, kwargs: Any) -> None:
        layers.append((_hidden((*args, *kwargs.values()))[0][is_token],))

    def output(module: Any, args: Any, result: Any) -> None:
        tensors = _hidden(result if isinstance(result, tuple) else (result,))
        layers.append((tensors[0][is_token],))

    plain = transformers_model(model)
    modules = [m for m in plain.modules() if isinstance(m, GradientCheckpointingLayer)]
    with _hooked(modules, embedded, output):
        logits = plain(input_ids=tokens, use_cache=False).logits.float()
    parts = [row_logits[: len(row)] for row_logits, row in zip(logits, rows, strict=True)]
    return _Trace(layers, torch.cat([_logprobs(*p) for p in zip(parts, rows, strict=True)]))


def _logprobs(logits: Tensor, row: list[int]) -> Tensor:
    """Return log-probs of a sequence's tokens but the first: logits [T, V] → [T - 1]."""
    following = torch.tensor(row[1:], device=logits.device)
    return logits[:-1].log_softmax(-1).gather(-1, following[:, None])[:, 0].cpu()


def _hidden(values: Sequence[Any]) -> list[Tensor]:
    """Return the hidden states among a layer's arguments or results."""
    return [t for t in values if isinstance(t, Tensor) and t.is_floating_point() and t.ndim >= 2]


@contextlib.contextmanager
def _hooked(modules: Sequence[nn.Module], before_first: Any, after: Any) -> Iterator[None]:
    """Call a function before the first of these modules, and another after each of them."""
    handles = [module.register_forward_hook(after) for module in modules]
    handles += [
        module.register_forward_pre_hook(before_first, with_kwargs=True) for module in modules[:1]
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def transformers_model(model: LowBitModel) -> nn.Module:
    """Return transformers' own model in fp32 that reads a model's masters.

    It is built from the configuration, so that what it computes at construction is fp32 whatever
    the masters' dtype is. A module has its weights only while it runs.
    """
    from accelerate import init_empty_weights

    with init_empty_weights(include_buffers=False):
        # sdpa leaves out soft caps and sinks
        plain = AutoModelForCausalLM.from_config(
            model.config, dtype=torch.float32, attn_implementation="eager"
        ).eval()
    plain.tie_weights()
    for _, buffer in plain.named_buffers():
        buffer.data = buffer.data.to(model.device)
    for name, tensor in model.loaded_state().items():
        if name not in model.loaded:
            buffer = plain.get_buffer(name)
            buffer.data = tensor.to(buffer.dtype)
    # a tied weight has two names, of which the masters have the first
    first = {id(parameter): name for name, parameter in plain.named_parameters()}
    masters = _values(model)
    values = {
        name: masters[first[id(parameter)]]
        for name, parameter in plain.named_parameters(remove_duplicate=False)
    }
    for prefix, module in _units(plain):
        weights = _Weights(prefix, module, values)
        module.register_forward_pre_hook(weights.put)
        module.register_forward_hook(weights.take)
    return plain


def _units(model: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield name and module of each decoder layer and of other modules with parameters."""
    for name, module in model.named_children():
        full = f"{prefix}{name}"
        if isinstance(module, GradientCheckpointingLayer) or any(
            p is not None for p in module._parameters.values()
        ):
            yield full, module
        else:
            yield from _units(module, f"{full}.")


def _values(model: LowBitModel) -> dict[str, Callable[[], Tensor]]:
    """Return name → function that returns the master's fp32 value, with its adapter's product."""
    owners = {
        id(master): (layer, index)
        for layer in model.low_bit_layers()
        for index, master in enumerate(layer.masters)
    }

    def value_of(parameter: nn.Parameter) -> Tensor:
        if id(parameter) not in owners:
            return fp32_value(parameter)
        layer, index = owners[id(parameter)]
        return fp32_value(parameter, layer.merged()[index])

    return {name: partial(value_of, parameter) for name, parameter in model.loaded.items()}


class _Weights:
    """The parameters of a module and of those inside it, which are there only while it runs.

    Args:
        prefix: the module's name.
        module: its parameters are on the meta device.
        values: parameter name → function that returns the value.
    """

    def __init__(self, prefix: str, module: nn.Module, values: Mapping[str, Callable[[], Tensor]]):
        self._places = [
            (part, key, values[".".join(filter(None, (prefix, name, key)))])
            for name, part in module.named_modules()
            for key, parameter in part._parameters.items()
            if parameter is not None
        ]
        self._empty = [part._parameters[key] for part, key, _ in self._places]

    def put(self, *unused: object) -> None:
        """Install the weights (a pre-hook)."""
        for part, key, value in self._places:
            part._parameters[key] = nn.Parameter(value(), requires_grad=False)

    def take(self, *unused: object) -> None:
        """Free the weights (a hook)."""
        for (part, key, _), empty in zip(self._places, self._empty, strict=True):
            part._parameters[key] = empty
