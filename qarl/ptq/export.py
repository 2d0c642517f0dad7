"""Uses of llmcompressor's tensors: as a folder like those QaRL exports, verified in a fresh engine
(`qarl export --ptq`), or as the codes that a run starts from (`quantization.init`).
"""

import math
import tempfile
from collections.abc import Iterator
from pathlib import Path

from qarl.configs.errors import ConfigError
from qarl.configs.schema.lora import LoraConfig
from qarl.configs.schema.run import RunConfig
from qarl.configs.schemes import UNQUANTIZED
from qarl.ptq.compressor import Job, compress, require_llmcompressor
from qarl.ptq.expected_checkpoint import read_as
from qarl.ptq.methods import (
    CALIBRATION,
    MAX_CALIBRATION_TOKENS,
    METHODS,
    calibration_count,
    check_method,
)
from qarl.ptq.source import Source, open_source, sample_source
from qarl.quant.checkpoint.folder import file_digests
from qarl.quant.checkpoint.load import load_masters
from qarl.quant.digest import StreamDigest
from qarl.quant.layers.context import LayerContext
from qarl.quant.model.low_bit_model import LowBitModel
from qarl.quant.schemes import COMPUTE_DTYPES, get_scheme
from qarl.quant.types import LowBitTensor
from qarl.report.run_folder import RunFolder
from qarl.report.startup import phase
from qarl.rollout.engine import SamplingEngine
from qarl.rollout.open import open_engine
from qarl.run.export import Exported
from qarl.run.export_note import add_to_note, export_note
from qarl.run.model_card import write_card
from qarl.run.policy import TrainingPolicy, model_folder
from qarl.run.served import note_served
from qarl.sync.audit import audit, require_agreement
from qarl.sync.export import ExportError, write_checkpoint


def export_ptq(
    run: Path, output: Path, method: str, scheme: str, calibration: int | None = None
) -> Exported:
    """Quantize a run's newest checkpoint by `method` to `scheme`, and verify it in a fresh engine.

    calibration: number of calibration sequences to sample. Default: `CALIBRATION` for methods that
    use data.

    Raises:
        ConfigError, ExportError: The input is unusable; nothing was computed.
        SchemeError: The scheme cannot hold a layer; nothing was sampled.
        CompressorError, ExportError, AuditError: The result is not the checkpoint that the scheme
            describes.
    """
    folder = RunFolder.open(run)
    count = check_request(folder.config(), str(run), method, scheme, calibration)
    folder.require_checkpoint()
    if output.exists():
        raise ExportError(f"folder {str(output)!r} exists; choose another or remove it")
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{output.name}-", dir=output.parent) as work:
        with phase("asking the unquantized policy"):
            source = open_source(folder, Path(work), scheme, count)
        with phase(f"quantizing by {method} to {scheme}"):
            written = quantize(source, method, output)
        opened = open_engine(output, source.config.rollout, source.config.dtype)
        with phase("verifying it in a fresh engine"), opened as engine:
            moved = verify(source, engine)
    note = export_note(run, source.config, source.step, output, model_folder(source.config.model))
    add_to_note(
        output,
        **note | {"scheme": scheme, "ptq": method, "calibration": count},
        requests=source.defaults.record(),
        digest=written.hexdigest(),
        files=file_digests(output),
        moved=moved,
    )
    served = note_served(output, source, source.config)
    write_card(output)
    return Exported(source.step, written, moved, source.calibration, served=served)


def check_request(
    config: RunConfig, run: str, method: str, scheme: str, calibration: int | None
) -> int:
    """Return how many calibration sequences to sample.

    Raises `ConfigError` if the run cannot be quantized by this method to this scheme.
    """
    require_llmcompressor()
    if config.scheme != UNQUANTIZED and isinstance(config.learner.lora, LoraConfig):
        raise ConfigError(
            f"run {run!r} trained LoRA adapters on a base in {config.scheme!r}: its masters are not"
            " the policy's; export it without --ptq, or train with --scheme bf16"
        )
    check_method(method, get_scheme(scheme))
    return calibration_count(method, calibration, config)


def quantize(source: Source, method: str, output: Path) -> StreamDigest:
    """Write the values that llmcompressor computes to `output`, in the layout that QaRL exports.

    Returns the digest of the tensors written.
    """
    with tempfile.TemporaryDirectory(dir=source.folder.parent) as work:
        tensors = quantized_tensors(source, method, Path(work))
        layout = source.layout.config
        return write_checkpoint(tensors, layout, source.folder, output, defaults=source.defaults)


def quantized_tensors(source: Source, method: str, work: Path) -> Iterator[LowBitTensor]:
    """Return llmcompressor's tensors of the unquantized checkpoint. work: folder for its output."""
    compressed = work / "compressed"
    job = Job(
        model=str(source.folder),
        scheme=source.scheme,
        method=method,
        ignored=source.layout.ignored,
        calibration=source.calibration if METHODS[method].calibrated else (),
        output=str(compressed),
    )
    compress(job, work)
    return read_as(source.layout, compressed)


def verify(source: Source, engine: SamplingEngine) -> float:
    """Return the mean |Δ log p| of fixed sequences between `engine` and the unquantized one, nats.

    Raises `AuditError` if the engine reports a layer in another scheme, group or dtype than the
    layout, and `ExportError` if a log-prob is not finite.
    """
    require_agreement(audit(source.layout.layers, engine.layer_reports(), same_kernels=False))
    scored = engine.logprobs(source.canary)
    deltas = [
        abs(a - b)
        for quantized, unquantized in zip(scored, source.logprobs, strict=True)
        for a, b in zip(quantized, unquantized, strict=True)
    ]
    moved = math.fsum(deltas) / len(deltas)
    if not math.isfinite(moved):
        raise ExportError(
            "the quantized checkpoint gives log-probs that are not finite; do not deploy it, try"
            " another --ptq method or scheme"
        )
    return moved


def initial_codes(policy: TrainingPolicy, config: RunConfig) -> list[LowBitTensor]:
    """Quantize the policy's folder by `quantization.init`, and return the codes for
    `start_from_codes`.

    A temporary engine samples the calibration sequences from the unquantized model: `CALIBRATION`
    of them, or fewer if they may be too long for that. Raises `CompressorError` if llmcompressor
    fails, and `ExportError` if its result is not the checkpoint that the scheme describes.
    """
    method = config.quantization.init
    assert method is not None
    dtype = COMPUTE_DTYPES[config.dtype]
    count = max(1, min(CALIBRATION, MAX_CALIBRATION_TOKENS // config.rollout.longest))
    model = LowBitModel(
        load_masters(policy.folder, dtype),
        get_scheme("bf16"),
        LayerContext(dtype, "reference"),
    )
    with tempfile.TemporaryDirectory(prefix="qarl-init-") as work:
        source = sample_source(policy, model, config, Path(work), config.scheme, count)
        return list(quantized_tensors(source, method, Path(work)))
