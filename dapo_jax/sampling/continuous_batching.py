"""Continuous batching: the host side of sampling.

Prompts are prefilled in order, each once; their responses wait in line for slots; a slot that ends is refilled at once.
The host looks at the device every `steps_per_call` tokens, or as soon as enough slots are free to be worth refilling.

A response starts when there is a slot and there are pages of the cache for it; with every call it gets those that it will need. When there are
none left, the response that started last gives its pages back, keeps what it has drawn, and waits at the head of the line until it
is read again, prompt and tokens together, and goes on. No token is drawn twice, and the key of a token says nothing of when it is drawn.
"""

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import jax
import numpy as np
from jaxtyping import Float, Int, PRNGKeyArray, PyTree

from dapo_jax.dapo.rollouts import Prompt, Response
from dapo_jax.sampling.decoding import Decoding
from dapo_jax.sampling.interface import Engine, Insertion, ResultTokens
from dapo_jax.sampling.pages import Fill, Pages, pages_for

Draw = Callable[[int], Sequence[Prompt]]
"""n -> up to n prompts. After none it is asked again while responses are in flight; with none in flight sampling ends."""

StopRule = Callable[[np.ndarray, int], int | None]
"""(a response's tokens so far, how many of them it has seen before) -> at how many tokens the response ends, or None."""


_SPARE_PAGES = 2
"""Pages that are kept free for each response in a slot when another one starts. With 12% of the pages that 128 slots may come to, the tokens that were read again were
51% of those drawn without, 25% with one page and 7% with four, which left 5% fewer slots at work (log-normal lengths)."""


