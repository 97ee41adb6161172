"""The order in which rows are visited: endless, shuffled anew each epoch, with random access."""

from collections.abc import Callable

import grain


def row_order(count: int, *, seed: int, shuffle: bool) -> Callable[[int], int]:
    """A function that says which of `count` rows comes at a place of an endless run, for any place >= 0.

    Place p lies in epoch p // count. An epoch visits each row once; with `shuffle` its order depends on the
    seed and the epoch, without it is the rows' own order. It is the order in which Grain's own iterator over
    `MapDataset.source(rows).seed(seed).shuffle().repeat()` goes.

    Raises:
        ValueError: there are no rows, or the seed is negative.
    """
    if count < 1:
        raise ValueError("there are no rows to draw from; the split or the list of rows is empty")
    if seed < 0:
        raise ValueError(f"the seed must not be negative; got {seed}")
    order = grain.MapDataset.range(count)
    if shuffle:
        order = order.seed(seed).shuffle()
    order = order.repeat()

    def row_at(place: int) -> int:
        index = order[place]
        assert index is not None  # Grain's None stands for a filtered row, and nothing is filtered here
        return index

    return row_at
