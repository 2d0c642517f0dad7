"""Tests that an export's texts become the tokens that they had in training."""

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from qarl.sync.export import copy_companions

LETTERS = "aA1 29 \n,.+=é你'’\t-"


def tokenizer(folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize(
    ("kind", "exported"),
    [("qwen3_5", "qwen3_5_text"), ("qwen3", "qwen3"), ("gemma3", "gemma3_text")],
)
def test_a_language_model_that_was_part_of_another_keeps_its_tokens(
    kind: str, exported: str, random_policy: Any, tmp_path: Path
):
    """Contract: drawn texts have equal tokens, although transformers reads the two folders' same
    tokenizer.json by other classes: of Qwen3.5's the class has a rule of its own to split texts.
    """
    folders = [tmp_path / "source", tmp_path / "export"]
    shutil.copytree(random_policy(True), folders[0])
    folders[1].mkdir()
    for folder, name in zip(folders, (kind, exported), strict=True):
        (folder / "config.json").write_text(json.dumps({"model_type": name}))
    before = (folders[0] / "tokenizer.json").read_bytes()
    copy_companions(*folders)
    if kind == exported:
        assert (folders[1] / "tokenizer.json").read_bytes() == before
    draw = random.Random(kind)
    texts = ["".join(draw.choices(LETTERS, k=draw.randint(1, 30))) for _ in range(50)]
    source, export = map(tokenizer, folders)
    assert [source.encode(text) for text in texts] == [export.encode(text) for text in texts]
