"""The programs of a run, lowered from shapes on a mesh: the very ones that training, scoring, transfer and sampling call."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jax.stages import Lowered

from dapo_jax.config import ConfigError, TrainConfig
from dapo_jax.models.presets import DecoderConfig
from dapo_jax.models.tensors import shapes_of
from dapo_jax.parallel.device_memory import bytes_on_device
from dapo_jax.parallel.mesh import Meshes, make_meshes
from dapo_jax.parallel.weights import weight_transfer
from dapo_jax.plan.costs import cache_bytes_per_token
from dapo_jax.plan.memory import Resident
from dapo_jax.plan.mesh_sizes import Layout, batch_shards, described, layout_of, one_device
from dapo_jax.plan.refusals import Allocation
from dapo_jax.plan.workload import Workload
from dapo_jax.run.policy import Policy, mesh_of, optimizer_of
from dapo_jax.run.programs import updater_of
from dapo_jax.run.response_sampler import prefill_of
from dapo_jax.run.training_pass import TrainingPass, for_mesh, training_pass
from dapo_jax.sampling.decoding import decoding
from dapo_jax.sampling.engine import DecoderEngine
from dapo_jax.sampling.pages import PageSizes
from dapo_jax.sampling.prompt_packing import PrefillShape
from dapo_jax.text.tokenizers import ByteTokenizer
from dapo_jax.training.state import TrainState, state_structs

TRAINING = ("update", "score", "transfer", "transfer_ends")
"""The programs that work on the train state; the others are the sampler's."""


