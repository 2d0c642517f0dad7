"""vLLM in this process: samples, scores, and takes published tensors without a restart."""

import logging
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from quant.types import LayerReport, LowBitTensor
from rollout.engine import EngineError, LoadReport
from rollout.types import Completion, Prompt, Sampling

_WORKER_EXTENSION = "rollout.vllm.worker.WorkerExtension"


@dataclass(frozen=True)
class VllmOptions:
    """dtype: "bfloat16", "float16" or "float32". max_model_len: prompt + completion tokens. kv_cache_gib: CPU
    key/value cache size in GiB. memory_share: of the device's memory vLLM may plan with. router_replay: return the
    experts that each token was routed to. several: this process is one of several, each with an engine of its own, and
    torch's process group is open. compile: leave torch.compile on, which the learner is to use; on a CPU vLLM's sampler
    then compiles as well, at its first use.
    """

    dtype: str = "bfloat16"
    max_model_len: int = 2048
    max_num_seqs: int = 256
    kv_cache_gib: int = 1
    memory_share: float = 0.2
    prefix_caching: bool = True
    enforce_eager: bool = True
    logging_level: str = "ERROR"
    router_replay: bool = False
    several: bool = False
    compile: bool = False


def prepare_environment(options: VllmOptions) -> None:
    """Settings vLLM reads from the environment on first import. Values the user set are kept."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", str(options.kv_cache_gib))
    os.environ.setdefault("VLLM_LOGGING_LEVEL", options.logging_level)
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    if not torch.cuda.is_available() and not options.compile:
        # On CPUs vLLM's sampler compiles one tiny function at the first generate: 10 s and a C++ compiler for
        # nothing measurable. torch reads this when the function is decorated, so before vLLM is imported.
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")


class VllmEngine:
    """One vLLM engine over a checkpoint folder.

    Raises `EngineError` with vLLM's reason and a remedy where it cannot start, and where one is open already.
    """

    _open = False

    def __init__(self, checkpoint: Path, options: VllmOptions):
        prepare_environment(options)
        from vllm import LLM

        # On an error vLLM logs its whole schedule, thousands of lines; the exception says what went wrong.
        logging.getLogger("vllm.logging_utils.dump_input").setLevel(logging.CRITICAL)
        if VllmEngine._open:
            raise EngineError("vLLM's groups and contexts are global: one engine a process; close the open one first")
        if options.router_replay and not torch.cuda.is_available():
            raise EngineError(
                "rollout.router_replay: vLLM returns expert choices through its V2 model runner alone, which needs "
                "Triton and so a GPU; set it to false on this machine"
            )
        self.weight_version = 0
        self._half_loaded = False
        try:
            self._llm = LLM(
                str(checkpoint),
                dtype=options.dtype,  # type: ignore[arg-type]
                enforce_eager=options.enforce_eager,
                max_model_len=options.max_model_len,
                max_num_seqs=options.max_num_seqs,
                gpu_memory_utilization=options.memory_share,
                enable_prefix_caching=options.prefix_caching,
                **_whole_prefills(options),
                # Each engine is whole: tensor parallelism is 1. vLLM takes its place in the open group, no more.
                distributed_executor_backend="external_launcher" if options.several else "uni",
                worker_extension_cls=_WORKER_EXTENSION,
                disable_log_stats=True,
                use_tqdm_on_load=False,
                enable_return_routed_experts=options.router_replay,
            )
        except Exception as error:
            raise EngineError(
                f"vLLM could not start on {str(checkpoint)!r}: {error}; check rollout.kv_cache_gib, "
                "rollout.memory_share and the scheme's support on this machine"
            ) from error

        VllmEngine._open = True

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[list[Completion]]:
        """See `Engine.generate`. Log-probs are of the raw logits (temperature 1), which is also what is sampled."""
        from vllm import SamplingParams

        self._refuse_half_loaded()
        inputs, params = [], []
        for j, prompt in enumerate(prompts):
            for k in range(sampling.samples):
                inputs.append({"prompt_token_ids": list(prompt.token_ids)})
                params.append(
                    SamplingParams(
                        temperature=sampling.temperature,
                        max_tokens=sampling.max_new_tokens,
                        logprobs=0,
                        seed=_stream(sampling.seed, sampling.first_prompt + j, k) if sampling.temperature > 0 else None,
                    )
                )
        outputs = self._call("generate", inputs, params, use_tqdm=False)
        completions = [self._completion(output.outputs[0]) for output in outputs]
        step = sampling.samples
        return [completions[i : i + step] for i in range(0, len(completions), step)]

    def _completion(self, output) -> Completion:
        logprobs = tuple(entry[token].logprob for token, entry in zip(output.token_ids, output.logprobs, strict=True))
        return Completion(
            tuple(output.token_ids),
            logprobs,
            output.text,
            self.weight_version,
            output.finish_reason or "unknown",
            output.routed_experts,
        )

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """See `Engine.score`."""
        from vllm import SamplingParams

        self._refuse_half_loaded()
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
        inputs = [{"prompt_token_ids": list(sequence)} for sequence in sequences]
        outputs = self._call("generate", inputs, params, use_tqdm=False)
        return [
            [entry[token].logprob for token, entry in zip(s[1:], o.prompt_logprobs[1:], strict=True)]
            for s, o in zip(sequences, outputs, strict=True)
        ]

    def layers(self) -> list[LayerReport]:
        """See `Engine.layers`."""
        return self._call("collective_rpc", "qarl_layers")[0]

    def load(self, stream: Iterable[LowBitTensor], version: int) -> LoadReport:
        """See `Engine.load`. The prefix cache is reset: nothing computed with the old weights is reused."""
        self._half_loaded = True
        report: LoadReport = self._call("collective_rpc", "qarl_load", args=(stream,))[0]
        self._half_loaded = False
        if not self._llm.reset_prefix_cache():
            raise EngineError("vLLM refused to reset its prefix cache after a publish; requests are still running")
        self.weight_version = version
        return report

    def close(self) -> None:
        """Free the engine's memory and torch's process group, so that another can start in this process."""
        import gc

        from vllm.distributed import cleanup_dist_env_and_memory

        self._llm.llm_engine.engine_core.shutdown()
        del self._llm
        gc.collect()
        cleanup_dist_env_and_memory()
        VllmEngine._open = False

    def _refuse_half_loaded(self) -> None:
        if self._half_loaded:
            raise EngineError("a publish broke off half way: the engine holds parts of two weight versions; restart it")

    def _call(self, method: str, *args, **kwargs):
        """One call into vLLM; whatever breaks there is an `EngineError` naming the call."""
        try:
            return getattr(self._llm, method)(*args, **kwargs)
        except EngineError:
            raise
        except Exception as error:
            raise EngineError(f"vLLM failed in {method!r} at weight version {self.weight_version}: {error}") from error


def _whole_prefills(options: VllmOptions) -> dict[str, Any]:
    """On CPUs: schedule prompts whole. vLLM 0.32 rewinds a seeded request's generator when a prompt is cut in
    chunks, which torch's CPU generator cannot do ("CPU Generator does not use offset")."""
    if torch.cuda.is_available():
        return {}
    return {"enable_chunked_prefill": False, "max_num_batched_tokens": max(8192, options.max_model_len)}


def _stream(seed: int, prompt: int, sample: int) -> int:
    """A 63-bit seed for one completion; mixes (seed, prompt, sample) so that streams do not overlap."""
    import hashlib

    digest = hashlib.blake2b(f"{seed}/{prompt}/{sample}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
