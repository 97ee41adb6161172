"""Each model family against transformers: logits, greedy tokens, gradients, the cache, and files.

The models are tiny and random, in float32. transformers 5.24.0 (torch 2.13.0, CPU, eager attention) wrote `model.safetensors` and `config.json`, and computed
`expected.safetensors` from two rows of tokens, of which the second is padded:

* `logits` (in newer folders also `logits64`, computed in float64), and `greedy`: the 12 tokens that follow each row, by full recomputation.
* `grad.NAME`: the gradient of the sum of log p(token, given the tokens before it) over all tokens but the first of each row.
* `cache.N.keys`: the keys of layer N for the first row and its response, as attention multiplies them.

`config.older.json` describes the same model in the notation of transformers 4.

Tolerances: two right computations in float32 differ by up to 4.2e-5 in logits of up to 25 (eager against fused attention in transformers), and float64 by up to 6.6e-5.
So 2e-4 on logits and keys is three times what rounding explains. Two right computations of the newer folders differ by 1.6e-4 from float64, so their tolerance is 5e-4. In `qwen3_5`, float64 differs by up to 1e-4, so its tolerance is 3e-4. Gradients differ by 2.1e-5 of their largest entry, and may differ by 1e-4.
"""

import functools
import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from dapo_jax.commands.convert import convert
from dapo_jax.models import decoder, experts
from dapo_jax.models.adapter_folder import read_adapter, save_adapter
from dapo_jax.models.attention_mixer import Attention
from dapo_jax.models.decoder import graph_of
from dapo_jax.models.experts import NO_ROUTE, Experts
from dapo_jax.models.families import understand
from dapo_jax.models.folder import load_model, read_config, save_model, weights_of
from dapo_jax.models.gated import ACTIVATIONS
from dapo_jax.models.latent_attention import LatentAttention
from dapo_jax.models.layer_kinds import Fixed, Paged
from dapo_jax.models.lora import lora_shape, parted
from dapo_jax.models.mamba import Mamba
from dapo_jax.models.projections import rms_norm, rotary
from dapo_jax.models.rope import Rope
from dapo_jax.models.safetensors_files import SafetensorsFolder
from dapo_jax.models.tensors import (
    check_adapters,
    checked,
    exported,
    place_adapters,
    shapes_of,
    tensor_shapes,
)
from dapo_jax.parallel.mesh import make_mesh
from dapo_jax.parallel.weights import WeightTransfer
from dapo_jax.sampling.decoding import decoding
from dapo_jax.sampling.engine import DecoderEngine
from dapo_jax.sampling.engine_spec import EngineSpec
from dapo_jax.sampling.interface import Insertion
from dapo_jax.sampling.page_tables import Pages
from dapo_jax.sampling.prompt_packing import PrefillShape
from dapo_jax.testing import tiny_params

FOLDERS = {path.name: path for path in sorted((Path(__file__).parents[1] / "golden" / "families").iterdir())}
TOLERANCE, NEW = 2e-4, 12


GRANITE = 3.1e-5
"""Tolerance of the log-probabilities of `granite_hybrid`, from the rounding errors of float32. Let u be 6e-8. In float64, relative errors u of the residual stream
after layers 0, 1, 2 and 3 change these log-probabilities by 1.5e-6, 0.9e-6, 0.3e-6 and 0.3e-6 (standard deviation of 20 draws, most of all tokens). In float32, a
Mamba-2 layer computes its output with relative errors of 4 u to 12 u: each of its seven operations causes up to 3 u. So a path differs from float64 by up to
12 sqrt(1.5^2 + 0.9^2 + 0.3^2 + 0.3^2) 1e-6 = 2.2e-5, and two paths differ by up to sqrt(2) times that. Found against float64: 1.6e-5 with chunks of 1 and 16 tokens,
0.9e-5 with 8, 1.5e-5 and 2.2e-5 with 64, and 1.0e-5 in the sampler. So the form of the recurrence is not the cause.
"""
GEMMA4 = 5e-5
"""Tolerance of the log-probabilities of `gemma4_e`, `gemma4_moe` and `gemma4_dense`. In float64, this network agrees with `logits64` to 3e-13. In float32, log-probabilities of the responses
differ from it by up to:

| | trainer | sampler | sampler, pages and prompts in parts | sampler and trainer from each other |
|---|---|---|---|---|
| gemma4_e | 6.8e-5 | 5.8e-5 | 4.1e-5 | 1.3e-5, 3.6e-5 |
| gemma4_moe | 2.6e-5 | 2.3e-5 | 2.7e-5 | 3.1e-5, 3.0e-5 |
| gemma4_dense | 2.7e-5 | 2.5e-5 | 1.8e-5 | 2.2e-5, 3.0e-5 |

Two paths differ by at most the sum of their errors, which is more than 5e-5 in the first two models, and 5.2e-5 and 4.5e-5 in `gemma4_dense` (whose float64 network agrees to 5e-6). A few tokens enlarge rounding errors: if one part of the float64 network of `gemma4_e` is
computed in float32, logits change by 1e-6 to 6e-6 on average, but by up to 2.7e-4 (angles), 2.0e-4 (norms, or GELU), 1.2e-4 (products) and 3e-5 (attention).
"""
ROUNDED = {"granite_hybrid": GRANITE, "gemma4_e": GEMMA4, "gemma4_moe": GEMMA4, "gemma4_dense": GEMMA4}


def tolerance(name):
    return 5e-4 if "logits64" in expected(name) else 3e-4 if name == "qwen3_5" else TOLERANCE


@functools.cache
def expected(name):
    return load_file(FOLDERS[name] / "expected.safetensors")


def logits_in(found):
    """The logits that the file expects, in float64 if it has them."""
    return found.get("logits64", found.get("logits"))


def rows_of(name):
    """The rows without padding, each followed by its greedy response."""
    found = expected(name)
    prompts = [row[mask == 1] for row, mask in zip(found["input_ids"], found["attention_mask"], strict=True)]
    return prompts, [np.concatenate(pair) for pair in zip(prompts, found["greedy"], strict=True)]


def arrays(sequences):
    """Tokens, positions and segment ids of rows, padded to the longest."""
    width = max(map(len, sequences))
    tokens, ids = (np.zeros((len(sequences), width), np.int32) for _ in range(2))
    for row, sequence in enumerate(sequences):
        tokens[row, : len(sequence)], ids[row, : len(sequence)] = sequence, 1
    return tuple(
        map(jnp.asarray, (tokens, np.broadcast_to(np.arange(width, dtype=np.int32), tokens.shape), ids))
    )


