"""One table of rules places parameters and moments, and a sharded decoder has the logits of a whole one."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from dapo_jax.models.decoder import graph_of
from dapo_jax.models.tensors import shapes_of
from dapo_jax.parallel.mesh import make_mesh
from dapo_jax.parallel.sharding import SAMPLER_RULES, by_row, shardings
from dapo_jax.testing import tiny_decoder_config, tiny_params

EVERYTHING = tiny_decoder_config(qkv_bias=True, qk_norm="head", tied_embeddings=False)


@pytest.fixture(scope="module")
def mesh():
    return make_mesh(data=2, fsdp=2, tensor=2)


def specs(tree):
    return jax.tree.map(lambda sharding: sharding.spec, nnx.to_pure_dict(tree))


def test_each_parameter_is_sharded_by_its_logical_axes(mesh):
    placed = specs(shardings(shapes_of(EVERYTHING), mesh))
    norm, into, out = P(None, None), P(None, "tensor", "fsdp"), P(None, "fsdp", "tensor")
    heads, bias = P(None, "tensor", None, "fsdp"), P(None, "tensor", None)
    assert placed == {
        "ends": {"embedding": P("tensor", "fsdp"), "lm_head": P("tensor", "fsdp"), "final_norm": P(None)},
        "blocks": {
            "attention_norm": norm, "mlp_norm": norm, "query_norm": norm, "key_norm": norm,
            "query": heads, "key": heads, "value": heads, "query_bias": bias, "key_bias": bias, "value_bias": bias,
            "output": P(None, "fsdp", "tensor", None), "gate": into, "up": into, "down": out,
        },
    }  # fmt: skip


def test_moments_are_sharded_as_their_parameters(mesh):
    params = shapes_of(EVERYTHING)
    moments = jax.eval_shape(optax.adam(1e-3).init, params)[0]
    placed = shardings(moments, mesh)
    assert specs(placed.mu) == specs(placed.nu) == specs(shardings(params, mesh))
    assert placed.count.spec == P()


def test_the_sampler_keeps_the_embedding_axis_whole(mesh):
    placed = specs(shardings(shapes_of(EVERYTHING), mesh, SAMPLER_RULES))
    assert "fsdp" not in {axis for spec in jax.tree.leaves(placed) for axis in spec}
    assert placed["blocks"]["query"] == P(None, "tensor", None, None)


@pytest.mark.parametrize(
    ("changes", "axes", "message"),
    [
        ({"vocab_size": 19}, {"tensor": 2}, r"embedding.*\(19, 32\).* 19, .*parallel\.tensor=2"),
        ({"kv_heads": 2}, {"tensor": 4}, r"'key'.*\(2, 2, 8, 32\).* 2, .*parallel\.tensor=4"),
        ({"embed_dim": 36}, {"fsdp": 8}, r" 36, .*parallel\.fsdp=8.* 1, 2, 3, 4, 6"),
        # 60 is divisible by 4, but the number of key heads is 2.
        ({"mlp_dim": 60}, {"tensor": 8}, r"'down'.* 60, .*parallel\.tensor=8; .* use 1, 2$"),
    ],
)  # fmt: skip
def test_a_dimension_that_does_not_divide_is_refused_with_the_arithmetic(changes, axes, message):
    with pytest.raises(ValueError, match=message):
        shardings(shapes_of(tiny_decoder_config(**changes)), make_mesh(**{"fsdp": -1, **axes}))


def test_a_vocabulary_alone_is_refused_too():
    with pytest.raises(ValueError, match=r"embedding.* 19, .*parallel\.tensor=2"):
        shardings(shapes_of(tiny_decoder_config(vocab_size=19))["ends"], make_mesh(data=1, fsdp=-1, tensor=2))


def test_a_sharded_decoder_has_the_logits_of_a_whole_one(mesh):
    graph, params = graph_of(EVERYTHING), tiny_params(EVERYTHING)
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 20, (4, 12)).astype(np.int32)
    positions = np.tile(np.concatenate([np.arange(7), np.arange(5)]).astype(np.int32), (4, 1))
    batch = (tokens, positions, np.where(np.arange(12) < 7, 1, 2).astype(np.int32)[None].repeat(4, axis=0))

    @jax.jit
    def logits(params, *batch):
        decoder = nnx.merge(graph, params)
        return decoder.ends.logits(decoder(*batch))

    whole = logits(params, *map(jnp.asarray, batch))
    sharded_params = jax.device_put(params, shardings(params, mesh))
    assert len(sharded_params["blocks"]["gate"][...].sharding.device_set) == 8
    sharded = logits(sharded_params, *(jax.device_put(part, by_row(mesh)) for part in batch))
    assert len(sharded.sharding.device_set) == 8
    np.testing.assert_allclose(sharded, whole, rtol=1e-5, atol=1e-5)
