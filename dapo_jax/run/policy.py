"""A policy as the commands know it: sizes, weights, tokenizer, found by name."""

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from dapo_jax.checkpoints.checkpointer import Check, Checkpointer
from dapo_jax.checkpoints.last_intact import restore_last
from dapo_jax.checkpoints.manifest import CheckpointError
from dapo_jax.config import (
    ConfigError,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    TrainConfig,
    load_config,
)
from dapo_jax.models.decoder import WHOLE, Decoder, graph_of
from dapo_jax.models.folder import CONFIG, load_model, read_config, save_model
from dapo_jax.models.hub import download
from dapo_jax.models.layout import Layout
from dapo_jax.models.presets import DecoderConfig, preset
from dapo_jax.models.safetensors_files import A_PICKLE, PICKLED
from dapo_jax.models.tensors import exported, shapes_of
from dapo_jax.parallel.mesh import BATCH_AXES, Meshes, make_mesh, make_meshes
from dapo_jax.parallel.processes import is_first
from dapo_jax.parallel.sharding import shardings
from dapo_jax.parallel.shared_reading import read_by_rows
from dapo_jax.run.folders import place_of
from dapo_jax.run.identity import check_identity, identity_of, model_files
from dapo_jax.run.training_pass import for_mesh
from dapo_jax.storage import AnyPath, check_access, in_bucket, path_of
from dapo_jax.terminal import visible
from dapo_jax.text.tokenizers import (
    Tokenizer,
    check_vocabulary,
    load_tokenizer,
    named_tokenizer,
    save_tokenizer,
    token_ids,
)
from dapo_jax.training.optimizer import make_optimizer
from dapo_jax.training.state import TrainState
from dapo_jax.training.state import state_structs as structs_of


@dataclass(frozen=True, kw_only=True)
class Policy:
    """A decoder with its weights and its tokenizer."""

    decoder: DecoderConfig
    params: nnx.State
    tokenizer: Tokenizer
    step: int = 0
    """The steps that the weights of a run's checkpoint were trained for."""
    folder: AnyPath | None = None
    """The model folder that it was read from, or that described it; None for a preset."""

    def graph(self, *, compute_dtype: str, remat: str, layout: Layout = WHOLE) -> nnx.GraphDef[Any]:
        """The structure that `nnx.merge` makes a module of, together with parameters."""
        return graph_of(self.decoder, compute_dtype=compute_dtype, remat=remat, layout=layout)

    def save(self, folder: str | AnyPath, *, dtype: str = "float32") -> int:
        """Writes a model folder that `load_policy` and transformers read; returns the bytes of its tensors.

        Of several processes all call it, and the first one writes.
        """
        if not is_first():
            # Each takes part in gathering a tensor.
            return (
                sum(tensor.fetch().size for tensor in exported(self.decoder, self.params))
                * jnp.dtype(dtype).itemsize
            )
        # First the tokenizer: config.json, which makes the folder a model, is written last of all.
        save_tokenizer(self.tokenizer, folder)
        ends, pad = self.tokenizer.stop_ids, self.tokenizer.pad_id
        named = token_ids(self.tokenizer)
        return save_model(
            folder, self.decoder, self.params, dtype=dtype, eos_ids=ends, pad_id=pad, token_ids=named
        )


