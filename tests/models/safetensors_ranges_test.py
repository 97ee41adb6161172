"""Tensors by ranges of bytes: what the library safetensors reads, and refused with the path where a file is not whole."""

import json
import struct

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dapo_jax.models.safetensors_ranges import stored_tensors
from dapo_jax.storage import path_of

KINDS = {"f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16}


@pytest.fixture(params=["local", "bucket"])
def file(request, tmp_path):
    """A file with a matrix, a vector and an empty tensor of each type."""
    rng = np.random.default_rng(0)
    tensors = {
        f"{name}.{kind}": rng.standard_normal(shape).astype(dtype)
        for kind, dtype in KINDS.items()
        for name, shape in {"matrix": (6, 5), "vector": (7,), "cube": (2, 3, 4), "nothing": (0, 4)}.items()
    }
    (tmp_path / "model").mkdir()
    save_file(tensors, tmp_path / "model" / "model.safetensors")
    if request.param == "local":
        return tmp_path / "model" / "model.safetensors"
    request.getfixturevalue("bucket").store(tmp_path / "model", "gs://bucket/model")
    return path_of("gs://bucket/model/model.safetensors")


def test_tensors_and_their_parts_are_those_that_the_library_reads(file, tmp_path):
    expected = load_file(tmp_path / "model" / "model.safetensors")
    found = stored_tensors(file)
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        whole = expected[name]
        assert tensor.shape == whole.shape
        for cut in (slice(None),), (slice(1, 3),), (slice(1, 3), slice(2, 4)), (slice(2, 2),):
            part = tensor.read(cut[: whole.ndim])
            assert part.dtype == whole.dtype
            np.testing.assert_array_equal(part, whole[cut[: whole.ndim]])


def test_of_a_tensor_its_rows_are_fetched_and_no_others(tmp_path, bucket):
    """The header's length and the header; then 2 rows of 5 float32, also where 2 of 5 columns are asked for."""
    (tmp_path / "model").mkdir()
    save_file({"w": np.zeros((6, 5), np.float32)}, tmp_path / "model" / "model.safetensors")
    bucket.store(tmp_path / "model", "gs://bucket/model")
    del bucket.handed_out[:]
    tensor = stored_tensors(path_of("gs://bucket/model/model.safetensors"))["w"]
    sizes = [size for _, size in bucket.handed_out]
    assert (sizes[0], sum(sizes)) == (8, (tmp_path / "model" / "model.safetensors").stat().st_size - 120)
    for cut in (slice(3, 5), slice(None)), (slice(3, 5), slice(1, 3)):
        del bucket.handed_out[:]
        tensor.read(cut)
        assert [size for _, size in bucket.handed_out] == [40]


def written(path, header, *, data=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


GOOD = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"{", "is not a JSON file"),
        ([], "holds a list"),
        ({"w": 3}, "its header describes 'w' as 3; a tensor needs a dtype, a shape and two data_offsets"),
        ({"w": GOOD | {"dtype": 3}}, "its header describes 'w' as {'dtype': "),
        ({"w": GOOD | {"dtype": "I8"}}, "w is stored as I8, which is not covered; F32, F16, BF16 are"),
        ({"w": GOOD | {"shape": [-2]}}, "its header describes 'w' as {'dtype': "),
        ({"w": GOOD | {"shape": [True, 2]}}, "its header describes 'w' as {'dtype': "),
        ({"w": GOOD | {"shape": [3]}}, r"w has 8 bytes, its shape \[3\] needs 12"),
        ({"w": GOOD | {"data_offsets": [0]}}, "its header describes 'w' as {'dtype': "),
        # Tensors follow the 8 bytes of the header's length and the header, 62 bytes of one tensor and 122 of two.
        (
            {"w": GOOD | {"data_offsets": [8, 16]}},
            "w begins at byte 78, and must begin at byte 70, where what lies before",
        ),
        ({"v": GOOD, "w": GOOD}, "w begins at byte 130, and must begin at byte 138, where what lies before"),
        ({"w": GOOD | {"shape": [10**12], "data_offsets": [0, 4 * 10**12]}}, "its header is of a file of"),
        ({}, "its header is of a file of"),
    ],
)
def test_a_header_that_is_none_is_refused_with_the_path(header, message, tmp_path):
    path = written(tmp_path / "model.safetensors", header, data=bytes(8))
    with pytest.raises(ValueError, match=message) as error:
        stored_tensors(path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize("length", [10**9, 2**63])
def test_a_header_longer_than_the_file_is_not_fetched(length, tmp_path):
    path = written(tmp_path / "model.safetensors", {"w": GOOD}, data=bytes(8), length=length)
    with pytest.raises(ValueError, match="is longer than the file of"):
        stored_tensors(path)


@pytest.mark.parametrize("kept", [0, 5, 30, -1])
def test_a_file_that_was_cut_short_is_refused_with_the_path(kept, tmp_path):
    path = written(tmp_path / "model.safetensors", {"w": GOOD}, data=bytes(8))
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ValueError, match=f"cannot read {path}"):
        stored_tensors(path)
