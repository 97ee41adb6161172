"""Gemma 4: sizes of the models, layers that share keys and values, the table of embeddings, and adapters."""

import functools
import re
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from dapo_jax.models import gemma4
from dapo_jax.models.adapter_folder import read_adapter, save_adapter
from dapo_jax.models.attention_mixer import Attention
from dapo_jax.models.decoder import graph_of
from dapo_jax.models.experts import Experts
from dapo_jax.models.families import understand
from dapo_jax.models.folder import load_model, read_config
from dapo_jax.models.lora import lora_shape, parted
from dapo_jax.models.presets import preset
from dapo_jax.models.tensors import place_adapters, shapes_of, unread
from dapo_jax.parallel.mesh import BATCH_AXES, make_mesh
from dapo_jax.parallel.sharding import SAMPLER_RULES, TRAINER_RULES, shardings
from dapo_jax.parallel.training_layout import MeshLayout, SamplerLayout
from dapo_jax.parallel.weights import WeightTransfer
from dapo_jax.sampling.decoding import decoding
from dapo_jax.sampling.engine import DecoderEngine
from dapo_jax.sampling.engine_spec import EngineSpec
from dapo_jax.sampling.prompt_packing import PrefillShape
from dapo_jax.testing import tiny_decoder_config, tiny_params
from tests.models.golden_families_test import FOLDERS, arrays, logits_of, passed, rows_of, scores

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


@functools.cache
def described(name):
    return understand({**E4B, **OTHERS.get(name, {})}, "config.json")


@pytest.mark.parametrize(
    ("name", "billions", "used"), [("E2B", 4.63, 4.63), ("E4B", 7.46, 7.46), ("31B", 30.7, 30.7), ("26B-A4B", 25.2, 3.8)]
)  # fmt: skip
def test_the_published_models_have_their_numbers_of_parameters(name, billions, used):
    config = described(name)
    assert name != "E4B" or config == preset("gemma-4-e4b")
    assert config.parameters == pytest.approx(billions * 1e9, rel=0.003)
    assert config.active_parameters == pytest.approx(used * 1e9, rel=0.02)


def test_layers_that_share_read_the_last_layer_of_their_kind():
    config = read_config(FOLDERS["gemma4_e"])
    assert config.sources == (0, 1, 2, 3, 2, 2, 3)
    assert (len(config.paged), len(config.read)) == (4, 7)
    with pytest.raises(ValueError, match="layer 0 reads the keys of an earlier layer"):
        tiny_decoder_config(mixers=(Attention(shares=True), Attention()))


# Slow: lowers the program for another cache. The default tier lowers it for pages.
@pytest.mark.parametrize("cache", ["pages", pytest.param("slots", marks=pytest.mark.slow)])
def test_only_the_layers_that_own_keys_write_them_in_a_decoding_step(cache):
    """Four of seven layers have keys and values, so a step has eight scatters into arrays of a cache. No other array has their shapes."""
    config, mesh = read_config(FOLDERS["gemma4_e"]), make_mesh(devices=jax.devices()[:1])
    spec = {"slots": 3, "capacity": 48, "steps_per_call": 1, "stop_ids": [], "cache": cache, "page_tokens": 16 * (cache == "pages")}  # fmt: skip
    engine = DecoderEngine(
        config, mesh, EngineSpec(**spec, prefill=PrefillShape(rows=1, width=48, longest=48))
    )
    params = WeightTransfer(shapes_of(config), mesh, dtype="float32", places=config.places).shapes
    lowered = engine.programs(params, decoding(temperature=0.0))["generate"]().as_text()
    arrays_of_cache = [
        "x".join(map(str, leaf.shape)) for leaf in jax.tree.leaves(engine.state_structs.layers)
    ]
    written = re.findall(r"stablehlo.scatter.*?-> tensor<([\dx]+)xf32>", lowered, re.DOTALL)
    assert sorted(shape for shape in written if shape in arrays_of_cache) == sorted(arrays_of_cache)


def test_tensors_of_shared_keys_are_skipped_in_their_layers_alone():
    is_unread, parts = (
        unread(read_config(FOLDERS["gemma4_wrapped"])),
        ("q_proj", "k_proj", "v_proj", "q_norm", "k_norm"),
    )
    found = {
        (layer, part)
        for layer in range(5)
        for part in parts
        if is_unread(f"model.layers.{layer}.self_attn.{part}.weight")
    }
    assert found == {(layer, part) for layer in (3, 4) for part in ("k_proj", "v_proj", "k_norm")}


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


def without_norm(x, weight, eps):
    return x * weight[:, None]


