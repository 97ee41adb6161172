"""The log-probabilities of tokens under the models that a run does not train: the teacher and the reference policy. Both choose their experts themselves."""

from collections.abc import Callable, Sequence

from jaxtyping import Array

from dapo_jax.training.minibatch import Minibatch, Stack, with_array
from dapo_jax.training.routing_replay import without_recorded_experts


def teacher_logprobs(minibatch: Minibatch, score: Callable[[Stack], Sequence[Array]]) -> Minibatch:
    """Fills in `Microbatch.teacher_logprobs`, in nats. The first result of `score` is the log-probabilities of a stack's tokens under the teacher."""
    return with_array(minibatch, "teacher_logprobs", lambda stack: score(without_recorded_experts(stack))[0])


def reference_logprobs(minibatch: Minibatch, score: Callable[[Stack], Sequence[Array]]) -> Minibatch:
    """Fills in `Microbatch.ref_logprobs` like `teacher_logprobs`, under the reference policy."""
    return with_array(minibatch, "ref_logprobs", lambda stack: score(without_recorded_experts(stack))[0])
