"""`qarl verify`: compare a trainer's policy with an engine's, whoever made them."""

import argparse
from pathlib import Path
from typing import Any

from rich.console import Console

from qarl.cli.environment import quiet_libraries
from qarl.cli.options import add_json, say, text_width, write_json
from qarl.verify.folders import require_folder
from qarl.verify.server import VllmServer, is_url

_DESCRIPTION = (
    "Compare what a trainer holds with what an engine samples from, and name the cause of a"
    " difference. Neither QaRL's trainer nor its engine is needed. Exit status: 0 if both agree in"
    " all that was compared, 1 if not, 2 for unusable input."
)


def add_verify(commands: Any) -> None:
    """Add `qarl verify` to the commands."""
    verify = commands.add_parser(
        "verify",
        help="Prove that any trainer and any engine hold the same policy, or name what differs.",
        description=_DESCRIPTION,
    )
    forms = verify.add_subparsers(title="what to compare", required=True, metavar="WHAT")
    _add_weights(forms)
    _add_logprobs(forms)


def _add_weights(forms: Any) -> None:
    weights = forms.add_parser(
        "weights",
        help="Compare two checkpoints, or one and a running vLLM server, layer by layer.",
        description=(
            "Compare the trainer's checkpoint with what the engine loads or holds, layer by layer:"
            " which layers are quantized and how, whether the codes are those of these masters, and"
            " if not, why: other groups, stale, permuted, exchanged or transposed weights, experts"
            " in another order, an ignore list, a quantized router, an untied head."
        ),
    )
    weights.add_argument(
        "trainer",
        metavar="TRAINER",
        help="Checkpoint folder of what is trained: masters, fake-quantized weights, or codes.",
    )
    weights.add_argument(
        "engine",
        metavar="ENGINE",
        help=(
            "Checkpoint folder that the engine loads, or the URL of a running vLLM server that was"
            " started with VLLM_SERVER_DEV_MODE=1 and --worker-extension-cls"
            " qarl.verify.HeldWeights. If it needs a key, set VLLM_API_KEY."
        ),
    )
    weights.add_argument(
        "--config",
        metavar="FILE",
        help=(
            "JSON file with the quantization_config that the trainer means, if TRAINER's"
            " config.json has none. Without it nothing says which layers the trainer quantizes."
        ),
    )
    _add_output(weights)
    weights.set_defaults(run=_weights)


def _add_logprobs(forms: Any) -> None:
    logprobs = forms.add_parser(
        "logprobs",
        help="Compare log-probs of sampled tokens, from a dump of any framework.",
        description=(
            "Compare the sampler's and the trainer's log-probs of the same tokens, and tell causes"
            " apart: temperature, truncation by top_p or top_k, a shift by one token, stale"
            " weights, padding, prompts, another scheme, single completions, rounding."
        ),
    )
    logprobs.add_argument(
        "dumps",
        nargs="+",
        metavar="DUMP",
        help=(
            "Parquet or JSONL file with a row a completion: completion_ids, sampler_logprobs,"
            " trainer_logprobs, and optional columns (docs/guide/verify.md). A folder of such files"
            " or a run folder of `qarl train` works too."
        ),
    )
    logprobs.add_argument(
        "--floor",
        type=float,
        metavar="NATS",
        help=(
            "Mean |Δ log p| up to which a difference counts as rounding. Measure it with an"
            " unquantized engine. Default: 0.05."
        ),
    )
    logprobs.add_argument(
        "--clip",
        type=_clip,
        metavar="LOW,HIGH",
        help="Ratios outside of which your objective clips. Default: 0.8,1.2.",
    )
    _add_output(logprobs)
    logprobs.set_defaults(run=_logprobs)


def _add_output(form: Any) -> None:
    add_json(form, "Write the report as JSON too.")
    form.add_argument(
        "--report",
        action="store_true",
        help="Exit with status 0 even if the sides disagree.",
    )


def _clip(text: str) -> tuple[float, float]:
    try:
        low, high = map(float, text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"{text!r} must be two ratios with a comma between, such as 0.8,1.2"
        ) from error
    return low, high


def _weights(known: argparse.Namespace, console: Console) -> int:
    for role in ("trainer", "engine"):
        source = getattr(known, role)
        if is_url(source):
            VllmServer(source).model()
        else:
            require_folder(Path(source).expanduser(), role)
    quiet_libraries()
    from qarl.verify import weights

    return _finish(weights(known.trainer, known.engine, known.config), known, console)


def _logprobs(known: argparse.Namespace, console: Console) -> int:
    from qarl.verify import logprobs

    options = {name: getattr(known, name) for name in ("floor", "clip")}
    chosen = {name: value for name, value in options.items() if value is not None}
    return _finish(logprobs(*known.dumps, **chosen), known, console)


def _finish(report: Any, known: argparse.Namespace, console: Console) -> int:
    """Print a report, write it if a file is named, and return the exit status."""
    for line in report.lines(text_width(console.width)):
        say(console, line)
    write_json(known.json, report.as_json())
    return int(not report.agrees and not known.report)
