"""Loads or initializes a policy (model configuration, weights and tokenizer) by name."""

import hashlib
import json
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import PyTree

from dapo_jax.checkpoints.checkpointer import Check, Checkpointer
from dapo_jax.checkpoints.manifest import MANIFEST, CheckpointError
from dapo_jax.config import (
    ConfigError,
    LoraConfig,
    ModelConfig,
    ParallelConfig,
    TrainConfig,
    load_evaluation,
)
from dapo_jax.config.keys import prefixed
from dapo_jax.models.adapter_folder import save_adapter
from dapo_jax.models.decoder import WHOLE, Decoder, graph_of, is_apart, unstacked
from dapo_jax.models.device_layout import Layout
from dapo_jax.models.folder import load_model, save_model
from dapo_jax.models.lora import LoraShape, parted, rounded_to
from dapo_jax.models.presets import DecoderConfig
from dapo_jax.models.tensors import (
    adapter_tensors,
    check_adapters,
    exported,
    place_adapters,
    shapes_of,
)
from dapo_jax.parallel.processes import is_first
from dapo_jax.parallel.sharding import read_by_rows, shardings
from dapo_jax.parallel.together import broadcast_from_first
from dapo_jax.run.meshes import mesh_of
from dapo_jax.run.resume_point import CHECKPOINT, check_identity, identity_of, model_files
from dapo_jax.run.sources import Source, run_at, source_of
from dapo_jax.run.training_pass import for_mesh
from dapo_jax.storage import AnyPath, file_bytes, in_bucket, path_of
from dapo_jax.terminal import visible
from dapo_jax.text.stop_strings import stop_ids
from dapo_jax.text.tokenizers import (
    Tokenizer,
    save_tokenizer,
    token_ids,
)
from dapo_jax.training.state import TrainState


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
        files = model_files(self.folder, weights=weights and not whole)
        return files | ({CHECKPOINT: self.checkpoint} if self.checkpoint else {})

    @property
    def unshared(self) -> nnx.State:
        """The frozen weights that the sampler must copy. Empty if the sampler shares the trainer's arrays."""
        return nnx.State({}) if self.frozen and is_apart(self.frozen) else self.frozen

    def graph(self, *, compute_dtype: str, remat: str, layout: Layout = WHOLE) -> nnx.GraphDef[Any]:
        """Returns the decoder's graph definition, which `nnx.merge` combines with parameters into a module."""
        return graph_of(self.decoder, compute_dtype=compute_dtype, remat=remat, layout=layout)

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
        source = source_of(model)
        lora = _adapters(source, lora, model.parts.place)
        decoder, tokenizer, folder = source.described(weights=weights)
        decoder = replace(for_mesh(decoder, *filter(None, (mesh, sampler))), lora=lora)
        decoder = decoder if longest is None else decoder.for_length(longest)
        check_adapters(decoder)
        trained, frozen = parted(shapes_of(decoder))
        policy = Policy(
            decoder=decoder,
            params=trained,
            tokenizer=tokenizer,
            frozen=frozen,
            base=source.base.parts.place,
            revision=source.base.parts.revision,
            folder=folder,
        )
        if not weights:
            return policy
        loader = _WeightLoader(
            policy=policy,
            source=source,
            seed=seed if source.run is None else source.seed,
            dtype="float32" if lora is None and section != "teacher" else model.compute_dtype,
            shardings=None if mesh is None else partial(shardings, mesh=mesh),
            shares=shares,
        )
        return loader.from_run(model) if source.run is not None else loader.from_model()


def _adapters(source: Source, lora: LoraShape | None, name: str) -> LoraShape | None:
    """Returns the adapters of a source, or the adapters `lora` to train on it. Raises ValueError if they do not fit together. `name` is `model.source`."""
    adapter = source.adapter
    if lora is None or lora == adapter:
        return adapter
    if adapter is not None:
        differ = [
            f"lora.{field} is {getattr(lora, field)!r}, but the adapter's is {getattr(adapter, field)!r}"
            for field in ("rank", "alpha", "targets")
            if getattr(lora, field) != getattr(adapter, field)
        ]
        raise ValueError(f"this adapter does not match the configuration: {'; '.join(differ)}")
    if source.is_whole_run:
        raise ValueError(
            f"this run trained all weights, but lora.rank={lora.rank} needs a model folder as the base of its adapters: set model.source to "
            f"{name}/model if the run has finished, or to FOLDER after `dapo-jax convert {name} FOLDER`"
        )
    return lora


