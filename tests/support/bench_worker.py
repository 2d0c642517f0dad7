"""Process of one scheme of `qarl bench speed`, in a fork of the server, which saves 15 s of
imports.
"""

import sys
from pathlib import Path

from pydantic import TypeAdapter

from qarl.bench.job import Job
from qarl.bench.process import answer_line
from qarl.bench.worker import run


def main(path: Path) -> None:
    """Do the job in the file at `path` and print the answer."""
    sys.stdout.write(answer_line(run(TypeAdapter(Job).validate_json(path.read_text()))))
