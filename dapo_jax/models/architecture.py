"""The options of a decoder's architecture that are plain values. `presets.DecoderConfig` adds the kinds of its layers."""

from dataclasses import dataclass, field
from typing import Literal

from dapo_jax.models.rope import Rope

LORA_PARTS = ("lora_a", "lora_b")
"""Suffixes of an adapter's parameter names. The matrix name and an underscore precede the suffix, as in `query_lora_a`."""


@dataclass(frozen=True, kw_only=True)
class LoraShape:
    """Rank, alpha and adapted matrices of a decoder's adapters. `lora.lora_shape` creates and validates it."""

    rank: int
    alpha: float
    targets: tuple[str, ...]
    """The adapted matrices, by their names in PEFT, in the order of `lora.TARGETS`."""

    @property
    def scale(self) -> float:
        """The factor alpha / rank, by which the product B A is multiplied."""
        return self.alpha / self.rank


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """Sizes and options of a decoder that are plain values. The defaults of the options describe Llama's architecture: pre-norm, RoPE and SwiGLU."""

    family: str = "llama"
    """The model family, as model_type in config.json. It determines the keys of config.json and the names of tensors, but not the computation."""

    vocab_size: int
    embed_dim: int
    layers: int
    heads: int
    kv_heads: int
    """Number of key and value heads. Each is shared by `heads / kv_heads` query heads."""
    head_shards: int = 1
    """Number of devices over which a sampler splits heads. Key heads are repeated so that they can be split, too (`parameters.repeated_heads`)."""
    head_dim: int
    mlp_dim: int
    """Number of hidden features of the MLP, or of each expert."""
    mlp_gate: bool = True
    """Whether the MLP and each expert have a gate. Otherwise, the activation function applies to the product with the matrix up (Nemotron-H)."""
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
    sinks: bool = False
    """Whether each head has a trained number that takes part in the softmax like the score of a further key, whose value is 0 (gpt-oss)."""
    score_cap: float | None = None
    """If c, attention scores s become c tanh(s / c) before the softmax (Gemma 2)."""
    logit_cap: float | None = None
    """If c, logits x become c tanh(x / c) (Gemma 2)."""
    logit_divisor: float = 1.0
    """Divisor of the logits, which is applied before `logit_cap` (Granite)."""
    activation: Literal["silu", "gelu_tanh", "relu2"] = "silu"
    """Activation function of the MLP's gate. `gelu_tanh` is the approximation of GELU with tanh, and `relu2` the square of ReLU."""
    gate_limit: float | None = None
    """If set, the MLP's gate is at most `gate_limit`, up is between its negative and itself, and the hidden features are (up + 1) gate sigmoid(gate_alpha gate) (gpt-oss)."""
    gate_alpha: float = 1.0
    embed_scale: float = 1.0
    """Factor of the embeddings, rounded to the compute dtype."""
    residual_scale: float = 1.0
    """Factor of the outputs of attention and MLP before they are added to the residual stream (Granite)."""
    layer_embed_dim: int = 0
    """Size of the embedding of a token that each layer has for itself. If 0, layers have no embeddings (Gemma 4)."""
    vocab_multiple: int = 1
    """The rows of the embedding and the unembedding are padded to a multiple of this number, so that they can be split over devices."""
    lora: LoraShape | None = None
    """The adapters of each block. If None, there are no adapters, and all parameters are trained."""
    wrapped: bool = field(default=False, compare=False)
    """Whether a model for images and text contains this decoder (`families.WRAPPED`). This changes only the names of adapter tensors."""
    fused_experts: bool = field(default=False, compare=False)
    """Whether a file has one tensor for the matrices of all experts in a layer. This changes only the names and shapes of tensors."""
