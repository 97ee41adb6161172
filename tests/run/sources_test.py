"""What `model.source` names: errors for names without a prefix, and for runs that have saved nothing. The tokenizer of an adapter."""

import json
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path

import pytest

import dapo_jax
from dapo_jax.commands.datasets import show
from dapo_jax.config import ConfigError, DataConfig, ModelConfig, to_yaml
from dapo_jax.doctor.subject import STAND_IN, Subject
from dapo_jax.run.policy import find_policy, load_policy
from dapo_jax.run.sources import tokenizer_of

SHIPPED, GOLDEN = (
    Path(dapo_jax.__file__).parent / "assets" / "quickstart",
    Path(__file__).parents[1] / "golden",
)


@pytest.fixture
def repositories():
    """A base model whose response may also end with token 5, and an adapter that was trained with another chat template, as TRL writes it."""
    base = {path.name: path.read_bytes() for path in SHIPPED.iterdir()}
    base["generation_config.json"] = b'{"eos_token_id": [1, 5]}'
    adapter = {path.name: path.read_bytes() for path in (GOLDEN / "llama" / "adapter").iterdir()}
    described = json.loads(adapter["adapter_config.json"]) | {"base_model_name_or_path": "org/base"}
    adapter |= {name: base[name] for name in ("tokenizer.json", "tokenizer_config.json")}
    adapter |= {
        "adapter_config.json": json.dumps(described).encode(),
        "chat_template.jinja": b"{{ messages }}",
    }
    return {"org/base": base, "org/adapter": adapter}


def test_an_adapter_on_the_hub_is_read_with_its_own_chat_template_and_the_ends_of_its_base(
    repositories, tmp_path, monkeypatch
):
    """A stand-in for the client of the hub writes the files that match the patterns."""
    client = pytest.importorskip("huggingface_hub")

    def snapshot(name, *, allow_patterns, **_):
        for file, content in repositories[name].items():
            if any(fnmatch(file, pattern) for pattern in allow_patterns):
                (tmp_path / name).mkdir(parents=True, exist_ok=True)
                (tmp_path / name / file).write_bytes(content)
        return tmp_path / name

    monkeypatch.setattr(client, "snapshot_download", snapshot)
    monkeypatch.setattr(client.HfApi, "model_info", lambda *_, **__: 1 / 0)  # as if it could not be reached
    model = ModelConfig(source="hf:org/adapter")
    found = tokenizer_of(model)
    assert found.chat_template.source == "{{ messages }}"
    assert found.stop_ids == (1, 5)
    decoder, examined, folder, size, _ = Subject(replace(STAND_IN, model=model)).described
    assert (decoder.vocab_size, examined, folder) == (found.vocab_size, found, tmp_path / "org" / "base")
    assert size == len(repositories["org/base"]["model.safetensors"])


def test_prompts_are_shown_with_the_chat_template_of_an_adapter(repositories, tmp_path):
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    for folder, name in ((base, "org/base"), (adapter, "org/adapter")):
        folder.mkdir()
        for file, content in repositories[name].items():
            if "token" in file or "adapter" in file:  # prompts need the tokenizers alone
                (folder / file).write_bytes(content)
    described = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(
        json.dumps(described | {"base_model_name_or_path": str(base)})
    )
    (adapter / "chat_template.jinja").write_text("?{{ messages[0].content }}")
    (tmp_path / "own.jsonl").write_text('{"prompt": "3+3", "answer": "6"}')
    data = DataConfig(source="jsonl", path=str(tmp_path / "own.jsonl"), chat=True)
    assert show(data, model=str(adapter)).splitlines()[-1] == "?3+3"


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
