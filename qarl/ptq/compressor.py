"""The boundary to llmcompressor: one post-training quantization, in a process of its own.

On its own, because llmcompressor configures logging for the whole process, draws progress bars,
patches models' `save_pretrained` and leaves files in the working directory. Here all of that ends
with the process and its folder. `compress` is the caller's side; `python -m qarl.ptq.compressor
job.json` is the other.
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
_LOG_TAIL = 12


class CompressorError(QarlError, heading="llmcompressor"):
    """llmcompressor is missing, or failed; the message ends with the last lines it wrote."""


@dataclass(frozen=True)
class Job:
    """model: folder of the unquantized checkpoint. scheme, method: by name. ignored: full names of
    the linear layers left alone. calibration: token ids of each sequence, none for a method without
    data. output: folder to write.
    """

    model: str
    scheme: str
    method: str
    ignored: tuple[str, ...]
    calibration: tuple[tuple[int, ...], ...]
    output: str


def require_llmcompressor() -> None:
    """Raise `CompressorError` where it is not installed."""
    if not find_spec("llmcompressor"):
        raise CompressorError(
            "post-training quantization needs llmcompressor, which this environment lacks; the"
            " locked one has it: make env (pip alone cannot install it beside vLLM, their pins"
            " contradict)"
        )


def compress(job: Job, work: Path) -> None:
    """Run `job` in a fresh process whose working directory is `work`; raises `CompressorError`
    where it fails.
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
    """Exit status of the other side, run in `work`, where its job is; what it prints goes to
    `log`.
    """
    here = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(p for p in (here, os.environ.get("PYTHONPATH")) if p)
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
    """llmcompressor's modifiers for the method, with the scheme's own quantization arguments."""
    from llmcompressor.modifiers.quantization import GPTQModifier, QuantizationModifier
    from llmcompressor.modifiers.transform.awq import AWQModifier
    from llmcompressor.modifiers.transform.smoothquant import SmoothQuantModifier

    from qarl.quant.schemes import get_scheme

    quantization = get_scheme(job.scheme).quantization
    assert quantization is not None
    # A copy: GPTQ writes its column order into what it is given.
    what: Any = {
        "config_groups": {"group_0": quantization.model_copy(deep=True)},
        "ignore": list(job.ignored),
    }
    if job.method == "gptq":
        return [GPTQModifier(**what)]
    before = {"rtn": [], "awq": [AWQModifier], "smoothquant": [SmoothQuantModifier]}[job.method]
    return [*(modifier() for modifier in before), QuantizationModifier(**what)]


def _batches(sequences: tuple[tuple[int, ...], ...]) -> list[dict[str, Any]]:
    """Sequences of one length together, so that nothing is padded or cut; int64 [rows, T] each,
    shortest first.
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
    """Let llmcompressor 0.12 be imported with transformers ≥ 5.16.

    Fault: `llmcompressor.modeling.moe.granitemoe` imports `GraniteMoeParallelExperts`, a class that
    transformers renamed, to use it as a key of its registry of experts. A placeholder serves: no
    other model has that key. Remove when the locked llmcompressor imports without it
    (tests/runs/test_ptq.py fails when that is so).
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
