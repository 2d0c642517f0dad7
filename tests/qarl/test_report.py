"""`qarl report`: one page out of what runs' folders hold. Built here of small records, without an
engine; what a browser makes of the page is not seen by these tests.
"""

import base64
import json
import shutil
from dataclasses import asdict, replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qarl.cli.main import main
from qarl.configs.load import load_config
from qarl.learner.clip_reasons import CLIP_REASONS
from qarl.learner.diagnostics.ages import MismatchByAgeMeter
from qarl.learner.diagnostics.figure import Figure
from qarl.page.build import MARK, report_page
from qarl.page.figures import MOST_POINTS, digits, mismatch_figures
from qarl.page.runs import configurations, read_runs
from qarl.page.tokens import BUDGET, _cost, _within, packed_tokens, treatment
from qarl.page.verdict import verdict
from qarl.report.finding import Finding
from qarl.report.run_folder import RunFolder
from qarl.report.start_note import StartNote
from qarl.report.token_files import TokenRows, write_step

HOSTILE = (
    '<!--<script></script ><script >alert("x")</script><img src=x onerror=alert(1)>&amp;\u2028'
    " {{script}} 🙂"
)


LINE: dict[str, Any] = {
    "response_tokens": 3.0,
    "error_tokens": 0.0,
    "improbable_tokens": 0.0,
    "repeated_tokens": 0.0,
    "mixed_reward_groups": 0.8,
    "truncated": 0.0,
    "skipped_batches": 0,
    "seconds/sample": 1.0,
    "seconds/learn": 0.5,
    "learn/clipped": 0.01,
    "learn/phantom_clipped": None,
    "learn/corrected": 0.0,
    "learn/entropy": 0.5,
    "learn/skipped": 0,
    "learn/forward": 0.1,
    "learn/mismatch/mean_abs": 0.001,
    "learn/mismatch/max_abs": 0.1,
    "learn/mismatch/mean_log_w": 0.0001,
    "learn/mismatch/log_w_low": -0.01,
    "learn/mismatch/log_w_high": 0.02,
}
"""Metrics of a step, except those that change from step to step."""


def new_run(
    path: Path,
    steps: int | list[Any] = 4,
    of: int = 4,
    tokens: bool = True,
    fields: Any = (),
) -> Path:
    """A run's folder with metrics of that many steps, or these, and two completions a step."""
    folder = RunFolder.create(
        load_config(None, {"output": str(path), "steps": str(of), **dict(fields)})
    )
    lines = [line(step) for step in range(1, steps + 1)] if isinstance(steps, int) else steps
    folder.metrics.write_text("".join(json.dumps(each) + "\n" for each in lines))
    if tokens:
        for step in range(1, len(lines) + 1):
            write_step(folder.tokens, step, rows(step), 8)
    return path


def line(step: int, **more: Any) -> dict[str, Any]:
    changing = {
        "step": step,
        "weight_version": step,
        "reward": step / 10,
        "digest": f"{step:032x}",
    }
    return LINE | changing | more


def rows(
    step: int,
    texts: tuple[str, str] = ("7", HOSTILE),
    length: int = 3,
) -> TokenRows:
    """Two completions of one prompt; the second's log-probs and ratios are not known."""
    count = 2 * length
    unknown = np.arange(count) >= length
    values = np.where(unknown, np.nan, np.linspace(-0.5, 0.25, count)).astype(np.float32)
    about: dict[str, list[Any]] = {
        "step": [step] * 2,
        "group": [0, 0],
        "sample": [0, 1],
        "prompt_id": ["a", "a"],
        "prompt": [HOSTILE] * 2,
        "prompt_token_ids": [[1, 2]] * 2,
        "completion": list(texts),
        "finish_reason": ["stop", "length"],
        "age": [1, None],
        "reward": [1.0, 0.0],
        "group_rewards": [[1.0, 0.0, 0.0]] * 2,
        "worst_token": [0, None],
        "experts": [None, None],
    }
    return TokenRows(
        completions=about,
        tokens={
            "token_id": np.arange(count, dtype=np.int32) % 500,
            "token": np.array(
                [texts[i >= length] if i % length == 0 else "" for i in range(count)],
                dtype=object,
            ),
            "weight_version": np.repeat([step - 1, step], [count - 1, 1]).astype(np.int32),
            "sampler_logprob": np.linspace(-9, -0.1, count).astype(np.float32),
            "learner_logprob": values,
            "mismatch": values,
            "log_ratio": values,
            "unquantized_logprob": (
                np.where(unknown | (step % 3 != 1), np.nan, -1.5).astype(np.float32)
            ),
            "clip": np.where(unknown, -1, np.arange(count) % len(CLIP_REASONS)),
            "advantage": np.repeat([1.25, -1.25], length).astype(np.float32),
            "improbable": np.arange(count) == 0,
            "repeated": np.arange(count) == 1,
        },
        lengths=[length, length],
    )