def load_policy(
    model: ModelConfig,
    *,
    seed: int = 0,
    mesh: jax.sharding.Mesh | None = None,
    sampler: jax.sharding.Mesh | None = None,
    weights: bool = True,
) -> Policy:
    """Makes or reads the policy that `model.source` names.

    Args:
        model: the source and, for a preset, the tokenizer.
        seed: of a preset's random weights.
        mesh: on which each weight goes at once where training has it; None puts all on the default device.
        sampler: the mesh that samples; the vocabulary is filled up so that both can split it.
        weights: False: no weight is made, fetched or read, and `params` are shapes alone.

    Raises:
        ConfigError: there is no such preset, shipped model or folder; the message names what there is.
    """
    try:
        decoder, tokenizer, folder = description_of(model, weights=weights)
        decoder = for_mesh(decoder, *(each for each in (mesh, sampler) if each is not None))
        if not weights:
            params = shapes_of(decoder)
        elif folder is None:
            params = _random(decoder, seed, mesh)
        else:
            where = None if mesh is None else lambda shapes: shardings(shapes, mesh)
            by_rows = read_by_rows if in_bucket(folder) else None
            _, params = load_model(folder, decoder, shardings=where, by_rows=by_rows)
    except ValueError as error:
        raise ConfigError(f"model.source={model.source!r}: {error}") from error
    return Policy(decoder=decoder, params=params, tokenizer=tokenizer, folder=folder)


def find_policy(source: str, *, mesh: jax.sharding.Mesh | None = None) -> Policy:
    """The policy of a model (as `model.source`) or of a run folder, whose latest checkpoint is taken.

    Weights go onto `mesh`; with None, a model's onto the default device and a run's spread over all devices.
    """
    if (run := run_at(source)) is None:
        return load_policy(ModelConfig(source=source), mesh=mesh)
    config = load_config(run / "config.yaml")
    # Shapes alone: the run's own weights are in its checkpoint, which is read onto the devices that are here and not
    # onto the mesh that it was trained on.
    mesh = mesh_of(ParallelConfig()) if mesh is None else mesh
    policy = load_policy(config.model, mesh=mesh, weights=False)
    decoder = policy.decoder
    target = state_structs(policy, optimizer_of(config.optimizer), mesh)
    with Checkpointer(run / "checkpoints") as checkpointer:
        try:
            restored = restore_last(
                checkpointer,
                lambda step: checkpointer.restore(
                    target, step, rows=decoder.vocab_size, check=check_of_readers(config, policy)
                ),
                say=lambda text: warnings.warn(visible(text), stacklevel=2),
            )
        except (CheckpointError, ValueError) as error:
            raise ConfigError(f"the run {source} cannot be used: {error}") from error
        if restored is None:
            raise ConfigError(
                f"the run {source} cannot be used yet: there is no checkpoint in {checkpointer.folder}"
            )
    return replace(policy, params=restored.state.params, step=restored.step)


def check_of_readers(config: TrainConfig, policy: Policy) -> Check:
    """Refuses checkpoints of other runs than that of `config` and the model `policy`; prompts are not looked at."""
    files = model_files(policy.folder, weights=False)
    own = {**identity_of(config, prompts=(), model=files), "prompts": None}
    return partial(check_identity, own=own, say=lambda _: None)


def run_at(source: str) -> AnyPath | None:
    """The training run's folder that `source` names, if it names one.

    Raises:
        ConfigError: it lies in a bucket and cannot be read, or there is neither a run nor a model.
    """
    folder = place_of(source, key="model", write=False)
    if (folder / "config.yaml").is_file() and (folder / "checkpoints").is_dir():
        return folder
    if in_bucket(folder) and not (folder / CONFIG).is_file():
        raise ConfigError(
            f"{source} is neither a run, with config.yaml and checkpoints, nor a model, with {CONFIG}: look at the name, or wait for the "
            "run's first checkpoint"
        )
    return None


def data_of_run(source: str) -> DataConfig | None:
    """The data section of the training run that `source` names, if it names one."""
    run = run_at(source)
    return None if run is None else load_config(run / "config.yaml").data


