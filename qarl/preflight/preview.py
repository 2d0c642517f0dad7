"""Preview of a run by `qarl check`, before it begins.

It shows the model, kernels, one prompt as the model sees it, the reward of a right and of a wrong
answer, lengths, memory and disk.
"""

from collections.abc import Iterator
from pathlib import Path

from qarl.configs.errors import ConfigError
from qarl.configs.schema.run import RunConfig
from qarl.configs.words import quoted, sized
from qarl.planning.machine import this_machine
from qarl.planning.plan import make_plan
from qarl.planning.shapes import sizes_of
from qarl.planning.words import one_line
from qarl.preflight.disk import (
    checkpoint_bytes,
    export_bytes,
    exports_of,
    free_disk,
    parameters_of,
)
from qarl.preflight.special_tokens import special_tokens
from qarl.quant.checkpoint.folder import read_config
from qarl.quant.kernels.supported import kept_support
from qarl.quant.schemes import COMPUTE_DTYPES
from qarl.report.finding import Finding
from qarl.run.policy import Architecture, RunInputs
from qarl.run.prompts import Prompter
from qarl.tasks import Problem, Response, Task, solution_of
from qarl.tasks.rewards import no_signal

_MEASURED_PROBLEMS = 512
"""Number of problems whose lengths are measured."""

_LONGEST_SHOWN = 2000
"""Upper bound on the characters of the prompt that is shown."""

_JUDGED = ("reference answer", "the same in a box", "a wrong answer", "that in a box")
"""Names of the answers that the reward judges."""


def preview(config: RunConfig, inputs: RunInputs) -> Iterator[Finding]:
    """Yield all findings, in the order to read them.

    inputs: what the checks of the configuration returned. Raises `RewardError` for a reward that
    fails.
    """
    folder = inputs.folder
    task = inputs.task
    prompter = inputs.prompter
    drawn = task.problems("train", 0, _MEASURED_PROBLEMS, config.seed)
    # A table of fewer problems is drawn from more than once.
    problems = list({problem.id: problem for problem in drawn}.values())
    yield _model(config, folder)
    yield Finding("note", "kernels", _kernels(config))
    yield Finding("note", "task", task.describe() or f"{task.name}: built in, without end")
    size = task.size("train")
    if size is not None and size < config.rollout.prompts:
        text = (
            f"a step asks {config.rollout.prompts} prompts, and there are {size}: they come again"
            " in it (--prompts)"
        )
        yield Finding("note", "task", text)
    yield from _prompt(prompter, problems[0])
    yield from special_tokens(folder, prompter, problems, config.rollout.stop)
    yield from _judged(task, problems)
    yield from _lengths(config, folder, prompter, problems)
    yield _memory(config)
    yield _disk(config, inputs.architecture)


def _model(config: RunConfig, folder: Path) -> Finding:
    """Return the model's type and size."""
    tree = read_config(folder)
    positions = tree.get("max_position_embeddings")
    used = ""
    if isinstance(positions, int):
        used = f"; {config.rollout.longest} of its {positions} positions are asked for"
    return Finding(
        "note",
        "model",
        f"{config.model}: {tree.get('model_type')}, {parameters_of(folder):,} parameters{used}",
    )


def _kernels(config: RunConfig) -> str:
    """Return the kernel of each scheme in words, and the KV cache's dtype if it is quantized."""
    names = dict.fromkeys((config.scheme, *(rule.scheme for rule in config.layers)))
    dtype = COMPUTE_DTYPES[config.dtype]
    parts = [f"{name} in {config.dtype}: {kept_support(name, dtype).kernel}" for name in names]
    if config.quantization.kv_cache:
        parts.append(f"keys and values in {config.quantization.kv_cache}")
    return "; ".join(parts)


def _prompt(prompter: Prompter, problem: Problem) -> Iterator[Finding]:
    tokens = len(prompter.prompt(problem).token_ids)
    text = prompter.text(problem)
    cut = "…" if len(text) > _LONGEST_SHOWN else ""
    yield Finding(
        "note",
        f"problem {problem.id}, as the model sees it ({tokens} tokens)",
        text[:_LONGEST_SHOWN] + cut,
    )


