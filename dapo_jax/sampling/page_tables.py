"""Host-side bookkeeping of KV-cache pages: free pages, owners and reference counts.

A holder is a slot, or a response that takes turns with other responses. Its row in a page table lists the pages of its tokens in order, so memory grows with
the tokens present, not with the longest possible response. All responses to a prompt share its full pages (prefix caching). A page is freed when its last
holder releases it.

Layers that attend to a window of tokens have a page table and pages of their own. There, a holder frees each page before the window of its next
token, so it has a bounded number of pages.

If slots are split over devices, each device has its own pool of pages for each table. In a cache without paging, every slot is a pool with a single page,
which has room for the longest sequence.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int


def pages_for(tokens: int, page_tokens: int) -> int:
    """Returns the number of pages needed for `tokens` tokens."""
    return -(-tokens // page_tokens)


@dataclass(frozen=True, kw_only=True)
class PageSizes:
    """The sizes of a cache's pools."""

    holders: int
    """Number of rows in each page table: one per slot, or more if responses take turns in the slots."""
    capacity: int
    """Maximum number of tokens per holder, prompt and response together."""
    page_tokens: int
    pools: int
    """Number of independent pools per page table. Each pool serves a contiguous range of holders."""
    pool_pages: int
    """Number of pages in each pool of the first table."""
    windows: tuple[int, ...] = (0,)
    """For each page table, the number of tokens to which a new token attends, including itself, or 0 for all tokens. The first table has the longest window."""
    call_tokens: int = 0
    """Maximum number of tokens that a call of the engine adds to a holder."""

    @property
    def tables(self) -> int:
        """Number of page tables."""
        return len(self.windows)

    def table_of(self, tokens: int) -> int:
        """Returns the page table of the layers in which a new token attends to `tokens` tokens."""
        return self.windows.index(tokens)

    @property
    def table_pages(self) -> int:
        """Number of columns of a page table."""
        return pages_for(self.capacity, self.page_tokens)

    @property
    def tokens(self) -> int:
        """Total number of tokens that fit in the first table's pages."""
        return self.pools * self.pool_pages * self.page_tokens

    @property
    def runs_out(self) -> bool:
        """Whether all holders together may need more pages than exist."""
        return self.pools * self.pool_pages < self.holders * self.holder_pages()

    def pool_of(self, holder: int) -> int:
        """Returns the index of the pool that contains a holder's pages."""
        return holder * self.pools // self.holders

    def holder_pages(self, table: int = 0) -> int:
        """Maximum number of pages per holder in a page table. With a window, these are the pages of the `window + call_tokens - 1` tokens that a call reads or
        writes, which may begin at the end of a page."""
        if not (window := self.windows[table]):
            return self.table_pages
        return min(self.table_pages, 1 + pages_for(window + self.call_tokens - 2, self.page_tokens))

    def pages_of(self, table: int) -> int:
        """Number of pages in each pool of a table. A holder has at most as many pages in a table as in the first one, and shares at least as many. So pools
        with the size of the first table's pools, or with room for all holders, never run out before the first one."""
        return min(self.pool_pages, self.holders // self.pools * self.holder_pages(table))

    def bytes(self, token_bytes: Mapping[int, int]) -> int:
        """Size of all pools in bytes. `token_bytes` maps each window to the bytes of one token in the layers with this window, in the order of the tables."""
        pages = sum(self.pages_of(table) * size for table, size in enumerate(token_bytes.values()))
        return self.pools * self.page_tokens * pages

    def held(self, tokens: float) -> int | float:
        """Mean number of tokens for which a holder of `tokens` tokens has room in the first table, because the last page is half full on average."""
        return min(tokens + self.page_tokens / 2, self.page_tokens * self.holder_pages())

    def held_bytes(self, tokens: int | float, token_bytes: Mapping[int, int]) -> int | float:
        """Size in bytes of the tokens that a holder of `tokens` tokens keeps in all tables."""
        most = (self.page_tokens * self.holder_pages(table) for table in range(self.tables))
        return sum(min(tokens, kept) * size for kept, size in zip(most, token_bytes.values(), strict=True))

    def fitting(self, room: int | float, token_bytes: Mapping[int, int]) -> int | float:
        """Returns the number of pages, not rounded, in each pool of the first table for which `room` bytes suffice, together with a pool of each other table.
        Pools have at most room for all of their holders."""
        left, growing = room / self.page_tokens, sum(token_bytes.values())
        most = [self.holders // self.pools * self.holder_pages(table) for table in range(self.tables)]
        # Pools that have room for all holders do not grow further, beginning with the smallest.
        for pages, size in sorted(zip(most, token_bytes.values(), strict=True)):
            if left <= pages * growing:
                return left / growing
            left, growing = left - pages * size, growing - size
        return most[0]


def slot_pages(slots: int, capacity: int, windows: tuple[int, ...] = (0,)) -> PageSizes:
    """Returns the sizes of a cache without paging, in which each slot has room for the longest sequence in all layers."""
    return PageSizes(
        holders=slots, capacity=capacity, page_tokens=capacity, pools=slots, pool_pages=1, windows=windows
    )


@dataclass(frozen=True)
class Fill:
    """A page to fill with prefilled tokens, starting with token `first` of the sequence."""

    first: int
    page: int
    """Page number, counted over all pools of the table."""
    table: int = 0
    """Index of the page table."""


class PageTable:
    """One page table of a cache, and the pools of its pages."""

    def __init__(self, sizes: PageSizes, index: int) -> None:
        """Starts with all pages free."""
        self._sizes, self._index, self._pool_pages = sizes, index, sizes.pages_of(index)
        self.rows = np.zeros((sizes.holders, sizes.table_pages), np.int32)
        # The lowest page number is on top of the stack, so that a small run touches little memory.
        self.free = [list(range(self._pool_pages - 1, -1, -1)) for _ in range(sizes.pools)]
        """The free pages of each pool."""
        self.holders = np.zeros((sizes.pools, self._pool_pages), np.int32)
        """The number of holders of each page."""
        self.held = [list[int]() for _ in range(sizes.holders)]
        """The pages of each holder, in the order of its tokens."""
        self.begins = [0] * sizes.holders
        """The column of each holder's first page."""
        self._shared: dict[tuple[int, Hashable, int], int] = {}
        """Maps a pool, a prompt and a column to the page that the responses to this prompt share."""
        self._keys: dict[tuple[int, int], tuple[int, Hashable, int]] = {}
        """Maps a pool and one of its shared pages to the page's key in `_shared`."""

    def first_column(self, cached: int) -> int:
        """Returns the first column that a new token after `cached` tokens needs."""
        window = self._sizes.windows[self._index]
        return max(0, cached + 1 - window) // self._sizes.page_tokens if window else 0

    def end(self, holder: int) -> int:
        """Returns the column after a holder's last page."""
        return self.begins[holder] + len(self.held[holder])

    def shared(self, holder: int, columns: range, prompt: Hashable) -> list[int | None]:
        """Returns, for each column, the page that a response to `prompt` shares, or None if it needs a page of its own."""
        pool = self._sizes.pool_of(holder)
        return [None if prompt is None else self._shared.get((pool, prompt, column)) for column in columns]

    def start(self, holder: int, columns: range, prompt: Hashable, full: int) -> list[Fill]:
        """Assigns pages to a new holder. It shares the first `full` pages of its prompt. Returns the pages that no other holder has."""
        pool, fills = self._sizes.pool_of(holder), []
        self.begins[holder] = columns.start
        for column, page in zip(columns, self.shared(holder, columns, prompt), strict=True):
            held = self.extend(holder, page)
            if page is not None:
                continue
            fills.append(Fill(column * self._sizes.page_tokens, pool * self._pool_pages + held, self._index))
            if column < full:
                self._keys[pool, held] = pool, prompt, column
                self._shared[pool, prompt, column] = held
        return fills

    def extend(self, holder: int, page: int | None = None) -> int:
        """Appends `page`, or a free page, to a holder's pages. Returns the page."""
        pool = self._sizes.pool_of(holder)
        page = self.free[pool].pop() if page is None else page
        self.rows[holder, self.end(holder)] = page
        self.holders[pool, page] += 1
        self.held[holder].append(page)
        return page

    def drop(self, holder: int, count: int) -> None:
        """Takes the first `count` pages from a holder, and frees each page without other holders."""
        pool, dropped = self._sizes.pool_of(holder), self.held[holder][:count]
        self.held[holder], self.begins[holder] = self.held[holder][count:], self.begins[holder] + count
        self.holders[pool][dropped] -= 1
        for page in reversed(dropped):
            if not self.holders[pool, page]:
                self.free[pool].append(page)
                if (key := self._keys.pop((pool, page), None)) is not None:
                    del self._shared[key]


class Pages:
    """Assigns cache pages to holders and frees them again. Pages are numbered within their pool.

    Only pools of the first table can run out (see `PageSizes.pages_of`), so `free` and `held` describe the first table.
    """

    def __init__(self, sizes: PageSizes) -> None:
        """Starts with all pages free."""
        self.sizes = sizes
        self.tables = tuple(PageTable(sizes, index) for index in range(sizes.tables))

    def rows(self, holders: Sequence[int] | slice) -> tuple[Int[np.ndarray, "holders table_pages"], ...]:
        """Returns the rows of some holders in each page table. A row lists the pages of the holder's tokens in order. Entries before a window and after the
        last page are meaningless."""
        return tuple(table.rows[holders] for table in self.tables)

    def free(self, pool: int) -> int:
        """Returns the number of free pages in a pool."""
        return len(self.tables[0].free[pool])

    def held(self, holder: int) -> Sequence[int]:
        """Returns the pages of a holder, in the order of its tokens."""
        return self.tables[0].held[holder]

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
        assert not self.held(holder), "the holder was not released"
        full = prompt_tokens // self.sizes.page_tokens if prompt is not None else 0
        end = pages_for(tokens, self.sizes.page_tokens)
        columns = [range(table.first_column(read), end) for table in self.tables]
        more = self.tables[0].shared(holder, columns[0], prompt).count(None)
        if more + spare > self.free(self.sizes.pool_of(holder)):
            return None
        started = (
            table.start(holder, own, prompt, full) for table, own in zip(self.tables, columns, strict=True)
        )
        return [fill for fills in started for fill in fills if fill.first < read]

    def grow(self, holder: int, tokens: int, *, cached: int) -> bool:
        """Frees the pages before the window of a new token after `cached` tokens, and extends a holder's pages to `tokens` tokens. Returns False, without
        extending them, if there are not enough free pages."""
        for table in self.tables:
            table.drop(holder, max(0, table.first_column(cached) - table.begins[holder]))
        end = pages_for(tokens, self.sizes.page_tokens)
        if end - self.tables[0].end(holder) > self.free(self.sizes.pool_of(holder)):
            return False
        for table in self.tables:
            while table.end(holder) < end:
                table.extend(holder)
        return True

    def release(self, holder: int) -> None:
        """Releases the holder's pages. Pages with other holders stay in use."""
        for table in self.tables:
            table.drop(holder, len(table.held[holder]))
