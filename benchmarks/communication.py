"""`python -m benchmarks communication`: bytes that learner processes send in a step, and how many
bytes of codes each has.

Rows are by scheme and optimizer. One of the processes is started by

    python -m torch.distributed.run --nproc-per-node 2 -m benchmarks.communication FOLDER

The benchmark counts torch's collectives themselves, so it covers every caller (DeepSpeed, Muon,
QaRL). It assumes a ring: one process sends (n - 1) / n of what n processes gather, scatter or
reduce, and twice that in an all-reduce. A point-to-point message counts its own bytes. No algorithm
needs fewer bytes than a ring, so a real network sees at least as many.
"""

import contextlib
import dataclasses
import json
import subprocess
import sys
import tempfile
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.learner.batch import draw_sequences
from benchmarks.learner.worker import groups_of
from benchmarks.models import PAD, BenchModel, qwen3, write_model, write_tokenizer
from benchmarks.publish import moe_config, random_masters
from qarl.bench.process import WorkerError
from qarl.configs.schema.learner import LearnerConfig
from qarl.learner.batching import make_batch
from qarl.learner.learner import Learner
from qarl.learner.optim.sharded import masters_mesh
from qarl.learner.processes import Processes, join_processes, leave_processes
from qarl.quant.checkpoint.load import load_masters
from qarl.quant.layers.context import LayerContext
from qarl.quant.layers.experts import RoutedLowBitExperts
from qarl.quant.layers.linear import LowBitLinear
from qarl.quant.materialize.code_changes import quantized_weights
from qarl.quant.materialize.experts import LowBitExperts
from qarl.quant.model.low_bit_model import LowBitModel
from qarl.quant.runtime.replaced import replaced
from qarl.quant.schemes import get_scheme
from qarl.report.tables import PlainTable

MODEL = BenchModel(qwen3(2048, 512, 1536, 4, 8, 64), prompts=4, samples=8, tokens=32)
"""Model of 14 million parameters.

No matrix has fewer than 100,000 elements, because DeepSpeed would not shard such a small one.
"""

UPDATES = 2
"""Updates in a step, each of one or two micro-batches in every process.

Their number is small, so that the bytes sent by an update show beside those sent by forwards.
"""


@dataclass(frozen=True)
class Traffic:
    """Bytes that one process sends in a step of `UPDATES` updates."""

    scheme: str
    optimizer: str
    reduce_dtype: str
    """Dtype in which gradients are sent."""
    keeps: bool
    """Whether processes keep codes and kernel layouts, instead of gathering them at each use."""
    processes: int
    """Number of learner processes."""
    sent: int
    """Bytes that one process sends, averaged over the processes."""
    share: float
    """`sent` divided by the bytes of the fp32 masters."""
    held: int
    """Bytes of quantized layers' codes and scales that the first process has between steps."""
    most: int
    """Largest number of bytes of them that it has at once within a step."""


def measure(
    schemes: Sequence[str],
    processes: Sequence[int],
    optimizers: Sequence[str],
    moe: bool,
    say: Callable[[str], None],
) -> list[Traffic]:
    """Return rows ordered by processes, scheme and optimizer.

    moe: measure a mixture of experts of 7 million parameters, a second time with `keep_codes` and
    `keep_kernel_layout` false. Raises an `InputError` for impossible values, and `WorkerError` with
    the end of the output if a measurement fails.
    """
    for scheme in schemes:
        get_scheme(scheme)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        if moe:
            random_masters(moe_config(7e6), torch.float32).save_pretrained(Path(folder) / "model")
            write_tokenizer(MODEL.config["vocab_size"], Path(folder) / "model")
        else:
            write_model(MODEL, Path(folder) / "model", seed=0)
        for count in processes:
            say(f"{count} processes")
            jobs = [
                {
                    "scheme": scheme,
                    "optimizer": optimizer,
                    "reduce_dtype": dtype,
                    "keeps": keeps,
                }
                for scheme in schemes
                for optimizer in optimizers
                for dtype in ("float32", "bfloat16")
                for keeps in (True, False)[: 2 if moe else 1]
            ]
            rows += _launch(Path(folder), count, jobs)
    return rows


def _launch(
    folder: Path,
    count: int,
    jobs: list[dict[str, Any]],
) -> list[Traffic]:
    (folder / "jobs.json").write_text(json.dumps(jobs))
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(count),
    ]
    ended = subprocess.run(
        [*command, "-m", __name__, str(folder)],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path.cwd(),
    )
    if ended.returncode:
        last_lines = "\n".join(ended.stderr.strip().splitlines()[-12:])
        raise WorkerError(f"{count} processes ended with status {ended.returncode}:\n{last_lines}")
    return [Traffic(**row) for row in json.loads((folder / "rows.json").read_text())]


def table(rows: Sequence[Traffic]) -> PlainTable:
    """Format the rows as a table to print."""
    figures = ("processes", "KiB", "x masters", "codes held, KiB", "most")
    shown = PlainTable(
        "scheme",
        "optimizer",
        "gradients",
        "codes",
        *figures,
        figures=figures,
        title=(
            f"what one process sends in a step of {UPDATES} updates, and over the fp32 masters'"
            " bytes"
        ),
    )
    for row in rows:
        codes = "kept" if row.keeps else "gathered"
        sizes = f"{row.sent / 1024:,.0f}", f"{row.share:.2f}"
        codes_sizes = f"{row.held / 1024:,.0f}", f"{row.most / 1024:,.0f}"
        shown.add_row(
            row.scheme,
            row.optimizer,
            row.reduce_dtype,
            codes,
            str(row.processes),
            *sizes,
            *codes_sizes,
        )
    return shown


