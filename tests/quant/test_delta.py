"""Tests of deltas and of the digest of a stream.

A delta makes the version it was computed for, bit for bit, and nothing else is ever accepted. Tests
of the digest say what changes it, what does not, and pin one value.

Blind spots: a delta that is forged together with its digest, because authenticating the sender is
the transport's task; two streams with the same digest, which chance does not produce.
"""

import json
import random
import struct
from collections.abc import Callable, Iterator
from itertools import cycle
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qarl.quant import delta as module
from qarl.quant import digest as hashing
from qarl.quant.delta import DeltaError, VersionCache
from qarl.quant.digest import ReceivedDigest, StreamDigest
from qarl.quant.materialize import materialize
from qarl.quant.schemes import SCHEMES, get_scheme
from qarl.quant.types import LowBitTensor
from tests.support.cases import pattern
from tests.support.kernels import needs_cuda
from tests.support.profiles import examples, thorough
from tests.support.tensors import seeded, stream_digest

Named = dict[str, torch.Tensor]
DTYPES = (
    torch.int32,
    torch.int8,
    torch.uint8,
    torch.int64,
    torch.bfloat16,
    torch.float16,
    torch.float32,
)


def stream(tensors: Named) -> list[LowBitTensor]:
    return [LowBitTensor(name, tensor) for name, tensor in tensors.items()]


def random_bytes(
    dtype: torch.dtype, shape: tuple[int, ...], generator: torch.Generator
) -> torch.Tensor:
    size = torch.empty(shape, dtype=dtype).nbytes
    drawn = torch.randint(0, 256, (size,), generator=generator).to(torch.uint8)
    return drawn.view(dtype).view(shape)


def altered(tensor: torch.Tensor, share: float, generator: torch.Generator) -> torch.Tensor:
    """Return a copy in which about this fraction of the bytes differ."""
    new = tensor.clone()
    flipped = torch.randint(1, 256, (new.nbytes,), generator=generator).to(torch.uint8)
    chosen = torch.rand(flipped.shape, generator=generator) < share
    octets(new)[:] ^= flipped * chosen
    return new


