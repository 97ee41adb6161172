"""Recurrent mixers: layers with a state of fixed size for each sequence. `GatedDelta` and `Mamba` are such kinds.

Each value head has a state S [key_dim, value_dim]. A token with decay a, key k, change u and query q computes

    S <- a S + k u^T,    output = S^T q.

`one_token` does this for one token. `over_rows` computes chunks of tokens with matrix products; docs/gated_delta.md derives it. Before the recurrence, a causal
convolution over the last tokens and silu are applied to q, k and v. A kind determines how u depends on v and S. All of this is in float32.
"""

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from dapo_jax.models.architecture import Architecture
from dapo_jax.models.layer_kinds import Attend, DecodingStep, Fixed, Mixer, PrefillPart, TrainingRows
from dapo_jax.models.parameters import Parameter
from dapo_jax.numerics.segments import looked_up

CHUNK = 64
"""Default number of tokens in a chunk."""

einsum = partial(jnp.einsum, precision=lax.Precision.HIGHEST)


class Mixed(NamedTuple):
    """The inputs of the recurrence. A value head h uses the query and the key of key head h / (value_heads / key_heads)."""

    query: Float[Array, "key_heads key_dim tokens"]
    key: Float[Array, "key_heads key_dim tokens"]
    value: Float[Array, "value_heads value_dim tokens"]
    decay: Float[Array, "value_heads tokens"]
    """Logarithm of the decay a, at most 0."""
    write: Float[Array, "value_heads tokens"]
    """The strength with which a token changes the state."""
    filters: tuple[Array, Array, Array]
    """The filters of the convolution for query, key and value, each [heads, dim, 1, taps]. The last tap belongs to the token itself."""
    biases: tuple[Array, ...] = ()
    """The biases of the convolution for query, key and value, each [heads, dim], or () without biases."""
    skip: Float[Array, " value_heads"] | None = None
    """The factor of a token's own value in its output, or None if the output has no such term."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RecurrentState:
    """The state of one layer after some tokens, for several sequences."""

    memory: Float[Array, "sequences value_heads key_dim value_dim"] | Any
    tails: tuple[Array, Array, Array] | Any
    """The last taps - 1 inputs of the convolution of query, key and value, each [sequences, heads x dim, taps - 1]. Devices may split the dimensions of one head."""


def empty(
    sequences: int, keys: Sequence[int], values: Sequence[int], taps: int, dtype: Any
) -> RecurrentState:
    """Returns the state before the first token. `keys` and `values` are (heads, dimensions)."""
    tails = tuple(jnp.zeros((sequences, math.prod(shape), taps - 1), dtype) for shape in (keys, keys, values))
    return RecurrentState(jnp.zeros((sequences, values[0], keys[1], values[1]), dtype), tails)


@dataclass(frozen=True)
class Recurrent(Mixer):
    """A recurrent mixer. Subclasses define the inputs (`mix`) and the rule of the recurrence."""

    taps: int = field(default=4, kw_only=True)
    """Number of tokens in the convolution."""

    path: ClassVar[str]
    """The beginning of the names of tensors."""
    inputs: ClassVar[Mapping[str, str]]
    """The tensor of each matrix that is applied to the layer's input, in the order of the products. Matrices may be parts of one tensor."""

    @property
    @abstractmethod
    def sizes(self) -> dict[str, tuple[int, int]]:
        """The numbers of heads and of their dimensions, of query, key and value."""

    def parameters(self, config: Architecture) -> dict[str, Parameter]:
        embed, wide = config.embed_dim, self.sizes["value"]
        # Devices along `tensor` have different heads. A single key head cannot be split, so each of them has it.
        keys = "heads" if self.sizes["key"][0] > 1 else "features", "head_dim"
        values, shapes = ("heads", "head_dim"), {**self.sizes, "value_gate": wide}
        axes = {"query": keys, "key": keys, "value": values, "value_gate": values}
        per_head: dict[str, Any] = {"shape": wide[:1], "axes": values[:1], "float32": True}
        matrices = {
            name: Parameter(
                shape=(*shapes.get(name, wide[:1]), embed), axes=(*axes.get(name, values[:1]), "embed"), fan_in=embed, joins=tuple(self.inputs),
                tensor=f"{self.path}.{tensor}.weight", target=tensor if tensor in self.targets else "",
            )
            for name, tensor in self.inputs.items()
        }  # fmt: skip
        filters = {
            f"{name}_conv": Parameter(
                shape=(*shapes[name], 1, self.taps), axes=(*axes[name], "features", "taps"), fan_in=self.taps,
                tensor=f"{self.path}.conv1d.weight", float32=True,
            )
            for name in self.inputs if name in self.sizes
        }  # fmt: skip
        output = Parameter(
            shape=(embed, *wide), axes=("embed", *values), fan_in=math.prod(wide) * 2 * config.layers,
            tensor=f"{self.path}.out_proj.weight", target="out_proj",
        )  # fmt: skip
        # The order of the parameters determines their random initial values.
        last = max(map(list(matrices).index, self.sizes))
        first = dict(list(matrices.items())[: last + 1])
        return {
            **first, **filters, **matrices,
            "decay": Parameter(start=partial(_first_rates, shape=wide[:1]), tensor=f"{self.path}.A_log", **per_head),
            "step_bias": Parameter(start=partial(_first_steps, shape=wide[:1]), tensor=f"{self.path}.dt_bias", **per_head),
            "output": output,
        }  # fmt: skip

    def prepared(self, query: Array, key: Array, axis: int) -> tuple[Array, Array]:
        """Returns the query and the key of the recurrence, after the convolution. `axis` is the axis of a head's dimensions."""
        return query, key

    def change(self, key: Array, value: Array, write: Array, memory: Array) -> Array:
        """Returns u of one token in each slot, like `value` [slots, key_heads, group, value_dim]. `memory` is the state after its decay."""
        return write[..., None] * value

    def system(self, key: Array, write: Array, within: Array) -> Array | None:
        """Returns the matrices that map the values of a chunk, without the share of the state before it, to u. None: u does not depend on the state.

        `key` and `write` are in chunks, as in `_scanned`. `within` [chunks, rows, key_heads, group, to, from] has the decays between two tokens, or 0.
        """
        return None

    def over_rows(self, config: Architecture, rows: TrainingRows) -> Attend:
        prefix = rows.layout.prompts(rows.prefix_ids)
        places = () if prefix is None else ancestors(rows.segment_ids, prefix, self.taps - 1)
        return partial(
            over_rows, self, segment_ids=rows.segment_ids, prefix_ids=rows.prefix_ids, places=places
        )

    def prefill(self, config: Architecture, part: PrefillPart, **data: Any) -> Attend:
        return partial(over_rows, self, segment_ids=part.segment_ids, start=part.before, ends=part.last)

    def step(self, config: Architecture, step: DecodingStep, **data: Any) -> Attend:
        return partial(one_token, self, state=step.state, live=step.live)

    def state(self, config: Architecture, layer: int) -> Fixed:
        return Fixed(self._empty)

    def _empty(self, sequences: int, compute_dtype: str) -> RecurrentState:
        """Returns the state before the first token. It is float32, or float64 if the compute dtype is float64."""
        dtype = np.promote_types(compute_dtype, np.float32)
        return empty(sequences, self.sizes["key"], self.sizes["value"], self.taps, dtype)


