"""Floating-point operations and bytes of a decoder's products, by shape. A product of [m, k] and [k, n] is 2 m k n operations."""

from dapo_jax.config import SamplingConfig
from dapo_jax.models.presets import DecoderConfig


def matrix_parameters(decoder: DecoderConfig) -> int:
    """Weights of the matrices that every token passes in the layers, adapters among them; not embedding and unembedding."""
    heads = decoder.head_dim * (2 * decoder.heads + 2 * decoder.kv_heads)
    adapters = 0 if decoder.lora is None else decoder.trained_parameters
    return decoder.layers * decoder.embed_dim * (heads + 3 * decoder.mlp_dim) + adapters


def unembedding_parameters(decoder: DecoderConfig) -> int:
    """Weights that a token passes whose logits are computed."""
    return decoder.vocab_size * decoder.embed_dim


def forward_flops(
    decoder: DecoderConfig, *, tokens: int | float, pairs: int | float, logits: int | float
) -> int | float:
    """Operations of a forward pass.

    Args:
        decoder: its sizes.
        tokens: that pass the layers.
        pairs: of a query and a key that it sees: each is a product with the key and one with the value in every head.
        logits: tokens whose logits are computed.
    """
    attention = 4 * decoder.layers * decoder.heads * decoder.head_dim
    return (
        2 * matrix_parameters(decoder) * tokens
        + attention * pairs
        + 2 * unembedding_parameters(decoder) * logits
    )


def cache_bytes_per_token(decoder: DecoderConfig, sampling: SamplingConfig, *, compute_dtype: str) -> int:
    """Bytes of one token's keys and values in all layers, and of their scales where they are in eight bits."""
    each = decoder.head_dim * item(compute_dtype) if not sampling.cache_dtype else decoder.head_dim + 4
    return 2 * decoder.layers * decoder.kv_heads * each


def weight_bytes(parameters: int | float, sampling: SamplingConfig, *, compute_dtype: str) -> int | float:
    """Bytes of so many weights of the sampler's matrices; the scales of those in eight bits, one for thousands, are left out."""
    return parameters * (1 if sampling.weight_dtype else item(compute_dtype))


def item(dtype: str) -> int:
    """Bytes of a number in a compute dtype."""
    return 2 if dtype == "bfloat16" else 4


def decode_weight_parameters(decoder: DecoderConfig) -> int:
    """Weights that a decode step reads: all matrices and the unembedding; of a separate embedding only a row a token."""
    return matrix_parameters(decoder) + unembedding_parameters(decoder)