def _judged(task: Task, problems: list[Problem]) -> Iterator[Finding]:
    """Yield reward and verdict of a right answer and of another problem's, bare and boxed."""
    if task.reward is no_signal:
        yield Finding("note", "reward", "the environment's, which speaks with the policy first")
        return
    problem = problems[0]
    if not problem.answer:
        empty = [Response(problem, "")]
        counted = "right" if task.correct(empty)[0] else "wrong"
        yield Finding(
            "note",
            "reward",
            f"of an empty completion: {task.rewards(empty)[0]}, which counts as {counted}",
        )
        return
    answer = problem.answer.strip()
    other = next((p for p in problems if p.answer.strip() != answer), None)
    wrong = f"{problem.answer}0" if other is None else other.answer
    texts = [
        solution_of(problem),
        f"\\boxed{{{problem.answer}}}",
        wrong,
        f"\\boxed{{{wrong}}}",
    ]
    responses = [Response(problem, text) for text in texts]
    rewards = task.rewards(responses)
    verdicts = task.correct(responses)
    for kind, response, reward, verdict in zip(_JUDGED, responses, rewards, verdicts, strict=True):
        signal = "no signal" if reward is None else f"reward {reward:g}"
        counted = "right" if verdict else "wrong"
        yield Finding("note", kind, f"{quoted(response.text)}: {signal}, counts as {counted}")
    right_rewards = [r for r in rewards[:2] if r is not None]
    wrong_rewards = [r for r in rewards[2:] if r is not None]
    if not right_rewards or (wrong_rewards and max(right_rewards) <= max(wrong_rewards)):
        # A reward that judges the text alone gives the same for another problem.
        elsewhere = [] if other is None else task.rewards([Response(other, text) for text in texts])
        if len(set(rewards)) > 1 and rewards == elsewhere:
            yield Finding(
                "note",
                "reward",
                "does not look at the answer: the same text gets the same anywhere",
            )
        else:
            text = "gives the reference answer no more than a wrong one"
            yield Finding("warning", "reward", text, "correct the function that --reward names")
    if not any(verdicts[:2]) or any(verdicts[2:]):
        text = "does not tell the reference answer from a wrong one"
        yield Finding("warning", "accuracy", text, "correct what --task.correct names")


def _lengths(
    config: RunConfig, folder: Path, prompter: Prompter, problems: list[Problem]
) -> Iterator[Finding]:
    """Yield how long prompts and reference answers are, against the limits."""
    prompts = sorted(prompter.lengths(problems))
    tokenizer_eos = prompter.tokenizer.eos_token_id
    model_eos = read_config(folder).get("eos_token_id")
    if tokenizer_eos is None and model_eos is None and not config.rollout.stop:
        yield Finding(
            "warning",
            "end",
            "neither tokenizer nor config.json has an EOS token, so every completion is cut off",
            "set eos_token_id in config.json, or give --rollout.stop TEXT",
        )
    answers = sorted(
        len(prompter.tokenizer(solution_of(p), add_special_tokens=False)["input_ids"])
        for p in problems
    )
    for name, lengths, option in (
        ("prompts", prompts, "rollout.max_prompt_tokens"),
        ("reference answers", answers, "rollout.max_new_tokens"),
    ):
        if not any(lengths):
            continue  # the problems have no reference answers
        limit = getattr(config.rollout, option.partition(".")[2])
        spread = (
            f"{lengths[0]} to {lengths[-1]} tokens, {lengths[len(lengths) // 2]} at the median;"
            f" {limit} allowed"
        )
        beyond = sum(length > limit for length in lengths)
        if beyond:
            yield Finding(
                "warning",
                name,
                f"{spread}, which {beyond} of {len(lengths)} exceed",
                f"raise --{option}",
            )
        else:
            yield Finding("note", name, spread)


def _memory(config: RunConfig) -> Finding:
    """Plan the memory of one process; `qarl plan` shows the parts, and several processes."""
    try:
        plan = make_plan(config, *sizes_of(config.model), this_machine(), 1)
    except ConfigError as error:
        return Finding("note", "memory", f"not planned: {error}")
    return Finding("note" if plan.fits else "warning", "memory", one_line(plan))


def _disk(config: RunConfig, architecture: Architecture) -> Finding:
    """Compare the disk space that a run needs with the free space.

    A new checkpoint is written before an old one is removed.
    """
    keep = config.checkpoint.keep
    exports = exports_of(config)
    needed = checkpoint_bytes(config, architecture.folder) * (keep + 1)
    needed += export_bytes(config, architecture) * len(exports)
    disk, free = free_disk(config)
    contents = [f"{keep} checkpoints", "one more while it is written", *exports]
    text = f"{sized(needed)} for {', '.join(contents)}; "
    level = "warning" if needed > free else "note"
    return Finding(level, "disk", f"{text}{sized(free)} free at {str(disk)!r}")
