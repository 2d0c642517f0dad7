"""What a person may give wrongly: one message, exit status 2, nothing left behind. In process and
without an engine; `scripts/bad_inputs.py` generates hundreds of the kind.
"""

import dataclasses
import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from qarl.cli.main import main
from qarl.configs.errors import ConfigError, ModelError
from qarl.configs.load import config_file, load_config
from qarl.configs.schema.task import TaskConfig
from qarl.report.run_folder import RunFolder, resumed_config
from qarl.run.evaluation_plan import plan_evaluation
from qarl.run.export_note import export_note
from qarl.tasks.paths import absolute, relative
from tests.support.cases import cases


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder with some files of questions, rewards and configurations in it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("QARL_SERVER_KEY", raising=False)
    for name, text in cases(__file__, "files").items():
        (tmp_path / name).write_text(text)
    (tmp_path / "latin.yaml").write_bytes(b"# \xe9\n")
    (tmp_path / "taken").mkdir()
    (tmp_path / "all" / "begun" / "config.yaml").mkdir(parents=True)
    return tmp_path


def refused(arguments: str, capsys: pytest.CaptureFixture[str], place: Path) -> str:
    """The message; everything else of the contract is checked here."""
    before = {
        path: path.stat().st_mtime_ns
        for path in place.rglob("*")
        if "__pycache__" not in path.parts
    }
    assert main(shlex.split(arguments)) == 2
    message = capsys.readouterr().err
    assert (
        message.count("\n") <= 4
        and "Traceback" not in message
        and "validation error" not in message
    ), message
    after = {
        path: path.stat().st_mtime_ns
        for path in place.rglob("*")
        if "__pycache__" not in path.parts
    }
    assert before == after
    return message


@pytest.mark.parametrize(("arguments", "said"), cases(__file__, "refusals"))
def test_one_message_and_nothing_left_behind(place: Path, capsys, arguments: str, said: str):
    assert said in refused(arguments, capsys, place)


def test_what_is_refused_early_is_refused_before_torch_is_imported(place: Path):
    """All in one process, which would keep what any of them imported. Blind spot: how long it
    takes, which was measured as 0.8 s a command on a quiet machine.
    """
    lines = cases(__file__, "refused without torch")
    code = (
        "import sys; from qarl.cli.main import main\nfor line in sys.argv[1:]:\n    status ="
        " main(line.split()); heavy = {'torch', 'vllm', 'transformers'} & sys.modules.keys()\n   "
        " assert (status, heavy) == (2, set()), (line, status, heavy)"
    )
    # not the checkout that is installed
    here = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    result = subprocess.run(
        [sys.executable, "-c", code, *lines], capture_output=True, text=True, env=here
    )
    assert result.returncode == 0, result.stderr


def change_json(file: Path, **fields: object) -> None:
    tree = json.loads(file.read_text())
    file.write_text(json.dumps({**tree, **fields}))


@pytest.mark.parametrize(("name", "content", "said"), cases(__file__, "models"))
def test_models_are_refused(
    place: Path, random_policy, capsys, monkeypatch, name: str, content: Any, said: str
):
    """Before a run folder is made; kernels are not asked. content: of the file; other fields; its
    cut length.
    """
    monkeypatch.setattr("qarl.run.preflight.require_support", lambda *_, **__: None)
    file = Path(shutil.copytree(random_policy(True), place / "model")) / name
    if isinstance(content, dict):
        change_json(file, **content)
    elif isinstance(content, int):
        os.truncate(file, content)
    else:
        file.write_bytes(content.encode("latin-1"))
    command = "train --config tiny-qwen3 --model model --scheme bf16 --rollout.max_new_tokens 8"
    assert said in refused(command, capsys, place)


def test_versions_are_told(capsys: pytest.CaptureFixture[str]):
    for arguments in (["--version"], ["-V"], ["version"]):
        assert main(arguments) == 0
        assert capsys.readouterr().out.startswith("qarl ")
    assert main(["help"]) == 0


