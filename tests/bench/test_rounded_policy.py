"""A policy rounded to a scheme's codes before it is trained."""

from pathlib import Path

import torch

from benchmarks.rounded_policy import rounded_policy
from qarl.quant.checkpoint.load import load_masters
from tests.support.learners import random_model
from tests.support.models import low_bit


def test_a_rounded_policy_is_where_its_codes_are(tmp_path: Path):
    """Linear weights are the values of their codes, all else is as it was; a second call leaves the folder alone."""
    source = tmp_path / "policy"
    random_model(tied=False).save_pretrained(source)
    folder = rounded_policy(source, "w4a16", tmp_path / "rounded")
    before, after = (load_masters(path, torch.float32) for path in (source, folder))
    model = low_bit(before, "w4a16", operators="transformers")
    for name, master in model.masters.items():
        linear = model.linears.get(name.removesuffix(".weight"))
        expected = master if linear is None else linear.codes().dequantized(torch.float32)
        assert torch.equal(after.get_parameter(name), expected), name
        assert linear is None or linear.scheme.name == "bf16" or not torch.equal(master, expected)
    marked = folder / "marked"
    marked.touch()
    assert rounded_policy(source, "w4a16", folder) == folder and marked.exists()
