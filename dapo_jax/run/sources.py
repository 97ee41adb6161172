"""Resolves `model.source`: a preset, a shipped model, a model on the hub, a model or adapter folder, or a training run."""

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib import resources
from pathlib import Path
from typing import NamedTuple, TypeVar

from dapo_jax.config import (
    ConfigError,
    DataConfig,
    LoraConfig,
    ModelConfig,
    TrainConfig,
    load_config,
    load_evaluation,
)
from dapo_jax.config.keys import prefixed
from dapo_jax.config.model_source import source_parts
from dapo_jax.models.adapter_folder import ADAPTER_CONFIG, is_adapter, read_adapter
from dapo_jax.models.folder import CONFIG, read_config
from dapo_jax.models.hub import download
from dapo_jax.models.lora import LoraShape, lora_shape
from dapo_jax.models.presets import PRESETS, DecoderConfig, preset
from dapo_jax.models.safetensors_files import A_PICKLE, PICKLED
from dapo_jax.models.tensors import TensorFile
from dapo_jax.run.run_dir import checked_folder
from dapo_jax.storage import AnyPath, check_access, in_bucket, locks, path_of
from dapo_jax.text.huggingface import TOKENIZER_FILES
from dapo_jax.text.tokenizers import Tokenizer, check_vocabulary, load_tokenizer, named_tokenizer

_Read = TypeVar("_Read")

_NAMED = ("preset:", "shipped:", "hf:")
"""Beginnings of sources that are not folders."""

_ON_HUB = re.compile(r"([\w.-]+/)?[\w.-]+")
"""Matches the name of a repository on the hub. Some relative paths match too."""

_NOTHING_SAVED = "this run has saved neither a checkpoint nor a model yet: wait until it has"


class Source(NamedTuple):
    """The model, adapter or run that `model.source` names."""

    base: ModelConfig
    """The model with the configuration and the tokenizer, which is neither an adapter nor a run."""
    adapter: LoraShape | None = None
    """The adapters of an adapter folder or of a run that trained adapters. Their frozen weights are in `base`."""
    file: TensorFile | None = None
    """The tensors of an adapter folder."""
    run: TrainConfig | None = None
    """The configuration of the run, if the source is a training run. Its checkpoint contains the trained weights."""
    seed: int = 0
    """The seed of random base weights, if the source is a training run."""
    key: str = ""
    """The file, key and value that specify the base model of an adapter folder, for error messages."""
    tokenizer: AnyPath | None = None
    """The adapter folder, if it has a tokenizer, which then replaces the base model's: training may have changed the chat template."""

    @property
    def is_whole_run(self) -> bool:
        """Whether all weights are in the checkpoint of a run, so that the weights of `base` are not needed."""
        return self.run is not None and self.adapter is None

    def described(self, *, weights: bool) -> tuple[DecoderConfig, Tokenizer, AnyPath | None]:
        """Returns the results of `description_of` for this source."""
        weights = weights and not self.is_whole_run
        return self.read(partial(description_of, weights=weights, tokenizer=self.tokenizer))

    def read(self, read: Callable[[ModelConfig], _Read]) -> _Read:
        """Returns `read(self.base)`. If it raises a ValueError, the message names the adapter's key."""
        try:
            return read(self.base)
        except ValueError as error:
            if not self.key:
                raise
            raise ValueError(_no_base(self.key, str(error))) from error


def source_of(model: ModelConfig) -> Source:
    """Resolves `model.source`. A run may have started from another run, so its base model is the model from which the first of these runs started.
    An adapter that is on the hub is downloaded. Raises ValueError if the model or the base of an adapter does not exist, the adapter is not supported, or a
    model has no checkpoint to choose."""
    base, runs = model, list[TrainConfig]()
    while True:
        base, run = _opened(base)
        if run is None:
            break
        if run in runs:
            raise ValueError(f"the run {run.run_dir} started from itself: restore its first model.source")
        runs.append(run)
        base = run.model
    if not runs and model.parts.checkpoint != "last":
        raise ValueError(
            f"@{model.parts.checkpoint} needs a training run, whose folder contains `checkpoints`: leave it out, or name a run"
        )
    source = _of_model(base)
    if not runs:
        return source
    return source._replace(run=runs[0], adapter=lora_of(runs[0].lora), file=None, seed=runs[-1].seed)


def _opened(model: ModelConfig) -> tuple[ModelConfig, TrainConfig | None]:
    """Returns the model, and its configuration if it is a training run. The folder of a warm start is replaced with its model folder."""
    if model.source.startswith(_NAMED):
        return model, None
    _check_prefix(model.parts.place)
    folder = path_of(model.parts.place)
    if not (folder / "config.yaml").is_file() or (folder / CONFIG).is_file() or is_adapter(folder):
        return model, None
    if (folder / "checkpoints").is_dir():
        return model, load_config(folder / "config.yaml")
    if not (folder / "model").is_dir():
        raise ValueError(_NOTHING_SAVED)
    return replace(model, source=str(folder / "model")), None


def _of_model(model: ModelConfig) -> Source:
    """Returns the source if it is not a run: an adapter and its base, or a whole model."""
    if model.source.startswith(("preset:", "shipped:")):
        return Source(model)
    if not is_adapter(folder_of(model, weights=False)):
        return Source(model)
    folder = folder_of(model, weights=True)
    adapter, file = read_adapter(folder)
    name = adapter.base
    key = f"{folder / ADAPTER_CONFIG}: base_model_name_or_path={name!r}"
    if name.startswith("preset:") or not name:
        raise ValueError(f"{key} does not name a model with weights; write the base model's name there")
    is_source = name.startswith(("shipped:", "hf:")) or in_bucket(name) or path_of(name).is_dir()
    if not is_source and not _ON_HUB.fullmatch(name):
        raise ValueError(_no_base(key, "there is no such folder"))
    source = name if is_source else f"hf:{name}"
    on_hub = source.startswith("hf:") and adapter.revision
    base = replace(model, source=f"{source}@{adapter.revision}" if on_hub else source)
    own = folder if (folder / TOKENIZER_FILES[0]).is_file() else None
    return Source(base, adapter.shape, file, key=key, tokenizer=own)


