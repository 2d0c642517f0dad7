"""`python -m benchmarks.served --plain PYTHON`: count served answers that were evaluated.

Five policies are trained for one step and exported: a real model, a mixture of experts, LoRA, one
behind a system prompt, and one whose thinking is switched off. Their held-out questions are then
asked by clients that know the question alone, greedily:

- `qarl eval RUN`, the reference;
- `qarl serve RUN`, without a temperature;
- vLLM's own server on the export, in an environment without QaRL, with temperature 0;
- transformers' `generate()` on the export.

Where an answer parts from that of `qarl serve`, the gap between the two likeliest tokens there says
whether rounding can explain it. For transformers it stands beside what that gap differs by between
the two runtimes, over all served tokens.

PYTHON has vLLM, and cannot import QaRL.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any
from urllib.error import HTTPError

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from qarl.cli.environment import quiet_libraries
from qarl.cli.main import main as command
from qarl.cli.options import write_json
from qarl.embedded.recipe import ensure_tiny
from qarl.report.record import record
from qarl.rollout.servers.vllm.start import is_ready
from tests.support.serving import request, server

SMALL = ("--steps", "1", "--prompts", "4", "--samples", "4", "--task", "chain_sum")
"""Options of every run."""
REAL = ("--config", "smollm2-135m", "--max-new-tokens", "16")
TINY = ("--config", "tiny-qwen3", "--scheme", "w8a8")
MODELS: dict[str, Sequence[str]] = {
    "LoRA, w8a8": (*TINY, "--learner.lora.name", "lora", "--optimizer", "adamw"),
    "system prompt, w8a8": (*TINY, "--task.system", "Be brief."),
    "thinking off, w8a8": (*TINY, "--model", "thinks", "--task.template.enable_thinking", "false"),
    "mixture, bf16": ("--config", "tiny-qwen3-moe", "--scheme", "bf16"),
    "SmolLM2-135M, bf16": (*REAL, "--scheme", "bf16"),
    "SmolLM2-135M, w4a16-g64": REAL,
}
"""Name of a policy → options of its run. `thinks` is `thinking_model`."""
_PATIENCE = 600.0
"""Seconds that a server has until it answers."""
_THINKING = "{% if enable_thinking is defined and not enable_thinking %}0 = 0\n{% endif %}"
"""What the template of `thinking_model` writes before an answer without thinking."""


@dataclass(frozen=True)
class Answer:
    """A served answer."""

    text: str
    prompt: list[int]
    """Token ids of the prompt that the server made."""
    token_ids: list[int]
    gaps: list[float]
    """Log-prob of the likeliest token less that of the second, in nats, at each position."""
    pairs: list[tuple[int, int]]
    """Those two tokens, at each position."""


def thinking_model(folder: Path) -> None:
    """Write the embedded policy with a chat template that knows `enable_thinking`, and a generation
    config with a repetition penalty, which no rollout applies.
    """
    shutil.copytree(ensure_tiny("tiny-qwen3"), folder)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template += _THINKING
    tokenizer.save_pretrained(folder)
    file = folder / "generation_config.json"
    config = json.loads(file.read_text()) if file.is_file() else {}
    file.write_text(json.dumps({**config, "repetition_penalty": 1.5}))


def qarl(*arguments: str) -> None:
    """Run `qarl ARGUMENTS` in this process. Raises `SystemExit` if it fails."""
    status = command(list(arguments))
    if status:
        raise SystemExit(status)


def ask(url: str, model: str, questions: Sequence[str], **fields: Any) -> list[Answer]:
    """Return a server's answers to plain chats, asked one at a time."""
    ids = {"return_token_ids": True, "return_tokens_as_token_ids": True}
    wanted = {"logprobs": True, "top_logprobs": 2, **ids, **fields}
    answers = []
    for question in questions:
        messages = [{"role": "user", "content": question}]
        body = {"model": model, "messages": messages, **wanted}
        reply = request(f"{url}/v1/chat/completions", body)
        (choice,) = reply["choices"]
        tops = [entry["top_logprobs"] for entry in choice["logprobs"]["content"]]
        answers.append(
            Answer(
                text=(choice["message"]["content"] or "").strip(),
                prompt=reply["prompt_token_ids"],
                token_ids=choice["token_ids"],
                gaps=[first["logprob"] - second["logprob"] for first, second in tops],
                pairs=[(_id(first), _id(second)) for first, second in tops],
            )
        )
    return answers


