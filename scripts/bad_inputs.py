"""Give `qarl` generated bad inputs of every kind and check the contract of its errors.

    python scripts/bad_inputs.py [--count 300] [--seed 0]

Inputs run in this process. The contract: one message, exit status 2 (1 if something had begun), and
no files left behind. The script prints a table by kind and every input that breaks the contract;
its exit status is 1 if there is one. Nothing is trained: inputs that need an engine, or a model's
weights in memory, are tested in tests/qarl/test_refusals.py.
"""

import argparse
import contextlib
import io
import json
import os
import random
import struct
import sys
import tempfile
import typing
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from qarl.cli.main import main
from qarl.configs.flags import FLAGS
from qarl.configs.load import choice_sections, field_paths, shipped_names
from qarl.configs.schemes import SCHEME_NAMES
from qarl.configs.words import literals

LONGEST_MESSAGE = 5
"""Upper bound on the lines of a message.

The error of a reward is followed by the problem.
"""

Kind = Callable[[random.Random], list[str]]


def typo(word: str, rng: random.Random) -> str:
    """Return `word` with one typo; the result is never `word` itself.

    Two neighbours are swapped, or a letter is lost, doubled or replaced.
    """
    while True:
        index = rng.randrange(len(word))
        changed = rng.choice(
            (
                word[:index] + word[index + 1 :],
                word[:index] + word[index] + word[index:],
                word[:index] + rng.choice("qxzj") + word[index + 1 :],
                word[:index] + word[index : index + 2][::-1] + word[index + 2 :],
            )
        )
        if changed and changed != word and not changed.startswith("-"):
            return changed


def _train(*arguments: str) -> list[str]:
    return ["train", *arguments, "--dry-run"]


def _unknown_option(rng: random.Random) -> list[str]:
    known = [*FLAGS, *field_paths(), "config", "resume"]
    option = typo(rng.choice(known), rng)
    while option in known or option.startswith("task.options."):
        option = typo(rng.choice(known), rng)
    return _train(f"--{option}", "1")


def _wrong_value(rng: random.Random) -> list[str]:
    """Return an option with a value that its type does not accept, for a field chosen at random."""
    inside = tuple(f"{section}." for section in choice_sections())
    fields = {path: info for path, info in field_paths().items() if not path.startswith(inside)}
    path = rng.choice(
        [
            path
            for path, info in fields.items()
            if str not in _types(info.annotation) and path not in ("layers", "rollout.stop")
        ]
    )
    kinds = _types(fields[path].annotation)
    if literals(fields[path].annotation):
        value = typo(rng.choice(literals(fields[path].annotation)), rng) + "~"
    elif bool in kinds:
        value = rng.choice(("perhaps", "2", "[]", "0.5"))
    elif dict in kinds:
        value = rng.choice(("5", "word", "[1, 2]"))
    elif tuple in kinds:
        value = rng.choice(("[2, 3]", "0.9", "[0.9]", "[0.1, 0.2, 0.3]", "[a, b]", "[.inf, 0.1]"))
    else:
        value = rng.choice(
            (
                "ten",
                "-1e30",
                "-7",
                ".inf",
                "-.inf",
                ".nan",
                "1e400",
                "[1]",
                "{a: 1}",
                "1,5",
                "",
                " ",
                "0x",
                "~5",
            )
        )
    return _train(f"--{path}", value)


def _types(annotation: object) -> set[object]:
    parts = typing.get_args(annotation)
    origin = typing.get_origin(annotation)
    if origin in (dict, tuple):
        return {origin}
    return {kind for part in parts for kind in _types(part)} if parts else {annotation}


def _wrong_choice(rng: random.Random) -> list[str]:
    section, alternatives = rng.choice(list(choice_sections().items()))
    names = [name for section in alternatives for name in section.names()]
    name = typo(rng.choice(names), rng)
    return _train(f"--{section}.name", name if name not in names else name + "x")


