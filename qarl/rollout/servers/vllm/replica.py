"""One of vLLM's servers as a replica: versions by calls into its workers, tokens over its HTTP."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlencode

from pydantic import TypeAdapter

from qarl.quant.types import LayerReport
from qarl.rollout.engine import AnswerError, EngineError, LoadReport, LostServerError
from qarl.rollout.servers.versions import MANIFEST, Version, publish_timeout
from qarl.rollout.servers.vllm.answers import (
    completion_request,
    read_completion,
    read_logprobs,
    scoring_request,
)
from qarl.rollout.servers.vllm.client import CONTROL_SECONDS, Server
from qarl.rollout.servers.vllm.receive import VERSIONS
from qarl.rollout.types import Completion, Prompt, Sampling
from qarl.rollout.vllm.options import VllmOptions

_FIRST_WAIT, _LONGEST_WAIT = 0.005, 0.25
"""Seconds between questions whether a replica has staged."""


class VllmReplica(Server):
    """One server that holds the whole policy. Every method raises `LostServerError` where it is out
    of reach, `AnswerError` where an answer broke off or cannot be used, `EngineError` where it
    refuses.
    """

    async def admit(self, options: VllmOptions, learner: str, seconds: float | None = None) -> None:
        """Refuse one that has other settings than `options`, or belongs to another run. learner:
        this run's name. seconds: that it may take to answer.
        """
        state, *_ = await self.call("qarl_state", CONTROL_SECONDS if seconds is None else seconds)
        _require_settings(self.url, state, options)
        if state["learner"] not in ("", learner):
            raise EngineError(
                f"the server at {self.url} takes its weights from {state['learner']}; end that run,"
                " or give this one servers of its own (restart the server where that run is gone"
                " for good)"
            )

    async def claim(self, learner: str) -> None:
        """Make it this run's."""
        await self.call("qarl_claim", learner=learner)

    async def release(self) -> None:
        """Give it back; it goes on with the weights it has."""
        await self.call("qarl_release")

    async def layers(self) -> list[LayerReport]:
        """Of its engine, for the audit."""
        first, *others = await self.call("qarl_layer_reports")
        if any(layers != first for layers in others):
            raise EngineError(
                f"the workers of the server at {self.url} have different layers; start it again"
            )
        return [LayerReport(**layer) for layer in first]

    async def sample(self, prompt: Prompt, sampling: Sampling, j: int, k: int, salt: str) -> Any:
        """Its answer to sample k of prompt j, for `read`. salt: of its prefix cache, one a weight
        version.
        """
        return await self.generate(completion_request(prompt, sampling, j, k, salt))

    def read(self, answer: Any, labels: Mapping[str, int]) -> Completion:
        """The completion in an answer. labels: of the weights that may have sampled it, and their
        versions.
        """
        return read_completion(answer, self.url, labels)

    async def logprobs(
        self, sequence: Sequence[int], salt: str, labels: Mapping[str, int]
    ) -> list[float]:
        """Of tokens 1… of a sequence, in nats."""
        return read_logprobs(
            await self.generate(scoring_request(sequence, salt)),
            sequence,
            self.url,
            labels,
        )

    async def held(self) -> list[str | None]:
        """The digest of the version that each of its workers keeps for a delta, None for
        nothing.
        """
        return [state["held"] for state in await self.call("qarl_state")]

    async def abandon(self) -> None:
        """Forget what was staged."""
        await self.call("qarl_abandon")

    async def send(self, version: Version, run: str, sharing: int) -> str:
        """Copy a version's files; the folder they are in there. sharing: servers that are sent them
        at once.
        """
        answer: Any = None
        for name in (MANIFEST, *version.names):
            file = version.folder / name
            path = f"{VERSIONS}/{version.version}/{name}?{urlencode({'run': run})}"
            answer = await self.upload(path, file, publish_timeout(sharing * file.stat().st_size))
        if not answer["folder"]:
            raise AnswerError(
                f"the server at {self.url} lacks files of weight version {version.version} that it"
                " was sent"
            )
        return answer["folder"]

    async def stage(self, version: Version, folder: str, keep: bool) -> LoadReport:
        """Read and check a version beside the present one. keep: whether the next may be a delta
        from it.
        """
        # what a publish that broke off has left
        await self.call("qarl_abandon", publish_timeout(version.tensor_bytes))
        announced = {
            "folder": folder,
            "digest": version.digest,
            "tensor_bytes": version.tensor_bytes,
            "keep": keep,
        }
        clock, wait = asyncio.get_running_loop().time, _FIRST_WAIT
        deadline = clock() + min(publish_timeout(version.tensor_bytes), self.seconds)
        while None in (reports := await self.call("qarl_stage", **announced)):
            if clock() > deadline:
                raise LostServerError(
                    f"the server at {self.url} has not staged weight version {version.version} in"
                    " time; look at its log"
                )
            await asyncio.sleep(wait)
            wait = min(1.5 * wait, _LONGEST_WAIT)
        return _one(reports, self.url, "staged")

    async def commit(self, version: Version, label: str, in_flight: bool) -> LoadReport:
        """Sample by what was staged, and name it `label`. in_flight: requests under way go on by
        it.
        """
        # Its prefix cache is emptied. Requests end first; or they lose their keys and values too,
        # as those that vLLM preempts, and so their next tokens have none of the weights before.
        await self.post(f"/pause?mode={'keep' if in_flight else 'wait'}")
        seconds = publish_timeout(version.tensor_bytes)
        reports = await self.call("qarl_load_staged", seconds, digest=version.digest)
        report = _one(reports, self.url, "loaded")
        await self.post("/update_weight_version", {"new_version": label})
        await self.post("/resume")
        return report


def _one(reports: list[Any], url: str, kind: str) -> LoadReport:
    """What all of a server's workers report, which has to be the same."""
    if any(report != reports[0] for report in reports):
        raise EngineError(
            f"the workers of the server at {url} {kind} different versions: {reports}"
        )
    if reports[0] is None:
        raise LostServerError(
            f"the server at {url} no longer holds what it staged: it was restarted"
        )
    return TypeAdapter(LoadReport).validate_python(reports[0])


def _require_settings(url: str, state: dict[str, Any], options: VllmOptions) -> None:
    mode = options.logprobs_mode
    longest = options.rollout.longest
    if state["logprobs_mode"] != mode:
        raise EngineError(
            f"the server at {url} gives {state['logprobs_mode']}, and rollout.temperature needs"
            f" {mode}; start it with --logprobs-mode {mode}"
        )
    if state["max_model_len"] < longest:
        raise EngineError(
            f"the server at {url} takes {state['max_model_len']} tokens, and"
            " rollout.max_prompt_tokens + rollout.max_new_tokens are"
            f" {longest}; start it with --max-model-len {longest}"
        )
