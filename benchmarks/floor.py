"""`python -m benchmarks.floor`: distance of right and faulty learners from the engine.

The distances are printed beside the floor of the bounds. One engine samples from the right codes.
Two right learners (the aligned one and one with transformers' operators) and several with one
planted fault each score a few fixed sequences (the canary's) and the sampled batch (the gate's).
"""

import argparse
import copy
import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from qarl.cli.environment import quiet_libraries
from qarl.cli.options import write_json
from qarl.configs.load import chosen_config
from qarl.configs.schema.run import LayerRule, RunConfig
from qarl.learner.batching import Batch, make_batch
from qarl.learner.mismatch import measure_mismatch
from qarl.learner.processes import Processes
from qarl.mismatch.investigate import LEARNERS, LearnerKind, engine_of, learner_over, scored
from qarl.quant.checkpoint.load import load_masters
from qarl.quant.model.low_bit_model import LowBitModel
from qarl.report.record import record
from qarl.rollout.types import Group, Sampling
from qarl.run.policy import model_folder
from qarl.run.prompts import open_prompter
from qarl.sync.floor import (
    OTHER_KERNELS_TOLERANCE,
    OTHER_ROUNDINGS_SEED,
    SAME_KERNELS_TOLERANCE,
    FixedSequences,
)
from qarl.tasks import load_task

RIGHT = LEARNERS["fake-quant"]
ROUNDINGS = LEARNERS["aligned"]
STEP = 2e-5
"""Amount by which a stale version's masters are moved, up or down.

It is the size of one AdamW step at this learning rate.
"""


@dataclasses.dataclass(frozen=True)
class Row:
    """Distances of one learner from the engine."""

    learner: str
    canary: float
    """Mean |Δ log p| of the fixed sequences, in nats."""
    canary_over_floor: float
    gate: float
    """Mean |log w| of the sampled batch, in nats."""
    gate_over_floor: float


