"""`qarl schemes`: list every scheme with its size in bytes and its kernel on this machine.

Rows are cached on disk, so that only the first list imports torch and vLLM and asks its kernels.
"""

import argparse
import dataclasses
import hashlib
import re
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from qarl.cli.environment import quiet_libraries
from qarl.cli.options import DTYPES, add_json, say, write_json
from qarl.configs.errors import SchemeError
from qarl.configs.load import is_embedded
from qarl.configs.schemes import SCHEME_SPECS
from qarl.configs.words import sized
from qarl.quant.checkpoint.check_folder import check_model
from qarl.quant.checkpoint.folder import local_folder
from qarl.quant.runtime.answers import keep_answer, read_answer
from qarl.report.startup import phase, phases_shown_on
from qarl.report.tables import PlainTable

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from qarl.quant.schemes import Scheme

REFERENCE_SHAPE = (4096, 4096)
"""Output rows and input columns of the layer that stands for a model if none is given."""


@dataclass(frozen=True)
class SchemeRow:
    """One scheme in the list."""

    name: str
    weights: str
    """Description of the weights' codes."""
    activations: str
    """Description of the activations' codes."""
    format: str
    """Name that compressed-tensors has for the codes' format, or "unquantized"."""
    bytes_per_parameter: float | None
    """Bytes per parameter of the quantized layers, with scales; None if a shape does not fit."""
    checkpoint_bytes: int | None
    """Bytes of all tensors of the model; None without a model or if a shape does not fit."""
    shape_reason: str
    """Why the model's shapes do not fit, or ""."""
    kernel: str
    """Kernel that would multiply in learner and engine, by its audit name; "" if none can."""
    reason: str
    """Why no kernel can, or ""."""

    @property
    def runs(self) -> bool:
        """Return whether this machine has a kernel and the model's layers fit the scheme."""
        return bool(self.kernel) and not self.shape_reason


def add_schemes(commands: Any) -> None:
    """Add `qarl schemes` to the commands."""
    words = "List the low-bit schemes: sizes, and which of them run on this machine."
    schemes = commands.add_parser("schemes", help=words, description=words)
    schemes.add_argument(
        "--model",
        metavar="MODEL",
        help=(
            "Folder, hub id or embedded name of a model to size, of which only the config is read."
        ),
    )
    schemes.add_argument(
        "--dtype", choices=DTYPES, default="bfloat16", help=("Compute dtype. Default: bfloat16.")
    )
    schemes.add_argument(
        "-v",
        "--verbose",
        action="store_true",
        help="Show kernels, and vLLM's reasons in full.",
    )
    add_json(schemes, "Write the rows as JSON too.")
    schemes.set_defaults(run=_schemes)


def _schemes(known: argparse.Namespace, console: Console) -> int:
    quiet_libraries()
    with phases_shown_on(Console(stderr=True)):
        rows = scheme_rows(known.model, known.dtype)
        agrees = agreement_line(known.model, known.dtype)
    _show(console, rows, known.model, known.verbose)
    if agrees:
        say(console, agrees)
    write_json(known.json, [dataclasses.asdict(row) for row in rows])
    return 0


def scheme_rows(model: str | None, dtype: str) -> list[SchemeRow]:
    """Return a row per scheme, from the cache on disk if it has them.

    model: folder, hub id or embedded name, of which only config.json is read; None for a layer of
    `REFERENCE_SHAPE`. dtype: compute dtype, a key of COMPUTE_DTYPES. Raises `ModelError` if the
    model's configuration cannot be read.
    """
    _check_folder(model)
    question = {"model": model, "config": _config_digest(model), "dtype": dtype}
    cached = read_answer("schemes", question)
    if cached:
        return [SchemeRow(**row) for row in cached]
    with phase("asking the kernels of this machine"):
        from qarl.quant.checkpoint.load import causal_model
        from qarl.quant.schemes import SCHEMES

        empty = None if model is None else causal_model(model, _architecture(model))
        rows = [_row(scheme, empty, dtype) for scheme in SCHEMES.values()]
    keep_answer("schemes", question, [dataclasses.asdict(row) for row in rows])
    return rows


