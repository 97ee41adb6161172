"""safetensors files, single, in shards and in a bucket: read back by the library itself, and refused if damaged."""

import json
import shutil

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dapo_jax.models.folder import load_model, save_model
from dapo_jax.models.safetensors_files import INDEX, stored_tensors
from dapo_jax.storage import path_of
from dapo_jax.testing import tiny_decoder_config, tiny_params

CONFIG = tiny_decoder_config(qk_norm="head", tied_embeddings=False)
SHARD = 16_000
"""Bytes: the 22,592 parameters need six or seven such files."""


def listed(folder):
    return json.loads((folder / INDEX).read_text())


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sharded")
    save_model(folder, CONFIG, tiny_params(CONFIG), max_shard_bytes=SHARD)
    return folder


@pytest.fixture
def sharded(made, tmp_path):
    """A copy to be damaged."""
    return shutil.copytree(made, tmp_path / "sharded")


def test_a_model_in_shards_comes_back_bit_for_bit(made):
    config, params = load_model(made)
    assert config == CONFIG
    jax.tree.map(np.testing.assert_array_equal, params, tiny_params(CONFIG))


def test_shards_are_filled_up_to_the_limit_and_listed(made, tmp_path):
    files = sorted(made.glob("*.safetensors"))
    assert len(files) > 5
    assert files[0].name == f"model-00001-of-{len(files):05}.safetensors"
    together = {}
    for file in files:
        tensors = load_file(file)
        assert sum(value.nbytes for value in tensors.values()) <= SHARD
        assert all(listed(made)["weight_map"][name] == file.name for name in tensors)
        together |= tensors
    assert listed(made)["metadata"]["total_size"] == 4 * CONFIG.parameters
    save_model(tmp_path, CONFIG, tiny_params(CONFIG))
    single = load_file(tmp_path / "model.safetensors")
    assert single.keys() == together.keys()
    assert all(np.array_equal(single[name], together[name]) for name in single)
    assert not (tmp_path / INDEX).exists()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_rounded_values_come_back_bit_for_bit(dtype, tmp_path):
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    rounded = jax.tree.map(lambda leaf: leaf.astype(kind).astype(np.float32), tiny_params(CONFIG))
    assert save_model(tmp_path, CONFIG, rounded, dtype=dtype) == 2 * CONFIG.parameters
    assert {value.dtype for value in load_file(tmp_path / "model.safetensors").values()} == {kind}
    jax.tree.map(np.testing.assert_array_equal, load_model(tmp_path)[1], rounded)


def test_a_model_replaces_an_earlier_one_completely(sharded):
    save_model(sharded, CONFIG, tiny_params(CONFIG, seed=1))
    assert {path.name for path in sharded.iterdir()} == {"config.json", "model.safetensors"}
    jax.tree.map(np.testing.assert_array_equal, load_model(sharded)[1], tiny_params(CONFIG, seed=1))
    save_model(sharded, CONFIG, tiny_params(CONFIG), max_shard_bytes=SHARD)
    assert not (sharded / "model.safetensors").exists()
    jax.tree.map(np.testing.assert_array_equal, load_model(sharded)[1], tiny_params(CONFIG))


def test_an_interrupted_export_is_not_a_model(sharded, monkeypatch):
    """Even over an older model, whose config.json would fit the half-written files."""
    from dapo_jax.models import safetensors_files

    write, written = safetensors_files.write_file, []

    def interrupted(*arguments, **how):
        if len(written) == 2:
            raise KeyboardInterrupt
        written.append(write(*arguments, **how))
        return written[-1]

    monkeypatch.setattr(safetensors_files, "write_file", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save_model(sharded, CONFIG, tiny_params(CONFIG), max_shard_bytes=SHARD)
    assert {path.name for path in sharded.iterdir()} == {
        path.name for path in sharded.glob("model-0000[12]-*")
    }
    with pytest.raises(ValueError, match=r"cannot read a model from .*config\.json"):
        load_model(sharded)


def test_an_index_that_names_a_wrong_or_missing_file_is_refused(sharded):
    content = listed(sharded)
    files = content["weight_map"]
    files["model.layers.1.mlp.up_proj.weight"] = files["model.embed_tokens.weight"]
    (sharded / INDEX).write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"'model\.layers\.1\.mlp\.up_proj\.weight' in .*does not contain"):
        load_model(sharded)
    (sharded / files["model.norm.weight"]).unlink()
    with pytest.raises(ValueError, match=r"index\.json lists '.*' in 'model-.*not in this folder"):
        load_model(sharded)


@pytest.mark.parametrize("content", ["{", "{}"])
def test_a_broken_index_is_refused_with_its_path(content, sharded):
    (sharded / INDEX).write_text(content)
    with pytest.raises(ValueError, match=r"sharded/model\.safetensors\.index\.json"):
        load_model(sharded)


