"""Who may ask a server for what: the key on the run's side, and its check inside the server, of all
but its health.

vLLM's own check of `VLLM_API_KEY` covers paths under /v1, /v2 and /inference alone; the ones that
pause a server, load weights or call into its workers are open in version 0.32 (its help of
--api-key says so).
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
    """The API key in a file, or in the environment's `QARL_SERVER_KEY`, or None where there is
    neither. Raises `InputError` for a file without one.
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
    """ASGI middleware: 401 without `Authorization: Bearer` and the key in `VLLM_API_KEY`; 403 for a
    call of another method of the workers than QaRL's. Some of vLLM's or Python's own (`__class__`)
    end the thread that answers, and the server hangs.
    """

    def __init__(self, app: Callable[..., Awaitable[None]]):
        self._app = app
        key = os.environ.get("VLLM_API_KEY", "")
        self._expected = f"Bearer {key}".encode() if key else None

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        """Pass on, or refuse."""
        # the application's start and end, without a path
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        credentials = dict(scope.get("headers", ())).get(b"authorization", b"")
        if (
            self._expected is None
            or scope["path"] in _OPEN
            or hmac.compare_digest(credentials, self._expected or b"")
        ):
            await (self._call if scope["path"] == _CALLS else self._app)(scope, receive, send)
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

    async def _call(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        """Pass a call on, its body read, where its method is QaRL's."""
        # vLLM's, which a run that asks servers may lack
        from starlette.requests import Request
        from starlette.responses import PlainTextResponse

        body = await Request(scope, receive).body()
        own = False
        with suppress(ValueError, LookupError, TypeError, AttributeError):
            own = json.loads(body)["method"].startswith("qarl_")
        if own:
            messages = iter([{"type": "http.request", "body": body}])

            async def again() -> Any:
                return next(messages, None) or await receive()

            await self._app(scope, again, send)
        else:
            await PlainTextResponse("calls are of QaRL's methods alone", 403)(scope, receive, send)
