"""Sums in a fixed order: the gradients of lookups, by a loop and for each platform."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dapo_jax.numerics.segments import looked_up, sums_by_entry

TOKENS = np.array([3, 0, 3, 5, 3, 0, 3, 3, 5, 3, 3], np.int32)
"""One entry has more rows than any power of two below their number, and entries 1, 2, 4 and 6 have none."""


def rows(seed=0, shape=(11, 4)):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def summed(values):
    return np.asarray(sums_by_entry(jnp.asarray(values), jnp.asarray(TOKENS), entries=7))


def test_the_sums_are_those_of_a_loop():
    expected = np.zeros((7, 4))
    for entry, row in zip(TOKENS, rows(), strict=True):
        expected[entry] += row
    found = summed(rows())
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)
    assert not found[[1, 2, 4, 6]].any()


def test_a_row_that_is_nan_reaches_only_its_own_entry():
    bad = rows()
    bad[3] = np.nan
    found = summed(bad)
    assert np.isnan(found[5]).all()
    np.testing.assert_array_equal(found[[0, 3]], summed(rows())[[0, 3]])


def plain(table, index):
    return table[index] if table.ndim == 2 else jnp.take_along_axis(table, index[..., None], axis=1)


def pulled(function, table, index, cotangent):
    return jax.vjp(lambda table: function(table, index), table)[1](cotangent)[0]


CASES = {
    "a table": ((7, 4), TOKENS),
    "rows": ((2, 12, 4), np.stack([TOKENS, TOKENS[::-1]])),
}


@pytest.mark.parametrize("case", CASES)
def test_on_cpu_values_and_gradients_are_bit_for_bit_those_of_a_gather(case):
    shape, index = CASES[case]
    table, index, cotangent = map(jnp.asarray, (rows(1, shape), index, rows(2, (*index.shape, 4))))
    np.testing.assert_array_equal(looked_up(table, index), plain(table, index))
    found, expected = (
        jax.jit(pulled, static_argnums=0)(f, table, index, cotangent) for f in (looked_up, plain)
    )
    np.testing.assert_array_equal(found, expected)


def lowered(function, case, platform):
    shape, index = CASES[case]
    arguments = jnp.zeros(shape), jnp.asarray(index), jnp.zeros((*index.shape, 4))
    traced = jax.jit(lambda *given: pulled(function, *given)).trace(*arguments)
    return traced.lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.parametrize("case", CASES)
def test_the_gradient_for_a_gpu_has_no_scatter(case):
    """The scatter of the plain gather shows that the test would find one."""
    assert "stablehlo.scatter" not in lowered(looked_up, case, "cuda")
    assert "stablehlo.sort" in lowered(looked_up, case, "cuda")
    assert "stablehlo.scatter" in lowered(plain, case, "cuda")


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
@pytest.mark.parametrize("case", CASES)
def test_the_gradient_for_other_platforms_is_that_of_a_gather(case, platform):
    mine, theirs = (lowered(function, case, platform) for function in (looked_up, plain))
    assert "stablehlo.sort" not in mine
    assert mine.count('"stablehlo.scatter"(') == theirs.count('"stablehlo.scatter"(') == 1
