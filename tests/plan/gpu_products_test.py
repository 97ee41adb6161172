"""Matrix products in programs compiled for an H100, which needs the CUDA plugin (extra cuda-plan) and no GPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

pytest.importorskip("jax_cuda12_plugin", reason="the extra cuda-plan")

from dapo_jax import chunked_logprobs
from dapo_jax.config import load_config
from dapo_jax.plan.decoder import decoder_of
from dapo_jax.plan.programs import Programs
from dapo_jax.plan.topologies import devices_of, parse
from dapo_jax.plan.workload import Assumptions, workload_of
from tests.plan.products import compiled_products, lowered_products

MODELS = ("qwen3-0.6b", "llama-3.2-1b", "gemma-3-1b")


def lowered(function, *shapes, mesh=None, axes=()):
    placed = jax.sharding.SingleDeviceSharding(devices_of(parse("h100:1"))[0])
    given = [
        jax.ShapeDtypeStruct(
            shape, dtype, sharding=placed if mesh is None else NamedSharding(mesh, PartitionSpec(axis))
        )
        for (shape, dtype), axis in zip(shapes, axes or (None,) * len(shapes), strict=True)
    ]
    return jax.jit(function).lower(*given)


def unaligned(made):
    """The products of a lowered program, before and after compilation, that are not aligned."""
    # The tests' own settings leave most optimizations out.
    whole = {"xla_backend_optimization_level": 3, "xla_llvm_disable_expensive_passes": False}
    texts = made.as_text(debug_info=True), made.compile(compiler_options=whole).as_text()
    found = [*lowered_products(texts[0]), *compiled_products(texts[1])]
    return [each for each in found if not each.is_aligned]


@functools.partial(jax.value_and_grad, argnums=(0, 1))
def score(hidden, unembedding, targets):
    return chunked_logprobs(hidden, unembedding, targets, compute_dtype="bfloat16")[0].sum()


def head(vocab, tokens=256, embed=64):
    return ((tokens, embed), jnp.float32), ((vocab, embed), jnp.float32), ((tokens,), jnp.int32)


@pytest.mark.parametrize("inner", [1187, 1184])
def test_an_unaligned_product_is_found(inner):
    made = lowered(
        lambda a, b: jnp.einsum("nij,njk->nik", a, b, preferred_element_type=jnp.float32),
        ((2, 256, inner), jnp.bfloat16),
        ((2, inner, 128), jnp.bfloat16),
    )
    [found] = lowered_products(made.as_text(debug_info=True))
    assert found[:3] == (256, inner, 128)
    assert "nij,njk->nik" in found.op
    [found] = compiled_products(made.compile().as_text())
    assert {found.rows, found.columns} == {256, 128}
    assert bool(unaligned(made)) == (inner == 1187)


# The whole programs are slow. The vocabulary of Qwen3-0.6B is 128 x 1,187, and 32,003 is a prime number.
@pytest.mark.parametrize("vocab", [151_936, 32_003])
def test_log_probabilities_have_four_aligned_products_and_no_copy_of_the_matrix(vocab):
    """Forward: logits. Backward: logits again, and the gradients of both operands. Besides the logits of a chunk, twice in float32 and once in bfloat16, there are small arrays."""
    made = lowered(score, *head(vocab))
    dots = lowered_products(made.as_text(debug_info=True))
    found = sorted((each.inner, *sorted((each.rows, each.columns))) for each in dots)
    assert found == [(64, 256, 2048), (64, 256, 2048), (256, 64, 2048), (2048, 64, 256)]
    assert unaligned(made) == []
    found = made.compile()
    assert "scatter(" not in found.as_text()
    assert found.memory_analysis().temp_size_in_bytes < 10 * 256 * 2048 + 2 * 2**20


def test_a_vocabulary_that_the_compiler_shards_is_not_gathered_on_gpus():
    """Each of four GPUs computes a quarter of each chunk. The parts of the vocabulary in a chunk number 151,936 / 9,496 = 16."""
    mesh = Mesh(np.array(devices_of(parse("h100:4"))), ("part",), axis_types=(AxisType.Auto,))
    text = lowered(score, *head(151_936), mesh=mesh, axes=(None, "part", None)).compile().as_text()
    assert {size for each in compiled_products(text) for size in each[:3]} == {64, 256, 512}
    assert "all-gather" not in text


# Slow: compiles every program of three models. The products with the vocabulary are compiled above.
@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_products_of_updates_and_of_decoding_are_aligned(model):
    config = load_config("gsm8k_qwen3_0.6b", [f"model.source=preset:{model}", "batch.rows_per_microbatch=1"])
    made = parse("h100:1")
    programs = Programs(
        config, decoder_of(config.model), workload_of(config, Assumptions()), devices_of(made),
        memory=made.chip.device_hbm_bytes,
    )  # fmt: skip
    found = {name: unaligned(lower()) for name, lower in programs.lowered().items()}
    assert found.keys() >= {"generate", "prefill_row", "score", "update_add_longest", "update_add_shortest"}
    assert {name: some for name, some in found.items() if some} == {}
