"""Files of a weight version that somebody else wrote to: refused, or the version that was announced to the last bit."""

import asyncio
import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from starlette.exceptions import HTTPException
from starlette.requests import Request

from qarl.quant.delta import DeltaError, VersionCache
from qarl.quant.types import LowBitTensor
from qarl.rollout.servers.versions import Version, read_version, write_delta, write_version
from qarl.rollout.servers.vllm import receive
from tests.support.profiles import thorough

MUTATIONS = 10_000 if thorough() else 200
NASTY: list[Any] = [
    None, True, -1, 2**63, 1e308, "", "..", "../x", "/etc/passwd", "a\x00b", "x" * 5000, [], [[]], {}, {"a": {}},
]  # fmt: skip


def stream(step: int) -> list[LowBitTensor]:
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 255, (64, 32), dtype=torch.uint8, generator=generator)
    codes[step % 64, step % 32] += step
    return [
        LowBitTensor("a.weight_packed", codes),
        LowBitTensor("a.weight_scale", torch.linspace(1, 2, 64).to(torch.bfloat16)),
        LowBitTensor("norm.weight", torch.ones(7) + step),
    ]


def written(parent: Path, whole: bool) -> tuple[Version, VersionCache]:
    """A version in files, and the one that a server holds then."""
    held = VersionCache(1, stream(1))
    if whole:
        return write_version(stream(2), parent, 2), held
    sender = VersionCache(1, stream(1))
    delta = sender.make_delta(2, stream(2))
    return write_delta(delta, parent, sender, held.digest), held


def received(version: Version, held: VersionCache | None) -> VersionCache | None:
    """What a server makes of the files that were announced as `version`; None where it would report another digest."""
    files = read_version(version.folder)
    if files.digest != version.digest:
        return None
    made, _ = files.received(version.tensor_bytes, held)
    return made if made.digest == version.digest else None


def mutate(folder: Path, chance: random.Random) -> None:
    """One thing that who may write into the folder might do."""
    file = chance.choice(sorted(folder.iterdir()))
    kind = chance.choice(["flip", "cut", "grow", "field", "field", "field", "link", "gone", "fifo", "folder", "sparse"])
    if kind == "field":
        manifest = json.loads((folder / "manifest.json").read_text())
        place, name = manifest, chance.choice(sorted(manifest))
        if name == "files" and manifest["files"] and chance.random() < 0.7:
            place, name = manifest["files"], next(iter(manifest["files"]))
            if chance.random() < 0.5:
                place[str(chance.choice(NASTY))] = place.pop(name)
                name = next(iter(place))
        if chance.random() < 0.1:
            del place[name]
        else:
            place[name] = chance.choice([*NASTY, ["a.weight_packed"], ["a.weight_packed"] * 2, [1], {"x": ["b"]}])
        (folder / "manifest.json").write_text(json.dumps(manifest))
        return
    data = bytearray(file.read_bytes())
    file.unlink()
    if kind == "flip":
        for _ in range(chance.randint(1, 8)):
            data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    elif kind == "cut":
        data = data[: chance.randrange(len(data))]
    elif kind == "grow":
        data += chance.randbytes(chance.randint(1, 64))
    elif kind == "link":
        moved = folder.parent / "elsewhere"
        moved.write_bytes(data)
        file.symlink_to(moved)
    elif kind == "fifo":
        os.mkfifo(file)
    elif kind == "folder":
        file.mkdir()
    elif kind == "sparse":
        with file.open("wb") as opened:
            opened.truncate(2**42)
    if kind in ("flip", "cut", "grow"):
        file.write_bytes(data)


