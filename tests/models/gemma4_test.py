"""Gemma 4: sizes of the models, the cache, layers that share keys and values, and adapters."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dapo_jax.models.adapter_folder import read_adapter, save_adapter
from dapo_jax.models.attention_mixer import Attention
from dapo_jax.models.decoder import graph_of
from dapo_jax.models.families import understand
from dapo_jax.models.folder import load_model, read_config
from dapo_jax.models.lora import lora_shape, parted
from dapo_jax.models.tensors import place_adapters, unread
from dapo_jax.parallel.mesh import make_mesh
from dapo_jax.sampling.caches import sizes_for, token_bytes
from dapo_jax.testing import tiny_decoder_config, tiny_params
from tests.models.golden_families_test import FOLDERS, arrays, rows_of, scores

NEAR, FULL = "sliding_attention", "full_attention"
E4B = {
    "model_type": "gemma4_text", "hidden_size": 2560, "num_hidden_layers": 42, "num_attention_heads": 8, "num_key_value_heads": 2,
    "intermediate_size": 10_240, "sliding_window": 512, "num_kv_shared_layers": 18, "final_logit_softcapping": 30.0,
}  # fmt: skip
OTHERS = {
    "E2B": {
        "hidden_size": 1536, "num_hidden_layers": 35, "num_key_value_heads": 1, "intermediate_size": 6144, "num_kv_shared_layers": 20,
        "use_double_wide_mlp": True, "layer_types": [NEAR, NEAR, NEAR, NEAR, FULL] * 7,
    },
    "31B": {
        "hidden_size": 5376, "num_hidden_layers": 60, "num_attention_heads": 32, "num_key_value_heads": 16, "intermediate_size": 21_504,
        "num_global_key_value_heads": 4, "attention_k_eq_v": True, "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0,
    },
    "26B-A4B": {
        "hidden_size": 2816, "num_hidden_layers": 30, "num_attention_heads": 16, "num_key_value_heads": 8, "intermediate_size": 2112,
        "num_global_key_value_heads": 2, "attention_k_eq_v": True, "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0,
        "enable_moe_block": True, "num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704,
    },
}  # fmt: skip
KIB = 2**10


@functools.cache
def described(name):
    return understand({**E4B, **OTHERS.get(name, {})}, "config.json")


@pytest.mark.parametrize(
    ("name", "billions", "used"), [("E2B", 4.63, 4.63), ("E4B", 7.46, 7.46), ("31B", 30.7, 30.7), ("26B-A4B", 25.2, 3.8)]
)  # fmt: skip
def test_the_published_models_have_their_numbers_of_parameters(name, billions, used):
    config = described(name)
    assert config.parameters == pytest.approx(billions * 1e9, rel=0.003)
    assert config.active_parameters == pytest.approx(used * 1e9, rel=0.02)


def test_the_cache_of_e4b_at_8k_tokens_is_a_third_of_a_full_cache():
    """Of 42 layers, the first 24 have keys and values: 20 with a window (2 heads of 256), 4 without (2 heads of 512). In bfloat16, a token needs
    20 x 2 x 2 x 256 x 2 = 40 KiB and 4 x 2 x 2 x 512 x 2 = 16 KiB. A response keeps 8192 tokens of the latter, and 10 pages of 64 of the former: the 512 tokens
    of a window, and room for the 32 tokens of a call, which may begin at the end of a page."""
    config, mesh = described("E4B"), make_mesh(devices=jax.devices()[:1])
    each = token_bytes(config, mesh, dtype="bfloat16", kind="pages")
    assert each == {0: 16 * KIB, 512: 40 * KIB}
    sizes = sizes_for(
        "pages", mesh, holders=4, capacity=8192, page_tokens=64, call_tokens=32, token_bytes=each
    )
    one = sizes.response_cache_bytes(8192, each)
    assert one == 8192 * 16 * KIB + 10 * 64 * 40 * KIB
    assert sizes.bytes(each) == 4 * one
    assert one < 0.4 * 8192 * 56 * KIB


def test_layers_that_share_read_the_last_layer_of_their_kind():
    config = read_config(FOLDERS["gemma4_e"])
    assert config.sources == (0, 1, 2, 3, 2, 2, 3)
    assert (len(config.paged), len(config.read)) == (4, 7)
    with pytest.raises(ValueError, match="layer 0 reads the keys of an earlier layer"):
        tiny_decoder_config(mixers=(Attention(shares=True), Attention()))


def test_tensors_of_shared_keys_are_skipped_in_their_layers_alone():
    names = unread(read_config(FOLDERS["gemma4_wrapped"]))
    theirs = ("k_norm", "k_proj", "v_proj")
    assert names == {f"model.layers.{layer}.self_attn.{name}.weight" for layer in (3, 4) for name in theirs}


# Slow: compiles a gradient.
@pytest.mark.slow
def test_the_factor_of_the_residual_stream_is_not_trained():
    config, params = load_model(FOLDERS["gemma4_dense"])
    graph, row = graph_of(config), arrays(rows_of("gemma4_dense")[0])

    @jax.jit
    def both(params):
        return jax.value_and_grad(lambda params: scores(graph, params, *row)[0].sum())(params)

    total, gradients = both(params)
    ones = jax.tree_util.tree_map_with_path(
        lambda path, leaf: jnp.ones_like(leaf) if "layer_scalar" in str(path) else leaf, params
    )
    assert abs(float(both(ones)[0] - total)) > 1.0
    for stack in config.stacks:
        assert not np.asarray(gradients[stack]["layer_scalar"][...]).any()
        assert not params[stack]["layer_scalar"].get_metadata("trained")


def test_adapters_of_layers_that_share_have_the_names_of_peft(tmp_path):
    """Layers with their own keys have adapters of k_proj, and others do not. In a wrapped model, the names are those of its class."""
    shape = lora_shape(rank=2, alpha=4.0, targets=["k_proj", "down_proj"])
    config = replace(read_config(FOLDERS["gemma4_wrapped"]), lora=shape)
    adapters, _ = parted(tiny_params(config))
    save_adapter(tmp_path, config, adapters, base="gemma4")
    found, file = read_adapter(tmp_path)
    assert found.shape == shape
    jax.tree.map(np.testing.assert_array_equal, place_adapters(config, file), adapters)
    layers = {int(name.split("layers.")[1].split(".")[0]) for name in file.shapes if "k_proj" in name}
    assert layers == {0, 1, 2}


def test_the_router_of_a_model_with_an_mlp_next_to_experts_allows_adapters_of_the_mlp():
    config = replace(read_config(FOLDERS["gemma4_moe"]), lora=lora_shape(rank=2, alpha=2.0, targets=["all"]))
    adapters = nnx.to_pure_dict(parted(tiny_params(config))[0])
    assert "shared_gate_lora_a" in adapters["blocks"]
    assert "gate_lora_a" not in adapters["blocks"]