def faulty(
    masters: PreTrainedModel, config: RunConfig, kind: LearnerKind
) -> Iterator[tuple[str, LowBitModel]]:
    """Yield a name and a learner for each planted fault.

    kind: operators that the learners use apart from the fault.
    """
    names = [name for name, _ in masters.named_modules()]
    values = [name for name in names if name.endswith("v_proj")][1]
    down = [name for name in names if name.endswith("down_proj")]
    middle = down[len(down) // 2]

    def learner(
        model: PreTrainedModel,
        scheme: str = config.scheme,
        rules: tuple[LayerRule, ...] = (),
    ) -> LowBitModel:
        return learner_over(model, scheme, config.dtype, kind, rules, None)

    if config.scheme.startswith("w4a16-g64"):
        yield "groups of 32 for 64", learner(masters, "w4a16-g32")
    if config.scheme != "bf16":
        yield (
            "one layer unquantized",
            learner(masters, rules=(LayerRule(match=middle, scheme="bf16"),)),
        )
    moved = copy.deepcopy(masters)
    generator = torch.Generator().manual_seed(1)
    for parameter in moved.parameters():
        parameter.data.add_(STEP * torch.randn(parameter.shape, generator=generator).sign())
    yield f"stale by a step of {STEP:g}", learner(moved)
    swapped = copy.deepcopy(masters)
    weight: Any = swapped.get_submodule(middle).weight
    weight.data[[0, 1]] = weight.data[[1, 0]]
    yield "two rows of one layer swapped", learner(swapped)
    permuted = copy.deepcopy(masters)
    weight = permuted.get_submodule(values).weight
    weight.data = weight.data[torch.randperm(len(weight), generator=generator)]
    yield "all rows of one layer permuted", learner(permuted)


def measure(config: RunConfig) -> list[Row]:
    """Return a row for each learner, the floor first."""
    folder = model_folder(config.model)
    prompter = open_prompter(folder, config.rollout, config.task)
    task = load_task(config.task).without_long_prompts(prompter.fits)
    masters = load_masters(folder, torch.float32, Processes().device)
    aligned = learner_over(
        masters, config.scheme, config.dtype, LEARNERS["aligned"], config.layers, None
    )
    problems = task.problems("train", 0, config.rollout.prompts, config.seed)
    prompts = [prompter.prompt(problem) for problem in problems]
    sequences = []
    for problem in task.problems("heldout", 0, 8, config.seed):
        answer = prompter.tokenizer(problem.answer, add_special_tokens=False)["input_ids"]
        sequences.append([*prompter.prompt(problem).token_ids, *answer])
    with engine_of(aligned, folder, config.rollout, config.dtype) as engine:
        completions = engine.generate(prompts, Sampling.of(config.rollout, config.seed))
        pairs = zip(prompts, completions, strict=True)
        groups = [Group(prompt, tuple(answers), (0.0,) * len(answers)) for prompt, answers in pairs]
        batch = make_batch(groups, prompter.pad_token, config.learner.advantage)
        expected = torch.nn.utils.rnn.pad_sequence(
            [torch.tensor(row) for row in engine.logprobs(sequences)], batch_first=True
        )
        return _rows(aligned, masters, config, sequences, expected, batch)


def _rows(
    aligned: LowBitModel,
    masters: PreTrainedModel,
    config: RunConfig,
    sequences: list[list[int]],
    expected: torch.Tensor,
    batch: Batch,
) -> list[Row]:
    fixed = FixedSequences(aligned, sequences)
    own = scored(aligned, batch)
    floor = fixed.floor().mean_abs
    with aligned.context.other_roundings(OTHER_ROUNDINGS_SEED):
        moved = scored(aligned, batch)
    gate_floor = measure_mismatch(moved, own, batch.response_mask).mean_abs_log_w
    rows = [Row("the floor", floor, 1.0, gate_floor, 1.0)]

    def add(name: str, model: LowBitModel) -> None:
        canary = measure_mismatch(
            FixedSequences(model, sequences).logprobs(), expected, fixed.response_mask
        ).mean_abs
        gate = measure_mismatch(
            scored(model, batch), batch.sampler_logprobs, batch.response_mask
        ).mean_abs_log_w
        rows.append(Row(name, canary, canary / floor, gate, gate / gate_floor))

    add("right: the engine's kernels", aligned)
    add(
        "right: transformers' operators",
        learner_over(masters, config.scheme, config.dtype, RIGHT, (), None),
    )
    for words, kind in (
        ("the engine's kernels", LEARNERS["aligned"]),
        ("transformers' operators", RIGHT),
    ):
        for name, model in faulty(masters, config, kind):
            add(f"fault, {words}: {name}", model)
    return rows


def main() -> None:
    """Print a table for each scheme, and write all of them as JSON if `--json` is set."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.floor", description=__doc__)
    parser.add_argument("--config", help="configuration to take task and limits from")
    parser.add_argument("--model", default="smollm2-135m", help="folder, hub id or embedded name")
    parser.add_argument("--scheme", default="w8a8")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--task", default="gsm_symbolic")
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    quiet_libraries()
    config = chosen_config(
        arguments.config,
        {
            "model": arguments.model,
            "scheme": arguments.scheme,
            "dtype": arguments.dtype,
            "task.name": arguments.task,
            "rollout.prompts": "6",
            "rollout.samples": "4",
            "rollout.max_prompt_tokens": "512",
            "rollout.max_new_tokens": "64",
        },
    )
    rows = measure(config)
    print(
        f"{config.model}, {config.scheme}, {config.dtype}; bounds: {SAME_KERNELS_TOLERANCE:g} and"
        f" {OTHER_KERNELS_TOLERANCE:g} times the floor"
    )
    for row in rows:
        print(
            f"{row.learner:62s} canary {row.canary:8.5f} = {row.canary_over_floor:6.2f} floors, "
            f"gate {row.gate:8.5f} = {row.gate_over_floor:6.2f} floors"
        )
    if arguments.json:
        figures = [dataclasses.asdict(row) for row in rows]
        write_json(
            str(arguments.json),
            record(sys.argv[1:], figures, "python -m benchmarks.floor"),
        )


if __name__ == "__main__":
    main()
