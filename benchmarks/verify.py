"""`python -m benchmarks.verify`: how often `qarl verify` names a planted fault, and cries wolf.

Faults and clean pairs are drawn from random models (tests/support/drawn_dumps.py,
drawn_checkpoints.py), by other seeds than the tests use. A fault counts as named if it is the one
fault that is reported; a clean pair counts as quiet if no fault is.

`--form trainers` draws faults at random for each trainer, in the shapes in which it holds weights
and logs completions (tests/support/trainer_shapes.py).
"""

import argparse
import dataclasses
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from qarl.cli.environment import quiet_libraries
from qarl.cli.options import whole, write_json
from qarl.report.record import record
from qarl.verify import Report, logprobs, weights
from tests.support import drawn_checkpoints, drawn_dumps, trainer_shapes


@dataclasses.dataclass(frozen=True)
class Row:
    """Outcomes of one kind."""

    form: str
    """"weights", "logprobs" or "trainers"."""
    kind: str
    """Name of the planted fault, or of the clean kind; of "trainers" the trainer's."""
    clean: bool
    drawn: int
    """Number of draws."""
    right: int
    """Number of draws in which the fault alone was named, or none was if the kind is clean."""
    named_otherwise: tuple[str, ...]
    """Names of the faults that were reported in the other draws; of "trainers" after what was
    drawn.
    """
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


class Drawn(NamedTuple):
    """A drawn pair or dump."""

    name: str
    """What was drawn, for the record of misses; "" if the row's kind says it."""
    wanted: list[str]
    """Names of the faults that have to be reported."""
    compare: Callable[[], Report]
    """Compares it."""


def measure(form: str, kind: str, draws: int, seed: int) -> Row:
    """Return the outcomes of some draws of one kind."""
    prepare, _, kinds_without_fault = FORMS[form]
    clean = kind in kinds_without_fault

    def draw(rng: random.Random, folder: Path) -> Drawn:
        return Drawn("", [] if clean else [kind], prepare(folder, rng, kind))

    return _outcomes(form, kind, clean, draws, lambda n: f"measured-{seed}-{n}-{kind}", draw)


def _outcomes(
    form: str,
    kind: str,
    clean: bool,
    draws: int,
    seed_of: Callable[[int], str],
    draw: Callable[[random.Random, Path], Drawn],
) -> Row:
    """Return the outcomes of some draws.

    seed_of: the seed of a draw, by its number. draw: draws into an empty folder.
    """
    right = 0
    seconds = 0.0
    others: list[str] = []
    for number in range(draws):
        rng = random.Random(seed_of(number))
        torch.manual_seed(rng.randrange(2**31))
        with tempfile.TemporaryDirectory() as folder:
            drawn = draw(rng, Path(folder))
            began = time.perf_counter()
            report = drawn.compare()
            seconds += time.perf_counter() - began
        names = [cause.name for cause in report.faults]
        right += names == drawn.wanted
        if names != drawn.wanted:
            answer = "+".join(names) or "none"
            others.append(f"{drawn.name}: {answer}" if drawn.name else answer)
    return Row(
        form=form,
        kind=kind,
        clean=clean,
        drawn=draws,
        right=right,
        named_otherwise=tuple(others),
        seconds=seconds / draws,
    )


def prepare_by_trainer(trainer: str, rng: random.Random, clean: bool, folder: Path) -> Drawn:
    """Draw a fault or a clean kind of a trainer's weights or dumps."""
    of_weights = drawn_checkpoints.CLEAN if clean else trainer_shapes.weight_faults(trainer)
    of_dumps = trainer_shapes.LOGPROB_CLEAN if clean else trainer_shapes.LOGPROB_FAULTS
    form, kind = rng.choice(
        [*(("weights", kind) for kind in of_weights), *(("log-probs", kind) for kind in of_dumps)]
    )
    wanted = [] if clean else [kind]
    if form == "weights":
        pair = trainer_shapes.draw_weights(trainer, rng, kind, folder)
        return Drawn(
            f"{kind} {pair.said}",
            wanted,
            lambda: weights(pair.trainer, pair.engine, pair.config),
        )
    dump = trainer_shapes.draw_dump(trainer, rng, kind, folder)
    return Drawn(f"{kind} {dump.said}", wanted, lambda: logprobs(dump.folder))


def measure_trainer(trainer: str, clean: bool, draws: int, seed: int) -> Row:
    """Return the outcomes of faults, or clean kinds, that are drawn at random for a trainer."""

    def draw(rng: random.Random, folder: Path) -> Drawn:
        return prepare_by_trainer(trainer, rng, clean, folder)

    def seed_of(number: int) -> str:
        return f"trainers-{seed}-{number}-{trainer}-{clean}"

    return _outcomes("trainers", trainer, clean, draws, seed_of, draw)


def measure_all(form: str, faults: int, clean: int, seed: int) -> Iterator[Row]:
    """Yield the outcomes of all kinds, or of all trainers."""
    if form == "trainers":
        for trainer in trainer_shapes.TRAINERS:
            yield measure_trainer(trainer, False, faults, seed)
            yield measure_trainer(trainer, True, clean, seed)
        return
    for kind in FORMS[form][1]:
        yield measure(form, kind, faults, seed)
    for kind in FORMS[form][2]:
        yield measure(form, kind, clean, seed)


def main(arguments: Sequence[str]) -> int:
    """Measure all kinds, print a line each, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--form", choices=["trainers", *sorted(FORMS)], default="weights")
    parser.add_argument(
        "--faults", type=whole(1), default=3, help="draws of each fault, or of each trainer's"
    )
    parser.add_argument(
        "--clean", type=whole(1), default=6, help="draws of each clean kind, or of each trainer's"
    )
    parser.add_argument("--seed", type=whole(0), default=0)
    parser.add_argument("--json")
    known = parser.parse_args(arguments)
    quiet_libraries()
    torch.set_num_threads(1)
    rows = []
    for row in measure_all(known.form, known.faults, known.clean, known.seed):
        rows.append(row)
        sys.stdout.write(f"{row}\n")
        sys.stdout.flush()
    data = [dataclasses.asdict(row) for row in rows]
    write_json(known.json, record([*arguments], data, "python -m benchmarks.verify"))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
