"""A GGUF file has an export's codes, scales and other tensors, in llama.cpp's order and layout.

Blind spot: llama.cpp itself does not run here. transformers' reader stands in for it; what
llama.cpp answers is measured by `python -m benchmarks.gguf`.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from qarl.configs.schemes import SCHEME_NAMES
from qarl.sync.gguf.blocks import supported_schemes
from qarl.sync.gguf.errors import GgufError
from qarl.sync.gguf.exported import read_exported
from qarl.sync.gguf.families import FAMILIES, gguf_family, permuted, rope_factors
from qarl.sync.gguf.vocabulary import read_vocabulary
from qarl.sync.gguf.write import WrittenGguf, write_gguf
from tests.support.gguf_models import FAMILIES as TOYS
from tests.support.gguf_models import dequantized_model, logprobs, redraw, toy_export
from tests.support.tensors import seeded

EXTREMES = [2.0**-24, 255 * 2.0**-24, 2.0**-17, 1.0, -0.5, 0.0123, 65280.0]
"""bfloat16 scales (rounded) at the ends of what fp16 has exactly, and between."""
READ_BY_TRANSFORMERS = ("llama", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "gemma3_text")


def to_gguf(export: Path, folder: Path) -> WrittenGguf:
    exported = read_exported(export)
    vocabulary = read_vocabulary(export, exported.config.vocab_size)
    folder.mkdir()
    return write_gguf(exported, gguf_family(exported.config), vocabulary, folder, "toy", {})


def expected_values(
    tensors: dict[str, torch.Tensor],
    bits: int,
) -> dict[str, torch.Tensor]:
    """Return every weight in fp32: bits of little-endian words, minus half their range, times the
    scale of their columns.
    """
    values = {}
    for name, tensor in tensors.items():
        layer, _, key = name.rpartition(".")
        if key == "weight_packed":
            words = tensor.numpy().view(np.uint32)[..., None]
            shifts = np.arange(0, 32, bits, dtype=np.uint32)
            unsigned = (words >> shifts & np.uint32(2**bits - 1)).reshape(len(words), -1)
            codes = torch.from_numpy(unsigned.astype(np.float32) - 2 ** (bits - 1))
            scale = tensors[f"{layer}.weight_scale"].float()
            per_scale = codes.shape[1] // scale.shape[1]
            values[f"{layer}.weight"] = codes * scale.repeat_interleave(per_scale, dim=1)
        elif key not in ("weight_scale", "weight_shape"):
            values[name] = tensor.float()
    return values


def read(
    folder: Path,
    name: str,
) -> dict[str, tuple[str, np.ndarray]]:
    """Return each tensor's type and values as the gguf package reads them."""
    return {
        each.name: (each.tensor_type.name, dequantize(each.data, each.tensor_type))
        for each in GGUFReader(folder / name).tensors
    }


@pytest.mark.parametrize("kind", READ_BY_TRANSFORMERS)
def test_transformers_reads_a_file_of_drawn_codes_as_the_same_model(kind: str, tmp_path: Path):
    """Every code, scales at both ends of fp16: log-probs equal those of a model whose fp32 weights
    are computed here from the export's words. A head without its permutation would differ.
    """
    export = toy_export(tmp_path, kind)
    # scales beside 1 would overflow log-probs
    tensors = redraw(export, [2.0**-24, 2.0**-17, 0.004, 0.0123])
    written = to_gguf(export, tmp_path / "gguf")
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path / "gguf", gguf_file=written.name, dtype=torch.float32
    )
    expected = dequantized_model(kind, expected_values(tensors, bits=4))
    tokens = torch.randint(0, 300, (2, 9), generator=seeded(1))
    assert torch.equal(logprobs(model, tokens), logprobs(expected, tokens))


