"""Latent attention: the absorbed form equals the expanded form, also with adapters and 8-bit weights, and the cache has one latent per token."""

import json
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from dapo_jax.models.adapter_folder import read_adapter, save_adapter
from dapo_jax.models.decoder import Block
from dapo_jax.models.families import describe, understand
from dapo_jax.models.folder import load_model, save_model, weights_of
from dapo_jax.models.latent_attention import LatentAttention
from dapo_jax.models.layer_kinds import PrefillPart
from dapo_jax.models.lora import lora_shape, parted
from dapo_jax.models.projections import rope_tables
from dapo_jax.models.safetensors_files import SafetensorsFolder
from dapo_jax.models.tensors import exported, place_adapters
from dapo_jax.parallel.mesh import make_mesh
from dapo_jax.parallel.weights import WeightTransfer
from dapo_jax.sampling.caches import token_bytes
from dapo_jax.testing import tiny_params

GOLDEN = Path(__file__).parents[1] / "golden" / "families"
MIXER = LatentAttention(rank=8, plain_dim=6, rotated_dim=4, value_dim=12, query_rank=10)
"""Values are wider than keys."""
DEEPSEEK = {
    "model_type": "deepseek_v3", "vocab_size": 129_280, "hidden_size": 7168, "intermediate_size": 18_432, "num_hidden_layers": 61,
    "num_attention_heads": 128, "max_position_embeddings": 163_840,
}  # fmt: skip
"""The sizes of DeepSeek-V3 that are not defaults of its class."""


def golden(name, **changes):
    return json.loads((GOLDEN / name / "config.json").read_text()) | changes


def deepseek(**changes):
    return understand(DEEPSEEK | changes, "config.json")


def tiny(**changes):
    described = golden("youtu", hidden_size=16, num_hidden_layers=1)
    config = understand(described, "config.json")
    return replace(config, mixers=(MIXER,), head_dim=MIXER.rotated_dim, **changes)


# Slow: each case compiles both forms.
@pytest.mark.parametrize("rank", [0, pytest.param(3, marks=pytest.mark.slow)], ids=["plain", "adapter"])
@pytest.mark.parametrize("eight_bit", [False, True], ids=["float32", "int8"])
def test_both_forms_have_the_same_results(rank, eight_bit):
    """A chunk uses the absorbed form, and a row the expanded form. The weights of both are the same, so only the order of sums differs."""
    lora = lora_shape(rank=rank, alpha=6.0, targets=["latent_attention"]) if rank else None
    config, tokens = tiny(lora=lora), 8
    params = jax.tree.map(lambda x: x + 0.1 * jnp.cos(jnp.arange(x.size, dtype=x.dtype)).reshape(x.shape), tiny_params(config))  # fmt: skip
    mesh = make_mesh(devices=jax.devices()[:1])
    transfer = WeightTransfer(params, mesh, dtype="float32", eight_bit=eight_bit, places=config.places)
    weights = transfer(params)["layers"][0]
    block = nnx.merge(nnx.split(Block(config, config.kinds[0], rngs=nnx.Rngs(0)))[0], weights)
    x = jax.random.normal(jax.random.key(1), (16, tokens))
    positions = jnp.arange(tokens, dtype=jnp.int32)
    (rope,), one = rope_tables(positions, config), jnp.ones((1, tokens), jnp.int32)

    def mixed(before):
        part = PrefillPart(
            one,
            positions[None],
            positions[-1:],
            before,
            jnp.int32(0),
            lambda *kept: kept[:2],
            "float32",
            before is not None,
        )
        return MIXER.mix(block, x, rope, MIXER.prefill(config, part))

    expanded, stored = mixed(None)
    absorbed, buffers = mixed((jnp.zeros((1, MIXER.latent_dim, tokens)), None))
    assert expanded.shape == (config.heads * MIXER.value_dim, tokens)
    np.testing.assert_allclose(absorbed, expanded, rtol=0, atol=2e-6 * float(jnp.abs(expanded).max()))
    np.testing.assert_array_equal(buffers[0], stored[0])
    assert buffers[1] is stored[1] is None


