"""The order in which rows are visited: endless, shuffled anew each epoch, mixed by weight, with random access.

A file of its own: it needs Grain from the start, which takes more than a second to import.
"""

from collections.abc import Sequence

import grain


def row_order(
    parts: Sequence[Sequence[int]], *, weights: Sequence[float] = (), seed: int, shuffle: bool
) -> "grain.MapDataset[int]":
    """Which row comes at each place of an endless run: `order[place]` for any place >= 0.

    One part: place p lies in its epoch p // len(part), and an epoch visits each row once; with `shuffle` its order depends
    on the seed and the epoch, without it is the part's own. Several parts: each goes through its own epochs, and among any n places
    a part has its share of the weights, to within one or two. Which part comes when depends on the weights alone.

    Args:
        parts: the rows of each dataset, as numbers.
        weights: one for each part; none: all parts weigh the same.
        seed: decides every epoch of every part.
        shuffle: a new order each epoch.

    Raises:
        ValueError: a part without rows, weights that are not positive or not one for each part, or a negative seed.
    """
    if not parts or not all(len(part) for part in parts):
        raise ValueError("there are no rows to draw from; the split or the list of rows is empty")
    if seed < 0:
        raise ValueError(f"the seed must not be negative; got {seed}")
    if weights and (len(weights) != len(parts) or min(weights) <= 0):
        raise ValueError(
            f"a mixture needs one weight above 0 for each of its {len(parts)} datasets; got {list(weights)}"
        )
    orders = []
    for number, part in enumerate(parts):
        order = grain.MapDataset.source(part)
        if shuffle:
            order = order.seed(seed + number).shuffle()
        orders.append(order.repeat())
    return orders[0] if len(orders) == 1 else grain.MapDataset.mix(orders, list(weights) or None)
