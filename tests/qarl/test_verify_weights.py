"""`qarl verify weights`: faults planted into checkpoints of random models, names of other
frameworks, and checkpoints that are refused.

Blind spot: the models are random, so that no two matrices resemble each other, and small. Codes of
GPTQ or AWQ are told from stale ones by nobody here.
"""

import json
import random
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
from safetensors.torch import save_file

import qarl
from qarl.cli.main import main
from qarl.configs.errors import ModelError
from qarl.quant.materialize import materialize
from qarl.quant.schemes import get_scheme
from qarl.verify.findings import VerifyInputError
from qarl.verify.names import stripped
from tests.support.drawn_checkpoints import (
    CLEAN,
    FAULTS,
    codes,
    draw_pair,
    fused,
    linears,
    masters,
    quantization,
    read,
    write,
)
from tests.support.profiles import examples


def pair(
    folder: Path,
    scheme: str = "w4a16-g64",
    family: str = "llama",
) -> tuple[Path, Path]:
    """Write masters of a random model and their codes; return both folders."""
    source = folder / "masters"
    masters(source, random.Random(0), torch.float32, family)
    tensors = read(source)
    engine = write(
        folder / "engine",
        source,
        codes(tensors, scheme),
        quantization_config=quantization(tensors, scheme),
    )
    return source, engine


def change(engine: Path, **settings: Any) -> None:
    """Change settings of a folder's config.json."""
    file = engine / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))


