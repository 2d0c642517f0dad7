"""The deployable checkpoint of a policy: config, tokenizer, and the published tensors."""

from pathlib import Path
from typing import Any

from qarl.quant.digest import StreamDigest
from qarl.quant.model.low_bit_model import LowBitModel
from qarl.sync.checkpoint_folder import write_checkpoint


def export_checkpoint(
    model: LowBitModel, source: Path, folder: Path, note: dict[str, Any] | None = None
) -> StreamDigest:
    """Write the model's present weight version to `folder`; `source` gives tokenizer and generation config. note: what
    qarl.json is to say, besides the digest; None writes none."""
    return write_checkpoint(model.low_bit_tensors(), checkpoint_config(model), source, folder, note)


def checkpoint_config(model: LowBitModel) -> dict[str, Any]:
    """config.json of the exported model: the architecture's, the compute dtype, the scheme's quantization."""
    config = model.config.to_dict()
    config["dtype"] = str(model.dtype).removeprefix("torch.")
    config.pop("quantization_config", None)
    config.pop("_name_or_path", None)  # where the masters were read from, a path of this machine
    quantization = model.plan.quantization_config()
    if quantization is not None:
        config["quantization_config"] = quantization
    return config
