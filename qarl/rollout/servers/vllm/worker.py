"""Loads weight versions from files inside a server, in two steps.

vLLM calls each step in its workers:

    stage   Read and hash the files, and compare the names with the model's. A thread does
            it, requests go on, and nothing is changed.
    load    Load the staged version into the model while the server is paused.

Every fault of a version is thus found before any replica has it: all of them load it, or all keep
the version before.
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
from qarl.quant.kernels.held_weights import HeldWeights
from qarl.rollout.engine import LoadReport
from qarl.rollout.servers.versions import read_version
from qarl.rollout.vllm.names import checkpoint_names, trace_names
from qarl.rollout.vllm.worker import WorkerExtension, compare_names, load_stream


@dataclass(frozen=True)
class StagedVersion:
    """A weight version in host memory, ready to be loaded."""

    version: VersionCache
    """The full version."""
    report: LoadReport
    """The report that loading it will return."""
    keep: bool
    """True if it stays in host memory after it is loaded."""


class ReceivedVersions:
    """The weight versions of one worker: cached, staged and loaded.

    Attributes:
        cached: The version that the model has. None if it is not kept, or if the model's version is
            unsure.
        loaded: Report of the last load, or None.
    """

    def __init__(self, model: nn.Module, config: VllmConfig):
        self._model = model
        self._config = config
        trace_names(model, config)
        self.cached: VersionCache | None = None
        self.loaded: LoadReport | None = None
        self._staging: Future[StagedVersion] | None = None
        self._thread = ThreadPoolExecutor(1, "staging")

    def abandon(self) -> None:
        """Discard what was staged. Waits until the staging thread is done."""
        if self._staging is not None:
            wait([self._staging])
        self._staging = None

    def stage(
        self,
        folder: str,
        digest: str,
        tensor_bytes: int,
        keep: bool,
    ) -> LoadReport | None:
        """Return the report of the staging thread, or None until it is done.

        The first call starts the thread, and `abandon` ends the staging. Re-raises the thread's
        error.

        Args:
            folder: Folder of a weight version (`rollout.servers.versions`), as this machine sees
                it.
            digest: Digest that the version has to have.
            tensor_bytes: Size of its tensors that was announced.
            keep: Whether to keep the version in host memory, so that the next may be a delta from
                it.
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
            self.cached = None  # its memory is overwritten
        version = files.received(tensor_bytes, cached)
        self.cached = None  # it is now the new version, which the model does not have yet
        names = [item.name for item in version.tensors()]
        unconsumed, missing = compare_names(checkpoint_names(self._model).values(), names)
        report = LoadReport(version.digest, unconsumed, missing)
        return StagedVersion(version, report, keep)

    def load(self, digest: str) -> LoadReport | None:
        """Load the staged version with this digest.

        Returns the earlier report if it is loaded already, because the answer may have been lost.
        Returns None if it is neither staged nor loaded. Raises `RuntimeError` if it does not fit
        the model.
        """
        if self._staging is None:
            is_loaded = self.loaded is not None and self.loaded.digest == digest
            return self.loaded if is_loaded else None
        staged = self._staging.result()
        if not staged.report.took_all_of(digest):
            raise RuntimeError(
                f"weight version {staged.version.version} does not fit: {staged.report}"
            )
        # If loading breaks off, the model holds parts of two versions until another is loaded.
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


class ServerExtension(WorkerExtension, HeldWeights):
    """Methods that a server's worker offers. They return plain data, because it travels as JSON."""

    qarl_learner = ""
    """Name of the run that this server belongs to, "" if none."""

    @cached_property
    def qarl_versions(self) -> ReceivedVersions:
        """The versions of this worker, created on first use, because the model has to be loaded."""
        return ReceivedVersions(self.model_runner.get_model(), self.vllm_config)

    def qarl_state(self) -> dict[str, Any]:
        """Return the server's run, the digest of its cached version, and its sampling settings."""
        config = self.vllm_config.model_config
        cached = self.qarl_versions.cached
        return {
            "learner": self.qarl_learner,
            "held": cached and cached.digest,
            "max_model_len": config.max_model_len,
            "tensor_parallel_size": self.vllm_config.parallel_config.tensor_parallel_size,
            "expert_parallel": self.vllm_config.parallel_config.enable_expert_parallel,
            "logprobs_mode": str(config.logprobs_mode),
        }

    def qarl_claim(self, learner: str) -> None:
        """Reserve this server for one run. Raises `ValueError` if it belongs to another."""
        if self.qarl_learner not in ("", learner):
            raise ValueError(f"this server belongs to {self.qarl_learner}")
        self.qarl_learner = learner

    def qarl_release(self) -> None:
        """Free this server from its run."""
        self.qarl_learner = ""
        self.qarl_versions.abandon()
        self.qarl_versions.cached = None

    def qarl_layer_reports(self) -> list[dict[str, Any]]:
        """Return `qarl_layers` as plain data."""
        return [asdict(layer) for layer in self.qarl_layers()]

    def qarl_stage(self, **announced: Any) -> dict[str, Any] | None:
        """See `ReceivedVersions.stage`."""
        return _plain(self.qarl_versions.stage(**announced))

    def qarl_load_staged(self, digest: str) -> dict[str, Any] | None:
        """See `ReceivedVersions.load`."""
        return _plain(self.qarl_versions.load(digest))

    def qarl_abandon(self) -> None:
        """End a publish that was not finished."""
        self.qarl_versions.abandon()


def _plain(report: LoadReport | None) -> dict[str, Any] | None:
    return report and asdict(report)
