"""Inside a server: a weight version is taken from files, in two steps, each a call of vLLM's into
its workers.

    stage     read, hash, compare names with the model's: nothing is changed, and requests go on,
    for a thread does it load      load it into the model, while the server is paused

So what can be wrong with a version is found before any replica has it: all of them take it, or all
keep the one before.
"""

from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig

from qarl.quant.delta import VersionCache
from qarl.rollout.engine import LoadReport
from qarl.rollout.servers.versions import read_version
from qarl.rollout.vllm.names import checkpoint_names, trace_names
from qarl.rollout.vllm.worker import WorkerExtension, compare_names, load_stream


@dataclass(frozen=True)
class StagedVersion:
    """version: whole, in host memory. report: what loading it would say. keep: whether to hold it
    when it is loaded.
    """

    version: VersionCache
    report: LoadReport
    keep: bool


class ReceivedVersions:
    """What one worker has of versions. cached: the version the model has, None where it is not
    kept, or not sure. loaded: what the last load did, or None.
    """

    def __init__(self, model: nn.Module, config: VllmConfig):
        self._model, self._config = model, config
        trace_names(model, config)
        self.cached: VersionCache | None = None
        self.loaded: LoadReport | None = None
        self._staging: Future[StagedVersion] | None = None
        self._thread = ThreadPoolExecutor(1, "staging")

    def abandon(self) -> None:
        """Forget what was staged, when it is."""
        if self._staging is not None:
            wait([self._staging])
        self._staging = None

    def stage(self, folder: str, digest: str, tensor_bytes: int, keep: bool) -> LoadReport | None:
        """What was staged since `abandon`, None while that is under way: begun at the first call,
        in a thread. Raises what it raised.

        folder: of a weight version (`rollout.servers.versions`), as this machine sees it. digest,
        tensor_bytes: that it has to have. keep: whether to hold it in host memory, for the next to
        be a delta from.
        """
        if self._staging is None:
            self._staging = self._thread.submit(
                self._stage, Path(folder), digest, tensor_bytes, keep
            )
        return self._staging.result().report if self._staging.done() else None

    def _stage(self, folder: Path, digest: str, tensor_bytes: int, keep: bool) -> StagedVersion:
        files = read_version(folder)
        if files.digest != digest:
            raise ValueError(f"{folder} holds a version of digest {files.digest}, not {digest}")
        cached = self.cached
        if files.base is None:
            self.cached = None  # it is written over
        version = files.received(tensor_bytes, cached)
        self.cached = None  # the model is still of the version before
        names = [item.name for item in version.tensors()]
        unconsumed, missing = compare_names(checkpoint_names(self._model).values(), names)
        return StagedVersion(
            version, LoadReport(version.digest, len(names), unconsumed, missing), keep
        )

    def load(self, digest: str) -> LoadReport | None:
        """Take the staged version of that digest, or have taken it already (the answer may have
        been lost); None where neither is so. Raises `RuntimeError` where it had to be refused.
        """
        if self._staging is None:
            return self.loaded if self.loaded and self.loaded.digest == digest else None
        staged = self._staging.result()
        if not staged.report.took_all_of(digest):
            raise RuntimeError(
                f"weight version {staged.version.version} does not fit: {staged.report}"
            )
        # it may break off half way, which leaves parts of two versions until another is loaded
        self.loaded = None
        self.loaded = load_stream(self._model, self._config, staged.version.tensors())
        if self.loaded != staged.report:
            raise RuntimeError(
                f"weight version {staged.version.version} was staged as {staged.report} and loaded"
                f" as {self.loaded}"
            )
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        self.cached = staged.version if staged.keep else None
        self.abandon()
        return self.loaded


class ServerExtension(WorkerExtension):
    """What a server's worker answers: plain data, for it goes through JSON. qarl_learner: the run
    this server belongs to, "" for none.
    """

    qarl_learner = ""

    @cached_property
    def qarl_versions(self) -> ReceivedVersions:
        """Begun when it is first asked for, for the model has to be loaded."""
        return ReceivedVersions(self.model_runner.get_model(), self.vllm_config)

    def qarl_state(self) -> dict[str, Any]:
        """Which run it belongs to, the digest of the version it holds, and the settings it samples
        by.
        """
        config, cached = self.vllm_config.model_config, self.qarl_versions.cached
        return {
            "learner": self.qarl_learner,
            "held": cached and cached.digest,
            "max_model_len": config.max_model_len,
            "logprobs_mode": str(config.logprobs_mode),
        }

    def qarl_claim(self, learner: str) -> None:
        """Take this server for one run. Raises `ValueError` where it is another's."""
        if self.qarl_learner not in ("", learner):
            raise ValueError(f"this server belongs to {self.qarl_learner}")
        self.qarl_learner = learner

    def qarl_release(self) -> None:
        """The run is done with this server."""
        self.qarl_learner = ""
        self.qarl_versions.abandon()
        self.qarl_versions.cached = None

    def qarl_layer_reports(self) -> list[dict[str, Any]]:
        """`qarl_layers` as plain data."""
        return [asdict(layer) for layer in self.qarl_layers()]

    def qarl_stage(self, **announced: Any) -> dict[str, Any] | None:
        """See `ReceivedVersions.stage`."""
        return _plain(self.qarl_versions.stage(**announced))

    def qarl_load_staged(self, digest: str) -> dict[str, Any] | None:
        """See `ReceivedVersions.load`."""
        return _plain(self.qarl_versions.load(digest))

    def qarl_abandon(self) -> None:
        """End a publish that was begun and not finished."""
        self.qarl_versions.abandon()


def _plain(report: LoadReport | None) -> dict[str, Any] | None:
    return report and asdict(report)
