"""Digests of a run's inputs: what it reads besides its configuration, kept with its checkpoints.

They are the rows of its questions, the source of the functions that it calls, and the files of its
model. A resumed run compares them, because with other inputs it is another run. A function's source
is its file and the modules beside it that it imports, in turn. Data that a function opens by itself
and installed packages are not among them.
"""

import ast
import hashlib
import json
import os
import re
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from qarl.configs.schema.objectives import OwnConfig
from qarl.configs.schema.run import RunConfig
from qarl.report.run_folder import ChangedInputsError, RunFolder
from qarl.report.startup import say
from qarl.run.checkpoint import checkpoint_inputs, list_checkpoints
from qarl.run.policy import model_folder
from qarl.tasks import Task
from qarl.tasks.rows import short_name
from qarl.tasks.table import Table

CHANGED = "inputs_changed"
"""Entry of environment.json: a line for every time that a run went on with other inputs."""
_MODEL_FILES = (
    *("config.json", "generation_config.json", "*.py", "*.safetensors", "pytorch_model*.bin"),
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json"),
    *("added_tokens.json", "vocab.json", "merges.txt", "chat_template.*"),
    *("preprocessor_config.json", "processor_config.json"),
)
"""Files of a model's folder on which tokens, prompts or weights depend."""
_LARGEST_COMPLETE = 64 * 2**20
"""Files of up to this many bytes are digested completely, larger ones by samples."""
_SAMPLE_COUNT = 16
"""Number of samples of a large file. Training changes the bytes of all of them."""
_SAMPLE_BYTES = 64 * 2**10
"""Bytes of a sample."""
_FUNCTION = re.compile(r"\s*(?P<source>[^:,=]+):[^:,]+")
"""Matches each function of a list such as `mine.py:a=1, mine.py:b=0.2`."""

InputDigests = dict[str, str]
"""Name of an input, such as "task.reward mine.py" → SHA-256."""


def digest_inputs(config: RunConfig, task: Task) -> InputDigests:
    """Return the digests of a run's inputs as they are now.

    task: the configuration's task, without the problems whose prompts are too long.
    """
    digests = {name: _digest(file) for name, file in _files(config).items()}
    if isinstance(task.source, Table):
        digests[f"questions {short_name(task.name)}"] = _digest_rows(task.source)
    return digests


def require_same_inputs(
    config: RunConfig, folder: RunFolder, digests: InputDigests, allow_changes: bool
) -> None:
    """Compare a run's inputs with those that its newest checkpoint was made from.

    A checkpoint of an earlier version has no digests, and a line says so. allow_changes: go on if
    inputs have changed, and record it in environment.json. Raises `ChangedInputsError`, which names
    them, unless they may.
    """
    newest = list_checkpoints(folder.path / "checkpoints")[-1]
    before = checkpoint_inputs(newest)
    if before is None:
        say(
            f"checkpoint {newest.name} holds no digests of the run's inputs, as an earlier version"
            " wrote it: whether questions, functions and model are still the same was not compared"
        )
        return
    changes = list(_changes(before, digests, _files(config)))
    if not changes:
        return
    first = int(newest.name.removeprefix("step-")) + 1
    written = _moment(newest / "manifest.json")
    if not allow_changes:
        listed = "".join(f"\n  {change}" for change in changes)
        raise ChangedInputsError(
            f"inputs of run {str(folder.path)!r} are not those of checkpoint {newest.name}, written"
            f" {written}:{listed}\nput the earlier ones back, start a new run, or go on with these"
            f" from step {first} by --allow-changed-inputs"
        )
    line = f"from step {first} on: {'; '.join(changes)}"
    say(f"inputs changed {line}")
    file = folder.path / "environment.json"
    environment = json.loads(file.read_text()) if file.is_file() else {}
    # a resumed run that ended before its next checkpoint has said so already
    noted = environment.get(CHANGED, [])
    earlier = [each for each in noted if each.split(":")[0] not in line]
    environment[CHANGED] = [*earlier, line]
    file.write_text(json.dumps(environment, indent=2) + "\n")


def _changes(
    before: InputDigests,
    now: InputDigests,
    files: dict[str, Path],
) -> Iterator[str]:
    for name in sorted({*before, *now}):
        if name not in now:
            yield f"{name}: no longer there"
        elif name not in before:
            yield f"{name}: was not there"
        elif before[name] != now[name]:
            modified = f", modified {_moment(files[name])}" if name in files else ""
            yield f"{name}: changed{modified}"


