"""Names of the models, shapes and settings that benchmarks measure.

Importing this module imports neither torch nor vLLM. A test compares the names with what the
benchmarks define.
"""

OPTIMIZERS = ("adamw", "muon")

TRL_SETTINGS = ("default", "no-checkpointing", "fp32")
"""Settings of `benchmarks.learner.trl_worker`."""

LEARNER_MODELS = ("tiny", "150m")
DELIVERY_SHAPES = ("0.6b", "1b-moe", "tiny")
DELTA_SHAPES = ("150m", "1b-moe")
STEP_TIME_GPUS = ("a100", "l40s", "h100", "h200", "b200")
MEMORY_MODELS = ("40m", "150m", "70m-moe", "1b-moe")
"""Random models of `benchmarks.memory`.

Two are dense Qwen3s; `70m-moe` has 16 experts of which a token uses 4; `1b-moe` has layers as in
Qwen3-30B-A3B (`benchmarks.publish.moe_config`).
"""
