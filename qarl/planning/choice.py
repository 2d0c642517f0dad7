"""Defaults for a run on a machine's GPUs, and proposals for a run that does not fit.

A new run gets a recipe for its model, one process a GPU, and the changes of its configuration that
make it fit (`choose`). For a run that does not fit, `helping` lists single changes, and `fitting`
the smallest set of changes that suffices.

Options given on the command line or in the user's file stay as they are. Changes of the answers'
length or of what is trained (LoRA) are proposed, never chosen.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass, replace

from pydantic import ValidationError

from qarl.configs.errors import ConfigError, InputError, ModelError
from qarl.configs.flags import flag_of
from qarl.configs.load import (
    config_file,
    is_embedded,
    load_config,
    shipped_names,
    written_fields,
)
from qarl.configs.schema.run import RunConfig
from qarl.configs.yaml_file import as_text, as_texts
from qarl.planning.machine import Machine, parse_machine
from qarl.planning.memory import GIB
from qarl.planning.plan import SPARE, MemoryPlan, changed_config, make_plan
from qarl.planning.shapes import sizes_of

_PROPOSED = ("rollout.max_new_tokens", "learner.lora.name")
"""Fields that are proposed and never chosen."""

_WHY = {
    "learner.optimizer.offload": "moments wait in the host's memory",
    "learner.master_dtype": "masters take half the memory",
    "learner.gradient_checkpointing": "activations are computed again in the backward",
    "learner.micro_batch_tokens": "as many as a longest sequence has",
    "learner.keep_codes": "codes are made anew where they are needed",
    "learner.keep_kernel_layout": "and so is what kernels multiply",
}


@dataclass(frozen=True)
class LaunchChoice:
    """The choices for a new run."""

    file: str | None
    """The configuration's file: the user's, or the name of the recipe that was chosen."""

    processes: int
    """Number of processes to start."""

    fields: dict[str, object]
    """Chosen fields of the configuration: dotted path → value."""

    words: tuple[str, ...] = ()
    """One line for each choice, with its reason."""

    def overrides(self, by_hand: Mapping[str, str]) -> dict[str, str]:
        """Return the options of a command: those given by hand, and the chosen fields."""
        return {**by_hand, **as_texts(self.fields)}

    def arguments(self, file: str | None) -> list[str]:
        """Return the arguments that make a command with `file` state every choice."""
        words = ["--config", self.file] if self.file is not None and self.file != file else []
        for field in self.fields.items():
            words += option(field).split(" ", 1)
        return words


def choose(
    config: RunConfig,
    by_hand: Mapping[str, str],
    file: str | None,
    processes: int | None,
    machine: Machine,
    here: int | None = None,
) -> LaunchChoice:
    """Choose recipe, processes and fields for a new run.

    Nothing is chosen without GPUs, for an embedded policy, which is small, or for a replay of
    rollouts. If the model's sizes are unknown, only the number of processes is chosen.

    Args:
        config: configuration so far.
        by_hand: fields given on the command line, as text.
        file: the user's configuration file, or None.
        processes: the requested number of processes, or None.
        machine: machine to run on.
        here: number of processes on this machine, if a launcher starts them on several.

    Raises `ConfigError` if there are more processes than GPUs.
    """
    if machine.device == "cpu" or is_embedded(config.model) or config.from_rollouts is not None:
        return LaunchChoice(file, processes or 1, {})
    if processes is not None:  # plan for as many GPUs, even if the machine has more
        on_each = here or -(-processes // machine.machines)
        machine = replace(machine, count=min(machine.count, on_each))
    words: list[str] = []
    try:
        shapes, source = sizes_of(config.model)
    # The plan, or the checks of files, report the error later.
    except (ModelError, ConfigError):
        count, words = _process_count(config, processes, machine)
        return LaunchChoice(file, count, {}, tuple(words))
    for name in _recipes_for(config.model) if file is None else ():
        try:
            recipe = load_config(config_file(name), dict(by_hand))
        except ConfigError as error:
            words.append(f"recipe {name} does not go with these options: {error}")
            continue
        count, about = _process_count(recipe, processes, machine)
        plan = make_plan(recipe, shapes, source, machine, count, here)
        if plan.fits:
            words.append(
                f"--config {name}: for this model, and fits {machine.name}; give --config for"
                " other settings"
            )
            return LaunchChoice(name, count, {}, (*words, *about))
        needs = f"{plan.memory.total / GIB:.1f} of {plan.capacity / GIB:.1f} GiB"
        words.append(f"recipe {name} does not fit {machine.name}: {needs}")
    count, about = _process_count(config, processes, machine)
    words += about
    plan = make_plan(config, shapes, source, machine, count, here)
    fields: dict[str, object] = {}
    if not plan.fits:
        written = written_fields(config_file(file)) if file is not None else ()
        fixed = {*by_hand, *written, *_PROPOSED}
        smallest = smallest_fit(plan, machine, lambda changed: not changed & fixed)
        fields = {} if smallest is None else smallest[1]
    words += [f"{option(field)}: {_WHY[field[0]]}" for field in fields.items()]
    return LaunchChoice(file, count, fields, tuple(words))


def _recipes_for(model: str) -> Iterator[str]:
    """Names of the shipped recipes that train all of this model, not adapters of it."""
    for name in shipped_names():
        if not name.startswith("recipes/"):
            continue
        recipe = load_config(config_file(name), {})
        if recipe.model == model and recipe.learner.lora.name == "none":
            yield name


def _process_count(
    config: RunConfig, requested: int | None, machine: Machine
) -> tuple[int, list[str]]:
    """Return the requested number of processes, or the most GPUs that divide the prompts evenly.

    Every machine has equally many, at least one. With the number comes a list of one line that
    explains the choice, empty if nothing was chosen.
    """
    if requested or machine.devices == 1:
        return requested or 1, []
    prompts = config.rollout.prompts
    counts = range(machine.devices, 0, -machine.machines)
    count = next((n for n in counts if prompts % n == 0), machine.machines)
    uneven = f"; rollout.prompts {prompts} is not a multiple of {machine.devices}"
    return count, [f"--processes {count}: one a GPU{uneven if count < machine.devices else ''}"]


_SHORT_ANSWERS = 4096
"""Tokens of an answer, as a remedy proposes."""

_LISTED = (
    "1xL40S",
    "1xH100",
    "1xH200",
    "2xH100",
    "2xH200",
    "4xH100",
    "4xH200",
    "8xH100",
    "8xH200",
    "8xB200",
)
"""Machines to propose, by increasing memory."""


@dataclass(frozen=True)
class Change:
    """One change that reduces a run's memory."""

    fields: dict[str, object]
    """Fields to set: dotted path → value."""

    cost: int
    """Cost to the user: a change of what the run does costs more than one that takes time."""

    spreads: bool = False
    """Whether the run also starts one process on each GPU."""

    def words(self, processes: int) -> str:
        """Return the change as options of `qarl train`."""
        options = [option(field) for field in self.fields.items()]
        if self.spreads:
            options.insert(0, f"--processes {processes}")
        return " ".join(options)


