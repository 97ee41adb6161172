"""One optimizer update: gradients summed over microbatches, then checked and applied by the optimizer, which clips them.

Each microbatch carries its tokens' weights in the whole minibatch's loss, so their gradients are summed. (Averaging
them, as gradient accumulation usually does, would divide the gradient by their number.)
"""

import math
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
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.stages import Lowered
from jaxtyping import Array, Bool, Float, PyTree

from dapo_jax.dapo.importance import importance_weights
from dapo_jax.dapo.losses import dapo_loss, kl_penalty
from dapo_jax.dapo.metrics import Max, Mean, Metric, token_mean
from dapo_jax.dapo.microbatch import Microbatch, microbatch_structs
from dapo_jax.parallel.sharding import by_row, replicated
from dapo_jax.parallel.together import Together
from dapo_jax.rewards.signatures import name_of
from dapo_jax.training.minibatch import Minibatch, Placing, Stack
from dapo_jax.training.old_logprobs import OldLogprobs, PolicyLogprobs, Weights
from dapo_jax.training.state import TrainState, state_shardings
from dapo_jax.training.sync_metrics import mismatch_metrics

Objective = Callable[..., tuple[Array, Mapping[str, Metric]]]
"""A function with the signature of `dapo_loss`: (logprobs, old_logprobs, advantages, mask, *, weights) -> (loss, metrics)."""


def check_objective(objective: Objective, *, rows: int, row_tokens: int) -> None:
    """Calls an objective once with shapes alone, so that a wrong one is refused before anything is sampled.

    Args:
        objective: the function.
        rows: the rows of a microbatch.
        row_tokens: the tokens of a row.

    Raises:
        ValueError: it raises, or it does not return a loss and metrics.
    """
    signature = "(logprobs, old_logprobs, advantages, mask, *, weights) -> (loss, metrics)"

    def call(values: Array, mask: Array) -> None:
        try:
            result = objective(values, values, values, mask, weights=values)
        except Exception as error:
            reason = f"raised {type(error).__name__}: {error}"
            raise ValueError(
                f"objective {name_of(objective)} {reason}; it is called as {signature}"
            ) from error
        if problem := _problem_of(result):
            raise ValueError(
                f"objective {name_of(objective)} returned {problem}; it must be a function {signature}"
            )

    values = jax.ShapeDtypeStruct((rows, row_tokens), jnp.float32)
    jax.eval_shape(call, values, jax.ShapeDtypeStruct(values.shape, jnp.bool_))


def _problem_of(result: Any) -> str | None:
    """Names an objective's result if it is not a loss and metrics; None if it is."""
    if not isinstance(result, tuple | list):
        return f"{_kind(result)} alone, not a loss and a dict of metrics: return loss, {{}}"
    if len(result) != 2:
        return f"{_kind(result)} of {len(result)}, not of a loss and a dict of metrics"
    loss, metrics = result
    is_float = isinstance(loss, float) or jnp.issubdtype(getattr(loss, "dtype", np.object_), jnp.floating)
    if not is_float or jnp.shape(loss) != ():
        return f"{_kind(loss)} as the loss, not a scalar of floats: add up weights * token_loss"
    if not isinstance(metrics, Mapping):
        return f"{_kind(metrics)} as the metrics, not a dict: return loss, {{}} without metrics"
    for name, metric in metrics.items():
        if not isinstance(metric, Mean | Max):
            return f"{_kind(metric)} as the metric {name!r}, not a dapo_jax.Mean(total, count) or dapo_jax.Max(value)"
        if any(jnp.shape(leaf) != () for leaf in jax.tree.leaves(metric)):
            return f"the metric {name!r} of arrays with more than one number, not of scalars: add them up"
    return None


def _kind(value: Any) -> str:
    """A type, of an array also its dtype and shape."""
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return f"an array {value.dtype}{list(value.shape)}"
    return "None" if value is None else f"a {type(value).__name__}"


@dataclass(frozen=True, kw_only=True)
class UpdateOptions:
    """The options of the update beyond its arrays."""

    temperature: float = 1.0
    logprob_chunk_vocab: int = 2048
    old_logprobs: str = "trainer"
    """trainer or sampler: see `OldLogprobs`."""
    correction: str = "none"
    """Importance weights of every step: one of `dapo_jax.dapo.importance.CORRECTIONS`."""
    importance_range: tuple[float, float] = (0.0, math.inf)
    """The smallest and the largest weight that is kept; of truncate the largest is the cap."""
    kl_coef: float = 0.0
    offload: bool = False
    """The optimizer's moments lie in the host's memory and come to the device only to be applied."""


