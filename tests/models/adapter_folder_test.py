"""Adapter folders: read and written as in PEFT; unsupported settings raise errors that name the key."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from dapo_jax.commands.convert import convert
from dapo_jax.config import ConfigError, ModelConfig
from dapo_jax.config.model_schema import LORA_TARGETS
from dapo_jax.models.adapter_folder import read_adapter, save_adapter
from dapo_jax.models.folder import load_model, read_config
from dapo_jax.models.lora import SETS, TARGETS, lora_shape, parted
from dapo_jax.models.tensors import exported, place_adapters
from dapo_jax.run.policy import load_policy
from dapo_jax.testing import tiny_decoder_config, tiny_params
from dapo_jax.text.tokenizers import CharTokenizer, save_tokenizer
from tests.models.parity_test import ALPHABET, TOLERANCE, logits_of

GOLDEN = sorted(path.parent for path in (Path(__file__).parents[1] / "golden").glob("*/adapter"))


@pytest.fixture(params=GOLDEN, ids=lambda path: path.name)
def golden(request):
    """(folder of the base, configuration with adapters, all parameters, PEFT's results)"""
    folder = request.param
    config, base = load_model(folder)
    found, file = read_adapter(folder / "adapter")
    config = replace(config, lora=found.shape)
    return (
        folder,
        config,
        nnx.merge_state(base, place_adapters(config, file)),
        load_file(folder / "adapter" / "golden.safetensors"),
    )


def test_logits_and_greedy_tokens_equal_those_of_peft(golden):
    _, config, params, expected = golden
    prompt, response = expected["tokens"], expected["greedy"]
    tokens = np.concatenate([prompt, response])
    found = logits_of(config, params, tokens)
    np.testing.assert_allclose(found[: len(prompt)], expected["logits"], rtol=0, atol=TOLERANCE)
    assert found[len(prompt) - 1 : -1].argmax(-1).tolist() == response.tolist()
    bare = logits_of(config.base, parted(params)[1], tokens)
    assert np.abs(bare - found).max() > 1.0, "the adapter changes something"


def test_an_adapter_of_peft_is_written_back_unchanged(golden, tmp_path):
    """The same tensors with the same names, and the same values of the keys that count."""
    folder, config, params, _ = golden
    save_adapter(tmp_path, config, parted(params)[0], base="org/model")
    found, theirs = (load_file(each / "adapter_model.safetensors") for each in (tmp_path, folder / "adapter"))
    assert found.keys() == theirs.keys()
    for name, tensor in theirs.items():
        np.testing.assert_array_equal(found[name], tensor)
    ours, theirs = (
        json.loads((each / "adapter_config.json").read_text()) for each in (tmp_path, folder / "adapter")
    )
    assert ours.pop("base_model_name_or_path") == "org/model"
    assert sorted(ours.pop("target_modules")) == sorted(theirs["target_modules"])
    assert {key: theirs[key] for key in ours} == ours


def test_a_merged_model_gives_the_same_logits(golden, tmp_path):
    _, config, params, expected = golden
    adapters, base = parted(params)
    tensors = {tensor.name: tensor.fetch() for tensor in exported(config, base, adapters)}
    save_file(tensors, tmp_path / "model.safetensors")
    shutil.copy(GOLDEN[0].parent / golden[0].name / "config.json", tmp_path)
    _, merged = load_model(tmp_path)
    found = logits_of(config.base, merged, expected["tokens"])
    np.testing.assert_allclose(found, expected["logits"], rtol=0, atol=TOLERANCE)


def test_the_code_of_the_documentation_opens_an_adapter(golden, tmp_path):
    """With PEFT installed: logits and 64 greedy tokens of a random adapter are equal."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("peft")
    folder, config, params, expected = golden
    adapters, base = parted(params)
    rng = np.random.default_rng(0)
    adapters = jax.tree.map(lambda leaf: jnp.asarray(rng.normal(0, 0.3, leaf.shape), "float32"), adapters)
    save_adapter(tmp_path, config, adapters, base=str(folder))
    page = (Path(__file__).parents[2] / "docs" / "adapters.md").read_text()
    [printed] = [part for part in page.split("\n\n") if part.startswith("    from transformers import")]
    loading = page[page.index(printed) :].split("\n\n")[1]
    code = "\n".join(line.removeprefix("    ") for line in (*printed.splitlines(), *loading.splitlines()))
    found: dict = {}
    exec(code.replace('"BASE"', repr(str(folder))).replace('"adapter"', repr(str(tmp_path))), found)
    model = found["model"].float().eval()
    tokens = [int(token) for token in expected["tokens"]]
    with torch.no_grad():
        for _ in range(64):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
        theirs = model(torch.tensor([tokens])).logits[0].numpy()
    ours = logits_of(config, nnx.merge_state(base, adapters), np.array(tokens))
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=5e-4)
    assert ours[len(expected["tokens"]) - 1 : -1].argmax(-1).tolist() == tokens[len(expected["tokens"]) :]


@pytest.fixture
def adapter(tmp_path):
    folder = tmp_path / "adapter"
    shutil.copytree(GOLDEN[0] / "adapter", folder)
    return folder


def edit(folder, **changes):
    path = folder / "adapter_config.json"
    described = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in described.items() if value is not ...}))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("use_dora", True),
        ("modules_to_save", ["lm_head"]),
        ("bias", "all"),
        ("rank_pattern", {"q_proj": 8}),
        ("layers_to_transform", [0]),
        ("init_lora_weights", "pissa"),
        ("peft_type", "LOHA"),
        ("use_something_new", True),
        ("r", 2.5),
        ("r", 0),
    ],
)
def test_settings_that_are_not_covered_are_refused_by_key(key, value, adapter):
    edit(adapter, **{key: value})
    with pytest.raises(ValueError, match=rf"adapter_config\.json: ({key}=|rank 0)"):
        read_adapter(adapter)


def test_an_adapter_of_another_base_is_refused_by_name(adapter):
    """A base with other widths, bases with more and fewer layers, and an adapter of the unembedding."""
    tensors = load_file(adapter / "adapter_model.safetensors")
    tensors["base_model.model.lm_head.lora_A.weight"] = np.zeros((2, 32), np.float32)
    save_file(tensors, adapter / "adapter_model.safetensors")
    found, file = read_adapter(adapter)
    for changes, words in [
        ({"embed_dim": 32}, r"has the tensors \['base_model\.model\.lm_head\.lora_A"),
        ({"embed_dim": 16}, r"k_proj\.lora_A\.weight .*\(2, 32\), .*\(2, 16\)"),
        ({"embed_dim": 32, "layers": 3}, r"lacks .*layers\.2\.self_attn\.k_proj\.lora_A\.weight"),
        ({"embed_dim": 32, "layers": 1}, r"has the tensors .*layers\.1\."),
    ]:
        config = tiny_decoder_config(
            **{"layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 8, **changes}, lora=found.shape
        )
        with pytest.raises(ValueError, match=words):
            place_adapters(config, file)


def test_an_interrupted_export_is_not_an_adapter(adapter, monkeypatch):
    """The folder has no adapter_config.json, not even the one of an earlier adapter."""
    config = tiny_decoder_config(lora=lora_shape(rank=2, alpha=1.0, targets=["mlp"]))
    monkeypatch.setattr("dapo_jax.models.adapter_folder.write_file", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        save_adapter(adapter, config, parted(tiny_params(config))[0], base="x")
    assert not (adapter / "adapter_config.json").exists()


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        (["all"], TARGETS[:7]),
        (["down_proj", "q_proj", "q_proj"], ("q_proj", "down_proj")),
        (["mlp", "v_proj"], ("v_proj", "gate_proj", "up_proj", "down_proj")),
    ],
)
def test_targets_name_matrices(targets, expected):
    assert (*SETS, *TARGETS) == LORA_TARGETS
    shape = lora_shape(rank=2, alpha=3.0, targets=targets)
    assert shape.targets == expected
    assert shape.scale == 1.5
    config = tiny_decoder_config(lora=shape)
    adapters = parted(jax.eval_shape(lambda: tiny_params(config)))[0]
    assert sum(leaf.size for leaf in jax.tree.leaves(adapters)) == config.trained_parameters
    assert len(jax.tree.leaves(adapters)) == 2 * len(expected)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"rank": 0}, "rank 0"),
        ({"alpha": 0.0}, "alpha 0.0"),
        (
            {"targets": ["lm_head"]},
            "'lm_head'.* all, attention, mlp, linear_attention, latent_attention, q_proj",
        ),
        ({"targets": []}, ": all, attention"),
    ],
)
def test_impossible_shapes_are_refused(how, words):
    with pytest.raises(ValueError, match=words):
        lora_shape(**{"rank": 2, "alpha": 1.0, "targets": ["all"], **how})


@pytest.mark.parametrize("moved", ["/gone/base", "gone base", "runs/gone"])
def test_an_adapter_whose_base_moved_is_refused_by_file_key_and_value(moved, adapter, monkeypatch):
    """A folder such as runs/gone could be a name on the hub, which does not have it either."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    edit(adapter, base_model_name_or_path=moved)
    with pytest.raises(ConfigError) as caught:
        load_policy(ModelConfig(source=str(adapter)))
    for words in (str(adapter / "adapter_config.json"), f"base_model_name_or_path={moved!r}", "ORG/NAME"):
        assert words in str(caught.value)
    asked_the_hub = moved == "runs/gone"
    assert ("HF_HUB_OFFLINE" in str(caught.value) or "the hub cannot" in str(caught.value)) == asked_the_hub


@pytest.fixture
def on_a_base(adapter, tmp_path):
    """An adapter whose base is a whole model with a tokenizer."""
    base = tmp_path / "base"
    shutil.copytree(GOLDEN[0], base, ignore=shutil.ignore_patterns("adapter"))
    save_tokenizer(CharTokenizer(ALPHABET), base)
    edit(adapter, base_model_name_or_path=str(base))
    return adapter


@pytest.mark.parametrize(("matrix", "value"), [("lora_A", np.nan), ("lora_B", -np.inf)])
def test_an_adapter_that_is_not_finite_is_neither_sampled_from_nor_merged(matrix, value, on_a_base, tmp_path):
    """Every command that takes a model reads it by `load_policy`."""
    tensors = load_file(on_a_base / "adapter_model.safetensors")
    name = next(name for name in tensors if matrix in name)
    tensors[name][0, 0] = value
    save_file(tensors, on_a_base / "adapter_model.safetensors")
    with pytest.raises(ConfigError, match=rf"adapter_model\.safetensors: {re.escape(name)} contains NaN"):
        load_policy(ModelConfig(source=str(on_a_base)))
    with pytest.raises(ConfigError, match=rf"{re.escape(name)} contains NaN or infinity"):
        convert(str(on_a_base), str(tmp_path / "out"), merge=True)
    assert not (tmp_path / "out").exists()


FAMILIES = Path(__file__).parents[1] / "golden" / "families"
WRAPPERS = {
    "gemma3": ("Gemma3ForConditionalGeneration", "gemma3", "model.vision_tower.encoder.layers.1.self_attn.q_proj"),
    "mistral3": ("Mistral3ForConditionalGeneration", "mistral", "model.vision_tower.transformer.layers.1.attention.q_proj"),
    "qwen3_5": ("Qwen3_5ForConditionalGeneration", "qwen3_5", "model.visual.blocks.1.attn.proj"),
}  # fmt: skip
"""For each model_type: the class, a golden text model, and a layer of the image encoder, by `named_modules()` of transformers 5.24.0.

In all three, the matrices of the text model are at `model.language_model.layers.N` (since transformers 4.52; before, at `language_model.model.layers.N`).
"""


@pytest.fixture(params=[*WRAPPERS, "ministral3"])
def wrapped(request, tmp_path):
    """Returns a folder with a config.json of a model for images and text, and the config.json of its text model."""
    name = "mistral3" if request.param == "ministral3" else request.param
    architecture, golden, encoder = WRAPPERS[name]
    golden = FAMILIES / ("ministral3" if request.param == "ministral3" else golden)
    described = {
        "model_type": name, "architectures": [architecture], "text_config": json.loads((golden / "config.json").read_text()),
    }  # fmt: skip
    folder = tmp_path / "base"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(described))
    return folder, golden, encoder


