"""Bookkeeping of an engine's slots on the host: the owner of each slot, its KV-cache pages, and preemption when pages run out."""

import heapq
import itertools
from collections import deque
from collections.abc import Iterator

import numpy as np
from jaxtyping import Int

from dapo_jax.sampling.cache_sizes import pages_for
from dapo_jax.sampling.interface import Engine
from dapo_jax.sampling.page_tables import Fill, Pages
from dapo_jax.sampling.requests import Request

SPARE_PAGES = 2
"""Number of pages to keep free per running response when another response starts. With 128 slots and 12% of the pages that they may need, 51 tokens were
re-prefilled per 100 sampled tokens if no pages were kept free. Two free pages per running response lowered this to 18, but 3% fewer slots were busy."""

_FOR_EVER = np.iinfo(np.int32).max


class Slots:
    """The owners of slots and pages.

    Each response with pages has a row in the page table. If there are more rows than slots, paused responses leave their slots to others, keep their
    pages, and get a slot again later.
    """

    def __init__(self, engine: Engine) -> None:
        self.pages, self._steps = Pages(engine.page_sizes), engine.steps_per_call
        self._feed_tokens = engine.feed_tokens
        self.owners: list[Request | None] = [None] * engine.slots
        sizes = self.pages.sizes
        # The free slots and rows of each pool. Both are taken in ascending order: slots from a heap, rows from the end of a list.
        self._idle, self._rows = ([list[int]() for _ in range(sizes.pools)] for _ in range(2))
        for slot in range(engine.slots):
            self._idle[self._pool_of(slot)].append(slot)
        for row in reversed(range(sizes.holders)):
            self._rows[sizes.pool_of(row)].append(row)
        self.released: list[int] = []
        """Slots without an owner that are still live in the engine."""
        self.aside: list[Request] = []
        """Responses with pages but without a slot: they are paused, or their environment is working."""
        self._starts = itertools.count()

    @property
    def live(self) -> int:
        """Number of slots that sample tokens."""
        return sum(owner is not None and not owner.paused for owner in self.owners)

    @property
    def tables(self) -> tuple[Int[np.ndarray, "slots table_pages"], ...]:
        """The pages of each slot in each page table. Rows of free slots are meaningless."""
        rows = [0 if owner is None or owner.row is None else owner.row for owner in self.owners]
        return self.pages.rows(rows)

    @property
    def until(self) -> Int[np.ndarray, " slots"]:
        """Number of tokens at which each slot pauses. For an episode, only tokens of its current turn count."""
        left = [_FOR_EVER if owner is None else owner.target - owner.begun for owner in self.owners]
        return np.array(left, np.int32)

    def has_room(self, request: Request, waiting: deque[Request]) -> bool:
        """Returns whether there is a free slot, and enough free pages even if the request cannot share any. Like `take`, this may preempt other responses."""
        needed, spare = self._pages_for(request.room(self._steps)), self._spare()
        if not (pools := self._open_to(request, waiting)):
            return False
        pool = max(pools, key=lambda pool: self.pages.free(pool) - spare[pool])
        while self.pages.free(pool) < needed + spare[pool]:
            if not self._preempts(pool, waiting, to=request):
                return False
        return True

    def take(self, request: Request, waiting: deque[Request]) -> tuple[int, list[Fill]] | None:
        """Assigns the request a free slot in the pool with the most free pages, and pages for its context and the next call. Returns the slot and the pages to
        write, or None if there is no room.

        Preempts paused responses to make room. If nothing is being sampled, it also preempts responses in the queue `waiting` that hold pages.
        """
        if not (pools := self._open_to(request, waiting)):
            return None
        pool = max(pools, key=self.pages.free)
        slot = heapq.heappop(self._idle[pool])
        while (fills := self._given(request, pool)) is None:
            if not self._preempts(pool, waiting, to=request):
                heapq.heappush(self._idle[pool], slot)
                return None
        self.owners[slot] = request
        if request in self.aside:
            self.aside.remove(request)
        if slot in self.released:
            self.released.remove(slot)
        if request.order < 0:
            request.order = next(self._starts)
        request.prefix = None
        return slot, fills

    def make_room(self, waiting: deque[Request]) -> None:
        """Assigns every running response the pages for the next call, the oldest responses first.

        If pages run out, paused responses are preempted first, then queued responses, then the running response that started last. A preempted running
        response moves to the head of the queue.
        """
        if self.pages.sizes.table_pages == 1:
            return  # A page has room for a whole response, so no response needs more.
        owners = [(slot, owner) for slot, owner in enumerate(self.owners) if owner and not owner.paused]
        running = sorted(owners, key=lambda pair: pair[1].order)
        while running:
            slot, owner = running.pop(0)
            pool = self._pool_of(slot)
            while not self._grow(owner):
                if self._preempts_paused(pool) or self._preempts_waiting(pool, waiting):
                    continue
                last = next((at for at, _ in reversed(running) if self._pool_of(at) == pool), slot)
                waiting.appendleft(self.end(last))
                if last == slot:
                    break
                running = [pair for pair in running if pair[0] != last]

    def end(self, slot: int, *, live: bool = True) -> Request:
        """Frees a slot and its pages. Returns the response. `live` is whether the slot is still live in the engine."""
        owner = self.leave(slot, live=live)
        self.let_go(owner)
        return owner

    def park(self, slot: int, *, live: bool = True) -> None:
        """Frees a slot. Its response keeps its pages until other responses need them."""
        self.aside.append(self.leave(slot, live=live))

    def others_idle(self, request: Request) -> bool:
        """Returns whether there are free slots, but not in the pool that contains the request's pages."""
        assert request.row is not None
        return not self._idle[self.pages.sizes.pool_of(request.row)] and any(self._idle)

    def forget(self, request: Request) -> None:
        """Frees the pages of a response outside the slots, if it has any."""
        if request.row is not None:
            self.aside.remove(request)
            self.let_go(request)

    def leave(self, slot: int, *, live: bool = True) -> Request:
        """Frees a slot. Returns its response, which keeps its pages."""
        owner = self.owners[slot]
        assert owner is not None
        self.owners[slot] = None
        if live:
            self.released.append(slot)
        heapq.heappush(self._idle[self._pool_of(slot)], slot)
        return owner

    def pausing(self) -> Iterator[tuple[int, Request]]:
        for slot, owner in enumerate(self.owners):
            if owner is not None and owner.paused:
                yield slot, owner

    def _open_to(self, request: Request, waiting: deque[Request]) -> list[int]:
        """Returns the pools in which the request can get a slot: the pool of its pages or, if it has no pages, all pools with a free slot and a free row of
        the page table. If no pool has a free row, preempts a response as `take` does."""
        if request.row is not None:
            pool = self.pages.sizes.pool_of(request.row)
            return [pool] if self._idle[pool] else []
        idle = [pool for pool, slots in enumerate(self._idle) if slots]
        if open_to := [pool for pool in idle if self._rows[pool]]:
            return open_to
        return next(([pool] for pool in idle if self._preempts(pool, waiting, to=request)), [])

    def _given(self, request: Request, pool: int) -> list[Fill] | None:
        """Assigns a request the pages that it needs. Returns the pages to write, or None if there are not enough free pages."""
        tokens, prompt = request.room(self._steps), request.prompt
        if request.row is not None:
            return [] if self._grow(request) else None
        fills = self.pages.start(
            self._rows[pool][-1],
            tokens,
            read=request.length,
            prompt=prompt.ordinal if request.context_start is None else None,
            prompt_tokens=len(prompt.tokens),
            spare=self._spare()[pool],
        )
        if fills is not None:
            request.row = self._rows[pool].pop()
        return fills

    def _grow(self, request: Request) -> bool:
        """Extends the pages of a request for the next call, and frees the pages that it no longer needs. Returns False if there are not enough free pages."""
        assert request.row is not None
        # Some tokens before the first sampled token of a turn may not be fed yet.
        unfed = self._feed_tokens if request.turns and request.drawn == request.begun else 0
        return self.pages.grow(request.row, request.room(self._steps), cached=request.length - unfed)

    def let_go(self, request: Request) -> None:
        """Frees the pages of a request, which must then be re-prefilled to continue."""
        assert request.row is not None
        self.pages.release(request.row)
        self._rows[self.pages.sizes.pool_of(request.row)].append(request.row)
        request.row = request.prefix = None

    def _preempts(self, pool: int, waiting: deque[Request], *, to: Request) -> bool:
        """Preempts one response so that another can start: a paused response or, if nothing is being sampled, a waiting one. Returns False if there is no
        such response."""
        freed = self._preempts_paused(pool)
        return freed or (not self.live and self._preempts_waiting(pool, waiting, but=to))

    def _preempts_paused(self, pool: int) -> bool:
        """Preempts the paused response that started last, which must then be re-prefilled. Returns False if there is no such response."""
        pausing = [*self.aside, *(owner for _, owner in self.pausing())]
        holding = [request for request in pausing if self._holds(request, pool)]
        last = max(holding, key=lambda request: request.order, default=None)
        if last is None:
            return False
        if last in self.aside:
            self.aside.remove(last)
        else:
            self.leave(self.owners.index(last))
        self.let_go(last)
        return True

    def _preempts_waiting(self, pool: int, waiting: deque[Request], but: Request | None = None) -> bool:
        """Preempts the last queued response that holds pages, which must then be re-prefilled. Returns False if there is no such response."""
        holding = (request for request in reversed(waiting) if self._holds(request, pool))
        last = next((request for request in holding if request is not but), None)
        if last is None:
            return False
        self.let_go(last)
        return True

    def _holds(self, request: Request, pool: int) -> bool:
        return request.row is not None and self.pages.sizes.pool_of(request.row) == pool

    def _pool_of(self, slot: int) -> int:
        return slot * self.pages.sizes.pools // len(self.owners)

    def _pages_for(self, tokens: int) -> int:
        """Returns the maximum number of pages that a response of this many tokens needs at the same time."""
        return min(pages_for(tokens, self.pages.sizes.page_tokens), self.pages.sizes.holder_pages())

    def _spare(self) -> list[int]:
        """Returns how many pages of each pool to leave free when a response starts: a few for each running response that may still grow. Otherwise, the new
        response would soon be preempted."""
        sizes = self.pages.sizes
        spare = [0] * sizes.pools
        if not sizes.runs_out:
            return spare
        for slot, owner in enumerate(self.owners):
            if owner is not None and owner.row is not None and not owner.paused:
                most = self._pages_for(owner.ahead + owner.limit)
                spare[self._pool_of(slot)] += min(SPARE_PAGES, most - len(self.pages.held(owner.row)))
        return spare
