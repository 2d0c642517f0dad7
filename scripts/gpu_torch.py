#!/usr/bin/env python3
"""Checks of a GPU with torch and transformers alone, as the first part of scripts/gpu_half_hour.sh.

    python scripts/gpu_torch.py FOLDER [--device cuda] [--only PIECE] [--small]

They need no vLLM. Each piece compares the device with the CPU, or two methods on the device, and
writes FOLDER/torch-PIECE.json: status (0 if all agree), seconds, figures, the error. A piece that
passed is not run again. torch 2.11 or later is required. The script has not run on a GPU yet. Exit
status: the number of pieces that failed. Axes: O output rows, I input columns, N tokens, H heads, D
head size.
"""

import argparse
import inspect
import json
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from qarl.configs.schema.learner import LearnerConfig
from qarl.learner.learner import Learner
from qarl.quant.checkpoint.families import ExpertLayout, ExpertsShape
from qarl.quant.layers.context import LayerContext
from qarl.quant.layers.experts import RoutedLowBitExperts
from qarl.quant.layers.linear import LowBitLinear
from qarl.quant.materialize import materialize
from qarl.quant.model.low_bit_model import LowBitModel
from qarl.quant.runtime import compile as compile_
from qarl.quant.schemes import SCHEMES, get_scheme

BF16 = torch.bfloat16
Figures = dict[str, Any]


def values(*shape: int, seed: int = 0) -> torch.Tensor:
    """Return normal values with standard deviation 0.1, on the CPU."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 0.1


def error(ours: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the relative error in the Frobenius norm."""
    ours = ours.detach().double().cpu()
    expected = expected.detach().double().cpu()
    return float((ours - expected).norm() / expected.norm().clamp_min(1e-30))


def within(bound: float, **errors: float) -> Figures:
    """Check that no error exceeds the bound, and return the errors."""
    worst = max(errors, key=lambda name: errors[name])
    assert errors[worst] <= bound, f"{worst} is off by {errors[worst]:.2e}, allowed is {bound:g}"
    return errors


def codes(device: str, small: bool) -> Figures:
    """Check that every scheme's codes and scales equal the CPU's to the last bit.

    Masters are float32 and bfloat16.
    """
    different = []
    for scheme in SCHEMES:
        for dtype in (torch.float32, BF16):
            weight = values(256, 512 if small else 4096).to(dtype)
            sides = [
                materialize(w, get_scheme(scheme), BF16).tensors()
                for w in (weight, weight.to(device))
            ]
            for (name, ours), (_, theirs) in zip(*sides, strict=True):
                if not torch.equal(ours.view(torch.uint8), theirs.cpu().view(torch.uint8)):
                    different.append(f"{scheme} {dtype} {name}")
    assert not different, f"differ from the CPU's: {', '.join(different)}"
    return {"schemes": len(SCHEMES)}


def linear(device: str, small: bool) -> Figures:
    """Check that a dense layer's product and straight-through gradients are near the CPU's.

    The product is the reference product.
    """
    rows, columns, tokens = (128, 256, 40) if small else (2048, 2048, 4096)

    def run(at: str, scheme: str) -> list[torch.Tensor]:
        master = nn.Parameter(values(rows, columns).to(at))
        layer = LowBitLinear(
            "layer", master, None, get_scheme(scheme), LayerContext(BF16, "reference")
        )
        layer.refresh()
        x = values(tokens, columns, seed=1).to(at, BF16).requires_grad_()
        y = layer(x)
        dy = values(tokens, rows, seed=2).to(at, BF16)
        return [y, *torch.autograd.grad(y, [x, master], dy)]

    errors: Figures = {}
    for scheme in SCHEMES:
        pairs = zip(run(device, scheme), run("cpu", scheme), strict=True)
        errors[scheme] = max(error(ours, expected) for ours, expected in pairs)
    return within(0.02, **errors)


