"""How a policy was asked in training and evaluation, and the files of an export that say it.

A runtime reads generation_config.json and the chat template of a folder. What can be written there
is written there, so that a plain request to a served export is asked as the policy was.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qarl.rollout.types import RequestDefaults

_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
"""Entries of the base's generation config that hold for whatever is sampled."""
_GIVEN = ("messages", "add_generation_prompt")
"""Variables of a chat template that every runtime sets."""
_NOTE = "{# The defaults with which this policy was trained and measured. A request may differ. #}"


def write_defaults(folder: Path, config: Mapping[str, Any], defaults: RequestDefaults) -> None:
    """Write into a checkpoint folder what its runtime has to know to ask as the policy was asked.

    generation_config.json keeps the base's token ids and gets limits and sampling of `defaults`;
    everything else in it was not in force and goes. The chat templates get defaults for their
    arguments and for the system prompt.

    config: contents of config.json, which has the token ids if there is no generation config.
    """
    file = folder / "generation_config.json"
    base = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else config
    generation = generation_config(base, defaults)
    if generation:
        file.write_text(json.dumps(generation, indent=2) + "\n")
    template = folder / "chat_template.jinja"
    if template.is_file():
        text = template.read_text(encoding="utf-8")
        template.write_text(with_defaults(text, defaults), encoding="utf-8")
    tokenizer = folder / "tokenizer_config.json"
    tree = json.loads(tokenizer.read_text(encoding="utf-8")) if tokenizer.is_file() else {}
    if tree.get("chat_template"):
        tree["chat_template"] = _each(tree["chat_template"], defaults)
        text = json.dumps(tree, indent=2, ensure_ascii=False)
        tokenizer.write_text(text + "\n", encoding="utf-8")


def generation_config(base: Mapping[str, Any], defaults: RequestDefaults) -> dict[str, Any]:
    """Return the generation config of an export: what was in force, and nothing else.

    A greedy evaluation leaves no temperature there, because transformers refuses to save a model
    whose generation config has a temperature of 0.

    base: generation config of the base.
    """
    tree = {name: base[name] for name in _TOKENS if base.get(name) is not None}
    ends = tree.get("eos_token_id", [])
    ends = list(ends) if isinstance(ends, list) else [ends]
    added = [end for end in defaults.end_tokens if end not in ends]
    if added:
        ends += added
        tree["eos_token_id"] = ends if len(ends) > 1 else ends[0]
    if defaults.max_new_tokens is not None:
        tree["max_new_tokens"] = defaults.max_new_tokens
    if defaults.sampling and not defaults.greedy:
        tree |= {"do_sample": True, **defaults.sampling}
    if tree and "transformers_version" in base:
        tree["transformers_version"] = base["transformers_version"]
    return tree


def with_defaults(template: str, defaults: RequestDefaults) -> str:
    """Return a chat template whose arguments and system prompt default to those of `defaults`.

    Arguments that a request gives, and a system message that its conversation begins with, take
    precedence. Returns the template itself if it reads nothing of `defaults`, or has the defaults.
    """
    head = _head(template, defaults)
    return template if template.startswith(head) else head + template


def _each(templates: Any, defaults: RequestDefaults) -> Any:
    """Return a template, or the named ones of a list, with the defaults."""
    if isinstance(templates, str):
        return with_defaults(templates, defaults)
    return [
        {**named, "template": with_defaults(named["template"], defaults)} for named in templates
    ]


def _head(template: str, defaults: RequestDefaults) -> str:
    """Return the lines that set the defaults.

    Each is a tag and a line break, which chat templates are rendered without (`trim_blocks`).
    """
    read = _variables(template)
    lines = []
    for name, value in defaults.template.items():
        if name in read and name not in _GIVEN:
            lines += [
                f"{{% if {name} is not defined or {name} is none %}}",
                f"{{% set {name} = {_literal(value)} %}}",
                "{% endif %}",
            ]
    if defaults.system is not None and "messages" in read:
        # vLLM turns developers' messages into the system's if the template has no word for them.
        roles = ["system"] + (["developer"] if "developer" in template else [])
        differs = " and ".join(f"messages[0]['role'] != '{role}'" for role in roles)
        message = _literal({"role": "system", "content": defaults.system})
        lines += [
            f"{{% if not messages or ({differs}) %}}",
            f"{{% set messages = [{message}] + messages %}}",
            "{% endif %}",
        ]
    return "\n".join([_NOTE, *lines, ""]) if lines else ""


def _variables(template: str) -> set[str]:
    """Return the names of the variables that a chat template reads."""
    # The environment with the tags of chat templates; transformers has no public name for it.
    from jinja2 import meta
    from transformers.utils.chat_template_utils import _compile_jinja_template

    environment = _compile_jinja_template(template).environment
    return meta.find_undeclared_variables(environment.parse(template))


def _literal(value: Any) -> str:
    """Return a value of JSON as an expression of Jinja.

    Characters beyond ASCII stay as they are, because Jinja reads no surrogate pairs.
    """
    if isinstance(value, Mapping):
        items = (f"{_literal(key)}: {_literal(each)}" for key, each in value.items())
        return f"{{{', '.join(items)}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_literal, value))}]"
    return "none" if value is None else json.dumps(value, ensure_ascii=False)
