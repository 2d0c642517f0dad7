"""A run's memory against its machine: what it takes, with what the configuration leaves open
decided.

Fields are the plan's to decide where the configuration leaves them open:
`learner.gradient_checkpointing` (auto), `rollout.kv_cache_gib`, and on CPUs `learner.compile`,
which is off there. What it decides is in the configuration from then on, and in the run's
config.yaml.
"""

from dataclasses import dataclass

from qarl.configs.errors import ConfigError, InputError
from qarl.configs.load import set_field
from qarl.configs.schema.base import leaf_values
from qarl.configs.schema.run import RunConfig
from qarl.planning.machine import Machine
from qarl.planning.memory import GIB, Memory, cache_itemsize, count_memory
from qarl.planning.shapes import Shapes

SPARE = 0.1
"""Of a device's memory, which defaults and proposed commands leave free."""

REFUSED_BEYOND = {"cuda": 1.1, "cpu": 1.25}
"""Share of what is there, beyond which a run is refused: the plan may be off by a tenth, and a
CPU's memory is used by others who may be gone the next minute.
"""


class MemoryPlanError(InputError, heading="memory"):
    """A run that cannot fit its machine."""


@dataclass(frozen=True)
class Plan:
    """requested: the configuration; config: with what was open decided. source: of the model's
    sizes, in words. processes: all of them; local: those on this machine. decided: what the plan
    decided, in words.
    """

    requested: RunConfig
    config: RunConfig
    shapes: Shapes
    source: str
    machine: Machine
    processes: int
    local: int
    memory: Memory
    decided: tuple[str, ...]

    @property
    def capacity(self) -> int:
        """Bytes one process may take of its device."""
        return self.machine.a_process(self.local)

    @property
    def share(self) -> float:
        """Of what is there, that the run takes."""
        return self.memory.total / max(1, self.capacity)

    @property
    def fits(self) -> bool:
        """Whether device and host have what it takes."""
        return self.share <= 1 and not self.lacks_host

    @property
    def lacks_host(self) -> bool:
        """Whether the processes of one machine take more of the host's memory than there is, where
        that is known.
        """
        return self.machine.host is not None and self.host > self.machine.host

    @property
    def host(self) -> int:
        """Bytes of the host's memory that the processes of one machine take."""
        return self.memory.host * self.local

    @property
    def refused(self) -> bool:
        """Whether a run would be in vain: far beyond a device, or the host's memory, where it is
        loaded.
        """
        return self.share > REFUSED_BEYOND[self.machine.device] or self.lacks_host


def make_plan(
    config: RunConfig,
    shapes: Shapes,
    source: str,
    machine: Machine,
    processes: int,
    here: int | None = None,
) -> Plan:
    """Decide what is open, and count. processes: one a device on GPUs; local: those on this
    machine, without it all.

    Raises `ConfigError` for more processes than GPUs.
    """
    here = processes if here is None else here
    if machine.device == "cuda" and here > machine.count:
        raise ConfigError(
            f"--processes {here}, but {machine.name} has {machine.count}; one process takes one GPU"
        )
    there = machine.a_process(here)
    filled = _filled(config, shapes, machine.device, processes, there)
    decided = []
    if config.learner.gradient_checkpointing == "auto" and machine.device == "cuda":
        word = "on" if filled.learner.gradient_checkpointing else "off"
        decided.append(f"gradient checkpointing {word}")
    if config.rollout.kv_cache_gib is None and machine.device == "cuda" and config.engine_here:
        decided.append(f"KV cache {filled.rollout.kv_cache_gib} GiB")
    return Plan(
        requested=config,
        config=filled,
        shapes=shapes,
        source=source,
        machine=machine,
        processes=processes,
        local=here,
        memory=count_memory(shapes, filled, machine.device, processes),
        decided=tuple(decided),
    )


def _filled(
    config: RunConfig, shapes: Shapes, device: str, processes: int, there: int
) -> RunConfig:
    """The cache: room for one longest sequence, and on GPUs, of what is left free, as much as the
    sequences sampled at once can fill. Checkpointing: on GPUs, unless all of that fits without.
    """
    setting, rollout = config.learner.gradient_checkpointing, config.rollout
    a_sequence = rollout.longest * shapes.key_value_bytes(cache_itemsize(config))
    least = rollout.kv_cache_gib or -(-a_sequence // GIB)
    sequences = min(rollout.max_num_seqs, -(-rollout.prompts // processes) * rollout.samples)
    useful = rollout.kv_cache_gib or -(-sequences * a_sequence // GIB)
    room = int((1 - SPARE) * there)

    def of(cache: int, checkpointing: bool) -> RunConfig:
        values: dict[str, object] = {
            "rollout.kv_cache_gib": cache,
            "learner.gradient_checkpointing": checkpointing,
        }
        if device == "cpu" and config.learner.compile == "auto":
            values["learner.compile"] = False
        return changed_config(config, values)

    def left(cache: int, checkpointing: bool) -> int:
        return room - count_memory(shapes, of(cache, checkpointing), device, processes).total

    if device == "cpu":
        return of(least, setting is True)
    checkpointing = left(useful, False) < 0 if setting == "auto" else setting
    return of(
        max(least, min(useful, least + left(least, checkpointing) // GIB)),
        checkpointing,
    )


def changed_config(config: RunConfig, changes: dict[str, object]) -> RunConfig:
    """The configuration with other values of fields, by dotted path. Raises `ValueError` for what
    cannot be.
    """
    tree, before = config.model_dump(), leaf_values(config)
    for path, value in changes.items():
        section, _, leaf = path.rpartition(".")
        if leaf == "name" and before[path] != value:
            set_field(tree, section, {})
        set_field(tree, path, value)
    return RunConfig.model_validate(tree)
