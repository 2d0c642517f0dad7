"""`quantization.init`: a run that starts from llmcompressor's codes of its model, calibrated on the run's own task."""

import tempfile
from pathlib import Path

from qarl.configs.schema.run import RunConfig
from qarl.ptq.expected_checkpoint import checkpoint_layout
from qarl.ptq.export import quantized_tensors
from qarl.ptq.methods import CALIBRATION, MAX_CALIBRATION_TOKENS
from qarl.ptq.source import calibration_sequences
from qarl.quant.checkpoint.load import load_masters
from qarl.quant.layers.context import LayerContext
from qarl.quant.model.kept_scales import start_from_codes
from qarl.quant.model.low_bit_model import LowBitModel
from qarl.quant.schemes import COMPUTE_DTYPES, get_scheme
from qarl.rollout.open import open_engine
from qarl.run.session import Policy
from qarl.sync.export import export_checkpoint


def start_from_ptq(policy: Policy, config: RunConfig) -> None:
    """Make the policy's weight version that of `quantization.init`.

    An engine of its own, closed again, samples the calibration sequences from the unquantized model, as many as
    `qarl export --ptq` takes without a number, or fewer where they may be too long for that. Raises
    `CompressorError` where llmcompressor fails, `ExportError` where its result is not what the scheme describes, and
    what `start_from_codes` raises.
    """
    method = config.quantization.init
    assert method is not None
    dtype = COMPUTE_DTYPES[config.dtype]
    longest = config.rollout.max_prompt_tokens + config.rollout.max_new_tokens
    count = max(1, min(CALIBRATION, MAX_CALIBRATION_TOKENS // longest))
    problems = policy.task.problems("train", 0, count, config.seed)
    with tempfile.TemporaryDirectory(prefix="qarl-init-") as work:
        folder = Path(work) / "unquantized"
        model = LowBitModel(load_masters(policy.folder, dtype), get_scheme("bf16"), LayerContext(dtype, "reference"))
        export_checkpoint(model, policy.folder, folder)
        layout = checkpoint_layout(folder, config.scheme, config.dtype)
        with open_engine(folder, config.rollout, config.dtype) as engine:
            sequences = calibration_sequences(engine, [policy.prompter.prompt(p) for p in problems], config)
        tensors = quantized_tensors(folder, layout, config.scheme, method, sequences, Path(work))
        start_from_codes(policy.model, list(tensors))