def page_of(*paths: Path) -> str:
    return report_page(read_runs(paths))


def data_of(*paths: Path) -> dict[str, Any]:
    return json.loads(Elements(page_of(*paths)).data)


def findings_of(run: Path) -> list[Finding]:
    return verdict(configurations(read_runs([run])))


def test_where_a_mismatch_is_drawn_by_hand():
    """Bins of equally many positions, and thirds of a decade of probability; empty ones, and those
    without mismatch, are left out. One token of probability 1 goes to the last bin.
    """
    at = np.array([0, 0, 1, 2])
    logprob = np.log([0.5, 0.4, 0.9, 1.0])
    figures = mismatch_figures(
        [None, (at, logprob, np.array([0.1, -0.3, 0.0, 0.4]))], "those of a run"
    )
    by_position, by_probability = (figure["lines"][0] for figure in figures)
    assert (by_position["of"], by_position["x"]) == (1, [1.0, 3.0])
    assert by_position["y"] == by_position["low"] == pytest.approx([0.2, 0.4])
    assert by_position["high"] == pytest.approx([0.1 + 0.95 * 0.2, 0.4])
    assert by_probability["x"] == pytest.approx([10 ** (-1 / 2), 10 ** (-1 / 6)], rel=1e-3)
    assert by_probability["y"] == pytest.approx([0.3, 0.5 / 3], rel=1e-3)
    assert mismatch_figures([None, (at, logprob, np.zeros(4))], "") == []


def test_metrics_that_are_lists_are_means_over_the_steps_that_measured(tmp_path: Path):
    """Bands by age go from the lowest to the highest; a run whose tokens are all new draws
    nothing.
    """
    ages = [{"learn/ages/age": [0, 1], "learn/ages/mean_abs": [0.0, value]} for value in (0.1, 0.3)]
    measured = [ages[0], {}, ages[1], {}]
    others = [{"learn/ages/age": [0], "learn/ages/mean_abs": [0.2]}, {}]
    run = new_run(
        tmp_path / "run",
        [line(n, **of) for n, of in enumerate(measured, 1)],
    )
    other = new_run(
        tmp_path / "other",
        [line(n, **of) for n, of in enumerate(others, 1)],
        fields={"scheme": "bf16"},
    )
    note = StartNote(
        audit=[],
        canary=None,
        accuracy=None,
        figures=list(MismatchByAgeMeter.figures),
    )
    for path in (run, other):
        (path / "start.json").write_text(json.dumps(asdict(note)))
    (by_age,) = data_of(run)["profiles"]
    assert by_age["lines"] == [
        {
            "of": 0,
            "name": "mean",
            "x": [0, 1],
            "y": [0, 0.2],
            "low": [0, 0.1],
            "high": [0, 0.3],
        }
    ]
    (by_age,) = data_of(run, other)["profiles"]
    assert [each["of"] for each in by_age["lines"]] == [0, 1]
    assert data_of(other)["profiles"] == []


def test_what_became_of_error_tokens(tmp_path: Path):
    """Computed by hand: of a step's two completions one has an advantage of 1.25 and is known:
    its first token improbable, its second in a loop, third sound, with clip reasons in
    `CLIP_REASONS`' order; the other was not learned from.
    """
    data = data_of(new_run(tmp_path / "run", steps=2))
    assert [row[:4] for row in data["treatment"]] == [
        [0, "A > 0", "sound", 2],
        [0, "A > 0", "improbable", 2],
        [0, "A > 0", "in a loop", 2],
    ]
    clipped, corrected, learned = zip(
        *(row[4:] for row in data["treatment"]),
        strict=True,
    )
    # reasons 2, 0 and 1
    assert clipped == (1, 0, 1)
    assert corrected == (0, 0, 0)
    assert learned == (0, 1, 0)
    # all reasons but the first two
    sound = treatment([[rows(1, length=len(CLIP_REASONS))]])[0]
    assert sound[2:] == ["sound", 8, 0.875, 0.125, 0.0]


