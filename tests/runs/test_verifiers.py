"""Environments of the package verifiers, in a process of their own. Blind spots: harnesses that `uv
run` starts, containers, and environments of the hub.
"""

import asyncio
import json
import os
import shutil
from pathlib import Path
from typing import Any

import psutil
import pytest
from transformers import AutoTokenizer

from qarl.configs.schema.task import TaskConfig
from qarl.conversations import Speaker, converse
from qarl.conversations.chat import ChatServer
from qarl.embedded.recipe import ensure_tiny
from qarl.embedded.tokenizer import TOOL_TEMPLATE
from qarl.report.run_folder import read_metrics
from qarl.rollout.types import Prompt, Sampling
from qarl.tasks import RewardError, Task, TaskError, load_task
from tests.support.conversations import Script
from tests.support.runs import succeeded

pytest.importorskip(
    "verifiers",
    reason="an optional extra, in no lock: pip install 'verifiers>=0.4,<0.5'",
)

MODULE = """
import asyncio, os
import verifiers.v1 as vf
from openai import AsyncOpenAI

class Data(vf.TaskData):
    answer: str = ""

class Guess(vf.Task[Data, vf.State]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        reply = trace.last_reply or ""
        return 1.0 if self.data.answer in reply else len(reply) % 3 / 4

class Config(vf.TasksetConfig):
    count: int = 24

class Guesses(vf.Taskset[Guess, Config]):
    def load(self):
        for n in range(self.config.count):
            data = Data(prompt=f"guess {n}", system_prompt="Guess.", answer=str(n))
            yield Guess(data, self.config.task)

class HarnessConfig(vf.HarnessConfig):
    how: str = "asks"

class Asks(vf.Harness[HarnessConfig]):
    APPENDS_SYSTEM_PROMPT, EXECUTES_CODE, NEEDS_CONTAINER = True, False, False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        messages = [
            {"role": "system", "content": data.system_prompt},
            {"role": "user", "content": data.prompt},
        ]
        if self.config.how == "silent":
            raise ValueError("no shop is open")
        async with AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0) as client:
            for _ in range(3):
                answer = await client.chat.completions.create(model=ctx.model, messages=messages)
                messages.append(answer.choices[0].message.model_dump(exclude_none=True))
                if answer.choices[0].finish_reason == "length":
                    break
                messages.append({"role": "user", "content": "again?"})
                if self.config.how == "hangs":
                    await asyncio.sleep(1000)
                if self.config.how == "dies":
                    os._exit(3)
                if self.config.how == "fails":
                    raise ValueError("sold out")
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")

__all__ = ["Guesses", "Asks"]
"""


def options(how: str = "asks", **taskset: Any) -> dict[str, Any]:
    return {
        "agent": {
            "runtime": {"type": "subprocess"},
            "harness": {"id": "guesses", "how": how},
        },
        "taskset": taskset,
    }


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "guesses.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def task(how: str, time_limit: float = 20.0, **fields: Any) -> Task:
    return load_task(
        TaskConfig(
            name="verifiers:guesses",
            options=options(how),
            time_limit=time_limit,
            **fields,
        )
    )


def spoken(task: Task, says: list[str], limit: int = 500) -> Any:
    tokenizer: Any = AutoTokenizer.from_pretrained(ensure_tiny("tiny-qwen3"))
    tokenizer.chat_template = TOOL_TEMPLATE
    problems = task.problems("train", 0, 2, 0)
    prompts = [Prompt(problem.id, problem.question, (5,)) for problem in problems]
    engine = Script(tokenizer, says)
    assert task.rollout is not None
    speaker = Speaker(task.rollout, tokenizer, None, ChatServer(tokenizer, "hermes", {}, 500))
    return asyncio.run(converse(engine, speaker, problems, prompts, Sampling(2, limit)))  # type: ignore[arg-type]


def test_an_environment_speaks_and_judges(module: Path):
    """Three turns each; the reward is the environment's; accuracy counts where it is 1."""
    asks = task("asks")
    first, _ = asks.problems("train", 0, 2, 0)
    prompts, ((one, same), (other, _)) = spoken(
        asks,
        ["hm", "so", first.question.split()[1]],
    )
    assert one == same
    assert one.reward == 1.0 > other.reward
    assert dict(one.events)["turns"] == 3
    assert len(one.environment) == 2
    assert prompts[0].token_ids != prompts[1].token_ids != (5,)
    assert asks.problems("heldout", 0, 1, 0)[0].id not in {
        p.id for p in asks.problems("train", 0, 21, 0)
    }
    _, ((cut, _), _) = spoken(
        asks,
        ["hm", "so", "1"],
        limit=12,
    )
    assert cut.truncated
    assert cut.reward is not None


@pytest.mark.parametrize("how", ["fails", "hangs", "dies"])
def test_what_an_environment_does_ends_no_run(module: Path, how: str):
    """Each conversation is as far as it came, without a reward, and counted; the host is begun
    again.
    """
    broken = task(how, time_limit=2.0)
    for _ in range(2):
        _, groups = spoken(broken, ["hm", "so", "1"])
        for completion in (completion for group in groups for completion in group):
            assert completion.reward is None
            assert dict(completion.events)["environment_errors"] == 1
            assert completion.text == "hm"


def test_what_cannot_be_used(module: Path):
    never = r"never asked the policy for a turn at .*: .*no shop is open"
    with pytest.raises(RewardError, match=never):
        spoken(task("silent"), ["hm"])
    with pytest.raises(TaskError, match=r"task.reward 'exact' is not for 'verifiers:guesses'"):
        task("asks", reward="exact")
    wrong = (
        ("not found", "nowhere", {}),
        ("agents", "guesses", {"agents": 1}),
        ("no task", "guesses", options(count=0)),
    )
    for words, name, env in wrong:
        with pytest.raises(TaskError, match=words):
            load_task(TaskConfig(name=f"verifiers:{name}", options=env))


@pytest.mark.slow
def test_a_run(module: Path):
    """Two steps are sampled by the policy that learns, to the last bit, and no process is left."""
    copy = shutil.copytree(ensure_tiny("tiny-qwen3"), module / "tiny")
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
        "2",
        "--max-new-tokens",
        "120",
        "--task.options",
        json.dumps(options()),
    )
    succeeded(
        "train",
        *small,
        "--task.name",
        "verifiers:guesses",
        "--output",
        module / "run",
        cwd=module,
    )
    steps = read_metrics(module / "run" / "metrics.jsonl")
    assert [step["learn/mismatch/max_abs"] for step in steps] == [0, 0]
    assert all(1 <= step["conversation/turns"] <= 3 for step in steps)
    hosts = [
        each
        for each in psutil.process_iter(["cmdline"])
        if "verifiers_host" in str(each.info["cmdline"])
    ]
    assert all(process.ppid() == os.getpid() for process in hosts), "one outlived its run"
