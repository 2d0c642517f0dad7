"""`python -m benchmarks.first_step`: how far an optimizer's first step moves a policy.

python -m benchmarks.first_step --model FOLDER --pairs PAIRS.jsonl [--schemes A,B] [--json FILE]

AdamW's first update moves each weight by the learning rate, in the direction of its gradient's
sign, however small the gradient. Here each master moves by that much: along the gradient of a
policy-gradient loss whose advantages are ±1 at random, so of nothing but noise, or with random
signs. KL(before ‖ after) is over the whole vocabulary, mean of all tokens of the answers, and after
is what is sampled from: the low-bit policy.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer

import qarl
from qarl.api.policy import Policy
from qarl.cli.options import json_file, write_json
from qarl.report.record import record


def batch_of(folder: Path, pairs: Path, count: int) -> dict[str, Tensor]:
    """Return the first pairs as `input_ids` and `attention_mask` int64 [count, T], padded on the
    left, and `mask` bool [count, T-1], true at the answers' tokens.
    """
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    rows = []
    for line in pairs.read_text().splitlines()[:count]:
        pair = json.loads(line)
        chat = [{"role": "user", "content": pair["question"]}]
        prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        answer = tokenizer(pair["answer"] + tokenizer.eos_token, add_special_tokens=False)
        rows.append((prompt, answer["input_ids"]))
    width = max(len(prompt) + len(answer) for prompt, answer in rows)
    tokens = torch.zeros(len(rows), width, dtype=torch.long)
    attended = torch.zeros_like(tokens)
    answers = torch.zeros_like(tokens, dtype=torch.bool)
    for n, (prompt, answer) in enumerate(rows):
        length = len(prompt) + len(answer)
        tokens[n, -length:] = torch.tensor([*prompt, *answer])
        attended[n, -length:] = 1
        answers[n, -len(answer) :] = True
    return {"input_ids": tokens, "attention_mask": attended, "mask": answers[:, 1:]}


def gradients(policy: Policy, batch: dict[str, Tensor], generator: torch.Generator) -> list[Tensor]:
    """Return each master's gradient of a policy-gradient loss with random advantages of ±1."""
    logprobs, _ = policy.logprobs(batch["input_ids"], batch["mask"], batch["attention_mask"])
    advantages = torch.randint(0, 2, (len(logprobs), 1), generator=generator) * 2.0 - 1
    (-(logprobs * advantages).sum() / batch["mask"].sum()).backward()
    computed = [torch.zeros_like(m) if m.grad is None else m.grad for m in policy.parameters()]
    for master in policy.parameters():
        master.grad = None
    return computed


def answer_logprobs(policy: Policy, batch: dict[str, Tensor]) -> Tensor:
    """Return log-probs of all tokens at the answers' positions, fp64 [answers' tokens, V]."""
    with torch.no_grad():
        output = policy(batch["input_ids"], batch["attention_mask"])
    return torch.log_softmax(output.logits[:, :-1][batch["mask"]].double(), dim=-1)


def measure(
    folder: Path, batch: dict[str, Tensor], scheme: str, rates: Sequence[float]
) -> list[dict[str, Any]]:
    """Return a row for each direction and rate: KL(before ‖ after), nats a token."""
    generator = torch.Generator().manual_seed(0)
    policy = qarl.align(folder, scheme, dtype="float32")
    before = answer_logprobs(policy, batch)
    starts = [master.detach().clone() for master in policy.parameters()]
    along = [gradient.sign() for gradient in gradients(policy, batch, generator)]
    at_random = [torch.randint(0, 2, s.shape, generator=generator) * 2.0 - 1 for s in starts]
    rows = []
    for name, directions in {"gradient": along, "random": at_random}.items():
        for rate in rates:
            with torch.no_grad():
                for master, start, direction in zip(
                    policy.parameters(), starts, directions, strict=True
                ):
                    master.copy_(start - rate * direction)
            policy.refresh()
            moved = before.exp() * (before - answer_logprobs(policy, batch))
            kl = moved.sum(-1).mean().item()
            rows.append({"scheme": scheme, "direction": name, "rate": rate, "kl": kl})
    return rows


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True, help="folder of the masters")
    parser.add_argument("--pairs", type=Path, required=True, help="questions and answers, JSONL")
    parser.add_argument("--count", type=int, default=16, help="pairs in the batch")
    parser.add_argument("--schemes", default="bf16,w8a8,w4a16-g64")
    parser.add_argument("--rates", default="5e-6,2e-5,4e-5", help="learning rates")
    parser.add_argument("--json", type=json_file, metavar="FILE", help="write the rows as a record")
    options = parser.parse_args()
    rates = [float(rate) for rate in options.rates.split(",")]
    batch = batch_of(options.model, options.pairs, options.count)
    rows = []
    for scheme in options.schemes.split(","):
        rows += measure(options.model, batch, scheme, rates)
        for row in rows[-2 * len(rates) :]:
            print("{scheme:12} {direction:8} {rate:8.1e}  KL {kl:.4f}".format(**row), flush=True)
    write_json(options.json, record(sys.argv[1:], rows, "python -m benchmarks.first_step"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
