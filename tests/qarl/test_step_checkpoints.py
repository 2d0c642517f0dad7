"""What a run keeps of its steps. Blind spot: one process; tests/runs/test_train.py has whole runs."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from qarl.configs.load import config_file, load_config
from qarl.learner.processes import Processes
from qarl.quant.digest import StreamDigest
from qarl.report.run_folder import RunFolder
from qarl.run.session import Position
from qarl.run.step_checkpoints import StepCheckpoints
from tests.support import Policies
from tests.support.engines import disturb, make_model


def test_the_best_policy_by_accuracy_is_exported(random_policy: Policies, tmp_path: Path):
    """Contract: the one of the highest accuracy since before the run, ties to the earlier; also over a resumption."""
    source = random_policy(True)
    model, folder = make_model(source, "w4a16"), RunFolder(tmp_path)
    policy: Any = SimpleNamespace(model=model, folder=source, processes=Processes())
    config, at = load_config(config_file("tiny-qwen3"), {"checkpoint.best": "true"}), Position(first_accuracy=0.3)
    checkpoints, digests, rollouts = StepCheckpoints(config, folder, policy, at), [], Any
    for accuracy in (0.2, 0.5, None, 0.5, 0.6):
        if at.step == 4:  # from here on as if resumed
            lines = [{"step": 2, "accuracy": 0.5}, {"step": 4, "accuracy": 0.5}, {"step": 5, "accuracy": 1}]
            folder.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
            checkpoints = StepCheckpoints(config, folder, policy, at)
        at.step += 1
        disturb(model, at.step)
        digest = StreamDigest()
        for tensor in model.low_bit_tensors():
            digest.update(tensor)
        digests.append(digest.hexdigest())
        checkpoints.after_step(rollouts, accuracy, stopping=False)  # pyright: ignore[reportArgumentType]
        note = tmp_path / "export-best" / "qarl.json"
        best = {1: None, 2: 2, 3: 2, 4: 2, 5: 5}[at.step]
        written = json.loads(note.read_text()) if note.exists() else {"step": None}
        assert written["step"] == best and written.get("digest") == (best and digests[best - 1])
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["export-best"]
