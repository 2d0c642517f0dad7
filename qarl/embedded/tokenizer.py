"""The embedded policies' tokenizer: byte-level BPE with every digit a token, and a ChatML
template.
"""

from collections.abc import Iterable
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

PAD, START, EOS = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOOL_RESULT = ("\n<|im_start|>tool\n", "<|im_end|>\n<|im_start|>assistant\n")
"""What the template with tools writes around a result, from the end of the turn that asked for
it.
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
    """A byte-level BPE tokenizer of `vocab_size` tokens, trained on `texts`, for sequences of at
    most `longest` tokens.

    Any text can be encoded. Every digit is a token of its own; everything else may merge, across
    spaces too, so that a question's fixed wording becomes one token and prompts stay short. words:
    what merges at most, as a regular expression, instead.
    """
    tokenizer = Tokenizer(models.BPE())
    digits = pre_tokenizers.Digits(individual_digits=True)
    cut = digits if words is None else pre_tokenizers.Split(Regex(words), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [cut, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
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
    """The ids of each text, int64 [T]; nothing is added."""
    encoded: Any = tokenizer(texts, add_special_tokens=False)["input_ids"]
    return [torch.tensor(ids) for ids in encoded]
