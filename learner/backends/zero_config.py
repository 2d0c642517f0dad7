"""DeepSpeed's configuration, generated from ours; `learner.deepspeed FILE` adds to it and may not contradict it."""

import json
from pathlib import Path
from typing import Any

from qarl.configs.errors import ConfigError
from qarl.configs.schema.learner import LearnerConfig

_ADDED = (
    "zero_optimization", "communication_data_type", "seq_parallel_communication_data_type", "disable_allgather",
    "prescale_gradients", "gradient_predivide_factor", "sparse_gradients", "steps_per_print", "wall_clock_breakdown",
    "memory_breakdown", "dump_state", "comms_logger", "flops_profiler", "tensorboard", "wandb", "comet", "csv_monitor",
    "timers",
)  # fmt: skip
"""What a file may set: how DeepSpeed communicates, partitions and reports."""

_OURS = {
    "optimizer": "learner.optimizer.*",
    "scheduler": "learner.optimizer.warmup_steps and decay_steps",
    "gradient_clipping": "learner.optimizer.grad_clip",
    "fp16": "dtype, learner.master_dtype and learner.loss_scale",
    "bf16": "dtype and learner.master_dtype",
    "amp": "dtype",
    "torch_autocast": "dtype",
    "data_types": "learner.master_dtype",
    "activation_checkpointing": "learner.gradient_checkpointing",
    "train_batch_size": "rollout.prompts, rollout.samples and learner.mini_batches",
    "train_micro_batch_size_per_gpu": "learner.micro_batch_tokens",
    "gradient_accumulation_steps": "learner.micro_batch_tokens",
    "managed_gradient_accumulation": "learner.micro_batch_tokens",
    "compression_training": "scheme",
}
"""DeepSpeed's sections for what has a field of its own here."""


def deepspeed_config(config: LearnerConfig) -> dict[str, Any]:
    """What `deepspeed.initialize` is given.

    Raises `ConfigError` for optimizer settings the stage cannot honour, and for a file that is unreadable, sets what is
    ours to set, or contradicts what was generated.
    """
    _require_optimizer(config)
    generated = generated_config(config)
    if config.deepspeed is None:
        return generated
    written = _read(config.deepspeed)
    for key, value in written.items():
        if key in generated and key != "zero_optimization":
            _require_equal(config.deepspeed, key, value, generated[key])
        elif key not in _ADDED:
            _refuse(config.deepspeed, key, value)
    zero = written.get("zero_optimization", {})
    for key, value in zero.items():
        if key in generated["zero_optimization"]:
            _require_equal(config.deepspeed, f"zero_optimization.{key}", value, generated["zero_optimization"][key])
        elif key.startswith(("offload_", "cpu_offload")):
            raise ConfigError(
                f"{config.deepspeed!r}: zero_optimization.{key} {value!r} is not supported: DeepSpeed steps offloaded "
                "masters with an optimizer of its own; leave it out"
            )
    merged = {**generated["zero_optimization"], **zero}
    return {**written, **generated, "zero_optimization": merged}


def generated_config(config: LearnerConfig) -> dict[str, Any]:
    """Ours in DeepSpeed's words. The caller of `engine.step()` owns the accumulation boundary, so batch sizes, which
    DeepSpeed insists on, count nothing."""
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,
        "gradient_clipping": config.optimizer.grad_clip,
        "zero_allow_untested_optimizer": True,  # `PartitionedMuon`, which tests/learner/test_zero.py tests
        "zero_optimization": {"stage": config.zero_stage, "overlap_comm": False},
    }


def _require_optimizer(config: LearnerConfig) -> None:
    optimizer, stage = config.optimizer, config.zero_stage
    if stage == 3:
        return
    if config.master_dtype != "float32":
        raise ConfigError(
            f"learner.master_dtype {config.master_dtype!r} with learner.zero_stage {stage}: ZeRO 1 and 2 keep an fp32 "
            "copy of 16-bit masters and round it to nearest, so that memory and rounding would not be those asked for; "
            "set learner.zero_stage 0 or 3, or learner.master_dtype float32"
        )
    if optimizer.offload != "none":
        raise ConfigError(
            f"learner.optimizer.offload {optimizer.offload!r} with learner.zero_stage {stage}: DeepSpeed steps "
            "offloaded masters with an optimizer of its own; set learner.zero_stage 0 or 3, or leave the moments, of "
            "which each process has its share alone, on the device"
        )


def _read(path: str) -> dict[str, Any]:
    try:
        written = json.loads(Path(path).read_text())
    except OSError as error:
        raise ConfigError(f"learner.deepspeed {path!r} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"learner.deepspeed {path!r} is not JSON: {error}") from error
    if not isinstance(written, dict):
        raise ConfigError(f"learner.deepspeed {path!r} holds {type(written).__name__}, not an object of settings")
    return written


def _require_equal(path: str, key: str, value: Any, ours: Any) -> None:
    if value not in (ours, "auto"):
        field = _OURS.get(key, "learner.zero_stage" if key.endswith("stage") else "")
        raise ConfigError(
            f"{path!r} sets {key} to {value!r}, QaRL to {ours!r}"
            + (f" (from {field}); change {field}" if field else "")
            + ", or leave it out of the file"
        )


def _refuse(path: str, key: str, value: Any) -> None:
    if key in _OURS:
        raise ConfigError(f"{path!r} sets {key} to {value!r}, which {_OURS[key]} decides; leave it out of the file")
    raise ConfigError(
        f"{path!r} sets {key!r}, which QaRL does not hand to DeepSpeed; a file may set {', '.join(_ADDED)}"
    )