_LEVELS = {
    "exact": (
        "learner and sampler agree to the last bit: the learner computes through vLLM's own model"
    ),
    "floor": (
        "learner and sampler agree up to rounding: transformers' operators add up in another order"
    ),
    "refused": "refused, because a learner would not be the sampler's policy",
    "no engine": "refused, because no engine on this machine can sample from the model",
}


def agreement_line(model: str | None, dtype: str) -> str:
    """Describe how closely a learner of this model agrees with its sampler, and why not more
    closely. Returns "" without a model or without vLLM.
    """
    from qarl.quant.runtime.libraries import has_vllm

    if model is None or not has_vllm():
        return ""
    question = {"model": model, "config": _config_digest(model), "dtype": dtype}
    answer = read_answer("agreement", question)
    if not answer:
        with phase("asking vLLM for its model"):
            from qarl.quant.checkpoint.load import causal_model
            from qarl.quant.model.agreement import agreement
            from qarl.quant.schemes import COMPUTE_DTYPES

            empty = causal_model(model, _architecture(model))
            agreed = agreement(empty, COMPUTE_DTYPES[dtype])
            answer = dataclasses.asdict(agreed)
        keep_answer("agreement", question, answer)
    return f"{_LEVELS[answer['level']]}{': ' if answer['reason'] else ''}{answer['reason']}"


def _check_folder(model: str | None) -> None:
    """Raise `ModelError` if the model's files show that it cannot be read, before torch is
    imported.
    """
    if model is None or is_embedded(model):
        return
    folder = local_folder(model)
    if folder is not None:
        check_model(folder)


def _config_digest(model: str | None) -> str:
    """Return the SHA-256 of a local model's config.json, or "". An embedded model is identified by
    our code, a hub id by its name.
    """
    file = Path(model or ".").expanduser() / "config.json"
    return hashlib.sha256(file.read_bytes()).hexdigest() if model and file.is_file() else ""


def _show(
    console: Console, rows: list[SchemeRow], model: str | None, verbose: bool = False
) -> None:
    """Print the table: what a scheme stores and in how many bytes, whether it runs here, and in
    short why not.

    verbose: print the kernels and, below the table, the reasons in full.
    """
    shapes = f"the layers of {model}" if model else "a layer of {}×{}".format(*REFERENCE_SHAPE)
    size = ("checkpoint",) if model else ()
    runs = ("kernel",) if verbose else ("runs", "why not")
    table = PlainTable(
        "scheme",
        "weights",
        "activations",
        "bytes/param",
        *size,
        *runs,
        figures=("bytes/param", "checkpoint"),
        title=f"bytes per parameter: {shapes}, scales included",
        caption="" if verbose else _HINT,
    )
    for row in rows:
        per = "-" if row.bytes_per_parameter is None else f"{row.bytes_per_parameter:.4f}"
        total = ()
        if model:
            total = ("-" if row.checkpoint_bytes is None else sized(row.checkpoint_bytes),)
        if verbose:
            runs = (row.kernel if row.runs else "-",)
        else:
            runs = ("yes" if row.runs else "no", _short_reason(row))
        table.add_row(row.name, row.weights, row.activations, per, *total, *runs)
    table.show(console)
    if verbose:
        for reason, names in _reasons(rows).items():
            say(console, f"{', '.join(names)}: {reason}")
    if remedy := _remedy(rows, model):
        say(console, remedy)


_HINT = "runs: whether on this machine, in learner and engine; kernels and reasons in full with -v"


def _remedy(rows: list[SchemeRow], model: str | None) -> str:
    """Name the schemes to take instead of those that the model's layers do not fit; "" if they fit
    all.
    """
    misfits = [row.name for row in rows if row.shape_reason]
    if not misfits:
        return ""
    running = [row.name for row in rows if row.runs and row.format != "unquantized"]
    instead = (
        f"take one that does and runs here: {', '.join(running)}"
        if running
        else "none that does runs here"
    )
    return f"{model or 'the layer'} does not fit {', '.join(misfits)}; {instead}"


