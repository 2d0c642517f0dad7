"""Small random exports of the families that GGUF files can have, with tokenizers of their kinds."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from qarl.rollout.types import RequestDefaults
from qarl.sync.export import export_checkpoint
from tests.support.models import low_bit, randomize
from tests.support.tensors import seeded

VOCABULARY = 384
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_EXPERTS = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True},
    "mistral": {"tie_word_embeddings": False, "sliding_window": None, "head_dim": 32},
    "mixtral": {
        "tie_word_embeddings": False,
        "sliding_window": None,
        "num_local_experts": 3,
        "num_experts_per_tok": 2,
        "head_dim": 32,
    },
    "qwen2": {"tie_word_embeddings": False},
    "qwen2_moe": {
        **_EXPERTS,
        "shared_expert_intermediate_size": 128,
        "tie_word_embeddings": False,
    },
    "qwen3": {"tie_word_embeddings": True, "head_dim": 128},
    "qwen3_moe": {
        **_EXPERTS,
        "norm_topk_prob": True,
        "tie_word_embeddings": False,
        "head_dim": 64,
    },
    "gemma3_text": {
        "tie_word_embeddings": True,
        "head_dim": 256,
        "num_hidden_layers": 6,
        "sliding_window": 4,
    },
}
"""Model type → its own settings. transformers' reader takes no other columns of a head."""
TEXTS = [
    "the cat sat on the mat, then it's the dog's turn at 12:30",
    "numbers 1234 567 and 89; naïve café Ünï 你好 мир 🙂 \t tabs\n\n  lines",
    "def add(a, b):\n    return a + b  # comment",
]
GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN2 = rf"{_WORDS}|\p{{N}}|{_REST}"
LLAMA3 = rf"{_WORDS}|\p{{N}}{{1,3}}|{_REST}"
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def splits(pattern: str) -> pre_tokenizers.PreTokenizer:
    """Return a pre-tokenizer that splits by a pattern, then takes bytes."""
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    return pre_tokenizers.Sequence([split, BYTES])


def byte_level(
    pre_tokenizer: pre_tokenizers.PreTokenizer,
    normalizer: normalizers.Normalizer | None = None,
    ignore_merges: bool = False,
    **tokens: Any,
) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer of about 300 tokens. tokens: fields of the tokenizer."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    tokenizer.pre_tokenizer = pre_tokenizer
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    fields: dict[str, Any] = {"eos_token": "<|im_end|>", "chat_template": CHATML, **tokens}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **fields)


def toy_model(kind: str, **changes: Any) -> PreTrainedModel:
    """Return a random model of a family, in fp32."""
    config = AutoConfig.for_model(kind, **{**_SIZES, **FAMILIES[kind], **changes})
    return randomize(AutoModelForCausalLM.from_config(config, dtype=torch.float32))


def toy_export(
    folder: Path,
    kind: str,
    scheme: str = "w4a16-g32",
    dtype: torch.dtype = torch.bfloat16,
    tokenizer: PreTrainedTokenizerFast | None = None,
    note: dict[str, Any] | None = None,
    defaults: RequestDefaults | None = None,
    **changes: Any,
) -> Path:
    """Export a random model of a family into `folder`/export, and return that folder.

    note: contents of qarl.json. defaults: how the policy was asked. changes: settings of the model.
    """
    source = folder / "source"
    source.mkdir()
    (tokenizer or byte_level(GPT2)).save_pretrained(source)
    model = low_bit(toy_model(kind, **changes), scheme, dtype, operators="transformers")
    export_checkpoint(model, source, folder / "export", note or {"run": "toy"}, defaults)
    return folder / "export"


def redraw(
    export: Path,
    scales: list[float],
    seed: int = 0,
) -> dict[str, torch.Tensor]:
    """Overwrite codes of an export by any codes, its scales by these, and return its tensors.

    The first words have the lowest and highest codes.
    """
    file = export / "model.safetensors"
    tensors = load_file(file)
    generator = seeded(seed)
    for name, tensor in tensors.items():
        if name.endswith("weight_packed"):
            low, high = (-(2**31), 2**31 - 1) if tensor.dtype == torch.int32 else (0, 255)
            drawn = torch.randint(low, high, tensor.shape, generator=generator)
            tensor.copy_(drawn.to(tensor.dtype))
            tensor.flatten()[:2] = torch.tensor([0, -1], dtype=torch.int64).to(tensor.dtype)
        elif name.endswith("weight_scale") and tensor.is_floating_point():
            which = torch.randint(0, len(scales), tensor.shape, generator=generator)
            tensor.copy_(torch.tensor(scales)[which].to(tensor.dtype))
    save_file(tensors, file, metadata={"format": "pt"})
    return tensors


def logprobs(model: PreTrainedModel, tokens: torch.Tensor) -> torch.Tensor:
    """Return log-probs of every next token, fp32 [B, T, V]."""
    with torch.no_grad():
        return model(tokens).logits.float().log_softmax(-1)


def dequantized_model(
    kind: str, values: Mapping[str, torch.Tensor], **changes: Any
) -> PreTrainedModel:
    """Return a model of a family with these weights by checkpoint names, in fp32."""
    model = toy_model(kind, **changes)
    state = model.state_dict()
    for name in state:
        state[name] = _weight(values, name)
    model.load_state_dict(state)
    return model.eval()


def _weight(values: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
    """Return a parameter: experts' matrices stacked, gate above up; a tied head's embedding."""
    if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
        module, _, key = name.rpartition(".")
        parts = ("gate_proj", "up_proj") if key == "gate_up_proj" else ("down_proj",)
        matrices = [
            torch.cat([values[f"{module}.{expert}.{part}.weight"] for part in parts])
            for expert in range(_EXPERTS["num_experts"])
        ]
        return torch.stack(matrices)
    tied = "model.embed_tokens.weight" if name == "lm_head.weight" else name
    return values.get(name, values.get(tied, torch.empty(0)))
