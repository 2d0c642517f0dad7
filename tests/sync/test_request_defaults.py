"""An export's files ask as the policy was asked: chat templates and generation config."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, GenerationConfig

from qarl.embedded.tokenizer import CHAT_TEMPLATE
from qarl.rollout.types import RequestDefaults
from qarl.sync.request_defaults import generation_config, with_defaults, write_defaults
from tests.support import Policies
from tests.support.profiles import examples

THINKING = (
    "{%- if enable_thinking is defined and enable_thinking is false %}<off>{% endif %}"
    "{{ '<' ~ style ~ '>' if style }}" + CHAT_TEMPLATE
)
"""A template with arguments, of which the run gives values."""
OWN_SYSTEM = "\n  <s>{% if messages[0].role != 'system' %}Default.{% endif %}" + CHAT_TEMPLATE
"""A template with a system prompt of its own, which begins with white space."""
NESTED = "{% macro say(m) %}{{ style }}{{ m.content }}{% endmacro %}" + (
    "{% for message in messages %}{{ message.role }}: {{ say(message) }}{% generation %}{%"
    " endgeneration %}{% endfor %}"
)
"""A template with a macro, and with a tag that only transformers' environment has."""
TEMPLATES = (CHAT_TEMPLATE, THINKING, OWN_SYSTEM, NESTED)
QUESTION = [{"role": "user", "content": "1 + 1 ="}]
CHAT = [
    *QUESTION,
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "Why?"},
]

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12) | st.sampled_from(
    ["Be {{ brief }}.", "{% endif %}\"'\\n", "a\nb\r\nc", "\\", "é😀\u2028", "{# no #}"]
)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | texts | st.floats(-1e9, 1e9),
    lambda each: st.lists(each, max_size=2) | st.dictionaries(texts, each, max_size=2),
    max_leaves=4,
)


