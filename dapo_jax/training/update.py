"""One optimizer update: gradients summed over microbatches, then clipped, checked and applied.

Each microbatch carries its tokens' weights in the whole minibatch's loss, so their gradients are summed. (Averaging
them, as gradient accumulation usually does, would divide the gradient by their number.)
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.stages import Lowered
from jaxtyping import Array, Bool, Float, Int, PyTree

from dapo_jax.batching import stack
from dapo_jax.losses import dapo_loss, kl_penalty
from dapo_jax.metrics import Max, Mean, Metric
from dapo_jax.microbatch import Microbatch, microbatch_structs
from dapo_jax.parallel.sharding import by_row, replicated
from dapo_jax.training.state import TrainState, state_shardings

Objective = Callable[..., tuple[Array, Mapping[str, Metric]]]
"""A function with the signature of `dapo_loss`: (logprobs, old_logprobs, advantages, mask, *, weights) -> (loss, metrics)."""


@dataclass(frozen=True, kw_only=True)
class UpdateOptions:
    """What the update needs to know beyond its arrays."""

    temperature: float = 1.0
    logprob_chunk_vocab: int = 2048
    old_logprobs: str = "trainer"
    """trainer or sampler: see `Updater.update`."""
    importance_cap: float | None = None
    kl_coef: float = 0.0
    offload: bool = False
    """The optimizer's moments lie in the host's memory and come to the device only to be applied."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Minibatch:
    """The microbatches of one update on the mesh."""

    microbatches: Microbatch
    """Stacked: each array is [room, rows, seq]."""
    count: Int[Array, ""] | Any
    """How many there are; the rest is room that nothing reads."""

    def at(self, index: Int[Array, ""]) -> Microbatch:
        """One of them."""
        return jax.tree.map(
            lambda leaf: lax.dynamic_index_in_dim(leaf, index, keepdims=False), self.microbatches
        )

    def having(self, **arrays: Float[Array, "room rows seq"]) -> "Minibatch":
        """The same with some arrays of its microbatches replaced."""
        return replace(self, microbatches=replace(self.microbatches, **arrays))


