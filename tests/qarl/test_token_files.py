"""Completions recorded token by token: what is kept, what each column holds, files that survive
kill and resume; groups read from them again, and which runs cannot be learned from a second time.
"""

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from qarl.cli.main import main
from qarl.configs.load import load_config
from qarl.embedded.tokenizer import train_tokenizer
from qarl.learner.batching import make_batch
from qarl.learner.clip_reasons import CLIP_REASONS
from qarl.learner.diagnostics.token_log import TokenLog
from qarl.report.run_folder import RunFolder
from qarl.report.token_files import (
    TokenFileError,
    drop_after,
    read_groups,
    read_step,
    step_files,
)
from qarl.report.token_recorder import TokenRecorder, chosen_rows, token_texts
from qarl.rollout.pictures import thumbnail
from qarl.rollout.types import Group, Pictures
from qarl.run.replay import comparison
from tests.support.cases import pattern
from tests.support.learners import (
    SAMPLES,
    VOCABULARY,
    logprobs_of,
    make_groups,
    make_learner,
)
from tests.support.picture_models import drawn

TOKENIZER = train_tokenizer(["12 + 34 = 46", "héllo 你好"], 300, 64)


def recorded(
    folder: Path, record: Any = "all", **config: Any
) -> tuple[list[dict[str, Any]], TokenLog, list[Group]]:
    """Return the rows of one step's file, for a batch that a learner has processed."""
    groups = make_groups()
    batch = make_batch(groups, VOCABULARY - 1)
    recorder = TokenRecorder(folder, record, TOKENIZER, None, True)
    log = recorder.log(batch, groups) or TokenLog(batch)
    make_learner(**config).learn(batch, 0, log=log)
    recorder.write(1, groups, log)
    return pq.read_table(step_files(folder)[1]).to_pylist(), log, groups


def test_every_column_is_what_sampler_learner_and_loss_had(tmp_path: Path):
    """Contract: row for row the batch's own values; the mismatch is their difference; texts add up
    to the completion. Mini-batches that teach nothing leave ratio and clip unknown.
    """
    rows, log, groups = recorded(
        tmp_path, objective={"name": "grpo", "clip_low": 1e-4, "clip_high": 1e-4}
    )
    assert [(r["group"], r["sample"]) for r in rows] == [
        (g, s) for g in range(len(groups)) for s in range(SAMPLES)
    ]
    for index, row in enumerate(rows):
        group = groups[row["group"]]
        completion = group.completions[row["sample"]]
        start = len(group.prompt.token_ids) - 1
        span = slice(start, start + len(completion.token_ids))
        assert row["token_id"] == list(completion.token_ids)
        assert row["prompt_token_ids"] == list(group.prompt.token_ids)
        np.testing.assert_array_equal(row["sampler_logprob"], np.float32(completion.logprobs))
        np.testing.assert_array_equal(row["learner_logprob"], log.old[index, span].numpy())
        apart = log.old[index, span].numpy() - np.float32(completion.logprobs)
        np.testing.assert_array_equal(row["mismatch"], apart)
        assert row["worst_token"] == np.abs(apart).argmax()
        assert row["advantage"] == log.batch.advantages[index, span].tolist()
        assert row["reward"] == group.rewards[row["sample"]]
        assert row["group_rewards"] == list(group.rewards)
        if log.updated[index]:
            np.testing.assert_array_equal(row["log_ratio"], log.log_ratio[index, span].numpy())
        else:
            assert set(row["log_ratio"]) == set(row["clip"]) == {None}
    reasons = [reason for row in rows for reason in row["clip"]]
    assert {"A > 0 above", "A < 0 below"} < set(reasons) <= {*CLIP_REASONS, None}
    for row in rows:
        for reason, ratio, advantage in zip(
            row["clip"], row["log_ratio"], row["advantage"], strict=True
        ):
            if reason == "A > 0 above":
                assert ratio > 0
                assert advantage > 0
            if reason == "A < 0 below":
                assert ratio < 0
                assert advantage < 0


