"""Post-training quantization: whose values, whose layout, and what is refused."""

import dataclasses
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from qarl.cli.main import main
from qarl.configs.errors import ConfigError
from qarl.configs.load import config_from_tree
from qarl.ptq.compressor import CompressorError, Job, _batches, compress
from qarl.ptq.expected_checkpoint import checkpoint_layout, read_as
from qarl.ptq.export import check_request, initial_codes, quantize, verify
from qarl.ptq.methods import (
    CALIBRATION,
    MAX_CALIBRATION_TOKENS,
    METHODS,
    calibration_count,
    methods_for,
)
from qarl.ptq.source import Source, open_source
from qarl.quant.checkpoint.load import load_masters
from qarl.quant.model.kept_scales import start_from_codes
from qarl.quant.schemes import (
    COMPUTE_DTYPES,
    SCHEMES,
    get_scheme,
    write_quantization_config,
)
from qarl.report.run_folder import RunFolder
from qarl.rollout.open import open_engine
from qarl.sync.audit import AuditError
from qarl.sync.export import ExportError, export_checkpoint
from tests.support import Policies, forks
from tests.support.cases import cases
from tests.support.models import low_bit
from tests.support.moe_models import with_tokenizer
from tests.support.profiles import thorough
from tests.support.runs import succeeded
from tests.support.tensors import as_bytes, stream_digest

BF16 = config_from_tree({"scheme": "bf16"})
SMALL = (
    "--steps",
    "2",
    "--rollout.prompts",
    "8",
    "--rollout.samples",
    "4",
    "--eval.problems",
    "32",
)


def unquantized(folder: Path, out: Path, dtype: str) -> Path:
    """The checkpoint a bf16 run of this policy would deploy."""
    export_checkpoint(
        low_bit(load_masters(folder, torch.float32), "bf16", COMPUTE_DTYPES[dtype]),
        folder,
        out,
    )
    return out


@pytest.mark.parametrize(("scheme", "methods"), cases(__file__, "methods"))
def test_which_methods_are_for_a_scheme(scheme: str, methods: str):
    assert methods_for(SCHEMES[scheme]) == tuple(methods.split())
    for name in METHODS:
        if name in methods.split():
            assert check_request(BF16, "run", name, scheme, None) == (
                0 if name == "rtn" else CALIBRATION
            )
        else:
            with pytest.raises(
                ConfigError, match=f"method '{name}' is for .*, not for '{scheme}'; "
            ):
                check_request(BF16, "run", name, scheme, None)


@given(st.integers(-3, 10_000), st.integers(1, 20_000), st.integers(1, 20_000))
def test_calibration_is_bounded_by_its_worst_case(count: int, prompt: int, new: int):
    limits = {"max_prompt_tokens": prompt, "max_new_tokens": new}
    config = config_from_tree({"rollout": limits, "learner": {"micro_batch_tokens": prompt + new}})
    if count >= 1 and count * (prompt + new) <= MAX_CALIBRATION_TOKENS:
        assert calibration_count("gptq", count, config) == count
    else:
        with pytest.raises(ConfigError, match=f"--calibration {count}: "):
            calibration_count("gptq", count, config)


@pytest.mark.parametrize(("scheme", "arguments", "message"), cases(__file__, "refusals"))
def test_the_command_refuses_in_one_line(
    tmp_path: Path, capsys, scheme: str, arguments: str, message: str
):
    learner = {} if scheme == "bf16" else {"lora": {"name": "lora"}}
    run = RunFolder.create(
        config_from_tree({"scheme": scheme, "output": str(tmp_path / "run"), "learner": learner})
    )
    assert main(["export", str(run.path), "-o", str(tmp_path / "out"), *arguments.split()]) == 2
    assert message in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["run"]


@given(st.lists(st.lists(st.integers(0, 500), min_size=1, max_size=6).map(tuple), max_size=60))
def test_batches_hold_every_sequence_uncut_and_unpadded(
    sequences: list[tuple[int, ...]],
):
    batches = _batches(tuple(sequences))
    rows = [tuple(row) for batch in batches for row in batch["input_ids"].tolist()]
    assert sorted(rows) == sorted(sequences)
    assert all(batch["attention_mask"].all() for batch in batches)


