"""Classes for text of language models that transformers has beside towers alone.

transformers' class of such a whole (Qwen3-VL's mixtures, GLM-4V) holds a text model without a head,
and the head beside it. Here both are one causal language model: the whole without its towers. It is
registered with `AutoModelForCausalLM`, so that everything that asks transformers for a language
model of the configuration gets it. tests/quant/test_whole.py compares its logits with the whole's.
"""

from typing import Any

import torch
from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    GenerationMixin,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    register_checkpoint_conversion_mapping,
)
from transformers.modeling_outputs import CausalLMOutputWithPast

_CHANGED_LOGITS = ("final_logit_softcapping", "output_multiplier", "logits_scaling", "logit_scale")
"""Settings by which a whole changes its logits after the head, as a class made here would not."""
_NAMES: dict[str, str] = {}
"""Type of a language model → name of its class, if that was made here."""


def has_text_class(config: PreTrainedConfig) -> bool:
    """Return whether a whole's language model has a causal class for text, and make it if needed.

    config: the configuration of the whole.
    """
    text = config.get_text_config()
    if type(text) in MODEL_FOR_CAUSAL_LM_MAPPING:
        if type(text).__module__ == type(config).__module__ and not conversions(text.model_type):
            text_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(text)]
            _take_conversions(text_class.__name__, text.model_type, config.model_type)
        return True
    if type(config) not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        return False
    if any(getattr(text, name, None) not in (None, 1) for name in _CHANGED_LOGITS):
        return False
    with torch.device("meta"):
        whole: Any = AutoModelForImageTextToText.from_config(config)
    decoder, head = whole.get_decoder(), whole.get_output_embeddings()
    if type(decoder.config) is not type(text) or type(head) is not nn.Linear:
        return False
    _register(type(decoder), type(text), config.model_type, head.bias is not None)
    return True


def conversions(model_type: str) -> list[Any]:
    """Return transformers' conversions between a checkpoint and a model of this type; [] if none.

    Those of a class that was made here are its whole's.
    """
    return get_checkpoint_conversion_mapping(_NAMES.get(model_type, model_type)) or []


def _register(
    decoder: type[PreTrainedModel],
    config_class: type[PreTrainedConfig],
    whole_type: str,
    has_bias: bool,
) -> None:
    """Make and register the causal class of a text model.

    Args:
        decoder: class of the text model.
        config_class: class of its configuration.
        whole_type: `model_type` of the whole.
        has_bias: whether its head has a bias.
    """
    name = f"{decoder.__name__.removesuffix('Model')}ForCausalLM"
    text_class = type(
        name,
        (_TextModel, decoder.__bases__[0], GenerationMixin),
        {
            "config_class": config_class,
            "base_model_prefix": "model",
            "_tied_weights_keys": {"lm_head.weight": "model.embed_tokens.weight"},
            "_decoder": decoder,
            "_head_has_bias": has_bias,
        },
    )
    # transformers ignores a class for a configuration of its own otherwise
    AutoModelForCausalLM.register(config_class, text_class, exist_ok=True)
    _take_conversions(name, config_class.model_type, whole_type)


def _take_conversions(name: str, model_type: str, whole_type: str) -> None:
    """Make a whole's conversions those of its language model's class.

    Args:
        name: the class's name.
        model_type: type of the language model.
        whole_type: type of the whole.
    """
    inside = [entry for entry in conversions(whole_type) if not _names_parts(entry)]
    if inside:
        register_checkpoint_conversion_mapping(name, inside, overwrite=True)
        _NAMES[model_type] = name


def _names_parts(entry: Any) -> bool:
    """Return whether a conversion renames the parts of a whole, from the beginnings of names on.

    `quant.checkpoint.whole` has these names from the files.
    """
    return any(source.startswith("^") for source in entry.source_patterns)


class _TextModel(PreTrainedModel):
    """A text model and its output head.

    The text model's `PreTrainedModel` is the second base of each class that is made of this one.
    """

    _decoder: type[PreTrainedModel]
    _head_has_bias: bool

    def __init__(self, config: PreTrainedConfig):
        super().__init__(config)
        self.model = self._decoder(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=self._head_has_bias)
        self.post_init()

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        """Return what transformers reads in the source of the text model's class."""
        return cls._decoder._can_set_experts_implementation()

    @classmethod
    def _can_set_attn_implementation(cls) -> bool:
        """Return what transformers reads in the source of the text model's class."""
        return cls._decoder._can_set_attn_implementation()

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        **inputs: Any,
    ) -> CausalLMOutputWithPast:
        """Return the logits: tokens, int64 [B, T] → `logits` [B, T, V].

        Args:
            input_ids: the tokens.
            logits_to_keep: number of last tokens whose logits are computed, or their indices.
                Default: all.
            inputs: further arguments of the text model.
        """
        outputs = self.model(input_ids=input_ids, **inputs)
        last = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        return CausalLMOutputWithPast(
            logits=self.lm_head(outputs.last_hidden_state[:, last]),
            past_key_values=outputs.past_key_values,
        )
