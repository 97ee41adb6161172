"""Configurations of known decoders. Model families differ only in field values, so they do not have separate classes."""

from dataclasses import dataclass, field, replace
from typing import Any, Literal

from dapo_jax.hints import nearest
from dapo_jax.models.lora import DELTA_MATRICES, SETS, LoraShape
from dapo_jax.models.rope import Rope, RopeScaling


@dataclass(frozen=True)
class Experts:
    """A mixture of experts (Shazeer et al. 2017, https://arxiv.org/abs/1701.06538). In each layer, a router chooses some MLPs for each token."""

    count: int
    """Number of experts in each layer."""
    chosen: int
    """Number of experts that each token uses."""
    normalize: bool
    """Whether the factors of a token's experts are divided by their sum, so that they sum to 1. If False, they are probabilities over all experts."""

    def __post_init__(self) -> None:
        if not 0 < self.chosen <= self.count:
            raise ValueError(
                f"a token uses num_experts_per_tok={self.chosen} experts, but there are {self.count}; it must be 1 to {self.count}"
            )


@dataclass(frozen=True)
class DeltaSizes:
    """The sizes of Gated DeltaNet layers (see `dapo_jax.models.gated_delta`)."""

    key_heads: int
    value_heads: int
    """Number of value heads. Each key head is shared by `value_heads / key_heads` of them."""
    key_dim: int
    value_dim: int
    taps: int = 4
    """Number of tokens in the convolution."""

    def __post_init__(self) -> None:
        if self.key_heads < 1 or self.value_heads % self.key_heads:
            raise ValueError(
                f"linear_num_key_heads={self.key_heads} must divide linear_num_value_heads={self.value_heads}"
            )

    @property
    def channels(self) -> int:
        """Number of channels of the convolution: queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def outputs(self) -> int:
        """Number of features of all value heads."""
        return self.value_heads * self.value_dim

    @property
    def matrix_rows(self) -> int:
        """Number of outputs of the matrices that are applied to the layer's input."""
        return self.channels + self.outputs + 2 * self.value_heads


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Sizes and architecture options of a decoder. The defaults of the options describe Llama's architecture: pre-norm, RoPE and SwiGLU."""

    family: str = "llama"
    """The model family, as model_type in config.json. It determines the keys of config.json and the names of tensors, but not the computation."""

    vocab_size: int
    embed_dim: int
    layers: int
    heads: int
    kv_heads: int
    """Number of key and value heads. Each is shared by `heads / kv_heads` query heads."""
    head_dim: int
    mlp_dim: int
    """Number of hidden features of the MLP, or of each expert."""
    experts: Experts | None = None
    """The experts that each layer has in place of the MLP. If None, there is one MLP."""
    delta: DeltaSizes | None = None
    """The sizes of the Gated DeltaNet layers. None: there are no such layers."""
    delta_layers: tuple[bool, ...] = ()
    """For each layer, whether it is a Gated DeltaNet layer in place of attention. If empty, no layer is."""
    attention_gate: bool = False
    """Whether the output of attention is multiplied by the sigmoid of a gate, which is a second half of each query head's projection (Qwen3.5)."""
    ropes: tuple[Rope | None, ...] = (Rope(),)
    """The different rotations of the layers. None means that queries and keys are not rotated."""
    rope_of_layer: tuple[int, ...] = ()
    """For each layer, an index into `ropes`. If empty, all layers have the first rotation."""
    windows: tuple[int, ...] = ()
    """For each layer, the number of tokens to which a query attends, including its own, or 0 for all. If empty, all layers attend to all tokens."""
    norm_eps: float = 1e-6
    norm_place: Literal["inputs", "outputs", "both"] = "inputs"
    """Whether the inputs or the outputs of attention and MLP are normalized, or both."""
    norm_offset: float = 0.0
    """Number that is added to the weights of all norms. Gemma stores the difference from 1."""
    max_positions: int = 4096
    """Maximum length of a sequence (prompt plus response) in tokens."""
    tied_embeddings: bool = True
    """If True, the unembedding uses the embedding matrix."""
    qkv_bias: bool = False
    """Whether the query, key and value projections have biases (Qwen2)."""
    output_bias: bool = False
    """Whether the output projection of attention has a bias."""
    mlp_bias: bool = False
    """Whether the three projections of the MLP have biases."""
    qk_norm: Literal["none", "head", "all"] = "none"
    """RMS normalization of queries and keys: over each head (Qwen3), or over all heads together (OLMo-2)."""
    qk_norm_after_rope: bool = False
    """Whether queries and keys are normalized after they are rotated (Hunyuan)."""
    clip_qkv: float | None = None
    """Bound to whose range queries, keys and values are clipped before the rotation (OLMoE). None: they are not clipped."""
    query_scale: float | None = None
    """Factor of the attention scores. None: head_dim^-0.5."""
    query_growth: tuple[float, int] | None = None
    """If (beta, original), a query at position p is multiplied by 1 + beta ln(1 + floor(p / original)) (Ministral 3)."""
    score_cap: float | None = None
    """If c, attention scores s become c tanh(s / c) before the softmax (Gemma 2)."""
    logit_cap: float | None = None
    """If c, logits x become c tanh(x / c) (Gemma 2)."""
    logit_divisor: float = 1.0
    """Divisor of the logits, which is applied before `logit_cap` (Granite)."""
    activation: Literal["silu", "gelu_tanh"] = "silu"
    """Activation function of the MLP's gate. `gelu_tanh` is the approximation of GELU with tanh."""
    embed_scale: float = 1.0
    """Factor of the embeddings, rounded to the compute dtype."""
    residual_scale: float = 1.0
    """Factor of the outputs of attention and MLP before they are added to the residual stream (Granite)."""
    vocab_multiple: int = 1
    """The rows of the embedding and the unembedding are padded to a multiple of this number, so that they can be split over devices."""
    lora: LoraShape | None = None
    """The adapters of each block. If None, there are no adapters, and all parameters are trained."""
    wrapped: bool = field(default=False, compare=False)
    """Whether a model for images and text contains this decoder (`families.WRAPPED`). This changes only the names of adapter tensors."""

    def __post_init__(self) -> None:
        if self.kv_heads < 1 or self.heads % self.kv_heads:
            raise ValueError(f"kv_heads={self.kv_heads} must divide heads={self.heads}")
        if (self.delta is not None) != any(self.delta_layers) or (
            self.delta_layers and all(self.delta_layers)
        ):
            raise ValueError("layer_types must have 'linear_attention' and at least one 'full_attention'")
        if self.delta and (len(self.delta_layers) != self.layers or self.experts):
            raise ValueError(
                f"a model with Gated DeltaNet must have layer_types for its layers={self.layers}, found {len(self.delta_layers)}, and no experts"
            )
        if self.lora and self.delta is None and set(self.lora.targets) & set(DELTA_MATRICES):
            raise ValueError(
                f"lora.targets={list(self.lora.targets)} has {' and '.join(DELTA_MATRICES)}, which only models with Gated DeltaNet layers have: "
                "remove linear_attention"
            )
        if self.experts and self.lora and (refused := set(self.lora.targets) & set(SETS["mlp"])):
            raise ValueError(
                f"lora.targets has {', '.join(sorted(refused))}, but adapters of experts are not supported: set lora.targets=[attention], "
                "or train all weights with lora.rank=0"
            )
        for rope in self.ropes:
            if rope is not None and (odd := rope.width(self.head_dim)) % 2:
                raise ValueError(
                    f"head_dim={self.head_dim} x partial_rotary_factor={rope.share:g} = {odd} must be even, because RoPE rotates pairs"
                )

    def for_length(self, tokens: int) -> "DecoderConfig":
        """Chooses the factors of longrope for a run whose longest sequence has `tokens` tokens. Other decoders do not change."""

        def chosen(rope: Rope | None) -> Rope | None:
            if rope is None or rope.scaling is None or rope.scaling.kind != "longrope":
                return rope
            return replace(
                rope, scaling=replace(rope.scaling, long=tokens > rope.scaling.original_max_positions)
            )

        return replace(self, ropes=tuple(map(chosen, self.ropes)))

    @property
    def length_note(self) -> str:
        """A sentence about the factors of longrope that `for_length` chose, or an empty string."""
        for rope in self.ropes:
            if rope is not None and rope.scaling is not None and rope.scaling.kind == "longrope":
                chosen, limit = ("long", "above") if rope.scaling.long else ("short", "at most")
                return (
                    f"RoPE uses {chosen}_factor, because data.max_prompt_tokens + sampling.max_response_tokens is {limit} "
                    f"original_max_position_embeddings={rope.scaling.original_max_positions}; a run on the other side of this limit has another policy"
                )
        return ""

    @property
    def places(self) -> tuple[tuple[str, int], ...]:
        """The place of each layer's parameters: the name of a stack of equal layers (`blocks`, or `delta_blocks` for Gated DeltaNet), and an index."""
        found, counts = [], {"blocks": 0, "delta_blocks": 0}
        for recurrent in self.delta_layers or (False,) * self.layers:
            name = "delta_blocks" if recurrent else "blocks"
            found.append((name, counts[name]))
            counts[name] += 1
        return tuple(found)

    def count(self, stack: str) -> int:
        """Returns the number of layers in a stack (see `places`)."""
        return sum(name == stack for name, _ in self.places)

    @property
    def period(self) -> tuple[str, ...]:
        """The stacks of the shortest sequence of layers that repeats."""
        names = tuple(name for name, _ in self.places)
        lengths = (n for n in range(1, len(names) + 1) if len(names) % n == 0)
        return next(names[:n] for n in lengths if names == names[:n] * (len(names) // n))

    @property
    def state_bytes(self) -> int:
        """Size in bytes of the recurrent state of one sequence, in all Gated DeltaNet layers."""
        if (sizes := self.delta) is None:
            return 0
        numbers = sizes.outputs * sizes.key_dim + (sizes.taps - 1) * sizes.channels
        return 4 * numbers * self.count("delta_blocks")

    @property
    def vocab_rows(self) -> int:
        """Number of rows of the embedding and the unembedding. Rows beyond `vocab_size` are padding: no token uses them."""
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple

    @property
    def parameters(self) -> int:
        """Number of parameters, excluding adapters and vocabulary padding."""
        mlps, router = (1, 0) if self.experts is None else (self.experts.count, self.experts.count)
        bias = self.head_dim * (self.heads + 2 * self.kv_heads) if self.qkv_bias else 0
        bias += self.output_bias * self.embed_dim + self.mlp_bias * (2 * self.mlp_dim + self.embed_dim)
        of_qk = {"none": 0, "head": 2, "all": self.heads + self.kv_heads}[self.qk_norm]
        norms = (4 if self.norm_place == "both" else 2) * self.embed_dim
        found = self.layers * (router * self.embed_dim + bias + norms)
        found += self.count("blocks") * of_qk * self.head_dim
        found += (self.vocab_size * (1 if self.tied_embeddings else 2) + 1) * self.embed_dim
        for name, (inputs, outputs, layers) in self._matrices.items():
            found += layers * inputs * outputs * (mlps if name in SETS["mlp"] else 1)
        if (sizes := self.delta) is not None:
            small = sizes.taps * sizes.channels + 2 * sizes.value_heads + sizes.value_dim
            delta = self.embed_dim * (sizes.matrix_rows + sizes.outputs) + small
            found += self.count("delta_blocks") * delta
        return found

    @property
    def _matrices(self) -> dict[str, tuple[int, int, int]]:
        """The inputs and outputs of each matrix of attention and MLP, and the number of layers that have it."""
        embed, layers = self.embed_dim, self.count("blocks")
        attended, kept = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "q_proj": (embed, attended * (1 + self.attention_gate), layers),
            **dict.fromkeys(("k_proj", "v_proj"), (embed, kept, layers)),
            "o_proj": (attended, embed, layers),
            **dict.fromkeys(SETS["mlp"], (embed, self.mlp_dim, self.layers)),
        }

    @property
    def active_parameters(self) -> int:
        """Number of parameters that one token uses: all parameters except the experts that the router does not choose."""
        idle = 0 if self.experts is None else self.experts.count - self.experts.chosen
        return self.parameters - idle * self.layers * 3 * self.mlp_dim * self.embed_dim

    @property
    def trained_parameters(self) -> int:
        """Number of trained parameters. If there are adapters, only they are trained."""
        if self.lora is None:
            return self.parameters
        of_delta = self.embed_dim, 0 if self.delta is None else self.delta.outputs, self.count("delta_blocks")
        matrices = self._matrices | dict.fromkeys(DELTA_MATRICES, of_delta)
        sizes = [matrices[name] for name in self.lora.targets]
        return self.lora.rank * sum(layers * (inputs + outputs) for inputs, outputs, layers in sizes)

    @property
    def size_note(self) -> str:
        """The number of parameters in words. With experts, it includes the number of parameters that each token uses."""
        active = f" ({self.active_parameters:,} used per token)" if self.experts else ""
        return f"{self.parameters:,} parameters{active}"

    @property
    def base(self) -> "DecoderConfig":
        """The configuration of the same decoder without adapters."""
        return replace(self, lora=None)


def _sized(
    base: DecoderConfig, embed_dim: int, layers: int, heads: int, mlp_dim: int, **others: Any
) -> DecoderConfig:
    return replace(base, embed_dim=embed_dim, layers=layers, heads=heads, mlp_dim=mlp_dim, **others)


def _llama3_rope(factor: float) -> Rope:
    return Rope(theta=5e5, scaling=RopeScaling(kind="llama3", factor=factor, original_max_positions=8192))


_LLAMA3 = DecoderConfig(
    vocab_size=128_256, embed_dim=2048, layers=16, heads=32, kv_heads=8, head_dim=64, mlp_dim=8192, norm_eps=1e-5,
    max_positions=131_072, ropes=(_llama3_rope(32.0),),
)  # fmt: skip
_QWEN2_5 = DecoderConfig(
    family="qwen2", vocab_size=151_936, embed_dim=896, layers=24, heads=14, kv_heads=2, head_dim=64, mlp_dim=4864, ropes=(Rope(theta=1e6),),
    max_positions=32_768, qkv_bias=True,
)  # fmt: skip
_QWEN2_5_LARGE = replace(
    _QWEN2_5, vocab_size=152_064, heads=28, kv_heads=4, head_dim=128, tied_embeddings=False
)
_QWEN3 = DecoderConfig(
    family="qwen3", vocab_size=151_936, embed_dim=1024, layers=28, heads=16, kv_heads=8, head_dim=128, mlp_dim=3072, ropes=(Rope(theta=1e6),),
    max_positions=40_960, qk_norm="head",
)  # fmt: skip


def _every_fourth(layers: int) -> tuple[bool, ...]:
    """Returns `delta_layers` of a model in which every fourth layer has attention."""
    return tuple(layer % 4 != 3 for layer in range(layers))


_QWEN3_5 = DecoderConfig(
    family="qwen3_5_text", vocab_size=248_320, embed_dim=1024, layers=24, heads=8, kv_heads=2, head_dim=256, mlp_dim=3584, ropes=(Rope(theta=1e7, share=0.25),),
    max_positions=262_144, qk_norm="head", norm_offset=1.0, attention_gate=True, delta=DeltaSizes(16, 16, 128, 128), delta_layers=_every_fourth(24),
)  # fmt: skip

# The sizes are from config.json in the publishers' repositories: HuggingFaceTB/SmolLM2-135M, meta-llama/Llama-3.2-1B,
# Qwen/Qwen2.5-*, Qwen/Qwen3-*, google/gemma-3-1b-it. Tests check the number of parameters of each preset.
PRESETS: dict[str, DecoderConfig] = {
    # About half a million parameters and a character vocabulary. It can be trained to do arithmetic on a laptop CPU.
    "tiny": DecoderConfig(
        vocab_size=32, embed_dim=128, layers=4, heads=4, kv_heads=2, head_dim=32, mlp_dim=256, max_positions=512
    ),
    "smollm2-135m": DecoderConfig(
        vocab_size=49152, embed_dim=576, layers=30, heads=9, kv_heads=3, head_dim=64, mlp_dim=1536,
        ropes=(Rope(theta=1e5),), norm_eps=1e-5, max_positions=8192,
    ),
    "llama-3.2-1b": _LLAMA3,
    "llama-3.1-8b": _sized(
        _LLAMA3, 4096, 32, 32, 14_336, head_dim=128, tied_embeddings=False,
        ropes=(_llama3_rope(8.0),),
    ),
    "qwen2.5-0.5b": _QWEN2_5,
    "qwen2.5-1.5b": _sized(_QWEN2_5, 1536, 28, 12, 8960, head_dim=128),
    "qwen2.5-3b": _sized(_QWEN2_5, 2048, 36, 16, 11_008, head_dim=128),
    "qwen2.5-7b": _sized(_QWEN2_5_LARGE, 3584, 28, 28, 18_944),
    "qwen2.5-32b": _sized(_QWEN2_5_LARGE, 5120, 64, 40, 27_648, kv_heads=8),
    "qwen3-0.6b": _QWEN3,
    "qwen3-1.7b": _sized(_QWEN3, 2048, 28, 16, 6144),
    "qwen3-4b": _sized(_QWEN3, 2560, 36, 32, 9728),
    "qwen3-8b": _sized(_QWEN3, 4096, 36, 32, 12_288, tied_embeddings=False),
    # As small as `tiny`, for trying out mixtures of experts.
    "tiny-moe": DecoderConfig(
        family="qwen3_moe", vocab_size=32, embed_dim=128, layers=4, heads=4, kv_heads=2, head_dim=32, mlp_dim=64, max_positions=512,
        qk_norm="head", experts=Experts(8, 2, normalize=True),
    ),
    "qwen3-30b-a3b": _sized(
        _QWEN3, 2048, 48, 32, 768, family="qwen3_moe", kv_heads=4, tied_embeddings=False, experts=Experts(128, 8, normalize=True),
    ),
    # As small as `tiny`, for trying out Gated DeltaNet layers.
    "tiny-qwen3.5": replace(
        _QWEN3_5, vocab_size=32, embed_dim=128, layers=4, heads=4, kv_heads=2, head_dim=32, mlp_dim=256, max_positions=512,
        ropes=(Rope(share=0.25),), delta=DeltaSizes(2, 4, 32, 32), delta_layers=_every_fourth(4),
    ),
    "qwen3.5-0.8b": _QWEN3_5,
    "gemma-3-1b": DecoderConfig(
        family="gemma3_text", vocab_size=262_144, embed_dim=1152, layers=26, heads=4, kv_heads=1, head_dim=256, mlp_dim=6912, max_positions=32_768,
        norm_place="both", norm_offset=1.0, qk_norm="head", activation="gelu_tanh", embed_scale=1152**0.5, query_scale=256**-0.5,
        windows=tuple(0 if layer % 6 == 5 else 512 for layer in range(26)), ropes=(Rope(theta=1e6), Rope()),
        rope_of_layer=tuple(int(layer % 6 != 5) for layer in range(26)),
    ),
}  # fmt: skip


def preset(name: str) -> DecoderConfig:
    """Returns the preset with the name `name`.

    Raises:
        ValueError: there is no such preset. The message suggests the most similar name.
    """
    if name not in PRESETS:
        near = nearest(name, PRESETS, least=0.0)[0]
        raise ValueError(f"no model preset {name!r}; the nearest is {near!r} (all: {', '.join(PRESETS)})")
    return PRESETS[name]
