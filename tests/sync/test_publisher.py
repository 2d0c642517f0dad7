"""Tests of the publisher's checks on an engine's reports, and of the files of an export.
tests/engine/test_publish.py has a real engine.
"""

import itertools
import json
import math
from collections.abc import Callable, Iterable, Sequence
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file

from qarl.configs.errors import PrecisionError
from qarl.learner.logprobs import token_logprobs
from qarl.quant import tensor_files
from qarl.quant.digest import digested
from qarl.quant.kernels import KernelError
from qarl.quant.types import LowBitTensor
from qarl.rollout.engine import LoadReport
from qarl.sync.export import ExportError, checkpoint_config, write_checkpoint
from qarl.sync.publisher import Publisher, PublishError
from tests.support.learners import make_learner

SIZES = {"a": 4, "b.w": 1, "c": 4, "d": 1}
_TENSORS = [torch.full((size,), n).int() for n, size in enumerate(SIZES.values())]
STREAM = [LowBitTensor(*item) for item in zip(SIZES, _TENSORS, strict=True)]
SEQUENCES = [[1, 5, 9, 2], [3, 3]]


class Ends:
    """Stand-in for both ends of a publish.

    unconsumed and missing are names that the engine reports. offsets are the distances of each
    replica's log-probs from the learner's. sent lists the versions in order.
    """

    def __init__(
        self,
        unconsumed: Sequence[str] = (),
        missing: Sequence[str] = (),
        offsets: Sequence[float] = (0.0,),
    ):
        self.model: Any = make_learner().model
        self.unconsumed = tuple(unconsumed)
        self.missing = tuple(missing)
        self.offsets = offsets
        self.other_bytes = False
        self.canaries = 0
        self.sent: list[int] = []
        self.shared = cast(Any, None)

    def load(self, stream: Iterable[LowBitTensor], version: int) -> LoadReport:
        self.sent.append(version)
        digest = digested(stream).hexdigest()
        return LoadReport("0" * 32 if self.other_bytes else digest, self.unconsumed, self.missing)

    def logprobs_of_each(
        self,
        sequences: Sequence[Sequence[int]],
    ) -> list[list[list[float]]]:
        self.canaries += 1
        assert [list(s) for s in sequences] == SEQUENCES
        tokens = torch.tensor([[*s, 0, 0][:4] for s in SEQUENCES])
        with torch.no_grad():
            own, _ = token_logprobs(
                self.model,
                tokens,
                torch.ones(2, 3, dtype=torch.bool),
            )
        rows = [own[0].tolist(), own[1, :1].tolist()]
        return [[[value + offset for value in row] for row in rows] for offset in self.offsets]

    def shared_layers(self) -> Any:
        return self.shared

    def publisher(
        self,
        canary: bool = False,
        bound: float = 0.5,
        every: int = 2,
        processes: Any = None,
    ) -> Publisher:
        engine: Any = self
        return Publisher(self.model, engine, SEQUENCES if canary else [], bound, every, processes)


def test_a_publish_reports_what_was_sent():
    published = (ends := Ends()).publisher().publish(7)
    sent = digested(ends.model.low_bit_tensors())
    assert published.version == 7
    assert published.digest == sent.hexdigest()
    assert ends.sent == [7]
    assert published.tensors == sent.tensors
    assert published.bytes == sent.bytes
    assert published.canary is None


@pytest.mark.parametrize(
    ("unconsumed", "missing", "problem"),
    [
        pytest.param(
            ["x", "y"], [], "no engine layer took x, y; the run stops here", id="two unconsumed"
        ),
        pytest.param(
            ["x", "y", "z"], [], "no engine layer took x, y, z; the run", id="three unconsumed"
        ),
        pytest.param(
            [],
            ["v", "w", "x", "y", "z"],
            "the engine expected more tensors for v, w, x and 2 more;",
            id="five missing",
        ),
    ],
)
def test_unconsumed_or_missing_tensors_stop_the_run(
    unconsumed: list[str], missing: list[str], problem: str
):
    ends = Ends(unconsumed, missing)
    with pytest.raises(PublishError, match=f"publish of weight version 3 failed: {problem}"):
        ends.publisher().publish(3)
    ends.unconsumed = ends.missing = ()
    ends.publisher().publish(3)
    ends.other_bytes = True
    with pytest.raises(PublishError, match="the engine received other bytes than were sent"):
        ends.publisher().publish(3)


