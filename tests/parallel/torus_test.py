"""Neighbours along the axes of a mesh are few links apart, and the devices of a process are adjacent; on slices that libtpu describes.

The tests count the links themselves, from the coordinates of the chips.
"""

from types import SimpleNamespace

import jax
import numpy as np
import pytest

from dapo_jax.parallel.mesh import AXES, make_mesh, make_meshes
from dapo_jax.parallel.torus import along_links


def described(topology):
    pytest.importorskip("libtpu", reason="the extra tpu")
    from dapo_jax.plan.topologies import devices_of, parse

    return devices_of(parse(topology))


def links(devices, axis):
    """Returns the number of links between neighbours along an axis; the last is a neighbour of the first."""
    chips = np.array([device.coords for device in devices.flat]).reshape(*devices.shape, 3)
    return np.abs(chips - np.roll(chips, -1, axis)).sum(-1)


def mean_links(devices):
    """Returns axis -> mean number of links, for axes with more than one device."""
    sizes = dict(zip(AXES, devices.shape, strict=True))
    return {
        name: round(float(links(devices, axis).mean()), 2)
        for axis, name in enumerate(AXES)
        if sizes[name] > 1
    }


@pytest.mark.parametrize(
    ("topology", "sizes", "expected"),
    [
        # The mesh of the 32B recipe, and its slice.
        ("v5p:4x4x8", {"tensor": 4}, {"fsdp": 1.12, "tensor": 1.0}),
        ("v5p:4x4x8", {}, {"fsdp": 1.03}),
        ("v5p:4x4x8", {"tensor": 4, "context": 2}, {"fsdp": 2.0, "tensor": 1.0, "context": 1.0}),
        # Hosts of 2x2 are two links apart.
        ("v5e:8x8", {"tensor": 4}, {"fsdp": 2.25, "tensor": 1.0}),
        # Two devices on a chip.
        ("tpu7x:4x4x4", {"tensor": 8}, {"fsdp": 1.25, "tensor": 0.5}),
    ],
)
def test_neighbours_are_few_links_apart(topology, sizes, expected):
    devices = described(topology)
    mesh = make_mesh(**{"fsdp": -1, **sizes}, devices=devices)
    assert set(mesh.devices.flat) == set(devices)
    assert mean_links(mesh.devices) == expected


@pytest.mark.parametrize("topology", ["v5p:4x4x8", "v5e:8x8", "v6e:16x16"])
@pytest.mark.parametrize("sizes", [{"tensor": 4}, {}])
def test_all_meshes_have_one_order_and_a_sampler_is_the_ring_of_its_host(topology, sizes):
    """0-1-3-2 in a block of 2x2: of 0-1-2-3 every second step would be two links."""
    train = make_mesh(**sizes, devices=described(topology))
    meshes = make_meshes(train, sampler_tensor=4)
    assert list(meshes.publish.devices.flat) == list(train.devices.flat)
    for sampler in meshes.publish.devices:
        assert len({device.process_index for device in sampler.flat}) == 1
        assert (links(sampler, AXES.index("tensor")) == 1).all()
    assert (
        len({row.flat[0].process_index for row in meshes.publish.devices}) == meshes.count == train.size // 4
    )


def test_samplers_of_several_hosts_have_hosts_that_are_linked():
    meshes = make_meshes(make_mesh(tensor=4, devices=described("v5p:4x4x8")), sampler_hosts=2)
    for sampler in meshes.publish.devices:
        assert len({device.process_index for device in sampler.flat}) == 2
        assert (links(sampler, AXES.index("data")) == 1).all()


def order(places, shape, processes=None):
    """Returns the order for chips at these places, given process by process."""
    devices = [
        SimpleNamespace(coords=place, core_on_chip=0, process_index=process)
        for place, process in zip(places, processes or [0] * len(places), strict=True)
    ]
    found = [devices.index(device) for device in along_links(devices, shape)]
    assert sorted(found) == list(range(len(places)))
    return found


GRID = [(x, y, 0) for y in range(2) for x in range(4)]
"""Numbered row by row: 0 1 2 3 / 4 5 6 7."""


def test_the_path_turns_at_each_end_of_the_grid():
    assert order(GRID, (1, 8, 1, 1)) == [0, 1, 2, 3, 7, 6, 5, 4]
    assert order(GRID, (1, 2, 4, 1)) == [0, 4, 5, 1, 2, 6, 7, 3]  # two rings, side by side


LAYERS = [(x, 0, z) for z in range(3) for x in range(4)]


@pytest.mark.parametrize(
    ("places", "shape", "processes"),
    [
        (GRID, (1, 8, 1, 1), [0, 0, 0, 1, 1, 1, 2, 2]),
        (GRID, (1, 8, 1, 1), [0, 0, 1, 1, 2, 3, 2, 3]),
        (GRID, (1, 8, 1, 1), [0, 1, 0, 1, 0, 1, 0, 1]),
        (GRID[:7], (1, 7, 1, 1), [0] * 7),
        (LAYERS, (1, 2, 6, 1), [z for _, _, z in LAYERS]),
    ],
    ids=["block sizes differ", "block shapes differ", "holes", "incomplete grid", "axes do not divide"],
)
def test_a_grid_without_equal_boxes_keeps_its_order(places, shape, processes):
    numbers = sorted(range(len(places)), key=lambda number: processes[number])
    assert order([places[number] for number in numbers], shape, sorted(processes)) == list(range(len(places)))


def test_devices_without_coordinates_are_ordered_process_by_process():
    assert list(make_mesh(data=2, tensor=4, fsdp=1).devices.flat) == jax.devices()
