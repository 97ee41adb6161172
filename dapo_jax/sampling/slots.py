"""Bookkeeping of an engine's slots on the host: the owner of each slot, its pages of the KV cache, and preemption when pages run out."""

import heapq
import itertools
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int

from dapo_jax.sampling.interface import Engine
from dapo_jax.sampling.pages import Fill, Pages, pages_for
from dapo_jax.sampling.requests import Request

SPARE_PAGES = 2
"""Pages that are kept free for each running response when another one starts. With 12% of the pages that 128 slots may need, re-prefilled tokens were 51% of
the sampled ones with no spare pages, 18% with two (3% fewer slots busy), and 8% with four (5% fewer)."""

_FOR_EVER = np.iinfo(np.int32).max


@dataclass(frozen=True)
class Started:
    """A response that starts in a slot."""

    slot: int
    request: Request
    fills: list[Fill]


class Slots:
    """The owners of slots and pages.

    A response holds its pages by a row of the page table. There may be more rows than slots: paused responses then leave their slots to others, keep their pages, and
    get a slot again in their turn.
    """

    def __init__(self, engine: Engine) -> None:
        self.pages, self._steps = Pages(engine.page_sizes), engine.steps_per_call
        self.owners: list[Request | None] = [None] * engine.slots
        sizes = self.pages.sizes
        # The free slots and rows of each pool: slots with the lowest number first, rows with the lowest number last.
        self._idle, self._rows = ([list[int]() for _ in range(sizes.pools)] for _ in range(2))
        for slot in range(engine.slots):
            self._idle[self._pool_of(slot)].append(slot)
        for row in reversed(range(sizes.holders)):
            self._rows[sizes.pool_of(row)].append(row)
        self.released: list[int] = []
        """Slots without an owner that the engine still counts as live."""
        self.aside: list[Request] = []
        """Responses with pages but without a slot: they pause, or their environment works."""
        self._starts = itertools.count()

    @property
    def live(self) -> int:
        """Number of slots that sample tokens."""
        return sum(owner is not None and not owner.paused for owner in self.owners)

    @property
    def tables(self) -> Int[np.ndarray, "slots table_pages"]:
        """The pages of each slot; rows of free slots have no meaning."""
        rows = [0 if owner is None or owner.row is None else owner.row for owner in self.owners]
        return self.pages.tables[rows]

    @property
    def until(self) -> Int[np.ndarray, " slots"]:
        """Number of tokens at which each slot pauses; of an episode, tokens of its present turn."""
        return np.array(
            [_FOR_EVER if owner is None else owner.target - owner.begun for owner in self.owners], np.int32
        )

    def has_room(self, request: Request, waiting: deque[Request]) -> bool:
        """Returns whether there is a free slot, and enough pages if none of them were shared. Preempts others as `take` does."""
        needed, spare = pages_for(request.room(self._steps), self.pages.sizes.page_tokens), self._spare()
        if not (pools := self._open_to(request, waiting)):
            return False
        pool = max(pools, key=lambda pool: self.pages.free(pool) - spare[pool])
        while self.pages.free(pool) < needed + spare[pool]:
            if not self._preempts(pool, waiting, to=request):
                return False
        return True

    def take(self, request: Request, waiting: deque[Request]) -> Started | None:
        """Gives the request a free slot in the pool with the most free pages, with pages for its context and the next call; or returns None.

        Preempts paused responses for that; if nothing is being sampled, also responses of the line `waiting` that have pages.
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
        return Started(slot, request, fills)

    def make_room(self, waiting: deque[Request]) -> None:
        """Gives every response the pages for the next call, the oldest responses first.

        If pages run out, paused responses are preempted first, then those in line, then the running response that started last, which goes to the head of the line.
        """
        if self.pages.sizes.table_pages == 1:
            return  # Each response has one page for all of its tokens.
        owners = [(slot, owner) for slot, owner in enumerate(self.owners) if owner and not owner.paused]
        running = sorted(owners, key=lambda each: each[1].order)
        while running:
            slot, owner = running.pop(0)
            pool = self._pool_of(slot)
            assert owner.row is not None
            while not self.pages.grow(owner.row, owner.room(self._steps)):
                if self._preempts_paused(pool) or self._preempts_waiting(pool, waiting):
                    continue
                last = next((at for at, _ in reversed(running) if self._pool_of(at) == pool), slot)
                waiting.appendleft(self.end(last))
                self.released.append(last)
                if last == slot:
                    break
                running = [each for each in running if each[0] != last]

    def end(self, slot: int) -> Request:
        """Frees a slot and its pages."""
        owner = self.leave(slot)
        self.let_go(owner)
        return owner

    def park(self, slot: int) -> None:
        """Frees a slot. Its response keeps its pages until others need them."""
        self.aside.append(self.leave(slot))

    def others_idle(self, request: Request) -> bool:
        """Returns whether slots are free, but only in other pools than the request's pages."""
        assert request.row is not None
        return not self._idle[self.pages.sizes.pool_of(request.row)] and any(self._idle)

    def forget(self, request: Request) -> None:
        """Frees the pages of a response outside the slots, if it has any."""
        if request.row is not None:
            self.aside.remove(request)
            self.let_go(request)

    def leave(self, slot: int) -> Request:
        """Frees a slot. Its response keeps its pages."""
        owner = self.owners[slot]
        assert owner is not None
        self.owners[slot] = None
        heapq.heappush(self._idle[self._pool_of(slot)], slot)
        return owner

    def pausing(self) -> Iterator[tuple[int, Request]]:
        """The slots of paused responses, and the responses."""
        for slot, owner in enumerate(self.owners):
            if owner is not None and owner.paused:
                yield slot, owner

    def _open_to(self, request: Request, waiting: deque[Request]) -> list[int]:
        """Returns the pools with a free slot for the request: the pool of its pages, or pools with a free row of the page table. Without one, preempts as `take` does."""
        if request.row is not None:
            pool = self.pages.sizes.pool_of(request.row)
            return [pool] if self._idle[pool] else []
        idle = [pool for pool, slots in enumerate(self._idle) if slots]
        if open_to := [pool for pool in idle if self._rows[pool]]:
            return open_to
        return next(([pool] for pool in idle if self._preempts(pool, waiting, to=request)), [])

    def _given(self, request: Request, pool: int) -> list[Fill] | None:
        """Gives a request the pages that it needs. Returns the pages to write; None if there are not enough."""
        tokens, prompt = request.room(self._steps), request.prompt
        if request.row is not None:
            return [] if self.pages.grow(request.row, tokens) else None
        fills = self.pages.start(
            self._rows[pool][-1],
            tokens,
            read=request.length,
            prompt=prompt.ordinal if request.anew is None else None,
            prompt_tokens=len(prompt.tokens),
            spare=self._spare()[pool],
        )
        if fills is not None:
            request.row = self._rows[pool].pop()
        return fills

    def let_go(self, request: Request) -> None:
        """Frees the pages of a request, which has to be re-prefilled to continue."""
        assert request.row is not None
        self.pages.release(request.row)
        self._rows[self.pages.sizes.pool_of(request.row)].append(request.row)
        request.row = request.prefix = None

    def _preempts(self, pool: int, waiting: deque[Request], *, to: Request) -> bool:
        """Preempts one response for another to start: a paused one, or if nothing is being sampled, a waiting one."""
        return self._preempts_paused(pool) or (
            not self.live and self._preempts_waiting(pool, waiting, but=to)
        )

    def _preempts_paused(self, pool: int) -> bool:
        """Preempts the paused response that started last; it has to be re-prefilled. Returns False without such a response."""
        pausing = [*self.aside, *(owner for _, owner in self.pausing())]
        held = [each for each in pausing if self._holds(each, pool)]
        last = max(held, key=lambda request: request.order, default=None)
        if last is None:
            return False
        if last in self.aside:
            self.aside.remove(last)
        else:
            slot = self.owners.index(last)
            self.leave(slot)
            self.released.append(slot)
        self.let_go(last)
        return True

    def _preempts_waiting(self, pool: int, waiting: deque[Request], but: Request | None = None) -> bool:
        """Preempts the last response in line with pages; it has to be re-prefilled. Returns False without such a response."""
        last = next((each for each in reversed(waiting) if self._holds(each, pool) and each is not but), None)
        if last is None:
            return False
        self.let_go(last)
        return True

    def _holds(self, request: Request, pool: int) -> bool:
        return request.row is not None and self.pages.sizes.pool_of(request.row) == pool

    def _pool_of(self, slot: int) -> int:
        return slot * self.pages.sizes.pools // len(self.owners)

    def _spare(self) -> list[int]:
        """Pages of each pool that a start leaves free: a few for each running response, as far as it may still grow. Without them, a response that starts would soon be
        preempted."""
        sizes = self.pages.sizes
        spare = [0] * sizes.pools
        if not sizes.runs_out:
            return spare
        for slot, owner in enumerate(self.owners):
            if owner is not None and owner.row is not None and not owner.paused:
                most = pages_for(owner.ahead + owner.limit, sizes.page_tokens)
                spare[self._pool_of(slot)] += min(SPARE_PAGES, most - len(self.pages.held(owner.row)))
        return spare
