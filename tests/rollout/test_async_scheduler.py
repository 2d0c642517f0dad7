"""vLLM's asynchronous scheduler, which GPUs use: it schedules a step before the tokens of the last
step are known.

Engine core, scheduler and executor are vLLM's; the worker computes nothing. Blind spot: vLLM's GPU
worker (tests/gpu).
"""

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from qarl.configs.schema.rollout import RolloutConfig
from qarl.quant.digest import digested
from qarl.quant.types import LowBitTensor
from qarl.rollout.engine import LoadReport
from qarl.rollout.types import Prompt, Sampling
from qarl.rollout.vllm import engine as engines
from qarl.rollout.vllm import worker
from qarl.rollout.vllm.engine import VllmEngine
from qarl.rollout.vllm.options import VllmOptions, llm_arguments
from tests.support import Policies
from tests.support.imports import import_libraries

import_libraries()
from vllm.platforms.cpu import CpuPlatform  # noqa: E402
from vllm.v1.kv_cache_interface import FullAttentionSpec  # noqa: E402
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput  # noqa: E402
from vllm.v1.worker.worker_base import CompilationTimes, WorkerBase  # noqa: E402

END = 2
"""Token that ends an answer."""
PROMPTS = (3, 21, 40, 5)
"""Lengths of prompts, in tokens; the third is computed in chunks."""


class Worker(WorkerBase):
    """Worker without a model.

    It samples token 10 + p at position p of an answer, and END at position 3 if the prompt begins
    with 1. A log-prob names the weights, the prompt and the position: minus (1000 · version + 100 ·
    first token of the prompt + p).
    """

    version = 0

    def init_device(self) -> None:
        self.first = dict[str, int]()
        self.length = dict[str, int]()
        vars(self)["model_runner"] = SimpleNamespace(
            get_model=lambda: None, reset_encoder_cache=lambda: None
        )
        nothing = ("load_model", "set_kv_cache_layout", "initialize_from_config")
        vars(self).update(
            dict.fromkeys(nothing, lambda *_: None),
            get_supported_tasks=lambda: ("generate",),
        )

    def get_kv_cache_spec(self) -> dict[str, Any]:
        return {
            "layer": FullAttentionSpec(
                block_size=16, num_kv_heads=1, head_size=16, dtype=torch.bfloat16
            )
        }

    def get_supported_kv_cache_layouts(self) -> list[str]:
        return ["NHD"]

    def determine_available_memory(self) -> int:
        return 2**24

    def compile_or_warm_up_model(self) -> CompilationTimes:
        return CompilationTimes(language_model=0.0, encoder=0.0)

    def execute_model(self, scheduler_output: Any) -> ModelRunnerOutput | None:
        cached = scheduler_output.scheduled_cached_reqs
        computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for request in scheduler_output.scheduled_new_reqs:
            self.first[request.req_id] = request.prompt_token_ids[0]
            self.length[request.req_id] = len(request.prompt_token_ids)
            computed[request.req_id] = request.num_computed_tokens
        scheduled = scheduler_output.num_scheduled_tokens.items()
        self.positions = {
            name: computed[name] + count - self.length[name] for name, count in scheduled
        }
        return None if self.positions else ModelRunnerOutput([], {})

    def sample_tokens(self, grammar_output: Any) -> ModelRunnerOutput:
        names = list(self.positions)
        first = self.first
        tokens = [END if first[n] == 1 and p == 3 else 10 + p for n, p in self.positions.items()]
        logprobs = [
            -(1000.0 * self.version + 100 * first[n] + p) for n, p in self.positions.items()
        ]
        answers = [
            [token] if p >= 0 else []
            for token, p in zip(tokens, self.positions.values(), strict=True)
        ]
        columns = (
            np.array([tokens]).T,
            np.array([logprobs]).T,
            np.zeros(len(names), dtype=int),
        )
        return ModelRunnerOutput(
            names, {n: i for i, n in enumerate(names)}, answers, LogprobsLists(*columns)
        )


def load(_model: Any, _config: Any, stream: Iterable[LowBitTensor]) -> LoadReport:
    """Count a weight version instead of loading it. Replaces `load_stream`."""
    Worker.version += 1
    digest = digested(stream)
    return LoadReport(digest.hexdigest(), (), ())


def test_no_token_is_of_weights_before_a_publish(
    random_policy: Policies, monkeypatch: pytest.MonkeyPatch
):
    """Check that every token is sampled by the version that its answer reports.

    A step may be scheduled beyond the end of an answer and be computed by the old weights. Its
    tokens must reach no request of the next call, and the publish between the two calls must not be
    refused because of it.
    """
    settle = CpuPlatform.check_and_update_config.__func__

    def settled(cls: type, config: Any) -> None:
        settle(cls, config)
        config.scheduler_config.async_scheduling = True

    gpus = {
        "worker_cls": f"{__name__}.Worker",
        "enable_chunked_prefill": True,
        "max_num_batched_tokens": 48,
    }
    monkeypatch.setattr(CpuPlatform, "check_and_update_config", classmethod(settled))
    monkeypatch.setattr(
        engines,
        "llm_arguments",
        lambda o: {**llm_arguments(o), **gpus, "num_gpu_blocks_override": 64},
    )
    monkeypatch.setattr(engines, "text_of", lambda *_: "")
    monkeypatch.setattr(worker, "load_stream", load)
    rollout = RolloutConfig(max_prompt_tokens=48, max_new_tokens=16, max_num_seqs=6)
    engine = VllmEngine(random_policy(True), VllmOptions(rollout, "bfloat16"))
    core: Any = engine._llm.llm_engine.engine_core
    assert core.engine_core.batch_queue_size == 2
    assert type(core.engine_core.scheduler).__name__ == "AsyncScheduler"
    prompts = [Prompt(str(n), "", (n, *range(20, 19 + length))) for n, length in enumerate(PROMPTS)]
    for version in (1, 2, 3):
        engine.load(iter([LowBitTensor("a", torch.zeros(version))]), version)
        answers = engine.generate(prompts, Sampling(samples=3, max_new_tokens=5 + version))
        for n, group in enumerate(answers):
            length = 4 if n == 1 else 5 + version
            for answer in group:
                assert answer.token_ids == (
                    *(10 + p for p in range(length - 1)),
                    END if n == 1 else 9 + length,
                )
                assert answer.logprobs == tuple(
                    -(1000.0 * version + 100 * n + p) for p in range(length)
                )
                assert answer.weight_version == version
                assert answer.finish_reason == ("stop" if n == 1 else "length")
    engine.close()