def test_clipped_sequences_are_told_from_clipped_tokens(tmp_path: Path):
    bands = {"epsilon_high": 1e-4, "delta_high": 1e-4, "delta_low": 1e-4}
    rows, _, _ = recorded(tmp_path, objective={"name": "tbpo", **bands})
    reasons = {reason for row in rows for reason in row["clip"]} - {
        None,
        "none",
        "corrected",
    }
    assert reasons
    assert all(reason.startswith("sequence, A") for reason in reasons)
    assert all(len(set(row["clip"]) - {"corrected"}) <= 1 for row in rows), (
        "a sequence is clipped whole"
    )


def test_the_unquantized_policy_is_asked_about_what_is_kept(tmp_path: Path):
    """Contract: in a step that diagnoses, the completions of least and of most reward have the
    log-probs of the masters before the updates, by hand those of an unaligned learner; a step that
    does not, and a learner that is not aligned, has none. MismatchByAgeMeter are each completion's
    update.
    """
    rows, log, groups = recorded(tmp_path / "due", 2, diagnostics_every=1, dtype=torch.float32)
    plain = logprobs_of(make_learner(aligned=False, dtype=torch.float32), log.batch).values
    assert len(rows) == 4
    assert {row["age"] for row in rows} <= {0, 1}
    places = [(g, s) for g, group in enumerate(groups) for s in range(len(group.completions))]
    for row in rows:
        index = places.index((row["group"], row["sample"]))
        length = len(row["token_id"])
        start = len(groups[row["group"]].prompt.token_ids) - 1
        expected = plain[index, start : start + length].numpy()
        np.testing.assert_allclose(row["unquantized_logprob"], expected, atol=1e-4)
    for name, config in (
        ("not", {"diagnostics_every": 0}),
        ("plain", {"diagnostics_every": 1, "aligned": False}),
    ):
        others, _, _ = recorded(tmp_path / name, "all", **config)
        assert {value for row in others for value in row["unquantized_logprob"]} == {None}
    assert {row["age"] for row in others} == {0, 1}


def test_nothing_of_the_training_changes():
    batch = make_batch(make_groups(), VOCABULARY - 1)
    plain = make_learner()
    logged = make_learner()
    for step in range(2):
        assert plain.learn(batch, step) == logged.learn(batch, step, log=TokenLog(batch))
    assert all(torch.equal(p, logged.model.masters[n]) for n, p in plain.model.masters.items())


def test_least_and_most_reward_with_the_worst_tokens_first():
    rewards = [0.0, 1.0, 0.0, 1.0, 0.5, 0.0]
    worst = np.array([1, 2, 3, 4, 9, 2])
    assert chosen_rows(rewards, worst, 1) == [2, 3]
    assert chosen_rows(rewards, worst, 2) == [2, 5, 3, 1]
    assert chosen_rows(rewards, worst, 3) == chosen_rows(rewards, worst, "all") == list(range(6))
    assert chosen_rows([1.0] * 6, worst, 2) == [4, 3, 2, 1], "of equal rewards none is taken twice"


def test_a_step_that_taught_nothing_is_recorded_all_the_same(tmp_path: Path):
    groups = make_groups()
    TokenRecorder(tmp_path, 2, TOKENIZER, None, True).write(1, groups, None)
    rows = pq.read_table(step_files(tmp_path)[1]).to_pylist()
    assert len(rows) == 4
    assert rows[0]["worst_token"] is None
    assert {
        value for row in rows for value in row["mismatch"] + row["log_ratio"] + row["clip"]
    } == {None}


def test_completions_are_recorded_with_small_pictures_of_their_prompts(tmp_path: Path):
    """Contract: a prompt of text has none. Steps without pictures have no such column, so that
    files of earlier versions are read as before.
    """
    text, seen = make_groups()[:2]
    files = (drawn(np.random.default_rng(0), 300, 200), drawn(np.random.default_rng(1), 9, 9))
    pictures = Pictures(files=files, token_ids=seen.prompt.token_ids)
    seen = dataclasses.replace(seen, prompt=dataclasses.replace(seen.prompt, pictures=pictures))
    TokenRecorder(tmp_path, "all", TOKENIZER, None, True).write(1, [text, seen], None)
    shown = read_step(step_files(tmp_path)[1]).completions["pictures"]
    assert shown[:SAMPLES] == [[]] * SAMPLES
    assert shown[SAMPLES:] == [[thumbnail(file) for file in files]] * SAMPLES
    TokenRecorder(tmp_path, "all", TOKENIZER, None, True).write(2, [text], None)
    assert "pictures" not in pq.read_schema(step_files(tmp_path)[2]).names


