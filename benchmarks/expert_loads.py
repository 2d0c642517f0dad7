"""Cost of a publish by the number of a mixture's tensors.

python -m benchmarks.expert_loads

vLLM's loader takes each expert's tensors one by one. Layers are as small as possible, so that
copies and kernels take almost no time and the rest is Python code of vLLM and QaRL. One line is
printed for each number of experts: tensors, seconds of the fastest round, microseconds a tensor.
"""

import argparse
import shutil
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from benchmarks.random_policy import SIZES
from qarl.configs.schema.run import RolloutConfig
from qarl.embedded.recipe import ensure_tiny
from qarl.quant.checkpoint.load import load_masters
from qarl.quant.layers.context import LayerContext
from qarl.quant.model.low_bit_model import LowBitModel
from qarl.quant.schemes import get_scheme
from qarl.rollout.vllm.engine import VllmEngine
from qarl.rollout.vllm.options import VllmOptions
from qarl.sync.export import export_checkpoint

_LAYERS = 4
_ROUNDS = 5


def seconds_of_publish(folder: Path, scheme: str, experts: int) -> tuple[int, float]:
    """Return a version's number of tensors, and the seconds of its fastest publish.

    The version goes into a running engine. folder: working folder.
    """
    sizes = {**SIZES, "num_hidden_layers": _LAYERS, "moe_intermediate_size": 128}
    masters = folder / "masters"
    export = folder / "export"
    shutil.copytree(ensure_tiny("tiny-qwen3-moe"), masters)
    torch.manual_seed(0)
    config = Qwen3MoeConfig(**sizes, num_experts=experts, num_experts_per_tok=4)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(masters)
    loaded = load_masters(masters, torch.bfloat16)
    model = LowBitModel(loaded, get_scheme(scheme), LayerContext(torch.bfloat16, "vllm"))
    export_checkpoint(model, masters, export)
    rollout = RolloutConfig(max_prompt_tokens=32, max_new_tokens=32, max_num_seqs=16)
    engine = VllmEngine(export, VllmOptions(rollout, "bfloat16"))
    seconds = []
    for version in range(1, _ROUNDS + 1):
        begun = time.perf_counter()
        report = engine.load(model.low_bit_tensors(), version)
        seconds.append(time.perf_counter() - begun)
    engine.close()
    return report.consumed, min(seconds)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--schemes",
        default="bf16,w4a16",
        help="with commas between (default bf16,w4a16)",
    )
    parser.add_argument("--experts", default="16,128", help="with commas between (default 16,128)")
    options = parser.parse_args()
    for scheme in options.schemes.split(","):
        for experts in map(int, options.experts.split(",")):
            with TemporaryDirectory() as folder:
                tensors, seconds = seconds_of_publish(Path(folder), scheme, experts)
            per = f"{seconds:.3f} s, {1e6 * seconds / tensors:.0f} µs"
            Console().print(
                f"{scheme}, {experts} experts: {tensors} tensors, {per}",
                highlight=False,
            )


if __name__ == "__main__":
    main()
