"""GGUF files, in: the Llama, Qwen2 and Qwen3 architectures, dequantised tensor by tensor.

Needs the package `gguf` (the extra of that name), which knows the format and its quantisations.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dapo_jax.extras import how_to_install
from dapo_jax.models.config_json import FAMILIES, WHAT_LOADS
from dapo_jax.models.gguf_header import check_header
from dapo_jax.models.presets import DecoderConfig
from dapo_jax.models.rope import RopeScaling, rope_frequencies
from dapo_jax.models.tensors import Cut, Shape

_ROPE_FACTORS = "rope_freqs.weight"
_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "attn_q.bias": "self_attn.q_proj.bias",
    "attn_k.bias": "self_attn.k_proj.bias",
    "attn_v.bias": "self_attn.v_proj.bias",
    "attn_q_norm.weight": "self_attn.q_norm.weight",
    "attn_k_norm.weight": "self_attn.k_norm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}


class GgufFile:
    """A GGUF file's tensors, under Hugging Face's names and in their row order; implements `tensors.TensorFile`."""

    def __init__(self, path: Path) -> None:
        """Reads metadata and shapes; the tensors stay in the file.

        Raises:
            ValueError: the package `gguf` is missing, or the file cannot be read.
        """
        try:
            from gguf import GGUFReader
        except ImportError as error:
            raise ValueError(
                f"{path} is a GGUF file; reading it takes the package gguf: {how_to_install('gguf')}"
            ) from error
        self._path = path
        try:
            check_header(path)
            reader = GGUFReader(path)
            self.metadata: Mapping[str, Any] = {
                name: field.contents() for name, field in reader.fields.items()
            }
        except (OSError, ValueError, IndexError, KeyError, OverflowError) as error:
            raise ValueError(
                f"cannot read {path}: it is no GGUF file, or not all of one ({error})"
            ) from error
        self._tensors = {_hugging_face_name(tensor.name): tensor for tensor in reader.tensors}
        self._shapes: dict[str, Shape] = {
            name: tuple(int(size) for size in reversed(tensor.shape.tolist()))
            for name, tensor in self._tensors.items()
            if name != _ROPE_FACTORS
        }
        self._heads = {
            "self_attn.q_proj.weight": self.size("attention.head_count"),
            "self_attn.k_proj.weight": self.size(
                "attention.head_count_kv", self.size("attention.head_count")
            ),
        }

    @property
    def where(self) -> str:
        """The path."""
        return str(self._path)

    @property
    def shapes(self) -> Mapping[str, Shape]:
        """The shape of every tensor."""
        return self._shapes

    @property
    def architecture(self) -> str:
        """llama, qwen2 or qwen3.

        Raises:
            ValueError: it is another one.
        """
        found = self.metadata.get("general.architecture")
        if found not in FAMILIES:
            raise ValueError(
                f"{self._path}: architecture {found!r} is not covered; llama, qwen2 and qwen3 are; {WHAT_LOADS}"
            )
        return found

    def read(self, name: str, cut: Cut) -> np.ndarray:
        """A part of a tensor in float32."""
        from gguf import dequantize

        tensor = self._tensors[name]
        try:
            value = dequantize(tensor.data, tensor.tensor_type).reshape(self._shapes[name])
        except (ValueError, NotImplementedError) as error:
            raise ValueError(f"cannot read {tensor.name} from {self._path}: {error}") from error
        heads = self._heads.get(name.partition("model.layers.")[2].partition(".")[2])
        if heads is not None and self.architecture == "llama":
            # Llama's file has the rows of a head as pairs (i, i + dim / 2) side by side; the others are not reordered.
            rows, columns = value.shape
            value = value.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(value.shape)
        return value[cut].astype(np.float32, copy=False)

    def number(self, key: str, default: Any = None) -> Any:
        """The architecture's metadata under `key`.

        Raises:
            ValueError: it is not there and has no default, or is no single number.
        """
        name = f"{self.architecture}.{key}"
        value = self.metadata.get(name, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ValueError(f"{self._path}: the metadata {name} is {value!r}; it must be one number")
        return value

    def size(self, key: str, default: int | None = None) -> int:
        """A number, whole and from 1 to 2**31 - 1.

        Raises:
            ValueError: it is none.
        """
        value = self.number(key, default)
        if not isinstance(value, int) or not 0 < value < 1 << 31:
            raise ValueError(
                f"{self._path}: the metadata {self.architecture}.{key} is {value}; it must be a positive integer below 2**31"
            )
        return value

    def _positive(self, key: str, default: float | None = None) -> float:
        value = self.number(key, default)
        if not (math.isfinite(value) and value > 0):
            raise ValueError(
                f"{self._path}: the metadata {self.architecture}.{key} is {value}; it must be a positive number"
            )
        return _shortest(value)

    def config(self) -> DecoderConfig:
        """The decoder that the metadata describes.

        Raises:
            ValueError: something is missing, or asks for what this decoder does not do.
        """
        family, heads, width = (
            self.architecture,
            self.size("attention.head_count"),
            self.size("embedding_length"),
        )
        head_dim = self.size("attention.key_length", width // heads)
        for key in ("attention.value_length", "rope.dimension_count"):
            if self.number(key, head_dim) != head_dim:
                raise ValueError(
                    f"{self._path}: {family}.{key} is {self.number(key)}, but heads are {head_dim} wide; this is not covered"
                )
        for key in ("expert_count", "attention.sliding_window"):
            if self.number(key, 0):
                raise ValueError(
                    f"{self._path}: {family}.{key}={self.number(key)} is not covered; {WHAT_LOADS}"
                )
        if "model.embed_tokens.weight" not in self._shapes:
            raise ValueError(f"{self._path} lacks the tensor 'token_embd.weight'")
        theta = self._positive("rope.freq_base", 10_000.0)
        return DecoderConfig(
            vocab_size=self._shapes["model.embed_tokens.weight"][0],
            embed_dim=width,
            layers=self.size("block_count"),
            heads=heads,
            kv_heads=self._heads["self_attn.k_proj.weight"],
            head_dim=head_dim,
            mlp_dim=self.size("feed_forward_length"),
            rope_theta=theta,
            rope_scaling=self._rope_scaling(head_dim, theta),
            norm_eps=self._positive("attention.layer_norm_rms_epsilon"),
            max_positions=self.size("context_length"),
            tied_embeddings="lm_head.weight" not in self._shapes,
            qkv_bias=family == "qwen2",
            qk_norm=family == "qwen3",
        )

    def _rope_scaling(self, head_dim: int, theta: float) -> RopeScaling | None:
        if _ROPE_FACTORS in self._tensors:
            return self._llama3(head_dim, theta)
        kind = self.metadata.get(f"{self.architecture}.rope.scaling.type", "none")
        if kind == "none":
            return None
        factor = self._positive("rope.scaling.factor")
        if kind == "linear":
            return RopeScaling(kind=kind, factor=factor)
        known = {"type", "factor", "original_context_length", "finetuned"}
        prefix = f"{self.architecture}.rope.scaling."
        extra = {name for name in self.metadata if name.startswith(prefix)} - {prefix + key for key in known}
        if kind != "yarn" or extra:
            raise ValueError(f"{self._path}: RoPE scaling {kind!r} with {sorted(extra)} is not covered")
        original = self.size("rope.scaling.original_context_length")
        return RopeScaling(kind="yarn", factor=factor, original_max_positions=original)

    def _llama3(self, head_dim: int, theta: float) -> RopeScaling:
        """Llama 3's scaling, which the file has only as the divisor of each frequency.

        The last rotation is slowed in full, so its divisor is the factor. The other three numbers are the same in all
        releases of Llama 3; the divisors they give must be the file's.
        """
        found = np.asarray(self._tensors[_ROPE_FACTORS].data, np.float32)
        scaling = RopeScaling(kind="llama3", factor=max(1.0, _shortest(float(found[-1]))))
        divisors = rope_frequencies(head_dim, theta, None) / rope_frequencies(head_dim, theta, scaling)
        if found.shape != divisors.shape or not np.allclose(found, divisors, rtol=1e-4):
            raise ValueError(
                f"{self._path}: {_ROPE_FACTORS} are not the divisors of Llama 3's scaling by {scaling.factor:g} from "
                f"{scaling.original_max_positions} positions (low_freq_factor 1, high_freq_factor 4); convert the model "
                "from its Hugging Face folder, whose config.json has the numbers"
            )
        return scaling


def _hugging_face_name(name: str) -> str:
    """Hugging Face's name of a tensor; one that is not known keeps its own, and is then not called for."""
    head, _, rest = name.partition(".")
    layer, _, rest = rest.partition(".")
    if head == "blk" and rest in _LAYER_NAMES:
        return f"model.layers.{layer}.{_LAYER_NAMES[rest]}"
    return _NAMES.get(name, name)


def _shortest(value: float) -> float:
    """The number that was meant: GGUF has it in float32, where 1e-5 is 9.99999975e-06."""
    return float(str(np.float32(value)))
