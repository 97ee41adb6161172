"""Reads and writes PEFT adapter folders, which contain adapter_config.json and adapter_model.safetensors.

The decoder supports a subset of PEFT's LoRA settings. Any other setting raises an error that names its key.
"""

import re
import warnings
from typing import Any, NamedTuple

from flax import nnx

from dapo_jax.models.folder import NOT_LOADED
from dapo_jax.models.lora import LoraShape, lora_shape
from dapo_jax.models.presets import DecoderConfig
from dapo_jax.models.safetensors_files import SafetensorsFolder, read_json, write_file, write_json
from dapo_jax.models.tensors import adapter_tensors
from dapo_jax.storage import AnyPath

ADAPTER_CONFIG, ADAPTER_TENSORS = "adapter_config.json", "adapter_model.safetensors"

_COVERED_VALUES: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "task_type": ("CAUSAL_LM",),
    "bias": ("none",),
    "fan_in_fan_out": (False,),
    "use_rslora": (False,),
    "use_dora": (False,),
    "use_qalora": (False,),
    "lora_bias": (False,),
    # Other values (PiSSA, OLoRA, CorDA, LoftQ) are not supported, because they also modify the base model.
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal"),
}
"""Supported values of the adapter_config.json keys that change the network. null, an empty list and an empty object are always supported."""

_SKIPPED = (
    "r", "lora_alpha", "target_modules", "base_model_name_or_path", "revision", "inference_mode", "lora_dropout", "auto_mapping", "peft_version",
    "megatron_core", "qalora_group_size", "loftq_config", "eva_config", "corda_config", "ensure_weight_tying",
)  # fmt: skip
"""Keys that may have any value here: `read_adapter` handles them, or they affect only training with PEFT or describe the adapter's origin."""

_ADAPTED = re.compile(r"base_model\.model\.\w+\.layers\.\d+\.(?:\w+\.)+(\w+)\.lora_[AB]\.weight")


class Adapter(NamedTuple):
    """Settings from an adapter folder: rank, alpha and adapted matrices (`shape`), and the base model."""

    shape: LoraShape
    base: str
    """PEFT's base_model_name_or_path: a repository name on the Hugging Face hub, or a folder."""
    revision: str


def is_adapter(folder: AnyPath) -> bool:
    """Returns whether a folder contains an adapter."""
    return (folder / ADAPTER_CONFIG).is_file()


def read_adapter(folder: AnyPath) -> tuple[Adapter, SafetensorsFolder]:
    """Returns an adapter's settings and its tensors. Only the names and shapes of the tensors are loaded.
    Raises ValueError if a file is missing or damaged, or a setting is not supported. The message names the key."""
    path = folder / ADAPTER_CONFIG
    found = read_json(path)
    for key, value in found.items():
        if key in _SKIPPED or value is None or value in ([], {}, ""):
            continue
        covered = _COVERED_VALUES.get(key, (False,))
        if not any(value is each or (isinstance(each, str) and value == each) for each in covered):
            needs = ", ".join(map(repr, covered))
            raise ValueError(f"{path}: {key}={value!r} is not supported (only {needs})")
    file = SafetensorsFolder(folder, single=ADAPTER_TENSORS)
    if file.skipped:
        warnings.warn(f"{file.where}: {file.skipped} {NOT_LOADED}", stacklevel=2)
    # Tensors whose names do not match are reported later, when the weights are loaded.
    targets = sorted({match[1] for name in file.shapes if (match := _ADAPTED.fullmatch(name))})
    rank, alpha = found.get("r"), found.get("lora_alpha")
    if not isinstance(rank, int) or not isinstance(alpha, int | float):
        raise ValueError(f"{path}: r={rank!r} must be an integer, and lora_alpha={alpha!r} a number")
    try:
        shape = lora_shape(rank=rank, alpha=float(alpha), targets=targets)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    base, revision = (str(found.get(key) or "") for key in ("base_model_name_or_path", "revision"))
    return Adapter(shape, base, revision), file


def save_adapter(
    folder: AnyPath,
    config: DecoderConfig,
    adapters: nnx.State,
    *,
    base: str,
    revision: str = "",
    dtype: str = "float32",
) -> int:
    """Writes an adapter folder that PEFT and `read_adapter` can load, and returns the size of its tensors in bytes.

    adapter_config.json is written last, so that an interrupted export is not mistaken for an adapter.

    Args:
        folder: target folder. It is created if necessary, and an adapter in it is replaced.
        config: configuration of the decoder. Its field `lora` describes the adapters.
        adapters: parameters of the adapters, on any devices. They are gathered on the host one tensor at a time.
        base: value of PEFT's base_model_name_or_path.
        revision: revision of the base model, if it is on the Hugging Face hub.
        dtype: dtype of the tensors in the file: float32, float16 or bfloat16.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ADAPTER_CONFIG).unlink(missing_ok=True)
    tensors = sorted(adapter_tensors(config, adapters), key=lambda tensor: tensor.name)
    written = write_file(folder / ADAPTER_TENSORS, tensors, dtype=dtype)
    shape = config.lora
    assert shape is not None
    # For PEFT, a list also names layers of an image encoder, and a text is a pattern for the whole name of a module.
    pattern = rf".*language_model\..*\.({'|'.join(shape.targets)})"
    described = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "revision": revision or None,
        "r": shape.rank,
        "lora_alpha": int(shape.alpha) if shape.alpha.is_integer() else shape.alpha,
        "target_modules": pattern if config.wrapped else list(shape.targets),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "use_dora": False,
        "init_lora_weights": True,
        "inference_mode": True,
    }
    write_json(folder / ADAPTER_CONFIG, described)
    return written
