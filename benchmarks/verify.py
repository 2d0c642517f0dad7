"""`python -m benchmarks.verify`: how often `qarl verify` names a planted fault, and cries wolf.

Faults and clean pairs are drawn from random models (tests/support/drawn_dumps.py,
drawn_checkpoints.py), by other seeds than the tests use. A fault counts as named if it is the one
fault that is reported; a clean pair counts as quiet if no fault is.
"""

import argparse
import dataclasses
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from qarl.cli.environment import quiet_libraries
from qarl.cli.options import whole, write_json
from qarl.report.record import record
from qarl.verify import Report, logprobs, weights
from tests.support import drawn_checkpoints, drawn_dumps


@dataclasses.dataclass(frozen=True)
class Row:
    """Outcomes of one kind."""

    form: str
    """"weights" or "logprobs"."""
    kind: str
    """Name of the planted fault, or of the clean kind."""
    clean: bool
    drawn: int
    """Number of draws."""
    right: int
    """Number of draws in which the fault alone was named, or none was if the kind is clean."""
    named_otherwise: tuple[str, ...]
    """Names of the faults that were reported in the other draws."""
    seconds: float
    """Mean time of a comparison."""


def compare_weights(folder: Path, rng: random.Random, kind: str) -> Callable[[], Report]:
    """Draw a pair and return its comparison."""
    pair = drawn_checkpoints.draw_pair(folder, rng, kind)
    return lambda: weights(pair.trainer, pair.engine, pair.config)


def compare_logprobs(folder: Path, rng: random.Random, kind: str) -> Callable[[], Report]:
    """Draw a dump and return its comparison."""
    drawn = drawn_dumps.draw_dump(rng, kind)
    dump = folder / "dump.jsonl"
    dump.write_text("".join(json.dumps(row) + "\n" for row in drawn.rows))
    return lambda: logprobs(dump)


FORMS = {
    "weights": (compare_weights, drawn_checkpoints.FAULTS, drawn_checkpoints.CLEAN),
    "logprobs": (compare_logprobs, drawn_dumps.FAULTS, drawn_dumps.CLEAN),
}


def measure(form: str, kind: str, draws: int, seed: int) -> Row:
    """Return the outcomes of some draws of one kind."""
    prepare, _, clean = FORMS[form]
    wanted = [] if kind in clean else [kind]
    right, seconds = 0, 0.0
    others: list[str] = []
    for draw in range(draws):
        rng = random.Random(f"measured-{seed}-{draw}-{kind}")
        torch.manual_seed(rng.randrange(2**31))
        with tempfile.TemporaryDirectory() as folder:
            compare = prepare(Path(folder), rng, kind)
            began = time.perf_counter()
            report = compare()
            seconds += time.perf_counter() - began
        names = [cause.name for cause in report.faults]
        right += names == wanted
        if names != wanted:
            others.append("+".join(names) or "none")
    return Row(
        form=form,
        kind=kind,
        clean=kind in clean,
        drawn=draws,
        right=right,
        named_otherwise=tuple(others),
        seconds=seconds / draws,
    )


def main(arguments: Sequence[str]) -> int:
    """Measure all kinds, print a line each, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--form", choices=sorted(FORMS), default="weights")
    parser.add_argument("--faults", type=whole(1), default=3, help="draws of each fault")
    parser.add_argument("--clean", type=whole(1), default=6, help="draws of each clean kind")
    parser.add_argument("--seed", type=whole(0), default=0)
    parser.add_argument("--json")
    known = parser.parse_args(arguments)
    quiet_libraries()
    torch.set_num_threads(1)
    _, faults, clean = FORMS[known.form]
    rows = []
    for kind in (*faults, *clean):
        draws = known.clean if kind in clean else known.faults
        rows.append(measure(known.form, kind, draws, known.seed))
        sys.stdout.write(f"{rows[-1]}\n")
        sys.stdout.flush()
    data = [dataclasses.asdict(row) for row in rows]
    write_json(known.json, record([*arguments], data, "python -m benchmarks.verify"))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