def test_nothing_is_written_where_nothing_is_asked_for_or_by_other_processes(
    tmp_path: Path,
):
    groups = make_groups()
    off = TokenRecorder(tmp_path / "off", 0, TOKENIZER, None, True)
    assert off.log(make_batch(groups, 0), groups) is None
    off.write(1, groups, None)
    TokenRecorder(tmp_path / "other", "all", TOKENIZER, None, False).write(1, groups, None)
    assert list(tmp_path.iterdir()) == []


def test_a_resumed_run_has_every_step_once(tmp_path: Path):
    """Killed in step 4, with step 3 done and half a file of step 4 written; resumed from the
    checkpoint of step 2.
    """
    groups = make_groups()
    recorder = TokenRecorder(tmp_path, 1, TOKENIZER, None, True)
    for step in (1, 2, 3):
        recorder.write(step, groups, None)
    (tmp_path / "step-000004.parquet.part").write_bytes(b"PAR1")
    assert list(step_files(tmp_path)) == [1, 2, 3]
    resumed = TokenRecorder(tmp_path, 1, TOKENIZER, 2, True)
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "step-000001.parquet",
        "step-000002.parquet",
    ]
    for step in (3, 4):
        resumed.write(step, groups, None)
    steps = [
        row["step"]
        for file in step_files(tmp_path).values()
        for row in pq.read_table(file).to_pylist()
    ]
    assert steps == [1, 1, 2, 2, 3, 3, 4, 4]
    drop_after(tmp_path / "nowhere", 0)


def test_what_is_read_is_what_was_written(tmp_path: Path):
    rows, _, _ = recorded(
        tmp_path,
        objective={"name": "grpo", "clip_low": 1e-4, "clip_high": 1e-4},
    )
    read = read_step(step_files(tmp_path)[1])
    assert list(read.lengths) == [len(row["token_id"]) for row in rows]
    assert len(read) == len(rows)
    for name in ("learner_logprob", "log_ratio", "advantage"):
        flat = [np.nan if value is None else value for row in rows for value in row[name]]
        np.testing.assert_array_equal(
            read.tokens[name],
            np.array(flat, dtype=np.float32),
        )
    named = [None if code < 0 else CLIP_REASONS[code] for code in read.tokens["clip"]]
    assert named == [reason for row in rows for reason in row["clip"]]
    some = read.first(3)
    assert len(some) == 3
    assert len(some.tokens["token"]) == sum(read.lengths[:3])
    assert some.completions["prompt_id"] == read.completions["prompt_id"][:3]


@pytest.mark.parametrize(("text", "pieces"), [("12 + 3", 4), ("你好🙂", 3), ("<|im_end|>", 1)])
def test_texts_of_tokens_add_up_and_any_ids_have_some(text: str, pieces: int):
    """Contract: bytes that are not UTF-8 are included."""
    ids = TOKENIZER(text)["input_ids"]
    texts = token_texts(TOKENIZER, ids)
    assert "".join(texts) == text
    assert len(texts) == len(ids) >= pieces
    for seed in range(20):
        ids = torch.randint(0, 300, (40,), generator=torch.Generator().manual_seed(seed)).tolist()
        assert len(token_texts(TOKENIZER, ids)) == 40


OTHER_FORMATS: list[tuple[dict[str, str] | None, str]] = [
    (None, "has format none, and this version of qarl reads 4"),
    ({"qarl.tokens": "1"}, "has format 1, …read it with the version that wrote it"),
    ({"qarl.tokens": "4"}, "has other columns than format 4"),
]


def test_damaged_files_and_other_formats_are_named(tmp_path: Path):
    file = tmp_path / "step-000001.parquet"
    file.write_bytes(b"PAR1 and no more")
    with pytest.raises(
        TokenFileError, match=r"step-000001.parquet' is damaged .*remove it to go on"
    ):
        read_step(file)
    for metadata, error in OTHER_FORMATS:
        pq.write_table(pa.table({"step": [1]}).replace_schema_metadata(metadata), file)
        with pytest.raises(TokenFileError, match=pattern(error)):
            read_step(file)