def reads_its_input(self, layer, x, routes, read, original=Experts.apply):
    return original(self, layer, x, routes)


# Slow: compiles a model for each part.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "part", "change"),
    [
        *(("gemma4_e", "ends", {part: 0.0}) for part in ("layer_embedding", "layer_projection")),
        ("gemma4_e", "blocks", {"layer_scalar": 1.0}), ("gemma4_e", "blocks", {"layer_out_norm": 0.0}), ("gemma4_moe", "blocks", {"router_scale": 1.0}),
        ("gemma4_moe", gemma4, {"rms_norm": without_norm}), ("gemma4_moe", Experts, {"apply": reads_its_input}),
    ],
)  # fmt: skip
def test_no_part_of_the_network_can_be_left_out(name, part, change, monkeypatch):
    """`change` has constants that replace parameters of `part`, or functions of the network."""
    config, params, logits = passed(name)
    state = shapes_of(config)
    whole = nnx.to_pure_dict(params)
    if isinstance(part, str):
        filled = {leaf: np.full_like(whole[part][leaf], value) for leaf, value in change.items()}
        whole = whole | {part: whole[part] | filled}
    else:
        for function, other in change.items():
            monkeypatch.setattr(part, function, other)
    nnx.replace_by_pure_dict(state, whole)
    found, ids = logits_of(config, state, rows_of(name)[1]), np.asarray(arrays(rows_of(name)[1])[2]) == 1
    assert np.abs(found - logits)[ids].max() > 2.0


TABLE = jax.ShapeDtypeStruct((48, 80), jnp.float32)


def split(axis):
    """A mesh, and the place of a table whose columns are split over one of its axes."""
    mesh = make_mesh(**{"fsdp": 1, axis: 4}, tensor=2, devices=jax.devices()[:8])
    return mesh, NamedSharding(mesh, PartitionSpec("tensor", axis))


def assert_never_gathered(program, *given):
    """The program has no array with half of the rows or of the columns of the table, or more."""
    text = jax.jit(program).lower(*given).compile().as_text()
    assert "f32[24,20]" in text
    for rows, columns in ((48, 80), (24, 80), (48, 20), (48, 40), (24, 40)):
        assert f"f32[{rows},{columns}]" not in text


def test_the_table_with_embeddings_of_the_layers_is_split_over_all_devices():
    """2.8 of the 7.5 billion numbers of E4B, 5.6 GB in bfloat16: on 8 devices, an eighth is 0.7 GB of the trainer's state and of the sampler's weights."""
    for axis, rules in {"fsdp": TRAINER_RULES, "data": SAMPLER_RULES}.items():
        mesh, expected = split(axis)
        placed = shardings(shapes_of(preset("gemma-4-e4b")), mesh, rules)["ends"]["layer_embedding"]
        assert placed.get_value() == expected


def test_a_split_table_gives_whole_rows_and_gradients_without_being_gathered():
    """In training, a device looks up the tokens of all devices in its columns."""
    keys, tokens = jax.random.split(jax.random.key(3)), np.arange(32, dtype=np.int32) * 7 % 48
    table, weights = jax.random.normal(keys[0], TABLE.shape), jax.random.normal(keys[1], (80, 32))
    by_token, everywhere = PartitionSpec(BATCH_AXES), PartitionSpec(None, (*BATCH_AXES, "tensor"))
    (mesh, place), (sampler, own_place) = split("fsdp"), split("data")

    def trained(table, tokens):
        lookup = partial(MeshLayout(mesh).lookup, dtype="float32", columns="layer_embed")
        specs = {"in_specs": (place.spec, by_token), "out_specs": everywhere}
        return jax.shard_map(lookup, mesh=mesh, check_vma=False, **specs)(table, tokens)

    def sampled(table, tokens):
        return SamplerLayout(sampler, by_slot=True).lookup(table, tokens, "float32", "layer_embed")

    def gradient(table, tokens):
        return jax.grad(lambda table: (trained(table, tokens) * weights).sum())(table)

    wanted = np.zeros(TABLE.shape, np.float32)
    np.add.at(wanted, tokens, np.asarray(weights).T)
    for program, where in {trained: place, sampled: own_place}.items():
        given = jax.device_put(table, where), jax.device_put(tokens, NamedSharding(where.mesh, by_token))
        np.testing.assert_array_equal(jax.jit(program)(*given), np.asarray(table)[tokens].T)
        assert_never_gathered(program, *given)
        if program is trained:
            np.testing.assert_allclose(jax.jit(gradient)(*given), wanted, rtol=0, atol=1e-6)


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
