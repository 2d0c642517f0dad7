"""Options of `python -m benchmarks step-time`."""

import argparse
from typing import Any

from rich.console import Console

from benchmarks.names import STEP_TIME_GPUS
from qarl.cli.options import scheme_names, whole
from qarl.report.tables import PlainTable


def add_options(names: Any) -> argparse.ArgumentParser:
    """Add the benchmark's parser to `names` and return it."""
    parser = names.add_parser(
        "step-time",
        help="seconds of a step on GPUs, predicted: bf16, plain and QaRL",
        description=(
            "Predict the seconds of a training step on GPUs, by data sheets' rates. Every field of"
            " the configuration is an option by its dotted name, as in qarl train."
        ),
    )
    parser.add_argument(
        "--config", required=True, metavar="FILE", help="YAML file, or a shipped name"
    )
    parser.add_argument(
        "--count", type=whole(1), default=8, help="GPUs of a machine, a process each (default 8)"
    )
    parser.add_argument("--machines", type=whole(1), default=1, help="machines (default 1)")
    parser.add_argument(
        "--gpu",
        choices=STEP_TIME_GPUS,
        default="h100",
        help="their kind (default h100)",
    )
    parser.add_argument(
        "--schemes",
        type=scheme_names,
        default="w4a16,w8a8,fp8",
        help="comma-separated (default w4a16,w8a8,fp8)",
    )
    parser.add_argument(
        "--prompt-tokens",
        type=whole(1),
        default=256,
        help="of a prompt, on average (default 256)",
    )
    parser.add_argument(
        "--answer-tokens",
        type=whole(1),
        help="of a completion, on average (default: as many as it may have)",
    )
    parser.add_argument(
        "--at-once",
        type=whole(1),
        help=(
            "sequences sampled together on a GPU, whatever room their cache has (default: "
            "as many as the plan leaves room for)"
        ),
    )
    return parser


def measure(
    known: argparse.Namespace, _console: Console, fields: dict[str, str]
) -> tuple[PlainTable, Any]:
    """Run the benchmark and return its table and JSON-ready data.

    fields: settings of the configuration, by dotted path.
    """
    from benchmarks import step_time
    from qarl.configs.load import config_file, load_config
    from qarl.planning.machine import parse_machine
    from qarl.planning.plan import make_plan
    from qarl.planning.shapes import sizes_of

    config = load_config(config_file(known.config), fields)
    machine = parse_machine(f"{known.machines}x{known.count}x{known.gpu}")
    plan = make_plan(config, *sizes_of(config.model), machine, machine.devices)
    answer = known.answer_tokens or config.rollout.max_new_tokens
    lengths = step_time.Lengths(known.prompt_tokens, answer, known.at_once)
    rows = step_time.measure(plan, known.schemes, lengths, known.gpu)
    title = (
        f"{config.model} on {machine.name}, {config.rollout.prompts} prompts ×"
        f" {config.rollout.samples}, answers of {lengths.answer} tokens: predicted, not measured"
    )
    return step_time.table(rows, title), step_time.as_data(rows)
