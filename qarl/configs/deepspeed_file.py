"""A user's DeepSpeed file, `learner.deepspeed`: what a run takes of it, and what it refuses.

A run takes how DeepSpeed divides, sends and offloads. Everything that would change a number is the
run's own: batches, precision, optimizer, clipping. Such a key may be "auto", which means the run's
value where DeepSpeed's integrations fill files in; it is then left to the run. Any other value is
refused, also where it equals the run's, because two places could come to disagree.

The keys are those of DeepSpeed 0.19.8.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qarl.configs.errors import ConfigError
from qarl.configs.words import quoted

_PRINTS = frozenset(
    {
        "steps_per_print",
        "wall_clock_breakdown",
        "memory_breakdown",
        "comms_logger",
        "dump_state",
        "zero_allow_untested_optimizer",
    }
)
"""Keys that print or permit, and change no number."""

_SENDS = frozenset(
    {
        "stage",
        "allgather_partitions",
        "allgather_bucket_size",
        "overlap_comm",
        "reduce_scatter",
        "reduce_bucket_size",
        "contiguous_gradients",
        "round_robin_gradients",
        "offload_optimizer",
    }
)
"""Keys of `zero_optimization` that decide what is divided, and in which order it is sent."""

_OFFLOAD = frozenset({"device", "pin_memory", "ratio"})
"""Keys of `offload_optimizer` at stages 1 and 2; the others are of NVMe."""

_RUNS_OWN = {
    "train_batch_size": "batches are rollout.prompts × rollout.samples",
    "train_micro_batch_size_per_gpu": "the run cuts by learner.micro_batch_tokens",
    "gradient_accumulation_steps": "an update is a mini-batch (learner.mini_batches), however cut",
    "gradient_clipping": "set learner.optimizer.grad_clip",
    "optimizer": "set learner.optimizer",
    "scheduler": "set learner.optimizer.warmup_steps and decay_steps",
    "fp16": "codes would be made of rounded masters; set dtype float16, whose loss the run scales",
    "bf16": "codes would be made of rounded masters; set dtype and learner.master_dtype",
    "amp": "codes would be made of rounded masters; set dtype",
    "torch_autocast": "codes would be made of rounded masters; set dtype",
    "data_types": "gradients are added in float32",
    "communication_data_type": "gradients are added in float32",
    "prescale_gradients": "the loss is normalized over the whole mini-batch already",
    "gradient_predivide_factor": "the loss is normalized over the whole mini-batch already",
    "activation_checkpointing": "set learner.gradient_checkpointing",
    "checkpoint": "checkpoints are the run's own; set checkpoint.every",
    "load_universal_checkpoint": "checkpoints are the run's own; use --resume",
    "tensorboard": "set log",
    "wandb": "set log",
}
"""Key of the file → why the run decides it, and by which option."""

_NOT_HERE = {
    "offload_param": "it is of stage 3",
    "zero_quantized_weights": "it rounds masters on their way",
    "zero_quantized_gradients": "it rounds gradients on their way",
    "zero_quantized_nontrainable_weights": "it rounds masters on their way",
    "zero_hpz_partition_size": "it is of stage 3",
    "sub_group_size": "it is of stage 3",
    "cpu_offload": "DeepSpeed's name for it is offload_optimizer now",
}
"""Key of `zero_optimization` → why no run can take it."""

_ONLY_STAGE_3 = ("stage3_", "param_persistence_threshold")
"""Beginnings of keys of stage 3, which files with "auto" often carry and may keep."""


@dataclass(frozen=True)
class DeepSpeedFile:
    """What a run takes of a DeepSpeed file."""

    stage: int
    """ZeRO stage, 1 or 2."""
    offloads: bool
    """Whether fp32 masters and moments are stepped in the host's memory."""
    settings: dict[str, Any]
    """The file without the keys that are left to the run."""


