"""The log-probabilities of tokens under the models that a run does not train: the teacher and the reference policy. Both choose their experts themselves."""

from collections.abc import Callable, Sequence

from jaxtyping import Array

from dapo_jax.training.minibatch import Minibatch, Stack, with_array
from dapo_jax.training.routing_replay import without_recorded_experts

Score = Callable[[Stack], Sequence[Array]]
"""Computes the log-probabilities of a stack's tokens under one model, in nats, as the first array of the result."""


def teacher_logprobs(minibatch: Minibatch, score: Score) -> Minibatch:
    """Fills in `Microbatch.teacher_logprobs`. `score` uses the teacher's parameters."""
    return with_array(minibatch, "teacher_logprobs", lambda stack: score(without_recorded_experts(stack))[0])


def reference_logprobs(minibatch: Minibatch, score: Score) -> Minibatch:
    """Fills in `Microbatch.ref_logprobs`. `score` uses the reference policy's parameters."""
    return with_array(minibatch, "ref_logprobs", lambda stack: score(without_recorded_experts(stack))[0])
