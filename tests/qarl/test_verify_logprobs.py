"""`qarl verify logprobs`: figures by hand, faults planted into dumps of models that really sample,
and dumps that are refused.

Blind spot: the models are random, with two layers. Rounding of large models is larger; `--floor`
is for that.
"""

import json
import math
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import qarl
from qarl.cli.main import main
from qarl.report.token_files import COMPLETION_COLUMNS, TOKEN_COLUMNS, TokenRows, write_step
from qarl.verify import dump as dumps
from tests.support.drawn_dumps import CLEAN, FAULTS, draw_dump
from tests.support.profiles import examples


def write(
    folder: Path,
    rows: list[dict[str, Any]],
    name: str = "dump.jsonl",
) -> Path:
    """Write rows as JSON lines, or as Parquet if the name says so."""
    file = folder / name
    if file.suffix == ".parquet":
        import pyarrow as pa
        import pyarrow.parquet as pq

        pq.write_table(pa.Table.from_pylist(rows), file)
    else:
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def row(
    sampler: list[Any],
    trainer: list[Any],
    **columns: Any,
) -> dict[str, Any]:
    """Return a row of a dump with different token ids."""
    ids = list(range(len(sampler)))
    return {
        "completion_ids": ids,
        "sampler_logprobs": sampler,
        "trainer_logprobs": trainer,
        **columns,
    }


@pytest.mark.parametrize("name", ["dump.jsonl", "dump.parquet"])
def test_figures_are_those_computed_by_hand(tmp_path: Path, name: str):
    """d is 0.5, -0.25 and 0; a token that the sampler did not sample counts nowhere."""
    rows = [
        row(
            [-1.0, None, -0.75],
            [-0.5, -3.0, -1.0],
            advantage=1.0,
            age=0,
        ),
        row([-2.0], [-2.0], advantage=-1.0, age=0),
    ]
    report = qarl.verify.logprobs(write(tmp_path, rows, name))
    assert (report.completions, report.tokens) == (2, 3)
    assert report.mean_abs == pytest.approx(0.25)
    assert report.max_abs == pytest.approx(0.5)
    assert report.equal == pytest.approx(1 / 3)
    assert report.k1 == pytest.approx(-0.25 / 3)
    assert report.k2 == pytest.approx((0.125 + 0.03125) / 3)
    k3 = (math.exp(0.5) - 1.5) + (math.exp(-0.25) - 0.75)
    assert report.k3 == pytest.approx(k3 / 3)
    # exp(0.5) > 1.2 with a positive advantage is clipped; exp(-0.25) < 0.8 with one is not
    assert report.outside_clip == pytest.approx(2 / 3)
    assert report.phantom == pytest.approx(1 / 3)


def test_a_dump_of_many_batches_has_the_figures_of_its_rows(tmp_path: Path):
    """Files are read in batches of 256 completions; figures do not depend on where these end."""
    rng = random.Random(3)
    rows = [row([-1.0, -0.5], [-1.0 - rng.random() / 50, -0.5]) for _ in range(600)]
    distances = [abs(each["trainer_logprobs"][0] + 1.0) for each in rows]
    halves = [write(tmp_path, rows[:301], "a.jsonl"), write(tmp_path, rows[301:], "b.parquet")]
    report = qarl.verify.logprobs(*halves)
    assert report.completions == 600
    assert report.mean_abs == pytest.approx(sum(distances) / 1200)
    assert report.max_abs == pytest.approx(max(distances))