@pytest.mark.parametrize("kept", [0, 5, 300, 0.5, -1], ids=str)
def test_a_truncated_file_is_refused_with_its_path(kept, sharded):
    """Without its header, in the header, after it, in half, and one byte short."""
    path = sorted(sharded.glob("*.safetensors"))[1]
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * kept) if isinstance(kept, float) else kept])
    with pytest.raises(ValueError, match=rf"cannot read .*{path.name}"):
        load_model(sharded)


def test_weights_that_are_quantised_are_refused(tmp_path):
    save_model(tmp_path, CONFIG, tiny_params(CONFIG))
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].astype(np.int8)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"model\.norm\.weight .* I8.* F32, F16, BF16"):
        load_model(tmp_path)


def test_a_folder_of_pickled_weights_says_so(tmp_path):
    save_model(tmp_path, CONFIG, tiny_params(CONFIG))
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"pytorch_model\.bin is a pickle"):
        load_model(tmp_path)


def test_only_rotary_frequencies_of_old_checkpoints_are_ignored(tmp_path):
    save_model(tmp_path, CONFIG, tiny_params(CONFIG))
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)
    save_file(tensors, tmp_path / "model.safetensors")
    jax.tree.map(np.testing.assert_array_equal, load_model(tmp_path)[1], tiny_params(CONFIG))
    tensors["model.layers.0.self_attn.sinks"] = np.ones(4, np.float32)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"has the tensors \['model\.layers\.0\.self_attn\.sinks'\]"):
        load_model(tmp_path)


@pytest.fixture(params=["local", "bucket"])
def file(request, tmp_path):
    """A file with a matrix, a vector, a cube and an empty tensor, each in another type."""
    rng = np.random.default_rng(0)
    shapes = {"matrix": (6, 5), "vector": (7,), "cube": (2, 3, 4), "empty": (0, 4)}
    kinds = (np.float32, np.float16, ml_dtypes.bfloat16, np.float32)
    tensors = {
        name: rng.standard_normal(shape).astype(kind)
        for (name, shape), kind in zip(shapes.items(), kinds, strict=True)
    }
    save_file(tensors, tmp_path / "model.safetensors")
    if request.param == "local":
        return tmp_path / "model.safetensors"
    request.getfixturevalue("bucket").store(tmp_path, "gs://bucket/model")
    return path_of("gs://bucket/model/model.safetensors")


def test_ranges_hold_the_parts_that_the_library_reads(file, tmp_path):
    expected, found = load_file(tmp_path / "model.safetensors"), stored_tensors(file)
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        whole = expected[name]
        assert tensor.shape == whole.shape
        for cut in (slice(None),), (slice(1, 3),), (slice(1, 3), slice(2, 4)), (slice(2, 2),):
            part = tensor.read(cut[: whole.ndim])
            assert part.dtype == whole.dtype
            np.testing.assert_array_equal(part, whole[cut[: whole.ndim]])


def test_only_the_rows_of_a_part_are_fetched(tmp_path, bucket):
    """The header's length and the header; then 2 rows of 5 float32, also for 2 of 5 columns."""
    save_file({"w": np.zeros((6, 5), np.float32)}, tmp_path / "model.safetensors")
    bucket.store(tmp_path, "gs://bucket/model")
    del bucket.handed_out[:]
    tensor = stored_tensors(path_of("gs://bucket/model/model.safetensors"))["w"]
    sizes = [size for _, size in bucket.handed_out]
    assert (sizes[0], sum(sizes)) == (8, (tmp_path / "model.safetensors").stat().st_size - 120)
    for cut in (slice(3, 5), slice(None)), (slice(3, 5), slice(1, 3)):
        del bucket.handed_out[:]
        tensor.read(cut)
        assert [size for _, size in bucket.handed_out] == [40]


@pytest.mark.parametrize("kept", [0, 5, 30, -1])
def test_a_truncated_file_of_a_bucket_is_refused_with_the_path(kept, tmp_path):
    path = tmp_path / "model.safetensors"
    save_file({"w": np.zeros(2, np.float32)}, path)
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ValueError, match=f"cannot read {path}"):
        stored_tensors(path)


@pytest.mark.parametrize(
    "entry",
    [
        '{"dtype":"F32","shape":[3],"data_offsets":[0,8]}',
        '{"dtype":"F32","shape":[2],"data_offsets":["0",8]}',
        '{"dtype":"F32","shap":[2],"data_offsets":[0,8]}',
        "null",
    ],
)
def test_a_damaged_header_is_refused_with_the_path(entry, tmp_path):
    path, header = tmp_path / "model.safetensors", f'{{"w":{entry}}}'.encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(ValueError, match=f"cannot read {path}.* w "):
        stored_tensors(path)
