"""Settings of every test run, and fixtures: small random policies, built once a session."""

import dataclasses
import os
import shutil
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from qarl.cli.environment import quiet_libraries

quiet_libraries()
# Models of these sizes gain nothing from a second thread, and several processes lose by spinning.
# Read at import.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch  # noqa: E402

# Registers the profiles before hypothesis' plugin loads one. Libraries are quieted above.
import tests.support.profiles  # noqa: E402, F401
from qarl.embedded.real_model import ensure_real_model  # noqa: E402
from qarl.embedded.recipe import RECIPES, ensure_recipe, recipe_tokenizer  # noqa: E402
from qarl.quant.runtime.answers import cache_folder  # noqa: E402
from tests.support import Policies, forks  # noqa: E402

settings.load_profile("ci")
LONGEST = ("runs", "engine", "learner", "quant")
"""Folders whose files begin first, so that all workers end together."""


def pytest_configure(config: pytest.Config) -> None:
    """Keep the session's embedded policies in a folder of its own instead of the user's cache. It
    begins with copies of those the user has, whose training takes half a minute each.
    """
    if "QARL_TEST_CACHE" not in os.environ:
        os.environ["QARL_USERS_CACHE"] = str(cache_folder())
        folder = tempfile.mkdtemp(prefix="qarl-tests-")
        complete = {path for path in cache_folder().glob("tiny-*/") if not path.suffix}
        for built in complete:
            shutil.copytree(built, Path(folder) / built.name)
        os.environ["QARL_TEST_CACHE"] = os.environ["QARL_CACHE"] = folder
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
    # one of several, which import nearly everything to collect the tests
    if hasattr(config, "workerinput"):
        forks.start_from_here()


@pytest.fixture
def forked_compressor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run llmcompressor in the fork server, which saves 12 s of CPU. A test without this fixture
    starts the real process.
    """
    monkeypatch.setattr("qarl.ptq.compressor._in_own_process", forks.compress)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put the longest files first, so that several workers finish together. The order within a file
    stays.
    """
    rank = {name: place for place, name in enumerate(LONGEST)}
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: rank.get(item.path.parent.name, len(rank)))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    """Restore torch's dispatch keys after a test that left them changed, and warn of it.

    They belong to the thread. In some runs, a test that compiles gradients left autograd's keys
    excluded, and every later test of its process that needs a gradient failed. Why is unknown.
    """
    before = _dispatch_keys()
    with torch._C._PreserveDispatchKeyGuard():
        result = yield
        after = _dispatch_keys()
    if after != before:
        item.warn(pytest.PytestWarning(f"dispatch keys were {before} and became {after}"))
    return result


def _dispatch_keys() -> tuple[str, str]:
    """Return the keys that torch excludes and includes in this thread."""
    return (
        str(torch._C._dispatch_tls_local_exclude_set()),
        str(torch._C._dispatch_tls_local_include_set()),
    )


@pytest.fixture(scope="session")
def random_policy() -> Policies:
    """Return a function that makes a randomly initialized tiny Qwen3: folder = random_policy(tied),
    with tied or untied embeddings.
    """
    return random_recipe("tiny-qwen3")


@pytest.fixture(scope="session")
def random_experts() -> Policies:
    """Return a function that makes a randomly initialized tiny Qwen3-MoE: folder =
    random_experts(tied), with tied or untied embeddings.
    """
    return random_recipe("tiny-qwen3-moe")


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """Return the tokenizer of the embedded policy that calls tools; the tests of a file may change
    its template.
    """
    return recipe_tokenizer(RECIPES["tiny-qwen3-tools"])


def random_recipe(name: str) -> Policies:
    def build(tied: bool) -> Path:
        recipe = dataclasses.replace(RECIPES[name], warm_start_steps=0, tie_word_embeddings=tied)
        return ensure_recipe("tied" if tied else "untied", recipe, cache_folder())

    return build


@pytest.fixture(scope="session")
def real_model() -> Path:
    """Return the folder of SmolLM2-135M-Instruct from the user's cache. Making it takes a download
    of 93 MB and half a minute.
    """
    return ensure_real_model(Path(os.environ["QARL_USERS_CACHE"]))


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prepare the data sets of a test in its own folder."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
