"""The loss in another training loop: alignment, gradient accumulation, `shard_map`, and the page about them."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, PartitionSpec

from dapo_jax import chunked_logprobs, dapo_loss, token_logprobs, token_weights
from dapo_jax.dapo.aggregation import AGGREGATIONS

PAGE = Path(__file__).parent.parent / "docs" / "your_own_training_loop.md"
BATCH, SEQ, VOCAB, EMBED = 8, 6, 7, 3
GROUP_IDS = np.repeat([0, 1], 4)


def align(logits, tokens, is_response):
    """Logits at t - 1 predict the token at t: shift them right, and let nothing predict column 0."""
    logprobs = jnp.pad(token_logprobs(logits[:, :-1], tokens[:, 1:]), ((0, 0), (1, 0)))
    return logprobs, is_response.at[:, 0].set(False)


def loss_fn(params, batch):
    """A bigram policy: the next token's logits depend on the current token alone."""
    hidden = jnp.take(params["embed"], batch["tokens"], axis=0)
    logprobs, mask = align(hidden @ params["unembed"].T, batch["tokens"], batch["mask"])
    return dapo_loss(
        logprobs, batch["old_logprobs"], batch["advantages"], mask, weights=batch.get("weights")
    )[0]


@pytest.fixture(scope="module")
def params():
    rng = np.random.default_rng(0)
    shapes = {"embed": (VOCAB, EMBED), "unembed": (VOCAB, EMBED)}
    return {name: jnp.asarray(rng.normal(size=shape), jnp.float32) for name, shape in shapes.items()}


@pytest.fixture(scope="module")
def batch():
    """Responses of 1 to 4 tokens: with equal lengths, averaging wrongly would go unseen."""
    rng = np.random.default_rng(1)
    column, lengths = np.arange(SEQ), np.array([4, 1, 2, 1, 3, 4, 1, 2])
    return {
        "tokens": jnp.asarray(rng.integers(0, VOCAB, (BATCH, SEQ)), jnp.int32),
        "mask": jnp.asarray((column >= 2) & (column < 2 + lengths[:, None])),
        "old_logprobs": jnp.asarray(rng.normal(-2.0, 0.3, (BATCH, SEQ)), jnp.float32),
        "advantages": jnp.asarray(rng.normal(size=BATCH), jnp.float32),
    }


def weighted(batch, aggregation):
    weights = token_weights(
        np.asarray(batch["mask"]), aggregation=aggregation, group_ids=GROUP_IDS, max_response_tokens=4
    )
    return batch | {"weights": jnp.asarray(weights, jnp.float32)}


def split(batch, count):
    return [{name: part[i] for name, part in batch.items()} for i in np.split(np.arange(BATCH), count)]


def assert_equal_trees(tree, expected, rtol=1e-5, atol=1e-6):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=atol), tree, expected)


gradient_of = jax.jit(jax.grad(loss_fn))


def test_logits_are_matched_with_the_token_that_follows():
    """Position t is certain that token t + 1 of the text comes next: every token but the first has probability 1."""
    tokens = jnp.array([[3, 1, 4, 1, 5, 2]])
    certain = 1000.0 * jax.nn.one_hot(jnp.roll(tokens, -1, axis=1), VOCAB)
    logprobs, mask = align(certain, tokens, jnp.ones((1, SEQ), bool))
    np.testing.assert_array_equal(logprobs, np.zeros((1, SEQ)))
    np.testing.assert_array_equal(mask, [[False, True, True, True, True, True]])
    off_by_one = token_logprobs(certain, tokens)
    assert float(off_by_one.min()) < -100.0  # what the unshifted reading would make of it


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_microbatch_gradients_add_up(params, batch, aggregation):
    whole = weighted(batch, aggregation)
    for count in (2, 8):
        parts = [gradient_of(params, part) for part in split(whole, count)]
        assert_equal_trees(jax.tree.map(lambda *xs: sum(xs), *parts), gradient_of(params, whole))


def test_optax_multi_steps_averages_so_its_update_is_too_small(params, batch):
    """Four microbatches under plain SGD of rate 1: the update is minus the gradient over four."""
    whole = weighted(batch, "token_mean")
    optimizer = optax.MultiSteps(optax.sgd(1.0), every_k_schedule=4)
    state = optimizer.init(params)
    for part in split(whole, 4):
        gradient = gradient_of(params, part)
        with jax.numpy_dtype_promotion("standard"):  # optax divides a float by its integer counter
            update, state = optimizer.update(gradient, state, params)
    assert_equal_trees(jax.tree.map(lambda x: -4 * x, update), gradient_of(params, whole))


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])


def over_devices(mesh, function, out_specs):
    specs = PartitionSpec(), PartitionSpec("data")
    return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=out_specs))


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_shards_with_global_weights_equal_one_device(params, batch, mesh, aggregation):
    whole = weighted(batch, aggregation)
    sharded = over_devices(mesh, lambda p, b: jax.lax.psum(loss_fn(p, b), "data"), PartitionSpec())
    np.testing.assert_allclose(sharded(params, whole), loss_fn(params, whole), rtol=1e-5)
    assert_equal_trees(jax.grad(sharded)(params, whole), gradient_of(params, whole))


@pytest.mark.parametrize("check_vma", [True, False])
def test_chunked_logprobs_works_inside_shard_map(params, batch, mesh, check_vma):
    """Its gradient is custom, and must still be added over devices for a replicated output matrix."""

    def total(params, batch):
        hidden = jnp.take(params["embed"], batch["tokens"][:, :-1], axis=0).reshape(-1, EMBED)
        logprobs, _ = chunked_logprobs(
            hidden, params["unembed"], batch["tokens"][:, 1:].reshape(-1), chunk_vocab=4
        )
        return logprobs.sum()

    def sharded_gradient(params, batch):
        gradient = jax.grad(total)(params, batch)
        return gradient if check_vma else jax.lax.psum(gradient, "data")

    specs = PartitionSpec(), PartitionSpec("data")
    sharded = jax.shard_map(
        sharded_gradient, mesh=mesh, in_specs=specs, out_specs=PartitionSpec(), check_vma=check_vma
    )
    assert_equal_trees(jax.jit(sharded)(params, batch), jax.grad(total)(params, batch), atol=1e-5)


def test_the_page_runs():
    """Every code block of the page, in order, as one program."""
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), flags=re.MULTILINE | re.DOTALL)
    assert len(blocks) == 3
    namespace = {}
    for number, block in enumerate(blocks, start=1):
        exec(compile(block, f"{PAGE.name}, block {number}", "exec"), namespace)
