"""Sizes of a run's checkpoints and exports, and the check that the disk has room for one."""

import math
import shutil
from pathlib import Path

from qarl.configs.errors import ConfigError
from qarl.configs.schema.run import RunConfig
from qarl.configs.schemes import SCHEME_SPECS
from qarl.configs.words import sized
from qarl.planning.shapes import ITEMSIZE, counted_parameters
from qarl.quant.checkpoint.folder import tensor_shapes
from qarl.quant.schemes import is_protected
from qarl.report.run_folder import new_path
from qarl.run.policy import Architecture


def check_disk(config: RunConfig, folder: Path) -> None:
    """Raise `ConfigError` if the disk has no room for one checkpoint: all steps would be lost.

    folder: the model's folder.
    """
    needed = checkpoint_bytes(config, folder)
    existing, free = free_disk(config)
    if needed > free:
        raise ConfigError(
            f"a checkpoint of {config.model!r} takes {sized(needed)}, and {str(existing)!r} has"
            f" {sized(free)} free; make room there, name another --output, or train adapters"
            " (--learner.lora.name lora)"
        )


def checkpoint_bytes(config: RunConfig, folder: Path) -> int:
    """Return the size of one checkpoint in bytes: masters, and their moments in fp32.

    Muon keeps one moment of each matrix, other optimizers two. Adapters count as 0 bytes. folder:
    the model's folder.
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


def export_bytes(config: RunConfig, architecture: Architecture) -> int:
    """Return the size of one deployable checkpoint in bytes: codes, scales, and what is left in the
    compute dtype.
    """
    shapes = architecture.layers.shapes
    itemsize = ITEMSIZE[config.dtype]
    codes = 0
    unquantized = parameters_of(architecture.folder)
    for name, scheme in architecture.layers.schemes.items():
        if scheme.quantization is not None:
            codes += SCHEME_SPECS[scheme.name].weight_bytes(shapes[name], itemsize)
            unquantized -= math.prod(shapes[name])
    return codes + unquantized * itemsize


def exports_of(config: RunConfig) -> list[str]:
    """Return the names of the deployable checkpoints in a run's folder, in words."""
    written = {
        "the engine's start": config.from_rollouts is None,
        "the export": config.export,
        "the best export": config.checkpoint.best,
    }
    return [name for name, due in written.items() if due]


def parameters_of(folder: Path) -> int:
    """Return the number of parameters of a model's folder, counted in its files' headers.

    If the files have another format, they are counted from its config.json.
    """
    counted = sum(math.prod(shape) for shape in tensor_shapes(folder).values())
    return counted or counted_parameters(folder)


def free_disk(config: RunConfig) -> tuple[Path, int]:
    """Return the nearest existing folder at or above the run's, and the bytes free on its disk."""
    path = new_path(config).absolute()
    existing = next(folder for folder in (path, *path.parents) if folder.exists())
    return existing, shutil.disk_usage(existing).free
