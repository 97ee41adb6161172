"""The host-side sampling loop: prefilled responses start in free slots, all slots sample, and finished responses leave their slots.

A device call returns to the host after `steps_per_call` tokens, or earlier if enough slots are free to be worth refilling.

A response starts when there is a free slot and enough free KV-cache pages. Before each call, every running response gets the pages that it will need. When
pages run out, a response is preempted: it keeps its tokens, waits, is re-prefilled with its prompt, and continues. No token is sampled twice, and the random key
of a token does not depend on timing.
"""

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jaxtyping import PRNGKeyArray, PyTree

from dapo_jax.dapo.rollouts import FinishReason
from dapo_jax.dapo.tokens import Tokens, values_of
from dapo_jax.sampling.decoding import Decoding, decoding_of_slots
from dapo_jax.sampling.interface import Engine, Insertion, ResultTokens
from dapo_jax.sampling.page_tables import Fill
from dapo_jax.sampling.requests import NOTHING, Reading, Request, StopRule
from dapo_jax.sampling.slots import Slots

PARKED: PyTree = object()
"""Used in place of a prefix if the pages of a response already contain its context, except for the tokens to feed."""

_PAUSED: PyTree = object()
"""Used in place of a prefix for a response that paused. Its logits and states are in the loop's parked states, at the index of its row in the page table."""

_DEARER = 4
"""Number of tokens that can be prefilled in the time that it takes to feed one token, which is one decoding step."""

Unread = Sequence[Sequence[Request]]
"""Requests to prefill, in one list per context."""


Ended = list[tuple[Request, FinishReason]]
"""The responses, or the episode turns, that ended in a step, each with its finish reason."""


