"""One optimizer update: sums gradients over microbatches, checks that they are finite, clips them and applies the optimizer.

The weight of each token is relative to the whole minibatch, so the gradients of microbatches are summed. Averaging them, as gradient accumulation
usually does, would divide the gradient by the number of microbatches.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import lax
from jax.flatten_util import ravel_pytree
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.stages import Lowered
from jaxtyping import Array, Bool, Float, PyTree

from dapo_jax.dapo.centering import centering_term
from dapo_jax.dapo.corrections import drop_off_policy, importance_weights
from dapo_jax.dapo.distillation import teacher_advantages, teacher_divergence
from dapo_jax.dapo.losses import dapo_loss, kl_penalty
from dapo_jax.dapo.metrics import Max, Mean, Metric, token_mean
from dapo_jax.dapo.microbatch import Microbatch, blank_microbatch
from dapo_jax.dapo.objectives import ARRAYS, wanted
from dapo_jax.dapo.selections import SELECTIONS
from dapo_jax.dapo.tokens import Shapes
from dapo_jax.hints import nearest
from dapo_jax.models.decoder import in_tuples, is_apart
from dapo_jax.numerics.segments import looked_up
from dapo_jax.parallel.sharding import by_row, replicated
from dapo_jax.parallel.together import Together
from dapo_jax.rewards.sample import name_of
from dapo_jax.training.minibatch import Minibatch, MinibatchTransfer, Stack, on_host, with_array
from dapo_jax.training.routing_replay import recorded_experts, routing_metrics, without_recorded_experts
from dapo_jax.training.state import TrainState, state_shardings
from dapo_jax.training.update_metrics import change_metrics, mismatch_metrics

Model = tuple[nnx.GraphDef[Any], nnx.State, nnx.State]
"""Structure, trained and frozen parameters of a decoder. The frozen parameters are the base model if adapters are trained, and empty otherwise."""

Fixed = tuple[nnx.State, tuple[Model, ...]]
"""Arrays that an update does not change: the frozen parameters, and the teachers whose divergence is part of the loss."""

Objective = Callable[..., tuple[Array, Mapping[str, Metric]]]
"""A function with the signature of `dapo_loss`: (logprobs, old_logprobs, advantages, mask, *, weights, ...) -> (loss, metrics).

