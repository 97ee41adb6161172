"""Loads or initializes a policy (model configuration, weights and tokenizer) by name."""

import hashlib
import json
import math
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import PyTree

from dapo_jax.checkpoints.checkpointer import Check, Checkpointer
from dapo_jax.checkpoints.manifest import MANIFEST, CheckpointError
from dapo_jax.config import (
    ConfigError,
    DataConfig,
    LoraConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    SftConfig,
    TrainConfig,
    load_config,
    load_evaluation,
)
from dapo_jax.config.keys import prefixed
from dapo_jax.models.adapter_folder import ADAPTER_CONFIG, is_adapter, read_adapter, save_adapter
from dapo_jax.models.decoder import WHOLE, Decoder, graph_of, is_apart, unstacked
from dapo_jax.models.folder import CONFIG, load_model, read_config, save_model
from dapo_jax.models.hub import download
from dapo_jax.models.layout import Layout
from dapo_jax.models.lora import LoraShape, lora_shape, parted, rounded_to
from dapo_jax.models.presets import PRESETS, DecoderConfig, preset
from dapo_jax.models.safetensors_files import A_PICKLE, PICKLED
from dapo_jax.models.tensors import (
    TensorFile,
    adapter_tensors,
    check_adapters,
    exported,
    place_adapters,
    shapes_of,
)
from dapo_jax.parallel.mesh import BATCH_AXES, AnyDevice, Meshes, make_mesh, make_meshes
from dapo_jax.parallel.processes import is_first
from dapo_jax.parallel.sharding import read_by_rows, shardings
from dapo_jax.parallel.together import broadcast_from_first
from dapo_jax.run.resume_point import CHECKPOINT, check_identity, identity_of, model_files
from dapo_jax.run.run_dir import place_of
from dapo_jax.run.training_pass import for_mesh
from dapo_jax.storage import AnyPath, check_access, file_bytes, in_bucket, locks, path_of
from dapo_jax.terminal import visible
from dapo_jax.text.stop_strings import stop_ids
from dapo_jax.text.tokenizers import (
    Tokenizer,
    check_vocabulary,
    load_tokenizer,
    named_tokenizer,
    save_tokenizer,
    token_ids,
)
from dapo_jax.training.optimizer import make_optimizer
from dapo_jax.training.state import TrainState, init_state, state_structs

_Read = TypeVar("_Read")

_NAMED = ("preset:", "shipped:", "hf:")
"""Beginnings of sources that are not folders."""

_ON_HUB = re.compile(r"([\w.-]+/)?[\w.-]+")
"""Matches the name of a repository on the hub. Some relative paths match too."""

_NOTHING_SAVED = "this run has saved neither a checkpoint nor a model yet: wait until it has"


