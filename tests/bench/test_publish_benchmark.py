"""The speed benchmarks: what they count; how fast a machine is they cannot test."""

import numpy as np
import torch

from benchmarks import publish
from benchmarks.peak_memory import PeakMemory
from qarl.configs.schemes import SCHEME_SPECS


def test_bytes_that_must_move_are_those_of_masters_and_checkpoint():
    """Contract: materializing reads every master once and writes every published byte once; publishing reads and
    writes the published bytes. Counted here from shapes alone."""
    found = publish.measure("w4a16", 2e6, "bfloat16", "float32", repeats=1)
    config = publish.moe_config(2e6)
    hidden, layers = config.hidden_size, config.num_hidden_layers
    heads, shared = config.num_attention_heads * config.head_dim, 2 * config.head_dim
    expert = config.moe_intermediate_size
    shapes = [(heads, hidden), (shared, hidden), (shared, hidden), (hidden, heads)]
    shapes += [(expert, hidden), (expert, hidden), (hidden, expert)] * config.num_experts
    low_bit = layers * sum(SCHEME_SPECS["w4a16"].weight_bytes(shape, torch.bfloat16.itemsize) for shape in shapes)
    plain = 2 * config.vocab_size * hidden + hidden
    plain += layers * (config.num_experts * hidden + 2 * hidden + 2 * config.head_dim)
    parameters = plain + layers * sum(o * i for o, i in shapes)
    assert found.parameters == parameters and found.master_bytes == 4 * parameters
    assert found.low_bit_bytes == low_bit + 2 * plain
    made, sent, both, *_ = found.work
    assert made.bytes == found.master_bytes + found.low_bit_bytes and sent.bytes == 2 * found.low_bit_bytes
    assert both.bytes == made.bytes + sent.bytes and all(s > 0 for w in found.work for s in w.seconds)
    assert "made by" in str(publish.table(found).title)


def test_peak_memory_sees_what_was_freed_again():
    with PeakMemory() as peak:
        held = np.ones(1 << 26, np.uint8)
        held += 1
        del held
    assert 0.9 * 2**26 < peak.bytes < 4 * 2**26
