"""Converts models to Hugging Face folders."""

from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from dapo_jax.config import ConfigError, ModelConfig
from dapo_jax.config.keys import Rules, check_value
from dapo_jax.models.adapter_folder import is_adapter
from dapo_jax.models.families import describe
from dapo_jax.models.folder import CONFIG, read_config, weights_of, write_model
from dapo_jax.models.gguf import GgufFile
from dapo_jax.models.gguf_tokenizer import special_ids, tokenizer_files
from dapo_jax.models.presets import DecoderConfig
from dapo_jax.models.safetensors_files import read_json
from dapo_jax.models.tensors import TensorFile, checked, exported, shapes_of
from dapo_jax.run.policy import find_policy
from dapo_jax.run.run_dir import checked_folder
from dapo_jax.run.sources import folder_of, run_at
from dapo_jax.storage import AnyPath, entries, files_of, in_bucket, write_whole
from dapo_jax.text.huggingface import TOKENIZER_FILES

_COPIED = (*TOKENIZER_FILES, "added_tokens.json", "vocab.json", "merges.txt", "chat_template.json")

_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


@dataclass(frozen=True, kw_only=True)
class Converted:
    """Describes the model folder that `convert` wrote."""

    folder: AnyPath
    family: str
    """The model_type in config.json. For an adapter, the model_type of its base model."""
    adapter: bool
    """Whether the folder contains only adapters instead of a complete model."""
    parameters: int
    dtype: str
    tensor_bytes: int
    files: tuple[str, ...]
    """Names of all written files, sorted."""
    skipped: int = 0
    """Number of tensors of the image encoder, in a model for images and text. They are not written."""


def convert(source: str, target: str, *, dtype: str = "float32", merge: bool = False) -> Converted:
    """Converts the model `source` and its tokenizer to a Hugging Face folder, which transformers and this library can load.

    A run that trained adapters becomes an adapter folder, which PEFT can load too. GGUF files and folders are converted tensor by tensor.

    Args:
        source: a local .gguf file, a model folder, a run folder (its latest checkpoint), an adapter folder, preset:NAME or shipped:NAME.
        target: a folder that does not exist or is empty.
        dtype: dtype of the written tensors, float32 or bfloat16.
        merge: whether to merge the adapters of a run or an adapter folder into the base model, and write a complete model.

    Raises:
        ConfigError: there is no such model, it is damaged or not supported, or `target` is not empty or cannot be written.
    """
    check_value("dtype", dtype, str, Rules(choices=("float32", "bfloat16")))
    folder = checked_folder(target, key="target", write=True)
    if folder.exists() and (not folder.is_dir() or entries(folder)):
        raise ConfigError(f"{target} exists and is not empty; choose another target, or remove it")
    path, is_new = Path(source).expanduser(), not folder.exists()
    is_gguf = path.suffix == ".gguf"
    try:
        if is_gguf and in_bucket(source):
            raise ConfigError(f"{source}: a GGUF file must be on a local disk; copy it there")
        plain, policy, skipped = None, None, 0
        if not is_gguf and not source.startswith("preset:") and run_at(source) is None:
            folder_read = folder_of(ModelConfig(source=source), weights=True)
            plain = None if is_adapter(folder_read) else folder_read
        if not is_gguf and plain is None:
            policy = find_policy(source)
        if merge and (policy is None or policy.decoder.lora is None):
            raise ConfigError(f"{source} has no adapter to merge: omit merge")
        if policy is not None:
            config, written = policy.decoder, policy.save(folder, dtype=dtype, merge=merge)
        else:
            config, written, skipped = _converted(plain or path, folder, dtype, is_gguf=is_gguf)
        adapter = config.lora is not None and not merge
    except BaseException as error:
        with suppress(OSError):  # removes the incomplete model
            for file in entries(folder):
                file.unlink()
            if is_new and folder.exists():
                folder.rmdir()
        if isinstance(error, OSError):
            raise ConfigError(
                f"{source} cannot be written to {target}: {error}; free some space there, or choose another target"
            ) from error
        if isinstance(error, ConfigError) or not isinstance(error, ValueError):
            raise
        raise ConfigError(f"{source}: {error}") from error
    return Converted(
        folder=folder,
        family=config.family,
        adapter=adapter,
        parameters=config.trained_parameters if adapter else config.parameters,
        dtype=dtype,
        tensor_bytes=written,
        files=tuple(sorted(file.name for file in entries(folder))),
        skipped=skipped,
    )


def _converted(
    source: AnyPath, folder: AnyPath, dtype: str, *, is_gguf: bool
) -> tuple[DecoderConfig, int, int]:
    """Converts a GGUF file or a model folder tensor by tensor. Of a folder's config.json, only dtype and quantization change. Also returns the numbers of bytes and of skipped tensors."""
    file: TensorFile
    skipped = 0
    if is_gguf:
        file = gguf = GgufFile(Path(source))
        config = gguf.config()
        checked(config, file)
        texts = tokenizer_files(gguf.metadata, Path(source))
        files = {name: content.encode("utf-8") for name, content in texts.items()}
        described = describe(config, dtype=dtype) | special_ids(gguf.metadata)
    else:
        config = read_config(source)
        file = weights_of(source, config)
        checked(config, file)
        skipped = file.skipped
        files = files_of(source, _COPIED)
        described = read_json(source / CONFIG)
        if "text_config" in described:  # of a model for images and text, only the text model is written
            both = described["text_config"] | described
            described = describe(config) | {key: both[key] for key in _TOKEN_IDS if key in both}
        described.pop("quantization_config", None)  # the written tensors are not quantized
        described |= {"torch_dtype": dtype, "dtype": dtype}
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        write_whole(folder / name, content)
    tensors = [  # each tensor is loaded only when it is written
        tensor._replace(fetch=partial(file.read, tensor.name, tuple(slice(0, size) for size in tensor.shape)))
        for tensor in exported(config, shapes_of(config.base))
    ]
    return config, write_model(folder, described, tensors, dtype=dtype), skipped
