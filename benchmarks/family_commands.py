"""Families through the commands that a user types: `python -m benchmarks.families --commands`.

A tiny random model of each family goes through `qarl schemes`, `qarl check` and two steps of `qarl
train`, which ends with an export that a fresh engine must reproduce. Commands run in forks of one
process that has imported everything (`tests.support.fork_server`).
"""

import json
import os
import re
import shutil
import signal
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers.models.auto import configuration_auto, modeling_auto

from tests.support.runs import Run

_LIMIT = 900
"""Seconds after which a command is ended."""
_TRAIN = (
    *("--config", "small", "--task", "chain_sum", "--steps", "2", "--prompts", "2"),
    *("--samples", "4", "--mini-batches", "2", "--max-new-tokens", "16"),
    *("--rollout.max_prompt_tokens", "256", "--eval.problems", "4", "--eval-every", "2"),
    *("--reward", "tests.support.rewards:reward"),
)

PICTURE_TASK = ("--task", "drawn_shapes", "--rollout.pictures", "1")
"""Options by which a run asks with drawn pictures."""


def registered() -> dict[str, str]:
    """Return the name of every architecture for text, also beside pictures or sound, that vLLM
    registers → its configuration's class in transformers; "" if transformers has none.
    """
    from vllm.model_executor.models import registry

    architectures = {
        **registry._TEXT_GENERATION_MODELS,
        **registry._MULTIMODAL_MODELS,
        **registry._TRANSFORMERS_SUPPORTED_MODELS,
    }
    configs: Any = configuration_auto.CONFIG_MAPPING_NAMES  # pyright: ignore[reportPrivateImportUsage]
    types = {
        name: kind
        for mapping in (
            modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
            modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
            modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        )
        for kind, names in mapping.items()
        for name in ([names] if isinstance(names, str) else names)
    }
    return {name: configs.get(types.get(name, ""), "") for name in architectures}


def through_commands(
    name: str, folder: Path, scheme: str, dtype: str, more: Sequence[str] = ()
) -> dict[str, Any]:
    """Return the row of the model in a folder: what the commands say, and how the run ended.

    `outcome` is one of "exact", "bounded" (log-probs differ), "refused", "crashed" (a traceback, a
    signal, or no end), "untrue" (a command says other than the run shows), and "not learned" (no
    step had rewards that differ: an untrained model whose head is its embedding may repeat its last
    token).

    more: options beside the row's, which come after them.
    """
    row: dict[str, Any] = {"family": name, "scheme": scheme, "dtype": dtype}
    with tempfile.TemporaryDirectory() as temporary:
        run = Path(temporary) / "run"
        model = ("--model", folder, "--dtype", dtype)
        chosen = (*model, *_TRAIN, *more, "--scheme", scheme, "--output", run)
        listed = _command("schemes", *model)
        checked = _command("check", *chosen)
        results = {"schemes": listed, "check": checked}
        if not checked["refusal"]:  # else `train` says the same
            results["train"] = _command("train", *chosen)
        row["says"] = listed["says"]
        for command, result in results.items():
            if result["crash"]:
                return {**row, "outcome": "crashed", "reason": f"{command}: {result['crash']}"}
        refusal = next(
            filter(None, (r["refusal"] for r in (checked, results.get("train")) if r)), ""
        )
        if refusal:
            says_so = listed["status"] != 0 or "refused" in listed["says"]
            untrue = not says_so and not _unusable(listed["output"], scheme)
            late = "" if checked["refusal"] else " (train, not check)"
            outcome = "untrue" if untrue else "refused"
            return {**row, "outcome": outcome, "reason": f"{refusal}{late}"}
        differences = _differences(run)
    if not differences:
        return {**row, "outcome": "not learned", "reason": "no answers to a prompt differed"}
    worst = max(differences)
    exact = worst == 0.0
    untrue = exact != ("to the last bit" in listed["says"])
    outcome = "untrue" if untrue else "exact" if exact else "bounded"
    return {**row, "outcome": outcome, "mean_abs": worst, "reason": listed["reason"]}


def _unusable(output: str, scheme: str) -> bool:
    """Return whether the table of `qarl schemes` says that a scheme does not run for a model."""
    rows = (line.split() for line in output.splitlines())
    return any(row[0] == scheme and "no" in row for row in rows if row)


def _differences(run: Path) -> list[float]:
    """Return mean |Δ log p| of each step of a run that learned."""
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    values = (_value(step, "learn/mismatch/mean_abs") for step in steps)
    return [value for value in values if value is not None]


def _value(step: dict[str, Any], key: str) -> Any:
    """Return a metric of a step, whose record may be nested."""
    value: Any = step.get(key)
    if value is None:
        value = step
        for part in key.split("/"):
            value = value.get(part) if isinstance(value, dict) else None
    return value


def _command(*arguments: str | Path) -> dict[str, Any]:
    """Run `qarl ARGUMENTS` and return status, last words, refusal and crash."""
    run = Run(*arguments)
    timer = threading.Timer(_LIMIT, os.kill, (run.pid, signal.SIGKILL))
    timer.start()
    done = run.wait()
    timer.cancel()
    text = done.stdout + done.stderr
    says = next((line for line in done.stdout.splitlines() if _AGREES.search(line)), "")
    errors = [line for line in text.splitlines() if re.match(r"(qarl: )?error|.*[Ee]rror: ", line)]
    last = next((line for line in reversed(text.splitlines()) if line.strip()), "")
    crash = ""
    if done.returncode < 0 or "Traceback (most recent call last)" in text:
        crash = (errors or [last or f"status {done.returncode}"])[-1]
    refusal = (errors or [last])[-1] if done.returncode == 2 else ""
    if done.returncode == 1 and not crash and arguments[0] == "train":
        refusal = f"failed: {(errors or [last])[-1]}"
    return {
        "status": done.returncode,
        "output": done.stdout,
        "says": says,
        "reason": says.partition(": ")[2],
        "refusal": refusal.strip(),
        "crash": crash.strip(),
    }


_AGREES = re.compile(r"^learner and sampler agree|^refused")


def print_row(row: dict[str, Any]) -> None:
    """Print a row on one line."""
    value = f"{row['mean_abs']:.1e} " if row.get("mean_abs") else ""
    print(f"{row['family']:20} {row['outcome']:8} {value}{row.get('reason', '')[:400]}", flush=True)


def table(rows: list[dict[str, Any]]) -> None:
    """Print how many families ended in each way."""
    width = shutil.get_terminal_size().columns
    outcomes = [row["outcome"] for row in rows]
    counts = {outcome: outcomes.count(outcome) for outcome in dict.fromkeys(outcomes)}
    print(", ".join(f"{count} {outcome}" for outcome, count in counts.items())[:width])
