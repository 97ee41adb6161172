"""Gated DeltaNet (Yang et al. 2024, https://arxiv.org/abs/2412.06464): a mixer that is recurrent, with a state of fixed size.

Each value head has a state S [key_dim, value_dim]. A token with decay a, write strength b, key k, value v and query q computes

    S <- a S + k (b (v - a S^T k))^T,    output = S^T q / sqrt(key_dim).

`one_token` does this for one token. `over_rows` computes chunks of tokens with matrix products; docs/gated_delta.md derives it. Before the recurrence, a causal
convolution over the last tokens and silu are applied to q, k and v, and q and k are divided by their norms. All of this is in float32.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from dapo_jax.models.architecture import Architecture
from dapo_jax.models.layer_kinds import Attend, DecodingStep, Fixed, Mixer, PrefillPart, TrainingRows
from dapo_jax.models.parameters import Parameter
from dapo_jax.models.projections import rms_norm
from dapo_jax.models.rope import RopeTables
from dapo_jax.numerics.segments import looked_up

CHUNK = 64
"""Default number of tokens in a chunk."""

_NORM_EPS = 1e-6
"""Added to the squared norms of queries and keys."""

_einsum = partial(jnp.einsum, precision=lax.Precision.HIGHEST)


class Mixed(NamedTuple):
    """The inputs of the recurrence. A value head h uses the query and the key of key head h / (value_heads / key_heads)."""

    query: Float[Array, "key_heads key_dim tokens"]
    key: Float[Array, "key_heads key_dim tokens"]
    value: Float[Array, "value_heads value_dim tokens"]
    decay: Float[Array, "value_heads tokens"]
    """Logarithm of the decay a, at most 0."""
    write: Float[Array, "value_heads tokens"]
    """The write strength b, from 0 to 1."""
    filters: tuple[Array, Array, Array]
    """The filters of the convolution for query, key and value, each [heads, dim, 1, taps]. The last tap belongs to the token itself."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DeltaState:
    """The state of one layer after some tokens, for several sequences."""

    memory: Float[Array, "sequences value_heads key_dim value_dim"] | Any
    tails: tuple[Array, Array, Array] | Any
    """The last taps - 1 inputs of the convolution of query, key and value, each [sequences, heads, dim, taps - 1]."""


def empty(sequences: int, keys: Sequence[int], values: Sequence[int], taps: int, dtype: Any) -> DeltaState:
    """Returns the state before the first token. `keys` and `values` are (heads, dimensions)."""
    tails = tuple(jnp.zeros((sequences, *shape, taps - 1), dtype) for shape in (keys, keys, values))
    return DeltaState(jnp.zeros((sequences, values[0], keys[1], values[1]), dtype), tails)


_INPUTS = ("query", "key", "value", "value_gate", "write", "forget")
"""The matrices that are applied to the layer's input."""