Keyword-only parameters without a default are arrays that the update provides (see `dapo_jax.dapo.objectives.ARRAYS`)."""


def trace_objective(objective: Objective, *, rows: int, row_tokens: int) -> None:
    """Traces an objective once, with the arrays that it requires, so that an invalid objective raises an error before sampling starts.

    Args:
        objective: the function to check.
        rows: number of rows in a microbatch.
        row_tokens: number of tokens in a row.

    Raises:
        ValueError: the objective requires an unknown array, raises an error, or does not return a loss and metrics.
    """
    name, arrays = f"objective {name_of(objective)}", sorted(wanted(objective) | {"weights"})
    signature = f"(logprobs, old_logprobs, advantages, mask, *, {', '.join(arrays)}) -> (loss, metrics)"
    if unknown := [array for array in arrays if array not in ARRAYS]:
        suggestion = nearest(unknown[0], ARRAYS, least=0.0)[0]
        raise ValueError(
            f"{name} requires the array {unknown[0]!r}. Did you mean {suggestion!r}? An update has the arrays {', '.join(ARRAYS)}. An option needs a "
            f"default. The signature is {signature}"
        )
    dtypes = {"segment_ids": jnp.int32, "positions": jnp.int32, "selected": jnp.bool_}

    def call(values: Array, mask: Array) -> None:
        others = {array: values.astype(dtypes.get(array, values.dtype)) for array in arrays}
        try:
            result = objective(values, values, values, mask, **others)
        except Exception as error:
            raise ValueError(
                f"{name} raised {type(error).__name__}: {error}. It is called with the signature {signature}"
            ) from error
        if problem := _invalid_result(result):
            raise ValueError(f"{name} returned {problem}. It must have the signature {signature}")

    values = jax.ShapeDtypeStruct((rows, row_tokens), jnp.float32)
    jax.eval_shape(call, values, jax.ShapeDtypeStruct(values.shape, jnp.bool_))


def _invalid_result(result: Any) -> str | None:
    """Describes an invalid result of an objective. Returns None if the result is a valid loss and metrics."""
    if not isinstance(result, tuple | list) or len(result) != 2:
        return f"{_kind(result)}, not two values; if there are no metrics, return loss, {{}}"
    loss, metrics = result
    is_float = isinstance(loss, float) or jnp.issubdtype(getattr(loss, "dtype", np.object_), jnp.floating)
    if not is_float or jnp.shape(loss) != ():
        return f"{_kind(loss)} as the loss, not a float scalar; return the sum of weights * token_loss"
    if not isinstance(metrics, Mapping):
        return f"{_kind(metrics)} as the metrics, not a dict"
    for name, metric in metrics.items():
        if not isinstance(metric, Mean | Max) or any(map(jnp.shape, jax.tree.leaves(metric))):
            return f"{_kind(metric)} as the metric {name!r}, not a dapo_jax.Mean(total, count) or dapo_jax.Max(value) of scalars"
    return None


def _kind(value: Any) -> str:
    """Describes the type of a value, including dtype and shape if it is an array."""
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return f"an array {value.dtype}{list(value.shape)}"
    return "None" if value is None else f"a {type(value).__name__}"


@dataclass(frozen=True, kw_only=True)
class UpdateOptions:
    """Options of an optimizer update."""

    temperature: float = 1.0
    """The sampling temperature, which is also used for the trainer's log-probabilities."""
    logprob_chunk_vocab: int = 2048
    """Number of vocabulary entries for which logits are computed at a time."""
    old_logprobs: str = "trainer"
    """Source of the old policy's log-probabilities. `trainer` recomputes them with the trained decoder. `sampler` uses the values recorded in sampling."""
    correction: str = "none"
    """Rule for importance weights, one of `dapo_jax.dapo.corrections.CORRECTIONS`."""
    importance_range: tuple[float, float] = (0.0, math.inf)
    """Bounds of the importance weights (see `importance_weights`)."""
    drop_off_policy: float | None = None
    """Drop responses with negative advantages that are further than this from the policy, in nats per token (see `dapo_jax.dapo.corrections`)."""
    select: str = "all"
    """Tokens of an update that enter the loss: `all`, or a selection in `dapo_jax.dapo.selections.SELECTIONS`."""
    select_options: tuple[tuple[str, Any], ...] = ()
    """Names and values of the selection's options."""
    kl_coef: float = 0.0
    kl_estimator: str = "k3"
    """Estimator of the KL penalty: `k3` or `k3_unbiased` (see `kl_penalty`)."""
    teacher_coef: float = 1.0
    """Factor of the teacher's advantages (see `teacher_advantages`), or of the divergence from the teacher."""
    teacher_kl: str = "sampled"
    """`sampled`: the teacher's log-probabilities become advantages. `full`: the divergence from the teacher over the whole vocabulary is part of the loss."""
    self_teacher: bool = False
    """The microbatches contain the log-probabilities under the policy with the teacher's prompt."""
    offload: bool = False
    """Keep the optimizer moments in host memory, and copy them to the device for each update."""
    recorded: Shapes = ()
    """The optional values that the sampler records for each token. If it records heads, the update centers the objective (see `dapo_jax.dapo.centering`)."""


Sums = tuple[nnx.State, Float[Array, ""]]
"""Running sums of the gradients and the loss over microbatches."""


