"""Problems as the model sees them: its own template, its arguments, and what a template may
refuse.
"""

import json
import shutil
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from qarl.configs.errors import ConfigError, ModelError
from qarl.preflight.special_tokens import special_tokens
from qarl.run.prompts import Prompter
from qarl.tasks import Problem

PLAIN = Problem("p", "1 + 1 =", "2")
CHAT = Problem(
    "c",
    "1 + 1 =",
    "2",
    {},
    ({"role": "system", "content": "Add."}, *PLAIN.chat),
)
TEMPLATE = (
    "{% if messages[0]['role'] == 'system' and no_system %}{{ raise_exception('no system role')"
    " }}{% endif %}{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}{%"
    " endfor %}{% if enable_thinking %}<think>{% endif %}"
)


@pytest.fixture
def model(random_policy, tmp_path: Path) -> Path:
    """A model whose chat template is `TEMPLATE`."""
    folder = tmp_path / "model"
    folder.mkdir()
    for file in random_policy(True).glob("*token*"):
        shutil.copy(file, folder)
    set_template(folder, TEMPLATE)
    return folder


def set_template(folder: Path, template: str | None) -> None:
    file = folder / "tokenizer_config.json"
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    file.write_text(json.dumps({**json.loads(file.read_text()), "chat_template": template}))


def test_chats_and_arguments_reach_the_template(model: Path):
    assert Prompter(model, 64).text(PLAIN) == "<user>1 + 1 ="
    prompter = Prompter(model, 64, {"enable_thinking": True})
    assert prompter.text(CHAT) == "<system>Add.<user>1 + 1 =<think>"
    assert prompter.tokenizer.decode(prompter.prompt(CHAT).token_ids) == prompter.text(CHAT)


def test_an_argument_that_would_do_nothing_is_refused_and_a_template_that_raises_is_quoted(
    model: Path,
):
    with pytest.raises(
        ConfigError,
        match="does not mention enable_thinkng; did you mean 'enable_thinking'",
    ):
        Prompter(model, 64, {"enable_thinkng": False})
    with pytest.raises(
        ModelError,
        match=r"TemplateError: no system role \(problem 'c', messages of system, user\)",
    ):
        Prompter(model, 64, {"no_system": True}).prompt(CHAT)


def test_a_chat_needs_a_template(model: Path):
    set_template(model, None)
    prompter = Prompter(model, 64)
    assert prompter.text(PLAIN) == "1 + 1 ="
    with pytest.raises(ConfigError, match="problem 'c' is a chat of 2 messages"):
        prompter.prompt(CHAT)
    with pytest.raises(ConfigError, match="the tokenizer has no chat template; omit it"):
        Prompter(model, 64, {"enable_thinking": False})


def beyond(model: Path, special: bool) -> tuple[int, str]:
    """Add a token to the tokenizer and not to the model; return its id and text."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    rows = len(tokenizer)
    (model / "config.json").write_text(json.dumps({"vocab_size": rows}))
    tokenizer.add_tokens(["<extra>"], special_tokens=special)
    tokenizer.pad_token = "<extra>"
    tokenizer.save_pretrained(model)
    return rows, "<extra>"


@pytest.mark.parametrize("special", [True, False], ids=["special", "added"])
@pytest.mark.parametrize("source", ["question", "system", "template", "row of a table"])
def test_a_token_without_a_row_is_refused_wherever_it_comes_from(
    source: str, special: bool, model: Path
):
    """Contract: the error names token, id and rows; padding takes another token instead. A token
    that nobody writes does no harm.
    """
    rows, token = beyond(model, special)
    system = ({"role": "system", "content": f"Add {token}"},)
    problems = {
        "question": Problem("q", f"1 {token} 1", "2"),
        "row of a table": Problem("q", f"1 {token} 1", "2"),
        "system": Problem("q", "1 + 1 =", "2", {}, (*system, *PLAIN.chat)),
        "template": PLAIN,
    }
    assert Prompter(model, 64).prompt(PLAIN).token_ids
    if source == "template":
        set_template(model, TEMPLATE + token)
    prompter = Prompter(model, 64)
    assert prompter.pad_token < rows
    says = rf"the token '{token}' \(id {rows}\), and the embedding of .* has {rows} rows"
    whole_table = lambda problem: prompter.fits([CHAT, problem])  # noqa: E731
    ask = whole_table if source == "row of a table" else prompter.prompt
    with pytest.raises(ModelError, match=says):
        ask(problems[source])


@pytest.mark.parametrize("ends", ["<|im_end|>", "<|endoftext|>"])
def test_check_says_that_no_completion_ends_as_the_templates_turns_do(ends: str, model: Path):
    """Contract: a note with the option, unless generation ends there or rollout.stop says so.
    Questions that hold special tokens are counted.
    """
    tokenizer = AutoTokenizer.from_pretrained(model)
    added = ["<|im_end|>", "<|endoftext|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": added, "eos_token": ends})
    tokenizer.save_pretrained(model)
    set_template(model, "{% for m in messages %}{{ m['content'] }}<|im_end|>{% endfor %}")
    held = Problem("h", "1 <|im_end|> 2", "")

    def findings(*stop: str) -> list[tuple[str, str]]:
        prompter = Prompter(model, 64)
        found = special_tokens(model, prompter, [PLAIN, held], stop)
        return [(finding.about, f"{finding.text}; {finding.remedy}") for finding in found]

    notes = dict(findings())
    assert "'<|im_end|>' in 1 of 2" in notes["question"]
    assert ("end" in notes) == (ends == "<|endoftext|>")
    if "end" in notes:
        assert "'<|im_end|>', and generation ends at '<|endoftext|>' alone" in notes["end"]
        assert "--rollout.stop '<|im_end|>'" in notes["end"]
    assert "end" not in dict(findings("<|im_end|>"))


def test_lengths_are_held_to_the_limit(model: Path):
    long = Problem("l", "1 + " * 40, "2")
    assert Prompter(model, 20).fits([PLAIN, long, CHAT]) == [True, False, True]
    with pytest.raises(
        ConfigError,
        match=r"problem 'l' has \d+ tokens, above rollout.max_prompt_tokens 20",
    ):
        Prompter(model, 20).prompt(long)
