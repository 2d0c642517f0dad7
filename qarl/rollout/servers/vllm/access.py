"""API key of a server: how the run finds it, and how the server checks it.

The check covers every path except `/health`. vLLM's own check of `VLLM_API_KEY` covers only paths
under /v1, /v2 and /inference. The paths that pause a server, load weights or call into its workers
are open in version 0.32 (its help of --api-key says so).
"""

import hmac
import json
import os
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from qarl.configs.errors import InputError

KEY_VARIABLE = "QARL_SERVER_KEY"
_OPEN = ("/health",)
_CALLS = "/collective_rpc"


def server_key(file: str | None) -> str | None:
    """Return the API key in `file`, by default that in `QARL_SERVER_KEY`; None if there is neither.

    Raises `InputError` if the file holds no key.
    """
    if file is None:
        return os.environ.get(KEY_VARIABLE) or None
    try:
        key = Path(file).expanduser().read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"the servers' API key cannot be read from {file!r}: {error}; give a file that holds it"
        ) from error
    if not key or not key.isascii() or len(key.split()) > 1:
        raise InputError(
            f"{file!r} holds no API key; write it into the file, one word in ASCII and nothing else"
        )
    return key


class RequireKey:
    """ASGI middleware that checks the API key and which methods of the workers are called.

    It answers 401 without `Authorization: Bearer` and the key in `VLLM_API_KEY`, and 403 to a call
    of a worker's method that is not QaRL's. Some methods of vLLM's or Python's own (`__class__`)
    end the thread that answers, and the server hangs.
    """

    def __init__(self, app: Callable[..., Awaitable[None]]):
        self._app = app
        key = os.environ.get("VLLM_API_KEY", "")
        self._expected = f"Bearer {key}".encode() if key else None

    async def __call__(
        self,
        scope: dict[str, Any],
        receive: Any,
        send: Any,
    ) -> None:
        """Pass the request on, or refuse it."""
        # The start and end of the application have no path.
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        credentials = dict(scope.get("headers", ())).get(b"authorization", b"")
        if (
            self._expected is None
            or scope["path"] in _OPEN
            or hmac.compare_digest(credentials, self._expected or b"")
        ):
            application = self._call if scope["path"] == _CALLS else self._app
            await application(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            headers = [
                (b"content-type", b"application/json"),
                (b"www-authenticate", b"Bearer"),
            ]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send(
                {
                    "type": "http.response.body",
                    "body": b'{"error": "no or another key"}',
                }
            )

    async def _call(
        self,
        scope: dict[str, Any],
        receive: Any,
        send: Any,
    ) -> None:
        """Read the body of a call and pass it on if it names a method of QaRL's."""
        # A dependency of vLLM, which a run that only connects to servers may lack.
        from starlette.requests import Request
        from starlette.responses import PlainTextResponse

        body = await Request(scope, receive).body()
        allowed = False
        with suppress(ValueError, LookupError, TypeError, AttributeError):
            allowed = json.loads(body)["method"].startswith("qarl_")
        if allowed:
            messages = iter([{"type": "http.request", "body": body}])

            # The body was consumed above, so the application gets it from here.
            async def replay_body() -> Any:
                return next(messages, None) or await receive()

            await self._app(scope, replay_body, send)
        else:
            await PlainTextResponse("calls are of QaRL's methods alone", 403)(scope, receive, send)