def as_data(rows: Sequence[Traffic]) -> list[dict[str, Any]]:
    """Return the rows as JSON-ready dictionaries."""
    return [dataclasses.asdict(row) for row in rows]


class CodesInMemory:
    """Count of the bytes of codes and scales that quantized layers have made and that are alive.

    Layers that are materialized inside the context are counted.
    """

    def __init__(self):
        self.most = 0
        self._tensors: list[weakref.ref[torch.Tensor]] = []

    @property
    def held(self) -> int:
        """Bytes that are alive, each storage once."""
        alive = [tensor for reference in self._tensors if (tensor := reference()) is not None]
        self._tensors = [weakref.ref(tensor) for tensor in alive]
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in alive}
        return sum(storages.values())

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """Count what layers make in this context."""
        with contextlib.ExitStack() as stack:
            for layer in (LowBitLinear, RoutedLowBitExperts):
                counted = self._counting(layer._materialize)
                stack.enter_context(replaced(layer, _materialize=counted))
            yield

    def _counting(self, materialize: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        def count(layer: Any, out: Any) -> Any:
            result = materialize(layer, out)
            experts = result.experts if isinstance(result, LowBitExperts) else ()
            views = [weight for expert in experts for weight in (expert.gate_up, expert.down)]
            weights = quantized_weights(result)
            for weight in [*weights, *views] if weights else []:
                tensors = (weight.codes, weight.scale)
                self._tensors += [weakref.ref(t) for t in tensors if t is not None]
            self.most = max(self.most, self.held)
            return result

        return count


class Sent(TorchDispatchMode):
    """Counter of the bytes that this process sends inside the context.

    `calls` counts the calls of each collective.
    """

    def __init__(self, world: int):
        super().__init__()
        self.bytes = 0.0
        self.calls: Counter[str] = Counter()
        self._ring = (world - 1) / world

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        if func.namespace == "c10d":
            self.calls[func.overloadpacket.__name__] += 1
            self.bytes += self._sent(func.overloadpacket.__name__, args)
        return func(*args, **(kwargs or {}))

    def _sent(self, name: str, args: Sequence[Any]) -> float:
        if name.startswith("alltoall_base"):
            # skip the output buffer, whose parts may have other sizes than the input's
            args = args[1:]
        largest = max((_bytes(arg) for arg in args), default=0)
        if name in ("recv_", "barrier", "monitored_barrier_"):
            return 0.0
        if name == "send":
            return largest
        # a gather or scatter has the whole tensor and a part as arguments: the larger is the whole
        return largest * self._ring * (2 if name.startswith("allreduce") else 1)


def _bytes(argument: Any) -> int:
    return sum(leaf.nbytes for leaf in tree_leaves(argument) if isinstance(leaf, torch.Tensor))


def _worker(folder: Path) -> None:
    """Run one process; the first process writes the rows.

    For every job the learner takes one step to warm up and one step that is counted.
    """
    torch.set_num_threads(1)
    processes = join_processes()
    batch = make_batch(groups_of(draw_sequences(MODEL, seed=0)), PAD)
    rows = []
    for job in json.loads((folder / "jobs.json").read_text()):
        codes = CodesInMemory()
        with codes.counted():
            learner = _learner(folder / "model", job, processes, int(batch.length.sum()))
            learner.learn(batch, 0)
            codes.most = held = codes.held
            with Sent(processes.world) as sent:
                stats = learner.learn(batch, 1)
        assert stats.updates == UPDATES
        mean = sum(processes.all_gather(sent.bytes)) / processes.world
        parameters = sum(p.numel() for p in learner.model.masters.values())
        masters_bytes = 4 * parameters
        rows.append(
            Traffic(
                **job,
                processes=processes.world,
                sent=round(mean),
                share=mean / masters_bytes,
                held=held,
                most=codes.most,
            )
        )
    if processes.first:
        (folder / "rows.json").write_text(json.dumps(as_data(rows)))
    leave_processes()


def _learner(
    folder: Path,
    job: dict[str, Any],
    processes: Processes,
    tokens: int,
) -> Learner:
    """Build the learner of one job; `tokens` is the number of tokens in the batch."""
    config = LearnerConfig.model_validate(
        {
            "reduce_dtype": job["reduce_dtype"],
            "optimizer": {"name": job["optimizer"]},
            "mini_batches": UPDATES,
            "micro_batch_tokens": tokens // UPDATES // processes.world,
            "diagnostics_every": 0,
        }
    )
    scheme = get_scheme(job["scheme"])
    masters = load_masters(folder, torch.float32, mesh=masters_mesh(config, processes))
    learner = Learner(
        LowBitModel(masters, scheme, LayerContext(torch.bfloat16, "reference")),
        config,
        processes=processes,
    )
    if not job["keeps"]:
        learner.model.release_codes()
        learner.model.drop_kernels()
    return learner


if __name__ == "__main__":
    _worker(Path(sys.argv[1]))
