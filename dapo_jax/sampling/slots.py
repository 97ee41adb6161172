"""The slots of an engine on the host: who is in which, with which pages of the cache, and who gives way where pages run out."""

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
"""Pages that are kept free for each response in a slot when another one starts. With 12% of the pages that 128 slots may come to, the tokens
that were read again were 51% of those drawn without any, 18% with two, with which 3% fewer slots were at work, and 8% with four (5% fewer)."""

_FOR_EVER = np.iinfo(np.int32).max


@dataclass(frozen=True)
class Started:
    """A response that was given a slot."""

    slot: int
    request: Request
    fills: list[Fill]


class Slots:
    """Who is in which slot, with which pages.

    A response holds its pages by a row of the table. There are as many rows as slots, or more: then those that pause leave their slot to others,
    keep their pages, and get a slot again in their turn.
    """

    def __init__(self, engine: Engine) -> None:
        self.pages, self._steps = Pages(engine.page_sizes), engine.steps_per_call
        self.owners: list[Request | None] = [None] * engine.slots
        # The lowest number first, of each pool.
        self._idle: list[list[int]] = [[] for _ in range(self.pages.sizes.pools)]
        for slot in range(engine.slots):
            self._idle[self._pool_of(slot)].append(slot)
        self.released: list[int] = []
        """Slots that their owners have left, and which the engine takes for live until it is told."""
        self.aside: list[Request] = []
        """Responses that pause, or whose environment works, and have pages, but no slot."""
        self._starts = itertools.count()
        rows, self._rows = (
            range(self.pages.sizes.holders),
            [list[int]() for _ in range(self.pages.sizes.pools)],
        )
        for row in reversed(rows):
            self._rows[self.pages.sizes.pool_of(row)].append(row)

    @property
    def live(self) -> int:
        """Slots whose responses draw tokens."""
        return sum(owner is not None and not owner.paused for owner in self.owners)

    @property
    def tables(self) -> Int[np.ndarray, "slots table_pages"]:
        """The pages of each slot; of a free one they have no meaning."""
        rows = [0 if owner is None or owner.row is None else owner.row for owner in self.owners]
        return self.pages.tables[rows]

    @property
    def until(self) -> Int[np.ndarray, " slots"]:
        """The number of tokens, of an episode those of its present turn, at which each slot pauses."""
        return np.array(
            [_FOR_EVER if owner is None else owner.target - owner.begun for owner in self.owners], np.int32
        )

    def has_room(self, request: Request, waiting: deque[Request]) -> bool:
        """Whether there is a free slot, and pages for the request were none of them shared; for that others give way as in `take`."""
        needed, spare = pages_for(request.room(self._steps), self.pages.sizes.page_tokens), self._spare()
        if not (pools := self._open_to(request, waiting)):
            return False
        pool = max(pools, key=lambda pool: self._free(pool) - spare[pool])
        while self._free(pool) < needed + spare[pool]:
            if not self._gives_way(pool, waiting, to=request):
                return False
        return True

    def take(self, request: Request, waiting: deque[Request]) -> Started | None:
        """Gives the request a free slot, where the most pages are free, with those for all of it and what the next call draws; or None.

        For that those that pause give way; and where nobody draws, those of the line `waiting` that have pages.
        """
        if not (pools := self._open_to(request, waiting)):
            return None
        pool = max(pools, key=self._free)
        slot = heapq.heappop(self._idle[pool])
        while (fills := self._given(request, pool)) is None:
            if not self._gives_way(pool, waiting, to=request):
                heapq.heappush(self._idle[pool], slot)
                return None
        self.owners[slot] = request
        if request in self.aside:
            self.aside.remove(request)
        if slot in self.released:
            self.released.remove(slot)
        if request.order < 0:
            request.order = next(self._starts)
        request.prefix, started = None, Started(slot, request, fills)
        return started

    def make_room(self, waiting: deque[Request]) -> None:
        """Gives every response the pages for what the next call draws, those that started first before the others.

        Where pages run out, those that pause give way first, then those in line, then the one that started last: it goes to the head of the line.
        """
        if self.pages.sizes.table_pages == 1:
            return  # Each response has a page for all of its tokens.
        running = sorted(
            (owner.order, slot)
            for slot, owner in enumerate(self.owners)
            if owner is not None and not owner.paused
        )
        while running:
            _, slot = running.pop(0)
            owner, pool = self.owners[slot], self._pool_of(slot)
            assert owner is not None
            assert owner.row is not None
            while not self.pages.grow(owner.row, owner.room(self._steps)):
                if self._pausing_gives_way(pool) or self._waiting_gives_way(pool, waiting):
                    continue
                last = next((at for _, at in reversed(running) if self._pool_of(at) == pool), slot)
                waiting.appendleft(self.end(last))
                self.released.append(last)
                if last == slot:
                    break
                running = [each for each in running if each[1] != last]

    def end(self, slot: int) -> Request:
        """Frees a slot and its pages."""
        owner = self.leave(slot)
        self.let_go(owner)
        return owner

    def park(self, slot: int) -> None:
        """Frees a slot whose response keeps its pages, until others need them."""
        self.aside.append(self.leave(slot))

    def others_idle(self, request: Request) -> bool:
        """Whether there are free slots, but none where the request's pages are."""
        assert request.row is not None
        return not self._idle[self.pages.sizes.pool_of(request.row)] and any(self._idle)

    def forget(self, request: Request) -> None:
        """Frees the pages of one beside the slots, if it has any."""
        if request.row is not None:
            self.aside.remove(request)
            self.let_go(request)

    def leave(self, slot: int) -> Request:
        """Frees a slot, whose response keeps its pages."""
        owner = self.owners[slot]
        assert owner is not None
        self.owners[slot] = None
        heapq.heappush(self._idle[self._pool_of(slot)], slot)
        return owner

    def pausing(self) -> Iterator[tuple[int, Request]]:
        """The slots of those that pause."""
        for slot, owner in enumerate(self.owners):
            if owner is not None and owner.paused:
                yield slot, owner

    def _open_to(self, request: Request, waiting: deque[Request]) -> list[int]:
        """The pools with a free slot that a request can have: where its pages are, or where there is a row of the table for it, if need be that of one that gives way as in `take`."""
        if request.row is not None:
            pool = self.pages.sizes.pool_of(request.row)
            return [pool] if self._idle[pool] else []
        idle = [pool for pool, slots in enumerate(self._idle) if slots]
        if open_to := [pool for pool in idle if self._rows[pool]]:
            return open_to
        return next(([pool] for pool in idle if self._gives_way(pool, waiting, to=request)), [])

    def _given(self, request: Request, pool: int) -> list[Fill] | None:
        """The pages of a pool to write for a request that gets the pages it needs; None if there are not enough."""
        tokens = request.room(self._steps)
        if request.row is not None:
            return [] if self.pages.grow(request.row, tokens) else None
        row = self._rows[pool][-1]
        begins_with_prompt = request.anew is None
        fills = self.pages.start(
            row,
            tokens,
            read=request.length,
            prompt=request.prompt.ordinal if begins_with_prompt else None,
            prompt_tokens=len(request.prompt.tokens) if begins_with_prompt else 0,
            spare=self._spare()[pool],
        )
        if fills is not None:
            request.row = self._rows[pool].pop()
        return fills

    def let_go(self, request: Request) -> None:
        """Takes the pages of a request that holds some."""
        assert request.row is not None
        self.pages.release(request.row)
        self._rows[self.pages.sizes.pool_of(request.row)].append(request.row)
        request.row = None

    def _gives_way(self, pool: int, waiting: deque[Request], *, to: Request) -> bool:
        """Takes the pages of one for another to start: of one that pauses, or if nobody draws, of one that waits."""
        return self._pausing_gives_way(pool) or (
            not self.live and self._waiting_gives_way(pool, waiting, but=to)
        )

    def _pausing_gives_way(self, pool: int) -> bool:
        """Takes the pages of one that pauses, the last that started, which then has to be read again; False if there is none."""
        pausing = [*self.aside, *(owner for _, owner in self.pausing())]
        if not (held := [each for each in pausing if self._holds(each, pool)]):
            return False
        last = max(held, key=lambda request: request.order)
        if last in self.aside:
            self.aside.remove(last)
        else:
            slot = self.owners.index(last)
            self.leave(slot)
            self.released.append(slot)
        self.let_go(last)
        last.prefix = None
        return True

    def _waiting_gives_way(self, pool: int, waiting: deque[Request], but: Request | None = None) -> bool:
        """Takes the pages of the last in line that has some, which then has to be read again; False if there is none."""
        last = next((each for each in reversed(waiting) if self._holds(each, pool) and each is not but), None)
        if last is None:
            return False
        self.let_go(last)
        last.prefix = None
        return True

    def _holds(self, request: Request, pool: int) -> bool:
        return request.row is not None and self.pages.sizes.pool_of(request.row) == pool

    def _pool_of(self, slot: int) -> int:
        return slot * self.pages.sizes.pools // len(self.owners)

    def _free(self, pool: int) -> int:
        return self.pages.free_of(pool)

    def _spare(self) -> list[int]:
        """The pages of each pool that a start leaves to those that are there: a few for each, as far as it may still grow. Without them what
        starts would soon have to give way, and be read again."""
        sizes = self.pages.sizes
        spare = [0] * sizes.pools
        if not sizes.runs_out:
            return spare
        for slot, owner in enumerate(self.owners):
            if owner is not None and owner.row is not None and not owner.paused:
                most = pages_for(owner.ahead + owner.limit, sizes.page_tokens)
                spare[self._pool_of(slot)] += min(SPARE_PAGES, most - self.pages.count(owner.row))
        return spare
