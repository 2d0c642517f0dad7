"""What a run writes to the disk, and whether a checkpoint has room there."""

import math
import shutil
from pathlib import Path

from qarl.configs.errors import ConfigError
from qarl.configs.schema.run import RunConfig
from qarl.configs.words import sized
from qarl.planning.memory import ITEMSIZE
from qarl.planning.shapes import counted_parameters
from qarl.quant.checkpoint.folder import tensor_shapes
from qarl.quant.schemes import is_protected
from qarl.report.run_folder import new_path


def check_disk(config: RunConfig, folder: Path) -> None:
    """Raise `ConfigError` where not one checkpoint has room: its steps would be lost. folder: the
    model's.
    """
    needed, (place, free) = checkpoint_bytes(config, folder), free_disk(config)
    if needed > free:
        raise ConfigError(
            f"a checkpoint of {config.model!r} takes {sized(needed)}, and {str(place)!r} has"
            f" {sized(free)} free; make room there, name another --output, or train adapters"
            " (--learner.lora.name lora)"
        )


def checkpoint_bytes(config: RunConfig, folder: Path) -> int:
    """Of one checkpoint: masters, and their moments in fp32, of Muon's matrices one; of adapters
    next to nothing.
    """
    if config.learner.lora.name != "none":
        return 0
    trained = second = parameters_of(folder)
    if config.learner.optimizer.name == "muon":
        sizes = tensor_shapes(folder).items()
        second = sum(
            math.prod(s) for n, s in sizes if len(s) < 2 or is_protected(n.removesuffix(".weight"))
        )
    return trained * (ITEMSIZE[config.learner.master_dtype] + 4) + second * 4


def parameters_of(folder: Path) -> int:
    """Of a model's folder, by its files' headers; by its config.json where they are of another
    format.
    """
    return sum(math.prod(shape) for shape in tensor_shapes(folder).values()) or counted_parameters(
        folder
    )


def free_disk(config: RunConfig) -> tuple[Path, int]:
    """The nearest folder above the run's that exists, and the bytes that are free there."""
    path = new_path(config).absolute()
    place = next(folder for folder in (path, *path.parents) if folder.exists())
    return place, shutil.disk_usage(place).free
