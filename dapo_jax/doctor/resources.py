"""The resources that a configuration names: the model and the memory it takes, the folders it writes to, the services it reports to."""

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import jax

from dapo_jax.checkpoints.checkpointer import Checkpointer
from dapo_jax.config import ConfigError, ModelConfig, TrainConfig
from dapo_jax.doctor.check import Found
from dapo_jax.doctor.machine import host_bytes, not_writable
from dapo_jax.locks import LockedError, check_free
from dapo_jax.models.hub import look_up
from dapo_jax.models.presets import DecoderConfig
from dapo_jax.models.safetensors_files import SafetensorsFolder
from dapo_jax.parallel.device_memory import device_bytes
from dapo_jax.plan.memory import MARGIN
from dapo_jax.plan.plan import Plan, plan_for
from dapo_jax.plan.workload import Assumptions
from dapo_jax.run.disk_space import gib, written_by
from dapo_jax.run.folders import place_of
from dapo_jax.run.policy import description_of, lora_of, mesh_of, meshes_of, read_base
from dapo_jax.run.run_dir import check_run_dir
from dapo_jax.storage import AnyPath, entries, in_bucket, size_of
from dapo_jax.text.tokenizers import Tokenizer
from dapo_jax.trackers import missing_requirement
from dapo_jax.trackers.wandb import wandb_mode, wandb_project

CROWDED = 0.8
"""Share of the memory beyond which a warning is given: activations are not counted."""


