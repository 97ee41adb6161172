"""Sizes of known decoders. A model family is a set of field values, not a class."""

from dataclasses import dataclass, replace

from dapo_jax.hints import nearest
from dapo_jax.models.lora import LoraShape
from dapo_jax.models.rope import RopeScaling


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """The sizes and switches of one decoder. The architecture is Llama's: pre-norm, RoPE, SwiGLU."""

    vocab_size: int
    embed_dim: int
    layers: int
    heads: int
    kv_heads: int
    """Key and value heads; each serves `heads / kv_heads` query heads."""
    head_dim: int
    mlp_dim: int
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    """How rotary angles are scaled for longer contexts; None: not at all."""
    norm_eps: float = 1e-6
    max_positions: int = 4096
    """Longest sequence (prompt plus response) in tokens."""
    tied_embeddings: bool = True
    """The unembedding is the embedding."""
    qkv_bias: bool = False
    """Biases on the query, key and value projections (Qwen2)."""
    qk_norm: bool = False
    """RMS norm of queries and keys per head (Qwen3)."""
    vocab_multiple: int = 1
    """The rows of embedding and unembedding are padded to a multiple of this, so that they can be split over devices."""

    lora: LoraShape | None = None
    """The adapters of each block; None: every parameter is trained."""

    def __post_init__(self) -> None:
        if self.kv_heads < 1 or self.heads % self.kv_heads:
            raise ValueError(f"kv_heads={self.kv_heads} must divide heads={self.heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} must be even: rotary embedding rotates pairs")

    @property
    def vocab_rows(self) -> int:
        """Rows of embedding and unembedding; the rows after `vocab_size` are zeros that no token uses."""
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple

    @property
    def parameters(self) -> int:
        """Number of parameters, without adapters and padding of the vocabulary."""
        heads = self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        bias = self.head_dim * (self.heads + 2 * self.kv_heads) if self.qkv_bias else 0
        norms = 2 * self.embed_dim + (2 * self.head_dim if self.qk_norm else 0)
        layer = self.embed_dim * (heads + 3 * self.mlp_dim) + bias + norms
        embeddings = self.vocab_size * self.embed_dim * (1 if self.tied_embeddings else 2)
        return self.layers * layer + embeddings + self.embed_dim

    @property
    def trained_parameters(self) -> int:
        """Number of trained parameters: of the adapters, if there are any."""
        if self.lora is None:
            return self.parameters
        attended, kept = self.heads * self.head_dim, self.kv_heads * self.head_dim
        widths = {
            "q_proj": self.embed_dim + attended,
            "k_proj": self.embed_dim + kept,
            "v_proj": self.embed_dim + kept,
            "o_proj": attended + self.embed_dim,
        }
        inner = self.embed_dim + self.mlp_dim
        return self.layers * self.lora.rank * sum(widths.get(name, inner) for name in self.lora.targets)

    @property
    def base(self) -> "DecoderConfig":
        """The same decoder without adapters."""
        return replace(self, lora=None)


def _llama3(embed_dim: int, layers: int, heads: int, mlp_dim: int, *, head_dim: int, factor: float,
            tied_embeddings: bool) -> DecoderConfig:  # fmt: skip
    return DecoderConfig(
        vocab_size=128_256, embed_dim=embed_dim, layers=layers, heads=heads, kv_heads=8, head_dim=head_dim,
        mlp_dim=mlp_dim, rope_theta=5e5, norm_eps=1e-5, max_positions=131_072, tied_embeddings=tied_embeddings,
        rope_scaling=RopeScaling(kind="llama3", factor=factor, original_max_positions=8192),
    )  # fmt: skip


def _qwen2_5(embed_dim: int, layers: int, heads: int, kv_heads: int, mlp_dim: int, *, vocab_size: int,
             tied_embeddings: bool, head_dim: int) -> DecoderConfig:  # fmt: skip
    return DecoderConfig(
        vocab_size=vocab_size, embed_dim=embed_dim, layers=layers, heads=heads, kv_heads=kv_heads, head_dim=head_dim,
        mlp_dim=mlp_dim, rope_theta=1e6, norm_eps=1e-6, max_positions=32768, tied_embeddings=tied_embeddings,
        qkv_bias=True,
    )  # fmt: skip


def _qwen3(embed_dim: int, layers: int, heads: int, mlp_dim: int, *, tied_embeddings: bool) -> DecoderConfig:
    return DecoderConfig(
        vocab_size=151_936, embed_dim=embed_dim, layers=layers, heads=heads, kv_heads=8, head_dim=128, mlp_dim=mlp_dim,
        rope_theta=1e6, norm_eps=1e-6, max_positions=40_960, tied_embeddings=tied_embeddings, qk_norm=True,
    )  # fmt: skip


# Sizes are from config.json in the publishers' repositories: HuggingFaceTB/SmolLM2-135M, meta-llama/Llama-3.2-1B,
# Qwen/Qwen2.5-*, Qwen/Qwen3-*. The tests count the parameters of each.
PRESETS: dict[str, DecoderConfig] = {
    # About half a million parameters with a character vocabulary: learns arithmetic on a laptop CPU.
    "tiny": DecoderConfig(
        vocab_size=32, embed_dim=128, layers=4, heads=4, kv_heads=2, head_dim=32, mlp_dim=256, max_positions=512
    ),
    "smollm2-135m": DecoderConfig(
        vocab_size=49152, embed_dim=576, layers=30, heads=9, kv_heads=3, head_dim=64, mlp_dim=1536,
        rope_theta=1e5, norm_eps=1e-5, max_positions=8192,
    ),
    "llama-3.2-1b": _llama3(2048, 16, 32, 8192, head_dim=64, factor=32.0, tied_embeddings=True),
    "llama-3.1-8b": _llama3(4096, 32, 32, 14_336, head_dim=128, factor=8.0, tied_embeddings=False),
    "qwen2.5-0.5b": _qwen2_5(896, 24, 14, 2, 4864, vocab_size=151_936, tied_embeddings=True, head_dim=64),
    "qwen2.5-1.5b": _qwen2_5(1536, 28, 12, 2, 8960, vocab_size=151_936, tied_embeddings=True, head_dim=128),
    "qwen2.5-3b": _qwen2_5(2048, 36, 16, 2, 11_008, vocab_size=151_936, tied_embeddings=True, head_dim=128),
    "qwen2.5-7b": _qwen2_5(3584, 28, 28, 4, 18_944, vocab_size=152_064, tied_embeddings=False, head_dim=128),
    "qwen2.5-32b": _qwen2_5(5120, 64, 40, 8, 27_648, vocab_size=152_064, tied_embeddings=False, head_dim=128),
    "qwen3-0.6b": _qwen3(1024, 28, 16, 3072, tied_embeddings=True),
    "qwen3-1.7b": _qwen3(2048, 28, 16, 6144, tied_embeddings=True),
    "qwen3-4b": _qwen3(2560, 36, 32, 9728, tied_embeddings=True),
    "qwen3-8b": _qwen3(4096, 36, 32, 12_288, tied_embeddings=False),
}  # fmt: skip


def preset(name: str) -> DecoderConfig:
    """Returns the preset called `name`.

    Raises:
        ValueError: there is no such preset; the message names the nearest.
    """
    if name not in PRESETS:
        near = nearest(name, PRESETS, least=0.0)[0]
        raise ValueError(f"no model preset {name!r}; the nearest is {near!r} (all: {', '.join(PRESETS)})")
    return PRESETS[name]
