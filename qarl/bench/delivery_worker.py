"""One scheme's process of `qarl bench delivery`: versions handed to a running vLLM server, whole and as deltas.

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
from transformers import PretrainedConfig, Qwen3Config

from configs.schema.run import RolloutConfig
from learner.optim.rounding import stochastic_round
from qarl.bench.learner.batch import END, PAD, qwen3, write_tokenizer
from qarl.bench.publish import moe_config, random_masters
from quant.layers.context import LayerContext
from quant.model.low_bit_model import LowBitModel
from quant.schemes import get_scheme
from rollout.open import open_engine
from sync.export import export_checkpoint

_QWEN3: dict[str, dict[str, Any]] = {
    "0.6b": {**qwen3(151936, 1024, 3072, 28, 16, 128), "num_key_value_heads": 8},
    "tiny": qwen3(512, 128, 256, 2, 4, 32),
}
_MOVED = 0.3
"""Root mean square of AdamW's updates over the learning rate, once its averages have settled over unlike gradients."""


@dataclass(frozen=True)
class Job:
    """shape: one of `delivery.SHAPES`. lr: of the step between two versions. folder: where versions are written."""

    scheme: str
    shape: str
    lr: float
    rounds: int
    folder: str


@dataclass(frozen=True)
class Delivered:
    """Of one scheme: bytes of a whole version and of a delta, and seconds by the name of the work, medians of all
    rounds. unquantized_bytes: of a whole version's embedding and output head."""

    scheme: str
    full_bytes: int
    unquantized_bytes: int
    delta_bytes: int
    seconds: dict[str, float]


class _Clock:
    """Seconds of named work, over rounds."""

    def __init__(self) -> None:
        self._seconds: dict[str, list[float]] = {}

    @contextmanager
    def of(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.add(name, time.perf_counter() - start)

    def add(self, name: str, seconds: float) -> None:
        """One round's."""
        self._seconds.setdefault(name, []).append(seconds)

    def medians(self) -> dict[str, float]:
        return {name: statistics.median(seconds) for name, seconds in self._seconds.items()}


def run(job: Job) -> Delivered:
    """Start an engine on a random model's export, then hand it version after version."""
    with tempfile.TemporaryDirectory(prefix="qarl-bench-", dir=job.folder) as temporary:
        folder = Path(temporary)
        config = _config(job.shape)
        write_tokenizer(config.vocab_size, folder)
        masters = random_masters(config, torch.bfloat16)
        model = LowBitModel(masters, get_scheme(job.scheme), LayerContext(torch.bfloat16, "reference"))
        export_checkpoint(model, folder, folder / "start")
        plain = job.scheme == "bf16"
        served: dict[str, Any] = {} if plain else {"servers": 1, "server_full_every": 2}
        rollout = RolloutConfig(max_prompt_tokens=32, max_new_tokens=32, max_num_seqs=4, **served)
        with open_engine(folder / "start", rollout, "bfloat16", placed=True) as engine:
            return (_from_disk if plain else _published)(model, engine, folder, _Clock(), job)


def _config(shape: str) -> PretrainedConfig:
    if shape == "1b-moe":
        config: PretrainedConfig = moe_config(1e9)
    else:
        config = Qwen3Config(**_QWEN3[shape])
    config.pad_token_id, config.eos_token_id = PAD, END
    return config


def _from_disk(model: LowBitModel, engine: Any, folder: Path, clock: _Clock, job: Job) -> Delivered:
    """What there is without QaRL: the checkpoint is saved, and vLLM reloads it, here in this process."""
    for number in range(job.rounds):
        with clock.of("write"):
            digest = export_checkpoint(model, folder, folder / f"saved-{number}")
        with clock.of("load, paused"):
            engine.reload_from(folder / f"saved-{number}")
        (folder / f"saved-{number}" / "model.safetensors").unlink()
    return Delivered(
        scheme=job.scheme,
        full_bytes=digest.bytes,
        unquantized_bytes=_unquantized(model),
        delta_bytes=digest.bytes,
        seconds=clock.medians(),
    )


def _published(model: LowBitModel, engine: Any, folder: Path, clock: _Clock, job: Job) -> Delivered:
    """By way of a server: of two versions that follow each other the first is sent whole, the second as a delta."""
    sizes: dict[str, list[int]] = {"whole": [], "delta": []}
    generator = torch.Generator().manual_seed(1)
    for version in range(1, 2 * job.rounds + 1):
        _step(model, job.lr, generator)
        kind = "delta" if version % 2 == 0 else "whole"
        if kind == "whole":
            _copy_once(model, clock)
        engine.load(model.low_bit_tensors(), version)
        sent = engine.sent
        assert sent.whole == (kind == "whole"), f"version {version} was sent as {sent}"
        sizes[kind].append(sent.bytes)
        for work in ("write", "stage", "pause"):
            clock.add(f"{kind}: {work}", getattr(sent, work))
    return Delivered(
        scheme=job.scheme,
        full_bytes=sizes["whole"][0],
        unquantized_bytes=_unquantized(model),
        delta_bytes=round(statistics.median(sizes["delta"])),
        seconds=clock.medians(),
    )


def _unquantized(model: LowBitModel) -> int:
    ends = ("embed_tokens.weight", "lm_head.weight")
    return sum(item.tensor.nbytes for item in model.low_bit_tensors() if item.name.endswith(ends))


def _copy_once(model: LowBitModel, clock: _Clock) -> None:
    items = list(model.low_bit_tensors())
    target = [np.empty(item.tensor.nbytes, np.uint8) for item in items]
    for octets in target:
        octets.fill(1)  # pages of its own
    with clock.of("copy once"):
        for item, octets in zip(items, target, strict=True):
            np.copyto(octets, item.tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy())


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
