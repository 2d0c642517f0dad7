"""Weights & Biases, offline, where it is installed: figures by step, and a resumed run goes on."""

from pathlib import Path

import pytest

from qarl.configs.load import load_config
from qarl.report.loggers import step_logger


def test_figures_are_logged_and_a_resumed_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("wandb", reason="an optional extra, in none of the locks: pip install qarl[log]")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    config = load_config(None, {"log": "wandb"})
    for steps in ((1, 2), (2, 3)):
        with step_logger(config, tmp_path) as log:
            for step in steps:
                log({"reward": step / 4, "learn/mismatch/k3": 0.0}, step)
    assert len(list(tmp_path.glob(f"wandb/offline-run-*/run-{tmp_path.name}.wandb"))) == 2
