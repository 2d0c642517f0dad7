"""`qarl init`: a folder with questions, a reward and a configuration to start from; of one's own
model too.
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
from qarl.configs.schema.base import at_home
from qarl.configs.schemes import SCHEME_SPECS
from qarl.configs.yaml_file import as_texts, read_yaml
from qarl.planning.choice import choose, option, smallest_fit
from qarl.planning.machine import Machine, planned_machine
from qarl.planning.plan import make_plan
from qarl.planning.shapes import Shapes, sizes_of
from qarl.planning.words import one_line
from qarl.quant.checkpoint.folder import positions, read_config
from qarl.run.check import check_new_folder
from qarl.starter import FILES, write_starter

_OWN = {
    "task.name": FILES[0],
    "task.reward": "reward.py:reward",
    "task.correct": "reward.py:correct",
}
_SCHEMES = ("w4a16", "w4a16-g64", "w4a16-g32", "w4a16-channel", "w8a8")
"""Of which the first that a model's matrices come to is taken."""
_ADAPTERS = {"learner.optimizer.name": "adamw", "learner.optimizer.lr": 1e-5}
"""Of LoRA, whose factors want a larger rate than masters."""


def add_init(commands: Any) -> None:
    """Add `qarl init` to the commands."""
    init = commands.add_parser(
        "init",
        help="write commented questions, reward and configuration to start from",
        description=(
            f"Write {', '.join(FILES)} to a new folder: a task of your own that trains as it is, on"
            " an embedded policy, or on --model with the settings of `--config small` and what"
            " makes it fit the machine."
        ),
    )
    init.add_argument("folder", metavar="DIR", help="folder to make (must not exist)")
    init.add_argument("--model", help="your model: a transformers folder, or a hub id")
    init.add_argument("--gpus", help="for these instead of this machine's: 1x24GB, or 8xH100")
    init.set_defaults(run=_init)


def _init(known: argparse.Namespace, console: Console) -> int:
    folder = Path(known.folder)
    check_new_folder(folder, "folder", "DIR")
    if known.gpus is not None and known.model is None:
        raise ConfigError(f"--gpus {known.gpus} goes with --model, the model that is to fit them")
    write_starter(
        folder,
        _fitted(known.model, planned_machine(known.gpus)) if known.model is not None else None,
    )
    say(console, f"wrote {', '.join(FILES)} to {folder}")
    say(console, f"cd {shlex.quote(str(folder))}")
    say(console, "qarl check run.yaml && qarl train --config run.yaml")
    return 0


def _suited(model: str, shapes: Shapes) -> dict[str, Any]:
    """What has to differ from `small` for the model: its positions, and a scheme that its matrices
    come to.
    """
    small = chosen_config("small", {"model": model})
    all_shapes = {*shapes.attention_matrices, *shapes.mlp_matrices}
    scheme = next(
        (name for name in _SCHEMES if all(map(SCHEME_SPECS[name].fits, all_shapes))),
        "bf16",
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
    """A run.yaml for a model: shipped settings, and the least changes with which its memory fits
    the machine. Raises `ConfigError` where none do.
    """
    local = Path(at_home(model))
    model = str(local.resolve()) if local.is_dir() else model
    shapes, source = sizes_of(model)
    suited = _suited(model, shapes)
    config = chosen_config("small", {"model": model, **as_texts(suited)})
    plan = make_plan(
        config,
        shapes,
        source,
        machine,
        choose(config, {}, "small", None, machine).processes,
    )
    whole = smallest_fit(plan, machine, lambda fields: "learner.lora.name" not in fields)
    works = whole or smallest_fit(plan, machine, lambda _: True)
    if works is None:
        raise ConfigError(
            f"no settings known here make {model!r} fit {machine.name}: `qarl plan --config small"
            f" --model {shlex.quote(model)} --gpus …` says what takes the room, and which machine"
            " has it"
        )
    fitting, changes = works
    fields = {
        **suited,
        **changes,
        **(_ADAPTERS if changes.get("learner.lora.name") == "lora" else {}),
    }
    tree = {"model": model, **read_yaml(config_file("small"))}
    for path, value in {**_OWN, **fields}.items():
        set_field(tree, path, value)
    said = " ".join(map(option, fields.items())) or "nothing"
    return (
        f"# {model} on {machine.name}, by `--config small`; changed for it: {said}\n# memory:"
        f" {one_line(fitting)}\n{yaml.safe_dump(tree, sort_keys=False)}"
    )
