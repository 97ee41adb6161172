"""Groups of responses to prompts, each sampled to its end: prompts are read in order, each once, and a slot that ends is refilled at once."""

from collections.abc import Callable, Iterator, Sequence
from itertools import chain

from jaxtyping import PRNGKeyArray, PyTree

from dapo_jax.dapo.rollouts import Prompt, Response, Span
from dapo_jax.sampling.decode_loop import DecodeLoop, StopRule
from dapo_jax.sampling.decoding import Decoding
from dapo_jax.sampling.interface import Engine
from dapo_jax.sampling.requests import Request
from dapo_jax.sampling.turns import EndedEpisode, Environments, TurnTaking, limits_of

Draw = Callable[[int], Sequence[Prompt]]
"""n -> up to n prompts. After none it is asked again while responses are in flight; with none in flight sampling ends."""


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
        """`prefill_prompts` are read side by side; slots are refilled once `refill_frac` of those that were live are free; `on_look` is called before
        each call of the engine that draws tokens."""
        self._on_look = on_look
        self._engine = engine
        self._prefill_prompts = prefill_prompts
        self._refill_frac = refill_frac

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
        """Yields each prompt with its responses, in the order in which groups end; `version` is that of `params`.

        What is sampled depends on `params`, `key`, the ordinals, `decoding` and `stop` alone, not on slots, order or timing. With a cache in eight bits it
        also depends on which responses are read again: that attends to keys that are not rounded yet.

        A response that `stop` ends is cut there, however many tokens the call had drawn beyond. With `environments` each response is an episode of several turns,
        of which `stop` ends one; `max_response_tokens` are those of the whole episode, what is appended to it included, unless the environments say how many it may have.

        Raises:
            ValueError: a prompt is empty, or leaves no room for `max_response_tokens` in a slot.
        """
        groups: dict[int, dict[int, Response]] = {}
        taking, most = None, 0
        if environments is not None:
            capacity = self._engine.capacity
            limits = limits_of(environments, max_response_tokens=max_response_tokens, capacity=capacity)
            taking, most = TurnTaking(environments, limits, self._on_look), limits.episode_tokens

        def more() -> list[list[Request]]:
            if taking is not None:
                taking.resume(loop.resume)
                if (going := taking.going_on()) or taking.starting or loop.waiting:
                    return going
            prompts = draw(self._prefill_prompts)
            check_prompts(prompts, capacity=self._engine.capacity, max_response_tokens=max_response_tokens)
            groups.update({prompt.ordinal: {} for prompt in prompts})
            asked = [
                [
                    Request(prompt, index, max_response_tokens, most=most)
                    for index in range(samples_per_prompt)
                ]
                for prompt in prompts
            ]
            if taking is None:
                return asked
            taking.start(list(chain.from_iterable(asked)))
            taking.resume(loop.resume)
            return taking.going_on()

        loop = DecodeLoop(
            self._engine,
            params,
            key=key,
            decoding=decoding,
            stop=stop,
            refill_frac=self._refill_frac,
            on_look=self._on_look,
            more=more,
            park=taking is not None and self._engine.feed_tokens > 0,
        )
        try:
            while True:
                if taking is not None:
                    taking.resume(loop.resume)
                ended = loop.step()
                if taking is None:
                    over = [EndedEpisode(*each, (), ()) for each in ended or ()]
                else:
                    for each in ended or ():
                        taking.turn_ended(*each)
                    over = taking.ended()
                    for episode in over:
                        loop.slots.forget(episode.request)
                for request, length, reason, turns, contexts in over:
                    group = groups[request.prompt.ordinal]
                    group[request.index] = Response(
                        tokens=request.tokens[:length].copy(),
                        logprobs=request.logprobs[:length].copy(),
                        finish_reason=reason,
                        spans=(Span(0, version),),
                        turns=turns,
                        contexts=contexts,
                    )
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
    """Refuses prompts that leave no room for a response in a slot of `capacity` tokens.

    Raises:
        ValueError: a prompt is empty or too long.
    """
    for prompt in prompts:
        if not 0 < len(prompt.tokens) <= capacity - max_response_tokens:
            raise ValueError(
                f"prompt {prompt.ordinal} has {len(prompt.tokens)} tokens; a slot of {capacity} tokens has room for 1 to "
                f"{capacity} - {max_response_tokens} (response) = {capacity - max_response_tokens}"
            )
