"""Prompts with pictures by a model folder's processor, and what is refused before a run begins."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qarl.configs.errors import ConfigError, ModelError
from qarl.configs.load import load_config
from qarl.configs.schema.rollout import RolloutConfig
from qarl.configs.schema.task import TaskConfig
from qarl.embedded.recipe import ensure_tiny
from qarl.preflight.files import check_processes
from qarl.run import picture_check
from qarl.run.prompts import Prompter, open_prompter
from qarl.tasks import Problem
from qarl.tasks.base import PICTURE, Picture
from tests.support.picture_models import PATCH, TEMPLATE, TILE, drawn, write_picture_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny random Idefics3."""
    folder = tmp_path_factory.mktemp("model")
    write_picture_model(folder)
    return folder


def problem(count: int, question: str = "How many?", **more: Any) -> Problem:
    """Return a problem with `count` drawn pictures of one tile."""
    generator = np.random.default_rng(count)
    pictures = tuple(Picture.of(drawn(generator, 40, 40)) for _ in range(count))
    return Problem("p", question, "3", pictures=pictures, **more)


def prompter(folder: Path, pictures: int = 2, longest: int = 256) -> Prompter:
    rollout = RolloutConfig(pictures=pictures, max_prompt_tokens=longest)
    return open_prompter(folder, rollout, TaskConfig())


def test_the_processor_puts_tokens_in_the_place_of_each_picture(folder: Path):
    """Contract: they are before the question, or where the messages have their places."""
    maker = prompter(folder)
    token = maker.tokenizer.convert_tokens_to_ids("<image>")
    plain = maker.prompt(problem(0))
    assert plain.pictures is None
    prompt = maker.prompt(problem(2))
    assert prompt.pictures is not None
    assert prompt.pictures.token_ids.count(token) == 2
    # 112 × 112 pixels after enlargement: four tiles and the whole
    a_tile = (TILE // PATCH) ** 2 // 4
    assert prompt.token_ids.count(token) == 2 * 5 * a_tile
    assert maker.lengths([problem(2), problem(0)]) == [
        len(prompt.token_ids),
        len(plain.token_ids),
    ]
    assert maker.fits([problem(2)]) == [True]
    assert prompter(folder, longest=30).fits([problem(2), problem(0)]) == [False, True]
    messages = ({"role": "user", "content": f"first {PICTURE} then {PICTURE}"},)
    text = maker.text(problem(2, messages=messages))
    assert "first <image> then <image><|im_end|>" in text


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_qwens_processor_needs_no_torchvision(family: str, tmp_path: Path):
    """Contract: its files are those that are published, which name a class that does."""
    write_picture_model(tmp_path, family=family)
    maker = prompter(tmp_path)
    token = maker.tokenizer.convert_tokens_to_ids("<|image_pad|>")
    pictures = tuple(
        Picture.of(drawn(np.random.default_rng(0), *size)) for size in ((28, 28), (80, 50))
    )
    prompt = maker.prompt(Problem("p", "How many?", "3", pictures=pictures))
    assert prompt.pictures is not None
    assert prompt.pictures.token_ids.count(token) == 2
    # a token for 28 × 28 pixels: one, and 3 × 2
    assert prompt.token_ids.count(token) == 1 + 6
    with pytest.raises(ModelError, match=r"has 1 places for pictures and 0 .*'<\|image_pad\|>'"):
        maker.prompt(problem(0, "<|image_pad|>?"))


def test_text_of_a_template_that_takes_parts_alone_is_not_lost(tmp_path: Path):
    """Contract: without pictures, too. SmolVLM's template drops messages that are plain text."""
    template = TEMPLATE.replace("{{ m['content'] }}", "")
    write_picture_model(tmp_path, template)
    for pictures in (0, 1):
        assert "How many?" in prompter(tmp_path, pictures).text(problem(0))


@pytest.mark.parametrize(
    ("count", "question", "pictures", "words"),
    [
        (3, "?", 2, "has 3 pictures, and rollout.pictures allows 2: set rollout.pictures to 3"),
        (1, "?", 0, "has 1 pictures, and rollout.pictures allows 0: set rollout.pictures to 1"),
        (0, "<image>?", 1, "has 1 places for pictures and 0 pictures .*'<image>'"),
        (1, "<image>?", 2, "has 2 places for pictures and 1 pictures .*'<image>'"),
        (0, "<image>?", 0, "has 1 places for pictures and 0 pictures"),
    ],
)
def test_other_numbers_of_pictures_than_places_or_allowed_are_refused(
    folder: Path, count: int, question: str, pictures: int, words: str
):
    maker = prompter(folder, pictures)
    with pytest.raises((ConfigError, ModelError), match=words):
        maker.prompt(problem(count, question))
    with pytest.raises((ConfigError, ModelError), match=words):
        maker.fits([problem(count, question)])


def test_models_that_take_no_pictures_are_refused_by_name(folder: Path, tmp_path: Path):
    text = ensure_tiny("tiny-qwen3")
    with pytest.raises(ModelError, match=r"a 'qwen3', which takes text alone.*pictures\.md"):
        prompter(text)
    with pytest.raises(ConfigError, match="takes text alone; drop the column, or take a model"):
        prompter(text, pictures=0).prompt(problem(1))
    for file in folder.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "processor_config.json").unlink()
    (tmp_path / "processor_config.json").write_text("{")
    with pytest.raises(ModelError, match=r"the processor of .* cannot be loaded"):
        prompter(tmp_path)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"rollout.servers": "2"}, "needs an engine in process"),
        ({"learner.operators": "transformers"}, "with learner.operators 'transformers'"),
        ({"learner.aligned": "false"}, "learner.aligned false"),
        ({"task.environment": "mine.py:Tools"}, "with a task of several turns"),
    ],
)
def test_settings_that_do_not_go_with_pictures_are_refused(more: dict[str, str], words: str):
    with pytest.raises(ConfigError, match=words):
        load_config(None, {"rollout.pictures": "1", **more})


def test_pictures_are_for_one_process():
    config = load_config(None, {"rollout.pictures": "1"})
    check_processes(config, 1)
    with pytest.raises(ConfigError, match=r"rollout\.pictures 1 is for one process, not 2"):
        check_processes(config, 2)


def test_pictures_are_not_compared_where_the_whole_model_has_no_room(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    """Contract: nothing is loaded, nothing is refused, and the result says how much is needed."""
    monkeypatch.setattr(picture_check, "available_memory", lambda: 1 << 10)
    unused: Any = None
    checked = picture_check.check_pictures(unused, folder, unused, unused)
    assert not checked.wrong
    assert re.search(
        r"not compared .* takes \d+\.\d GiB in float32, and 0\.0 GiB are free", str(checked)
    )
