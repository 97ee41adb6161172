"""Sizes of known decoders. A model family is a set of field values, not a class."""

from dataclasses import dataclass
from difflib import get_close_matches


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """The sizes and switches of one decoder. Field names follow the paper trail of Llama: pre-norm, RoPE, SwiGLU."""

    vocab_size: int
    embed_dim: int
    layers: int
    heads: int
    kv_heads: int
    """Key and value heads; each serves `heads / kv_heads` query heads."""
    head_dim: int
    mlp_dim: int
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-6
    max_positions: int = 4096
    """Longest sequence (prompt plus response) in tokens."""
    tied_embeddings: bool = True
    """The unembedding is the embedding."""
    qkv_bias: bool = False
    """Biases on the query, key and value projections (Qwen2)."""
    qk_norm: bool = False
    """RMS norm of queries and keys per head (Qwen3)."""

    def __post_init__(self) -> None:
        if self.kv_heads < 1 or self.heads % self.kv_heads:
            raise ValueError(f"kv_heads={self.kv_heads} must divide heads={self.heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} must be even: rotary embedding turns pairs")

    @property
    def parameters(self) -> int:
        """Number of parameters."""
        heads = self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        bias = self.head_dim * (self.heads + 2 * self.kv_heads) if self.qkv_bias else 0
        norms = 2 * self.embed_dim + (2 * self.head_dim if self.qk_norm else 0)
        layer = self.embed_dim * (heads + 3 * self.mlp_dim) + bias + norms
        embeddings = self.vocab_size * self.embed_dim * (1 if self.tied_embeddings else 2)
        return self.layers * layer + embeddings + self.embed_dim


def _qwen2_5(embed_dim: int, layers: int, heads: int, kv_heads: int, mlp_dim: int, *, vocab_size: int,
             tied_embeddings: bool, head_dim: int) -> DecoderConfig:  # fmt: skip
    return DecoderConfig(
        vocab_size=vocab_size, embed_dim=embed_dim, layers=layers, heads=heads, kv_heads=kv_heads, head_dim=head_dim,
        mlp_dim=mlp_dim, rope_theta=1e6, norm_eps=1e-6, max_positions=32768, tied_embeddings=tied_embeddings,
        qkv_bias=True,
    )  # fmt: skip


PRESETS: dict[str, DecoderConfig] = {
    # About half a million parameters over a character vocabulary: learns arithmetic on a laptop CPU.
    "tiny": DecoderConfig(
        vocab_size=32, embed_dim=128, layers=4, heads=4, kv_heads=2, head_dim=32, mlp_dim=256, max_positions=512
    ),
    "smollm2-135m": DecoderConfig(
        vocab_size=49152, embed_dim=576, layers=30, heads=9, kv_heads=3, head_dim=64, mlp_dim=1536,
        rope_theta=1e5, norm_eps=1e-5, max_positions=8192,
    ),
    "qwen2.5-0.5b": _qwen2_5(896, 24, 14, 2, 4864, vocab_size=151_936, tied_embeddings=True, head_dim=64),
    "qwen2.5-7b": _qwen2_5(3584, 28, 28, 4, 18_944, vocab_size=152_064, tied_embeddings=False, head_dim=128),
    "qwen2.5-32b": _qwen2_5(5120, 64, 40, 8, 27_648, vocab_size=152_064, tied_embeddings=False, head_dim=128),
    "qwen3-0.6b": DecoderConfig(
        vocab_size=151_936, embed_dim=1024, layers=28, heads=16, kv_heads=8, head_dim=128, mlp_dim=3072,
        rope_theta=1e6, norm_eps=1e-6, max_positions=40_960, qk_norm=True,
    ),
}  # fmt: skip


def preset(name: str) -> DecoderConfig:
    """The preset called `name`.

    Raises:
        ValueError: there is none; the message names the nearest.
    """
    if name not in PRESETS:
        near = get_close_matches(name, PRESETS, n=1, cutoff=0.0)[0]
        raise ValueError(f"no model preset {name!r}; the nearest is {near!r} (all: {', '.join(PRESETS)})")
    return PRESETS[name]