def scores(graph, params, *arrays):
    """Logits, and the counts of a model with experts."""
    decoder = nnx.merge(graph, params)
    found = decoder(*arrays)
    hidden, counts = (found, None) if decoder.ends.config.experts is None else found
    return decoder.ends.logits(hidden), counts


def logits_of(config, params, sequences):
    run = jax.jit(partial(scores, graph_of(config)))
    return np.asarray(run(params, *arrays(sequences))[0])


QUICK_GRADIENTS = {"gemma3", "gpt_oss", "qwen3_moe", "qwen3_5", "deepseek_v3", "nemotron_h"}
"""Families whose gradients the default tier compares: one of each kind of layer. The program of a gradient takes twice as long to compile as the logits alone."""


@functools.cache
def passed(name):
    """(config, params, logits of both rows with their responses). The logits come from the program of the gradient where the default tier has it."""
    config, params = load_model(FOLDERS[name])
    if name in QUICK_GRADIENTS:
        return config, params, differentiated(name)[0]
    return config, params, logits_of(config, params, rows_of(name)[1])


@functools.cache
def differentiated(name):
    """(logits of both rows with their responses, gradients), in one program."""
    (logits, _), gradients = gradients_of(*load_model(FOLDERS[name]), *rows_of(name))
    return np.asarray(logits), gradients


def gradients_of(config, params, prompts, sequences, routes=None, **how):
    """The logits and counts of `scores`, and the gradient of the sum of the prompts' log-probabilities. `routes` are forced choices of experts."""
    graph = graph_of(config, **how)
    tokens, positions, ids = arrays(sequences)
    counted = np.zeros(tokens.shape, np.float32)
    for row, prompt in enumerate(prompts):
        counted[row, 1 : len(prompt)] = 1.0

    def total(params):
        logits, counts = scores(
            graph, params, tokens, positions, ids, None, *(() if routes is None else (routes,))
        )
        logprobs = jnp.take_along_axis(jax.nn.log_softmax(logits[:, :-1]), tokens[:, 1:, None], -1)
        return (logprobs[..., 0] * counted[:, 1:]).sum(), (logits, counts)

    (_, found), gradients = jax.jit(jax.value_and_grad(total, has_aux=True))(params)
    return found, gradients


def stored_gradient(config, gradients, key):
    """The gradient that the file has under `key`. In transformers, each layer's experts are one array."""
    name = key.removeprefix("grad.").removeprefix("replay_grad.").removeprefix("language_model.")
    tensors = {tensor.name.partition(".")[2]: tensor for tensor in exported(config, gradients)}
    layer, *inner = name.removeprefix("layers.").split(".")
    if name not in tensors and inner[-2] in ("experts", "gate", "router"):
        stack, index = config.places[int(layer)]
        leaf = {"down_proj": "down", "up_proj": "up", "weight": "router"}[inner[-1]]
        return np.asarray(nnx.to_pure_dict(gradients)[stack][leaf][index])
    return tensors[name].fetch()


OTHER_SETTINGS = {
    "deepseek_v3_flat", "gemma3_wrapped", "gemma4_dense", "gemma4_moe", "gemma4_wrapped", "glm4_moe", "glm4_moe_lite", "glm4_moe_lite_hub", "gpt_oss_mxfp4", "granite_hybrid_dense", "granitemoe", "nemotron_h_latent",
    "qwen3_5_moe_hub", "qwen3_5_moe_wrapped", "qwen3_next", "youtu",
}  # fmt: skip
"""Folders with the layers of another folder. They are slow, because each compiles its own programs."""


def named(*, slow):
    return [pytest.param(name, marks=pytest.mark.slow if name in slow else []) for name in FOLDERS]


NAMES = named(slow=OTHER_SETTINGS)


@pytest.mark.parametrize("name", NAMES)
def test_logits_and_greedy_tokens_are_those_of_transformers(name):
    _, _, logits = passed(name)
    found = expected(name)
    for row, prompt in enumerate(rows_of(name)[0]):
        last = len(prompt) - 1
        np.testing.assert_allclose(
            logits[row, : last + 1], logits_in(found)[row, : last + 1], rtol=0, atol=tolerance(name)
        )
        assert logits[row, last : last + NEW].argmax(-1).tolist() == found["greedy"][row].tolist()


@pytest.mark.parametrize("name", named(slow=FOLDERS.keys() - QUICK_GRADIENTS))
def test_gradients_are_those_of_transformers(name):
    if name != "gemma4_e":
        assert_gradients(name, passed(name)[0], differentiated(name)[1])


# Slow: compiles another gradient.
@pytest.mark.slow
def test_gradients_of_gemma4_e_in_float64_are_those_of_transformers():
    """In float32, gradients of jax 0.12 differ from float64 by up to 1.8e-4, and the file's by 4.7e-5."""
    config, params, *_ = passed("gemma4_e")
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        wide = jax.tree.map(lambda leaf: leaf.astype(np.float64), params)
        gradients = gradients_of(config, wide, *rows_of("gemma4_e"), compute_dtype="float64")[1]
    assert_gradients("gemma4_e", config, gradients)


def assert_gradients(name, config, gradients):
    found = expected(name)
    names = [key for key in found if key.startswith("grad.")]
    assert names or name.endswith("_hub")
    for key in names:
        gradient = stored_gradient(config, gradients, key)
        np.testing.assert_allclose(gradient, found[key], rtol=0, atol=1e-4 * np.abs(found[key]).max())


def sampled(name, cache, width):
    """Greedy tokens and their log-probabilities from prefill and decoding, and by name in the file, the states of fixed size after the first prompt and at the end, and
    the final cache."""
    config, params, *_ = passed(name)
    mesh, prompts = make_mesh(devices=jax.devices()[:1]), rows_of(name)[0]
    longest = max(map(len, prompts))
    pages_of = {"page_tokens": 16} if cache == "pages" else {}
    engine = DecoderEngine(
        config,
        mesh,
        EngineSpec(
            slots=2,
            capacity=longest + NEW,
            steps_per_call=NEW,
            stop_ids=[],
            cache=cache,
            prefill=PrefillShape(rows=1, width=width, longest=longest),
            **pages_of,
        ),
    )
    weights = WeightTransfer(shapes_of(config), mesh, dtype="float32", places=config.places)(params)
    pages, state = Pages(engine.page_sizes), engine.init_decode_state()
    for part in engine.prefill(weights, [prompt.astype(np.int32) for prompt in prompts]):
        for index, prefix, place in part:
            length = int(prefix.lengths[place])
            if index == 0:
                prompt_states = jax.tree.map(lambda leaf, place=place: leaf[place], prefix.states)
            fills = [(place, fill) for fill in pages.start(index, length + NEW, read=length)]
            one = {
                key: np.array([value], np.int32)
                for key, value in {"slots": index, "prompts": place, "ordinals": index, "indices": 0, "limits": NEW, "drawn": 0, "turns": 0}.items()
            }  # fmt: skip
            state = engine.insert(prefix, state, Insertion(**one, fills=fills), jax.random.key(0))
    greedy = decoding(temperature=0.0)
    state, result = engine.generate(weights, state, greedy, 1, pages.rows([0, 1]))
    states = {"prefill": prompt_states, "cache": jax.tree.map(lambda leaf: leaf[0], state.states)}
    return np.asarray(result.tokens), np.asarray(result.logprobs), states, state.layers