class Updater:
    """Runs optimizer updates with jitted programs, for one decoder, optimizer and objective."""

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
        teacher: Model | None = None,
    ) -> None:
        """Prepares the programs. They are compiled when they are first used.

        Args:
            graph, params: structure of the decoder, and the trained parameters or their shapes.
            optimizer: an optimizer with learning rate 1, for example from `make_optimizer`. The change is multiplied by the step's learning rate.
            mesh, objective, options: mesh on which the updates run, loss function, and other options.
            reference: parameters of the reference policy. Required if and only if `kl_coef` is not 0 or the objective requires `ref_logprobs`.
            frozen: parameters of the base model, if `params` are adapters.
            teacher: a teacher with the same vocabulary, sharded over the same mesh.

        Raises:
            ValueError: `reference` is missing although it is required, or is given although it is not.
        """
        self._graph, self._frozen = graph, nnx.State({}) if frozen is None else frozen
        self._optimizer, self._objective, self._options = optimizer, objective, options or UpdateOptions()
        self._reference = None if reference is None else self.model(reference)
        diverges = teacher is not None and self._options.teacher_kl == "full"
        self._fixed: Fixed = self._frozen, ((teacher,) if diverges else ())
        self._teacher = None if diverges else teacher
        self._arrays = wanted(objective) | {"weights"}
        if (reference is not None) != (self._options.kl_coef != 0.0 or "ref_logprobs" in self._arrays):
            raise ValueError(
                f"kl_coef={self._options.kl_coef} with an objective that requires {sorted(self._arrays)} "
                f"{'needs' if reference is None else 'does not use'} a reference policy"
            )
        selection = SELECTIONS.get(self._options.select)
        settings = dict(self._options.select_options)
        self._select: Callable[..., Array] | None = selection and partial(selection, **settings)
        self._scores_entropy = selection is not None and "entropy" in wanted(selection)
        placed = state_shardings(params, optimizer, mesh, offload=self._options.offload)
        self._shardings, self._whole = placed.params, replicated(mesh)
        self._moments = state_shardings(params, optimizer, mesh).opt_state
        self._rows = NamedSharding(mesh, PartitionSpec(None, *by_row(mesh).spec, "context"))
        self._placing = MinibatchTransfer(self._rows)
        self._score = Together(jax.jit(self._score_program, out_shardings=self._rows))
        self._choose = Together(jax.jit(self._select_program, out_shardings=self._rows))
        changed, sums = (placed, self._whole), (placed.params, self._whole)
        begin = jax.jit(self._nothing_program, out_shardings=sums)
        self._nothing, self._sums = Together(begin), begin.eval_shape
        self._add = Together(jax.jit(self._add_program, donate_argnums=1, out_shardings=(sums, self._whole)))
        self._apply = Together(jax.jit(self._apply_program, donate_argnums=0, out_shardings=changed))
        self._join = Together(jax.jit(_joined, out_shardings=self._whole))

    def prepare(self, state: TrainState, minibatches: Sequence[Sequence[Microbatch]]) -> list[Minibatch]:
        """Transfers a step's microbatches to the mesh, selects tokens, and fills in the log-probabilities under the old policy, the reference policy and the teacher.

        Must be called before the first update of a step, because the old policy is the policy at the start of the step.
        """
        filled, policy = self._placing.put(minibatches), self.model(state.params)
        filled = [with_array(m, "old_head_logprobs", _sampler_heads) for m in filled]
        if self._select is not None:
            filled = [self._selected(m, policy) for m in filled]
        if self._options.old_logprobs == "sampler":
            recorded = attrgetter("microbatches.sampler_logprobs")
            filled = [with_array(m, "old_logprobs", recorded) for m in filled]
        elif self._select is None:
            # In the first update, the old policy is the current policy, so `_loss` uses the log-probabilities that it computes anyway.
            filled[1:] = [
                tuple(self._with_old(stack, self._score(policy, stack)) for stack in m) for m in filled[1:]
            ]
        for name, model in (("ref_logprobs", self._reference), ("teacher_logprobs", self._teacher)):
            if model is not None:
                filled = [with_array(m, name, self._scores(model)) for m in filled]
        return filled

    def model(self, params: nnx.State) -> Model:
        """Returns the decoder with `params` as its trained parameters."""
        return self._graph, params, self._frozen

    def _scores(self, model: Model) -> Callable[[Stack], Array]:
        """Returns the function that computes log-probabilities under a model that is not trained, and so chooses its experts itself."""
        return lambda stack: self._score(model, without_recorded_experts(stack))[0]

    def _selected(self, minibatch: Minibatch, policy: Model) -> Minibatch:
        """Fills in the log-probabilities of an update under the policy, and the selected tokens."""
        scores = [self._score(policy, stack) for stack in minibatch]
        stacks = zip(minibatch, scores, self._choose(minibatch, scores), strict=True)
        return tuple(
            self._with_old(stack, score, selected=selected, noise=None) for stack, score, selected in stacks
        )

    def _with_old(self, stack: Stack, score: tuple[Array, ...], **others: Any) -> Stack:
        """Fills in the log-probabilities of tokens and heads under the old policy, and `others`. `score` is the result of `_score_program`."""
        if _sampler_heads(stack) is not None and self._options.old_logprobs == "trainer":
            others["old_head_logprobs"] = score[1]
        return stack.with_arrays(old_logprobs=score[0], **others)

    def _select_program(self, minibatch: Minibatch, scores: Sequence[tuple[Array, ...]]) -> list[Array]:
        """Returns the selected tokens of each stack. The selection gets the tokens of all stacks in one vector."""
        assert self._select is not None
        stacks = [
            {**stack.microbatches.arrays, "logprobs": score[0], "entropy": score[-1]}
            for stack, score in zip(minibatch, scores, strict=True)
        ]
        whole, unravel = ravel_pytree([stack["mask"] for stack in stacks])
        arrays = {name: ravel_pytree([stack[name] for stack in stacks])[0] for name in wanted(self._select)}
        return unravel(self._select(whole, **arrays))

    def update(
        self, state: TrainState, minibatch: Minibatch, *, learning_rate: float, first: bool
    ) -> tuple[TrainState, dict[str, Metric]]:
        """Runs one optimizer update on a prepared minibatch. `state` is donated.

        Args:
            state: parameters and optimizer moments.
            minibatch: a minibatch that `prepare` returned.
            learning_rate: learning rate of this step.
            first: True for the first update of a step, in which the old policy is the current policy.

        Returns:
            The new state (unchanged if a value was not finite), and metrics for `to_scalars`. The metrics `nonfinite/*` are 1 where a value
            was not finite. `nonfinite/gradient` has one entry per array in `state.params`, and the others have one entry per microbatch.
        """
        rate, is_first = np.float32(learning_rate), np.bool_(first)
        # There is one program per stack shape. Its temporary arrays are freed before the next program runs. Offloaded moments are on the device only in the last.
        sums, measured = self._nothing(state.params), []
        for same_length in minibatch:
            sums, metrics = self._add((state.params, self._fixed), sums, same_length, is_first)
            measured.append(metrics)
        state, applied = self._apply(state, sums, rate)
        return state, {**self._join(*measured), **applied}

    def ratios(self, state: TrainState, minibatch: Minibatch, *, first: bool) -> list[Array]:
        """Returns the ratio pi / pi_old that `update` would now compute for each token, as one array [capacity, rows, seq] per stack."""
        if first and self._options.old_logprobs == "trainer":
            return [jnp.ones_like(stack.microbatches.old_logprobs) for stack in minibatch]
        score = partial(self._score, self.model(state.params))
        return [jnp.exp(score(stack)[0] - stack.microbatches.old_logprobs) for stack in minibatch]

    def logprobs(self, state: TrainState, microbatches: Sequence[Microbatch]) -> np.ndarray:
        """Returns the log-probabilities of the tokens under the policy, [microbatches, rows, seq]. All microbatches must have the same shape."""
        [[stack]] = self._placing.put([microbatches])
        scores: np.ndarray = on_host(self._score(self.model(state.params), stack)[0])
        return scores[: len(microbatches)]

    def lower_score(self, model: Model, *, capacity: int, rows: int, row_tokens: int) -> Lowered:
        """Lowers the program that `prepare` uses to compute log-probabilities. The parameters may be shapes with shardings."""
        stack = self.stack_structs(capacity, rows, row_tokens)
        return self._score.lower(model, stack if model[0] is self._graph else without_recorded_experts(stack))

    def programs(
        self, state: TrainState, *, capacity: int, rows: int, lengths: Sequence[int]
    ) -> dict[str, Callable[[], Lowered]]:
        """Returns the programs that an update runs, as a dict from each program's name to a function that lowers it.

        An update is a sequence of programs: `update_begin`, one program per row length, and `update_apply`. Of the programs per length, only
        `update_add_longest` and `update_add_shortest` are returned.

        Args:
            state: parameters and optimizer moments, or only their shapes with shardings.
            capacity: capacity of the stack with the longest rows. The stack with the shortest rows has capacity 1.
            rows: number of rows in a microbatch.
            lengths: row lengths, longest first.
        """
        whole = self.stack_structs(capacity, rows, lengths[0])
        scalar = partial(jax.ShapeDtypeStruct, (), sharding=self._whole)
        rate, first = scalar(jnp.float32), scalar(jnp.bool_)
        sums = self.sums_structs(state)
        add = partial(self._add.lower, (state.params, self._fixed), sums)
        programs = {
            "update_begin": partial(self._nothing.lower, state.params),
            "update_add_longest": partial(add, whole, first),
        }
        if len(lengths) > 1:
            shortest = self.stack_structs(1, rows, lengths[-1])
            programs["update_add_shortest"] = partial(add, shortest, first)
        return programs | {"update_apply": partial(self._apply.lower, state, sums, rate)}

    def sums_structs(self, state: TrainState) -> PyTree:
        """Returns the shapes and shardings of the running sums that are passed between the programs of an update."""
        return self._sums(state.params)

    def stack_structs(self, capacity: int, rows: int, row_tokens: int) -> Stack:
        """Returns the shapes and shardings of a stack."""
        count = jax.ShapeDtypeStruct((), jnp.int32, sharding=self._whole)
        shape = (capacity, rows, row_tokens)
        taught = self._teacher is not None or self._options.self_teacher
        optional = {"teacher_logprobs": taught, "selected": self._select is not None}
        also = [name for name, needed in optional.items() if needed]
        arrays = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct((*shape, *leaf.shape), leaf.dtype, sharding=self._rows),
            blank_microbatch((), *also, recorded=self._options.recorded),
        )
        heads = arrays.recorded.get("head_logprobs")
        return Stack(replace(arrays, old_head_logprobs=heads), count)

    def _logprobs(self, models: tuple[Model, ...], microbatch: Microbatch) -> tuple[Array, ...]:
        """Returns the log-probability of each token under the first model given the tokens before it, the entropy, and the divergence from each other model.

        All have shape [rows, seq]. Column 0 has no meaningful values. If the sampler recorded heads, their log-probabilities [rows, seq, heads] come second. If the first
        model has experts, two more arrays follow: the number of layers in which the router's choice differs from the record, [rows, seq], and each device's number of tokens per expert, for `routing_metrics`.
        """

        def program(models: tuple[Model, ...], m: Microbatch) -> tuple[Array, ...]:
            before, ends, counts = _hidden(models[0], m)
            teachers = [_hidden(model, replace(m, recorded={}))[:2] for model in models[1:]]
            heads = m.recorded.get("head_ids")
            scores = ends.layout.logprobs(
                before,
                ends.unembedding(),
                m.tokens.reshape(-1),
                vocab_size=ends.config.vocab_size,
                temperature=self._options.temperature,
                chunk_vocab=self._options.logprob_chunk_vocab,
                dtype=ends.compute_dtype,
                teachers=[(states, layers.unembedding()) for states, layers in teachers],
                caps=[layers.config.logit_cap for layers in (ends, *(layers for _, layers in teachers))],
                heads=None if heads is None else heads.reshape(m.tokens.size, -1),
            )
            return *(score.reshape(*m.tokens.shape, *score.shape[1:]) for score in scores), *counts

        return _decoder(models[0]).ends.layout.shard(program)(models, microbatch)

    def _score_program(self, model: Model, stack: Stack) -> tuple[Array, ...]:
        """Computes the log-probabilities of all microbatches in a stack, and the entropy if the selection requires it, [capacity, rows, seq]. If the sampler recorded
        heads, their log-probabilities [capacity, rows, seq, heads] come second."""

        def score(i: Array, scores: tuple[Array, ...]) -> tuple[Array, ...]:
            new = self._logprobs((model,), stack.at(i))[: len(scores)]
            return jax.tree.map(partial(lax.dynamic_update_index_in_dim, index=i, axis=0), scores, new)

        blank, heads = jnp.zeros_like(stack.microbatches.old_logprobs), _sampler_heads(stack)
        of_heads = () if heads is None else (jnp.zeros_like(heads),)
        return lax.fori_loop(0, stack.count, score, (blank, *of_heads, *[blank] * self._scores_entropy))

    def _nothing_program(self, params: nnx.State) -> Sums:
        return jax.tree.map(jnp.zeros_like, params), jnp.zeros((), jnp.float32)

    def _add_program(
        self, weights: tuple[nnx.State, Fixed], sums: Sums, stack: Stack, first: Bool[Array, ""]
    ) -> tuple[Sums, dict[str, Metric]]:
        """Adds the gradients and losses of all microbatches in a stack to `sums`, in one loop that reuses the memory of temporary arrays."""
        params, (frozen, teachers) = weights

        def loss(params: nnx.State, i: Array) -> tuple[Float[Array, ""], dict[str, Metric]]:
            return self._loss(((self._graph, params, frozen), *teachers), stack.at(i), first)

        def accumulate(i: Array, so_far: tuple[Sums, PyTree]) -> tuple[Sums, PyTree]:
            (grads, total), metrics = so_far
            (value, measured), new = jax.value_and_grad(loss, has_aux=True)(params, i)
            grads = lax.with_sharding_constraint(jax.tree.map(jnp.add, grads, new), self._shardings)
            # Metrics are stored per microbatch and added on the host in float64, because float32 counts are inexact beyond 2^24.
            kept = jax.tree.map(lambda values, value: values.at[i].set(value), metrics, measured)
            return (grads, total + value), kept

        _, shapes = jax.eval_shape(loss, params, stack.count)
        blank = {name: _neutral(metric, len(stack.microbatches.tokens)) for name, metric in shapes.items()}
        return lax.fori_loop(0, stack.count, accumulate, (sums, blank))

    def _loss(
        self, models: tuple[Model, ...], microbatch: Microbatch, first: Bool[Array, ""]
    ) -> tuple[Float[Array, ""], dict[str, Metric]]:
        options, mask, sampler = self._options, microbatch.mask, microbatch.sampler_logprobs
        logprobs, *others = self._logprobs(models, microbatch)
        heads = None if microbatch.old_head_logprobs is None else others.pop(0)
        entropy, *others = others
        divergences, counts = others[: len(models) - 1], others[len(models) - 1 :]
        current, by_trainer = lax.stop_gradient(logprobs), options.old_logprobs == "trainer"
        old = jnp.where(first, current, microbatch.old_logprobs) if by_trainer else microbatch.old_logprobs
        advantages, metrics = microbatch.advantages, dict[str, Metric]()
        if (teacher := microbatch.teacher_logprobs) is not None:
            coef = options.teacher_coef
            advantages, measured = teacher_advantages(advantages, teacher, old, mask, coef=coef)
            metrics |= measured
        token_weights, objective_weights, measured = self._weights(microbatch, current, old, advantages)
        metrics |= measured
        # If the old log-probabilities are the sampler's, they are compared with the trainer's in the first update only, before the weights change.
        compared, trainers = (mask, old) if by_trainer else (mask & first, current)
        given = microbatch, logprobs, old, advantages
        loss, measured = self._of_tokens(*given, weights=objective_weights, entropy=entropy)
        metrics = {**measured, **metrics, "policy/entropy": token_mean(entropy, mask)}
        if heads is not None:
            term, measured = self._centering(microbatch, heads, entropy, first)
            # The value of the term has no meaning, so the loss has its gradient only.
            loss, metrics = loss + (term - lax.stop_gradient(term)), metrics | measured
        metrics |= mismatch_metrics(trainers, sampler, compared, advantages, first)
        if counts:
            config = _decoder(models[0]).ends.config
            sizes = {"layers": len(config.routed), "experts": config.experts.count}
            flipped, load = counts
            metrics |= routing_metrics(flipped, load, microbatch, **sizes)
        if options.kl_coef:
            # Like the objective, the KL estimate is an expectation over tokens sampled by the policy, so it needs the same importance weights. It has
            # no advantage, so `drop_off_policy` and `select` do not apply to it.
            estimate = partial(kl_penalty, estimator=options.kl_estimator, old_logprobs=old)
            penalty, measured = estimate(logprobs, microbatch.ref_logprobs, mask, weights=token_weights)
            loss, metrics = loss + options.kl_coef * penalty, metrics | measured
        for divergence in divergences:
            coef = options.teacher_coef
            penalty, measured = teacher_divergence(divergence, mask, weights=token_weights, coef=coef)
            loss, metrics = loss + penalty, metrics | measured
        scored = (current, old) if by_trainer else (current,)
        nonfinite = {
            "nonfinite/sampler_logprobs": _not_finite(mask, sampler),
            "nonfinite/advantages": _not_finite(mask, advantages),
            "nonfinite/trainer_logprobs": _not_finite(mask, *scored),
            "nonfinite/loss": ~jnp.isfinite(loss),
        }
        # A non-finite input need not make the loss non-finite: clipping can hide it, and the loss may not depend on the sampler's log-probabilities.
        # The loss is therefore set to NaN, so that `_apply_program` skips the update.
        loss = jnp.where(jnp.stack(list(nonfinite.values())).any(), jnp.nan, loss)
        return loss, metrics | {name: Max(bad.astype(jnp.float32)) for name, bad in nonfinite.items()}

    def _weights(
        self, microbatch: Microbatch, current: Array, old: Array, advantages: Array
    ) -> tuple[Array, Array, dict[str, Metric]]:
        """Returns the weights of tokens with the correction, the weights of the objective, which also exclude tokens, and metrics."""
        options, mask, sampler = self._options, microbatch.mask, microbatch.sampler_logprobs
        token_weights, metrics = microbatch.weights, dict[str, Metric]()
        if options.correction != "none":
            low, high = options.importance_range
            rule = partial(importance_weights, correction=options.correction, low=low, high=high)
            ratios, measured = rule(old, sampler, mask, microbatch.segment_ids)
            token_weights, metrics = token_weights * ratios, metrics | measured
        objective_weights = token_weights
        if options.drop_off_policy is not None:
            drop = partial(drop_off_policy, delta=options.drop_off_policy)
            kept, measured = drop(current, sampler, advantages, mask, microbatch.segment_ids)
            objective_weights, metrics = token_weights * kept, metrics | measured
        if self._select is not None:
            selected = microbatch.selected.astype(jnp.float32)
            metrics["policy/selected_frac"] = token_mean(selected, mask)
            if "selected" not in self._arrays:
                objective_weights = objective_weights * selected
        return token_weights, objective_weights, metrics

    def _of_tokens(
        self, microbatch: Microbatch, logprobs: Array, old: Array, advantages: Array, **computed: Array
    ) -> tuple[Float[Array, ""], Mapping[str, Metric]]:
        """Calls the objective with the arrays of a microbatch, and with `computed` arrays."""
        provided = {**microbatch.arrays, **computed}
        arrays = {name: provided[name] for name in self._arrays}
        return self._objective(logprobs, old, advantages, microbatch.mask, **arrays)

    def _centering(
        self, microbatch: Microbatch, heads: Array, entropy: Array, first: Bool[Array, ""]
    ) -> tuple[Float[Array, ""], dict[str, Metric]]:
        """Returns the term that centers the objective, and its metrics. `heads` are the log-probabilities of the recorded heads under the policy.

        The objective is called with all tokens of the heads, and the tails, in the place of the sampled tokens."""
        old = microbatch.old_head_logprobs
        if self._options.old_logprobs == "trainer":
            old = jnp.where(first, lax.stop_gradient(heads), old)
        repeated = partial(jnp.repeat, repeats=heads.shape[-1] + 1, axis=1)
        same = jax.tree.map(repeated, replace(microbatch, recorded={}, old_head_logprobs=None))

        def objective(*three: Array) -> Array:
            now, before, sampler = (each.reshape(same.mask.shape) for each in three)
            m = replace(same, sampler_logprobs=sampler)
            _, weights, _ = self._weights(m, now, before, m.advantages)
            computed = {"weights": weights, "entropy": repeated(entropy)}
            return self._of_tokens(m, now, before, m.advantages, **computed)[0]

        scale = microbatch.weights * microbatch.advantages
        if self._select is not None:
            scale = jnp.where(microbatch.selected, scale, 0.0)
        recorded = microbatch.recorded["head_logprobs"]
        return centering_term(objective, heads, old, recorded, microbatch.mask, scale)

    def _apply_program(
        self, state: TrainState, sums: Sums, learning_rate: Float[Array, ""]
    ) -> tuple[TrainState, dict[str, Metric]]:
        grads, loss = sums
        if self._options.offload:
            state = replace(state, opt_state=jax.device_put(state.opt_state, self._moments))
        squares = [jnp.sum(leaf * leaf) for leaf in jax.tree.leaves(grads)]
        norm = jnp.sqrt(sum(squares))
        finite = jnp.isfinite(norm) & jnp.isfinite(loss)
        with jax.numpy_dtype_promotion("standard"):  # optax mixes dtypes: it raises floats to integer powers
            changes, opt_state = self._optimizer.update(grads, state.opt_state, state.params)
        params = jax.tree.map(lambda leaf, change: leaf + learning_rate * change, state.params, changes)
        new = TrainState(params, opt_state)
        # A non-finite update changes neither weights nor moments.
        kept = jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, state)
        one = jnp.ones((), jnp.float32)
        stored = _decoder(self.model(state.params)).ends.compute_dtype
        applied = {
            **change_metrics(state.params, kept.params, changes, learning_rate, stored=stored),
            "update/loss": Mean(loss, one),
            "update/grad_norm": Mean(norm, one),
        }  # a skipped update does not count in these means
        return kept, {
            **jax.tree.map(lambda leaf: jnp.where(finite, leaf, 0.0), applied),
            "update/skipped_frac": Mean(1.0 - finite.astype(jnp.float32), one),
            "nonfinite/gradient": Max((~jnp.isfinite(jnp.stack(squares))).astype(jnp.float32)),
        }


