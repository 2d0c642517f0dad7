"""TRL's trainers on an exact low-bit policy (docs/guide/trl.md). Needs the extra `trl`."""

try:
    from qarl.integrations.trl.grpo import LowBitGRPOTrainer
except ModuleNotFoundError as error:
    if error.name != "trl":
        raise
    raise ImportError("TRL is not installed here; pip install 'trl>=1.16,<1.17'") from error

__all__ = ["LowBitGRPOTrainer"]
