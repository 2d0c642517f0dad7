"""argparse with the project's errors: one line with the value, what is allowed, and the nearest
name.

argparse stays although it is overridden here in private methods, which `tests/qarl/test_help.py`
would show to have changed. cyclopts 5.5 was tried: an option of a section that was not chosen, such
as tbpo's `clip_low`, is dropped without a word or refused in pydantic's own three lines.
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
    """Parser that raises `UsageError` if argparse would print its usage and exit, and if an option
    is given twice.

    Messages are made from the action and its value, not from argparse's sentences, which change
    with Python's releases. A command declares by `set_defaults` the function that runs it (`run`),
    whether it takes fields of the configuration as options (`fields`), and whether it passes
    arguments after -- to vLLM (`engine`).
    """

    def __init__(self, *arguments: Any, **settings: Any):
        super().__init__(
            *arguments,
            **{
                "formatter_class": _Formatter,
                "exit_on_error": False,
                "allow_abbrev": False,
                "add_help": False,
                **settings,
            },
        )
        self.add_argument("-h", "--help", action="help", help="Show this help, and exit.")
        self.set_defaults(fields=False, engine=False)
        self.register("action", None, _Once)
        self.register("action", "store", _Once)

    def parse_known_args(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, args: Any = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """Parse as argparse does. Raises `UsageError`."""
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
        """Join options and values that argparse would not read as a pair.

        `--lr -1e-3` becomes `--lr=-1e-3`, because argparse takes -1e-3 for a flag. `--rollout.top_p
        0.9` becomes `--rollout.top_p=0.9`, because argparse does not know fields of the
        configuration and would take 0.9 for CONFIG or another positional argument. Raises
        `UsageError` for a field if the command takes none.
        """
        fields = self.get_default("fields")
        joined: list[str] = []
        # whether the previous item is an option, and a field, that still lacks its value
        option = False
        field = False
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
                # otherwise the configuration suggests the nearest field
                if near or not fields:
                    self.error(f"unknown option {name}{near}")
            joined.append(item)
        return joined

    def _parse_optional(self, arg_string: str) -> Any:
        # argparse takes --FIELD=VALUE with a space in the value for a positional argument, so a
        # field is shown to it without its value
        name = arg_string.partition("=")[0]
        own = name in self._option_string_actions or not name.startswith("--")
        return super()._parse_optional(arg_string if own else name)

    def error(self, message: str) -> NoReturn:
        """Raise `message` as a `UsageError`."""
        missing = message.removeprefix("the following arguments are required: ")
        message = message if missing == message else f"{self.prog} needs {missing}"
        raise UsageError(f"{message} (`{self.prog} --help` lists what it takes)")

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        if not arg_string and action.nargs != argparse.PARSER:
            self.error(f"{_name(action)} is empty; give it a value or omit it")
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
    """Formatter that breaks lines only between words. argparse would break `--max-model-len` at a
    hyphen. The help of a `FieldOption` ends with its default.
    """

    def _get_help_string(self, action: argparse.Action) -> str | None:
        text = super()._get_help_string(action)
        default = action.shown_default() if isinstance(action, FieldOption) else ""
        return f"{text} [{default.replace('%', '%%')}]" if default else text

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
    """Action that stores one value and refuses a second. argparse would let the last one win."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: Any,
        values: Any,
        option_string: str | None = None,
    ):
        """Store the value; refuse a second one."""
        seen = vars(namespace).setdefault("_given", set())
        if option_string and self.dest in seen:
            raise UsageError(
                f"option {option_string} is given twice, the second time with {values!r}; give it"
                " once"
            )
        seen.add(self.dest)
        setattr(namespace, self.dest, values)


class FieldOption(_Once):
    """Action of a field's short flag.

    shown_default: returns the default as text. It is called only when the help is shown, because
    the shipped configuration must be read for it.
    """

    def __init__(self, *arguments: Any, shown_default: Callable[[], str], **settings: Any):
        super().__init__(*arguments, **settings)
        self.shown_default = shown_default


class PrintAndExit(argparse.Action):
    """Action that prints the result of `text` and exits."""

    def __init__(
        self,
        *arguments: Any,
        text: Callable[[], str],
        **settings: Any,
    ):
        super().__init__(*arguments, nargs=0, default=argparse.SUPPRESS, **settings)
        self._text = text

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        """Print the text and exit."""
        sys.stdout.write(self._text() + "\n")
        parser.exit()


def normalized_argv(arguments: Sequence[str]) -> list[str]:
    """Return the command line with the words `help` and `version` turned into options."""
    if arguments[:1] == ["help"]:
        return [*arguments[1:], "--help"]
    if arguments[:1] == ["version"]:
        return ["--version", *arguments[1:]]
    return list(arguments)
