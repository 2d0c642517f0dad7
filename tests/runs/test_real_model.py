"""A real language model through a whole run, on all cores and with a tail of one sequence:
SmolLM2-135M-Instruct.

Trained two steps, sampled and scored to the last bit, exported, read by transformers, and served as
it was evaluated.
"""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from qarl.report.run_folder import RunFolder, read_metrics
from qarl.report.start_note import read_start
from tests.support.kernels import no_cuda
from tests.support.runs import command, environment
from tests.support.serving import request, server

pytestmark = [no_cuda, pytest.mark.slow]

STORY = (
    "On Monday the baker lit the oven at five, as he had done for thirty years, and the street"
    " smelled of bread. " * 4
)
"""Some hundred tokens: vLLM would split the keys of sequences from about that length on over
threads.
"""
QUESTIONS = tuple(
    STORY + end
    for end in (
        "What did he do?",
        "Name a bread.",
        "What is flour made of?",
        "Who came first?",
    )
)
NEW_TOKENS = 24
REWARD = '''
import json
from pathlib import Path


def reward(problem, text):
    """Vary among answers of a question, so that a batch teaches something."""
    return (len(text) % 7) / 7


def correct(problem, text):
    """Keep what was judged: the last answers are those of the exported checkpoint."""
    with Path(__file__).with_name("judged.jsonl").open("a") as file:
        file.write(json.dumps([problem.question, text]) + "\\n")
    return True
'''


@pytest.fixture(scope="module")
def run(real_model: Path, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """Two steps in int4, on all cores. Six answers a step and room for five: the sixth is sampled
    alone.
    """
    folder = tmp_path_factory.mktemp("real")
    splits = ("heldout", "train", "train", "train")
    pairs = zip(QUESTIONS, splits, strict=True)
    rows = [{"question": question, "answer": "-", "split": split} for question, split in pairs]
    (folder / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "judge.py").write_text(REWARD)
    arguments = command(
        "train",
        "--model",
        real_model,
        "--config",
        "smollm2-135m",
        "--scheme",
        "w4a16-g64",
        "--task",
        folder / "questions.jsonl",
        "--reward",
        f"{folder / 'judge.py'}:reward",
        "--task.correct",
        f"{folder / 'judge.py'}:correct",
        "--output",
        folder / "run",
        "--steps",
        "2",
        "--prompts",
        "3",
        "--samples",
        "2",
        "--rollout.max_num_seqs",
        "5",
        "--max-new-tokens",
        str(NEW_TOKENS),
        "--rollout.max_prompt_tokens",
        "256",
        "--eval.problems",
        "1",
        "--mini-batches",
        "1",
        "--optimizer",
        "adamw",
        "--lr",
        "2e-5",
    )
    cores = {"OMP_NUM_THREADS": str(psutil.cpu_count()), "OMP_WAIT_POLICY": "PASSIVE"}
    done = subprocess.run(
        arguments,
        env=environment() | cores,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return RunFolder.open(folder / "run")


def test_every_log_prob_of_every_step_is_the_samplers(run: RunFolder):
    steps = read_metrics(run.metrics)
    assert len(steps) == 2
    for metrics in steps:
        assert metrics["learn/mismatch/max_abs"] == 0
        assert metrics["skipped_batches"] == 0


def test_the_engine_held_what_was_published(run: RunFolder):
    """The canary's log-probs are of layers of the learner's own."""
    start = read_start(run)
    assert start is not None
    assert start.canary == 0


@pytest.fixture(scope="module")
def served(run: RunFolder) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """The export's server, which takes a while to start."""
    with server(run.export) as (url, process):
        yield url, process


def test_a_served_answer_is_the_evaluated_one(run: RunFolder, served: tuple[str, Any]):
    """The same question as a chat, greedily, once the export was evaluated in a fresh engine."""
    url, process = served
    judged = [
        json.loads(line) for line in (run.path.parent / "judged.jsonl").read_text().splitlines()
    ]
    question, evaluated = judged[-1]
    for line in process.stdout:
        if url in line:
            break
    body = {
        "model": run.export.name,
        "messages": [{"role": "user", "content": question}],
        "max_tokens": NEW_TOKENS,
        "temperature": 0,
    }
    (choice,) = request(f"{url}/v1/chat/completions", body)["choices"]
    assert choice["message"]["content"].strip() == evaluated.strip()


def test_transformers_reads_the_export_within_rounding(run: RunFolder, served: tuple[str, Any]):
    """Log-probs of the prompt's tokens by the server, whose kernels multiply codes, and by
    transformers, which dequantizes them. Two right implementations of this model are some 0.05 nats
    a token apart in bfloat16; codes of another version or layout are some nats.
    """
    url, _ = served
    tokenizer = AutoTokenizer.from_pretrained(run.export)
    chat = [
        {"role": "user", "content": QUESTIONS[0]},
        {"role": "assistant", "content": "Tea is a warm drink."},
    ]
    tokens = tokenizer.apply_chat_template(chat, return_dict=False)
    body = {
        "model": run.export.name,
        "prompt": tokens,
        "max_tokens": 1,
        "temperature": 0,
        "prompt_logprobs": 0,
    }
    (choice,) = request(f"{url}/v1/completions", body)["choices"]
    engine = [
        row[str(token)]["logprob"]
        for token, row in zip(tokens[1:], choice["prompt_logprobs"][1:], strict=True)
    ]
    model = AutoModelForCausalLM.from_pretrained(run.export, dtype=torch.bfloat16)
    with torch.no_grad():
        logits = model(torch.tensor([tokens])).logits[0, :-1]
    expected = logits.log_softmax(-1, dtype=torch.float32).gather(
        -1, torch.tensor(tokens[1:])[:, None]
    )[:, 0]
    assert float((torch.tensor(engine) - expected).abs().mean()) < 0.15


def test_digits_are_split_from_the_spaces_before_them(real_model: Path):
    """Contract: as in the published tokenizer; from GGUF, transformers takes another rule."""
    tokenizer = AutoTokenizer.from_pretrained(real_model)
    assert tokenizer.tokenize("in  37") == ["in", "ĠĠ", "3", "7"]
