"""Policies found by name: presets, shipped models, folders, runs."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from dapo_jax.config import ConfigError, ModelConfig, ParallelConfig, to_yaml
from dapo_jax.models.tensors import shapes_of
from dapo_jax.parallel.sharding import shardings
from dapo_jax.run.meshes import mesh_of
from dapo_jax.run.policy import find_policy, load_policy
from dapo_jax.run.resume_point import model_files
from dapo_jax.text.huggingface import HuggingFaceTokenizer
from tests.models.hub_server import serve_hub
from tests.run.conftest import assert_equal_weights
from tests.text.folders import files_of


def test_a_saved_policy_is_loaded_as_it_was(model, tmp_path):
    policy = load_policy(ModelConfig(source=model))
    policy.save(tmp_path / "copy")
    again = load_policy(ModelConfig(source=str(tmp_path / "copy")))
    assert again.decoder == policy.decoder
    assert again.tokenizer == policy.tokenizer
    assert_equal_weights(again, policy)


def test_the_files_of_a_saved_base_model_name_the_token_that_ends_a_turn(chat_model, tmp_path):
    """A base model of Qwen has the end token <|endoftext|> (id 0), and its chat template writes <|im_end|> (id 2)."""
    policy = load_policy(ModelConfig(source=chat_model))
    files = files_of(eos_token="<|endoftext|>", generation={"eos_token_id": 0})
    replace(policy, tokenizer=HuggingFaceTokenizer(files)).save(tmp_path / "saved")
    for name in ("config.json", "generation_config.json"):
        assert json.loads((tmp_path / "saved" / name).read_text())["eos_token_id"] == [0, 2]
    again = load_policy(ModelConfig(source=str(tmp_path / "saved"))).tokenizer
    assert (again.eos_id, again.stop_ids) == (0, (0, 2))


@pytest.mark.parametrize(
    ("source", "tokenizer", "message"),
    [
        ("preset:tyni", "byte", "'tiny'"),
        ("preset:tiny", "words", "char:ALPHABET"),
        ("preset:tiny", "char:", "alphabet '' is empty"),
        ("shipped:../assets", "byte", "quickstart"),
        ("no/such/folder", "byte", "cannot read a model from"),
    ],
)
def test_an_unknown_policy_is_a_configuration_error(source, tokenizer, message):
    with pytest.raises(ConfigError, match=message) as error:
        load_policy(ModelConfig(source=source, tokenizer=tokenizer))
    assert str(error.value).startswith(f"model.source={source!r}: ")


@pytest.mark.parametrize("source", ["folder", "preset:tiny"])
def test_weights_go_onto_the_mesh_where_training_has_them(source, model):
    config = ModelConfig(source=model if source == "folder" else source)
    mesh = mesh_of(ParallelConfig(fsdp=4, tensor=2 if source == "preset:tiny" else 1, data=-1))
    policy = load_policy(config, seed=3, mesh=mesh)
    wanted = shardings(shapes_of(policy.decoder), mesh)
    for leaf, place in zip(jax.tree.leaves(policy.params), jax.tree.leaves(wanted), strict=True):
        assert leaf.sharding.is_equivalent_to(place, leaf.ndim)
    assert_equal_weights(policy, load_policy(config, seed=3))


def test_a_mesh_that_does_not_fit_is_a_configuration_error(model):
    """One key head cannot be split in two."""
    mesh = mesh_of(ParallelConfig(tensor=2))
    with pytest.raises(ConfigError, match=r"not divisible by parallel\.tensor=2"):
        load_policy(ModelConfig(source=model), mesh=mesh)


def test_a_run_is_its_latest_checkpoint(finished, monkeypatch):
    monkeypatch.setattr("dapo_jax.run.policy.load_model", None)
    assert_equal_weights(find_policy(str(finished.run_dir)), finished)


def test_a_run_without_a_checkpoint_is_refused(micro, tmp_path):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "config.yaml").write_text(to_yaml(micro(tmp_path)))
    with pytest.raises(ConfigError, match=r"cannot be used: there is no checkpoint in .* yet"):
        find_policy(str(tmp_path))


def test_the_rows_of_a_microbatch_must_spread_over_the_mesh():
    """data 2 x fsdp 2 = 4 devices hold rows; the tensor axis does not."""
    axes = ParallelConfig(data=2, fsdp=2, tensor=2)
    assert mesh_of(axes, rows_per_microbatch=4).shape["tensor"] == 2
    with pytest.raises(ConfigError, match=r"rows_per_microbatch=6 .* parallel.fsdp = 4, .* 8"):
        mesh_of(axes, rows_per_microbatch=6)


@pytest.fixture
def stored(bucket, model, chat_model):
    """A bucket with a model folder for each kind of tokenizer."""
    bucket.store(Path(model), "gs://bucket/models/char")
    bucket.store(Path(chat_model), "gs://bucket/models/chat")
    return bucket


@pytest.mark.parametrize("spread", [False, True])
@pytest.mark.parametrize("kind", ["char", "chat"])
def test_a_model_in_a_bucket_equals_the_local_one(kind, spread, stored, model, chat_model):
    mesh = mesh_of(ParallelConfig()) if spread else None
    local = load_policy(ModelConfig(source=model if kind == "char" else chat_model), mesh=mesh)
    found = load_policy(ModelConfig(source=f"gs://bucket/models/{kind}"), mesh=mesh)
    assert found.decoder == local.decoder
    text = "1+1=2"
    assert found.tokenizer.encode(text).tolist() == local.tokenizer.encode(text).tolist()
    assert model_files(found.folder, weights=True) == model_files(local.folder, weights=True)
    for a, b in zip(jax.tree.leaves(found.params), jax.tree.leaves(local.params), strict=True):
        assert a.sharding.is_equivalent_to(b.sharding, a.ndim)
        np.testing.assert_array_equal(a, b)


def removed(bucket, name):
    del bucket.buckets["bucket"][f"models/char/{name}"]


@pytest.mark.parametrize(
    ("source", "change", "message"),
    [
        ("gs://none/model", None, r"bucket 'none'"),
        ("s3://bucket/model", None, r"neither a local path nor in a bucket"),
        ("gs://bucket/models/char", "config.json", r"gs://.*/config\.json: No such file"),
        ("gs://bucket/models/char", "tokenizer.json", r"a tokenizer from gs://.*: No such file"),
        ("gs://bucket/models/char", "model.safetensors", r"neither this file nor model\.safetensors\.index"),
        ("gs://bucket/models/char", "rights", r"storage\.objects\.get access; .* needs roles/storage"),
    ],
)
def test_a_model_that_cannot_be_read_from_a_bucket_is_a_configuration_error(source, change, message, stored):
    if change == "rights":
        stored.granted = {"storage.buckets.get", "storage.objects.list"}
    elif change is not None:
        removed(stored, change)
    with pytest.raises(ConfigError, match=message) as error:
        load_policy(ModelConfig(source=source))
    assert str(error.value).startswith(f"model.source={source!r}: ")


@pytest.mark.parametrize("source", ["preset:tiny", "FOLDER", "gs://bucket/models/char"])
def test_without_weights_a_policy_has_only_shapes(source, stored, model, tmp_path):
    removed(stored, "model.safetensors")
    shutil.copytree(model, tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    found = load_policy(ModelConfig(source=source.replace("FOLDER", str(tmp_path / "model"))), weights=False)
    assert {type(leaf) for leaf in jax.tree.leaves(found.params)} == {jax.ShapeDtypeStruct}
    if source != "preset:tiny":
        assert found.decoder == load_policy(ModelConfig(source=model)).decoder


ASK = """
from dapo_jax.config import ModelConfig
from dapo_jax.run.policy import load_policy
policy = load_policy(ModelConfig(source="hf:org/model@main"))
print(policy.decoder.vocab_size, policy.tokenizer.stop_ids)
try:
    load_policy(ModelConfig(source="hf:org/other"))
except ValueError as error:
    print(error)
"""


def test_a_model_is_read_from_the_hub_and_fetched_once(chat_model, tmp_path):
    """In another process: huggingface_hub reads its environment when it is imported."""
    pytest.importorskip("huggingface_hub")
    files = {path.name: path.read_bytes() for path in Path(chat_model).iterdir()}
    with serve_hub({"org/model": files}) as (address, requests):
        hub = {"HF_ENDPOINT": address, "HF_HOME": str(tmp_path / "home"), "no_proxy": "127.0.0.1"}
        environment = os.environ | hub | {"PYTHONPATH": str(Path(__file__).parents[2])}
        done = subprocess.run([sys.executable, "-c", ASK], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first == "336 (2,)"
    assert second.startswith("model.source='hf:org/other': the hub has no repository org/other")
    fetched = [path for method, path in requests if method == "GET" and "/resolve/" in path]
    assert len(fetched) == len(set(fetched)) == len(files)
