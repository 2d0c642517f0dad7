"""Requests to vLLM and its answers, without an engine (tests/engine has one)."""

import hashlib
import os
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from tokenizers import AddedToken
from vllm.model_executor.layers.linear import UnquantizedLinearMethod

from qarl.configs.errors import InputError
from qarl.configs.schema.rollout import RolloutConfig
from qarl.rollout.absent import AbsentEngine
from qarl.rollout.engine import EngineError, LoadReport
from qarl.rollout.servers.vllm import worker as server_worker
from qarl.rollout.servers.vllm.start import server_command
from qarl.rollout.servers.vllm.worker import ReceivedVersions, StagedVersion
from qarl.rollout.types import Prompt, Sampling, ServerSpec
from qarl.rollout.vllm.engine import VllmEngine, vllm_requests
from qarl.rollout.vllm.options import (
    VllmOptions,
    llm_arguments,
    prepare_environment,
    refuse_unsupported,
)
from qarl.rollout.vllm.requests import (
    sampling_arguments,
    scoring_arguments,
)
from qarl.rollout.vllm.worker import _scheme_of, compare_names
from tests.support.cases import cases
from tests.support.kernels import no_cuda

SAMPLING = Sampling(
    samples=2, max_new_tokens=6, temperature=0.5, top_p=0.9, top_k=5, min_p=0.1, seed=3
)
PROMPTS = [
    Prompt("a", "", (1, 2)),
    Prompt("b", "", (3,), max_new_tokens=4),
    Prompt("c", "", (4,), (7, 8, 9)),
]


def test_a_completions_request():
    seed = int.from_bytes(hashlib.blake2b(b"3/6/1", digest_size=8).digest(), "big") >> 1
    asked = sampling_arguments(replace(SAMPLING, first_prompt=5), PROMPTS[0], 1, 1)
    assert asked == cases(__file__, "request") | {"seed": seed}
    other = replace(
        SAMPLING,
        temperature=0.0,
        stop=("#", "##"),
        loop_limit=4,
        ignore_end=True,
    )
    asked = sampling_arguments(other, PROMPTS[1], 0, 0)
    assert asked["seed"] is None
    assert asked["stop"] == ["#", "##"]
    assert asked["detokenize"] is True
    assert asked["ignore_eos"] is True
    assert asked["repetition_detection"] == {
        "max_pattern_size": 8,
        "min_pattern_size": 1,
        "min_count": 4,
    }
    assert asked["max_tokens"] == 4
    assert scoring_arguments() == {
        "temperature": 0,
        "max_tokens": 1,
        "prompt_logprobs": 0,
        "detokenize": False,
    }
    inputs, params = vllm_requests(PROMPTS, replace(SAMPLING, loop_limit=3))
    assert [each["prompt_token_ids"] for each in inputs] == [
        [1, 2],
        [1, 2],
        [3],
        [3],
        [4],
        [4],
    ]
    seeds = [
        sampling_arguments(SAMPLING, prompt, j, k)["seed"]
        for j, prompt in enumerate(PROMPTS)
        for k in (0, 1)
    ]
    assert [each.seed for each in params] == seeds
    assert len({*seeds}) == 5, "a prompt with draws of its own has one seed"
    assert {(each.temperature, each.repetition_detection.min_count) for each in params} == {
        (0.5, 3)
    }


def test_a_stop_text_that_is_a_special_token_is_asked_for_by_its_id():
    """Contract: special tokens become ids, because vLLM's text leaves them out; other added tokens
    and texts are searched in the text.
    """
    added = {7: AddedToken("<end>", special=True), 8: AddedToken("<think>", special=False)}
    tokenizer = SimpleNamespace(added_tokens_decoder=added)
    settings = replace(SAMPLING, stop=("<end>", "#", "<think>"))
    asked = sampling_arguments(settings.with_stop_tokens(tokenizer), PROMPTS[0], 0, 0)
    assert (asked["stop_token_ids"], asked["stop"]) == ([7], ["#", "<think>"])
    alone = replace(SAMPLING, stop=("<end>",)).with_stop_tokens(tokenizer)
    assert sampling_arguments(alone, PROMPTS[0], 0, 0)["detokenize"] is False
    assert SAMPLING.with_stop_tokens(tokenizer) == SAMPLING