@dataclass(frozen=True)
class GatedDelta(Mixer):
    """The sizes of a Gated DeltaNet layer."""

    key_heads: int
    value_heads: int
    """Number of value heads. Each key head is shared by `value_heads / key_heads` of them."""
    key_dim: int
    value_dim: int
    taps: int = 4
    """Number of tokens in the convolution."""

    stack = "delta_blocks"
    group = "linear_attention"
    targets = ("in_proj_z", "out_proj")

    def __post_init__(self) -> None:
        if self.key_heads < 1 or self.value_heads % self.key_heads:
            raise ValueError(
                f"linear_num_key_heads={self.key_heads} must divide linear_num_value_heads={self.value_heads}"
            )

    @property
    def _heads(self) -> dict[str, tuple[int, int]]:
        """The numbers of heads and of their dimensions, of queries, keys and values."""
        keys = self.key_heads, self.key_dim
        return {"query": keys, "key": keys, "value": (self.value_heads, self.value_dim)}

    def parameters(self, config: Architecture) -> dict[str, Parameter]:
        embed, heads = config.embed_dim, (self.value_heads,)
        axes = {
            "query": ("kv_heads", "head_dim"),
            "key": ("kv_heads", "head_dim"),
            "value": ("heads", "head_dim"),
        }
        sizes = self._heads

        def matrix(shape: tuple[int, ...], axes: tuple[str, ...], tensor: str, target: str = "") -> Parameter:
            tensor = f"linear_attn.{tensor}.weight"
            return Parameter(
                shape=(*shape, embed), axes=(*axes, "embed"), fan_in=embed, tensor=tensor, target=target, joins=_INPUTS
            )  # fmt: skip

        def filters(name: str) -> Parameter:
            return Parameter(
                shape=(*sizes[name], 1, self.taps), axes=(*axes[name], "features", "taps"), fan_in=self.taps,
                tensor="linear_attn.conv1d.weight", float32=True,
            )  # fmt: skip

        # As in Mamba-2 (Dao and Gu 2024, https://arxiv.org/abs/2405.21060), rates are uniform from 1 to 16, and steps log-uniform from 0.001 to 0.1.
        def rates(key: Array) -> Array:
            return jnp.log(jax.random.uniform(key, heads, jnp.float32, 1.0, 16.0))

        def steps(key: Array) -> Array:
            ends = math.log(0.001), math.log(0.1)
            return jnp.log(jnp.expm1(jnp.exp(jax.random.uniform(key, heads, jnp.float32, *ends))))

        alike: dict[str, Any] = {"shape": heads, "axes": ("heads",), "float32": True}
        return {
            **{name: matrix(sizes[name], axes[name], "in_proj_qkv") for name in sizes},
            **{f"{name}_conv": filters(name) for name in sizes},
            "value_gate": matrix(sizes["value"], axes["value"], "in_proj_z", "in_proj_z"),
            "write": matrix(heads, ("heads",), "in_proj_b"),
            "forget": matrix(heads, ("heads",), "in_proj_a"),
            "decay": Parameter(start=rates, tensor="linear_attn.A_log", **alike),
            "step_bias": Parameter(start=steps, tensor="linear_attn.dt_bias", **alike),
            "delta_norm": Parameter(
                shape=(self.value_dim,), axes=("norm",), start=1.0, tensor="linear_attn.norm.weight", float32=True
            ),
            "output": Parameter(
                shape=(embed, *sizes["value"]), axes=("embed", *axes["value"]), fan_in=math.prod(sizes["value"]) * 2 * config.layers,
                tensor="linear_attn.out_proj.weight", target="out_proj",
            ),
        }  # fmt: skip

    def mix(
        self, layer: Any, x: Float[Array, "embed tokens"], rope: RopeTables, attend: Attend
    ) -> tuple[Float[Array, "features tokens"], Any]:
        query, key, value, gate, write, forget = layer.project(_INPUTS, x)
        steps = jax.nn.softplus(forget + layer.step_bias[...][:, None])
        decay = -jnp.exp(layer.decay[...])[:, None] * steps
        filters = layer.query_conv[...], layer.key_conv[...], layer.value_conv[...]
        out, kept = attend(Mixed(query, key, value, decay, jax.nn.sigmoid(write), filters))
        per_head = jax.vmap(rms_norm, in_axes=(0, None, None))
        out = per_head(out, layer.delta_norm[...], layer.config.norm_eps) * jax.nn.silu(gate)
        return out.reshape(-1, out.shape[2]), kept

    def over_rows(self, config: Architecture, rows: TrainingRows) -> Attend:
        prefix = rows.layout.prompts(rows.prefix_ids)
        places = () if prefix is None else ancestors(rows.segment_ids, prefix, self.taps - 1)
        return partial(over_rows, segment_ids=rows.segment_ids, prefix_ids=rows.prefix_ids, places=places)

    def prefill(self, config: Architecture, part: PrefillPart, **data: Any) -> Attend:
        return partial(over_rows, segment_ids=part.segment_ids, start=part.before, ends=part.last)

    def step(self, config: Architecture, step: DecodingStep, **data: Any) -> Attend:
        return partial(one_token, state=step.state, live=step.live)

    def state(self, config: Architecture, layer: int) -> Fixed:
        return Fixed(self._empty)

    def _empty(self, sequences: int, compute_dtype: str) -> DeltaState:
        """Returns the state before the first token. It is float32, or float64 if the compute dtype is float64."""
        *_, keys, values = self._heads.values()
        return empty(sequences, keys, values, self.taps, np.promote_types(compute_dtype, np.float32))

    def flops(self, config: Architecture, *, decoding: bool) -> tuple[int, int]:
        """A token is multiplied by the state twice, and changes it once.

        In a chunk of C tokens, each token has C products of keys, of queries and of changes (twice), and its share of the 2 log2(C) products of C x C
        matrices in the inverse and of one product for the decays.
        """
        chunk = 0 if decoding else CHUNK
        squares = 2 * chunk * chunk * (2 * math.ceil(math.log2(chunk)) + 1) if chunk else 0
        of_value = 6 * self.key_dim * self.value_dim + 4 * chunk * self.value_dim + squares
        return self.value_heads * of_value + self.key_heads * 4 * chunk * self.key_dim, 0


