"""Inside a server: the files of a weight version that a run sends come in here, where the two share no file system.

    POST /qarl/versions/7/manifest.json?run=NAME           what is to come; what was there before goes
    POST /qarl/versions/7/tensors-0.safetensors?run=NAME   each file of it, or its `delta`

    → {"folder": "…/version-7"} to the last of them, {"folder": null} to those before

The folder gets its name when all of it is there, and workers stage from it as from one that a run has written
(`rollout.servers.versions`). So half a version is never staged; whether the bytes are right, its digest says then.
What broke off is begun again with the manifest. (Not PUT: clients and proxies repeat one by themselves.)
"""

import asyncio
import json
import os
import re
import shutil
import tempfile
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any
from urllib.parse import parse_qs

from qarl.rollout.servers.versions import MANIFEST, MANIFEST_BYTES, read_version

VERSIONS = "/qarl/versions"
FOLDER_VARIABLE = "QARL_RECEIVED"
"""Of a server's environment: the folder of its own where versions are kept that it is sent, one at a time."""
_PATH = re.compile(VERSIONS + r"/([0-9]{1,10})/(manifest\.json|delta|tensors-[0-9]{1,6}\.safetensors)")
_WRITTEN_AT_ONCE = 1 << 22
_SILENCE_SECONDS = 60.0
"""Without a byte, after which a sender is taken to be gone."""
_DISCARDED = 1 << 26
"""Bytes of a refused file that are still read, so that a sender who reads no answer before its end finds the refusal,
and no broken connection."""


class RefusedError(Exception):
    """status: of HTTP. The message goes to the run."""

    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status = status


class ReceiveVersions:
    """ASGI middleware behind `RequireKey`: takes a version's files from the run that this server belongs to, no more
    bytes than the manifest says; all else is passed on."""

    def __init__(self, app: Callable[..., Awaitable[None]]):
        self._app = app
        folder = os.environ.get(FOLDER_VARIABLE)
        self._folder = Path(folder) if folder else None

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        """Take a file and say where its version is, or why not, or pass on."""
        path = _PATH.fullmatch(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        if path is None or self._folder is None:
            await self._app(scope, receive, send)
            return
        status, answer, body = 200, b"", _Body(receive)
        try:
            await _require_the_run(scope)
            building = self._folder / f"version-{path[1]}.part"
            folder = await _taken(building, path[2], _length(scope), body)
            answer = json.dumps({"folder": folder and str(folder)}).encode()
        except RefusedError as error:
            status, answer = error.status, str(error).encode()
        except OSError as error:
            status, answer = 507, f"cannot write to {str(self._folder)!r}: {error}".encode()
        if status != 200:
            await body.discard()
        kind = b"application/json" if status == 200 else b"text/plain; charset=utf-8"
        await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", kind)]})
        await send({"type": "http.response.body", "body": answer})


class _Body:
    """A request's `receive`, which knows whether all of the body came."""

    def __init__(self, receive: Any):
        self._receive = receive
        self._ended = False

    async def __call__(self) -> dict[str, Any]:
        message = await self._receive()
        self._ended = message["type"] != "http.request" or not message.get("more_body", False)
        return message

    async def discard(self) -> None:
        """Read what is still sent, up to `_DISCARDED` bytes."""
        left = _DISCARDED
        with suppress(TimeoutError):
            while left > 0 and not self._ended:
                left -= len((await asyncio.wait_for(self(), _SILENCE_SECONDS)).get("body", b""))


async def _require_the_run(scope: dict[str, Any]) -> None:
    """Raise where the server is another's than the run that asks; one that was restarted is nobody's yet."""
    run = parse_qs(scope["query_string"].decode("latin-1")).get("run", [""])[0]
    states = await scope["app"].state.engine_client.collective_rpc("qarl_state")
    for owner in {state["learner"] for state in states} - {"", run}:
        raise RefusedError(409, f"this server belongs to {owner}")


async def _taken(building: Path, name: str, length: int, receive: Any) -> Path | None:
    """The version's folder where this file was the last of it, else None."""
    limit = MANIFEST_BYTES if name == MANIFEST else _room(building, name)
    if length > limit:
        raise RefusedError(413, f"{name} of {length} bytes is larger than the {limit} that are left for it")
    building.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=building.parent, delete=False) as file:
        arrived = Path(file.name)
        try:
            await copy(receive, file, length)
            file.close()
            return await asyncio.to_thread(_place, arrived, building, name)
        finally:
            arrived.unlink(missing_ok=True)


def _length(scope: dict[str, Any]) -> int:
    announced = dict(scope["headers"]).get(b"content-length")
    if announced is None:
        raise RefusedError(411, "the request names no Content-Length")
    return int(announced)


def _room(building: Path, name: str) -> int:
    """Bytes that a file of the version may have, beside those that are there."""
    try:
        version = read_version(building)
    except ValueError as error:
        raise RefusedError(503, f"no manifest of it is here: {error}") from error
    if name not in version.names:
        raise RefusedError(400, f"the manifest names no {name}")
    others = (building / other for other in version.names if other != name)
    return version.most_bytes - sum(file.stat().st_size for file in others if file.exists())


async def copy(receive: Any, file: IO[bytes], length: int) -> None:
    """A request's body into a file. Raises where it has other than `length` bytes, breaks off, or stops coming."""
    left, more = length, True
    while more:
        pending = bytearray()
        while more and len(pending) < _WRITTEN_AT_ONCE:
            try:
                message = await asyncio.wait_for(receive(), _SILENCE_SECONDS)
            except TimeoutError:
                raise RefusedError(408, f"nothing came for {_SILENCE_SECONDS:g} s") from None
            if message["type"] != "http.request":
                raise RefusedError(400, "the connection broke off")
            pending += message.get("body", b"")
            more = message.get("more_body", False)
        left -= len(pending)
        if left < 0 or (left and not more):
            raise RefusedError(400, f"{length} bytes were announced, and {'more' if left < 0 else 'fewer'} came")
        await asyncio.to_thread(file.write, pending)


def _place(arrived: Path, building: Path, name: str) -> Path | None:
    """Put a file into the version it is of, which is begun by its manifest, and finished where it was the last."""
    if name == MANIFEST:
        _clear(building.parent, arrived)
        building.mkdir()
    arrived.replace(building / name)
    try:
        version = read_version(building)
    except ValueError as error:
        raise RefusedError(400, str(error)) from error
    free = shutil.disk_usage(building).free
    if name == MANIFEST and version.bytes > free:
        raise RefusedError(507, f"{version.bytes} bytes are to come, and {free} are free in {str(building.parent)!r}")
    if not all((building / file).exists() for file in version.names):
        return None
    return building.rename(building.with_suffix(""))


def _clear(parent: Path, keep: Path) -> None:
    """Remove what is there: workers have read it, or will not."""
    for old in parent.iterdir():
        if old.is_dir():
            shutil.rmtree(old)
        elif old != keep:
            old.unlink(missing_ok=True)