@no_cuda
def test_an_engines_arguments_on_a_cpu():
    rollout = RolloutConfig(
        max_prompt_tokens=5000, max_new_tokens=4000, max_num_seqs=7, temperature=0.5
    )
    expected = cases(__file__, "arguments")
    assert llm_arguments(VllmOptions(rollout)) == expected
    delta_nets = {**expected, "enable_prefix_caching": False}
    assert llm_arguments(VllmOptions(rollout, states=True)) == delta_nets
    rollout = rollout.model_copy(
        update={"temperature": 1.0, "prefix_caching": False, "max_new_tokens": 8}
    )
    options = VllmOptions(rollout, "float16", multi_process=True)
    assert llm_arguments(options) == expected | cases(__file__, "changed")


@no_cuda
def test_what_the_environment_says_is_kept_or_refused(monkeypatch: pytest.MonkeyPatch):
    names = (
        "QARL_SETTLES_VLLM",
        "VLLM_ENABLE_V1_MULTIPROCESSING",
        "VLLM_NO_USAGE_STATS",
    )
    for name in names:
        monkeypatch.setenv(name, "x")
    prepare_environment()
    assert [os.environ[name] for name in names] == ["1", "x", "x"]
    for name in names:
        monkeypatch.delenv(name)
    # which prepares its own
    server_command(ServerSpec(Path(), "a", "bfloat16"), "127.0.0.1", 1, [])
    assert [os.environ[name] for name in names] == ["1", "0", "1"]
    for amx, value, refused in (
        (True, "1", True),
        (True, "0", False),
        (False, "1", False),
    ):
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda amx=amx: amx)
        monkeypatch.setenv("VLLM_CPU_INT4_W4A8", value)
        if refused:
            with pytest.raises(
                InputError,
                match=r"W4A8=1: on this CPU.* AMX.* int8 activations.* set it to 0",
            ):
                refuse_unsupported(VllmOptions())
        else:
            refuse_unsupported(VllmOptions())
    monkeypatch.setenv("VLLM_CPU_ATTN_SPLIT_KV", "1")
    with pytest.raises(
        InputError,
        match=r"SPLIT_KV=1: vLLM's attention would split .* unset it or set it to 0",
    ):
        refuse_unsupported(VllmOptions())
    monkeypatch.setenv("VLLM_CPU_ATTN_SPLIT_KV", "0")
    with pytest.raises(EngineError, match=r"router_replay: .* set it to false on this machine"):
        refuse_unsupported(VllmOptions(RolloutConfig(router_replay=True)))


def test_a_process_has_one_engine_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Check that a second engine is refused while one is open.

    Closing an engine releases what vLLM holds in the process, so that the next can be opened.
    """
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr("vllm.LLM", Mock())
    monkeypatch.setattr("vllm.distributed.cleanup_dist_env_and_memory", cleaned := Mock())
    monkeypatch.setattr(VllmEngine, "_open", False)
    for count in (1, 2):
        engine = VllmEngine(tmp_path, VllmOptions())
        assert engine.weight_version == 0
        with pytest.raises(EngineError, match="close the open one first"):
            VllmEngine(tmp_path, VllmOptions())
        engine.close()
        assert cleaned.call_count == count


class Entries(list):
    """Log-probs of the tokens of a completion, as vLLM gives them."""

    logprobs = (-1.0, -0.5)
    token_ids = property(tuple)


class Answers:
    """Stand-in for `vllm.LLM`."""

    refuses: Exception | None = None
    """Error that all calls raise, if any."""
    resets = True
    """Whether the prefix cache is reset."""
    off = 0
    """Difference between the second token sampled and the one scored."""

    def get_tokenizer(self) -> None:
        return None

    def reset_prefix_cache(self) -> bool:
        return self.resets

    def generate(
        self, inputs: Sequence[dict[str, list[int]]], params: Any, use_tqdm: bool
    ) -> list[Any]:
        """Return the request's number twice as tokens, and minus each prompt token as log-prob."""
        if self.refuses is not None:
            raise self.refuses
        return [
            self._finished(number, asked["prompt_token_ids"]) for number, asked in enumerate(inputs)
        ]

    def _finished(self, number: int, prompt: list[int]) -> Any:
        output = SimpleNamespace(
            token_ids=[number, number],
            logprobs=Entries([number, number + self.off]),
            text=f"t{number}",
            finish_reason=None,
            routed_experts=number,
        )
        scored = [
            None,
            *({token: SimpleNamespace(logprob=-token), 99: None} for token in prompt[1:]),
        ]
        return SimpleNamespace(outputs=[output], prompt_token_ids=prompt, prompt_logprobs=scored)

    def collective_rpc(self, method: str, args: Any) -> list[Any]:
        if self.refuses is not None:
            raise self.refuses
        return [LoadReport(f"{method} {len([*args[0]])}", (), ())]


