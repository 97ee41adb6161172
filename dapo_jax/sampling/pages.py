"""The pages of the key/value cache on the host: which are free, who holds which, and how often.

A holder has a row in `tables` that names the pages of its tokens in order, so memory follows what is in it and not how long a response may get: a
slot, or a response that takes turns with others in the slots.
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

    holders: int
    """Rows of the table of pages: one for each slot, or more where responses take turns in the slots."""
    capacity: int
    """Tokens that a holder may come to, prompt and response together."""
    page_tokens: int
    pools: int
    """Pools that know nothing of each other; the holders are divided among them in order."""
    pool_pages: int
    """Pages of one pool."""

    @property
    def table_pages(self) -> int:
        """The most pages of a holder."""
        return pages_for(self.capacity, self.page_tokens)

    @property
    def runs_out(self) -> bool:
        """Whether all holders together may come to more than there are pages."""
        return self.pools * self.pool_pages < self.holders * self.table_pages

    def pool_of(self, holder: int) -> int:
        """The pool that a holder takes its pages from."""
        return holder * self.pools // self.holders


def slot_pages(slots: int, capacity: int) -> PageSizes:
    """A cache without pages: each slot has room for all that it may come to."""
    return PageSizes(holders=slots, capacity=capacity, page_tokens=capacity, pools=slots, pool_pages=1)


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
        self.tables: Int[np.ndarray, "holders table_pages"] = np.zeros(
            (sizes.holders, sizes.table_pages), np.int32
        )
        """The pages of each holder, in the order of its tokens. What stands behind a holder's last page has no meaning."""
        # The lowest number on top, so that a run that needs little touches little.
        self._free = [list(range(sizes.pool_pages - 1, -1, -1)) for _ in range(sizes.pools)]
        self._holders = np.zeros((sizes.pools, sizes.pool_pages), np.int32)
        self._held = [_Held() for _ in range(sizes.holders)]
        self._prompts: dict[tuple[int, Hashable], list[int]] = {}

    def free(self, holder: int) -> int:
        """Pages of the holder's pool that nobody holds."""
        return len(self._free[self.sizes.pool_of(holder)])

    def free_of(self, pool: int) -> int:
        """Pages of a pool that nobody holds."""
        return len(self._free[pool])

    def count(self, holder: int) -> int:
        """The number of pages that it holds."""
        return len(self._held[holder].pages)

    def start(
        self,
        holder: int,
        tokens: int,
        *,
        read: int,
        prompt: Hashable = None,
        prompt_tokens: int = 0,
        spare: int = 0,
    ) -> list[Fill] | None:
        """Gives a holder that holds nothing the pages for `tokens` tokens, `read` of which are there to be written.

        Holders that name the same `prompt` begin with the same `prompt_tokens` tokens: its full pages are theirs together. Returned are the
        pages to be written: shared ones for the first of them alone. None, and nothing has changed, if fewer than `spare` free ones would be left.
        """
        sizes, held = self.sizes, self._held[holder]
        assert not held.pages, "the holder was not released"
        shared = self._shared(holder, prompt, prompt_tokens)
        more = pages_for(tokens, sizes.page_tokens) - len(shared)
        if more + spare > self.free(holder):
            return None
        pages = [*shared, *self._taken(holder, more)]
        full = prompt_tokens // sizes.page_tokens
        pool = sizes.pool_of(holder)
        if prompt is not None and full:
            self._prompts[pool, prompt] = pages[:full]
            held.shared = prompt
        self._hold(holder, held, pages)
        written = range(len(shared), pages_for(read, sizes.page_tokens))
        return [Fill(at * sizes.page_tokens, pool * sizes.pool_pages + pages[at]) for at in written]

    def grow(self, holder: int, tokens: int) -> bool:
        """Gives the holder pages until it has room for `tokens`; False, and nothing has changed, if there are not enough."""
        held = self._held[holder]
        more = pages_for(tokens, self.sizes.page_tokens) - len(held.pages)
        if more > self.free(holder):
            return False
        if more > 0:
            self._hold(holder, held, self._taken(holder, more))
        return True

    def release(self, holder: int) -> None:
        """Takes back what the holder has; pages that another has too stay where they are."""
        held, pool = self._held[holder], self.sizes.pool_of(holder)
        holders, gone = self._holders[pool], []
        for page in held.pages:
            holders[page] -= 1
            if not holders[page]:
                gone.append(page)
        # The first page of a prompt goes with all of its full pages: their holders are the same.
        if held.shared is not None and held.pages[0] in gone:
            del self._prompts[pool, held.shared]
        self._free[pool].extend(reversed(gone))
        self._held[holder] = _Held()

    def held(self, holder: int) -> tuple[int, ...]:
        """The pages of a holder, in the order of its tokens."""
        return tuple(self._held[holder].pages)

    def _shared(self, holder: int, prompt: Hashable, prompt_tokens: int) -> list[int]:
        full = prompt_tokens // self.sizes.page_tokens
        if prompt is None or not full:
            return []
        return self._prompts.get((self.sizes.pool_of(holder), prompt), [])[:full]

    def _taken(self, holder: int, count: int) -> list[int]:
        free = self._free[self.sizes.pool_of(holder)]
        return [free.pop() for _ in range(count)]

    def _hold(self, holder: int, held: _Held, pages: list[int]) -> None:
        first = len(held.pages)
        self.tables[holder, first : first + len(pages)] = pages
        self._holders[self.sizes.pool_of(holder)][pages] += 1
        held.pages += pages
