"""A tiny policy with pictures that answers the task of drawn shapes in part, and a run's curve.

    python -m benchmarks.picture_policy FOLDER
    qarl train --config tiny-qwen3 --model FOLDER --task drawn_shapes --task.options '{}' \\
        --rollout.pictures 1 --scheme w8a8 --prompts 32 --steps 20 --eval.problems 128 \\
        --eval-every 5 --output RUN
    python -m benchmarks.picture_policy FOLDER --run RUN --json FILE

It is a random Idefics3 of 0.6 million parameters, trained by transformers on answers for half a
minute of one core. A run trains no tower, so that the tower is trained until it sees what is asked,
together with a language model that is then thrown away. Another one, from the random weights, is
trained over this tower until half of its answers are right.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForImageTextToText, AutoProcessor

from qarl.cli.options import json_file, write_json
from qarl.embedded.cache import to_stderr
from qarl.page.runs import read_runs
from qarl.report.record import record
from qarl.rollout.pictures import open_picture
from qarl.tasks import Problem
from qarl.tasks.procedural import ReasoningGymTask
from tests.support.picture_models import TILE, write_picture_model

_BATCH = 64
"""Problems of a step."""
_SEED = 12345
"""Seed of the problems, another one than a run's, so that a run's questions are new."""
_IGNORED = -100
"""Label of a token that is not trained on."""


_LR = 1e-3
"""Learning rate of AdamW, reached after `_WARM` steps."""
_WARM = 15
_LANGUAGE = ("model.text_model.", "lm_head.")
"""Beginnings of the names of the language model's parameters."""


def write_picture_policy(folder: Path, steps: int, accuracy: float) -> None:
    """Write the model's folder.

    Args:
        steps: steps of the tower's training, each of `_BATCH` problems.
        accuracy: fraction of a step's new problems whose most probable answer is right, at which
            the language model's training ends.
    """
    write_picture_model(folder, longest=TILE)
    loader: Any = AutoModelForImageTextToText
    model = loader.from_pretrained(folder, dtype=torch.float32).train()
    processor: Any = AutoProcessor.from_pretrained(folder)
    language = {
        name: parameter
        for name, parameter in model.named_parameters()
        if name.startswith(_LANGUAGE)
    }
    before = {name: parameter.detach().clone() for name, parameter in language.items()}
    batches = _batches(processor)
    _train(model, list(model.parameters()), batches, "tower", steps, 1.0)
    for name, parameter in language.items():
        parameter.data.copy_(before[name])
    _train(model, list(language.values()), batches, "language model", steps, accuracy)
    model.save_pretrained(folder)


def _batches(processor: Any) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
    """Yield inputs and labels of new problems."""
    task = ReasoningGymTask("drawn_shapes", {})
    for step in count():
        yield _encoded(processor, task.problems("train", step * _BATCH, _BATCH, _SEED))


def _train(
    model: Any,
    parameters: list[torch.nn.Parameter],
    batches: Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]],
    part: str,
    steps: int,
    accuracy: float,
) -> None:
    """Train some of the model's parameters, for `steps` steps or to an accuracy.

    part: their name, for messages.
    """
    optimizer = torch.optim.AdamW(parameters, lr=_LR, weight_decay=0.01)
    for step, (inputs, labels) in zip(range(steps), batches, strict=False):
        logits = model(**inputs).logits[:, :-1]
        labels = labels[:, 1:]
        right = ((logits.argmax(-1) == labels) | (labels == _IGNORED)).all(-1).float().mean().item()
        if step % 10 == 0 or step == steps - 1 or right >= accuracy:
            to_stderr(f"{part}, step {step + 1}: {right:.0%} right")
        if right >= accuracy:
            return
        loss = cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=_IGNORED)
        model.zero_grad()
        loss.backward()
        optimizer.param_groups[0]["lr"] = _LR * min(1.0, (step + 1) / _WARM)
        optimizer.step()


def _encoded(
    processor: Any, problems: Sequence[Problem]
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Return a model's inputs of questions with their answers, and labels int64 [B, T]."""
    end = processor.tokenizer.eos_token
    prompts = [
        processor.apply_chat_template(
            [
                {
                    "role": "user",
                    "content": [{"type": "image"}, {"type": "text", "text": problem.question}],
                }
            ],
            add_generation_prompt=True,
        )
        for problem in problems
    ]
    answers = [problem.answer + end for problem in problems]
    pictures = [
        [open_picture(picture.contents()) for picture in problem.pictures] for problem in problems
    ]
    texts = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
    inputs = processor(
        text=texts, images=pictures, padding=True, padding_side="right", return_tensors="pt"
    )
    labels = torch.full_like(inputs["input_ids"], _IGNORED)
    for row, answer in enumerate(answers):
        tokens = len(processor.tokenizer(answer, add_special_tokens=False)["input_ids"])
        length = int(inputs["attention_mask"][row].sum())
        labels[row, length - tokens : length] = inputs["input_ids"][row, length - tokens : length]
    return dict(inputs), labels


def curve(run: Path) -> dict[str, Any]:
    """Return what a run's record has: settings, held-out accuracy, and numbers of each step."""
    (recorded,) = read_runs([run])
    config = recorded.config
    return {
        "scheme": config.scheme,
        "prompts": config.rollout.prompts,
        "samples": config.rollout.samples,
        "heldout problems": config.eval.problems,
        "heldout accuracy": {
            str(step): round(measured.accuracy, 4) for step, measured in recorded.heldout().items()
        },
        "steps": [
            {
                "step": step["step"],
                "reward": round(step["reward"], 4),
                "mean_abs": step["learn/mismatch/mean_abs"],
                "max_abs": step["learn/mismatch/max_abs"],
            }
            for step in recorded.metrics
        ],
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--accuracy", type=float, default=0.5)
    parser.add_argument("--run", type=Path, help="a run that trained it: only print its curve")
    parser.add_argument("--json", type=json_file, help="write the curve as a record")
    arguments = parser.parse_args()
    if arguments.run is None:
        torch.set_num_threads(1)
        write_picture_policy(arguments.folder, arguments.steps, arguments.accuracy)
    else:
        data = curve(arguments.run)
        to_stderr(f"held-out accuracy by step: {data['heldout accuracy']}")
        program = "python -m benchmarks.picture_policy"
        write_json(arguments.json, record(sys.argv[1:], data, program))