def test_processes_with_different_digests_are_named():
    ends = Ends()
    apart: Any = SimpleNamespace(all_gather=lambda digest: [digest, digest, "f" * 32])
    own = digested(ends.model.low_bit_tensors()).hexdigest()[:16]
    with pytest.raises(
        PublishError,
        match=f"digest {own}… in process 0, {'f' * 16}… in process 2; the run",
    ):
        ends.publisher(processes=apart).publish(0)


def test_the_canary_is_due_at_the_first_publish_and_every_nth():
    publisher = (ends := Ends()).publisher(canary=True, every=3)
    due = [publisher.publish(version).canary is not None for version in range(8)]
    assert due == [True, False, False, True, False, False, True, False]
    assert ends.canaries == 3


@pytest.mark.parametrize(
    "offsets",
    [
        (0.0, 0.25, -0.125),
        (0.75, 0.0),
        (0.0, 0.75),
    ],
)
def test_the_canary_passes_its_bound_and_no_more(offsets: tuple[float, ...]):
    """Contract: the farthest replica is reported, and any replica beyond the
    bound stops the run.
    """
    ends = Ends(offsets=offsets)
    if max(offsets) == 0.25:
        canary = ends.publisher(canary=True).publish(0).canary
        assert canary is not None
        assert canary.mean_abs == pytest.approx(0.25, abs=1e-6)
        ends.publisher(canary=True, bound=0.2500001).publish(0)
    else:
        with pytest.raises(
            PublishError,
            match=r"mean \|Δ log p\| .* is 0.75 nats, above the bound 0.5 \(sync.can",
        ):
            ends.publisher(canary=True).publish(0)
        with pytest.raises(PublishError, match=r"above the bound 0 \(bitwise\)"):
            ends.publisher(canary=True, bound=0.0).publish(0)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("bound", [0.5, 0.0, None])
def test_a_canary_that_is_not_finite_is_named_by_its_dtype(value: float, bound: float | None):
    """Contract: values beyond a dtype's range are no mismatch: whichever side they are on, the
    error names the dtype and, for float16, the remedy; no bound is mentioned.
    """
    ends = Ends(offsets=(0.0, value))
    with pytest.raises(PrecisionError, match=r"^the engine's canary: .* 4 of 4 .* in bfloat16"):
        ends.publisher(canary=True, bound=bound).publish(0)  # type: ignore[arg-type]
    spoiled = Ends(offsets=(0.0,))
    spoiled.model.context.dtype = torch.float16
    publisher = spoiled.publisher(canary=True)
    publisher._fixed.logprobs = lambda: torch.full((2, 3), value)  # type: ignore
    with pytest.raises(PrecisionError, match=r"^the learner's canary: .*--dtype bfloat16"):
        publisher.publish(0)


def test_shared_layers_get_a_version_as_it_is_made(monkeypatch: pytest.MonkeyPatch):
    """Contract: a refresh writes the next version, and publishing that one does not write again.

    Publishing another version writes the present tensors. The reported seconds are those of writing
    and publishing.
    """
    ends = Ends()
    hooks = list[Callable[[], None] | None]()
    multiplied = list[Any]()
    publisher = ends.publisher()
    with pytest.raises(KernelError, match="the engine's layers are in another process"):
        publisher.share_layers()
    ends.shared = "layers"
    monkeypatch.setattr(ends.model, "multiply_with", multiplied.append)
    monkeypatch.setattr(ends.model, "on_refresh", hooks.append)
    monkeypatch.setattr("time.perf_counter", itertools.count().__next__)
    assert publisher.publish(4).seconds == 3
    publisher.share_layers()
    (refreshed,) = hooks
    assert refreshed is not None
    refreshed()
    assert ends.sent == [4, 5]
    published = publisher.publish(5)
    assert published.version == 5
    assert published.seconds == 2
    assert ends.sent == [4, 5]
    refreshed()
    publisher.publish(9)
    publisher.publish(9)
    assert ends.sent == [4, 5, 6, 9, 9]
    publisher.unshare_layers()
    assert multiplied == ["layers", None]
    assert hooks[1:] == [None]


