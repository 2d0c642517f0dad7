"""`python -m benchmarks.gguf EXPORT GGUF --node FOLDER`: llama.cpp beside the engine and fp32.

The engine (vLLM) and llama.cpp answer the same questions greedily. Then the engine's answers are
scored by both, and by transformers in fp32 with the export's dequantized weights, which is nearest
to exact arithmetic. Token ids of drawn texts are compared as well.

FOLDER holds llama.cpp: npm install node-llama-cpp@3.21.1 (node 20 or newer) in an empty one.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from qarl.cli.environment import quiet_libraries
from qarl.cli.options import write_json
from qarl.configs.schema.rollout import RolloutConfig
from qarl.report.record import record
from qarl.rollout.open import open_engine
from qarl.rollout.types import Prompt, Sampling
from qarl.run.export_note import read_note

QUESTIONS = (
    "What is the capital of France?",
    "Name three colours.",
    "What is 7 + 5?",
    "Write one sentence about the sea.",
    "Who wrote Romeo and Juliet?",
    "What do bees make?",
    "Give a synonym of 'happy'.",
    "Which planet is the largest?",
    "How many legs has a spider?",
    "Explain in one sentence what a computer is.",
    "What is the opposite of 'cold'?",
    "Translate 'good morning' into Spanish.",
    "What is the boiling point of water?",
    "Name an animal that can fly.",
    "What is a noun?",
    "When do leaves fall?",
    "What is the square of 9?",
    "Name the first month of the year.",
    "What do plants need to grow?",
    "Write a title for a story about a cat.",
)
TOKENS = 32
"""Upper bound on the tokens of an answer."""
TEXTS = 400
"""Number of drawn texts whose token ids are compared."""
_ALPHABET = (
    "aAbeEinsT xyz  019 23.,;:!?'\"-_()[]{}<>|/\\\n\t éüßñçøÅ你好мирعربي🙂🎉ﬁ½²\u00a0\u200b\r"
)
_WORDS = (
    "it's",
    "don't",
    "I'LL",
    "the",
    " 1234567",
    "\n\n",
    "   ",
    "<|im_start|>",
    "naïve",
    "def f():",
)


def drawn_texts(count: int) -> list[str]:
    """Return drawn texts of letters, digits, spaces, symbols, words and a special token."""
    draw = random.Random(0)
    texts = []
    for _ in range(count):
        parts = draw.choices([*_ALPHABET, *_WORDS], k=draw.randint(1, 40))
        texts.append("".join(parts))
    return texts


def from_engine(export: Path, prompts: list[list[int]], dtype: str) -> tuple[Any, Any]:
    """Return the engine's greedy answers, and the log-probs of prompts with their answers."""
    rollout = RolloutConfig(max_prompt_tokens=256, max_new_tokens=TOKENS)
    with open_engine(export, rollout, dtype) as engine:
        questions = [
            Prompt(str(number), QUESTIONS[number], tuple(ids)) for number, ids in enumerate(prompts)
        ]
        sampling = Sampling(samples=1, max_new_tokens=TOKENS, temperature=0.0)
        answers = [list(each[0].token_ids) for each in engine.generate(questions, sampling)]
        sequences = [p + a for p, a in zip(prompts, answers, strict=True)]
        return answers, engine.logprobs(sequences)


def from_llama_cpp(folder: Path, request: dict[str, Any]) -> dict[str, Any]:
    """Return what gguf.mjs answers to a request. folder: where node-llama-cpp is installed."""
    with tempfile.TemporaryDirectory() as work:
        asked_file, answer_file = Path(work) / "request.json", Path(work) / "answer.json"
        asked_file.write_text(json.dumps(request))
        script = Path(__file__).with_name("gguf.mjs").resolve()
        command = ["node", str(script), str(asked_file), str(answer_file)]
        subprocess.run(command, cwd=folder, check=True)
        return json.loads(answer_file.read_text())