def _misplaced_option(rng: random.Random) -> list[str]:
    return _train(
        *rng.choice(
            (
                ("--objective", "sapo", "--learner.objective.clip_low", "0.1"),
                ("--learner.kl.coefficient", "0.1"),
                ("--learner.lora.rank", "8"),
                ("--learner.correction.name", "none", "--learner.correction.cap", "2"),
                ("--learner.optimizer.rounding", "stochastic"),
                ("--learner.compute_dtype", "float32"),
                ("--learner.optimizer.warmup_steps", str(rng.randrange(200, 10**6))),
                ("--prompts", "2", "--mini-batches", str(rng.randrange(3, 99))),
                ("--learner.micro_batch_tokens", str(rng.randrange(1, 70))),
                ("--learner", str(rng.randrange(9))),
                ("--rollout.router_replay", "true"),
            )
        )
    )


def _said_twice(rng: random.Random) -> list[str]:
    flag, path = rng.choice([(flag, path) for flag, path in FLAGS.items() if flag != path])
    return _train(
        *rng.choice(
            (
                (f"--{flag}", "1", f"--{flag}", "2"),
                (f"--{flag}", "1", f"--{path}=2"),
                (f"--{path}", "1", f"--{path}", "2"),
            )
        )
    )


def _broken_line(rng: random.Random) -> list[str]:
    flag = rng.choice(list(FLAGS))
    return rng.choice(
        (
            ["train", f"--{flag}"],
            ["train", "--dry-run", f"-{flag}", "5"],
            ["train", "--dry-run", flag],
            [typo(rng.choice(("train", "export", "schemes", "compare")), rng) + "x"],
            ["compare", typo("schemes", rng)],
            ["export"],
            ["eval"],
            ["schemes", "--dtype", typo("bfloat16", rng) + "x"],
            ["train", "--learner.kernel", typo("reference", rng) + "x"],
            ["train", "--processes", rng.choice(("two", "1.5", ""))],
            ["train", "--dry-run=1"],
        )
    )


def _configuration_file(rng: random.Random) -> list[str]:
    text = rng.choice(
        (
            b"steps: 1\nsteps: 2\n",
            b"learner: 5\n",
            b"learner:\n",
            b"- 1\n",
            b"a: [\n",
            b"\xe9: 1\n",
            b"steps: ten\n",
            b"learner:\n  optimiser: {}\n",
            b"task: chain_sum\n",
            b"rollout: {prompts: -1}\n",
            b"\x00",
            b"a: &a [*a]\n",
            b"learner: {objective: grpo}\n",
            b"steps: {1: 2}\n",
            b"? [1]\n: 2\n",
            b"model: [a]\n",
            b"export: maybe\n",
            b"learner: {objective: {name: ppo}}\n",
            b"eval: null\n",
            b"layers: [5]\n",
            b"layers: [a=w9]\n",
            b"!!python/x 1",
        )
    )
    Path("bad.yaml").write_bytes(text)
    return (
        _train("--config", rng.choice(("bad.yaml", "./bad.yaml")))
        if rng.random() < 0.8
        else _train("--config", typo(rng.choice(shipped_names()), rng))
    )


def _scheme(rng: random.Random) -> list[str]:
    name = typo(rng.choice(SCHEME_NAMES), rng)
    name = name if name not in SCHEME_NAMES else name + "x"
    return (
        _train("--scheme", name) if rng.random() < 0.5 else _train("--layers", f"*.q_proj={name}")
    )


def _output(rng: random.Random) -> list[str]:
    return _train(
        "--output",
        rng.choice(("taken", "file/run", "/proc/no/run", "", "taken/", "x" * 300, "file")),
    )


def _model(rng: random.Random) -> list[str]:
    folder = Path("model")
    damages: tuple[Callable[[], object], ...] = (
        lambda: (folder / "config.json").write_text(
            rng.choice(("", "[]", "{", "5", "null", '"text"'))
        ),
        lambda: (folder / "config.json").unlink(),
        lambda: (folder / "tokenizer.json").unlink(),
        lambda: (folder / "tokenizer.json").write_text(rng.choice(("", "[]", "{"))),
        lambda: (folder / "model.safetensors").write_bytes(
            rng.choice((b"", b"\0" * 8, b"\xff" * 99, b"garbage"))
        ),
        lambda: (folder / "model.safetensors").unlink(),
        lambda: (folder / "model.safetensors").write_bytes(_tensors()[: -rng.randrange(1, 60)]),
        lambda: (folder / "model.safetensors.index.json").write_text(
            rng.choice(("{}", "[", '{"weight_map": {"a": "b"}}'))
        ),
        lambda: (folder / "config.json").write_text(
            '{"quantization_config": {"quant_method": "gptq"}}'
        ),
        lambda: (folder / "config.json").write_text(
            json.dumps({"max_position_embeddings": rng.randrange(1, 70)})
        ),
    )
    if rng.random() < 0.7:
        rng.choice(damages)()
        return _train("--config", "tiny-qwen3", "--model", "model")
    return _train(
        "--model",
        rng.choice(
            (
                typo("tiny-qwen3", rng) + "x",
                "file",
                "taken",
                "./nope",
                "/nope",
                "a/b/c",
                "Qwen3-8B",
                "",
                "~/nope",
            )
        ),
    )


