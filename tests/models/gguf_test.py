"""GGUF files: weights bit for bit, quantized ones as in the `gguf` package, and the configuration from metadata."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dapo_jax.models.gguf import GgufFile
from dapo_jax.models.rope import Rope, RopeScaling, rope_frequencies
from dapo_jax.models.tensors import place
from dapo_jax.testing import tiny_decoder_config, tiny_params

gguf = pytest.importorskip("gguf")

from tests.models.gguf_files import GEMMA_TOKENS, TOKENS, write_gguf  # noqa: E402 - needs gguf

SIZES = {"vocab_size": len(TOKENS)}
FAMILIES = {
    "llama": tiny_decoder_config(**SIZES, norm_eps=1e-5, ropes=(Rope(theta=5e5),)),
    "qwen2": tiny_decoder_config(**SIZES, qkv_bias=True, tied_embeddings=False, ropes=(Rope(theta=1e6),)),
    "qwen3": tiny_decoder_config(**SIZES, qk_norm="head", head_dim=16),
}
LLAMA = FAMILIES["llama"]
GEMMA = tiny_decoder_config(
    family="gemma3_text", vocab_size=len(GEMMA_TOKENS), layers=7, head_dim=16, qk_norm="head", norm_place="both", norm_offset=1.0,
    activation="gelu_tanh", embed_scale=32**0.5, query_scale=16**-0.5, windows=(*[4] * 5, 0, 4), ropes=(Rope(theta=1e6), Rope(theta=1e4)),
    rope_of_layer=(1, 1, 1, 1, 1, 0, 1),
)  # fmt: skip
"""Six layers are a period, and queries are divided by the square root of head_dim. embed_dim is 32."""


@pytest.fixture
def written(tmp_path):
    """Writes a tiny Llama with changes, and opens it."""

    def write(config=LLAMA, params=None, **how):
        return GgufFile(write_gguf(tmp_path / "model.gguf", config, params or tiny_params(config), **how))

    return write


@pytest.mark.parametrize("family", FAMILIES)
def test_float32_weights_come_in_bit_for_bit(family, written):
    """The configuration has 1e-5, although float32 has 9.99999975e-06."""
    config = FAMILIES[family]
    file = written(config)
    assert file.config() == config
    jax.tree.map(np.testing.assert_array_equal, place(config, file), tiny_params(config))


def test_a_gemma_file_has_the_factors_of_norms(written):
    """A file contains 1 + w in float32, so w is rounded to a multiple of 2^-24 or 2^-23."""
    params = nnx.to_pure_dict(tiny_params(GEMMA))
    random = np.random.default_rng(0)
    for part in params.values():
        for name in (name for name in part if name.endswith("norm")):
            part[name] = jnp.asarray(random.normal(0.0, 0.5, part[name].shape), jnp.float32)
    changed = tiny_params(GEMMA)
    nnx.replace_by_pure_dict(changed, params)
    file = written(GEMMA, params=changed)
    assert file.config() == GEMMA
    found = nnx.to_pure_dict(place(GEMMA, file))
    for part, values in params.items():
        for name, value in values.items():
            one = np.float32(name.endswith("norm"))
            np.testing.assert_array_equal(found[part][name], (np.asarray(value) + one) - one, err_msg=name)


@pytest.mark.parametrize(
    ("extra", "changed"),
    [
        ({"attention.sliding_window_pattern": 2}, {"windows": (4, 0) * 3 + (4,), "rope_of_layer": (1, 0) * 3 + (1,)}),
        ({"rope.freq_base_swa": 500.0}, {"ropes": (Rope(theta=1e6), Rope(theta=500.0))}),
        (
            {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0},  # of layers without a window
            {"ropes": (Rope(theta=1e6, scaling=RopeScaling(kind="linear", factor=8.0)), Rope(theta=1e4))},
        ),
        ({"final_logit_softcapping": 30.0}, {"logit_cap": 30.0}),
    ],
    ids=lambda value: next(iter(value)),
)  # fmt: skip
def test_gemma_options_in_the_metadata_are_taken_over(extra, changed, written):
    found = written(GEMMA, extra={f"gemma3.{key}": value for key, value in extra.items()}).config()
    assert found == replace(GEMMA, **changed)


def test_gemma_27b_has_another_scale_of_queries(written):
    """Its 62 layers divide by the square root of hidden size / heads, which the file does not contain: here 32 / 4 instead of head_dim 16."""
    config = written(GEMMA, extra={"gemma3.block_count": 62}).config()
    assert config.query_scale == 8**-0.5
    assert config.layers == 62


def test_quantised_weights_are_dequantised(written):
    """Rows of 32 numbers are one block of each type; Q4_0 has 16 levels of at most max / 8."""
    types = gguf.GGMLQuantizationType
    file = written(
        kinds={"ffn_up.weight": types.Q8_0, "ffn_gate.weight": types.Q4_0, "attn_q.weight": types.F16}
    )
    blocks, exact = place(LLAMA, file)["blocks"], tiny_params(LLAMA)["blocks"]
    for name, kind in (("up", types.Q8_0), ("gate", types.Q4_0)):
        expected = gguf.dequantize(gguf.quantize(np.asarray(exact[name][...]), kind), kind)
        np.testing.assert_array_equal(blocks[name][...], expected)
        worst = np.abs(np.asarray(exact[name][...])).max()
        assert (
            0
            < np.abs(expected - np.asarray(exact[name][...])).max()
            <= worst / (8 if kind == types.Q4_0 else 127)
        )
    np.testing.assert_array_equal(
        blocks["query"][...], np.asarray(exact["query"][...]).astype(np.float16).astype(np.float32)
    )


def test_metadata_that_is_left_out_has_the_defaults_of_the_format(written):
    keys = ("attention.head_count_kv", "attention.key_length", "attention.value_length", "rope.freq_base")
    config = tiny_decoder_config(**SIZES, kv_heads=4)
    assert written(config, extra={f"llama.{key}": None for key in keys}).config() == config


@pytest.mark.parametrize(
    ("metadata", "scaling"),
    [
        ({"type": "none"}, None),
        ({"type": "linear", "factor": 4.0}, RopeScaling(kind="linear", factor=4.0)),
        (
            {"type": "yarn", "factor": 4.0, "original_context_length": 16},
            RopeScaling(kind="yarn", factor=4.0, original_max_positions=16),
        ),
    ],
)
def test_rope_scaling_of_the_metadata_is_taken_over(metadata, scaling, written):
    extra = {f"llama.rope.scaling.{key}": value for key, value in metadata.items()}
    assert written(extra=extra).config().ropes[0].scaling == scaling


def test_the_former_key_of_a_linear_scaling_is_refused(written):
    with pytest.raises(ValueError, match=r"llama\.rope\.scale_linear=2\.0 .* must be 1"):
        written(extra={"llama.rope.scale_linear": 2.0}).config()


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_scaling_is_found_in_the_divisors_of_the_frequencies(factor, written):
    """As llama.cpp's converter writes them: 1 for fast rotations, the factor for slow ones, a blend between."""
    theta, dim = 5e5, 8
    frequencies = [theta ** (-2 * i / dim) for i in range(dim // 2)]
    divisors = []
    for frequency in frequencies:
        turns = 8192 * frequency / (2 * np.pi)
        share = min(max((turns - 1.0) / 3.0, 0.0), 1.0)
        divisors.append(1.0 / (share + (1.0 - share) / factor))
    file = written(tensors={"rope_freqs.weight": np.array(divisors, np.float32)})
    scaling = file.config().ropes[0].scaling
    assert scaling == RopeScaling(kind="llama3", factor=factor, original_max_positions=8192)
    np.testing.assert_allclose(
        rope_frequencies(dim, theta, scaling), np.array(frequencies) / divisors, rtol=1e-6
    )
    place(file.config(), file)  # rope_freqs.weight is not a tensor of the decoder


def test_missing_and_unexpected_tensors_are_named(written):
    file = written(FAMILIES["qwen2"])
    with pytest.raises(ValueError, match=r"model\.gguf lacks the tensor 'model\.layers\.2\."):
        place(tiny_decoder_config(**SIZES, qkv_bias=True, tied_embeddings=False, layers=3), file)
    with pytest.raises(ValueError, match=r"has the tensors \['blk\.0\.attn_sinks\.weight'\]"):
        place(LLAMA, written(tensors={"blk.0.attn_sinks.weight": np.ones(4, np.float32)}))
