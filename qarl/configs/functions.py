"""A user's function, by `package.module:function` or `path/to/file.py:function`; its faults with
file and line.
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
    """word: what the function is, in messages. takes: its signature, in words. error: raised where
    it is not found. noun: "function" or "class".
    """

    word: str
    takes: str
    error: type[InputError]
    noun: str = "function"


def load_function(kind: FunctionKind, spec: str) -> Callable[..., Any]:
    """The function that `spec` names; modules are looked for in the working folder first.

    Raises `kind.error` for a spec that cannot be read, and a module that is missing, raises, or
    lacks the function.
    """
    place, _, name = spec.rpartition(":")
    if not (place and name.isidentifier()):
        raise kind.error(
            f"{kind.word} {spec!r} must read file.py:{kind.noun} or package.module:{kind.noun}, the"
            f" {kind.noun} {kind.takes}"
        )
    module = (
        _load_file(kind, spec, Path(place))
        if place.endswith(".py")
        else _load_module(kind, spec, place)
    )
    function = getattr(module, name, None)
    if not callable(function):
        near = did_you_mean(name, [word for word, value in vars(module).items() if callable(value)])
        raise kind.error(f"{kind.word} {spec!r}: {place!r} has no {kind.noun} {name!r}{near}")
    return function


def in_words(error: BaseException) -> str:
    """What was raised, and in which file and line of the code that raised it."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"SyntaxError: {error.msg} ({error.filename}, line {error.lineno})"
    frames = traceback.extract_tb(error.__traceback__)
    where = (
        f" ({frames[-1].filename}, line {frames[-1].lineno}, in {frames[-1].name})"
        if frames
        else ""
    )
    said = f"{type(error).__name__}: {error}".removesuffix(": ")
    said = f"sys.exit({error.code!r})" if isinstance(error, SystemExit) else said
    size, _ = resource.getrlimit(resource.RLIMIT_DATA)
    short = size > 0 and (isinstance(error, MemoryError) or "allocate memory" in str(error))
    return (
        said
        + where
        + (
            f"; raise task.memory_limit {size / 2**30:g} GiB, or bound the function"
            if short
            else ""
        )
    )


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
    sys.modules[name] = module  # dataclasses and pickle look a module up by name
    try:
        with _searching(file.resolve().parent):
            module_spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise kind.error(f"{kind.word} {spec!r}: importing it raised {in_words(error)}") from error
    return module


def _load_module(kind: FunctionKind, spec: str, name: str) -> ModuleType:
    try:
        with _searching(Path.cwd()):
            importlib.invalidate_caches()  # a module written a moment ago is found too
            return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is not None and f"{name}.".startswith(f"{missing}."):
            raise kind.error(
                f"{kind.word} {spec!r}: there is no module {missing!r}, neither in the working"
                f" folder nor installed; give its file, as in path/to/mine.py:{kind.word}, or put"
                " its folder on PYTHONPATH"
            ) from error
        raise kind.error(f"{kind.word} {spec!r}: importing it raised {in_words(error)}") from error


@contextmanager
def _searching(folder: Path) -> Iterator[None]:
    """Modules are looked for in a folder first; afterwards, for imports within functions, in it
    last.
    """
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        if str(folder) not in sys.path:
            sys.path.append(str(folder))