def test_the_placeholder_is_still_needed():
    """When transformers has the class again, or llmcompressor no longer asks for it, the
    placeholder goes.
    """
    from importlib.util import find_spec

    from transformers.models.granitemoe import modeling_granitemoe

    assert not hasattr(modeling_granitemoe, "GraniteMoeParallelExperts")
    found = find_spec("llmcompressor")
    assert found is not None
    assert found.submodule_search_locations
    source = Path(found.submodule_search_locations[0]) / "modeling" / "moe" / "granitemoe.py"
    assert "import GraniteMoeParallelExperts" in source.read_text()


@pytest.mark.slow
@pytest.mark.usefixtures("forked_compressor")
def test_what_llmcompressor_says_is_shown_when_it_fails(tmp_path: Path):
    job = Job(
        str(tmp_path / "nowhere"),
        "w4a16",
        "rtn",
        (),
        (),
        str(tmp_path / "out"),
    )
    with pytest.raises(CompressorError, match="by 'rtn' to 'w4a16' \\(exit status 1\\)") as caught:
        compress(job, tmp_path)
    assert "nowhere" in str(caught.value)


QUANTIZED = {"dense": 14, "qwen3_moe": 15, "mixtral": 18}
"""Matrices: a dense model's linear layers, of a mixture its experts'."""


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "scheme", "dtype", "tied"), cases(__file__, "round to nearest"))
def test_rtn_is_materialize_bit_for_bit(
    request, tmp_path: Path, kind: str, scheme: str, dtype: str, tied: bool
):
    """Contract: round to nearest by llmcompressor is QaRL's export of the same unquantized
    checkpoint: names, dtypes, shapes, bytes; every expert is quantized, no router is. So the
    baseline and QaRL differ in what was trained, not in how it is stored. Once by the real process,
    on which the other tests' forks rest.
    """
    if (kind, scheme) != ("dense", "w4a16"):
        request.getfixturevalue("forked_compressor")
    dense = kind == "dense"
    policy = request.getfixturevalue("random_policy" if dense else "random_experts")(tied)
    masters = policy if dense else with_tokenizer(kind, policy, tmp_path / "masters")
    folder = unquantized(masters, tmp_path / "unquantized", dtype)
    layout = checkpoint_layout(folder, scheme, dtype)
    (tmp_path / "work").mkdir()
    compress(
        Job(str(folder), scheme, "rtn", layout.ignored, (), str(tmp_path / "out")),
        tmp_path / "work",
    )
    theirs = {item.name: item.tensor for item in read_as(layout, tmp_path / "out")}
    compute = COMPUTE_DTYPES[dtype]
    ours = low_bit(load_masters(folder, compute), scheme, compute)
    quantized = 0
    for item in ours.low_bit_tensors():
        tensor = theirs.pop(item.name)
        assert (tensor.dtype, tensor.shape) == (item.tensor.dtype, item.tensor.shape), item.name
        assert torch.equal(as_bytes(tensor), as_bytes(item.tensor)), item.name
        quantized += item.name.endswith("weight_scale") and (dense or ".experts." in item.name)
    assert not theirs
    assert quantized == QUANTIZED[kind]


@pytest.fixture
def written(random_policy: Policies, tmp_path: Path):
    """(layout, folder, tensors): a W4A16 checkpoint by QaRL itself, to be spoiled."""
    folder = unquantized(random_policy(False), tmp_path / "unquantized", "bfloat16")
    layout = checkpoint_layout(folder, "w4a16", "bfloat16")
    export_checkpoint(
        low_bit(load_masters(folder, torch.bfloat16), "w4a16"),
        folder,
        tmp_path / "written",
    )
    return (
        layout,
        tmp_path / "written",
        load_file(tmp_path / "written" / "model.safetensors"),
    )


