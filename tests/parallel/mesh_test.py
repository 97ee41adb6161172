"""Meshes over eight virtual CPU devices, and over described TPU slices."""

import re

import pytest
from jax.sharding import AxisType

from dapo_jax.parallel.mesh import make_mesh, make_meshes


@pytest.mark.parametrize(
    ("sizes", "shape"),
    [
        ({}, (1, 8, 1, 1)),
        ({"data": 2, "fsdp": 2, "tensor": 2}, (2, 2, 2, 1)),
        ({"data": -1, "fsdp": 1}, (8, 1, 1, 1)),
        ({"fsdp": 2, "context": -1}, (1, 2, 1, 4)),
    ],
)
def test_one_axis_takes_the_remaining_devices(sizes, shape):
    mesh = make_mesh(**sizes)
    assert mesh.axis_names == ("data", "fsdp", "tensor", "context")
    assert mesh.devices.shape == shape
    assert mesh.axis_types == (AxisType.Auto,) * 4


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"fsdp": 2, "tensor": 2}, "data 1 x fsdp 2 x tensor 2 x context 1 .* 4 devices, .* 8; set parallel.fsdp=4$"),
        ({"tensor": 3}, "fsdp -1 x tensor 3 x context 1 .* 3 devices, .* 8; set parallel.tensor=2$"),
        ({"data": 3, "fsdp": 4}, "set parallel.data=2$"),
        ({"data": 3, "fsdp": 3}, "set parallel.data=1 parallel.fsdp=-1 parallel.tensor=1 parallel.context=1$"),
        ({"data": -1, "fsdp": 16, "tensor": 2}, "set parallel.fsdp=4$"),
    ],
)  # fmt: skip
def test_sizes_that_do_not_fit_are_refused_with_the_product_and_a_mesh_that_fits(sizes, message):
    with pytest.raises(ValueError, match=message) as refused:
        make_mesh(**sizes)
    changes = re.findall(r"parallel\.(\w+)=(-?\d+)", str(refused.value))
    assert make_mesh(**sizes | {name: int(size) for name, size in changes}).size == 8


def test_one_process_has_one_sampler_over_all_its_devices():
    meshes = make_meshes(make_mesh(data=2, fsdp=2, tensor=2))
    assert (meshes.count, meshes.index) == (1, 0)
    assert dict(meshes.sampler.shape) == {"data": 4, "fsdp": 1, "tensor": 2, "context": 1}
    assert meshes.publish.axis_names == ("sampler", "data", "fsdp", "tensor", "context")
    flat = [list(mesh.devices.flat) for mesh in (meshes.train, meshes.publish, meshes.sampler)]
    assert flat[0] == flat[1] == flat[2]


def test_the_weights_of_a_sampler_may_be_split_otherwise_than_the_trainers():
    assert make_meshes(make_mesh(fsdp=8), sampler_tensor=4).sampler.shape["tensor"] == 4
    with pytest.raises(ValueError, match=r"sampler_tensor=3 .* 8 devices"):
        make_meshes(make_mesh(fsdp=8), sampler_tensor=3)
    with pytest.raises(ValueError, match=r"sampler_hosts=2 .* 1 processes"):
        make_meshes(make_mesh(fsdp=8), sampler_hosts=2)


def slices(count, topology="v5p:2x2x2", chips_per_host=(2, 2, 1)):
    """The devices of several TPU slices, as libtpu describes them."""
    pytest.importorskip("libtpu", reason="the extra tpu")
    from jax.experimental import topologies

    from dapo_jax.plan.topologies import describe_only

    describe_only()
    return topologies.get_topology_desc(
        topology_name=topology, platform="tpu", chips_per_host_bounds=chips_per_host, num_slices=count
    ).devices


@pytest.mark.parametrize("sizes", [{"data": 2, "tensor": 4}, {"data": 4}, {"data": -1, "fsdp": 1}])
def test_only_data_reaches_from_slice_to_slice(sizes):
    mesh = make_mesh(**sizes, devices=slices(2))
    parts = mesh.devices.reshape(2, -1)
    assert [{device.slice_index for device in part} for part in parts] == [{0}, {1}]
    for one, other in zip(*parts, strict=True):
        assert (one.coords, one.core_on_chip) == (other.coords, other.core_on_chip)  # one path for both
    assert list(make_meshes(mesh).publish.devices.flat) == list(mesh.devices.flat)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({}, r"2 slices, parallel\.data=1: fsdp .*parallel\.data=2"),
        ({"fsdp": 1, "tensor": -1}, r"parallel\.data=1: tensor .* 8 devices of a slice"),
    ],
)
def test_a_mesh_that_would_cross_the_network_between_slices_is_refused(sizes, message):
    with pytest.raises(ValueError, match=message):
        make_mesh(**sizes, devices=slices(2))


def test_the_suggested_mesh_fits_the_slices():
    with pytest.raises(ValueError, match=r"set parallel\.data=2$"):
        make_mesh(fsdp=4, tensor=2, devices=slices(2))
    with pytest.raises(ValueError, match=r"set parallel\.data=2 parallel\.fsdp=-1 "):
        make_mesh(data=3, fsdp=3, devices=slices(2))


def test_a_sampler_has_processes_of_one_slice():
    mesh = make_mesh(data=2, devices=slices(2))
    assert make_meshes(mesh, sampler_hosts=2).count == 2
    with pytest.raises(ValueError, match=r"sampler_hosts=4, .*between slices; .* 2 processes"):
        make_meshes(mesh, sampler_hosts=4)
