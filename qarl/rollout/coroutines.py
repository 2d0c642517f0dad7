"""Coroutines that code without `async` runs to their end."""

import asyncio
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

Result = TypeVar("Result")


def completed(work: Coroutine[Any, Any, Result]) -> Result:
    """Run a coroutine and return its result.

    If this thread already runs an event loop, as in a notebook, the coroutine runs in another
    thread.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, work).result()
