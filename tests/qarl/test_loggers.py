"""Weights & Biases and MLflow, offline, where they are installed: figures by step, and a resumed run goes on."""

from pathlib import Path

import pytest

from qarl.configs.load import load_config
from qarl.report.loggers import open_logger

WHERE = {"wandb": {"WANDB_MODE": "offline"}, "mlflow": {"MLFLOW_ALLOW_FILE_STORE": "true"}}


@pytest.mark.parametrize("name", WHERE)
def test_figures_are_logged_and_a_resumed_run_goes_on(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip(name, reason="an optional extra, in none of the locks: pip install qarl[log]")
    monkeypatch.chdir(tmp_path)
    for variable, value in {**WHERE[name], "MLFLOW_TRACKING_URI": f"file:{tmp_path}/mlruns"}.items():
        monkeypatch.setenv(variable, value)
    config = load_config(None, {"log": name})
    for steps in ((1, 2), (2, 3)):
        logger = open_logger(config, tmp_path)
        assert logger is not None
        for step in steps:
            logger.write({"reward": step / 4, "learn/mismatch/k3": 0.0}, step)
        logger.close()
    if name == "mlflow":
        (written,) = tmp_path.glob("mlruns/*/*/metrics/reward")
        assert [line.split()[1:] for line in written.read_text().splitlines()] == [
            ["0.25", "1"],
            ["0.5", "2"],
            ["0.5", "2"],
            ["0.75", "3"],
        ]
    else:
        assert len(list(tmp_path.glob(f"wandb/offline-run-*/run-{tmp_path.name}.wandb"))) == 2


def test_no_logger_is_opened_unless_asked_for(tmp_path: Path):
    assert open_logger(load_config(None, {}), tmp_path) is None
