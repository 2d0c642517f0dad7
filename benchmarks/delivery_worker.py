"""Worker process of `python -m benchmarks delivery` for one scheme.

    python -m benchmarks.delivery_worker '{"scheme": NAME, …}'     (see `Job`)

It sends versions to a running vLLM server, whole and as deltas, and prints one line of JSON
(`Delivered`) last. It is a separate process because vLLM allows one engine per process.
"""

import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from inspect import iscoroutinefunction
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from transformers import PretrainedConfig, Qwen3Config

from benchmarks.models import END, PAD, qwen3, write_tokenizer
from benchmarks.publish import moe_config, random_masters
from qarl.bench.process import answer_line
from qarl.configs.schema.rollout import RolloutConfig
from qarl.learner.optim.rounding import stochastic_round
from qarl.quant.layers.context import LayerContext
from qarl.quant.model.low_bit_model import LowBitModel
from qarl.quant.schemes import get_scheme
from qarl.rollout.open import open_engine
from qarl.rollout.servers.sender import VersionSender
from qarl.rollout.servers.versions import read_version
from qarl.rollout.servers.vllm.replica import VllmReplica
from qarl.sync.export import export_checkpoint

_QWEN3: dict[str, dict[str, Any]] = {
    "0.6b": {**qwen3(151936, 1024, 3072, 28, 16, 128), "num_key_value_heads": 8},
    "tiny": qwen3(512, 128, 256, 2, 4, 32),
}
_WORKS = (
    (VersionSender, "write", "write"),
    (VllmReplica, "send", "send"),
    (VllmReplica, "stage", "stage"),
    (VllmReplica, "commit", "pause"),
)
"""Methods that a publish calls, each with the name of its seconds."""
_MOVED = 0.3
"""Root mean square of AdamW's updates divided by the learning rate.

This is the value after its averages have settled over gradients that differ from step to step.
"""


@dataclass(frozen=True)
class Job:
    """Task of one worker process."""

    scheme: str
    shape: str
    """One of `delivery.SHAPES`."""
    lr: float
    """Learning rate of the step between two versions."""
    rounds: int
    folder: str
    """Folder in which versions are written."""
    transfer: str
    """Transfer to the server, as in `rollout.server_transfer`."""


@dataclass(frozen=True)
class Delivered:
    """Figures of one scheme."""

    scheme: str
    full_bytes: int
    """Bytes of a whole version."""
    unquantized_bytes: int
    """Bytes of a whole version's embedding and output head."""
    delta_bytes: int
    """Bytes of a delta, median of all rounds."""
    bf16_bytes: int
    """Bytes of the bf16 checkpoint."""
    seconds: dict[str, float]
    """Seconds by name of the work, medians of all rounds."""


