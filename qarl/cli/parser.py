"""argparse, in our words: one line that names the value, what is allowed and the nearest, as an error of ours."""

import argparse
import re
import textwrap
from collections.abc import Sequence
from typing import Any, NoReturn

from qarl.configs.errors import InputError
from qarl.configs.flags import FLAGS
from qarl.configs.load import field_paths
from qarl.configs.words import did_you_mean

_NEGATIVE = re.compile(r"-(\d|\.\d|\.?inf|\.?nan)", re.IGNORECASE)
_KINDS = {"int": "a whole number", "float": "a number"}


class UsageError(InputError):
    """A command line that cannot be read."""

    heading = "usage"


class Parser(argparse.ArgumentParser):
    """Raises `UsageError` where argparse would print its usage and exit, and for an option that is given twice."""

    def __init__(self, *arguments: Any, **settings: Any):
        super().__init__(*arguments, **{"formatter_class": _Formatter, **settings})
        self.register("action", None, _Once)
        self.register("action", "store", _Once)

    def error(self, message: str) -> NoReturn:
        """In our words what argparse says in its own."""
        raise UsageError(f"{self._in_words(message)} (`{self.prog} --help` lists what it takes)")

    def _in_words(self, message: str) -> str:
        argument, _, fault = message.removeprefix("argument ").partition(": ")
        if "expected one argument" in fault:
            return f"option {argument} needs a value"
        if "ignored explicit argument" in fault:
            return f"option {argument} takes no value"
        missing = re.fullmatch(r"the following arguments are required: (.+)", message)
        if missing:
            return f"{self.prog} needs {missing[1]}"
        kind = re.fullmatch(r"invalid (\w+) value: (.+)", fault)
        if kind:
            return f"{argument} {kind[2]} must be {_KINDS.get(kind[1], kind[1])}"
        choice = re.fullmatch(r"invalid choice: (.+?) \(choose from (.+)\)", fault)
        if choice:
            words = [word.strip().strip("'") for word in choice[2].split(",")]
            near = did_you_mean(choice[1].strip("'"), words)
            return f"{argument} {choice[1]} must be one of {', '.join(words)}{near}"
        return f"{argument} {fault}" if fault else message


class _Formatter(argparse.HelpFormatter):
    """Wraps between words alone: argparse would part `--max-model-len` at a hyphen."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False, break_long_words=False)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n".join(indent + line for line in self._split_lines(text, width - len(indent)))


class _Once(argparse.Action):
    """Stores one value; a second one is an error, where argparse lets the last win."""

    def __init__(self, *arguments: Any, **settings: Any):
        super().__init__(*arguments, **settings)
        if self.nargs == 0:
            raise ValueError("an option that stores takes a value")

    def __call__(self, parser: argparse.ArgumentParser, namespace: Any, values: Any, option_string: str | None = None):
        """See the class."""
        given = vars(namespace).setdefault("_given", set())
        if option_string and self.dest in given:
            raise UsageError(f"option {option_string} is given twice, the second time with {values!r}; give it once")
        given.add(self.dest)
        setattr(namespace, self.dest, values)


def readable(arguments: Sequence[str]) -> list[str]:
    """The command line as argparse reads it: `--lr -1e-3` as `--lr=-1e-3` (argparse takes what follows for a flag),
    `--rollout.top_p 0.9` as `--rollout.top_p=0.9` (it does not know fields of the configuration, and takes what follows
    for CONFIG or another positional argument), `help` and `version` as options."""
    joined: list[str] = []
    for item in arguments:
        option = joined[-1] if joined else ""
        open_option = len(option) > 2 and option.startswith("--") and "=" not in option
        if open_option and (_NEGATIVE.match(item) or (_is_field(option[2:]) and not item.startswith("--"))):
            joined[-1] = f"{option}={item}"
        else:
            joined.append(item)
    if joined[:1] == ["help"]:
        return [*joined[1:], "--help"]
    return ["--version", *joined[1:]] if joined[:1] in (["version"], ["-V"]) else joined


def _is_field(name: str) -> bool:
    return "." in name or name in FLAGS or name in field_paths()