def one_token(
    mixed: Mixed, state: DeltaState, live: Bool[Array, " slots"]
) -> tuple[Float[Array, "value_heads value_dim slots"], DeltaState]:
    """Processes one token of each slot. The states of slots that are not live do not change."""
    columns = [jnp.moveaxis(part, -1, 0)[..., None] for part in mixed[:3]]
    wide = [jnp.concatenate(pair, axis=-1) for pair in zip(state.tails, columns, strict=True)]
    query, key, value = (
        jax.nn.silu((part * filters[None, :, :, 0].astype(part.dtype)).sum(-1))
        for part, filters in zip(wide, mixed.filters, strict=True)
    )
    query, key = _normed(query) * query.shape[-1] ** -0.5, _normed(key)
    slots, heads, _ = key.shape
    grouped = (slots, heads, value.shape[1] // heads)
    value, write, decay = (
        part.reshape(*grouped, *part.shape[2:]) for part in (value, mixed.write.T, mixed.decay.T)
    )
    memory = state.memory.reshape(*grouped, *state.memory.shape[2:]) * jnp.exp(decay)[..., None, None]
    # Without the barrier, XLA on a GPU would compute the new memory in a copy.
    change = lax.optimization_barrier(write[..., None] * (value - _einsum("skd,skrde->skre", key, memory)))
    memory = memory + key[:, :, None, :, None] * change[..., None, :]
    out = _einsum("skd,skrde->skre", query, memory).reshape(slots, -1, value.shape[-1])
    new = DeltaState(memory.reshape(state.memory.shape), tuple(part[..., 1:] for part in wide))

    def kept(new: Array, old: Array) -> Array:
        return jnp.where(live.reshape(-1, *[1] * (new.ndim - 1)), new, old)

    return jnp.moveaxis(out, 0, -1), jax.tree.map(kept, new, state)


def ancestors(
    segment_ids: Int[Array, "rows seq"], prefix_ids: Int[Array, "rows seq"], count: int
) -> list[Int[Array, "rows seq"]]:
    """Returns the columns of the tokens 1, 2, ... `count` places before each token in its sequence, or -1 before the start.

    The sequence of a token consists of the segment `prefix_ids`, if that is another segment, and its own segment.
    """
    rows, seq = segment_ids.shape
    column = jnp.broadcast_to(jnp.arange(seq, dtype=jnp.int32), (rows, seq))
    row = jnp.arange(rows)[:, None]
    last = jnp.full((rows, seq + 1), -1, jnp.int32).at[row, segment_ids].max(column)
    before = jnp.pad(segment_ids[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
    start = jnp.where(prefix_ids == segment_ids, -1, jnp.take_along_axis(last, prefix_ids, axis=1))
    parent = jnp.where(segment_ids == before, column - 1, start)
    found = [parent]
    while len(found) < count:
        further = jnp.take_along_axis(parent, jnp.maximum(found[-1], 0), axis=1)
        found.append(jnp.where(found[-1] < 0, -1, further))
    return found


def over_rows(
    mixed: Mixed,
    segment_ids: Int[Array, "rows seq"],
    prefix_ids: Int[Array, "rows seq"] | None = None,
    *,
    places: Sequence[Int[Array, "rows seq"]] = (),
    start: DeltaState | None = None,
    ends: Int[Array, " sequences"] | None = None,
    chunk: int = CHUNK,
) -> tuple[Float[Array, "value_heads value_dim tokens"], DeltaState | None]:
    """Processes whole rows, whose tokens are concatenated along the token axis.

    The state starts from zeros in each segment. If `prefix_ids` names another segment, which must be earlier in the row, the state starts from the end of
    that segment, so several responses continue one prompt. The responses to a prompt must follow it before the next prompt begins.

    Args:
        mixed: inputs, with tokens = rows x seq.
        segment_ids, prefix_ids: as in `dapo_jax.models.attention.causal_attention`.
        places: the result of `ancestors` for the taps of the convolution; required with `prefix_ids`.
        start: the state before each row, which the first segment continues. Not with `prefix_ids`.
        ends: flat indices of tokens. The states after these tokens are returned.
        chunk: number of tokens in a chunk.
    """
    rows, seq = segment_ids.shape
    taps = mixed.filters[0].shape[-1]
    extra = -seq % chunk
    first = segment_ids[:, :1] if start is not None else jnp.full((rows, 1), -1, segment_ids.dtype)
    extended = jnp.concatenate([jnp.repeat(first, taps - 1, axis=1), segment_ids], axis=1)
    sizes = mixed.key.shape[:2], mixed.value.shape[:2]
    before = empty(rows, *sizes, taps, mixed.value.dtype) if start is None else start
    wide = [
        jnp.concatenate([jnp.moveaxis(tail, 0, 2), part.reshape(*part.shape[:2], rows, seq)], axis=-1)
        for part, tail in zip(mixed[:3], before.tails, strict=True)
    ]

    def shifted(part: Array, back: int) -> Array:
        begin = taps - 1 - back
        if places and back:
            at, table = places[back - 1], part[..., taps - 1 :].reshape(-1, rows, seq)
            found = looked_up(table.transpose(1, 2, 0), jnp.maximum(at, 0)).transpose(2, 0, 1)
            return jnp.where((at >= 0)[None, None], found.reshape(*part.shape[:3], seq), 0.0)
        same = extended[:, begin : begin + seq] == segment_ids
        return jnp.where(same[None, None], part[..., begin : begin + seq], 0.0)

    def convolved(part: Array, filters: Array) -> Array:
        terms = (shifted(part, back) * filters[:, :, :, taps - 1 - back, None] for back in range(taps))
        return jax.nn.silu(sum(terms))

    query, key, value = map(convolved, wide, mixed.filters)
    query, key = _normed(query, 1) * key.shape[1] ** -0.5, _normed(key, 1)
    heads = len(key)

    def split(part: Array, *order: int) -> Array:
        """Splits the tokens into chunks, and pads the last chunk."""
        part = jnp.pad(part, [(0, 0)] * (part.ndim - 1) + [(0, extra)])
        part = part.reshape(*part.shape[:-1], -1, chunk)
        return part.transpose(*order)

    query, key = (split(part, 3, 2, 0, 4, 1) for part in (query, key))
    value = split(value.reshape(heads, -1, *value.shape[1:]), 4, 3, 0, 1, 5, 2)
    decay, write = (
        split(part.reshape(heads, -1, rows, seq), 3, 2, 0, 1, 4) for part in (mixed.decay, mixed.write)
    )
    own = split(segment_ids, 1, 0, 2)
    prefix = None if prefix_ids is None else split(prefix_ids, 1, 0, 2)
    paths = _paths(own, prefix, first, decay)
    memory = before.memory.reshape(rows, heads, -1, *before.memory.shape[2:])
    carry = (memory,) if prefix is None else (memory, jnp.zeros_like(memory))
    out, befores, changes = _scanned(query, key, value, write, paths, carry)
    out = out.transpose(2, 3, 5, 1, 0, 4).reshape(len(mixed.value), value.shape[-1], rows, -1)[..., :seq]
    out = out.reshape(len(mixed.value), value.shape[-1], -1)
    if ends is None:
        return out, None
    row, column = ends // seq, ends % seq
    at, place = (column // chunk, row), column % chunk
    index = jnp.arange(len(ends))
    held = paths.own[at][index, :, :, place][..., None, None] * befores[at]
    weights = paths.within[at][index, :, :, place]
    held = held + _einsum("skjd,skrj,skrje->skrde", key[at], weights, changes[at])
    window = column[:, None] + jnp.arange(1, taps)[None]
    same = extended[row[:, None], window] == segment_ids[row, column][:, None]
    tails = tuple(
        jnp.where(same[:, None, None], part[:, :, row[:, None], window].transpose(2, 0, 1, 3), 0.0)
        for part in wide
    )
    return out, DeltaState(held.reshape(len(ends), -1, *held.shape[3:]), tails)


class _Paths(NamedTuple):
    """Products of decays along the paths between tokens of a chunk, and from the states before the chunk."""

    within: Float[Array, "chunks rows heads group to from"]
    """The decay between two tokens, or 0 if the first is not before the second in its sequence."""
    own: Float[Array, "chunks rows heads group to"]
    """The decay since the state of the last segment before the chunk, or 0 if the token does not continue it."""
    prompt: Float[Array, "chunks rows heads group to"] | None
    """The decay since the state of the prompt of this segment, or 0 if the token does not start from it."""
    after: Float[Array, "chunks rows heads group from"] | None
    """The decay between a token and the end of the prompt to which the chunk's last token belongs, or 0 if it is not part of the prompt."""
    kept: Float[Array, "chunks rows heads group"] | None
    """The decay of the prompt's state during the chunk, or 0 if the chunk ends with another prompt."""


def _paths(own: Array, prefix: Array | None, first: Array, decay: Array) -> _Paths:
    chunk = own.shape[-1]
    above = np.tri(chunk, dtype=bool)[None, None]
    seen = (own[..., :, None] == own[..., None, :]) & above
    if prefix is not None:
        seen |= (prefix[..., :, None] == own[..., None, :]) & above
    steps = jnp.where(seen[:, :, None, None], decay[..., None, :], 0.0)
    # Sums of the decays after one token up to another. Differences of two sums from the start would lose digits if there is a strong decay before both.
    between = _einsum("nbkril,nblj->nbkrij", steps, jnp.tril(seen, -1).astype(decay.dtype))

    def decayed(mask: Array, decays: Array) -> Array:
        return jnp.exp(jnp.where(mask[:, :, None, None], decays, -jnp.inf))

    def previous(ids: Array) -> Array:
        """Returns the id of the last token before each chunk."""
        return jnp.concatenate([first[None, :, 0], ids[:-1, :, -1]])[..., None]

    within = decayed(seen, between)
    continues = own == previous(own)
    since = jnp.exp(steps.sum(-1))
    of_own = jnp.where(continues[:, :, None, None], since, 0.0)
    if prefix is None:
        return _Paths(within, of_own, None, None, None)
    starts = ~continues & (prefix == previous(prefix))
    of_prompt = jnp.where(starts[:, :, None, None], since, 0.0)
    last = prefix[..., -1:]
    part = own == last
    of_part = jnp.where(part[:, :, None, None], decay, 0.0)
    after = decayed(part, _einsum("nbkrl,lj->nbkrj", of_part, np.tri(chunk, k=-1, dtype=decay.dtype)))
    kept = jnp.where((last == previous(prefix))[:, :, None], jnp.exp(of_part.sum(-1)), 0.0)
    return _Paths(within, of_own, of_prompt, after, kept)


def _scanned(
    query: Array, key: Array, value: Array, write: Array, paths: _Paths, carry: tuple[Array, ...]
) -> tuple[Array, Array, Array]:
    """Returns the outputs, the states before each chunk, and the changes u, for which S = sum of decay k u^T."""
    chunk = key.shape[-2]
    products = _einsum("nbkid,nbkjd->nbkij", key, key)[:, :, :, None]
    lower = jnp.tril(paths.within, -1) * products * write[..., None]
    solved = unit_inverse(lower) * write[..., None, :]
    mixing = paths.within * _einsum("nbkid,nbkjd->nbkij", query, key)[:, :, :, None]
    both = jnp.concatenate([key, query], axis=-2)

    def one(carry: tuple[Array, ...], given: tuple[Any, ...]) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
        key, both, value, solved, mixing, last, (own, prompt, after, kept) = given
        memory, *of_prompt = carry

        def since(state: Array, weight: Array) -> Array:
            doubled = jnp.concatenate([weight, weight], axis=-1)[..., None]
            return doubled * _einsum("bkid,bkrde->bkrie", both, state)

        def grown(weight: Array) -> Array:
            return _einsum("bkjd,bkrje->bkrde", key, weight[..., None] * change)

        inner = since(memory, own)
        for state in of_prompt:
            inner = inner + since(state, prompt)
        change = _einsum("bkrij,bkrje->bkrie", solved, value - inner[..., :chunk, :])
        out = inner[..., chunk:, :] + _einsum("bkrij,bkrje->bkrie", mixing, change)
        new = [own[..., -1, None, None] * memory + grown(last)]
        for state in of_prompt:
            new[0] = new[0] + prompt[..., -1, None, None] * state
            new.append(kept[..., None, None] * state + grown(after))
        return tuple(new), (out, memory, change)

    last = paths.within[..., -1, :]
    _, (out, befores, changes) = lax.scan(one, carry, (key, both, value, solved, mixing, last, paths[1:]))
    return out, befores, changes


@jax.custom_vjp
def unit_inverse(lower: Float[Array, "*batch chunk chunk"]) -> Float[Array, "*batch chunk chunk"]:
    """Returns the inverse of I + L for a strictly lower triangular L.

    Products of matrices join the inverses of the diagonal blocks to inverses of blocks of twice the size. Sums of powers of L
    would lose all digits if L has large entries far from the diagonal.
    """
    size = lower.shape[-1]
    index, block = np.arange(size), 1
    inverse = jnp.broadcast_to(np.eye(size, dtype=lower.dtype), lower.shape)
    while block < size:
        pair, half = index // (2 * block), index // block % 2
        mask = (pair[:, None] == pair[None]) & (half[:, None] == 1) & (half[None] == 0)
        corner = jnp.where(np.broadcast_to(mask, lower.shape), lower, 0.0)
        inverse = inverse - _matmul(inverse, _matmul(corner, inverse))
        block *= 2
    return inverse


def _inverse_backward(inverse: Array, cotangent: Array) -> tuple[Array]:
    turned = jnp.swapaxes(inverse, -1, -2)
    return (jnp.tril(-_matmul(turned, _matmul(cotangent, turned)), -1),)


def _forward(lower: Array) -> tuple[Array, Array]:
    inverse = unit_inverse(lower)
    return inverse, inverse


unit_inverse.defvjp(_forward, _inverse_backward)

_matmul: Callable[[Array, Array], Array] = partial(jnp.matmul, precision=lax.Precision.HIGHEST)


def _normed(x: Array, axis: int = -1) -> Array:
    return x * lax.rsqrt((x * x).sum(axis, keepdims=True) + _NORM_EPS)
