"""Selections against numpy and against other libraries. They do not depend on the order of tokens, on padding or on the number of devices.

fixtures/selections.npz has two random batches of 20 responses of up to 12 tokens (`s0/in/NAME`, `s1/in/NAME`), and what other libraries returned for them in float64:
losses and their gradients from verl 0.9.1 (Clip-Cov, KL-Cov) and TRL 1.16.0 (high entropy), and the mask of AReaL 1.0.4 (M2PO). `clip_cov/verl_first_5_percent` drops the
first tokens in reading order instead of random ones.
"""

import math
from inspect import signature
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from dapo_jax.config import algorithms
from dapo_jax.dapo.losses import dapo_loss
from dapo_jax.dapo.objectives import kl_cov_loss, options_of, wanted
from dapo_jax.dapo.selections import SELECTIONS, at_least_kth
from dapo_jax.parallel.mesh import make_mesh

FIXTURES = np.load(Path(__file__).parent / "fixtures" / "selections.npz")
SEEDS = ("s0", "s1")
SIZE = 24
at_least = jax.jit(at_least_kth)
high_entropy, low_covariance, high_covariance, low_second_moment = (
    jax.jit(each, static_argnames=[*options_of(each)]) for each in SELECTIONS.values()
)
JITTED = dict(
    zip(SELECTIONS, (high_entropy, low_covariance, high_covariance, low_second_moment), strict=True)
)

numbers = st.one_of(
    st.floats(width=32, allow_nan=False, allow_subnormal=False),
    st.sampled_from([0.0, -0.0, 1.0, -1.0, math.inf, -math.inf]),
)


@given(
    values=st.lists(numbers, min_size=SIZE, max_size=SIZE),
    mask=st.lists(st.booleans(), min_size=SIZE, max_size=SIZE),
    k=st.integers(1, SIZE + 1),
)
def test_at_least_kth_is_the_threshold_of_a_sort(values, mask, k):
    """Ties are all kept: equal numbers of both signs of zero, and infinite ones. A mask of fewer than k tokens is kept."""
    values, mask = np.array(values, np.float32), np.array(mask)
    largest_first = np.sort(values[mask])[::-1]
    expected = mask & (values >= largest_first[k - 1]) if k <= mask.sum() else mask
    np.testing.assert_array_equal(at_least(values, mask, k), expected)


def test_values_outside_the_mask_may_be_nan():
    found = at_least(
        np.array([np.nan, 2.0, np.nan, 3.0, 1.0], np.float32), np.array([0, 1, 0, 1, 1], bool), 2
    )
    assert found.tolist() == [False, True, False, True, False]


@pytest.mark.parametrize("count", [1, 2, 5, 10, 11, 24])
@pytest.mark.parametrize("frac", [0.1, 0.2, 0.5, 1.0])
def test_high_entropy_is_numpy_s_quantile(count, frac):
    entropy = np.random.default_rng(count).permutation(SIZE).astype(np.float32)
    mask = np.arange(SIZE) < count
    expected = mask & (entropy >= np.quantile(entropy[mask].astype(np.float64), 1 - frac) - 1e-9)
    np.testing.assert_array_equal(high_entropy(mask, entropy=entropy, frac=frac), expected)


