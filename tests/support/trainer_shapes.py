"""Drawn dumps and checkpoints in the shapes in which trainers hold and log them.

Dumps of TRL and verl are written by the lines of docs/guide/verify.md, from padded batches as these
trainers hold them. prime-rl's and NeMo-RL's are their own logs, written here after their sources.
Blind spot: none of the four trainers runs.
"""

import contextlib
import json
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file

from tests.support import drawn_checkpoints, drawn_dumps
from tests.support.drawn_checkpoints import Pair, Tensors

ROOT = Path(__file__).parents[2]
TRAINERS = ("TRL", "verl", "prime-rl", "NeMo-RL")
TEMPERATURES = (0.5, 0.7, 0.9, 0.95, 0.99, 1.05, 1.3)
LOGPROB_FAULTS = tuple(kind for kind in drawn_dumps.FAULTS if kind != "prompt")
"""No trainer's completions hold their prompt; a mask that covers it is "not-sampled"."""
LOGPROB_CLEAN = (*drawn_dumps.CLEAN, "reloaded")

Rows = list[dict[str, Any]]


def weight_faults(trainer: str) -> tuple[str, ...]:
    """Return the kinds of faults that a trainer's weights can have."""
    without = {"settings"} if trainer == "prime-rl" else set()  # its folders have no config.json
    return tuple(kind for kind in drawn_checkpoints.FAULTS if kind not in without)


@dataclass(frozen=True)
class WrittenDump:
    """A dump in a trainer's files."""

    folder: Path
    """Folder of the files."""
    said: dict[str, Any]
    """Drawn values, for messages."""


def draw_dump(trainer: str, rng: random.Random, kind: str, folder: Path) -> WrittenDump:
    """Write a dump with a fault of that kind, or a clean one, as the trainer would."""
    if kind in ("stale", "reloaded"):
        drawn = drawn_dumps.draw_reloads(rng, skips=kind == "stale")
    else:
        drawn = drawn_dumps.draw_dump(rng, kind, completions=32, temperatures=TEMPERATURES)
    by_version: dict[int, Rows] = {}
    for row in drawn.rows:
        by_version.setdefault(row.get("trainer_version", 0), []).append(row)
    for version in sorted(by_version):
        _WRITERS[trainer](folder, by_version[version], version, kind == "not-sampled", rng)
    return WrittenDump(folder, drawn.said)


def guide_lines(begins: str) -> str:
    """Return the code of docs/guide/verify.md that begins with a line."""
    text = (ROOT / "docs/guide/verify.md").read_text(encoding="utf-8")
    (block,) = [
        block
        for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL)
        if block.startswith(begins)
    ]
    return block


def _padded(rows: Rows, name: str, left: bool = False) -> torch.Tensor:
    """Return a column of lists as a tensor [B, T], padded with 0."""
    longest = max(len(row[name]) for row in rows)
    padded = []
    for row in rows:
        padding = [0] * (longest - len(row[name]))
        padded.append([*padding, *row[name]] if left else [*row[name], *padding])
    return torch.tensor(padded)


def _mask(rows: Rows, name: str, left: bool = False) -> torch.Tensor:
    ones = [{name: [1] * len(row[name])} for row in rows]
    return _padded(ones, name, left)


def _write_trl(folder: Path, rows: Rows, version: int, mask_all: bool, rng: random.Random) -> None:
    batch = {
        "prompt_ids": _padded(rows, "prompt_ids", left=True),
        "prompt_mask": _mask(rows, "prompt_ids", left=True),
        "completion_ids": _padded(rows, "completion_ids"),
        "completion_mask": _mask(rows, "completion_ids"),
        "sampling_per_token_logps": _padded(rows, "sampler_logprobs"),
        "old_per_token_logps": _padded(rows, "trainer_logprobs"),
        "advantages": torch.tensor([row["advantage"] for row in rows]),
    }

    class Trainer:
        accelerator = SimpleNamespace(process_index=0)
        state = SimpleNamespace(global_step=version)
        temperature = rows[0].get("temperature", 1.0)

        def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
            return inputs

    names: dict[str, Any] = {"GRPOTrainer": Trainer, "json": json}
    exec(guide_lines("class Dumping"), names)
    with contextlib.chdir(folder):
        names["Dumping"]()._generate_and_score_completions(batch)


