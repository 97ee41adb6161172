"""Orders the devices of a TPU slice so that neighbours along the mesh axes are few links apart.

The chips of a slice form a grid with links between neighbours, and each device has coordinates. A run needs a flat order in which the
devices of a process are adjacent (`mesh`), which `jax.experimental.mesh_utils` does not provide. Such an order combines a path through each
process's block of chips with a path through the grid of blocks. For both paths, this module tries all orders of the dimensions, and chooses
the order of devices with the fewest links between neighbours. It first compares links along `tensor`, the axis with the most traffic, and then
along `context`, `fsdp` and `data`.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

_DIGIT = tuple[int, int, int]
"""A part of a path that runs along one dimension of the grid: (dimension, step size, number of places)."""


def along_links(devices: Sequence[Any], shape: Sequence[int]) -> list[Any]:
    """Returns the devices of a TPU slice in the order with the fewest links between neighbours along the axes of a mesh.

    `devices` are given process by process, and `shape` has the sizes of the mesh axes `data`, `fsdp`, `tensor` and `context`. The given order is kept if no other order is
    better, or if the processes' blocks are not boxes of equal shape that together fill a larger box.
    """
    places = np.array([(*device.coords, device.core_on_chip) for device in devices])
    grid = _grid_of(places, np.array([device.process_index for device in devices]))
    orders = [np.arange(len(places)), *(_orders(*grid, shape) if grid else ())]
    best = min(orders, key=lambda order: _cost(places[order].reshape(*shape, -1)))
    return [devices[index] for index in best.tolist()]


def _cost(places: Int[np.ndarray, "data fsdp tensor context 4"]) -> tuple[float, ...]:
    """Returns the mean number of links between neighbouring devices along each mesh axis. The first and last device of an axis count as neighbours.

    Wrap-around links of the slice are not considered, because devices do not report them.
    """
    chips = places[..., :3]  # without the core, because devices of one chip need no link

    def links(axis: int) -> float:
        return round(float(np.abs(np.roll(chips, -1, axis) - chips).sum(-1).mean()), 6)

    data, fsdp, tensor, context = map(links, range(4))
    return tensor, context, fsdp, data


def _grid_of(
    places: Int[np.ndarray, "devices 4"], processes: Int[np.ndarray, " devices"]
) -> tuple[Int[np.ndarray, "x y z core"], tuple[int, ...]] | None:
    """Returns the device index at each place (x, y and z of the chip, and the core on this chip), and the size of each process's block of chips.

    Returns None if the blocks are not boxes of equal shape that together fill a larger box.
    """
    places = places - places.min(0)
    corners, blocks = [], set()
    for process in np.unique(processes):
        own = places[processes == process]
        corners.append(own.min(0))
        blocks.add(tuple((own.max(0) - own.min(0) + 1).tolist()))
    block = blocks.pop()
    whole = places.max(0) + 1
    if blocks or math.prod(whole) != len(places) or any((corner % block).any() for corner in corners):
        return None
    index = np.full(whole, -1)
    index[tuple(places.T)] = np.arange(len(places))
    filled = (index >= 0).all() and math.prod(block) * len(corners) == len(places)
    return (index, block) if filled else None


def _orders(
    index: Int[np.ndarray, "x y z core"], block: tuple[int, ...], shape: Sequence[int]
) -> Iterator[Int[np.ndarray, " devices"]]:
    """Yields paths through the grid, one for each order of the dimensions inside a block and of the dimensions between blocks."""
    inside = [(dimension, 1, size) for dimension, size in enumerate(block) if size > 1]
    blocks = [whole // part for whole, part in zip(index.shape, block, strict=True)]
    between = [(dimension, block[dimension], size) for dimension, size in enumerate(blocks) if size > 1]
    for inner, outer in itertools.product(itertools.permutations(inside), itertools.permutations(between)):
        if (axes := _shared_out([*inner, *outer], shape)) is None:
            continue
        places = np.zeros((*shape, len(block)), int)
        for number, digits in enumerate(axes):
            sizes = [-1 if axis == number else 1 for axis in range(len(shape))]
            places += _way(digits, len(block)).reshape(*sizes, len(block))
        yield index[tuple(places.reshape(-1, len(block)).T)]


def _shared_out(digits: list[_DIGIT], shape: Sequence[int]) -> list[list[_DIGIT]] | None:
    """Distributes the parts of a path over the mesh axes. The fastest-changing parts are assigned to the last axis. A part may be split between axes.

    Returns None if the parts cannot be split to match the axis sizes in `shape`.
    """
    axes: list[list[_DIGIT]] = []
    left = list(digits)
    for size in reversed(shape):
        axis: list[_DIGIT] = []
        while size > 1:
            dimension, step, steps = left.pop(0)
            if (taken := math.gcd(size, steps)) == 1:
                return None
            axis.append((dimension, step, taken))
            size //= taken
            if taken < steps:
                left.insert(0, (dimension, step * taken, steps // taken))
        axes.insert(0, axis)
    return axes


def _way(digits: list[_DIGIT], dimensions: int) -> Int[np.ndarray, "size dimensions"]:
    """Returns the places along one mesh axis. `digits` lists parts, fastest-changing first. The path turns back at each end, so that neighbours are linked."""
    number = np.arange(math.prod(steps for _, _, steps in digits))
    places = np.zeros((len(number), dimensions), int)
    before = 1
    for dimension, step, steps in digits:
        digit, before = number // before % steps, before * steps
        turned = number // before % 2 == 1
        places[:, dimension] += step * np.where(turned, steps - 1 - digit, digit)
    return places
