"""Attributes that have other values for a while."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def replaced(holder: Any, **values: Any) -> Iterator[None]:
    """Within this context the attributes of a module or an object have these values, and afterwards
    those they had; one that was not there is None then.
    """
    before = {name: getattr(holder, name, None) for name in values}
    try:
        for name, value in values.items():
            setattr(holder, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(holder, name, value)
