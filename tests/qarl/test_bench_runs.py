"""Benchmarks over runs, without running any: how each is configured, what is refused, how metrics become rows."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from qarl.bench import objectives, precision_gap
from qarl.bench.rounded_policy import rounded_policy
from qarl.bench.runs import overrides_in
from qarl.cli.main import main
from qarl.configs.schema.objectives import TbpoConfig
from qarl.configs.schema.run import RunConfig
from qarl.quant.checkpoint.load import load_masters
from qarl.quant.layers.context import LayerContext
from qarl.quant.model.low_bit_model import LowBitModel
from qarl.quant.schemes import get_scheme
from qarl.report.run_folder import RunFolder
from qarl.tasks import Problem, short_reward
from tests.support.learners import random_model


def objective_config(tmp_path: Path, name: str, **overrides: str) -> RunConfig:
    options = objectives.ObjectivesOptions(tmp_path, (0,), (), 60, overrides)
    return objectives._config(options, 3, name)


def test_objectives_differ_in_the_learner_alone_and_share_the_budget(tmp_path: Path):
    """All configurations are equal once objective, its correction and aggregation, and on_policy's one update a batch
    are set aside."""
    shared = []
    for name in objectives.OBJECTIVES:
        config = objective_config(tmp_path, name)
        assert config.learner.objective.name == name and config.seed == 3 and config.steps == 60
        assert config.learner.optimizer.decay_steps == 40 and config.eval.every == 60
        assert config.learner.mini_batches == (1 if name == "on_policy" else 2)
        data = config.model_dump(exclude={"output"})
        for part in ("objective", "correction", "aggregation", "mini_batches"):
            del data["learner"][part]
        shared.append(data)
    assert len(shared) == 11 and all(data == shared[0] for data in shared)


def test_sequence_bands_are_the_same_and_token_bounds_are_the_published_ones(tmp_path: Path):
    tbpo = objective_config(tmp_path, "tbpo").learner.objective
    assert isinstance(tbpo, TbpoConfig)
    assert (tbpo.epsilon_high, tbpo.delta_high, tbpo.delta_low) == (0.1, 0.1, 0.1)
    expected = {
        "gspo": (0.1, 0.1), "gspo_dual_clip": (0.1, 0.1), "grpo": (0.2, 0.2), "dapo": (0.2, 0.28),
        "dual_clip": (0.2, 0.2),
    }  # fmt: skip
    for name, bounds in expected.items():
        section: Any = objective_config(tmp_path, name).learner.objective
        assert (section.clip_low, section.clip_high) == bounds


def test_overrides_reach_every_run(tmp_path: Path):
    config = objective_config(tmp_path, "gspo", **{"rollout.prompts": "16", "learner.optimizer.decay_steps": "0"})
    assert config.rollout.prompts == 16 and config.learner.optimizer.decay_steps == 0


def line(step: int, reward: float, learned: bool, **more: Any) -> dict[str, Any]:
    learn = {
        "learn/loss": 0.0, "learn/mismatch/k3": 1e-3 * step, "learn/mismatch/mean_abs": 0.25, "learn/clipped": 0.5,
        "learn/update_log_ratio": 0.01 * step, "learn/entropy": 2.0, "learn/phantom_clipped": 0.125 * step,
    }  # fmt: skip
    return {"step": step, "reward": reward, "error_tokens": 0.1 * step, **(learn if learned else {}), **more}


def test_how_codes_are_made_reaches_quantized_runs_alone():
    """`qarl bench ptq --scale kept` and `bench schemes` share their options with an unquantized run, which has none."""
    overrides = {"quantization.scale": "kept", "steps": "3"}
    assert overrides_in("w4a16", overrides) == overrides
    assert overrides_in("bf16", overrides) == {"steps": "3"}


def test_a_row_averages_the_end_of_a_run_and_all_steps_that_learned(tmp_path: Path):
    """Twelve steps of rewards 1, …, 12, of which the first did not learn."""
    lines = [line(n, float(n), n > 1) for n in range(1, 13)]
    lines[-1]["accuracy"] = 0.75
    run = RunFolder(tmp_path)
    run.metrics.write_text("".join(json.dumps(one) + "\n" for one in lines))
    row = objectives._trained(run, "gspo", 4)
    assert (row.objective, row.seed, row.accuracy, row.clipped, row.entropy) == ("gspo", 4, 0.75, 0.5, 2.0)
    assert row.reward == pytest.approx(7.5)  # 3, …, 12
    assert row.error_tokens == pytest.approx(0.75)
    assert row.k3 == pytest.approx(7e-3) and row.update == pytest.approx(0.07)  # 2, …, 12
    assert row.rewards == tuple(range(1, 13))
    console = Console()
    with console.capture() as captured:
        objectives.table([row]).show(console)
    assert captured.get().splitlines()[-1].split()[:5] == ["gspo", "75.0%", "75.0%", "75.0%", "7.500"]


def test_convergence_is_the_first_step_at_the_threshold():
    lines = [line(n, reward, True) for n, reward in enumerate((-3.0, -1.0, -0.5, -0.8, 0.0, 0.0, 0.0), start=1)]
    row = precision_gap.summarize(lines, "bf16", 5e-4, 0, -0.5)
    assert (row.converged, row.first_reward, row.last_reward, row.gap) == (3, -3.0, 0.0, 0.25)
    assert row.phantom == pytest.approx(0.125 * 3) and row.clipped == 0.5  # the first five steps
    assert precision_gap.summarize(lines[:2], "bf16", 5e-4, 0, -0.5).converged is None
    unlearned = precision_gap.summarize([line(1, -1.0, False)], "bf16", 5e-4, 0, -0.5)
    assert math.isnan(unlearned.gap) and math.isnan(unlearned.phantom)


def test_a_rounded_policy_is_where_its_codes_are(tmp_path: Path):
    """Linear weights are the values of their codes, all else is as it was; a second call leaves the folder alone."""
    source = tmp_path / "policy"
    random_model(tied=False).save_pretrained(source)
    folder = rounded_policy(source, "w4a16", tmp_path / "rounded")
    before, after = (load_masters(path, torch.float32) for path in (source, folder))
    low_bit = LowBitModel(before, get_scheme("w4a16"), LayerContext(torch.bfloat16, "reference"), "transformers")
    for name, master in low_bit.masters.items():
        linear = low_bit.linears.get(name.removesuffix(".weight"))
        expected = master if linear is None else linear.codes().dequantized(torch.float32)
        assert torch.equal(after.get_parameter(name), expected), name
        assert linear is None or linear.scheme.name == "bf16" or not torch.equal(master, expected)
    marked = folder / "marked"
    marked.touch()
    assert rounded_policy(source, "w4a16", folder) == folder and marked.exists()


def test_pairings_share_everything_but_what_computes(tmp_path: Path):
    configs = {}
    for name in precision_gap.PAIRINGS:
        options = precision_gap.GapOptions(tmp_path, (0,), (), -0.5, {})
        data = precision_gap._config(options, 1, name).model_dump(exclude={"output"})
        for part in ("aligned", "compute_dtype", "operators", "ratio_fix", "master_dtype"):
            del data["learner"][part]
        configs[name] = {k: v for k, v in data.items() if k not in ("scheme", "dtype")}
    assert all(config == configs["bf16"] for config in configs.values())
    assert configs["bf16"]["learner"]["correction"]["ratio_from"] == "sampler"
    assert len(precision_gap.PAIRINGS) == 10
    slow = precision_gap._config(precision_gap.GapOptions(tmp_path, (0,), (), -0.5, {}), 1, "fp32", "1e-5")
    assert slow.learner.optimizer.lr == 1e-5 and slow.output == str(tmp_path / "tiny-qwen3-fp32-lr1e-05-seed1")


def test_the_shortest_answer_is_worth_most():
    problem = Problem("0", "1 + 1", "2")
    assert [short_reward(problem, text) for text in ("", "2", " 22")] == [0.0, -1.0, -3.0]


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("objectives --learner.objective.delta_low 0.1", "--learner.objective.delta_low is chosen by the benchmark"),
        ("precision-gap --lrs 1e-4 --learner.optimizer.lr 1e-5", "--learner.optimizer.lr is chosen by the benchmark"),
        ("precision-gap --learner.ratio_fix shadow_forward", "--learner.ratio_fix is chosen by the benchmark"),
    ],
)
def test_what_is_refused(command: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["bench", *command.split(), "--runs", str(tmp_path / "runs")]) == 2
    assert message in capsys.readouterr().err.replace("\n", " ")
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_finished_runs_are_used_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Two objectives trained, then the same command: the same figures, and nothing is trained."""
    small = "--steps 2 --seeds 0 --objectives tbpo,on_policy --rollout.prompts 8 --rollout.samples 4 --eval.problems 32"
    rows = []
    for file in ("first.json", "second.json"):
        command = ["bench", "objectives", *small.split(), "--runs", str(tmp_path / "runs")]
        assert main([*command, "--json", str(tmp_path / file)]) == 0
        rows.append(json.loads((tmp_path / file).read_text())["data"])
    assert capsys.readouterr().out.count("trained already") == 2
    assert rows[0] == rows[1] and [row["objective"] for row in rows[0]] == ["tbpo", "on_policy"]
    assert rows[0][1]["update"] == 0.0  # one update a batch: nothing moves before it
    assert all(len(row["rewards"]) == 2 for row in rows[0])
