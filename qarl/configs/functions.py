"""Loader of a user's function, `package.module:function` or `path/to/file.py:function`. Errors are
shown with file and line.
"""

import importlib
import importlib.util
import resource
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from qarl.configs.errors import InputError
from qarl.configs.words import did_you_mean


@dataclass(frozen=True)
class FunctionKind:
    """Kind of user's function, for messages and errors."""

    word: str
    """Name of the kind, such as "reward"."""
    takes: str
    """Description of the signature."""
    error: type[InputError]
    """Error to raise if the function cannot be loaded."""
    noun: str = "function"
    """ "function" or "class"."""


def load_function(kind: FunctionKind, spec: str) -> Callable[..., Any]:
    """Return the function that `spec` names. Modules are searched in the working folder first.

    Raises `kind.error` if `spec` cannot be parsed, or if the module is missing, raises, or lacks
    the function.
    """
    source, _, name = spec.rpartition(":")
    if not (source and name.isidentifier()):
        raise kind.error(
            f"{kind.word} {spec!r} must read file.py:{kind.noun} or package.module:{kind.noun}, the"
            f" {kind.noun} {kind.takes}"
        )
    if source.endswith(".py"):
        module = _load_file(kind, spec, Path(source))
    else:
        module = _load_module(kind, spec, source)
    function = getattr(module, name, None)
    if not callable(function):
        near = did_you_mean(name, [word for word, value in vars(module).items() if callable(value)])
        raise kind.error(f"{kind.word} {spec!r}: {source!r} has no {kind.noun} {name!r}{near}")
    return function


def describe_error(error: BaseException) -> str:
    """Describe an error with the file and line of the code that raised it."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"SyntaxError: {error.msg} ({error.filename}, line {error.lineno})"
    frames = traceback.extract_tb(error.__traceback__)
    where = ""
    if frames:
        where = f" ({frames[-1].filename}, line {frames[-1].lineno}, in {frames[-1].name})"
    message = f"{type(error).__name__}: {error}".removesuffix(": ")
    if isinstance(error, SystemExit):
        message = f"sys.exit({error.code!r})"
    # task.memory_limit is set as this limit of the process
    limit, _ = resource.getrlimit(resource.RLIMIT_DATA)
    remedy = ""
    if limit > 0 and (isinstance(error, MemoryError) or "allocate memory" in str(error)):
        remedy = f"; raise task.memory_limit {limit / 2**30:g} GiB, or bound the function"
    return message + where + remedy


def _load_file(kind: FunctionKind, spec: str, file: Path) -> ModuleType:
    if not file.is_file():
        raise kind.error(
            f"{kind.word} {spec!r}: there is no file {str(file)!r} in {str(Path.cwd())!r}"
        )
    name = f"qarl_{kind.word}_{file.stem}"
    module_spec = importlib.util.spec_from_file_location(name, file.resolve())
    assert module_spec is not None
    assert module_spec.loader is not None
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[name] = module  # because dataclasses and pickle look a module up by name
    try:
        with _searching(file.resolve().parent):
            module_spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise kind.error(
            f"{kind.word} {spec!r}: importing it raised {describe_error(error)}"
        ) from error
    return module


def _load_module(kind: FunctionKind, spec: str, name: str) -> ModuleType:
    try:
        with _searching(Path.cwd()):
            importlib.invalidate_caches()  # to find a module that was just written
            return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is not None and f"{name}.".startswith(f"{missing}."):
            raise kind.error(
                f"{kind.word} {spec!r}: there is no module {missing!r}, neither in the working"
                f" folder nor installed; give its file, as in path/to/mine.py:{kind.word}, or put"
                " its folder on PYTHONPATH"
            ) from error
        raise kind.error(
            f"{kind.word} {spec!r}: importing it raised {describe_error(error)}"
        ) from error


@contextmanager
def _searching(folder: Path) -> Iterator[None]:
    """Search modules in `folder` first. Afterwards it is searched last, for imports within
    functions.
    """
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        if str(folder) not in sys.path:
            sys.path.append(str(folder))
