"""How a run uses a machine's GPUs where nobody says: a recipe that suits, a process a GPU, and what else makes it fit.

What was given by hand, or in a file of the person's, stays as it is; what changes the answers or what is trained
(shorter answers, LoRA) is proposed alone.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from qarl.configs.errors import ConfigError, ModelError
from qarl.configs.load import config_file, is_embedded, load_config, shipped_names, written_fields
from qarl.configs.schema.run import RunConfig
from qarl.planning.machine import Machine
from qarl.planning.memory import GIB
from qarl.planning.plan import make_plan
from qarl.planning.remedies import as_text, option, smallest_fit
from qarl.planning.shapes import sizes_of

_PROPOSED = ("rollout.max_new_tokens", "learner.lora.name")
_WHY = {
    "learner.zero_stage": "masters, gradients and moments are shared out",
    "learner.optimizer.offload": "moments wait in the host's memory",
    "learner.master_dtype": "masters take half the memory",
    "learner.gradient_checkpointing": "activations are computed again in the backward",
    "learner.micro_batch_tokens": "as many as a longest sequence has",
    "learner.keep_codes": "codes are made anew where they are needed",
    "learner.keep_products": "and so is what kernels multiply",
}


@dataclass(frozen=True)
class Choice:
    """file: the configuration's, a recipe's name where one was chosen. processes: to start. fields: of the
    configuration, by dotted path. words: a line for each, with the reason."""

    file: str | None
    processes: int
    fields: dict[str, object]
    words: tuple[str, ...] = ()

    def overrides(self, by_hand: Mapping[str, str]) -> dict[str, str]:
        """The fields as a command's, beside those given."""
        return {**by_hand, **{path: as_text(value) for path, value in self.fields.items()}}

    def arguments(self, file: str | None) -> list[str]:
        """What is to be added to a command that was given `file`, so that nothing is left to choose."""
        words = ["--config", self.file] if self.file is not None and self.file != file else []
        return words + [word for field in self.fields.items() for word in option(field).split(" ", 1)]


def choose(
    config: RunConfig, by_hand: Mapping[str, str], file: str | None, processes: int | None, machine: Machine,
    here: int | None = None,
) -> Choice:  # fmt: skip
    """For a new run. by_hand: fields, as text. file: of the person's, or None. processes: as asked for, or None; here:
    those on this machine, where a launcher starts them on several. Without GPUs, and for an embedded policy, which is
    small, nothing is chosen; of a model whose sizes are not known, processes alone. Raises `ConfigError` for more
    processes than GPUs."""
    if machine.device == "cpu" or is_embedded(config.model) or config.from_rollouts is not None:
        return Choice(file, processes or 1, {})
    if processes is not None:  # on as many GPUs, and no more
        machine = replace(machine, count=min(machine.count, here or processes))
    words: list[str] = []
    try:
        shapes, source = sizes_of(config.model)
    except (ModelError, ConfigError):  # of which the plan, or the checks of files, say more
        count, words = _dealt(config, processes, machine)
        return Choice(file, count, {}, tuple(words))
    for name in shipped_names() if file is None else []:
        shipped = load_config(config_file(name), {}) if name.startswith("recipes/") else None
        if shipped is not None and shipped.model == config.model and shipped.learner.lora.name == "none":
            recipe = load_config(config_file(name), dict(by_hand))
            count, about = _dealt(recipe, processes, machine)
            plan = make_plan(recipe, shapes, source, machine, count, here)
            if plan.fits:
                words.append(
                    f"--config {name}: for this model, and fits {machine.name}; give --config for other settings"
                )
                return Choice(name, count, {}, (*words, *about))
            needs = f"{plan.memory.total / GIB:.1f} of {plan.there / GIB:.1f} GiB"
            words.append(f"recipe {name} does not fit {machine.name}: {needs}")
    count, about = _dealt(config, processes, machine)
    words += about
    plan = make_plan(config, shapes, source, machine, count, here)
    kept = {*by_hand, *(written_fields(config_file(file)) if file is not None else ())}
    works = None if plan.fits else smallest_fit(plan, machine, lambda fields: not fields & {*kept, *_PROPOSED})
    fields = {} if works is None else works[1]
    words += [f"{option(field)}: {_WHY[field[0]]}" for field in fields.items()]
    return Choice(file, count, fields, tuple(words))


def _dealt(config: RunConfig, requested: int | None, machine: Machine) -> tuple[int, list[str]]:
    """As many processes as asked for, else one a GPU, as far as prompts can be dealt to them evenly; and what is said
    of that."""
    if requested or machine.count == 1:
        return requested or 1, []
    count = next(n for n in range(machine.count, 0, -1) if config.rollout.prompts % n == 0)
    uneven = f"; rollout.prompts {config.rollout.prompts} cannot be dealt to {machine.count}"
    return count, [f"--processes {count}: one a GPU{uneven if count < machine.count else ''}"]