class Elements(HTMLParser):
    """Tags of a page, and what its data element holds."""

    def __init__(self, page: str):
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.data = ""
        self._in_data = False
        self.feed(page)

    def handle_starttag(
        self,
        tag: str,
        attrs: list[tuple[str, str | None]],
    ) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        self._in_data = ("id", "data") in attrs

    def handle_endtag(self, tag: str) -> None:
        self._in_data = False

    def handle_data(self, data: str) -> None:
        self.data += data if self._in_data else ""


def test_equal_runs_give_equal_bytes(tmp_path: Path):
    """Also from another place: nothing of the machine, the time or the path is in a page."""
    run = new_run(tmp_path / "here" / "run")
    shutil.copytree(run, tmp_path / "there" / "run")
    page = page_of(run)
    assert page == page_of(run) == page_of(tmp_path / "there" / "run")
    assert page.startswith(MARK)
    assert str(tmp_path) not in page


def test_text_stays_text(tmp_path: Path):
    """A prompt, completion, task or run name that is HTML or a placeholder of the page's own."""
    run = new_run(tmp_path / "<b>{{data}}", fields={"task.name": "</script>"})
    other = new_run(
        tmp_path / "other",
        [line(1, truncated=0.5)],
        fields={"scheme": "w8a8"},
    )
    page = page_of(run, other)
    elements = Elements(page)
    assert elements.tags.count("script") == 2
    assert elements.tags.count("li") == len(verdict(configurations(read_runs([run, other])))) > 2
    assert page.count(' headline"') == 2
    assert "img" not in elements.tags
    assert not any(name.startswith("on") for name, _ in elements.attributes)
    assert not {"<", ">", "&"} & set(elements.data), (
        "browsers end a script where this parser does not"
    )
    data = json.loads(elements.data)
    assert data["tokens"]["prompts"] == [HOSTILE]
    assert HOSTILE in data["tokens"]["texts"]
    assert data["runs"][0]["name"] == "<b>{{data}}"


def test_the_page_needs_no_network(tmp_path: Path):
    elements = Elements(page_of(new_run(tmp_path / "run")))
    addresses = [value for name, value in elements.attributes if name in ("src", "href")]
    assert all(value and value.startswith(("#", "data:")) for value in addresses)
    policy = next(
        text
        for name, text in elements.attributes
        if name == "content" and text and "default-src" in text
    )
    assert policy.startswith("default-src 'none'")
    assert "http" not in policy


def test_seeds_share_a_curve_with_a_band(tmp_path: Path):
    """Runs that differ in their seed alone are one configuration; the line is their mean at steps
    any has.
    """
    runs = [
        new_run(tmp_path / str(seed), steps=4 - seed, fields={"seed": str(seed)}) for seed in (0, 1)
    ]
    (runs[1] / "metrics.jsonl").write_text(
        "".join(json.dumps(line(s, reward=1.0)) + "\n" for s in (1, 2, 3))
    )
    other = new_run(tmp_path / "other", fields={"scheme": "w8a8", "learner.aligned": "false"})
    data = data_of(*runs, other)
    assert data["kinds"] == ["w4a16 · aligned", "w8a8 · plain learner"]
    reward = next(figure for figure in data["curves"] if figure["id"] == "reward")
    assert reward["lines"][0] == {
        "of": 0,
        "name": "reward",
        "x": [1, 2, 3, 4],
        "y": [0.55, 0.6, 0.65, 0.4],
        "low": [0.1, 0.2, 0.3, 0.4],
        "high": [1, 1, 1, 0.4],
    }
    assert "low" not in reward["lines"][1]
    assert [row[0] for row in data["settings"]] == ["scheme", "learner.aligned"]
    # of one run, what it trains and what is not a default
    alone = data_of(other)["settings"]
    assert alone[1:3] == [["scheme", "w8a8"], ["learner.aligned", False]]
    assert "learner.objective.name" not in [row[0] for row in alone]