class _Clock:
    """Stopwatch that collects the seconds of named work over rounds."""

    def __init__(self) -> None:
        self._seconds: dict[str, list[float]] = {}

    @contextmanager
    def of(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.add(name, time.perf_counter() - start)

    @contextmanager
    def of_calls(self, owner: type, method: str, name: str) -> Iterator[None]:
        """Time every call of a method inside the context."""
        original = getattr(owner, method)

        def at_once(*arguments: Any) -> Any:
            with self.of(name):
                return original(*arguments)

        async def awaited(*arguments: Any) -> Any:
            with self.of(name):
                return await original(*arguments)

        with patch.object(owner, method, awaited if iscoroutinefunction(original) else at_once):
            yield

    def add(self, name: str, seconds: float) -> None:
        """Add the seconds of one round."""
        self._seconds.setdefault(name, []).append(seconds)

    def medians(self) -> dict[str, float]:
        return {name: statistics.median(seconds) for name, seconds in self._seconds.items()}


def run(job: Job) -> Delivered:
    """Start both engines and publish version after version to them.

    One is a server on a random model's export, the other a bf16 engine in this process.
    """
    with (
        tempfile.TemporaryDirectory(prefix="qarl-bench-", dir=job.folder) as temporary,
        ExitStack() as engines,
    ):
        folder = Path(temporary)
        config = _config(job.shape)
        write_tokenizer(config.vocab_size, folder)

        def started(scheme: str, **servers: Any) -> tuple[LowBitModel, Any]:
            masters = random_masters(config, torch.bfloat16)
            model = LowBitModel(
                masters, get_scheme(scheme), LayerContext(torch.bfloat16, "reference")
            )
            start = folder / ("served" if servers else "bf16") / "start"
            export_checkpoint(model, folder, start)
            rollout = RolloutConfig(
                max_prompt_tokens=32, max_new_tokens=32, max_num_seqs=4, **servers
            )
            engine = engines.enter_context(
                open_engine(start, rollout, "bfloat16", use_servers=True)
            )
            shutil.rmtree(start)  # the folder may be in memory
            return model, engine

        served = started(job.scheme, servers=1, server_full_every=2, server_transfer=job.transfer)
        plain = started("bf16")
        # the codes are already computed, so both models can share one set of masters
        for name, master in plain[0].masters.items():
            master.data = served[0].masters[name].data
        return _measured(*served, *plain, folder, job)


def _config(shape: str) -> PretrainedConfig:
    if shape == "1b-moe":
        config: PretrainedConfig = moe_config(1e9)
    else:
        config = Qwen3Config(**_QWEN3[shape])
    config.pad_token_id = PAD
    config.eos_token_id = END
    return config


def _measured(
    model: LowBitModel,
    server: Any,
    plain: LowBitModel,
    engine: Any,
    folder: Path,
    job: Job,
) -> Delivered:
    """Measure `job.rounds` rounds, each with one publish of every kind."""
    clock = _Clock()
    generator = torch.Generator().manual_seed(1)
    sizes: dict[str, list[int]] = {"bf16": [], "whole": [], "delta": []}
    for number in range(job.rounds):
        sizes["bf16"].append(_from_disk(plain, engine, folder, clock))
        for kind, version in (("whole", 2 * number + 1), ("delta", 2 * number + 2)):
            _step(model, job.lr, generator)
            if kind == "whole":
                _copy_once(model, clock)
            with ExitStack() as timed:
                for owner, method, work in _WORKS:
                    timed.enter_context(clock.of_calls(owner, method, f"{kind}: {work}"))
                report = server.load(model.low_bit_tensors(), version)
            assert not report.missing + report.unconsumed, (
                f"version {version} was refused: {report}"
            )
            written = read_version(server._sender._folder / f"version-{version}")
            assert (written.base is None) == (kind == "whole"), (
                f"version {version} was sent as {written}"
            )
            sizes[kind].append(written.bytes)
    return Delivered(
        scheme=job.scheme,
        full_bytes=sizes["whole"][0],
        unquantized_bytes=_unquantized(model),
        delta_bytes=round(statistics.median(sizes["delta"])),
        bf16_bytes=sizes["bf16"][0],
        seconds=clock.medians(),
    )


def _from_disk(model: LowBitModel, engine: Any, folder: Path, clock: _Clock) -> int:
    """Save the checkpoint, reload it from disk in this process, and return its bytes.

    This is how weights are updated without QaRL.
    """
    saved = folder / "saved"
    with clock.of("bf16: write"):
        digest = export_checkpoint(model, folder, saved)
    with clock.of("bf16: load, paused"):
        engine._llm.collective_rpc("reload_weights", kwargs={"weights_path": str(saved)})
    shutil.rmtree(saved)
    return digest.bytes


def _unquantized(model: LowBitModel) -> int:
    ends = ("embed_tokens.weight", "lm_head.weight")
    unquantized = (item for item in model.low_bit_tensors() if item.name.endswith(ends))
    return sum(item.tensor.nbytes for item in unquantized)


def _copy_once(model: LowBitModel, clock: _Clock) -> None:
    items = list(model.low_bit_tensors())
    target = [np.empty(item.tensor.nbytes, np.uint8) for item in items]
    for octets in target:
        octets.fill(1)  # allocates the pages, so that the timed copy does not
    with clock.of("copy once"):
        for item, octets in zip(items, target, strict=True):
            flat = item.tensor.detach().contiguous().reshape(-1)
            np.copyto(octets, flat.view(torch.uint8).numpy())


@torch.no_grad()
def _step(model: LowBitModel, lr: float, generator: torch.Generator) -> None:
    """Move the bfloat16 masters as AdamW would, and make a version of them.

    The moved values are rounded stochastically.
    """
    for master in model.masters.values():
        for part in master.view(-1).split(1 << 22):
            moved = part.float() + lr * _MOVED * torch.randn(part.shape, generator=generator)
            part.copy_(stochastic_round(moved, torch.bfloat16, generator))
    model.refresh()


if __name__ == "__main__":
    task = Job(**json.loads(sys.argv[1]))
    sys.stdout.write(answer_line(run(task)))