@dataclass(frozen=True, kw_only=True)
class Policy:
    """A decoder with its weights and its tokenizer."""

    decoder: DecoderConfig
    params: nnx.State
    """The trained parameters: only the adapters if LoRA is used, otherwise all parameters."""
    tokenizer: Tokenizer
    frozen: nnx.State = field(default_factory=lambda: nnx.State({}))
    """The base weights under LoRA adapters. Layers are stacked unless the sampler shares their arrays (`parallel.weights.shares_base`)."""
    base: str = ""
    """The `model.source` of the base model."""
    revision: str = ""
    """The revision of the base model that was requested from the hub."""
    step: int = 0
    """The training step of the checkpoint from which the weights were loaded."""
    folder: AnyPath | None = None
    """The model folder from which the weights, or only the configuration, were loaded. None for a preset."""
    checkpoint: str = ""
    """Step and digest of the run's checkpoint from which the trained weights were loaded. Empty if they were not loaded from a run."""

    def files(self, *, weights: bool) -> dict[str, str]:
        """Returns the digests of the files from which the policy was loaded (see `model_files`), and its `checkpoint`. `weights` is the argument of `load_policy`."""
        whole = self.checkpoint and self.decoder.lora is None
        found = model_files(self.folder, weights=weights and not whole)
        return found | ({CHECKPOINT: self.checkpoint} if self.checkpoint else {})

    @property
    def unshared(self) -> nnx.State:
        """The frozen weights that the sampler must copy. Empty if the sampler shares the trainer's arrays."""
        return nnx.State({}) if self.frozen and is_apart(self.frozen) else self.frozen

    def graph(self, *, compute_dtype: str, remat: str, layout: Layout = WHOLE) -> nnx.GraphDef[Any]:
        """Returns the decoder's graph definition, which `nnx.merge` combines with parameters into a module."""
        return graph_of(self.decoder, compute_dtype=compute_dtype, remat=remat, layout=layout)

    def initial_state(
        self,
        config: TrainConfig | SftConfig,
        optimizer: optax.GradientTransformation,
        mesh: jax.sharding.Mesh,
        *,
        copy: bool,
    ) -> TrainState:
        """Returns the state of a new run with these weights (see `init_state`). With `optimizer.from_source`, the optimizer state is from the same checkpoint.

        Raises:
            ConfigError: `model.source` is not a training run with the same optimizer.
        """
        offload, moments, own = config.optimizer.offload, None, config.optimizer.name
        if config.optimizer.from_source:
            source, run = config.model.source, source_of(config.model).run
            if run is None or run.optimizer.name != own:
                found = (
                    "not a training run" if run is None else f"a run with optimizer.name={run.optimizer.name}"
                )
                raise ConfigError(
                    f"optimizer.from_source=true needs a training run with optimizer.name={own}, but model.source={source!r} is {found}: "
                    "choose another source, or leave optimizer.from_source out to start with a new optimizer state"
                )
            target = replace(state_structs(self.params, optimizer, mesh, offload=offload), params=None)
            with Checkpointer(path_of(source) / "checkpoints") as checkpointer:
                restored = checkpointer.restore(target, self.step, rows=self.decoder.vocab_size, part=True)
                moments = restored.state.opt_state
        return init_state(self.params, optimizer, mesh, offload=offload, copy=copy, moments=moments)

    def save(self, folder: str | AnyPath, *, dtype: str = "float32", merge: bool = False) -> int:
        """Writes a model folder that `load_policy` and transformers can load. Returns the size of its tensors in bytes.

        With LoRA, this is an adapter folder, which PEFT can load too. If `merge` is True, the adapters are merged into a whole model. All processes
        must call this method, but only the first process writes.
        """
        decoder, path = self.decoder, path_of(folder)
        base, adapters = (self.params, None) if decoder.lora is None else (self.frozen, self.params)
        alone = adapters is not None and not merge
        if not is_first():
            # Gathering a sharded tensor is a collective operation, so all processes must take part.
            tensors = adapter_tensors(decoder, adapters) if alone else exported(decoder, base, adapters)
            return sum(tensor.fetch().size for tensor in tensors) * jnp.dtype(dtype).itemsize
        # The tokenizer is written first, because a folder with config.json or adapter_config.json is treated as a complete model.
        path.mkdir(parents=True, exist_ok=True)
        ends = list(stop_ids(self.tokenizer))
        save_tokenizer(self.tokenizer, folder, ends)
        if alone:
            name = self.base.removeprefix("hf:")
            return save_adapter(path, decoder, adapters, base=name, revision=self.revision, dtype=dtype)
        ids = {"eos_token_id": ends if len(ends) > 1 else ends[0], "pad_token_id": self.tokenizer.pad_id}
        ids |= token_ids(self.tokenizer)
        return save_model(folder, decoder, base, adapters=adapters, dtype=dtype, token_ids=ids)