def test_an_adapter_has_the_names_of_its_base(wrapped, tmp_path):
    """PEFT 0.21.2 sets these names, and adapts the modules whose whole name matches target_modules. It ignores tensors of other names with a warning."""
    folder, golden, encoder = wrapped
    for base, layers in ((folder, "model.language_model.layers"), (golden, "model.layers")):
        config = replace(
            read_config(base), lora=lora_shape(rank=2, alpha=4.0, targets=["q_proj", "down_proj"])
        )
        adapters = parted(tiny_params(config))[0]
        save_adapter(tmp_path / "adapter", config, adapters, base=str(base))
        names = load_file(tmp_path / "adapter" / "adapter_model.safetensors").keys()
        attended = [layer for layer, (stack, _) in enumerate(config.places) if stack == "blocks"]
        modules = {f"{layers}.{layer}.self_attn.q_proj" for layer in attended}
        modules |= {f"{layers}.{layer}.mlp.down_proj" for layer in range(config.layers)}
        assert names == {
            f"base_model.model.{module}.lora_{part}.weight" for module in modules for part in "AB"
        }
        targets = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["target_modules"]
        if base == golden:
            assert targets == ["q_proj", "down_proj"]
            continue
        others = {encoder, f"{layers}.1.self_attn.k_proj", "model.multi_modal_projector.down_proj", "lm_head"}
        assert {each for each in modules | others if re.fullmatch(targets, each)} == modules