# Rows of 48 tokens prefill each prompt at once; rows of 16 prefill it in parts.
QUICK = {
    "slots": ("gemma4_e", "qwen3_5_moe", "deepseek_v3"),
    "pages": ("gemma3",),
}


@pytest.mark.parametrize(
    ("name", "cache", "width"),
    [
        # Slow: compiles a sampler for each family. Trainer and sampler call the same layers; the quick families have windows, several
        # rotations, recurrent states and experts, and "every switch" of tests/sampling/engine_test.py has the rest.
        pytest.param(name, cache, width, marks=[] if name in QUICK[cache] else pytest.mark.slow)
        for cache, width in (("slots", 48), ("pages", 16))
        for name in FOLDERS
    ],
)
def test_the_sampler_continues_as_the_trainer_computes(name, cache, width):
    config, _, logits = passed(name)
    found = expected(name)
    tokens, logprobs, states, layers = sampled(name, cache, width)
    assert tokens.tolist() == found["greedy"].tolist()
    for row, prompt in enumerate(rows_of(name)[0]):
        ours = jax.nn.log_softmax(logits[row, len(prompt) - 1 : len(prompt) - 1 + NEW])
        trained = np.take_along_axis(np.asarray(ours), found["greedy"][row][:, None].astype(np.int32), -1)
        np.testing.assert_allclose(logprobs[row], trained[:, 0], rtol=0, atol=ROUNDED.get(name, 2e-5))
    if cache != "slots":
        return
    for key in (key for key in found if key.endswith(".keys")):
        layer, keys = int(key.split(".")[1]), found[key]
        if name in ("glm4", "ernie4_5"):
            # The file rotates neighbouring dimensions, and the decoder the two halves of the rotated dimensions.
            rotated = config.ropes[0].width(config.head_dim)
            order = [*range(0, rotated, 2), *range(1, rotated, 2), *range(rotated, config.head_dim)]
            keys = keys[..., order]
        if (values := found.get(key.replace("keys", "values"))) is not None and config.paged[0].value_dim:
            # The file has the latents, and the rotated keys of all heads.
            keys = np.concatenate([keys, values], axis=-1)
        of_cache = [at for at, form in enumerate(config.states) if isinstance(form, Paged)].index(layer)
        held = layers[of_cache].keys[0, :, :, : keys.shape[1]]
        np.testing.assert_allclose(np.asarray(held).swapaxes(1, 2), keys, rtol=0, atol=tolerance(name))
    for key in (key for key in found if key.endswith(".recurrent_states")):
        when, layer, _ = key.split(".")
        held = states[when][[at for at, form in enumerate(config.states) if isinstance(form, Fixed)].index(int(layer))]  # fmt: skip
        memory, tails = held.memory, held.tails
        if isinstance(config.mixers[int(layer)], Mamba):
            # The file has states [head_dim, state], and the inputs of the convolution in the order x, B, C.
            memory, tails = memory.swapaxes(1, 2), tails[::-1]
        np.testing.assert_allclose(memory, found[key][0], rtol=0, atol=tolerance(name))
        tails = np.concatenate([np.asarray(tail).reshape(-1, tail.shape[-1]) for tail in tails])
        np.testing.assert_allclose(tails, found[key.replace("recurrent", "conv")][0, :, 1:], rtol=0, atol=tolerance(name))  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_a_loaded_model_is_saved_bit_for_bit(name, tmp_path):
    """The names and bytes of all tensors are those of the source. Of a model for images and text, only the text model is written."""
    config, params = load_model(FOLDERS[name])
    save_model(tmp_path, config, params, max_shard_bytes=100_000)
    source, saved = weights_of(FOLDERS[name], config), SafetensorsFolder(tmp_path)
    assert source.shapes == saved.shapes == tensor_shapes(config)
    for tensor, shape in saved.shapes.items():
        cut = tuple(slice(0, size) for size in shape)
        np.testing.assert_array_equal(saved.read(tensor, cut), source.read(tensor, cut), err_msg=tensor)
    again, loaded = load_model(tmp_path)
    assert again == config
    jax.tree.map(np.testing.assert_array_equal, loaded, params)
    assert config.parameters == sum(int(np.prod(shape)) for shape in saved.shapes.values())


MOE = (
    "qwen3_moe", "olmoe", "granitemoe", "qwen3_5_moe", "qwen3_next", "nemotron_h", "nemotron_h_latent", "granite_hybrid", "gpt_oss", "deepseek_v3", "deepseek_v3_flat",
    "glm4_moe_lite", "glm4_moe", "gemma4_moe",
)  # fmt: skip
# Slow: compiles the gradient or the logits of each family. The first family has the same code, and the test of logits has all of them.
FIRST_MOE = [pytest.param(name, marks=[] if name == MOE[0] else pytest.mark.slow) for name in MOE]


@pytest.mark.parametrize("name", FIRST_MOE)
def test_forced_choices_of_experts_are_used_and_keep_the_gradient_of_the_router(name):
    """The file forces other experts for about a quarter of all tokens and layers, with factors from the router's own scores. The layers are rematerialized, too."""
    config, params, *_ = passed(name)
    found, (prompts, _) = expected(name), rows_of(name)
    (logits, counts), gradients = gradients_of(
        config, params, prompts, prompts, records(found["replay_topk"]), remat="full"
    )
    for row, prompt in enumerate(prompts):
        ours, theirs = logits[row, : len(prompt)], found["replay_logits"][row, : len(prompt)]
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=tolerance(name))
    for key in (key for key in found if key.startswith("replay_grad.")):
        largest = np.abs(found[key]).max()
        np.testing.assert_allclose(
            stored_gradient(config, gradients, key), found[key], rtol=0, atol=1e-4 * largest
        )
    # In the first layer, no earlier choice was forced, so the router's own choice is known.
    first = (np.sort(found["replay_topk"][0], -1) != np.sort(found["topk"][0], -1)).any(-1)
    flipped, real = np.asarray(counts["flipped"]), found["attention_mask"] == 1
    assert flipped[real & first].min() >= 1
    assert (flipped <= config.layers).all()


