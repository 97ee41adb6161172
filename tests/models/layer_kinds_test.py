"""The contract of a kind of layer: its name is in its own file and in the tables of families and presets, and in no other file."""

import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dapo_jax.models.attention_mixer import ATTENTION
from dapo_jax.models.decoder import Block, graph_of
from dapo_jax.models.gated import GATED
from dapo_jax.models.gated_delta import GatedDelta
from dapo_jax.models.layer_kinds import LayerKind
from dapo_jax.models.projections import rope_tables
from dapo_jax.models.tensors import shapes_of
from dapo_jax.testing import tiny_decoder_config, tiny_params
from tests.prose import ROOT

NAMES = re.compile(
    r"gated.?delta|deltanet|mamba|delta_(?:blocks|layers)|linear_attention|latent.?attention|latent_blocks|gemma.?4|nemotron|mxfp4|\bwindow(?:s|ed)?\b|\bsliding", re.IGNORECASE
)  # fmt: skip
TABLES = {
    "models/delta_families.py",
    "models/families.py",
    "models/gemma4.py",
    "models/latent_families.py",
    "models/mamba_families.py",
    "models/presets.py",
}
OTHERS = {
    "models/architecture.py": "the options of attention",
    "models/attention.py": "attention over rows",
    "models/attention_mixer.py": "the mixer",
    "models/config_json.py": "keys of config.json",
    "models/cudnn.py": "attention over rows",
    "models/gated_delta.py": "the mixer",
    "models/gguf.py": "keys of GGUF files",
    "models/latent_attention.py": "the mixer",
    "models/kernels.py": "attention over rows",
    "models/experts.py": "the MLP",
    "models/mamba.py": "the mixer",
    "models/mxfp4.py": "weights in files",
    "models/safetensors_files.py": "weights in files",
    "models/recurrent.py": "what several mixers have in common",
    "models/layer_kinds.py": "the example of a cache's argument",
    "models/rope.py": "a scaling of rotations",
    "models/device_layout.py": "attention over rows",
    "parallel/training_layout.py": "attention over rows on a mesh",
    "sampling/cache.py": "attention over a cache",
    "sampling/cache_sizes.py": "the tokens that a layer keeps",
    "sampling/caches.py": "attention over a cache",
    "sampling/gpu_cache.py": "attention over a cache",
    "sampling/paged_cache.py": "attention over a cache",
    "sampling/page_tables.py": "pages before a window are free",
    "sampling/tpu_cache.py": "attention over a cache",
    "config/model_schema.py": "lora.targets has the name of a group of matrices",
    "health/watchdogs.py": "a window of steps",
    "parallel/gpu_settings.py": "Microsoft Windows",
    "report/build.py": "a window of the browser",
    "serving/text.py": "a window of characters",
    "text/stop_strings.py": "a window of characters",
    "text/thoughts.py": "models whose thoughts have other marks",
    "environments/rendering.py": "a model whose results follow their calls",
    "environments/tool_calls.py": "models whose calls have other formats",
}
"""Other files that may have such a word, and its meaning there."""
CLASSES = re.compile(
    r"\b(?:Attention|ATTENTION|LatentAttention|GatedDelta|Gated|GATED|Gemma4Mlp|Mamba|Experts)\b"
)


def sources():
    return {
        str(path.relative_to(ROOT / "dapo_jax")): path.read_text()
        for path in (ROOT / "dapo_jax").rglob("*.py")
    }


def naming(texts):
    return {name for name, text in texts.items() if NAMES.search(text)}


def test_only_its_own_file_and_the_tables_name_a_kind_of_layer():
    found = naming(sources())
    assert found <= TABLES | OTHERS.keys()
    assert OTHERS.keys() <= found, "remove the files that no longer have such a word"


@pytest.mark.parametrize(
    "word", ["gated_delta", "mamba_blocks", "latent_attention", "Gemma4Mlp", "Nemotron", "mxfp4", "window"]
)
def test_a_name_in_the_engine_would_be_found(word):
    texts = sources()
    engine = "sampling/engine.py"
    assert engine in naming({engine: f"{texts[engine]}\n{word} = 1\n"})


def test_only_the_tables_import_the_classes_of_kinds():
    found = {
        name
        for name, text in sources().items()
        for line in text.splitlines()
        if "import" in line and CLASSES.search(line.partition("import")[2])
    }
    assert found <= TABLES


def test_a_layer_may_have_a_mixer_or_an_mlp_alone():
    config = tiny_decoder_config()
    x, (rope,) = jnp.ones((32, 3)), rope_tables(jnp.arange(3, dtype=jnp.int32), config)
    shapes = {}
    for name, kind in {"mixer": LayerKind(ATTENTION, None), "mlp": LayerKind(None, GATED)}.items():
        block = Block(config, kind, rngs=nnx.Rngs(0))
        out, kept, _ = jax.eval_shape(
            lambda block=block: block(x, rope, lambda query, key, value: (query, key))
        )
        assert (out.shape, kept is None) == (x.shape, name == "mlp")
        shapes[name] = set(kind.parameters(config))
    whole = set(LayerKind(ATTENTION, GATED).parameters(config))
    assert shapes["mixer"] | shapes["mlp"] == whole
    assert not shapes["mixer"] & shapes["mlp"]


def test_layers_without_a_repeated_period_are_one_segment():
    once = tiny_decoder_config(layers=4, mixers=(*[GatedDelta(2, 2, 4, 4)] * 3, ATTENTION))
    names = (*["delta_blocks"] * 3, "blocks")
    assert once.periods == ((names, 1),)
    assert replace(once, layers=8, mixers=once.mixers * 2).periods == ((names, 2),)


def test_each_kind_has_a_stack_of_its_own_and_layers_keep_their_order():
    """Two sizes of one mixer are two kinds. The two layers of each stack have different places, so all weights matter."""
    small, large = GatedDelta(2, 2, 4, 4), GatedDelta(2, 4, 8, 8)
    config = tiny_decoder_config(layers=5, mixers=(*(small, ATTENTION) * 2, large))
    names = ["delta_blocks", "blocks", "delta_blocks_2"]
    assert config.periods == ((tuple(names[:2]), 2), ((names[2],), 1))
    assert config.places == ((names[0], 0), (names[1], 0), (names[0], 1), (names[1], 1), (names[2], 0))
    assert list(config.stacks) == sorted(names)
    assert (len(config.paged), len(config.fixed)) == (2, 3)
    graph, params = graph_of(config), tiny_params(config)
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, shapes_of(config))
    tokens = jnp.arange(6, dtype=jnp.int32)[None]

    def hidden(params):
        return nnx.merge(graph, params)(tokens, tokens, jnp.ones_like(tokens))

    run = jax.jit(hidden)
    for place in range(2):
        other = jax.tree.map(jnp.copy, params)
        query = other["blocks"]["query"]
        other["blocks"]["query"] = query.replace(query.get_value().at[place].set(0.0))
        assert np.abs(run(other) - run(params)).max() > 1e-3
    assert config.parameters == sum(leaf.size for leaf in jax.tree.leaves(params))