@pytest.mark.parametrize("form", ["model.language_model.", "language_model.model.", "model."])
def test_an_adapter_is_loaded_in_the_names_of_every_version_and_of_the_text_model_alone(
    form, wrapped, tmp_path
):
    folder, _, encoder = wrapped
    config = replace(read_config(folder), lora=lora_shape(rank=2, alpha=4.0, targets=["all"]))
    adapters = parted(tiny_params(config))[0]
    save_adapter(tmp_path, config, adapters, base=str(folder))
    path = tmp_path / "adapter_model.safetensors"
    tensors = {name.replace("model.language_model.", form, 1): each for name, each in load_file(path).items()}
    assert all(name.startswith(f"base_model.model.{form}layers.") for name in tensors)
    save_file(tensors, path)
    found, file = read_adapter(tmp_path)
    assert found.shape == config.lora
    jax.tree.map(np.testing.assert_array_equal, place_adapters(config, file), adapters)
    if form != "model.":  # PEFT adapts the image encoder, too, if target_modules names layers of both
        save_file(tensors | {f"base_model.model.{encoder}.lora_A.weight": np.ones((2, 4), np.float32)}, path)
        with pytest.warns(UserWarning, match=r"adapter_model\.safetensors: 1 tensors of the image encoder"):
            file = read_adapter(tmp_path)[1]
        jax.tree.map(np.testing.assert_array_equal, place_adapters(config, file), adapters)
