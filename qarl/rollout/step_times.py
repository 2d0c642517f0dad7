"""Measure when each step of an engine in this process ends, to separate prefill from decoding."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from qarl.rollout.engine import EngineError, SamplingEngine
from qarl.rollout.types import Prompt, Sampling

if TYPE_CHECKING:
    from qarl.rollout.vllm.engine import VllmEngine


@dataclass(frozen=True)
class EngineStep:
    """One step of an engine."""

    end: float
    """Seconds since sampling began."""
    sequences: int
    """Number of sequences that got a token in this step."""


def engine_steps(
    engine: SamplingEngine, prompts: Sequence[Prompt], sampling: Sampling
) -> list[EngineStep]:
    """Sample as `SamplingEngine.generate` does, but step by step, and return the steps.

    Raises `EngineError` unless the engine is vLLM in this process.
    """
    from qarl.rollout.vllm.engine import VllmEngine

    if not isinstance(engine, VllmEngine):
        raise EngineError(
            f"{type(engine).__name__} has no steps to time; they are of an engine in this process"
        )
    start = time.perf_counter()
    return [
        EngineStep(time.perf_counter() - start, sequences)
        for sequences in _steps(engine, prompts, sampling)
    ]


def _steps(engine: "VllmEngine", prompts: Sequence[Prompt], sampling: Sampling) -> Iterator[int]:
    """Yield after each step how many sequences got a token."""
    from vllm.inputs import tokens_input

    from qarl.rollout.vllm.engine import vllm_requests

    vllm = engine._llm.llm_engine
    inputs, params = vllm_requests(prompts, sampling)
    for number, (prompt, parameters) in enumerate(zip(inputs, params, strict=True)):
        vllm.add_request(str(number), tokens_input(prompt["prompt_token_ids"]), parameters)
    while vllm.has_unfinished_requests():
        yield len(vllm.step())  # one output for each sequence that got a token
