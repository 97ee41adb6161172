"""Model folders: bit-for-bit round trips, transformers' names and orientations, errors with file and key."""

import json

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dapo_jax.models.folder import load_model, save_model
from dapo_jax.models.rope import Rope
from dapo_jax.testing import tiny_decoder_config, tiny_params

FAMILIES = {
    "llama": tiny_decoder_config(norm_eps=1e-5, ropes=(Rope(theta=5e5),)),
    "qwen2": tiny_decoder_config(qkv_bias=True, tied_embeddings=False),
    "qwen3": tiny_decoder_config(qk_norm="head", head_dim=16),
}


@pytest.fixture
def folder(tmp_path):
    """An untied Qwen2, on disk."""
    save_model(tmp_path, FAMILIES["qwen2"], tiny_params(FAMILIES["qwen2"]))
    return tmp_path


def edit_config(folder, **changes):
    described = json.loads((folder / "config.json").read_text()) | changes
    kept = {key: value for key, value in described.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(kept))


def edit_tensors(folder, **changes):
    tensors = load_file(folder / "model.safetensors") | {
        name.replace("__", "."): value for name, value in changes.items()
    }
    save_file(
        {name: value for name, value in tensors.items() if value is not ...}, folder / "model.safetensors"
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_comes_back_bit_for_bit(family, tmp_path):
    config, params = FAMILIES[family], tiny_params(FAMILIES[family])
    save_model(tmp_path / "new" / "folder", config, params)
    found_config, found = load_model(tmp_path / "new" / "folder")
    assert found_config == config
    assert jax.tree.structure(found) == jax.tree.structure(params)
    jax.tree.map(np.testing.assert_array_equal, found, params)
    assert json.loads((tmp_path / "new/folder/config.json").read_text())["model_type"] == family


def test_a_tied_matrix_may_be_stored_twice_but_not_differ(tmp_path):
    """The published Qwen3-0.6B is tied but has lm_head.weight."""
    save_model(tmp_path, FAMILIES["llama"], tiny_params(FAMILIES["llama"]))
    embedding = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    edit_tensors(tmp_path, lm_head__weight=embedding)
    assert "lm_head" not in load_model(tmp_path)[1]["ends"]
    edit_tensors(tmp_path, lm_head__weight=embedding + 1)
    with pytest.raises(ValueError, match=r"model\.safetensors: lm_head\.weight"):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gemma3"}, r"config\.json: model_type 'gemma3'"),
        ({"hidden_size": 40}, r"model\.safetensors: model\.embed_tokens\.weight has shape \(20, 32\), .* \(20, 40\)"),
        ({"num_hidden_layers": 3}, r"model\.safetensors lacks the tensor 'model\.layers\.2\."),
        ({"num_hidden_layers": 1}, r"model\.safetensors has the tensors \['model\.layers\.1\."),
        ({"model_type": "llama", "architectures": ...}, r"has the tensors \['model\.layers\.0\.self_attn\.k_proj\.bias'"),
    ],
)  # fmt: skip
def test_a_config_that_does_not_fit_is_refused(folder, changes, message):
    edit_config(folder, **changes)
    with pytest.raises(ValueError, match=message):
        load_model(folder)


def test_tensors_that_do_not_fit_are_refused(folder):
    edit_tensors(folder, model__norm__weight=np.zeros(31, np.float32))
    with pytest.raises(ValueError, match=r"safetensors: model\.norm\.weight has shape \(31,\).*\(32,\)"):
        load_model(folder)
    edit_tensors(folder, model__norm__weight=...)
    with pytest.raises(ValueError, match=r"model\.safetensors lacks the tensor 'model\.norm\.weight'"):
        load_model(folder)


def test_missing_and_damaged_files_are_named(folder, tmp_path):
    with pytest.raises(ValueError, match=r"cannot read a model from .*nowhere/config\.json"):
        load_model(tmp_path / "nowhere")
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:1000])
    with pytest.raises(ValueError, match=r"cannot read .*model\.safetensors"):
        load_model(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"cannot read .*model\.safetensors"):
        load_model(folder)
    (folder / "config.json").write_text('{"model_type": ')
    with pytest.raises(ValueError, match=r"config\.json is not a JSON file"):
        load_model(folder)
