"""Which parameters are not finite, spread over a mesh."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from dapo_jax.parallel.mesh import make_mesh
from dapo_jax.run.guard import nonfinite_leaves


@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf, -jnp.inf])
def test_leaves_with_one_number_that_is_not_finite_are_named_by_path(bad):
    mesh = make_mesh(fsdp=8)
    whole = jnp.ones((16, 4))
    tree = {"layers": {"up": whole.at[13, 2].set(bad), "down": whole}, "embedding": jnp.zeros((8,))}
    placed = jax.device_put(tree, NamedSharding(mesh, PartitionSpec("fsdp")))
    assert nonfinite_leaves(placed) == ["layers.up"]
    assert nonfinite_leaves({"layers": {"down": placed["layers"]["down"]}}) == []
