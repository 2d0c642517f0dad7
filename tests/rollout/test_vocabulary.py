"""Tests of token ids that have no row in the model's embedding, whoever gives them."""

import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from qarl.configs.errors import ModelError
from qarl.rollout.types import Prompt, Sampling
from qarl.rollout.vllm.engine import VllmEngine
from qarl.rollout.vocabulary import Vocabulary


class Tokenizer:
    """Stand-in for a tokenizer of some size."""

    def __init__(self, size: int):
        self.size = size

    def __len__(self) -> int:
        return self.size

    def convert_ids_to_tokens(self, token: int) -> str:
        return f"<{token}>"


@pytest.mark.parametrize("seed", range(20))
def test_the_first_id_without_a_row_is_named(seed: int):
    """Contract: ids from 0 to rows - 1 pass, all others are refused; a token is quoted if the
    tokenizer has it. Drawn: rows, tokenizer, ids, negative ones too.
    """
    draw = random.Random(seed)
    rows = draw.randint(1, 40)
    tokenizer = Tokenizer(rows + draw.randint(-1, 3))
    sequences = [[draw.randint(0, rows - 1) for _ in range(draw.randint(0, 9))] for _ in range(4)]
    vocabulary = Vocabulary("folder", rows)
    vocabulary.require(sequences, "a prompt", tokenizer)
    Vocabulary("folder", None).require([[10**6]], "a prompt", tokenizer)
    wrong = draw.choice([rows, rows + 2, 10**6, -1])
    spoiled = draw.choice(sequences)
    spoiled.insert(draw.randint(0, len(spoiled)), wrong)
    known = f"the token '<{wrong}>' " if 0 <= wrong < len(tokenizer) else ""
    says = rf"^a prompt has {known}\(id {wrong}\), and .* 'folder' has {rows} rows"
    with pytest.raises(ModelError, match=says):
        vocabulary.require(sequences, "a prompt", tokenizer)


@pytest.mark.parametrize(
    ("config", "rows"),
    [
        ({"vocab_size": 7}, 7),
        ({"vocab_size": 7, "text_config": {"vocab_size": 5}}, 5),
        ({}, None),
        (None, None),
    ],
)
def test_rows_are_those_of_the_language_model(config: Any, rows: int | None, tmp_path: Path):
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    assert Vocabulary.of(tmp_path).rows == rows


def test_an_engine_is_not_asked_about_such_ids():
    """Contract: prompts, later turns and scored sequences are refused before vLLM sees them."""
    engine: Any = VllmEngine.__new__(VllmEngine)
    engine._half_loaded = False
    engine._vocabulary = Vocabulary("folder", 5)
    engine._llm = SimpleNamespace(get_tokenizer=lambda: Tokenizer(6))
    with pytest.raises(ModelError, match=r"'<5>' \(id 5\), .* 5 rows"):
        engine.generate(
            [Prompt("p", "", (1, 5))],
            Sampling(1, 4),
        )
    with pytest.raises(ModelError, match=r"'<5>' \(id 5\), .* 5 rows"):
        engine.logprobs([[1, 2], [5, 1]])
