"""Agreement of learner, sampler and transformers on prompts with pictures, for many families.

python -m benchmarks.pictures [NAME …] [--schemes bf16,w8a8] [--json FILE]

For a tiny random model of each family, and each scheme:

- the fraction of sampled tokens after pictures whose log-prob the learner reproduces to the last
  bit, by the engine's own layers and by layers of the learner's own, after a publish of other
  masters;
- of the comparison before a run (`qarl.run.picture_check`), how far the towers' outputs and the
  log-probs are from transformers';
- over all masters' gradients of a policy-gradient loss, the cosine with those of transformers'
  whole model in float32, tower included, on the dequantized weights.

Then, in the last scheme, two steps of `qarl train` with drawn pictures, which end with an export
that a fresh engine must reproduce. FILE is written after each family, and families that it has are
not run again.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForImageTextToText

from benchmarks.families import (
    compare,
    dequantized_masters,
    publish_another,
    weights_of_loss,
)
from benchmarks.family_commands import PICTURE_TASK, through_commands
from qarl.cli.options import json_file, write_json
from qarl.configs.schema.rollout import RolloutConfig
from qarl.configs.schema.task import TaskConfig
from qarl.learner.batching import Batch, make_batch
from qarl.learner.logprobs import token_logprobs
from qarl.learner.mismatch import measure_mismatch
from qarl.mismatch.investigate import engine_of
from qarl.quant.checkpoint.load import load_masters
from qarl.quant.layers.context import LayerContext
from qarl.quant.model.low_bit_model import LowBitModel
from qarl.quant.schemes import get_scheme
from qarl.report.record import record
from qarl.rollout.picture_processors import load_processor
from qarl.rollout.types import Group, Prompt, Sampling
from qarl.run.picture_check import check_pictures, whole_inputs
from qarl.run.prompts import open_prompter
from qarl.tasks import Problem
from qarl.tasks.base import Picture
from tests.support.picture_models import PICTURE_FAMILIES, drawn, write_picture_model

_TOKENS = 24
"""Tokens of a completion."""
_SAMPLES = 2
_ONE_PICTURE = ("llava_onevision",)
"""Families that are asked with one picture a prompt."""


def measure(folder: Path, scheme: str, most: int) -> dict[str, Any]:
    """Return the figures of a folder's model in a scheme. most: pictures of a prompt."""
    model = LowBitModel(
        load_masters(folder, torch.float32),
        get_scheme(scheme),
        LayerContext(torch.bfloat16, "auto"),
        "engine",
    )
    rollout = RolloutConfig(pictures=most, max_prompt_tokens=512, max_new_tokens=_TOKENS)
    prompts = _prompts(folder, rollout, most)
    with engine_of(model, folder, rollout, "bfloat16") as engine:
        ((answer,),) = engine.generate(prompts[:1], Sampling(1, 1, seed=0))
        assert answer.pictures is not None
        checked = check_pictures(model, folder, prompts[0], answer.pictures)
        publish_another(model, engine, [list(prompts[0].token_ids)])
        completions = engine.generate(prompts, Sampling(_SAMPLES, _TOKENS, seed=0))
        rewards = tuple(map(float, range(_SAMPLES)))
        pairs = zip(prompts, completions, strict=True)
        batch = make_batch([Group(prompt, tuple(texts), rewards) for prompt, texts in pairs])
        model.multiply_with(engine.shared_layers())
        with torch.no_grad():
            by_engine = _equal(_scores(model, batch), batch)
        model.multiply_with(None)
    scores = _scores(model, batch)
    (scores * weights_of_loss(batch)).sum().backward()
    ours = {name: p.grad for name, p in model.masters.items() if p.grad is not None}
    cosine, error = compare(ours, _whole_gradients(model, folder, prompts, batch))
    return {
        "equal": by_engine,
        "equal_own": _equal(scores.detach(), batch),
        "tower": checked.tower,
        "difference": checked.difference,
        "bound": checked.bound,
        "unknown": checked.unknown,
        "cosine": cosine,
        "relative": error,
    }


