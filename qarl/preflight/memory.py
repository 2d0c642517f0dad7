"""Check of a run's memory: its plan, and the refusal of a run that is clearly too large."""

from collections.abc import Callable, Mapping
from typing import Any

from qarl.configs.errors import ConfigError, ModelError
from qarl.configs.schema.run import RunConfig
from qarl.planning.machine import Machine, this_machine
from qarl.planning.plan import MemoryPlanError, make_plan
from qarl.planning.shapes import sizes_of
from qarl.planning.words import one_line, remedies, table, verdict
from qarl.preflight.schemes import check_fit
from qarl.quant.runtime.parent import local_world_size, rank, world_size


def plan_memory(
    config: RunConfig,
    processes: int | None,
    overrides: Mapping[str, str],
    file: str | None,
    say: Callable[[str], Any],
    machine: Machine | None = None,
) -> RunConfig:
    """Plan a run's memory, and return its configuration with the choices made that were left to it.

    Nothing is loaded. `say` gets the plan in one line. A model without a config.json is not
    planned; the checks of files refuse it later.

    Args:
        config: The run's configuration.
        processes: Requested number of processes, None if a launcher decides.
        overrides: Options of the command, for the suggested command in the error message.
        file: Configuration file of the command, likewise.
        say: Called with the line.
        machine: This machine, if the driver was asked before.

    Raises:
        SchemeError: A matrix of the model does not fit its scheme.
        MemoryPlanError: The run is clearly too large for this machine.
        ConfigError: There are more processes than GPUs.
    """
    try:
        shapes, source = sizes_of(config.model)
    except ModelError:
        return config
    except ConfigError as error:
        say(f"memory: not planned: {error}")
        return config
    check_fit(config, shapes)
    world = processes or world_size()
    local_world = processes or local_world_size()
    plan = make_plan(config, shapes, source, machine or this_machine(), world, local_world)
    if plan.refused and rank() == 0:
        lines = [f"{verdict(plan)} on {plan.machine.name}; nothing was loaded", *table(plan)]
        raise MemoryPlanError("\n".join([*lines, *remedies(plan, overrides, file)]))
    say(f"memory, planned: {one_line(plan)}")
    return plan.config
