"""Receives a weight version's files inside a server, if run and server share no file system.

    POST /qarl/versions/7/manifest.json?run=NAME           announces the files, removes older ones
    POST /qarl/versions/7/tensors-0.safetensors?run=NAME   each of its files, or its `delta`

    → {"folder": "…/version-7"} for the last file, {"folder": null} for those before

The folder gets its name when all files are there. Workers stage from it as from a folder that a run
has written (`rollout.servers.versions`), so an incomplete version is never staged; the digest then
shows whether the bytes are right. After an interruption the run starts again with the manifest.
(Not PUT: clients and proxies may repeat a PUT by themselves.)
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
"""Seconds without a byte after which the sender counts as gone."""
_DISCARDED = 1 << 26
"""Bytes of a refused file that are still read.

A sender reads no answer before the end of its file; it then finds the refusal instead of a broken
connection.
"""


class ReceiveVersions:
    """ASGI middleware that receives a version's files. It runs behind `RequireKey`.

    It accepts files only from the run that this server belongs to, and no more bytes than the
    manifest announces. It passes on every other request.
    """

    def __init__(self, app: Callable[..., Awaitable[None]]):
        self._app = app
        folder = os.environ.get(RECEIVED)
        self._folder = Path(folder) if folder else None

    async def __call__(
        self,
        scope: dict[str, Any],
        receive: Any,
        send: Any,
    ) -> None:
        """Receive a file and answer where its version is, or pass the request on."""
        path = None
        if scope["type"] == "http" and scope["method"] == "POST":
            path = _PATH.fullmatch(scope["path"])
        if path is None or self._folder is None:
            await self._app(scope, receive, send)
            return
        request = Request(scope, receive)
        answer = Response()
        try:
            await _require_owner(request)
            building = self._folder / f"version-{path[1]}.part"
            folder = await _receive_file(building, path[2], request)
            answer = JSONResponse({"folder": folder and str(folder)})
        except HTTPException as error:
            answer = PlainTextResponse(error.detail, error.status_code)
        except OSError as error:
            answer = PlainTextResponse(f"cannot write to {str(self._folder)!r}: {error}", 507)
        if answer.status_code != 200:
            await _discard(request)
        await answer(scope, receive, send)


async def _require_owner(request: Request) -> None:
    """Refuse a run if this server belongs to another one.

    A server that was restarted belongs to no run yet.
    """
    run = request.query_params.get("run", "")
    states = await request.app.state.engine_client.collective_rpc("qarl_state")
    for owner in {state["learner"] for state in states} - {"", run}:
        raise HTTPException(409, f"this server belongs to {owner}")


async def _receive_file(building: Path, name: str, request: Request) -> Path | None:
    """Receive a file. Returns the version's folder if this was its last file, else None."""
    announced = request.headers.get("content-length")
    if announced is None:
        raise HTTPException(411, "the request names no Content-Length")
    limit = MANIFEST_BYTES if name == MANIFEST else _bytes_left(building, name)
    length = int(announced)
    if length > limit:
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
            return await asyncio.to_thread(_add_file, arrived, building, name)
        finally:
            arrived.unlink(missing_ok=True)


def _bytes_left(building: Path, name: str) -> int:
    """Return how many bytes a file of the version may have, given those that arrived before."""
    try:
        version = read_version(building)
    except ValueError as error:
        raise HTTPException(503, f"no manifest of it is here: {error}") from error
    if name not in version.names:
        raise HTTPException(400, f"the manifest names no {name}")
    other_files = (building / other for other in version.names if other != name)
    received = sum(file.stat().st_size for file in other_files if file.exists())
    return version.max_bytes - received


async def copy(request: Request, file: IO[bytes], length: int) -> None:
    """Copy a request's body into a file.

    Raises `HTTPException` if the body does not have `length` bytes, breaks off, or stops coming.
    """
    left = length
    pending = bytearray()
    async for chunk in _chunks(request):
        pending += chunk
        left -= len(chunk)
        if left < 0:
            raise HTTPException(400, f"{length} bytes were announced, and more came")
        if len(pending) >= _WRITTEN_AT_ONCE:
            await asyncio.to_thread(file.write, pending)
            pending = bytearray()
    if left:
        raise HTTPException(400, f"{length} bytes were announced, and fewer came")
    await asyncio.to_thread(file.write, pending)


async def _chunks(request: Request) -> AsyncIterator[bytes]:
    """Yield the chunks of a request's body as they arrive."""
    stream = request.stream()
    try:
        # The last chunk is empty.
        while chunk := await asyncio.wait_for(anext(stream), _SILENCE_SECONDS):
            yield chunk
    except TimeoutError:
        raise HTTPException(408, f"nothing came for {_SILENCE_SECONDS:g} s") from None
    except ClientDisconnect:
        raise HTTPException(400, "the connection broke off") from None


async def _discard(request: Request) -> None:
    """Read the rest of the body, up to `_DISCARDED` bytes."""
    left = _DISCARDED
    with suppress(HTTPException, RuntimeError):  # RuntimeError: the body is already complete
        async for chunk in _chunks(request):
            left -= len(chunk)
            if left < 0:
                return


def _add_file(arrived: Path, building: Path, name: str) -> Path | None:
    """Move a received file into its version's folder.

    The manifest starts a folder. The last file completes it: returns the final folder then, else
    None.
    """
    if name == MANIFEST:
        _remove_other_files(building.parent, arrived)
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


def _remove_other_files(parent: Path, keep: Path) -> None:
    """Remove everything in `parent` except the file `keep`.

    Workers have already read the older versions, or never will.
    """
    for old in parent.iterdir():
        if old.is_dir():
            shutil.rmtree(old)
        elif old != keep:
            old.unlink(missing_ok=True)
