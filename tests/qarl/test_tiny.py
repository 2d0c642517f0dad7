"""The embedded policy: a real model folder, built alike every time, kept in a cache."""

import string
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from qarl.configs.schema.task import TaskConfig
from qarl.embedded import recipe as embedded
from qarl.embedded.recipe import (
    IGNORED,
    RECIPES,
    TinyRecipe,
    build_tiny,
    encode_problems,
    ensure_recipe,
    recipe_config,
)
from qarl.quant.checkpoint.shapes import weight_shapes
from qarl.quant.runtime.answers import cache_folder
from qarl.quant.schemes import is_protected
from qarl.tasks import load_task
from tests.support.profiles import examples
from tests.support.records import assert_recorded

SMALL = TinyRecipe(
    num_hidden_layers=1, intermediate_size=128, warm_start_steps=2, warm_start_batch=8
)


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    return ensure_recipe("small", SMALL, tmp_path_factory.mktemp("cache"))


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.fixture(scope="module")
def tokenizer(built):
    return AutoTokenizer.from_pretrained(built)


@pytest.mark.parametrize("experts", [0, 4])
def test_wide_columns_change_no_output_and_coarsen_rows(experts: int) -> None:
    """A factor that is a power of two leaves every logit as it was, to the bit; int4 codes of rows
    get coarser.
    """
    recipe = replace(SMALL, num_experts=experts, warm_start_steps=0)
    config = recipe_config(recipe, dtype="float32")
    model = AutoModelForCausalLM.from_config(config).eval()
    ids = torch.arange(40).view(2, 20)
    before = model(ids).logits
    errors = row_errors(model)
    embedded.widen_columns(dict(model.named_parameters()), 4.0)
    assert torch.equal(model(ids).logits, before)
    assert all(after > 2 * errors[name] for name, after in row_errors(model).items())


def row_errors(model: torch.nn.Module) -> dict[str, float]:
    """Return mean |weight rounded to int4 by rows - weight| over the columns that were not widened,
    of the matrices that read a norm's output.
    """
    errors = {}
    for name, weight in model.named_parameters():
        if name.endswith(("q_proj.weight", "gate_proj.weight", "experts.gate_up_proj")):
            rows = weight.detach().flatten(0, -2)
            scale = rows.abs().amax(dim=1, keepdim=True) / 7.5
            errors[name] = ((rows / scale).round() * scale - rows)[:, 1:16].abs().mean().item()
    return errors


def test_two_builds_are_bit_identical_and_two_recipes_never_share_a_folder(built, tmp_path) -> None:
    assert ensure_recipe("small", replace(SMALL, warm_start_steps=0), built.parent) != built
    torch.manual_seed(7)  # another state than the first was built from
    random_state = torch.get_rng_state()
    threads = torch.get_num_threads()
    build_tiny(SMALL, tmp_path / "again")
    assert contents(tmp_path / "again") == contents(built)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize("tied", [True, False])
def test_a_built_folder_is_an_fp32_qwen3_tied_as_the_recipe_says(tied, tmp_path) -> None:
    build_tiny(replace(SMALL, warm_start_steps=0, tie_word_embeddings=tied), tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    assert (model.config.model_type, model.dtype) == ("qwen3", torch.float32)
    assert model.generation_config.eos_token_id == model.config.eos_token_id


def test_warm_start_lowers_the_loss(tmp_path, capsys) -> None:
    build_tiny(replace(SMALL, warm_start_steps=21, warm_start_batch=32), tmp_path)
    messages = capsys.readouterr().err.splitlines()
    assert [message.split()[3] for message in messages] == ["1/21,", "21/21,"]
    first, last = (float(message.split("loss ")[1].split()[0]) for message in messages)
    assert last < first - 1.0


def test_the_recipes_are_those_recorded() -> None:
    assert_recorded(__file__, "recipes", {name: asdict(recipe) for name, recipe in RECIPES.items()})


@pytest.mark.parametrize("name", RECIPES)
def test_every_quantized_linear_tiles(name) -> None:
    """Inputs in multiples of 128, outputs of 32, of every expert too; on the meta device, without
    building.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(recipe_config(RECIPES[name]))
    shapes = weight_shapes(model)
    assert bool(RECIPES[name].num_experts) == any(
        ".experts.7.down_proj" in layer for layer in shapes
    )
    for layer, (rows, columns) in shapes.items():
        assert is_protected(layer) or (columns % 128 == 0 and rows % 32 == 0), layer


@given(text=st.text())
@settings(max_examples=examples(150))
def test_any_text_survives_the_tokenizer(text, tokenizer) -> None:
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_no_token_holds_a_digit_and_anything_else(tokenizer) -> None:
    assert all(
        len(token) == 1 for token in tokenizer.get_vocab() if set(token) & set(string.digits)
    )


def test_the_chat_template_is_chatml_and_prompts_are_short(tokenizer) -> None:
    (problem,) = load_task(TaskConfig(name="chain_sum")).problems("train", 0, 1, 0)
    chat = [{"role": "user", "content": problem.question}]
    text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    assert text == f"<|im_start|>user\n{problem.question}<|im_end|>\n<|im_start|>assistant\n"
    assert len(tokenizer.encode(text, add_special_tokens=False)) <= 16
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")
    assert len(tokenizer) == SMALL.vocab_size


def test_only_answers_and_end_tokens_are_trained_on(tokenizer) -> None:
    problems = load_task(TaskConfig(name="chain_sum")).problems("train", 0, 20, 0)
    ids, labels = encode_problems(tokenizer, problems)
    assert ids.shape == labels.shape
    assert ids.dtype == labels.dtype == torch.int64
    for problem, row, label in zip(problems, ids, labels, strict=True):
        kept = label != IGNORED
        assert tokenizer.decode(label[kept]) == problem.answer + "<|im_end|>"
        assert torch.equal(row[kept], label[kept])
    ids, labels = encode_problems(
        tokenizer, [replace(problems[0], metadata={"values_by_name": {"a": 7}})]
    )
    assert "7".join(embedded.TOOL_RESULT) in tokenizer.decode(ids[labels == IGNORED])


def test_two_at_once_build_once_where_an_earlier_build_died(built, tmp_path, capsys) -> None:
    """Threads stand in for processes: flock excludes by open file, whichever process or thread
    opened it.
    """
    (leftover := tmp_path / f"{built.name}.part").mkdir()
    (leftover / "junk").touch()
    with ThreadPoolExecutor(2) as racers:
        folders = list(racers.map(lambda _: ensure_recipe("small", SMALL, tmp_path), range(2)))
    assert folders[0] == folders[1]
    assert contents(folders[0]) == contents(built)
    assert not leftover.exists()
    messages = capsys.readouterr().err.splitlines()
    assert [message.split()[0] for message in messages] == ["building", "warm", "warm"]


def test_the_cache_folder_follows_the_environment(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("QARL_CACHE", str(tmp_path))
    assert cache_folder() == tmp_path
    monkeypatch.delenv("QARL_CACHE")
    assert cache_folder() == Path.home() / ".cache" / "qarl"
