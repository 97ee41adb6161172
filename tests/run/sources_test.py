"""What `model.source` names: errors for names without a prefix, and for runs that have saved nothing."""

import pytest

from dapo_jax.config import ConfigError, ModelConfig, to_yaml
from dapo_jax.run.policy import find_policy, load_policy


@pytest.mark.parametrize(
    ("source", "meant"),
    [
        ("Qwen/Qwen3-0.6B", "hf:Qwen/Qwen3-0.6B"),
        ("https://huggingface.co/Qwen/Qwen3-0.6B", "hf:Qwen/Qwen3-0.6B"),
        ("qwen3-0.6b", "preset:qwen3-0.6b"),
    ],
)
def test_a_model_without_its_prefix_is_answered_with_the_prefix(source, meant):
    for read in (lambda: load_policy(ModelConfig(source=source)), lambda: find_policy(source)):
        with pytest.raises(ConfigError, match=rf" {meant}$"):
            read()


def test_a_missing_run_is_not_taken_for_a_model_on_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    with pytest.raises(ConfigError, match="runs/first is neither a run nor a model"):
        find_policy("runs/first")


@pytest.mark.parametrize("files", [["config.yaml"], [".lock"], ["config.yaml", "checkpoints/.keep"]])
def test_a_run_before_its_first_checkpoint_is_no_model_yet(files, micro, tmp_path):
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(to_yaml(micro(tmp_path)) if name == "config.yaml" else "")
    with pytest.raises(ConfigError, match=rf"{tmp_path}.* checkpoint .*yet"):
        find_policy(str(tmp_path))
