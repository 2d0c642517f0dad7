"""How a run uses a machine's GPUs where nobody says: a recipe that suits, a process a GPU, and what
else makes it fit; and what would make a run do so that does not fit: single changes, and the least
that together suffice.

What was given by hand, or in a file of the person's, stays as it is; what changes the answers or
what is trained (shorter answers, LoRA) is proposed alone.
"""

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, replace
from itertools import product

from qarl.configs.errors import ConfigError, ModelError
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
from qarl.planning.plan import SPARE, Plan, changed_config, make_plan
from qarl.planning.shapes import sizes_of

_PROPOSED = ("rollout.max_new_tokens", "learner.lora.name")
_WHY = {
    "learner.zero_stage": "masters, gradients and moments are shared out",
    "learner.optimizer.offload": "moments wait in the host's memory",
    "learner.master_dtype": "masters take half the memory",
    "learner.gradient_checkpointing": "activations are computed again in the backward",
    "learner.micro_batch_tokens": "as many as a longest sequence has",
    "learner.keep_codes": "codes are made anew where they are needed",
    "learner.keep_kernel_layout": "and so is what kernels multiply",
}


@dataclass(frozen=True)
class Choice:
    """file: the configuration's, a recipe's name where one was chosen. processes: to start. fields:
    of the configuration, by dotted path. words: a line for each, with the reason.
    """

    file: str | None
    processes: int
    fields: dict[str, object]
    words: tuple[str, ...] = ()

    def overrides(self, by_hand: Mapping[str, str]) -> dict[str, str]:
        """The fields as a command's, beside those given."""
        return {**by_hand, **as_texts(self.fields)}

    def arguments(self, file: str | None) -> list[str]:
        """What is to be added to a command that was given `file`, so that nothing is left to
        choose.
        """
        words = ["--config", self.file] if self.file is not None and self.file != file else []
        return words + [
            word for field in self.fields.items() for word in option(field).split(" ", 1)
        ]


def choose(
    config: RunConfig,
    by_hand: Mapping[str, str],
    file: str | None,
    processes: int | None,
    machine: Machine,
    here: int | None = None,
) -> Choice:
    """For a new run. by_hand: fields, as text. file: of the person's, or None. processes: as asked
    for, or None; here: those on this machine, where a launcher starts them on several. Without
    GPUs, and for an embedded policy, which is small, nothing is chosen; of a model whose sizes are
    not known, processes alone. Raises `ConfigError` for more processes than GPUs.
    """
    if machine.device == "cpu" or is_embedded(config.model) or config.from_rollouts is not None:
        return Choice(file, processes or 1, {})
    if processes is not None:  # on as many GPUs, and no more
        machine = replace(machine, count=min(machine.count, here or processes))
    words: list[str] = []
    try:
        shapes, source = sizes_of(config.model)
    # of which the plan, or the checks of files, say more
    except (ModelError, ConfigError):
        count, words = _process_count(config, processes, machine)
        return Choice(file, count, {}, tuple(words))
    for name in shipped_names() if file is None else []:
        shipped = load_config(config_file(name), {}) if name.startswith("recipes/") else None
        if (
            shipped is not None
            and shipped.model == config.model
            and shipped.learner.lora.name == "none"
        ):
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
                return Choice(name, count, {}, (*words, *about))
            needs = f"{plan.memory.total / GIB:.1f} of {plan.capacity / GIB:.1f} GiB"
            words.append(f"recipe {name} does not fit {machine.name}: {needs}")
    count, about = _process_count(config, processes, machine)
    words += about
    plan = make_plan(config, shapes, source, machine, count, here)
    kept = {*by_hand, *(written_fields(config_file(file)) if file is not None else ())}
    works = (
        None
        if plan.fits
        else smallest_fit(plan, machine, lambda fields: not fields & {*kept, *_PROPOSED})
    )
    fields = {} if works is None else works[1]
    words += [f"{option(field)}: {_WHY[field[0]]}" for field in fields.items()]
    return Choice(file, count, fields, tuple(words))


def _process_count(
    config: RunConfig, requested: int | None, machine: Machine
) -> tuple[int, list[str]]:
    """As many processes as asked for, else one a GPU, as far as prompts are a multiple; and what is
    said of that.
    """
    if requested or machine.count == 1:
        return requested or 1, []
    count = next(n for n in range(machine.count, 0, -1) if config.rollout.prompts % n == 0)
    uneven = f"; rollout.prompts {config.rollout.prompts} is no multiple of {machine.count}"
    return count, [f"--processes {count}: one a GPU{uneven if count < machine.count else ''}"]


_SHORT_ANSWERS = 4096
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
"""Machines to propose, in order of memory."""


