"""`dapo-jax convert`: weights are equal bit for bit, with their tokenizer, and nothing is overwritten."""

import errno
import json
import os
import re
from pathlib import Path

import jax
import numpy as np
import pytest

from dapo_jax.cli import main
from dapo_jax.commands.convert import convert
from dapo_jax.commands.inference import sample
from dapo_jax.config import ConfigError, ModelConfig
from dapo_jax.models.folder import load_model
from dapo_jax.run.policy import Policy, find_policy, load_policy
from dapo_jax.testing import tiny_decoder_config, tiny_params
from dapo_jax.text.huggingface import HuggingFaceTokenizer
from dapo_jax.text.tokenizers import load_tokenizer

pytest.importorskip("gguf")

from tests.models.gguf_files import TOKENS, write_gguf
from tests.text.folders import files_of

GOLDEN = Path(__file__).parents[1] / "golden" / "families"
CONFIG = tiny_decoder_config(vocab_size=len(TOKENS), layers=1)
"""A Llama, tied."""


def same(found, expected):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory):
    return write_gguf(tmp_path_factory.mktemp("gguf") / "model.gguf", CONFIG, tiny_params(CONFIG))


def test_a_gguf_file_becomes_a_folder_that_can_be_sampled(gguf_file, tmp_path):
    done = convert(str(gguf_file), str(tmp_path / "out"))
    assert (done.family, done.parameters, done.dtype) == ("llama", CONFIG.parameters, "float32")
    assert done.tensor_bytes == 4 * CONFIG.parameters
    assert done.files == (
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"
    )  # fmt: skip
    config, params = load_model(done.folder)
    assert config == CONFIG
    same(params, tiny_params(CONFIG))
    tokenizer = load_tokenizer(done.folder)
    assert (tokenizer.eos_id, tokenizer.pad_id, tokenizer.chat_template is None) == (2, 0, False)
    described = json.loads((done.folder / "config.json").read_text())
    assert [described[f"{name}_token_id"] for name in ("bos", "eos", "pad")] == [1, [2, 0], 0]
    (group,) = sample(str(done.folder), ["the"], max_response_tokens=3, slots=8)
    assert len(group.rollouts) == 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_folder_becomes_a_folder_of_the_given_dtype(dtype, gguf_file, tmp_path):
    first = convert(str(gguf_file), str(tmp_path / "first")).folder
    described = json.loads((first / "config.json").read_text())
    described |= {"_name_or_path": "a/name", "eos_token_id": [2, 0]}
    (first / "config.json").write_text(json.dumps(described))
    (first / "chat_template.jinja").write_text("{{ messages }}")
    done = convert(str(first), str(tmp_path / "second"), dtype=dtype)
    size = {"float32": 4, "bfloat16": 2}[dtype]
    assert done.tensor_bytes == size * CONFIG.parameters
    rounded = jax.tree.map(lambda leaf: leaf.astype(dtype).astype("float32"), tiny_params(CONFIG))
    same(load_model(done.folder)[1], rounded)
    again = json.loads((done.folder / "config.json").read_text())
    assert again == described | {"dtype": dtype, "torch_dtype": dtype}
    kept = {path.name for path in first.iterdir()} - {"config.json", "model.safetensors"}
    assert all((done.folder / name).read_bytes() == (first / name).read_bytes() for name in kept)


def test_a_folder_with_quantized_matrices_becomes_a_folder_without(tmp_path):
    """transformers would read the quantization in config.json, and look for quantized tensors."""
    source = GOLDEN / "gpt_oss_mxfp4"
    done = convert(str(source), str(tmp_path / "out"))
    described, again = (json.loads((f / "config.json").read_text()) for f in (source, done.folder))
    del described["quantization_config"]
    assert again == described | {"dtype": "float32", "torch_dtype": "float32"}
    same(load_model(done.folder)[1], load_model(source)[1])


def test_a_run_a_shipped_model_and_a_preset_become_folders(finished, tmp_path):
    """Of a run, its latest checkpoint."""
    for source, policy in (
        (str(finished.run_dir), finished.policy),
        ("shipped:quickstart", find_policy("shipped:quickstart")),
        ("preset:tiny", find_policy("preset:tiny")),
    ):
        done = convert(source, str(tmp_path / source.replace("/", "_")))
        same(load_model(done.folder)[1], policy.params)
        assert load_tokenizer(done.folder) == policy.tokenizer
        described = json.loads((done.folder / "config.json").read_text())
        ids = described["eos_token_id"], described["pad_token_id"]
        assert ids == (policy.tokenizer.eos_id, policy.tokenizer.pad_id)


def test_nothing_is_overwritten(gguf_file, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match=r"full exists and is not empty"):
        convert(str(gguf_file), str(tmp_path / "full"))
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["notes.txt"]
    with pytest.raises(ConfigError, match=r"notes\.txt"):
        convert(str(gguf_file), str(tmp_path / "full" / "notes.txt"))
    (tmp_path / "empty").mkdir()
    convert(str(gguf_file), str(tmp_path / "empty"))


