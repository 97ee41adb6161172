"""The sizes of a KV cache: its page tables, its pools of pages, and the bytes of one response. In a cache without paging, every slot is a pool with a single page,
which has room for the longest sequence."""

from collections.abc import Mapping
from dataclasses import dataclass


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

    def response_cache_bytes(self, tokens: int | float, token_bytes: Mapping[int, int]) -> int | float:
        """Size in bytes of one response in the cache: of the tokens that a holder of `tokens` tokens keeps in all tables."""
        most = (self.page_tokens * self.holder_pages(table) for table in range(self.tables))
        return sum(min(tokens, limit) * size for limit, size in zip(most, token_bytes.values(), strict=True))

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
