"""Fixtures: small random policies, built once a session."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings

from qarl.cli.environment import quiet_libraries

quiet_libraries()

from qarl.embedded.recipe import RECIPES, ensure_recipe  # noqa: E402  (libraries must be quieted before they are imported)
from rollout.vllm.engine import VllmOptions, prepare_environment  # noqa: E402

# Examples are not timed: machines are shared, and first calls compile.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

# Before any test imports vLLM: it reads these once.
prepare_environment(VllmOptions())


@pytest.fixture(scope="session")
def random_policy(tmp_path_factory: pytest.TempPathFactory) -> Callable[[bool], Path]:
    """folder = random_policy(tied): a randomly initialized tiny Qwen3 with tied or untied embeddings."""
    return random_recipe("tiny-qwen3", tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session")
def random_experts(tmp_path_factory: pytest.TempPathFactory) -> Callable[[bool], Path]:
    """folder = random_experts(tied): a randomly initialized tiny Qwen3-MoE with tied or untied embeddings."""
    return random_recipe("tiny-qwen3-moe", tmp_path_factory.mktemp("cache"))


def random_recipe(name: str, cache: Path) -> Callable[[bool], Path]:
    def build(tied: bool) -> Path:
        recipe = dataclasses.replace(RECIPES[name], warm_start_steps=0, tie_word_embeddings=tied)
        return ensure_recipe("tied" if tied else "untied", recipe, cache, progress=lambda message: None)

    return build