def attention(device: str, small: bool) -> Figures:
    """Compare torch's attention over several sequences in one call with each alone in fp32.

    Sequences have different lengths. The backward is compared too.
    """
    from qarl.quant.kernels.flash_attention import flash_gradients

    if device == "cpu":
        return {"skipped": "torch has it on GPUs alone"}
    heads = 16
    groups = 8
    size = 128
    lengths = [5, 64, 1, 130] if small else [1000, 3000, 1, 95]
    starts = torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)
    total = sum(lengths)
    q, k, v = (values(total, n, size, seed=n).to(device, BF16) for n in (heads, groups, groups))
    dy = values(total, heads, size, seed=9).to(device, BF16)
    scale = size**-0.5
    longest = max(lengths)
    y, sums, _ = torch.ops.torch_attn._varlen_attn(
        q, k, v, starts, starts, longest, longest, True, scale, [-1, 0], True
    )
    ours = [y, *flash_gradients(dy, (q, k, v), y, sums, scale, lengths, lengths)]
    exact = [t.float().requires_grad_() for t in (q, k, v)]
    parts = [
        nn.functional.scaled_dot_product_attention(
            *(t.transpose(0, 1)[None] for t in each), is_causal=True, enable_gqa=True
        )[0]
        for each in zip(*(t.split(lengths) for t in exact), strict=True)
    ]
    expected = torch.cat([part.transpose(0, 1) for part in parts])
    exact_gradients = torch.autograd.grad(expected, exact, dy.float())
    names = ("y", "dq", "dk", "dv")
    return within(
        0.02,
        **{
            n: error(a, b)
            for n, a, b in zip(names, ours, (expected, *exact_gradients), strict=True)
        },
    )


def experts(device: str, small: bool) -> Figures:
    """Compare gradients of all experts at once (grouped products) with a loop over the experts.

    One expert has no token. The full size is a layer of Qwen3-30B-A3B.
    """
    full_size = (128, 8, 2048, 768, 16384)
    count, k, hidden, inner, tokens = (8, 2, 256, 128, 96) if small else full_size
    shape = ExpertsShape(count, k, hidden, inner, "silu", ExpertLayout())
    sizes = (count, 2 * inner, hidden), (count, hidden, inner)
    masters = [
        nn.Parameter((values(*size, seed=s) * 0.3).to(device)) for s, size in enumerate(sizes)
    ]
    gate_up, down = masters
    context = LayerContext(BF16, "reference")
    layer = RoutedLowBitExperts(
        "model.layers.0.mlp.experts", gate_up, down, shape, get_scheme("w4a16"), context
    )
    layer.refresh()
    x = values(tokens, hidden, seed=3).to(device, BF16).requires_grad_()
    scores = values(tokens, count, seed=4)
    scores[:, 5] = -100.0  # no token is routed to this expert
    weights, index = scores.to(device).softmax(-1).topk(k)
    dy = values(tokens, hidden, seed=5).to(device, BF16)
    both = []
    seconds = []
    for grouped in (True, False):
        layer.multiplies_grouped = lambda _, grouped=grouped: grouped  # type: ignore[method-assign]
        for _ in range(2):  # the first one warms up
            start = time.perf_counter()
            gradients = torch.autograd.grad(layer(x, index, weights), [x, *masters], dy)
            synchronize(device)
        both.append(gradients)
        seconds.append(time.perf_counter() - start)
    compared = zip(("dx", "gate_up", "down"), *both, strict=True)
    errors = within(0.02, **{name: error(grouped, loop) for name, grouped, loop in compared})
    return {**errors, "grouped_seconds": seconds[0], "loop_seconds": seconds[1]}