def _id(entry: dict[str, Any]) -> int:
    """Return the id of a token that the server was told to write as "token_id:N"."""
    return int(entry["token"].removeprefix("token_id:"))


def served(run: Path, questions: Sequence[str], plain: Path | None) -> list[Answer] | str:
    """Return the answers of `qarl serve`, or of vLLM alone under the Python `plain`. A server that
    does not start or answer gives the last error of its output instead.
    """
    target = run / "export" if plain else run
    log = run.with_suffix(".log")
    with server(target, plain=plain is not None, python=plain, log=log) as (url, process):
        deadline = time.monotonic() + _PATIENCE
        while not is_ready(url):
            if process.poll() is not None or time.monotonic() > deadline:
                return last_error(log.read_text(errors="replace"))
            time.sleep(0.2)
        try:
            return ask(url, target.name, questions, **({"temperature": 0} if plain else {}))
        except HTTPError as error:
            return f"{last_error(log.read_text(errors='replace'))} (status {error.code})"


def last_error(text: str) -> str:
    """Return the last line of a log that names an error."""
    named = [line for line in text.splitlines() if "Error:" in line]
    return named[-1].strip()[-300:] if named else "no error in its output"


@dataclass(frozen=True)
class Compared:
    """Another runtime's answers beside those of `qarl serve`."""

    equal: int
    """Number of questions whose answers have equal tokens."""
    prompts: int
    """Number of questions whose prompts have equal tokens."""
    gaps: list[float]
    """Gap of `qarl serve` at the first token that differs, in nats, of each other question."""
    second: int
    """Number of those whose first other token is the second likeliest of `qarl serve`."""
    near: int
    """Number of served tokens whose gap is at most the largest of `gaps`."""
    tokens: int
    """Number of served tokens."""


def compared(
    answers: Sequence[Answer], prompts: Sequence[list[int]], tokens: Sequence[list[int]]
) -> Compared:
    """Return how another runtime's prompts and tokens compare with the served answers."""
    gaps: list[float] = []
    second = 0
    for answer, own in zip(answers, tokens, strict=True):
        parted = parting(own, answer.token_ids)
        # past the end of the served answer there is no gap: the other one went on
        if parted is not None and parted < len(answer.gaps):
            gaps.append(answer.gaps[parted])
            second += own[parted : parted + 1] == [answer.pairs[parted][1]]
    every = [gap for answer in answers for gap in answer.gaps]
    return Compared(
        equal=sum(
            parting(own, answer.token_ids) is None
            for answer, own in zip(answers, tokens, strict=True)
        ),
        prompts=sum(
            answer.prompt == prompt for answer, prompt in zip(answers, prompts, strict=True)
        ),
        gaps=gaps,
        second=second,
        near=sum(gap <= max(gaps, default=-1.0) for gap in every),
        tokens=len(every),
    )


