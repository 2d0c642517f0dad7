#!/usr/bin/env python3
"""Run the same short trainings from two commits and compare everything they computed bit for bit.

    scripts/compare_commits.py OLD [NEW] [--cases w4a16,moe] [--steps 4] [--without-amx]
        [--json FILE]

NEW defaults to HEAD. Each commit is checked out into a scratch folder with an environment of its
own (`make env`). The comparison covers all metrics of every step except timings, among them the
digest of each published weight version, and the SHA-256 of the exported weights. Metrics that only
one commit has are listed, not compared.

--without-amx runs both commits as on a CPU without AMX. Use it for commits that choose differently
among vLLM's AMX kernels.

Exit status: 0 equal, 1 different, 2 a run failed.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
CASES = {
    "w4a16": ["--scheme", "w4a16"],
    "w4a16-float16": ["--scheme", "w4a16", "--dtype", "float16"],
    "w8a8": ["--scheme", "w8a8"],
    "bf16": ["--scheme", "bf16"],
    "moe": ["--model", "tiny-qwen3-moe", "--scheme", "w4a16"],
    "lora": ["--scheme", "w4a16", "--learner.lora.name", "lora"],
    "processes": ["--scheme", "w4a16", "--processes", "2"],
    "server": ["--scheme", "w4a16", "--rollout.servers", "1"],
}
TIMINGS = ("seconds", "tokens_per_second", "time/")
NO_AMX = "import torch\ntorch.cpu._is_amx_tile_supported = lambda: False\n"


def main() -> int:
    """Compare the commits and print one line for each case."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("old")
    parser.add_argument("new", nargs="?", default="HEAD")
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--without-amx", action="store_true")
    parser.add_argument("--json", type=Path)
    known = parser.parse_args()
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="compare-") as scratch:
        folder = Path(scratch)
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "QARL_CACHE": str(folder / "cache"),
        }
        if known.without_amx:
            (folder / "site").mkdir()
            (folder / "site" / "sitecustomize.py").write_text(NO_AMX)
            environment["PYTHONPATH"] = str(folder / "site")
        trees = {
            side: check_out(commit, folder / side)
            for side, commit in (("old", known.old), ("new", known.new))
        }
        for case in known.cases.split(","):
            sides = {
                side: train(
                    tree,
                    CASES[case],
                    known.steps,
                    folder / f"{side}-{case}",
                    environment,
                )
                for side, tree in trees.items()
            }
            results[case] = compare(sides["old"], sides["new"])
            print(f"{case:14} {results[case]['verdict']}", flush=True)
    if known.json:
        outcome = {"old": known.old, "new": known.new, "cases": results}
        known.json.write_text(json.dumps(outcome, indent=2) + "\n")
    return 0 if all(not result["different"] for result in results.values()) else 1


def check_out(commit: str, folder: Path) -> Path:
    """Clone the repository at `commit`, make its environment, and return the clone's path."""
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(folder)], check=True)
    subprocess.run(
        ["git", "checkout", "--quiet", "--detach", commit_id(commit)],
        cwd=folder,
        check=True,
    )
    subprocess.run(
        ["make", "--no-print-directory", "env"],
        cwd=folder,
        check=True,
        stdout=subprocess.DEVNULL,
    )
    return folder


def commit_id(commit: str) -> str:
    """Return the hash of a name, because the clone may not know the name."""
    return subprocess.check_output(
        ["git", "rev-parse", f"{commit}^{{commit}}"], cwd=ROOT, text=True
    ).strip()


def train(
    tree: Path, options: list[str], steps: int, run: Path, environment: dict[str, str]
) -> dict[str, Any]:
    """Train and return the run's figures by names such as "step 1 reward"."""
    command = [
        str(tree / ".venv/bin/qarl"),
        "train",
        *options,
        "--steps",
        str(steps),
        "--prompts",
        "16",
    ]
    command += ["--eval.problems", "64", "--output", str(run)]
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
    if done.returncode:
        print(done.stdout[-3000:], done.stderr[-3000:], sep="\n", file=sys.stderr)
        sys.exit(2)
    computed: dict[str, Any] = {}
    for line in (run / "metrics.jsonl").read_text().split("\n"):
        if line:
            step = json.loads(line)
            computed |= {f"step {step['step']} {name}": value for name, value in flat(step).items()}
    for file in sorted((run / "export").glob("*.safetensors")):
        computed[f"export {file.name}"] = hashlib.sha256(file.read_bytes()).hexdigest()
    return computed


def flat(
    step: dict[str, Any],
    prefix: str = "",
) -> dict[str, Any]:
    """Return a step's metrics except timings, nested ones by dotted names."""
    out: dict[str, Any] = {}
    for name, value in step.items():
        if any(part in prefix + name for part in TIMINGS):
            continue
        out |= (
            flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
        )
    return out


def compare(
    old: dict[str, Any],
    new: dict[str, Any],
) -> dict[str, Any]:
    """Return the values that differ and the names that only one side has."""
    shared = old.keys() & new.keys()
    different = {
        name: [old[name], new[name]]
        for name in sorted(shared)
        if json.dumps(old[name]) != json.dumps(new[name])
    }
    alone = {
        "old": sorted(old.keys() - new.keys()),
        "new": sorted(new.keys() - old.keys()),
    }
    verdict = (
        f"{len(shared)} values equal"
        if not different
        else f"DIFFERENT: {len(different)} of {len(shared)}, e.g. "
    )
    if different:
        name = next(iter(different))
        verdict += f"{name}: {different[name][0]} and {different[name][1]}"
    only = [f"{len(names)} in the {side} commit alone" for side, names in alone.items() if names]
    return {
        "verdict": ", ".join([verdict, *only]),
        "different": different,
        "alone": alone,
        "shared": len(shared),
    }


if __name__ == "__main__":
    sys.exit(main())