@pytest.mark.parametrize("seed", range(examples(5 * len(FAULTS)) // len(FAULTS)))
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_named_and_no_other(tmp_path: Path, fault: str, seed: int):
    drawn = draw_dump(random.Random(f"named-{fault}-{seed}"), fault, completions=24)
    report = qarl.verify.logprobs(write(tmp_path, drawn.rows))
    assert [cause.name for cause in report.faults] == [fault], (drawn.said, report.lines())
    if "rows" in drawn.said:
        assert report.faults[0].about == tuple(f"row {n}" for n in drawn.said["rows"])


@pytest.mark.parametrize("seed", range(examples(5 * len(CLEAN)) // len(CLEAN)))
@pytest.mark.parametrize("kind", CLEAN)
def test_a_clean_dump_has_no_fault(tmp_path: Path, kind: str, seed: int):
    drawn = draw_dump(random.Random(f"clean-{kind}-{seed}"), kind, completions=24)
    report = qarl.verify.logprobs(write(tmp_path, drawn.rows))
    assert report.agrees, (drawn.said, report.lines())
    assert (report.causes[0].name == "equal") == (kind == "equal")


def test_a_temperature_is_estimated_and_its_side_named(tmp_path: Path):
    """Contract: tokens are drawn from one side's log-probs, and the mean ratio tells which."""
    rng = random.Random(0)
    while (drawn := draw_dump(rng, "temperature", completions=48)).said["raw"]:
        pass
    report = qarl.verify.logprobs(write(tmp_path, drawn.rows))
    (cause,) = report.faults
    estimate = float(cause.evidence.split("of about ")[1].split(";")[0].split()[0])
    assert estimate == pytest.approx(drawn.said["temperature"], rel=0.15)


@pytest.mark.parametrize("rows", [[row([-1.0, -2.0], [None, None])] * 2, [row([], [])]])
def test_a_dump_without_a_token_of_both_sides_is_refused(tmp_path: Path, rows: list, capsys):
    """Every log-prob of the trainer is null, or the only completion is empty."""
    assert main(["verify", "logprobs", str(write(tmp_path, rows))]) == 2
    assert "no token has log-probs of both sides" in capsys.readouterr().err


def test_a_mistyped_optional_column_is_named(tmp_path: Path):
    report = qarl.verify.logprobs(write(tmp_path, [row([-1.0], [-1.0], temprature=0.7)]))
    assert any("temprature" in text for text in report.unchecked)


def test_the_assertion_shows_the_causes(tmp_path: Path):
    rows = [row([-1.0] * 8, [-2.0 + n / 99] * 8) for n in range(8)]
    report = qarl.verify.logprobs(write(tmp_path, rows))
    with pytest.raises(qarl.verify.DisagreementError, match="log-probs disagree"):
        qarl.verify.assert_agreement(report)


def test_token_files_of_a_run_are_a_dump(tmp_path: Path):
    """The folder `tokens` of a run: environment tokens have no log-prob by the sampler."""
    lengths = [3, 2]
    completions: dict[str, list[Any]] = {name: [None, None] for name in COMPLETION_COLUMNS}
    completions |= {"age": [0, 1], "prompt_token_ids": [[1, 2], [3]], "worst_token": [0, 0]}
    tokens = {name: np.full(5, np.nan) for name in TOKEN_COLUMNS}
    tokens |= {
        "token_id": np.arange(5),
        "token": np.array(list("abcde"), dtype=object),
        "weight_version": np.array([4, 4, 4, 3, 3]),
        "sampler_logprob": np.array([-1.0, np.nan, -1.0, -2.0, -2.0]),
        "learner_logprob": np.array([-1.0, -4.0, -1.5, -2.0, -2.0]),
        "clip": np.full(5, -1),
        "improbable": np.zeros(5, dtype=bool),
        "repeated": np.zeros(5, dtype=bool),
    }
    write_step(tmp_path / "tokens", 3, TokenRows(completions, tokens, lengths), 2)
    report = qarl.verify.logprobs(tmp_path)
    assert (report.tokens, report.max_abs) == (4, 0.5)
    assert [each.label for each in report.by_age] == ["0", "1"]


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([{"completion_ids": [1], "sampler_logprob": [-1]}], ["sampler_logprobs", "did you mean"]),
        ([row([-1.0, -1.0], [-1.0])], ["trainer_logprobs has 1 values", "prepend"]),
        (
            [row([-1.0], [-1.0, -1.0, -1.0], prompt_ids=[5, 6])],
            ["2 prompt_ids", "cut the first 2"],
        ),
        ([row([-1.0], [float("nan")])], ["row 0, token 0", "nan", "null"]),
        ([row([float("-inf")], [-1.0])], ["-inf", "top_k"]),
        ([row([-1.0, 0.3], [-1.0, -1.0])], ["0.3, above 0", "logarithms"]),
        ([row(["-1"], [-1.0])], ["'-1'", "numbers"]),
        ([row([-1.0], [-1.0], temperature="hot")], ["temperature is 'hot'", "finite number"]),
        ([{**row([-1.0], [-1.0]), "completion_ids": [0.5]}], ["0.5", "whole numbers"]),
        ([{**row([-1.0], [-1.0]), "completion_ids": [-100]}], ["-100", "padding: cut it off"]),
        (
            [{**row([-1.0], [-1.0]), "completion_ids": [10**30]}],
            ["completion_ids", "whole numbers"],
        ),
        ([row([-1.0], [-1.0], prompt_ids="2 + 2 =")], ["prompt_ids is '2 + 2 ='", "a list of"]),
        ([row([-1.0], [-1.0], prompt_ids=["2"])], ["prompt_ids holds '2'", "whole numbers"]),
        ([row([-1.0], [-1.0], weight_version=["a", 1])], ["weight_version is 'a'"]),
        ([], ["no completion"]),
    ],
)
def test_bad_rows_are_refused_with_their_remedy(tmp_path: Path, rows: list, words: list[str]):
    with pytest.raises(qarl.verify.VerifyInputError) as error:
        qarl.verify.logprobs(write(tmp_path, rows))
    assert all(word in str(error.value) for word in words), error.value


def test_bad_files_are_refused_with_status_2(tmp_path: Path, capsys):
    (tmp_path / "cut.parquet").write_bytes(b"PAR1 and then nothing")
    (tmp_path / "text.csv").write_text("a,b\n")
    (tmp_path / "broken.jsonl").write_text("{\n")
    (tmp_path / "empty").mkdir()
    expected = {
        "cut.parquet": "cannot be read",
        "text.csv": "must be Parquet or JSON lines",
        "broken.jsonl": "line 1 is not JSON",
        "empty": "has no dump",
        "nowhere": "does not exist",
    }
    for name, words in expected.items():
        assert main(["verify", "logprobs", str(tmp_path / name), "--report"]) == 2, name
        assert words in " ".join(capsys.readouterr().err.split()), name


def test_the_status_says_whether_both_agree(tmp_path: Path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    clean = write(
        tmp_path,
        [row([-1.0] * 8, [-1.0] * 8)] * 4,
        "clean.jsonl",
    )
    wrong = write(
        tmp_path,
        [row([-1.0] * 8, [-1.5] * 8)] * 4,
        "wrong.jsonl",
    )
    assert main(["verify", "logprobs", str(clean)]) == 0
    assert main(["verify", "logprobs", str(wrong), "--report"]) == 0
    target = tmp_path / "report.json"
    assert main(["verify", "logprobs", str(wrong), "--json", str(target)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    written = json.loads(target.read_text())
    assert (written["agrees"], written["mean_abs"]) == (False, 0.5)
    assert main(["verify", "logprobs", str(clean), "--clip", "1.2"]) == 2
    assert "two ratios" in capsys.readouterr().err


def test_importing_the_package_imports_no_library():
    code = (
        "import sys, qarl, qarl.verify; qarl.verify.assert_agreement; print([m for m in ('torch',"
        " 'vllm', 'transformers', 'numpy', 'pyarrow') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "[]"


def test_a_completion_within_the_floor_is_not_wrong_altogether(tmp_path: Path):
    """One of twelve completions is off by 0.03 nats, the others by 0.001: rounding by the default
    floor of 0.05, and a fault by a floor of 0.01.
    """
    sampler = [-0.1 * n - 0.5 for n in range(10)]
    rows = [row(sampler, [each - 0.001 for each in sampler]) for _ in range(11)]
    rows.append(row(sampler, [each - 0.03 for each in sampler]))
    dump = write(tmp_path, rows)
    assert "sequences" not in [cause.name for cause in qarl.verify.logprobs(dump).causes]
    (cause,) = [
        each for each in qarl.verify.logprobs(dump, floor=0.01).causes if each.name == "sequences"
    ]
    assert cause.about == ("row 11",)


def test_a_recorded_truncation_that_does_not_show_is_said(tmp_path: Path):
    rows = [row([-1.0, -0.5], [-1.001, -0.499], top_k=20, top_p=1.0) for _ in range(4)]
    unchecked = " ".join(qarl.verify.logprobs(write(tmp_path, rows)).unchecked)
    assert "renormalizes by top_k 20, which" in unchecked


def test_token_exports_of_prime_rl_are_dumps(tmp_path: Path):
    """Read prime-rl's own files (`trainer.enable_token_export`), whose rows hold prompt and
    completions with a mask. Blind spot: the row is written by hand after prime-rl's exporter.
    """
    export = {
        "schema_version": 1,
        "token_ids": [5, 6, 7, 8, 9],
        "loss_mask": [False, False, True, True, False],
        "inference_logprobs": [0.0, 0.0, -1.0, -2.0, 0.0],
        "trainer_logprobs": [-9.0, -9.0, -1.5, -2.0, -9.0],
        "advantages": [None, None, 0.5, 0.5, None],
    }
    folder = tmp_path / "token_exports" / "step_3"
    folder.mkdir(parents=True)
    file = write(folder, [export], "rank_0.jsonl")
    report = qarl.verify.logprobs(tmp_path / "token_exports")
    assert (report.completions, report.tokens) == (1, 2)
    assert report.mean_abs == pytest.approx(0.25)
    assert report.phantom is not None
    write(folder, [export | {"loss_mask": [False] * 5}], "rank_0.jsonl")
    with pytest.raises(qarl.verify.VerifyInputError, match="loss_mask is true for no token"):
        qarl.verify.logprobs(file)


def nemo_row(**changes: Any) -> dict[str, Any]:
    """Return a row of NeMo-RL's log, in which every column is a list with one value."""
    return {
        "content": ["1 + 1"],
        "rewards": [1.0],
        "token_ids": [[5, 6, 7, 8, 0]],
        "token_loss_mask": [[0, 0, 1, 1, 0]],
        "generation_logprobs": [[0.0, 0.0, -1.0, -2.0, 0.0]],
        "prev_logprobs": [[0.0, -9.0, -1.5, -2.0, 0.0]],
        "idx": 0,
    } | changes


def test_train_data_of_nemo_rl_are_dumps(tmp_path: Path):
    """Read NeMo-RL's own `train_data_step*.jsonl`, and not what its validations wrote beside it.

    Blind spot: the rows are written by hand after NeMo-RL's logger.
    """
    write(tmp_path, [nemo_row()] * 2, "train_data_step3.jsonl")
    write(tmp_path, [{"content": ["1 + 1"], "idx": 0}], "val_data_step3.jsonl")
    report = qarl.verify.logprobs(tmp_path)
    assert (report.completions, report.tokens) == (2, 4)
    assert report.mean_abs == pytest.approx(0.25)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (nemo_row(prev_logprobs=[[0.0] * 5]), "set that to false for a step"),
        (
            {"generation_logprobs": [[-1.0]], "prev_logprobs": [[-1.0]], "idx": 0},
            "has no token_ids and no token_loss_mask, which its earlier versions did not write",
        ),
        (nemo_row(token_ids=None), "token_ids is None; it must be a list"),
        (nemo_row(prev_logprobs=[[0.0]]), "differ in length: token_ids 5, .*prev_logprobs 1"),
    ],
)
def test_rows_of_nemo_rl_that_lack_a_side_are_refused(tmp_path: Path, row: Any, words: str):
    file = write(tmp_path, [row], "train_data_step1.jsonl")
    with pytest.raises(qarl.verify.VerifyInputError, match=words):
        qarl.verify.logprobs(file)


def test_tokens_that_nobody_sampled_are_named_and_left_out(tmp_path: Path):
    """A tool's answer of four tokens stands within the mask: the sampler has 0.0 for each. Three
    tokens that both sides find certain are not such tokens.
    """
    sure = row([0.0, 0.0, 0.0, 0.0, -1.0], [0.0, -1e-6, 0.0, -1e-7, -1.0])
    tool = row([-1.0, 0.0, 0.0, 0.0, 0.0, -2.0], [-1.0, -3.0, -4.0, -2.5, -6.0, -2.0])
    report = qarl.verify.logprobs(write(tmp_path, [sure, tool]))
    (cause,) = report.faults
    assert (cause.name, cause.about) == ("not-sampled", ("row 1",))
    assert report.tokens == 7
    assert report.max_abs < 1e-5


def test_a_dump_without_ages_does_not_blame_the_reload_alone(tmp_path: Path):
    """An asynchronous trainer's first version is on-policy and the next is a version behind."""
    rng = random.Random(5)
    rows = []
    for version in range(4):
        for _ in range(8):
            gap = 0.001 if version == 0 else 0.01
            values = [-1.0 - rng.random() for _ in range(20)]
            moved = [value + rng.choice([-gap, gap]) for value in values]
            rows.append(row(values, moved, trainer_version=version))
    (cause,) = qarl.verify.logprobs(write(tmp_path, rows)).faults
    assert cause.name == "stale"
    assert "does not say which version sampled" in cause.evidence


@pytest.mark.parametrize(("later", "names"), [(1.0, []), (1.6, []), (3.2, ["stale"])])
def test_a_reload_that_leaves_a_layer_out_shows_at_the_first_reload(
    tmp_path: Path, later: float, names: list[str]
):
    """The two sides agree at version 0, which both loaded, and part at the next. The factors are a
    clean run's (at most 1.2 in docs/lab/verify.md), one below the bound, and one skipped layer's.
    """
    generator = np.random.default_rng(0)
    rows = []
    for n in range(48):
        version = 2 * (n // 8)
        size = 0.0013 * (later if version else 1.0)
        sampler = -generator.exponential(2.0, 30) - 0.1
        trainer = np.minimum(sampler + generator.normal(0, size, 30), 0)
        rows.append(row(sampler.tolist(), trainer.tolist(), trainer_version=version, age=0))
    report = qarl.verify.logprobs(write(tmp_path, rows))
    assert [cause.name for cause in report.faults] == names
    if names:
        assert "at version 0" in report.faults[0].evidence
        assert len(report.faults[0].about) == 40


def _sampled_dump(seed: int, temperature: float, top_k: int = 0) -> list[dict[str, Any]]:
    """Return rows of a sampler with a temperature and a trainer whose logits are rounded as in
    bfloat16: 32 completions of 30 tokens, at 64 tokens of random logits.
    """
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 3, (32, 30, 64))
    trainer = logits + rng.normal(0, 0.04, logits.shape)
    sampler = logits / temperature
    if top_k:
        least = np.sort(sampler, -1)[..., -top_k, None]
        sampler = np.where(sampler < least, -np.inf, sampler)
    log_q, log_p = (x - np.log(np.exp(x).sum(-1, keepdims=True)) for x in (sampler, trainer))
    ids = (log_q + rng.gumbel(size=log_q.shape)).argmax(-1)[..., None]
    q, p = (np.take_along_axis(x, ids, -1)[..., 0] for x in (log_q, log_p))
    return [row(q[n].tolist(), p[n].tolist()) for n in range(32)]


@pytest.mark.parametrize(
    ("temperature", "top_k", "names"),
    [(0.99, 0, ["temperature"]), (1.01, 0, ["temperature"]), (1.0, 0, []), (1.0, 40, [])],
)
def test_a_temperature_near_1_shows_below_rounding_of_its_own_size(
    tmp_path: Path, temperature: float, top_k: int, names: list[str]
):
    """Rounding is 0.04 nats a logit, 0.99 moves log-probs by 0.02. A top_k of 40 of 64 tokens
    moves rare tokens too, and hides below the rounding.
    """
    for seed in range(4):
        report = qarl.verify.logprobs(write(tmp_path, _sampled_dump(seed, temperature, top_k)))
        assert [cause.name for cause in report.faults] == names, report.lines()
        assert report.mean_abs < 0.05


@pytest.mark.parametrize(
    ("versions", "growth", "names"),
    [(5, 2.0, ["stale"]), (5, 1.2, []), (20, 2.0, [])],
)
def test_a_difference_that_grows_within_few_versions_is_stale(
    tmp_path: Path, versions: int, growth: float, names: list[str]
):
    """One matrix of an expert was left out of reloads: its part of |d| grows from below the
    rounding. Over many versions rounding itself may grow so much by training.
    """
    rng = np.random.default_rng(0)
    rows = []
    for version in range(versions):
        size = 0.02 * growth ** (version / (versions - 1))
        for _ in range(8):
            sampler = -rng.exponential(2.0, 30) - 0.1
            trainer = np.minimum(sampler + rng.normal(0, size, 30), 0)
            rows.append(row(sampler.tolist(), trainer.tolist(), trainer_version=version))
    report = qarl.verify.logprobs(write(tmp_path, rows))
    assert [cause.name for cause in report.faults] == names, report.lines()


@pytest.mark.parametrize("name", ["dump.jsonl", "dump.parquet"])
def test_batches_hold_few_long_completions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
):
    """A batch is bounded by its size, so that memory does not grow with completions' lengths, and
    figures do not depend on batches.
    """
    dump = write(tmp_path, _sampled_dump(0, 1.0), name)
    at_once = qarl.verify.logprobs(dump)
    monkeypatch.setattr(dumps, "_BATCH", 4000)
    sizes = [len(batch.lengths) for batch in dumps.read_dumps([dump], set())]
    assert sum(sizes) == 32
    assert 1 < max(sizes) < 8
    by_few = qarl.verify.logprobs(dump)
    assert by_few.tokens == at_once.tokens
    assert by_few.mean_abs == pytest.approx(at_once.mean_abs, rel=1e-12)


def test_a_parquet_file_of_one_row_group_is_not_held_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """pyarrow writes up to a million rows as one row group, and reads it at once by default."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows, tokens = 200, 2000
    logprobs = pa.array(-np.random.default_rng(0).exponential(2.0, rows * tokens))
    ids = pa.array(np.random.default_rng(1).integers(0, 2**31 - 1, rows * tokens))
    starts = pa.array(np.arange(0, rows * tokens + 1, tokens, dtype=np.int32))
    columns = {name: pa.ListArray.from_arrays(starts, logprobs) for name in dumps.REQUIRED[1:]}
    columns["completion_ids"] = pa.ListArray.from_arrays(starts, ids)
    file = tmp_path / "dump.parquet"
    pq.write_table(pa.table(columns), file, use_dictionary=False)
    assert pq.ParquetFile(file).num_row_groups == 1
    monkeypatch.setattr(dumps, "_BATCH", 2**18)
    monkeypatch.setattr(dumps, "_BUFFER", 2**16)
    before = pa.total_allocated_bytes()
    batches = dumps.read_dumps([file], set())
    assert len(next(batches).lengths) < 10
    assert pa.total_allocated_bytes() - before < file.stat().st_size / 2
