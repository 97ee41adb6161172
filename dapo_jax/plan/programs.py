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
from dapo_jax.models.lora import parted
from dapo_jax.models.presets import DecoderConfig
from dapo_jax.models.tensors import shapes_of
from dapo_jax.parallel.device_memory import bytes_on_device
from dapo_jax.parallel.mesh import Meshes, make_meshes
from dapo_jax.plan.costs import item
from dapo_jax.plan.memory import Resident
from dapo_jax.plan.mesh_sizes import Layout, batch_shards, described, layout_of, one_device
from dapo_jax.plan.refusals import Allocation
from dapo_jax.plan.workload import Workload
from dapo_jax.run.policy import Policy, frozen_structs, mesh_of, optimizer_of
from dapo_jax.run.programs import sampled_decoder, sharing, transfer_of, updater_of
from dapo_jax.run.sampler_setup import prefill_of, prefix_bytes, room_for_cache
from dapo_jax.run.training_pass import TrainingPass, for_mesh, training_pass
from dapo_jax.sampling.decoding import decoding
from dapo_jax.sampling.engine import DecoderEngine
from dapo_jax.sampling.pages import PageSizes
from dapo_jax.sampling.prompt_packing import PrefillShape
from dapo_jax.text.tokenizers import ByteTokenizer
from dapo_jax.training.state import TrainState, state_structs


def trains(program: str) -> bool:
    """True for a program that works on the train state; the others are the sampler's."""
    return program.startswith(("update", "score", "transfer"))


