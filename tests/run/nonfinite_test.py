"""From flags of values that are not finite to names of microbatches and parameters."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from dapo_jax.dapo.metrics import Max, Mean
from dapo_jax.dapo.microbatch import Microbatch
from dapo_jax.parallel.mesh import make_mesh
from dapo_jax.run.guard import Update, described, nonfinite_leaves
from dapo_jax.training.minibatch import Stack


def room_for(count, tokens):
    """A stack with room for `count` microbatches of one row, the last of them unused."""
    ids, floats = jnp.zeros((count, 1, tokens), jnp.int32), jnp.zeros((count, 1, tokens), jnp.float32)
    microbatches = Microbatch(
        tokens=ids, segment_ids=ids, prefix_ids=ids, previous=ids, positions=ids, mask=ids > 0, advantages=floats, weights=floats,
        sampler_logprobs=floats, old_logprobs=floats, ref_logprobs=floats, recorded={},
    )  # fmt: skip
    return Stack(microbatches, np.int32(count - 1))


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
    assert described(named) == "loss, gradient (embedding, up)"


def test_room_beyond_the_microbatches_is_not_kept():
    assert [len(arrays["tokens"]) for arrays in update().stacks()] == [1, 3]


@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf, -jnp.inf])
def test_leaves_with_one_bad_number_are_named_by_path(bad):
    """Spread over a mesh."""
    whole = jnp.ones((16, 4))
    tree = {"layers": {"up": whole.at[13, 2].set(bad), "down": whole}, "embedding": jnp.zeros((8,))}
    placed = jax.device_put(tree, NamedSharding(make_mesh(fsdp=8), PartitionSpec("fsdp")))
    assert nonfinite_leaves(placed) == ["layers.up"]
    assert nonfinite_leaves({"layers": {"down": placed["layers"]["down"]}}) == []
