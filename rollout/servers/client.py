"""HTTP to one server: JSON there and back, every answer within a time limit, every error naming the server."""

import asyncio
from typing import Any

import aiohttp

from rollout.engine import EngineError

CONNECT_SECONDS = 10.0
REMEDY = "start servers with `qarl serve-rollouts` and the run's own configuration"
_DEVELOPMENT = (
    "/pause", "/resume", "/collective_rpc", "/init_weight_transfer_engine", "/shutdown_weight_transfer_engine",
    "/start_weight_update", "/update_weights", "/finish_weight_update",
)  # fmt: skip
"""What a server has with VLLM_SERVER_DEV_MODE=1 alone."""


class LostServerError(EngineError):
    """A server that cannot be reached, broke a connection off, or did not answer in time; another may."""


class Server:
    """One replica. url: where. session: whose headers carry the key. seconds: that an answer may take."""

    def __init__(self, url: str, session: aiohttp.ClientSession, seconds: float):
        self.url = url
        self._session = session
        self._seconds = seconds

    async def post(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """What the server answers to `body`. Raises `LostServerError` where it does not, `EngineError` where it
        refuses."""
        limit = aiohttp.ClientTimeout(total=self._seconds, sock_connect=CONNECT_SECONDS)
        try:
            async with self._session.post(f"{self.url}{path}", json=body or {}, timeout=limit) as answer:
                if answer.status == 200:
                    return await answer.json()
                raise self._refused(path, answer.status, await answer.text())
        except TimeoutError as error:
            raise LostServerError(
                f"the server at {self.url} did not answer {path} within {self._seconds:g} s; look at its log, or raise "
                "rollout.server_seconds"
            ) from error
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise LostServerError(f"no answer from the server at {self.url} to {path}: {error}; {REMEDY}") from error

    async def call(self, method: str) -> list[Any]:
        """What a method of `rollout.servers.worker.ServerExtension` returns, from each of the server's workers."""
        answer = await self.post("/collective_rpc", {"method": method})
        return answer["results"]

    def _refused(self, path: str, status: int, text: str) -> EngineError:
        if status == 401:
            return EngineError(
                f"the server at {self.url} refused the API key; give the one it was started with, in a file "
                "(rollout.server_key_file) or in the environment (QARL_SERVER_KEY)"
            )
        base = path.partition("?")[0]
        if status == 404 and base in _DEVELOPMENT:
            return EngineError(
                f"the server at {self.url} has no {base}: it was started without VLLM_SERVER_DEV_MODE=1; {REMEDY}"
            )
        if status == 404:
            return EngineError(f"the server at {self.url} has no {base}, which needs --enable-scale-out; {REMEDY}")
        return EngineError(f"the server at {self.url} refused {base} (HTTP {status}): {text.strip()[:500]}")


def in_background(loop: asyncio.AbstractEventLoop) -> None:
    """What the thread of an engine's requests does, until `loop` is stopped."""
    asyncio.set_event_loop(loop)
    loop.run_forever()
    loop.close()
