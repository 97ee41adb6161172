"""The pages of the key/value cache on the host: which are free, who holds which, and how often.

A slot has a row in `tables` that names the pages of its tokens in order, so memory follows what is in it and not how long a response may get.
The full pages of a prompt are held by all of its responses together; a page goes back to the free ones when its last holder lets go.

Where slots are spread over devices there is a pool for each: a slot's pages are those of its own device. A cache without pages is one in
which every slot has a pool of its own with a single page as long as a slot.
"""

from collections.abc import Hashable
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Int


def pages_for(tokens: int, page_tokens: int) -> int:
    """The pages that hold so many tokens."""
    return -(-tokens // page_tokens)


@dataclass(frozen=True, kw_only=True)
class PageSizes:
    """The sizes of a cache's pools."""

    slots: int
    capacity: int
    """Tokens that a slot may come to, prompt and response together."""
    page_tokens: int
    pools: int
    """Pools that know nothing of each other; the slots are divided among them in order."""
    pool_pages: int
    """Pages of one pool."""

    @property
    def table_pages(self) -> int:
        """The most pages of a slot."""
        return pages_for(self.capacity, self.page_tokens)

    @property
    def runs_out(self) -> bool:
        """Whether all slots together may come to more than there are pages."""
        return self.pools * self.pool_pages < self.slots * self.table_pages

    def pool_of(self, slot: int) -> int:
        """The pool that a slot takes its pages from."""
        return slot * self.pools // self.slots


def slot_pages(slots: int, capacity: int) -> PageSizes:
    """A cache without pages: each slot has room for all that it may come to."""
    return PageSizes(slots=slots, capacity=capacity, page_tokens=capacity, pools=slots, pool_pages=1)


@dataclass(frozen=True)
class Fill:
    """A page to be written with tokens that were read: those from `first` on of the sequence."""

    first: int
    page: int
    """Counted over all pools."""


@dataclass
class _Held:
    pages: list[int] = field(default_factory=list)
    shared: Hashable = None


class Pages:
    """Hands out the pages of a cache and takes them back. Pages are told by their number within their pool."""

    def __init__(self, sizes: PageSizes) -> None:
        """All pages are free."""
        self.sizes = sizes
        self.tables: Int[np.ndarray, "slots table_pages"] = np.zeros(
            (sizes.slots, sizes.table_pages), np.int32
        )
        """The pages of each slot, in the order of its tokens. What stands behind a slot's last page has no meaning."""
        # The lowest number on top, so that a run that needs little touches little.
        self._free = [list(range(sizes.pool_pages - 1, -1, -1)) for _ in range(sizes.pools)]
        self._holders = np.zeros((sizes.pools, sizes.pool_pages), np.int32)
        self._slots = [_Held() for _ in range(sizes.slots)]
        self._prompts: dict[tuple[int, Hashable], list[int]] = {}

    def free(self, slot: int) -> int:
        """Pages of the slot's pool that nobody holds."""
        return len(self._free[self.sizes.pool_of(slot)])

    def start(
        self,
        slot: int,
        tokens: int,
        *,
        read: int,
        prompt: Hashable = None,
        prompt_tokens: int = 0,
        spare: int = 0,
    ) -> list[Fill] | None:
        """Gives a slot that holds nothing the pages for `tokens` tokens, `read` of which are there to be written.

        Slots that name the same `prompt` begin with the same `prompt_tokens` tokens: its full pages are theirs together. Returned are the
        pages to be written: shared ones for the first of them alone. None, and nothing has changed, if fewer than `spare` free ones would be left.
        """
        sizes, held = self.sizes, self._slots[slot]
        assert not held.pages, "the slot was not released"
        shared = self._shared(slot, prompt, prompt_tokens)
        more = pages_for(tokens, sizes.page_tokens) - len(shared)
        if more + spare > self.free(slot):
            return None
        pages = [*shared, *self._taken(slot, more)]
        full = prompt_tokens // sizes.page_tokens
        pool = sizes.pool_of(slot)
        if prompt is not None and full:
            self._prompts[pool, prompt] = pages[:full]
            held.shared = prompt
        self._hold(slot, held, pages)
        written = range(len(shared), pages_for(read, sizes.page_tokens))
        return [Fill(at * sizes.page_tokens, pool * sizes.pool_pages + pages[at]) for at in written]

    def grow(self, slot: int, tokens: int) -> bool:
        """Gives the slot pages until it has room for `tokens`; False, and nothing has changed, if there are not enough."""
        held = self._slots[slot]
        more = pages_for(tokens, self.sizes.page_tokens) - len(held.pages)
        if more > self.free(slot):
            return False
        if more > 0:
            self._hold(slot, held, self._taken(slot, more))
        return True

    def release(self, slot: int) -> None:
        """Takes back what the slot holds; pages that another slot holds too stay where they are."""
        held, pool = self._slots[slot], self.sizes.pool_of(slot)
        holders, gone = self._holders[pool], []
        for page in held.pages:
            holders[page] -= 1
            if not holders[page]:
                gone.append(page)
        # The first page of a prompt goes with all of its full pages: their holders are the same.
        if held.shared is not None and held.pages[0] in gone:
            del self._prompts[pool, held.shared]
        self._free[pool].extend(reversed(gone))
        self._slots[slot] = _Held()

    def held(self, slot: int) -> tuple[int, ...]:
        """The pages of a slot, in the order of its tokens."""
        return tuple(self._slots[slot].pages)

    def _shared(self, slot: int, prompt: Hashable, prompt_tokens: int) -> list[int]:
        full = prompt_tokens // self.sizes.page_tokens
        if prompt is None or not full:
            return []
        return self._prompts.get((self.sizes.pool_of(slot), prompt), [])[:full]

    def _taken(self, slot: int, count: int) -> list[int]:
        free = self._free[self.sizes.pool_of(slot)]
        return [free.pop() for _ in range(count)]

    def _hold(self, slot: int, held: _Held, pages: list[int]) -> None:
        first = len(held.pages)
        self.tables[slot, first : first + len(pages)] = pages
        self._holders[self.sizes.pool_of(slot)][pages] += 1
        held.pages += pages
