"""Tests of the engine's model as a graph: where it takes vLLM's leaves, and which models it
refuses.
"""

import inspect
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AXK1Config,
    BambaConfig,
    BloomConfig,
    BloomForCausalLM,
    DbrxConfig,
    DeepseekV2Config,
    DeepseekV3Config,
    DogeConfig,
    FalconConfig,
    FalconForCausalLM,
    Gemma3nTextConfig,
    GlmMoeDsaConfig,
    JambaConfig,
    LagunaConfig,
    MambaConfig,
    MiMoV2FlashConfig,
    OlmoHybridConfig,
    PhimoeConfig,
    Zamba2Config,
)

from qarl.configs.errors import GraphError, NoEngineModelError
from qarl.preflight.support import require_engine_model
from qarl.quant.checkpoint.shapes import plan_layers
from qarl.quant.checkpoint.whole import served_settings
from qarl.quant.graph import operators
from qarl.quant.kernels import vllm as vllm_kernels
from qarl.quant.layers.context import LayerContext
from qarl.quant.model.agreement import agreement
from qarl.quant.model.low_bit_model import LowBitModel
from qarl.quant.schemes import get_scheme
from tests.support.kernels import no_cuda
from tests.support.models import SIZES, all_logits, qwen3, some_tokens


def test_vllm_has_its_leaves_where_the_graph_takes_them():
    """Contract: if an upgrade of vLLM moves a leaf, this test fails and names it.

    Blind spot: a new operator that runs between leaves; the gradient gate
    (tests/learner/test_gradient_gate.py) and tests/engine/test_families.py catch it.
    """
    from vllm.distributed import parallel_state
    from vllm.model_executor.custom_op import CustomOp
    from vllm.model_executor.layers import rotary_embedding
    from vllm.model_executor.layers.attention import Attention, MLAAttention
    from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter
    from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
    from vllm.model_executor.layers.linear import (
        ColumnParallelLinear,
        ReplicatedLinear,
        RowParallelLinear,
    )
    from vllm.model_executor.layers.logits_processor import LogitsProcessor
    from vllm.model_executor.layers.vocab_parallel_embedding import (
        VocabParallelEmbedding,
    )
    from vllm.model_executor.models.transformers.base import Base

    def text(code: Any) -> str:
        return inspect.getsource(code)

    assert "self._forward_method(*args, **kwargs)" in text(CustomOp.forward)
    for linear in (ColumnParallelLinear, ReplicatedLinear, RowParallelLinear):
        assert "self.quant_method.apply(self, " in text(linear.forward), linear
    assert "lm_head.quant_method.apply(" in text(LogitsProcessor._apply_head)
    assert "self.quant_method.embedding(self, " in text(VocabParallelEmbedding.forward)
    assert list(inspect.signature(Attention.forward).parameters)[1:4] == [
        "query",
        "key",
        "value",
    ]
    assert list(inspect.signature(MLAAttention.forward).parameters)[1:4] == [
        "q",
        "kv_c_normed",
        "k_pe",
    ]
    for attribute in ("kv_b_proj", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim", "num_heads"):
        assert f"self.{attribute} = " in text(inspect.unwrap(MLAAttention.__init__)), attribute
    for attribute in (
        "_forward_entry",
        "_shared_experts",
        "_fse_fuse_gate",
        "routed_experts",
        "router",
    ):
        assert f"self.{attribute} " in text(MoERunner.__init__) or f"self.{attribute}:" in text(
            MoERunner.__init__
        )
    assert list(inspect.signature(BaseRouter._select_experts).parameters)[1:3] == [
        "hidden_states",
        "router_logits",
    ]
    assert isinstance(rotary_embedding._ROPE_DICT, dict)
    assert callable(Base._decorate_for_torch_compile)
    assert all(hasattr(parallel_state, group) for group in vllm_kernels._GROUPS)
    assert {operators.RMSNorm, operators.SiluAndMul}.issubset(CustomOp.__subclasses__())


def test_a_graph_leaves_vllms_groups_and_rotary_embeddings_unchanged():
    """Contract: building a graph and running it changes neither vLLM's process groups nor its cache
    of rotary embeddings. The graph's own weights are never loaded, so code that reads a weight past
    its leaf fails.
    """
    from vllm.distributed import parallel_state
    from vllm.model_executor.layers import rotary_embedding

    kept = dict(rotary_embedding._ROPE_DICT)
    model = LowBitModel(qwen3(), get_scheme("w8a8"), LayerContext(torch.bfloat16, "auto"), "engine")
    all_logits(model, some_tokens())
    assert kept == rotary_embedding._ROPE_DICT
    assert all(
        getattr(parallel_state, group) is not vllm_kernels._ALONE for group in vllm_kernels._GROUPS
    )


LATENT = {
    "q_lora_rank": 64,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 32,
    "v_head_dim": 64,
}


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (
            lambda: BloomForCausalLM(
                BloomConfig(hidden_size=64, n_layer=1, n_head=2, vocab_size=96)
            ),
            (
                r"changes what it loads into"
                r" 'transformer\.h\.0\.self_attention\.query_key_value\.weight'"
            ),
        ),
        (
            lambda: FalconForCausalLM(
                FalconConfig(
                    hidden_size=128,
                    num_hidden_layers=1,
                    num_attention_heads=4,
                    num_kv_heads=2,
                    vocab_size=96,
                    new_decoder_architecture=True,
                )
            ),
            (
                r"changes what it loads into"
                r" 'transformer\.h\.0\.self_attention\.query_key_value\.weight'"
            ),
        ),
    ],
    ids=["turned weights", "weights joined anew"],
)
def test_modules_without_a_leaf_are_refused_by_class_and_name(model: Any, words: str):
    """Contract: "engine" refuses before anything changes. "auto" takes transformers' operators and
    says why, and `qarl schemes --model` says the same from the configuration only.
    """
    with torch.device("meta"):
        empty = model()
    answer = agreement(empty, torch.bfloat16)
    assert answer.level == "floor"
    assert re.search(words, answer.reason)
    with pytest.raises(GraphError, match=words):
        LowBitModel(model(), get_scheme("bf16"), LayerContext(torch.bfloat16, "auto"), "engine")
    without = LowBitModel(model(), get_scheme("bf16"), LayerContext(torch.bfloat16, "auto"))
    assert without.operators == "transformers"
    assert re.search(words, without.why_not_engine)


