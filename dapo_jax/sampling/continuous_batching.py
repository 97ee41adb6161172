"""Continuous batching: the host side of sampling.

Prompts are prefilled in order, each once; their responses wait in line for slots; a slot that ends is refilled at once.
The host looks at the device every `steps_per_call` tokens, or as soon as enough slots are free to be worth refilling.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import jax
import numpy as np
from jaxtyping import Float, Int, PRNGKeyArray, PyTree

from dapo_jax.dapo.rollouts import Prompt, Response
from dapo_jax.sampling.decoding import Decoding
from dapo_jax.sampling.interface import Engine, Insertion, ResultTokens

Draw = Callable[[int], Sequence[Prompt]]
"""n -> up to n prompts. After none it is asked again while responses are in flight; with none in flight sampling ends."""

StopRule = Callable[[np.ndarray, int], int | None]
"""(a response's tokens so far, how many of them it has seen before) -> at how many tokens the response ends, or None."""


@dataclass
class _Request:
    """One response on its way: waiting for a slot, then growing in it."""

    prompt: Prompt
    index: int
    prefix: PyTree
    place: int
    """Which of the prefix's prompts is its own."""
    limit: int
    drawn: int = 0
    tokens: Int[np.ndarray, " limit"] = field(init=False)
    logprobs: Float[np.ndarray, " limit"] = field(init=False)

    def start(self) -> None:
        """Makes room for the response, and lets go of the prefix: it goes when its last response has a slot."""
        self.prefix = None
        self.tokens, self.logprobs = np.empty(self.limit, np.int32), np.empty(self.limit, np.float32)

    def append(self, tokens: Int[np.ndarray, " new"], logprobs: Float[np.ndarray, " new"]) -> None:
        """Takes new tokens."""
        place = slice(self.drawn, self.drawn + len(tokens))
        self.tokens[place], self.logprobs[place] = tokens, logprobs
        self.drawn = place.stop


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
        """`prefill_prompts` are read side by side; slots are refilled once `refill_frac` of them are free; `on_look` is called before
        each call of the engine that draws tokens."""
        self._on_look = on_look
        self._engine = engine
        self._prefill_prompts = prefill_prompts
        self._refill = max(1, round(engine.slots * refill_frac))

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
    ) -> Iterator[tuple[Prompt, tuple[Response, ...]]]:
        """Yields each prompt with its responses, in the order in which groups end.

        What is sampled depends on `params`, `key`, the ordinals, `decoding` and `stop` alone, not on slots, order or timing.
        A response that `stop` ends is cut there, however many tokens the call had drawn beyond.

        Raises:
            ValueError: a prompt is empty, or leaves no room for `max_response_tokens` in a slot.
        """
        engine = self._engine
        state = engine.init_decode_state()
        waiting: deque[_Request] = deque()
        owners: list[_Request | None] = [None] * engine.slots
        groups: dict[int, dict[int, Response]] = {}
        while True:
            free = [slot for slot, owner in enumerate(owners) if owner is None]
            # One more than can start at once: with nobody in line, `generate` would not come back for a freed slot.
            while len(waiting) <= len(free) and (prompts := draw(self._prefill_prompts)):
                waiting.extend(self._prefill(params, prompts, samples_per_prompt, max_response_tokens))
                groups.update({prompt.ordinal: {} for prompt in prompts})
            state = self._fill(state, free, waiting, owners, key)
            live = sum(owner is not None for owner in owners)
            if not live:
                return
            # With work waiting, come back once enough slots are free; without, run on to the end of the call.
            min_live = engine.slots - self._refill + 1 if waiting else 1
            self._on_look()
            state, result = engine.generate(params, state, decoding, min_live)
            ended, overrun = self._absorb(result, owners, stop)
            if overrun:
                state = engine.release(state, overrun)
            for request, response in ended:
                group = groups[request.prompt.ordinal]
                group[request.index] = response
                if len(group) == samples_per_prompt:
                    del groups[request.prompt.ordinal]
                    yield request.prompt, tuple(group[index] for index in range(samples_per_prompt))

    def _prefill(
        self, params: PyTree, prompts: Sequence[Prompt], samples: int, max_response_tokens: int
    ) -> list[_Request]:
        """Reads prompts in one call and queues their responses."""
        lengths = [len(prompt.tokens) for prompt in prompts]
        for prompt, length in zip(prompts, lengths, strict=True):
            if not 0 < length <= self._engine.capacity - max_response_tokens:
                raise ValueError(
                    f"prompt {prompt.ordinal} has {length} tokens; a slot of {self._engine.capacity} tokens has room for 1 to "
                    f"{self._engine.capacity} - {max_response_tokens} (response) = {self._engine.capacity - max_response_tokens}"
                )
        prefix = self._engine.prefill(params, [prompt.tokens for prompt in prompts])
        return [
            _Request(prompt=prompt, index=index, prefix=prefix, place=place, limit=max_response_tokens)
            for place, prompt in enumerate(prompts)
            for index in range(samples)
        ]

    def _fill(
        self,
        state: PyTree,
        free: list[int],
        waiting: deque[_Request],
        owners: list[_Request | None],
        key: PRNGKeyArray,
    ) -> PyTree:
        """Puts waiting responses into free slots, one `insert` for each prefix they come from."""
        taken = [(slot, waiting.popleft()) for slot in free[: len(waiting)]]
        while taken:
            prefix = taken[0][1].prefix
            batch = [(slot, request) for slot, request in taken if request.prefix is prefix]
            taken = taken[len(batch) :]
            insertion = Insertion(
                slots=np.array([slot for slot, _ in batch], np.int32),
                prompts=np.array([request.place for _, request in batch], np.int32),
                ordinals=np.array([request.prompt.ordinal for _, request in batch], np.int32),
                indices=np.array([request.index for _, request in batch], np.int32),
                limits=np.array([request.limit for _, request in batch], np.int32),
            )
            state = self._engine.insert(prefix, state, insertion, key)
            for slot, request in batch:
                owners[slot] = request
                request.start()
        return state

    def _absorb(
        self, result: ResultTokens, owners: list[_Request | None], stop: StopRule | None
    ) -> tuple[list[tuple[_Request, Response]], list[int]]:
        """Hands each slot's new tokens to its owner. The responses that ended, their slots freed, and those of the slots
        that the engine still takes for live."""
        tokens, logprobs, valid, live = jax.device_get(
            (result.tokens, result.logprobs, result.valid, result.live)
        )
        counts, ended, overrun = valid.sum(axis=1), [], []
        for slot, request in enumerate(owners):
            if request is None:
                continue
            seen = request.drawn
            request.append(tokens[slot, : counts[slot]], logprobs[slot, : counts[slot]])
            cut = stop(request.tokens[: request.drawn], seen) if stop else None
            if live[slot] and cut is None:
                continue
            owners[slot] = None
            if live[slot]:
                overrun.append(slot)
            length = request.drawn if cut is None else cut
            stopped = cut is not None or int(request.tokens[length - 1]) in self._engine.stop_ids
            response = Response(
                tokens=request.tokens[:length].copy(),
                logprobs=request.logprobs[:length].copy(),
                finish_reason="stop" if stopped else "length",
            )
            ended.append((request, response))
        return ended, overrun
