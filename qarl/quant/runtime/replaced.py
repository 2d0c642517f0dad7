"""Temporary replacement of attributes."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def replaced(holder: Any, **values: Any) -> Iterator[None]:
    """Set attributes of a module or an object for the duration of this context.

    Afterwards they have their previous values. An attribute that did not exist is then None.
    """
    before = {name: getattr(holder, name, None) for name in values}
    try:
        for name, value in values.items():
            setattr(holder, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(holder, name, value)