MIMO: dict[str, Any] = {
    "hybrid_layer_pattern": [0, 0],
    "moe_layer_freq": [0, 1],
    "layernorm_epsilon": 1e-5,
}
"""Fields of MiMo-V2-Flash that vLLM reads and transformers' class does not declare."""
ZAMBA = {
    **SIZES,
    "num_hidden_layers": 6,
    "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid", "hybrid", "hybrid"],
    "num_mem_blocks": 2,
    "num_key_value_heads": 4,
    "n_mamba_heads": 8,
    "mamba_ngroups": 1,
    "adapter_rank": 64,
    "tie_word_embeddings": True,
}


@no_cuda
@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            GlmMoeDsaConfig(
                **{**SIZES, "num_key_value_heads": 4, **LATENT},
                n_routed_experts=4,
                num_experts_per_tok=2,
                moe_intermediate_size=64,
            ),
            r"does not run GlmMoeDsaForCausalLM on this machine: Sparse Attention is not",
        ),
        (MambaConfig(**SIZES), r"its Mamba-1 layers compute a prompt by a kernel \(selective_scan"),
        (JambaConfig(**SIZES, num_experts=1), r"its Mamba-1 layers compute a prompt by a kernel"),
        (
            OlmoHybridConfig(
                **SIZES, pad_token_id=0, linear_num_key_heads=2, linear_num_value_heads=2
            ),
            r"its gated delta nets have kernels for GPUs alone",
        ),
        (
            BambaConfig(**SIZES, mamba_n_heads=8, mamba_d_head=32, attn_layer_indices=[1]),
            r"vLLM supported it until 0\.23\.0, and no longer does",
        ),
        (
            Zamba2Config(**{**ZAMBA, "num_mem_blocks": 4, "tie_word_embeddings": False}),
            r"takes the input embedding for its output head.*another, 'lm_head\.weight'",
        ),
        (
            Zamba2Config(**{**ZAMBA, "num_key_value_heads": 2}),
            r"has \d+ rows in .*qkv_proj', and this model \d+, in .*q_proj.*of heads",
        ),
        (
            MiMoV2FlashConfig(**SIZES, n_routed_experts=4, num_experts_per_tok=2),
            r"it reads 'hybrid_layer_pattern' of config\.json, of which.*; add the field as",
        ),
        (
            MiMoV2FlashConfig(
                **{**SIZES, "num_key_value_heads": 1, "head_dim": 96},
                v_head_dim=64,
                layer_types=["full_attention"] * 2,
                n_routed_experts=4,
                num_experts_per_tok=2,
                moe_intermediate_size=64,
                **MIMO,
            ),
            r"keys of 96 columns and values of 64 \(head_dim, v_head_dim\).*for GPUs alone",
        ),
        (
            AXK1Config(
                **{**SIZES, "num_key_value_heads": 4, **LATENT},
                n_routed_experts=4,
                num_experts_per_tok=2,
                moe_intermediate_size=64,
                n_group=1,
                topk_group=1,
            ),
            r"AXK1ForCausalLM has a norm 'model\.layers\.0\.post_mlp_layernorm', for which",
        ),
        (
            DeepseekV2Config(
                **{**SIZES, "num_key_value_heads": 4, **LATENT},
                n_routed_experts=4,
                num_experts_per_tok=2,
                moe_intermediate_size=64,
                first_k_dense_replace=0,
            ),
            r"its routers choose among groups of experts, and n_group or topk_group is null",
        ),
        (
            DeepseekV3Config(
                **{**SIZES, "num_key_value_heads": 4, **LATENT, "kv_lora_rank": 64},
                n_routed_experts=4,
                n_group=1,
                topk_group=1,
                num_experts_per_tok=2,
                moe_intermediate_size=64,
            ),
            r"its latent attention has 64 \+ 64 columns.*and vLLM's kernel for CPUs 512 \+ 64",
        ),
        (
            LagunaConfig(
                **SIZES,
                num_experts=4,
                num_experts_per_tok=2,
                moe_intermediate_size=64,
                shared_expert_intermediate_size=64,
                num_attention_heads_per_layer=[4, 4],
                layer_types=["full_attention"] * 2,
                mlp_layer_types=["dense", "sparse"],
            ),
            r"does not load 'model\.layers\.1\.mlp\.experts\.e_score_correction_bias', by which",
        ),
        (DogeConfig(**SIZES), r"its attention computes a mask, which vLLM's general class"),
        (
            DbrxConfig(
                d_model=128,
                n_heads=4,
                n_layers=1,
                max_seq_len=64,
                vocab_size=96,
                attn_config={"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
                ffn_config={"hidden_size": 128, "ffn_hidden_size": 64, "moe_num_experts": 4},
            ),
            r"loader looks for 'blocks\.0\.ffn\.experts\.w13_weight', which its class has as",
        ),
    ],
    ids=lambda value: type(value).__name__ if hasattr(value, "model_type") else "",
)
def test_a_model_that_vllm_does_not_run_is_refused_with_its_reason(config: Any, words: str):
    """Contract: `qarl schemes` and a run's checks say so from the configuration alone, though
    transformers' operators could learn it.
    """
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(config)
    with pytest.raises(NoEngineModelError, match=words):
        require_engine_model(empty, plan_layers(empty, get_scheme("bf16")), torch.bfloat16)
    answer = agreement(empty, torch.bfloat16)
    assert answer.level == "no engine"
    assert re.search(words, answer.reason)


