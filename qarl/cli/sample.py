"""`qarl sample` and `qarl chat`: what a policy answers, for eyes."""

import argparse
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from rich.console import Console

from qarl.cli.environment import quiet_libraries
from qarl.cli.eval import add_sampling
from qarl.cli.options import say
from qarl.report.startup import phase, phases_shown_on
from qarl.run.evaluation_plan import Plan, plan_evaluation, plan_same
from qarl.tasks.base import Message


def add_sample(commands: Any) -> None:
    """Add `qarl sample` and `qarl chat` to the commands."""
    sample = commands.add_parser(
        "sample",
        help="what a run, an export or any checkpoint answers to a question",
        description="Answers to one question, behind the run's system prompt and in its chat template and limits.",
    )
    sample.add_argument(
        "target", metavar="TARGET", help="run folder (its export), checkpoint, hub id, or embedded name"
    )
    sample.add_argument("question", metavar="QUESTION", help="text of the user's turn")
    sample.add_argument("--beside", metavar="OTHER", help="another target, asked the same: where the run started")
    sample.add_argument("--samples", dest="short:eval.samples", default="1", metavar="N", help="answers (default 1)")
    add_sampling(sample)
    sample.set_defaults(run=_sample)
    chat = commands.add_parser(
        "chat",
        help="talk with a run, an export or any checkpoint",
        description="A conversation by lines, until an empty one or Ctrl-D, behind the run's system prompt.",
    )
    chat.add_argument("target", metavar="TARGET", help="as of `qarl sample`")
    add_sampling(chat)
    chat.set_defaults(run=_chat, **{"short:eval.samples": "1"})


def _sample(known: argparse.Namespace, console: Console) -> int:
    turns: list[Message] = [{"role": "user", "content": known.question}]
    plan = _plan(known)
    plans = [plan] if known.beside is None else [plan, plan_same(plan, known.beside)]
    for plan in plans:
        with _opened(plan) as answer:
            completions = answer(turns, known.seed)
        for completion in completions:
            count = f"{len(completion.token_ids)} tokens, {completion.finish_reason}"
            say(console, f"— {plan.target} ({count})")
            say(console, completion.text)
    return 0


def _chat(known: argparse.Namespace, console: Console) -> int:
    turns: list[Message] = []
    with _opened(_plan(known)) as answer:
        while question := _line(console):
            turns.append({"role": "user", "content": question})
            (completion,) = answer(turns, known.seed + len(turns))
            turns.append({"role": "assistant", "content": completion.text})
            say(console, completion.text)
    return 0


def _line(console: Console) -> str:
    """The next one of the person's; "" at the end."""
    if sys.stdin.isatty():
        console.print("> ", end="")
    return sys.stdin.readline().strip()


def _plan(known: argparse.Namespace) -> Plan:
    quiet_libraries()
    return plan_evaluation(known.target, known.overrides, known.max_new_tokens)


@contextmanager
def _opened(plan: Plan) -> Iterator[Any]:
    with phases_shown_on(Console(stderr=True)), ExitStack() as stack:
        with phase(f"starting the engine on {plan.target}"):
            from qarl.run.ask import open_policy_to_ask

            answer = stack.enter_context(open_policy_to_ask(plan))
        yield answer
