"""Compares two kinds of attention over a row that is sharded over devices: keys and values are gathered at once, or passed round a ring.

    JAX_PLATFORMS=cpu python -m benchmarks.context [--tokens 22528] [--topology v5p:2x2x1]

The programs are compiled for a described TPU v5p slice (extra `tpu`), but they do not run. Each is the forward and backward pass of
one layer's attention with Qwen2.5-32B's heads, at the same precision. Only the transfer of keys and values differs. Prints the bytes
that a device receives, by kind of collective operation, and the device's temporary memory.
"""

import argparse
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from dapo_jax.parallel.mesh import make_mesh
from dapo_jax.parallel.training_layout import MeshLayout
from dapo_jax.plan.collectives import collectives
from dapo_jax.plan.topologies import devices_of, parse

HEADS, KV_HEADS, DIM = 40, 8, 128
SPLIT = PartitionSpec(None, None, None, "context")


def gathered(layout: MeshLayout, query: Array, key: Array, value: Array) -> Array:
    """Computes attention as the library does, by gathering the keys and values of all devices."""
    rows = jnp.ones((1, query.shape[3]), jnp.int32)
    flat = (part.reshape(*part.shape[:2], -1) for part in (query, key, value))
    return layout.attend(*flat, rows, None, "bfloat16").reshape(query.shape)


def ring(devices: int, query: Array, key: Array, value: Array) -> Array:
    """Computes attention in a ring: in each step, a device attends to one shard of the keys and values, and passes this shard on.

    Shards after the queries are computed too, and then masked. They differ between devices, but all devices run the same program.
    """
    place, width = lax.axis_index("context"), query.shape[3]
    grouped = (query * DIM**-0.5).reshape(KV_HEADS, -1, *query.shape[1:])
    column = jnp.arange(width, dtype=jnp.int32)

    @jax.checkpoint
    def part(sums: tuple[Array, ...], key: Array, value: Array, source: Array) -> tuple[Array, ...]:
        top, total, out = sums
        scores = jnp.einsum(
            "kdbt,kgdbs->bkgst", key, grouped.astype(key.dtype), preferred_element_type=jnp.float32
        )
        seen = (place * width + column)[:, None] >= (source * width + column)[None]
        scores = jnp.where(seen[None, None, None], scores, -1e30)
        highest = jnp.maximum(top, scores.max(-1))
        weights, shrink = jnp.exp(scores - highest[..., None]), jnp.exp(top - highest)
        found = jnp.einsum(
            "kdbt,bkgst->bkgsd", value, weights.astype(value.dtype), preferred_element_type=jnp.float32
        )
        return highest, total * shrink + weights.sum(-1), out * shrink[..., None] + found

    def step(
        carry: tuple[tuple[Array, ...], Array, Array], turn: Array
    ) -> tuple[tuple[tuple[Array, ...], Array, Array], None]:
        sums, key, value = carry
        sums = part(sums, key, value, (place - turn) % devices)
        onward = partial(
            lax.ppermute, axis_name="context", perm=[(i, (i + 1) % devices) for i in range(devices)]
        )
        return (sums, onward(key), onward(value)), None

    shape = (1, KV_HEADS, HEADS // KV_HEADS, width)
    start = (jnp.full(shape, -1e30), jnp.zeros(shape), jnp.zeros((*shape, DIM)))
    narrow = (part.astype(jnp.bfloat16) for part in (key, value))
    (sums, _, _), _ = lax.scan(step, (start, *narrow), jnp.arange(devices, dtype=jnp.int32))
    return (sums[2] / sums[1][..., None]).transpose(1, 2, 4, 0, 3).reshape(query.shape)


def report(name: str, attend: Callable[..., Array], mesh: Mesh, tokens: int) -> None:
    """Compiles the gradient of `attend`, and prints its temporary memory and the received bytes."""

    def loss(query: Array, key: Array, value: Array) -> Array:
        mapped = jax.shard_map(attend, mesh=mesh, in_specs=(SPLIT,) * 3, out_specs=SPLIT, check_vma=False)
        return (mapped(query, key, value) ** 2).sum()

    place = NamedSharding(mesh, SPLIT)
    query, key = (
        jax.ShapeDtypeStruct((heads, DIM, 1, tokens), jnp.float32, sharding=place)
        for heads in (HEADS, KV_HEADS)
    )
    compiled = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(query, key, key).compile()
    received = ", ".join(
        f"{kind.kind} {kind.received_bytes / 2**20:.0f} MiB ({kind.count})"
        for kind in collectives(compiled.as_text())
    )
    temporary = compiled.memory_analysis().temp_size_in_bytes / 2**20
    print(f"{name:22}| temporary {temporary:7.0f} MiB | {received}", flush=True)


def main() -> None:
    """Prints one line for each kind of attention."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=22_528)
    parser.add_argument("--topology", default="v5p:2x2x1")
    arguments = parser.parse_args()
    mesh = make_mesh(fsdp=1, context=-1, devices=devices_of(parse(arguments.topology)))
    count = mesh.shape["context"]
    for kind in ("splash", "xla"):
        report(f"gathered, {kind}", partial(gathered, MeshLayout(mesh, kind)), mesh, arguments.tokens)
    report("ring, xla", partial(ring, count), mesh, arguments.tokens)


if __name__ == "__main__":
    main()