def load_policy(
    model: ModelConfig,
    *,
    lora: LoraShape | None = None,
    seed: int = 0,
    mesh: jax.sharding.Mesh | None = None,
    sampler: jax.sharding.Mesh | None = None,
    weights: bool = True,
    shares: Callable[[nnx.State], bool] = lambda frozen: False,
    section: str = "model",
    longest: int | None = None,
) -> Policy:
    """Loads or initializes the policy that `model.source` specifies.

    Args:
        model: the source and, for a preset, the tokenizer.
        lora: adapters to train on a base that is frozen in `model.compute_dtype`. If the source is an adapter folder, its adapters must match
            `lora`. If None, the policy has the adapters of the source, if there are any.
        seed: random seed for a preset's initial weights and for new adapters.
        mesh: mesh over which the weights are sharded, as in training. If None, they are placed on the default device.
        sampler: mesh of the sampler. The vocabulary is padded so that it can be split over both meshes.
        weights: whether to load or initialize weights. If False, `params` contains only shapes.
        shares: takes the shapes of a LoRA base, and returns whether the sampler uses the trainer's arrays of this base (`parallel.weights.shares_base`).
        section: the section with the source, for error messages. The weights of a `teacher` are never trained, so they are rounded to `model.compute_dtype`.
        longest: number of tokens in the longest sequence of the run, which determines the factors of longrope. None: `long_factor`.

    Raises:
        ConfigError: the preset, shipped model or folder does not exist, the run has no checkpoint, or the adapter does not match `lora`.
    """
    with prefixed(f"{section}.source={model.source!r}"):
        source = source_of(model, weights=weights)
        adapter, step, checkpoint = source.adapter, 0, ""
        if lora is not None and adapter is not None and lora != adapter:
            differ = [
                f"lora.{name} is {getattr(lora, name)!r}, but the adapter's is {getattr(adapter, name)!r}"
                for name in ("rank", "alpha", "targets")
                if getattr(lora, name) != getattr(adapter, name)
            ]
            raise ValueError(f"this adapter does not match the configuration: {'; '.join(differ)}")
        if lora is not None and source.is_whole_run:
            raise ValueError(
                f"this run trained all weights, but lora.rank={lora.rank} needs a model folder as the base of its adapters: set model.source to "
                f"{model.source}/model if the run has finished, or to FOLDER after `dapo-jax convert {model.source} FOLDER`"
            )
        lora = adapter or lora
        decoder, tokenizer, base_folder = source.read(
            partial(description_of, weights=weights and not source.is_whole_run)
        )
        decoder = replace(for_mesh(decoder, *filter(None, (mesh, sampler))), lora=lora)
        decoder = decoder if longest is None else decoder.for_length(longest)
        check_adapters(decoder)
        trained, frozen = parted(shapes_of(decoder))
        where = None if mesh is None else lambda shapes: shardings(shapes, mesh)
        if weights:
            seed = seed if source.run is None else source.seed
            kind = "float32" if lora is None and section != "teacher" else model.compute_dtype
            apart = lora is not None and shares(jax.eval_shape(partial(rounded_to, kind), frozen))
            how: dict[str, Any] = {"dtype": kind, "apart": apart}
            if source.is_whole_run:
                loaded = nnx.State({})
            elif base_folder is None:
                loaded = _random(decoder.base, seed, where, partial(_held, **how))
            else:
                by_rows = read_by_rows if in_bucket(base_folder) else None
                loaded = load_model(base_folder, decoder, shardings=where, by_rows=by_rows, **how)[1]
            if lora is not None:
                frozen = loaded
            if source.run is not None:
                target = trained if lora else jax.eval_shape(partial(rounded_to, kind), trained)
                check = check_of_readers(source.run, base_folder)
                trained, step, checkpoint = _of_checkpoint(
                    model, _structs(target, where), rows=decoder.vocab_size, check=check
                )
            elif lora is None:
                trained = loaded
            elif source.file is None:
                trained = _random(decoder, seed, where, lambda params: parted(params)[0])
            else:
                trained = place_adapters(decoder, source.file, shardings=where)
    return Policy(
        decoder=decoder,
        params=trained,
        tokenizer=tokenizer,
        frozen=frozen,
        base=source.base.source,
        revision=source.base.revision,
        folder=base_folder,
        step=step,
        checkpoint=checkpoint,
    )