@dataclass
class _Request:
    """One response on its way: waiting for a slot, then growing in it, perhaps waiting again."""

    prompt: Prompt
    index: int
    limit: int
    prefix: PyTree = None
    """The prefix that waits to be inserted; None: nothing was read, or it was inserted."""
    place: int = 0
    """Which of the prefix's prompts is its own."""
    drawn: int = 0
    order: int = -1
    """The order in which responses started; -1: not yet."""
    tokens: Int[np.ndarray, " limit"] = field(init=False)
    logprobs: Float[np.ndarray, " limit"] = field(init=False)

    @property
    def length(self) -> int:
        """Tokens of the prompt and of the response so far."""
        return len(self.prompt.tokens) + self.drawn

    def room(self, steps: int) -> int:
        """Tokens that it may come to in a call that draws `steps`."""
        return len(self.prompt.tokens) + min(self.drawn + steps, self.limit)

    @property
    def sequence(self) -> Int[np.ndarray, " length"]:
        """The prompt and what was drawn."""
        if not self.drawn:
            return self.prompt.tokens
        return np.concatenate([self.prompt.tokens, self.tokens[: self.drawn]])

    def start(self, order: int) -> None:
        """Lets go of the prefix, which goes when its last response has a slot, and the first time makes room for the response."""
        self.prefix = None
        if self.order < 0:
            self.order = order
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
    ) -> Iterator[tuple[Prompt, tuple[Response, ...]]]:
        """Yields each prompt with its responses, in the order in which groups end.

        What is sampled depends on `params`, `key`, the ordinals, `decoding` and `stop` alone, not on slots, order or timing. With a cache in eight bits it
        also depends on which responses are read again: that attends to keys that are not rounded yet.

        A response that `stop` ends is cut there, however many tokens the call had drawn beyond.

        Raises:
            ValueError: a prompt is empty, or leaves no room for `max_response_tokens` in a slot.
        """
        engine = self._engine
        state = engine.init_decode_state()
        waiting: deque[_Request] = deque()
        slots = _Slots(engine)
        # Apart, or what is read again would wait for prompts that are being read, and these for the place at the head of the line.
        reading, again = _Reading(engine, params), _Reading(engine, params)
        groups: dict[int, dict[int, Response]] = {}
        while True:
            state = self._stopped(state, slots.make_room(waiting))
            state = self._start(state, slots, waiting, key)
            # One more than can start at once: with nobody in line, `generate` would not come back for a freed slot.
            while not waiting or waiting[0].prefix is None:
                if waiting:
                    if not again.busy:
                        if not slots.has_room(waiting[0]):
                            break
                        again.begin_again(waiting)
                    again.go_on()
                else:
                    if not reading.busy:
                        if not (prompts := draw(self._prefill_prompts)):
                            break
                        self._check(prompts, max_response_tokens)
                        reading.begin(prompts, samples_per_prompt, max_response_tokens)
                        groups.update({prompt.ordinal: {} for prompt in prompts})
                    waiting.extend(reading.go_on())
                state = self._start(state, slots, waiting, key)
                # What is left to read can wait for the next call, unless more slots are idle than decode.
                if (reading.busy or again.busy) and slots.live >= engine.slots - slots.live:
                    break
            if not slots.live:
                return
            # With work waiting, come back once enough slots are free; without, run on to the end of the call.
            more = bool(waiting) or reading.busy or again.busy
            min_live = slots.live - max(1, round(slots.live * self._refill_frac)) + 1 if more else 1
            self._on_look()
            state, result = engine.generate(params, state, decoding, min_live, slots.pages.tables)
            ended, overrun = self._absorb(result, slots, stop)
            state = self._stopped(state, overrun)
            for request, response in ended:
                group = groups[request.prompt.ordinal]
                group[request.index] = response
                if len(group) == samples_per_prompt:
                    del groups[request.prompt.ordinal]
                    yield request.prompt, tuple(group[index] for index in range(samples_per_prompt))

    def _check(self, prompts: Sequence[Prompt], max_response_tokens: int) -> None:
        capacity = self._engine.capacity
        for prompt in prompts:
            if not 0 < len(prompt.tokens) <= capacity - max_response_tokens:
                raise ValueError(
                    f"prompt {prompt.ordinal} has {len(prompt.tokens)} tokens; a slot of {capacity} tokens has room for 1 to "
                    f"{capacity} - {max_response_tokens} (response) = {capacity - max_response_tokens}"
                )

    def _start(self, state: PyTree, slots: "_Slots", waiting: deque[_Request], key: PRNGKeyArray) -> PyTree:
        """Starts those at the head of the line that were read, as many as there are slots and pages for: one `insert` for each prefix."""
        started: list[_Started] = []
        while waiting and waiting[0].prefix is not None and (one := slots.take(waiting[0])):
            started.append(one)
            waiting.popleft()
        while started:
            prefix = started[0].request.prefix
            batch = [each for each in started if each.request.prefix is prefix]
            started = [each for each in started if each.request.prefix is not prefix]
            requests = [each.request for each in batch]
            insertion = Insertion(
                slots=np.array([each.slot for each in batch], np.int32),
                prompts=np.array([request.place for request in requests], np.int32),
                ordinals=np.array([request.prompt.ordinal for request in requests], np.int32),
                indices=np.array([request.index for request in requests], np.int32),
                limits=np.array([request.limit for request in requests], np.int32),
                drawn=np.array([request.drawn for request in requests], np.int32),
                fills=[(each.request.place, fill) for each in batch for fill in each.fills],
            )
            state = self._engine.insert(prefix, state, insertion, key)
            for request in requests:
                request.start(next(slots.starts))
        return state

    def _stopped(self, state: PyTree, slots: Sequence[int]) -> PyTree:
        return self._engine.release(state, slots) if slots else state

    def _absorb(
        self, result: ResultTokens, slots: "_Slots", stop: StopRule | None
    ) -> tuple[list[tuple[_Request, Response]], list[int]]:
        """Hands each slot's new tokens to its owner. The responses that ended, their slots freed, and those of the slots
        that the engine still takes for live."""
        tokens, logprobs, valid, live = jax.device_get(
            (result.tokens, result.logprobs, result.valid, result.live)
        )
        counts, ended, overrun = valid.sum(axis=1), [], []
        for slot, request in enumerate(slots.owners):
            if request is None:
                continue
            seen = request.drawn
            request.append(tokens[slot, : counts[slot]], logprobs[slot, : counts[slot]])
            cut = stop(request.tokens[: request.drawn], seen) if stop else None
            if live[slot] and cut is None:
                continue
            slots.end(slot)
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