def test_configurations_that_a_label_cannot_tell_apart_have_their_runs_names(
    tmp_path: Path,
):
    far = {
        "scheme": "w8a8",
        "learner.aligned": "false",
        "learner.objective.name": "grpo",
        "dtype": "float16",
    }
    fields = {"a": {}, "b": {"learner.mini_batches": "8"}, "c": far}
    assert data_of(*(new_run(tmp_path / name, fields=each) for name, each in fields.items()))[
        "kinds"
    ] == [*"abc"]


def test_long_runs_are_thinned_and_numbers_are_short(tmp_path: Path):
    assert [digits(value) for value in (0.123456, 12345.6, 3.0, -1e-9, 0.0)] == [
        0.1235,
        12346,
        3,
        -1e-9,
        0,
    ]
    run = new_run(tmp_path / "run", steps=2 * MOST_POINTS + 1, of=5000, tokens=False)
    (reward,) = data_of(run)["curves"][0]["lines"]
    assert len(reward["x"]) <= MOST_POINTS
    assert reward["x"][-1] == 2 * MOST_POINTS + 1
    assert reward["y"][0] == pytest.approx(0.2)


def test_tokens_come_through_the_packing():
    """They agree to the three digits of float16; what is not known stays so."""
    tokens = packed_tokens([[rows(1), rows(2)]])
    expected = rows(1).tokens
    for name in ("sampler_logprob", "mismatch", "log_ratio"):
        found = np.frombuffer(base64.b64decode(tokens[name]), "<f2")
        np.testing.assert_allclose(found, np.tile(expected[name], 2), rtol=1e-3)
    flags = np.frombuffer(base64.b64decode(tokens["flags"]), np.uint8)
    clips = (flags & 15).astype(int)
    np.testing.assert_array_equal(
        np.where(clips == 15, -1, clips),
        np.tile(expected["clip"], 2),
    )
    np.testing.assert_array_equal(flags & 16 > 0, np.tile(expected["improbable"], 2))
    np.testing.assert_array_equal(flags & 32 > 0, np.tile(expected["repeated"], 2))
    words = np.frombuffer(base64.b64decode(tokens["words"]), "<u2")
    assert [tokens["texts"][word] for word in words] == [
        *expected["token"],
        *expected["token"],
    ]
    assert [tokens["ids"][word] for word in words] == [
        *expected["token_id"],
        *expected["token_id"],
    ]
    assert tokens["completions"]["advantage"] == [1.25, -1.25] * 2
    assert tokens["completions"]["age"] == [1, None] * 2
    unquantized = np.frombuffer(base64.b64decode(tokens["unquantized_logprob"]), "<f2")
    assert unquantized[:3].tolist() == [-1.5] * 3
    assert np.isnan(unquantized[3:]).all()
    assert tokens["completions"]["worst"] == [0, -1] * 2
    assert tokens["completions"]["truncated"] == [0, 1] * 2
    assert (tokens["recorded"], tokens["shown"]) == (4, 4)


def with_pictures(step: TokenRows, *files: bytes) -> TokenRows:
    """Return rows whose prompts have these pictures."""
    columns = {**step.completions, "pictures": [list(files)] * len(step)}
    return replace(step, completions=columns)


def test_a_page_has_each_picture_once_beside_its_completions():
    """Contract: rows of text have none. Pictures count for the page's size."""
    steps = [with_pictures(rows(1), b"one", b"two"), with_pictures(rows(2), b"two"), rows(3)]
    tokens = packed_tokens([steps])
    assert [base64.b64decode(file) for file in tokens["pictures"]] == [b"one", b"two"]
    assert tokens["completions"]["pictures"] == [[0, 1], [0, 1], [1], [1], [], []]
    large = [with_pictures(rows(step), bytes([step]) * 500_000) for step in (1, 2, 3, 4)]
    tokens = packed_tokens([large])
    # two fit: the last, and of those before it the one that asked the unquantized policy
    assert tokens["completions"]["step"] == [1, 1, 4, 4]
    assert len(json.dumps(tokens, ensure_ascii=False)) <= BUDGET


