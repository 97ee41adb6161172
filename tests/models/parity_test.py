"""The decoder against transformers: golden files always, the real SmolLM2 where transformers is installed.

The tolerance is 2e-4 on logits of up to about 25: float32 sums in another order.
"""

import functools
import os
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from dapo_jax.commands.convert import convert
from dapo_jax.commands.inference import sample
from dapo_jax.models.decoder import graph_of
from dapo_jax.models.folder import load_model
from dapo_jax.parallel.mesh import make_mesh
from dapo_jax.text.tokenizers import CharTokenizer, save_tokenizer

GOLDEN = sorted(path.parent for path in (Path(__file__).parents[1] / "golden").glob("*/expected.safetensors"))
TOLERANCE = 2e-4
ALPHABET = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJ"
"""46 characters: with the padding and the end token, the golden models' vocabulary of 48."""

SMOLLM2 = os.environ.get("DAPO_JAX_SMOLLM2")
PROMPTS = (
    "The capital of France is",
    "Question: 12 + 7 =",
    "def fibonacci(n):\n",
    "Once upon a time, in a village by the sea,",
)


@functools.cache
def program(config):
    graph = graph_of(config)

    @jax.jit
    def logits(params, tokens):
        decoder = nnx.merge(graph, params)
        positions = jnp.arange(tokens.shape[0], dtype=jnp.int32)[None]
        return decoder.ends.logits(decoder(tokens[None], positions, jnp.ones_like(positions)))[0]

    return logits


def logits_of(config, params, tokens):
    return np.asarray(program(config)(params, jnp.asarray(tokens, jnp.int32)))


def greedy_by_sampler(folder, *prompts):
    """64 greedy tokens to each prompt, through prefill, cache and sampler."""
    groups = sample(str(folder), prompts, max_response_tokens=64, temperature=0.0, slots=8)
    return [group.rollouts[0].response.tokens.tolist() for group in groups]


@pytest.fixture(params=GOLDEN, ids=lambda path: path.name)
def golden(request):
    return request.param, load_file(request.param / "expected.safetensors")


def test_golden_logits_and_greedy_tokens_are_ours(golden):
    """Each of the 64 greedy tokens has the largest logit, in one pass over all of them."""
    folder, expected = golden
    config, params = load_model(folder)
    prompt, response = expected["tokens"], expected["greedy"]
    found = logits_of(config, params, np.concatenate([prompt, response]))
    np.testing.assert_allclose(found[: len(prompt)], expected["logits"], rtol=0, atol=TOLERANCE)
    assert found[len(prompt) - 1 : -1].argmax(-1).tolist() == response.tolist()


def test_golden_models_show_it_when_their_scaling_is_left_out(golden):
    folder, expected = golden
    config, params = load_model(folder)
    (rope,) = config.ropes
    if rope.scaling is None:
        assert "scaling" not in folder.name
        return
    found = logits_of(replace(config, ropes=(replace(rope, scaling=None),)), params, expected["tokens"])
    assert np.abs(found - expected["logits"]).max() > 0.1


# Slow: compiles a sampler each. The logits are compared above, and tests/models/golden_families_test.py compares the sampler.
@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3", "llama3_scaling", "qwen2", "qwen2_yarn"])
def test_the_sampler_continues_golden_prompts_as_transformers_does(name, tmp_path):
    (source,) = [path for path in GOLDEN if path.name == name]
    expected = load_file(source / "expected.safetensors")
    for file in ("config.json", "model.safetensors"):
        (tmp_path / file).symlink_to(source / file)
    save_tokenizer(CharTokenizer(ALPHABET), tmp_path)
    prompt = "".join(ALPHABET[token - 2] for token in expected["tokens"])
    assert greedy_by_sampler(tmp_path, prompt) == [expected["greedy"].tolist()]


def transformers_and_torch():
    return pytest.importorskip("transformers"), pytest.importorskip("torch")


def their_logits(folder, tokens):
    transformers, torch = transformers_and_torch()
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return theirs(torch.tensor([list(map(int, tokens))])).logits[0].numpy()


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory):
    """The real SmolLM2-135M as a folder, converted if DAPO_JAX_SMOLLM2 is a GGUF file."""
    transformers_and_torch()
    if not SMOLLM2:
        pytest.skip("DAPO_JAX_SMOLLM2 does not name a folder or GGUF file of SmolLM2-135M-Instruct")
    if Path(SMOLLM2).is_dir():
        return Path(SMOLLM2)
    folder = tmp_path_factory.mktemp("smollm2") / "model"
    convert(SMOLLM2, str(folder))
    return folder


@pytest.mark.slow
def test_the_real_smollm2_agrees_with_transformers(smollm2, monkeypatch):
    transformers, torch = transformers_and_torch()
    # Eight simulated devices would hold eight copies of the weights.
    one = make_mesh(devices=jax.devices()[:1])
    monkeypatch.setattr("dapo_jax.commands.inference.mesh_of", lambda axes: one)
    tokenizer = transformers.AutoTokenizer.from_pretrained(smollm2)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    config, params = load_model(smollm2)
    continued = []
    for text in PROMPTS:
        tokens = tokenizer(text, return_tensors="pt").input_ids
        with torch.no_grad():
            expected = theirs(tokens).logits[0].numpy()
            row = theirs.generate(tokens, max_new_tokens=64, do_sample=False)[0]
        found = logits_of(config, params, tokens[0].numpy())
        np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE)
        continued.append(row[tokens.shape[1] :].tolist())
    assert greedy_by_sampler(smollm2, *PROMPTS) == continued
