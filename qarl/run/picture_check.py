"""Independent check of prompts with pictures: the engine's inputs and model against transformers'.

Learner and engine share what the tower made of a picture, where it stands, at which positions, and
which tokens see which, so that equal log-probs hide what both get wrong. Before a run, one prompt
with pictures therefore goes through transformers' whole model in float32. Two things must agree
with it: what the engine's tower made of the pictures, up to the rounding of its dtype, and the
language model's log-probs of the prompt, up to rounding, if it is given transformers' output of the
tower. Both models' last hidden states go through one output head, which the comparison of text
(`quant.model.operator_check`) covers: transformers' Cohere 2 Vision leaves out the scale of logits.

Blind spots: what other pictures show, such as those of other sizes; what only more pictures in one
prompt show.

Axes: T tokens of the prompt, P of them in the places of pictures, C hidden columns.
"""

import gc
import inspect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText

from qarl.configs.words import error_text
from qarl.planning.machine import available_memory
from qarl.planning.memory import GIB
from qarl.quant.checkpoint.folder import tensor_shapes
from qarl.quant.graph.packing import PictureRows, Sequences
from qarl.quant.model.low_bit_model import LowBitModel
from qarl.quant.model.operator_check import most_of_rounding
from qarl.rollout.picture_processors import load_processor
from qarl.rollout.pictures import open_picture
from qarl.rollout.types import EmbeddedPictures, Prompt
from qarl.sync.audit import AuditError

_SEED = 71
"""Seed of the random changes to products."""
_TOWER_BOUND = 0.1
"""Difference of two towers' outputs, relative to their size, that is always taken for rounding."""
_TIMES_DTYPE = 3.0
"""Multiple of the effect of the engine's dtype on transformers' tower that is, too."""


@dataclass(frozen=True)
class PictureCheck:
    """Result of the comparison."""

    difference: float
    """Mean |Δ log p| of the engine's and transformers' language model, in nats a token."""
    bound: float
    """Largest mean |Δ log p| that rounding explains, in nats a token."""
    tower: float
    """Difference of the towers' outputs, relative to their size."""
    tower_bound: float
    """Largest difference of the towers' outputs that rounding explains."""
    tokens: int
    """Number of the prompt's tokens."""
    unknown: str = ""
    """Reason why nothing was compared, or ""."""

    @property
    def wrong(self) -> bool:
        """Return whether the two differ by more than rounding explains."""
        # A NaN is wrong, too.
        agrees = self.difference <= self.bound and self.tower <= self.tower_bound
        return not self.unknown and not agrees

    def __str__(self) -> str:
        if self.unknown:
            return f"pictures were not compared with transformers': {self.unknown}"
        return (
            f"pictures {'differ from' if self.wrong else 'agree with'} transformers': what the"
            f" tower made of them by {self.tower:.1e} of its size (up to {self.tower_bound:.0e}),"
            f" the log-probs of {self.tokens} tokens by {self.difference:.1e} nats a token in"
            f" float32 (rounding explains up to {self.bound:.1e})"
        )


def require_right_pictures(checked: PictureCheck) -> None:
    """Raise `AuditError` if the engine sees other pictures than transformers' model."""
    if checked.wrong:
        raise AuditError(
            f"{checked}. The engine, which samples, would see other pictures than the checkpoint's"
            " own model, and the learner with it. Look whether config.json and"
            " preprocessor_config.json are those of the model's publisher, train on text alone"
            " (rollout.pictures 0), or take another model, and report this one"
        )


@torch.no_grad()
def check_pictures(
    model: LowBitModel, folder: Path, prompt: Prompt, pictures: EmbeddedPictures
) -> PictureCheck:
    """Compare the engine's pictures, and its model of a prompt with them, with transformers'.

    transformers' whole model is loaded in float32 and freed again. If there is no memory for it,
    nothing is compared, which the result says.

    Args:
        model: has the masters of the folder, before any update.
        folder: the model's folder.
        prompt: with pictures.
        pictures: what the engine made of them.
    """
    needed = 4 * sum(map(math.prod, tensor_shapes(folder).values()))
    if needed > (free := available_memory()):
        return _not_compared(
            f"its whole model takes {needed / GIB:.1f} GiB in float32, and {free / GIB:.1f} GiB are"
            " free"
        )
    try:
        hidden, embedded, rounding = _whole_outputs(folder, prompt, pictures)
    except Exception as error:  # transformers' classes may raise anything
        words = f"{type(error).__name__}: {error_text(error)}".partition("\n")[0]
        return _not_compared(f"its whole model cannot be run ({words})")
    gc.collect()
    actual, rerounded, expected = _all_logprobs(model, prompt, pictures, embedded, hidden)
    return PictureCheck(
        difference=float((actual - expected).abs().mean()),
        bound=most_of_rounding(float((rerounded - actual).abs().mean())),
        tower=_relative(pictures.rows, embedded),
        tower_bound=max(_TOWER_BOUND, _TIMES_DTYPE * rounding),
        tokens=len(prompt.token_ids),
    )


