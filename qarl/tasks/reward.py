"""A user's reward function: found by `package.module:function` or `path/to/file.py:function`, and its faults told with
file and line."""

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import cast

from configs.words import did_you_mean
from qarl.tasks.base import Reward, TaskError, in_words


def import_reward(spec: str) -> Reward:
    """The function that `spec` names; modules are looked for in the working folder first.

    Raises:
        TaskError: a spec that cannot be read, a module that is missing or raises, or has no such function.
    """
    place, _, name = spec.rpartition(":")
    if not (place and name.isidentifier()):
        raise TaskError(
            f"reward {spec!r} must read file.py:function or package.module:function, the function taking "
            "(problem, text) and returning a number"
        )
    module = _load_file(spec, Path(place)) if place.endswith(".py") else _load_module(spec, place)
    function = getattr(module, name, None)
    if not callable(function):
        near = did_you_mean(name, [word for word, value in vars(module).items() if callable(value)])
        raise TaskError(f"reward {spec!r}: {place!r} has no function {name!r}{near}")
    return cast(Reward, function)


def _load_file(spec: str, file: Path) -> ModuleType:
    if not file.is_file():
        raise TaskError(f"reward {spec!r}: there is no file {str(file)!r}")
    name = f"qarl_reward_{file.stem}"
    found = importlib.util.spec_from_file_location(name, file.resolve())
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module  # dataclasses and pickle look a module up by name
    try:
        with _searching(file.resolve().parent):
            found.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise TaskError(f"reward {spec!r}: importing it raised {in_words(error)}") from error
    return module


def _load_module(spec: str, name: str) -> ModuleType:
    try:
        with _searching(Path.cwd()):
            importlib.invalidate_caches()  # a module written a moment ago is found too
            return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise TaskError(f"reward {spec!r}: importing it raised {in_words(error)}") from error
        raise TaskError(
            f"reward {spec!r}: there is no module {error.name!r}, neither in the working folder nor installed; give "
            "its file, as in path/to/mine.py:reward, or put its folder on PYTHONPATH"
        ) from error
    except (Exception, SystemExit) as error:
        raise TaskError(f"reward {spec!r}: importing it raised {in_words(error)}") from error


class _searching:  # noqa: N801 (a context manager, read as a verb)
    """Modules are looked for in a folder first; afterwards, for imports within functions, in it last."""

    def __init__(self, folder: Path):
        self._folder = str(folder)

    def __enter__(self) -> None:
        sys.path.insert(0, self._folder)

    def __exit__(self, *_: object) -> None:
        sys.path.remove(self._folder)
        if self._folder not in sys.path:
            sys.path.append(self._folder)