_PARTS = ("prefill_part", "prefill_kept", "prefill_empty", "fill_part", "insert_part")
"""The programs for a sequence that is read part by part."""


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
    memory: int | None = None
    """Bytes of a device; None where nobody knows, as of a CPU."""

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
        offload = self.config.optimizer.offload
        return _configured(state_structs, self._policy.params, optimizer, self.meshes.train, offload=offload)

    @cached_property
    def weights(self) -> Any:
        """The sampler's weights, the same way."""
        return self._transfer.shapes

    def lowered(self) -> dict[str, Callable[[], Lowered]]:
        """Each program's name and what lowers it; of those that the configuration runs."""
        sampling = self._engine.programs(self.weights, _how(self.config))
        rows, lengths = self.config.batch.rows_per_microbatch, self._row_lengths
        made: dict[str, Callable[[], Lowered]] = {
            **{name: lower for name, lower in sampling.items() if self.reads_parts or name not in _PARTS},
            "transfer": lambda: self._transfer.lower(self.state.params)["layer"],
            **(
                {}
                if self._adapts
                else {"transfer_ends": lambda: self._transfer.lower(self.state.params)["ends"]}
            ),
            **self._updater.programs(self.state, capacity=self.work.room, rows=rows, lengths=lengths),
        }
        if (self.config.loss.old_logprobs == "trainer" and self.work.updates > 1) or self.config.loss.kl_coef:
            score = partial(self._updater.lower_score, self.state.params, rows=rows)
            made["score"] = partial(score, capacity=self.work.room, row_tokens=lengths[0])
            if len(lengths) > 1:
                made["score_shortest"] = partial(score, capacity=1, row_tokens=lengths[-1])
        return made

    @property
    def reads_parts(self) -> bool:
        """Whether a run reads sequences longer than a row of prefill: prompts, or responses that had given their pages back, or are read again by
        new weights."""
        again = self.pages.runs_out or self.config.rollout.in_flight > 0
        longest, width = self.config.data.max_prompt_tokens, self._prefilled.width
        return self._capacity > width and (again or longest > width)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in the cache, on each of the devices that share its heads."""
        # The engine's mesh is of one device where the configuration's devices are not there.
        return self._engine.token_bytes * self.meshes.sampler.shape["tensor"] // self.layout.sampler["tensor"]

    def largest_inputs(self, name: str) -> list[Allocation]:
        """The largest arguments of a program: arrays of one kind and shape together."""
        if not trains(name):
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
        layout, state, decoder = self.layout, self.state, self._policy.decoder
        params = bytes_on_device(state.params, layout.train)
        moments = bytes_on_device(state.opt_state, layout.train)
        longest, *others = map(self._spread, self._stacks)
        shorter = sum(others)
        several = bytes_on_device(self._updater.sums_structs(state), layout.train) if others else 0
        read, width, slots = self._prefilled, self._prefilled.width, self.config.sampling.slots
        room = -(-self._capacity // width) * width if self.reads_parts else 0
        reread = room and room * self.token_bytes + read.row_prompts * decoder.vocab_rows * 4
        heads = -(-decoder.kv_heads // layout.sampler["tensor"])
        base = bytes_on_device(self._transfer.base_shapes, layout.sampler) if self._adapts else 0
        # The residual stream of one part, and its angles, in float32.
        flowing = 4 * (decoder.embed_dim + decoder.head_dim) * width
        return Resident(
            state=params + moments,
            moments=moments,
            reference=params if self.config.loss.kl_coef else 0,
            base=bytes_on_device(self._policy.frozen, layout.train),
            shares_base=self._shares_base,
            sampler_base=0 if self._shares_base else base,
            weights=bytes_on_device(self.weights, layout.sampler) - base,
            rotations=2 * 4 * (decoder.head_dim // 2) * self._capacity,
            minibatch=longest + shorter,
            shorter=shorter,
            gradient=several,
            prefix=prefix_bytes(decoder, read, token_bytes=self.token_bytes),
            buffers=room
            and 2 * decoder.layers * heads * decoder.head_dim * item(self._dtype) * room + flowing,
            reread=reread,
            waiting=reread if self._in_flight or read.longest > width else 0,
            decode_state=bytes_on_device(self._engine.state_structs, layout.sampler),
            # Logits of all slots at a time, on each device.
            paused=4 * decoder.vocab_rows * slots * max(0, -(-self._in_flight // slots) - 1),
        )

    @property
    def pages(self) -> PageSizes:
        """The sizes of a sampler's cache."""
        return self._engine.page_sizes

    @property
    def _prefilled(self) -> PrefillShape:
        """The rows that one call of prefill reads."""
        group, longest = self.config.batch.group_size, self.config.data.max_prompt_tokens
        how = {"in_flight": self._in_flight, "has_turns": bool(self.config.environment.source)}
        return prefill_of(self.config.sampling, group, max_prompt_tokens=longest, **how)

    @property
    def _in_flight(self) -> int:
        """Responses that go on from round to round in one sampler, at most; 0: none do."""
        return self.layout.share_of(self.config.rollout.in_flight)

    @property
    def _capacity(self) -> int:
        return self.config.data.max_prompt_tokens + self.config.sampling.max_response_tokens

    @property
    def _dtype(self) -> str:
        return self.config.model.compute_dtype

    @property
    def _row_lengths(self) -> tuple[int, ...]:
        """The lengths that rows of an update may have, the longest first."""
        return (self._pass.row_tokens, *self._pass.packing["shorter_rows"])

    @property
    def _stacks(self) -> list[Any]:
        """The microbatches of an update as shapes: room for all in the longest rows, and one in each shorter length."""
        rows, (longest, *shorter) = self.config.batch.rows_per_microbatch, self._row_lengths
        make = self._updater.stack_structs
        return [make(self.work.room, rows, longest), *(make(1, rows, tokens) for tokens in shorter)]

    def _spread(self, stack: Any) -> int:
        """Bytes of a stack on each device: its rows are spread over the batch axes, each row over `context`."""
        whole = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(stack))
        return -(-whole // (batch_shards(self.layout.train) * self.layout.train["context"]))

    @property
    def _adapts(self) -> bool:
        """Whether the sampler is given adapters beside a base that it keeps."""
        return self.decoder.lora is not None and not self.config.sampling.merge_lora

    @cached_property
    def _shares_base(self) -> bool:
        """Whether trainer and sampler have one copy of the base."""
        config, layout = self.config, self.layout
        if self.decoder.lora is None:
            return False
        if self.devices is not None:
            frozen = frozen_structs(self._decoder, self.meshes.train, dtype=self._dtype, apart=False)
            remat = config.model.remat
            return sharing(self.meshes, config.sampling, dtype=self._dtype, remat=remat)(frozen)
        # The meshes are of one device: whole along `embed`, and split over the same devices for both.
        alike = layout.samplers == 1 and layout.train["fsdp"] == 1 and layout.train["context"] == 1
        return (
            alike
            and layout.train["tensor"] == layout.sampler["tensor"]
            and not (config.sampling.merge_lora or config.sampling.weight_dtype)
        )

    @cached_property
    def _decoder(self) -> DecoderConfig:
        return for_mesh(self.decoder, self.meshes.train, self.meshes.sampler)

    @cached_property
    def _policy(self) -> Policy:
        trained, frozen = parted(shapes_of(self._decoder))
        if self._decoder.lora is not None:
            frozen = frozen_structs(
                self._decoder, self.meshes.train, dtype=self._dtype, apart=self._shares_base
            )
        # Its tokenizer is never asked.
        return Policy(decoder=self._decoder, params=trained, frozen=frozen, tokenizer=ByteTokenizer())

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
            frozen=self._policy.frozen,
        )

    @cached_property
    def _pass(self) -> TrainingPass:
        config = self.config
        return training_pass(config.model, config.batch, self.meshes.train, row_tokens=config.row_tokens)

    @property
    def _cache_bytes(self) -> int | None:
        """The room for a cache whose size the configuration leaves open, as a run finds it."""
        params = bytes_on_device(self.state.params, self.layout.train)
        state = bytes_on_device(self.state, self.layout.train)
        return room_for_cache(
            self._decoder,
            self.meshes.sampler,
            self.config.sampling,
            self._prefilled,
            capacity=self._capacity,
            compute_dtype=self._dtype,
            in_flight=self._in_flight,
            has_turns=bool(self.config.environment.source),
            resident=state
            + (params if self.config.loss.kl_coef else 0)
            + (0 if self._shares_base else bytes_on_device(self._policy.frozen, self.layout.train))
            + bytes_on_device(self.weights, self.layout.sampler),
            memory=self.memory,
        )

    @cached_property
    def _engine(self) -> DecoderEngine:
        return _configured(
            DecoderEngine,
            sampled_decoder(self._decoder, self.config.sampling),
            slots=self.config.sampling.slots,
            capacity=self._capacity,
            steps_per_call=self.config.sampling.steps_per_call,
            stop_ids=(self.decoder.vocab_size - 1,),
            mesh=self.meshes.sampler,
            compute_dtype=self._dtype,
            page_tokens=self.config.sampling.page_tokens,
            cache_tokens=self.config.sampling.cache_tokens,
            cache_dtype=self.config.sampling.cache_dtype,
            cache_bytes=self._cache_bytes,
            in_flight=self._in_flight,
            prefill=self._prefilled,
        )

    @cached_property
    def _transfer(self) -> Any:
        return _configured(transfer_of, self._policy, self.meshes, self.config.sampling, dtype=self._dtype)


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
