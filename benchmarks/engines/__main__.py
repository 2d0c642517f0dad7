"""`python -m benchmarks.engines`: compare engines of several processes.

Prints a row per engine: bytes a process sends in an update of two micro-batches (loopback counters
of a network namespace, so what TCP carried), seconds, memory above the masters' start, how far
masters are from one process's, and whether a checkpoint goes from these processes to half as many.
"""

import argparse
import ctypes
import fcntl
import gc
import json
import os
import signal
import socket
import struct
import sys
import tempfile
import time
import traceback
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.engines.engines import ENGINES, SETTINGS, Gradients, import_all
from qarl.cli.options import write_json
from qarl.report.record import record

COMMAND = "python -m benchmarks.engines"
UPDATES = 3
MICRO_BATCHES = 2


def dense() -> dict[str, tuple[int, ...]]:
    """Return shapes of a dense toy of 14 million parameters."""
    shapes: dict[str, tuple[int, ...]] = {"embed": (2048, 512)}
    for layer in range(4):
        sizes = {"q": (512, 512), "k": (256, 512), "v": (256, 512), "o": (512, 512)}
        mlp = {"gate": (1536, 512), "up": (1536, 512), "down": (512, 1536), "norm": (512,)}
        shapes |= {f"layer{layer}.{name}": shape for name, shape in {**sizes, **mlp}.items()}
    return shapes


def mixture() -> dict[str, tuple[int, ...]]:
    """Return shapes of a mixture of 16 experts a layer, 10 million parameters."""
    shapes: dict[str, tuple[int, ...]] = {"embed": (2048, 256)}
    for layer in range(2):
        each = {"q": (256, 256), "o": (256, 256), "router": (16, 256), "norm": (256,)}
        stacks = {"gate_up": (16, 768, 256), "down": (16, 256, 384)}
        shapes |= {f"layer{layer}.{name}": shape for name, shape in {**each, **stacks}.items()}
    return shapes


MODELS = {"dense": dense, "mixture": mixture}


def masters_of(shapes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Return the same random masters in every process, fp32."""
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def gradients_of(shapes: dict[str, tuple[int, ...]], part: int) -> Gradients:
    """Yield the gradients of one of an update's parts, from the last master to the first."""

    def gradient(number: int, shape: tuple[int, ...]) -> Tensor:
        generator = torch.Generator().manual_seed(1000 * part + number)
        return torch.randn(shape, generator=generator)

    for number, (name, shape) in reversed([*enumerate(shapes.items())]):
        yield name, partial(gradient, number, shape)


def updated_by_one(shapes: dict[str, tuple[int, ...]], world: int) -> dict[str, Tensor]:
    """Return the masters after `UPDATES` updates in one process."""
    masters = masters_of(shapes)
    for p in masters.values():
        p.requires_grad_()
    optimizer = torch.optim.AdamW(masters.values(), fused=True, **SETTINGS)
    for update in range(UPDATES):
        for part in range(world * MICRO_BATCHES):
            for name, gradient in gradients_of(shapes, update * world * MICRO_BATCHES + part):
                grad = masters[name].grad
                masters[name].grad = gradient() if grad is None else grad.add_(gradient())
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach() for name, p in masters.items()}


