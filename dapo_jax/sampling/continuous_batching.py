"""Groups of responses to prompts, each sampled to its end: prompts are read in order, each once, and a slot that ends is refilled at once."""

from collections.abc import Callable, Iterator, Sequence

from jaxtyping import PRNGKeyArray, PyTree

from dapo_jax.dapo.rollouts import Prompt, Response, Span
from dapo_jax.sampling.decode_loop import DecodeLoop, StopRule
from dapo_jax.sampling.decoding import Decoding
from dapo_jax.sampling.interface import Engine
from dapo_jax.sampling.requests import Request

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
    ) -> Iterator[tuple[Prompt, tuple[Response, ...]]]:
        """Yields each prompt with its responses, in the order in which groups end; `version` is that of `params`.

        What is sampled depends on `params`, `key`, the ordinals, `decoding` and `stop` alone, not on slots, order or timing. With a cache in eight bits it
        also depends on which responses are read again: that attends to keys that are not rounded yet.

        A response that `stop` ends is cut there, however many tokens the call had drawn beyond.

        Raises:
            ValueError: a prompt is empty, or leaves no room for `max_response_tokens` in a slot.
        """
        groups: dict[int, dict[int, Response]] = {}

        def more() -> list[list[Request]]:
            prompts = draw(self._prefill_prompts)
            check_prompts(prompts, capacity=self._engine.capacity, max_response_tokens=max_response_tokens)
            groups.update({prompt.ordinal: {} for prompt in prompts})
            return [
                [Request(prompt, index, max_response_tokens) for index in range(samples_per_prompt)]
                for prompt in prompts
            ]

        loop = DecodeLoop(
            self._engine,
            params,
            key=key,
            decoding=decoding,
            stop=stop,
            refill_frac=self._refill_frac,
            on_look=self._on_look,
            more=more,
        )
        while (ended := loop.step()) is not None:
            for request, length, reason in ended:
                group = groups[request.prompt.ordinal]
                group[request.index] = Response(
                    tokens=request.tokens[:length].copy(),
                    logprobs=request.logprobs[:length].copy(),
                    finish_reason=reason,
                    spans=(Span(0, version),),
                )
                if len(group) == samples_per_prompt:
                    del groups[request.prompt.ordinal]
                    yield request.prompt, tuple(group[index] for index in range(samples_per_prompt))


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
