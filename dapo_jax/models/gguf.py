"""Loads GGUF files of the Llama, Qwen2, Qwen3 and Gemma 3 architectures, and dequantizes them tensor by tensor.

The package `gguf` (installed by the `gguf` extra) parses the format and dequantizes the tensors.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from dapo_jax.hints import needing
from dapo_jax.models.families import FAMILIES, WHAT_LOADS, understand
from dapo_jax.models.presets import DecoderConfig
from dapo_jax.models.rope import Rope, RopeScaling, rope_frequencies
from dapo_jax.models.tensors import Cut, Shape, tensor_names

_FAMILIES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3": "gemma3_text"}
"""The family of each supported architecture."""
_ROPE_FACTORS = "rope_freqs.weight"


class GgufFile:
    """The tensors of a GGUF file, with the names and the row order of Hugging Face files. Implements `tensors.TensorFile`."""

    def __init__(self, path: Path) -> None:
        """Reads the metadata and the shapes. The tensors are read later, on access.
        Raises ValueError if the package `gguf` is missing, the file cannot be read, or its architecture is not supported."""
        with needing("gguf", f"{path} is a GGUF file and needs gguf"):
            from gguf import MODEL_ARCH, GGUFReader, get_tensor_name_map
        self.where = str(path)
        try:
            reader = GGUFReader(path)
            self.metadata: dict[str, Any] = {name: field.contents() for name, field in reader.fields.items()}
        except (OSError, ValueError, IndexError, KeyError, OverflowError) as error:
            raise ValueError(f"cannot read {path}: not a GGUF file, or incomplete ({error})") from error
        if (files := self.metadata.get("split.count", 1)) > 1:
            raise ValueError(
                f"{path}: split.count={files}: the model has {files} files; merge them with llama-gguf-split --merge FIRST_FILE MERGED_FILE"
            )
        self._architecture = self.metadata.get("general.architecture")
        if self._architecture not in _FAMILIES:
            raise ValueError(
                f"{path}: architecture {self._architecture!r} is not supported (only {', '.join(_FAMILIES)}). {WHAT_LOADS}"
            )
        self._family = _FAMILIES[self._architecture]
        layers = min(self._size("block_count"), len(reader.tensors))  # the file may be damaged
        known = get_tensor_name_map(MODEL_ARCH[self._architecture.upper()], layers)
        names = {
            known.get_name(name, (".weight", ".bias")): name for name in tensor_names(layers, self._family)
        }
        self._tensors = {names.get(tensor.name, tensor.name): tensor for tensor in reader.tensors}
        self.shapes: Mapping[str, Shape] = {
            name: tuple(int(size) for size in reversed(tensor.shape.tolist()))
            for name, tensor in self._tensors.items()
            if name != _ROPE_FACTORS
        }

    def read(self, name: str, cut: Cut) -> np.ndarray:
        """Returns the part `cut` of a tensor in float32."""
        from gguf import dequantize

        tensor = self._tensors[name]
        try:
            value = dequantize(tensor.data, tensor.tensor_type).reshape(self.shapes[name])
        except (ValueError, NotImplementedError) as error:
            raise ValueError(f"cannot read {tensor.name} from {self.where}: {error}") from error
        if self._architecture == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            # Restores the row order: Llama's GGUF files interleave the rows i and i + dim / 2 of each head.
            heads = self._size("attention.head_count")
            if name.endswith("k_proj.weight"):
                heads = self._size("attention.head_count_kv", heads)
            rows, columns = value.shape
            value = value.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(value.shape)
        value = value[cut].astype(np.float32, copy=False)
        # Gemma's GGUF files contain the factors of norms, from which the offset has to be subtracted.
        offset = FAMILIES[self._family].switches.get("norm_offset", 0.0)
        return value - np.float32(offset) if offset and name.endswith("norm.weight") else value

    def _number(self, key: str, default: Any = None) -> Any:
        """Returns the number that the metadata contains under the key `{architecture}.{key}`, or `default`."""
        value = self.metadata.get(f"{self._architecture}.{key}", default)
        if not isinstance(value, int | float):
            raise ValueError(
                f"{self.where}: {self._architecture}.{key} is {value!r}; it must be a single number"
            )
        return value

    def _size(self, key: str, default: int | None = None) -> int:
        return int(self._number(key, default))

    def config(self) -> DecoderConfig:
        """Returns the configuration of the decoder that the metadata describes.
        Raises ValueError if a metadata key is missing, or the decoder does not support its value."""
        heads, width = self._size("attention.head_count"), self._size("embedding_length")
        head_dim = self._size("attention.key_length", width // heads)
        windowed = self._architecture == "gemma3"
        needed = {
            "attention.value_length": head_dim,
            "rope.dimension_count": head_dim,
            "expert_count": 0,
            "rope.scale_linear": 1,
        }
        for key, need in (needed if windowed else needed | {"attention.sliding_window": 0}).items():
            if (found := self._number(key, need)) != need:
                raise ValueError(
                    f"{self.where}: {self._architecture}.{key}={found} is not supported; it must be {need}. {WHAT_LOADS}"
                )
        if "model.embed_tokens.weight" not in self.shapes:
            raise ValueError(f"{self.where} lacks the tensor 'token_embd.weight'")
        theta, layers = _shortest(self._number("rope.freq_base", 10_000.0)), self._size("block_count")
        described: dict[str, Any] = {
            "model_type": self._family,
            "vocab_size": self.shapes["model.embed_tokens.weight"][0],
            "hidden_size": width,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": self._size("attention.head_count_kv", heads),
            "head_dim": head_dim,
            "intermediate_size": self._size("feed_forward_length"),
            "rms_norm_eps": _shortest(self._number("attention.layer_norm_rms_epsilon")),
            "max_position_embeddings": self._size("context_length"),
            "tie_word_embeddings": "lm_head.weight" not in self.shapes,
            "rope_theta": theta,
        }
        if windowed:
            cap = f"{self._architecture}.final_logit_softcapping"
            described |= {
                "sliding_window": self._size("attention.sliding_window"),
                "sliding_window_pattern": self._size("attention.sliding_window_pattern", 6),
                "rope_local_base_freq": _shortest(self._number("rope.freq_base_swa", 10_000.0)),
                "final_logit_softcapping": self.metadata.get(cap),
                # The file does not contain this number. Only Gemma 3 27B, which has 62 layers, divides by the square root of another one.
                "query_pre_attn_scalar": width // heads if layers == 62 else head_dim,
            }
        config = understand(described, self.where)
        first = Rope(theta=theta, scaling=self._rope_scaling(head_dim, theta))
        return replace(config, ropes=(first, *config.ropes[1:]))

    def _rope_scaling(self, head_dim: int, theta: float) -> RopeScaling | None:
        if _ROPE_FACTORS in self._tensors:
            return self._llama3(head_dim, theta)
        prefix = f"{self._architecture}.rope.scaling."
        kind = self.metadata.get(f"{prefix}type", "none")
        if kind == "none":
            return None
        factor = _shortest(self._number("rope.scaling.factor"))
        if kind == "linear":
            return RopeScaling(kind=kind, factor=factor)
        known = {f"{prefix}{key}" for key in ("type", "factor", "original_context_length", "finetuned")}
        extra = {name for name in self.metadata if name.startswith(prefix)} - known
        if kind != "yarn" or extra:
            raise ValueError(f"{self.where}: RoPE scaling {kind!r} with {sorted(extra)} is not supported")
        original = self._size("rope.scaling.original_context_length")
        return RopeScaling(kind="yarn", factor=factor, original_max_positions=original)

    def _llama3(self, head_dim: int, theta: float) -> RopeScaling:
        """Reconstructs Llama 3's RoPE scaling, because the file stores only the divisor of each frequency.

        The last divisor equals `factor`, because the lowest frequency is always divided by the full factor. The other three
        settings are the same in all Llama 3 releases. The divisors computed from these settings must equal the divisors in the file.
        """
        found = np.asarray(self._tensors[_ROPE_FACTORS].data, np.float32)
        scaling = RopeScaling(kind="llama3", factor=max(1.0, _shortest(float(found[-1]))))
        divisors = rope_frequencies(head_dim, theta, None) / rope_frequencies(head_dim, theta, scaling)
        if found.shape != divisors.shape or not np.allclose(found, divisors, rtol=1e-4):
            raise ValueError(
                f"{self.where}: {_ROPE_FACTORS} does not match Llama 3's RoPE scaling with factor {scaling.factor:g}, "
                f"original context {scaling.original_max_positions}, low_freq_factor 1 and high_freq_factor 4. Convert the "
                "model from its Hugging Face folder instead, because its config.json contains the scaling settings"
            )
        return scaling


def _shortest(value: float) -> float:
    """Returns the shortest decimal number that rounds to the same float32. For example, 1e-5 is stored as 9.99999975e-06."""
    return float(str(np.float32(value)))
