"""`qarl sample`: what a policy answers, for eyes."""

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
        help="what a run, an export or any checkpoint answers to a question",
        description=(
            "Answers to one question, behind the run's system prompt and in its chat template and"
            " limits."
        ),
    )
    sample.add_argument(
        "target",
        metavar="TARGET",
        help="run folder (its export), checkpoint, hub id, or embedded name",
    )
    sample.add_argument("question", metavar="QUESTION", help="text of the user's turn")
    sample.add_argument(
        "--beside",
        metavar="OTHER",
        help="another target, asked the same: where the run started",
    )
    sample.add_argument(
        "--samples",
        dest="short:eval.samples",
        default="1",
        metavar="N",
        help="answers (default 1)",
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
