"""`python -m benchmarks NAME`: run one benchmark.

Every benchmark measures, prints a table, and writes the same figures as JSON with --json.
"""

import sys

from benchmarks.command import PROGRAM, runs
from benchmarks.options import (
    communication,
    delivery,
    delta,
    learner,
    memory,
    mismatch,
    precision,
    publish,
    soak,
    step_time,
    train,
)
from qarl.cli.main import run_command
from qarl.cli.parser import Parser


def main(arguments: list[str] | None = None) -> int:
    """Run one benchmark and return the exit status, as `qarl` does."""
    return run_command(make_parser(), sys.argv[1:] if arguments is None else arguments)


def make_parser() -> Parser:
    """Return the parser of all benchmarks."""
    parser = Parser(prog=PROGRAM, description="What developers measure of QaRL, from a checkout.")
    names = parser.add_subparsers(title="benchmarks", required=True, metavar="NAME")
    for benchmark in (
        communication,
        delivery,
        delta,
        learner,
        mismatch,
        precision,
        publish,
        soak,
    ):
        runs(benchmark.add_options(names), benchmark.measure)
    for benchmark in (memory, step_time, train):
        runs(benchmark.add_options(names), benchmark.measure, fields=True)
    return parser


if __name__ == "__main__":
    sys.exit(main())
