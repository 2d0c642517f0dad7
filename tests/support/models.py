"""Small random dense models of transformers' classes, and what tests compute with them."""

from typing import Any

import torch
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from qarl.quant.layers.context import LayerContext
from qarl.quant.model.low_bit_model import LowBitModel
from qarl.quant.schemes import get_scheme
from tests.support.tensors import as_bytes, seeded

VOCABULARY = 96
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 64,
}
PUBLISHED: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": {
        "model_type": "qwen3",
        "hidden_size": 1024,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "intermediate_size": 3072,
        "head_dim": 128,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
        "max_position_embeddings": 32768,
    },
    "qwen3-1.7b": {
        "model_type": "qwen3",
        "hidden_size": 2048,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "intermediate_size": 6144,
        "head_dim": 128,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
        "max_position_embeddings": 32768,
    },
    "qwen3-4b": {
        "model_type": "qwen3",
        "hidden_size": 2560,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 9728,
        "head_dim": 128,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
        "max_position_embeddings": 32768,
    },
    "qwen3-8b": {
        "model_type": "qwen3",
        "hidden_size": 4096,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 12288,
        "head_dim": 128,
        "vocab_size": 151936,
        "tie_word_embeddings": False,
        "max_position_embeddings": 32768,
    },
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "intermediate_size": 6144,
        "head_dim": 128,
        "vocab_size": 151936,
        "tie_word_embeddings": False,
        "max_position_embeddings": 32768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
}
"""Model → fields of its published config.json."""


def randomize(model: PreTrainedModel, seed: int = 0) -> PreTrainedModel:
    """Draw every parameter: matrices that keep the scale of their input, norms around one, biases
    around zero.
    """
    generator = seeded(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim > 1:
                parameter.copy_(noise * parameter.shape[-1] ** -0.5 * 1.5)
            else:
                parameter.copy_(noise * 0.3 + (0.0 if name.endswith("bias") else 1.0))
    return model.eval()


def cast(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """Cast as `from_pretrained(dtype=...)` does: only parameters; the rotary frequencies stay
    float32.
    """
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def low_bit(
    model: Any,
    scheme: str,
    dtype=torch.bfloat16,
    kernel="reference",
    operators="auto",
    aligned=True,
    compute=None,
) -> LowBitModel:
    """Return low-bit layers over a model's parameters."""
    return LowBitModel(
        model,
        get_scheme(scheme),
        LayerContext(dtype, kernel, aligned, compute),
        operators,
    )


def qwen3(tied: bool = True, seed: int = 0, **changes: Any) -> PreTrainedModel:
    return randomize(
        Qwen3ForCausalLM(Qwen3Config(**{**SIZES, "tie_word_embeddings": tied, **changes})),
        seed,
    )


def some_tokens(
    B: int = 3,
    T: int = 11,
    seed: int = 0,
) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (B, T), generator=seeded(seed))


def all_logits(model: LowBitModel, tokens: torch.Tensor) -> torch.Tensor:
    everywhere = torch.ones_like(tokens, dtype=torch.bool)
    hidden = model.hidden(tokens, everywhere)
    return model.head(hidden).view(*tokens.shape, -1)


def stream_bytes(model: LowBitModel) -> dict[str, torch.Tensor]:
    """Return a copy of every streamed tensor's bytes, by name, in order."""
    return {item.name: as_bytes(item.tensor).clone() for item in model.low_bit_tensors()}


def same_stream(model: LowBitModel, expected: dict[str, torch.Tensor]) -> bool:
    """Return whether the stream has the names, order and bytes of an earlier stream or of another
    model's.
    """
    ours = stream_bytes(model)
    return list(ours) == list(expected) and all(
        torch.equal(ours[name], expected[name]) for name in ours
    )


@torch.no_grad()
def multiply_masters(model: LowBitModel, factor: float, *names: str) -> None:
    """Multiply all masters, or those of these names, and materialize them."""
    for name in names or model.masters:
        model.masters[name].mul_(factor)
    model.refresh()


def loss_of(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    logp = logits[:, :-1].float().log_softmax(-1)
    picked = logp.gather(-1, tokens[:, 1:, None])
    return -picked.sum() / tokens.numel()


def collected_gradients(model: LowBitModel) -> dict[str, torch.Tensor]:
    """Return a copy of each master's gradient, by name, of the masters that have one."""
    trained = {name: p.grad for name, p in model.masters.items()}
    return {name: gradient.clone() for name, gradient in trained.items() if gradient is not None}


def gradients(model: LowBitModel, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the gradients of a fresh backward pass, by master name."""
    for master in model.masters.values():
        master.grad = None
    loss_of(all_logits(model, tokens), tokens).backward()
    return collected_gradients(model)