def _task(rng: random.Random) -> list[str]:
    fine = {"question": "1 + 1 =", "answer": "2"}
    lines = rng.choice(
        (
            b"",
            b"\n\n",
            b"{\n",
            b"[1]\n",
            b"5\n",
            b'{"question": "1"}\n',
            b'{"answer": "1"}\n',
            b"\xff\xfe\n",
            json.dumps({**fine, "answer": 0.5}).encode(),
            json.dumps({**fine, "split": "test"}).encode(),
            json.dumps({**fine, "split": "train"}).encode(),
            json.dumps({**fine, "split": "heldout"}).encode(),
            b"\n".join(json.dumps({**fine, "split": s}).encode() for s in ("train", "heldout")),
            json.dumps({**fine, "question": ["a"]}).encode(),
        )
    )
    Path("bad.jsonl").write_bytes(lines)
    other = ("nope.jsonl", "x.csv", "x.json", "owner/name", "taken", "gsm8k!", "")
    return _train("--task", "bad.jsonl" if rng.random() < 0.6 else rng.choice(other))


def _reward(rng: random.Random) -> list[str]:
    body = rng.choice(
        (
            "def reward(problem, text):\n    return []\n",
            "def reward(problem, text):\n    return 'x'\n",
            "def reward(problem, text):\n    1 / 0\n",
            "def reward(problem, text):\n    raise SystemExit(3)\n",
            "def reward(p):\n    return 1.0\n",
            "def reward(:\n",
            "reward = 5\n",
            "def reward(problem, text):\n    return float('nan')\n",
            "def reward(problem, text):\n    return 1e300\n",
            "import no_such_thing\n",
            "import sys\nsys.exit(4)\n",
            "raise KeyError('x')\n",
            "def other(problem, text):\n    return 1.0\n",
            "\0",
        )
    )
    Path("bad_reward.py").write_text(body)
    good = ("--task", "good.jsonl", "--reward")
    if rng.random() < 0.75:
        return _train(*good, "bad_reward.py:reward")
    return _train(
        *good,
        rng.choice(
            (
                "nope:f",
                "nope.py:f",
                "bad_reward",
                ":",
                "a:b:c",
                "",
                "bad_reward.py:",
                "json:dumps:",
            )
        ),
    )


def _run_folder(rng: random.Random) -> list[str]:
    return rng.choice(
        (
            ["train", "--resume", rng.choice(("nope", "taken", "file", ""))],
            ["train", "--resume", "taken", "--config", "immediate-eos"],
            ["train", "--resume", "run", "--output", "else"],
            ["train", "--resume", "run", "--scheme", "w8a8"],
            ["train", "--resume", "run", "--steps", str(rng.randrange(1, 8))],
            ["train", "--resume", "broken"],
            ["train", "--resume", "newer"],
            ["export", rng.choice(("nope", "taken", "broken", "newer")), "-o", "out"],
            ["export", "run", "-o", rng.choice(("taken", "file", "file/x", "run"))],
            ["export", "run", "-o", "out", "--scheme", "w4a16"],
            ["eval", "run", "--problems", rng.choice(("0", "-3", "many", "1e3"))],
            ["eval", "run", "--json", rng.choice(("no/such/x.json", "taken"))],
            ["eval", "run", "--max-new-tokens", rng.choice(("0", "-1", "x"))],
            ["eval", rng.choice(("./nope", "run/nope")), "--problems", "4"],
            ["eval", "run", "--task.options", rng.choice(("5", "[", "word"))],
        )
    )


KINDS: tuple[Kind, ...] = (
    _unknown_option,
    _wrong_value,
    _wrong_choice,
    _misplaced_option,
    _said_twice,
    _broken_line,
    _configuration_file,
    _scheme,
    _output,
    _model,
    _task,
    _reward,
    _run_folder,
)


