"""Servers that a run samples on, given by number or by URL. Imports neither torch nor vllm."""

from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator

from qarl.configs.schema.base import COMMA_SEPARATED

_MOST = 1024
"""Largest number of servers that a run may start."""


def _checked(servers: int | tuple[str, ...]) -> int | tuple[str, ...]:
    if isinstance(servers, int):
        if not 1 <= servers <= _MOST:
            raise ValueError(
                f"{servers} is not a number of servers; allowed are 1 to {_MOST}, or their URLs"
            )
        return servers
    urls = tuple(_address(url) for url in servers)
    if not urls or len(set(urls)) < len(urls):
        raise ValueError(f"[{', '.join(urls)}] names no server, or one twice; name each once")
    return urls


def _address(url: str) -> str:
    parts = urlsplit(url)
    if (
        parts.scheme not in ("http", "https")
        or not parts.hostname
        or parts.path not in ("", "/")
        or parts.query
    ):
        raise ValueError(
            f"{url!r} is not a server's URL; write http://HOST:PORT, or a number of servers to"
            " start"
        )
    if "@" in parts.netloc:
        raise ValueError(
            f"the URL of {parts.hostname} holds a user or a password, which would be written into"
            " the run's records; servers take a key, from rollout.server_key_file or"
            " QARL_SERVER_KEY"
        )
    return url.rstrip("/")


Servers = Annotated[int | tuple[str, ...], COMMA_SEPARATED, AfterValidator(_checked)]
"""Number of servers that the run starts itself, or the addresses of servers that run already."""
