"""Loading a model whose parameters DeepSpeed partitions while they are read: no process ever holds all of it."""

from collections.abc import Iterator
from contextlib import contextmanager

from qarl.configs.schema.learner import LearnerConfig


@contextmanager
def partitioned_loading(config: LearnerConfig) -> Iterator[None]:
    """Within this context `from_pretrained` partitions what it loads, if `learner.zero_stage` is 3."""
    if config.zero_stage != 3:
        yield
        return
    from transformers.integrations.deepspeed import HfDeepSpeedConfig, unset_hf_deepspeed_config

    quiet_deepspeed()
    settings = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}  # of the first none is made
    reference = HfDeepSpeedConfig(settings)  # transformers keeps a weak reference
    try:
        yield
    finally:
        del reference
        unset_hf_deepspeed_config()


def quiet_deepspeed() -> None:
    """Keep DeepSpeed from compiling its shared-memory all-reduce (a minute, and a C++ compiler) where gloo does, from
    logging every setting, and torch from warning that it calls collectives by names of older releases."""
    import logging
    import warnings

    from deepspeed import ops

    ops.__compatible_ops__["deepspeed_shm_comm"] = False
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
