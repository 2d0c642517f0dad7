"""Inside a server: the files of a weight version that a run sends come in here, where the two share
no file system.

    POST /qarl/versions/7/manifest.json?run=NAME           what is to come; what was there before
    goes POST /qarl/versions/7/tensors-0.safetensors?run=NAME   each file of it, or its `delta`

    → {"folder": "…/version-7"} to the last of them, {"folder": null} to those before

The folder gets its name when all of it is there, and workers stage from it as from one that a run
has written (`rollout.servers.versions`). So half a version is never staged; whether the bytes are
right, its digest says then. What broke off is begun again with the manifest. (Not PUT: clients and
proxies repeat one by themselves.)
"""

import asyncio
import os
import re
import shutil
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from qarl.quant.runtime.libraries import RECEIVED
from qarl.rollout.servers.versions import MANIFEST, MANIFEST_BYTES, read_version

VERSIONS = "/qarl/versions"
_PATH = re.compile(
    VERSIONS + r"/([0-9]{1,10})/(manifest\.json|delta|tensors-[0-9]{1,6}\.safetensors)"
)
_WRITTEN_AT_ONCE = 1 << 22
_SILENCE_SECONDS = 60.0
"""Without a byte, after which a sender is taken to be gone."""
_DISCARDED = 1 << 26
"""Bytes of a refused file that are still read, so that a sender who reads no answer before its end
finds the refusal, and no broken connection.
"""


class ReceiveVersions:
    """ASGI middleware behind `RequireKey`: takes a version's files from the run that this server
    belongs to, no more bytes than the manifest says; all else is passed on.
    """

    def __init__(self, app: Callable[..., Awaitable[None]]):
        self._app = app
        folder = os.environ.get(RECEIVED)
        self._folder = Path(folder) if folder else None

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        """Take a file and say where its version is, or why not, or pass on."""
        path = (
            _PATH.fullmatch(scope["path"])
            if scope["type"] == "http" and scope["method"] == "POST"
            else None
        )
        if path is None or self._folder is None:
            await self._app(scope, receive, send)
            return
        request, answer = Request(scope, receive), Response()
        try:
            await _require_the_run(request)
            folder = await _taken(self._folder / f"version-{path[1]}.part", path[2], request)
            answer = JSONResponse({"folder": folder and str(folder)})
        except HTTPException as error:
            answer = PlainTextResponse(error.detail, error.status_code)
        except OSError as error:
            answer = PlainTextResponse(f"cannot write to {str(self._folder)!r}: {error}", 507)
        if answer.status_code != 200:
            await _discard(request)
        await answer(scope, receive, send)


async def _require_the_run(request: Request) -> None:
    """Raise where the server is another's than the run that asks; one that was restarted is
    nobody's yet.
    """
    run = request.query_params.get("run", "")
    states = await request.app.state.engine_client.collective_rpc("qarl_state")
    for owner in {state["learner"] for state in states} - {"", run}:
        raise HTTPException(409, f"this server belongs to {owner}")


async def _taken(building: Path, name: str, request: Request) -> Path | None:
    """The version's folder where this file was the last of it, else None."""
    announced = request.headers.get("content-length")
    if announced is None:
        raise HTTPException(411, "the request names no Content-Length")
    limit = MANIFEST_BYTES if name == MANIFEST else _room(building, name)
    if (length := int(announced)) > limit:
        raise HTTPException(
            413,
            f"{name} of {length} bytes is larger than the {limit} that are left for it",
        )
    building.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=building.parent, delete=False) as file:
        arrived = Path(file.name)
        try:
            await copy(request, file, length)
            file.close()
            return await asyncio.to_thread(_place, arrived, building, name)
        finally:
            arrived.unlink(missing_ok=True)


def _room(building: Path, name: str) -> int:
    """Bytes that a file of the version may have, beside those that are there."""
    try:
        version = read_version(building)
    except ValueError as error:
        raise HTTPException(503, f"no manifest of it is here: {error}") from error
    if name not in version.names:
        raise HTTPException(400, f"the manifest names no {name}")
    others = (building / other for other in version.names if other != name)
    return version.max_bytes - sum(file.stat().st_size for file in others if file.exists())


async def copy(request: Request, file: IO[bytes], length: int) -> None:
    """A request's body into a file. Raises where it has other than `length` bytes, breaks off, or
    stops coming.
    """
    left, pending = length, bytearray()
    async for part in _parts(request):
        pending += part
        left -= len(part)
        if left < 0:
            raise HTTPException(400, f"{length} bytes were announced, and more came")
        if len(pending) >= _WRITTEN_AT_ONCE:
            await asyncio.to_thread(file.write, pending)
            pending = bytearray()
    if left:
        raise HTTPException(400, f"{length} bytes were announced, and fewer came")
    await asyncio.to_thread(file.write, pending)


async def _parts(request: Request) -> AsyncIterator[bytes]:
    """Of a request's body, as they come."""
    stream = request.stream()
    try:
        # the last one is empty
        while part := await asyncio.wait_for(anext(stream), _SILENCE_SECONDS):
            yield part
    except TimeoutError:
        raise HTTPException(408, f"nothing came for {_SILENCE_SECONDS:g} s") from None
    except ClientDisconnect:
        raise HTTPException(400, "the connection broke off") from None


async def _discard(request: Request) -> None:
    """Read what is still sent, up to `_DISCARDED` bytes."""
    left = _DISCARDED
    with suppress(HTTPException, RuntimeError):  # the latter where all of it came
        async for part in _parts(request):
            left -= len(part)
            if left < 0:
                return


def _place(arrived: Path, building: Path, name: str) -> Path | None:
    """Put a file into the version it is of, which is begun by its manifest, and finished where it
    was the last.
    """
    if name == MANIFEST:
        _clear(building.parent, arrived)
        building.mkdir()
    arrived.replace(building / name)
    try:
        version = read_version(building)
    except ValueError as error:
        raise HTTPException(400, str(error)) from error
    free = shutil.disk_usage(building).free
    if name == MANIFEST and version.bytes > free:
        raise HTTPException(
            507,
            f"{version.bytes} bytes are to come, and {free} are free in {str(building.parent)!r}",
        )
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