def _moment(file: Path) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(file.stat().st_mtime))


def _files(config: RunConfig) -> dict[str, Path]:
    """Return the files of a run's functions and model, by the names of inputs."""
    task = config.task
    specs = {
        "task.reward": task.reward,
        "task.correct": task.correct,
        "task.rollout": task.rollout,
        "task.environment": task.environment,
    }
    if isinstance(config.learner.objective, OwnConfig):
        specs["learner.objective.function"] = config.learner.objective.function
    files: dict[str, Path] = {}
    for option, spec in specs.items():
        for match in _FUNCTION.finditer(spec or ""):
            files |= {f"{option} {name}": file for name, file in _sources(match["source"]).items()}
    folder = model_folder(config.model)
    for pattern in _MODEL_FILES:
        files |= {f"model {file.name}": file for file in sorted(folder.glob(pattern))}
    return files


def _digest(file: Path) -> str:
    """Return the SHA-256 of a file's bytes, or of its size and samples of them."""
    with file.open("rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        if size <= _LARGEST_COMPLETE:
            return hashlib.file_digest(stream, "sha256").hexdigest()
        digest = hashlib.sha256(str(size).encode())
        for index in range(_SAMPLE_COUNT):
            stream.seek(index * (size - _SAMPLE_BYTES) // (_SAMPLE_COUNT - 1))
            digest.update(stream.read(_SAMPLE_BYTES))
        return digest.hexdigest()


def _digest_rows(table: Table) -> str:
    digest = hashlib.sha256()
    for split, problems in table.by_split.items():
        for problem in problems:
            fields = {name: value for name, value in vars(problem).items() if name != "pictures"}
            row = [split, fields, *(picture.digest for picture in problem.pictures)]
            digest.update(json.dumps(row, sort_keys=True, default=_as_json).encode() + b"\n")
    return digest.hexdigest()


def _as_json(value: Any) -> Any:
    """Return what stands for a value in a row's digest, the same in every process."""
    if hasattr(value, "tolist"):
        return value.tolist()
    # others may show their address in memory
    plain = type(value).__module__ in ("datetime", "decimal", "uuid", "fractions", "builtins")
    return repr(value) if plain else type(value).__qualname__


def _sources(source: str) -> dict[str, Path]:
    """Return the files of a function's code by name: its own, and the modules that it imports from
    the same folder. Of an installed package only the function's own file.

    source: a file or the name of a module. Functions of QaRL itself have none.
    """
    if source.split(".")[0] == "qarl":
        return {}
    if source.endswith(".py"):
        root, first = Path(source).parent, Path(source)
    else:
        candidates = (
            (Path(folder or "."), _module_file(Path(folder or "."), source))
            for folder in (".", *sys.path)
        )
        root, first = next(((root, file) for root, file in candidates if file), (Path(), None))
    if first is None or not first.is_file():
        return {}
    installed = {Path(path).resolve() for path in sysconfig.get_paths().values()}
    sources: dict[str, Path] = {}
    pending = [first]
    while pending:
        file = pending.pop()
        name = os.path.relpath(file, root)
        if name not in sources:
            sources[name] = file
            if root.resolve() not in installed:
                pending += _imported(file, root)
    return sources


def _imported(file: Path, root: Path) -> list[Path]:
    """Return the files below `root` that a file of Python imports."""
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):  # whoever imports it says so
        return []
    package = file.relative_to(root).parent.parts
    names: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            outer = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join((*outer, *filter(None, [node.module])))
            names += [module, *(f"{module}.{alias.name}".lstrip(".") for alias in node.names)]
    # importing a.b.c runs the packages a and a.b
    paths = [name.split(".") for name in names if name]
    parts = [path for path in paths if path[0] != "qarl"]
    modules = set[str]()
    for path in parts:
        modules |= {".".join(path[:end]) for end in range(1, len(path) + 1)}
    files = (_module_file(root, module) for module in sorted(modules))
    return [each for each in files if each is not None]


def _module_file(root: Path, module: str) -> Path | None:
    """Return the file of a module below a folder, or None if it has none there."""
    path = root.joinpath(*module.split("."))
    candidates = (path.with_name(f"{path.name}.py"), path / "__init__.py")
    return next((file for file in candidates if file.is_file()), None)