def octets(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def same(held: VersionCache, tensors: Named) -> bool:
    theirs = {item.name: item.tensor for item in held.tensors()}
    if list(theirs) != list(tensors):
        return False
    return all(torch.equal(octets(theirs[name]), octets(tensors[name])) for name in tensors)


@pytest.fixture(scope="module", autouse=True)
def small_blocks() -> Iterator[None]:
    """Use blocks of 25,001 bytes, compared 256 bytes at a time, so that small tensors have several
    blocks.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_BLOCK", 25_001)
        patch.setattr(module, "_CHUNK", 256)
        yield


@given(
    st.lists(
        st.tuples(
            st.sampled_from(DTYPES),
            st.lists(st.integers(0, 40), max_size=3),
            st.sampled_from((0.0, 0.001, 0.05, 0.5, 1.0)),
        ),
        min_size=1,
        max_size=5,
    ),
    st.integers(0, 2**31),
)
@settings(max_examples=examples(200))
def test_a_delta_reproduces_the_next_version(
    tensors: list[tuple[torch.dtype, list[int], float]], seed: int
):
    """Contract: this holds over versions of tensors of any dtype and shape, including empty ones,
    and for any fraction of changed bytes. A delta lists only the tensors that changed.
    """
    generator = seeded(seed)
    version = {
        f"t{n}": random_bytes(dtype, tuple(shape), generator)
        for n, (dtype, shape, _) in enumerate(tensors)
    }
    sender, receiver = (VersionCache(0, stream(version)) for _ in range(2))
    for number in (1, 2):
        after = {
            f"t{n}": altered(version[f"t{n}"], share, generator)
            for n, (*_, share) in enumerate(tensors)
        }
        delta = sender.make_delta(number, stream(after))
        receiver.apply(delta, number, sender.digest)
        changed = [entry.name for entry in module._read(delta, len(delta))[0].tensors]
        assert changed == [
            n for n in after if not torch.equal(octets(version[n]), octets(after[n]))
        ]
        assert same(receiver, after)
        assert same(sender, after)
        assert receiver.digest == sender.digest == stream_digest(stream(after))
        assert receiver.version == number
        headers = 300 * (1 + len(changed))
        assert len(delta) < sender.bytes * (1 + 40 / module._BLOCK) + headers
        version = after


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_small_step_of_every_scheme_is_sent_in_a_fraction_of_the_bytes(scheme: str):
    """Contract: for the tensors of every scheme, the change by a small step of the masters takes a
    fraction of the version's bytes.
    """
    generator = seeded(0)
    masters = {name: torch.randn(256, 512, generator=generator) * 0.02 for name in ("a", "b")}

    def version() -> list[LowBitTensor]:
        made = {
            name: materialize(m, get_scheme(scheme), torch.bfloat16) for name, m in masters.items()
        }
        return [
            LowBitTensor(f"{n}.{suffix}", t)
            for n, weight in made.items()
            for suffix, t in weight.tensors()
        ]

    sender, receiver = (VersionCache(0, version()) for _ in range(2))
    for master in masters.values():
        master += 1e-6 * torch.randn(master.shape, generator=generator)
    after = version()
    delta = sender.make_delta(1, after)
    receiver.apply(delta, 1, sender.digest)
    assert same(receiver, {item.name: item.tensor for item in after})
    assert len(delta) < 0.05 * sender.bytes


MAGIC_BYTES = 8
START = 12


def small() -> tuple[Named, Named]:
    """Return a version of eight tensors and the next one, in which some tensors changed in places,
    some throughout and some not at all.
    """
    generator = seeded(1)
    shares = (0.01, 0.01, 0.0, 1.0, 0.02, 0.0, 0.4, 0.005)
    names = [f"layers.{n}.weight" for n in range(len(shares))]
    before = {
        name: random_bytes(dtype, (16, 24), generator)
        for name, dtype in zip(names, cycle(DTYPES), strict=False)
    }
    after = {
        name: altered(t, share, generator)
        for (name, t), share in zip(before.items(), shares, strict=True)
    }
    return before, after


@pytest.fixture
def made() -> tuple[VersionCache, bytes, str]:
    """Return a receiver of version 1, and the delta to version 2 with its digest."""
    before, after = small()
    sender, receiver = (VersionCache(1, stream(before)) for _ in range(2))
    return receiver, sender.make_delta(2, stream(after)), stream_digest(stream(after))


def reheaded(
    delta: bytes,
    change: Callable[[dict[str, Any]], object],
) -> bytes:
    """Return the delta with another header and the matching header length."""
    (length,) = struct.unpack_from("<I", delta, MAGIC_BYTES)
    header = json.loads(delta[START : START + length])
    change(header)
    encoded = json.dumps(header).encode()
    return delta[:MAGIC_BYTES] + struct.pack("<I", len(encoded)) + encoded + delta[START + length :]


def changed(**fields: Any) -> Callable[[dict[str, Any]], object]:
    """Return a change of fields of the header, of its first tensor ("tensor.name") or of
    that tensor's first block ("block.size").
    """

    def change(header: dict[str, Any]) -> None:
        tensor = header["tensors"][0]
        places = {"": header, "tensor": tensor, "block": tensor["blocks"][0]}
        for name, value in fields.items():
            place, _, field = name.rpartition(".")
            places[place][field] = value

    return change


def more_changes(count: int) -> Callable[[dict[str, Any]], object]:
    def change(header: dict[str, Any]) -> None:
        header["tensors"][0]["blocks"][0]["changes"] += count

    return change


CHANGED_FIELDS: dict[str, tuple[dict[str, Any], str]] = {
    "wrong base": (
        {"base_digest": "0" * 32},
        "send the whole version",
    ),
    "version skipped": ({"base": 0}, "from version 0"),
    "other version": ({"version": 3}, "makes version 3 … and 2 … was announced"),
    "other result": (
        {"digest": "0" * 32},
        "(0000000000000000…), and 2 (",
    ),
    "other shape": (
        {"tensor.shape": [24, 16]},
        "is 'int32' [24, 16], and 'int32' [16, 24] is held",
    ),
    "other dtype": ({"tensor.dtype": "float32"}, "'float32'"),
    "a name of no tensor": ({"tensor.name": "layers.9.weight"}, "not among the 8 tensors"),
    "a path": ({"tensor.name": "../../etc/passwd"}, "not among"),
    "negative size": ({"block.size": -1}, "greater than or equal to 0"),
    "huge size": ({"block.size": 2**70}, "are announced"),
    "negative changes": ({"block.changes": -5}, "greater than or equal to 0"),
    "bomb": ({"block.changes": 2**31 // 10}, "more than one in 2"),
    "no changes, and bytes": ({"block.changes": 0}, "decompressed"),
    "whole, and too short": ({"block.changes": None}, "bytes instead of 1536"),
    "floating size": ({"block.size": 1.5}, "valid integer"),
    "unknown field": ({"pickle": "gASV"}, "not permitted"),
    "no tensors": ({"tensors": []}, "0 bytes of tensors are announced"),
}
"""Case → changed fields of a header, and words of the error."""
HOSTILE = {
    name: (changed(**fields), pattern(said)) for name, (fields, said) in CHANGED_FIELDS.items()
} | {
    "a name without an end": (
        changed(**{"tensor.name": "x" * 10_000}),
        "header cannot be read|not a delta",
    ),
    "one change more": (more_changes(1), "decompressed"),
    "one change less": (more_changes(-1), "decompressed"),
    "no blocks": (
        changed(**{"tensor.blocks": []}),
        "are announced|0 blocks instead of 1",
    ),
    "a block more": (
        lambda h: h["tensors"][0]["blocks"].append({"changes": 0, "size": 0}),
        "2 blocks instead of 1",
    ),
    "lost field": (lambda h: h.pop("base"), "base: Field required"),
    "deep": (
        changed(tensors=json.loads("[" * 500 + "]" * 500)),
        "header cannot be read",
    ),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_header_is_refused_and_nothing_changes(
    made: tuple[VersionCache, bytes, str], kind: str
):
    receiver, delta, announced = made
    change, message = HOSTILE[kind]
    before, after = small()
    with pytest.raises(DeltaError, match=message):
        receiver.apply(reheaded(delta, change), 2, announced)
    assert same(receiver, before)
    assert receiver.version == 1
    receiver.apply(delta, 2, announced)
    assert same(receiver, after)


def test_a_delta_that_lists_a_tensor_twice_is_refused():
    """Contract: a tensor sent twice as a whole would be undone to its intermediate state, so it is
    refused.
    """
    before = {"w": torch.zeros(64, dtype=torch.int8)}
    after = {"w": torch.ones(64, dtype=torch.int8)}
    sender, receiver = (VersionCache(1, stream(before)) for _ in range(2))
    delta = sender.make_delta(2, stream(after)) + bytes([2] * 64)
    with pytest.raises(DeltaError, match="changes a tensor twice"):
        receiver.apply(
            reheaded(delta, lambda h: h.update(tensors=h["tensors"] * 2)),
            2,
            sender.digest,
        )
    assert same(receiver, before)


def test_a_change_beyond_its_block_is_refused():
    octets = torch.zeros(64, dtype=torch.uint8).numpy()
    longer = torch.zeros(65, dtype=torch.uint8).numpy()
    changed = longer.copy()
    changed[64] = 1
    changes, payload = module._encoded(longer, changed)
    with pytest.raises(DeltaError, match="changes byte 64 of 64 of 'w'"):
        module._apply(octets, changes, payload, "w")


def test_a_delta_with_another_digest_is_undone(
    made: tuple[VersionCache, bytes, str],
):
    """Contract: the digest is checked after all of the delta has been applied, and on failure all
    of it is undone.
    """
    receiver, delta, _ = made
    before, _ = small()
    other = "0" * 32
    with pytest.raises(DeltaError, match=f"not {other[:16]}… as it says"):
        receiver.apply(reheaded(delta, lambda header: header.update(digest=other)), 2, other)
    assert same(receiver, before)
    assert receiver.version == 1


def mutated(delta: bytes, other: bytes, chance: random.Random) -> bytes:
    """Return a delta with bits flipped or with bytes replaced, cut out, repeated, swapped or taken
    from another delta, anywhere or in the header. Half of them have a header of the stated length.
    """
    data = bytearray(delta)
    (length,) = struct.unpack_from("<I", delta, MAGIC_BYTES)
    for _ in range(chance.choice((1, 1, 1, 2, 5))):
        end = len(data) if chance.random() < 0.5 else START + length
        at = chance.randrange(max(1, min(end, len(data))))
        size = chance.choice((1, 2, 4, 16, 100))
        kind = chance.randrange(6)
        if kind == 0 and data:
            data[at] ^= 1 << chance.randrange(8)
        elif kind == 1:
            data[at : at + size] = chance.randbytes(size)
        elif kind == 2:
            del data[at : at + size]
        elif kind == 3:
            data[at:at] = data[at : at + size]
        elif kind == 4:
            data[at : at + size] = other[at : at + size]
        else:
            digits = [n for n, b in enumerate(data[:end]) if 48 <= b <= 57]
            if digits:
                place = chance.choice(digits)
                data[place : place + 1] = chance.choice(
                    (b"-1", b"0", b"9" * 20, b"null", b"1e9", b"7")
                )
    if chance.random() < 0.5 and len(data) > START:
        closing = bytes(data).rfind(b"}]}")
        if closing > START:
            data[MAGIC_BYTES:START] = struct.pack("<I", closing + 3 - START)
    return bytes(data)


def test_mutated_deltas_are_refused_or_make_exactly_their_version():
    """Contract: each of ten thousand is either refused with one of our own errors or makes exactly
    its version. Otherwise the receiver's tensors never change.
    """
    before, after = small()
    sender = VersionCache(1, stream(before))
    receiver = VersionCache(1, stream(before))
    delta = sender.make_delta(2, stream(after))
    announced = sender.digest
    other = sender.make_delta(3, stream(before))
    chance = random.Random(7)
    refused = 0
    taken = 0
    count = 40_000 if thorough() else 10_000
    for number in range(count):
        try:
            receiver.apply(mutated(delta, other, chance), 2, announced)
        except DeltaError:
            refused += 1
        else:
            assert same(receiver, after)
            assert receiver.version == 2
            taken += 1
            receiver = VersionCache(1, stream(before))
        if number % 100 == 0:
            assert same(receiver, before)
    assert same(receiver, before)
    assert refused > 0.9 * count
    assert refused + taken == count


def test_a_version_over_another_is_the_version_in_its_memory():
    """Contract: the result equals a newly made version whatever the receiver held before; tensors
    with the same name, dtype and shape keep their memory.
    """
    before = {
        "same": torch.zeros(4, 3),
        "other": torch.zeros(2, dtype=torch.int8),
        "gone": torch.zeros(5),
    }
    after = {
        "new": torch.ones(2),
        "same": torch.rand(3, 4).t(),
        "other": torch.ones(3, dtype=torch.int8),
    }
    old = VersionCache(1, stream(before))
    memory = {item.name: item.tensor.data_ptr() for item in old.tensors()}
    made = VersionCache(2, stream(after), reuse=old)
    fresh = VersionCache(2, stream(after))
    assert made.digest == fresh.digest
    assert made.bytes == fresh.bytes
    assert made.version == 2
    addresses = {item.name: item.tensor.data_ptr() for item in made.tensors()}
    assert addresses["same"] == memory["same"]


Item = tuple[str, torch.Tensor]
PIECE = hashing._PIECE
NAMES = st.text("abcdefghijklmnopqrstuvwxyz._0123456789", min_size=1, max_size=12)
SIZES = st.lists(st.integers(1, 5000), min_size=2, max_size=5)


def digest(*items: Item) -> str:
    return stream_digest(LowBitTensor(name, tensor) for name, tensor in items)


def tensor(size: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (size,), generator=seeded(seed)).to(torch.uint8)


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use pieces of 1,000 bytes, so that small tensors have several pieces."""
    monkeypatch.setattr(hashing, "_PIECE", 1000)


def test_a_digest_is_the_same_on_every_machine_and_in_every_version():
    """Contract: checkpoints and exports store the digest, so it must never change.

    Sizes are on both sides of every boundary of the hash and of a piece.
    """
    data = (torch.arange(2 * PIECE + 3) * 40503 >> 7 & 255).to(torch.uint8)
    sizes = (
        0,
        1,
        16,
        17,
        128,
        129,
        240,
        241,
        1024,
        1025,
        PIECE - 1,
        PIECE,
        PIECE + 1,
        2 * PIECE + 3,
    )
    assert (
        digest(*((f"layer.{size}", data[:size]) for size in sizes))
        == "8bf4580193af6020e7b1cb10b769c4f0"
    )


@pytest.mark.usefixtures("small_pieces")
@given(st.data(), SIZES)
def test_any_flipped_bit_changes_the_digest(data: st.DataObject, sizes: list[int]):
    items = [(f"t{i}", tensor(size, i)) for i, size in enumerate(sizes)]
    before = digest(*items)
    _, changed = items[data.draw(st.integers(0, len(items) - 1))]
    byte = data.draw(st.integers(0, len(changed) - 1))
    changed[byte] ^= 1 << data.draw(st.integers(0, 7))
    assert digest(*items) != before


@pytest.mark.usefixtures("small_pieces")
@given(st.data(), SIZES, NAMES)
def test_the_digest_depends_on_names_order_dtypes_shapes_and_tensor_boundaries(
    data: st.DataObject, sizes: list[int], name: str
):
    """Contract: except for the swapped ones, these streams have the same bytes in the same order
    and differ only in the header or in a tensor's end.
    """
    items = [(f"T{i}", tensor(size, i)) for i, size in enumerate(sizes)]
    at = data.draw(st.integers(0, len(items) - 2))
    (first, a), (second, b) = items[at : at + 2]
    cut = data.draw(st.integers(1, len(a)))
    bytes_of_both = torch.cat([a, b])
    pairs: list[list[Item]] = [
        [(second, b), (first, a)],  # order
        [(second, a), (first, b)],  # the other's name
        [(name, a), (second, b)],  # another name
        [(first, a.view(torch.int8)), (second, b)],
        [(first, a[None]), (second, b)],
        [(first, bytes_of_both)],  # one tensor lost, its bytes kept
        [
            (first, bytes_of_both[: len(a) - cut]),
            (second, bytes_of_both[len(a) - cut :]),
        ],
        [(first, a)],  # one tensor lost
        [(first, a), (first, a), (second, b)],  # and one sent twice
    ]
    digests = [
        digest(*items[:at], *pair, *items[at + 2 :])
        for pair in ([items[at], items[at + 1]], *pairs)
    ]
    assert len(set(digests)) == len(digests)


@pytest.mark.usefixtures("small_pieces")
@given(
    st.integers(4000, 40_000),
    st.sampled_from([torch.int32, torch.bfloat16, torch.float8_e4m3fn, torch.uint8]),
)
@settings(max_examples=examples(40))
def test_the_digest_depends_neither_on_threads_nor_on_strides(bytes_: int, dtype: torch.dtype):
    data = tensor(bytes_ // 8 * 8).view(dtype).view(2, -1)
    with pytest.MonkeyPatch.context() as patch:
        digests = set()
        for count in (1, 2, 3, 8):
            patch.setattr(torch, "get_num_threads", lambda count=count: count)
            transposed = data.T.contiguous().T
            sliced = data.repeat(1, 2)[:, : len(data[0])]
            digests |= {digest(("a", layout)) for layout in (data, transposed, sliced)}
    assert len(digests) == 1


@pytest.mark.gpu
@needs_cuda("a digest of tensors on it")
def test_the_digest_does_not_depend_on_the_device():
    data = tensor(2 * PIECE + 6).view(torch.bfloat16).view(2, -1)
    assert (
        digest(("a", data.cuda()))
        == digest(("a", data.cuda().T.contiguous().T))
        == digest(("a", data))
    )


def test_a_gpus_tensors_are_read_many_at_once(monkeypatch: pytest.MonkeyPatch):
    """Contract: a GPU's tensors are copied in packs of a bounded number of bytes, the digest is the
    same, and a receiver of the same tensors copies none. Blind spot: no GPU runs this.
    """
    sizes = (300, 0, 20, 700, 1, 64)
    items = [LowBitTensor(f"T{n}", tensor(size, n)) for n, size in enumerate(sizes)]
    items.append(
        LowBitTensor(
            "m",
            tensor(96).view(torch.bfloat16).view(2, -1).T,
        )
    )
    expected = hashing.digested(items).hexdigest()
    monkeypatch.setattr(hashing, "_on_gpu", lambda _: True)
    copies: list[int] = []
    read = StreamDigest._read_waiting
    monkeypatch.setattr(
        StreamDigest,
        "_read_waiting",
        lambda s: copies.append(len(s._waiting)) or read(s),
    )
    for at_once, packs in (
        (1 << 25, [7]),
        (500, [4, 3]),
        (1, [1, 2, 1, 1, 1, 1]),
    ):
        monkeypatch.setattr(hashing, "_AT_ONCE", at_once)
        copies.clear()
        sent = StreamDigest()
        received = ReceivedDigest()
        assert [item.name for item in received.over(sent.over(items))] == [
            item.name for item in items
        ]
        assert sent.hexdigest() == received.hexdigest() == expected
        assert [count for count in copies if count] == packs


def test_a_receiver_hashes_every_tensor_again_except_the_very_one_just_hashed(
    monkeypatch: pytest.MonkeyPatch,
):
    """Contract: the receiver's digest is the sender's for the same stream, however it was
    transferred. The very tensor that was just hashed is not read twice. Blind spot: a write between
    the two that torch does not count.
    """
    readings: list[torch.Tensor] = []
    read = hashing._hashed
    monkeypatch.setattr(hashing, "_hashed", lambda tensor: readings.append(tensor) or read(tensor))

    def ends(deliver: Callable[[LowBitTensor], LowBitTensor]) -> tuple[bool, int]:
        """Return whether both ends agree on two tensors, and how often a tensor was read."""
        sent = StreamDigest()
        received = ReceivedDigest()
        readings.clear()
        for item in (
            LowBitTensor("a", tensor(300, 1)),
            LowBitTensor("b", tensor(20, 2)),
        ):
            sent.update(item)
            received.update(deliver(item))
        assert received.bytes == 320
        assert received.tensors == 2
        return sent.hexdigest() == received.hexdigest(), len(readings)

    def written(item: LowBitTensor) -> LowBitTensor:
        item.tensor[0] ^= 1
        return item

    assert ends(lambda item: item) == (True, 2)
    assert ends(lambda item: LowBitTensor(item.name, item.tensor.clone())) == (True, 4)
    assert ends(lambda item: LowBitTensor(item.name, item.tensor.clone() ^ 1)) == (
        False,
        4,
    )
    assert ends(written) == (False, 4)
    assert ends(lambda item: LowBitTensor(f"{item.name}!", item.tensor)) == (False, 2)


def test_a_sender_hashes_tensors_again_after_compiled_loops_wrote_them():
    """Contract: materialization writes into the same tensors by compiled loops, which torch does
    not count, so a sender never reuses an earlier hash.
    """
    data = tensor(1000)
    before = digest(("a", data))
    data.numpy()[7] ^= 1
    assert digest(("a", data)) != before
