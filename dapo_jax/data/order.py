"""The order in which rows are visited: endless, shuffled anew each epoch, with random access."""

import grain


def row_order(count: int, *, seed: int, shuffle: bool) -> grain.MapDataset[int]:
    """Which of `count` rows comes at each place of an endless run: `row_order(...)[place]`, any place >= 0.

    Place p lies in epoch p // count. An epoch visits each row once; with `shuffle` its order depends on the
    seed and the epoch, without it is the rows' own order.

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
    return order.repeat()
