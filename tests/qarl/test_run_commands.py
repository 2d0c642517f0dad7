"""Whole commands in this process, on an engine of transformers: what a run of a few steps prints,
measures and leaves, also when it is resumed, sampled ahead, replayed and evaluated.

Blind spot: a real engine (tests/runs).
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from qarl.cli.main import main
from tests.support.transformers_engine import use_transformers_engine

TRAIN = """
train --config tiny-qwen3 --scheme bf16 --dtype float32 --steps 3 --prompts 4 --samples 3
--kernel reference --learner.operators transformers --eval.problems 4 --eval-every 2
--checkpoint-every 2 --max-new-tokens 5 --mini-batches 2 --reward exact
--learner.diagnostics_every 1 --record all --output runs/a
"""
BEGINNING = """
qarl 0.1.0: MODEL, bf16, float32, 3 steps
checking input
importing torch, transformers and compressed-tensors
checking kernels
checking tokenizer and prompts
run folder: runs/a
loading the model
starting the engine
layers, as learner and engine have them
materialized: bf16 by cast
learner's sequences: padded
learner multiplies with layers of its own
evaluating before step 1
before training: held-out accuracy 25.0%
""".strip().splitlines()
"""How a run's lines begin, in their order, from its start to its first step."""
END = """
No change beyond noise: held-out accuracy from 25.0% to 25.0% (+0.0 points) in
100.0% of completions are cut off by rollout.max_new_tokens at the end (above 10%).
held-out accuracy, bf16: 25.0% before, 25.0% of the exported checkpoint in a fresh engine
deployable checkpoint: runs/a/export
serve it: qarl serve runs/a
see how it went: qarl report runs/a
""".strip().splitlines()
"""How the lines after a run's last step begin."""
LEFT = {
    "config.yaml",
    "environment.json",
    "lock",
    "metrics.jsonl",
    "start.json",
    "tensorboard",
}
"""Every run's own files."""
MODEL_FILES = {
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
}

Command = Any
"""lines = command("train …"): run it, with status 0, and return what it printed, line by line."""


@pytest.fixture
def command(random_policy: Any, tmp_path: Path, monkeypatch: Any, capsys: Any) -> Command:
    """Let the reward depend on the text, which is at random, so that groups have advantages."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    use_transformers_engine(monkeypatch)
    for judge in ("scorers.exact_answer", "procedural.ReasoningGymTask.score"):
        monkeypatch.setattr(
            f"qarl.tasks.{judge}",
            lambda *of: sum(map(ord, of[-1])) % 4 / 3,
        )
    model = str(random_policy(True))

    def run(line: str) -> list[str]:
        arguments = line.split()
        if "--config" in arguments:
            arguments += ["--model", model]
        assert main(arguments) == 0
        printed = capsys.readouterr()
        return (printed.out + printed.err).replace(model, "MODEL").splitlines()

    return run


def assert_lines_in_order(printed: list[str], beginnings: list[str]) -> None:
    """Other lines may stand between."""
    rest = iter(printed)
    for beginning in beginnings:
        assert any(line.startswith(beginning) for line in rest), f"{beginning!r} in {printed}"


def steps_of(printed: list[str]) -> list[tuple[int, str]]:
    """Return each step's number and what its line ends with after the times: an evaluation."""
    lines = [line for line in printed if line.startswith("step ")]
    return [
        (int(line.split()[1].split("/")[0]), "held-out" * ("held-out" in line)) for line in lines
    ]


def metrics_of(run: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(run, "metrics.jsonl").read_text().splitlines()]


def names(folder: str) -> set[str]:
    return {path.name for path in Path(folder).iterdir()}


def assert_measured(lines: list[dict[str, Any]], steps: int) -> None:
    """Assert what is true of any run's figures, whatever the policy sampled."""
    assert [line["step"] for line in lines] == list(range(1, steps + 1))
    assert [line["weight_version"] for line in lines] == list(range(1, steps + 1))
    assert [line["learn/updates"] for line in lines] == [2] * steps
    for line in lines:
        assert line["prompts"] == 4
        assert line["truncated"] == 1.0
        assert line["response_tokens"] == 5.0
        # 12 rewards of 0, 1/3, 2/3 or 1.
        assert line["reward"] * 36 == pytest.approx(round(line["reward"] * 36))
        assert line["learn/mismatch/mean_abs"] < 0.05
        assert line["learn/grad_norm"] > 0
    assert len({line["digest"] for line in lines}) == steps


