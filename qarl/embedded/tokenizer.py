"""Tokenizer of the embedded policies: byte-level BPE, a token per digit, a ChatML template."""

from collections.abc import Iterable
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

PAD = "<|endoftext|>"
START = "<|im_start|>"
EOS = "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOOL_RESULT = ("\n<|im_start|>tool\n", "<|im_end|>\n<|im_start|>assistant\n")
"""Text that the template with tools writes before and after a tool's result.

It begins after the token that ends the calling turn.
"""
TOOL_TEMPLATE = (
    "{% for tool in tools or [] %}<|im_start|>tools\n{{ tool | tojson }}<|im_end|>\n{% endfor %}{%"
    " for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}{% for"
    " call in message['tool_calls'] or [] %}<tool_call>{{ {'name': call.function.name, 'arguments':"
    " call.function.arguments} | tojson }}</tool_call>{% endfor %}<|im_end|>\n{% endfor %}{% if"
    " add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def train_tokenizer(
    texts: Iterable[str],
    vocab_size: int,
    longest: int,
    template: str = CHAT_TEMPLATE,
    words: str | None = None,
) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer of `vocab_size` tokens on `texts`.

    Any text can be encoded. Every digit is a token of its own. Everything else may merge, across
    spaces too, so that a question's fixed wording becomes one token and prompts stay short.

    Args:
        texts: Training texts.
        vocab_size: Number of tokens.
        longest: Upper bound on a sequence, in tokens.
        template: Chat template.
        words: Regular expression of what may merge at most. Default: everything but digits.
    """
    tokenizer = Tokenizer(models.BPE())
    digits = pre_tokenizers.Digits(individual_digits=True)
    split = digits if words is None else pre_tokenizers.Split(Regex(words), behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, START, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=EOS,
        pad_token=PAD,
        chat_template=template,
        model_max_length=longest,
        clean_up_tokenization_spaces=False,
    )


def token_ids(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> list[torch.Tensor]:
    """Return the ids of each text, int64 [T], without special tokens being added."""
    encoded: Any = tokenizer(texts, add_special_tokens=False)["input_ids"]
    return [torch.tensor(ids) for ids in encoded]
