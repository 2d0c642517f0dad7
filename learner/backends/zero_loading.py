"""Loading a model whose parameters ZeRO-3 partitions while they are read, so that no process ever holds all of it."""

from collections.abc import Iterator
from contextlib import contextmanager

from configs.schema.learner import LearnerConfig
from learner.backends.zero_config import deepspeed_config


@contextmanager
def partitioned_loading(config: LearnerConfig) -> Iterator[None]:
    """Within this context `from_pretrained` partitions what it loads, if `learner.zero_stage` is 3."""
    if config.zero_stage != 3:
        yield
        return
    from transformers.integrations.deepspeed import HfDeepSpeedConfig, unset_hf_deepspeed_config

    held = HfDeepSpeedConfig(deepspeed_config(config))  # transformers keeps a weak reference
    try:
        yield
    finally:
        del held
        unset_hf_deepspeed_config()