def _of_checkpoint(model: ModelConfig, target: PyTree, *, rows: int, check: Check) -> tuple[PyTree, int, str]:
    """Restores the trained weights of the run `model.source`. Returns them, the step of their checkpoint, and the text for `Policy.checkpoint`."""
    with Checkpointer(path_of(model.source) / "checkpoints") as checkpointer:
        folder, found = checkpointer.folder, None
        restore = partial(checkpointer.restore, TrainState(target, None), rows=rows, check=check, part=True)
        with prefixed("the run cannot be used", CheckpointError, OSError):
            if model.checkpoint == "last":
                found = checkpointer.restore_last(
                    restore, say=lambda text: warnings.warn(visible(text), stacklevel=2)
                )
            elif best := json.loads(broadcast_from_first(json.dumps(checkpointer.best()).encode())):
                found = restore(best[0])
            if found is None:
                kind = "with an evaluation score " if model.checkpoint == "best" else ""
                raise ValueError(f"there is no checkpoint {kind}in {folder} yet")
            digest = hashlib.sha256(file_bytes(folder / str(found.step) / MANIFEST)).hexdigest()
    return found.state.params, found.step, f"step {found.step} (sha256 {digest[:12]}...)"


def teacher_of(config: TrainConfig) -> ModelConfig:
    """Returns the teacher's model: the `model` section with `teacher.source`, `teacher.revision` and the last checkpoint."""
    teacher = config.teacher
    return replace(config.model, source=teacher.source, revision=teacher.revision, checkpoint="last")


def check_trains(policy: Policy, config: LoraConfig, source: str) -> None:
    """Checks that a run trains adapters if it starts from an adapter folder.

    Raises:
        ConfigError: the run would train all weights. The message contains the adapter's settings.
    """
    found = policy.decoder.lora
    if found is not None and not config.rank:
        raise ConfigError(
            f"model.source={source!r} is an adapter, but lora.rank=0 trains all weights: set lora.rank={found.rank} lora.alpha={found.alpha:g} "
            f"lora.targets=[{','.join(found.targets)}], or merge the adapter into a whole model: dapo-jax convert {source} FOLDER --merge"
        )


def lora_of(config: LoraConfig) -> LoraShape | None:
    """Returns the adapters that `config` describes, or None without LoRA."""
    return lora_shape(rank=config.rank, alpha=config.alpha, targets=config.targets) if config.rank else None


def with_adapters(decoder: DecoderConfig, config: LoraConfig) -> DecoderConfig:
    """Returns the decoder with the adapters that `config` describes. Raises ConfigError if it cannot have them."""
    with prefixed(""):
        return replace(decoder, lora=lora_of(config))


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

    @property
    def is_whole_run(self) -> bool:
        """Whether all weights are in the checkpoint of a run, so that the weights of `base` are not needed."""
        return self.run is not None and self.adapter is None

    def read(self, read: Callable[[ModelConfig], _Read]) -> _Read:
        """Returns `read(self.base)`. If it raises a ValueError, the message names the adapter's key."""
        try:
            return read(self.base)
        except ValueError as error:
            if not self.key:
                raise
            raise ValueError(_no_base(self.key, str(error))) from error


def source_of(model: ModelConfig, *, weights: bool = False) -> Source:
    """Resolves `model.source`. A run may have started from another run, so its base model is the model from which the first of these runs started.

    Args:
        model: its `source` and `checkpoint` are used.
        weights: whether to download the weights of an adapter that is on the hub.

    Raises:
        ValueError: the model or the base of an adapter does not exist, the adapter is not supported, or a model has no checkpoint to choose.
    """
    base, runs = model, list[TrainConfig]()
    while True:
        base, run = _opened(base)
        if run is None:
            break
        if run in runs:
            raise ValueError(f"the run {run.run_dir} started from itself: restore its first model.source")
        runs.append(run)
        base = run.model
    if not runs and model.checkpoint != "last":
        raise ValueError(
            f"model.checkpoint={model.checkpoint} needs a training run, whose folder contains `checkpoints`: leave it out, or name a run"
        )
    found = _of_model(base, weights=weights)
    if not runs:
        return found
    return found._replace(run=runs[0], adapter=lora_of(runs[0].lora), file=None, seed=runs[-1].seed)


def _opened(model: ModelConfig) -> tuple[ModelConfig, TrainConfig | None]:
    """Returns the model, and its configuration if it is a training run. The folder of a warm start is replaced with its model folder."""
    if model.source.startswith(_NAMED):
        return model, None
    _check_prefix(model.source)
    folder = path_of(model.source)
    if not (folder / "config.yaml").is_file() or (folder / CONFIG).is_file() or is_adapter(folder):
        return model, None
    if (folder / "checkpoints").is_dir():
        return model, load_config(folder / "config.yaml")
    if not (folder / "model").is_dir():
        raise ValueError(_NOTHING_SAVED)
    return replace(model, source=str(folder / "model")), None