def folder_of(model: ModelConfig, *, weights: bool) -> AnyPath:
    """The folder that holds the model.

    Args:
        model: the source.
        weights: whether those of a model of the hub are fetched too.

    Raises:
        ValueError: no such model is shipped, the hub or the bucket does not have it or cannot be reached, or the source is a file.
    """
    kind, _, name = model.source.partition(":")
    if kind == "shipped":
        return _shipped(name)
    if kind == "hf":
        return download(
            name, revision=model.revision or None, cache_dir=model.cache_dir or None, weights=weights
        )
    folder = path_of(model.source)
    if folder.suffix == ".gguf":
        raise ValueError("a GGUF file is no model folder; `dapo-jax convert FILE FOLDER` makes one of it")
    if folder.suffix in PICKLED and not folder.is_dir():
        raise ValueError(f"a file of this kind is {A_PICKLE}")
    check_access(folder, write=False)
    return folder


def optimizer_of(config: OptimizerConfig) -> optax.GradientTransformation:
    """The optimizer that `config` describes."""
    return make_optimizer(
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
    devices: Sequence[jax.Device] | None = None,
) -> jax.sharding.Mesh:
    """The mesh that `axes` describes, of `devices`; None: all there are.

    Raises:
        ConfigError: the axes do not fit the devices, or the rows of a microbatch do not spread over the mesh.
    """
    try:
        mesh = make_mesh(
            data=axes.data, fsdp=axes.fsdp, tensor=axes.tensor, context=axes.context, devices=devices
        )
    except ValueError as error:
        raise ConfigError(str(error)) from error
    spread = math.prod(mesh.shape[axis] for axis in BATCH_AXES)
    if rows_per_microbatch is not None and rows_per_microbatch % spread:
        raise ConfigError(
            f"batch.rows_per_microbatch={rows_per_microbatch} must be a multiple of parallel.data x parallel.fsdp = "
            f"{spread}, over which the rows are spread; {rows_per_microbatch // spread * spread + spread} is"
        )
    return mesh


def meshes_of(axes: ParallelConfig, mesh: jax.sharding.Mesh) -> Meshes:
    """The meshes of training and of the samplers that `axes` describes, over the devices of `mesh`.

    Raises:
        ConfigError: the samplers do not fit the processes, or their devices.
    """
    try:
        return make_meshes(mesh, sampler_tensor=axes.sampler_tensor, sampler_hosts=axes.sampler_hosts)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def state_structs(
    policy: Policy,
    optimizer: optax.GradientTransformation,
    mesh: jax.sharding.Mesh,
    *,
    offload: bool = False,
) -> TrainState:
    """The shape, dtype and place of every array of the train state: what a checkpoint is restored into."""
    return structs_of(shapes_of(policy.decoder), optimizer, mesh, offload=offload)


def description_of(
    model: ModelConfig, *, weights: bool = True
) -> tuple[DecoderConfig, Tokenizer, AnyPath | None]:
    """Sizes and tokenizer, and the folder with the weights, which are not read; a preset has none, and its vocabulary is
    cut to the tokenizer's. With `weights` False those of a model of the hub are not fetched either.

    Raises:
        ValueError: there is no such model, or its configuration or tokenizer cannot be read.
    """
    source, _, name = model.source.partition(":")
    if source == "preset":
        made = named_tokenizer(model.tokenizer)
        return replace(preset(name), vocab_size=made.vocab_size), made, None
    folder = folder_of(model, weights=weights)
    decoder, tokenizer = read_config(folder), load_tokenizer(folder)
    check_vocabulary(tokenizer, decoder.vocab_size)
    return decoder, tokenizer, folder


def _random(decoder: DecoderConfig, seed: int, mesh: jax.sharding.Mesh | None) -> nnx.State:
    where = None if mesh is None else shardings(shapes_of(decoder), mesh)
    return jax.jit(lambda: nnx.state(Decoder(decoder, rngs=nnx.Rngs(seed))), out_shardings=where)()


def _shipped(name: str) -> Path:
    assets = Path(str(resources.files("dapo_jax"))) / "assets"
    there = sorted(path.name for path in assets.iterdir() if path.is_dir()) if assets.is_dir() else []
    if name not in there:
        raise ValueError(f"no model {name!r} is shipped; these are: {', '.join(there)}")
    return assets / name