class Updater:
    """The jitted programs of an update, bound to a decoder, an optimizer and an objective."""

    def __init__(
        self,
        graph: nnx.GraphDef[Any],
        params: nnx.State,
        optimizer: optax.GradientTransformation,
        mesh: Mesh,
        *,
        objective: Objective = dapo_loss,
        options: UpdateOptions | None = None,
        reference: nnx.State | None = None,
    ) -> None:
        """`params` may be shapes alone; `reference` are the reference policy's parameters if `kl_coef` is above 0."""
        self._graph, self._optimizer, self._objective = graph, optimizer, objective
        self._options, self._reference = options or UpdateOptions(), reference
        if (reference is None) != (self._options.kl_coef == 0.0):
            raise ValueError(
                f"kl_coef={self._options.kl_coef} {'needs' if reference is None else 'has no use for'} a reference policy"
            )
        placed = state_shardings(params, optimizer, mesh, offload=self._options.offload)
        self._shardings, self._whole, self._room = placed.params, replicated(mesh), 1
        self._moments = state_shardings(params, optimizer, mesh).opt_state
        self._rows = NamedSharding(mesh, PartitionSpec(None, *by_row(mesh).spec, "context"))
        self._score = jax.jit(self._score_program, out_shardings=self._rows)
        self._update = jax.jit(self._update_program, donate_argnums=0, out_shardings=(placed, self._whole))

    def prepare(self, state: TrainState, minibatches: Sequence[Sequence[Microbatch]]) -> list[Minibatch]:
        """Puts a step's microbatches on the mesh and fills in the log-probabilities that the update compares with.

        Called with the weights that sampled, before the first update. `old_logprobs: trainer` recomputes the old
        log-probabilities with the function the update uses; the first minibatch needs none, its old policy is the
        policy itself. The reference policy's are computed only where there is one.
        """
        # Room only grows, by powers of 2: programs are compiled for it, and steps differ in how many microbatches they have.
        self._room = max(self._room, *(1 << (len(minibatch) - 1).bit_length() for minibatch in minibatches))
        placed = [self._put(minibatch) for minibatch in minibatches]
        if self._options.old_logprobs == "sampler":
            placed = [m.having(old_logprobs=m.microbatches.sampler_logprobs) for m in placed]
        else:
            placed[1:] = [m.having(old_logprobs=self._score(state.params, m)) for m in placed[1:]]
        if self._reference is None:
            return placed
        return [m.having(ref_logprobs=self._score(self._reference, m)) for m in placed]

    def update(
        self, state: TrainState, minibatch: Minibatch, *, learning_rate: float, first: bool
    ) -> tuple[TrainState, dict[str, Metric]]:
        """One optimizer update over a prepared minibatch; `state` is donated.

        Args:
            state: parameters and moments.
            minibatch: one of what `prepare` gave.
            learning_rate: of this step.
            first: no update has happened since sampling, so the old policy is the policy itself.

        Returns:
            The new state (the old one if loss or gradient was not finite), and metrics for `to_scalars`.
        """
        return self._update(state, minibatch, np.float32(learning_rate), np.bool_(first))

    def lower_update(self, state: TrainState, *, room: int, rows: int, row_tokens: int) -> Lowered:
        """The program of `update` for `room` microbatches; `state` may be shapes with their places."""
        scalars = (jax.ShapeDtypeStruct((), kind, sharding=self._whole) for kind in (jnp.float32, jnp.bool_))
        return self._update.lower(state, self._structs(room, rows, row_tokens), *scalars)

    def lower_score(self, params: nnx.State, *, room: int, rows: int, row_tokens: int) -> Lowered:
        """The program with which `prepare` computes log-probabilities; `params` may be shapes with their places."""
        return self._score.lower(params, self._structs(room, rows, row_tokens))

    def _structs(self, room: int, rows: int, row_tokens: int) -> Minibatch:
        count = jax.ShapeDtypeStruct((), jnp.int32, sharding=self._whole)
        return Minibatch(microbatch_structs((room, rows, row_tokens), self._rows), count)

    def _put(self, minibatch: Sequence[Microbatch]) -> Minibatch:
        """The host/device boundary."""

        def place(whole: np.ndarray) -> Array:
            # Of several processes each has the whole array, and puts what is its devices' there.
            return jax.make_array_from_callback(whole.shape, self._rows, lambda index: whole[index])

        stacked = jax.tree.map(place, stack(minibatch, room=self._room))
        return Minibatch(stacked, np.int32(len(minibatch)))

    def _logprobs(self, params: nnx.State, microbatch: Microbatch) -> tuple[Array, Array]:
        """Log-probability and entropy [rows, seq] of each token given what it follows; without meaning in the first column."""

        def program(params: nnx.State, m: Microbatch) -> tuple[Array, Array]:
            decoder = nnx.merge(self._graph, params)
            hidden = decoder(m.tokens, m.positions, m.segment_ids, m.prefix_ids)
            before = jnp.take_along_axis(hidden, m.previous[..., None], axis=1)
            logprobs, entropy = decoder.ends.layout.logprobs(
                before.reshape(-1, hidden.shape[-1]),
                decoder.ends.unembedding(),
                m.tokens.reshape(-1),
                vocab_size=decoder.ends.config.vocab_size,
                temperature=self._options.temperature,
                chunk_vocab=self._options.logprob_chunk_vocab,
                dtype=decoder.ends.compute_dtype,
            )
            return logprobs.reshape(m.tokens.shape), entropy.reshape(m.tokens.shape)

        return nnx.merge(self._graph, params).ends.layout.spread(program)(params, microbatch)

    def _score_program(self, params: nnx.State, minibatch: Minibatch) -> Float[Array, "room rows seq"]:
        def score(i: Array, scores: Array) -> Array:
            return lax.dynamic_update_index_in_dim(
                scores, self._logprobs(params, minibatch.at(i))[0], i, axis=0
            )

        blank = jnp.zeros_like(minibatch.microbatches.old_logprobs)
        return lax.fori_loop(0, minibatch.count, score, blank)

    def _update_program(
        self, state: TrainState, minibatch: Minibatch, learning_rate: Float[Array, ""], first: Bool[Array, ""]
    ) -> tuple[TrainState, dict[str, Metric]]:
        """All microbatches in one program: each one's temporary arrays lie where the last one's did."""

        def loss(params: nnx.State, i: Array) -> tuple[Float[Array, ""], dict[str, Metric]]:
            return self._loss(params, microbatch=minibatch.at(i), first=first)

        def accumulate(i: Array, sums: tuple[nnx.State, Array, PyTree]) -> tuple[nnx.State, Array, PyTree]:
            grads, total, metrics = sums
            (value, measured), new = jax.value_and_grad(loss, has_aux=True)(state.params, i)
            grads = lax.with_sharding_constraint(jax.tree.map(jnp.add, grads, new), self._shardings)
            # Kept apart until they are added on the host, in float64: float32 counts are inexact beyond 2^24 tokens.
            return (
                grads,
                total + value,
                jax.tree.map(lambda all_, one: all_.at[i].set(one), metrics, measured),
            )

        zeros = lax.with_sharding_constraint(jax.tree.map(jnp.zeros_like, state.params), self._shardings)
        _, shapes = jax.eval_shape(loss, state.params, minibatch.count)
        blank = {name: _blank(metric, len(minibatch.microbatches.tokens)) for name, metric in shapes.items()}
        start = (zeros, jnp.zeros((), jnp.float32), blank)
        grads, total, metrics = lax.fori_loop(0, minibatch.count, accumulate, start)
        state, applied = self._apply(state, grads, total, learning_rate)
        return state, {**metrics, **applied}

    def _loss(
        self, params: nnx.State, microbatch: Microbatch, first: Bool[Array, ""]
    ) -> tuple[Float[Array, ""], dict[str, Metric]]:
        options, mask = self._options, microbatch.mask
        logprobs, entropy = self._logprobs(params, microbatch)
        now, by_trainer = lax.stop_gradient(logprobs), options.old_logprobs == "trainer"
        old = jnp.where(first, now, microbatch.old_logprobs) if by_trainer else microbatch.old_logprobs
        weights = microbatch.weights
        if options.importance_cap is not None:
            gap = jnp.where(mask, old - microbatch.sampler_logprobs, 0.0)
            weights = weights * jnp.minimum(jnp.exp(gap), options.importance_cap)
        # Where the sampler's are the old ones, only the first update has the weights that sampled to compare with.
        compared, trainers = (mask, old) if by_trainer else (mask & first, now)
        loss, metrics = self._objective(logprobs, old, microbatch.advantages, mask, weights=weights)
        metrics = {
            **metrics,
            "policy/entropy": _token_mean(entropy, mask),
            **_mismatch_metrics(trainers, microbatch.sampler_logprobs, compared),
        }
        if options.kl_coef:
            penalty, kl_metrics = kl_penalty(
                logprobs, microbatch.ref_logprobs, mask, weights=microbatch.weights
            )
            loss, metrics = loss + options.kl_coef * penalty, {**metrics, **kl_metrics}
        return loss, metrics

    def _apply(
        self, state: TrainState, grads: nnx.State, loss: Float[Array, ""], learning_rate: Float[Array, ""]
    ) -> tuple[TrainState, dict[str, Metric]]:
        if self._options.offload:
            state = replace(state, opt_state=jax.device_put(state.opt_state, self._moments))
        norm = jnp.sqrt(sum(jnp.sum(leaf * leaf) for leaf in jax.tree.leaves(grads)))
        finite = jnp.isfinite(norm) & jnp.isfinite(loss)
        with jax.numpy_dtype_promotion("standard"):  # optax raises a float to an integer count
            changes, opt_state = self._optimizer.update(grads, state.opt_state, state.params)
        params = jax.tree.map(lambda leaf, change: leaf + learning_rate * change, state.params, changes)
        new = TrainState(params, opt_state)
        # Neither weights nor moments take anything of an update that is not finite.
        kept = jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, state)
        one = jnp.ones((), jnp.float32)
        return kept, {
            "update/loss": Mean(jnp.where(finite, loss, 0.0), finite.astype(jnp.float32)),
            "update/grad_norm": Mean(jnp.where(finite, norm, 0.0), finite.astype(jnp.float32)),
            "update/skipped_frac": Mean(1.0 - finite.astype(jnp.float32), one),
        }


def _token_mean(values: Array, mask: Array) -> Mean:
    return Mean(jnp.where(mask, values, 0.0).sum(), mask.sum(dtype=jnp.float32))


def _mismatch_metrics(trainer: Array, sampler: Array, mask: Array) -> dict[str, Metric]:
    """How far the sampler's log-probabilities are from the trainer's, both under the weights that sampled."""
    delta = jnp.where(mask, trainer - sampler, 0.0)
    return {
        "sync/logprob_diff_mean": _token_mean(jnp.abs(delta), mask),
        "sync/logprob_diff_max": Max(jnp.abs(delta).max()),
        "sync/sampler_trainer_kl": _token_mean(jnp.exp(delta) - 1.0 - delta, mask),
    }


def _blank(metric: Metric, count: int) -> Metric:
    """`count` metrics of the same shape that add nothing."""
    nothing = -jnp.inf if isinstance(metric, Max) else 0.0
    return jax.tree.map(lambda leaf: jnp.full((count, *leaf.shape), nothing, leaf.dtype), metric)