@pytest.mark.parametrize("name", FIRST_MOE)
def test_the_routers_own_choice_is_used_where_no_choice_is_forced(name):
    """Half of all tokens are forced to use what they choose anyway, and the others are not forced."""
    config, params, *_ = passed(name)
    found, (prompts, _) = expected(name), rows_of(name)
    forced = records(found["topk"]).at[:, ::2].set(NO_ROUTE)
    row = arrays(prompts)
    made, counts = jax.jit(partial(scores, graph_of(config)))(params, *row, None, forced)
    real = found["attention_mask"] == 1
    np.testing.assert_allclose(np.asarray(made)[real], logits_in(found)[real], rtol=0, atol=tolerance(name))
    assert (np.asarray(counts["flipped"])[real] == 0).all()
    load = np.stack([np.bincount(layer[real].reshape(-1), minlength=8) for layer in found["topk"]])
    np.testing.assert_array_equal(counts["load"], load)


# Slow: compiles another gradient. The test of forced choices rematerializes everything.
@pytest.mark.slow
def test_rematerialisation_changes_no_gradient_of_experts():
    config, params, _ = passed("qwen3_moe")
    found = gradients_of(config, params, *rows_of("qwen3_moe"), remat="dots")[1]
    for ours, theirs in zip(
        jax.tree.leaves(found), jax.tree.leaves(differentiated("qwen3_moe")[1]), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5 * np.abs(theirs).max())


def records(topk):
    """The choices of all layers, [batch, seq, layers, chosen]."""
    return jnp.asarray(topk.transpose(1, 2, 0, 3).astype(np.int32))


@pytest.mark.parametrize("name", [name for name in FOLDERS if (FOLDERS[name] / "config.older.json").exists()])
def test_the_notation_of_transformers_4_describes_the_same_decoder(name):
    older = FOLDERS[name] / "config.older.json"
    assert understand(json.loads(older.read_text()), older) == read_config(FOLDERS[name])


def test_the_text_model_of_a_model_for_images_and_text_is_converted(tmp_path):
    source = FOLDERS["gemma3_wrapped"]
    done = convert(str(source), str(tmp_path / "text"))
    names = load_file(source / "model.safetensors")
    assert done.skipped == sum(not name.startswith("language_model.") for name in names) > 0
    written = json.loads((tmp_path / "text" / "config.json").read_text())
    assert (done.family, written["eos_token_id"]) == (written["model_type"], 1) == ("gemma3_text", 1)
    config, params = load_model(tmp_path / "text")
    assert config == read_config(source)
    jax.tree.map(np.testing.assert_array_equal, params, load_model(source)[1])


def test_a_wrapped_qwen3_5_loads_as_its_text_model(tmp_path):
    """With the names of transformers 5, a vision tower and a head that predicts further tokens."""
    source = FOLDERS["qwen3_5"]
    text = json.loads((source / "config.json").read_text())
    described = {"model_type": "qwen3_5", "architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": text}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(described | {"tie_word_embeddings": False}))
    tensors = {
        name.replace("model.", "model.language_model.", 1): tensor
        for name, tensor in load_file(source / "model.safetensors").items()
    }
    others = {"model.visual.blocks.0.norm1.weight": np.ones(4, np.float32), "mtp.fc.weight": np.ones((4, 8), np.float32)}  # fmt: skip
    save_file(tensors | others, tmp_path / "model.safetensors")
    with pytest.warns(UserWarning, match="2 tensors of the image encoder or of additional heads"):
        config, params = load_model(tmp_path)
    assert config == read_config(source)
    jax.tree.map(np.testing.assert_array_equal, params, load_model(source)[1])


