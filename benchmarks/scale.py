"""`python -m benchmarks.scale`: what larger runs hold and send, and the seconds of their steps.

Arithmetic alone, by the plan and by `benchmarks.step_time`: no GPU ran any of it. Completions have
the longest length that a configuration allows. A run that samples on servers has no figure for
sampling, which is on other machines.
"""

import argparse
import json
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.step_time import GPUS, Estimate, Lengths
from qarl.cli.options import json_file, write_json
from qarl.configs.load import config_file, load_config
from qarl.planning.machine import parse_machine
from qarl.planning.memory import GIB
from qarl.planning.plan import make_plan
from qarl.planning.shapes import sizes_of
from qarl.report.record import record

PROGRAM = "python -m benchmarks.scale"
DEEPSPEED = {
    "zero_optimization": {
        "stage": 2,
        "overlap_comm": True,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
    }
}
_SERVED = {
    "model": "Qwen/Qwen3-235B-A22B",
    "rollout.servers": "http://sampler:8100",
    "rollout.max_new_tokens": "3072",
    "rollout.max_prompt_tokens": "1024",
    "learner.micro_batch_tokens": "4096",
    "learner.master_dtype": "bfloat16",
    "learner.keep_codes": "false",
    "learner.keep_kernel_layout": "false",
}
_ROUNDED = {"learner.reduce_dtype": "bfloat16"}


@dataclass(frozen=True)
class Case:
    """One run on paper."""

    name: str
    gpus: str
    """Machines, as `--gpus` takes them."""
    rates: str
    """GPU whose rates predict the seconds."""
    config: str = "recipes/qwen3-30b-a3b-8x80gb"
    fields: dict[str, str] = field(default_factory=dict)
    """Settings of the configuration, by dotted path."""
    deepspeed: bool = False
    """Whether DeepSpeed steps the masters, by `DEEPSPEED`."""


CASES = (
    Case("8B, LoRA, base on the host", "1x24GB", "l40s", "recipes/qwen3-8b-24gb"),
    Case("8B", "8x80GB", "h100", "recipes/qwen3-8b-8x80gb"),
    Case(
        "8B, AdamW by DeepSpeed's ZeRO 2 on the host",
        "8x80GB",
        "h100",
        "recipes/qwen3-8b-8x80gb",
        {"learner.optimizer.name": "adamw"},
        deepspeed=True,
    ),
    Case("30B-A3B", "8x80GB", "h100"),
    Case("30B-A3B, gradients in bfloat16", "8x80GB", "h100", fields=_ROUNDED),
    Case("235B-A22B, servers elsewhere", "4x8x80GB", "h100", fields=_SERVED),
    Case("the same, gradients in bfloat16", "4x8x80GB", "h100", fields={**_SERVED, **_ROUNDED}),
    Case(
        "235B-A22B, LoRA of rank 8, servers on a fourth machine",
        "3x8x80GB",
        "h100",
        fields={
            **_SERVED,
            "rollout.prompts": "240",
            "learner.lora.name": "lora",
            "learner.lora.rank": "8",
            "learner.optimizer.name": "adamw",
            "learner.optimizer.offload": "none",
        },
    ),
)


def measure(case: Case) -> dict[str, Any]:
    """Return what a case holds and sends, in bytes, and its seconds."""
    fields = dict(case.fields)
    with tempfile.TemporaryDirectory() as folder:
        if case.deepspeed:
            file = Path(folder) / "deepspeed.json"
            file.write_text(json.dumps(DEEPSPEED))
            fields["learner.deepspeed"] = str(file)
        config = load_config(config_file(case.config), fields)
        machine = parse_machine(case.gpus)
        plan = make_plan(config, *sizes_of(config.model), machine, machine.devices)
        rollout = config.rollout
        lengths = Lengths(rollout.max_prompt_tokens, rollout.max_new_tokens)
        estimate = Estimate(plan, lengths, GPUS[case.rates])
        updates = config.learner.mini_batches
        seconds = {
            "products": estimate.products(),
            "sending": estimate.sending(),
            "learner": estimate.learner(),
            "optimizer": estimate.optimizer(),
            "publish": estimate.publish(),
        }
        if config.engine_here:
            seconds["sampling"] = estimate.sampling()
    return {
        "case": case.name,
        "machine": machine.name,
        "rates": case.rates,
        "parts": {part.name: part.bytes for part in plan.memory.parts},
        "total": plan.memory.total,
        "capacity": plan.capacity,
        "host": plan.host,
        "traffic": {**asdict(plan.traffic), "micro_batch": plan.traffic.micro_batch},
        "micro_batches": estimate.micro_batches,
        "step": plan.traffic.step(estimate.micro_batches, updates),
        "seconds": seconds,
    }


def table(rows: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """Return the cells of the table of what is held and sent, in GiB, its head first."""
    head = (
        "run",
        "on",
        "masters",
        "gradients",
        "moments",
        "codes, kernels",
        "all",
        "of",
        "host",
        "sent a micro-batch",
        "an update",
        "a step",
    )
    return [head, *(_held(row) for row in rows)]


def _held(row: dict[str, Any]) -> tuple[str, ...]:
    parts = row["parts"]
    traffic = row["traffic"]
    amounts = (
        parts.get("masters", 0),
        parts.get("gradients", 0),
        parts.get("moments", 0),
        parts.get("codes", 0) + parts.get("kernel layout", 0),
        row["total"],
        row["capacity"],
        row["host"],
        traffic["micro_batch"],
        traffic["update"] + traffic["version"],
        row["step"],
    )
    return (row["case"], row["machine"], *(f"{amount / GIB:,.1f}" for amount in amounts))


def main() -> None:
    """Print what each case holds and sends, and write all figures as JSON if `--json` is set."""
    parser = argparse.ArgumentParser(prog=PROGRAM, description=__doc__)
    parser.add_argument("--json", type=json_file, metavar="FILE")
    arguments = parser.parse_args()
    rows = [measure(case) for case in CASES]
    for cells in table(rows):
        print(" | ".join(cells))
    for row in rows:
        seconds = ", ".join(f"{name} {value:,.0f}" for name, value in row["seconds"].items())
        print(f"{row['case']}: {row['micro_batches']} micro-batches; seconds: {seconds}")
    if arguments.json:
        write_json(arguments.json, record(sys.argv[1:], rows, PROGRAM))


if __name__ == "__main__":
    main()
