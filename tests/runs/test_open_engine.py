"""A second kind of engine: plain transformers, which `open_engine` could choose, carries a whole
run.
"""

import io
import itertools
import shutil
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import ANY, Mock, call

import pytest
from rich.console import Console

from qarl.configs.load import config_from_tree
from qarl.configs.schema.rollout import RolloutConfig
from qarl.configs.schema.run import RunConfig
from qarl.loop import train
from qarl.quant.types import LowBitTensor
from qarl.report.dashboard import Dashboard
from qarl.report.run_folder import RunFolder, read_metrics
from qarl.rollout.engine import EngineError, LoadReport
from qarl.rollout.open import open_engine
from qarl.rollout.types import Completion, Prompt, Sampling
from qarl.start import RunStart
from qarl.sync.gate import GateError
from tests.support import Policies
from tests.support.runs import lines
from tests.support.transformers_engine import (
    TransformersEngine,
    use_transformers_engine,
)


class SkewedEngine(TransformersEngine):
    """Tells other log-probs of what it samples than it sampled with."""

    def _sample(self, prompt: Prompt, sampling: Sampling, seed: int) -> Completion:
        found = super()._sample(prompt, sampling, seed)
        skewed = tuple(value - 1.0 for value in found.logprobs)
        return Completion(
            found.token_ids,
            skewed,
            found.text,
            found.weight_version,
            found.finish_reason,
        )


@pytest.fixture
def config(random_policy: Policies, tmp_path: Path) -> RunConfig:
    return config_from_tree(
        {
            "model": str(random_policy(True)),
            "scheme": "bf16",
            "steps": 2,
            "output": str(tmp_path / "run"),
            "task": {"name": "chain_sum", "reward": "tests.support.rewards:reward"},
            "eval": {"problems": 0},
            "rollout": {"prompts": 2, "samples": 4, "max_new_tokens": 4},
            "learner": {
                "kernel": "reference",
                "operators": "transformers",
                "mini_batches": 2,
                "optimizer": {"lr": 1e-3},
            },
        }
    )


def sampling_ahead(config: RunConfig, versions: int, **changes: Any) -> RunConfig:
    tree = config.model_dump()
    tree["rollout"] |= {"servers": 1, "max_staleness": versions}
    return config_from_tree({**tree, "export": False, **changes})


def run(config: RunConfig, folder: RunFolder | None = None) -> tuple[RunFolder, Any]:
    """folder: of the run to resume; None begins one."""
    with Dashboard(config, Console(file=io.StringIO())) as dashboard:
        into = folder or RunFolder.create(config)
        return into, train(RunStart(config, into, resume=folder is not None), dashboard)


def test_a_run_needs_no_more_than_the_protocol(config: RunConfig, monkeypatch: pytest.MonkeyPatch):
    """Audit, canary, gate, two steps of learning and publishing, and an export that a fresh engine
    repeats bit for bit: all with an engine that only tests know. Blind spot: low-bit schemes, which
    transformers does not multiply.
    """
    use_transformers_engine(monkeypatch)
    folder, outcome = run(config)
    first, second = read_metrics(folder.metrics)
    assert first["weight_version"] == 1
    assert second["weight_version"] == 2
    assert outcome.export == folder.export
    assert first["digest"] != second["digest"]
    assert first["learn/mismatch/mean_abs"] < 0.01
    assert TransformersEngine.running == 0


class FullEngine(TransformersEngine):
    """Takes no second version."""

    def load(self, stream: Iterable[LowBitTensor], version: int) -> LoadReport:
        if version == 2:
            raise EngineError("no room for version 2")
        return super().load(stream, version)


def test_a_step_whose_publish_fails_is_in_the_metrics(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
):
    """Contract: what was learned in the step is written, with the batch's tokens, and the run goes
    on after it.
    """
    use_transformers_engine(monkeypatch, FullEngine)
    folder = RunFolder.create(config)
    with (
        pytest.raises(EngineError, match="no room"),
        Dashboard(config, Console(file=io.StringIO())) as dashboard,
    ):
        train(RunStart(config, folder), dashboard)
    first, second = read_metrics(folder.metrics)
    assert first["digest"]
    assert "digest" not in second
    assert second["learn/mismatch/mean_abs"] < 0.01
    assert [path.stem for path in sorted(folder.tokens.iterdir())] == ["step-000001", "step-000002"]
    use_transformers_engine(monkeypatch)
    run(config, folder)
    assert [row["step"] for row in read_metrics(folder.metrics)] == [1, 2]


class WatchedEngine(TransformersEngine):
    """Notes the weight version of every call, at its beginning and at its end, and whether the main
    thread waits.
    """

    calls: ClassVar[list[tuple[int, int, bool]]] = []

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[list[Completion]]:
        begun = self.weight_version
        found = super().generate(prompts, sampling)
        time.sleep(0.2)  # longer than a publish that would not wait
        self.calls.append(
            (
                begun,
                self.weight_version,
                threading.current_thread() is threading.main_thread(),
            )
        )
        return found