def compare_transformers(
    export: Path, questions: Sequence[str], answers: Sequence[Answer]
) -> dict[str, Any]:
    """Ask transformers the questions, and compare its tokens with the served ones.

    `moved` is the difference of the gap between the two likeliest tokens, over all served tokens:
    mean and maximum, in nats.
    """
    tokenizer: Any = AutoTokenizer.from_pretrained(export)
    model: Any = AutoModelForCausalLM.from_pretrained(export, dtype="auto").eval()
    prompts: list[list[int]] = []
    tokens: list[list[int]] = []
    moved: list[float] = []
    for question, answer in zip(questions, answers, strict=True):
        chat = [{"role": "user", "content": question}]
        options = {"add_generation_prompt": True, "return_dict": True, "return_tensors": "pt"}
        prompt = tokenizer.apply_chat_template(chat, **options)
        prompts.append(prompt["input_ids"][0].tolist())
        with torch.no_grad():
            # the export says nothing of a temperature, so that this is greedy
            tokens.append(model.generate(**prompt)[0, len(prompts[-1]) :].tolist())
            whole = torch.tensor([answer.prompt + answer.token_ids])
            rows = model(whole).logits[0, len(answer.prompt) - 1 : -1].float()
        for row, gap, (first, other) in zip(rows, answer.gaps, answer.pairs, strict=True):
            moved.append(abs(float(row[first] - row[other]) - gap))
    return {
        **asdict(compared(answers, prompts, tokens)),
        "moved": {"mean": fmean(moved), "max": max(moved)},
    }


def parting(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Return the index of the first token that differs, None if there is none."""
    for index, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return index
    return None if len(one) == len(other) else min(len(one), len(other))


def measure(name: str, folder: Path, count: int, plain: Path) -> dict[str, Any]:
    """Return one policy's counts."""
    run = folder / name.replace(", ", "-").replace(" ", "-")
    number = str(count)
    options = [str(folder / "thinks") if word == "thinks" else word for word in MODELS[name]]
    qarl("train", *SMALL, *options, "--eval.problems", number, "--output", str(run))
    answers_file = folder / "eval.json"
    qarl("eval", str(run), "--problems", number, "--json", str(answers_file))
    (result,) = json.loads(answers_file.read_text())["benchmarks"]
    questions = [each["question"] for each in result["questions"]]
    expected = [each["answers"][0] for each in result["questions"]]
    ours = served(run, questions, None)
    if isinstance(ours, str):
        raise SystemExit(f"qarl serve of {name}: {ours}")
    theirs = served(run, questions, plain)
    alone: Any = theirs
    if not isinstance(theirs, str):
        prompts = [answer.prompt for answer in theirs]
        alone = asdict(compared(ours, prompts, [answer.token_ids for answer in theirs]))
    return {
        "model": name,
        "questions": len(questions),
        "qarl_serve": sum(a.text == text for a, text in zip(ours, expected, strict=True)),
        "vllm_alone": alone,
        "transformers": compare_transformers(run / "export", questions, ours),
    }


def require_alone(python: Path) -> None:
    """End the program unless this Python has vLLM and cannot import QaRL."""
    code = "import importlib.util as u; print(u.find_spec('qarl'), u.find_spec('vllm') is not None)"
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    probe = [str(python), "-P", "-c", code]
    done = subprocess.run(probe, capture_output=True, text=True, cwd="/", env=clean, check=True)
    if done.stdout.split() != ["None", "True"]:
        raise SystemExit(f"--plain {python} imports QaRL, or has no vLLM; give one of another kind")


def main() -> None:
    """Measure every policy, and print and save the rows."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.served",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--plain", type=Path, required=True, help="a Python without QaRL")
    parser.add_argument("--questions", type=int, default=24, help="questions of each policy")
    parser.add_argument("--only", default="", help="policies with this text in their name")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="keep the rows here, and go on from what it has"
    )
    arguments = parser.parse_args()
    require_alone(arguments.plain)
    quiet_libraries()
    rows: list[dict[str, Any]] = []
    if arguments.json and arguments.json.is_file():
        rows = json.loads(arguments.json.read_text())["data"]
    done = {row["model"] for row in rows}
    with tempfile.TemporaryDirectory(prefix="qarl-served-") as work:
        thinking_model(Path(work) / "thinks")
        for name in MODELS:
            if arguments.only in name and name not in done:
                rows.append(measure(name, Path(work), arguments.questions, arguments.plain))
                print(json.dumps(rows[-1], ensure_ascii=False), flush=True)
                if arguments.json:
                    written = record(sys.argv[1:], rows, "python -m benchmarks.served")
                    write_json(str(arguments.json), written)


if __name__ == "__main__":
    main()