def step(device: str, small: bool) -> Figures:
    """Check that masters after an AdamW update of a complete learner are near the CPU's.

    A second update is timed, and memory is reported.
    """
    from tests.support.learners import batch_of, random_model

    ends: list[torch.Tensor] = []
    for at in ("cpu", device):
        model: Any = random_model()
        low_bit = LowBitModel(
            model.to(at),
            get_scheme("w4a16"),
            LayerContext(BF16, "reference"),
            "transformers",
        )
        config = {
            "mini_batches": 1,
            "diagnostics_every": 0,
            "optimizer": {"name": "adamw", "lr": 1e-3},
        }
        learner = Learner(low_bit, LearnerConfig.model_validate(config))
        learner.learn(batch_of(), step=0)
        ends.append(
            torch.cat([master.detach().flatten().cpu() for master in low_bit.masters.values()])
        )
        start = time.perf_counter()
        learner.learn(batch_of(), step=1)
        synchronize(at)
    seconds = time.perf_counter() - start
    peak = torch.cuda.max_memory_allocated() / 2**30 if device != "cpu" else 0.0
    return {
        **within(0.02, masters=error(ends[1], ends[0])),
        "seconds": seconds,
        "peak_gib": peak,
    }


def silu_gradients(dx: torch.Tensor, dy: torch.Tensor, x: torch.Tensor) -> None:
    """Write the gradients of silu(gate) · up, x = (gate, up), to dx.

    `quant.graph.operators` compiles the same function, but needs vLLM.
    """
    (dgate, dup) = dx.chunk(2, dim=-1)
    (gate, up) = x.chunk(2, dim=-1)
    dup.copy_(dy * torch.nn.functional.silu(gate))
    dgate.copy_(torch.ops.aten.silu_backward(dy * up, gate))


def compiled(device: str, small: bool) -> Figures:
    """Compare a backward compiled like the learner's with the uncompiled one, to the last bit.

    Both are timed.
    """
    if "isolate_recompiles" not in inspect.signature(torch.compile).parameters:
        return {"skipped": f"torch {torch.__version__} cannot compile variants apart; 2.13 can"}
    rows, columns = (64, 256) if small else (32768, 6144)
    dy = values(rows, columns, seed=1).to(device, BF16)
    x = values(rows, 2 * columns, seed=2).to(device, BF16)
    results = []
    seconds = []
    for function in (compile_.compiled(silu_gradients), silu_gradients):
        for _ in range(2):  # the first one compiles
            dx = torch.empty_like(x)
            synchronize(device)
            start = time.perf_counter()
            function(dx, dy, x)
            synchronize(device)
        results.append(dx)
        seconds.append(time.perf_counter() - start)
    assert torch.equal(*results), f"bits differ, by {error(*results):.2e}"
    return {"compiled_seconds": seconds[0], "eager_seconds": seconds[1]}


PIECES: tuple[Callable[[str, bool], Figures], ...] = (
    codes,
    linear,
    attention,
    experts,
    step,
    compiled,
)


def synchronize(device: str) -> None:
    """Wait until a GPU has finished its queued work."""
    if device != "cpu":
        torch.cuda.synchronize()


def main() -> int:
    """Run the pieces that have not passed; return the number that failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", choices=[piece.__name__ for piece in PIECES])
    parser.add_argument("--small", action="store_true", help="small shapes, for a CPU")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    failed = 0
    for piece in PIECES:
        file = options.folder / f"torch-{piece.__name__}.json"
        passed = file.exists() and json.loads(file.read_text())["status"] == 0
        if passed or options.only not in (None, piece.__name__):
            continue
        start = time.perf_counter()
        record = {
            "step": f"torch-{piece.__name__}",
            "status": 0,
            "torch": torch.__version__,
        }
        try:
            record["figures"] = piece(options.device, options.small)
        except Exception as raised:
            failed += 1
            record |= {
                "status": 1,
                "error": "".join(traceback.format_exception(raised)[-3:]),
            }
        record["seconds"] = round(time.perf_counter() - start, 1)
        file.write_text(json.dumps(record, indent=1) + "\n")
        verdict = "failed" if record["status"] else "passed"
        print(f"{record['step']}: {verdict}, {record['seconds']} s {record.get('error', '')}")
    return failed


if __name__ == "__main__":
    sys.exit(main())
