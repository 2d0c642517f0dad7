"""`qarl bench speed`: its options, those of measuring and those of predicting."""

import argparse
from typing import Any

from rich.console import Console

from qarl.cli.options import DTYPES, KERNELS, numbers, scheme_names, whole
from qarl.configs.errors import ConfigError
from qarl.report.plots import plot_stem
from qarl.report.tables import PlainTable

_MEASURED = {
    "model": "150m", "batches": (1, 4, 16, 64), "contexts": None, "decode_tokens": 16, "steps": 2, "rounds": 3,
    "kernel": "auto", "seed": 0, "clock": "wall",
}  # fmt: skip
"""Options of measuring alone, by name, with their defaults; contexts depend on the machine."""

_PLANNED = {"gpus": None, "rates": None}
"""Options of predicting alone."""

_STEP = {"prompts": 2, "samples": 4, "prompt_tokens": 64, "tokens": 128, "updates": 2, "optimizer": "adamw"}
_PLANNED_STEP = {
    "prompts": 128, "samples": 8, "prompt_tokens": 512, "tokens": 4096, "updates": 4, "optimizer": "muon",
}  # fmt: skip
"""The training step's, measured and predicted: the second has a quarter of the paper's prompts (configs/paper)."""


def add_options(speed: argparse.ArgumentParser) -> None:
    """All of them. Defaults are filled in by `measure`, which refuses what would be ignored."""
    step = {name: f"default {_STEP[name]}, with --plan {_PLANNED_STEP[name]}" for name in _STEP}
    speed.add_argument(
        "--schemes", type=scheme_names, default=(), help="comma-separated (default: all that run on this machine); "
        "bf16 comes first",
    )  # fmt: skip
    speed.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="compute dtype (default bfloat16)")
    speed.add_argument("--prompts", type=whole(1), help=f"of a training step ({step['prompts']})")
    speed.add_argument("--samples", type=whole(2), help=f"completions a prompt ({step['samples']})")
    speed.add_argument("--prompt-tokens", type=whole(1), help=f"of each prompt ({step['prompt_tokens']})")
    speed.add_argument("--tokens", type=whole(1), help=f"of each completion ({step['tokens']})")
    speed.add_argument("--updates", type=whole(1), help=f"optimizer steps a batch ({step['updates']})")
    speed.add_argument("--optimizer", choices=("adamw", "muon"), help=step["optimizer"])
    speed.add_argument("--plot", metavar="NAME", help="draw the figures too, as NAME.svg and NAME.png")
    measured = speed.add_argument_group("measuring on this machine")
    measured.add_argument(
        "--model", help="150m (default) or tiny, with random weights; an embedded name, a folder or a hub id"
    )
    measured.add_argument(
        "--batches", type=numbers("1,16", 1), help="sequences at once, comma-separated (default 1,4,16,64)"
    )
    measured.add_argument(
        "--contexts", type=numbers("64,256", 1), help="tokens before what is timed, comma-separated "
        "(default 64,256; on GPUs 512,4096)",
    )  # fmt: skip
    measured.add_argument("--decode-tokens", type=whole(4), help="decoded a sequence and cell (default 16)")
    measured.add_argument("--steps", type=whole(1), help="timed training steps a process and learner (default 2)")
    measured.add_argument("--rounds", type=whole(1), help="of all processes; medians are shown (default 3)")
    measured.add_argument("--kernel", choices=KERNELS, help="the learner's kernel family (default auto)")
    measured.add_argument("--seed", type=whole(0), help="of weights and prompts (default 0)")
    measured.add_argument(
        "--clock", choices=("wall", "cpu"), help="seconds of the wall's (default), or on CPUs of the process's "
        "threads, which other processes disturb less",
    )  # fmt: skip
    planned = speed.add_argument_group("predicting a step on GPUs, from shapes and rates: nothing is run there")
    planned.add_argument(
        "--plan", metavar="MODEL", help="predict for this model: a published size (qwen3-8b, qwen3-30b-a3b, …), an "
        "embedded name, a folder or a hub id, of which config.json alone is read",
    )  # fmt: skip
    planned.add_argument("--gpus", help="count and kind: 8xH100; kinds are A100, L40S, H100, H200, B200")
    planned.add_argument(
        "--rates", metavar="FILE", help="rates from a record of this benchmark on one such GPU (default: stated "
        "shares of data sheets' peaks, which are printed)",
    )  # fmt: skip


def measure(known: argparse.Namespace, console: Console) -> tuple[list[PlainTable], Any]:
    """Measure, or predict with --plan. Raises `ConfigError` for options the other of the two would take."""
    stem = plot_stem("--plot", known.plot) if known.plot else None
    _refuse_other(known, _MEASURED if known.plan else _PLANNED)
    defaults = {**(_PLANNED if known.plan else _MEASURED), **(_PLANNED_STEP if known.plan else _STEP)}
    options: dict[str, Any] = {
        name: default if getattr(known, name) is None else getattr(known, name) for name, default in defaults.items()
    }
    if known.plan:
        return _plan(known.plan, known.schemes, known.dtype, options, stem)
    import torch

    from qarl.bench.speed import measure as speed
    from qarl.bench.speed.plot import draw_figures
    from qarl.bench.speed.table import tables

    options["contexts"] = options["contexts"] or ((512, 4096) if torch.cuda.is_available() else (64, 256))
    figures = speed.measure(
        speed.Options(schemes=known.schemes, dtype=known.dtype, **options),
        lambda line: console.print(line, highlight=False),
    )
    if stem:
        draw_figures(figures, stem)
    return tables(figures), speed.as_data(figures)


def _plan(
    model: str, schemes: tuple[str, ...], dtype: str, options: dict[str, Any], stem: Any
) -> tuple[list[PlainTable], Any]:
    from qarl.bench.speed import plan as planning
    from qarl.bench.speed.plot import draw_plan
    from qarl.bench.speed.table import plan_tables

    if options["gpus"] is None:
        raise ConfigError(f"--plan {model} needs --gpus, a count and a kind, such as 8xH100")
    plan = planning.plan(planning.PlanOptions(model=model, schemes=schemes, dtype=dtype, **options))
    if stem:
        draw_plan(plan, stem)
    return plan_tables(plan), planning.as_data(plan)


def _refuse_other(known: argparse.Namespace, others: dict[str, Any]) -> None:
    """Raise `ConfigError` for an option that the command, as it was given, would ignore."""
    for name in others:
        if getattr(known, name) is not None:
            option, value = f"--{name.replace('_', '-')}", getattr(known, name)
            value = ",".join(map(str, value)) if isinstance(value, tuple) else value
            why = f"goes with measuring, not with --plan {known.plan}" if known.plan else "goes with --plan MODEL"
            raise ConfigError(f"{option} {value} {why}; leave it out")