def single(group: Group) -> Group:
    """Return the group with log-probs as an engine has them, in fp32, and experts of a router."""
    experts = np.arange(24, dtype=np.int16).reshape(4, 3, 2)
    alike = [
        dataclasses.replace(
            c,
            logprobs=tuple(np.array(c.logprobs, np.float32).tolist()),
            experts=experts,
        )
        for c in group.completions
    ]
    return dataclasses.replace(group, completions=tuple(alike))


@pytest.fixture
def recording(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """Return a run of three steps that recorded all completions of the first two and one of the
    third.
    """
    monkeypatch.chdir(tmp_path)
    run = RunFolder.create(load_config(None, {"output": "run", "steps": "3", "record": "all"}))
    for step in (1, 2, 3):
        record = "all" if step < 3 else 1
        TokenRecorder(run.tokens, record, TOKENIZER, None, True).write(
            step, make_groups(step), None
        )
    return run


def test_groups_are_read_as_they_were_learned_from(tmp_path: Path):
    """Contract: prompts, completions, log-probs to the bit, rewards, and the dtype and shape of
    experts are read back.
    """
    groups = [single(group) for group in make_groups()]
    TokenRecorder(tmp_path, "all", TOKENIZER, None, True).write(1, groups, None)
    read = read_groups(step_files(tmp_path)[1])
    assert read == groups
    experts = read[1].completions[0].experts
    assert experts.dtype == np.int16
    assert (experts == groups[1].completions[0].experts).all()


REFUSED_COMMANDS = [
    (
        "",
        (
            "has recorded 2 of the 24 completions of step 3, of 3 to learn from; give "
            "--steps 2, or take a run that"
        ),
    ),
    ("--steps 4", "has recorded 2 of the 24 completions of step 3, of 4 to learn from"),
    (
        "--model tiny-qwen3-moe",
        "was sampled with model 'tiny-qwen3', and model 'tiny-qwen3-moe' has no effect",
    ),
    (
        "--prompts 8",
        ("was sampled with rollout.prompts 32, and rollout.prompts (--prompts) 8 has no effect"),
    ),
    ("--seed 4", "was sampled with seed 0, and seed 4 has no effect"),
    (
        "--task gcd",
        ("was sampled with task.name 'chain_sum', and task.name (--task) 'gcd' has no effect"),
    ),
    (
        "--eval.problems 8",
        "eval.problems 8 needs an engine, and from_rollouts 'run' learns without one",
    ),
    ("--init gptq --scale kept", "quantization.init 'gptq' needs an engine"),
    (
        "--config tiny-qwen3",
        "--from-rollouts has the recorded run's configuration; --config tiny-qwen3 does not",
    ),
]


@pytest.mark.parametrize(("arguments", "said"), REFUSED_COMMANDS)
def test_runs_that_cannot_be_replayed_are_refused(
    recording: RunFolder, capsys: pytest.CaptureFixture[str], arguments: str, said: str
):
    assert main(["train", "--from-rollouts", "run", *arguments.split()]) == 2
    assert said in capsys.readouterr().err
    assert [path.name for path in Path().iterdir()] == ["run"]


def test_missing_and_damaged_steps(recording: RunFolder, capsys: pytest.CaptureFixture[str]):
    file = step_files(recording.tokens)[2]
    file.write_bytes(file.read_bytes()[:-9])
    assert main(["train", "--from-rollouts", "run"]) == 2
    assert "step-000002.parquet' is damaged" in capsys.readouterr().err
    shutil.rmtree(recording.tokens)
    assert main(["train", "--from-rollouts", "run"]) == 2
    said = (
        "has recorded no completions of step 1, of 3 to learn from; take a run that was started"
        " with --record all"
    )
    assert said in capsys.readouterr().err


def test_the_first_difference_is_named():
    """Contract: only the learner's figures are compared, not times or sampling metrics."""
    before = [
        {"step": 1, "learn/loss": 0.5, "digest": "a", "reward": 1},
        {"step": 2, "learn/loss": 0.5, "digest": "b"},
    ]
    after = [{**before[0], "reward": 2}, {**before[1], "digest": "c"}]
    assert (
        comparison(Path("run"), before, after) == "first apart from run in step 2: digest c, was b"
    )
    assert comparison(Path("run"), before, after[:1]).startswith(
        "equal to run to the last bit, in all 1 steps"
    )
