"""Tensors one at a time: placed on their sharding, read once, and the host never holds the model twice."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dapo_jax.models.decoder import unstacked
from dapo_jax.models.folder import load_model, save_model
from dapo_jax.models.safetensors_files import SafetensorsFolder
from dapo_jax.models.tensors import place, shapes_of, tensor_shapes
from dapo_jax.parallel.mesh import make_mesh
from dapo_jax.parallel.sharding import shardings
from dapo_jax.testing import tiny_decoder_config, tiny_params

CONFIG = tiny_decoder_config(qkv_bias=True, tied_embeddings=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("model")
    save_model(made, CONFIG, tiny_params(CONFIG))
    return made


class Recording:
    """A tensor file that records the shapes that are read."""

    def __init__(self, file):
        self._file, self.where, self.shapes = file, file.where, file.shapes
        self.read_shapes = []

    def read(self, name, cut):
        found = self._file.read(name, cut)
        self.read_shapes.append((name, found.shape))
        return found


def on_mesh(**axes):
    mesh = make_mesh(devices=jax.devices()[:4], **axes)
    return lambda shapes: shardings(shapes, mesh)


@pytest.mark.parametrize("axes", [{"fsdp": 4}, {"fsdp": 2, "tensor": 2}, {"data": 4, "fsdp": 1}], ids=str)
def test_a_model_is_placed_on_its_sharding_bit_for_bit(folder, axes):
    where = on_mesh(**axes)
    _, params = load_model(folder, shardings=where)
    jax.tree.map(np.testing.assert_array_equal, params, tiny_params(CONFIG))
    wanted = where(shapes_of(CONFIG))
    for leaf, there in zip(jax.tree.leaves(params), jax.tree.leaves(wanted), strict=True):
        assert leaf.sharding.is_equivalent_to(there, leaf.ndim)


def test_without_shardings_weights_may_be_moved_to_any_device(folder):
    """A jitted function over a mesh refuses arrays that are tied to one of its devices."""
    _, params = load_model(folder)
    place = shardings(shapes_of(CONFIG), make_mesh(devices=jax.devices()[:4], fsdp=4))
    moved = jax.jit(lambda tree: tree, out_shardings=place)(params)
    assert len(moved["ends"]["embedding"].sharding.device_set) == 4


@pytest.mark.parametrize(
    ("axes", "largest"),
    [
        # The largest matrix is 48 x 32: in quarters along embed, then in quarters along both; then whole, on 4 devices.
        ({"fsdp": 4}, 48 * 32 // 4),
        ({"fsdp": 2, "tensor": 2}, 48 * 32 // 4),
        ({"data": 4, "fsdp": 1}, 48 * 32),
    ],
    ids=str,
)
def test_each_part_is_read_once_and_no_part_is_larger_than_a_device_needs(folder, axes, largest):
    file = Recording(SafetensorsFolder(folder))
    place(CONFIG, file, shardings=on_mesh(**axes))
    sizes = [np.prod(shape) for _, shape in file.read_shapes]
    assert sum(sizes) == sum(np.prod(shape) for shape in tensor_shapes(CONFIG).values()) == CONFIG.parameters
    matrices = [np.prod(shape) for name, shape in file.read_shapes if "layers" in name]
    assert max(matrices) == largest


@pytest.mark.parametrize("apart", [False, True], ids=["stacked", "layers apart"])
def test_a_model_can_be_held_in_bfloat16(apart, folder):
    """Except norms, which are applied in float32."""
    _, params = load_model(folder, dtype="bfloat16", apart=apart)
    exact = unstacked(tiny_params(CONFIG)) if apart else tiny_params(CONFIG)
    kinds = set()
    for (path, leaf), whole in zip(
        jax.tree_util.tree_leaves_with_path(params), jax.tree.leaves(exact), strict=True
    ):
        kind = jnp.float32 if "norm" in jax.tree_util.keystr(path) else jnp.bfloat16
        kinds.add(kind)
        assert leaf.dtype == kind
        np.testing.assert_array_equal(leaf, whole.astype(kind))
    assert len(kinds) == 2


def test_sharded_weights_are_written_whole(folder, tmp_path):
    _, params = load_model(folder, shardings=on_mesh(fsdp=2, tensor=2))
    save_model(tmp_path, CONFIG, params)
    assert (tmp_path / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
