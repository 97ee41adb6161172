"""Sharding of a training pass on a mesh, with explicit collectives.

The pass is one `shard_map`. Rows of tokens are sharded over `data` and `fsdp`, and each row over `context`. Weights are sharded over
`fsdp` and `tensor`. For each matrix product, weights are gathered over `fsdp` in the compute dtype, and their gradients are
reduce-scattered in float32. Heads, the MLP and the vocabulary remain sharded over `tensor` in matrix products. Between products,
tokens are sharded over `tensor` (sequence parallelism), so an all-gather precedes each product and a reduce-scatter follows it.
Attention gathers keys and values over `context`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int, PyTree

from dapo_jax.dapo.logprobs import chunked_logprobs
from dapo_jax.models.attention import Near, Sinks, row_attention
from dapo_jax.models.cudnn import packed, packed_attention
from dapo_jax.models.device_layout import Layout, Matrices, Mixture
from dapo_jax.models.kernels import splash_attention, splash_kernel
from dapo_jax.numerics.precision import WeightSharding, gathered, rounded
from dapo_jax.numerics.quantization import Quantized
from dapo_jax.numerics.segments import looked_up
from dapo_jax.parallel.mesh import BATCH_AXES
from dapo_jax.parallel.sharding import SAMPLER_RULES, TRAINER_RULES, shardings

ROWS = PartitionSpec(BATCH_AXES, "context")
"""Sharding of arrays with shape [rows, seq]."""


def layout_of(mesh: Mesh, *, attention: str = "xla") -> Layout:
    """Returns the layout for a mesh. For a single device without an attention kernel, this is the default `Layout`."""
    on_cpu = mesh.devices.flat[0].platform == "cpu"
    if mesh.size > 1 or attention != "xla":
        return MeshLayout(mesh, attention, by_blocks=on_cpu)
    return Layout(by_blocks=on_cpu)


@dataclass(frozen=True)
class MeshLayout(Layout):
    """Layout for a mesh with the axes `data`, `fsdp`, `tensor` and `context`. Methods other than `shard` must be called in a program that `shard` runs."""

    mesh: Mesh
    attention: str = "xla"
    """The attention implementation: xla, splash, cudnn, or splash_interpreted, which runs the splash kernel slowly, without a TPU."""

    def shard(self, program: Callable[..., tuple[Array, ...]]) -> Callable[..., tuple[Array, ...]]:
        def part(params: PyTree, arrays: PyTree) -> tuple[Array, ...]:
            return tuple(self._share(result)[None] for result in program(params, arrays))

        def whole(params: PyTree, arrays: PyTree) -> tuple[Array, ...]:
            placed = jax.tree.map(lambda sharding: sharding.spec, shardings(params, self.mesh))
            results = PartitionSpec("tensor", *ROWS)
            # check_vma is off because attention kernels do not declare the mesh axes over which their results vary.
            mapped = jax.shard_map(
                part, mesh=self.mesh, in_specs=(placed, ROWS), out_specs=results, check_vma=False
            )
            return tuple(result.sum(0) for result in mapped(params, arrays))

        return whole

    def weight_sharding(self, axes: tuple[str, ...]) -> WeightSharding | None:
        split = [TRAINER_RULES[axis] for axis in axes]
        if self.mesh.shape["fsdp"] == 1 or "fsdp" not in split:
            return None
        # On v5e and v6e ("lite"), libtpu 0.0.50 cannot reduce-scatter along lanes if the parts do not fill registers.
        device = self.mesh.devices.flat[0]
        parts_first, as_stored = "lite" in device.device_kind, device.platform == "gpu"
        return WeightSharding("fsdp", split.index("fsdp"), parts_first, as_stored)

    def inner(self, x: Float[Array, "features part"], dtype: str) -> Float[Array, "features tokens"]:
        return x if self.mesh.shape["tensor"] == 1 else _gather(x, "tensor", 1, _sent(self.mesh, dtype))

    def outer(self, x: Float[Array, "features tokens"], dtype: str) -> Float[Array, "features part"]:
        return x if self.mesh.shape["tensor"] == 1 else _scatter(x, "tensor", 1, _sent(self.mesh, dtype))

    def experts(
        self, mixture: Mixture, x: Float[Array, "embed tokens"], factors: Float[Array, "tokens chosen"], routes: Int[Array, "tokens chosen"],
        matrices: Matrices, dtype: str, biases: Sequence[Array] = (),
    ) -> Float[Array, "embed tokens"]:  # fmt: skip
        """Gathers the tokens of all devices along `fsdp`, applies this device's experts to them, and reduce-scatters the results.

        The tokens of one device at a time pass through the experts, so that the arrays have room for the case that all of them choose experts of this device.
        If `fsdp` does not divide the number of experts, their matrices are gathered instead, like all others.
        """
        parts, held = self.mesh.shape["fsdp"], len(matrices[0])
        if parts == 1:
            return mixture(x, factors, routes, matrices, biases)
        if matrices[0].shape[2] != len(x):
            how = (self.weight_sharding(axes) for axes in (("mlp", "embed"), ("embed", "mlp")))
            later = tuple(one and one._replace(dim=one.dim + 1) for one in how)
            return mixture(x, factors, routes, matrices, biases, sharding=later)
        mine = jax.checkpoint(partial(mixture, first=lax.axis_index("fsdp") * held))
        whole = (
            _gather(x, "fsdp", 1, _sent(self.mesh, dtype)).T,
            _gather(factors, "fsdp", 0, _sent(self.mesh, "float32")),
            lax.all_gather(routes, "fsdp", tiled=True),
        )
        given = tuple(each.reshape(parts, -1, each.shape[1]) for each in whole)
        made = lax.map(lambda part: mine(part[0].T, *part[1:], matrices, biases).T, given)
        return _scatter(made.reshape(-1, len(x)).T, "fsdp", 1, _sent(self.mesh, dtype))

    def prompts(self, prefix_ids: Array | None) -> Array | None:
        # Rows for splash contain a copy of the prompt for each response.
        return None if self.attention.startswith("splash") else prefix_ids

    def over_heads(self, x: Float[Array, " tokens"]) -> Float[Array, " tokens"]:
        return lax.psum(x, "tensor")

    def rows(
        self, x: Float[Array, "part embed"], shape: tuple[int, ...], dtype: str
    ) -> Float[Array, "rows seq embed"]:
        whole = _gather(x, "tensor", 0, _sent(self.mesh, dtype)).reshape(*shape, -1)
        return _gather(whole, "context", 1, _sent(self.mesh, dtype))

    def lookup(
        self, table: Float[Array, "entries shard"], tokens: Int[Array, " tokens"], dtype: str, columns: str = "embed"
    ) -> Float[Array, "embed part"]:  # fmt: skip
        """Looks up the tokens in each device's part of the table along `tensor`, and sums the parts with a reduce-scatter.

        The columns `embed` are gathered over `fsdp`. A table with other columns is larger than the embeddings of the tokens: each device looks up its columns for the tokens
        of all devices, which then exchange them.
        """
        sent, exchanged = _sent(self.mesh, dtype), columns != "embed"
        rows = table if exchanged else self._table(table, dtype)
        tokens = lax.all_gather(tokens, "fsdp", tiled=True) if exchanged else tokens
        place = tokens - lax.axis_index("tensor") * len(rows)
        here = (place >= 0) & (place < len(rows))
        found = jnp.where(here[:, None], looked_up(rows, jnp.where(here, place, 0)), 0.0)
        if exchanged:
            found = _rounded(
                rounded(found, dtype), sent, lambda x: lax.all_to_all(x, "fsdp", 0, 1, tiled=True)
            )
        return _scatter(found.T, "tensor", 1, sent)

    def sequences(self, segment_ids: Int[Array, "batch part"], prefix_ids: Array | None) -> Any:
        prefix = segment_ids if prefix_ids is None else prefix_ids
        return packed(segment_ids, prefix) if self.attention == "cudnn" else None

    def attend(
        self,
        query: Float[Array, "heads head_dim tokens"],
        key: Float[Array, "kv_heads head_dim tokens"],
        value: Float[Array, "kv_heads head_dim tokens"],
        segment_ids: Int[Array, "batch part"],
        prefix_ids: Int[Array, "batch part"] | None,
        dtype: str,
        *,
        near: Near | None = None,
        windows: Sequence[int] = (),
        cap: float | None = None,
        sinks: Sinks = None,
        sequences: Any = None,
    ) -> Float[Array, "heads head_dim tokens"]:
        own, prefix = segment_ids, segment_ids if prefix_ids is None else prefix_ids
        q, k, v = (part.reshape(*part.shape[:2], *own.shape) for part in (query, key, value))
        k, v = (_gather(part, "context", 3, _sent(self.mesh, dtype)) for part in (k, v))
        segments = lax.all_gather(own, "context", axis=1, tiled=True)
        parts = self.mesh.shape["context"]

        def by_window(attend: Callable[..., Array]) -> Array:
            """Calls a kernel with the layer's window, which is static in kernels."""
            kinds = sorted(set(windows)) or [0]
            kind = 0 if near is None else jnp.searchsorted(jnp.array(kinds, jnp.int32), near[0])
            return lax.switch(kind, [partial(attend, window=window) for window in kinds])

        if self.attention == "cudnn":
            assert cap is None, "`training_pass` chooses XLA"
            how: dict[str, Any] = {"sinks": sinks, "rows": sequences, "dtype": dtype}
            out = by_window(partial(packed_attention, q, k, v, own, prefix, **how))
        elif self.attention == "xla":
            first = lax.axis_index("context") * own.shape[1] if parts > 1 else None
            if near is not None:
                near = near[0], lax.all_gather(near[1], "context", axis=1, tiled=True)
            how = {"near": near, "cap": cap, "sinks": sinks, "dtype": dtype, "by_blocks": self.by_blocks}
            out = row_attention(q, k, v, own, prefix, segments, first=first, **how)
        else:
            how = {"parts": parts, "interpret": self.attention == "splash_interpreted"}

            def splash(window: int) -> Array:
                heads, head_dim = q.shape[:2]
                kernel = splash_kernel(
                    heads, segments.shape[1], head_dim=head_dim, window=window, cap=cap, **how
                )
                mine = self._of_this_part(kernel)
                return splash_attention(mine, q, k, v, own, segments, sinks=sinks, dtype=dtype)

            out = by_window(splash)
        return out.reshape(query.shape)

    def logprobs(
        self,
        before: Float[Array, "tokens embed"],
        unembedding: Float[Array, "entries shard"],
        targets: Int[Array, " tokens"],
        *,
        vocab_size: int,
        dtype: str,
        teachers: Sequence[tuple[Array, Array]] = (),
        **how: Any,
    ) -> tuple[Array, ...]:
        """Computes the log-probabilities of all target tokens. Each device along `tensor` handles a part of the vocabulary."""
        table = self._table(unembedding, dtype)
        padded = len(table) * self.mesh.shape["tensor"] != vocab_size
        return chunked_logprobs(
            before,
            table,
            targets,
            compute_dtype=dtype,
            vocab_size=vocab_size if padded else None,
            vocab_axis="tensor",
            teachers=[(its, self._table(weight, dtype)) for its, weight in teachers],
            **how,
        )

    def _table(self, weight: Float[Array, "entries shard"], dtype: str) -> Float[Array, "entries embed"]:
        return _widened(weight, self.weight_sharding(("vocab", "embed")), dtype)

    def _share(self, result: Float[Array, "rows part *heads"]) -> Float[Array, "rows part *heads"]:
        """Keeps this device's share of an array that is replicated along `tensor`, and sets the rest to zero. The shares of all devices add up to the array."""
        flat, tensor = result.reshape(-1), self.mesh.shape["tensor"]
        mine = jnp.arange(flat.size, dtype=jnp.int32) * tensor // flat.size == lax.axis_index("tensor")
        return jnp.where(mine, flat, 0.0).reshape(result.shape)

    def _of_this_part(self, kernel: Any) -> Any:
        """Returns the splash kernel for this device's queries. Like the queries, the tables of the kernel are sharded over `context`."""
        if self.mesh.shape["context"] == 1:
            return kernel
        specs = kernel.manual_sharding_spec(NamedSharding(self.mesh, PartitionSpec(None, "context")))

        def mine(spec: PartitionSpec, table: Array) -> Array:
            if "context" not in spec:
                return table
            axis = spec.index("context")
            size = table.shape[axis] // self.mesh.shape["context"]
            return lax.dynamic_slice_in_dim(jnp.asarray(table), lax.axis_index("context") * size, size, axis)

        return jax.tree.map(mine, specs, kernel, is_leaf=lambda leaf: isinstance(leaf, PartitionSpec))


