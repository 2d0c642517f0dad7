"""TRL's trainers on an exact low-bit policy (docs/guide/trl.md). Needs TRL: `pip install "qarl[cpu,trl]"`."""

from qarl.integrations.trl.grpo import LowBitGRPOTrainer

__all__ = ["LowBitGRPOTrainer"]
