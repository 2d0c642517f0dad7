"""vLLM in this process: samples, computes log-probs, loads published tensors without a restart."""

import gc
import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qarl.configs.words import error_text
from qarl.quant.runtime.imports import collections_paused
from qarl.quant.types import LayerReport, LowBitTensor
from qarl.rollout.engine import EngineError, LoadReport
from qarl.rollout.types import Completion, EmbeddedPictures, Prompt, Sampling
from qarl.rollout.vllm.options import (
    VllmOptions,
    llm_arguments,
    prepare_environment,
    refuse_unsupported,
)
from qarl.rollout.vllm.requests import (
    sampling_arguments,
    scoring_arguments,
    text_of,
)
from qarl.rollout.vocabulary import Vocabulary

if TYPE_CHECKING:
    from qarl.quant.kernels.engine_layers import EngineLayers
    from qarl.rollout.vllm.pictures import Tower

_WORKER_EXTENSION = "qarl.rollout.vllm.worker.WorkerExtension"


class VllmEngine:
    """One vLLM engine on a checkpoint folder.

    Raises `EngineError` with vLLM's reason and a remedy if it cannot start, or if another one is
    open.
    """

    _open = False
    _vocabulary = Vocabulary("", None)
    _tower: "Tower | None" = None

    def __init__(self, checkpoint: Path, options: VllmOptions):
        prepare_environment()
        with collections_paused():
            from vllm import LLM

        # On an error vLLM logs its whole schedule, thousands of lines. The exception is enough.
        logging.getLogger("vllm.logging_utils.dump_input").setLevel(logging.CRITICAL)
        if VllmEngine._open:
            raise EngineError(
                "vLLM's groups and contexts are global: one engine a process; close the open one"
                " first"
            )
        refuse_unsupported(options)
        options = options.of_model(checkpoint)
        self.weight_version = 0
        self._vocabulary = Vocabulary.of(checkpoint)
        self._half_loaded = False
        # vLLM collects garbage several times during its start, and each time would walk the
        # millions of objects that imported modules consist of. They live as long as the process,
        # so they are frozen (vLLM's own clean-up unfreezes them).
        gc.collect()
        gc.freeze()
        try:
            self._llm = LLM(
                str(checkpoint),
                worker_extension_cls=_WORKER_EXTENSION,
                **llm_arguments(options),
            )
        except Exception as error:
            raise EngineError(
                f"vLLM could not start on {str(checkpoint)!r}: {error_text(error)}; check"
                " rollout.kv_cache_gib and the scheme's support on this machine"
            ) from error
        VllmEngine._open = True
        if options.towers and options.rollout.pictures:
            self._tower = self._open_tower()
        if options.rounding:
            self._refuse_preemption(options.rounding)

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[list[Completion]]:
        """See `SamplingEngine.generate`.

        Log-probs are those of the distribution sampled from (`VllmOptions.logprobs_mode`).
        """
        self._refuse_half_loaded()
        self._require_rows([prompt.token_ids for prompt in prompts])
        tokenizer = self._llm.get_tokenizer()
        sampling = sampling.with_stop_tokens(tokenizer)
        embedded = self._embedded(prompts)
        inputs, params = vllm_requests(prompts, sampling)
        outputs = self._call("generate", inputs, params, use_tqdm=False)
        samples = sampling.samples
        completions = [
            self._completion(output, tokenizer, bool(sampling.stop), embedded[number // samples])
            for number, output in enumerate(outputs)
        ]
        return [completions[i : i + samples] for i in range(0, len(completions), samples)]

    def _open_tower(self) -> "Tower":
        from qarl.rollout.vllm.pictures import Tower

        runner = self._call("collective_rpc", lambda worker: worker.model_runner)[0]
        return Tower(self._llm, runner)

    def _embedded(self, prompts: Sequence[Prompt]) -> list[EmbeddedPictures | None]:
        """Return what the tower makes of each prompt's pictures; None for text.

        Raises `EngineError` for pictures if the engine was started without its tower.
        """
        if self._tower is None:
            for prompt in prompts:
                if prompt.pictures is not None:
                    raise EngineError(
                        f"prompt {prompt.id!r} has pictures, and the engine was started without the"
                        " model's part for them; set rollout.pictures to the most that a prompt has"
                    )
            return [None] * len(prompts)
        self._tower.forget()
        return [
            None if prompt.pictures is None else self._tower.embedded(prompt) for prompt in prompts
        ]

    def _completion(
        self, finished, tokenizer: Any, has_text: bool, pictures: EmbeddedPictures | None
    ) -> Completion:
        (output,) = finished.outputs
        tokens = tuple(output.token_ids)
        entries = output.logprobs  # one entry per token, because `logprobs` is 0
        if tuple(entries.token_ids) != tokens:
            raise EngineError(
                f"vLLM gave log-probs of other tokens than it sampled: {len(entries)} for"
                f" {len(tokens)}"
            )
        if has_text:
            text = output.text
        else:
            text = text_of(tokenizer, finished.prompt_token_ids, tokens, output.finish_reason)
        return Completion(
            token_ids=tokens,
            logprobs=tuple(entries.logprobs),
            text=text,
            weight_version=self.weight_version,
            finish_reason=output.finish_reason or "unknown",
            experts=output.routed_experts,
            pictures=pictures,
        )

    def logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """See `SamplingEngine.logprobs`."""
        from vllm import SamplingParams

        self._refuse_half_loaded()
        self._require_rows(sequences)
        params = SamplingParams(**scoring_arguments())
        inputs = [{"prompt_token_ids": list(sequence)} for sequence in sequences]
        outputs = self._call("generate", inputs, params, use_tqdm=False)
        logprobs = []
        for sequence, output in zip(sequences, outputs, strict=True):
            # The first token has no log-prob.
            pairs = zip(sequence[1:], output.prompt_logprobs[1:], strict=True)
            logprobs.append([entry[token].logprob for token, entry in pairs])
        return logprobs

    def logprobs_of_each(
        self,
        sequences: Sequence[Sequence[int]],
    ) -> list[list[list[float]]]:
        """See `SamplingEngine.logprobs_of_each`."""
        return [self.logprobs(sequences)]

    def layer_reports(self) -> list[LayerReport]:
        """See `SamplingEngine.layer_reports`."""
        return self._call("collective_rpc", "qarl_layers")[0]

    def load(self, stream: Iterable[LowBitTensor], version: int) -> LoadReport:
        """See `SamplingEngine.load`.

        Resets the prefix cache, so that nothing computed with the old weights is reused.
        """
        self._half_loaded = True
        report: LoadReport = self._call("collective_rpc", "qarl_load", args=(stream,))[0]
        self._half_loaded = False
        if not self._llm.reset_prefix_cache():
            raise EngineError(
                "vLLM refused to reset its prefix cache after a publish; requests are still running"
            )
        self.weight_version = version
        return report

    def shared_layers(self) -> "EngineLayers":
        """See `SamplingEngine.shared_layers`."""
        from qarl.quant.kernels.engine_layers import EngineLayers

        models = self._call("collective_rpc", lambda worker: worker.model_runner.get_model())
        return EngineLayers(models[0])

    def close(self) -> None:
        """Free the engine's memory and torch's process group.

        Afterwards this process can start another engine.
        """
        from vllm.distributed import cleanup_dist_env_and_memory

        self._llm.llm_engine.engine_core.shutdown()
        del self._llm
        gc.collect()
        cleanup_dist_env_and_memory()
        VllmEngine._open = False

    def _require_rows(self, sequences: Sequence[Sequence[int]]) -> None:
        tokenizer = self._llm.get_tokenizer()
        self._vocabulary.require(sequences, "a sequence for the engine", tokenizer)

    def _refuse_preemption(self, layers: str) -> None:
        """Make vLLM raise instead of preempting a request.

        It would compute the request's tokens again, together, as a prompt. These layers give them
        other bits then than when they sampled them, and nothing would say from which token on.

        layers: their name, in the plural.
        """
        core: Any = self._llm.llm_engine.engine_core
        if not hasattr(core, "engine_core"):
            raise EngineError(
                f"VLLM_ENABLE_V1_MULTIPROCESSING=1 with a model of {layers}: vLLM's"
                " scheduler is in another process, where nobody sees whether it interrupts a"
                " completion; unset it or set it to 0"
            )

        def preempt(request: Any, *rest: Any, **more: Any) -> None:
            raise EngineError(
                "the cache is full, so vLLM would interrupt a completion and compute it again, with"
                f" other log-probs, because this model has {layers}; raise rollout.kv_cache_gib, or"
                " lower rollout.max_num_seqs"
            )

        core.engine_core.scheduler._preempt_request = preempt

    def _refuse_half_loaded(self) -> None:
        if self._half_loaded:
            raise EngineError(
                "a publish broke off half way: the engine holds parts of two weight versions;"
                " publish again, or restart it"
            )

    def _call(self, method: str, *args, **kwargs):
        """Call a method of vLLM. Its errors become `EngineError`s that name the method."""
        try:
            return getattr(self._llm, method)(*args, **kwargs)
        except EngineError:
            raise
        except Exception as error:
            raise EngineError(
                f"vLLM failed in {method!r} at weight version {self.weight_version}:"
                f" {error_text(error)}"
            ) from error


def vllm_requests(
    prompts: Sequence[Prompt], sampling: Sampling
) -> tuple[list[dict[str, Any]], list[Any]]:
    """Return vLLM's inputs and parameters: `sampling.samples` in a row for each prompt."""
    from vllm import SamplingParams
    from vllm.sampling_params import RepetitionDetectionParams

    from qarl.rollout.vllm.pictures import picture_input

    inputs = []
    params = []
    for j, prompt in enumerate(prompts):
        for k in range(sampling.samples):
            arguments = sampling_arguments(sampling, prompt, j, k)
            loops = arguments.pop("repetition_detection")
            detection = RepetitionDetectionParams(**loops) if loops else None
            if prompt.pictures is None:
                inputs.append({"prompt_token_ids": list(prompt.token_ids)})
            else:
                inputs.append(picture_input(prompt))
            params.append(SamplingParams(**arguments, repetition_detection=detection))
    return inputs, params
