"""Fast fallback to the cache if the Hugging Face Hub cannot be reached.

Its libraries try six times, for 23 s, before they look into their caches.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

_PATIENCE = 10.0
"""Timeout of the one request, in seconds."""


class UnreachableHubError(OSError):
    """Raised if there is no connection to the Hub, and its cache lacks the requested files."""


@contextmanager
def hub_or_cache() -> Iterator[None]:
    """Make Hugging Face's libraries look only in their caches within the `with`, as under
    HF_HUB_OFFLINE=1, if there is no connection to the Hub. Their `OSError` is then raised as
    `UnreachableHubError`.
    """
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE or _reachable():
        yield
        return
    settings = [constants]
    if "datasets.config" in sys.modules:
        settings.append(sys.modules["datasets.config"])
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
    """Return False if no connection to the Hub can be made.

    This sends one request as the library does, through its proxy if it has one. Other errors count
    as reachable: the library tries again.
    """
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    try:
        get_session().head(constants.ENDPOINT, timeout=_PATIENCE)
    # compared by name, because a later release may use another library than httpx
    except Exception as error:
        return not {"ConnectError", "ConnectionError"} & {
            kind.__name__ for kind in type(error).__mro__
        }
    return True
