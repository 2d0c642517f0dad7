"""`qarl bench speed`: every scheme's engine and training step against bf16's, on one model.

Each scheme runs in a separate process, one after the other, and rounds interleave them. Ratios are
between processes of one round.
"""

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter

from qarl.bench.figures import SpeedReport, engine_rows, memory_rows, step_rows
from qarl.bench.job import Answer, Job, SpeedOptions
from qarl.bench.process import run_worker
from qarl.configs.errors import ConfigError, GraphError, SchemeError
from qarl.configs.load import is_embedded
from qarl.configs.schemes import UNQUANTIZED, known_scheme
from qarl.planning.shapes import Shapes, shapes_of
from qarl.quant.checkpoint.check_folder import check_folder
from qarl.quant.checkpoint.folder import local_folder, read_config
from qarl.quant.checkpoint.load import model_skeleton
from qarl.quant.checkpoint.settings import positions
from qarl.quant.checkpoint.shapes import expert_modules, plan_layers
from qarl.quant.kernels.supported import kept_support, require_support
from qarl.quant.model.agreement import agreement
from qarl.quant.schemes import COMPUTE_DTYPES, SCHEMES, get_scheme
from qarl.run.policy import model_folder

_CACHE_BLOCK = 128
"""Tokens of a block in which vLLM gives a sequence its key/value cache, on CPUs."""
_CONTEXTS = (64, 256)
"""Default contexts on CPUs, tokens."""
_CONTEXTS_OF_GPUS = (512, 4096)
"""Default contexts on GPUs, tokens."""


@dataclass(frozen=True)
class SpeedPlan:
    """Checked plan of the measurements."""

    folder: Path
    """Folder of the model."""
    shapes: Shapes
    options: SpeedOptions
    schemes: list[str]
    """Names of the schemes to measure, bf16 first."""
    skipped: dict[str, str]
    """Schemes that this machine or the model cannot run, with the reason."""


def check(options: SpeedOptions) -> SpeedPlan:
    """Check options, and return the plan for `measure`. This starts no process.

    Raises `ConfigError`, `SchemeError`, `ModelError` or `GraphError` if something cannot be
    measured on this machine.
    """
    if options.prompts % options.updates:
        raise ConfigError(
            f"--updates {options.updates} does not divide --prompts {options.prompts}; each update"
            " takes as many prompts as the next: choose --prompts as a multiple of --updates"
        )
    for name in options.schemes:
        known_scheme(name)
    if not is_embedded(options.model):
        local_folder(options.model)
    dtype = COMPUTE_DTYPES[options.dtype]
    if reason := kept_support(UNQUANTIZED, dtype).reason:
        raise SchemeError(
            f"nothing can be compared with bf16 on this machine ({options.dtype}): {reason}"
        )
    for name in options.schemes:  # before a model is built or downloaded
        require_support(get_scheme(name), dtype)
    folder = model_folder(options.model)
    options = _checked_lengths(folder, options)
    skeleton = model_skeleton(folder)
    shapes = shapes_of(skeleton.config.to_dict(), options.model)
    schemes, skipped = runnable_schemes(skeleton, options)
    learner = agreement(skeleton, dtype)
    if learner.level != "exact":
        raise GraphError(
            f"model {options.model!r} has no learner with the engine's operators, so another step"
            f" would be timed than a run's: {learner.reason}; give another model, `qarl schemes"
            " --model` says which are exact"
        )
    return SpeedPlan(
        folder=folder, shapes=shapes, options=options, schemes=schemes, skipped=skipped
    )


def _checked_lengths(folder: Path, options: SpeedOptions) -> SpeedOptions:
    """Return the options with contexts filled in.

    Raises `ModelError` for an unusable folder, `ConfigError` for sequences that are longer than the
    model's positions.
    """
    available = positions(read_config(folder))
    if not options.contexts:
        contexts = _CONTEXTS_OF_GPUS if torch.cuda.is_available() else _CONTEXTS
        limit = float("inf") if available is None else available - options.completion_limit
        fitting = tuple(context for context in contexts if context <= limit)
        options = dataclasses.replace(options, contexts=fitting or _CONTEXTS[:1])
    longest = options.prompt_limit + options.completion_limit
    if available is not None and longest > available:
        raise ConfigError(
            f"a sequence of {longest} tokens is to be sampled: {options.prompt_limit} of a prompt"
            f" (the largest of --contexts and --prompt-tokens), {options.completion_limit} after it"
            f" (the larger of --tokens and --decode-tokens + 1); the model {options.model!r} has"
            f" {int(available)} positions: lower these options"
        )
    check_folder(folder, longest)
    return options