def option(field: tuple[str, object]) -> str:
    """Return `--flag value` of a field, with its short flag if it has one."""
    path, value = field
    return f"--{flag_of(path)} {as_text(value)}"


def _changes(config: RunConfig, machine: Machine, processes: int) -> list[Change]:
    """Return the changes that apply to a configuration on a machine."""
    learner = config.learner
    rollout = config.rollout
    longest = rollout.longest
    shorter: dict[str, object] = {
        "rollout.max_new_tokens": _SHORT_ANSWERS,
        "learner.micro_batch_tokens": rollout.max_prompt_tokens + _SHORT_ANSWERS,
    }
    on_host: dict[str, object] = {
        "learner.lora.name": "lora",
        "learner.lora.base": "host",
    }
    on_gpus = machine.device == "cuda"
    spreads = on_gpus and processes < machine.devices
    changes = (
        (
            learner.gradient_checkpointing is not True,
            Change({"learner.gradient_checkpointing": True}, 1),
        ),
        (
            learner.micro_batch_tokens > longest,
            Change({"learner.micro_batch_tokens": longest}, 1),
        ),
        (spreads, Change({}, 2, spreads=True)),
        (
            on_gpus and learner.optimizer.offload == "none",
            Change({"learner.optimizer.offload": "cpu"}, 4),
        ),
        (learner.keep_codes, Change({"learner.keep_codes": False}, 6)),
        (
            learner.keep_kernel_layout and not config.shares_engine,
            Change({"learner.keep_kernel_layout": False}, 6),
        ),
        (
            learner.master_dtype == "float32",
            Change({"learner.master_dtype": "bfloat16"}, 5),
        ),
        (rollout.max_new_tokens > _SHORT_ANSWERS, Change(shorter, 8)),
        (learner.lora.name == "none", Change({"learner.lora.name": "lora"}, 9)),
        (
            on_gpus and learner.lora.name == "none" and processes == 1,
            Change(on_host, 10),
        ),
    )
    return [change for applies, change in changes if applies]