def _prompts(folder: Path, rollout: RolloutConfig, most: int) -> list[Prompt]:
    """Return a prompt with one picture, and one with `most`; sizes are drawn."""
    maker = open_prompter(folder, rollout, TaskConfig())
    generator = np.random.default_rng(0)
    prompts = []
    for count in (1, most):
        sizes = generator.integers(8, 150, (count, 2)).tolist()
        pictures = tuple(Picture.of(drawn(generator, *size)) for size in sizes)
        question = "how many " * int(generator.integers(1, 12))
        prompts.append(maker.prompt(Problem(str(count), question, "", pictures=pictures)))
    return prompts


def _scores(model: LowBitModel, batch: Batch) -> torch.Tensor:
    packed = batch.packed()
    return token_logprobs(
        model, batch.tokens, batch.response_mask, packed=packed, pictures=batch.pictures
    )[0]


def _equal(scores: torch.Tensor, batch: Batch) -> float:
    return measure_mismatch(scores, batch.sampler_logprobs, batch.response_mask).equal


def _whole_gradients(
    model: LowBitModel, folder: Path, prompts: Sequence[Prompt], batch: Batch
) -> dict[str, torch.Tensor]:
    """Return transformers' float32 gradients on the dequantized weights, by the masters' names.

    The whole model computes one sequence at a time, its tower included.
    """
    loader: Any = AutoModelForImageTextToText
    whole = loader.from_pretrained(folder, dtype=torch.float32).eval()
    parameters = _language_parameters(whole, model)
    values = dequantized_masters(model)
    with torch.no_grad():
        for name, parameter in parameters.items():
            value = values.get(id(model.loaded[name]))
            parameter.copy_(model.loaded[name].to(model.dtype) if value is None else value)
    processor = load_processor(folder)
    weights = weights_of_loss(batch)
    for row, length in enumerate(batch.length.tolist()):
        inputs = whole_inputs(whole, processor, prompts[row // _SAMPLES])
        tokens = batch.tokens[row, :length]
        for name, value in inputs.items():
            if name.endswith("token_type_ids"):  # sampled tokens are text
                more = length - value.shape[1]
                inputs[name] = torch.nn.functional.pad(value, (0, more))
        logits = whole(**{**inputs, "input_ids": tokens[None]}).logits[0]
        # transformers' Cohere 2 Vision leaves it out
        logits = logits * getattr(whole.config.text_config, "logit_scale", 1.0)
        logp = logits[:-1].log_softmax(-1).gather(-1, tokens[1:, None])[:, 0]
        (logp * weights[row, : length - 1]).sum().backward()
    return {name: p.grad for name, p in parameters.items() if p.grad is not None}


def _language_parameters(whole: Any, model: LowBitModel) -> dict[str, torch.nn.Parameter]:
    """Return the parameters of the whole's language model, by their masters' names."""
    parameters = {}
    for name in model.loaded:
        part = whole.get_output_embeddings() if name.startswith("lm_head.") else whole.get_decoder()
        parameters[name] = part.get_parameter(name.partition(".")[2])
    return parameters


def _rows_of(file: str | None) -> list[dict[str, Any]]:
    """Return the rows of a record; [] if there is none."""
    if file is None or not Path(file).is_file():
        return []
    return json.loads(Path(file).read_text(encoding="utf-8"))["data"]


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--schemes", default="bf16,w8a8")
    parser.add_argument("--json", type=json_file, metavar="FILE", help="write the rows as a record")
    options = parser.parse_args()
    schemes = options.schemes.split(",")
    rows = _rows_of(options.json)
    done = {row["family"] for row in rows}
    for name in options.names or PICTURE_FAMILIES:
        if name in done:
            continue
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            write_picture_model(folder, family=name)
            most = 1 if name in _ONE_PICTURE else 2
            row: dict[str, Any] = {"family": name}
            row |= {scheme: measure(folder, scheme, most) for scheme in schemes}
            row["run"] = through_commands(name, folder, schemes[-1], "bfloat16", PICTURE_TASK)
        rows.append(row)
        print(json.dumps(row), flush=True)
        write_json(options.json, record(sys.argv[1:], rows, "python -m benchmarks.pictures"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
