"""DeepSpeed's settings, made of ours, and loading a model whose parameters ZeRO-3 partitions while they are read: no
process ever holds all of it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from qarl.configs.schema.learner import LearnerConfig


@contextmanager
def partitioned_loading(config: LearnerConfig) -> Iterator[None]:
    """Within this context `from_pretrained` partitions what it loads, if `learner.zero_stage` is 3."""
    if config.zero_stage != 3:
        yield
        return
    from transformers.integrations.deepspeed import HfDeepSpeedConfig, unset_hf_deepspeed_config

    quiet_deepspeed()
    reference = HfDeepSpeedConfig(deepspeed_settings(config))  # transformers keeps a weak reference
    try:
        yield
    finally:
        del reference
        unset_hf_deepspeed_config()


def deepspeed_settings(config: LearnerConfig) -> dict[str, Any]:
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


def quiet_deepspeed() -> None:
    """Keep DeepSpeed from compiling its shared-memory all-reduce (a minute, and a C++ compiler) where gloo does, from
    logging every setting, and torch from warning that it calls collectives by names of older releases."""
    import logging
    import warnings

    from deepspeed import ops

    ops.__compatible_ops__["deepspeed_shm_comm"] = False
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
