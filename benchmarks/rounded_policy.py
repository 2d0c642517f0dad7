r"""Policy whose weights equal the values of a scheme's codes.

A checkpoint that was rounded before training is such a policy.

    python -m benchmarks.rounded_policy SOURCE SCHEME FOLDER
    qarl compare precision-gap --model FOLDER --variants w4a16-unaligned,w4a16-aligned \
        --lr 5e-5 --steps 100

A master in the middle of its code's interval has to move by half a step before the sampler sees any
change. Float32 masters of a bfloat16 checkpoint are in the same situation at a small learning rate.
"""

import shutil
import sys
from pathlib import Path

import torch

from qarl.configs.files import written_aside
from qarl.quant.checkpoint.load import load_masters
from qarl.quant.layers.context import LayerContext
from qarl.quant.model.low_bit_model import LowBitModel
from qarl.quant.schemes import get_scheme
from qarl.run.policy import model_folder


def rounded_policy(source: Path, scheme: str, folder: Path) -> Path:
    """Write the model folder `source` to `folder` with every linear weight replaced.

    A weight becomes the value of its code, in fp32. An existing `folder` is left unchanged. Whoever
    rounds these weights again computes their scales anew.
    """
    if folder.exists():
        return folder
    plain = load_masters(source, torch.float32)
    low_bit = LowBitModel(
        load_masters(source, torch.float32),
        get_scheme(scheme),
        LayerContext(torch.bfloat16, "reference"),
    )
    with torch.no_grad():
        for name, linear in low_bit.linears.items():
            plain.get_parameter(f"{name}.weight").copy_(linear.codes().dequantized(torch.float32))
    with written_aside(folder) as building:
        plain.save_pretrained(building)
        for file in source.iterdir():
            if not (building / file.name).exists():
                shutil.copy(file, building)
    return folder


if __name__ == "__main__":
    name, rounded_to, target = sys.argv[1:]
    rounded_policy(model_folder(name), rounded_to, Path(target))