def engine_of(llm: Answers) -> VllmEngine:
    """Return an engine at weight version 4, without the start of vLLM."""
    engine: Any = VllmEngine.__new__(VllmEngine)
    engine._llm = llm
    engine.weight_version = 4
    engine._half_loaded = False
    return engine


def test_answers_are_grouped_by_prompt_and_checked():
    engine = engine_of(llm := Answers())
    groups = engine.generate(PROMPTS[:2], replace(SAMPLING, stop=("#",)))
    assert [[(c.token_ids, c.text, c.experts) for c in group] for group in groups] == [
        [((n, n), f"t{n}", n) for n in pair] for pair in ((0, 1), (2, 3))
    ]
    assert {c.logprobs for group in groups for c in group} == {(-1.0, -0.5)}
    assert {(c.weight_version, c.finish_reason) for group in groups for c in group} == {
        (4, "unknown")
    }
    assert engine.logprobs([[1, 2, 3], [4, 5]]) == [[-2, -3], [-5]]
    assert engine.logprobs_of_each([[1, 2]]) == [[[-2]]]
    llm.off = 1
    with pytest.raises(EngineError, match="other tokens than it sampled: 2 for 2"):
        engine.generate(PROMPTS, replace(SAMPLING, stop=("#",)))
    llm.refuses = ValueError("no memory")
    with pytest.raises(
        EngineError, match="vLLM failed in 'generate' at weight version 4: no memory"
    ):
        engine.logprobs([[1, 2]])


def test_a_publish_that_breaks_off_is_not_sampled_from():
    engine = engine_of(llm := Answers())
    tensors: Any = iter("abc")
    assert engine.load(tensors, 5) == LoadReport("qarl_load 3", (), ())
    assert engine.weight_version == 5
    llm.refuses = EngineError("of our own")
    with pytest.raises(EngineError, match=r"^of our own$"):
        engine.load(iter(()), 6)
    llm.refuses = None
    for ask in (
        lambda: engine.generate(PROMPTS, SAMPLING),
        lambda: engine.logprobs([[1, 2]]),
    ):
        with pytest.raises(EngineError, match="parts of two weight versions; publish again"):
            ask()
    llm.resets = False
    with pytest.raises(EngineError, match="refused to reset its prefix cache"):
        engine.load(iter(()), 6)
    llm.resets = True
    engine.load(iter(()), 6)
    assert engine.weight_version == 6
    assert engine.logprobs([[1, 2]]) == [[-2]]


def test_a_server_whose_load_broke_off_has_no_version(monkeypatch: pytest.MonkeyPatch):
    """Check that a server reports its last complete load, and none after a load that broke off.

    The next complete load is reported again.
    """
    monkeypatch.setattr(server_worker, "trace_names", Mock())
    monkeypatch.setattr(server_worker, "load_stream", loads := Mock())
    report = LoadReport("digest", (), ())
    received = ReceivedVersions(Mock(), Mock())
    for outcome in (report, RuntimeError("out of memory"), report):
        received._staging = Future()
        received._staging.set_result(StagedVersion(Mock(), report, keep=False))
        loads.side_effect = [outcome]
        if outcome is report:
            assert received.load("digest") == received.load("digest") == report
            assert received.load("other") is None
        else:
            with pytest.raises(RuntimeError, match="out of memory"):
                received.load("digest")
            received.abandon()
            assert received.load("digest") is None


def test_names_are_compared_layer_by_layer():
    sent = ["a.weight", "a.scale", "b.weight", "x.weight", "w.weight"]
    assert compare_names([["a", "b"], ["d", "c"]], sent) == (("w", "x"), ("c", "d"))


def test_a_layer_without_codes_is_reported_unquantized():
    """Check a model without quantization, and a layer that a quantized model leaves alone."""
    alone = SimpleNamespace(quant_method=UnquantizedLinearMethod())
    cases: list[Any] = [(SimpleNamespace(quant_method=None), None), (alone, "of the other layers")]
    for layer, quantization in cases:
        config: Any = SimpleNamespace(quant_config=quantization)
        assert _scheme_of(layer, "a", config) == ("bf16", None)


def test_a_replay_has_no_engine_to_ask():
    engine = AbsentEngine()
    for ask in (engine.generate, engine.logprobs, engine.logprobs_of_each):
        with pytest.raises(EngineError, match="leave from_rollouts out"):
            ask([], None)
    report = engine.load(iter(()), 3)
    assert report.took_all_of(report.digest)
    assert engine.weight_version == 3
