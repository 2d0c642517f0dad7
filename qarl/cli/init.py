"""`qarl init`: a folder with questions, a reward and a configuration to start from."""

import argparse
import shlex
from pathlib import Path
from typing import Any

from rich.console import Console

from qarl.cli.options import refuse_rest
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


def _init(known: argparse.Namespace, rest: list[str], console: Console) -> int:
    refuse_rest(rest)
    folder = Path(known.folder)
    check_new_folder(folder, "folder", "DIR")
    write_starter(folder)
    console.print(f"wrote {', '.join(FILES)} to {folder}", markup=False, highlight=False, soft_wrap=True)
    console.print(f"cd {shlex.quote(str(folder))}", markup=False, highlight=False, soft_wrap=True)
    console.print("qarl check run.yaml && qarl train --config run.yaml", markup=False, highlight=False)
    return 0