def random_arrays(tokens=1000, seed=0):
    """Tokens of which about 70% are in the mask, with NaN outside it. Every fifth token has the values of another, so there are ties."""
    rng = np.random.default_rng(seed)
    mask = rng.random(tokens) < 0.7
    arrays = {
        "advantages": rng.normal(size=tokens),
        "logprobs": -rng.exponential(0.8, size=tokens),
        "entropy": rng.exponential(size=tokens),
        "noise": rng.random(tokens),
    }
    arrays["sampler_logprobs"] = arrays["logprobs"] + rng.normal(0, 0.3, size=tokens)
    same = rng.integers(0, tokens, tokens // 5)
    for array in arrays.values():
        array[: len(same)] = array[same]
        array[~mask] = np.nan
    return {"mask": mask, **{name: array.astype(np.float32) for name, array in arrays.items()}}


OPTIONS = {
    "high_entropy": {"frac": 0.3},
    "low_covariance": {"frac": 0.05, "low": 0.2, "high": 3.0},
    "high_covariance": {"frac": 0.1},
    "low_second_moment": {"limit": 0.04},
}


def selected(name, arrays):
    chosen = {each: arrays[each] for each in wanted(SELECTIONS[name])}
    return np.asarray(JITTED[name](arrays["mask"], **chosen, **OPTIONS[name]))


@pytest.mark.parametrize("name", SELECTIONS)
def test_order_padding_and_devices_do_not_change_the_selection(name):
    """The arrays are shuffled, padded to 1,600 tokens, and split over eight devices."""
    arrays = random_arrays()
    expected = selected(name, arrays)
    assert 0 < expected.sum() < arrays["mask"].sum()
    assert not (expected & ~arrays["mask"]).any()
    sharding = NamedSharding(make_mesh(fsdp=8), PartitionSpec("fsdp"))
    for seed in range(3):
        place = np.random.default_rng(seed).permutation(1600)[:1000]
        moved = {
            key: np.full(1600, np.nan, array.dtype) if key != "mask" else np.zeros(1600, bool)
            for key, array in arrays.items()
        }
        for key, array in arrays.items():
            moved[key][place] = array
        for where in (moved, jax.device_put(moved, sharding)):
            np.testing.assert_array_equal(selected(name, where)[place], expected)


def test_the_selections_are_what_they_say_in_float64():
    arrays = random_arrays(seed=1)
    mask = arrays["mask"]
    exact = {name: array[mask].astype(np.float64) for name, array in arrays.items() if name != "mask"}
    c = (exact["advantages"] - exact["advantages"].mean()) * (exact["logprobs"] - exact["logprobs"].mean())
    k = int(0.1 * mask.sum())
    np.testing.assert_array_equal(selected("high_covariance", arrays)[mask], c >= np.sort(c)[-k])

    within = np.flatnonzero((c > 0.2) & (c < 3.0))
    dropped, k = ~selected("low_covariance", arrays)[mask], int(0.05 * mask.sum())
    assert len(within) > k
    noise = exact["noise"]
    expected = np.isin(np.arange(len(c)), within) & (noise >= np.sort(noise[within])[-k])
    np.testing.assert_array_equal(dropped, expected)

    square = (exact["logprobs"] - exact["sampler_logprobs"]) ** 2
    kept = square[selected("low_second_moment", arrays)[mask]]
    more = square[square <= square[square > kept.max()].min()]
    assert kept.mean() < 0.04 <= more.mean()
    assert len(kept) == (square <= kept.max()).sum()


def test_small_masks():
    """Without tokens, nothing is selected. Of one token, the covariance is 0: it is the largest, and it is outside the range of Clip-Cov."""
    arrays = {**random_arrays(8), "mask": np.zeros(8, bool)}
    assert not any(selected(name, arrays).any() for name in SELECTIONS)
    arrays = random_arrays(8)
    arrays["mask"] = np.arange(8) == np.flatnonzero(arrays["mask"])[0]
    arrays["sampler_logprobs"] = arrays["logprobs"]
    for name in SELECTIONS:
        np.testing.assert_array_equal(selected(name, arrays), arrays["mask"])


def test_all_tokens_may_have_too_large_a_moment():
    ones = np.ones(4, np.float32)
    assert not low_second_moment(np.ones(4, bool), logprobs=ones, sampler_logprobs=0 * ones).any()


def test_the_configuration_knows_the_selections_and_their_options():
    found = {name: set(options_of(selection)) for name, selection in SELECTIONS.items()}
    assert found | {"all": set()} == {name: set(names) for name, names in algorithms.SELECTIONS.items()}
    assert all(next(iter(signature(each).parameters)) == "mask" for each in SELECTIONS.values())


def inputs(seed):
    """The mask [20, 12] and the arrays of a fixture as flat float32 arrays, NaN outside the mask."""
    mask = FIXTURES[f"{seed}/in/mask"]
    arrays = {}
    for name in ("logprobs", "old_logprobs", "sampler_logprobs", "entropy", "advantages"):
        array = FIXTURES[f"{seed}/in/{name}"]
        array = np.broadcast_to(array if array.ndim == 2 else array[:, None], mask.shape)
        arrays[name] = np.where(mask, array, np.nan)
    return mask, arrays


def flat(mask, arrays, *names):
    return mask.ravel(), {name: arrays[name].ravel().astype(np.float32) for name in names}


def assert_loss(seed, key, objective, **options):
    """Compares a loss in float64 with a fixture. verl adds 1e-8 to the number of tokens, over 100."""
    mask, arrays = inputs(seed)
    with jax.enable_x64(True):
        options = {n: jnp.asarray(v) if isinstance(v, np.ndarray) else v for n, v in options.items()}
        given = {name: jnp.asarray(arrays[name]) for name in ("logprobs", "old_logprobs", "advantages")}

        def loss(logprobs):
            return objective(
                logprobs, given["old_logprobs"], given["advantages"], jnp.asarray(mask), **options
            )[0]

        value, gradient = jax.value_and_grad(loss)(given["logprobs"])
    expected = FIXTURES[f"{seed}/loss/{key}/grad"]
    assert np.abs(np.asarray(gradient) - expected).max() <= 1e-9 * np.abs(expected).max()
    return float(value) - float(FIXTURES[f"{seed}/loss/{key}/loss"])


def token_mean(mask, selected=None):
    return np.where(mask if selected is None else selected.reshape(mask.shape), 1.0 / mask.sum(), 0.0)


@pytest.mark.parametrize("seed", SEEDS)
def test_high_entropy_equals_trl(seed):
    mask, arrays = inputs(seed)
    flat_mask, entropy = flat(mask, arrays, "entropy")
    kept = np.asarray(high_entropy(flat_mask, **entropy))
    off = assert_loss(
        seed, "high_entropy/trl", dapo_loss, clip_ratio_high=0.28, weights=token_mean(mask, kept)
    )
    assert abs(off) < 1e-9


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("variant", "frac"), [("verl", 2e-4), ("verl_20_percent", 0.2)])
def test_high_covariance_with_kl_cov_equals_verl(seed, variant, frac):
    mask, arrays = inputs(seed)
    flat_mask, given = flat(mask, arrays, "advantages", "logprobs")
    chosen = np.asarray(high_covariance(flat_mask, **given, frac=frac)).reshape(mask.shape)
    assert chosen.sum() == max(1, int(frac * mask.sum()))
    off = assert_loss(seed, f"kl_cov/{variant}", kl_cov_loss, weights=token_mean(mask), selected=chosen)
    assert abs(off) < 1e-8


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("variant", "frac", "clip"),
    [("verl_all", 1.0, 1.0), ("verl_all_ppo_clip", 1.0, 0.2), ("verl_first_5_percent", 0.05, 1.0)],
)
def test_low_covariance_equals_verl(seed, variant, frac, clip):
    """In the fixture, some ratios are clipped, and verl never drops these tokens. Here they get the lowest noise, so that others are dropped first. Their gradient is 0, whether they
    are dropped or not, but with frac = 1 they are dropped, so that the losses differ."""
    mask, arrays = inputs(seed)
    ratio = np.exp(arrays["logprobs"] - arrays["old_logprobs"])
    clipped = np.where(arrays["advantages"] > 0, ratio > 1 + clip, ratio < 1 - clip) & (
        arrays["advantages"] != 0
    )
    in_order = np.where(clipped, 0.0, 1.0 - np.arange(mask.size).reshape(mask.shape) / 1000)
    flat_mask, given = flat(mask, {**arrays, "noise": in_order}, "advantages", "logprobs", "noise")
    kept = np.asarray(low_covariance(flat_mask, **given, frac=frac)).reshape(mask.shape)
    assert 0 < (mask & ~kept).sum() <= frac * mask.sum()
    off = assert_loss(
        seed,
        f"clip_cov/{variant}",
        dapo_loss,
        clip_ratio_low=clip,
        clip_ratio_high=clip,
        weights=token_mean(mask, kept),
    )
    if not (mask & ~kept & clipped).any():
        assert abs(off) < 1e-8


@pytest.mark.parametrize("seed", SEEDS)
def test_low_second_moment_equals_areal(seed):
    """AReaL compares the old policy with the sampler."""
    mask, arrays = inputs(seed)
    arrays["logprobs"] = arrays["old_logprobs"]
    flat_mask, given = flat(mask, arrays, "logprobs", "sampler_logprobs")
    kept = np.asarray(low_second_moment(flat_mask, **given)).reshape(mask.shape)
    assert kept.sum() < mask.sum()
    np.testing.assert_array_equal(kept, FIXTURES[f"{seed}/mask/m2po/areal/mask"] & mask)
