"""From flags to names."""

import jax.numpy as jnp
import numpy as np

from dapo_jax.dapo.metrics import Max, Mean
from dapo_jax.dapo.microbatch import Microbatch
from dapo_jax.run.guard import Update, in_words
from dapo_jax.training.minibatch import Stack


def stack(sampler, old, mask, weights, advantages=None):
    """One microbatch of one row, in room for two; what is not in the mask is NaN."""

    def whole(values):
        values = np.where(mask, np.array(values, np.float32), np.float32("nan"))
        return jnp.asarray(np.stack([values[None], np.zeros_like(values)[None]]))

    ids = jnp.zeros((2, 1, len(mask)), jnp.int32)
    room = jnp.asarray(np.stack([np.array(mask)[None], np.zeros((1, len(mask)), bool)]))
    blank = jnp.zeros((2, 1, len(mask)), jnp.float32)
    given = [0.0] * len(mask) if advantages is None else advantages
    microbatches = Microbatch(
        tokens=ids, segment_ids=ids, prefix_ids=ids, previous=ids, positions=ids, mask=room,
        advantages=jnp.asarray(np.stack([np.array(given, np.float32)[None], np.zeros((1, len(mask)), np.float32)])),
        weights=jnp.asarray(np.stack([np.array(weights, np.float32)[None], np.zeros((1, len(mask)), np.float32)])),
        sampler_logprobs=whole(sampler), old_logprobs=whole(old), ref_logprobs=blank,
    )  # fmt: skip
    return Stack(microbatches, np.int32(1))


def room_for(count, tokens):
    """A stack with room for so many microbatches of a row of so many tokens."""
    one = stack([0.0] * tokens, [0.0] * tokens, [True] * tokens, [0.0] * tokens).microbatches
    arrays = {name: jnp.repeat(array[:1], count, axis=0) for name, array in vars(one).items()}
    return Stack(Microbatch(**arrays), np.int32(count - 1))


def update(**flags):
    metrics = {f"nonfinite/{name}": Max(jnp.array(values)) for name, values in flags.items()}
    return Update((room_for(2, 4), room_for(4, 2)), 1e-4, {**metrics, "update/loss": Mean(0.0, 0.0)})


def test_an_update_that_was_applied_has_no_flags():
    assert update(loss=[0.0, -np.inf, 0.0, 0.0, 0.0, -np.inf], gradient=[0.0, 0.0]).flags() == {}


def test_flags_name_microbatches_of_each_stack_and_parameters():
    """Room for two microbatches in the first stack: the fifth flag is of the third one in the second stack."""
    found = update(gradient=[1.0, 0.0, 1.0], loss=[0.0, 1.0, 0.0, 0.0, 1.0, -np.inf], advantages=[0.0] * 6)
    named = found.named(found.flags(), [], ["embedding", "norm", "up"])
    assert named == {
        "loss": {"microbatches": [[0, 1], [1, 2]]},
        "gradient": {"parameters": ["embedding", "up"]},
    }
    assert in_words(named) == "loss, gradient (embedding, up)"


def test_room_beyond_the_microbatches_is_not_kept():
    assert [len(arrays["tokens"]) for arrays in update().stacks()] == [1, 3]
