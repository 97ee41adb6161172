"""The layout of a decoder's arrays over devices: what the decoder asks of it, and the answers where nothing is spread."""

from collections.abc import Callable
from dataclasses import dataclass

from jaxtyping import Array, Float, Int

from dapo_jax.dapo.logprobs import chunked_logprobs
from dapo_jax.dapo.precision import WeightSharding, rounded
from dapo_jax.models.attention import causal_attention


def output_dimensions(axes: tuple[str, ...]) -> int:
    """The leading dimensions of a matrix with these logical axes that are its outputs: those of a head, or one. A product sums over the others."""
    return 2 if axes[1] == "head_dim" else 1


@dataclass(frozen=True)
class Layout:
    """One device, or arrays that the compiler places as it sees fit; `parallel.training_layout.MeshLayout` says where all of them lie."""

    def shard(self, program: Callable[..., tuple[Array, Array]]) -> Callable[..., tuple[Array, Array]]:
        """A function of (parameters, arrays of [rows, seq]) that returns two arrays of [rows, seq], made to run on all devices."""
        return program

    def weight_sharding(self, axes: tuple[str, ...]) -> WeightSharding | None:
        """The split of a weight with these logical axes between its uses; None: it is not split."""
        return None

    def in_parts(self, axis: str) -> bool:
        """True if devices have parts of the logical axis `axis` that a product sums over, and the compiler adds up what they have."""
        return False

    def inner(self, x: Float[Array, "features part"], dtype: str) -> Float[Array, "features tokens"]:
        """The activations that are to be multiplied by weights in `dtype`."""
        return x

    def outer(self, x: Float[Array, "features tokens"], dtype: str) -> Float[Array, "features part"]:
        """The residual stream, and what is added to it: products in `dtype`."""
        return x

    def rows(
        self, x: Float[Array, "part embed"], shape: tuple[int, ...], dtype: str
    ) -> Float[Array, "rows seq embed"]:
        """Final hidden states of whole rows, to be multiplied by weights in `dtype`. `shape` is that of the tokens that are here."""
        return x.reshape(*shape, -1)

    def lookup(
        self, table: Float[Array, "entries shard"], tokens: Int[Array, " tokens"], dtype: str
    ) -> Float[Array, "embed part"]:
        """The rows of `table` at `tokens`, rounded to `dtype`, and turned: the residual stream's beginning."""
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
        """The attention that `causal_attention` computes."""
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
        """`chunked_logprobs`; `vocab_size` rows of the unembedding are entries, what follows them is padding."""
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
    """Arrays that the compiler places, weights among them that are split over devices."""

    split: frozenset[str]
    """The logical axes over which they are."""

    def in_parts(self, axis: str) -> bool:
        return axis in self.split