def test_a_batch_is_sampled_ahead_by_one_version_and_kept(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
):
    """Contract of `rollout.max_staleness` 1: the first batch by version 0, every other by the
    version before the one that learns from it, from beginning to end, beside the learner; equal
    runs are equal; a run that is resumed from its second step goes on to the last bit, though the
    weights that sampled its third batch are gone.
    """
    use_transformers_engine(monkeypatch, WatchedEngine)
    config = sampling_ahead(config, 1, steps=4, checkpoint={"every": 1, "keep": 9})
    WatchedEngine.calls.clear()
    folder, _ = run(config)
    whole = lines(folder.path)
    assert [line["staleness"] for line in whole] == [0, 1, 1, 1]
    assert WatchedEngine.calls == [
        (0, 0, True),
        (0, 0, False),
        (1, 1, False),
        (2, 2, False),
    ]
    for step in (3, 4):
        shutil.rmtree(folder.checkpoints / f"step-{step:06d}")
    run(config, folder)
    assert lines(folder.path) == whole
    assert WatchedEngine.calls[4:] == [(2, 2, False)], "the third batch was not sampled again"


SLOW_BATCH = 4
SLOW_SECONDS = 1.0


class LockedEngine(TransformersEngine):
    """One call at a time, each wholly by one version. The slow batch takes longer than steps do."""

    lock: ClassVar = threading.Lock()
    calls: ClassVar = itertools.count()
    begun: ClassVar[list[int]] = []

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[list[Completion]]:
        if next(self.calls) == SLOW_BATCH:
            time.sleep(SLOW_SECONDS)
        with self.lock:
            self.begun.append(self.weight_version)
            return super().generate(prompts, sampling)

    def load(self, stream: Iterable[LowBitTensor], version: int) -> LoadReport:
        with self.lock:
            return super().load(stream, version)


def test_several_batches_are_sampled_ahead_and_none_is_lost(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
):
    """Contract of `rollout.max_staleness` from 2: no batch is by weights more than so many versions
    before those that learn from it, the first ones are that old; a checkpoint has all that were
    begun, so that a run which is resumed samples none of them again; what it waits for them is in
    the next step's seconds.

    Blind spot: batches here are of one version each; those of several are
    `tests/engine/test_servers.py`'s.
    """
    use_transformers_engine(monkeypatch, LockedEngine)
    config = sampling_ahead(config, 2, steps=6, checkpoint={"every": 3, "keep": 9})
    LockedEngine.begun.clear()
    folder, _ = run(config)
    whole = lines(folder.path)
    ages = [line["staleness"] for line in whole]
    assert ages[0] == 0
    assert all(0 <= age <= 2 for age in ages)
    assert max(ages) > 0
    assert len(LockedEngine.begun) == 6
    third, fourth = read_metrics(folder.metrics)[2:4]
    phases = ("sample", "score", "learn", "publish", "record")
    waited = sum(third[f"seconds/{phase}"] for phase in phases) + fourth["seconds/sample"]
    assert waited > SLOW_SECONDS, "begun in the third step, which ends with a checkpoint"
    shutil.rmtree(folder.checkpoints / "step-000006")
    run(config, folder)
    assert len(LockedEngine.begun) == 7, "of steps 4 to 6 the last alone was not in the checkpoint"
    resumed = lines(folder.path)
    assert len(resumed) == 6
    assert resumed[:3] == whole[:3]
    assert [line["reward"] for line in resumed[:5]] == [line["reward"] for line in whole[:5]]


@pytest.mark.parametrize("aligned", [True, False])
def test_a_run_starts_from_the_codes_of_its_method(
    aligned: bool, config: RunConfig, monkeypatch: pytest.MonkeyPatch
):
    """Before an engine is started, and with its own masters where it multiplies those."""
    monkeypatch.setattr("qarl.start.initial_codes", lambda *_: ["the codes"])
    monkeypatch.setattr(
        "qarl.start.start_from_codes", started := Mock(side_effect=InterruptedError)
    )
    tree = config.model_dump() | {
        "scheme": "w4a16",
        "quantization": {"init": "gptq", "scale": "kept"},
    }
    tree["learner"]["aligned"] = aligned
    with pytest.raises(InterruptedError):
        run(config_from_tree(tree))
    assert started.call_args == call(ANY, ["the codes"], keep_masters=not aligned)


def test_an_engine_is_closed_where_a_run_fails(config: RunConfig, monkeypatch: pytest.MonkeyPatch):
    use_transformers_engine(monkeypatch, SkewedEngine)
    with pytest.raises(GateError):
        run(config)
    assert TransformersEngine.running == 0


def test_the_first_error_is_the_one_told(monkeypatch: pytest.MonkeyPatch, random_policy: Policies):
    """A body's error is not hidden by what closing a broken engine raises; without one, closing may
    fail aloud.
    """

    class Stuck(TransformersEngine):
        def close(self) -> None:
            super().close()
            raise OSError("stuck")

    use_transformers_engine(monkeypatch, Stuck)
    with (
        pytest.raises(ValueError, match="body"),
        open_engine(random_policy(True), RolloutConfig(), "bfloat16"),
    ):
        raise ValueError("body")
    with (
        pytest.raises(OSError, match="stuck"),
        open_engine(random_policy(True), RolloutConfig(), "bfloat16"),
    ):
        pass
    assert TransformersEngine.running == 0
