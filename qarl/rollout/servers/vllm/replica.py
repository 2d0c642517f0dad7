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

_FIRST_WAIT = 0.005
"""Seconds before the second question whether a replica has staged; later waits grow."""
_LONGEST_WAIT = 0.25
"""Upper bound on the seconds between two such questions."""


class VllmReplica(Server):
    """One server that holds the whole policy.

    Every method raises `LostServerError` if the server is out of reach, `AnswerError` if an answer
    broke off or is unusable, and `EngineError` if the server refuses.
    """

    async def admit(self, options: VllmOptions, learner: str, seconds: float | None = None) -> None:
        """Check that the server has the settings of `options` and belongs to no other run.

        Args:
            options: This run's options.
            learner: This run's name.
            seconds: Timeout for the answer. Default: `CONTROL_SECONDS`.
        """
        states = await self.call("qarl_state", CONTROL_SECONDS if seconds is None else seconds)
        for state in states:
            _require_settings(self.url, state, options)
            if state["learner"] not in ("", learner):
                raise EngineError(
                    f"the server at {self.url} takes its weights from {state['learner']}; end that"
                    " run, or give this one servers of its own (restart the server where that run"
                    " is gone for good)"
                )

    async def claim(self, learner: str) -> None:
        """Reserve the server for this run."""
        await self.call("qarl_claim", learner=learner)

    async def release(self) -> None:
        """Give the server back. It keeps its weights."""
        await self.call("qarl_release")

    async def layer_reports(self) -> list[LayerReport]:
        """Return the layers of the server's engine, for the audit."""
        first, *rest = await self.call("qarl_layer_reports")
        if any(layers != first for layers in rest):
            raise EngineError(
                f"the workers of the server at {self.url} have different layers; start it again"
            )
        return [LayerReport(**layer) for layer in first]

    async def sample(
        self,
        prompt: Prompt,
        sampling: Sampling,
        j: int,
        k: int,
        salt: str,
    ) -> Any:
        """Return the server's answer for sample k of prompt j, for `read`.

        salt: salt of its prefix cache, one per weight version.
        """
        return await self.generate(completion_request(prompt, sampling, j, k, salt))

    def read(self, answer: Any, labels: Mapping[str, int]) -> Completion:
        """Return the completion in an answer.

        labels: labels of the weights that may have sampled it, with their versions.
        """
        return read_completion(answer, self.url, labels)

    async def logprobs(
        self, sequence: Sequence[int], salt: str, labels: Mapping[str, int]
    ) -> list[float]:
        """Return the log-probs of tokens 1… of a sequence, in nats."""
        answer = await self.generate(scoring_request(sequence, salt))
        return read_logprobs(answer, sequence, self.url, labels)

    async def held(self) -> list[str | None]:
        """Return the digest of the version that each worker keeps for a delta, or None."""
        states = await self.call("qarl_state")
        return [state["held"] for state in states]

    async def abandon(self) -> None:
        """Discard what was staged."""
        await self.call("qarl_abandon")

    async def send(self, version: Version, run: str, sharing: int) -> str:
        """Copy a version's files to the server and return their folder on the server.

        sharing: number of servers that are sent the files at the same time.
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
        """Have the server read and check a version while it keeps sampling with the present one.

        Args:
            version: The version's manifest.
            folder: Its folder, as the server sees it.
            keep: Whether the next version may be a delta from it.
        """
        # An earlier publish that broke off may have left a staged version.
        await self.call("qarl_abandon", publish_timeout(version.tensor_bytes))
        announced = {
            "folder": folder,
            "digest": version.digest,
            "tensor_bytes": version.tensor_bytes,
            "keep": keep,
        }
        clock = asyncio.get_running_loop().time
        wait = _FIRST_WAIT
        deadline = clock() + min(publish_timeout(version.tensor_bytes), self.seconds)
        # The first call starts the staging; a worker returns None until it is done.
        reports = await self.call("qarl_stage", **announced)
        while None in reports:
            if clock() > deadline:
                raise LostServerError(
                    f"the server at {self.url} has not staged weight version {version.version} in"
                    " time; look at its log"
                )
            await asyncio.sleep(wait)
            wait = min(1.5 * wait, _LONGEST_WAIT)
            reports = await self.call("qarl_stage", **announced)
        return _one(reports, self.url, "staged")

    async def commit(self, version: Version, label: str, in_flight: bool) -> LoadReport:
        """Have the server sample with the staged version, and report it as `label`.

        in_flight: whether pending requests continue with the new weights.
        """
        # The pause empties the prefix cache. Pending requests finish first; in mode "keep" they
        # lose their keys and values, like requests that vLLM preempts, so that their next tokens
        # are computed with the new weights alone.
        if in_flight:
            await self.post("/pause?mode=keep")
        else:
            # A pending request may take as long as any answer.
            await self.post("/pause?mode=wait", seconds=self.seconds)
        seconds = publish_timeout(version.tensor_bytes)
        reports = await self.call("qarl_load_staged", seconds, digest=version.digest)
        report = _one(reports, self.url, "loaded")
        await self.post("/update_weight_version", {"new_version": label})
        await self.post("/resume")
        return report


def _one(reports: list[Any], url: str, kind: str) -> LoadReport:
    """Return the report of a server's workers, which has to be the same for all of them."""
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
    ranks = options.rollout.tensor_parallel_size
    if state["tensor_parallel_size"] != ranks:
        raise EngineError(
            f"the server at {url} has {state['tensor_parallel_size']} ranks, and"
            f" rollout.tensor_parallel_size is {ranks}, by which the learner sums; start it with"
            f" --rollout.tensor_parallel_size {ranks}, or give the run that of the server"
        )
    if state["expert_parallel"] and ranks > 1:
        raise EngineError(
            f"the server at {url} gives each rank whole experts (--enable-expert-parallel), and the"
            " learner sums parts of every expert; start it without"
        )
    if state["max_model_len"] < longest:
        raise EngineError(
            f"the server at {url} takes {state['max_model_len']} tokens, and"
            " rollout.max_prompt_tokens + rollout.max_new_tokens are"
            f" {longest}; start it with --max-model-len {longest}"
        )