@pytest.mark.parametrize("whole", [True, False], ids=["whole", "delta"])
def test_a_version_that_was_written_to_is_refused_or_the_one_announced(whole: bool, tmp_path: Path):
    """Contract: bytes, lengths, the manifest's fields, links, pipes, folders and holes in the place of files: reading
    raises, in bounded time and memory, or gives the announced version; and what a server holds is what it was.

    Blind spot: a writer that changes files while they are read; their digest is of what was read."""
    version, held = written(tmp_path, whole)
    sound, before = tmp_path / "sound", held.digest
    version.folder.rename(sound)
    refused = 0
    for number in range(MUTATIONS):
        shutil.rmtree(version.folder, ignore_errors=True)
        shutil.copytree(sound, version.folder)
        mutate(version.folder, random.Random(number))
        mine = VersionCache(1, stream(1)) if held.digest != before else held
        try:
            made = received(version, mine)
        except (ValueError, DeltaError):
            refused += 1
            assert mine.digest == before, number
            continue
        refused += made is None
    assert refused > 0.8 * MUTATIONS


def damaged(there: Version, /, **fields: Any) -> None:
    manifest = json.loads((there.folder / "manifest.json").read_text())
    (there.folder / "manifest.json").write_text(json.dumps(manifest | fields))


def deep(version: Version) -> None:
    (version.folder / "manifest.json").write_text("[" * 200_000)


def linked(version: Version) -> None:
    file = version.folder / "tensors-0.safetensors"
    file.symlink_to(file.rename(version.folder.parent / "elsewhere"))


def piped(version: Version) -> None:
    file = version.folder / "tensors-0.safetensors"
    file.unlink()
    os.mkfifo(file)


def bomb(version: Version) -> None:
    with (version.folder / "tensors-0.safetensors").open("r+b") as file:
        file.truncate(2**42)


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda v: damaged(v, files={"../x": ["a.weight_packed"]}), "no file of a weight version"),
        (lambda v: damaged(v, files={"..": ["a.weight_packed"]}), "no file of a weight version"),
        (lambda v: damaged(v, files={"manifest.json": ["a.weight_packed"]}), "no file of a weight version"),
        (lambda v: damaged(v, tensor_bytes=2**50), "bytes of tensors, not"),
        (lambda v: damaged(v, version=True), "no weight version can be read"),
        (deep, "no weight version can be read"),
        (bomb, "bytes, more than"),
        (linked, "no plain file"),
        (piped, "no plain file"),
    ],
)
def test_what_a_hostile_version_is_refused_for(harm: Callable[[Version], None], message: str, tmp_path: Path):
    version, held = written(tmp_path, whole=True)
    harm(version)
    with pytest.raises(ValueError, match=message):
        received(version, held)


@pytest.mark.parametrize(
    ("bodies", "message"),
    [
        ([b"abc", b"defg"], "6 bytes were announced, and more came"),
        ([b"abc", b"de"], "6 bytes were announced, and fewer came"),
        ([b"abc", None], "the connection broke off"),
        ([b"abc", "silence"], "nothing came for"),
    ],
)
def test_a_file_that_does_not_come_as_announced_is_refused(
    bodies: list[Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Blind spot: HTTP itself, which is `tests/engine/test_servers.py`'s."""
    monkeypatch.setattr(receive, "_SILENCE_SECONDS", 0.05)

    async def next_message() -> dict[str, Any]:
        body = bodies.pop(0)
        if body == "silence":
            await asyncio.sleep(30)
        kind = "http.disconnect" if body is None else "http.request"
        return {"type": kind, "body": body, "more_body": bool(bodies)}

    request = Request({"type": "http"}, next_message)
    with (tmp_path / "file").open("wb") as file, pytest.raises(HTTPException, match=message):
        asyncio.run(receive.copy(request, file, 6))


def test_a_whole_version_and_a_delta_are_received(tmp_path: Path):
    for whole in (True, False):
        version, held = written(tmp_path / str(whole), whole)
        made, changed = read_version(version.folder).received(version.tensor_bytes, held)
        assert made.digest == version.digest
        assert changed == (tuple(i.name for i in stream(2)) if whole else ("a.weight_packed", "norm.weight"))
    with pytest.raises(DeltaError, match="send the whole version"):
        received(version, None)