@pytest.mark.parametrize(
    ("scheme", "bits", "kind"),
    [
        ("w4a16-g32", 4, "Q4_0"),
        ("w4a16-g64", 4, "Q4_0"),
        ("w4a16", 4, "Q4_0"),
        ("w4a16-channel", 4, "Q4_0"),
        ("w8a16", 8, "Q8_0"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_drawn_codes_and_extreme_scales_are_equal_to_the_bit(
    scheme: str, bits: int, kind: str, dtype: torch.dtype, tmp_path: Path
):
    export = toy_export(tmp_path, "qwen3", scheme, dtype)
    values = expected_values(redraw(export, EXTREMES, seed=bits), bits)
    written = to_gguf(export, tmp_path / "gguf")
    actual = read(tmp_path / "gguf", written.name)
    name = "blk.1.ffn_down.weight"
    assert actual[name][0] == kind
    assert torch.equal(
        torch.from_numpy(actual[name][1]), values["model.layers.1.mlp.down_proj.weight"]
    )
    plain = {torch.bfloat16: "BF16", torch.float16: "F16"}[dtype]
    assert actual["token_embd.weight"][0] == plain
    assert torch.equal(
        torch.from_numpy(actual["token_embd.weight"][1]).float(),
        values["model.embed_tokens.weight"],
    )
    assert actual["output_norm.weight"][0] == "F32"


def test_mxfp4_codes_and_powers_of_two_are_equal(tmp_path: Path):
    """e2m1: ±{0, ½, 1, 1½, 2, 3, 4, 6} times 2^(exponent - 127)."""
    export = toy_export(tmp_path, "qwen3", "mxfp4a16")
    tensors = redraw(export, [])
    layer = "model.layers.0.mlp.up_proj"
    exponents = tensors[f"{layer}.weight_scale"]
    exponents.copy_(torch.randint(0, 253, exponents.shape, generator=seeded(2)).to(torch.uint8))
    save_file(tensors, export / "model.safetensors", metadata={"format": "pt"})
    written = to_gguf(export, tmp_path / "gguf")
    kind, actual = read(tmp_path / "gguf", written.name)["blk.0.ffn_up.weight"]
    magnitudes = np.array(
        [0, 0.5, 1, 1.5, 2, 3, 4, 6],
        dtype=np.float64,
    )
    table = np.concatenate([magnitudes, -magnitudes])
    packed = tensors[f"{layer}.weight_packed"].numpy()
    codes = table[np.stack([packed & 15, packed >> 4], axis=-1).reshape(len(packed), -1)]
    scale = 2.0 ** (exponents.numpy().astype(np.float64) - 127).repeat(32, axis=1)
    assert kind == "MXFP4"
    assert np.array_equal(actual, codes * scale)


def test_mixtral_and_mistral_files_have_every_tensor_of_the_export(tmp_path: Path):
    """transformers' reader has neither; experts are stacked, and q's rows change places."""
    export = toy_export(tmp_path, "mixtral")
    values = expected_values(redraw(export, EXTREMES), 4)
    written = to_gguf(export, tmp_path / "gguf")
    actual = read(tmp_path / "gguf", written.name)
    experts = "model.layers.1.block_sparse_moe.experts"
    for name, key in (("gate", "w1"), ("up", "w3"), ("down", "w2")):
        stack = torch.stack([values[f"{experts}.{n}.{key}.weight"] for n in range(3)])
        kind, tensor = actual[f"blk.1.ffn_{name}_exps.weight"]
        assert kind == "Q4_0"
        assert torch.equal(torch.from_numpy(tensor), stack)
    q = values["model.layers.0.self_attn.q_proj.weight"]
    # Head 0 has rows 0 to 31: llama.cpp's pairs are rows 0 and 16, 1 and 17, and so on.
    order = [row for i in range(16) for row in (i, 16 + i)]
    assert np.array_equal(actual["blk.0.attn_q.weight"][1][:32], q[order].numpy())
    assert actual["blk.0.ffn_gate_inp.weight"][0] == "F32"


def test_gemmas_norms_have_what_the_model_adds_to_them(tmp_path: Path):
    """llama.cpp multiplies by a norm's weight alone, Gemma by that and 1, added in fp32."""
    export = toy_export(tmp_path, "gemma3_text")
    weight = load_file(export / "model.safetensors")["model.layers.0.self_attn.q_norm.weight"]
    written = to_gguf(export, tmp_path / "gguf")
    kind, values = read(tmp_path / "gguf", written.name)["blk.0.attn_q_norm.weight"]
    assert kind == "F32"
    assert np.array_equal(values, 1 + weight.float().numpy())
    fields = GGUFReader(tmp_path / "gguf" / written.name).fields
    settings = {name: field.contents() for name, field in fields.items()}
    assert settings["gemma3.attention.sliding_window"] == 4
    assert settings["gemma3.rope.freq_base_swa"] == 10_000
    assert settings["gemma3.rope.freq_base"] == 1_000_000


def test_a_bias_changes_places_with_its_rows(tmp_path: Path):
    export = toy_export(tmp_path, "llama", attention_bias=True)
    written = to_gguf(export, tmp_path / "gguf")
    actual = read(tmp_path / "gguf", written.name)
    bias = load_file(export / "model.safetensors")["model.layers.0.self_attn.k_proj.bias"]
    order = [row for i in range(16) for row in (i, 16 + i)]
    assert np.array_equal(actual["blk.0.attn_k.bias"][1][:32], bias.float()[order].numpy())


def test_the_permutation_keeps_rows_within_their_head():
    rows = torch.arange(2 * 6).view(12, 1)
    assert permuted(rows, 2).flatten().tolist() == [0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11]


@pytest.mark.parametrize(
    ("scale", "text"), [(2.0**-26, "1.4901161193847656e-08"), (2.0**17, "131072.0")]
)
def test_a_scale_that_fp16_lacks_is_refused_by_layer_and_value(
    scale: float, text: str, tmp_path: Path
):
    export = toy_export(tmp_path, "qwen3")
    tensors = redraw(export, [1.0])
    layer = "model.layers.1.mlp.up_proj"
    tensors[f"{layer}.weight_scale"][3, 2] = scale
    save_file(tensors, export / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(GgufError) as error:
        to_gguf(export, tmp_path / "gguf")
    assert f"layer '{layer}'" in str(error.value)
    assert f"the scale {text} of row 3, columns 64 to 95" in str(error.value)
    assert f"--layers {layer}=bf16" in str(error.value)
    assert not list((tmp_path / "gguf").iterdir())


def test_a_scale_that_fp16_lacks_is_no_matter_where_all_codes_are_zero(tmp_path: Path):
    export = toy_export(tmp_path, "qwen3")
    tensors = redraw(export, [1.0])
    layer = "model.layers.1.mlp.up_proj"
    tensors[f"{layer}.weight_scale"][3, 2] = 2.0**-40
    # 8 codes a word: columns 64 to 95 are words 8 to 11, and code 0 is stored as 8
    tensors[f"{layer}.weight_packed"][3, 8:12] = int("88888888", 16) - 2**32
    save_file(tensors, export / "model.safetensors", metadata={"format": "pt"})
    written = to_gguf(export, tmp_path / "gguf")
    (tensor,) = (
        t
        for t in GGUFReader(tmp_path / "gguf" / written.name).tensors
        if t.name == "blk.1.ffn_up.weight"
    )
    block = dequantize(tensor.data, tensor.tensor_type)[3, 64:96]
    assert not block.any()


def test_the_schemes_that_gguf_has_are_these():
    assert set(supported_schemes()) == {
        "w4a16",
        "w4a16-g64",
        "w4a16-g32",
        "w4a16-channel",
        "w8a16",
        "mxfp4a16",
    }


@pytest.mark.parametrize(
    "scheme", sorted(set(SCHEME_NAMES) - set(supported_schemes()) - {"bf16", "w4afp8", "w4a8"})
)
def test_other_schemes_are_refused_with_a_reason_and_those_that_fit(scheme: str, tmp_path: Path):
    export = toy_export(tmp_path, "qwen3", scheme)
    with pytest.raises(GgufError, match=f"is in scheme '{scheme}'") as error:
        to_gguf(export, tmp_path / "gguf")
    assert ("activations are" in str(error.value)) == (scheme != "nvfp4a16")
    assert "w4a16-g64" in str(error.value)


def test_an_unquantized_export_keeps_its_bits(tmp_path: Path):
    export = toy_export(tmp_path, "qwen2", "bf16")
    written = to_gguf(export, tmp_path / "gguf")
    assert set(written.kinds) == {"BF16", "F32"}
    assert written.name == "toy-BF16.gguf"


@pytest.mark.parametrize("kind", TOYS)
def test_the_digest_of_an_export_is_that_of_its_files(kind: str, tmp_path: Path):
    """The stream's order, which the digest depends on, is found again without the learner."""
    export = toy_export(tmp_path, kind)
    noted = json.loads((export / "qarl.json").read_text())["digest"]
    read_exported(export).check_digest(noted)
    tensors = load_file(export / "model.safetensors")
    tensors["model.norm.weight"][5] *= 1.01
    save_file(tensors, export / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(GgufError, match=f"was changed after it was exported.*{noted}"):
        read_exported(export).check_digest(noted)


def test_a_changed_byte_of_the_file_is_noticed_when_it_is_read_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    export = toy_export(tmp_path, "qwen3")
    from qarl.sync.gguf import write

    lay_out = write.blocks_of

    def torn(weight: Any, layer: str) -> np.ndarray:
        blocks = lay_out(weight, layer).copy()
        blocks[-1, -1] ^= 16
        return blocks

    monkeypatch.setattr(write, "blocks_of", torn)
    with pytest.raises(GgufError, match="tensors that differ from the export's, the first being"):
        to_gguf(export, tmp_path / "gguf")


LOCAL = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 20_000.0},
    "full_attention": {"rope_type": "default", "rope_theta": 1_000_000.0},
}


def config_of(kind: str, **changes: Any) -> Any:
    return AutoConfig.for_model(kind, **{**TOYS.get(kind, {}), **changes})


@pytest.mark.parametrize(
    ("kind", "changes", "words"),
    [
        ("gemma2", {}, "model type 'gemma2' is not among"),
        ("gemma3_text", {"query_pre_attn_scalar": 168}, "query_pre_attn_scalar 168"),
        ("gemma3_text", {"layer_types": ["sliding_attention"] * 6}, "layer_types ['sliding"),
        ("gemma3_text", {"final_logit_softcapping": 30.0}, "final_logit_softcapping 30.0"),
        ("gemma3_text", {"rope_parameters": LOCAL}, "rope_parameters of windows"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ("llama", {"mlp_bias": True}, "mlp_bias True"),
        ("mistral", {"sliding_window": 32, "max_position_embeddings": 64}, "sliding_window 32"),
        ("qwen3_moe", {"norm_topk_prob": False}, "norm_topk_prob False"),
        ("qwen2_moe", {"norm_topk_prob": True}, "norm_topk_prob True"),
        ("qwen3_moe", {"mlp_only_layers": [0]}, "mlp_only_layers [0]"),
        (
            "qwen3",
            {
                "rope_parameters": {
                    "rope_type": "yarn",
                    "rope_theta": 1e4,
                    "factor": 4.0,
                    "original_max_position_embeddings": 64,
                }
            },
            "rope_type 'yarn'",
        ),
    ],
)
def test_what_llama_cpp_would_ignore_is_refused(kind: str, changes: dict[str, Any], words: str):
    with pytest.raises(GgufError) as error:
        gguf_family(config_of(kind, **changes))
    assert words in str(error.value)
    assert "qarl serve" in str(error.value)


def test_every_family_has_a_toy():
    assert FAMILIES.keys() == TOYS.keys()


def test_llama3s_frequency_factors_are_those_of_transformers(tmp_path: Path):
    rope = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = config_of("llama", rope_parameters=rope, head_dim=128, max_position_embeddings=131072)
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = 1.0 / (500000.0 ** (torch.arange(0, 128, 2).float() / 128))
    factors = rope_factors(config)
    assert factors is not None
    assert torch.allclose(factors, plain / scaled, rtol=1e-6, atol=0)
    assert factors[0] == 1.0
    assert factors[-1] == 8.0