@no_cuda
def test_a_model_is_served_by_the_class_that_vllm_has_of_it():
    """Contract: transformers' and vLLM's names of Phi-MoE's class differ in case. vLLM's own class
    is taken, here and by an engine of the export, not its general one. It is refused, because its
    routers get next to no gradient.
    """
    config = PhimoeConfig(
        **{key: size for key, size in SIZES.items() if key != "head_dim"},
        num_local_experts=4,
        num_experts_per_tok=2,
    )
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(config)
    settings = served_settings(empty.config, type(empty).__name__)
    assert settings["architectures"] == ["PhiMoEForCausalLM"]
    answer = agreement(empty, torch.bfloat16)
    assert answer.level == "no engine"
    assert answer.reason.startswith(
        "PhiMoEForCausalLM cannot be trained: its routers weigh an expert by a constant"
    )
    assert answer.reason.endswith("; take another model")


@no_cuda
def test_a_model_that_neither_operators_can_learn_is_refused_by_schemes_and_check():
    """Contract: vLLM's Gemma 3n adds in place, and transformers' forward ends before its soft cap.
    Both commands say so, and a run that asks for the engine's operators has the first reason.
    """
    config = Gemma3nTextConfig(
        **{**SIZES, "head_dim": 32},
        num_kv_shared_layers=1,
        vocab_size_per_layer_input=SIZES["vocab_size"],
        hidden_size_per_layer_input=32,
        laurel_rank=8,
        layer_types=["full_attention"] * 2,
    )
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(config)
    plan = plan_layers(empty, get_scheme("bf16"))
    with pytest.raises(GraphError, match=r"final_logit_softcapping.*in place"):
        require_engine_model(empty, plan, torch.bfloat16)
    with pytest.raises(GraphError, match=r"^the engine's model has a Gemma3nAltUp"):
        require_engine_model(empty, plan, torch.bfloat16, operators="engine")
    answer = agreement(empty, torch.bfloat16)
    assert answer.level == "refused"
    assert re.search(r"in place.*final_logit_softcapping", answer.reason)