def runnable_schemes(
    skeleton: Any,
    options: SpeedOptions,
) -> tuple[list[str], dict[str, str]]:
    """Return the schemes to measure, bf16 first, and why each of the others is left out.

    skeleton: the model on the meta device. Raises `SchemeError` for a scheme of `options.schemes`
    that cannot run on this machine, or cannot hold the model's layers.
    """
    dtype = COMPUTE_DTYPES[options.dtype]
    experts = bool(expert_modules(skeleton))
    names = [name for name in options.schemes or SCHEMES if name != UNQUANTIZED]
    skipped = {}
    for name in names:
        try:
            require_support(get_scheme(name), dtype, experts)
            plan_layers(skeleton, get_scheme(name))
        except SchemeError as error:
            if options.schemes:
                raise
            skipped[name] = kept_support(name, dtype, experts).reason or str(error)
    return [UNQUANTIZED, *(name for name in names if name not in skipped)], skipped


def measure(plan: SpeedPlan, say: Callable[[str], None]) -> SpeedReport:
    """Run all rounds and return their figures.

    say: called with a line for each scheme that is left out, and one before each process. Raises
    `WorkerError` if a process fails.
    """
    for name, reason in plan.skipped.items():
        say(f"{name} is left out: {reason}")
    options = plan.options
    rounds: dict[str, list[Answer]] = {name: [] for name in plan.schemes}
    for number in range(options.rounds):
        for name in plan.schemes:
            say(f"round {number + 1} of {options.rounds}: {name}")
            rounds[name].append(_answer(job(plan, name, number)))
    return SpeedReport(
        model=options.model,
        parameters=plan.shapes.parameters,
        options=options,
        skipped=plan.skipped,
        engine=engine_rows(rounds),
        steps=step_rows(rounds),
        memory=memory_rows(rounds),
        rounds=rounds,
    )


def job(plan: SpeedPlan, scheme: str, number: int) -> Job:
    """Return the job of a scheme's process in round `number`, counted from 0.

    A scheme's two learners swap their order from round to round. QaRL's comes first in round 0, so
    that its peak of memory is known after one round.
    """
    kinds = (UNQUANTIZED,)
    if scheme != UNQUANTIZED:
        kinds = ("qarl", "plain") if number % 2 == 0 else ("plain", "qarl")
    return Job(
        str(plan.folder),
        scheme,
        kinds,
        cache_gib=_cache_gib(plan.options, plan.shapes),
        options=plan.options,
    )


def _cache_gib(options: SpeedOptions, shapes: Shapes) -> int:
    """Return the size of the key/value cache in GiB: enough for the largest cell and the step, with
    one block per sequence to spare.
    """
    cells = [
        (batch, context + options.decode_tokens)
        for batch in options.batches
        for context in options.contexts
    ]
    cells.append((options.prompts * options.samples, options.prompt_tokens + options.tokens))
    tokens = max(
        sequences * _CACHE_BLOCK * (2 + length // _CACHE_BLOCK) for sequences, length in cells
    )
    return -(-tokens * shapes.key_value_bytes(COMPUTE_DTYPES[options.dtype].itemsize) // 2**30)


def _answer(job: Job) -> Answer:
    argument = json.dumps(dataclasses.asdict(job))
    parse = TypeAdapter(Answer).validate_python
    return run_worker("qarl.bench.worker", argument, parse, f"the process of {job.scheme}")


def as_data(report: SpeedReport) -> dict[str, Any]:
    """Return the report as data for JSON, with every cell and step of every round and the number of
    threads.
    """
    return dataclasses.asdict(report) | {"threads": torch.get_num_threads()}