@dataclass(frozen=True)
class SamplerLayout(Layout):
    """The layout of a sampler's mesh. The compiler places all arrays, except in the products with experts, which it could not split."""

    mesh: Mesh
    by_slot: bool = False
    """Whether tokens are split over `data` and `fsdp`, like slots. Tokens of prefill are not, because then their sums would depend on the number of devices."""

    def in_parts(self, axis: str) -> bool:
        over = SAMPLER_RULES[axis]
        return over is not None and self.mesh.shape[over] > 1

    def lookup(
        self, table: Float[Array, "entries columns"], tokens: Int[Array, " tokens"], dtype: str, columns: str = "embed"
    ) -> Float[Array, "columns part"]:  # fmt: skip
        """Each device gets whole rows for its tokens, also of a table whose columns are split."""
        found = super().lookup(table, tokens, dtype)
        if SAMPLER_RULES[columns] is None:
            return found
        parts = PartitionSpec(None, BATCH_AXES if self.by_slot else None)
        return lax.with_sharding_constraint(found, NamedSharding(self.mesh, parts))

    def experts(
        self, mixture: Mixture, x: Float[Array, "embed tokens"], factors: Float[Array, "tokens chosen"], routes: Int[Array, "tokens chosen"],
        matrices: Matrices, dtype: str, biases: Sequence[Array] = (),
    ) -> Float[Array, "embed tokens"]:  # fmt: skip
        """Splits each expert over `tensor`."""
        if self.mesh.size == 1:
            return mixture(x, factors, routes, matrices, biases)
        rows = BATCH_AXES if self.by_slot else None
        columns, outer, inner = (
            PartitionSpec(*axes) for axes in ((None, rows), (None, "tensor"), (None, None, "tensor"))
        )
        down: Any = Quantized(inner, PartitionSpec()) if isinstance(matrices[-1], Quantized) else inner

        def part(*given: Any) -> Array:
            return _rounded(mixture(*given), _sent(self.mesh, dtype), lambda x: lax.psum(x, "tensor"))

        places = columns, PartitionSpec(rows), PartitionSpec(rows), (*[outer] * (len(matrices) - 1), down)
        places += ((*[outer] * (len(biases) - 1), PartitionSpec())[: len(biases)],)
        program = jax.shard_map(part, mesh=self.mesh, in_specs=places, out_specs=columns, check_vma=False)
        return program(x, factors, routes, matrices, biases)


