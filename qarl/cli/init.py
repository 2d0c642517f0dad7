"""`qarl init`: a folder with questions, a reward and a configuration to start from."""

import argparse
import shlex
from pathlib import Path
from typing import Any

from rich.console import Console

from qarl.cli.options import say
from qarl.run.check import check_new_folder
from qarl.starter import FILES, write_starter


def add_init(commands: Any) -> None:
    """Add `qarl init` to the commands."""
    init = commands.add_parser(
        "init",
        help="write commented questions, reward and configuration to start from",
        description=f"Write {', '.join(FILES)} to a new folder: a task of your own that trains as it is.",
    )
    init.add_argument("folder", metavar="DIR", help="folder to make (must not exist)")
    init.set_defaults(run=_init)


def _init(known: argparse.Namespace, console: Console) -> int:
    folder = Path(known.folder)
    check_new_folder(folder, "folder", "DIR")
    write_starter(folder)
    say(console, f"wrote {', '.join(FILES)} to {folder}")
    say(console, f"cd {shlex.quote(str(folder))}")
    say(console, "qarl check run.yaml && qarl train --config run.yaml")
    return 0
