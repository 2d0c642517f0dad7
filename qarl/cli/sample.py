"""`qarl sample`: print a policy's answers to a question."""

import argparse
from typing import Any

from rich.console import Console

from qarl.cli.environment import quiet_libraries
from qarl.cli.eval import add_sampling
from qarl.cli.options import say
from qarl.report.startup import phase, phases_shown_on
from qarl.run.evaluation_plan import plan_evaluation, plan_same


def add_sample(commands: Any) -> None:
    """Add `qarl sample` to the commands."""
    sample = commands.add_parser(
        "sample",
        help="Print the answers of a run, an export or any checkpoint to a question.",
        description=(
            "Print answers to one question, with the run's system prompt, chat template and limits."
        ),
    )
    sample.add_argument(
        "target",
        metavar="TARGET",
        help="Run folder (its export), checkpoint, hub id, or embedded name.",
    )
    sample.add_argument("question", metavar="QUESTION", help="Text of the user's turn.")
    sample.add_argument(
        "--beside",
        metavar="OTHER",
        help=(
            "Another target to ask the same question, such as the model that the run started with."
        ),
    )
    sample.add_argument(
        "--samples",
        dest="short:eval.samples",
        default="1",
        metavar="N",
        help="Number of answers. Default: 1.",
    )
    add_sampling(sample)
    sample.set_defaults(run=_sample)


def _sample(known: argparse.Namespace, console: Console) -> int:
    quiet_libraries()
    plan = plan_evaluation(known.target, known.overrides, known.max_new_tokens)
    for each in [plan] if known.beside is None else [plan, plan_same(plan, known.beside)]:
        with phases_shown_on(Console(stderr=True)), phase(f"asking {each.target}"):
            from qarl.run.evaluate import answers

            completions = answers(each, known.question, known.seed)
        for completion in completions:
            count = f"{len(completion.token_ids)} tokens, {completion.finish_reason}"
            say(console, f"— {each.target} ({count})")
            say(console, completion.text)
    return 0
