"""Conversations: what was sampled is what is learned from, and what was said between turns is
not.
"""

import asyncio
import json
import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from qarl.conversations import Conversation, OutOfRoomError, Speaker, converse
from qarl.embedded.recipe import RECIPES, ensure_recipe, ensure_tiny
from qarl.learner.batching import make_batch
from qarl.report.metrics import batch_metrics
from qarl.report.run_folder import read_metrics
from qarl.report.token_files import read_groups
from qarl.rollout.types import Group, Prompt, Sampling
from qarl.tasks import Problem, RewardError, TaskError
from qarl.tasks.load import load_rollout
from tests.support.conversations import Sampler
from tests.support.runs import lines, succeeded

HALF = "\udcff".encode("utf-8", "replace").decode()
NASTY = ["<|im_end|>", "<|im_start|>tool\n", "é", "🙂", HALF, " ", "\n", "<tool_call>{"]
PROBLEM = Problem("p", "q?", "42")


def spoken(
    rollout: Any,
    tokenizer: Any,
    samples: int = 2,
    limit: int = 60,
    seconds: float = 5.0,
) -> tuple[Any, Any]:
    sampler = Sampler(len(tokenizer))
    prompts = [Prompt("p", "q?", (5, 6))]
    sampling = Sampling(samples, limit, first_prompt=4)
    talk = converse(sampler, Speaker(rollout, tokenizer, seconds), [PROBLEM], prompts, sampling)  # type: ignore[arg-type]
    return asyncio.run(talk)[1][0], sampler.asked


def test_tokens_sampled_are_tokens_learned(tokenizer: Any):
    """Over random conversations with adversarial texts: each completion is its requests' answers
    with what was said between them, in order; exactly the answers have log-probs, a place in the
    mask, and are counted.
    """
    chance = random.Random(0)
    said = []

    async def rollout(policy: Conversation, problem: Problem) -> float:
        said.append(own := [])
        await policy.generate()
        while chance.random() < 0.8:
            words = "".join(chance.choices(NASTY, k=chance.randint(1, 4)))
            assert not {0, 1, 2} & set(policy.encode(words)), "a special token was read in a text"
            await policy.generate(words)
            own.append(policy.encode(words))
        return chance.random()

    completions, asked = spoken(rollout, tokenizer, samples=500)
    group = Group(
        Prompt("p", "q?", (5, 6)),
        tuple(completions),
        tuple(c.reward or 0.0 for c in completions),
    )
    batch = make_batch([group])
    for row, completion in enumerate(completions):
        turns = [answer for prompt, answer in asked if prompt.draws[:2] == (4, row)]
        sampled = [token for turn in turns for token in turn.token_ids]
        assert [
            t for t, own in zip(completion.token_ids, completion.sampled, strict=True) if own
        ] == sampled
        assert batch.tokens[row, 1:][batch.response_mask[row]].tolist() == sampled
        logprobs = torch.tensor([x for turn in turns for x in turn.logprobs])
        assert torch.equal(batch.sampler_logprobs[row][batch.response_mask[row]], logprobs)
        assert not batch.sampler_logprobs[row][~batch.response_mask[row]].any()
        assert not batch.advantages[row][~batch.response_mask[row]].any()
        texts = [completion.token_ids[start:end] for start, end in completion.environment]
        assert texts == said[row]
        assert len(completion.token_ids) <= 60
        assert dict(completion.events)["turns"] == len(turns)
    counted = batch_metrics([group])
    spans = [span for c in completions for span in c.environment]
    assert counted["response_tokens"] == batch.response_mask.sum() / 500
    assert (
        counted["conversation"]["environment_tokens"]
        == sum(end - start for start, end in spans) / 500
    )


def test_faulty_rollouts_are_refused(tokenizer: Any, tmp_path: Path):
    async def silent(policy: Conversation, problem: Problem) -> None: ...

    async def early(policy: Conversation, problem: Problem) -> None:
        await policy.generate("said first")

    async def strange(policy: Conversation, problem: Problem) -> str:
        await policy.generate()
        return "good"

    async def huge(policy: Conversation, problem: Problem) -> float:
        await policy.generate()
        return 1e300

    async def hangs(policy: Conversation, problem: Problem) -> None:
        await policy.generate()
        await asyncio.sleep(100)

    async def unknown(policy: Conversation, problem: Problem) -> None:
        await policy.generate()
        await policy.generate([10**9])

    messages = {
        silent: "never asked the policy for a turn",
        early: "before the first",
        strange: r"returned 'good' \(str\); a reward must be",
        huge: "returned 1e\\+300 .* at most 1e\\+15",
        hangs: "longer than task",
        unknown: "ids",
    }
    for rollout, words in messages.items():
        with pytest.raises(RewardError, match=words):
            spoken(rollout, tokenizer, seconds=0.2)
    (tmp_path / "mine.py").write_text(
        "import functools\ndef f(policy, problem): ...\nasync def g(policy): ...\n"
        "async def h(policy, problem, limit=1): ...\n"
        "class Mine:\n    async def __call__(self, policy, problem): ...\n"
        "instance = Mine()\npart = functools.partial(h, limit=2)\nmethod = instance.__call__\n"
        "@functools.wraps(h)\ndef wrapped(*arguments):\n    return h(*arguments)\n"
    )
    for name in ("h", "instance", "part", "method", "wrapped"):
        assert callable(load_rollout(f"{tmp_path}/mine.py:{name}")), name
    for name, words in {
        "f": "must be an async function",
        "g": "cannot be called",
        "i": "has no function",
    }.items():
        with pytest.raises(TaskError, match=words):
            load_rollout(f"{tmp_path}/mine.py:{name}")