@pytest.mark.parametrize("most", [20, 40, 1 << 20])
def test_an_exports_files_are_those_that_transformers_looks_for(
    most: int, tmp_path: Path, monkeypatch
):
    """Contract: tensors take as many files as needed, a file ends with the tensor that fills it,
    several files get an index, companions of the source are copied, and a note has the digests of
    tensors and other files. An existing folder is not touched.
    """
    monkeypatch.setattr(tensor_files, "_FILE_BYTES", most)
    source = tmp_path / "source"
    folder = tmp_path / "below" / "export"
    source.mkdir()
    for name in (
        "tokenizer.json",
        "chat_template.jinja",
        "model.safetensors",
        "notes.txt",
    ):
        (source / name).write_text(name)
    digest = write_checkpoint(
        STREAM,
        {"b": [1], "a": 2},
        source,
        folder,
        {"run": "r"},
    )
    assert (folder / "config.json").read_text() == '{\n  "a": 2,\n  "b": [\n    1\n  ]\n}\n'
    names = ("chat_template.jinja", "config.json", "tokenizer.json")
    digests = {name: sha256((folder / name).read_bytes()).hexdigest() for name in names}
    note = json.loads((folder / "qarl.json").read_text())
    assert note == {"run": "r", "digest": digest.hexdigest(), "files": digests}
    files = [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    ]
    assert (folder / "tokenizer.json").read_text() == "tokenizer.json"
    assert {p.name for p in folder.iterdir()} == {*names, "qarl.json"} | (
        {*files} if most == 20 else {"model.safetensors"}
    )
    if most == 20:
        where = {
            "a": files[0],
            "b.w": files[0],
            "c": files[1],
            "d": files[1],
        }
        assert all(name in load_file(folder / file) for name, file in where.items())
        index = {"metadata": {"total_size": 40}, "weight_map": where}
        assert (folder / files[2]).read_text() == json.dumps(index, indent=2) + "\n"
    read: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        read |= load_file(file)
    assert all(torch.equal(read.pop(item.name), item.tensor) for item in STREAM)
    assert not read
    assert digest.hexdigest() == digested(STREAM).hexdigest()
    with pytest.raises(ExportError, match="exists; choose another or remove it"):
        write_checkpoint(STREAM, {}, source, folder)
    (tmp_path / "file").write_text("")
    with pytest.raises(ExportError, match=r"cannot write checkpoint .*: Not a directory"):
        write_checkpoint(STREAM, {}, source, tmp_path / "file" / "export")
    write_checkpoint(STREAM, {}, source, tmp_path / "alone")
    assert not (tmp_path / "alone" / "qarl.json").exists()


@pytest.mark.parametrize("scheme", ["bf16", "w8a8"])
def test_an_exports_configuration_says_how_it_is_quantized(scheme: str):
    """Contract: the configuration has the quantization but not the path that the masters were read
    from.
    """
    model = make_learner(scheme, torch.float16).model
    model.config._name_or_path = "/home/me/base"
    model.config.quantization_config = {"stale": 1}  # type: ignore
    written = checkpoint_config(model)
    assert written["dtype"] == "float16"
    assert "_name_or_path" not in written
    assert written.get("quantization_config") == model.plan.quantization_config(None)
    assert (scheme == "bf16") == ("quantization_config" not in written)
