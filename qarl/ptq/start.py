"""`quantization.init`: a run that starts from llmcompressor's codes of its model, calibrated on the run's own task."""

import tempfile
from pathlib import Path

from qarl.configs.schema.run import RunConfig
from qarl.ptq.export import quantized_tensors
from qarl.ptq.methods import CALIBRATION, MAX_CALIBRATION_TOKENS
from qarl.ptq.source import sample_source
from qarl.quant.checkpoint.load import load_masters
from qarl.quant.layers.context import LayerContext
from qarl.quant.model.kept_scales import start_from_codes
from qarl.quant.model.low_bit_model import LowBitModel
from qarl.quant.schemes import COMPUTE_DTYPES, get_scheme
from qarl.run.session import Policy


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
    model = LowBitModel(load_masters(policy.folder, dtype), get_scheme("bf16"), LayerContext(dtype, "reference"))
    with tempfile.TemporaryDirectory(prefix="qarl-init-") as work:
        source = sample_source(policy, model, config, Path(work), config.scheme, count)
        start_from_codes(policy.model, list(quantized_tensors(source, method, Path(work))))
