"""Products in a compute dtype: rounding and gradients, against float64 and in lowered programs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dapo_jax.numerics.precision import product, rounded
from dapo_jax.numerics.quantization import quantized

ROWS, INNER, TOKENS = 7, 40, 5


def operands(seed=0):
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((ROWS, INNER), (INNER, TOKENS))]


def as_bfloat16(x):
    """Rounded to 8 bits of mantissa by ml_dtypes, in float64."""
    return np.asarray(x).astype(jnp.bfloat16).astype(np.float64)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_stored_is_rounded_and_what_flows_is_not_on_cpu(dtype):
    weight, x = operands()
    found = product("oi,it->ot", weight, x, dtype)
    kept = as_bfloat16(weight) if dtype == "bfloat16" else np.asarray(weight, np.float64)
    assert found.dtype == jnp.float32
    # 40 sums in float32: 40 roundings of 2^-24 of partial sums of at most about 40.
    np.testing.assert_allclose(found, kept @ np.asarray(x, np.float64), rtol=0, atol=40 * 40 * 2**-24)


def test_weights_kept_in_bfloat16_and_in_float32_give_the_same_bits():
    """So a sampler that holds bfloat16 weights computes what a trainer with float32 weights does."""
    weight, x = operands()
    multiply = jax.jit(lambda w: product("oi,it->ot", w, x, "bfloat16"))
    np.testing.assert_array_equal(multiply(weight), multiply(weight.astype(jnp.bfloat16)))


def test_gradients_are_float32_and_see_the_rounded_weight():
    weight, x = operands()
    cotangent = jnp.cos(jnp.arange(ROWS * TOKENS, dtype=jnp.float32)).reshape(ROWS, TOKENS)
    _, back = jax.vjp(lambda w, x: product("oi,it->ot", w, x, "bfloat16"), weight, x)
    d_weight, d_x = back(cotangent)
    assert d_weight.dtype == d_x.dtype == jnp.float32
    np.testing.assert_allclose(d_weight, np.asarray(cotangent) @ np.asarray(x).T, rtol=0, atol=1e-5)
    np.testing.assert_allclose(d_x, as_bfloat16(weight).T @ np.asarray(cotangent), rtol=0, atol=1e-5)


def test_batched_indices_have_the_gradients_of_einsum():
    rng = np.random.default_rng(1)
    keys, queries = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((2, 8, 3, 6), (2, 4, 8, 3, 6)))
    spec = "kdbt,kgdbs->bkgst"

    def loss(multiply):
        return lambda k, q: jnp.sum(jnp.sin(multiply(k, q)))

    found = jax.grad(loss(lambda k, q: product(spec, k, q, "float32")), argnums=(0, 1))(keys, queries)
    expected = jax.grad(loss(lambda k, q: jnp.einsum(spec, k, q)), argnums=(0, 1))(keys, queries)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), found, expected)


@pytest.mark.parametrize(("platform", "operand"), [("cpu", "f32"), ("cuda", "bf16"), ("tpu", "bf16")])
def test_accelerators_multiply_bfloat16_and_sum_in_float32(platform, operand):
    """Forward and both gradients, in the program as it is lowered for each platform."""

    def gradients(w, x):
        out, back = jax.vjp(lambda w, x: product("oi,it->ot", w, x, "bfloat16"), w, x)
        return out, back(jnp.ones_like(out))

    shapes = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in operands()]
    text = jax.jit(gradients).trace(*shapes).lower(lowering_platforms=(platform,)).as_text()
    dots = [line for line in text.splitlines() if "stablehlo.dot_general" in line]
    kinds = [line.split(" : ")[-1] for line in dots]
    assert len(kinds) == 3
    for kind in kinds:
        inputs, output = kind.split("->")
        assert inputs.count(f"x{operand}>") == 2, kind
        assert output.strip().endswith("xf32>"), kind


def test_rounding_survives_compilation():
    """A cast there and back may be dropped by the compiler; this is not."""
    x = jnp.float32(1.0) + jnp.float32(2.0**-10)
    assert jax.jit(lambda x: rounded(x, "bfloat16"))(x) == 1.0
    assert jax.jit(lambda x: rounded(x, "float32"))(x) == x


@pytest.mark.parametrize("spec", ["hde,et->hdt", "oi,it->ot", "ve,te->tv"])
def test_a_product_with_a_quantized_weight_is_that_with_what_it_stands_for(spec):
    """The scale comes out of the sum: in float32 to its rounding. A row of zeros stays one, and divides nothing by zero."""
    rng = np.random.default_rng(0)
    sizes = {"h": 3, "d": 4, "e": 16, "t": 5, "o": 6, "i": 16, "v": 7}
    first, second, _ = spec.replace("->", ",").split(",")
    weight, x = (
        jnp.asarray(rng.normal(size=[sizes[i] for i in part]), jnp.float32) for part in (first, second)
    )
    weight = weight.at[0].set(0)
    small = quantized(weight, (weight.ndim - 1,))
    whole = small.whole
    assert small.values.dtype == jnp.int8
    assert (np.abs(whole - weight) <= np.abs(weight).max(-1, keepdims=True) / 127 / 2 * 1.0001).all()
    expected = jnp.einsum(spec, whole, x)
    np.testing.assert_allclose(product(spec, small, x, "float32"), expected, rtol=1e-5, atol=1e-5)


def test_a_quantized_table_gives_rows_and_a_matrix_of_heads_becomes_one_of_outputs():
    table = quantized(jnp.asarray(np.random.default_rng(0).normal(size=(5, 2, 4)), jnp.float32), (1, 2))
    flat = table.reshape(len(table), -1)
    assert (flat.values.shape, flat.scale.shape) == ((5, 8), (5, 1))
    np.testing.assert_array_equal(flat.rows(jnp.array([3, 0])), flat.whole[jnp.array([3, 0])])