def _of_model(model: ModelConfig, *, weights: bool) -> Source:
    """Returns the source if it is not a run: an adapter and its base, or a whole model."""
    if model.source.startswith(("preset:", "shipped:")):
        return Source(model)
    folder = folder_of(model, weights=weights)
    if not is_adapter(folder):
        return Source(model)
    found, file = read_adapter(folder)
    key = f"{folder / ADAPTER_CONFIG}: base_model_name_or_path={found.base!r}"
    if found.base.startswith("preset:") or not found.base:
        raise ValueError(f"{key} does not name a model with weights; write the base model's name there")
    name = found.base
    there = name.startswith(("shipped:", "hf:")) or in_bucket(name) or path_of(name).is_dir()
    base = replace(model, source=name if there else f"hf:{name}", revision=found.revision)
    if not there and not _ON_HUB.fullmatch(name):
        raise ValueError(_no_base(key, "there is no such folder"))
    return Source(base, found.shape, file, key=key)


def _no_base(key: str, why: str) -> str:
    return f"{key}: {why}; write the folder of the base model there, or its name ORG/NAME on the hub"


def find_policy(
    source: str,
    *,
    mesh: jax.sharding.Mesh | None = None,
    shares: Callable[[nnx.State], bool] = lambda frozen: False,
) -> Policy:
    """Loads the policy from a model, or from the latest checkpoint of a run. `source` is a `model.source`.

    The weights are sharded over `mesh`. Without a `mesh`, a model is placed on the default device, but the policy of a run is sharded over all devices.
    For `shares`, see `load_policy`.
    """
    if (run := run_at(source)) is None:
        return load_policy(ModelConfig(source=source), mesh=mesh, shares=shares)
    dtype = load_evaluation(run / "config.yaml").compute_dtype
    # The configured mesh is not used, because this machine may have different devices.
    mesh = mesh_of(ParallelConfig()) if mesh is None else mesh
    return load_policy(ModelConfig(source=source, compute_dtype=dtype), mesh=mesh, shares=shares)


def check_of_readers(config: TrainConfig, folder: AnyPath | None) -> Check:
    """Returns a function that raises an error if a checkpoint was saved with another configuration or base model `folder`. Prompts are not compared."""
    files = model_files(folder, weights=config.lora.rank > 0)
    return partial(check_identity, own=identity_of(config, prompts=None, model=files))


def run_at(source: str) -> AnyPath | None:
    """Returns the folder if `source` is a training run or a warm start, or None if it is a model.

    Raises:
        ConfigError: the folder cannot be read, or is neither a run nor a model.
    """
    _check_prefix(source)
    folder = place_of(source, key="model", write=False)
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
    """Returns the folder of the model `model.source`. If the model is on the hub, downloads it first.

    Args:
        model: its `source` specifies the folder.
        weights: whether to download weights too, if the model is on the hub.

    Raises:
        ValueError: the model does not exist, the hub or the bucket cannot be reached, or the source is a file.
    """
    kind, _, name = model.source.partition(":")
    if kind == "shipped":
        assets = Path(str(resources.files("dapo_jax"))) / "assets"
        there = sorted(path.name for path in assets.iterdir() if path.is_dir()) if assets.is_dir() else []
        if name not in there:
            raise ValueError(f"there is no shipped model {name!r}; available: {', '.join(there)}")
        return assets / name
    if kind == "hf":
        return download(name, revision=model.revision or None, weights=weights)
    folder = path_of(model.source)
    if folder.suffix == ".gguf":
        raise ValueError("a GGUF file is not a model folder; convert it with `dapo-jax convert FILE FOLDER`")
    if folder.suffix in PICKLED and not folder.is_dir():
        raise ValueError(f"this file is {A_PICKLE}")
    check_access(folder, write=False)
    return folder


def optimizer_of(config: OptimizerConfig) -> optax.GradientTransformation:
    """Returns the optimizer that `config` describes."""
    return make_optimizer(
        name=config.name,
        beta1=config.beta1,
        beta2=config.beta2,
        epsilon=config.epsilon,
        weight_decay=config.weight_decay,
        max_grad_norm=config.max_grad_norm,
    )