def _changed(
    plan: MemoryPlan,
    changes: list[Change],
    machine: Machine,
    processes: int,
) -> MemoryPlan | None:
    """Return the plan with changes, or None if they contradict each other."""
    fields = _all_fields(changes)
    here = plan.local if machine is plan.machine else processes
    if any(change.spreads for change in changes):
        processes = machine.devices
        here = machine.count
    if plan.config.rollout.prompts % processes:
        return None
    try:
        return make_plan(
            changed_config(plan.requested, fields),
            plan.shapes,
            plan.source,
            machine,
            processes,
            here,
        )
    except (ValidationError, InputError):
        return None


def _all_fields(changes: list[Change]) -> dict[str, object]:
    """Return the fields of all changes; a later change overrides an earlier one."""
    fields: dict[str, object] = {}
    for change in changes:
        fields.update(change.fields)
    return fields


def helping(plan: MemoryPlan) -> dict[str, int]:
    """Return every single change that reduces a run's memory on its machine.

    The result maps the change, as options of `qarl train`, to the bytes that a process saves.
    """
    saved: dict[str, int] = {}
    # Else a plan would give all memory that a change saves to the KV cache.
    same_cache = Change({"rollout.kv_cache_gib": plan.config.rollout.kv_cache_gib}, 0)
    for change in _changes(plan.config, plan.machine, plan.processes):
        changed = _changed(plan, [change, same_cache], plan.machine, plan.processes)
        if changed is not None and changed.memory.total < plan.memory.total:
            saved[change.words(changed.processes)] = plan.memory.total - changed.memory.total
    return saved


Fitting = tuple[MemoryPlan, dict[str, object]]
"""A plan that fits and leaves `SPARE` free, and the changed fields that make it fit."""


def fitting(plan: MemoryPlan) -> list[Fitting]:
    """Return the cheapest changes that make a run fit its machine, or a larger one.

    If no changes make it fit its own machine, the smallest of `_LISTED` that it fits with some is
    proposed. If the changes include LoRA, which changes what is trained, a second proposal does
    without it. The list is empty if there is no proposal.
    """
    available = 0 if plan.machine.device == "cpu" else plan.machine.devices * plan.machine.memory
    listed = map(parse_machine, _LISTED)
    larger = [machine for machine in listed if machine.count * machine.memory > available]
    proposed = []
    for allowed in (_any_fields, _all_but_lora):
        candidates = (smallest_fit(plan, machine, allowed) for machine in (plan.machine, *larger))
        smallest = next(filter(None, candidates), None)
        if smallest is None:
            continue
        proposed.append(smallest)
        if _all_but_lora(smallest[1].keys()):
            break
    return proposed


def _any_fields(fields: Set[str]) -> bool:
    return True


def _all_but_lora(fields: Set[str]) -> bool:
    return "learner.lora.name" not in fields


def smallest_fit(
    plan: MemoryPlan, machine: Machine, allowed: Callable[[Set[str]], bool]
) -> Fitting | None:
    """Return the cheapest set of changes that makes a run fit a machine, or None if none does.

    allowed: whether fields of these paths may change.
    """
    processes = plan.processes if machine is plan.machine else min(plan.processes, machine.count)
    possible = _changes(plan.config, machine, processes)
    changes = [change for change in possible if allowed(change.fields.keys())]
    # At most ten changes apply, so that all of their subsets can be tried.
    masks = itertools.product((False, True), repeat=len(changes))
    subsets = [list(itertools.compress(changes, mask)) for mask in masks]
    for subset in sorted(subsets, key=_total_cost):
        candidate = _changed(plan, subset, machine, processes)
        if candidate is not None and candidate.fraction <= 1 - SPARE and not candidate.lacks_host:
            return candidate, _all_fields(subset)
    return None


def _total_cost(changes: list[Change]) -> int:
    return sum(change.cost for change in changes)
