"""A run of `qarl sft`: checks before anything is loaded, the updates, and the two folders it
writes.
"""

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from qarl.configs.errors import ConfigError
from qarl.configs.flags import flag_of
from qarl.configs.load import overridden
from qarl.configs.schema.base import leaf_values
from qarl.configs.schema.learner import OptimizerConfig
from qarl.configs.schema.rollout import LONGEST
from qarl.configs.schema.run import RunConfig
from qarl.configs.words import quoted
from qarl.preflight.files import check_named_model, check_new_folder
from qarl.preflight.schemes import check_schemes
from qarl.quant.checkpoint.folder import read_config
from qarl.quant.checkpoint.settings import positions
from qarl.report.run_folder import describe_environment
from qarl.report.startup import phase
from qarl.rollout.types import Group, RequestDefaults
from qarl.run.export_note import export_note
from qarl.run.model_card import write_card
from qarl.run.request_defaults import request_defaults
from qarl.sft.data import Pair, encode, read_pairs
from qarl.tasks import Problem

if TYPE_CHECKING:  # these import torch
    from qarl.run.policy import Architecture
    from qarl.run.prompts import Prompter
    from qarl.run.served import Served
    from qarl.sft.train import SftStep

_LEARNER = (
    "master_dtype",
    "kernel",
    "operators",
    "packing",
    "micro_batch_tokens",
    "logprob_chunk_tokens",
    "gradient_checkpointing",
    "input_gradients",
    "compile",
    "router_aux_loss",
)
"""Fields of the `learner` section that apply."""
FIELDS = (
    "model",
    "scheme",
    "layers",
    "dtype",
    "quantization.kv_cache",
    "steps",
    "seed",
    "output",
    "task.subset",
    "task.split",
    "task.system",
    "task.template",
    *(f"learner.{name}" for name in _LEARNER),
    *(f"learner.optimizer.{name}" for name in OptimizerConfig.model_fields),
)
"""Fields of a run's configuration that apply to supervised fine-tuning."""
_UNSET_STEPS = 10**9
"""Steps of the configuration while the number of pairs is unknown, from which they follow."""
_ROOM = 2048
"""Number of tokens that the export allows for a prompt and its answer, if no pair is longer."""


@dataclass(frozen=True)
class SftPlan:
    """Plan of a fine-tuning run."""

    config: RunConfig
    """The configuration."""
    folder: Path
    """Run folder, not created yet."""
    architecture: "Architecture"
    """The model, in the configuration's schemes."""
    learned: list[Group]
    """Pairs to learn from, as tokens."""
    heldout: list[Group]
    """Pairs held out, as tokens."""
    batch: int
    """Number of pairs a step."""
    epochs: int | None
    """Number of passes over the pairs; None if the number of steps was given."""
    questions: list[Problem]
    """Problems of the held-out pairs, or of all pairs if none are held out."""
    prompter: "Prompter"
    """Maker of the pairs' prompts."""
    defaults: RequestDefaults
    """How the pairs ask the policy, without the lengths."""


@dataclass(frozen=True)
class SftOutcome:
    """Folders and losses of a finished run."""

    export: Path
    """Folder of the deployable codes."""
    masters: Path
    """Folder that `qarl train --model` reads."""
    before: float | None
    """Mean −log p of the held-out pairs' completion tokens before the first update, nats; None
    if no pair is held out.
    """
    after: float | None
    """The same after the last update."""
    served: "Served"
    """Comparison of what a server of the export is asked with the prompts of the pairs."""


def sft_config(data: str, overrides: Mapping[str, str], steps: int = _UNSET_STEPS) -> RunConfig:
    """Return the configuration of a fine-tuning.

    Args:
        data: file or data set of the pairs.
        overrides: values of `FIELDS` by dotted path.
        steps: number of steps, unless the overrides set it.

    Raises:
        ConfigError: a field would have no effect here, or values are wrong or contradict each
            other.
    """
    tree = {
        "task": {"name": data},
        "steps": steps,
        # Required, but without effect: pairs have their own lengths.
        "rollout": {"max_prompt_tokens": 1, "max_new_tokens": 1},
        "learner": {"share_prompts": False, "optimizer": {"lr": 1e-5}},
    }
    config = overridden(tree, overrides)
    for path, value in overrides.items():
        if not f"{path}.".startswith(tuple(f"{field}." for field in FIELDS)):
            instead = "name the pairs by --data" if path == "task.name" else "omit it"
            raise ConfigError(
                f"--{flag_of(path)} {quoted(value)} has no effect in `qarl sft`; {instead}"
                " (docs/guide/sft.md lists the fields that apply)"
            )
    return config


