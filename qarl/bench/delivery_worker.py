"""One scheme's process of `qarl bench delivery`: versions handed to a running vLLM, whole and as deltas.

    python -m qarl.bench.delivery_worker '{"scheme": NAME, …}'     (see `Job`)

prints one line of JSON (`Delivered`) last. A process of its own, for vLLM allows one engine in each.
"""

import dataclasses
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import Qwen3Config

from configs.schema.run import RolloutConfig
from learner.optim.rounding import stochastic_round
from qarl.bench.learner.batch import END, PAD, qwen3, write_tokenizer
from qarl.bench.publish import random_masters
from quant.delta import HeldVersion
from quant.digest import StreamDigest
from quant.layers.context import LayerContext
from quant.model.low_bit_model import LowBitModel
from quant.schemes import get_scheme
from quant.types import LowBitTensor
from rollout.open import open_engine
from sync.export import export_checkpoint

SHAPES: dict[str, dict[str, Any]] = {
    "0.6b": {**qwen3(151936, 1024, 3072, 28, 16, 128), "num_key_value_heads": 8},
    "tiny": qwen3(512, 128, 256, 2, 4, 32),
}
_MOVED = 0.3
"""Root mean square of AdamW's updates over the learning rate, once its averages have settled over unlike gradients."""


@dataclass(frozen=True)
class Job:
    """shape: one of `SHAPES`. lr: of the step between two versions. folder: where versions are written."""

    scheme: str
    shape: str
    lr: float
    rounds: int
    folder: str


@dataclass(frozen=True)
class Delivered:
    """Of one scheme: bytes of a whole version and of a delta, and seconds by the name of the work, medians of all
    rounds. layers: that a delta made anew, at most."""

    scheme: str
    full_bytes: int
    delta_bytes: int
    layers: int
    seconds: dict[str, float]


class _Clock:
    """Seconds of named work, over rounds."""

    def __init__(self) -> None:
        self._seconds: dict[str, list[float]] = {}

    @contextmanager
    def of(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self._seconds.setdefault(name, []).append(time.perf_counter() - start)

    def medians(self) -> dict[str, float]:
        return {name: statistics.median(seconds) for name, seconds in self._seconds.items()}


def run(job: Job) -> Delivered:
    """Start an engine on a random model's export, then hand it version after version."""
    with tempfile.TemporaryDirectory(prefix="qarl-bench-", dir=job.folder) as temporary:
        folder = Path(temporary)
        config = Qwen3Config(**SHAPES[job.shape], pad_token_id=PAD, eos_token_id=END)
        write_tokenizer(config.vocab_size, folder)
        masters = random_masters(config, torch.bfloat16)
        model = LowBitModel(masters, get_scheme(job.scheme), LayerContext(torch.bfloat16, "reference"))
        export_checkpoint(model, folder, folder / "start")
        rollout = RolloutConfig(max_prompt_tokens=32, max_new_tokens=32, max_num_seqs=4)
        with open_engine(folder / "start", rollout, "bfloat16") as engine:
            deliver = _from_disk if job.scheme == "bf16" else _published
            return deliver(model, engine, folder, _Clock(), job)


def _from_disk(model: LowBitModel, engine: Any, folder: Path, clock: _Clock, job: Job) -> Delivered:
    """What there is without QaRL: the checkpoint is saved, and vLLM reloads it."""
    for number in range(job.rounds):
        with clock.of("write"):
            digest = export_checkpoint(model, folder, folder / f"saved-{number}")
        with clock.of("load, paused"):
            engine.reload_from(folder / f"saved-{number}")
        (folder / f"saved-{number}" / "model.safetensors").unlink()
    return Delivered(
        scheme=job.scheme, full_bytes=digest.bytes, delta_bytes=digest.bytes, layers=0, seconds=clock.medians()
    )


def _published(model: LowBitModel, engine: Any, folder: Path, clock: _Clock, job: Job) -> Delivered:
    sender, receiver = (HeldVersion(0, model.low_bit_tensors()) for _ in range(2))
    sizes, layers = [], 0
    generator = torch.Generator().manual_seed(1)
    for version in range(1, job.rounds + 1):
        _step(model, job.lr, generator)
        _whole(model, engine, folder / "whole.safetensors", version, clock)
        with clock.of("delta: encode"):
            delta = sender.advance(version, model.low_bit_tensors())
        with clock.of("delta: write"):
            (folder / "delta").write_bytes(delta)
        with clock.of("delta: read and apply"):
            changed = receiver.apply((folder / "delta").read_bytes(), version, sender.digest)
        tensors = {item.name: item.tensor for item in receiver.tensors()}
        with clock.of("delta: make layers"):
            staged = engine.stage(tensors, changed)
        sizes.append(len(delta))
        layers = max(layers, staged.layers)
        with clock.of("delta: swap, paused"):
            staged.swap()
    return Delivered(
        scheme=job.scheme,
        full_bytes=sender.bytes,
        delta_bytes=round(statistics.median(sizes)),
        layers=layers,
        seconds=clock.medians(),
    )


def _whole(model: LowBitModel, engine: Any, file: Path, version: int, clock: _Clock) -> None:
    items = list(model.low_bit_tensors())
    target = [np.empty(item.tensor.nbytes, np.uint8) for item in items]
    for octets in target:
        octets.fill(1)  # pages of its own
    with clock.of("copy once"):
        for item, octets in zip(items, target, strict=True):
            np.copyto(octets, item.tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy())
    del target
    with clock.of("write"):
        digest = StreamDigest()
        for item in items:
            digest.update(item)
        save_file({item.name: item.tensor.detach().contiguous() for item in items}, file)
    with safe_open(file, "pt") as tensors:
        with clock.of("read and hash"):
            received = StreamDigest()
            for item in items:
                received.update(LowBitTensor(item.name, tensors.get_tensor(item.name)))
        assert received.hexdigest() == digest.hexdigest()
        with clock.of("load, paused"):
            engine.load((LowBitTensor(i.name, tensors.get_tensor(i.name)) for i in items), version)


@torch.no_grad()
def _step(model: LowBitModel, lr: float, generator: torch.Generator) -> None:
    """Masters in bfloat16, moved as by AdamW and rounded stochastically, and a version made of them."""
    for master in model.masters.values():
        for part in master.view(-1).split(1 << 22):
            moved = part.float() + lr * _MOVED * torch.randn(part.shape, generator=generator)
            part.copy_(stochastic_round(moved, torch.bfloat16, generator))
    model.refresh()


if __name__ == "__main__":
    sys.stdout.write(json.dumps(dataclasses.asdict(run(Job(**json.loads(sys.argv[1]))))) + "\n")
