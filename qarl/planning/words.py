"""A plan in words: one line at a run's start, a table of 80 columns, and commands that fit."""

import shlex
import textwrap
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from qarl.configs.yaml_file import as_texts
from qarl.planning.choice import fitting, helping, option
from qarl.planning.memory import GIB, counted
from qarl.planning.plan import SPARE, MemoryPlan

_WIDTH = 80
_SHOWN = 0.05 * GIB
"""Smallest part, in bytes, that the line lists."""


def one_line(plan: MemoryPlan) -> str:
    """Return the total, the available memory and the larger parts in one line."""
    parts = [
        f"{part.name} {part.bytes / GIB:.1f}" for part in plan.memory.parts if part.bytes >= _SHOWN
    ]
    a_process = " a process" if plan.processes > 1 else ""
    line = (
        f"{plan.memory.total / GIB:.1f} of {plan.capacity / GIB:.1f} GiB{a_process} on"
        f" {plan.machine.name}"
    )
    line += f" ({', '.join(parts)})"
    if plan.decided:
        line += f"; decided by the plan: {', '.join(plan.decided)}"
    if plan.unmatched_targets:
        line += f"; {_assumed(plan)}"
    if not plan.fits:
        line += f"; {verdict(plan)}: it may run out"
    elif plan.memory.total > plan.capacity - plan.machine.used:
        line += (
            f"; other processes have {plan.machine.used / GIB:.1f} GiB there now: it may run out"
        )
    return line


def table(plan: MemoryPlan) -> list[str]:
    """Return a table of all parts, with the total, the available memory and the verdict."""
    config = plan.config
    parameters = counted(plan.shapes.parameters)
    processes = f"{plan.processes} processes" if plan.processes > 1 else "one process"
    lines = [
        *_wrapped(f"{config.model}: {parameters} parameters ({plan.source})"),
        *_wrapped(f"{config.scheme} in {config.dtype} on {plan.machine.name}, {processes}"),
        "",
        f"{'part':<15}{'GiB':>7}  of what",
        *(f"{part.name:<15}{part.bytes / GIB:>7.1f}  {part.note}" for part in plan.memory.parts),
        (
            f"{'sum':<15}{plan.memory.total / GIB:>7.1f}  of {plan.capacity / GIB:.1f}:"
            f" {verdict(plan)}"
        ),
    ]
    if plan.memory.host:
        available = f" of {plan.machine.host / GIB:.1f}" if plan.machine.host is not None else ""
        whose = "a machine's" if plan.machine.machines > 1 else "all"
        note = f"loading, or moments and a checkpoint, {whose} processes"
        lines.append(f"{'host':<15}{plan.host / GIB:>7.1f}{available}  {note}")
    if plan.processes > 1:
        lines += _sent(plan)
    if plan.decided:
        lines += ["", *_wrapped(f"decided by the plan: {', '.join(plan.decided)}")]
    if plan.unmatched_targets:
        lines += ["", *_wrapped(_assumed(plan))]
    return lines


def _assumed(plan: MemoryPlan) -> str:
    """Return the sentence about LoRA targets whose matrices the plan does not know."""
    targets = ", ".join(map(repr, plan.unmatched_targets))
    return (
        f"adapters are counted for all matrices, because the plan knows no layer that matches"
        f" learner.lora.targets {targets}"
    )


def _sent(plan: MemoryPlan) -> list[str]:
    """Return the lines that say what a process sends to the others."""
    traffic = plan.traffic
    kinds = (("gradients", traffic.gradients), ("codes", traffic.gathers))
    in_micro_batch = " and ".join(name for name, sent in kinds if sent)
    in_update = "with a weight version" if traffic.version else "without codes"
    lines = []
    if traffic.micro_batch:
        sent = traffic.micro_batch / GIB
        lines.append(f"{'sent':<15}{sent:>7.1f}  in a micro-batch, {in_micro_batch}")
    sent = (traffic.update + traffic.version) / GIB
    lines.append(f"{'sent':<15}{sent:>7.1f}  in an update, {in_update}")
    return lines


def verdict(plan: MemoryPlan) -> str:
    """Return whether the plan fits, in words."""
    if plan.fraction > 1:
        return f"{(plan.memory.total - plan.capacity) / GIB:.1f} GiB too much"
    if plan.lacks_host:
        available = (plan.machine.host or 0) / GIB
        return (
            f"fits, but loading and checkpoints take {plan.host / GIB:.1f} of the host's"
            f" {available:.1f} GiB"
        )
    return f"{'fits' if plan.fraction <= 1 - SPARE else 'tight'}, {1 - plan.fraction:.0%} to spare"


def remedies(
    plan: MemoryPlan,
    overrides: Mapping[str, str],
    file: str | None,
) -> list[str]:
    """Return the lines that follow the table of a plan that does not fit.

    They list what each single change would save, and commands whose runs fit.

    overrides, file: options and configuration file of the planned command.
    """
    lines = ["", "what would help, GiB less a process:"]
    lines += [f"{saved / GIB:>7.1f}  {options}" for options, saved in helping(plan).items()]
    proposed = fitting(plan)
    if not any(smaller.machine == plan.machine for smaller, _ in proposed):
        lines += ["", f"no combination of these fits {plan.machine.name}"]
    for smaller, fields in proposed:
        total = f"{smaller.memory.total / GIB:.1f} of {smaller.capacity / GIB:.1f} GiB"
        lines += ["", f"fits {smaller.machine.name}, {total}:"]
        options = {**overrides, **as_texts(fields)}
        lines += _command(smaller, options, file)
    return lines


def as_data(plan: MemoryPlan) -> dict[str, Any]:
    """Return the plan as a dictionary for JSON; memory is in bytes."""
    return {
        "model": plan.config.model,
        "scheme": plan.config.scheme,
        "machine": plan.machine.name,
        "processes": plan.processes,
        "parts": {part.name: part.bytes for part in plan.memory.parts},
        "total": plan.memory.total,
        "capacity": plan.capacity,
        "host": plan.host,
        "sent": asdict(plan.traffic),
        "fits": plan.fits,
        "gradient_checkpointing": plan.config.learner.gradient_checkpointing,
        "kv_cache_gib": plan.config.rollout.kv_cache_gib,
    }


def _command(
    plan: MemoryPlan,
    overrides: Mapping[str, str],
    file: str | None,
) -> list[str]:
    """Return `qarl train` with its options, in lines of `_WIDTH` that a shell reads as one.

    On several machines torchrun starts it; NODE and NODE0 are for the user to replace.
    """
    machines = plan.machine.machines
    words = ["qarl train"]
    if machines > 1:
        words = [
            f"torchrun --nnodes {machines}",
            "--node-rank NODE",
            "--master-addr NODE0",
            f"--nproc-per-node {plan.local}",
            "-m qarl train",
        ]
    words += [f"--config {shlex.quote(file)}"] if file else []
    words += [option((path, shlex.quote(text))) for path, text in overrides.items()]
    words += [f"--processes {plan.processes}"] if plan.processes > 1 and machines == 1 else []
    lines = [f"  {words[0]}"]
    for word in words[1:]:
        if len(lines[-1]) + 1 + len(word) + 2 > _WIDTH:
            lines[-1] += " \\"
            lines.append(f"    {word}")
        else:
            lines[-1] += f" {word}"
    return lines


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, break_long_words=False, break_on_hyphens=False)