class DecodeLoop:
    """Samples responses in the slots of an engine. The weights stay the same until `take` replaces them."""

    def __init__(
        self,
        engine: Engine,
        params: PyTree,
        *,
        key: PRNGKeyArray,
        decoding: Decoding,
        more: Callable[[], Unread],
        stop: StopRule | None = None,
        refill_frac: float = 0.125,
        on_look: Callable[[], None] = lambda: None,
        prefill_first: bool = True,
        park: bool = False,
    ) -> None:
        """`more` returns the requests to prefill next. It is called when the queue is empty. If it returns nothing, it is called again in the next `step`.

        With `prefill_first`, prompts are prefilled until every slot is taken, and only then are tokens sampled. This maximizes throughput: a prompt costs the
        same whenever it is prefilled, but an idle slot wastes decoding steps. Without `prefill_first`, at most one prefill call precedes each `generate`
        call. While slots are idle and prompts wait, `generate` samples only one token, so running responses keep streaming.

        With `park`, a response that ends a turn leaves its slot but keeps its pages until `resume` or `slots.forget` is called. `decoding`, `stop` and `key`
        apply to requests without their own options. In one loop, either all requests have their own options, or none of them do.
        """
        self._engine, self._params, self._key, self._decoding = engine, params, key, decoding
        self._stop, self._refill_frac, self._on_look = stop, refill_frac, on_look
        self._more, self._prefill_first, self._park = more, prefill_first, park
        self._state = engine.init_decode_state()
        self._parked: PyTree | None = None
        self.slots = Slots(engine)
        self.waiting: deque[Request] = deque()
        # New prompts and preempted responses are prefilled separately, so a re-prefill need not wait for the prefill of new prompts.
        self._reading, self._again = Reading(engine, params), Reading(engine, params)

    def resume(self, request: Request) -> bool:
        """Queues an episode for its next turn, at the head of the queue. Context tokens that its pages do not contain are fed first. Returns False,
        without queueing the episode, if it must be re-prefilled instead."""
        fed = len(request.fed)
        long = not 0 < fed <= self._engine.feed_tokens or fed * _DEARER > request.length
        if request.row is None or long or self.slots.others_idle(request):
            self.slots.forget(request)
            return False
        self.slots.aside.remove(request)
        request.prefix = PARKED
        self.waiting.appendleft(request)
        return True

    def step(self) -> Ended | None:
        """Starts and prefills responses, then calls `generate` once. Returns the responses that ended, or None if there was nothing to sample."""
        slots = self.slots
        slots.make_room(self.waiting)
        self._put_aside()
        self._release()
        self._start()
        interrupted = self._prefill()
        if not (live := slots.live):
            return None
        # If responses are waiting, `generate` returns once enough slots are free; otherwise it runs all of its steps.
        min_live = live - max(1, round(live * self._refill_frac)) + 1 if self._has_work else 1
        if interrupted:
            min_live = live + 1  # so that the call ends after one step
        self._on_look()
        options = [None if owner is None else owner.options for owner in slots.owners]
        decoding = self._decoding
        if any(options):
            decoding = decoding_of_slots([None if option is None else option.decoding for option in options])
        arguments = decoding, min_live, slots.tables, slots.until
        self._state, result = self._engine.generate(self._params, self._state, *arguments)
        ended = self._absorb(result)
        self._release()
        return ended

    def drop(self, requests: Sequence[Request]) -> None:
        """Ends requests, whether they are queued, in prefill or in a slot. Requests that have already ended are ignored."""
        slots = self.slots
        for request in requests:
            request.dropped = True  # a request in prefill is removed once its prefill ends
        for slot, owner in enumerate(slots.owners):
            if owner is not None and owner.dropped:
                slots.end(slot)
        for request in self.waiting:
            if request.dropped and request.row is not None:
                slots.let_go(request)
        self.waiting = deque(request for request in self.waiting if not request.dropped)

    def take(self, params: PyTree) -> None:
        """Switches to new weights from the next call on. All contexts are re-prefilled, so the weights that sample a token have also processed all tokens
        before it."""
        slots = self.slots
        assert not slots.aside, "paused responses are not re-prefilled"
        running = sorted((owner.order, slot) for slot, owner in enumerate(slots.owners) if owner is not None)
        again = [slots.end(slot) for _, slot in running]
        for request in self.waiting:
            request.prefix = None
            if request.row is not None:
                slots.let_go(request)
        self.waiting.extendleft(reversed(again))
        unread = self._reading.unread
        self._params = params
        self._reading, self._again = (Reading(self._engine, params) for _ in range(2))
        if unread:
            self._reading.begin(unread)

    def close(self) -> None:
        """Drops `more`, which references this loop. Otherwise, this reference cycle would keep the cache and the weights in memory until garbage collection."""
        self._more = tuple

    @property
    def _has_work(self) -> bool:
        """Whether any response is known to be waiting for a slot."""
        return bool(self.waiting) or self._reading.busy or self._again.busy

    def _prefill(self) -> bool:
        """Prefills until a queued response cannot start yet. If the queue were empty, `generate` would not return early when slots become free.

        Returns True if prefill was interrupted to let running responses sample a token, although slots are idle and prompts wait.
        """
        slots, waiting = self.slots, self.waiting
        while not waiting or waiting[0].prefix is None:
            if waiting:
                if not self._again.busy:
                    if not slots.has_room(waiting[0], waiting):
                        break
                    self._again.begin([[waiting[0]]])
                self._again.advance()
            else:
                if not self._reading.busy:
                    if not (unread := self._more()):
                        if not waiting:
                            break
                        self._start()  # `more` may have queued requests for their next turn
                        if waiting:
                            break
                        continue
                    self._reading.begin(unread)
                waiting.extend(request for request in self._reading.advance() if not request.dropped)
            self._start()
            idle = slots.live < self._engine.slots
            if (self._reading.busy or self._again.busy) and slots.live and not (idle and self._prefill_first):
                return idle
        return False

    def _start(self) -> None:
        """Starts prefilled responses from the head of the queue while there are free slots and pages, with one `insert` call per prefix and key."""
        batches: dict[tuple[int, int], tuple[PyTree, Any, list[tuple[Request, int, list[Fill]]]]] = {}
        while self.waiting and (prefix := (request := self.waiting[0]).prefix) is not None:
            if (slot_and_fills := self.slots.take(request, self.waiting)) is None:
                break
            key = None if request.options is None else request.options.key
            batches.setdefault((id(prefix), id(key)), (prefix, key, []))[2].append((request, *slot_and_fills))
            self.waiting.popleft()
        self._release()
        for prefix, key, batch in batches.values():
            requests = [request for request, _, _ in batch]
            if prefix is _PAUSED:
                prefix = self._parked
            elif prefix is PARKED:
                lengths = [request.length - len(request.fed) for request in requests]
                parked = self._parked if self._engine.parks_states else None
                rows = [request.row or 0 for request in requests]
                prefix = self._engine.parked_prefix(lengths, parked, rows)
                for index, request in enumerate(requests):
                    request.place = index
            integers = partial(np.array, dtype=np.int32)
            insertion = Insertion(
                slots=integers([slot for _, slot, _ in batch]),
                prompts=integers([request.place for request in requests]),
                ordinals=integers([request.prompt.ordinal if key is None else 0 for request in requests]),
                indices=integers([request.index for request in requests]),
                limits=integers([request.limit - request.begun for request in requests]),
                drawn=integers([request.drawn - request.begun for request in requests]),
                turns=integers([len(request.turns) for request in requests]),
                fills=[(request.place, fill) for request, _, fills in batch for fill in fills],
                fed=[request.fed for request in requests],
            )
            used = self._key if key is None else key
            self._state = self._engine.insert(prefix, self._state, insertion, used)
            for request in requests:
                request.fed = NOTHING

    def _release(self) -> None:
        """Releases, on the device, the slots that no longer have an owner."""
        if self.slots.released:
            self._state = self._engine.release(self._state, self.slots.released)
            self.slots.released = []

    def _absorb(self, result: ResultTokens) -> Ended:
        """Appends new tokens to the requests that own the slots, and frees the slots of responses that ended."""
        slots, result = self.slots, jax.device_get(result)
        sampled, processed = (values_of(result, processed=is_processed) for is_processed in (False, True))
        live, counts, ended, parked = result.live, result.valid.sum(axis=1), Ended(), {}
        for slot, request in enumerate(slots.owners):
            if request is None or not (processed or counts[slot]):
                continue
            seen = request.drawn
            request.append(Tokens(**{name: array[slot, : counts[slot]] for name, array in sampled.items()}))
            if processed:
                values = {name: array[slot] for name, array in processed.items()}
                request.fill(int(result.begins[slot]), values)
            if not counts[slot]:
                continue
            begun, stop = request.begun, self._stop if request.options is None else request.options.stop
            cut = stop(request.record.ids[begun:], seen - begun) if stop else None
            if live[slot] and cut is None:
                continue
            # A state cannot be cut, unlike the tokens in pages.
            if self._park and not (self._engine.parks_states and cut is not None):
                slots.park(slot, live=bool(live[slot]))
                parked[slot] = request.row
            else:
                slots.end(slot, live=bool(live[slot]))
            # Whether the last token was processed depends on other slots. If the episode continues, the token is processed again.
            request.record.end(request.drawn if cut is None else begun + cut)
            stopped = cut is not None or int(request.record.ids[-1]) in self._engine.stop_ids
            ended.append((request, "stop" if stopped else "length"))
        if parked and self._engine.parks_states:
            self._parked = self._engine.park(self._state, self._parked, list(parked), list(parked.values()))
        return ended

    def _put_aside(self) -> None:
        """Moves paused responses out of their slots if other responses are waiting for a slot. The logits of the paused responses' next tokens are kept."""
        slots = self.slots
        if not (pausing := list(slots.pausing())):
            return
        if not self._has_work and (unread := self._more()):
            self._reading.begin(unread)
        if not self._has_work:
            return
        for slot, request in pausing:
            slots.park(slot)
            assert request.row is not None
            request.prefix, request.place = _PAUSED, request.row
        rows = [request.place for _, request in pausing]
        self._parked = self._engine.park(self._state, self._parked, [slot for slot, _ in pausing], rows)
