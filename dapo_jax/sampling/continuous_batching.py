"""Continuous batching: samples groups of complete responses, with one prefill for all responses to a prompt."""

from collections.abc import Callable, Iterator, Sequence
from itertools import chain

from jaxtyping import PRNGKeyArray, PyTree

from dapo_jax.dapo.rollouts import Prompt, Response
from dapo_jax.sampling.decode_loop import DecodeLoop, StopRule
from dapo_jax.sampling.decoding import Decoding
from dapo_jax.sampling.interface import Engine
from dapo_jax.sampling.requests import Request
from dapo_jax.sampling.turns import Environments, TurnTaking, limits_of

Draw = Callable[[int], Sequence[Prompt]]
"""Function that returns up to n prompts. After an empty result, it is called again while responses are still being sampled; then sampling ends."""


class Sampler:
    """Samples groups of responses with an engine."""

    def __init__(
        self,
        engine: Engine,
        *,
        prefill_prompts: int = 16,
        refill_frac: float = 0.125,
        on_look: Callable[[], None] = lambda: None,
    ) -> None:
        """Up to `prefill_prompts` prompts are prefilled together. Slots are refilled once a fraction `refill_frac` of the live slots has become free.
        `on_look` is called before every engine call that samples tokens."""
        self._engine, self._prefill_prompts = engine, prefill_prompts
        self._refill_frac, self._on_look = refill_frac, on_look

    def sample(
        self,
        params: PyTree,
        draw: Draw,
        *,
        key: PRNGKeyArray,
        decoding: Decoding,
        samples_per_prompt: int,
        max_response_tokens: int,
        stop: StopRule | None = None,
        version: int = 0,
        environments: Environments | None = None,
    ) -> Iterator[tuple[Prompt, tuple[Response, ...]]]:
        """Yields each prompt with its responses as soon as all of them have ended. `version` is the version of `params`.

        Responses depend only on `params`, `key`, the ordinals, `decoding` and `stop`, not on slots, order or timing. With an 8-bit KV cache, they also depend
        on which responses are preempted, because a re-prefill attends to keys that are not yet rounded.

        `stop` truncates a response at its stop string. With `environments`, each response is an episode of several turns, and `stop` ends a turn. An episode
        has at most `max_response_tokens` tokens, including the environment's, unless the environments set another limit.

        Raises:
            ValueError: a prompt is empty, or leaves no room for `max_response_tokens` in a slot.
        """
        groups: dict[int, dict[int, Response]] = {}
        capacity, taking = self._engine.capacity, None
        if environments is not None:
            limits = limits_of(environments, max_response_tokens=max_response_tokens, capacity=capacity)
            taking = TurnTaking(environments, limits, self._on_look)

        def more() -> list[list[Request]]:
            if taking is not None:
                taking.resume(loop.resume)
                if (going := taking.continuing()) or taking.starting or loop.waiting:
                    return going
            prompts = draw(self._prefill_prompts)
            check_prompts(prompts, capacity=capacity, max_response_tokens=max_response_tokens)
            groups.update({prompt.ordinal: {} for prompt in prompts})
            asked = [
                [
                    Request(prompt, at, max_response_tokens, version=version)
                    for at in range(samples_per_prompt)
                ]
                for prompt in prompts
            ]
            if taking is None:
                return asked
            taking.start(list(chain.from_iterable(asked)))
            taking.resume(loop.resume)
            return taking.continuing()

        park = taking is not None and self._engine.feed_tokens > 0
        loop = DecodeLoop(
            self._engine, params, key=key, decoding=decoding, stop=stop, refill_frac=self._refill_frac,
            on_look=self._on_look, more=more, park=park,
        )  # fmt: skip
        try:
            while True:
                if taking is not None:
                    taking.resume(loop.resume)
                ended = loop.step()
                over = [request for request, _ in ended or ()]
                for request, reason in ended or ():
                    request.finish_reason = reason
                    if taking is not None:
                        taking.end_turn(request, reason)
                if taking is not None:
                    over = taking.ended()
                    for request in over:
                        loop.slots.forget(request)
                for request in over:
                    group = groups[request.prompt.ordinal]
                    group[request.index] = request.response(version)
                    if len(group) == samples_per_prompt:
                        del groups[request.prompt.ordinal]
                        yield request.prompt, tuple(group[index] for index in range(samples_per_prompt))
                if ended is None and not over:
                    if taking is None or not taking.busy:
                        return
                    taking.wait()
        finally:
            loop.close()


def check_prompts(prompts: Sequence[Prompt], *, capacity: int, max_response_tokens: int) -> None:
    """Checks that every prompt leaves room for a response in a slot of `capacity` tokens.

    Raises:
        ValueError: a prompt is empty or too long.
    """
    for prompt in prompts:
        if not 0 < len(prompt.tokens) <= capacity - max_response_tokens:
            raise ValueError(
                f"prompt {prompt.ordinal} has {len(prompt.tokens)} tokens; a slot of {capacity} tokens has room for 1 to "
                f"{capacity} - {max_response_tokens} (response) = {capacity - max_response_tokens}"
            )
