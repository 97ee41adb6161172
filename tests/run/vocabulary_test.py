"""A vocabulary that the mesh does not divide is padded without any effect. Eight virtual CPU devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dapo_jax.checkpoints.checkpointer import Checkpointer
from dapo_jax.dapo.logprobs import chunked_logprobs
from dapo_jax.models.decoder import Decoder, graph_of
from dapo_jax.models.folder import load_model, save_model
from dapo_jax.models.tensors import shapes_of
from dapo_jax.parallel.mesh import make_mesh
from dapo_jax.parallel.sharding import shardings
from dapo_jax.run.training_pass import for_mesh
from dapo_jax.testing import tiny_decoder_config, tiny_params
from dapo_jax.training.optimizer import make_optimizer
from dapo_jax.training.state import init_state, state_structs

ODD = tiny_decoder_config(vocab_size=21, tied_embeddings=False, kv_heads=4)


def mesh_of(tensor):
    return make_mesh(fsdp=8 // tensor, tensor=tensor)


def test_random_weights_do_not_depend_on_the_padding():
    plain, filled = (
        nnx.to_pure_dict(nnx.state(Decoder(config, rngs=nnx.Rngs(0))))["ends"]
        for config in (ODD, for_mesh(ODD, mesh_of(4)))
    )
    for table in ("embedding", "lm_head"):
        assert filled[table].shape[0] == 24
        np.testing.assert_array_equal(filled[table][:21], plain[table])
        assert not filled[table][21:].any()


def test_padding_has_logits_of_minus_infinity():
    config = for_mesh(ODD, mesh_of(4))
    decoder = nnx.merge(graph_of(config), nnx.state(Decoder(config, rngs=nnx.Rngs(0))))
    logits = decoder.ends.logits(jnp.ones((2, config.embed_dim)))
    assert np.isneginf(logits[:, 21:]).all()
    assert np.isfinite(logits[:, :21]).all()


def test_log_probabilities_leave_out_the_padding():
    """The padding has no share in the softmax, although its rows are the largest here."""
    rng = np.random.default_rng(0)
    hidden, table = (rng.normal(size=shape).astype(np.float32) for shape in ((5, 8), (24, 8)))
    table[21:] = 100.0 * hidden.sum(0)
    targets = rng.integers(0, 21, 5).astype(np.int32)
    hidden, table, targets = map(jnp.asarray, (hidden, table, targets))
    found = chunked_logprobs(hidden, table, targets, vocab_size=21, chunk_vocab=6)
    expected = chunked_logprobs(hidden, table[:21], targets, chunk_vocab=6)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)  # float32, another order of summation
    gradient = jax.grad(lambda table: chunked_logprobs(hidden, table, targets, vocab_size=21)[0].sum())(table)
    assert not gradient[21:].any()


def test_a_model_folder_has_no_padding(tmp_path):
    params = tiny_params(ODD)
    save_model(tmp_path / "plain", ODD, params)
    mesh = mesh_of(4)
    config = for_mesh(ODD, mesh)
    _, filled = load_model(tmp_path / "plain", config, shardings=lambda shapes: shardings(shapes, mesh))
    assert filled["ends"]["embedding"].shape == (24, ODD.embed_dim)
    assert not np.asarray(filled["ends"]["embedding"])[21:].any()
    save_model(tmp_path / "again", config, filled)
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("plain", "again")]
    assert files[0] == files[1]


@pytest.mark.parametrize(("before", "after"), [(1, 4), (4, 2), (4, 1)])
def test_a_checkpoint_moves_to_a_mesh_with_another_padding(before, after, tmp_path):
    optimizer = make_optimizer()
    configs = [for_mesh(ODD, mesh_of(tensor)) for tensor in (before, after)]
    params = nnx.state(Decoder(configs[0], rngs=nnx.Rngs(0)))
    saved = init_state(params, optimizer, mesh_of(before))
    target = state_structs(shapes_of(configs[1]), optimizer, mesh_of(after))
    with Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save(1, saved, {}, {})
        found = checkpointer.restore(target, rows=21).state
        with pytest.raises(ValueError, match=r"embedding of shape \(2\d, 32\), but the target has shape"):
            checkpointer.restore(target)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(saved), strict=True):
        rows = 21 if one.shape != other.shape else None
        one, other = np.atleast_1d(one), np.atleast_1d(other)
        np.testing.assert_array_equal(one[:rows], other[:rows])
        assert rows is None or not one[rows:].any()


def test_another_model_is_still_refused(tmp_path):
    with Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save(1, tiny_params(ODD), {}, {})
        larger = shapes_of(tiny_decoder_config(vocab_size=40, tied_embeddings=False))
        with pytest.raises(ValueError, match="was it saved with another model configuration"):
            checkpointer.restore(larger, rows=40)