@dataclass(frozen=True, kw_only=True)
class _WeightLoader:
    """Loads or initializes the weights of a policy."""

    policy: Policy
    """The policy with shapes in place of weights."""
    source: Source
    seed: int
    """Seed of random weights."""
    dtype: str
    """Dtype of weights that are not trained, and float32 if all weights are trained."""
    shardings: Callable[[nnx.State], PyTree] | None
    """Maps shapes to shardings. None: weights are placed on the default device."""
    shares: Callable[[nnx.State], bool]
    """See `load_policy`."""

    def from_model(self) -> Policy:
        """Loads a model, an adapter folder with its base, or a base under new adapters."""
        policy, decoder = self.policy, self.policy.decoder
        if decoder.lora is None:
            return replace(policy, params=self._base())
        frozen = self._base()
        if self.source.file is not None:
            adapters = place_adapters(decoder, self.source.file, shardings=self.shardings)
        else:
            adapters = _random(decoder, self.seed, self.shardings, lambda params: parted(params)[0])
        return replace(policy, params=adapters, frozen=frozen)

    def from_run(self, model: ModelConfig) -> Policy:
        """Loads the trained weights from a checkpoint of the run `model.source`, and the base under its adapters as the run did."""
        assert self.source.run is not None
        policy, whole = self.policy, self.source.is_whole_run
        frozen = policy.frozen if whole else self._base()
        shapes = jax.eval_shape(partial(rounded_to, self.dtype), policy.params) if whole else policy.params
        check, rows = check_of_readers(self.source.run, policy.folder), policy.decoder.vocab_size
        target, restored = TrainState(_structs(shapes, self.shardings), None), None
        with Checkpointer(path_of(model.parts.place) / "checkpoints") as checkpointer:
            folder = checkpointer.folder
            restore = partial(checkpointer.restore, target, rows=rows, check=check, part=True)
            with prefixed("the run cannot be used", CheckpointError, OSError):
                if model.parts.checkpoint == "last":
                    restored = checkpointer.restore_last(
                        restore, say=lambda text: warnings.warn(visible(text), stacklevel=2)
                    )
                elif best := json.loads(broadcast_from_first(json.dumps(checkpointer.best()).encode())):
                    restored = restore(best[0])
                if restored is None:
                    kind = "with an evaluation score " if model.parts.checkpoint == "best" else ""
                    raise ValueError(f"there is no checkpoint {kind}in {folder} yet")
                digest = hashlib.sha256(file_bytes(folder / str(restored.step) / MANIFEST)).hexdigest()
        name, params = f"step {restored.step} (sha256 {digest[:12]}...)", restored.state.params
        return replace(policy, params=params, frozen=frozen, step=restored.step, checkpoint=name)

    def _base(self) -> nnx.State:
        """Loads the weights of the base model, which are random for a preset."""
        decoder, folder = self.policy.decoder, self.policy.folder
        layers_apart = decoder.lora is not None and self.shares(
            jax.eval_shape(partial(rounded_to, self.dtype), self.policy.frozen)
        )
        form: dict[str, Any] = {"dtype": self.dtype, "apart": layers_apart}
        if folder is None:
            return _random(decoder.base, self.seed, self.shardings, partial(_frozen_form, **form))
        by_rows = read_by_rows if in_bucket(folder) else None
        return load_model(folder, decoder, shardings=self.shardings, by_rows=by_rows, **form)[1]


def check_trains(policy: Policy, config: LoraConfig, source: str) -> None:
    """Checks that a run trains adapters if it starts from an adapter folder. Raises ConfigError if the run would train all weights. The message contains the
    adapter's settings."""
    adapter = policy.decoder.lora
    if adapter is not None and not config.rank:
        raise ConfigError(
            f"model.source={source!r} is an adapter, but lora.rank=0 trains all weights: set lora.rank={adapter.rank} lora.alpha={adapter.alpha:g} "
            f"lora.targets=[{','.join(adapter.targets)}], or merge the adapter into a whole model: dapo-jax convert {source} FOLDER --merge"
        )


def find_policy(
    source: str,
    *,
    mesh: jax.sharding.Mesh | None = None,
    shares: Callable[[nnx.State], bool] = lambda frozen: False,
) -> Policy:
    """Loads the policy from a model, or from a checkpoint of a run. `source` is a `model.source`.

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


def _frozen_form(params: nnx.State, *, dtype: str, apart: bool) -> nnx.State:
    """Converts stacked float32 parameters to `dtype`. If `apart` is True, separates the layers; otherwise they stay stacked."""
    rounded = rounded_to(dtype, params)
    return unstacked(rounded) if apart else rounded


def frozen_structs(decoder: DecoderConfig, mesh: jax.sharding.Mesh, *, dtype: str, apart: bool) -> nnx.State:
    """Returns the shape, dtype and sharding of each array in a LoRA base, or in a model without adapters. Layers are stacked unless `apart` is True."""
    whole = shapes_of(decoder)
    shapes = jax.eval_shape(partial(_frozen_form, dtype=dtype, apart=apart), parted(whole)[1] or whole)
    return _structs(shapes, partial(shardings, mesh=mesh))


def _structs(shapes: nnx.State, shardings_of: Callable[[nnx.State], PyTree] | None) -> nnx.State:
    """Returns `shapes` with the shardings that `shardings_of` returns, or without shardings."""
    if shardings_of is None:
        return shapes
    return jax.tree.map(lambda leaf, sharding: leaf.update(sharding=sharding), shapes, shardings_of(shapes))


def _random(
    decoder: DecoderConfig,
    seed: int,
    shardings_of: Callable[[nnx.State], PyTree] | None,
    convert: Callable[[nnx.State], nnx.State],
) -> nnx.State:
    """Initializes random parameters and returns `convert(parameters)`, for example a subset of the parameters or a copy in another dtype."""

    def program() -> nnx.State:
        return convert(nnx.state(Decoder(decoder, rngs=nnx.Rngs(seed))))

    placed = None if shardings_of is None else shardings_of(jax.eval_shape(program))
    return jax.jit(program, out_shardings=placed)()