@pytest.fixture(scope="module")
def folder(random_policy: Policies, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(shutil.copytree(random_policy(True), tmp_path_factory.mktemp("base") / "base"))


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(folder)


def rendered(
    tokenizer: Any,
    template: str,
    chat: list[dict[str, str]],
    **arguments: Any,
) -> str:
    tokenizer.chat_template = template
    return tokenizer.apply_chat_template(
        chat, tokenize=False, add_generation_prompt=True, **arguments
    )


@settings(max_examples=examples(200), deadline=None)
@given(st.sampled_from(TEMPLATES), st.none() | texts, values, st.booleans())
def test_a_plain_request_is_rendered_as_the_run_asked(
    tokenizer: Any, template: str, system: str | None, style: Any, thinking: bool
):
    """Contract: a chat without system prompt and arguments, through the export's template, is text
    for text the run's chat with both through the base's. The run's own chat stays as it was, so
    that nothing is applied twice, whether the template has got the defaults once or again.
    """
    arguments = {"style": style, "enable_thinking": thinking}
    before = [] if system is None else [{"role": "system", "content": system}]
    for chat in (QUESTION, CHAT):
        expected = rendered(tokenizer, template, [*before, *chat], **arguments)
        once = with_defaults(template, RequestDefaults(system=system, template=arguments))
        assert rendered(tokenizer, once, chat) == expected
        assert rendered(tokenizer, once, [*before, *chat], **arguments) == expected
        assert with_defaults(once, RequestDefaults(system=system, template=arguments)) == once


def test_a_request_with_its_own_words_gets_them(tokenizer: Any):
    template = with_defaults(
        THINKING,
        RequestDefaults(system="Be brief.", template={"enable_thinking": False, "style": "x"}),
    )
    own = [{"role": "system", "content": "Be long."}, *QUESTION]
    expected = rendered(tokenizer, THINKING, own, enable_thinking=True, style="y")
    assert rendered(tokenizer, template, own, enable_thinking=True, style="y") == expected
    assert "<off>" not in expected and "<y>" in expected and "brief" not in expected


def test_another_run_of_an_export_asks_in_its_own_way(tokenizer: Any):
    """Check the template of an export of an export: the later run's defaults come first."""
    first = with_defaults(THINKING, RequestDefaults(system="One.", template={"style": "1"}))
    second = with_defaults(first, RequestDefaults(system="Two.", template={"style": "2"}))
    expected = rendered(tokenizer, THINKING, [{"role": "system", "content": "Two."}, *QUESTION])
    assert rendered(tokenizer, second, QUESTION) == f"<2>{expected}"


def test_a_developers_message_counts_where_the_template_knows_it(tokenizer: Any):
    """vLLM asks the template's text whether it has that role, so no other template may name it."""
    defaults = RequestDefaults(system="Be brief.")
    knows = "{# 'developer' #}" + CHAT_TEMPLATE
    chat = [{"role": "developer", "content": "Be long."}, *QUESTION]
    assert "brief" not in rendered(tokenizer, with_defaults(knows, defaults), chat)
    assert "developer" not in with_defaults(CHAT_TEMPLATE, defaults)


def test_a_template_that_reads_nothing_of_it_stays(tokenizer: Any):
    defaults = RequestDefaults(template={"enable_thinking": False, "messages": [], "if": True})
    assert with_defaults(CHAT_TEMPLATE, defaults) == CHAT_TEMPLATE


@pytest.mark.parametrize("place", ["chat_template.jinja", "tokenizer_config.json", "named"])
def test_every_place_of_a_template_gets_the_defaults(folder: Path, tmp_path: Path, place: str):
    export = Path(shutil.copytree(folder, tmp_path / "export"))
    file = export / "tokenizer_config.json"
    tree = json.loads(file.read_text())
    tree.pop("chat_template", None)
    (export / "chat_template.jinja").unlink(missing_ok=True)
    if place == "chat_template.jinja":
        (export / place).write_text(CHAT_TEMPLATE)
    elif place == "tokenizer_config.json":
        tree["chat_template"] = CHAT_TEMPLATE
    else:
        names = ("default", "tool_use")
        tree["chat_template"] = [{"name": name, "template": CHAT_TEMPLATE} for name in names]
    file.write_text(json.dumps(tree))
    tokenizer = AutoTokenizer.from_pretrained(export)
    full = [{"role": "system", "content": "é"}, *QUESTION]
    expected = tokenizer.apply_chat_template(full, tokenize=False)
    write_defaults(export, {}, RequestDefaults(system="é"))
    tokenizer = AutoTokenizer.from_pretrained(export)
    assert tokenizer.apply_chat_template(QUESTION, tokenize=False) == expected


SAMPLING = {"temperature": 0.6, "top_p": 0.9, "top_k": 0, "min_p": 0.0}
BASE = {
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "repetition_penalty": 1.5,
    "temperature": 0.2,
    "top_k": 2,
    "max_new_tokens": 3,
    "bad_words_ids": [[5]],
    "do_sample": True,
}


def test_only_what_was_in_force_stays_in_the_generation_config():
    tokens = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    assert generation_config(BASE, RequestDefaults()) == tokens
    greedy = RequestDefaults(
        sampling={**SAMPLING, "temperature": 0.0}, max_new_tokens=8, end_tokens=(2,)
    )
    assert generation_config(BASE, greedy) == {**tokens, "max_new_tokens": 8}
    sampled = RequestDefaults(sampling=SAMPLING, end_tokens=(7,))
    assert generation_config(BASE, sampled) == {
        **tokens,
        "eos_token_id": [2, 7],
        "do_sample": True,
        **SAMPLING,
    }
    assert generation_config({}, RequestDefaults(end_tokens=(7,))) == {"eos_token_id": 7}


@pytest.mark.parametrize("temperature", [0.0, 0.6])
def test_transformers_can_save_what_it_loads(tmp_path: Path, temperature: float):
    """transformers refuses to save a temperature without sampling, and so a model that has one."""
    defaults = RequestDefaults(sampling={**SAMPLING, "temperature": temperature}, max_new_tokens=8)
    (tmp_path / "generation_config.json").write_text(json.dumps(BASE))
    write_defaults(tmp_path, {}, defaults)
    loaded = GenerationConfig.from_pretrained(tmp_path)
    assert loaded.repetition_penalty in (None, 1.0)
    loaded.save_pretrained(tmp_path / "again")


def test_a_base_without_generation_config_gets_the_token_ids_of_its_config(tmp_path: Path):
    """Runtimes read such a base's config.json, with its sampling, in the file's place."""
    write_defaults(tmp_path, {**BASE, "architectures": ["X"]}, RequestDefaults())
    written = json.loads((tmp_path / "generation_config.json").read_text())
    assert written == {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
