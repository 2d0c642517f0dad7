"""`python -m benchmarks speed`: every scheme's engine and training step against bf16's, on one model.

Each scheme runs in a process of its own, one after the other, and rounds interleave them; ratios are between processes
of one round.
"""

import dataclasses
import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter

from benchmarks.models import MODELS, write_model
from benchmarks.process import run_worker
from benchmarks.speed.figures import EngineRow, StepRow, engine_rows, step_rows
from benchmarks.speed.job import Answer, Job, Options
from qarl.configs.errors import ConfigError
from qarl.planning.shapes import Shapes, shapes_of
from qarl.quant.checkpoint.load import model_skeleton
from qarl.quant.checkpoint.shapes import expert_modules, plan_layers
from qarl.quant.kernels.supported import kept_support, require_support
from qarl.quant.schemes import COMPUTE_DTYPES, SCHEMES, SchemeError, get_scheme
from qarl.run.session import model_folder

_CACHE_BLOCK = 128
"""Tokens; vLLM gives a sequence its key/value cache in blocks, on CPUs of this size."""


@dataclass(frozen=True)
class Figures:
    """Everything. skipped: scheme → why this machine cannot run it. rounds: scheme → what its processes answered."""

    model: str
    parameters: int
    options: Options
    skipped: dict[str, str]
    engine: list[EngineRow]
    steps: list[StepRow]
    rounds: dict[str, list[Answer]]


def measure(options: Options, say: Callable[[str], None]) -> Figures:
    """All rounds. say: gets a line before each process, and one for each scheme that is left out.

    Raises `ConfigError` and `SchemeError` for what cannot be measured, before anything is started; `WorkerError` where
    a process fails.
    """
    if options.prompts % options.updates:
        raise ConfigError(f"--updates {options.updates} does not divide the {options.prompts} prompts of --prompts")
    for name in options.schemes:  # before a model is looked for or made
        require_support(get_scheme(name), COMPUTE_DTYPES[options.dtype])
    with _folder(options) as folder:
        skeleton = model_skeleton(folder)
        shapes = shapes_of(skeleton.config.to_dict(), options.model)
        schemes, skipped = runnable(skeleton, options)
        for name, reason in skipped.items():
            say(f"{name} is left out: {reason}")
        rounds: dict[str, list[Answer]] = {name: [] for name in schemes}
        for number in range(options.rounds):
            for name in schemes:
                say(f"round {number + 1} of {options.rounds}: {name}")
                rounds[name].append(_answer(job(folder, name, number, options, shapes)))
    return Figures(
        model=options.model,
        parameters=shapes.parameters,
        options=options,
        skipped=skipped,
        engine=engine_rows(rounds),
        steps=step_rows(rounds),
        rounds=rounds,
    )


@contextmanager
def _folder(options: Options) -> Iterator[Path]:
    """The model's; one of `MODELS` is made for the time of the measurement."""
    if options.model not in MODELS:
        yield model_folder(options.model)
        return
    with tempfile.TemporaryDirectory(prefix="qarl-bench-") as folder:
        write_model(MODELS[options.model], Path(folder), options.seed)
        yield Path(folder)


def runnable(skeleton: Any, options: Options) -> tuple[list[str], dict[str, str]]:
    """The schemes to measure, bf16 first, and why each of the others is not. Raises `SchemeError` for one that was
    named and cannot run, or cannot hold the model's layers."""
    dtype, experts = COMPUTE_DTYPES[options.dtype], bool(expert_modules(skeleton))
    names = [name for name in options.schemes or SCHEMES if name != "bf16"]
    skipped = {}
    for name in names:
        try:
            require_support(get_scheme(name), dtype, experts)
            plan_layers(skeleton, get_scheme(name))
        except SchemeError as error:
            if options.schemes:
                raise
            skipped[name] = kept_support(name, dtype, experts).reason or str(error)
    return ["bf16", *dict.fromkeys(name for name in names if name not in skipped)], skipped


def job(folder: Path, scheme: str, number: int, options: Options, shapes: Shapes) -> Job:
    """Of round `number`, counted from 0: the two learners of a scheme change places from round to round."""
    kinds = ("bf16",) if scheme == "bf16" else ("plain", "qarl") if number % 2 == 0 else ("qarl", "plain")
    return Job(str(folder), scheme, kinds, cache_gib=_cache_gib(options, shapes), options=options)


def _cache_gib(options: Options, shapes: Shapes) -> int:
    """Enough for the largest cell and for the step, in whole GiB; a block a sequence to spare."""
    cells = [(batch, context + options.decode_tokens) for batch in options.batches for context in options.contexts]
    cells.append((options.prompts * options.samples, options.prompt_tokens + options.tokens))
    tokens = max(sequences * _CACHE_BLOCK * (2 + length // _CACHE_BLOCK) for sequences, length in cells)
    return -(-tokens * shapes.key_value_bytes(COMPUTE_DTYPES[options.dtype].itemsize) // 2**30)


def _answer(job: Job) -> Answer:
    argument = json.dumps(dataclasses.asdict(job))
    parse = TypeAdapter(Answer).validate_python
    return run_worker("benchmarks.speed.worker", argument, parse, f"the process of {job.scheme}")


def as_data(figures: Figures) -> dict[str, Any]:
    """JSON-ready, every cell and step of every round included."""
    return dataclasses.asdict(figures) | {"threads": torch.get_num_threads()}