def _decoder(model: Model) -> Any:
    graph, trained, frozen = model
    return nnx.merge(graph, trained, in_tuples(frozen) if frozen and is_apart(frozen) else frozen)


def _hidden(model: Model, m: Microbatch) -> tuple[Array, Any, tuple[Array, ...]]:
    """Returns the hidden states [tokens, embed] that predict the tokens, the layers before and after the blocks, and the counts of experts, if there are experts."""
    decoder = _decoder(model)
    hidden = decoder(m.tokens, m.positions, m.segment_ids, m.prefix_ids, recorded_experts(m))
    counts: tuple[Array, ...] = ()
    if decoder.ends.config.experts is not None:
        hidden, routing = hidden
        counts = tuple(routing[name].astype(jnp.float32) for name in ("flipped", "load"))
    return looked_up(hidden, m.previous).reshape(-1, hidden.shape[-1]), decoder.ends, counts


def _sampler_heads(stack: Stack) -> Array | None:
    """Returns the log-probabilities of the heads that the sampler recorded, or None if it recorded none."""
    return stack.microbatches.recorded.get("head_logprobs")


def _joined(*measured: dict[str, Metric]) -> dict[str, Metric]:
    """Concatenates the values of all stacks, for each metric."""
    return jax.tree.map(lambda *values: jnp.concatenate(values), *measured)


def _not_finite(mask: Array, *values: Array) -> Bool[Array, ""]:
    """Returns whether any value is not finite where the mask is True."""
    return (mask & ~jnp.stack([jnp.isfinite(array) for array in values]).all(axis=0)).any()


def _neutral(metric: Metric, count: int) -> Metric:
    """Returns `count` neutral elements of a metric: -inf for a maximum, 0 for a mean."""
    nothing = -jnp.inf if isinstance(metric, Max) else 0.0
    return jax.tree.map(lambda leaf: jnp.full((count, *leaf.shape), nothing, leaf.dtype), metric)
