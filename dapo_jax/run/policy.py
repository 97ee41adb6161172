"""A policy as the commands know it: sizes, weights, tokenizer, found by name."""

import math
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

import jax
import optax
from flax import nnx

from dapo_jax.checkpoints import Checkpointer
from dapo_jax.config import ConfigError, ModelConfig, OptimizerConfig, ParallelConfig, load_config
from dapo_jax.data.tokenizers import ByteTokenizer, CharTokenizer, load_tokenizer, save_tokenizer
from dapo_jax.models.decoder import Decoder
from dapo_jax.models.folder import load_model, save_model, shapes_of
from dapo_jax.models.presets import DecoderConfig, preset
from dapo_jax.parallel.mesh import BATCH_AXES, make_mesh
from dapo_jax.training.state import TrainState, make_optimizer, state_shardings


@dataclass(frozen=True, kw_only=True)
class Policy:
    """A decoder with its weights and its tokenizer."""

    decoder: DecoderConfig
    params: nnx.State
    tokenizer: ByteTokenizer | CharTokenizer

    def graph(self, *, compute_dtype: str, remat: str) -> nnx.GraphDef[Any]:
        """The structure that `nnx.merge` makes a module of, together with parameters."""

        def make() -> Decoder:
            return Decoder(self.decoder, rngs=nnx.Rngs(0), compute_dtype=compute_dtype, remat=remat)

        return nnx.split(nnx.eval_shape(make))[0]

    def save(self, folder: str | Path) -> None:
        """Writes a model folder that `load_policy` and transformers read."""
        save_model(folder, self.decoder, self.params)
        save_tokenizer(self.tokenizer, folder)


def load_policy(model: ModelConfig, *, seed: int = 0) -> Policy:
    """Makes or reads the policy that `model.source` names.

    Raises:
        ConfigError: there is no such preset, shipped model or folder; the message names what there is.
    """
    kind, _, name = model.source.partition(":")
    try:
        if kind == "preset":
            return _fresh(name, model.tokenizer, seed)
        folder = _shipped(name) if kind == "shipped" else Path(model.source).expanduser()
        decoder, params = load_model(folder)
        return Policy(decoder=decoder, params=params, tokenizer=load_tokenizer(folder))
    except ValueError as error:
        raise ConfigError(f"model.source={model.source!r}: {error}") from error


def find_policy(source: str) -> Policy:
    """The policy of a model (as `model.source`) or of a run folder, whose latest checkpoint is taken."""
    run = Path(source).expanduser()
    if not (run / "config.yaml").is_file() or not (run / "checkpoints").is_dir():
        return load_policy(ModelConfig(source=source))
    config = load_config(run / "config.yaml")
    policy = load_policy(config.model, seed=config.seed)
    optimizer = optimizer_of(config.optimizer)
    # Read onto the devices that are here, not onto the mesh that the run was trained on.
    target = state_structs(policy, optimizer, mesh_of(ParallelConfig()))
    with Checkpointer(run / "checkpoints") as checkpointer:
        try:
            restored = checkpointer.restore(target)
        except FileNotFoundError as error:
            raise ConfigError(f"the run {source} cannot be used yet: {error}") from error
    return replace(policy, params=restored.state.params)


def optimizer_of(config: OptimizerConfig) -> optax.GradientTransformation:
    """The optimizer that `config` describes."""
    return make_optimizer(
        beta1=config.beta1,
        beta2=config.beta2,
        epsilon=config.epsilon,
        weight_decay=config.weight_decay,
        max_grad_norm=config.max_grad_norm,
    )


def mesh_of(axes: ParallelConfig, *, rows_per_microbatch: int | None = None) -> jax.sharding.Mesh:
    """The device mesh that `axes` describes.

    Raises:
        ConfigError: the axes do not fit the devices, or the rows of a microbatch do not spread over the mesh.
    """
    try:
        mesh = make_mesh(data=axes.data, fsdp=axes.fsdp, tensor=axes.tensor, context=axes.context)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    spread = math.prod(mesh.shape[axis] for axis in BATCH_AXES)
    if rows_per_microbatch is not None and rows_per_microbatch % spread:
        raise ConfigError(
            f"batch.rows_per_microbatch={rows_per_microbatch} must be a multiple of parallel.data x parallel.fsdp = "
            f"{spread}, over which the rows are spread; {rows_per_microbatch // spread * spread + spread} is"
        )
    return mesh


def state_structs(
    policy: Policy, optimizer: optax.GradientTransformation, mesh: jax.sharding.Mesh
) -> TrainState:
    """The shape, dtype and place of every array of the train state: what a checkpoint is restored into."""
    params = shapes_of(policy.decoder)
    shapes = TrainState(params, jax.eval_shape(optimizer.init, params))
    placed = state_shardings(params, optimizer, mesh)
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), shapes, placed
    )


def _fresh(name: str, tokenizer: str, seed: int) -> Policy:
    """A preset with random weights, its vocabulary cut to the tokenizer's."""
    kind, _, alphabet = tokenizer.partition(":")
    if kind not in ("byte", "char"):
        raise ValueError(f"model.tokenizer={tokenizer!r} must be byte, or char:ALPHABET")
    made = CharTokenizer(alphabet) if kind == "char" else ByteTokenizer()
    decoder = replace(preset(name), vocab_size=made.vocab_size)
    params = jax.jit(lambda: nnx.state(Decoder(decoder, rngs=nnx.Rngs(seed))))()
    return Policy(decoder=decoder, params=params, tokenizer=made)


def _shipped(name: str) -> Path:
    assets = Path(str(resources.files("dapo_jax"))) / "assets"
    there = sorted(path.name for path in assets.iterdir() if path.is_dir()) if assets.is_dir() else []
    if name not in there:
        raise ValueError(f"no model {name!r} is shipped; these are: {', '.join(there)}")
    return assets / name