@dataclass(frozen=True)
class Programs:
    """The programs that a configuration compiles, for devices which may be described ones."""

    config: TrainConfig
    decoder: DecoderConfig
    work: Workload
    devices: list[jax.Device] | None
    """None: those of the configuration, which are not there; then nothing can be lowered."""
    host: list[jax.Device] | None = None
    """A host's devices, as a slice of their own: the compiler does not take some hosts out of every slice. None: they are `devices`'."""

    @cached_property
    def meshes(self) -> Meshes:
        """Where the run trains and where it samples.

        Raises:
            ConfigError: the mesh axes do not fit the devices, or the rows of a microbatch not the mesh.
        """
        parallel, rows = self.config.parallel, self.config.batch.rows_per_microbatch
        if self.devices is None:
            parallel, devices = one_device(parallel), jax.devices()[:1]
        else:
            devices = self.devices
        train = mesh_of(parallel, rows_per_microbatch=rows, devices=devices)
        made = _configured(
            make_meshes,
            train,
            sampler_tensor=parallel.sampler_tensor,
            sampler_hosts=parallel.sampler_hosts,
        )
        own = made.sampler
        if self.host is None or len(self.host) != own.size:
            return made
        grid = np.asarray(self.host).reshape(own.devices.shape)
        return replace(made, sampler=Mesh(grid, own.axis_names, axis_types=own.axis_types))

    @cached_property
    def layout(self) -> Layout:
        """The sizes of the meshes."""
        layout = layout_of(self.meshes) if self.devices is not None else described(self.config.parallel)
        assert layout is not None, "without devices, the configuration names all sizes"
        rows, over = self.config.batch.rows_per_microbatch, batch_shards(layout.train)
        if rows % over:
            raise ConfigError(
                f"batch.rows_per_microbatch={rows} must be a multiple of parallel.data x parallel.fsdp = {over}; "
                f"{rows // over * over + over} is"
            )
        return layout

    @cached_property
    def state(self) -> TrainState:
        """The train state as shapes with their places."""
        optimizer = optimizer_of(self.config.optimizer)
        return _configured(state_structs, self._policy.params, optimizer, self.meshes.train)

    @cached_property
    def weights(self) -> Any:
        """The sampler's weights, the same way."""
        return self._transfer.shapes

    def lowered(self) -> dict[str, Callable[[], Lowered]]:
        """Each program's name and what lowers it; of those that the configuration runs."""
        batch = self.config.batch
        shape = {
            "capacity": self.work.room,
            "rows": batch.rows_per_microbatch,
            "row_tokens": self._pass.row_tokens,
        }
        made: dict[str, Callable[[], Lowered]] = {
            **self._engine.programs(self.weights, _how(self.config)),
            "transfer": lambda: self._transfer.lower(self.state.params)["layer"],
            "transfer_ends": lambda: self._transfer.lower(self.state.params)["ends"],
            "update": lambda: self._updater.lower_update(self.state, **shape),
        }
        if (self.config.loss.old_logprobs == "trainer" and self.work.updates > 1) or self.config.loss.kl_coef:
            made["score"] = lambda: self._updater.lower_score(self.state.params, **shape)
        return made

    def largest_inputs(self, name: str) -> list[Allocation]:
        """The largest arguments of a program: arrays of one kind and shape together."""
        if name not in TRAINING:
            kinds = {"sampler weights": self.weights, "decode state": self._engine.state_structs}
            sizes = self.layout.sampler
        else:
            kinds, sizes = {"train state": self.state}, self.layout.train
        found: dict[tuple[str, str], list[int]] = {}
        for kind, tree in kinds.items():
            for leaf in jax.tree.leaves(tree):
                text = f"{leaf.dtype.name}{list(leaf.shape)}"
                found.setdefault((kind, text), []).append(bytes_on_device(leaf, sizes))
        ranked = sorted(found.items(), key=lambda item: -sum(item[1]))[:5]
        return [
            Allocation(bytes=sum(sizes), shape=f"{len(sizes)} x {shape} over the mesh", operation=kind)
            for (kind, shape), sizes in ranked
        ]

    @cached_property
    def resident(self) -> Resident:
        """The arrays on each device between programs."""
        prompts, decoder = self._prefilled, self.decoder
        layout = self.layout
        cached = (
            cache_bytes_per_token(decoder, self.config.sampling, compute_dtype=self._dtype)
            // layout.sampler["tensor"]
        )
        params = bytes_on_device(self.state.params, layout.train)
        return Resident(
            state=bytes_on_device(self.state, layout.train),
            reference=params if self.config.loss.kl_coef else 0,
            weights=bytes_on_device(self.weights, layout.sampler),
            minibatch=self._minibatch_bytes,
            prefix=prompts.rows * (prompts.width * cached + prompts.row_prompts * decoder.vocab_size * 4),
            decode_state=bytes_on_device(self._engine.state_structs, layout.sampler),
        )

    @property
    def pages(self) -> PageSizes:
        """The sizes of a sampler's cache."""
        return self._engine.page_sizes

    @property
    def _prefilled(self) -> PrefillShape:
        """The rows that one call of prefill reads."""
        group, longest = self.config.batch.group_size, self.config.data.max_prompt_tokens
        return prefill_of(self.config.sampling, group, max_prompt_tokens=longest)

    @property
    def _capacity(self) -> int:
        return self.config.data.max_prompt_tokens + self.config.sampling.max_response_tokens

    @property
    def _dtype(self) -> str:
        return self.config.model.compute_dtype

    @property
    def _minibatch_bytes(self) -> int:
        rows = self.config.batch.rows_per_microbatch // batch_shards(self.layout.train)
        # Ten arrays of 4 bytes an entry and a mask of 1.
        return self.work.room * rows * self._pass.row_tokens * 41

    @cached_property
    def _policy(self) -> Policy:
        decoder = for_mesh(self.decoder, self.meshes.train, self.meshes.sampler)
        # Its tokenizer is never asked.
        return Policy(decoder=decoder, params=shapes_of(decoder), tokenizer=ByteTokenizer())

    @cached_property
    def _updater(self) -> Any:
        reference = self._policy.params if self.config.loss.kl_coef else None
        optimizer = optimizer_of(self.config.optimizer)
        return _configured(
            updater_of,
            self.config,
            self._policy.decoder,
            optimizer,
            self.meshes.train,
            layout=self._pass.layout,
            reference=reference,
        )

    @cached_property
    def _pass(self) -> TrainingPass:
        config = self.config
        return training_pass(config.model, config.batch, self.meshes.train, row_tokens=config.row_tokens)

    @cached_property
    def _engine(self) -> DecoderEngine:
        return _configured(
            DecoderEngine,
            self._policy.decoder,
            slots=self.config.sampling.slots,
            capacity=self._capacity,
            steps_per_call=self.config.sampling.steps_per_call,
            stop_ids=(self.decoder.vocab_size - 1,),
            mesh=self.meshes.sampler,
            compute_dtype=self._dtype,
            page_tokens=self.config.sampling.page_tokens,
            cache_tokens=self.config.sampling.cache_tokens,
            cache_dtype=self.config.sampling.cache_dtype,
            prefill=self._prefilled,
        )

    @cached_property
    def _transfer(self) -> Any:
        eight_bit = self.config.sampling.weight_dtype == "int8"
        return _configured(
            weight_transfer, self._policy.params, self.meshes, dtype=self._dtype, eight_bit=eight_bit
        )


def _configured(make: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Calls `make`; a size that does not fit is the configuration's."""
    try:
        return make(*arguments, **options)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _how(config: TrainConfig) -> Any:
    return jax.eval_shape(partial(decoding, temperature=config.sampling.temperature))
