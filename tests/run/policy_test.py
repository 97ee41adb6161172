"""Policies found by name: presets, shipped models, folders, runs."""

import jax
import numpy as np
import pytest

from dapo_jax.config import ConfigError, ModelConfig, ParallelConfig, to_yaml
from dapo_jax.run.policy import find_policy, load_policy, mesh_of


def leaves(policy):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(policy.params)]


def test_a_saved_policy_is_loaded_as_it_was(model, tmp_path):
    policy = load_policy(ModelConfig(source=model))
    policy.save(tmp_path / "copy")
    again = load_policy(ModelConfig(source=str(tmp_path / "copy")))
    assert again.decoder == policy.decoder
    assert again.tokenizer == policy.tokenizer
    for a, b in zip(leaves(again), leaves(policy), strict=True):
        np.testing.assert_array_equal(a, b)


def test_the_shipped_model_is_there():
    policy = load_policy(ModelConfig(source="shipped:quickstart"))
    assert policy.decoder.vocab_size == policy.tokenizer.vocab_size
    assert policy.tokenizer.decode(policy.tokenizer.encode("47+85=132")) == "47+85=132"


@pytest.mark.parametrize(
    ("source", "tokenizer", "message"),
    [
        ("preset:tyni", "byte", "nearest is 'tiny'"),
        ("preset:tiny", "words", "must be byte, or char:ALPHABET"),
        ("preset:tiny", "char:", "alphabet is empty"),
        ("shipped:", "byte", "these are: quickstart"),
        ("shipped:../assets", "byte", "is shipped"),
        ("no/such/folder", "byte", "cannot read a model from"),
    ],
)
def test_an_unknown_policy_is_a_configuration_error(source, tokenizer, message):
    with pytest.raises(ConfigError, match=message) as error:
        load_policy(ModelConfig(source=source, tokenizer=tokenizer))
    assert str(error.value).startswith(f"model.source={source!r}: ")


def test_a_run_is_its_latest_checkpoint(finished):
    for a, b in zip(leaves(find_policy(str(finished.run_dir))), leaves(finished.policy), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_run_without_a_checkpoint_says_so(micro, tmp_path):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "config.yaml").write_text(to_yaml(micro(tmp_path)))
    with pytest.raises(ConfigError, match=r"cannot be used yet: there is no checkpoint in"):
        find_policy(str(tmp_path))


def test_the_rows_of_a_microbatch_must_spread_over_the_mesh():
    """data 2 x fsdp 2 = 4 devices hold rows; the tensor axis does not."""
    axes = ParallelConfig(data=2, fsdp=2, tensor=2)
    assert mesh_of(axes, rows_per_microbatch=4).shape["tensor"] == 2
    with pytest.raises(ConfigError, match=r"rows_per_microbatch=6 .* parallel.fsdp = 4, .* 8 is"):
        mesh_of(axes, rows_per_microbatch=6)
