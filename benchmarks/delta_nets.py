"""`python -m benchmarks.delta_nets`: seconds and memory of gated delta nets beside a transformer.

Two random models have the same layers, hidden size and parameters: Qwen3.5 with three delta nets to
one attention layer, and Qwen3. Each samples one answer a length after a prompt of 64 tokens, and
the learner scores it and differentiates it. Every model and scheme is a process of its own. Seconds
are CPU seconds of all threads, which other processes disturb less than the wall clock. A first
answer of few tokens is not counted.
"""

import argparse
import json
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.learner.step_memory import StepMemory
from benchmarks.models import END, PAD, write_tokenizer
from qarl.bench.process import answer_line, run_worker
from qarl.cli.environment import quiet_libraries
from qarl.cli.options import json_file, write_json
from qarl.report.record import record

PROGRAM = "python -m benchmarks.delta_nets"
PROMPT = 64
_COMMON = {
    "vocab_size": 2048,
    "hidden_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "pad_token_id": PAD,
    "eos_token_id": END,
    "dtype": "float32",
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("Qwen3Config", {**_COMMON, "intermediate_size": 2272}),
    "qwen3.5": (
        "Qwen3_5TextConfig",
        {
            **_COMMON,
            "intermediate_size": 1536,
            "full_attention_interval": 4,
            "linear_num_key_heads": 8,
            "linear_num_value_heads": 8,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
        },
    ),
}
"""Name → class of its configuration and fields.

Delta nets have twice the hidden size in keys, queries and values each, as in Qwen3.5-0.8B. The
width of Qwen3's feed-forward layers makes the numbers of parameters equal.
"""


@dataclass(frozen=True)
class Job:
    """Task of one process."""

    model: str
    scheme: str
    lengths: tuple[int, ...]
    """Tokens of each answer, in ascending order."""


@dataclass(frozen=True)
class Cell:
    """Figures of one answer."""

    model: str
    parameters: int
    scheme: str
    tokens: int
    """Tokens of the answer."""
    equal: float
    """Fraction of the answer's log-probs whose bits are the sampler's."""
    sampling: float
    forward: float
    backward: float
    """CPU seconds."""
    sampling_bytes: int
    """Peak of the memory that sampling added to the engine at rest: cache and activations."""
    saved_bytes: int
    """Memory that the forward keeps for the backward."""
    step_bytes: int
    """Peak of the memory that forward and backward added, gradients of the masters included."""


@dataclass(frozen=True)
class Cells:
    """Answer of one process."""

    cells: list[Cell]


def write(name: str, folder: Path) -> int:
    """Write a random model and a tokenizer to `folder`; return the number of parameters."""
    import torch
    import transformers

    kind, fields = MODELS[name]
    config = getattr(transformers, kind)(**fields, max_position_embeddings=8192)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    write_tokenizer(fields["vocab_size"], folder)
    return sum(parameter.numel() for parameter in model.parameters())


def run(job: Job) -> list[Cell]:
    """Measure one model in one scheme."""
    import torch

    from qarl.configs.schema.rollout import RolloutConfig
    from qarl.mismatch.investigate import engine_of
    from qarl.quant.checkpoint.load import load_masters
    from qarl.quant.layers.context import LayerContext
    from qarl.quant.model.low_bit_model import LowBitModel
    from qarl.quant.schemes import get_scheme
    from qarl.rollout.types import Group, Prompt, Sampling

    drawn = torch.randint(2, 2048, (PROMPT,), generator=torch.Generator().manual_seed(0))
    prompt = Prompt("0", "", tuple(drawn.tolist()))
    sampled = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        parameters = write(job.model, folder)
        masters = load_masters(folder, torch.float32)
        context = LayerContext(torch.bfloat16, "auto")
        model = LowBitModel(masters, get_scheme(job.scheme), context, "engine")
        rollout = RolloutConfig(
            max_prompt_tokens=PROMPT, max_new_tokens=max(job.lengths), kv_cache_gib=1
        )
        with engine_of(model, folder, rollout, "bfloat16") as engine:
            memory = StepMemory(False)
            for tokens in (8, *job.lengths):
                memory.begin()
                start = time.process_time()
                ((answer,),) = engine.generate([prompt], Sampling(1, tokens, seed=0))
                seconds = time.process_time() - start
                memory.end()
                assert len(answer.token_ids) == tokens, "the end token was sampled"
                sampled.append((Group(prompt, (answer,), (1.0,)), seconds, memory.total))
    scored = [_scored(model, group) for group, *_ in sampled]
    return [
        Cell(
            model=job.model,
            parameters=parameters,
            scheme=job.scheme,
            tokens=tokens,
            sampling=seconds,
            sampling_bytes=peak,
            **figures,
        )
        for tokens, (_, seconds, peak), figures in zip(
            job.lengths, sampled[1:], scored[1:], strict=True
        )
    ]


