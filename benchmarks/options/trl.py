"""Options of the benchmarks that also measure TRL."""

import argparse
import sys
from pathlib import Path

from benchmarks.names import TRL_SETTINGS
from qarl.cli.options import split, words
from qarl.configs.errors import ConfigError


def add_trl(parser: argparse.ArgumentParser, settings: str) -> None:
    """Add `--against` and the options that go with it. settings: TRL's default settings."""
    parser.add_argument(
        "--against",
        choices=("trl",),
        help="measure TRL's GRPOTrainer too, doing the same",
    )
    parser.add_argument(
        "--trl-settings",
        type=words(TRL_SETTINGS),
        metavar="NAMES",
        help=(
            "comma-separated: default (of TRL), "
            f"no-checkpointing, fp32 (no-checkpointing in float32) (default {settings})"
        ),
    )
    parser.add_argument(
        "--trl-python",
        metavar="PATH",
        help="Python of an environment with another TRL (default: this one)",
    )
    parser.set_defaults(trl_default=settings)


def trl_settings(
    known: argparse.Namespace,
    *others: str,
) -> tuple[tuple[str, ...], Path]:
    """Return TRL's settings to measure and its interpreter; no settings without `--against trl`.

    others: names in `known` of further options that need `--against trl`. Raises `ConfigError` if
    an option of TRL's is set without it.
    """
    for name in ("trl_settings", "trl_python", *others):
        option = getattr(known, name)
        if not known.against and option is not None:
            value = ",".join(option) if isinstance(option, tuple) else option
            raise ConfigError(f"--{name.replace('_', '-')} {value} goes with --against trl")
    settings = (known.trl_settings or split(known.trl_default)) if known.against else ()
    return settings, Path(known.trl_python or sys.executable)
