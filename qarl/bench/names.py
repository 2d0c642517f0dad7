"""What benchmarks compare, by name. Importing this imports neither torch nor vLLM, so that a slip in an option is told
at once; what a name means is said where it is measured, and a test holds the two together."""

from typing import get_args

from qarl.configs.schema.objectives import AnyObjective, OwnConfig

OBJECTIVES = tuple(n for section in get_args(AnyObjective) for n in section.names() if section is not OwnConfig)

LEARNERS = ("unquantized", "plain", "aligned")
"""unquantized: learner and sampler in the compute dtype; plain: a 16-bit learner whose sampler is quantized; aligned:
the learner multiplies the sampler's codes (QaRL)."""

METHODS = ("rtn", "gptq", "awq", "smoothquant")
"""Of post-training quantization (`qarl.ptq.methods`)."""

PAIRINGS = (
    "bf16", "bf16-transformers", "bf16-fp32", "bf16-masters", "fp16", "fp32", "w4a16-aligned", "w4a16-unaligned",
    "w4a16-fp32", "w4a16-shadow_forward",
)  # fmt: skip
"""Of learner and sampler (`qarl.bench.precision_gap`)."""

TRL_SETTINGS = ("default", "no-checkpointing", "fp32")
"""Of `qarl.bench.learner.trl`."""

OPTIMIZERS = ("adamw", "muon")

LEARNER_MODELS = ("tiny", "150m")
DELIVERY_SHAPES = ("0.6b", "1b-moe", "tiny")
DELTA_SHAPES = ("150m", "1b-moe")
MEMORY_MODELS = ("40m", "150m", "70m-moe", "1b-moe")
"""Random Qwen3s, one of 16 experts of which 4 a token, and one of layers as in Qwen3-30B-A3B
(`qarl.bench.publish.moe_config`)."""
