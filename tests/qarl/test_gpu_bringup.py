"""scripts/gpu_bringup.sh without a GPU: its commands are ones there are, and it goes on where it stopped."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

from qarl.configs.load import config_file, load_config

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts/gpu_bringup.sh"
STAND_IN = """#!/usr/bin/env bash
printf '%s\\n' "$(basename "$0") $*" >>"$CALLS"
[[ $FAILS && "$*" == *"$FAILS"* ]] && exit 3
[[ "$*" == *runs/resumed* && "$*" != *--resume* ]] && mkdir -p "$RESUMED/step-000002" && exec sleep 60
exit 0
"""


def bringup(folder: Path, fails: str = "") -> tuple[int, list[str], dict[str, int]]:
    """Exit status, the commands called by a stand-in for each program, and every step's status."""
    programs, calls = folder / "bin", folder / "calls"
    programs.mkdir(exist_ok=True)
    calls.write_text("")
    for name in ("make", "python", "qarl"):
        (programs / name).write_text(STAND_IN)
        (programs / name).chmod(0o755)
    resumed = folder / "out/runs/resumed/checkpoints"
    environment = os.environ | {
        "PATH": f"{programs}:{os.environ['PATH']}", "VENV": str(folder), "CALLS": str(calls), "FAILS": fails,
        "RESUMED": str(resumed), "PYTHON": str(programs / "python"),
    }  # fmt: skip
    done = subprocess.run(["bash", SCRIPT, folder / "out"], env=environment, capture_output=True, text=True, timeout=60)
    steps = {file.stem: json.loads(file.read_text())["status"] for file in (folder / "out").glob("*.json")}
    return done.returncode, calls.read_text().splitlines(), steps


def test_it_skips_what_depends_on_a_failure_and_does_not_repeat_what_passed(tmp_path: Path):
    """Contract: status counts failures and skips; a second call runs those alone."""
    status, first, steps = bringup(tmp_path, fails="-k products")
    assert steps["products"] == 3 and {steps["environment"], steps["codes"], steps["operators"]} == {0}
    assert status > 5 and not {"gradients", "engine", "train"} & steps.keys()
    status, second, steps = bringup(tmp_path)
    assert status == 0 and not set(steps.values()) - {0} and steps.keys() >= {"train", "resume", "large-experts"}
    assert not any(" env " in call for call in second) and any("--resume" in call for call in second)
    status, third, _ = bringup(tmp_path)
    assert status == 0 and third == [] and first


def test_every_run_and_test_it_names_is_there(tmp_path: Path):
    """Options are those of a run's configuration; files of tests exist."""
    _, calls, _ = bringup(tmp_path)
    trained = 0
    for program, *words in map(shlex.split, calls):
        for word in words:
            assert not word.startswith(("tests/", "scripts/")) or (ROOT / word).exists(), word
        if program == "qarl" and words[0] == "train" and words[1] != "--resume":
            options = dict(zip((word[2:] for word in words[1::2]), words[2::2], strict=True))
            config = options.pop("config", None)
            load_config(config_file(config) if config else None, options)
            trained += 1
    assert trained > 7


def test_the_piece_without_vllm_tells_what_differs(tmp_path: Path):
    """On a CPU, where all is equal; here codes are found to differ. Blind spot: what only runs on GPUs."""
    code = "import sys, runpy, torch\nsys.modules['vllm'], same = None, torch.equal\n"
    code += "torch.equal = lambda a, b: a.dtype != torch.uint8 and same(a, b)\n"
    code += "sys.argv = ['', sys.argv[1], '--device', 'cpu', '--small']\n"
    code += f"runpy.run_path({str(ROOT / 'scripts/gpu_torch.py')!r}, run_name='__main__')"
    command = [sys.executable, "-c", code, tmp_path]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
    records = {file.stem: json.loads(file.read_text()) for file in tmp_path.glob("torch-*.json")}
    assert [name for name, record in records.items() if record["status"]] == ["torch-codes"], done.stdout
    assert (
        len(records) == 6 and done.returncode == 1 and "differ from the CPU's: bf16" in records["torch-codes"]["error"]
    )