@pytest.mark.parametrize("seed", range(examples(5 * len(FAULTS)) // len(FAULTS)))
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_named_and_no_other(tmp_path: Path, fault: str, seed: int):
    rng = random.Random(f"named-{fault}-{seed}")
    torch.manual_seed(seed)
    drawn = draw_pair(tmp_path, rng, fault)
    report = qarl.verify.weights(drawn.trainer, drawn.engine, drawn.config)
    assert [cause.name for cause in report.faults] == [fault], (drawn.said, report.lines())
    if "layer" in drawn.said:
        places = report.faults[0].about
        assert any(name.startswith(drawn.said["layer"]) for name in places), places


@pytest.mark.parametrize("seed", range(examples(5 * len(CLEAN)) // len(CLEAN)))
@pytest.mark.parametrize("kind", CLEAN)
def test_a_clean_pair_has_no_fault(tmp_path: Path, kind: str, seed: int):
    rng = random.Random(f"clean-{kind}-{seed}")
    drawn = draw_pair(tmp_path, rng, kind)
    report = qarl.verify.weights(drawn.trainer, drawn.engine, drawn.config)
    assert report.agrees, (drawn.said, report.lines())
    assert len(report.layers) > 20  # two decoder layers, head, embedding and norms


def test_codes_of_these_masters_are_told_from_merely_nearest_ones(tmp_path: Path):
    """Scales that are 2 % larger than the masters' own still make every code the nearest one."""
    source, engine = pair(tmp_path)
    layer = "model.layers.1.mlp.up_proj"
    tensors = read(engine)
    master = read(source)[f"{layer}.weight"]
    scale = (tensors[f"{layer}.weight_scale"].float() * 1.02).to(torch.bfloat16)
    kept = materialize(master, get_scheme("w4a16-g64"), torch.bfloat16, scale=scale)
    tensors |= {f"{layer}.{leaf}": value for leaf, value in kept.tensors()}
    save_file(tensors, engine / "model.safetensors")
    states = {each.name: each.state for each in qarl.verify.weights(source, engine).layers}
    assert states[layer] == "nearest codes under other scales"
    assert states["model.layers.0.mlp.up_proj"] == "codes of these masters, bit for bit"


def test_codes_that_are_not_packed_are_compared_too(tmp_path: Path):
    """Contract: in the format int-quantized, one int8 a code. Blind spot until 2026-11: only scales
    were compared, so that any codes counted as these masters'.
    """
    source, engine = pair(tmp_path)
    config = json.loads((engine / "config.json").read_text())
    settings = config["quantization_config"]
    for each in (settings, *settings["config_groups"].values()):
        each["format"] = "int-quantized"
    (engine / "config.json").write_text(json.dumps(config))
    tensors = read(engine)
    for name in [name for name in tensors if name.endswith("weight_packed")]:
        layer = name.removesuffix(".weight_packed")
        shape = tensors.pop(f"{layer}.weight_shape").tolist()
        tensors[f"{layer}.weight"] = unpack_from_int32(tensors.pop(name), 4, torch.Size(shape))
    layer = "model.layers.0.mlp.up_proj"
    save_file(tensors, engine / "model.safetensors")
    clean = qarl.verify.weights(source, engine)
    assert clean.agrees, clean.lines()
    states = {each.name: each.state for each in clean.layers}
    assert states[layer] == "codes of these masters, bit for bit"
    generator = torch.Generator().manual_seed(0)
    shape = tensors[f"{layer}.weight"].shape
    drawn = torch.randint(-8, 8, shape, generator=generator, dtype=torch.int8)
    save_file({**tensors, f"{layer}.weight": drawn}, engine / "model.safetensors")
    (cause,) = qarl.verify.weights(source, engine).faults
    assert cause.about == (layer,)


def test_one_code_that_is_not_the_nearest_is_a_fault(tmp_path: Path):
    source, engine = pair(tmp_path)
    tensors = read(engine)
    tensors["model.layers.0.mlp.up_proj.weight_packed"][3, 5] ^= 4
    save_file(tensors, engine / "model.safetensors")
    (cause,) = qarl.verify.weights(source, engine).faults
    assert (cause.name, cause.about) == ("stale", ("model.layers.0.mlp.up_proj",))


def test_what_the_trainer_means_is_not_guessed(tmp_path: Path):
    """Contract: without --config nothing is said of ignore lists, and the report says so."""
    source, engine = pair(tmp_path)
    report = qarl.verify.weights(source, engine)
    assert any("give --config" in text for text in report.unchecked)
    meant = tmp_path / "quantization.json"
    meant.write_text(json.dumps(quantization(read(source), "w4a16-g64")))
    assert not qarl.verify.weights(source, engine, meant).unchecked


def test_what_one_side_alone_has_is_counted_by_side(tmp_path: Path):
    """Contract: a cause's count and its layers are of the side that it names, for whole layers and
    for tensors beside a layer's weight.
    """
    source, engine = pair(tmp_path)
    ours, theirs = read(source), read(engine)
    for leaf in ("gate_proj", "up_proj"):
        for name in [name for name in theirs if f"layers.0.mlp.{leaf}." in name]:
            del theirs[name]
    del ours["model.layers.1.mlp.down_proj.weight"]
    ours["model.layers.0.self_attn.o_proj.bias"] = torch.zeros(128)
    theirs["model.layers.1.self_attn.o_proj.bias"] = torch.zeros(128)
    save_file(ours, source / "model.safetensors")
    save_file(theirs, engine / "model.safetensors")
    causes = qarl.verify.weights(source, engine).faults
    assert {cause.name for cause in causes} == {"missing"}
    assert {cause.evidence: cause.about for cause in causes} == {
        "2 layers are the trainer's alone": (
            "model.layers.0.mlp.gate_proj",
            "model.layers.0.mlp.up_proj",
        ),
        "1 layer is the engine's alone": ("model.layers.1.mlp.down_proj",),
        "the trainer alone has it": ("model.layers.0.self_attn.o_proj.bias",),
        "the engine alone has it": ("model.layers.1.self_attn.o_proj.bias",),
    }


def test_rotary_pairs_in_another_order_are_named(tmp_path: Path):
    """Rows 2i and 2i + 1 of a head hold a pair, in place of rows i and i + 16 of 32."""
    source, engine = pair(tmp_path)
    tensors = read(source)
    name = "model.layers.0.self_attn.q_proj.weight"
    heads = tensors[name].view(4, 2, 16, 128)
    tensors[name] = heads.transpose(1, 2).reshape(128, 128).contiguous()
    save_file(tensors, source / "model.safetensors")
    (cause,) = qarl.verify.weights(source, engine).faults
    assert cause.name == "permuted"
    assert "interleaved rotary pairs" in cause.evidence


def test_stacked_experts_are_compared_one_by_one(tmp_path: Path):
    """transformers holds a layer's experts as one tensor in memory: [E, 2F, H] and [E, H, F]."""
    source, engine = pair(tmp_path, "w8a8", "qwen3-moe")
    tensors = read(source)
    stacked = {name: value for name, value in tensors.items() if ".experts." not in name}
    for layer in (0, 1):
        prefix = f"model.layers.{layer}.mlp.experts"
        parts = {
            leaf: torch.stack([tensors[f"{prefix}.{n}.{leaf}.weight"] for n in range(4)])
            for leaf in ("gate_proj", "up_proj", "down_proj")
        }
        stacked[f"{prefix}.gate_up_proj"] = torch.cat([parts["gate_proj"], parts["up_proj"]], 1)
        stacked[f"{prefix}.down_proj"] = parts["down_proj"]
    assert qarl.verify.weights(stacked, engine).agrees
    stacked["model.layers.1.mlp.experts.down_proj"] = parts["down_proj"][[0, 2, 1, 3]]
    (cause,) = qarl.verify.weights(stacked, engine).faults
    assert cause.name == "expert-order"
    assert cause.about == tuple(f"model.layers.1.mlp.experts.{n}.down_proj" for n in (1, 2))


def test_a_folder_of_weights_alone_is_compared_without_settings(tmp_path: Path):
    """prime-rl's broadcasts have no config.json: its settings come from the engine's, and the
    report says that they were not compared.
    """
    source, engine = pair(tmp_path)
    fused_tensors = fused(read(source))
    save_file(fused_tensors, source / "model.safetensors")
    (source / "config.json").unlink()
    report = qarl.verify.weights(source, engine)
    assert report.agrees
    assert any("has no config.json" in text for text in report.unchecked)


def test_settings_of_tensors_in_memory_are_said_to_be_uncompared(tmp_path: Path, monkeypatch):
    """Contract: they are read by the other side's config.json, which agrees with itself; `~` in the
    other side's path is the home folder.
    """
    source, engine = pair(tmp_path, "w8a8", "qwen3-moe")
    change(engine, rms_norm_eps=0.5)
    tensors = fused(read(source))
    monkeypatch.setenv("HOME", str(tmp_path))
    report = qarl.verify.weights(tensors, "~/engine")
    assert report.agrees
    assert "the trainer's settings: tensors in memory have no config.json" in report.unchecked
    (cause,) = qarl.verify.weights(source, "~/engine").faults
    assert cause.name == "settings"


@pytest.mark.parametrize("side", ["trainer", "engine"])
@pytest.mark.parametrize("leaf", ["self_attn.q_proj.weight", "mlp.up_proj.bias", "norm.weight"])
def test_zeros_of_either_side_are_named(leaf: str, side: str):
    generator = torch.Generator().manual_seed(0)
    shape = (64, 32) if leaf.endswith("q_proj.weight") else (64,)
    drawn = {
        f"model.layers.{layer}.{leaf}": torch.randn(shape, generator=generator) for layer in (0, 1)
    }
    drawn |= {"model.layers.0.self_attn.o_proj.weight": torch.zeros(64, 32)}
    name = f"model.layers.1.{leaf}"
    zeros = drawn | {name: torch.zeros(shape)}
    sides = (zeros, drawn) if side == "trainer" else (drawn, zeros)
    (cause,) = qarl.verify.weights(*sides).faults
    assert (cause.name, cause.evidence) == ("zeros", f"the {side}'s tensor is all zeros")
    assert cause.about == (name.removesuffix(".weight"),)


@pytest.mark.parametrize(
    ("changes", "names", "remedy"),
    [
        ({"rms_norm_eps": 9.999999747378752e-06}, [], ""),
        ({"rope_parameters": {"rope_theta": 10000, "factor": 0.10000000149011612}}, [], ""),
        ({"rope_parameters": {"rope_theta": 10000.0}}, ["settings"], "copy the trainer's config"),
        ({"rms_norm_eps": 1e-6}, ["settings"], "copy the trainer's config.json"),
        ({"model_type": "llama"}, ["settings"], "check that both sides are the same model"),
    ],
)
def test_settings_may_be_rounded_to_float32(
    tmp_path: Path, changes: dict[str, Any], names: list[str], remedy: str
):
    """transformers writes a GGUF file's settings as the float32 numbers that stand in it."""
    config = {
        "model_type": "qwen3",
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_theta": 10000.0, "factor": 0.1},
    }
    for folder, settings in (("trainer", config), ("engine", config | changes)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "config.json").write_text(json.dumps(settings))
        save_file({"model.norm.weight": torch.ones(4)}, tmp_path / folder / "model.safetensors")
    report = qarl.verify.weights(tmp_path / "trainer", tmp_path / "engine")
    assert [cause.name for cause in report.faults] == names
    assert all(cause.remedy.startswith(remedy) for cause in report.faults)


@pytest.mark.parametrize(
    ("value", "cause"),
    [
        (torch.tensor([1.0, float("nan")]), "not-finite"),
        (torch.tensor([1.0, float("inf")]), "not-finite"),
        (torch.ones(3), "shape"),
        (torch.tensor([1.0, 2.5]), "stale"),
        (torch.tensor([1, 2]), "stale"),
    ],
)
def test_a_bias_that_differs_is_named_as_a_weight_is(value: torch.Tensor, cause: str):
    name = "model.layers.0.mlp.up_proj"
    trainer = {f"{name}.weight": torch.ones(2, 2), f"{name}.bias": torch.tensor([1.0, 2.25])}
    (said,) = qarl.verify.weights(trainer, trainer | {f"{name}.bias": value}).faults
    assert (said.name, said.about) == (cause, (f"{name}.bias",))


@pytest.mark.parametrize("tied", ["trainer", "engine"])
def test_another_models_head_has_another_shape(tied: str):
    """Contract: one side ties its head to the embedding, the other is a model of another width."""
    embedding = "model.embed_tokens.weight"
    one = {embedding: torch.ones(8, 4)}
    other = {embedding: torch.ones(6, 2), "lm_head.weight": torch.ones(6, 2)}
    sides = (one, other) if tied == "trainer" else (other, one)
    (cause,) = qarl.verify.weights(*sides).faults
    assert cause.name == "shape"
    assert set(cause.about) == {"lm_head", "model.embed_tokens"}


@pytest.fixture
def server() -> Iterator[Callable[[dict[str, Any]], str]]:
    """Return a function that starts a server with these answers, by path, and returns its URL."""
    started = []

    def start(answers: dict[str, Any]) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length") or 0))
                self.send_response(200 if self.path in answers else 404)
                self.end_headers()
                self.wfile.write(json.dumps(answers.get(self.path)).encode())

            do_POST = do_GET  # noqa: N815

            def log_message(self, format: str, *args: Any) -> None:
                pass

        started.append(HTTPServer(("127.0.0.1", 0), Handler))
        threading.Thread(target=started[-1].serve_forever, args=(0.01,), daemon=True).start()
        return f"http://127.0.0.1:{started[-1].server_port}"

    yield start
    for each in started:
        each.shutdown()
        each.server_close()


HELD: dict[str, Any] = {
    "config": {},
    "quantization": None,
    "stages": 1,
    "expert_parallel": False,
    "tensors": [],
    "others": {},
}


@pytest.mark.parametrize(
    "answers",
    [
        {"/collective_rpc": {}},
        {"/collective_rpc": []},
        {"/collective_rpc": {"results": []}},
        {"/collective_rpc": {"results": [None]}},
        {"/collective_rpc": {"results": [[1]]}},
        {"/collective_rpc": {"results": [{}]}},
        {"/collective_rpc": {"results": [HELD | {"tensors": [{"name": "a"}]}]}},
        {"/collective_rpc": {"results": [HELD | {"tensors": 1}]}},
        {"/collective_rpc": {"results": [HELD]}, "/weight_info": ["1"]},
    ],
)
def test_a_server_that_answers_in_another_form_is_quoted(
    answers: dict[str, Any], server: Callable[[dict[str, Any]], str]
):
    url = server({"/v1/models": {"data": [{"id": "m"}]}} | answers)
    path = "/weight_info" if "/weight_info" in answers else "/collective_rpc"
    with pytest.raises(VerifyInputError, match=f"'{url}' answers {path} with .*another form"):
        qarl.verify.weights({"model.norm.weight": torch.ones(2)}, url)


def test_a_running_trainer_with_its_own_quantization_refuses_config(
    tmp_path: Path, server: Callable[[dict[str, Any]], str]
):
    source, engine = pair(tmp_path)
    settings = quantization(read(source), "w4a16-g64")
    held = HELD | {"quantization": settings}
    url = server({"/v1/models": {"data": [{"id": "m"}]}, "/collective_rpc": {"results": [held]}})
    with pytest.raises(VerifyInputError, match="--config, but the trainer, a running vLLM, has a"):
        qarl.verify.weights(url, engine, settings)


@pytest.mark.parametrize(
    "wrapped",
    [
        "module.model.layers.0.mlp.up_proj.weight",
        "_orig_mod.module.model.layers.0.mlp.up_proj.weight",
        "_fsdp_wrapped_module.model.layers.0._fsdp_wrapped_module.mlp.up_proj.weight",
        "base_model.model.model.layers.0.mlp.up_proj.base_layer.weight",
        "model.language_model.layers.0.mlp.up_proj.weight",
        "language_model.model.layers.0.mlp.up_proj.weight",
    ],
)
def test_wrappers_are_stripped(wrapped: str):
    assert stripped(wrapped) == "model.layers.0.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["decoder.layers.0.self_attention.linear_qkv.weight"], ["Megatron", "q_proj, k_proj"]),
        (["_fsdp_wrapped_module._flat_param"], ["FSDP", "FULL_STATE_DICT"]),
        (["model.layers.0.mlp.up_proj.lora_A.default.weight"], ["merge"]),
        (["model.layers.0.mlp.up_proj.qweight"], ["another format", "compressed-tensors"]),
        (["other.weight"], ["no layer has the same name", "other"]),
        (["model.norm.weight", "module.model.norm.weight"], ["are both 'model.norm.weight'"]),
    ],
)
def test_names_that_cannot_be_read_are_refused(tmp_path: Path, names: list[str], words: list[str]):
    _, engine = pair(tmp_path)
    with pytest.raises(qarl.verify.VerifyInputError) as error:
        qarl.verify.weights({name: torch.ones(4) for name in names}, engine)
    assert all(word in str(error.value) for word in words), error.value


def test_a_file_in_place_of_a_folder_is_refused(tmp_path: Path):
    trainer, engine = pair(tmp_path)
    with pytest.raises(VerifyInputError, match=r"engine's folder .* is a file; give"):
        qarl.verify.weights(trainer, Path(engine) / "config.json")


def test_fused_rows_without_a_number_of_heads_are_refused(tmp_path: Path):
    tensors = {"model.layers.0.self_attn.qkv_proj.weight": torch.ones(12, 4)}
    with pytest.raises(qarl.verify.VerifyInputError, match="num_attention_heads is unknown"):
        qarl.verify.weights(tensors, {"model.norm.weight": torch.ones(4)})


def test_unusable_folders_are_refused_with_status_2(tmp_path: Path, capsys):
    source, engine = pair(tmp_path)

    def refused(words: str, *options: str) -> None:
        assert main(["verify", "weights", str(source), str(engine), "--report", *options]) == 2
        assert words in " ".join(capsys.readouterr().err.split())

    refused("cannot be read", "--config", str(tmp_path / "nowhere.json"))
    change(engine, quantization_config={"quant_method": "gptq", "bits": 4})
    refused("quantization format 'gptq' is unknown")
    change(engine, quantization_config={"quant_method": "compressed-tensors", "format": "zip"})
    refused("compressed-tensors refuses")
    file = engine / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    refused("cut short")
    assert main(["verify", "weights", str(source), str(tmp_path / "gone")]) == 2
    assert "does not exist" in capsys.readouterr().err
    with pytest.raises(ModelError, match="has no config"):
        qarl.verify.weights(source, tmp_path)


def test_codes_without_a_scheme_are_refused(tmp_path: Path):
    source, engine = pair(tmp_path)
    file = engine / "config.json"
    settings = json.loads(file.read_text())
    del settings["quantization_config"]
    file.write_text(json.dumps(settings))
    with pytest.raises(qarl.verify.VerifyInputError, match="no quantization_config"):
        qarl.verify.weights(source, engine)


def test_the_status_and_the_table(tmp_path: Path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    source, engine = pair(tmp_path)
    count = len([n for n in linears(read(source)) if n != "lm_head"])
    assert main(["verify", "weights", str(source), str(engine)]) == 0
    out = capsys.readouterr().out
    assert f"{count} int4 group 64" in " ".join(out.split())
    assert f"{count}  codes of these masters, bit for bit" in out
    change(engine, rms_norm_eps=0.5)
    report = tmp_path / "report.json"
    assert main(["verify", "weights", str(source), str(engine), "--json", str(report)]) == 1
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80
    assert json.loads(report.read_text())["causes"][0]["name"] == "settings"
    assert main(["verify", "weights", str(source), str(engine), "--report"]) == 0
