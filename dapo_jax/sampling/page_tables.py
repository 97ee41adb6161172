"""Host-side bookkeeping of KV-cache pages: free pages, owners and reference counts.

A holder is a slot, or a response that takes turns with other responses. Its row in a page table lists the pages of its tokens in order, so memory grows with
the tokens present, not with the longest possible response. All responses to a prompt share its full pages (prefix caching). A page is freed when its last
holder releases it.

Layers that attend to a window of tokens have a page table and pages of their own. There, a holder frees each page before the window of its next
token, so it has a bounded number of pages.

If slots are split over devices, each device has its own pool of pages for each table.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int

from dapo_jax.sampling.cache_sizes import PageSizes, pages_for


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
        tables = zip(self.tables, columns, strict=True)
        fills = [fill for table, used in tables for fill in table.start(holder, used, prompt, full)]
        return [fill for fill in fills if fill.first < read]

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
