"""The Hugging Face Hub out of reach: its libraries ask six times over, for 23 s, before they look
into their caches.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

_PATIENCE = 10.0
"""Seconds for the one request."""


class UnreachableHubError(OSError):
    """There is no connection to the Hub, and its cache does not hold what was asked for."""


@contextmanager
def hub_or_cache() -> Iterator[None]:
    """Where no connection to the Hub comes about, Hugging Face's libraries look in their caches
    alone within the `with`, as with HF_HUB_OFFLINE=1. Raises `UnreachableHubError` for their
    OSError then.
    """
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE or _reachable():
        yield
        return
    settings = [
        constants,
        *(sys.modules[name] for name in ("datasets.config",) if name in sys.modules),
    ]
    for module in settings:
        module.HF_HUB_OFFLINE = True  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    except OSError as error:
        raise UnreachableHubError(
            f"no connection to {constants.ENDPOINT}, and not in the cache"
        ) from error
    finally:
        for module in settings:
            module.HF_HUB_OFFLINE = False  # pyright: ignore[reportAttributeAccessIssue]


def _reachable() -> bool:
    """By one request of the library's own, through whatever proxy it goes. False where no
    connection came about; any other trouble is for the library to try again.
    """
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    try:
        get_session().head(constants.ENDPOINT, timeout=_PATIENCE)
    # by the name httpx gives it, for a later release may ask by another library
    except Exception as error:
        return not {"ConnectError", "ConnectionError"} & {
            kind.__name__ for kind in type(error).__mro__
        }
    return True