def test_steps_that_asked_the_unquantized_policy_are_shown_first():
    """Every third step did; of six steps three fit: the last, and before it one of each two, one
    that asked if any.
    """
    steps = [rows(step, length=100) for step in range(1, 7)]
    shown = _within(steps, 3 * _cost(steps[0]))
    assert [each.completions["step"][0] for each in shown] == [1, 4, 6]
    assert [each.completions["step"][0] for each in _within(steps, 10**6)] == [
        1,
        2,
        3,
        4,
        5,
        6,
    ]


def test_completions_that_take_more_than_was_thought_go(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr("qarl.page.tokens._A_TOKEN", 1)
    monkeypatch.setattr("qarl.page.tokens.BUDGET", 20_000)
    tokens = packed_tokens([[rows(step, length=100) for step in range(1, 61)]])
    assert 10_000 < len(json.dumps(tokens, ensure_ascii=False).encode()) <= 20_000


@pytest.mark.parametrize(("steps", "length"), [(50, 1000), (60, 2000), (2, 100_000)])
def test_a_page_stays_small(tmp_path: Path, steps: int, length: int):
    """100,000 tokens fit; of more than fits, steps spread evenly, the last among them."""
    run = new_run(tmp_path / "run", steps=steps, of=steps, tokens=False)
    (run / "tokens").mkdir()
    for step in range(1, steps + 1):
        file = write_step(tmp_path, step % 2, rows(1, length=length), 2)
        (run / "tokens" / f"step-{step:06d}.parquet").symlink_to(file)
    page = page_of(run).encode()
    assert len(page) <= 2 * 2**20
    data = json.loads(Elements(page.decode()).data)["tokens"]
    assert data["recorded"] == 2 * steps
    if steps == 50:
        assert data["shown"] == 100
        assert sum(data["completions"]["length"]) == 100_000
    else:
        assert 0 < data["shown"] < data["recorded"]
        assert sum(data["completions"]["length"]) * 12 > BUDGET / 4


WAVE = [0.25, 0.3, 0.1, 0.2] * 4
RISING_WAVE = [round(value + n * 0.1, 2) for n, value in enumerate(WAVE)]
HEADLINES: dict[str, tuple[int, dict[str, list[float]], str, str]] = {
    "level": (
        1,
        {"reward": [0.2] * 29},
        "note",
        "No change beyond noise: reward from 0.2 to 0.2",
    ),
    "a wave": (0, {"reward": WAVE}, "note", "No change beyond noise: reward"),
    "a wave that rises": (0, {"reward": RISING_WAVE}, "good", "Learned: reward"),
    "accuracy rises": (
        1,
        {"accuracy": [round(0.22 + 0.02 * n, 2) for n in range(29)]},
        "good",
        "Learned: held-out accuracy from 22.0% to 78.0",
    ),
    "accuracy falls": (
        1,
        {"accuracy": [round(0.78 - 0.02 * n, 2) for n in range(29)]},
        "warning",
        "Got worse: held-out accuracy",
    ),
    "nothing but rewards says which answers are right": (
        1,
        {
            "accuracy": [0.0] * 29,
            "heldout_reward": list(range(-4, 25)),
            "reward": [round(0.1 + 0.1 * n, 2) for n in range(29)],
        },
        "good",
        "Learned: reward from 0.2 to 2.8 (+2.6) in 29 steps",
    ),
    "a point of accuracy": (
        1,
        {"accuracy": [0.2, 0.21]},
        "note",
        "No change beyond noise: held-out accuracy",
    ),
    "1.7 standard errors": (
        1,
        {"accuracy": [0.5, 0.575]},
        "note",
        "No change beyond noise: held-out",
    ),
    "2.1 standard errors": (
        0,
        {"reward": [0.1, -0.1] * 5 + [0.45, 0.25] * 5},
        "good",
        "Learned: reward",
    ),
    "reward rises, accuracy does not": (
        0,
        {"accuracy": [0.2] * 16, "reward": RISING_WAVE},
        "good",
        (
            "Learned: reward from 0.325 to 1.6 (+1.28), with no change of held-out accuracy from"
            " 20.0% to 20.0%, which"
        ),
    ),
    "no version is new": (
        1,
        {"weight_version": [0]},
        "warning",
        "Learned nothing in 1 step of 4; the run is not finished",
    ),
}
"""What became of a run → its first step, the metrics of its steps, and its first finding."""


@pytest.mark.parametrize(("first", "values", "level", "said"), HEADLINES.values(), ids=HEADLINES)
def test_the_headline_says_what_became_of_it(
    tmp_path: Path, first: int, values: Any, level: str, said: str
):
    steps = enumerate(zip(*values.values(), strict=True), first)
    metrics = [line(step, **dict(zip(values, of_step, strict=True))) for step, of_step in steps]
    headline = findings_of(new_run(tmp_path / "run", metrics, tokens=False))[0]
    assert headline.level == level and headline.text.startswith(said), headline


REFUSALS = [
    ("report", "qarl report needs RUN"),
    (
        "report begun",
        "run 'begun' has no steps yet; make its report once its first step is done",
    ),
    ("report run run", "run 'run' is given twice"),
    (
        "report older",
        "line 1, lacks 'weight_version': another version of qarl wrote it",
    ),
    ("report damaged", "line 2, is not a JSON object"),
    ("report start", "'start/start.json' cannot be read"),
    (
        "report run -o no/such/page.html",
        "-o no/such/page.html: there is no folder 'no/such'",
    ),
    (
        "report run -o empty",
        "-o empty is a folder; name a file, such as empty/report.html",
    ),
    (
        "report run -o notes.html",
        "-o notes.html exists and is not a report; name another file",
    ),
    ("report run --open", "unknown option --open"),
]
"""Command line → what its error says."""


@pytest.mark.parametrize(("arguments", "error"), REFUSALS)
def test_a_report_that_cannot_be_made_is_refused_and_nothing_is_written(
    arguments: str, error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
):
    monkeypatch.chdir(tmp_path)
    for name in ("run", "older", "damaged", "start"):
        new_run(Path(name), steps=2, tokens=False)
    new_run(Path("begun"), steps=0)
    Path("empty").mkdir()
    Path("notes.html").write_text("<!doctype html>mine")
    Path("older/metrics.jsonl").write_text('{"step": 1}\n')
    Path("damaged/metrics.jsonl").write_text(
        json.dumps(line(1)) + "\n{\n" + json.dumps(line(3)) + "\n"
    )
    Path("start/start.json").write_text('{"canary": {}}')
    assert main(arguments.split()) == 2
    assert error in capsys.readouterr().err
    assert not Path("report.html").exists()
    assert Path("notes.html").read_text() == "<!doctype html>mine"


def test_a_page_is_written_and_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """The run is going on: a line half written is left out."""
    run = new_run(tmp_path / "run", steps=2, of=9)
    page = tmp_path / "page.html"
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "rew')
    assert main(["report", str(run), "-o", str(page)]) == 0
    assert f"wrote {page}: " in capsys.readouterr().out
    first = page.read_bytes()
    assert main(["report", str(run), "-o", str(page)]) == 0
    assert page.read_bytes() == first
    assert "2 steps of 9; the run is not finished" in first.decode()


def test_early_warnings_are_named(tmp_path: Path):
    lines = [line(n, reward=(0.9 if n <= 20 else 0.1) + 0.001 * (n % 3)) for n in range(1, 41)]
    texts = [
        finding.text for finding in findings_of(new_run(tmp_path / "run", lines, 40, tokens=False))
    ]
    assert any(
        text.startswith("At step 2") and "the reward fell from 0.9" in text for text in texts
    )


BOUNDS = [
    (
        "learn/mismatch/mean_abs",
        0.0505,
        (
            "Mean |Δ log p| is 0.051 nats at the end, above 0.05: sampler and learner are two"
            " policies."
        ),
    ),
    (
        "learn/phantom_clipped",
        0.0101,
        "1.0% of tokens are clipped at the end for precision alone (above 1%).",
    ),
    (
        "learn/corrected",
        0.0505,
        "5.1% of tokens have a mismatch weight that was capped or masked at the end (above 5%).",
    ),
    (
        "truncated",
        0.101,
        "10.1% of completions are cut off by rollout.max_new_tokens at the end (above 10%).",
    ),
    (
        "error_tokens",
        0.0202,
        "2.0% of tokens are improbable or in loops at the end (above 2%).",
    ),
    (
        "mixed_reward_groups",
        0.099,
        (
            "Only 9.9% of groups have rewards that differ at the end: the task is nearly solved, or"
            " out of reach."
        ),
    ),
]
"""Metric, a value one hundredth beyond its bound, the finding."""


def findings_at(value: float, field: str, folder: Path, seeds: int) -> list[str]:
    """Return the findings of runs of three steps whose last steps have that value."""
    lines = [line(n, reward=0.0, accuracy=0.3, **{field: value * (n > 1)}) for n in range(3)]
    runs = [
        new_run(folder / str(seed), lines, 3, tokens=False, fields={"seed": str(seed)})
        for seed in range(seeds)
    ]
    return [finding.text for finding in verdict(configurations(read_runs(runs)))]


@pytest.mark.parametrize("seeds", [1, 2])
@pytest.mark.parametrize(("field", "beyond", "finding"), BOUNDS, ids=[row[0] for row in BOUNDS])
def test_a_metric_is_a_finding_beyond_its_bound_alone(
    field: str, beyond: float, finding: str, seeds: int, tmp_path: Path
):
    below = field == "mixed_reward_groups"
    bound = beyond / (0.99 if below else 1.01)
    assert finding in findings_at(beyond, field, tmp_path / "beyond", seeds)
    within = findings_at(bound * (1.01 if below else 0.99), field, tmp_path / "within", seeds)
    assert not any(text.split(" ", 2)[2] == finding.split(" ", 2)[2] for text in within)
    assert len(within) == 1, "the headline"


def test_steps_left_out_and_batches_that_taught_nothing_are_counted_over_seeds(
    tmp_path: Path,
):
    lines = [line(n) for n in (1, 2, 3)]
    lines[-1] |= {"learn/skipped": 1, "skipped_batches": 300}
    runs = [
        new_run(tmp_path / str(seed), lines, 3, tokens=False, fields={"seed": str(seed)})
        for seed in (0, 1)
    ]
    one = [finding.text for finding in verdict(configurations(read_runs(runs[:1])))]
    assert "1 optimizer step was left out because a gradient was not finite." in one
    assert "300 batches taught nothing: within every group all rewards were equal." in one
    both = [finding.text for finding in verdict(configurations(read_runs(runs)))]
    assert "2 optimizer steps were left out because a gradient was not finite." in both
    assert "600 batches taught nothing: within every group all rewards were equal." in both


def page_of_three(tmp_path: Path) -> dict[str, Any]:
    """Return the page's data of two configurations, the first with two seeds, of twelve steps each.

    Every fourth step has an evaluation and a canary, shifted by a step a run; two of three steps
    have the phase "old". The runs' start notes name figures of diagnostics.
    """
    figures = [
        Figure("over", "Over", "nats", "Steps.", {"d": "d/over"}, True),
        Figure("lists", "Lists", "share", "", {"d": "d/mean"}, axis="age", places="d/place"),
        Figure("counted", "Counted", "share", "", {"d": "d/mean"}, axis="layer"),
    ]
    runs = []
    for number, fields in enumerate(({}, {"seed": "1"}, {"scheme": "w8a8", "dtype": "float32"})):
        lines = []
        for index in range(12):
            step = index + 1
            more: dict[str, Any] = {
                "d/over": step / 7,
                "d/mean": [step / 10, None, 0.5],
                "d/place": [0, step, 8],
            }
            if index % 4 == number:
                more |= {
                    "accuracy": index / 20,
                    "canary": index / 50,
                    "seconds/evaluate": 9.0,
                }
            if index % 3:
                more |= {
                    "seconds/learn/old": index / 3,
                    "learn/phantom_clipped": index / 100,
                }
            lines.append(line(step, reward=step * step % 5 / 7, **more))
        run = new_run(tmp_path / f"run{number}", lines, 12 + number, fields=fields)
        note = StartNote([["a"]], 0.02 * number or None, None if number else 0.25, figures)
        (run / "start.json").write_text(json.dumps(asdict(note)))
        runs.append(run)
    return data_of(*runs)


def test_a_page_groups_runs_by_what_differs_besides_the_seed(tmp_path: Path):
    page = page_of_three(tmp_path)
    assert page["kinds"] == ["w4a16 · bfloat16", "w8a8 · float32"]
    assert page["settings"] == [
        ["scheme", "w4a16", "w8a8"],
        ["dtype", "bfloat16", "float32"],
    ]
    first, second, third = page["runs"]
    assert [run["of"] for run in (first, second, third)] == [0, 0, 1]
    assert first["heldout"] == "25.0% → 40.0%", "from before step 1 to index 8"
    assert second["heldout"] == "5.0% → 45.0%", "of indices 1 and 9: nothing before step 1"
    assert second["reward"] == 0.5714, "12² % 5 / 7"
    assert second["steps"] == second["publishes"] == 12
    assert second["asked"] == 13
    assert second["canaries"] == 4, "three of its steps, and that of its start"
    assert second["canary"] == 0.18, "9 / 50"
    assert second["digest"] == f"{12:032x}"
    assert second["audit"] == [["a"]]


def test_a_pages_curves_are_means_over_seeds_at_the_steps_that_measured(tmp_path: Path):
    curves = {curve["id"]: curve for curve in page_of_three(tmp_path)["curves"]}
    rewards = curves["reward"]["lines"]
    steps = list(range(1, 13))
    assert rewards[0]["x"] == rewards[1]["x"] == steps
    assert rewards[0]["y"] == [round(step * step % 5 / 7, 4) for step in steps]
    assert rewards[0]["low"] == rewards[0]["y"] == rewards[0]["high"], "the seeds are alike"
    assert "low" not in rewards[1], "one seed has no band"
    accuracy, other = curves["accuracy"]["lines"]
    assert accuracy["x"] == [0, 1, 2, 5, 6, 9, 10], "0: before training, of the run that has it"
    assert accuracy["y"] == [0.25, 0, 0.05, 0.2, 0.25, 0.4, 0.45]
    assert other["x"] == [3, 7, 11]
    assert other["y"] == [0.1, 0.3, 0.5]
    phantom = next(each for each in curves["clipped"]["lines"] if each["name"] == "phantom")
    assert phantom["x"] == [2, 3, 5, 6, 8, 9, 11, 12]
    assert phantom["y"][:2] == [0.01, 0.02]
    assert curves["mismatch"]["log"]
    assert not curves["reward"]["log"]
    diagnostic = curves["over"]
    assert diagnostic["log"]
    assert diagnostic["lines"][0]["y"][:2] == [0.1429, 0.2857], "1 / 7 and 2 / 7"


def test_a_pages_times_and_profiles_are_means_over_steps(tmp_path: Path):
    page = page_of_three(tmp_path)
    # Nine seconds in three of twelve steps; "old": (1 + 2 + 4 + 5 + 7 + 8 + 10 + 11) / 3 / 12.
    phases = {"sample": 1, "learn": 0.5, "evaluate": 2.25}
    assert page["time"] == [
        {"of": kind, "phases": phases, "learn": {"old": 1.333}} for kind in (0, 1)
    ]
    by_place, by_layer = page["profiles"]
    assert by_place["lines"][0]["x"] == [0, 8], "the place in the middle has no value"
    assert by_layer["lines"][0]["x"] == [1, 3], "without places, layers are counted from 1"
    for profile in (by_place, by_layer):
        assert profile["lines"][0]["y"] == [0.65, 0.5], "means of 0.1, 0.2, … 1.2 and of 0.5"
        assert profile["lines"][0]["low"] == [0.1, 0.5]
        assert profile["lines"][0]["high"] == [1.2, 0.5]


def test_a_pages_tokens_are_counted_by_place_and_kind(tmp_path: Path):
    """Two completions a step: three runs of twelve steps have 72."""
    page = page_of_three(tmp_path)
    assert page["tokens"]["recorded"] == page["tokens"]["shown"] == 72
    assert page["tokens"]["prompts"] == [HOSTILE]
    by_position, by_probability = page["where"]
    assert by_position["lines"][0]["x"] == [1, 2, 3]
    assert by_position["lines"][0]["y"] == [0.5, 0.35, 0.2]
    assert by_probability["lines"][0]["y"] == [0.5, 0.35, 0.2]
    sound, improbable, in_a_loop = page["treatment"][:3]
    assert sound == [0, "A > 0", "sound", 24, 1, 0, 0]
    assert improbable == [0, "A > 0", "improbable", 24, 0, 0, 1]
    assert in_a_loop == [0, "A > 0", "in a loop", 24, 1, 0, 0]
