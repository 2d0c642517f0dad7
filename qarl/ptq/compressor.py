"""The boundary to llmcompressor: one post-training quantization in a separate process.

The process is separate because llmcompressor configures logging for the whole process, draws
progress bars, patches models' `save_pretrained` and leaves files in the working directory. All of
that ends with the process and its folder. `compress` is the caller's side; `python -m
qarl.ptq.compressor job.json` is the other side.
"""

import dataclasses
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from qarl.configs.errors import QarlError

_BATCH_ROWS = 16
"""Upper bound on the calibration sequences of a batch."""
_LOG_TAIL = 12
"""Lines of llmcompressor's output in an error message."""


class CompressorError(QarlError, heading="llmcompressor"):
    """Raised if llmcompressor is missing or fails; the message ends with its last lines."""


@dataclass(frozen=True)
class Job:
    """One post-training quantization."""

    model: str
    """Folder of the unquantized checkpoint."""
    scheme: str
    """Name of the scheme."""
    method: str
    """Name of the method, of `qarl.ptq.methods.METHODS`."""
    ignored: tuple[str, ...]
    """Full names of the linear layers that stay unquantized."""
    calibration: tuple[tuple[int, ...], ...]
    """Token ids of each calibration sequence; empty for a method without data."""
    output: str
    """Folder to write."""


def require_llmcompressor() -> None:
    """Raise `CompressorError` if llmcompressor is not installed."""
    if not find_spec("llmcompressor"):
        raise CompressorError(
            "post-training quantization needs llmcompressor, which this environment lacks; the"
            " locked one has it: make env (pip alone cannot install it beside vLLM, their pins"
            " contradict)"
        )


def compress(job: Job, work: Path) -> None:
    """Run `job` in a fresh process whose working directory is `work`.

    Raises `CompressorError` if it fails.
    """
    require_llmcompressor()
    (work / "job.json").write_text(json.dumps(dataclasses.asdict(job)))
    log = work / "log.txt"
    status = _in_own_process(work, log)
    if status:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-_LOG_TAIL:])
        raise CompressorError(
            f"llmcompressor could not quantize by {job.method!r} to {job.scheme!r} (exit status"
            f" {status}); its last lines:\n{tail}"
        )


def _in_own_process(work: Path, log: Path) -> int:
    """Run the other side in `work`, which holds its job, and return its exit status.

    Its output goes to `log`.
    """
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(p for p in (root, os.environ.get("PYTHONPATH")) if p)
    command = [sys.executable, "-m", "qarl.ptq.compressor", "job.json"]
    with log.open("w") as stream:
        return subprocess.run(
            command,
            cwd=work,
            env={**os.environ, "PYTHONPATH": path},
            stdout=stream,
            stderr=stream,
            check=False,
        ).returncode


def _run(job: Job) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    _restore_granite_experts()
    from llmcompressor import oneshot

    model = AutoModelForCausalLM.from_pretrained(job.model, dtype="auto")
    batches: Any = _batches(job.calibration)
    data = torch.utils.data.DataLoader(batches, batch_size=None) if batches else None
    oneshot(
        model=model,
        tokenizer=job.model,
        recipe=_recipe(job),
        dataset=data,
        output_dir=job.output,
    )


def _recipe(job: Job) -> Any:
    """Return llmcompressor's modifiers for the method, with the scheme's quantization arguments."""
    from llmcompressor.modifiers.quantization import GPTQModifier, QuantizationModifier
    from llmcompressor.modifiers.transform.awq import AWQModifier
    from llmcompressor.modifiers.transform.smoothquant import SmoothQuantModifier

    from qarl.quant.schemes import get_scheme

    quantization = get_scheme(job.scheme).quantization
    assert quantization is not None
    # A copy, because GPTQ writes its column order into its argument.
    arguments: Any = {
        "config_groups": {"group_0": quantization.model_copy(deep=True)},
        "ignore": list(job.ignored),
    }
    if job.method == "gptq":
        return [GPTQModifier(**arguments)]
    before = {"rtn": [], "awq": [AWQModifier], "smoothquant": [SmoothQuantModifier]}[job.method]
    return [*(modifier() for modifier in before), QuantizationModifier(**arguments)]


def _batches(
    sequences: tuple[tuple[int, ...], ...],
) -> list[dict[str, Any]]:
    """Return batches of sequences of equal length, so that nothing is padded or cut.

    Each is int64 [rows, T]; the shortest sequences come first.
    """
    import torch

    by_length: dict[int, list[tuple[int, ...]]] = {}
    for sequence in sequences:
        by_length.setdefault(len(sequence), []).append(sequence)
    batches = []
    for _, alike in sorted(by_length.items()):
        for start in range(0, len(alike), _BATCH_ROWS):
            tokens = torch.tensor(alike[start : start + _BATCH_ROWS])
            batches.append({"input_ids": tokens, "attention_mask": torch.ones_like(tokens)})
    return batches


def _restore_granite_experts() -> None:
    """Make llmcompressor 0.12 importable with transformers ≥ 5.16.

    Fault: `llmcompressor.modeling.moe.granitemoe` imports `GraniteMoeParallelExperts`, a class that
    transformers renamed, to use it as a key of its registry of experts. A placeholder is enough,
    because no other model has that key. Remove this when the locked llmcompressor imports without
    it; tests/runs/test_ptq.py fails then.
    """
    from torch import nn
    from transformers.models.granitemoe import modeling_granitemoe

    name = "GraniteMoeParallelExperts"
    placeholder = type(name, (nn.Module,), {})
    setattr(modeling_granitemoe, name, placeholder)
    from llmcompressor.modeling.moe import granitemoe

    assert getattr(granitemoe, name) is placeholder, (
        "the placeholder was set after llmcompressor was imported"
    )


def _main() -> None:
    _run(TypeAdapter(Job).validate_json(Path(sys.argv[1]).read_text()))


if __name__ == "__main__":
    _main()