def _write_verl(folder: Path, rows: Rows, version: int, mask_all: bool, rng: random.Random) -> None:
    data = {
        "responses": _padded(rows, "completion_ids"),
        "response_mask": _mask(rows, "completion_ids"),
        "rollout_log_probs": _padded(rows, "sampler_logprobs"),
        "old_log_probs": _padded(rows, "trainer_logprobs"),
    }
    with (folder / "dump.jsonl").open("a") as file:
        names = {
            "batch": SimpleNamespace(batch=data),
            "self": SimpleNamespace(global_steps=version),
            "file": file,
            "json": json,
        }
        exec(guide_lines("data = batch.batch"), names)


def _sequences(rows: Rows, mask_all: bool, rng: random.Random) -> Iterator[dict[str, list[Any]]]:
    """Yield prompts and completions as one sequence each, with a mask of the completion.

    mask_all: Let the mask cover the prompts of half of the dumps too.
    """
    covers = mask_all and rng.random() < 0.5
    for row in rows:
        before = len(row["prompt_ids"])
        length = before + len(row["completion_ids"])
        yield {
            "token_ids": row["prompt_ids"] + row["completion_ids"],
            "mask": [covers] * before + [True] * len(row["completion_ids"]),
            "sampler": [0.0] * before + row["sampler_logprobs"],
            "trainer": [rng.uniform(-9, 0) for _ in range(before)] + row["trainer_logprobs"],
            "advantage": [row["advantage"]] * length,
        }


def _write_prime_rl(
    folder: Path, rows: Rows, version: int, mask_all: bool, rng: random.Random
) -> None:
    target = folder / "token_exports" / f"step_{version}"
    target.mkdir(parents=True)
    with (target / "rank_0.jsonl").open("w") as file:
        for number, each in enumerate(_sequences(rows, mask_all, rng)):
            line = {
                "schema_version": 1,
                "step": version,
                "export_step": version,
                "rank": 0,
                "export_sequence_idx": number,
                "token_ids": each["token_ids"],
                "loss_mask": each["mask"],
                "advantages": each["advantage"],
                "inference_logprobs": each["sampler"],
                "trainer_logprobs": each["trainer"],
                "is_masked": [False] * len(each["mask"]),
            }
            file.write(f"{json.dumps(line)}\n")
    (target / "STABLE").touch()


def _write_nemo_rl(
    folder: Path, rows: Rows, version: int, mask_all: bool, rng: random.Random
) -> None:
    sequences = list(_sequences(rows, mask_all, rng))
    longest = max(len(each["token_ids"]) for each in sequences)
    (folder / f"val_data_step{version}.jsonl").write_text('{"content": ["1 + 1"], "idx": 0}\n')
    with (folder / f"train_data_step{version}.jsonl").open("w") as file:
        for number, each in enumerate(sequences):
            padding = [0] * (longest - len(each["token_ids"]))
            line = {
                "content": ["1 + 1"],
                "rewards": [1.0],
                "input_lengths": [len(each["token_ids"])],
                "token_ids": [each["token_ids"] + padding],
                "token_loss_mask": [[float(one) for one in each["mask"]] + padding],
                "sample_loss_mask": [1.0],
                "advantages": [each["advantage"] + padding],
                "generation_logprobs": [each["sampler"] + padding],
                "prev_logprobs": [each["trainer"] + padding],
                "idx": number,
            }
            file.write(f"{json.dumps(line)}\n")