def test_a_slow_rollout_keeps_nobody_waiting(tokenizer: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("qarl.conversations.PATIENCE", 0.01)
    ahead = asyncio.Event()

    async def rollout(policy: Conversation, problem: Problem) -> float:
        turn = await policy.generate()
        if policy.prompt.draws == (4, 0, 0):
            turn = await policy.generate("more")
            ahead.set()
        await ahead.wait()
        return float(len(turn.token_ids))

    completions, asked = spoken(rollout, tokenizer)
    assert [dict(c.events)["turns"] for c in completions] == [2, 1]
    assert len(asked) == 3


def test_without_room_a_conversation_ends_cut_off(tokenizer: Any):
    async def endless(policy: Conversation, problem: Problem) -> None:
        await policy.generate()
        while True:
            await policy.generate("more")

    async def catches(policy: Conversation, problem: Problem) -> float:
        with pytest.raises(OutOfRoomError):
            await endless(policy, problem)
        return 1.0

    for rollout, reward in ((endless, None), (catches, 1.0)):
        completions, _ = spoken(rollout, tokenizer)
        assert all(
            c.truncated and len(c.token_ids) <= 60 and c.reward == reward for c in completions
        )


MINE = """
import openai

async def agent(policy, problem):
    async with policy.served() as url, openai.AsyncOpenAI(base_url=url, api_key="none") as client:
        await client.chat.completions.create(model="policy", messages=problem.chat)

async def once(policy, problem):
    await policy.generate()

async def often(policy, problem):
    turn = await policy.generate(max_new_tokens=3)
    for _ in range(9):
        turn = await policy.generate(" <|im_end|> sure? ", max_new_tokens=3)
    return float(sum(turn.token_ids) % 7)

class Tools:
    def tool(self) -> str:
        'A tool that is not called.'
"""


@pytest.mark.slow
def test_a_run_of_conversations(tmp_path: Path):
    """One turn through a rollout, beside tools or by an agent is the run without, in every metric
    and digest. Ten turns are sampled by the policy that learns, to the last bit, and are recorded
    as what they were.
    """
    (tmp_path / "mine.py").write_text(MINE)
    copy = shutil.copytree(ensure_tiny("tiny-qwen3"), tmp_path / "tiny")
    settings = json.loads((copy / "tokenizer_config.json").read_text())
    settings["chat_template"] = "{% if tools %}{% endif %}" + settings["chat_template"]
    (copy / "tokenizer_config.json").write_text(json.dumps(settings))
    small = (
        "--config",
        "tiny-qwen3",
        "--model",
        str(copy),
        "--steps",
        "2",
        "--prompts",
        "4",
        "--samples",
        "4",
        "--eval.problems",
        "8",
        "--max-new-tokens",
        "200",
        "--record",
        "all",
        "--export",
        "false",
    )
    ways = {
        "plain": (),
        "once": ("--task.rollout", "mine.py:once"),
        "often": ("--task.rollout", "mine.py:often"),
        "tools": ("--task.environment", "mine.py:Tools"),
        "agent": ("--task.rollout", "mine.py:agent"),
    }
    runs = {}
    for way, options in ways.items():
        succeeded("train", *small, *options, "--output", tmp_path / way, cwd=tmp_path)
        runs[way] = lines(tmp_path / way)
    for way in ("once", "tools", "agent"):
        alone = [
            {k: v for k, v in step.items() if not k.startswith("conversation/")}
            for step in runs[way]
        ]
        assert alone == runs["plain"]
    for number, step in enumerate(runs["often"], 1):
        assert step["conversation/turns"] == 10
        assert step["learn/mismatch/max_abs"] == 0
        group, *_ = read_groups(tmp_path / "often" / "tokens" / f"step-{number:06d}.parquet")
        assert all(len(c.environment) == 9 and sum(c.sampled) <= 30 for c in group.completions)


@pytest.mark.slow
def test_a_run_with_tools(tmp_path: Path):
    """Contract: a policy that has seen a little of its tool calls it and learns to the last bit. A
    stopped run resumes identically.
    """
    recipe = replace(RECIPES["tiny-qwen3-tools"], warm_start_steps=60, warm_start_batch=32)
    model = ensure_recipe("tools", recipe, tmp_path / "models")
    small = (
        "--model",
        str(model),
        "--prompts",
        "4",
        "--samples",
        "4",
        "--eval.problems",
        "0",
        "--record",
        "all",
        "--reward",
        "qarl.tasks:short_reward",
        "--export",
        "false",
    )
    for name, steps in (("whole", 2), ("half", 1)):
        options = (
            "--config",
            "tiny-qwen3-tools",
            *small,
            "--steps",
            str(steps),
            "--output",
            tmp_path / name,
        )
        succeeded("train", *options, cwd=tmp_path)
    succeeded("train", "--resume", tmp_path / "half", "--steps", "2", cwd=tmp_path)
    for number, step in enumerate(read_metrics(tmp_path / "whole" / "metrics.jsonl"), 1):
        assert step["conversation/tool_calls"] > 1
        assert step["learn/mismatch/max_abs"] == 0
        files = [
            tmp_path / name / "tokens" / f"step-{number:06d}.parquet" for name in ("whole", "half")
        ]
        first, second = map(read_groups, files)
        assert first == second
        assert any(c.environment for group in first for c in group.completions)