@pytest.mark.parametrize(
    ("source", "dtype", "message"),
    [
        ("nowhere", "float32", "nowhere is neither a run nor a model: there is no such folder"),
        ("nowhere.gguf", "float32", r"nowhere\.gguf: cannot read nowhere\.gguf"),
        ("HALF", "float32", r"half\.gguf"),
        ("gs://bucket/m.gguf", "float32", r"gs://bucket/m\.gguf: a GGUF file must be on a local disk"),
        ("preset:tyni", "float32", "nearest is 'tiny'"),
        ("shipped:quickstart", "int8", "dtype: found 'int8', needs float32 or bfloat16"),
    ],
)
def test_an_invalid_source_leaves_no_target(source, dtype, message, gguf_file, bucket, tmp_path):
    (tmp_path / "half.gguf").write_bytes(gguf_file.read_bytes()[:20_000])
    with pytest.raises(ConfigError, match=message):
        convert(source.replace("HALF", f"{tmp_path}/half.gguf"), str(tmp_path / "out"), dtype=dtype)
    assert not (tmp_path / "out").exists()


def test_a_gguf_file_cannot_be_trained_directly(gguf_file):
    with pytest.raises(ConfigError, match="convert it with `dapo-jax convert FILE FOLDER`"):
        load_policy(ModelConfig(source=str(gguf_file)))


def test_the_command_prints_a_summary(gguf_file, tmp_path, capsys):
    assert main(["convert", str(gguf_file), str(tmp_path / "out"), "--dtype", "bfloat16"]) == 0
    output = capsys.readouterr().out
    assert output.startswith(
        f"{tmp_path}/out: a llama of {CONFIG.parameters:,} parameters, {2 * CONFIG.parameters:,} bytes in bfloat16"
    )
    assert "tokenizer.json" in output
    assert main(["convert", str(gguf_file), str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err.startswith("dapo-jax convert: ")


@pytest.mark.parametrize(
    ("name", "output"),
    [("link", r"target=.*link"), ("a" * 300, "File name too long")],
)
def test_a_target_that_cannot_be_made_is_a_usage_error(name, output, tmp_path, capsys):
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    assert main(["convert", "shipped:quickstart", str(tmp_path / name)]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert re.search(output, line)
    assert {path.name for path in tmp_path.iterdir()} == {"link"}


@pytest.mark.parametrize(
    ("kind", "there", "room"), [("gguf", True, 2), ("shipped", False, 1), ("folder", False, 2)]
)
def test_a_full_disk_leaves_nothing_behind(kind, there, room, monkeypatch, gguf_file, tmp_path):
    """Neither an empty tokenizer.json nor a folder that the next attempt would refuse. Flushing fails after `room` files."""
    from dapo_jax import storage

    target, flushed = tmp_path / "out", []
    if there:
        target.mkdir()
    source = str(gguf_file) if kind == "gguf" else "shipped:quickstart"
    if kind == "folder":
        source = str(convert(source, str(tmp_path / "first")).folder)

    def fsync(number):
        flushed.append(number)
        if len(flushed) > room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(storage.os, "fsync", fsync)
    with pytest.raises(ConfigError, match="No space left"):
        convert(source, str(target))
    assert target.exists() == there
    assert not there or not list(target.iterdir())


@pytest.mark.parametrize("where", ["config.json", "generation_config.json", "tokenizer_config.json"])
def test_a_policy_keeps_the_tokens_that_its_folder_names(where, tmp_path):
    """A run's `model` is written like this: transformers needs its `bos_token_id` to generate without a prompt."""
    begin = "<|im_start|>"
    bos, ends = (begin, [2, 0]) if where == "tokenizer_config.json" else (None, 2)
    tokenizer = HuggingFaceTokenizer(files_of(generation={"eos_token_id": ends}, bos_token=bos))
    decoder = tiny_decoder_config(vocab_size=tokenizer.vocab_size, layers=1)
    source = tmp_path / "source"
    Policy(decoder=decoder, params=tiny_params(decoder), tokenizer=tokenizer).save(source)
    named = {"bos_token_id": tokenizer.encode(begin).tolist()[0]}
    if where != "tokenizer_config.json":
        named["decoder_start_token_id"] = 7
        wrong = {"image_token_id": "not one", "sep_token_id": -1}
        content = json.loads((source / where).read_text())
        (source / where).write_text(json.dumps(content | named | wrong))
    policy = find_policy(str(source))
    policy.save(tmp_path / "saved")
    described = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert {key: described.get(key) for key in named} == named
    assert {"image_token_id", "sep_token_id"}.isdisjoint(described)
    assert (described["eos_token_id"], described["pad_token_id"]) == (ends, tokenizer.pad_id)
    assert load_tokenizer(tmp_path / "saved").files.keys() >= tokenizer.files.keys()
