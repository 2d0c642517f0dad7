"""Base classes of configuration sections, and sections chosen by name. Imports neither torch nor
vllm.
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
"""Validator of a list that may be written `A,B`. If items contain commas, a list must be given."""

LARGEST_SEED = 2**63 - 1
"""Largest seed, because torch's generators take 64 bits."""


def expand_home(path: str) -> str:
    """Replace a leading `~` by the user's home folder, also after hf: and in each of several
    comma-separated functions' files.
    """
    return re.sub(
        r"((?:^|,)\s*(?:hf:)?)(~[^/,]*)(?=/|$)",
        lambda match: match[1] + os.path.expanduser(match[2]),
        path,
    )


PathText = Annotated[Text, AfterValidator(expand_home)]
"""A path, or text that may contain one: a name, or functions of files."""


class Section(BaseModel):
    """Frozen group of fields. Unknown keys, infinities and NaN are errors; text may look like a
    number.
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, coerce_numbers_to_str=True
    )

    @model_validator(mode="before")
    @classmethod
    def _numbers(cls, data: Any) -> Any:
        """Refuse true and false for numbers, because pydantic would take them for 1 and 0."""
        if not isinstance(data, dict):
            return data
        for name, field in cls.model_fields.items():
            kinds = _leaves(field.annotation)
            value = data.get(name)
            numbers = any(kind in (int, float) or type(kind) is int for kind in kinds)
            parts = value if isinstance(value, list | tuple) else [value]
            if numbers and bool not in kinds and any(type(part) is bool for part in parts):
                raise ValueError(f"{name} {str(value).lower()} must be a number")
        return data


def _leaves(annotation: Any) -> list[Any]:
    """Return the classes and the values of literals that an annotation is made of."""
    parts = typing.get_args(annotation)
    return [leaf for part in parts for leaf in _leaves(part)] if parts else [annotation]


class Choice(Section):
    """Alternative of a section whose `name` decides which other fields it has.

    An option can only be given if it is used: one that the chosen alternative ignores is an error.
    Every alternative has its own defaults.
    """

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Return the values of `name` that choose this class."""
        return typing.get_args(cls.model_fields["name"].annotation)

    @classmethod
    def options(cls) -> list[str]:
        """Return the fields besides `name`."""
        return [field for field in cls.model_fields if field != "name"]


def leaf_values(section: Section, prefix: str = "") -> dict[str, Any]:
    """Return dotted path → value of every field of a section and its subsections."""
    values: dict[str, Any] = {}
    for name in type(section).model_fields:
        value = getattr(section, name)
        if isinstance(value, Section):
            values |= leaf_values(value, f"{prefix}{name}.")
        else:
            values[prefix + name] = value
    return values


def differing(one: Section, other: Section) -> dict[str, tuple[Any, Any]]:
    """Return dotted path → both values of every field in which the sections differ. The value is
    None in a section that lacks the field.
    """
    before = leaf_values(one)
    after = leaf_values(other)
    paths = [path for path in {**before, **after} if before.get(path) != after.get(path)]
    return {path: (before.get(path), after.get(path)) for path in paths}


def alternatives(annotation: Any) -> tuple[type[Section], ...]:
    """Return the sections that a field's annotation allows: several for a choice, one for a plain
    section, none for a value.
    """
    parts = typing.get_args(annotation) or (annotation,)
    sections = tuple(part for part in parts if isinstance(part, type) and issubclass(part, Section))
    return sections if len(sections) == len(parts) else ()


def chooser(
    kind: str,
    path: str,
    union: Any,
    default: str | None = None,
) -> Callable[[Any], Any]:
    """Return a validator that runs before the union's own. It fills in the default name, and raises
    `ValueError` for an unknown name and for an option that the chosen alternative does not have.

    kind, path: noun and dotted path of the section, for messages. union: of `Choice` classes.
    default: name to use if none is given; None if the enclosing section fills it in.
    """
    by_name = {name: section for section in typing.get_args(union) for name in section.names()}

    def check(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        name = value.get("name", default)
        if name not in by_name:
            near = did_you_mean(str(name), by_name)
            article = "an" if kind[0] in "aeiou" else "a"
            raise ValueError(
                f"name {quoted(name)} is not {article} {kind}; choose one of"
                f" {', '.join(by_name)}{near}"
            )
        options = by_name[name].options()
        for option in value:
            if option in ("name", *options):
                continue
            having = [n for n, section in by_name.items() if option in section.options()]
            where = f"is an option of {', '.join(having)}" if having else "is unknown"
            remedy = f", or give --{path}.name {having[-1]}" if having else ""
            takes = ", ".join(options) or "no options"
            raise ValueError(
                f"{option!r} {where}, not of {kind} {name!r}, which takes {takes}; omit it{remedy}"
            )
        return {**value, "name": name}

    return check


def pattern_fault(pattern: str) -> str | None:
    """Return what is wrong with a pattern over layer names (`quant.checkpoint.patterns`), to follow
    the quoted pattern in a message, or None.
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
            return f"is not a regular expression: {error}"
    return None
