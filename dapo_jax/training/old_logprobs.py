"""Log-probabilities under the trained policy, and the old log-probabilities of its importance ratio: recomputed by the trainer, or recorded by the sampler."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import NamedSharding
from jax.stages import Lowered
from jaxtyping import Array, Float

from dapo_jax.dapo.microbatch import Microbatch
from dapo_jax.models.decoder import is_apart, unstacked
from dapo_jax.parallel.together import Together
from dapo_jax.training.minibatch import Minibatch, Stack, with_array

Weights = tuple[nnx.State, nnx.State]
"""Trained parameters and frozen ones: the base model of adapters, otherwise none."""


class PolicyLogprobs:
    """Computes the log-probability of every token of a microbatch. The update differentiates it; `OldLogprobs` calls it."""

    def __init__(self, graph: nnx.GraphDef[Any], *, temperature: float, chunk_vocab: int) -> None:
        """`temperature` is the sampling temperature; logits are computed for `chunk_vocab` entries of the vocabulary at a time."""
        self._graph, self._temperature, self._chunk_vocab = graph, temperature, chunk_vocab

    def __call__(self, weights: Weights, microbatch: Microbatch) -> tuple[Array, Array]:
        """Returns log-probability and entropy [rows, seq] of each token given the tokens before it. The first column has no meaning."""

        def program(weights: Weights, m: Microbatch) -> tuple[Array, Array]:
            decoder = self._decoder(weights)
            hidden = decoder(m.tokens, m.positions, m.segment_ids, m.prefix_ids)
            before = jnp.take_along_axis(hidden, m.previous[..., None], axis=1)
            logprobs, entropy = decoder.ends.layout.logprobs(
                before.reshape(-1, hidden.shape[-1]),
                decoder.ends.unembedding(),
                m.tokens.reshape(-1),
                vocab_size=decoder.ends.config.vocab_size,
                temperature=self._temperature,
                chunk_vocab=self._chunk_vocab,
                dtype=decoder.ends.compute_dtype,
            )
            return logprobs.reshape(m.tokens.shape), entropy.reshape(m.tokens.shape)

        return self._decoder(weights).ends.layout.shard(program)(weights, microbatch)

    def _decoder(self, weights: Weights) -> Any:
        trained, frozen = weights
        if frozen and is_apart(frozen):
            trained = unstacked(trained)
        return nnx.merge(self._graph, trained, frozen)


class OldLogprobs:
    """Fills in the old and reference log-probabilities of a step's minibatches."""

    def __init__(
        self,
        logprobs: PolicyLogprobs,
        *,
        source: str,
        reference: nnx.State | None,
        frozen: nnx.State,
        sharding: NamedSharding,
    ) -> None:
        """Compiles nothing yet.

        Args:
            logprobs: function that the update uses.
            source: `trainer` recomputes the old log-probabilities with this function; `sampler` uses the recorded ones.
            reference: parameters of the reference policy, if there is one.
            frozen: parameters that are not trained.
            sharding: sharding of arrays [capacity, rows, seq].
        """
        self._logprobs, self._source = logprobs, source
        self._reference, self._frozen = reference, frozen
        self._score = Together(jax.jit(self._score_program, out_shardings=sharding))
        self._ratio = jax.jit(_ratio, out_shardings=sharding)

    def fill(self, params: nnx.State, minibatches: Sequence[Minibatch]) -> list[Minibatch]:
        """Returns the minibatches with `old_logprobs`, and with `ref_logprobs` if there is a reference policy.

        Args:
            params: weights before the first update of the step.
            minibatches: minibatches of the step, on the mesh.
        """
        filled = list(minibatches)
        if self._source == "sampler":
            filled = [with_array(m, "old_logprobs", _recorded) for m in filled]
        else:
            score = partial(self._score, (params, self._frozen))
            # The old policy of the first update is the policy itself.
            filled[1:] = [with_array(m, "old_logprobs", score) for m in filled[1:]]
        if self._reference is None:
            return filled
        score = partial(self._score, (self._reference, self._frozen))
        return [with_array(m, "ref_logprobs", score) for m in filled]

    def ratios(self, params: nnx.State, minibatch: Minibatch, *, first: bool) -> list[Array]:
        """Returns the ratio pi / pi_old of each token, [capacity, rows, seq] per stack. It is 1 if `first`: the old policy is the policy itself."""
        if first and self._source == "trainer":
            return [jnp.ones_like(stack.microbatches.old_logprobs) for stack in minibatch]
        score = partial(self._score, (params, self._frozen))
        return [self._ratio(score(stack), stack.microbatches.old_logprobs) for stack in minibatch]

    def lower(self, params: nnx.State, stack: Stack) -> Lowered:
        """Lowers the program that recomputes log-probabilities. Both arguments may be shapes with shardings."""
        return self._score.lower((params, self._frozen), stack)

    def _score_program(self, weights: Weights, stack: Stack) -> Float[Array, "capacity rows seq"]:
        def score(i: Array, scores: Array) -> Array:
            return lax.dynamic_update_index_in_dim(scores, self._logprobs(weights, stack.at(i))[0], i, axis=0)

        blank = jnp.zeros_like(stack.microbatches.old_logprobs)
        return lax.fori_loop(0, stack.count, score, blank)


def _recorded(stack: Stack) -> Array:
    return stack.microbatches.sampler_logprobs


def _ratio(logprobs: Array, old_logprobs: Array) -> Array:
    return jnp.exp(logprobs - old_logprobs)