def test_an_export_is_measured_as_its_run_is(tmp_path: Path, random_policy):
    """Contract: task, its options, limits and dtype of the run are read back from qarl.json; naming
    another task forgets the options, and a run's dtype is not overridden in silence.
    """
    config = load_config(
        config_file("tiny-qwen3"), {"output": str(tmp_path / "run"), "dtype": "float16"}
    )
    run = RunFolder.create(config)
    shutil.copytree(random_policy(True), run.export)
    (run.export / "qarl.json").write_text(json.dumps(export_note(run.path, config, 3, run.export)))
    asked: dict[str, Any] = {"overrides": {}, "max_new_tokens": None, "dtype": None}
    of_run, of_export = (plan_evaluation(str(path), **asked) for path in (run.path, run.export))
    assert dataclasses.replace(of_run, target=of_export.target) == of_export
    assert of_export.task == config.task
    assert of_export.rollout.max_num_seqs == 512
    assert of_export.dtype == "float16"
    assert of_export.rollout.max_new_tokens == 8
    assert of_export.asking == config.eval.model_copy(update={"every": 50})
    changed = {
        "task.name": "gcd",
        "eval.samples": "4",
        "eval.temperature": "0.6",
        "eval.top_p": "0.95",
    }
    other = plan_evaluation(str(run.export), **{**asked, "overrides": changed, "max_new_tokens": 9})
    assert (other.task, other.rollout.max_new_tokens) == (TaskConfig(name="gcd"), 9)
    assert other.asking.samples == 4
    assert other.asking.top_p == 0.95
    assert other.asking.problems == config.eval.problems
    with pytest.raises(
        ConfigError, match=r"--dtype bfloat16: run .* computes in float16; leave it out"
    ):
        plan_evaluation(str(run.path), **{**asked, "dtype": "bfloat16"})
    with pytest.raises(
        ModelError,
        match=r"rollout.max_new_tokens \(--max-new-tokens\) = 4160, .* has 512 positions",
    ):
        plan_evaluation(str(run.path), **{**asked, "max_new_tokens": 4096})
    (run.export / "qarl.json").unlink()
    assert plan_evaluation(str(run.export), {}).dtype == "bfloat16", "of a checkpoint in float32"
    for own, dtype in (
        ({"dtype": "float16"}, "float16"),
        ({"quantization_config": {}}, "float32"),
    ):
        change_json(run.export / "config.json", **{"dtype": "float32", **own})
        assert plan_evaluation(str(run.export), {}).dtype == dtype
    (run.export / "qarl.json").write_text("{}")
    with pytest.raises(ConfigError, match="lacks 'run'; export the run again"):
        plan_evaluation(str(run.export), **asked)


def test_a_run_is_resumed_and_evaluated_in_any_folder(
    place: Path, random_policy, monkeypatch: pytest.MonkeyPatch
):
    """Contract: a run's configuration has absolute paths, of model, questions and functions, and
    its export's note names them from its own folder; ids, modules and built-in names stay. A folder
    that moves takes its files along.
    """
    shutil.copytree(random_policy(True), place / "model")
    (place / "data").mkdir()
    config = load_config(config_file("tiny-qwen3"), cases(__file__, "a run of files"))
    run = RunFolder.create(config)
    shutil.copytree(place / "model", run.export)
    (run.export / "qarl.json").write_text(json.dumps(export_note(run.path, config, 3, run.export)))
    assert str(place) not in (run.export / "qarl.json").read_text(), (
        "what is published names no folder of the machine"
    )
    monkeypatch.chdir(place / "data")
    found = RunFolder.open(place / "run").config()
    assert found.model == str(place / "model")
    assert found.task.name == str(place / "q.jsonl")
    assert found.task.reward == f"{place / 'raises.py'}:reward=1, math"
    assert found.task.correct == "tests.support.rewards:reward"
    assert getattr(found.learner.objective, "function", None) == f"{place / 'own.py'}:objective"
    asked = {"task.reward": "../raises.py:reward=1, math"}
    assert resumed_config(found, load_config(place / "run" / "config.yaml", asked)) == found
    for target in (place / "run", place / "run" / "export"):
        assert plan_evaluation(str(target), {}).task == found.task
    (place / "moved").mkdir()
    for name in ("run", "q.jsonl", "raises.py"):
        (place / name).rename(place / "moved" / name)
    moved = plan_evaluation(str(place / "moved" / "run" / "export"), {}).task
    assert moved.name == str(place / "moved" / "q.jsonl")
    hub = absolute(TaskConfig(name="hf:model", data="hf:owner/name", rollout="talk.py:talk"), place)
    assert hub.name == f"hf:{place / 'model'}"
    assert hub.data == "hf:owner/name"
    assert hub.rollout == f"{place / 'talk.py'}:talk"
    assert (
        absolute(TaskConfig(environment="tools.py:Shop"), place).environment
        == f"{place / 'tools.py'}:Shop"
    )
    assert relative(hub, place).name == "hf:model"


def test_generated_bad_inputs_keep_the_contract():
    """A few of every kind that `scripts/bad_inputs.py` makes; the script tries hundreds."""
    script = Path(__file__).parents[2] / "scripts" / "bad_inputs.py"
    done = subprocess.run(
        [sys.executable, str(script), "--count", "39"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
