"""One optimizer update: gradients summed over microbatches, then clipped, checked and applied.

Each microbatch carries its tokens' weights in the whole minibatch's loss, so their gradients are summed. (Averaging
them, as gradient accumulation usually does, would divide the gradient by their number.)
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import lax
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float

from dapo_jax.batching import put
from dapo_jax.logprobs import chunked_logprobs
from dapo_jax.losses import dapo_loss, kl_penalty
from dapo_jax.metrics import Max, Mean, Metric
from dapo_jax.parallel.sharding import by_row, replicated
from dapo_jax.rollouts import Microbatch
from dapo_jax.training.state import TrainState, state_shardings

Objective = Callable[..., tuple[Array, Mapping[str, Metric]]]
"""A function with the signature of `dapo_loss`: (logprobs, old_logprobs, advantages, mask, *, weights) -> (loss, metrics)."""


@dataclass(frozen=True, kw_only=True)
class UpdateOptions:
    """What the update needs to know beyond its arrays."""

    temperature: float = 1.0
    logprob_chunk_tokens: int = 1024
    old_logprobs: str = "trainer"
    """trainer or sampler: see `Updater.update`."""
    importance_cap: float | None = None
    kl_coef: float = 0.0


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
        self._rows = by_row(mesh)
        placed, whole = state_shardings(params, optimizer, mesh), replicated(mesh)
        self._score = jax.jit(self._score_program, out_shardings=self._rows)
        self._zeros = jax.jit(lambda tree: jax.tree.map(jnp.zeros_like, tree), out_shardings=placed.params)
        self._accumulate = jax.jit(
            self._accumulate_program, donate_argnums=1, out_shardings=(placed.params, whole, whole)
        )
        self._apply = jax.jit(self._apply_program, donate_argnums=0, out_shardings=(placed, whole))

    def prepare(
        self, state: TrainState, minibatches: Sequence[Sequence[Microbatch]]
    ) -> list[list[Microbatch]]:
        """Puts a step's microbatches on the mesh and fills in the log-probabilities that the update compares with.

        Called with the weights that sampled, before the first update. `old_logprobs: trainer` recomputes the old
        log-probabilities with the function the update uses; the first minibatch needs none, its old policy is the
        policy itself. The reference policy's are computed only where there is one.
        """
        placed = [[put(microbatch, self._rows) for microbatch in minibatch] for minibatch in minibatches]
        if self._options.old_logprobs == "sampler":
            placed = [
                [replace(m, old_logprobs=m.sampler_logprobs) for m in minibatch] for minibatch in placed
            ]
        else:
            placed[1:] = [
                [replace(m, old_logprobs=self._score(state.params, m)) for m in minibatch]
                for minibatch in placed[1:]
            ]
        if self._reference is None:
            return placed
        reference = self._reference
        return [
            [replace(m, ref_logprobs=self._score(reference, m)) for m in minibatch] for minibatch in placed
        ]

    def update(
        self, state: TrainState, minibatch: Sequence[Microbatch], *, learning_rate: float, first: bool
    ) -> tuple[TrainState, list[dict[str, Metric]]]:
        """One optimizer update over a prepared minibatch; `state` is donated.

        Args:
            state: parameters and moments.
            minibatch: its microbatches, from `prepare`.
            learning_rate: of this step.
            first: no update has happened since sampling, so the old policy is the policy itself.

        Returns:
            The new state (the old one if loss or gradient was not finite), and metric dicts to be added up.
        """
        grads, loss = self._zeros(state.params), jnp.zeros((), jnp.float32)
        metrics: list[dict[str, Metric]] = []
        for microbatch in minibatch:
            grads, part, measured = self._accumulate(state.params, grads, microbatch, np.bool_(first))
            loss = loss + part
            metrics.append(measured)
        state, applied = self._apply(state, grads, loss, np.float32(learning_rate))
        # Update metrics have other names than microbatch metrics: merged into the last one of these.
        metrics[-1] = {**metrics[-1], **applied}
        metrics[:-1] = [{**measured, **_blank(applied)} for measured in metrics[:-1]]
        return state, metrics

    def _logprobs(self, params: nnx.State, microbatch: Microbatch) -> tuple[Array, Array]:
        """Log-probability and entropy [rows, seq] of each token given the ones before it; column 0 is 0."""
        decoder = nnx.merge(self._graph, params)
        hidden = decoder(microbatch.tokens, microbatch.positions, microbatch.segment_ids)
        rows, seq = microbatch.tokens.shape
        # The state at t - 1 predicts the token at t. The last column predicts nothing: it is rolled to the front.
        targets = jnp.roll(microbatch.tokens, -1, axis=1)
        logprobs, entropy = chunked_logprobs(
            hidden.reshape(rows * seq, -1),
            decoder.ends.unembedding(),
            targets.reshape(-1),
            temperature=self._options.temperature,
            chunk_tokens=min(self._options.logprob_chunk_tokens, rows * seq),
            compute_dtype=decoder.ends.compute_dtype,
        )

        def back(values: Array) -> Array:
            return jnp.roll(values.reshape(rows, seq), 1, axis=1).at[:, 0].set(0.0)

        return back(logprobs), back(entropy)

    def _score_program(self, params: nnx.State, microbatch: Microbatch) -> Array:
        return self._logprobs(params, microbatch)[0]

    def _accumulate_program(
        self, params: nnx.State, grads: nnx.State, microbatch: Microbatch, first: Bool[Array, ""]
    ) -> tuple[nnx.State, Float[Array, ""], dict[str, Metric]]:
        loss = partial(self._loss, microbatch=microbatch, first=first)
        (value, metrics), new = jax.value_and_grad(loss, has_aux=True)(params)
        return jax.tree.map(jnp.add, grads, new), value, metrics

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

    def _apply_program(
        self, state: TrainState, grads: nnx.State, loss: Float[Array, ""], learning_rate: Float[Array, ""]
    ) -> tuple[TrainState, dict[str, Metric]]:
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


def _blank(metrics: Mapping[str, Metric]) -> dict[str, Metric]:
    """Metrics of the same names that add nothing."""
    return {name: Mean(np.float32(0.0), np.float32(0.0)) for name in metrics}