def mesh_of(
    axes: ParallelConfig,
    *,
    rows_per_microbatch: int | None = None,
    devices: Sequence[AnyDevice] | None = None,
) -> jax.sharding.Mesh:
    """Returns the mesh that `axes` describes. It consists of `devices`, which defaults to all devices.

    Raises:
        ConfigError: the axes do not match the number of devices, or the rows of a microbatch cannot be distributed evenly over the mesh.
    """
    sizes = {"data": axes.data, "fsdp": axes.fsdp, "tensor": axes.tensor, "context": axes.context}
    mesh = make_mesh(**sizes, devices=devices)
    spread = math.prod(mesh.shape[axis] for axis in BATCH_AXES)
    if rows_per_microbatch is not None and rows_per_microbatch % spread:
        raise ConfigError(
            f"batch.rows_per_microbatch={rows_per_microbatch} must be a multiple of parallel.data x parallel.fsdp = "
            f"{spread}, because the rows are distributed over these axes; for example {rows_per_microbatch // spread * spread + spread}"
        )
    return mesh


def meshes_of(axes: ParallelConfig, mesh: jax.sharding.Mesh) -> Meshes:
    """Returns the meshes of the trainer and the samplers that `axes` describes. Both use the devices of `mesh`.

    Raises:
        ConfigError: the samplers do not match the number of processes or devices.
    """
    return make_meshes(mesh, sampler_tensor=axes.sampler_tensor, sampler_hosts=axes.sampler_hosts)


def _held(params: nnx.State, *, dtype: str, apart: bool) -> nnx.State:
    """Converts stacked float32 parameters to `dtype`. If `apart` is True, separates the layers; otherwise they stay stacked."""
    rounded = rounded_to(dtype, params)
    return unstacked(rounded) if apart else rounded


def frozen_structs(decoder: DecoderConfig, mesh: jax.sharding.Mesh, *, dtype: str, apart: bool) -> nnx.State:
    """Returns the shape, dtype and sharding of each array in a LoRA base, or in a model without adapters. Layers are stacked unless `apart` is True."""
    whole = shapes_of(decoder)
    shapes = jax.eval_shape(partial(_held, dtype=dtype, apart=apart), parted(whole)[1] or whole)
    return _structs(shapes, partial(shardings, mesh=mesh))


def _structs(shapes: nnx.State, where: Callable[[nnx.State], PyTree] | None) -> nnx.State:
    """Returns `shapes` with the shardings that `where` returns, or without shardings."""
    if where is None:
        return shapes
    return jax.tree.map(lambda leaf, place: leaf.update(sharding=place), shapes, where(shapes))


def description_of(
    model: ModelConfig, *, weights: bool = True
) -> tuple[DecoderConfig, Tokenizer, AnyPath | None]:
    """Returns the decoder configuration, the tokenizer and the model folder. Never reads weights, but downloads them from the hub if `weights` is True.

    For a preset, returns None as the folder, and uses the vocabulary size of the tokenizer.

    Raises:
        ValueError: the model does not exist, or its configuration or tokenizer cannot be read.
    """
    source, _, name = model.source.partition(":")
    if source == "preset":
        made = named_tokenizer(model.tokenizer)
        return replace(preset(name), vocab_size=made.vocab_size), made, None
    folder = folder_of(model, weights=weights)
    decoder, tokenizer = read_config(folder), load_tokenizer(folder)
    check_vocabulary(tokenizer, decoder.vocab_size)
    return decoder, tokenizer, folder


def _random(
    decoder: DecoderConfig,
    seed: int,
    where: Callable[[nnx.State], PyTree] | None,
    made: Callable[[nnx.State], nnx.State],
) -> nnx.State:
    """Initializes random parameters and returns `made(parameters)`, for example a subset of the parameters or a copy in another dtype."""

    def program() -> nnx.State:
        return made(nnx.state(Decoder(decoder, rngs=nnx.Rngs(seed))))

    placed = None if where is None else where(jax.eval_shape(program))
    return jax.jit(program, out_shardings=placed)()