class _Reading:
    """Reads prompts for the first time, or the response at the head of the line again, some at a time."""

    def __init__(self, engine: Engine, params: PyTree) -> None:
        self._engine, self._params = engine, params
        self._work: Iterator[list[tuple[int, PyTree, int]]] = iter(())
        self._requests: list[list[_Request]] = []
        self._left = 0

    @property
    def busy(self) -> bool:
        """True while something that was begun is not read to its end."""
        return self._left > 0

    def begin(self, prompts: Sequence[Prompt], samples: int, limit: int) -> None:
        """Prompts, each for a group of responses."""
        self._requests = [
            [_Request(prompt=prompt, index=index, limit=limit) for index in range(samples)]
            for prompt in prompts
        ]
        self._work = self._engine.prefill(self._params, [prompt.tokens for prompt in prompts])
        self._left = len(prompts)

    def begin_again(self, waiting: deque[_Request]) -> None:
        """The response at the head of the line, which stays there."""
        self._requests = [[waiting[0]]]
        self._work = self._engine.prefill(self._params, [waiting[0].sequence])
        self._left = 1

    def go_on(self) -> list[_Request]:
        """One part of the work. Returned are the responses that can now start and are not in line yet."""
        new: list[_Request] = []
        for index, prefix, place in next(self._work):
            self._left -= 1
            for request in self._requests[index]:
                request.prefix, request.place = prefix, place
                if request.order < 0:
                    new.append(request)
        if not self._left:
            self._work, self._requests = iter(()), []  # or they would hold what was read
        return new


@dataclass(frozen=True)
class _Started:
    """A response that was given a slot."""

    slot: int
    request: _Request
    fills: list[Fill]


class _Slots:
    """Who is in which slot, with which pages."""

    def __init__(self, engine: Engine) -> None:
        self.pages, self._steps = Pages(engine.page_sizes), engine.steps_per_call
        self.owners: list[_Request | None] = [None] * engine.slots
        self.starts = itertools.count()

    @property
    def live(self) -> int:
        """Slots that are taken."""
        return sum(owner is not None for owner in self.owners)

    def has_room(self, request: _Request) -> bool:
        """Whether there is a free slot, and pages for the request were none of them shared."""
        free = [slot for slot, owner in enumerate(self.owners) if owner is None]
        needed, spare = pages_for(request.room(self._steps), self.pages.sizes.page_tokens), self._spare()
        return any(self.pages.free(slot) >= needed + spare[self.pages.sizes.pool_of(slot)] for slot in free)

    def take(self, request: _Request) -> _Started | None:
        """Gives the request a free slot, where the most pages are free, with those for all of it and what the next call draws; or None."""
        free = [slot for slot, owner in enumerate(self.owners) if owner is None]
        if not free:
            return None
        slot, tokens = max(free, key=self.pages.free), request.room(self._steps)
        spare = self._spare()[self.pages.sizes.pool_of(slot)]
        fills = self.pages.start(
            slot,
            tokens,
            read=request.length,
            prompt=request.prompt.ordinal,
            prompt_tokens=len(request.prompt.tokens),
            spare=spare,
        )
        if fills is None:
            return None
        self.owners[slot] = request
        return _Started(slot, request, fills)

    def _spare(self) -> list[int]:
        """The pages of each pool that a start leaves to those that are there: a few for each, as far as it may still grow. Without them what
        starts would soon have to give way, and be read again."""
        sizes = self.pages.sizes
        spare = [0] * sizes.pools
        for slot, owner in enumerate(self.owners):
            if owner is not None:
                most = pages_for(len(owner.prompt.tokens) + owner.limit, sizes.page_tokens)
                spare[sizes.pool_of(slot)] += min(_SPARE_PAGES, most - len(self.pages.held(slot)))
        return spare

    def make_room(self, waiting: deque[_Request]) -> list[int]:
        """Gives every response the pages for what the next call draws, those that started first before the others. Where pages run
        out, the one that started last goes back to the head of the line; returned are the slots that had to be given up."""
        running = sorted((owner.order, slot) for slot, owner in enumerate(self.owners) if owner is not None)
        given_up: list[int] = []
        while running:
            _, slot = running.pop(0)
            owner = self.owners[slot]
            assert owner is not None
            while not self.pages.grow(slot, owner.room(self._steps)):
                pool = self.pages.sizes.pool_of(slot)
                last = next((at for _, at in reversed(running) if self.pages.sizes.pool_of(at) == pool), slot)
                waiting.appendleft(self.end(last))
                given_up.append(last)
                if last == slot:
                    break
                running = [each for each in running if each[1] != last]
        return given_up

    def end(self, slot: int) -> _Request:
        """Frees a slot and its pages."""
        owner = self.owners[slot]
        assert owner is not None
        self.owners[slot] = None
        self.pages.release(slot)
        return owner
