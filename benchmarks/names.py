"""What benchmarks measure, by name. Importing this imports neither torch nor vLLM; a test compares
the names with what is measured.
"""

OPTIMIZERS = ("adamw", "muon")

TRL_SETTINGS = ("default", "no-checkpointing", "fp32")
"""Of `benchmarks.learner.trl_worker`."""

LEARNER_MODELS = ("tiny", "150m")
DELIVERY_SHAPES = ("0.6b", "1b-moe", "tiny")
DELTA_SHAPES = ("150m", "1b-moe")
STEP_TIME_GPUS = ("a100", "l40s", "h100", "h200", "b200")
MEMORY_MODELS = ("40m", "150m", "70m-moe", "1b-moe")
"""Random Qwen3s, one of 16 experts of which 4 a token, and one of layers as in Qwen3-30B-A3B
(`benchmarks.publish.moe_config`).
"""