def read_deepspeed_file(path: str | Path) -> DeepSpeedFile:
    """Read a DeepSpeed file.

    Raises `ConfigError` for a file that is missing or no JSON object, and for a key that a run
    cannot follow, with the option of the run that takes its place.
    """
    try:
        settings = json.loads(Path(path).read_text())
    except OSError as error:
        raise ConfigError(
            f"cannot read learner.deepspeed {quoted(str(path))}: {error.strerror}; give the path of"
            " a DeepSpeed configuration, a JSON file"
        ) from error
    except ValueError as error:
        raise ConfigError(
            f"learner.deepspeed {quoted(str(path))} is no JSON ({error}); give a DeepSpeed"
            " configuration"
        ) from error
    if not isinstance(settings, dict):
        raise ConfigError(
            f"learner.deepspeed {quoted(str(path))} has a {type(settings).__name__}, no object;"
            ' give a DeepSpeed configuration, such as {"zero_optimization": {"stage": 2}}'
        )
    kept = {}
    for key, value in settings.items():
        if key in _RUNS_OWN:
            _require_left_open(key, value)
        elif key in _PRINTS or key == "zero_optimization":
            kept[key] = value
        else:
            allowed = ", ".join(sorted({"zero_optimization", *_PRINTS}))
            raise _refused(key, value, f"a run takes {allowed}; omit it")
    zero = _checked_zero(kept.get("zero_optimization"))
    offload = zero.get("offload_optimizer") or {}
    kept["zero_optimization"] = zero
    return DeepSpeedFile(zero["stage"], offload.get("device", "none") == "cpu", kept)


def _checked_zero(section: Any) -> dict[str, Any]:
    """Return the section `zero_optimization` without what is left open, or raise `ConfigError`."""
    stage = section.get("stage") if isinstance(section, dict) else None
    if stage not in (1, 2) or isinstance(stage, bool):
        why = {
            0: "stage 0 divides nothing",
            3: "stage 3 frees masters, of which autograd then takes no gradient",
        }
        reason = why.get(stage) if isinstance(stage, int) else None
        raise _refused(
            "zero_optimization.stage",
            stage,
            f"{reason or 'give a stage'}; take 1 or 2, or leave learner.deepspeed out: several"
            " processes then share masters, gradients and moments by rows",
        )
    zero = {}
    for key, value in section.items():
        name = f"zero_optimization.{key}"
        if value == "auto":
            continue
        if key.startswith(_ONLY_STAGE_3):
            raise _refused(name, value, "it is of stage 3, and this run has none; omit it")
        if key in _NOT_HERE:
            if value not in (None, False) and not _is_off(value):
                raise _refused(name, value, f"{_NOT_HERE[key]}; omit it")
        elif key in _SENDS:
            zero[key] = value
        else:
            raise _refused(name, value, f"a run takes {', '.join(sorted(_SENDS))}; omit it")
    offload = zero.get("offload_optimizer")
    if offload is not None:
        _check_offload(offload)
    return zero


def _check_offload(offload: Any) -> None:
    """Raise `ConfigError` for an optimizer offload that stages 1 and 2 do not have."""
    name = "zero_optimization.offload_optimizer"
    if not isinstance(offload, dict) or offload.get("device", "none") not in ("cpu", "none"):
        device = offload.get("device") if isinstance(offload, dict) else offload
        raise _refused(
            f"{name}.device",
            device,
            "DeepSpeed offloads to the host at stages 1 and 2, and to NVMe at stage 3 alone; take"
            " cpu or none",
        )
    for key, value in offload.items():
        if key not in _OFFLOAD and value != "auto":
            why = "it is of NVMe, which DeepSpeed has at stage 3; omit it"
            raise _refused(f"{name}.{key}", value, why)


def _require_left_open(key: str, value: Any) -> None:
    """Raise `ConfigError` unless a key that the run decides is "auto" or switched off."""
    if not _is_auto(value) and not _is_off(value):
        raise _refused(key, value, f'{_RUNS_OWN[key]}; omit it, or write "auto"')


def _is_auto(value: Any) -> bool:
    """Return whether a value is "auto", or a section whose values are, for AdamW if for any."""
    if isinstance(value, dict):
        settings = {key: each for key, each in value.items() if (key, each) != ("type", "AdamW")}
        return all(map(_is_auto, settings.values()))
    return value == "auto"


def _is_off(value: Any) -> bool:
    """Return whether a value switches its feature off."""
    if isinstance(value, dict):
        return value.get("enabled") in (False, "auto") or value.get("device") == "none"
    return value in (None, False)


def _refused(key: str, value: Any, why: str) -> ConfigError:
    """Return the error for a key of the file."""
    return ConfigError(f"learner.deepspeed: {key} {json.dumps(value)} is refused: {why}")