@dataclass(frozen=True)
class Configured:
    """A configuration, and what it names as far as it was found."""

    config: TrainConfig

    @cached_property
    def described(self) -> tuple[DecoderConfig, Tokenizer, AnyPath | None, int]:
        """Sizes, tokenizer, the folder of them, and the bytes of the weights; no weights are fetched or read.

        Raises:
            ConfigError: there is no such model, or it cannot be used.
        """
        model, size = self.config.model, 0
        try:
            if model.source.startswith("hf:"):
                folder, size = look_up(
                    model.source.removeprefix("hf:"),
                    revision=model.revision or None,
                )
                return (*description_of(ModelConfig(source=str(folder))), size)
            decoder, tokenizer, folder = read_base(model, description_of)
            if folder is not None:
                _ = SafetensorsFolder(
                    folder
                )  # names and shapes: a file that is missing or cut short is found
                size = sum(size_of(file) for file in entries(folder) if file.suffix == ".safetensors")
        except ValueError as error:
            raise ConfigError(f"model.source={model.source!r}: {error}") from error
        return decoder, tokenizer, folder, size

    @property
    def decoder(self) -> DecoderConfig:
        """The model's sizes."""
        return self.described[0]

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's."""
        return self.described[1]

    def mesh(self) -> Found:
        """Whether the devices make up the configured mesh, and a sampler."""
        parallel = self.config.parallel
        mesh = mesh_of(parallel, rows_per_microbatch=self.config.batch.rows_per_microbatch)
        sampler = meshes_of(parallel, mesh).sampler
        return Found(message=f"trains on {_sizes(mesh)}, samples on {_sizes(sampler)}")

    def model(self) -> Found:
        """Whether the model can be had, and what it is."""
        decoder, tokenizer, folder, size = self.described
        weights = "random weights" if folder is None else f"{gib(size)} of weights"
        return Found(
            message=f"{self.config.model.source}: {decoder.parameters:,} parameters, {weights}, {tokenizer.vocab_size:,} tokens"
        )

    @cached_property
    def planned(self) -> Plan:
        """The plan of the run by shapes alone, on the devices that are here."""
        folder = self.described[2]
        # Of a preset, planning takes the published model, whose vocabulary is larger than its tokenizer's here.
        model = (
            self.config.model
            if folder is None
            else replace(self.config.model, source=str(folder), revision="")
        )
        return plan_for(
            replace(self.config, model=model), jax.devices(), assumed=Assumptions(informative=1.0)
        )

    def memory(self) -> Found:
        """Compares the memory that must lie on a device together at least with what the device has. Activations are not in it: those only a compiler knows."""
        there, first = self.planned.resident, jax.devices()[0]
        minibatches = self.planned.work.updates * there.minibatch
        always = {
            "train state": there.state,
            "frozen weights": there.base + there.sampler_base,
            "reference policy": there.reference,
        }
        cache, pages = there.decode_state, self.planned.pages
        if pages.runs_out and not self.config.sampling.cache_tokens:
            # It takes what is left, and does with a single sequence for each pool.
            cache = cache * pages.table_pages // pages.pool_pages
        sampling = {
            **always,
            "sampler's weights": there.weights,
            "its cache": cache + 2 * there.prefix,
            "logits of responses that pause": there.paused,
        }
        # In float32, as the weights are.
        updating = {**always, "minibatches": minibatches, "gradient": there.state - there.moments}
        parts = max(sampling, updating, key=lambda each: sum(each.values()))
        needed, each = sum(parts.values()), device_bytes(first)
        if each is None:
            needed, limit, whose = (
                needed * jax.local_device_count(),
                host_bytes()[1],
                "available in the host's memory",
            )
        else:
            limit, whose = int(each * (1 - MARGIN)), "on a device"
        listed = " + ".join(f"{name} {gib(size)}" for name, size in parts.items() if size)
        said = f"{gib(needed)} at least, of {gib(limit)} {whose}: {listed}"
        if needed <= CROWDED * limit:
            return Found(message=said)
        changes = "lower sampling.slots or sampling.max_response_tokens, or take more devices (parallel.fsdp)"
        if needed <= limit:
            return Found(message=said, state="warning", remedy=f"activations come on top of it: {changes}")
        return Found(
            message=said,
            state="failed",
            remedy=f"{changes}; `dapo-jax plan` compiles it and tries what would fit",
        )

    def written(self) -> dict[str, tuple[str, int]]:
        """Key -> folder, and bytes that a run writes there."""
        try:
            parameters = replace(self.decoder, lora=lora_of(self.config.lora)).trained_parameters
        except ConfigError:
            parameters = 0  # another check says so
        return written_by(self.config, parameters)

    def run_dir(self) -> Found:
        """Whether the run's folder is free, or holds this very run, and can be written to."""
        config = self.config
        folder = place_of(config.run_dir, key="run_dir", write=True)
        if not in_bucket(folder) and (why := not_writable(folder)):
            return Found(
                message=f"{folder}: {why}",
                state="failed",
                remedy="set run_dir to a folder that can be written to",
            )
        if not in_bucket(folder):
            try:
                check_free(Path(folder))
            except LockedError as error:
                return Found(
                    message=f"{config.run_dir}: {error}",
                    state="failed",
                    remedy="train again when the run has ended, or set another run_dir",
                )
        if not (folder / "config.yaml").exists():
            check_run_dir(folder, config, resume=False)
            return Found(message=f"{config.run_dir} is free")
        try:
            check_run_dir(folder, config, resume=True)
        except ConfigError as error:
            return Found(
                message=str(error), state="failed", remedy="choose another run_dir, or undo the change"
            )
        return _resumable(folder, config)

    def reports(self) -> Found:
        """Whether metrics can go where the configuration wants them."""
        log = self.config.log
        what, remedy = missing_requirement(log)
        if what:
            return Found(message=what, state="failed", remedy=remedy)
        if not log.wandb:
            return Found(message="metrics.jsonl" + (" and TensorBoard" if log.tensorboard else ""))
        if (mode := wandb_mode()) != "online":
            return Found(message=f"Weights & Biases, with WANDB_MODE={mode}")
        return Found(message=f"Weights & Biases, project {wandb_project()}; an API key is there (not tried)")


def _resumable(folder: AnyPath, config: TrainConfig) -> Found:
    with Checkpointer(folder / "checkpoints") as checkpointer:
        step = checkpointer.latest_step()
    if step is None:
        said = f"{config.run_dir} holds this run without a checkpoint; it begins anew"
    elif step >= config.steps:
        return Found(
            message=f"{config.run_dir} holds this run, done with step {step}",
            state="warning",
            remedy="raise steps and start with --resume, or choose another run_dir",
        )
    else:
        said = f"{config.run_dir} holds this run; it goes on after step {step}"
    return Found(message=said, state="warning", remedy="start it with --resume, or choose another run_dir")


def _sizes(mesh: jax.sharding.Mesh) -> str:
    return " x ".join(f"{axis} {size}" for axis, size in mesh.shape.items() if size > 1) or "1 device"
