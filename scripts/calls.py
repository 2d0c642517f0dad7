"""Which functions of a folder a process and the processes it starts run, for scripts/mutate.py."""

import os
import sys
import threading
from pathlib import Path
from typing import Any


class Calls:
    """file: where other processes than this one append theirs, a line each. rooms: the folders of root that count."""

    def __init__(self, root: Path | str, file: Path | str, rooms: tuple[str, ...]) -> None:
        self.root, self.file, self._rooms = Path(root), Path(file), rooms
        self._names: dict[Any, str] = {}
        self._ran = set[str]()
        self._writes = os.environ.get("MUTATE_PID") not in (None, str(os.getpid()))
        os.register_at_fork(after_in_child=self._in_child)

    def watch(self) -> None:
        """From now on, in all threads."""
        os.environ.setdefault("MUTATE_PID", str(os.getpid()))
        threading.settrace(self._call)
        sys.settrace(self._call)

    def taken(self) -> set[str]:
        """What ran since the last time, as "file:function", here and in the processes that this one started."""
        ran, self._ran = self._ran, set()
        if self.file.exists():
            ran |= set(self.file.read_text().split("\n")) - {""}
            self.file.unlink()
        return ran

    def _in_child(self) -> None:
        self._writes, self._ran = True, set()

    def _call(self, frame: Any, event: str, argument: object) -> None:
        code = frame.f_code
        if code not in self._names:
            file = os.path.realpath(code.co_filename)
            place = file.removeprefix(f"{self.root}/")
            function = code.co_qualname.replace(".<locals>", "").partition(".<")[0]
            self._names[code] = f"{place}:{function}" if place != file and place.split("/")[0] in self._rooms else ""
        name = self._names[code]
        if not name or name in self._ran:
            return
        self._ran.add(name)
        if self._writes:
            with self.file.open("a") as lines:
                lines.write(f"{name}\n")