def plan_sft(
    data: str,
    overrides: Mapping[str, str],
    batch: int,
    epochs: int | None,
    heldout: float,
) -> SftPlan:
    """Return what a run will do. Nothing is written, and no weight is loaded.

    Raises what `sft_config`, `read_pairs`, `encode` and the checks of schemes, model and folder do.

    Args:
        data: as in `sft_config`.
        overrides: as in `sft_config`.
        batch: number of pairs a step.
        epochs: number of passes over the pairs. None: as many steps as the overrides say.
        heldout: fraction of the pairs to hold out.
    """
    settings = sft_config(data, overrides)
    folder = Path(settings.output or f"runs/{_name(settings)}")
    check_new_folder(folder, "run folder", "--output")
    check_named_model(settings)
    check_schemes(settings)
    with phase("reading pairs"):
        pairs = read_pairs(settings.task, heldout)
    learned = sum(not pair.heldout for pair in pairs)
    if batch > learned:
        raise ConfigError(
            f"--batch {batch} is more than the {learned} pairs to learn from; give at most"
            f" {learned}"
        )
    steps = settings.steps if epochs is None else ceil(epochs * learned / batch)
    # With the number of steps, which warm-up and decay have to fit.
    config = sft_config(data, overrides, steps)
    with phase("importing torch and transformers"):
        from qarl.preflight.support import require_schemes
        from qarl.run.prompts import open_prompter
    with phase("checking kernels"):
        architecture = require_schemes(config)
    source = architecture.folder
    with phase("tokenizing pairs"):
        unlimited = config.rollout.model_copy(update={"max_prompt_tokens": LONGEST})
        prompter = open_prompter(source, unlimited, config.task)
        groups = encode(prompter, pairs, positions(read_config(source)))
    problems = [pair.problem for pair in pairs]
    return SftPlan(
        config=config,
        folder=folder,
        architecture=architecture,
        learned=_part(pairs, groups, heldout=False),
        heldout=_part(pairs, groups, heldout=True),
        batch=batch,
        epochs=epochs,
        questions=[pair.problem for pair in pairs if pair.heldout] or problems,
        prompter=prompter,
        defaults=request_defaults(config, prompter.tokenizer, problems),
    )


def run_sft(plan: SftPlan, show: Callable[["SftStep"], None]) -> SftOutcome:
    """Fine-tune, write export and masters, and return where they are.

    The folder is created once the model is loaded. Raises what `qarl.sft.train.open_learner` and
    `update` do, and `ExportError` if a folder cannot be written.

    show: called after each step.
    """
    from qarl.run.served import LIMIT, note_requests
    from qarl.sft.train import batch_rows, mean_loss, open_learner, pairs_batch, update
    from qarl.sync.export import export_checkpoint, export_masters

    config = plan.config
    with phase("loading the model"):
        learner = open_learner(config, plan.architecture)
    pad_token = plan.prompter.pad_token
    measured = pairs_batch(plan.heldout, pad_token) if plan.heldout else None
    before = mean_loss(learner, measured) if measured else None
    _make_folder(plan)
    with (plan.folder / "metrics.jsonl").open("a", encoding="utf-8") as lines:
        for step in range(config.steps):
            rows = batch_rows(step, plan.batch, len(plan.learned), plan.epochs, config.seed)
            batch = pairs_batch([plan.learned[row] for row in rows], pad_token)
            result = update(learner, batch, step)
            lines.write(json.dumps(asdict(result)) + "\n")
            lines.flush()
            show(result)
    after = mean_loss(learner, measured) if measured else None
    source = plan.architecture.folder
    export = plan.folder / "export"
    masters = plan.folder / "masters"
    note = export_note(plan.folder, config, config.steps, export, source)
    limits = _limits(plan)
    note |= limits
    note["sft"] = {
        "pairs": len(plan.learned),
        "heldout_pairs": len(plan.heldout),
        "heldout_loss": [before, after],
    }
    with phase("writing codes and masters"):
        export_masters(learner.model, source, masters)
        defaults = replace(plan.defaults, **limits)
        export_checkpoint(learner.model, source, export, note, defaults)
    rollout = config.rollout.model_copy(update=limits)
    limited = config.model_copy(update={"rollout": rollout})
    served = note_requests(export, source, plan.prompter, plan.questions[:LIMIT], limited, defaults)
    write_card(export)
    return SftOutcome(export=export, masters=masters, before=before, after=after, served=served)


def _limits(plan: SftPlan) -> dict[str, int]:
    """Return the prompt and completion lengths for which the export is meant, in tokens.

    They allow for the longest pair, and for at least `_ROOM` tokens if the model has as many
    positions.
    """
    groups = [*plan.learned, *plan.heldout]
    prompts = [len(group.prompt.token_ids) for group in groups]
    completions = [len(group.completions[0].token_ids) for group in groups]
    longest_prompt = max(prompts)
    longest_pair = max(sum(pair) for pair in zip(prompts, completions, strict=True))
    model_limit = int(positions(read_config(plan.architecture.folder)) or _ROOM)
    total = max(longest_pair, min(_ROOM, model_limit))
    return {"max_prompt_tokens": longest_prompt, "max_new_tokens": total - longest_prompt}


def _name(config: RunConfig) -> str:
    """Return the default name of the run folder."""
    now = time.strftime("%Y%m%d-%H%M%S")
    return f"{Path(config.model).name}-{config.scheme}-sft-{now}"


def _part(
    pairs: list[Pair],
    groups: list[Group],
    heldout: bool,
) -> list[Group]:
    """Return the groups of the pairs that are held out, or of those that are not."""
    return [group for pair, group in zip(pairs, groups, strict=True) if pair.heldout == heldout]


def _make_folder(plan: SftPlan) -> None:
    """Create the run's folder with its settings.

    It has no config.yaml, because `qarl train` cannot resume this run.
    """
    plan.folder.mkdir(parents=True)
    fields = {path: value for path, value in leaf_values(plan.config).items() if path in FIELDS}
    settings = {
        "data": plan.config.task.name,
        "batch": plan.batch,
        "epochs": plan.epochs,
        **fields,
    }
    plain = json.loads(json.dumps(settings, default=str))
    (plan.folder / "sft.yaml").write_text(yaml.safe_dump(plain, sort_keys=False), encoding="utf-8")
    (plan.folder / "environment.json").write_text(
        json.dumps(describe_environment(), indent=2) + "\n"
    )
