"""Proof at the end of a run: a server of its export asks what the evaluation asked."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from qarl.configs.schema.rollout import LONGEST
from qarl.configs.schema.run import RunConfig
from qarl.quant.checkpoint.folder import end_tokens, read_config
from qarl.quant.checkpoint.settings import positions
from qarl.rollout.servers.vllm.chat import (
    EngineRequest,
    request_fields,
    sampled_requests,
    served_requests,
)
from qarl.rollout.types import RequestDefaults, Sampling
from qarl.run.evaluate import problems_once
from qarl.run.export_note import add_to_note
from qarl.run.prompts import Prompter
from qarl.run.request_defaults import all_problems, request_defaults, system_of
from qarl.tasks import Problem, Task

LIMIT = 256
"""Upper bound on the number of questions that are compared."""


@dataclass(frozen=True)
class Served:
    """Comparison of a served export with its evaluation."""

    questions: int
    """Number of held-out questions compared."""
    equal: int
    """Number of questions that a server asks as the evaluation did."""
    difference: str | None
    """First difference in words; None if there is none."""

    def __str__(self) -> str:
        """Return one line for the end of a run."""
        line = f"served as evaluated: {self.equal} of {self.questions} questions"
        if self.difference is None:
            return f"{line}, by prompt tokens and sampling parameters of vLLM's server"
        return f"{line}; first difference, evaluated and served: {self.difference}"


class Asked(Protocol):
    """A policy that was asked a task's questions: a `TrainingPolicy`, or the source of a quantized
    one.
    """

    @property
    def folder(self) -> Path:
        """Folder whose generation config the evaluating engine reads."""
        ...

    @property
    def task(self) -> Task:
        """Task whose questions it was asked."""
        ...

    @property
    def prompter(self) -> Prompter:
        """Maker of its prompts."""
        ...


def policy_defaults(policy: Asked, config: RunConfig) -> RequestDefaults:
    """Return how a run asks its policy in training and evaluation."""
    return request_defaults(config, policy.prompter.tokenizer, all_problems(policy.task))


def note_served(export: Path, policy: Asked, config: RunConfig) -> Served | None:
    """Compare the served export with its evaluation, and write the result into qarl.json.

    The problems are held-out ones. None, and nothing is written, if the task talks with the policy
    over several turns, which one request cannot repeat, if prompts have pictures, which these
    requests do not carry, or if there are no held-out problems.
    """
    if config.task.speaks or config.rollout.pictures:
        return None
    problems = problems_once(policy.task, min(config.eval.problems or LIMIT, LIMIT), seed=0)
    if not problems:
        return None
    defaults = policy_defaults(policy, config)
    return note_requests(export, policy.folder, policy.prompter, problems, config, defaults)


def note_requests(
    export: Path,
    folder: Path,
    prompter: Prompter,
    problems: Sequence[Problem],
    config: RunConfig,
    defaults: RequestDefaults,
) -> Served:
    """Compare the requests of a served export with those of its evaluation, and write the result
    into qarl.json.

    The served ones are what vLLM's server makes of plain requests: the question, and
    `request_fields`. Equal requests have equal greedy answers.

    Args:
        export: Folder of the export.
        folder: Folder whose generation config the evaluating engine reads.
        prompter: Maker of the evaluation's prompts.
        problems: What is asked.
        config: Dtype, sampling and lengths of the evaluation.
        defaults: How the export says that it is asked.
    """
    prompts = [prompter.prompt(problem) for problem in problems]
    tokenizer = prompter.tokenizer
    sampling = Sampling.of(config.rollout, 0, evaluation=config.eval).with_stop_tokens(tokenizer)
    own = {tokenizer.eos_token_id} - {None}  # of either engine, whatever its files say
    evaluated = sampled_requests(prompts, sampling, end_tokens(folder) | own)
    bodies = [_body(problem, defaults) for problem in problems]
    # vLLM's server refuses to start with more than the model has; an engine of one's own may not.
    longest = min(config.rollout.longest, int(positions(read_config(export)) or LONGEST))
    served = served_requests(export, config.dtype, longest, bodies, end_tokens(export) | own)
    result = _compared(evaluated, served)
    add_to_note(export, served=asdict(result))
    return result


def _body(problem: Problem, defaults: RequestDefaults) -> dict[str, Any]:
    """Return the request of a client that knows the question, but not what was put before it."""
    fields = request_fields(defaults)
    if not defaults.chat:
        return {"prompt": problem.question, **fields}
    messages = problem.chat
    if defaults.system is not None and system_of(problem) == defaults.system:
        messages = messages[1:]
    return {"messages": messages, **fields}


def _compared(evaluated: Sequence[EngineRequest], served: Sequence[EngineRequest | str]) -> Served:
    compared = (
        other if isinstance(other, str) else one.difference(other)
        for one, other in zip(evaluated, served, strict=True)
    )
    differences = [difference for difference in compared if difference is not None]
    first = differences[0] if differences else None
    return Served(len(evaluated), len(evaluated) - len(differences), first)