def test_the_cache_of_deepseek_v3_has_576_numbers_per_token_and_layer_on_each_device():
    """512 of the latent and 64 of the rotated key, in two bytes each. The expanded keys and values would have 128 x (192 + 128) = 40,960."""
    config = deepseek()
    assert {(state.kv_heads, state.head_dim, state.value_dim) for state in config.paged} == {(1, 576, 512)}
    for devices, tensor in ((1, 1), (4, 2)):
        mesh = make_mesh(tensor=tensor, fsdp=devices // tensor, devices=jax.devices()[:devices])
        found = token_bytes(config, mesh, dtype="bfloat16", kind="pages")
        assert found == {0: 61 * 576 * 2}
    # One scale for each token.
    assert token_bytes(config, mesh, dtype="int8", kind="pages") == {0: 61 * (576 + 4)}


def test_deepseek_v3_has_its_published_numbers_of_parameters():
    """671 billion, of which a token uses 37 billion (https://arxiv.org/abs/2412.19437) without its embedding."""
    config = deepseek()
    assert (len(config.routed), config.kinds[2].mlp.dim) == (58, 18_432)
    assert round(config.parameters / 1e9) == 671
    assert round((config.active_parameters - config.vocab_size * config.embed_dim) / 1e9) == 37


def test_the_operations_of_a_pair_are_counted_in_both_forms():
    """GLM-4.7-Flash: 20 heads with keys of 192 + 64, values of 256, and latents of 512."""
    config, mixer = deepseek(num_attention_heads=20), LatentAttention(512, 192, 64, 256)
    assert mixer.flops(config, decoding=False) == (0, 20_480)
    assert mixer.flops(config, decoding=True) == (0, 43_520)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("deepseek_v3", {"attention_bias": True}, "attention_bias=True"),
        ("deepseek_v3", {"qk_rope_head_dim": 7}, "qk_rope_head_dim=7 must be even"),
        ("deepseek_v3", {"kv_lora_rank": 0}, "kv_lora_rank is 0"),
        ("deepseek_v3", {"n_group": 3}, "n_group=3 must divide the 8 experts"),
        ("deepseek_v3", {"topk_group": 1, "num_experts_per_tok": 3}, "fewer than num_experts_per_tok=3"),
        ("deepseek_v3", {"first_k_dense_replace": 5}, "first_k_dense_replace is 5"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func='softmax'"),
        ("deepseek_v3", {"topk_method": "group_limited_greedy"}, "topk_method='group_limited_greedy'"),
        ("deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq=2"),
        ("deepseek_v3", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config=.*fp8.* remove the key"),
        ("deepseek_v3", {"rope_interleave": False}, "rope_interleave=False"),
        ("glm4_moe_lite", {"mlp_layer_types": ["dense", "sparse"]}, "mlp_layer_types=.* for each of 4 layers"),
        ("glm4_moe_lite", {"mlp_layer_types": ["linear"] * 4}, "mlp_layer_types=.* 'dense' or 'sparse'"),
        ("youtu", {"n_routed_experts": 8}, "n_routed_experts=8"),
    ],
)  # fmt: skip
def test_settings_that_are_not_supported_are_refused_by_key(name, changes, message):
    with pytest.raises(ValueError, match=message):
        understand(golden(name, **changes), "config.json")


def test_absent_keys_have_the_values_of_each_class():
    absent = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim")
    mixers = {}
    for name in ("deepseek_v3_flat", "glm4_moe_lite", "youtu"):
        described = {key: value for key, value in golden(name).items() if key not in absent}
        config = understand(described | {"qk_rope_head_dim": 64}, "config.json")
        assert (config.head_dim, config.kv_heads) == (64, 4)
        mixers[name] = config.mixers[0]
    assert mixers["deepseek_v3_flat"] == mixers["youtu"] == LatentAttention(512, 128, 64, 128, 1536)
    assert mixers["glm4_moe_lite"] == LatentAttention(512, 192, 64, 256, 768)
    assert understand(golden("youtu", q_lora_rank=None), "config.json").mixers[0].query_rank is None


@pytest.mark.parametrize(
    "changes",
    [
        {"first_k_dense_replace": 0},
        {"first_k_dense_replace": 3},
        {"n_shared_experts": 0},
        {"rope_parameters": {"rope_theta": 1e4, "rope_type": "yarn", "factor": 8.0, "mscale_all_dim": 0.5}},
    ],
)
def test_other_settings_are_written_as_they_were_read(changes):
    config = understand(golden("deepseek_v3", **changes), "config.json")
    assert config != understand(golden("deepseek_v3"), "config.json")
    assert understand(describe(config), "config.json") == config


def test_any_layers_of_glm_may_be_dense():
    kinds = ["dense", "sparse", "dense", "sparse"]
    config = understand(golden("glm4_moe_lite", mlp_layer_types=kinds), "config.json")
    assert config.routed == (1, 3)
    assert describe(config)["mlp_layer_types"] == kinds
    assert "first_k_dense_replace" not in describe(config)
    two = understand(golden("glm4_moe_lite", mlp_layer_types=None, first_k_dense_replace=2), "config.json")
    assert two.routed == (2, 3)


def test_layers_that_predict_further_tokens_are_skipped_and_counted():
    names = load_file(GOLDEN / "glm4_moe_lite_hub" / "model.safetensors")
    further = sum(name.startswith("model.layers.3.") for name in names)
    with pytest.warns(UserWarning, match=f": {further} tensors of .*additional heads are not loaded"):
        config, _ = load_model(GOLDEN / "glm4_moe_lite_hub")
    assert config.layers == 3
    assert weights_of(GOLDEN / "glm4_moe_lite_hub", config).skipped == further
    assert not weights_of(GOLDEN / "glm4_moe_lite", replace(config, layers=4)).skipped


def test_the_bias_of_the_choice_stays_float32_in_files(tmp_path):
    config, params = load_model(GOLDEN / "deepseek_v3")
    save_model(tmp_path, config, params, dtype="bfloat16")
    tensors = SafetensorsFolder(tmp_path)._tensors
    wide = {name for name, tensor in tensors.items() if tensor.dtype == "float32"}
    assert wide == {f"model.layers.{layer}.mlp.gate.e_score_correction_bias" for layer in (1, 2, 3)}
    source = load_file(GOLDEN / "deepseek_v3" / "model.safetensors")
    for name in wide:
        np.testing.assert_array_equal(SafetensorsFolder(tmp_path).read(name, (slice(0, 8),)), source[name])


def test_adapters_have_the_names_of_peft(tmp_path):
    """B A x added to a saved matrix is what the decoder adds, as the mixer does not change the order of rows."""
    shape = lora_shape(rank=2, alpha=4.0, targets=["latent_attention", "mlp"])
    config = replace(load_model(GOLDEN / "deepseek_v3")[0], lora=shape)
    adapters, base = parted(tiny_params(config))
    save_adapter(tmp_path, config, adapters, base="deepseek_v3")
    found, file = read_adapter(tmp_path)
    assert (found.shape, config.trained_parameters) == (shape, sum(map(np.size, jax.tree.leaves(adapters))))
    jax.tree.map(np.testing.assert_array_equal, place_adapters(config, file), adapters)
    whole = (slice(None), slice(None))
    plain, merged = (
        {tensor.name: tensor for tensor in exported(config, base, added)} for added in (None, adapters)
    )
    for name in ("self_attn.kv_b_proj", "self_attn.kv_a_proj_with_mqa", "mlp.shared_experts.gate_proj"):
        name = f"model.layers.2.{name}"
        a, b = (file.read(f"base_model.model.{name}.lora_{part}.weight", whole) for part in "AB")
        change = merged[f"{name}.weight"].fetch() - plain[f"{name}.weight"].fetch()
        np.testing.assert_allclose(change, 2.0 * b @ a, rtol=0, atol=1e-6)


def test_a_tensor_of_quantized_weights_is_refused_by_name(tmp_path):
    """DeepSeek-V3 was released in 8-bit floating point, with a tensor of scales for each matrix."""
    source = GOLDEN / "youtu"
    (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())
    scale = {"model.layers.0.self_attn.o_proj.weight_scale_inv": np.ones((1, 1), np.float32)}
    save_file(load_file(source / "model.safetensors") | scale, tmp_path / "model.safetensors")
    with pytest.raises(
        ValueError, match=r"has the tensors \['model.layers.0.self_attn.o_proj.weight_scale_inv"
    ):
        load_model(tmp_path)