def _tensors() -> bytes:
    header = json.dumps({"w": {"dtype": "F32", "shape": [4, 4], "data_offsets": [0, 64]}}).encode()
    return struct.pack("<Q", len(header)) + header + bytes(64)


def furnish(place: Path) -> None:
    """Write the files that inputs refer to.

    They are a model's files, valid questions, a finished run, and runs whose config is damaged or
    newer.
    """
    (place / "taken").mkdir()
    (place / "file").write_text("")
    (place / "model").mkdir()
    (place / "model" / "config.json").write_text('{"max_position_embeddings": 512}')
    (place / "model" / "tokenizer.json").write_text("{}")
    (place / "model" / "model.safetensors").write_bytes(_tensors())
    questions = ({"question": f"{i} + 1 =", "answer": str(i + 1)} for i in range(64))
    (place / "good.jsonl").write_text("".join(json.dumps(row) + "\n" for row in questions))
    for name, text in (
        ("run", "steps: 8\n"),
        ("broken", "steps: [\n"),
        ("newer", "future: 1\n"),
    ):
        checkpoint = place / name / "checkpoints" / "step-000008"
        checkpoint.mkdir(parents=True)
        (checkpoint / "manifest.json").write_text('{"step": 8, "sha256": {}}')
        (place / name / "config.yaml").write_text(text)


def _listing(folder: Path) -> dict[str, int]:
    files = (path for path in folder.rglob("*") if "__pycache__" not in path.parts)
    return {str(path): path.stat().st_size for path in files}


def faults(arguments: list[str], place: Path) -> list[str]:
    """Return how `qarl ARGUMENTS` breaks the contract; empty if it does not."""
    out = io.StringIO()
    err = io.StringIO()
    before = _listing(place)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            status = main(arguments)
    except BaseException as error:
        return [f"{type(error).__name__} escapes: {error}"]
    message = err.getvalue().strip()
    breaches = [] if status in (1, 2) else [f"exit status {status}"]
    if not message or len(message.splitlines()) > LONGEST_MESSAGE or len(message) > 2000:
        breaches.append(
            f"a message of {len(message.splitlines())} lines and {len(message)} characters"
        )
    foreign = (
        "Traceback",
        "validation error",
        "Input should",
        "usage: qarl [",
        "expected one argument",
        "pydantic",
    )
    breaches += [f"speaks of {word!r}" for word in foreign if word in message]
    if _listing(place) != before:
        breaches.append("leaves something behind")
    return [f"{fault}: {message[:200]}" for fault in breaches]


def try_all(
    count: int,
    seed: int,
) -> dict[str, list[tuple[list[str], list[str]]]]:
    """Run `count` inputs, taking the kinds in turn.

    Returns kind → pairs of an input and how it breaks the contract.
    """
    tried: dict[str, list[tuple[list[str], list[str]]]] = {}
    for kind in KINDS:
        tried[kind.__name__[1:]] = []
    original = Path.cwd()
    for index in range(count):
        kind = KINDS[index % len(KINDS)]
        rng = random.Random(f"{seed}/{index}")
        with tempfile.TemporaryDirectory() as folder:
            furnish(Path(folder))
            os.chdir(folder)
            try:
                arguments = kind(rng)
                breaches = faults(arguments, Path(folder))
                tried[kind.__name__[1:]].append((arguments, breaches))
            finally:
                os.chdir(original)
    return tried


def _report() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    known = parser.parse_args()
    tried = try_all(known.count, known.seed)
    broken: Counter[str] = Counter()
    for kind, inputs in tried.items():
        broken[kind] = sum(bool(breaches) for _, breaches in inputs)
    print(f"{'kind':<20} {'inputs':>6} {'refused well':>12}")
    for kind, inputs in tried.items():
        print(f"{kind:<20} {len(inputs):>6} {len(inputs) - broken[kind]:>12}")
    print(f"{'all':<20} {known.count:>6} {known.count - broken.total():>12}")
    for inputs in tried.values():
        for arguments, breaches in inputs:
            for fault in breaches:
                print(f"\n{arguments}\n  {fault}")
    return int(broken.total() > 0)


if __name__ == "__main__":
    sys.exit(_report())
