"""Defines how a decoder's arrays are distributed over devices: the interface that the decoder uses, and its implementation for one device."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxtyping import Array, Float, Int

from dapo_jax.dapo.logprobs import chunked_logprobs
from dapo_jax.models.attention import Near, Sinks, causal_attention
from dapo_jax.numerics.precision import WeightSharding, rounded
from dapo_jax.numerics.segments import looked_up

Matrices = tuple[Any, ...]
"""The matrices of experts: gate (if there is one) and up [experts, mlp, embed], and last, down [experts, embed, mlp]. They may be `Quantized`."""
Mixture = Callable[..., Array]
"""A function like `dapo_jax.models.experts.mixture` with bound `hidden` and dtype."""


@dataclass(frozen=True)
class Layout:
    """The layout for a single device, or for arrays that the compiler places. `parallel.training_layout.MeshLayout` places all arrays explicitly."""

    by_blocks: bool = field(default=False, kw_only=True)
    """Whether attention skips masked blocks, as on a CPU (see `dapo_jax.models.attention.row_attention`)."""

    def shard(self, program: Callable[..., tuple[Array, ...]]) -> Callable[..., tuple[Array, ...]]:
        """Wraps `program` so that it runs on all devices. `program` maps parameters and arrays of shape [rows, seq] to arrays of shape [rows, seq]."""
        return program

    def weight_sharding(self, axes: tuple[str, ...]) -> WeightSharding | None:
        """Returns how a weight with these logical axes is sharded between matrix products, or None if it is not sharded."""
        return None

    def in_parts(self, axis: str) -> bool:
        """Returns whether the logical axis `axis` is split over devices. A sum over this axis then consists of partial sums that the compiler adds."""
        return False

    def inner(self, x: Float[Array, "features part"], dtype: str) -> Float[Array, "features tokens"]:
        """Gathers the tokens that are sharded over devices, as input of a product with weights in `dtype`."""
        return x

    def outer(self, x: Float[Array, "features tokens"], dtype: str) -> Float[Array, "features part"]:
        """Returns this device's part of a product in `dtype`, to be added to the residual stream."""
        return x

    def prompts(self, prefix_ids: Array | None) -> Array | None:
        """Returns `prefix_ids`, or None if no response shares its prompt with other responses in a row."""
        return prefix_ids

    def over_heads(self, x: Float[Array, " tokens"]) -> Float[Array, " tokens"]:
        """Returns the sum of `x` over all devices that have different heads of the same tokens."""
        return x

    def experts(
        self, mixture: Mixture, x: Float[Array, "embed tokens"], factors: Float[Array, "tokens chosen"], routes: Int[Array, "tokens chosen"],
        matrices: Matrices, dtype: str, biases: Sequence[Array] = (),
    ) -> Float[Array, "embed tokens"]:  # fmt: skip
        """Calls `mixture` with the tokens of this device and the matrices of all experts. If the mlp axis is split, the result is a partial sum."""
        return mixture(x, factors, routes, matrices, biases)

    def rows(
        self, x: Float[Array, "part embed"], shape: tuple[int, ...], dtype: str
    ) -> Float[Array, "rows seq embed"]:
        """Returns the final hidden states of complete rows, for a product in `dtype` with the unembedding. `shape` is the shape of this device's token array."""
        return x.reshape(*shape, -1)

    def lookup(
        self, table: Float[Array, "entries shard"], tokens: Int[Array, " tokens"], dtype: str, columns: str = "embed"
    ) -> Float[Array, "embed part"]:  # fmt: skip
        """Looks up the embeddings of `tokens` in `table`, rounded to `dtype` and transposed. `columns` is the logical axis of the table's columns."""
        return rounded(looked_up(table, tokens), dtype).T

    def sequences(self, segment_ids: Int[Array, "batch seq"], prefix_ids: Array | None) -> Any:
        """Returns the arrays that `attend` derives from the segments, to compute them once for all layers, or None if there are no such arrays."""
        return None

    def attend(
        self,
        query: Float[Array, "heads head_dim tokens"],
        key: Float[Array, "kv_heads head_dim tokens"],
        value: Float[Array, "kv_heads head_dim tokens"],
        segment_ids: Int[Array, "batch seq"],
        prefix_ids: Int[Array, "batch seq"] | None,
        dtype: str,
        *,
        near: Near | None = None,
        windows: Sequence[int] = (),
        cap: float | None = None,
        sinks: Sinks = None,
        sequences: Any = None,
    ) -> Float[Array, "heads head_dim tokens"]:
        """Computes causal attention within segments (see `dapo_jax.models.attention.causal_attention`). The window in `near` is one of `windows`. Without `sequences`, they are computed."""
        how: dict[str, Any] = {"near": near, "cap": cap, "sinks": sinks, "dtype": dtype}
        how["by_blocks"] = self.by_blocks
        return causal_attention(query, key, value, segment_ids, prefix_ids, **how)

    def logprobs(
        self,
        before: Float[Array, "tokens embed"],
        unembedding: Float[Array, "entries shard"],
        targets: Int[Array, " tokens"],
        *,
        vocab_size: int,
        temperature: float,
        chunk_vocab: int,
        dtype: str,
        teachers: Sequence[tuple[Array, Array]] = (),
        caps: Sequence[float | None] = (),
        heads: Int[Array, "tokens heads"] | None = None,
    ) -> tuple[Array, ...]:
        """Computes the log-probabilities of `targets` with `chunked_logprobs`. The rows of the unembedding beyond `vocab_size` are padding."""
        return chunked_logprobs(
            before,
            unembedding,
            targets,
            temperature=temperature,
            chunk_vocab=chunk_vocab,
            compute_dtype=dtype,
            vocab_size=None if len(unembedding) == vocab_size else vocab_size,
            teachers=teachers,
            caps=caps,
            heads=heads,
        )
