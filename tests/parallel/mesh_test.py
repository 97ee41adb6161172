"""The mesh takes the devices it is given, or says what does not multiply. Eight virtual CPU devices."""

import jax
import pytest
from jax.sharding import AxisType

from dapo_jax.parallel.mesh import make_mesh, make_meshes


@pytest.mark.parametrize(
    ("sizes", "shape"),
    [
        ({}, (1, 8, 1, 1)),
        ({"data": 2, "fsdp": 2, "tensor": 2}, (2, 2, 2, 1)),
        ({"fsdp": 2, "tensor": -1}, (1, 2, 4, 1)),
        ({"data": -1, "fsdp": 1}, (8, 1, 1, 1)),
        ({"fsdp": 2, "context": -1}, (1, 2, 1, 4)),
        ({"fsdp": -1, "tensor": 8}, (1, 1, 8, 1)),
    ],
)
def test_one_axis_takes_what_the_others_leave(sizes, shape):
    mesh = make_mesh(**sizes)
    assert mesh.axis_names == ("data", "fsdp", "tensor", "context")
    assert mesh.devices.shape == shape
    assert mesh.axis_types == (AxisType.Auto,) * 4


def test_a_mesh_may_be_of_some_of_the_devices():
    devices = jax.devices()[2:6]
    assert set(make_mesh(fsdp=2, tensor=2, devices=devices).devices.flat) == set(devices)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"fsdp": 2, "tensor": 2}, "data 1 x fsdp 2 x tensor 2 x context 1 need 4 devices, 8 are there"),
        ({"fsdp": 16}, "need 16 devices, 8 are there; set one of parallel.data, parallel.fsdp"),
        ({"tensor": 3}, "fsdp -1 x tensor 3 x context 1 need a multiple of 3 devices, 8 are there"),
        ({"data": -1, "fsdp": -1}, "at most one of them -1; got data -1 x fsdp -1 x tensor 1"),
        ({"tensor": 0}, "must be positive, .*; got data 1 x fsdp -1 x tensor 0"),
        ({"fsdp": -2}, "must be positive, .*; got data 1 x fsdp -2"),
    ],
)  # fmt: skip
def test_sizes_that_do_not_fit_are_refused_with_the_product(sizes, message):
    with pytest.raises(ValueError, match=message):
        make_mesh(**sizes)


def test_one_process_has_one_sampler_over_all_its_devices():
    meshes = make_meshes(make_mesh(data=2, fsdp=2, tensor=2))
    assert (meshes.count, meshes.index) == (1, 0)
    assert dict(meshes.sampler.shape) == {"data": 4, "fsdp": 1, "tensor": 2, "context": 1}
    assert meshes.publish.axis_names == ("sampler", "data", "fsdp", "tensor", "context")
    flat = [list(mesh.devices.flat) for mesh in (meshes.train, meshes.publish, meshes.sampler)]
    assert flat[0] == flat[1] == flat[2]


def test_the_weights_of_a_sampler_may_be_split_otherwise_than_the_trainers():
    assert make_meshes(make_mesh(fsdp=8), sampler_tensor=4).sampler.shape["tensor"] == 4
    with pytest.raises(ValueError, match=r"sampler_tensor=3 must divide the 8 devices of a sampler"):
        make_meshes(make_mesh(fsdp=8), sampler_tensor=3)
    with pytest.raises(ValueError, match=r"sampler_hosts=2 must divide the 1 processes"):
        make_meshes(make_mesh(fsdp=8), sampler_hosts=2)