_WRITERS: dict[str, Callable[[Path, Rows, int, bool, random.Random], None]] = {
    "TRL": _write_trl,
    "verl": _write_verl,
    "prime-rl": _write_prime_rl,
    "NeMo-RL": _write_nemo_rl,
}


def draw_weights(trainer: str, rng: random.Random, kind: str, folder: Path) -> Pair:
    """Return a pair with a fault of that kind, or a clean one, its trainer's side in a shape in
    which the trainer holds or writes weights.
    """
    pair = drawn_checkpoints.draw_pair(folder, rng, kind)
    if not isinstance(pair.trainer, Path):
        return pair
    tensors = drawn_checkpoints.read(pair.trainer)
    codes = any(name.endswith("weight_scale") for name in tensors)
    forms = _FORMS[trainer]
    if codes or kind == "settings":  # config.json has to say of which scheme
        forms = ("shards",)
    form = rng.choice(forms)
    pair.said["form"] = form
    if form == "shards":
        _split(pair.trainer, tensors, rng)
    elif form == "broadcast":
        _split(pair.trainer, tensors, rng)
        (pair.trainer / "config.json").unlink()
        (pair.trainer / "STABLE").touch()
    elif form == "stacked":
        pair.trainer = _stacked(tensors)
    else:
        pair.trainer = {_NAMES[form](name): tensor for name, tensor in tensors.items()}
    return pair


_FORMS = {
    "TRL": ("shards", "DDP", "PEFT, merged"),
    "verl": ("shards", "FSDP", "stacked"),
    "prime-rl": ("broadcast", "compiled", "broadcast"),
    "NeMo-RL": ("shards", "compiled", "stacked"),
}
"""Shapes in which each trainer holds or writes its weights."""
_LINEAR = re.compile(r"(\.(?:[qkvo]|gate|up|down)_proj)\.")
_BLOCK = re.compile(r"(model\.layers\.\d+\.)")
_NAMES: dict[str, Callable[[str], str]] = {
    "DDP": lambda name: f"module.{name}",
    "PEFT, merged": lambda name: "base_model.model." + _LINEAR.sub(r"\1.base_layer.", name),
    "FSDP": lambda name: "_fsdp_wrapped_module." + _BLOCK.sub(r"\1_fsdp_wrapped_module.", name),
    "compiled": lambda name: _BLOCK.sub(r"\1_orig_mod.", name),
}
"""Shape → name of a tensor in it."""


def _split(folder: Path, tensors: Tensors, rng: random.Random) -> None:
    """Write a checkpoint's tensors anew, in two or three files with an index."""
    files: dict[str, Tensors] = {}
    count = rng.randrange(2, 4)
    for name, tensor in tensors.items():
        file = f"model-{rng.randrange(count) + 1:05}-of-{count:05}.safetensors"
        files.setdefault(file, {})[name] = tensor
    (folder / "model.safetensors").unlink()
    for file, part in files.items():
        save_file(part, folder / file)
    index = {name: file for file, part in files.items() for name in part}
    text = json.dumps({"metadata": {}, "weight_map": index})
    (folder / "model.safetensors.index.json").write_text(text)


def _stacked(tensors: Tensors) -> Tensors:
    """Return tensors with each layer's experts as one, as transformers holds them in memory."""
    result = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    stacks: dict[str, dict[str, list[torch.Tensor]]] = {}
    for name, tensor in sorted(tensors.items()):  # fewer than ten experts
        if ".experts." in name:
            block, _, rest = name.partition(".experts.")
            stacks.setdefault(f"{block}.experts", {}).setdefault(rest.split(".")[1], []).append(
                tensor
            )
    for block, leaves in stacks.items():
        gate, up = (torch.stack(leaves[leaf]) for leaf in ("gate_proj", "up_proj"))
        result[f"{block}.gate_up_proj"] = torch.cat([gate, up], 1)
        result[f"{block}.down_proj"] = torch.stack(leaves["down_proj"])
    return result
