"""A model in a bucket equals the one on a disk bit for bit, and all processes together read it once, on any mesh."""

import json
import math
import re
from dataclasses import replace

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from dapo_jax.models.folder import load_model, save_model
from dapo_jax.models.tensors import shapes_of
from dapo_jax.parallel.mesh import make_mesh
from dapo_jax.parallel.sharding import _mover, read_by_rows, shardings
from dapo_jax.testing import tiny_decoder_config, tiny_params
from tests import several

CONFIG = tiny_decoder_config(qkv_bias=True, tied_embeddings=False, embed_dim=64, vocab_size=20)
SHARD = 32_000
"""Bytes: the model needs several files."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("model")
    save_model(made, CONFIG, tiny_params(CONFIG), max_shard_bytes=SHARD)
    return made


def file_bytes(folder):
    """Returns (bytes of tensors, bytes of headers and of the index)."""
    tensors = 4 * CONFIG.parameters
    files = sum(path.stat().st_size for path in folder.iterdir() if path.name != "config.json")
    return tensors, files - tensors


def fetched(bucket, place):
    return sum(
        size
        for name, size in bucket.handed_out
        if name.startswith(place) and not name.endswith("config.json")
    )


AXES = [{"fsdp": 4, "tensor": 2}, {"fsdp": 8}, {"data": 2, "fsdp": 2, "context": 2}]


# Slow: other meshes. The first one splits rows and columns.
@pytest.mark.parametrize(
    "axes", [AXES[0], *(pytest.param(axes, marks=pytest.mark.slow) for axes in AXES[1:])], ids=str
)
def test_a_model_in_a_bucket_is_the_one_on_a_disk_and_is_fetched_once(axes, folder, bucket):
    """If each device read for itself, it would fetch all rows of a matrix with split columns."""
    bucket.store(folder, "gs://bucket/model")
    del bucket.handed_out[:]
    mesh = make_mesh(**axes)
    where = lambda shapes: shardings(shapes, mesh)  # noqa: E731
    _, params = load_model("gs://bucket/model", shardings=where, by_rows=read_by_rows)
    jax.tree.map(np.testing.assert_array_equal, params, tiny_params(CONFIG))
    for leaf, place in zip(jax.tree.leaves(params), jax.tree.leaves(where(shapes_of(CONFIG))), strict=True):
        assert leaf.sharding.is_equivalent_to(place, leaf.ndim)
    tensors, headers = file_bytes(folder)
    assert fetched(bucket, "gs://bucket/model") == tensors + headers


def test_a_padded_vocabulary_is_the_same_from_a_bucket(bucket, tmp_path):
    """20 rows on 8 devices that split the vocabulary: 24, the last 4 of them zeros."""
    config = tiny_decoder_config(heads=8, kv_heads=8, embed_dim=32)
    mesh = make_mesh(fsdp=1, tensor=8)
    where = lambda shapes: shardings(shapes, mesh)  # noqa: E731
    save_model(tmp_path, config, tiny_params(config))
    bucket.store(tmp_path, "gs://bucket/model")
    filled = replace(config, vocab_multiple=8)
    _, local = load_model(tmp_path, filled, shardings=where)
    _, params = load_model("gs://bucket/model", filled, shardings=where, by_rows=read_by_rows)
    assert params["ends"]["embedding"].shape == (24, 32)
    jax.tree.map(np.testing.assert_array_equal, params, local)


@pytest.mark.parametrize("stored", ["float32", "bfloat16", pytest.param("float16", marks=pytest.mark.slow)])
def test_any_stored_dtype_gives_the_weights_of_a_disk(stored, bucket, tmp_path):
    save_model(tmp_path, CONFIG, tiny_params(CONFIG), dtype=stored)
    bucket.store(tmp_path, "gs://bucket/model")
    where = lambda shapes: shardings(shapes, make_mesh(fsdp=8))  # noqa: E731
    for dtype in ("float32", "bfloat16"):
        _, params = load_model("gs://bucket/model", shardings=where, by_rows=read_by_rows, dtype=dtype)
        _, local = load_model(tmp_path, dtype=dtype)
        jax.tree.map(np.testing.assert_array_equal, params, local)


@pytest.mark.parametrize("rows", [5, 8, 17])
def test_rows_that_the_devices_do_not_divide_are_read_once(rows):
    asked = []
    values = np.arange(rows * 8, dtype=np.float32).reshape(rows, 8).astype(ml_dtypes.bfloat16)

    def read(start, stop):
        asked.append((start, stop))
        return np.pad(values[start:stop], ((0, stop - max(start, min(stop, rows))), (0, 0)))

    mesh = make_mesh(fsdp=8)
    found = read_by_rows(read, (rows, 8), (rows, 2, 4), NamedSharding(mesh, PartitionSpec(None, None, None)))
    np.testing.assert_array_equal(found, values.reshape(rows, 2, 4))
    assert asked == [(0, -(-rows // 8) * 8)]


@pytest.mark.parametrize("axes", AXES, ids=str)
def test_no_device_gathers_more_than_its_part_of_the_target(axes):
    """A matrix of 16 heads by 64 columns, which the compiler could otherwise gather whole on every device."""
    mesh = make_mesh(**axes)
    target = NamedSharding(mesh, PartitionSpec("tensor", None, "fsdp"))
    spread = jax.ShapeDtypeStruct(
        (128, 64), np.float32, sharding=NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    )
    text = _mover((128, 64), (16, 8, 64), target).lower(spread).compile().as_text()
    gathered = re.findall(r"= f32\[([\d,]+)\]\S* all-(?:gather|reduce)\(", text)
    sizes = [math.prod(map(int, shape.split(","))) for shape in gathered]
    assert max(sizes, default=0) <= math.prod(target.shard_shape((16, 8, 64)))


SHARES = """
import json
import sys

import jax
import numpy as np

from dapo_jax.models.folder import load_model
from dapo_jax.parallel import processes
from dapo_jax.parallel.mesh import make_mesh
from dapo_jax.parallel.sharding import read_by_rows, shardings

processes.start()
mesh = make_mesh(**json.loads(sys.argv[2]))
where = lambda shapes: shardings(shapes, mesh)
own = f"gs://bucket/{jax.process_index()}"
_, params = load_model(own, shardings=where, by_rows=read_by_rows)
_, local = load_model(sys.argv[1], shardings=where)
for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(local), strict=True):
    for mine, theirs in zip(a.addressable_shards, b.addressable_shards, strict=True):
        np.testing.assert_array_equal(mine.data, theirs.data)
print("the same", flush=True)
processes.leave()
"""


@pytest.mark.parametrize(
    "axes", [{"fsdp": 4}, pytest.param({"fsdp": 2, "tensor": 2}, marks=pytest.mark.slow)], ids=str
)
def test_each_of_two_processes_fetches_half_of_the_model(axes, folder, bucket):
    """Each reads its own copy, so that the server can count; both read headers and index. Four devices divide the rows of every tensor."""
    for process in range(2):
        bucket.store(folder, f"gs://bucket/{process}")
    del bucket.handed_out[:]
    outputs = several.run(SHARES, folder, json.dumps(axes), processes=2, devices=2)
    assert all("the same" in output for output in outputs)
    tensors, headers = file_bytes(folder)
    shares = [fetched(bucket, f"gs://bucket/{process}/") - headers for process in range(2)]
    assert sum(shares) == tensors
    assert shares == [tensors // 2] * 2