def _first_rates(key: Array, shape: tuple[int, ...]) -> Float[Array, " heads"]:
    """Returns initial values of the logarithm of the decay rate. As in Mamba-2 (Dao and Gu 2024, https://arxiv.org/abs/2405.21060), rates are uniform from 1 to 16."""
    return jnp.log(jax.random.uniform(key, shape, jnp.float32, 1.0, 16.0))


def _first_steps(key: Array, shape: tuple[int, ...]) -> Float[Array, " heads"]:
    """Returns initial values of the step before softplus, whose values after softplus are log-uniform from 0.001 to 0.1."""
    ends = math.log(0.001), math.log(0.1)
    return jnp.log(jnp.expm1(jnp.exp(jax.random.uniform(key, shape, jnp.float32, *ends))))


def one_token(
    rule: Recurrent, mixed: Mixed, state: RecurrentState, live: Bool[Array, " slots"]
) -> tuple[Float[Array, "value_heads value_dim slots"], RecurrentState]:
    """Processes one token of each slot. The states of slots that are not live do not change."""
    columns = [jnp.moveaxis(part, -1, 0)[..., None] for part in mixed[:3]]
    tails = (tail.reshape(*part.shape[:3], -1) for tail, part in zip(state.tails, columns, strict=True))
    wide = [jnp.concatenate(pair, axis=-1) for pair in zip(tails, columns, strict=True)]

    def convolved(part: Array, filters: Array, bias: Array | None = None) -> Array:
        total = (part * filters[None, :, :, 0].astype(part.dtype)).sum(-1)
        return jax.nn.silu(total if bias is None else total + bias[None].astype(part.dtype))

    query, key, value = map(convolved, wide, mixed.filters, *[mixed.biases] * bool(mixed.biases))
    query, key = rule.prepared(query, key, axis=-1)
    slots, heads, _ = key.shape
    grouped = (slots, heads, value.shape[1] // heads)
    plain = value
    value, write, decay = (
        part.reshape(*grouped, *part.shape[2:]) for part in (value, mixed.write.T, mixed.decay.T)
    )
    memory = state.memory.reshape(*grouped, *state.memory.shape[2:]) * jnp.exp(decay)[..., None, None]
    # Without the barrier, XLA on a GPU would compute the new memory in a copy.
    change = lax.optimization_barrier(rule.change(key, value, write, memory))
    memory = memory + key[:, :, None, :, None] * change[..., None, :]
    out = einsum("skd,skrde->skre", query, memory).reshape(slots, -1, value.shape[-1])
    out = out if mixed.skip is None else out + mixed.skip[None, :, None] * plain
    tails = (part[..., 1:].reshape(tail.shape) for part, tail in zip(wide, state.tails, strict=True))
    new = RecurrentState(memory.reshape(state.memory.shape), tuple(tails))

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
    rule: Recurrent,
    mixed: Mixed,
    segment_ids: Int[Array, "rows seq"],
    prefix_ids: Int[Array, "rows seq"] | None = None,
    *,
    places: Sequence[Int[Array, "rows seq"]] = (),
    start: RecurrentState | None = None,
    ends: Int[Array, " sequences"] | None = None,
    chunk: int = CHUNK,
) -> tuple[Float[Array, "value_heads value_dim tokens"], RecurrentState | None]:
    """Processes whole rows, whose tokens are concatenated along the token axis.

    The state starts from zeros in each segment. If `prefix_ids` names another segment, which must be earlier in the row, the state starts from the end of
    that segment, so several responses continue one prompt. The responses to a prompt must follow it before the next prompt begins.

    Args:
        rule: the kind of the mixer.
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
        jnp.concatenate(
            [
                jnp.moveaxis(tail.reshape(rows, *part.shape[:2], -1), 0, 2),
                part.reshape(*part.shape[:2], rows, seq),
            ],
            axis=-1,
        )
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

    def convolved(part: Array, filters: Array, bias: Array | None = None) -> Array:
        total = sum(shifted(part, back) * filters[:, :, :, taps - 1 - back, None] for back in range(taps))
        return jax.nn.silu(total if bias is None else total + bias[:, :, None, None])

    query, key, plain = map(convolved, wide, mixed.filters, *[mixed.biases] * bool(mixed.biases))
    query, key = rule.prepared(query, key, axis=1)
    heads = len(key)

    def split(part: Array, *order: int) -> Array:
        """Splits the tokens into chunks, and pads the last chunk."""
        part = jnp.pad(part, [(0, 0)] * (part.ndim - 1) + [(0, extra)])
        part = part.reshape(*part.shape[:-1], -1, chunk)
        return part.transpose(*order)

    query, key = (split(part, 3, 2, 0, 4, 1) for part in (query, key))
    value = split(plain.reshape(heads, -1, *plain.shape[1:]), 4, 3, 0, 1, 5, 2)
    decay, write = (
        split(part.reshape(heads, -1, rows, seq), 3, 2, 0, 1, 4) for part in (mixed.decay, mixed.write)
    )
    own = split(segment_ids, 1, 0, 2)
    prefix = None if prefix_ids is None else split(prefix_ids, 1, 0, 2)
    paths = _paths(own, prefix, first, decay)
    memory = before.memory.reshape(rows, heads, -1, *before.memory.shape[2:])
    carry = (memory,) if prefix is None else (memory, jnp.zeros_like(memory))
    out, befores, changes = _scanned(rule, query, key, value, write, paths, carry)
    out = out.transpose(2, 3, 5, 1, 0, 4).reshape(len(mixed.value), value.shape[-1], rows, -1)[..., :seq]
    out = out if mixed.skip is None else out + mixed.skip[:, None, None, None] * plain
    out = out.reshape(len(mixed.value), value.shape[-1], -1)
    if ends is None:
        return out, None
    row, column = ends // seq, ends % seq
    at, place = (column // chunk, row), column % chunk
    index = jnp.arange(len(ends))
    held = paths.own[at][index, :, :, place][..., None, None] * befores[at]
    weights = paths.within[at][index, :, :, place]
    held = held + einsum("skjd,skrj,skrje->skrde", key[at], weights, changes[at])
    window = column[:, None] + jnp.arange(1, taps)[None]
    same = extended[row[:, None], window] == segment_ids[row, column][:, None]
    channels = (part.reshape(-1, *part.shape[2:])[:, row[:, None], window].swapaxes(0, 1) for part in wide)
    tails = tuple(jnp.where(same[:, None], part, 0.0) for part in channels)
    return out, RecurrentState(held.reshape(len(ends), -1, *held.shape[3:]), tails)


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
    between = einsum("nbkril,nblj->nbkrij", steps, jnp.tril(seen, -1).astype(decay.dtype))

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
    after = decayed(part, einsum("nbkrl,lj->nbkrj", of_part, np.tri(chunk, k=-1, dtype=decay.dtype)))
    kept = jnp.where((last == previous(prefix))[:, :, None], jnp.exp(of_part.sum(-1)), 0.0)
    return _Paths(within, of_own, of_prompt, after, kept)


def _scanned(
    rule: Recurrent, query: Array, key: Array, value: Array, write: Array, paths: _Paths, carry: tuple[Array, ...]
) -> tuple[Array, Array, Array]:  # fmt: skip
    """Returns the outputs, the states before each chunk, and the changes u, for which S = sum of decay k u^T."""
    chunk, solved = key.shape[-2], rule.system(key, write, paths.within)
    mixing = paths.within * einsum("nbkid,nbkjd->nbkij", query, key)[:, :, :, None]
    both = query if solved is None else jnp.concatenate([key, query], axis=-2)
    if solved is None:
        value = value * write[..., None]

    def one(carry: tuple[Array, ...], given: tuple[Any, ...]) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
        key, both, value, solved, mixing, last, (own, prompt, after, kept) = given
        memory, *of_prompt = carry

        def since(state: Array, weight: Array) -> Array:
            weights = (weight if solved is None else jnp.concatenate([weight, weight], axis=-1))[..., None]
            return weights * einsum("bkid,bkrde->bkrie", both, state)

        def grown(weight: Array) -> Array:
            return einsum("bkjd,bkrje->bkrde", key, weight[..., None] * change)

        inner = since(memory, own)
        for state in of_prompt:
            inner = inner + since(state, prompt)
        change = value
        if solved is not None:
            change = einsum("bkrij,bkrje->bkrie", solved, value - inner[..., :chunk, :])
        out = inner[..., -chunk:, :] + einsum("bkrij,bkrje->bkrie", mixing, change)
        new = [own[..., -1, None, None] * memory + grown(last)]
        for state in of_prompt:
            new[0] = new[0] + prompt[..., -1, None, None] * state
            new.append(kept[..., None, None] * state + grown(after))
        return tuple(new), (out, memory, change)

    last = paths.within[..., -1, :]
    _, (out, befores, changes) = lax.scan(one, carry, (key, both, value, solved, mixing, last, paths[1:]))
    return out, befores, changes
