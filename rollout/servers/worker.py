"""Inside a server: a weight version is taken from files, through vLLM's weight-transfer phases, in two of them.

    update    read, hash, compare names with the model's: nothing is changed, and requests go on
    finish    load it into the model, while the server is paused

So what can be wrong with a version is found before any replica has it: all of them take it, or all keep the one before.
vLLM 0.32's own backends need CUDA (NCCL or its IPC); these phases work on CPUs too, but for the base class' wait for an
accelerator, which is left out where there is none.
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from quant.digest import StreamDigest
from rollout.engine import LoadReport
from rollout.servers.versions import Version, read_version
from rollout.vllm.worker import WorkerExtension, compare_names, load_stream


@dataclass
class LearnersRun(WeightTransferInitInfo):
    """learner: the run that publishes, by a name no other has."""

    learner: str


@dataclass
class PublishedFiles(WeightTransferUpdateInfo):
    """folder: of a weight version (`rollout.servers.versions`), as this machine sees it."""

    folder: str


class FileTransfer(WeightTransferEngine[LearnersRun, PublishedFiles]):
    """Backend `qarl_files`. learner: the run this server belongs to, "" for none. staged: the version that was read
    and compared, and is to be loaded. loaded: what the last load did, or None. torn: whether one broke off half way,
    which leaves parts of two versions in the model until another is loaded."""

    init_info_cls = LearnersRun
    update_info_cls = PublishedFiles
    supports_draft_weight_update = False

    learner = ""
    staged: Version | None = None
    report: LoadReport | None = None
    loaded: LoadReport | None = None
    torn = False

    def init_transfer_engine(self, init_info: LearnersRun) -> None:
        """Take this server for one run. Raises `ValueError` where it is another's."""
        if self.learner not in ("", init_info.learner):
            raise ValueError(f"this server belongs to {self.learner}")
        self.learner = init_info.learner

    def start_weight_update(self) -> None:
        """Forget what was staged before."""
        self.staged = self.report = None

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Stage a version; the base class waits for an accelerator here, which CPUs are none of."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: PublishedFiles) -> None:
        """Read and hash a version, and compare its names with the model's."""
        version, digest = read_version(Path(update_info.folder)), StreamDigest()
        for item in version.tensors():
            digest.update(item)
        names = [name for tensors in version.files.values() for name in tensors]
        unconsumed, missing = compare_names(self.model, names)
        self.staged = version
        self.report = LoadReport(digest.hexdigest(), len(names), unconsumed, missing)

    def finish_weight_update(self) -> None:
        """Load the staged version. Raises `RuntimeError` where none is staged, or it had to be refused."""
        staged, report = self.staged, self.report
        if staged is None or report is None:
            raise RuntimeError("no weight version is staged")
        if report.digest != staged.digest or report.unconsumed or report.missing:
            raise RuntimeError(f"weight version {staged.version} does not fit: {report}")
        self.torn = True
        self.loaded = load_stream(self.model, self.vllm_config, staged.tensors())
        self.torn = self.loaded != report
        if self.torn:
            raise RuntimeError(f"weight version {staged.version} was staged as {report} and loaded as {self.loaded}")
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        self.start_weight_update()

    def shutdown(self) -> None:
        """The run is done with this server."""
        self.learner = ""
        self.start_weight_update()


class ServerExtension(WorkerExtension):
    """What a server's worker answers beyond vLLM's phases: plain data, for it goes through JSON."""

    def qarl_state(self) -> dict[str, Any]:
        """Which run it belongs to, what it was asked to take and what it took, and the settings it samples by."""
        transfer, config = self._transfer(), self.vllm_config
        return {
            "learner": transfer.learner,
            "staged": transfer.report and asdict(transfer.report),
            "loaded": transfer.loaded and asdict(transfer.loaded),
            "torn": transfer.torn,
            "max_model_len": config.model_config.max_model_len,
            "logprobs_mode": str(config.model_config.logprobs_mode),
        }

    def qarl_layer_reports(self) -> list[dict[str, Any]]:
        """`qarl_layers` as plain data."""
        return [asdict(layer) for layer in self.qarl_layers()]

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
