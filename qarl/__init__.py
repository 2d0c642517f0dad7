"""QaRL: reinforcement learning where sampler and learner share one low-bit tensor. Start at `qarl.cli`."""
