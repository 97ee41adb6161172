"""Lowers the programs of a run, for training, scoring, weight transfer and sampling, from shapes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.stages import Lowered

from dapo_jax.config import TrainConfig
from dapo_jax.models.decoder import stacks_of
from dapo_jax.models.lora import parted
from dapo_jax.models.presets import DecoderConfig
from dapo_jax.models.tensors import shapes_of
from dapo_jax.parallel.device_memory import bytes_on_device
from dapo_jax.parallel.mesh import AnyDevice, Meshes
from dapo_jax.plan.decoder import decoder_of
from dapo_jax.plan.memory import Resident
from dapo_jax.plan.roofline import prefill_shape_of
from dapo_jax.plan.workload import MeshSizes, Workload
from dapo_jax.rollout.response_sampler import ResponseSampler
from dapo_jax.run.build import rollout_sampler
from dapo_jax.run.learner import Learner
from dapo_jax.run.meshes import meshes_of
from dapo_jax.run.policy import Policy, frozen_structs
from dapo_jax.run.sample_workers import worker_sampler
from dapo_jax.run.sampler_programs import sharing
from dapo_jax.run.sampler_setup import prefix_bytes
from dapo_jax.run.teacher_setup import teacher_model, teacher_of
from dapo_jax.run.training_pass import for_mesh
from dapo_jax.run.updater_setup import has_reference, objective_of, updater_of
from dapo_jax.sampling.decoding import decoding
from dapo_jax.sampling.engine import DecoderEngine
from dapo_jax.sampling.prefill import program_suffix
from dapo_jax.text.tokenizers import ByteTokenizer
from dapo_jax.training.state import TrainState
from dapo_jax.training.update import Model

Lower = Callable[[], Lowered]

_DECODING = ("temperature", "top_p", "top_k")


@dataclass(frozen=True)
class Programs:
    """The programs that a run executes, for present devices or for devices that a compiler describes."""

    config: TrainConfig
    decoder: DecoderConfig
    work: Workload
    devices: Sequence[AnyDevice]
    """The run's devices. If they are absent, programs cannot be lowered."""
    host: list[jax.Device] | None = None
    """Devices of a one-host topology, used to compile the sampler's programs. The compiler rejects some hosts that are part of a larger slice."""
    memory: int | None = None
    """Bytes of a device's memory. None: the amount that the devices report. CPUs do not report it."""
    samplers: int = 0
    """If not 0, `devices` belong to one of this number of sample workers. A worker has only the programs and arrays of the sampler."""

    @cached_property
    def meshes(self) -> Meshes:
        """The meshes of the trainer and the sampler. Raises ConfigError if the mesh axes do not fit the devices, or the rows of a microbatch do not fit the
        mesh."""
        parallel, rows = self.config.parallel, self.config.batch.rows_per_microbatch
        meshes = meshes_of(parallel, rows_per_microbatch=rows, devices=self.devices)
        sampler = meshes.sampler
        if self.host is None or len(self.host) != sampler.size:
            return meshes
        grid = np.asarray(self.host).reshape(sampler.devices.shape)
        return replace(meshes, sampler=Mesh(grid, sampler.axis_names, axis_types=sampler.axis_types))

    @cached_property
    def sizes(self) -> MeshSizes:
        """The axis sizes of the meshes."""
        meshes = self.meshes
        sizes = {"train": dict(meshes.train.shape), "sampler": dict(meshes.sampler.shape)}
        return MeshSizes(**sizes, samplers=self.samplers or meshes.count)

    @cached_property
    def state(self) -> TrainState:
        """The train state as shapes with shardings."""
        return self._learner.state_structs

    def lowered(self) -> dict[str, Lower]:
        """Maps the name of each program to a function that lowers it."""
        used = self.config.eval if self._only_evaluates else self.config.sampling
        options = {name: value for name, value in vars(used).items() if name in _DECODING}
        transfer: Any = self._sampler.transfer
        made: dict[str, Lower] = self.engine.programs(
            transfer.shapes, jax.eval_shape(partial(decoding, **options))
        )
        if self.samplers:
            return made
        if self._never_pauses:
            made = {name: lower for name, lower in made.items() if "paused" not in name}
        rows, lengths, params = self.config.batch.rows_per_microbatch, self._row_lengths, self.state.params
        for part in stacks_of(params) if self.decoder.lora else (*self.decoder.stacks, "ends"):
            made[f"transfer{program_suffix(part)}"] = lambda part=part: transfer.lower(params)[part]
        made |= self._updater.programs(self.state, capacity=self.work.room, rows=rows, lengths=lengths)
        scored = self.config.loss.old_logprobs == "trainer" and self.work.updates > 1
        if scored or self.config.loss.select != "all" or self._has_reference:
            score = partial(self._updater.lower_score, self._updater.model(params), rows=rows)
            made["score"] = partial(score, capacity=self.work.room, row_tokens=lengths[0])
            if len(lengths) > 1:
                made["score_shortest"] = partial(score, capacity=1, row_tokens=lengths[-1])
        if self.config.teacher.source and self.config.teacher.kl == "sampled":
            teacher = self._teacher or self._updater.model(params)
            score = partial(self._updater.lower_score, teacher, rows=rows)
            made["score_teacher"] = partial(score, capacity=self.work.room, row_tokens=lengths[0])
        return made

    @cached_property
    def resident(self) -> Resident:
        """Bytes per device of the arrays that stay in memory between programs, computed from shapes."""
        sizes, state, decoder = self.sizes, self.state, self._policy.decoder
        fixed = -(-decoder.state_bytes // sizes.sampler["tensor"])
        params = bytes_on_device(state.params, sizes.train)
        moments = bytes_on_device(state.opt_state, sizes.train)
        rows, (longest, *shorter) = self.config.batch.rows_per_microbatch, self._row_lengths
        # An update has a stack for each row length: `work.room` microbatches of the longest rows, and one of each shorter length.
        stacks = [(self.work.room, longest), *((1, tokens) for tokens in shorter)]
        first, *others = (
            bytes_on_device(self._updater.stack_structs(count, rows, tokens), sizes.train)
            for count, tokens in stacks
        )
        engine, prefill = self.engine, prefill_shape_of(self.config)
        transfer: Any = self._sampler.transfer
        each, capacity, width = sum(engine.token_bytes.values()), engine.capacity, prefill.width
        # If the pages run out, a response of any length may be re-prefilled.
        prefilled = capacity if engine.page_sizes.runs_out else prefill.longest
        chunks = -(-capacity // width) * width if prefilled > width else 0
        reread = chunks and chunks * each + prefill.row_prompts * decoder.vocab_rows * 4 + fixed
        base = bytes_on_device(transfer.base_shapes, sizes.sampler) if self.decoder.lora else 0
        # The residual stream, the rotary embedding and the embeddings for each layer of one chunk, in float32.
        inputs = decoder.layers * decoder.layer_embed_dim
        flowing = 4 * (decoder.embed_dim + decoder.head_dim + inputs) * width
        tensor = sizes.sampler["tensor"]
        features = sum(state.arrays * state.heads_on(tensor) * state.head_dim for state in decoder.paged)
        cached = features * jnp.dtype(self._dtype).itemsize
        resident = Resident(
            state=params + moments,
            moments=moments,
            reference=params if self._has_reference else 0,
            teacher=bytes_on_device(self._teacher, sizes.train),
            teaches_update=self.config.teacher.kl == "full",
            base=bytes_on_device(self._policy.frozen, sizes.train),
            shares_base=self._shares_base,
            sampler_base=0 if self._shares_base else base,
            weights=bytes_on_device(transfer.shapes, sizes.sampler) - base,
            rotations=2 * 4 * (decoder.head_dim // 2) * capacity,
            minibatch=first + sum(others),
            shorter=sum(others),
            gradient=bytes_on_device(self._updater.sums_structs(state), sizes.train),
            prefix=prefix_bytes(decoder, prefill, token_bytes=each, state_bytes=fixed),
            buffers=chunks and cached * chunks + flowing + fixed,
            reread=reread,
            waiting=reread if prefill.longest > width else 0,
            decode_state=bytes_on_device(engine.state_structs, sizes.sampler),
            paused=0 if self._never_pauses else bytes_on_device(engine.parked_structs, sizes.sampler),
        )
        if self.samplers:
            training = "state", "moments", "reference", "teacher", "minibatch", "shorter", "gradient"
            nothing: dict[str, Any] = dict.fromkeys(training, 0)
            return replace(resident, **nothing)
        return resident

    @property
    def _only_evaluates(self) -> bool:
        """Whether the sampler on these devices samples evaluations only, because sample workers sample the responses in flight."""
        return self.config.cluster.samplers > 0 and not self.samplers

    @property
    def _never_pauses(self) -> bool:
        return self._only_evaluates and not self.config.environment.source

    @property
    def _dtype(self) -> str:
        return self.config.model.compute_dtype

    @property
    def _row_lengths(self) -> tuple[int, ...]:
        """The row lengths that an update may use, longest first."""
        training_pass = self._learner.training_pass
        return (training_pass.row_tokens, *training_pass.packing["shorter_rows"])

    @cached_property
    def _shares_base(self) -> bool:
        """Whether trainer and sampler share one copy of the frozen base weights."""
        if self.decoder.lora is None:
            return False
        frozen = frozen_structs(self._decoder, self.meshes.train, dtype=self._dtype, apart=False)
        return sharing(self.meshes, self.config.sampling, dtype=self._dtype)(frozen)

    @cached_property
    def _has_reference(self) -> bool:
        return has_reference(self.config, objective_of(self.config.loss))

    @cached_property
    def _teacher(self) -> Model | None:
        """The teacher, with the shapes of its parameters without adapters, or None without a teacher of its own weights."""
        if self.config.teacher.source in ("", "self"):
            return None
        mesh = self.meshes.train
        decoder = for_mesh(decoder_of(teacher_of(self.config), section="teacher"), mesh)
        params = frozen_structs(decoder, mesh, dtype=self._dtype, apart=False)
        policy = Policy(decoder=decoder, params=params, tokenizer=ByteTokenizer())
        return teacher_model(self.config, policy, mesh)

    @cached_property
    def _decoder(self) -> DecoderConfig:
        return for_mesh(self.decoder, self.meshes.train, self.meshes.sampler)

    @cached_property
    def _policy(self) -> Policy:
        trained, frozen = parted(shapes_of(self._decoder))
        if self._decoder.lora is not None:
            train, apart = self.meshes.train, self._shares_base
            frozen = frozen_structs(self._decoder, train, dtype=self._dtype, apart=apart)
        # `Policy` requires a tokenizer, but planning does not use it.
        return Policy(decoder=self._decoder, params=trained, frozen=frozen, tokenizer=ByteTokenizer())

    @cached_property
    def _learner(self) -> Learner:
        return Learner(config=self.config, meshes=self.meshes, policy=self._policy)

    @cached_property
    def _updater(self) -> Any:
        reference = self._policy.params if self._has_reference else None
        return updater_of(self.config, self._learner, reference=reference, teacher=self._teacher)

    @cached_property
    def engine(self) -> DecoderEngine:
        """The engine that a run builds for one sampler."""
        engine = self._sampler.engine
        assert isinstance(engine, DecoderEngine)
        return engine

    @cached_property
    def _sampler(self) -> ResponseSampler:
        # The ends of responses are text, which depends on the tokenizer.
        config = replace(self.config, sampling=replace(self.config.sampling, stop=[], stop_token_ids=[]))
        if self.samplers:
            return worker_sampler(
                config, self._policy, self.meshes, samplers=self.samplers, memory=self.memory
            )
        return rollout_sampler(
            self._learner,
            config,
            has_reference=self._has_reference,
            teacher=self._teacher,
            memory=self.memory,
        )