def test_a_checkpoint_of_the_layout_is_read_in_its_order(written):
    layout, folder, tensors = written
    items = list(read_as(layout, folder))
    assert [item.name for item in items] == [name for name, _, _ in layout.tensors]
    assert all(torch.equal(item.tensor, tensors[item.name]) for item in items)


@pytest.mark.parametrize(("spoil", "message"), cases(__file__, "layouts"))
def test_another_layout_is_refused(written, spoil: str, message: str):
    layout, folder, tensors = written
    if spoil == "unquantized":
        layer = "model.layers.1.mlp.up_proj"
        for suffix in ("packed", "scale", "shape"):
            del tensors[f"{layer}.weight_{suffix}"]
        tensors[f"{layer}.weight"] = torch.zeros(256, 128, dtype=torch.bfloat16)
    elif spoil == "additional":
        tensors["model.layers.0.mlp.gate.weight_scale"] = torch.ones(2, 1)
    else:
        name = "model.layers.0.self_attn.q_proj.weight_scale"
        tensors[name] = tensors[name].float()
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ExportError) as caught:
        read_as(layout, folder)
    assert message in str(caught.value)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plain run of two steps, whose sampler alone is low-bit, where a comparison expects it."""
    folder = tmp_path_factory.mktemp("runs") / "tiny-qwen3-plain-seed0"
    succeeded(
        "train",
        "--scheme",
        "w4a16",
        "--learner.aligned",
        "false",
        "--output",
        folder,
        *SMALL,
        cwd=folder.parent,
    )
    return folder


def load_and_verify(source: Source, folder: Path) -> float:
    with open_engine(folder, source.config.rollout, source.config.dtype) as engine:
        return verify(source, engine)


@pytest.mark.slow
@pytest.mark.usefixtures("forked_compressor")
@pytest.mark.parametrize("scheme", ["w4a16", "w8a8", "fp8"] if thorough() else ["w4a16"])
def test_every_method_gives_a_checkpoint_vllm_loads(run: Path, tmp_path: Path, scheme: str):
    """Each is audited in a fresh engine and stays near the unquantized policy; calibration changes
    the bytes. A run that starts from GPTQ's codes publishes the bytes of that checkpoint first.
    """
    source = open_source(RunFolder.open(run), tmp_path, scheme, 32)
    assert len(source.calibration) == 32
    rollout = source.config.rollout
    assert max(map(len, source.calibration)) <= rollout.max_prompt_tokens + rollout.max_new_tokens
    moved = {}
    digests = {}
    for method in methods_for(SCHEMES[scheme]):
        digests[method] = quantize(source, method, tmp_path / method).hexdigest()
        moved[method] = load_and_verify(source, tmp_path / method)
        assert 0 < moved[method] < 1, moved
    assert len(set(digests.values())) == len(digests)
    model = low_bit(load_masters(source.folder, torch.float32), scheme)
    if scheme != "fp8":
        start_from_codes(model, list(read_as(source.layout, tmp_path / "gptq")))
        assert stream_digest(model.low_bit_tensors()) == digests["gptq"]
    if scheme == "w4a16":
        assert moved["gptq"] < 0.7 * moved["rtn"], moved
        other = dataclasses.replace(
            source, layout=checkpoint_layout(source.folder, "w8a8", "bfloat16")
        )
        with pytest.raises(AuditError, match="scheme 'w8a8'"):
            load_and_verify(other, tmp_path / "rtn")


def test_a_run_begins_with_what_its_method_makes(
    random_policy: Policies, monkeypatch: pytest.MonkeyPatch
):
    """From as many sequences as an export samples, or as the longest leave room for. What codes
    become: test_scales.
    """
    monkeypatch.setattr("qarl.ptq.export.sample_source", lambda *chosen: chosen[-2:])
    monkeypatch.setattr(
        "qarl.ptq.export.quantized_tensors",
        lambda sampled, method, _: iter([method, *sampled]),
    )
    policy: Any = SimpleNamespace(folder=random_policy(True))
    for longest, count in ((64, CALIBRATION), (10**7, 1)):
        limits = {"max_prompt_tokens": 8, "max_new_tokens": longest}
        tree = {
            "scheme": "w8a8",
            "rollout": limits,
            "learner": {"micro_batch_tokens": longest + 8},
        }
        config = config_from_tree({**tree, "quantization": {"init": "gptq", "scale": "kept"}})
        assert initial_codes(policy, config) == ["gptq", "w8a8", count]


@pytest.mark.slow
def test_the_export_command(run: Path, tmp_path: Path):
    """Two lines, a folder `qarl eval` reads, and nothing else: no log, no progress bar, no file in
    the way.
    """
    (tmp_path / "cwd").mkdir()
    arguments = (
        "export",
        run,
        "-o",
        "out",
        "--ptq",
        "gptq",
        "--scheme",
        "w4a16",
        "--calibration",
        "16",
    )
    done = succeeded(*arguments, cwd=tmp_path / "cwd")
    assert "by gptq to w4a16 on 16 sequences (" in done.stdout
    _, served = done.stdout.splitlines()
    count = json.loads((tmp_path / "cwd" / "out" / "qarl.json").read_text())["served"]["questions"]
    assert served.startswith(f"served as evaluated: {count} of {count} questions")
    assert not [word for word in ("it/s", "GPTQ", "INFO", "WARN") if word in done.stderr], (
        done.stderr
    )
    assert [p.name for p in (tmp_path / "cwd").iterdir()] == ["out"]
    ours, theirs = (
        json.loads((f / "config.json").read_text())
        for f in (run / "export", tmp_path / "cwd" / "out")
    )
    assert theirs["quantization_config"] == write_quantization_config(
        [(get_scheme("w4a16"), ["Linear"])], ["lm_head"]
    )
    assert ours == theirs
    note = json.loads((tmp_path / "cwd" / "out" / "qarl.json").read_text())
    assert note["scheme"] == "w4a16"
    assert note["ptq"] == "gptq"
    assert note["step"] == 2
    assert note["task"]["name"] == "chain_sum"


@pytest.mark.slow
@pytest.mark.usefixtures("forked_compressor")
def test_a_comparison_with_what_is_quantized_afterwards(
    run: Path, tmp_path: Path, monkeypatch, capsys
):
    """The plain run is found, and its checkpoint quantized and evaluated by both ways of asking; a
    second call runs nothing and shows the same. Another method is not mixed with what is there.
    """
    monkeypatch.setattr(sys, "executable", str(forks.interpreter(tmp_path)))
    file = tmp_path / "mine.yaml"
    tree = {
        "seeds": [0],
        "evaluate": {"samples": 2, "temperature": 1},
        "variants": {
            "tiny-qwen3-plain": {"aligned": False},
            "rtn": {"ptq": "rtn", "of": "tiny-qwen3-plain"},
        },
    }
    data = []
    for _ in range(2):
        file.write_text(json.dumps(tree))
        command = [
            "compare",
            str(file),
            "--output",
            str(run.parent),
            "--json",
            str(tmp_path / "rows.json"),
            *SMALL,
        ]
        assert main(command) == 0
        data.append(json.loads((tmp_path / "rows.json").read_text())["data"])
    assert data[0] == data[1]
    assert data[0]["failed"] == []
    plain, rtn = data[0]["cells"]
    assert (plain["variant"], rtn["variant"]) == ("tiny-qwen3-plain", "rtn")
    assert rtn["moved"] > 0
    assert all(0 <= cell[name] <= 1 for cell in (plain, rtn) for name in ("accuracy", "evaluated"))
    out = capsys.readouterr().out
    assert "2 cells, 0 of them finished" in out
    assert "2 cells, 2 of them finished" in out
    assert not list(run.parent.glob("tiny-qwen3-plain-seed0.yaml")), "nothing was trained"
    tree["variants"]["rtn"]["ptq"] = "gptq"
    file.write_text(json.dumps(tree))
    assert main(["compare", str(file), "--output", str(run.parent), *SMALL]) == 2
    assert "was quantized to w4a16 by rtn, not to w4a16 by gptq" in capsys.readouterr().err.replace(
        "\n", " "
    )
