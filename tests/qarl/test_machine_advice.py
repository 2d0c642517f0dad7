"""`qarl check --machine` and what `make env DEVICE=cuda` tells: what is missing is named, with its remedy.

Blind to GPUs: none was at hand, and what is said of one comes from a driver that is made up here.
"""

import os
import subprocess
from pathlib import Path

import pytest

from qarl.advice import machine as advice
from qarl.advice.finding import Finding
from qarl.cli.main import main
from qarl.planning import machine as machines

ROOT = Path(__file__).parents[2]
OLD = "0, GPU-a, NVIDIA A100-SXM4-80GB, 81920, 1000, 8.0, 550.54.15"


def tool(place: Path, name: str, text: str = "") -> Path:
    place.mkdir(exist_ok=True)
    (place / name).write_text(f"#!/bin/sh\n{text}\n")
    (place / name).chmod(0o755)
    return place


def lines(monkeypatch: pytest.MonkeyPatch, path: str) -> dict[str, Finding]:
    """Those that import nothing heavy, under that PATH."""
    monkeypatch.setenv("PATH", path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    heavy = ("_torch", "_triton", "_group", "_operators")
    for name in heavy:
        monkeypatch.setattr(advice, name, lambda on_gpus, name=name: Finding("good", name, ""))
    return {line.about: line for line in advice.machine_findings()}


def test_a_cpu_machine_is_well_without_gpu_and_compiler(tmp_path: Path, monkeypatch, capsys):
    found = lines(monkeypatch, str(tmp_path))
    assert found["GPUs"].text.startswith("none that the driver names") and not found["GPUs"].remedy
    assert "none (gcc, clang or cc); only learner.compile needs it" in found["compiler"].text
    assert {"versions", "CPU", "memory", "disk, runs", "disk, cache"} <= found.keys()
    assert not found["versions"].remedy and "torch 2." in found["versions"].text
    assert main(["check", "--machine"]) in (0, 1)  # by this machine's memory and disk
    assert "versions: python " in capsys.readouterr().out


def test_a_gpu_machine_is_told_what_it_lacks(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(advice, "torch_is_for_cpus", lambda: False)
    none = lines(monkeypatch, str(tmp_path / "empty"))
    assert none["GPUs"].remedy == "install NVIDIA's driver, or: make env DEVICE=cpu"
    assert none["compiler"].remedy.startswith("apt install gcc")
    found = lines(monkeypatch, str(tool(tmp_path / "bin", "nvidia-smi", f"echo '{OLD}'")))
    assert found["GPU 0"].text == "NVIDIA A100-SXM4-80GB, capability 8, 1.0 of 80.0 GiB free" and found["GPU 0"].remedy
    assert found["driver"].remedy == "CUDA 13 needs 580 or later: update it"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert not machines.visible_gpus() and machines.driver_gpus()


def test_a_check_that_fails_is_a_line(monkeypatch):
    def _torch(on_gpus: bool) -> Finding:
        raise ImportError("libcudart.so.13: cannot open shared object file")

    line = advice._guarded(_torch, False)
    assert line.text == "ImportError: libcudart.so.13: cannot open shared object file" and line.remedy


def told(place: Path, *python: str) -> str:
    """What scripts/env/check_cuda.sh says with these programs and a shell's own."""
    environment = {**os.environ, "PATH": str(place)}
    for name in ("bash", "head"):
        path = next(p for p in (Path("/usr/bin") / name, Path("/bin") / name) if p.exists())
        if not (place / name).exists():
            (place / name).symlink_to(path)
    script = str(ROOT / "scripts" / "env" / "check_cuda.sh")
    done = subprocess.run([str(place / "bash"), script, *python], env=environment, capture_output=True, text=True)
    assert done.returncode == ("MISSING" in done.stderr)
    return done.stderr


def test_make_env_names_what_is_missing_for_cuda(tmp_path: Path):
    place = tmp_path / "bin"
    place.mkdir()
    nothing = told(place, "no-python")
    for what in ("NVIDIA's driver", "a C compiler", "Python.h of no-python"):
        assert f"MISSING: {what}" in nothing
    tool(place, "gcc")
    tool(place, "nvidia-smi", "exit 9")
    assert "MISSING: a GPU" in told(place) and "compiler" not in told(place)
    tool(place, "nvidia-smi", "echo 550.54.15")
    assert "MISSING: a driver for CUDA 13 (it is 550.54.15)" in told(place)
