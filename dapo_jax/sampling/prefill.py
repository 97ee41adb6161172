"""Prefills several rows of prompts per call. Prompts that are longer than a row are prefilled in chunks.

Each program computes one layer and is called for every layer, so it compiles in seconds instead of minutes. There are three call shapes: all rows, one row,
and one chunk of a sequence that attends to the earlier chunks.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.stages import Lowered
from jaxtyping import Array, Float, Int

from dapo_jax.models.attention import Near, causal_attention, part_attention
from dapo_jax.models.decoder import Block, EmbeddingAndHead, RopeTables, rope_tables
from dapo_jax.models.presets import DecoderConfig
from dapo_jax.parallel.weights import SamplerWeights
from dapo_jax.sampling.cache import Cache
from dapo_jax.sampling.prompt_packing import PackedPrompts, PrefillShape, pack_prompts


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Prefix:
    """Prefilled prompts. Their buffers are never donated, so one prompt can be inserted into many slots."""

    layers: tuple[Any, ...]
    """Keys and values of each layer, arranged in the rows of `PackedPrompts`."""
    logits: Float[Array, "prompts vocab"] | Any
    """Logits of each prompt's first response token."""
    rows: Int[Array, " prompts"] | Any
    starts: Int[Array, " prompts"] | Any
    lengths: Int[Array, " prompts"] | Any


Read = list[tuple[int, Prefix, int]]
"""The prompts that one prefill call finished, as tuples `(index in prompts, prefix, index in the prefix)`."""


