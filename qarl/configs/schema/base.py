"""What every configuration section is built from, and sections chosen by name. Imports neither
torch nor vllm.
"""

import os
import re
import typing
from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    model_validator,
)

from qarl.configs.words import did_you_mean, quoted

Dtype = Literal["bfloat16", "float16", "float32"]
Text = Annotated[str, Field(min_length=1)]

COMMA_SEPARATED = BeforeValidator(
    lambda v: [part.strip() for part in v.split(",")] if isinstance(v, str) else v
)
"""Of a list that may be written `A,B`; where items hold commas it is given as a list."""

LARGEST_SEED = 2**63 - 1
"""torch's generators take 64 bits."""


def at_home(path: str) -> str:
    """With the user's home for a leading `~`, also of each of several functions' files, and of the
    part behind hf:.
    """
    return re.sub(
        r"((?:^|,)\s*(?:hf:)?)(~[^/,]*)(?=/|$)",
        lambda at: at[1] + os.path.expanduser(at[2]),
        path,
    )


PathText = Annotated[Text, AfterValidator(at_home)]
"""A path, or what may be one: a name, or functions of files."""


class Section(BaseModel):
    """A frozen group of fields; unknown keys, infinities and NaN are errors. Text may look like a
    number.
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, coerce_numbers_to_str=True
    )

    @model_validator(mode="before")
    @classmethod
    def _numbers(cls, data: Any) -> Any:
        for name, field in cls.model_fields.items() if isinstance(data, dict) else ():
            kinds, value = _leaves(field.annotation), data.get(name)
            numeric = bool not in kinds and any(
                kind in (int, float) or type(kind) is int for kind in kinds
            )
            if numeric and any(
                type(part) is bool
                for part in (value if isinstance(value, list | tuple) else [value])
            ):
                # Python takes True for 1
                raise ValueError(f"{name} {str(value).lower()} must be a number")
        return data


def _leaves(annotation: Any) -> list[Any]:
    """What it is made of: classes, and the values of literals."""
    parts = typing.get_args(annotation)
    return [leaf for part in parts for leaf in _leaves(part)] if parts else [annotation]


class Choice(Section):
    """One alternative of a section whose `name` decides which other fields it has.

    So an option can only be given where it is used: one that the chosen alternative ignores is an
    error, and every alternative has defaults of its own.
    """

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """The values of `name` that choose this class."""
        return typing.get_args(cls.model_fields["name"].annotation)

    @classmethod
    def options(cls) -> list[str]:
        """Its fields besides `name`."""
        return [field for field in cls.model_fields if field != "name"]


def leaf_values(section: Section, prefix: str = "") -> dict[str, Any]:
    """Dotted path → value of every field in it that is no section itself."""
    values: dict[str, Any] = {}
    for name in type(section).model_fields:
        value = getattr(section, name)
        values |= (
            leaf_values(value, f"{prefix}{name}.")
            if isinstance(value, Section)
            else {prefix + name: value}
        )
    return values


def differing(one: Section, other: Section) -> dict[str, tuple[Any, Any]]:
    """Dotted path → both values of every field in which they differ; None in a section that lacks
    it.
    """
    before, after = leaf_values(one), leaf_values(other)
    paths = [path for path in {**before, **after} if before.get(path) != after.get(path)]
    return {path: (before.get(path), after.get(path)) for path in paths}


def alternatives(annotation: Any) -> tuple[type[Section], ...]:
    """The sections a field's annotation allows: several for a choice, one for a plain section, none
    for a value.
    """
    parts = typing.get_args(annotation) or (annotation,)
    sections = tuple(part for part in parts if isinstance(part, type) and issubclass(part, Section))
    return sections if len(sections) == len(parts) else ()


def chooser(kind: str, path: str, union: Any, default: str | None = None) -> Callable[[Any], Any]:
    """A validator that runs before the union's own: fills in the default name and refuses what does
    not fit.

    kind, path: what is chosen, and where, for messages. union: of `Choice` classes. default: the
    name where none is given; None where the enclosing section fills it in. Raises `ValueError` for
    an unknown name and for an option that the chosen alternative does not have.
    """
    by_name = {name: section for section in typing.get_args(union) for name in section.names()}

    def check(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        name = value.get("name", default)
        if name not in by_name:
            near = did_you_mean(str(name), by_name)
            raise ValueError(
                f"name {quoted(name)} is no {kind}; choose one of {', '.join(by_name)}{near}"
            )
        options = by_name[name].options()
        for option in value:
            if option not in ("name", *options):
                having = [n for n, section in by_name.items() if option in section.options()]
                where = f"is an option of {', '.join(having)}" if having else "is unknown"
                remedy = f", or give --{path}.name {having[-1]}" if having else ""
                takes = ", ".join(options) or "no options"
                raise ValueError(
                    f"{option!r} {where}, not of {kind} {name!r}, which takes {takes}; leave it"
                    f" out{remedy}"
                )
        return {**value, "name": name}

    return check


def pattern_fault(pattern: str) -> str | None:
    """What is wrong with a pattern over layer names (`quant.checkpoint.patterns`), after its
    quotation; or None.
    """
    kind, _, count = pattern.partition(":")
    if not pattern:
        return "is empty; write a layer's name, a shell pattern, re:EXPRESSION, first:K or last:K"
    if kind in ("first", "last") and ":" in pattern and not (count.isdecimal() and int(count) > 0):
        return f"counts decoder layers with {count!r}; write first:1, last:2, …"
    if kind == "re" and ":" in pattern:
        try:
            re.compile(count)
        except re.error as error:
            return f"is no regular expression: {error}"
    return None
