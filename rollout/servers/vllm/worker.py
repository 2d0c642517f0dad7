"""Inside a server: a weight version is taken from files, through vLLM's weight-transfer phases, in two of them.

    update    read, hash, compare names with the model's, make the layers that changed beside the model's: nothing is
              changed, and requests go on, for a thread does it
    finish    put them in the model's place, while the server is paused; a model of which no version can be made
              beside it (`rollout.vllm.staging`) is loaded whole here

So what can be wrong with a version is found before any replica has it: all of them take it, or all keep the one before.
vLLM 0.32's own backends need CUDA (NCCL or its IPC); these phases work on CPUs too, but for the base class' wait for an
accelerator, which is left out where there is none.
"""

from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from qarl.quant.delta import VersionCache
from qarl.rollout.engine import LoadReport
from qarl.rollout.servers.versions import read_version
from qarl.rollout.vllm.staging import Staged, stage, staging_refusal
from qarl.rollout.vllm.worker import WorkerExtension, compare_names, load_stream


@dataclass
class LearnersRun(WeightTransferInitInfo):
    """learner: the run that publishes, by a name no other has."""

    learner: str


@dataclass
class PublishedFiles(WeightTransferUpdateInfo):
    """folder: of a weight version (`rollout.servers.versions`), as this machine sees it. digest, tensor_bytes: that it
    has to have. keep: whether to hold it in host memory, for the next to be a delta from."""

    folder: str
    digest: str
    tensor_bytes: int
    keep: bool


@dataclass(frozen=True)
class StagedVersion:
    """version: whole, in host memory. layers: made beside the model's, None where the model cannot have that."""

    version: VersionCache
    report: LoadReport
    layers: Staged | None


class FileTransfer(WeightTransferEngine[LearnersRun, PublishedFiles]):
    """Backend `qarl_files`. learner: the run this server belongs to, "" for none. held: the version the model has, None
    where it is not kept, or not sure. loaded: what the last load did, or None. torn: whether one broke off half way,
    which leaves parts of two versions in the model until another is loaded."""

    init_info_cls = LearnersRun
    update_info_cls = PublishedFiles
    supports_draft_weight_update = False

    learner = ""
    cached: VersionCache | None = None
    loaded: LoadReport | None = None
    torn = False

    def __init__(self, *arguments: Any, **named: Any):
        super().__init__(*arguments, **named)
        self._announced: PublishedFiles | None = None
        self._staging: Future[StagedVersion] | None = None
        self._thread = ThreadPoolExecutor(1, "staging")

    def init_transfer_engine(self, init_info: LearnersRun) -> None:
        """Take this server for one run. Raises `ValueError` where it is another's."""
        if self.learner not in ("", init_info.learner):
            raise ValueError(f"this server belongs to {self.learner}")
        self.learner = init_info.learner

    def start_weight_update(self) -> None:
        """Forget what was staged before, when it is."""
        if self._staging is not None:
            with suppress(Exception):  # it is not wanted any more
                if layers := self._staging.result().layers:
                    layers.discard()
        self._announced = self._staging = None

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Announce a version; the base class waits for an accelerator here, which CPUs are none of."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: PublishedFiles) -> None:
        """Announce a version; `staged` makes it. (What vLLM calls this in sets its configuration for the process, and
        takes it away afterwards, which what a thread does for longer could not have.)"""
        self._announced = update_info

    def staged(self) -> LoadReport | None:
        """What was staged of the announced version, None while that is under way: begun at the first call, in a thread.
        Raises what it raised, and `RuntimeError` where none is announced."""
        if self._announced is None:
            raise RuntimeError("no weight version is announced")
        if self._staging is None:
            self._staging = self._thread.submit(self._stage, self._announced)
        return self._staging.result().report if self._staging.done() else None

    def staged_already(self) -> LoadReport | None:
        """What is staged and not loaded, if anything."""
        ready = self._staging is not None and self._staging.done() and self._staging.exception() is None
        return self.staged() if ready else None

    def _stage(self, announced: PublishedFiles) -> StagedVersion:
        files = read_version(Path(announced.folder))
        if files.digest != announced.digest:
            raise ValueError(f"{announced.folder} holds a version of digest {files.digest}, not {announced.digest}")
        cached = self.cached
        if files.base is None:
            self.cached = None  # it is written over
        version, changed = files.received(announced.tensor_bytes, cached)
        self.cached = None  # the model is still of the version before
        tensors = {item.name: item.tensor for item in version.tensors()}
        unconsumed, missing = compare_names(self.model, tensors)
        report = LoadReport(version.digest, len(tensors), unconsumed, missing)
        beside = _fits(report, announced) and staging_refusal(self.model) is None
        layers = stage(self.model, self.vllm_config, tensors, changed) if beside else None
        return StagedVersion(version, report, layers)

    def finish_weight_update(self) -> None:
        """Take the staged version. Raises `RuntimeError` where none is staged, or it had to be refused."""
        if self._announced is None or self._staging is None:
            raise RuntimeError("no weight version is staged")
        staged = self._staging.result()
        if not _fits(staged.report, self._announced):
            raise RuntimeError(f"weight version {staged.version.version} does not fit: {staged.report}")
        self.torn = True
        if staged.layers is None:
            self.loaded = load_stream(self.model, self.vllm_config, staged.version.tensors())
        else:
            staged.layers.swap()
            self.loaded = staged.report
        self.torn = self.loaded != staged.report
        if self.torn:
            raise RuntimeError(
                f"weight version {staged.version.version} was staged as {staged.report} and loaded as {self.loaded}"
            )
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        self.cached = staged.version if self._announced.keep else None
        self.start_weight_update()

    def shutdown(self) -> None:
        """The run is done with this server."""
        self.learner = ""
        self.start_weight_update()
        self.cached = None


def _fits(report: LoadReport, announced: PublishedFiles) -> bool:
    return report.digest == announced.digest and not report.unconsumed and not report.missing


class ServerExtension(WorkerExtension):
    """What a server's worker answers beyond vLLM's phases: plain data, for it goes through JSON."""

    def qarl_state(self) -> dict[str, Any]:
        """Which run it belongs to, what it holds, was asked to take and took, and the settings it samples by."""
        transfer, config = self._transfer(), self.vllm_config
        return {
            "learner": transfer.learner,
            "held": transfer.cached and transfer.cached.digest,
            "staged": _plain(transfer.staged_already()),
            "loaded": _plain(transfer.loaded),
            "torn": transfer.torn,
            "max_model_len": config.model_config.max_model_len,
            "logprobs_mode": str(config.model_config.logprobs_mode),
        }

    def qarl_layer_reports(self) -> list[dict[str, Any]]:
        """`qarl_layers` as plain data."""
        return [asdict(layer) for layer in self.qarl_layers()]

    def qarl_stage(self) -> dict[str, Any] | None:
        """What was staged of the version that was announced; None while that is under way."""
        return _plain(self._transfer().staged())

    def qarl_abandon(self) -> None:
        """End a publish that was begun and not finished: vLLM's phases have none for that."""
        transfer: Any = self
        self._transfer().start_weight_update()
        self._transfer().reset_weight_update_target()
        transfer._weight_update_active = False

    def _transfer(self) -> FileTransfer:
        transfer = getattr(self, "weight_transfer_engine", None)
        if not isinstance(transfer, FileTransfer):
            raise RuntimeError(
                f"the server's weight transfer is {type(transfer).__name__}, not {FileTransfer.__name__}"
            )
        return transfer


def _plain(report: LoadReport | None) -> dict[str, Any] | None:
    return report and asdict(report)
