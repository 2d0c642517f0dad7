"""`python -m benchmarks memory`: predicted memory against the peak of a real run.

Each cell, a model in a scheme, is a separate `qarl train` of one step with two updates on a random
model. After the second update's backward everything that the plan counts is allocated. The peak is
the kernel's figure for the process's resident memory. Random policies never end an answer, so
sequences are as long as the plan assumes.
"""

import dataclasses
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.models import MODELS as LEARNER_MODELS
from benchmarks.models import PAD, write_model
from benchmarks.publish import moe_config
from qarl.bench.process import WorkerError
from qarl.configs.errors import ConfigError
from qarl.configs.load import config_file, load_config
from qarl.planning.machine import Machine
from qarl.planning.memory import Memory
from qarl.planning.plan import make_plan
from qarl.planning.shapes import shapes_of
from qarl.quant.kernels.supported import require_support
from qarl.quant.schemes import COMPUTE_DTYPES, get_scheme
from qarl.report.tables import PlainTable

_MOE_FIELDS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "tie_word_embeddings",
    "num_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
)

_REWARD = (
    '"""Differs within a group."""\n\n\ndef reward(problem, text):\n    return sum(text.encode()) %'
    " 97 / 97\n"
)
_SETTINGS = {
    "task.name": "chain_sum",
    "task.options": "{}",
    "steps": "1",
    "record": "0",
    "export": "false",
    "eval.problems": "0",
    "rollout.prompts": "4",
    "rollout.samples": "4",
    "rollout.max_prompt_tokens": "32",
    "rollout.max_new_tokens": "96",
    "rollout.max_num_seqs": "32",
    "learner.mini_batches": "2",
    "learner.micro_batch_tokens": "2048",
    "learner.optimizer.name": "adamw",
    "learner.optimizer.decay_steps": "0",
    "learner.optimizer.lr": "1e-6",
}


@dataclass(frozen=True)
class Row:
    """Predicted and measured memory of one cell."""

    model: str
    scheme: str
    planned: int
    """Predicted peak of the process, in bytes."""
    measured: int
    """Measured peak of the process, in bytes."""
    parts: dict[str, int]
    """Bytes of each part of the prediction."""
    fields: dict[str, str] = dataclasses.field(default_factory=dict)
    """Settings of the configuration in addition to the benchmark's own, by dotted path."""

    @property
    def off(self) -> float:
        """Relative error of the prediction: planned / measured - 1."""
        return self.planned / self.measured - 1


def measure(
    models: tuple[str, ...],
    schemes: tuple[str, ...],
    say: Callable[[str], None],
    fields: dict[str, str] | None = None,
) -> list[Row]:
    """Return rows by model.

    say: called with a line of progress before each run. fields: settings of the configuration, by
    dotted path. Raises `ConfigError` and `SchemeError` for options that cannot be measured, before
    anything is measured; `WorkerError` if a run fails.
    """
    for scheme in schemes:
        require_support(get_scheme(scheme), COMPUTE_DTYPES["bfloat16"])
    if torch.cuda.is_available():
        raise ConfigError(
            "a GPU works here, whose memory the kernel does not count; measure where there is none"
        )
    return [row for model in models for row in _measure_model(model, schemes, say, fields or {})]


def _measure_model(
    model: str,
    schemes: tuple[str, ...],
    say: Callable[[str], None],
    fields: dict[str, str],
) -> Iterator[Row]:
    with tempfile.TemporaryDirectory(prefix="qarl-bench-") as place:
        folder = Path(place) / "model"
        reward = Path(place) / "mine.py"
        _write(model, folder)
        reward.write_text(_REWARD)
        for scheme in schemes:
            say(f"{model} {scheme}")
            places = {
                "model": str(folder),
                "task.reward": f"{reward}:reward",
                "output": f"{place}/{scheme}",
            }
            memory = planned(model, scheme, fields)
            yield Row(
                model=model,
                scheme=scheme,
                planned=memory.total,
                measured=_peak({**settings(scheme), **places, **fields}),
                parts={part.name: part.bytes for part in memory.parts},
                fields=fields,
            )


def planned(model: str, scheme: str, options: dict[str, str]) -> Memory:
    """Return the plan's prediction for a cell. options: settings of its run, by dotted path."""
    config = load_config(config_file("tiny-qwen3"), {**settings(scheme), **options})
    ample = Machine("CPUs", "cpu", 1, 2**50)
    # a dense Qwen3 counts as a qwen3_moe without experts
    fields = {**model_config(model), "model_type": "qwen3_moe"}
    return make_plan(config, shapes_of(fields, model), "", ample, 1).memory


def settings(scheme: str) -> dict[str, str]:
    """Return the settings of a cell's run by dotted path, except those that name a folder."""
    return {**_SETTINGS, "scheme": scheme}


def _peak(overrides: dict[str, str]) -> int:
    """Run a separate `qarl train` and return its peak of resident bytes."""
    command = [sys.executable, "-m", "qarl", "train", "--config", "tiny-qwen3"]
    command += [word for path, text in overrides.items() for word in (f"--{path}", text)]
    # glibc would otherwise retain much of the freed memory
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment
        )
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        output.seek(0)
        if process.returncode:
            raise WorkerError(
                f"{' '.join(command)} ended with status"
                f" {process.returncode}:\n{output.read()[-2000:]}"
            )
    return usage.ru_maxrss * 1024


def model_config(model: str) -> dict[str, Any]:
    """Return the fields of the model's config.json."""
    if model == "150m":
        return LEARNER_MODELS[model].config
    if model == "1b-moe":
        known = moe_config(1e9)
        return {name: getattr(known, name) for name in _MOE_FIELDS}
    small = {
        "vocab_size": 16384,
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
    }
    experts = {
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 384,
        "num_hidden_layers": 6,
    }
    return {
        **LEARNER_MODELS["150m"].config,
        **small,
        **(experts if model == "70m-moe" else {}),
    }


def _write(model: str, folder: Path) -> None:
    """Write random weights in fp32, and a tokenizer with one word per token."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = model_config(model)
    dense = {
        name: value for name, value in config.items() if not name.startswith(("num_expert", "moe_"))
    }
    write_model(dataclasses.replace(LEARNER_MODELS["150m"], config=dense), folder, seed=0)
    if "num_experts" in config:
        torch.manual_seed(0)
        mixture = Qwen3MoeForCausalLM(
            Qwen3MoeConfig(**config, pad_token_id=PAD, eos_token_id=1, dtype="float32")
        )
        mixture.save_pretrained(folder)


def table(rows: list[Row]) -> PlainTable:
    """Return the table to print, in MiB."""
    columns = ("planned", "measured", "off")
    fields = {f"--{path} {value}": None for row in rows for path, value in row.fields.items()}
    shown = PlainTable(
        "model",
        "scheme",
        *columns,
        figures=columns,
        title=" ".join(["peak of a run, MiB", *fields]),
    )
    for row in rows:
        shown.add_row(
            row.model,
            row.scheme,
            f"{row.planned / 2**20:,.0f}",
            f"{row.measured / 2**20:,.0f}",
            f"{row.off:+.1%}",
        )
    return shown


def as_data(rows: list[Row]) -> list[dict[str, Any]]:
    """Return the rows as JSON-ready dictionaries."""
    return [{**dataclasses.asdict(row), "off": row.off} for row in rows]