def _scored(model: Any, group: Any) -> dict[str, Any]:
    """Score an answer and differentiate it; return the learner's fields of its `Cell`."""
    import torch

    from qarl.learner.batching import make_batch
    from qarl.learner.logprobs import token_logprobs
    from qarl.learner.mismatch import measure_mismatch

    batch = make_batch([group], PAD)
    saved = _SavedBytes(model)
    memory = StepMemory(False)
    memory.begin()
    start = time.process_time()
    with torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda tensor: tensor):
        logprobs = token_logprobs(
            model, batch.tokens, batch.response_mask, packed=batch.packed(), entropy=False
        )[0]
    forward = time.process_time() - start
    # the hooks' own references are gone before the backward
    saved_bytes = saved.bytes
    start = time.process_time()
    (logprobs * batch.response_mask).sum().backward()
    backward = time.process_time() - start
    memory.end()
    for master in model.masters.values():
        master.grad = None
    mismatch = measure_mismatch(logprobs.detach(), batch.sampler_logprobs, batch.response_mask)
    return {
        "equal": mismatch.equal,
        "forward": forward,
        "backward": backward,
        "saved_bytes": saved_bytes,
        "step_bytes": memory.step,
    }


class _SavedBytes:
    """Counts the storages that autograd saves, each once, except the model's own."""

    def __init__(self, model: Any):
        self.bytes = 0
        self._own = {master.untyped_storage().data_ptr() for master in model.masters.values()}
        self._saved: set[int] = set()

    def pack(self, tensor: Any) -> Any:
        """Count a tensor, and return it."""
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._own | self._saved:
            self._saved.add(storage.data_ptr())
            self.bytes += storage.nbytes()
        return tensor


def show(cells: list[Cell]) -> None:
    """Print the cells of each scheme and length beside each other, with their ratio."""
    names = ("sampling", "forward", "backward")
    sizes = ("sampling_bytes", "saved_bytes", "step_bytes")
    for first in (cell for cell in cells if cell.model == "qwen3"):
        (second,) = (
            cell
            for cell in cells
            if cell.model != first.model
            and (cell.scheme, cell.tokens) == (first.scheme, first.tokens)
        )
        print(f"{first.scheme}, {first.tokens} tokens; equal {first.equal}, {second.equal}")
        for name in names:
            a, b = (1e3 * getattr(cell, name) / cell.tokens for cell in (first, second))
            print(f"  {name:14} {a:9.2f} {b:9.2f} ms a token, x {b / a:.2f}")
        for name in sizes:
            a, b = (getattr(cell, name) / 2**20 for cell in (first, second))
            print(f"  {name:14} {a:9.1f} {b:9.1f} MiB, x {b / a:.2f}")


def main() -> None:
    """Print the figures of both models, and write them as JSON if `--json` is set."""
    parser = argparse.ArgumentParser(prog=PROGRAM, description=__doc__)
    parser.add_argument("--lengths", default="256,1024,4096", help="tokens of the answers")
    parser.add_argument("--schemes", default="bf16,w8a8")
    parser.add_argument("--json", type=json_file, metavar="FILE")
    parser.add_argument("job", nargs="?", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    quiet_libraries()
    if arguments.job:
        sys.stdout.write(answer_line(Cells(run(Job(**json.loads(arguments.job))))))
        return
    lengths = tuple(sorted(int(word) for word in arguments.lengths.split(",")))
    cells = []
    for scheme in arguments.schemes.split(","):
        for name in MODELS:
            job = json.dumps(asdict(Job(name, scheme, lengths)))
            cells += run_worker(
                "benchmarks.delta_nets",
                job,
                lambda answer: [Cell(**cell) for cell in answer["cells"]],
                f"{name} {scheme}",
                environment={"TORCHDYNAMO_DISABLE": "1"},
            )
    show(cells)
    if arguments.json:
        rows = [asdict(cell) for cell in cells]
        write_json(arguments.json, record(sys.argv[1:], rows, PROGRAM))


if __name__ == "__main__":
    main()