def test_a_run_is_resumed_to_more_steps_and_then_finished(command: Command):
    printed = command(f"{TRAIN} --learner.kl.name k3 --learner.kl.coefficient 0.1")
    assert_lines_in_order(printed, [*BEGINNING, "step    1/3", *END])
    assert steps_of(printed) == [(1, ""), (2, "held-out"), (3, "held-out")]
    before = metrics_of("runs/a")
    assert_measured(before, 3)
    assert 0 < before[0]["learn/kl"] < before[-1]["learn/kl"]

    printed = command("train --resume runs/a --steps 5")
    assert_lines_in_order(printed, ["going on from checkpoint step-000003", "step    4/5", *END])
    assert steps_of(printed) == [(4, "held-out"), (5, "held-out")]
    assert metrics_of("runs/a")[:3] == before
    assert_measured(metrics_of("runs/a"), 5)

    (last,) = command("train --resume runs/a")
    assert last.startswith("run runs/a is finished: 5 of 5 steps are done, and runs/a/export holds")
    assert last.endswith("To go on: qarl train --resume runs/a --steps N")

    assert names("runs/a") == LEFT | {"checkpoints", "export", "tokens"}
    assert names("runs/a/checkpoints") == {"step-000004", "step-000005"}
    assert names("runs/a/checkpoints/step-000005") == {
        "manifest.json",
        "shard-00001-model-00001-of-00001.safetensors",
        "state.pt",
    }
    assert names("runs/a/export") == MODEL_FILES | {"README.md", "qarl.json"}
    assert names("runs/a/tokens") == {f"step-{n:06d}.parquet" for n in range(1, 6)}


def test_a_run_with_adapters_is_evaluated_and_asked(command: Command):
    printed = command(
        f"{TRAIN} --learner.lora.name lora --optimizer adamw --checkpoint.best true"
        " --early_warning stop --checkpoint.keep 1"
    )
    adapters = (
        "LoRA: rank 16, alpha 32 on 14 of 15 weight matrices; 65,536 parameters are trained over"
        " 361,216 frozen ones (18.1%); frozen without adapter: embeddings, norms, biases, lm_head"
    )
    assert_lines_in_order(
        printed,
        [*BEGINNING[:-2], adapters, *BEGINNING[-2:], *END],
    )
    assert_measured(metrics_of("runs/a"), 3)
    assert names("runs/a/checkpoints") == {"step-000003"}

    accuracy = command("eval runs/a --problems 3")[0]
    pattern = r"chain_sum, greedy: [\d.]+% \[[\d., ]+\] of 3 held-out problems; 5 tokens an answer"
    assert re.match(pattern, accuracy)
    answers = command("sample runs/a hi --samples 2 --temperature 1")
    assert answers.count("— runs/a (5 tokens, length)") == 2


def test_a_run_that_sampled_ahead_is_replayed_to_the_last_bit(command: Command):
    printed = command(
        f"{TRAIN} --rollout.servers http://127.0.0.1:9 --rollout.max_staleness 1 --export false"
    )
    assert_lines_in_order(printed, [*BEGINNING, *END[:2]])
    lines = metrics_of("runs/a")
    assert_measured(lines, 3)
    assert lines[0]["learn/ages/age"] == [0, 1]

    replayed = command("train --from-rollouts runs/a --output runs/b --export false")
    equal = (
        "equal to runs/a to the last bit, in all 3 steps: every weight version's digest, and every"
        " metric of the learner"
    )
    assert_lines_in_order(replayed, ["learner multiplies with layers of its own: a replay", equal])
    assert [line["digest"] for line in metrics_of("runs/b")] == [line["digest"] for line in lines]
    assert names("runs/b") == LEFT | {"checkpoints", "tokens"}