def _not_compared(reason: str) -> PictureCheck:
    """Return the result that says why nothing was compared."""
    return PictureCheck(
        difference=0.0, bound=0.0, tower=0.0, tower_bound=0.0, tokens=0, unknown=reason
    )


def _relative(actual: Tensor, expected: Tensor) -> float:
    """Return ‖actual - expected‖ / ‖expected‖."""
    actual = actual.float().cpu()
    return float((actual - expected).norm() / expected.norm().clamp_min(1e-30))


def _all_logprobs(
    model: LowBitModel, prompt: Prompt, pictures: EmbeddedPictures, rows: Tensor, hidden: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return fp32 log-probs [T - 1] of a prompt by vLLM's language model, by it with other
    roundings, and by transformers'.

    Args:
        model: see `check_pictures`.
        prompt: see `check_pictures`.
        pictures: see `check_pictures`.
        rows: what transformers' tower made of the pictures, fp32 [P, C] or more columns.
        hidden: transformers' last hidden states, fp32 [T, C].
    """
    rows = rows.to(model.device)
    tokens = torch.tensor(prompt.token_ids, device=model.device)
    index = torch.full_like(tokens, -1)
    index[pictures.places] = torch.arange(len(rows), device=model.device)
    in_row = PictureRows(rows, index, pictures.positions, pictures.sees)
    length = (len(tokens),)
    sequences = Sequences(length, length, None, length)

    def ours(graph: Any) -> Tensor:
        output = graph.hidden(tokens, sequences, pictures=in_row)
        return _logprobs(graph.logits(output).float(), prompt.token_ids)

    with model.fp32_graph() as graph:
        theirs = graph.logits(hidden.to(model.device)).float()
        actual = ours(graph)
        with model.context.other_roundings(_SEED):
            rerounded = ours(graph)
    return actual, rerounded, _logprobs(theirs, prompt.token_ids)


def _whole_outputs(
    folder: Path, prompt: Prompt, pictures: EmbeddedPictures
) -> tuple[Tensor, Tensor, float]:
    """Return transformers' last hidden states of a prompt, fp32 [T, C]; what its tower made of the
    pictures, [P, C] or more columns (deepstack); and the relative effect of the engine's dtype on
    the latter.
    """
    loader: Any = AutoModelForImageTextToText
    whole = loader.from_pretrained(folder, dtype=torch.float32).eval()
    inputs = whole_inputs(whole, load_processor(folder), prompt)
    seen: dict[str, Any] = {}

    def look(module: Any, args: Any, kwargs: Any, output: Any) -> None:
        seen.update(kwargs, output=output)

    def rows() -> Tensor:
        whole(**inputs)
        deeper = seen.get("deepstack_visual_embeds") or ()
        return torch.cat([seen["inputs_embeds"][0, pictures.places], *deeper], -1)

    whole.get_decoder().register_forward_hook(look, with_kwargs=True)
    embedded = rows()
    hidden = seen["output"].last_hidden_state[0]
    dtype = pictures.rows.dtype
    whole.to(dtype)
    for name, value in inputs.items():
        inputs[name] = value.to(dtype) if value.is_floating_point() else value
    return hidden, embedded, _relative(rows(), embedded)


def whole_inputs(whole: Any, processor: Any, prompt: Prompt) -> dict[str, Tensor]:
    """Return the arguments of transformers' whole model for a prompt with pictures.

    Raises `ValueError` if its processor makes other tokens of the prompt's text.
    """
    assert prompt.pictures is not None
    pictures = [open_picture(file) for file in prompt.pictures.files]
    text = processor.tokenizer.decode(list(prompt.pictures.token_ids))
    inputs = processor(
        text=[text],
        images=[pictures],
        return_tensors="pt",
        add_special_tokens=False,
        text_kwargs={"return_mm_token_type_ids": True},
    )
    _require_same(inputs.pop("input_ids")[0].tolist(), prompt.token_ids)
    # a mask would be as long as the prompt, and there is no padding
    names = inspect.signature(whole.forward).parameters.keys() - {"attention_mask"}
    chosen = {name: value for name, value in inputs.items() if name in names}
    return {**chosen, "input_ids": torch.tensor([prompt.token_ids])}


def _require_same(tokens: Sequence[int], expected: Sequence[int]) -> None:
    if tuple(tokens) != tuple(expected):
        raise ValueError(f"its processor makes {len(tokens)} tokens of {len(expected)}, or others")


def _logprobs(logits: Tensor, tokens: Sequence[int]) -> Tensor:
    """Return log-probs of a prompt's tokens but the first: logits [T, V] → [T - 1]."""
    following = torch.tensor(tokens[1:], device=logits.device)
    return logits[:-1].log_softmax(-1).gather(-1, following[:, None])[:, 0].cpu()