@pytest.mark.parametrize("head", [True, False])
def test_a_wrapped_model_whose_keys_differ_is_tied_if_its_file_has_no_lm_head(head, tmp_path):
    """transformers 5.24 ties the matrices by the outer key, unless the file has two different ones."""
    source = FOLDERS["mistral"]
    text, tensors = json.loads((source / "config.json").read_text()), load_file(source / "model.safetensors")
    described = {"model_type": "mistral3", "tie_word_embeddings": True, "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(described))
    assert not text["tie_word_embeddings"]
    assert not read_config(tmp_path).tied_embeddings
    lm_head = tensors.pop("lm_head.weight")
    if head:
        tensors["lm_head.weight"] = lm_head
    save_file(
        {f"language_model.{name}": tensor for name, tensor in tensors.items()}, tmp_path / "model.safetensors"
    )
    config, params = load_model(tmp_path)
    assert config.tied_embeddings == (not head)
    assert ("lm_head" in params["ends"]) == head


def test_adapters_of_gated_delta_layers_have_the_names_of_peft(tmp_path):
    shape = lora_shape(rank=2, alpha=4.0, targets=["q_proj", "linear_attention", "gate_proj"])
    config = replace(read_config(FOLDERS["qwen3_5"]), lora=shape)
    adapters, base = parted(tiny_params(config))
    save_adapter(tmp_path, config, adapters, base="qwen3_5")
    found, file = read_adapter(tmp_path)
    assert (found.shape, config.trained_parameters) == (shape, sum(map(np.size, jax.tree.leaves(adapters))))
    jax.tree.map(np.testing.assert_array_equal, place_adapters(config, file), adapters)
    name, whole = "model.layers.1.linear_attn.out_proj", (slice(None), slice(None))
    a, b = (file.read(f"base_model.model.{name}.lora_{part}.weight", whole) for part in "AB")
    plain, merged = (
        {tensor.name: tensor for tensor in exported(config, base, added)}[f"{name}.weight"].fetch()
        for added in (None, adapters)
    )
    np.testing.assert_allclose(merged, plain + 2.0 * b @ a, rtol=0, atol=1e-6)
    with pytest.raises(ValueError, match=r"lora\.targets has in_proj_z, out_proj, .*\[attention,mlp\]"):
        replace(read_config(FOLDERS["olmo2"]), lora=shape)


_QKV, _GATE_UP = "model.layers.1.self_attn.qkv_proj.weight", "model.layers.1.mlp.gate_up_proj.weight"


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("phi3", {_QKV: lambda old: old[:-8]}, rf"{_QKV} has shape \(\d+, \d+\), but the configuration needs"),
        ("phi3", {_GATE_UP: None}, f"lacks the tensor '{_GATE_UP}'"),
        ("phi3", {_GATE_UP: lambda old: old[:, :-1]}, f"{_GATE_UP} has shape"),
        ("phi3", {_QKV: lambda old: old * np.nan}, f"{_QKV} contains NaN"),
        ("glm4", {_GATE_UP: lambda old: old[: len(old) // 2]}, f"{_GATE_UP} has shape"),
        ("granite4_dense", {"model.layers.0.shared_mlp.input_linear.weight": lambda old: old[2:]}, "input_linear.weight has shape"),
        ("granite4_dense", {"model.layers.0.mamba.A_log": lambda _: np.ones(2, np.float32)}, r"has the tensors \['model.layers.0.mamba.A_log'\]"),
        ("olmo2", {"model.layers.2.self_attn.q_norm.weight": None}, "lacks the tensor 'model.layers.2.self_attn.q_norm.weight'"),
        ("olmo2", {"model.layers.2.self_attn.k_norm.weight": lambda old: old[:8]}, r"k_norm.weight has shape \(8,\)"),
        ("olmo2", {"model.layers.0.input_layernorm.weight": lambda _: np.ones(64, np.float32)}, r"has the tensors \['model.layers.0.input_layernorm"),
        ("gemma3", {"model.layers.0.pre_feedforward_layernorm.weight": None}, "lacks the tensor 'model.layers.0.pre_feedforward"),
        ("gemma3", {"lm_head.weight": lambda _: np.ones((96, 64), np.float32)}, "lm_head.weight"),
        ("hunyuan_dense", {"model.layers.0.self_attn.query_layernorm.weight": None}, "lacks the tensor .*query_layernorm"),
        ("seed_oss", {"model.layers.0.self_attn.k_proj.bias": None}, "lacks the tensor 'model.layers.0.self_attn.k_proj.bias'"),
        ("mistral", {"model.layers.0.self_attn.q_proj.bias": lambda _: np.ones(4, np.float32)}, r"has the tensors \['model.layers.0.self_attn.q_proj.bias'\]"),
        ("mistral", {"model.layers.0.self_attn.q_proj.weight_scale_inv": lambda _: np.ones(4, np.float32)}, r"has the tensors \['model.*weight_scale_inv'\]"),
        ("mistral", {"model.layers.0.mlp.up_proj.weight": lambda old: old.astype(np.int8)}, "up_proj.weight has type I8"),
        ("gemma3_wrapped", {"language_model.model.layers.0.mlp.up_proj.weight": None}, "lacks the tensor 'model.layers.0.mlp.up_proj.weight'"),
        ("gemma3_wrapped", {"other_tower.weight": lambda _: np.ones(4, np.float32)}, r"has the tensors \['other_tower.weight'\]"),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:.*image encoder")
def test_a_checkpoint_that_does_not_fit_is_refused_by_tensor(name, changes, message, tmp_path):
    (tmp_path / "config.json").write_bytes((FOLDERS[name] / "config.json").read_bytes())
    tensors = load_file(FOLDERS[name] / "model.safetensors")
    for tensor, change in changes.items():
        old = tensors.pop(tensor, None)
        if change is not None:
            tensors[tensor] = np.ascontiguousarray(change(old))
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        load_model(tmp_path)


def test_adapters_of_parts_of_a_tensor_are_refused():
    config = read_config(FOLDERS["phi3"])
    for targets in (["q_proj"], ["mlp"]):
        shape = lora_shape(rank=2, alpha=2.0, targets=targets)
        with pytest.raises(
            ValueError, match=r"lora\.targets=.*_proj is a part of .*lora\.targets=\[o_proj,down_proj\]"
        ):
            check_adapters(replace(config, lora=shape))
    check_adapters(replace(config, lora=lora_shape(rank=2, alpha=2.0, targets=["o_proj", "down_proj"])))


def test_adapters_of_neighbouring_rotations_are_reordered_as_their_matrices(tmp_path):
    """GLM-4's file has other rows than the decoder. B A x added to a saved matrix is what the decoder adds."""
    shape = lora_shape(rank=2, alpha=4.0, targets=["q_proj"])
    config = replace(read_config(FOLDERS["glm4"]), lora=shape)
    adapters, base = parted(tiny_params(config))
    save_adapter(tmp_path, config, adapters, base="glm4")
    again = place_adapters(config, read_adapter(tmp_path)[1])
    jax.tree.map(np.testing.assert_array_equal, again, adapters)
    file, name = (
        SafetensorsFolder(tmp_path, single="adapter_model.safetensors"),
        "model.layers.1.self_attn.q_proj",
    )
    whole = (slice(None), slice(None))
    a, b = (file.read(f"base_model.model.{name}.lora_{part}.weight", whole) for part in "AB")
    plain, merged = (
        {tensor.name: tensor for tensor in exported(config, base, added)}[f"{name}.weight"].fetch()
        for added in (None, adapters)
    )
    np.testing.assert_allclose(merged, plain + 2.0 * b @ a, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", MOE[:5])
def test_missing_and_additional_experts_are_refused_by_tensor(name, tmp_path):
    config = read_config(FOLDERS[name])
    tensors = {name: np.zeros(shape, np.float32) for name, shape in tensor_shapes(config).items()}
    expert = "model.layers.1.mlp.experts.5.up_proj.weight"
    fused = {
        "granitemoe": "model.layers.1.block_sparse_moe.output_linear.weight",
        "gpt_oss": "model.layers.1.mlp.experts.gate_up_proj_bias",
    }
    absent = fused.get(name, expert)
    save_file({key: value for key, value in tensors.items() if key != absent}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=f"lacks the tensor '{absent}'"):
        checked(config, SafetensorsFolder(tmp_path))
    save_file(tensors, tmp_path / "model.safetensors")
    more = {key.replace("experts.5", "experts.8"): value for key, value in tensors.items()}
    save_file(tensors | more, tmp_path / "model.safetensors")
    if name not in fused:
        with pytest.raises(
            ValueError, match=r"has the tensors .*experts\.8\.down_proj.*not part of this model"
        ):
            checked(config, SafetensorsFolder(tmp_path))
    other = replace(config, **of_experts(count=4, groups=1, chosen_groups=1)(config))
    with pytest.raises(ValueError, match=r"weight has shape \(8, .* needs \(4, "):
        checked(other, SafetensorsFolder(tmp_path))


def test_adapters_of_experts_are_refused():
    config = read_config(FOLDERS["qwen3_moe"])
    with pytest.raises(ValueError, match=r"lora\.targets has down_proj, gate_proj, up_proj, .*\[attention\]"):
        replace(config, lora=lora_shape(rank=2, alpha=2.0, targets=["all"]))


def plain(config, **changes):
    """The configuration with the scaling of all rotations, or other parts of them, left out."""
    return {"ropes": tuple(rope and replace(rope, **changes) for rope in config.ropes)}


def scaled(config, **changes):
    """The configuration with another scaling of its rotation."""
    return plain(config, scaling=replace(config.ropes[0].scaling, **changes))


def of_experts(**changes):
    """The configuration with other experts."""
    return lambda config: {
        "mlps": tuple(replace(mlp, **changes) if isinstance(mlp, Experts) else mlp for mlp in config.mlps)
    }


def of_layers(part, cls=None, **changes):
    """The configuration with other mixers or MLPs in all layers, or with a subclass of Mamba in its layers."""

    def other(each):
        if cls is None:
            return replace(each, **changes)
        return cls(**vars(each)) if isinstance(each, Mamba) else each

    return lambda config: {part: tuple(map(other, getattr(config, part)))}


class GateLast(Mamba):
    """The norm precedes the gate."""

    def gated(self, layer, out, gate):
        one = jnp.full_like(gate, 1.2784645)  # whose silu is 1
        return super().gated(layer, out, one) * jax.nn.silu(gate)


class OneGroup(Mamba):
    """The norm is over all groups."""

    def gated(self, layer, out, gate):
        gated = out * jax.nn.silu(gate)
        mean = (gated * gated).mean((0, 1), keepdims=True)
        return gated * jax.lax.rsqrt(mean + layer.config.norm_eps) * layer.mamba_norm[...][..., None]


LEFT_OUT = {
    "gemma4_e": [
        of_layers("mixers", value_norm=False), {"layer_embed_dim": 0}, lambda config: plain(config, proportional=False), {"query_scale": None},
        {"windows": ()}, {"rope_of_layer": ()}, {"logit_cap": None}, {"embed_scale": 1.0}, {"activation": "silu"}, {"norm_eps": 1e-6}, {"norm_offset": 1.0},
        lambda config: {"windows": tuple(window and window + 1 for window in config.windows)}, {"rope_of_layer": (1,) * 7}, {"ropes": (None, None)},
        lambda config: plain(config, share=1.0),
    ],
    "gemma4_moe": [
        lambda config: of_layers("mlps", experts=replace(config.experts, expert_scale=False))(config),
        lambda config: of_layers("mlps", experts=replace(config.experts, normalize=False))(config),
    ],
    "mistral": [{"windows": ()}],
    "ministral3": [{"query_growth": None}, lambda config: plain(config, scaling=None)],
    "olmo2": [{"qk_norm": "none"}],
    "olmo3": [{"windows": ()}, {"rope_of_layer": ()}, lambda config: plain(config, scaling=None)],
    "smollm3": [{"rope_of_layer": ()}],
    "gemma2": [
        {"windows": ()}, {"norm_offset": 0.0}, {"norm_place": "inputs"}, {"query_scale": None}, {"score_cap": None}, {"logit_cap": None},
        {"activation": "silu"}, {"embed_scale": 1.0},
    ],
    "gemma3": [{"rope_of_layer": ()}, {"qk_norm": "none"}, {"windows": ()}, lambda config: plain(config, scaling=None)],
    "granite": [{"embed_scale": 1.0}, {"query_scale": None}, {"residual_scale": 1.0}, {"logit_divisor": 1.0}],
    "granite4_dense": [{"ropes": (None,)}],
    "seed_oss": [{"qkv_bias": False}],
    "exaone4": [{"rope_of_layer": ()}, {"qk_norm": "none"}],
    "phi3": [lambda config: plain(config, scaling=None), lambda config: plain(config, share=1.0, scaling=None)],
    "glm4": [lambda config: plain(config, share=1.0), {"norm_place": "inputs"}],
    "hunyuan_dense": [{"qk_norm_after_rope": False}],
    "qwen3_moe": [of_experts(normalize=False), of_experts(chosen=1), {"qk_norm": "none"}],
    "qwen3_5": [{"norm_offset": 0.0}, lambda config: plain(config, share=1.0)],
    "qwen3_5_moe": [
        of_experts(shared_dim=0, shared_gate=False), of_experts(shared_gate=False), of_experts(normalize=False), {"norm_offset": 0.0}, {"norm_eps": 1e-6},
        {"qk_norm": "none"}, {"ropes": (None,)}, {"activation": "gelu_tanh"}, lambda config: plain(config, share=1.0),
    ],
    "qwen3_next": [of_experts(normalize=False), of_experts(shared_gate=False), {"norm_offset": 0.0}, lambda config: plain(config, share=1.0)],
    "gpt_oss": [
        {"sinks": False}, {"windows": ()}, {"qkv_bias": False}, {"output_bias": False}, of_experts(biases=False), {"gate_limit": 100.0},
        {"gate_alpha": 1.0}, lambda config: scaled(config, truncate=True), lambda config: scaled(config, attention_factor=1.0), of_experts(normalize=False),
        {"ropes": (None,)}, {"norm_eps": 1e-6}, {"norm_offset": 1.0}, lambda config: {"windows": tuple(window and window + 1 for window in config.windows)},
    ],
    "olmoe": [of_experts(normalize=True), of_experts(chosen=2), {"qk_norm": "none"}, {"clip_qkv": None}],
    "deepseek_v3": [
        of_experts(groups=1, chosen_groups=1), of_experts(choice_bias=False), of_experts(sigmoid=False), of_experts(scale=1.0),
        of_experts(normalize=False), of_experts(shared_dim=0), lambda config: scaled(config, mscale_all_dim=0.0), of_layers("mixers", norm_eps=0.02),
        lambda config: plain(config, scaling=None), lambda config: scaled(config, attention_factor=1.0), {"ropes": (None,)}, {"norm_eps": 1e-6},
        {"norm_offset": 1.0}, {"activation": "gelu_tanh"},
    ],
    "youtu": [of_layers("mixers", norm_eps=0.02)],
    "glm4_moe": [of_experts(choice_bias=False), {"qkv_bias": False}, {"qk_norm": "none"}, lambda config: plain(config, share=1.0)],
    "granitemoe": [
        of_experts(normalize=False), {"embed_scale": 1.0}, {"query_scale": None}, {"residual_scale": 1.0}, {"logit_divisor": 1.0},
    ],
    "nemotron_h": [
        of_experts(scale=1.0), of_experts(normalize=False), of_experts(choice_bias=False), of_experts(shared_dim=0), {"activation": "silu"}, {"ropes": (Rope(),)},
        {"norm_eps": 1e-6}, {"norm_offset": 1.0}, of_layers("mixers", cls=GateLast), of_layers("mixers", cls=OneGroup),
    ],
    "granite_hybrid": [
        of_experts(normalize=False), of_experts(shared_dim=0), {"embed_scale": 1.0}, {"query_scale": None}, {"residual_scale": 1.0}, {"logit_divisor": 1.0},
        {"norm_eps": 1e-6}, {"norm_offset": 1.0}, {"activation": "gelu_tanh"}, of_layers("mixers", cls=GateLast),
    ],
}  # fmt: skip


# Slow: compiles another model for each switch. The first switch of one family stays, and the test of logits has all switches.
@pytest.mark.parametrize(
    ("name", "number"),
    [
        pytest.param(name, number, marks=pytest.mark.slow if number or name != "mistral" else [])
        for name, changes in LEFT_OUT.items()
        for number in range(len(changes))
    ],
)
def test_no_switch_can_be_left_out(name, number):
    """Without any one switch, logits change by 0.4 or more. Half of that shows that the tests above would fail."""
    config, params, logits = passed(name)
    change = LEFT_OUT[name][number]
    other = replace(config, **(change(config) if callable(change) else change))
    kept = nnx.to_pure_dict(shapes_of(other))
    state = shapes_of(other)
    whole = nnx.to_pure_dict(params)
    nnx.replace_by_pure_dict(
        state, {part: {leaf: whole[part][leaf] for leaf in leaves} for part, leaves in kept.items()}
    )
    found = logits_of(other, state, rows_of(name)[1])
    ids = np.asarray(arrays(rows_of(name)[1])[2]) == 1
    assert np.abs(found - logits)[ids].max() > 0.2


def swapped(one, other):
    return lambda leaves: {one: leaves[other], other: leaves[one]}


def without(name):
    return lambda leaves: {name: 0 * leaves[name]}


def turned(name, count):
    """The first `count` rows of each head become its last rows."""
    return lambda leaves: {name: jnp.roll(leaves[name], -count, axis=2)}


def keys_before_values(leaves):
    """The matrix of keys and values as it would be if its tensor had the keys of all heads before the values of all heads."""
    layers, heads, _, rank = leaves["key_value"].shape
    keys, values = jnp.split(leaves["key_value"].reshape(layers, -1, rank), [heads * 12], axis=1)
    both = keys.reshape(layers, heads, -1, rank), values.reshape(layers, heads, -1, rank)
    return {"key_value": jnp.concatenate(both, axis=2)}


def alternating(one, other):
    """Exchanges two orders of rows [layers, experts, rows, ...]: `one` and `other` alternate in the file, and are read as if one followed the other."""

    def change(leaves):
        pairs = np.stack([leaves[one], leaves[other]], axis=3)
        halves = np.split(pairs.reshape(*pairs.shape[:2], -1, *pairs.shape[4:]), 2, axis=2)
        return dict(zip((one, other), halves, strict=True))

    return change


def gates_after_queries(leaves):
    """The second half of each head's rows are its gate. Here, all queries are read before all gates."""
    query = leaves["query"]
    layers, heads, rows, width = query.shape
    halves = query.reshape(layers, 2, heads, rows // 2, width)
    return {"query": np.concatenate([halves[:, 0], halves[:, 1]], axis=2)}


def other_key_heads(leaves):
    """Value head h takes key head h mod the number of key heads. This is another order of value heads."""
    values, keys = leaves["value"].shape[1], leaves["key"].shape[1]
    order = np.argsort(np.arange(values) % keys, kind="stable")
    found = {
        name: leaves[name][:, order]
        for name in ("value", "value_gate", "write", "forget", "decay", "step_bias", "value_conv")
    }
    return found | {"output": leaves["output"][:, :, order]}


def flat(leaves):
    """The rows of each key head in the file, one after the other, are read as all queries, all keys, all values and all gates."""
    names, heads = ("query", "key", "value", "value_gate"), leaves["key"].shape[1]
    layers, _, _, width = leaves["key"].shape
    whole = np.concatenate(
        [np.reshape(leaves[name], (layers, heads, -1, width)) for name in names], axis=2
    ).reshape(layers, -1, width)
    ends = np.cumsum([np.prod(leaves[name].shape[1:3]) for name in names])[:-1]
    return {
        name: part.reshape(leaves[name].shape)
        for name, part in zip(names, np.split(whole, ends, axis=1), strict=True)
    }


MAMBA = *map(without, ("skip", "step_bias", "value_conv_bias", "key_conv_bias", "decay")), swapped("key", "query"), swapped("value_gate", "value")  # fmt: skip
DELTA = without("step_bias"), other_key_heads, swapped("query", "key"), swapped("gate", "up")
CHANGED = {
    "nemotron_h_latent": {"mamba_blocks": MAMBA}, "granite_hybrid": {"mamba_blocks": (*MAMBA, swapped("gate", "up"))},
    "deepseek_v3": {"latent_blocks": (keys_before_values, turned("query", 12), swapped("gate", "up"))},
    "qwen3_5_moe": {"delta_blocks": DELTA, "blocks": (gates_after_queries, swapped("gate", "up"))},
    "qwen3_next": {"delta_blocks": (*DELTA, flat), "blocks": (gates_after_queries,)},
    "gpt_oss": {
        "blocks": (
            without("router_bias"), alternating("gate", "up"), swapped("gate", "up"), lambda leaves: {"up_biases": leaves["up_biases"] - 1.0},
            *(without(f"{name}_bias") for name in ("query", "key", "value", "output")), *(without(f"{name}_biases") for name in ("gate", "up", "down")),
        )
    },
}  # fmt: skip
"""The changes of parameters, by the beginning of the names of the stacks of layers."""


# Slow: compiles a model. The test of logits has all parameters.
@pytest.mark.slow
@pytest.mark.parametrize("name", CHANGED)
def test_no_parameter_can_be_left_out_or_exchanged(name):
    config, params, logits = passed(name)
    run, row = jax.jit(partial(scores, graph_of(config))), arrays(rows_of(name)[1])
    ids = np.asarray(row[2]) == 1
    for begin, change in ((begin, change) for begin, changes in CHANGED[name].items() for change in changes):
        whole, other = nnx.to_pure_dict(params), shapes_of(config)
        whole |= {stack: leaves | change(leaves) for stack, leaves in whole.items() if stack.startswith(begin)}  # fmt: skip
        nnx.replace_by_pure_dict(other, whole)
        found = np.asarray(run(other, *row)[0])
        assert np.abs(found - logits)[ids].max() > 2.0


def neighbours_apart(monkeypatch):
    """Latent attention rotates the pairs of dimensions i and i + half."""
    monkeypatch.setattr(LatentAttention, "_rotated", lambda self, x, rope: rotary(x, rope))


def bounded_steps(monkeypatch):
    """Steps are at least `time_step_min`, which is 0.3 in the file."""
    softplus = jax.nn.softplus
    monkeypatch.setattr(jax.nn, "softplus", lambda x: jnp.maximum(softplus(x), 0.3))


def relu(monkeypatch):
    monkeypatch.setitem(ACTIVATIONS, "relu2", jax.nn.relu)


def best_alone(monkeypatch):
    """The score of a group of experts is its largest score, not the sum of two."""
    top_k = jax.lax.top_k
    monkeypatch.setattr(jax.lax, "top_k", lambda x, count: top_k(x, 1 if x.ndim == 3 else count))


def factors_with_the_bias(monkeypatch):
    """The bias of the choice is also added to the scores from which factors are computed."""
    chosen = experts.chosen

    def biased(logits, rule, routes, bias):
        own, used, _ = chosen(logits, rule, routes, bias)
        factors = jnp.take_along_axis(jax.nn.sigmoid(logits.T) + bias[None], used, axis=1)
        factors = factors / factors.sum(1, keepdims=True) if rule.normalize else factors
        return own, used, factors * rule.scale

    monkeypatch.setattr(experts, "chosen", biased)


def values_after_key_norm(monkeypatch):
    """Values are the keys after the norm of keys, but before their rotation."""
    inputs = Attention._queries_keys_values

    def other(self, layer, x, rope):
        query, key, value, gate = inputs(self, layer, x, rope)
        if self.keys_are_values:
            _, normed, *_ = inputs(self, layer, x, (jnp.ones_like(rope[0]), jnp.zeros_like(rope[1])))
            per_head = jax.vmap(rms_norm, in_axes=(0, None, None))
            value = per_head(normed, jnp.ones(normed.shape[1]), layer.config.norm_eps)
        return query, key, value, gate

    monkeypatch.setattr(Attention, "_queries_keys_values", other)


def first_source(monkeypatch):
    """Layers that share read the keys and values of the first layer of their kind, not of the last."""
    over_periods = decoder._over_periods

    def other(x, period, stacks):
        x, made = over_periods(x, period, stacks)
        return x, {
            name: (jax.tree.map(lambda leaf: leaf[::-1], kept), own) for name, (kept, own) in made.items()
        }

    monkeypatch.setattr(decoder, "_over_periods", other)


# Slow: compiles a model for each rule. The test of logits has all rules.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "replaced"),
    [
        ("deepseek_v3", neighbours_apart), ("deepseek_v3", best_alone), ("deepseek_v3", factors_with_the_bias), ("nemotron_h", factors_with_the_bias),
        ("nemotron_h", bounded_steps), ("nemotron_h", relu), ("glm4_moe", factors_with_the_bias),
        ("gemma4_dense", values_after_key_norm), ("gemma4_e", first_source),
    ],
)  # fmt: skip
def test_no_rule_can_be_replaced(name, replaced, monkeypatch):
    config, params, logits = passed(name)
    replaced(monkeypatch)
    found = logits_of(config, params, rows_of(name)[1])
    ids = np.asarray(arrays(rows_of(name)[1])[2]) == 1
    assert np.abs(found - logits)[ids].max() > 2.0


_SHARED, _SELF = "mlp.shared_expert.up_proj", "self_attn.q_proj"
ADAPTED = {
    "nemotron_h": ("backbone.layers.{}.mixer.", ["out_proj", "up_proj", "out_proj", "q_proj", "out_proj", "shared_experts.up_proj"]),
    "qwen3_5_moe": ("model.layers.{}.", [*[f"linear_attn.out_proj,{_SHARED}"] * 3, f"{_SELF},{_SHARED}"]),
    "qwen3_5_moe_wrapped": ("model.language_model.layers.{}.", [*[f"linear_attn.out_proj,{_SHARED}"] * 2, f"{_SELF},{_SHARED}"]),
    "gpt_oss": ("model.layers.{}.", [_SELF] * 4),
    "granite_hybrid": ("model.layers.{}.", ["mamba.out_proj", _SELF, "mamba.out_proj", "mamba.out_proj"]),
}  # fmt: skip
"""The beginning of the names of a layer's adapters, and the adapted matrices of each layer. Routed experts have none."""


@pytest.mark.parametrize("name", ADAPTED)
def test_adapters_of_each_layer_have_the_names_of_peft(name, tmp_path):
    begin, layers = ADAPTED[name]
    targets = [each for each in ("q_proj", "out_proj", "up_proj") if any(each in layer for layer in layers)]
    shape = lora_shape(rank=2, alpha=4.0, targets=targets)
    config = replace(read_config(FOLDERS[name]), lora=shape)
    adapters, _ = parted(tiny_params(config))
    save_adapter(tmp_path, config, adapters, base=name)
    found, file = read_adapter(tmp_path)
    assert found.shape == shape
    jax.tree.map(np.testing.assert_array_equal, place_adapters(config, file), adapters)
    names = {
        begin.format(layer) + each for layer, matrices in enumerate(layers) for each in matrices.split(",")
    }
    stored = load_file(tmp_path / "adapter_model.safetensors")
    assert {each.rpartition(".lora_")[0] for each in stored} == {f"base_model.model.{each}" for each in names}
    assert {tensor.dtype for tensor in stored.values()} == {np.dtype(np.float32)}
    check_adapters(config)


def test_a_window_counts_positions_where_responses_share_a_prompt():
    """The second response is 8 columns farther from its prompt than in a row of its own, but not farther in its sequence."""
    config, params, *_ = passed("mistral")
    tokens = rows_of("mistral")[1][0][:28]
    prompt, responses = tokens[:12], (tokens[12:20], tokens[20:28])
    alone = [logits_of(config, params, [np.concatenate([prompt, each])])[0] for each in responses]
    graph = graph_of(config)
    positions = np.concatenate([np.arange(20), np.arange(12, 20)]).astype(np.int32)[None]
    segments = np.repeat(np.array([1, 2, 3], np.int32), [12, 8, 8])[None]
    prefixes = np.ones_like(segments)

    @jax.jit
    def shared(params):
        decoder = nnx.merge(graph, params)
        row = map(jnp.asarray, (tokens.astype(np.int32)[None], positions, segments, prefixes))
        return decoder.ends.logits(decoder(*row))[0]

    found = np.asarray(shared(params))
    np.testing.assert_allclose(found[:20], alone[0], rtol=0, atol=5e-5)
    np.testing.assert_allclose(found[20:], alone[1][12:], rtol=0, atol=5e-5)