@no_cuda
def test_a_checkpoint_whose_names_vllm_does_not_know_has_no_engine():
    """Contract: the reason names the first such tensor, without vLLM's list of all it knows."""
    from qarl.quant.graph.loading import trace_loading

    class Model(nn.Module):
        def load_weights(self, weights: Any) -> None:
            raise ValueError("no parameter named 'b.weight'. The available parameters are: {'a'}")

    config = SimpleNamespace(model_config=SimpleNamespace(dtype=torch.bfloat16))
    skeleton: Any = SimpleNamespace(module=Model(), config=config)
    with pytest.raises(NoEngineModelError, match=r"names: ValueError: no .* 'b\.weight'; take the"):
        trace_loading(skeleton, {"b.weight": (2, 2)})


@no_cuda
def test_layers_that_blocks_share_are_planned_and_multiplied_once():
    """Contract: Zamba2's hybrid layers take turns in two blocks of weights, whose layers have the
    name of the first that has them, in the plan, in vLLM's stacks and among the masters.
    """
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(Zamba2Config(**ZAMBA))
    low_bit = LowBitModel(model, get_scheme("w8a8"), LayerContext(torch.bfloat16, "auto"), "engine")
    shared = [name for name in low_bit.linears if "shared_transformer" in name]
    assert {name.partition(".shared")[0] for name in shared} == {"model.layers.1", "model.layers.3"}
    masters = {id(layer.master) for layer in low_bit.linears.values()}
    assert len(masters) == len(low_bit.linears)
    matrices = {id(p) for name, p in model.named_parameters() if "shared" in name and p.ndim == 2}
    assert matrices <= masters
