"""Segment sums with a fixed order of additions, and table lookups that use these sums in the backward pass.

On a GPU, a scatter adds rows in arbitrary order, so two identical runs would differ in the last bits of their gradients.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int


def segment_sums(
    values: Float[Array, "rows seq"], segment_ids: Int[Array, "rows seq"]
) -> Float[Array, "rows seq"]:
    """Returns, for each token, the sum of `values` over the token's segment. The tokens of a segment must be adjacent.

    The sums use only shifts, so the order of additions is fixed even if a row is split over devices.
    """
    sums = _running_sums(values, segment_ids, 1)
    last = segment_ids != _shifted(segment_ids, -1, fill=-1)
    # Keep the sum at the last token of each segment, and set all other tokens to 0. A running sum from the right then copies the sum to all tokens.
    return _running_sums(jnp.where(last, sums, 0.0), segment_ids, -1)


@jax.custom_vjp
def looked_up(
    table: Float[Array, "*batch entries embed"], index: Int[Array, "*batch tokens"]
) -> Float[Array, "*batch tokens embed"]:
    """Looks up the rows `index` in a table, or in a batch of tables with one batch axis.

    On a GPU, the backward pass sorts the rows of the gradient by table entry and adds them in a fixed order. On other platforms, it is a scatter.
    """
    return _rows(table, index)


def sums_by_entry(
    rows: Float[Array, "tokens embed"], index: Int[Array, " tokens"], *, entries: int
) -> Float[Array, "entries embed"]:
    """Returns, for each table entry, the sum of all rows with its index, or 0 if no row has it. The order of additions depends only on `index`."""
    order = jnp.argsort(index)
    found, entry = index[order], jnp.arange(entries, dtype=index.dtype)
    sums = _running_sums(rows[order].T, found[None], 1)
    last = jnp.searchsorted(found, entry, side="right") - 1
    return jnp.where(found[last] == entry, sums[:, last], 0.0).T


def _rows(table: Array, index: Array) -> Array:
    return table[index] if table.ndim == 2 else jnp.take_along_axis(table, index[..., None], axis=1)


def _lookup_forward(table: Array, index: Array) -> tuple[Array, tuple[Array, Array]]:
    # The empty slice stores the number of entries for the backward pass without using memory.
    return _rows(table, index), (index, table[..., :0])


def _lookup_backward(saved: tuple[Array, Array], cotangent: Array) -> tuple[Array, None]:
    index, empty = saved
    *batch, entries, _ = empty.shape
    table = jax.ShapeDtypeStruct((*batch, entries, cotangent.shape[-1]), empty.dtype)

    def scattered(cotangent: Array, index: Array) -> Array:
        return jax.linear_transpose(lambda table: _rows(table, index), table)(cotangent)[0]

    summed: Any = partial(sums_by_entry, entries=entries)
    if batch:
        summed = jax.vmap(summed)
    return lax.platform_dependent(cotangent, index, cuda=summed, default=scattered), None


looked_up.defvjp(_lookup_forward, _lookup_backward)


def _running_sums(values: Array, segment_ids: Array, direction: int) -> Array:
    """Returns running sums within each segment, from the left (`direction` 1) or from the right (-1) (Hillis and Steele 1986)."""
    reach = 1
    while reach < values.shape[1]:
        same = segment_ids == _shifted(segment_ids, direction * reach, fill=-1)
        values = values + jnp.where(same, _shifted(values, direction * reach, fill=0), 0.0)
        reach *= 2
    return values


def _shifted(array: Array, by: int, *, fill: int) -> Array:
    """Shifts the columns to the right by `by`, or to the left if `by` is negative. New columns are filled with `fill`."""
    kept = array[:, :-by] if by > 0 else array[:, -by:]
    sides = (by, 0) if by > 0 else (0, -by)
    return jnp.pad(kept, ((0, 0), sides), constant_values=fill)