def _sent(mesh: Mesh, dtype: str) -> str | None:
    """Returns the dtype in which collectives transfer activations: `dtype`, the precision of matrix products (see `product`), or None on CPU, where they are not cast."""
    # `lax.platform_dependent` would leave a branch around each collective, and on a GPU, the host waits for the device at every branch.
    return None if mesh.devices.flat[0].platform == "cpu" else dtype


def _rounded(x: Array, dtype: str | None, collective: Callable[[Array], Array]) -> Array:
    """Casts an array to `dtype`, and calls a collective on it."""
    return collective(x) if dtype is None else collective(x.astype(dtype)).astype(x.dtype)


def _all_gather(x: Array, axis: str, dim: int, dtype: str | None) -> Array:
    return _rounded(x, dtype, lambda x: lax.all_gather(x, axis, axis=dim, tiled=True))


def _sum_scatter(x: Array, axis: str, dim: int, dtype: str | None) -> Array:
    return _rounded(x, dtype, lambda x: lax.psum_scatter(x, axis, scatter_dimension=dim, tiled=True))


def _differentiable(forward: Callable[..., Array], backward: Callable[..., Array]) -> Callable[..., Array]:
    """Returns the collective `forward` along a mesh axis. Its gradient applies the collective `backward` to the cotangent."""
    collective = jax.custom_vjp(forward, nondiff_argnums=(1, 2, 3))
    collective.defvjp(
        lambda x, axis, dim, dtype: (forward(x, axis, dim, dtype), None),
        lambda axis, dim, dtype, _, cotangent: (backward(cotangent, axis, dim, dtype),),
    )
    return collective


_gather = _differentiable(_all_gather, _sum_scatter)
_scatter = _differentiable(_sum_scatter, _all_gather)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _widened(weight: Array, sharding: WeightSharding | None, dtype: str) -> Array:
    """Gathers a weight like `gathered`, but with a float32 gradient."""
    return gathered(weight, dtype, sharding).astype(np.promote_types(dtype, np.float32))


_widened.defvjp(
    lambda weight, sharding, dtype: (_widened(weight, sharding, dtype), None),
    lambda sharding, dtype, _, cotangent: (cotangent if sharding is None else sharding.summed(cotangent),),
)
