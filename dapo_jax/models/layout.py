"""The layout of a decoder's arrays over devices: the interface that the decoder uses, and the layout of a single device."""

from collections.abc import Callable
from dataclasses import dataclass

from jaxtyping import Array, Float, Int

from dapo_jax.dapo.logprobs import chunked_logprobs
from dapo_jax.dapo.precision import WeightSharding, rounded
from dapo_jax.models.attention import causal_attention


def output_dimensions(axes: tuple[str, ...]) -> int:
    """Returns the number of leading dimensions that are outputs of a matrix with these logical axes; a product sums over the others."""
    return 2 if axes[1] == "head_dim" else 1


@dataclass(frozen=True)
class Layout:
    """One device, or arrays that the compiler places; `parallel.training_layout.MeshLayout` places all arrays explicitly."""

    def shard(self, program: Callable[..., tuple[Array, Array]]) -> Callable[..., tuple[Array, Array]]:
        """Makes `program` run on all devices: a function of (parameters, arrays of [rows, seq]) that returns two arrays of [rows, seq]."""
        return program

    def weight_sharding(self, axes: tuple[str, ...]) -> WeightSharding | None:
        """Returns how a weight with these logical axes is split between its uses, or None."""
        return None

    def in_parts(self, axis: str) -> bool:
        """Returns whether a product sums over the logical axis `axis`, which is split over devices, and the compiler adds the partial sums."""
        return False

    def inner(self, x: Float[Array, "features part"], dtype: str) -> Float[Array, "features tokens"]:
        """Returns the activations to multiply by weights in `dtype`."""
        return x

    def outer(self, x: Float[Array, "features tokens"], dtype: str) -> Float[Array, "features part"]:
        """Returns the part of a product in `dtype` that is added to the residual stream."""
        return x

    def rows(
        self, x: Float[Array, "part embed"], shape: tuple[int, ...], dtype: str
    ) -> Float[Array, "rows seq embed"]:
        """Returns final hidden states of whole rows, to multiply by weights in `dtype`; `shape` is the shape of the local tokens."""
        return x.reshape(*shape, -1)

    def lookup(
        self, table: Float[Array, "entries shard"], tokens: Int[Array, " tokens"], dtype: str
    ) -> Float[Array, "embed part"]:
        """Returns the rows of `table` at `tokens`, rounded to `dtype` and transposed: the beginning of the residual stream."""
        return rounded(table[tokens], dtype).T

    def attend(
        self,
        query: Float[Array, "heads head_dim tokens"],
        key: Float[Array, "kv_heads head_dim tokens"],
        value: Float[Array, "kv_heads head_dim tokens"],
        segment_ids: Int[Array, "batch seq"],
        prefix_ids: Int[Array, "batch seq"] | None,
        dtype: str,
    ) -> Float[Array, "heads head_dim tokens"]:
        """Computes `causal_attention`."""
        return causal_attention(query, key, value, segment_ids, prefix_ids, dtype=dtype)

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
    ) -> tuple[Float[Array, " tokens"], Float[Array, " tokens"]]:
        """Computes `chunked_logprobs`; the rows of the unembedding after `vocab_size` are padding."""
        return chunked_logprobs(
            before,
            unembedding,
            targets,
            temperature=temperature,
            chunk_vocab=chunk_vocab,
            compute_dtype=dtype,
            vocab_size=None if len(unembedding) == vocab_size else vocab_size,
        )


@dataclass(frozen=True)
class PlacedLayout(Layout):
    """Arrays that the compiler places, including weights that are split over devices."""

    split: frozenset[str]
    """The logical axes over which weights are split."""

    def in_parts(self, axis: str) -> bool:
        return axis in self.split
