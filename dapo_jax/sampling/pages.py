"""Host-side bookkeeping of KV-cache pages: free pages, owners and reference counts.

A holder is a slot, or a response that takes turns with other responses. Its row in `tables` lists the pages of its tokens in order, so memory grows with
the tokens present, not with the longest possible response. All responses to a prompt share its full pages (prefix caching). A page is freed when its last
holder releases it.

If slots are split over devices, each device has its own pool of pages. In a cache without paging, every slot is a pool with a single page, which has room for
the longest sequence.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np


def pages_for(tokens: int, page_tokens: int) -> int:
    """Returns the number of pages needed for `tokens` tokens."""
    return -(-tokens // page_tokens)


@dataclass(frozen=True, kw_only=True)
class PageSizes:
    """The sizes of a cache's pools."""

    holders: int
    """Number of rows in the page table: one per slot, or more if responses take turns in the slots."""
    capacity: int
    """Maximum number of tokens per holder, prompt and response together."""
    page_tokens: int
    pools: int
    """Number of independent pools. Each pool serves a contiguous range of holders."""
    pool_pages: int
    """Number of pages in each pool."""

    @property
    def table_pages(self) -> int:
        """Maximum number of pages per holder."""
        return pages_for(self.capacity, self.page_tokens)

    @property
    def tokens(self) -> int:
        """Total number of tokens that fit in the cache."""
        return self.pools * self.pool_pages * self.page_tokens

    @property
    def runs_out(self) -> bool:
        """Whether all holders together may need more pages than exist."""
        return self.pools * self.pool_pages < self.holders * self.table_pages

    def pool_of(self, holder: int) -> int:
        """Returns the index of the pool that contains a holder's pages."""
        return holder * self.pools // self.holders


def slot_pages(slots: int, capacity: int) -> PageSizes:
    """Returns the sizes of a cache without paging, in which each slot has room for the longest sequence."""
    return PageSizes(holders=slots, capacity=capacity, page_tokens=capacity, pools=slots, pool_pages=1)


@dataclass(frozen=True)
class Fill:
    """A page to fill with prefilled tokens, starting with token `first` of the sequence."""

    first: int
    page: int
    """Page number, counted over all pools."""


class Pages:
    """Assigns cache pages to holders and frees them again. Pages are numbered within their pool."""

    def __init__(self, sizes: PageSizes) -> None:
        """Starts with all pages free."""
        self.sizes = sizes
        self.tables = np.zeros((sizes.holders, sizes.table_pages), np.int32)
        """The pages of each holder, in token order (int32, [holders, table_pages]). Entries after a holder's last page are meaningless."""
        # The lowest page number is on top of the stack, so that a small run touches little memory.
        self._free = [list(range(sizes.pool_pages - 1, -1, -1)) for _ in range(sizes.pools)]
        self._holders = np.zeros((sizes.pools, sizes.pool_pages), np.int32)
        self._held = [list[int]() for _ in range(sizes.holders)]
        self._shares: dict[int, Hashable] = {}
        """For each holder with shared pages, the prompt to which these pages belong."""
        self._prompts: dict[tuple[int, Hashable], list[int]] = {}

    def free(self, pool: int) -> int:
        """Returns the number of free pages in a pool."""
        return len(self._free[pool])

    def held(self, holder: int) -> Sequence[int]:
        """Returns the pages of a holder, in the order of its tokens."""
        return self._held[holder]

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
        """Assigns pages for `tokens` tokens to a new holder. The caller must then write the first `read` tokens, which are already prefilled, to the returned pages.

        Holders with the same `prompt` begin with the same `prompt_tokens` tokens and share the prompt's full pages. A shared page is returned only to its
        first holder, which writes it. Returns None, and changes nothing, if fewer than `spare` free pages would be left.
        """
        assert not self._held[holder], "the holder was not released"
        sizes, pool = self.sizes, self.sizes.pool_of(holder)
        full = prompt_tokens // sizes.page_tokens if prompt is not None else 0
        shared = self._prompts.get((pool, prompt), [])[:full]
        more = pages_for(tokens, sizes.page_tokens) - len(shared)
        if more + spare > self.free(pool):
            return None
        pages = self._hold(holder, shared, more)
        if full:
            self._prompts[pool, prompt], self._shares[holder] = pages[:full], prompt
        written = range(len(shared), pages_for(read, sizes.page_tokens))
        return [Fill(at * sizes.page_tokens, pool * sizes.pool_pages + pages[at]) for at in written]

    def grow(self, holder: int, tokens: int) -> bool:
        """Extends a holder's pages to `tokens` tokens. Returns False, without any change, if there are not enough free pages."""
        more = pages_for(tokens, self.sizes.page_tokens) - len(self._held[holder])
        if more > self.free(self.sizes.pool_of(holder)):
            return False
        if more > 0:
            self._hold(holder, [], more)
        return True

    def release(self, holder: int) -> None:
        """Releases the holder's pages. Pages with other holders stay in use."""
        held, pool, shared = self._held[holder], self.sizes.pool_of(holder), self._shares.pop(holder, None)
        self._holders[pool][held] -= 1
        gone = [page for page in held if not self._holders[pool][page]]
        # All full pages of a prompt have the same holders, so they are freed together with its first page.
        if shared is not None and held[0] in gone:
            del self._prompts[pool, shared]
        self._free[pool].extend(reversed(gone))
        self._held[holder] = []

    def _hold(self, holder: int, shared: list[int], more: int) -> list[int]:
        """Assigns the `shared` pages and then `more` free pages to a holder. Returns all of these pages."""
        pool, first = self.sizes.pool_of(holder), len(self._held[holder])
        pages = [*shared, *(self._free[pool].pop() for _ in range(more))]
        self.tables[holder, first : first + len(pages)] = pages
        self._holders[pool][pages] += 1
        self._held[holder] += pages
        return pages