@dataclass(frozen=True)
class Change:
    """Fields to set, by dotted path. cost: to the person, more for what changes the run than for
    what takes time. spreads: over all GPUs, a process each.
    """

    fields: dict[str, object]
    cost: int
    spreads: bool = False

    def words(self, processes: int) -> str:
        """As options of `qarl train`."""
        return " ".join(
            [
                *([f"--processes {processes}"] if self.spreads else []),
                *map(option, self.fields.items()),
            ]
        )


def option(field: tuple[str, object]) -> str:
    """`--flag value` of a field, by its short flag where it has one."""
    path, value = field
    return f"--{flag_of(path)} {as_text(value)}"


def _changes(config: RunConfig, machine: Machine, processes: int) -> list[Change]:
    """What could be changed, from the least to the most that it asks of a person."""
    learner, rollout = config.learner, config.rollout
    longest, short = rollout.longest, rollout.max_prompt_tokens + _SHORT_ANSWERS
    shorter: dict[str, object] = {
        "rollout.max_new_tokens": _SHORT_ANSWERS,
        "learner.micro_batch_tokens": short,
    }
    on_host: dict[str, object] = {
        "learner.lora.name": "lora",
        "learner.lora.base": "host",
    }
    on_gpus, spreads = machine.device == "cuda", processes < machine.count
    shares = on_gpus and max(machine.count, processes) > 1 and (spreads or learner.zero_stage != 3)
    changes = (
        (
            learner.gradient_checkpointing is not True,
            Change({"learner.gradient_checkpointing": True}, 1),
        ),
        (
            learner.micro_batch_tokens > longest,
            Change({"learner.micro_batch_tokens": longest}, 1),
        ),
        (shares, Change({"learner.zero_stage": 3}, 2, spreads)),
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


def _changed(plan: Plan, changes: list[Change], machine: Machine, processes: int) -> Plan | None:
    """The plan with changes, or None where they do not go together."""
    fields = {path: value for change in changes for path, value in change.fields.items()}
    spreads = any(change.spreads for change in changes)
    here = plan.local if machine is plan.machine else processes
    processes, here = (machine.count, machine.count) if spreads else (processes, here)
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
    except ValueError:
        return None


def helping(plan: Plan) -> dict[str, int]:
    """Every single change that would make it smaller on its machine, as options → bytes a process
    takes less.
    """
    saved, same_cache = (
        {},
        Change({"rollout.kv_cache_gib": plan.config.rollout.kv_cache_gib}, 0),
    )
    for change in _changes(plan.config, plan.machine, plan.processes):
        changed = _changed(plan, [change, same_cache], plan.machine, plan.processes)
        if changed is not None and changed.memory.total < plan.memory.total:
            saved[change.words(changed.processes)] = plan.memory.total - changed.memory.total
    return saved


Fitting = tuple[Plan, dict[str, object]]
"""A plan that fits and leaves `SPARE`, and the fields that make it one."""


def fitting(plan: Plan) -> list[Fitting]:
    """The least changes that make the run fit its own machine, else the smallest of `_LISTED` that
    it fits with some; where they change what is trained, also the smallest that it fits without.
    Nothing where there is none.
    """
    there = 0 if plan.machine.device == "cpu" else plan.machine.count * plan.machine.memory
    larger = [
        machine for machine in map(parse_machine, _LISTED) if machine.count * machine.memory > there
    ]
    proposed = []
    for lora in (True, False):
        allowed = (
            (lambda fields: True) if lora else (lambda fields: "learner.lora.name" not in fields)
        )
        candidates = (smallest_fit(plan, machine, allowed) for machine in (plan.machine, *larger))
        if works := next(filter(None, candidates), None):
            proposed.append(works)
            if "learner.lora.name" not in works[1]:
                break
    return proposed


def smallest_fit(
    plan: Plan, machine: Machine, allowed: Callable[[Set[str]], bool]
) -> Fitting | None:
    """The least changes that make it fit a machine; None where there are none. allowed: whether a
    field may change.
    """
    processes = plan.processes if machine is plan.machine else min(plan.processes, machine.count)
    changes = [
        change
        for change in _changes(plan.config, machine, processes)
        if allowed(change.fields.keys())
    ]
    masks = product((False, True), repeat=len(changes))
    subsets = [
        [change for change, taken in zip(changes, mask, strict=True) if taken] for mask in masks
    ]
    for subset in sorted(subsets, key=lambda subset: sum(change.cost for change in subset)):
        candidate = _changed(plan, subset, machine, processes)
        if candidate is not None and candidate.share <= 1 - SPARE and not candidate.lacks_host:
            return candidate, {
                path: value for change in subset for path, value in change.fields.items()
            }
    return None
