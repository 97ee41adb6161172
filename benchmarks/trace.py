"""Divides wall time among operations that overlap because they run in several threads or inside each other."""

import heapq
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

CONTAINERS = ("while", "call", "conditional")
"""Operations that only run other operations. Time is attributed to them only while no other operation runs."""


@dataclass(frozen=True)
class Slice:
    """One execution of one operation. Times are in ns."""

    start: float
    end: float
    program: str
    operation: str
    kernel: str = field(default="", compare=False)
    """Name of the GPU kernel, which may differ from the operation's name."""

    @property
    def is_container(self) -> bool:
        """Whether the operation is one of `CONTAINERS`."""
        return self.operation.split(".")[0] in CONTAINERS


@dataclass(frozen=True)
class Gap:
    """A time without any operation, in ns."""

    length: float
    before: str
    """The last operation before the gap, or `start`."""
    after: str
    """The first operation after the gap, or `end`."""


def gaps(slices: Sequence[Slice], span: tuple[float, float]) -> list[Gap]:
    """Returns all gaps within `span`, longest first.

    >>> gaps([Slice(1, 4, "p", "dot"), Slice(2, 3, "p", "add"), Slice(6, 7, "p", "sub")], (0, 7))
    [Gap(length=2, before='dot', after='sub'), Gap(length=1, before='start', after='dot')]
    """
    found, now, last = [], span[0], "start"
    for one in [*sorted(slices, key=lambda each: each.start), Slice(span[1], span[1], "", "end")]:
        if span[0] <= one.start <= span[1] and one.start > now:
            found.append(Gap(one.start - now, last, one.operation))
        if one.end > now:
            now, last = one.end, one.operation
    return sorted(found, key=lambda gap: -gap.length)


def shares(slices: Iterable[Slice], span: tuple[float, float]) -> dict[tuple[str | None, str], float]:
    """Returns the seconds of each (program, operation) within `span`. The rest is (None, "loop") or, outside of all operations, (None, "none").

    Operations that run at the same time share this time equally.

    >>> a, b = Slice(0, 2e9, "p", "dot"), Slice(1e9, 3e9, "p", "add")
    >>> shares([a, b, Slice(0, 4e9, "p", "while.1")], (0, 5e9))
    {('p', 'dot'): 1.5, ('p', 'add'): 1.5, (None, 'loop'): 1.0, (None, 'none'): 1.0}
    """
    begin, finish = span
    inside = [s for s in slices if s.end > begin and s.start < finish]
    edges = [(max(s.start, begin), 1, index) for index, s in enumerate(inside)]
    edges += [(min(s.end, finish), 0, index) for index, s in enumerate(inside)]
    heapq.heapify(edges)
    seconds: dict[tuple[str | None, str], float] = defaultdict(float)
    running: set[int] = set()
    loops: set[int] = set()
    now = begin

    def spend(until: float) -> None:
        part = (until - now) / 1e9
        if running:
            for index in running:
                seconds[inside[index].program, inside[index].operation] += part / len(running)
        elif part > 0:
            seconds[None, "loop" if loops else "none"] += part

    while edges:
        at, opens, index = heapq.heappop(edges)
        spend(at)
        now = at
        kind = loops if inside[index].is_container else running
        (kind.add if opens else kind.discard)(index)
    spend(finish)
    return dict(seconds)
