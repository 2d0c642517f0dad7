"""`qarl watch`: the panel of `qarl train`, of a run that another process writes."""

import argparse
import json
import shlex
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from qarl.cli.options import refuse_rest
from qarl.configs.errors import ConfigError
from qarl.report.run_folder import RunFolder

_SECONDS = 1.0
"""Between two looks."""


def add_watch(commands: Any) -> None:
    """Add `qarl watch` to the commands."""
    watch = commands.add_parser(
        "watch",
        help="follow a run in the terminal, from wherever it was started",
        description="Show a run's panel as `qarl train` does, of a run that another process writes, until it ends. "
        "Ctrl-C ends the watching alone. Without a terminal: its lines.",
    )
    watch.add_argument("folder", metavar="RUN", help="run folder")
    watch.set_defaults(run=_watch)


def _watch(known: argparse.Namespace, rest: list[str], console: Console) -> int:
    refuse_rest(rest)
    folder = RunFolder.open(Path(known.folder))
    config = folder.config()

    from qarl.report.dashboard import Dashboard
    from qarl.report.early_warning import RunWatch
    from qarl.report.metrics import restored_step

    began = (folder.path / "config.yaml").stat().st_mtime

    def clock() -> float:
        """Now; of a run that has ended, when it last wrote a step."""
        ended = folder.metrics.is_file() and not folder.is_held()
        return folder.metrics.stat().st_mtime if ended else time.time()

    signs, lines, done = RunWatch([], config.early_warning), NewLines(folder.metrics), 0
    with Dashboard(config, console, clock, began) as dashboard:
        dashboard.entered("a step")
        try:
            while True:
                running = folder.is_held()  # asked first: what is written until then is read
                for line in lines.read():
                    done = line["step"]
                    try:
                        step = restored_step(line)
                    except TypeError as error:
                        raise ConfigError(
                            f"{str(folder.metrics)!r}, step {done}: another version of qarl wrote it ({error}); watch "
                            "it with that one"
                        ) from error
                    dashboard.stepped(step, signs.add(line))
                    dashboard.entered("a step")
                if not running or done >= config.steps:
                    break
                time.sleep(_SECONDS)
        except KeyboardInterrupt:
            return 0
    if done < config.steps:
        again = f"qarl train --resume {shlex.quote(known.folder)}"
        console.print(
            f"no process writes run {folder.path}, of which {done} of {config.steps} steps are done; continue it with: "
            f"{again}",
            soft_wrap=True, markup=False, highlight=False,
        )  # fmt: skip
    return 0


class NewLines:
    """Of a file that another process appends JSON lines to; it need not exist yet."""

    def __init__(self, file: Path):
        self._file = file
        self._read = 0

    def read(self) -> list[dict[str, Any]]:
        """The whole lines since the last call."""
        if not self._file.is_file():
            return []
        with self._file.open("rb") as file:
            file.seek(self._read)
            whole = file.read().rpartition(b"\n")[0]
        self._read += len(whole) + bool(whole)
        return [json.loads(line) for line in whole.split(b"\n") if line]
