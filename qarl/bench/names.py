"""What benchmarks compare, by name. Importing this imports neither torch nor vLLM, so that a slip in an option is told
at once; what a name means is said where it is measured, and a test holds the two together."""

TRL_SETTINGS = ("default", "no-checkpointing", "fp32")
"""Of `qarl.bench.learner.trl`."""

OPTIMIZERS = ("adamw", "muon")

LEARNER_MODELS = ("tiny", "150m")
DELIVERY_SHAPES = ("0.6b", "1b-moe", "tiny")
DELTA_SHAPES = ("150m", "1b-moe")
MEMORY_MODELS = ("40m", "150m", "70m-moe", "1b-moe")
"""Random Qwen3s, one of 16 experts of which 4 a token, and one of layers as in Qwen3-30B-A3B
(`qarl.bench.publish.moe_config`)."""