class Prefill:
    """Prefills prompts with jitted programs on one mesh."""

    def __init__(
        self, config: DecoderConfig, mesh: Mesh, cache: Cache, *, block: nnx.GraphDef[Block], ends: nnx.GraphDef[EmbeddingAndHead],
        shape: PrefillShape, capacity: int, cache_dtype: str, compute_dtype: str,
    ) -> None:  # fmt: skip
        """Builds the programs. `block` is a layer's graph definition, and `ends` defines the embedding and head. `capacity` is the maximum sequence length."""
        self.shape, self._config, self._cache, self._block, self._ends = shape, config, cache, block, ends
        self._dtype, self._cache_dtype = compute_dtype, cache_dtype
        # Each program is awaited, because the CPU runtime may hang if many programs with collectives are queued.
        self._waits = mesh.size > 1 and mesh.devices.flat[0].platform == "cpu"
        self._room = -(-capacity // shape.width) * shape.width
        whole, row, buffer = (
            NamedSharding(mesh, PartitionSpec(*axes)) for axes in ((), (None, "tensor"), ("tensor",))
        )
        self._embed = jax.jit(self._embed_program, out_shardings=whole)
        self._layer = jax.jit(self._layer_program, donate_argnums=1, out_shardings=(whole, row))
        pair = buffer, buffer
        self._part = jax.jit(self._part_program, donate_argnums=(1, 2), out_shardings=(whole, pair))
        self._kept = jax.jit(self._kept_program, out_shardings=row)
        self._head = jax.jit(self._head_program, out_shardings=whole)
        self._angles = jax.jit(rope_tables, static_argnums=1, out_shardings=whole)
        self._empty = jax.jit(self._empty_program, out_shardings=pair)

    def __call__(self, params: SamplerWeights, prompts: Sequence[Int[np.ndarray, " _"]]) -> Iterator[Read]:
        """Prefills prompts; prompts longer than a row come last. After each call, yields the list of finished prompts, possibly empty."""
        short = [index for index, prompt in enumerate(prompts) if len(prompt) <= self.shape.width]
        for packed in pack_prompts(prompts, short, self.shape) if short else ():
            prefix = self._rows(params, packed)
            yield [(index, prefix, place) for place, index in enumerate(packed.indices)]
        for index, prompt in enumerate(prompts):
            for prefix in self._parts(params, prompt) if len(prompt) > self.shape.width else ():
                yield [] if prefix is None else [(index, prefix, 0)]

    def programs(
        self, params: SamplerWeights, *, again: bool
    ) -> tuple[dict[str, Callable[[], Lowered]], dict[str, Prefix]]:
        """Returns functions that lower the programs in use, and, for each call shape in use, a prefix that consists of shape structs with shardings.

        `params` may be shape structs. With `again`, programs for re-prefilling are included, because a preempted response may be longer than any prompt.
        """
        made: dict[str, Callable[[], Lowered]] = {}
        prefixes, layer, ends = dict[str, Prefix](), params["layers"][0], params["ends"]
        row_prompts, width = self.shape.row_prompts, self.shape.width
        used = {"row": 1, "rows": self.shape.rows} if self.shape.rows > 1 else {"row": 1}
        if (self._room if again else self.shape.longest) > width:
            used["part"] = 1
        for name, rows in used.items():
            shapes = (rows * width,), (rows, width), (rows * row_prompts,)
            # These arguments are host arrays, so their structs have no sharding.
            tokens, segments, last = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes)
            x, ropes = self._embed.eval_shape(ends, tokens), self._angles.eval_shape(tokens, self._config)
            rope, window = self._of_layer(0, ropes)
            if name == "part":
                pair, start = self._empty.eval_shape(), jax.ShapeDtypeStruct((), jnp.int32)
                made["prefill_part"] = partial(self._part.lower, layer, x, pair, rope, start, window)
                made["prefill_kept"] = partial(self._kept.lower, pair)
                made["prefill_empty"] = self._empty.lower
                kept = self._kept.eval_shape(pair)
            else:
                made[f"prefill_{name}_embed"] = partial(self._embed.lower, ends, tokens)
                near = () if window is None else ((window, segments),)
                made[f"prefill_{name}"] = partial(self._layer.lower, layer, x, rope, segments, *near)
                made[f"prefill_{name}_head"] = partial(self._head.lower, ends, x, last)
                _, kept = self._layer.eval_shape(layer, x, rope, segments, *near)
            prefixes[name] = Prefix(
                layers=(kept,) * len(params["layers"]), logits=self._head.eval_shape(ends, x, last),
                rows=last, starts=last, lengths=last,
            )  # fmt: skip
        return made, prefixes

    def _rows(self, params: SamplerWeights, packed: PackedPrompts) -> Prefix:
        ropes = self._angles(packed.positions.reshape(-1), self._config)
        x, layers = self._embed(params["ends"], packed.tokens.reshape(-1)), []
        for index, weights in enumerate(params["layers"]):
            rope, window = self._of_layer(index, ropes)
            near = () if window is None else ((window, packed.positions),)
            x, kept = self._awaited(self._layer(weights, x, rope, packed.segment_ids, *near))
            layers.append(kept)
        last = packed.rows * self.shape.width + packed.starts + packed.lengths - 1
        rows, starts, lengths = (jnp.asarray(part) for part in (packed.rows, packed.starts, packed.lengths))
        logits = self._head(params["ends"], x, last)
        return Prefix(layers=tuple(layers), logits=logits, rows=rows, starts=starts, lengths=lengths)

    def _parts(self, params: SamplerWeights, prompt: Int[np.ndarray, " _"]) -> Iterator[Prefix | None]:
        """Prefills one sequence in chunks as wide as a row. Yields None after each chunk except the last, and finally the prefix."""
        width, buffers, x = self.shape.width, [self._empty() for _ in params["layers"]], None
        starts = range(0, len(prompt), width)
        for start in starts:
            positions = np.arange(start, start + width, dtype=np.int32)
            part = np.zeros(width, np.int32)
            part[: len(prompt) - start] = prompt[start : start + width]
            x, ropes = self._embed(params["ends"], part), self._angles(positions, self._config)
            for index, weights in enumerate(params["layers"]):
                rope, window = self._of_layer(index, ropes)
                made = self._part(weights, x, buffers[index], rope, np.int32(start), window)
                x, buffers[index] = self._awaited(made)
            if start + width < len(prompt):
                yield None
        last = np.zeros(self.shape.row_prompts, np.int32)
        last[0] = len(prompt) - 1 - starts[-1]
        logits = self._head(params["ends"], x, last)
        zero, length = jnp.zeros(len(last), jnp.int32), jnp.full(len(last), len(prompt), jnp.int32)
        layers = tuple(self._kept(buffer) for buffer in buffers)
        yield Prefix(layers=layers, logits=logits, rows=zero, starts=zero, lengths=length)

    def _of_layer(self, index: int, ropes: Sequence[Any]) -> tuple[Any, np.int32 | None]:
        """Returns the tables of a layer's rotation, which may be shape structs, and its window."""
        config = self._config
        window = np.int32(config.windows[index]) if config.windows else None
        return ropes[config.rope_of_layer[index] if config.rope_of_layer else 0], window

    def _awaited(self, made: Any) -> Any:
        return jax.block_until_ready(made) if self._waits else made

    # The programs below are pure functions of their arguments.

    def _embed_program(self, ends: nnx.State, tokens: Array) -> Array:
        return nnx.merge(self._ends, ends).embed(tokens)

    def _layer_program(
        self, weights: nnx.State, x: Array, rope: RopeTables, segment_ids: Array, near: Near | None = None
    ) -> tuple[Array, Any]:
        def attend(query: Array, key: Array, value: Array) -> tuple[Array, Any]:
            attended = causal_attention(
                query, key, value, segment_ids, near=near, cap=self._config.score_cap, dtype=self._dtype
            )
            return attended, self._cache.of_rows(key, value, len(segment_ids), self._cache_dtype)

        return nnx.merge(self._block, weights)(x, rope, attend)[:2]

    def _part_program(
        self, weights: nnx.State, x: Array, buffers: tuple[Array, Array], rope: RopeTables, start: Array, window: Array | None = None
    ) -> tuple[Array, tuple[Array, Array]]:  # fmt: skip
        def attend(query: Array, key: Array, value: Array) -> tuple[Array, Any]:
            keys, values = (
                lax.dynamic_update_slice_in_dim(buffer, new.astype(buffer.dtype), start, axis=2)
                for buffer, new in zip(buffers, (key, value), strict=True)
            )
            cap = self._config.score_cap
            out = part_attention(query, keys, values, start, window=window, cap=cap, dtype=self._dtype)
            return out, (keys, values)

        return nnx.merge(self._block, weights)(x, rope, attend)[:2]

    def _kept_program(self, buffers: tuple[Array, Array]) -> Any:
        return self._cache.of_rows(*buffers, 1, self._cache_dtype)

    def _head_program(self, ends: nnx.State, x: Array, last: Array) -> Array:
        outer = nnx.merge(self._ends, ends)
        return outer.logits(outer.normed(x[:, last]))

    def _empty_program(self) -> tuple[Array, Array]:
        buffer = jnp.zeros((self._config.kv_heads, self._config.head_dim, self._room), self._dtype)
        return buffer, buffer
