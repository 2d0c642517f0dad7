"""argparse, in our words: one line that names the value, what is allowed and the nearest, as an
error of ours.
"""

import argparse
import re
import sys
import textwrap
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from qarl.configs.errors import InputError
from qarl.configs.load import is_option
from qarl.configs.words import did_you_mean

_NEGATIVE = re.compile(r"-(\d|\.\d|\.?inf|\.?nan)", re.IGNORECASE)
_KINDS: dict[Any, str] = {int: "a whole number", float: "a number"}


class UsageError(InputError, heading="usage"):
    """A command line that cannot be read."""


class Parser(argparse.ArgumentParser):
    """Raises `UsageError` where argparse would print its usage and exit, and for an option that is
    given twice.

    What went wrong is taken from the action and its value, not from argparse's sentences, which
    change with Python's releases. A command says by `set_defaults` what runs it (`run`), whether
    fields of the configuration are options of it too (`fields`), and whether what follows -- is for
    vLLM (`engine`).
    """

    def __init__(self, *arguments: Any, **settings: Any):
        super().__init__(
            *arguments,
            **{
                "formatter_class": _Formatter,
                "exit_on_error": False,
                "allow_abbrev": False,
                **settings,
            },
        )
        self.set_defaults(fields=False, engine=False)
        self.register("action", None, _Once)
        self.register("action", "store", _Once)

    def parse_known_args(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, args: Any = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """As argparse's. Raises `UsageError`."""
        try:
            return super().parse_known_args(
                args if self._subparsers else self._joined(args or ()), namespace
            )
        except argparse.ArgumentError as error:
            name = error.argument_name
            if any(action.nargs == 0 and _name(action) == name for action in self._actions):
                self.error(f"option {name} takes no value")
            self.error(f"{name} {error.message}" if name else str(error))

    def _joined(self, arguments: Sequence[str]) -> list[str]:
        """`--lr -1e-3` as `--lr=-1e-3` (argparse takes what follows for a flag), `--rollout.top_p
        0.9` as `--rollout.top_p=0.9` (it does not know fields of the configuration, and takes what
        follows for CONFIG or another positional argument). Raises `UsageError` for a field where
        the command has none.
        """
        joined, option, field, fields = (
            list[str](),
            False,
            False,
            self.get_default("fields"),
        )
        # option, field: of the item before, while it has no value
        for item in arguments:
            if option and (_NEGATIVE.match(item) or (field and not item.startswith("--"))):
                joined[-1] += f"={item}"
                option = False
                continue
            name, equals, _ = item.partition("=")
            option = name.startswith("--") and not equals
            field = name.startswith("--") and name not in self._option_string_actions
            if field and not (fields and is_option(name[2:])):
                near = did_you_mean(name, self._option_string_actions, 0.8 if fields else 0.6)
                if near or not fields:  # else the configuration knows what is near
                    self.error(f"unknown option {name}{near}")
            joined.append(item)
        return joined

    def _parse_optional(self, arg_string: str) -> Any:
        # of a field, whose value with a space argparse takes for an argument
        name = arg_string.partition("=")[0]
        own = name in self._option_string_actions or not name.startswith("--")
        return super()._parse_optional(arg_string if own else name)

    def error(self, message: str) -> NoReturn:
        """Raise it as a `UsageError`."""
        missing = message.removeprefix("the following arguments are required: ")
        message = message if missing == message else f"{self.prog} needs {missing}"
        raise UsageError(f"{message} (`{self.prog} --help` lists what it takes)")

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        if not arg_string and action.nargs != argparse.PARSER:
            self.error(f"{_name(action)} is empty; give it a value or leave it out")
        try:
            return super()._get_value(action, arg_string)
        except argparse.ArgumentError:
            if action.type not in _KINDS:
                raise
            self.error(f"{_name(action)} {arg_string!r} must be {_KINDS[action.type]}")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        choices = list(action.choices or ())
        if choices and value not in choices:
            near = did_you_mean(str(value), choices)
            self.error(
                f"{_name(action)} {value!r} must be one of {', '.join(map(str, choices))}{near}"
            )

    def _match_argument(self, action: argparse.Action, arg_strings_pattern: str) -> int:
        try:
            return super()._match_argument(action, arg_strings_pattern)
        except argparse.ArgumentError:
            self.error(f"option {_name(action)} needs a value")


def _name(action: argparse.Action) -> str | None:
    return argparse.ArgumentError(action, "").argument_name


class _Formatter(argparse.HelpFormatter):
    """Wraps between words alone: argparse would part `--max-model-len` at a hyphen."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(
            " ".join(text.split()),
            width,
            break_on_hyphens=False,
            break_long_words=False,
        )

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n".join(indent + line for line in self._split_lines(text, width - len(indent)))


class _Once(argparse.Action):
    """Stores one value; a second one is an error, where argparse lets the last win."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: Any,
        values: Any,
        option_string: str | None = None,
    ):
        """See the class."""
        seen = vars(namespace).setdefault("_given", set())
        if option_string and self.dest in seen:
            raise UsageError(
                f"option {option_string} is given twice, the second time with {values!r}; give it"
                " once"
            )
        seen.add(self.dest)
        setattr(namespace, self.dest, values)


class PrintAndExit(argparse.Action):
    """An option that prints what `text` returns, and exits."""

    def __init__(self, *arguments: Any, text: Callable[[], str], **settings: Any):
        super().__init__(*arguments, nargs=0, default=argparse.SUPPRESS, **settings)
        self._text = text

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        """See the class."""
        sys.stdout.write(self._text() + "\n")
        parser.exit()


def normalized_argv(arguments: Sequence[str]) -> list[str]:
    """The command line with `help` and `version` as options."""
    if arguments[:1] == ["help"]:
        return [*arguments[1:], "--help"]
    return (
        ["--version", *arguments[1:]] if arguments[:1] in (["version"], ["-V"]) else list(arguments)
    )