def _no_base(key: str, why: str) -> str:
    return f"{key}: {why}; write the folder of the base model there, or its name ORG/NAME on the hub"


def run_at(source: str) -> AnyPath | None:
    """Returns the folder if `source` is a training run or a warm start, or None if it is a model. Raises ConfigError if the folder cannot be read, or is
    neither a run nor a model."""
    source = source_parts(source).place
    _check_prefix(source)
    folder = checked_folder(source, key="model", write=False)
    saved = any((folder / name).is_dir() for name in ("checkpoints", "model"))
    if saved and (folder / "config.yaml").is_file():
        return folder
    if source.startswith(_NAMED) or folder.is_file():
        return None
    if not (folder / CONFIG).is_file() and not is_adapter(folder):
        if any((folder / name).is_file() for name in ("config.yaml", locks.NAME)):
            raise ConfigError(f"{source}: {_NOTHING_SAVED}")
        missing = f"config.yaml with checkpoints, and no {CONFIG}" if folder.exists() else "such folder"
        raise ConfigError(
            f"{source} is neither a run nor a model: there is no {missing}; use the run_dir of a training run with a checkpoint, a model "
            "folder, preset:NAME, shipped:NAME or hf:ORG/NAME"
        )
    return None


def _check_prefix(source: str) -> None:
    """Raises a ConfigError with the remedy if `source` is the name of a model without its prefix, or the address of its page on the hub."""
    name = re.sub(r"^(https?://)?(huggingface\.co|hf\.co)/", "", source)
    on_hub = [name] * ("/" in name and bool(_ON_HUB.fullmatch(name)) and not Path(name).parent.is_dir())
    for kind, names in {"preset": PRESETS, "hf": on_hub}.items():
        if name in names and not Path(source).exists():
            raise ConfigError(f"there is no folder {source}; for the model of this name, write {kind}:{name}")


def data_of_run(source: str) -> DataConfig | None:
    """Returns the `data` section of the configuration if `source` is a run, or None if it is a model."""
    run = run_at(source)
    return None if run is None else load_evaluation(run / "config.yaml").data


def folder_of(model: ModelConfig, *, weights: bool) -> AnyPath:
    """Returns the folder of the model `model.source`. If the model is on the hub, downloads it first, with `weights` including its weights. Raises ValueError
    if the model does not exist, the hub or the bucket cannot be reached, or the source is a file."""
    kind, _, name = model.parts.place.partition(":")
    if kind == "shipped":
        assets = Path(str(resources.files("dapo_jax"))) / "assets"
        shipped = sorted(path.name for path in assets.iterdir() if path.is_dir()) if assets.is_dir() else []
        if name not in shipped:
            raise ValueError(f"there is no shipped model {name!r}; available: {', '.join(shipped)}")
        return assets / name
    if kind == "hf":
        return download(name, revision=model.parts.revision or None, weights=weights)
    folder = path_of(model.parts.place)
    if folder.suffix == ".gguf":
        raise ValueError("a GGUF file is not a model folder; convert it with `dapo-jax convert FILE FOLDER`")
    if folder.suffix in PICKLED and not folder.is_dir():
        raise ValueError(f"this file is {A_PICKLE}")
    check_access(folder, write=False)
    return folder


def description_of(
    model: ModelConfig, *, weights: bool = True, tokenizer: AnyPath | None = None
) -> tuple[DecoderConfig, Tokenizer, AnyPath | None]:
    """Returns the decoder configuration, the tokenizer and the model folder. Never reads weights, but downloads them from the hub if `weights` is True.
    `tokenizer` is the folder of the tokenizer, if it is another one.

    For a preset, returns None as the folder, and uses the vocabulary size of the tokenizer. Raises ValueError if the model does not exist, or its configuration
    or tokenizer cannot be read.
    """
    source, _, name = model.source.partition(":")
    if source == "preset":
        named = named_tokenizer(model.tokenizer)
        return replace(preset(name), vocab_size=named.vocab_size), named, None
    folder = folder_of(model, weights=weights)
    decoder, loaded = read_config(folder), load_tokenizer(tokenizer or folder, folder)
    check_vocabulary(loaded, decoder.vocab_size)
    return decoder, loaded, folder


def tokenizer_of(model: ModelConfig) -> Tokenizer:
    """Returns the tokenizer of `model.source`, without loading weights. Raises ConfigError if the model does not exist, or its configuration or tokenizer
    cannot be read."""
    with prefixed(f"model.source={model.source!r}"):
        return source_of(model).described(weights=False)[1]


def lora_of(config: LoraConfig) -> LoraShape | None:
    """Returns the adapters that `config` describes, or None without LoRA."""
    return lora_shape(rank=config.rank, alpha=config.alpha, targets=config.targets) if config.rank else None


def with_adapters(decoder: DecoderConfig, config: LoraConfig) -> DecoderConfig:
    """Returns the decoder with the adapters that `config` describes. Raises ConfigError if it cannot have them."""
    with prefixed(""):
        return replace(decoder, lora=lora_of(config))
