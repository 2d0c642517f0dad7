"""A plan as a person reads it: in a line at a run's start, as a table of 80 columns, as a command
that works.
"""

import shlex
import textwrap
from collections.abc import Mapping
from typing import Any

from qarl.configs.yaml_file import as_texts
from qarl.planning.choice import fitting, helping, option
from qarl.planning.memory import GIB, counted
from qarl.planning.plan import SPARE, Plan

_WIDTH = 80
_SHOWN = 0.05 * GIB
"""Parts below it are left out of the line."""


def one_line(plan: Plan) -> str:
    """The sum against what is there, and the larger parts."""
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
    if not plan.fits:
        line += f"; {verdict(plan)}: it may run out"
    elif plan.memory.total > plan.capacity - plan.machine.taken:
        line += (
            f"; other processes have {plan.machine.taken / GIB:.1f} GiB there now: it may run out"
        )
    return line


def table(plan: Plan) -> list[str]:
    """Every part, the sum against what is there, and whether it fits."""
    config, s = plan.config, plan.shapes
    processes = f"{plan.processes} processes" if plan.processes > 1 else "one process"
    stage = f", ZeRO {config.learner.zero_stage or 0}" if plan.processes > 1 else ""
    lines = [
        *_wrapped(f"{config.model}: {counted(s.parameters)} parameters ({plan.source})"),
        *_wrapped(f"{config.scheme} in {config.dtype} on {plan.machine.name}, {processes}{stage}"),
        "",
        f"{'part':<15}{'GiB':>7}  of what",
        *(f"{part.name:<15}{part.bytes / GIB:>7.1f}  {part.note}" for part in plan.memory.parts),
        (
            f"{'sum':<15}{plan.memory.total / GIB:>7.1f}  of {plan.capacity / GIB:.1f}:"
            f" {verdict(plan)}"
        ),
    ]
    if plan.memory.host:
        there = f" of {plan.machine.host / GIB:.1f}" if plan.machine.host is not None else ""
        what = "loading, or moments and a checkpoint, all processes"
        lines.append(f"{'host':<15}{plan.host / GIB:>7.1f}{there}  {what}")
    if plan.decided:
        lines += ["", *_wrapped(f"decided by the plan: {', '.join(plan.decided)}")]
    return lines


def verdict(plan: Plan) -> str:
    """Whether it fits, in words."""
    if plan.share > 1:
        return f"{(plan.memory.total - plan.capacity) / GIB:.1f} GiB too much"
    if plan.lacks_host:
        there = (plan.machine.host or 0) / GIB
        return (
            f"fits, but loading and checkpoints take {plan.host / GIB:.1f} of the host's"
            f" {there:.1f} GiB"
        )
    return f"{'fits' if plan.share <= 1 - SPARE else 'tight'}, {1 - plan.share:.0%} to spare"


def remedies(plan: Plan, overrides: Mapping[str, str], file: str | None) -> list[str]:
    """Of a plan that does not fit: what would help and how much, and the command that works.
    overrides, file: of the command that was planned.
    """
    lines = ["", "what would help, GiB less a process:"]
    lines += [f"{saved / GIB:>7.1f}  {options}" for options, saved in helping(plan).items()]
    proposed = fitting(plan)
    if not any(works.machine == plan.machine for works, _ in proposed):
        lines += ["", f"no combination of these fits {plan.machine.name}"]
    for works, fields in proposed:
        lines += [
            "",
            (
                f"fits {works.machine.name}, {works.memory.total / GIB:.1f} of"
                f" {works.capacity / GIB:.1f} GiB:"
            ),
        ]
        options = {**overrides, **as_texts(fields)}
        lines += _command(works.processes, options, file)
    return lines


def as_data(plan: Plan) -> dict[str, Any]:
    """JSON-ready; bytes."""
    return {
        "model": plan.config.model,
        "scheme": plan.config.scheme,
        "machine": plan.machine.name,
        "processes": plan.processes,
        "parts": {part.name: part.bytes for part in plan.memory.parts},
        "total": plan.memory.total,
        "capacity": plan.capacity,
        "host": plan.host,
        "fits": plan.fits,
        "gradient_checkpointing": plan.config.learner.gradient_checkpointing,
        "kv_cache_gib": plan.config.rollout.kv_cache_gib,
    }


def _command(processes: int, overrides: Mapping[str, str], file: str | None) -> list[str]:
    """`qarl train` with its options, on lines of the table's width that a shell takes together."""
    words = ["qarl train", *([f"--config {shlex.quote(file)}"] if file else [])]
    words += [option((path, shlex.quote(text))) for path, text in overrides.items()]
    words += [f"--processes {processes}"] if processes > 1 else []
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