def status(field: str) -> int:
    """Return a field of this process's status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def loopback() -> int:
    """Return the bytes that all processes of this network namespace have sent over loopback."""
    line = next(x for x in Path("/proc/net/dev").read_text().splitlines() if "lo:" in x)
    return int(line.split(":")[1].split()[8])


def settled() -> int:
    """Return `loopback` once every process has arrived and acknowledgements are through."""
    dist.barrier()
    time.sleep(0.2)
    value = loopback()
    time.sleep(0.1)
    dist.barrier()
    return value


def work(engine: Any, model: str, folder: Path, resumes: bool) -> dict[str, Any]:
    """Run one engine in this process, and return its row."""
    world, rank = dist.get_world_size(), dist.get_rank()
    shapes = MODELS[model]()
    sizes = 4 * sum(torch.Size(shape).numel() for shape in shapes.values())
    before_masters = status("RssAnon")
    holder = engine(masters_of(shapes))
    if resumes:
        holder.load(folder / "checkpoint")
        expected = torch.load(folder / "full.pt")
        full = holder.full()
        return {"resumed": all(torch.equal(full[key], expected[key]) for key in full)}
    sent, seconds = [], []
    for update in range(UPDATES):
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        before = settled()
        held = status("RssAnon") - before_masters
        Path("/proc/self/clear_refs").write_text("5")  # a new high-water mark
        start = time.perf_counter()
        for micro in range(MICRO_BATCHES):
            part = (update * MICRO_BATCHES + micro) * world + rank
            holder.backward(gradients_of(shapes, part), micro == MICRO_BATCHES - 1)
        holder.step()
        dist.barrier()
        seconds.append(time.perf_counter() - start)
        peak = status("VmHWM") - status("RssFile") - status("RssShmem") - before_masters
        sent.append((settled() - before) / world)
    full = holder.full()
    holder.save(folder / "checkpoint")
    if rank == 0:
        torch.save(full, folder / "full.pt")
    expected = updated_by_one(shapes, world)
    start_masters = masters_of(shapes)
    off = sum(float((full[k] - expected[k]).abs().sum()) for k in full)
    moved = sum(float((start_masters[k] - expected[k]).abs().sum()) for k in full)
    return {
        "sent": sent[-1] / sizes,
        "seconds": min(seconds),
        "held": held / sizes,
        "peak": peak / sizes,
        "off": off / moved,
    }


def process(engine: str, model: str, folder: Path, rank: int, world: int, resumes: bool) -> None:
    """Be one process of a group; the first writes the mean of the rows."""
    torch.set_num_threads(1)
    name = "resumed" if resumes else "row"
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank)}
    meeting = f"file://{folder}/{name}.meeting"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=world)
    row = work(ENGINES[engine], model, folder, resumes)
    rows: list[Any] = [None] * world
    dist.all_gather_object(rows, row)
    if rank == 0:
        mean = {key: sum(each[key] for each in rows) / world for key in row}
        (folder / f"{name}.json").write_text(json.dumps(mean))
    dist.barrier()
    os._exit(0)


def run(engine: str, model: str, folder: Path, world: int, resumes: bool) -> dict[str, Any]:
    """Fork a group of processes, and return their row, or what the first failure says."""
    children = []
    for rank in range(world):
        child = os.fork()
        if not child:
            try:
                process(engine, model, folder, rank, world, resumes)
            except BaseException as error:
                said = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200]}"
                (folder / "failed.json").write_text(json.dumps({"failed": said}))
                traceback.print_exc()
                os._exit(1)
        children.append(child)
    failed = False
    while children:
        child, code = os.wait()
        children.remove(child)
        if code and not failed:
            failed = True
            for other in children:
                os.kill(other, signal.SIGKILL)
    name = "failed" if failed else "resumed" if resumes else "row"
    file = folder / f"{name}.json"
    return json.loads(file.read_text()) if file.exists() else {"failed": "killed"}


def measure(engine: str, model: str, world: int) -> dict[str, Any]:
    """Return the row of one engine."""
    with tempfile.TemporaryDirectory() as folder:
        row = run(engine, model, Path(folder), world, resumes=False)
        row = {"engine": engine, "model": model, "processes": world, **row}
        if "failed" in row:
            return row
        after = run(engine, model, Path(folder), world // 2, resumes=True)
        resumed = after.get("failed") or ("equal" if after["resumed"] == 1 else "off")
        return {**row, "half as many": resumed}


def main() -> None:
    """Measure, print and write the rows."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--engine", nargs="*")
    parser.add_argument("--model", nargs="*", default=[*MODELS])
    parser.add_argument("--processes", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if "QARL_LOOPBACK" not in os.environ:
        inside = ["unshare", "-rn", sys.executable, "-m", "benchmarks.engines"]
        os.environ |= {"QARL_LOOPBACK": "1", "GLOO_SOCKET_IFNAME": "lo"}
        os.execvp(inside[0], [*inside, *sys.argv[1:]])
    loopback_up()
    import_all()  # once, before the forks
    rows = []
    for world in arguments.processes:
        for model in arguments.model:
            for engine in arguments.engine or ENGINES:
                rows.append(measure(engine, model, world))
                sys.stdout.write(json.dumps(rows[-1]) + "\n")
                sys.stdout.flush()
                if arguments.json:
                    write_json(str(arguments.json), record(sys.argv[1:], rows, COMMAND))


def loopback_up() -> None:
    """Bring loopback up in this network namespace."""
    set_flags, up = 0x8914, 0x41
    with socket.socket() as any_socket:
        fcntl.ioctl(any_socket, set_flags, struct.pack("16sH14x", b"lo", up))


if __name__ == "__main__":
    main()