_SHORT = 60
"""Most characters of a reason that the table shows."""


def _short_reason(row: SchemeRow) -> str:
    """Return in a few words why a scheme cannot run here; "" if it can.

    A remark in brackets after vLLM's own message ("vLLM has it for …") is preferred, because it is
    shorter. For a layer that does not fit, the words are about its shape.
    """
    reason = row.shape_reason or row.reason
    remark = re.search(r"\((vLLM has [^()]*)\)$", reason)
    if remark:
        words = remark[1]
    else:
        words = re.split(r"[;:.] ", reason.removeprefix(f"scheme {row.name!r}: "))[0]
    words = re.sub(r"^layer '[^']*' has ", "", words)
    return textwrap.shorten(words, _SHORT, placeholder=" …")


def _reasons(rows: list[SchemeRow]) -> dict[str, list[str]]:
    """Return each reason why schemes cannot run here → the names of those schemes."""
    by_reason: dict[str, list[str]] = {}
    for row in rows:
        for reason in filter(None, (row.shape_reason, row.reason and f"not here: {row.reason}")):
            by_reason.setdefault(reason, []).append(row.name)
    return by_reason


def _architecture(name: str) -> Any:
    from qarl.embedded.real_model import REAL_MODEL, ensure_real_model
    from qarl.embedded.recipe import RECIPES, recipe_config
    from qarl.quant.checkpoint.load import load_config

    if name == REAL_MODEL:
        return load_config(str(ensure_real_model()))
    return recipe_config(RECIPES[name]) if name in RECIPES else load_config(name)


def _row(scheme: "Scheme", model: "PreTrainedModel | None", dtype: str) -> SchemeRow:
    from qarl.quant.checkpoint.shapes import expert_modules
    from qarl.quant.kernels.supported import kept_support
    from qarl.quant.schemes import (
        COMPUTE_DTYPES,
        describe_activations,
        describe_weights,
    )

    experts = model is not None and bool(expert_modules(model))
    support = kept_support(scheme.name, COMPUTE_DTYPES[dtype], experts)
    per_parameter = None
    total = None
    reason = ""
    try:
        per_parameter, total = checkpoint_bytes(scheme, model, COMPUTE_DTYPES[dtype].itemsize)
    except SchemeError as error:
        reason = str(error)
    return SchemeRow(
        name=scheme.name,
        weights=describe_weights(scheme),
        activations=describe_activations(scheme),
        format=scheme.format.value if scheme.format else "unquantized",
        bytes_per_parameter=per_parameter,
        checkpoint_bytes=total,
        shape_reason=reason,
        kernel=support.kernel,
        reason=support.reason,
    )


def checkpoint_bytes(
    scheme: "Scheme", model: "PreTrainedModel | None", itemsize: int
) -> tuple[float, int | None]:
    """Return the bytes per parameter of the quantized layers, and the bytes of the whole checkpoint
    (None without a model). For `bf16` the layers are those that other schemes quantize.

    itemsize: bytes of a value in the compute dtype. Raises `SchemeError` if a shape does not fit.
    """
    from qarl.quant.checkpoint.shapes import plan_layers
    from qarl.quant.schemes import get_scheme

    if model is None:
        rows, columns = REFERENCE_SHAPE
        quantized = SCHEME_SPECS[scheme.name].weight_bytes(REFERENCE_SHAPE, itemsize)
        return quantized / (rows * columns), None
    plan = plan_layers(model, scheme if scheme.quantization else get_scheme("w8a8"))
    shapes = [shape for name, shape in plan.shapes.items() if plan.schemes[name].quantization]
    quantized = sum(SCHEME_SPECS[scheme.name].weight_bytes(shape, itemsize) for shape in shapes)
    parameters = sum(rows * columns for rows, columns in shapes)
    others = sum(p.numel() for p in model.parameters()) - parameters
    return quantized / parameters, quantized + others * itemsize
