"""`qarl export`."""

import argparse
from pathlib import Path
from typing import Any

from rich.console import Console

from qarl.cli.environment import quiet_libraries
from qarl.cli.options import say
from qarl.configs.errors import ConfigError
from qarl.preflight.files import check_new_folder
from qarl.report.run_folder import RunFolder
from qarl.report.startup import phase, phases_shown_on
from qarl.run.export_note import find_export


def add_export(commands: Any) -> None:
    """Add `qarl export` to the program's commands."""
    export = commands.add_parser(
        "export",
        help="Write a run's deployable checkpoint and prove it in a fresh engine.",
        description=(
            "Write a run's deployable checkpoint and prove it in a fresh engine. A run trained in"
            " a low-bit scheme is exported as the policy it is. With --ptq, llmcompressor quantizes"
            " the run's masters after training, in whatever scheme it sampled: this is the"
            " baseline, not QaRL."
        ),
        epilog=(
            "rtn rounds to nearest, needs no data and takes any scheme. gptq takes weight-only"
            " schemes and those with dynamic activations, awq weight-only int4, smoothquant int8"
            " weights with int8 activations. Calibration sequences are prompts of the run's own"
            " task, each with a completion sampled from the policy."
        ),
    )
    export.add_argument(
        "folder",
        metavar="RUN",
        help=(
            "Run folder, whose newest checkpoint is exported. With --format gguf: a run folder (its"
            " export) or an exported checkpoint."
        ),
    )
    export.add_argument(
        "-o",
        "--output",
        required=True,
        metavar="DIR",
        help="Folder to create, which must not exist.",
    )
    export.add_argument(
        "--format",
        choices=("safetensors", "gguf"),
        default="safetensors",
        help=(
            "Format: safetensors for vLLM and transformers, gguf for llama.cpp, with the"
            " same codes (docs/guide/gguf.md). Default: safetensors."
        ),
    )
    ptq = export.add_argument_group("post-training quantization of a run's masters")
    ptq.add_argument("--ptq", metavar="METHOD", help="Method: rtn, gptq, awq or smoothquant.")
    ptq.add_argument(
        "--scheme",
        metavar="NAME",
        help="Low-bit scheme to quantize to. `qarl schemes` lists them.",
    )
    ptq.add_argument(
        "--calibration",
        type=int,
        metavar="N",
        help="Number of calibration sequences to sample. Default: 256.",
    )
    export.set_defaults(run=_export)


def _export(known: argparse.Namespace, console: Console) -> int:
    check_new_folder(Path(known.output), "folder", "--output")
    if known.format == "gguf":
        return _export_gguf(known, console)
    folder = RunFolder.open(Path(known.folder))
    config = folder.config()
    quiet_libraries()
    if known.ptq:
        return _export_ptq(known, console)
    for option in ("scheme", "calibration"):
        value = getattr(known, option)
        if value is not None:
            raise ConfigError(
                f"--{option} {value} applies only with --ptq METHOD, and a run is exported in its"
                f" own scheme, {config.scheme}; omit it, or add --ptq rtn"
            )
    folder.require_checkpoint()
    with phases_shown_on(Console(stderr=True)):
        with phase("importing torch and transformers"):
            from qarl.preflight.support import require_schemes
            from qarl.run.export import export_run
        require_schemes(config)
        exported = export_run(Path(known.folder), Path(known.output))
    say(
        console,
        f"wrote step {exported.step} to {known.output}: {_loaded(exported, 'the learner')}",
    )
    if exported.served is not None:
        say(console, str(exported.served))
    return 0


def _export_gguf(known: argparse.Namespace, console: Console) -> int:
    for option in ("ptq", "scheme", "calibration"):
        value = getattr(known, option)
        if value is not None:
            raise ConfigError(
                f"--{option} {value} writes safetensors, not GGUF; export with it first, and give"
                " that folder with --format gguf"
            )
    find_export(Path(known.folder))  # refused before libraries are imported, which takes seconds
    quiet_libraries()
    with phases_shown_on(Console(stderr=True)):
        with phase("importing torch and transformers"):
            from qarl.run.gguf import export_gguf
        exported = export_gguf(Path(known.folder), Path(known.output))
    written = exported.written
    count = sum(written.kinds.values())
    kinds = ", ".join(f"{number} {kind}" for kind, number in written.kinds.items())
    say(
        console,
        f"wrote {Path(known.output) / written.name} of {exported.source}:"
        f" {written.size / 2**20:.1f} MiB, sha256 {written.sha256[:16]}…; {count} of {count}"
        f" tensors, read back, equal the export's ({kinds})",
    )
    for remark in exported.remarks:
        say(console, remark)
    return 0


def _export_ptq(known: argparse.Namespace, console: Console) -> int:
    if known.scheme is None:
        raise ConfigError(
            "--ptq needs --scheme, the low-bit scheme to quantize to; `qarl schemes` lists them"
        )
    with phases_shown_on(Console(stderr=True)):
        with phase("importing torch and transformers"):
            from qarl.ptq.export import export_ptq
        exported = export_ptq(
            Path(known.folder),
            Path(known.output),
            known.ptq,
            known.scheme,
            known.calibration,
        )
    sequences = exported.calibration
    data = (
        f" on {len(sequences)} sequences ({sum(map(len, sequences))} tokens)" if sequences else ""
    )
    say(
        console,
        f"quantized step {exported.step} by {known.ptq} to {known.scheme}{data}; wrote"
        f" {known.output}: {_loaded(exported, 'the unquantized policy')}",
    )
    if exported.served is not None:
        say(console, str(exported.served))
    return 0


def _loaded(exported: Any, reference: str) -> str:
    """Describe the files of an export and how exactly a fresh engine reproduces `reference`.

    exported: a `qarl.run.export.Exported`.
    """
    written = exported.written
    return (
        f"{written.tensors} tensors, {written.bytes / 2**20:.1f} MiB, digest"
        f" {written.hexdigest()[:16]}…; loaded in a fresh engine, mean |Δ log p| against"
        f" {reference} {exported.moved:.2e} nats"
    )