Sums = tuple[nnx.State, Float[Array, ""]]
"""Gradient and loss of the microbatches so far."""


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
        frozen: nnx.State | None = None,
    ) -> None:
        """`params`, those that are trained, may be shapes alone; `optimizer` is one for a learning rate of 1, by which an update multiplies what it gives;
        `reference` are the reference policy's parameters in their place if `kl_coef` is above 0; `frozen` are the decoder's others, if it has adapters."""
        self._frozen = nnx.State({}) if frozen is None else frozen
        self._optimizer, self._objective, self._options = optimizer, objective, options or UpdateOptions()
        if (reference is None) != (self._options.kl_coef == 0.0):
            raise ValueError(
                f"kl_coef={self._options.kl_coef} {'needs' if reference is None else 'has no use for'} a reference policy"
            )
        placed = state_shardings(params, optimizer, mesh, offload=self._options.offload)
        self._shardings, self._whole = placed.params, replicated(mesh)
        self._moments = state_shardings(params, optimizer, mesh).opt_state
        self._rows = NamedSharding(mesh, PartitionSpec(None, *by_row(mesh).spec, "context"))
        self._placing = Placing(self._rows)
        self._logprobs = PolicyLogprobs(
            graph,
            temperature=self._options.temperature,
            chunk_vocab=self._options.logprob_chunk_vocab,
        )
        self._old = OldLogprobs(
            self._logprobs,
            source=self._options.old_logprobs,
            reference=reference,
            frozen=self._frozen,
            sharding=self._rows,
        )
        changed, sums = (placed, self._whole), (placed.params, self._whole)
        self._update = Together(jax.jit(self._update_program, donate_argnums=0, out_shardings=changed))
        self._nothing = Together(jax.jit(self._nothing_program, out_shardings=sums))
        self._add = Together(jax.jit(self._add_program, donate_argnums=1, out_shardings=(sums, self._whole)))
        self._apply = Together(jax.jit(self._apply_program, donate_argnums=0, out_shardings=changed))
        self._join = Together(jax.jit(_joined, out_shardings=self._whole))

    def prepare(self, state: TrainState, minibatches: Sequence[Sequence[Microbatch]]) -> list[Minibatch]:
        """Puts a step's microbatches on the mesh, with the log-probabilities that its updates compare with (`OldLogprobs`).

        Called before the first update of the step, with the weights that it samples by; groups that are carried were sampled by earlier ones.
        """
        return self._old.fill(state.params, self._placing.put(minibatches))

    def update(
        self, state: TrainState, minibatch: Minibatch, *, learning_rate: float, first: bool
    ) -> tuple[TrainState, dict[str, Metric]]:
        """One optimizer update over a prepared minibatch; `state` is donated.

        Args:
            state: parameters and moments.
            minibatch: one of what `prepare` gave.
            learning_rate: of this step.
            first: it is the step's first update, so the old policy is the policy itself.

        Returns:
            The new state (the old one if anything was not finite), and metrics for `to_scalars`. Those of `nonfinite/` are 1
            where something was not: for log-probabilities, advantages and loss a value for each microbatch, for the gradient
            one for each parameter in the order of `state.params`.
        """
        rate, is_first = np.float32(learning_rate), np.bool_(first)
        if len(minibatch) == 1:
            return self._update(state, self._frozen, *minibatch, rate, is_first)
        # A program for each shape, and what one of them needs is gone before the next.
        sums, measured = self._nothing(state.params), []
        for same_length in minibatch:
            sums, metrics = self._add((state.params, self._frozen), sums, same_length, is_first)
            measured.append(metrics)
        state, applied = self._apply(state, sums, rate)
        return state, {**self._join(*measured), **applied}

    def ratios(self, state: TrainState, minibatch: Minibatch, *, first: bool) -> list[Array]:
        """pi / pi_old of each token as `update` would take it now: for each stack [capacity, rows, seq]; 1 if `first`."""
        return self._old.ratios(state.params, minibatch, first=first)

    def lower_update(self, state: TrainState, *, capacity: int, rows: int, row_tokens: int) -> Lowered:
        """The program of `update` for `capacity` microbatches of one shape; `state` may be shapes with their places."""
        stack = self.stack_structs(capacity, rows, row_tokens)
        return self._update.lower(state, self._frozen, stack, *self._scalars())

    def lower_score(self, params: nnx.State, *, capacity: int, rows: int, row_tokens: int) -> Lowered:
        """The program with which `prepare` computes log-probabilities; `params` may be shapes with their places."""
        return self._old.lower(params, self.stack_structs(capacity, rows, row_tokens))

    def programs(
        self, state: TrainState, *, capacity: int, rows: int, lengths: Sequence[int]
    ) -> dict[str, Callable[[], Lowered]]:
        """All programs that an update runs, by name, and what lowers each; `state` may be shapes with their places.

        `update` is for microbatches of one shape. Where rows may have several `lengths`, an update of more than one of them is a sequence of
        programs: `update_begin`, then one for each length, of which the longest and the shortest are here (`update_add_longest`,
        `update_add_shortest`), then `update_apply`.

        Args:
            state: parameters and moments.
            capacity: of a stack of the longest rows; one of the shortest has a single microbatch.
            rows: of a microbatch.
            lengths: of rows, the longest first.
        """
        whole = {"capacity": capacity, "rows": rows, "row_tokens": lengths[0]}
        made: dict[str, Callable[[], Lowered]] = {"update": partial(self.lower_update, state, **whole)}
        if len(lengths) > 1:
            rate, first = self._scalars()
            sums = self.sums_structs(state)
            add = partial(self._add.lower, (state.params, self._frozen), sums)
            made |= {
                "update_begin": partial(self._nothing.lower, state.params),
                "update_add_longest": partial(add, self.stack_structs(**whole), first),
                "update_add_shortest": partial(add, self.stack_structs(1, rows, lengths[-1]), first),
                "update_apply": partial(self._apply.lower, state, sums, rate),
            }
        return made

    def sums_structs(self, state: TrainState) -> PyTree:
        """The gradient and the loss that lie on the devices between the programs of an update of several row lengths, as shapes with their places."""
        scalar = jax.ShapeDtypeStruct((), jnp.float32, sharding=self._whole)
        grads = jax.tree.map(
            lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
            state.params,
            self._shardings,
        )
        return grads, scalar

    def stack_structs(self, capacity: int, rows: int, row_tokens: int) -> Stack:
        """The microbatches of one length of an update, as shapes with their places."""
        count = jax.ShapeDtypeStruct((), jnp.int32, sharding=self._whole)
        return Stack(microbatch_structs((capacity, rows, row_tokens), self._rows), count)

    def _scalars(self) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
        """The learning rate, and whether an update is a step's first."""
        rate, first = (
            jax.ShapeDtypeStruct((), kind, sharding=self._whole) for kind in (jnp.float32, jnp.bool_)
        )
        return rate, first

    def _nothing_program(self, params: nnx.State) -> Sums:
        return jax.tree.map(jnp.zeros_like, params), jnp.zeros((), jnp.float32)

    def _add_program(
        self, weights: Weights, sums: Sums, stack: Stack, first: Bool[Array, ""]
    ) -> tuple[Sums, dict[str, Metric]]:
        """All microbatches of a shape in one program: each one's temporary arrays lie where the last one's did."""
        params, frozen = weights

        def loss(params: nnx.State, i: Array) -> tuple[Float[Array, ""], dict[str, Metric]]:
            return self._loss((params, frozen), microbatch=stack.at(i), first=first)

        def accumulate(i: Array, so_far: tuple[Sums, PyTree]) -> tuple[Sums, PyTree]:
            (grads, total), metrics = so_far
            (value, measured), new = jax.value_and_grad(loss, has_aux=True)(params, i)
            grads = lax.with_sharding_constraint(jax.tree.map(jnp.add, grads, new), self._shardings)
            # Kept apart until they are added on the host, in float64: float32 counts are inexact beyond 2^24 tokens.
            kept = jax.tree.map(lambda all_, one: all_.at[i].set(one), metrics, measured)
            return (grads, total + value), kept

        _, shapes = jax.eval_shape(loss, params, stack.count)
        blank = {name: _blank(metric, len(stack.microbatches.tokens)) for name, metric in shapes.items()}
        return lax.fori_loop(0, stack.count, accumulate, (sums, blank))

    def _update_program(
        self,
        state: TrainState,
        frozen: nnx.State,
        stack: Stack,
        learning_rate: Float[Array, ""],
        first: Bool[Array, ""],
    ) -> tuple[TrainState, dict[str, Metric]]:
        """Gradient and change in one."""
        nothing, total = self._nothing_program(state.params)
        start = (lax.with_sharding_constraint(nothing, self._shardings), total)
        sums, metrics = self._add_program((state.params, frozen), start, stack, first)
        state, applied = self._apply_program(state, sums, learning_rate)
        return state, {**metrics, **applied}

    def _loss(
        self, weights: Weights, microbatch: Microbatch, first: Bool[Array, ""]
    ) -> tuple[Float[Array, ""], dict[str, Metric]]:
        options, mask = self._options, microbatch.mask
        logprobs, entropy = self._logprobs(weights, microbatch)
        current, by_trainer = lax.stop_gradient(logprobs), options.old_logprobs == "trainer"
        old = jnp.where(first, current, microbatch.old_logprobs) if by_trainer else microbatch.old_logprobs
        of_tokens, of_weights = microbatch.weights, {}
        if options.correction != "none":
            low, high = options.importance_range
            ratios, of_weights = importance_weights(
                old,
                microbatch.sampler_logprobs,
                mask,
                microbatch.segment_ids,
                correction=options.correction,
                low=low,
                high=high,
            )
            of_tokens = of_tokens * ratios
        # Where the sampler's are the old ones, only the first update has the weights that sampled to compare with.
        compared, trainers = (mask, old) if by_trainer else (mask & first, current)
        loss, metrics = self._objective(logprobs, old, microbatch.advantages, mask, weights=of_tokens)
        metrics = {
            **metrics,
            **of_weights,
            "policy/entropy": token_mean(entropy, mask),
            **mismatch_metrics(trainers, microbatch.sampler_logprobs, compared),
        }
        if options.kl_coef:
            # Its mean is over the policy's tokens too, so those that another one has drawn weigh there what they weigh in the objective.
            penalty, kl_metrics = kl_penalty(logprobs, microbatch.ref_logprobs, mask, weights=of_tokens)
            loss, metrics = loss + options.kl_coef * penalty, {**metrics, **kl_metrics}
        scored = (current, old) if by_trainer else (current,)
        found = {
            "nonfinite/sampler_logprobs": _not_finite(mask, microbatch.sampler_logprobs),
            "nonfinite/advantages": _not_finite(mask, microbatch.advantages),
            "nonfinite/trainer_logprobs": _not_finite(mask, *scored),
            "nonfinite/loss": ~jnp.isfinite(loss),
        }
        # Clipping can hide what is not finite from the loss, and with old log-probabilities of the trainer's it never sees the
        # sampler's: made NaN, the loss says so to what applies the gradient.
        loss = jnp.where(jnp.stack(list(found.values())).any(), jnp.nan, loss)
        return loss, metrics | {name: Max(bad.astype(jnp.float32)) for name, bad in found.items()}

    def _apply_program(
        self, state: TrainState, sums: Sums, learning_rate: Float[Array, ""]
    ) -> tuple[TrainState, dict[str, Metric]]:
        grads, loss = sums
        if self._options.offload:
            state = replace(state, opt_state=jax.device_put(state.opt_state, self._moments))
        squares = [jnp.sum(leaf * leaf) for leaf in jax.tree.leaves(grads)]
        norm = jnp.sqrt(sum(squares))
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
            "nonfinite/gradient": Max((~jnp.isfinite(jnp.stack(squares))).astype(jnp.float32)),
        }


def _joined(*measured: dict[str, Metric]) -> dict[str, Metric]:
    """The values of every stack in one array for each metric."""
    return jax.tree.map(lambda *parts: jnp.concatenate(parts), *measured)


def _not_finite(mask: Array, *values: Array) -> Bool[Array, ""]:
    """True if one of the values is not finite where the mask is True."""
    return (mask & ~jnp.stack([jnp.isfinite(array) for array in values]).all(axis=0)).any()


def _blank(metric: Metric, count: int) -> Metric:
    """`count` metrics of the same shape that add nothing."""
    nothing = -jnp.inf if isinstance(metric, Max) else 0.0
    return jax.tree.map(lambda leaf: jnp.full((count, *leaf.shape), nothing, leaf.dtype), metric)
