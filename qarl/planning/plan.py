"""The plan of a run: its memory against its machine's, with the open fields decided.

The plan decides the fields that a configuration leaves open: `learner.gradient_checkpointing` if it
is auto, `rollout.kv_cache_gib`, and on CPUs `learner.compile`, which it turns off. The decided
values are in the configuration from then on, and in the run's config.yaml.
"""

from dataclasses import dataclass

from qarl.configs.errors import ConfigError, InputError
from qarl.configs.load import set_field
from qarl.configs.schema.base import leaf_values
from qarl.configs.schema.lora import LoraConfig
from qarl.configs.schema.run import RunConfig
from qarl.planning.machine import Machine
from qarl.planning.memory import GIB, Memory, cache_itemsize, count_memory
from qarl.planning.shapes import Shapes, unmatched
from qarl.planning.traffic import Traffic, count_traffic

SPARE = 0.1
"""Fraction of a device's memory that defaults and proposed commands leave free."""

REFUSED_BEYOND = {"cuda": 1.1, "cpu": 1.25}
"""Ratio of needed to available memory above which a run is refused.

The plan may be off by a tenth. On CPUs other programs use memory too, and may end the next minute.
"""


class MemoryPlanError(InputError, heading="memory"):
    """A run that cannot fit its machine."""


@dataclass(frozen=True)
class MemoryPlan:
    """A run's memory on a machine."""

    requested: RunConfig
    """The configuration before the plan decided anything."""

    config: RunConfig
    """The configuration with its open fields decided."""

    shapes: Shapes
    """Sizes of the model."""

    source: str
    """Source of these sizes, in words."""

    machine: Machine
    """The machine, or one of several equal ones."""

    processes: int
    """Number of processes on all machines."""

    local: int
    """Number of processes on this machine."""

    memory: Memory
    """Memory of one process."""

    traffic: Traffic
    """What one process sends to the others."""

    decided: tuple[str, ...]
    """The plan's decisions, in words."""

    @property
    def capacity(self) -> int:
        """Bytes that one process may use of its device."""
        return self.machine.per_process(self.local)

    @property
    def fraction(self) -> float:
        """Fraction of the device's memory that the run needs."""
        return self.memory.total / max(1, self.capacity)

    @property
    def fits(self) -> bool:
        """True if both the device's and the host's memory suffice."""
        return self.fraction <= 1 and not self.lacks_host

    @property
    def lacks_host(self) -> bool:
        """True if this machine's processes need more host memory than is known to be available."""
        return self.machine.host is not None and self.host > self.machine.host

    @property
    def host(self) -> int:
        """Bytes of host memory that the processes of this machine need."""
        return self.memory.host * self.local

    @property
    def unmatched_targets(self) -> tuple[str, ...]:
        """LoRA targets that match no name that the plan knows, so that it counts all matrices."""
        lora = self.config.learner.lora
        return unmatched(self.shapes, lora.targets) if isinstance(lora, LoraConfig) else ()

    @property
    def refused(self) -> bool:
        """True if the run is so far over a limit that loading the model is pointless.

        Loading itself needs host memory, so that any lack of it counts.
        """
        return self.fraction > REFUSED_BEYOND[self.machine.device] or self.lacks_host


def make_plan(
    config: RunConfig,
    shapes: Shapes,
    source: str,
    machine: Machine,
    processes: int,
    here: int | None = None,
) -> MemoryPlan:
    """Decide the open fields of a configuration, and compute the memory of its run.

    Args:
        config: configuration of the run.
        shapes: sizes of the model.
        source: source of these sizes, in words.
        machine: machine to plan for.
        processes: number of processes, one a device on GPUs.
        here: number of processes on this machine. Default: all, or of several machines an equal
            share.

    Raises `ConfigError` if there are more processes than GPUs, or other numbers of them on the
    machines.
    """
    if here is None and processes % machine.machines:
        raise ConfigError(
            f"--processes {processes} is not a multiple of the {machine.machines} machines of"
            f" {machine.name}, each of which has as many"
        )
    here = processes // machine.machines if here is None else here
    if machine.device == "cuda" and here > machine.count:
        raise ConfigError(
            f"--processes {here}, but {machine.name} has {machine.count}; one process takes one GPU"
        )
    filled = _filled(config, shapes, machine.device, processes, machine.per_process(here))
    decided = []
    if config.learner.gradient_checkpointing == "auto" and machine.device == "cuda":
        word = "on" if filled.learner.gradient_checkpointing else "off"
        decided.append(f"gradient checkpointing {word}")
    if config.rollout.kv_cache_gib is None and machine.device == "cuda" and config.engine_here:
        decided.append(f"KV cache {filled.rollout.kv_cache_gib} GiB")
    return MemoryPlan(
        requested=config,
        config=filled,
        shapes=shapes,
        source=source,
        machine=machine,
        processes=processes,
        local=here,
        memory=count_memory(shapes, filled, machine.device, processes),
        traffic=count_traffic(shapes, filled, machine.device, processes),
        decided=tuple(decided),
    )


def _filled(
    config: RunConfig, shapes: Shapes, device: str, processes: int, capacity: int
) -> RunConfig:
    """Decide the open fields of a configuration.

    The KV cache holds one longest sequence. On GPUs it grows into the memory that is left, up to
    what the sequences sampled at once can fill. Gradient checkpointing is off on CPUs. On GPUs it
    is on, unless everything fits without it, the whole cache included.

    capacity: bytes of the device that a process may use.
    """
    setting = config.learner.gradient_checkpointing
    rollout = config.rollout
    a_sequence = rollout.longest * shapes.key_value_bytes(cache_itemsize(config))
    prompts = -(-rollout.prompts // processes)  # rounded up, as the cache's GiB below
    sequences = min(rollout.max_num_seqs, prompts * rollout.samples)
    smallest_cache = rollout.kv_cache_gib or -(-a_sequence // GIB)
    largest_cache = rollout.kv_cache_gib or -(-sequences * a_sequence // GIB)
    budget = int((1 - SPARE) * capacity)

    def filled(cache: int, checkpointing: bool) -> RunConfig:
        values: dict[str, object] = {
            "rollout.kv_cache_gib": cache,
            "learner.gradient_checkpointing": checkpointing,
        }
        if device == "cpu" and config.learner.compile == "auto":
            values["learner.compile"] = False
        return changed_config(config, values)

    def left(cache: int, checkpointing: bool) -> int:
        candidate = filled(cache, checkpointing)
        return budget - count_memory(shapes, candidate, device, processes).total

    if device == "cpu":
        return filled(smallest_cache, setting is True)
    checkpointing = left(largest_cache, False) < 0 if setting == "auto" else setting
    affordable = smallest_cache + left(smallest_cache, checkpointing) // GIB
    cache = max(smallest_cache, min(largest_cache, affordable))
    return filled(cache, checkpointing)


def changed_config(config: RunConfig, changes: dict[str, object]) -> RunConfig:
    """Return the configuration with other values of some fields.

    changes: dotted path → value. Raises `ValueError` if the values are invalid.
    """
    tree = config.model_dump()
    before = leaf_values(config)
    for path, value in changes.items():
        section, _, leaf = path.rpartition(".")
        # Another variant of a section has other fields, so that the old ones are dropped.
        if leaf == "name" and before[path] != value:
            set_field(tree, section, {})
        set_field(tree, path, value)
    return RunConfig.model_validate(tree)