def from_fp32(export: Path, sequences: list[list[int]]) -> list[list[float]]:
    """Return log-probs by transformers in fp32, with dequantized weights."""
    from qarl.sync.gguf.exported import read_exported

    exported = read_exported(export)
    model = AutoModelForCausalLM.from_config(exported.config, dtype=torch.float32)
    layers = set(exported.layers)
    state = {f"{layer}.weight": exported.weight(layer).dequantized() for layer in layers}
    for name in exported.shapes:
        if name.rpartition(".")[0] not in layers or name.endswith(".bias"):
            state[name] = exported.tensor(name).float()
    model.load_state_dict(state, strict=False)
    model.tie_weights()
    rows = []
    with torch.no_grad():
        for ids in sequences:
            logits = model.eval()(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
            rows.append(logits.gather(-1, torch.tensor(ids[1:])[:, None])[:, 0].tolist())
    return rows


def differences(one: list[list[float]], other: list[list[float]]) -> dict[str, float]:
    """Return the mean and the largest |Δ log p| over tokens, nats."""
    pairs = [pair for rows in zip(one, other, strict=True) for pair in zip(*rows, strict=True)]
    moved = [abs(a - b) for a, b in pairs]
    return {"mean_abs": fmean(moved), "max_abs": max(moved), "tokens": len(moved)}


def measure(export: Path, file: Path, node: Path, threads: int) -> dict[str, Any]:
    """Return all figures of one export and its GGUF file."""
    tokenizer: Any = AutoTokenizer.from_pretrained(export)
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    prompts = [
        list(tokenizer.apply_chat_template(c, add_generation_prompt=True, return_dict=False))
        for c in chats
    ]
    note = read_note(export)
    answers, engine = from_engine(export, prompts, note["dtype"])
    sequences = [p + a for p, a in zip(prompts, answers, strict=True)]
    texts = drawn_texts(TEXTS)
    llama = from_llama_cpp(
        node,
        {
            "model": str(file.resolve()),
            "threads": threads,
            "context": 512,
            "texts": texts,
            "prompts": prompts,
            "answer_tokens": TOKENS,
            "sequences": sequences,
            "starts": [len(prompt) for prompt in prompts],
        },
    )
    exact = from_fp32(export, sequences)
    # log-probs begin with the second token of a sequence
    engine, exact = (
        [row[len(prompt) - 1 :] for row, prompt in zip(rows, prompts, strict=True)]
        for rows in (engine, exact)
    )
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    pairs = {
        "llama.cpp and vLLM": (llama["logprobs"], engine),
        "llama.cpp and fp32": (llama["logprobs"], exact),
        "vLLM and fp32": (engine, exact),
    }
    return {
        "scheme": note["scheme"],
        "file": file.name,
        "llama_cpp": llama["llama_cpp"],
        "texts": len(texts),
        "equal_texts": sum(a == b for a, b in zip(ids, llama["tokens"], strict=True)),
        "unequal": [t for t, a, b in zip(texts, ids, llama["tokens"], strict=True) if a != b][:5],
        "questions": len(prompts),
        "equal_answers": sum(a == b for a, b in zip(answers, llama["answers"], strict=True)),
        "equal_tokens": sum(_common(a, b) for a, b in zip(answers, llama["answers"], strict=True)),
        "answer_tokens": sum(map(len, answers)),
        "pairs": {name: differences(one, other) for name, (one, other) in pairs.items()},
        "answers": [
            {
                "question": question,
                "vllm": tokenizer.decode(ours),
                "llama_cpp": tokenizer.decode(theirs),
            }
            for question, ours, theirs in zip(QUESTIONS, answers, llama["answers"], strict=True)
        ],
    }


def _common(one: list[int], other: list[int]) -> int:
    """Return how many tokens from the start are equal."""
    for number, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return number
    return min(len(one), len(other))


def main() -> None:
    """Print the figures, and write them as JSON if `--json` is set."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gguf", description=__doc__)
    parser.add_argument("export", type=Path, help="export folder")
    parser.add_argument("gguf", type=Path, help="GGUF file of that export")
    parser.add_argument("--node", type=Path, required=True, help="folder with node-llama-cpp")
    parser.add_argument("--threads", type=int, default=1, help="threads of llama.cpp")
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    quiet_libraries()
    figures = measure(arguments.export, arguments.gguf, arguments.node, arguments.threads)
    print(json.dumps(figures, indent=2, ensure_ascii=False))
    if arguments.json:
        write_json(
            str(arguments.json), record(sys.argv[1:], [figures], "python -m benchmarks.gguf")
        )


if __name__ == "__main__":
    main()
