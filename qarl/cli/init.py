"""`qarl init`: write a folder with questions, a reward and a configuration to start from.

The configuration can be for a model of one's own.
"""

import argparse
import shlex
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from qarl.cli.options import say
from qarl.configs.errors import ConfigError
from qarl.configs.load import chosen_config, config_file, set_field
from qarl.configs.schema.base import expand_home
from qarl.configs.schemes import SCHEME_SPECS, UNQUANTIZED
from qarl.configs.yaml_file import as_texts, read_yaml
from qarl.planning.choice import choose, option, smallest_fit
from qarl.planning.machine import Machine, planned_machine
from qarl.planning.plan import make_plan
from qarl.planning.shapes import Shapes, sizes_of
from qarl.planning.words import one_line
from qarl.preflight.files import check_new_folder
from qarl.quant.checkpoint.folder import read_config
from qarl.quant.checkpoint.settings import positions
from qarl.starter import FILES, write_starter

_OWN = {
    "task.name": FILES[0],
    "task.reward": "reward.py:reward",
    "task.correct": "reward.py:correct",
}
_SCHEMES = tuple(
    name
    for name, spec in SCHEME_SPECS.items()
    if spec.weights is not None and spec.weights.kind == "int" and not spec.only
)
"""Integer schemes of all machines, in the table's order. The first one that fits all of a model's
matrices is taken.
"""
_ADAPTERS = {"learner.optimizer.name": "adamw", "learner.optimizer.lr": 1e-5}
"""Optimizer settings for LoRA, whose factors need a larger learning rate than masters."""


def add_init(commands: Any) -> None:
    """Add `qarl init` to the commands."""
    init = commands.add_parser(
        "init",
        help="Write commented questions, a reward and a configuration to start from.",
        description=(
            f"Write {', '.join(FILES)} to a new folder: a task of your own that trains without"
            " changes, on an embedded policy, or on --model with the settings of `--config small`"
            " and the changes that make it fit the machine."
        ),
    )
    init.add_argument("folder", metavar="DIR", help="Folder to create, which must not exist.")
    init.add_argument("--model", help="Model to train: a transformers folder or a hub id.")
    init.add_argument(
        "--gpus", help="GPUs to fit instead of this machine's, such as 1x24GB or 8xH100."
    )
    init.set_defaults(run=_init)


def _init(known: argparse.Namespace, console: Console) -> int:
    folder = Path(known.folder)
    check_new_folder(folder, "folder", "DIR")
    if known.gpus is not None and known.model is None:
        raise ConfigError(f"--gpus {known.gpus} goes with --model, the model that is to fit them")
    fitted = None
    if known.model is not None:
        fitted = _fitted(known.model, planned_machine(known.gpus))
    write_starter(folder, fitted)
    say(console, f"wrote {', '.join(FILES)} to {folder}")
    say(console, f"cd {shlex.quote(str(folder))}")
    say(console, "qarl check run.yaml && qarl train --config run.yaml")
    return 0


def _suited(model: str, shapes: Shapes) -> dict[str, Any]:
    """Return the fields in which a model needs other values than `small`: limits within its
    positions, and a scheme that fits its matrices.
    """
    small = chosen_config("small", {"model": model})
    all_shapes = {*shapes.attention_matrices, *shapes.mlp_matrices}
    scheme = next(
        (name for name in _SCHEMES if all(map(SCHEME_SPECS[name].fits, all_shapes))),
        UNQUANTIZED,
    )
    fields: dict[str, Any] = {} if scheme == small.scheme else {"scheme": scheme}
    length = positions(read_config(Path(model))) if Path(model).is_dir() else None
    if length is not None and length < small.rollout.longest:
        prompt = min(small.rollout.max_prompt_tokens, int(length) // 2)
        fields |= {
            "rollout.max_prompt_tokens": prompt,
            "rollout.max_new_tokens": int(length) - prompt,
        }
    return fields


def _fitted(model: str, machine: Machine) -> str:
    """Return the text of a run.yaml for a model: shipped settings with the smallest changes that
    make its memory fit the machine. Raises `ConfigError` if none do.
    """
    local = Path(expand_home(model))
    model = str(local.resolve()) if local.is_dir() else model
    shapes, source = sizes_of(model)
    suited = _suited(model, shapes)
    config = chosen_config("small", {"model": model, **as_texts(suited)})
    processes = choose(config, {}, "small", None, machine).processes
    plan = make_plan(config, shapes, source, machine, processes)
    # train all masters if that fits, otherwise adapters
    fit = smallest_fit(plan, machine, lambda fields: "learner.lora.name" not in fields)
    fit = fit or smallest_fit(plan, machine, lambda _: True)
    if fit is None:
        raise ConfigError(
            f"no settings known here make {model!r} fit {machine.name}: `qarl plan --config small"
            f" --model {shlex.quote(model)} --gpus …` says what takes the room, and which machine"
            " has it"
        )
    fitting, changes = fit
    fields = {**suited, **changes}
    if changes.get("learner.lora.name") == "lora":
        fields |= _ADAPTERS
    tree = {"model": model, **read_yaml(config_file("small"))}
    for path, value in {**_OWN, **fields}.items():
        set_field(tree, path, value)
    changed = " ".join(map(option, fields.items())) or "nothing"
    return (
        f"# {model} on {machine.name}, by `--config small`; changed for it: {changed}\n# memory:"
        f" {one_line(fitting)}\n{yaml.safe_dump(tree, sort_keys=False)}"
    )
