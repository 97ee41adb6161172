"""Objectives compared with the numbers that other libraries returned for the same inputs: one response per row, and packed.

`fixtures/objectives.npz` contains numbers only: the inputs of two random batches (20 responses of up to 12 tokens, in 5 groups), and the losses, gradients and
weights that these libraries computed for them in float64: verl 0.9.1, TRL 1.16.0, SkyRL 0.3.0, OpenRLHF 0.11.2, AReaL 1.0.4, prime-rl 559b44772, slime 624b824a8,
ROLL 8eb27cc2 and NeMo-RL 7ea279abf. A key has the form `seed/loss/algorithm/library_variant/array`. One response is not in the loss, one has one token, one
has a hole in its mask, and one has the ratio 1 at all tokens. In these tests, all values outside the mask are NaN.
"""

import re
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from dapo_jax.config.algorithms import OBJECTIVES as CONFIGURED
from dapo_jax.dapo.aggregation import token_weights
from dapo_jax.dapo.corrections import drop_off_policy, importance_weights
from dapo_jax.dapo.losses import dapo_loss, kl_penalty
from dapo_jax.dapo.metrics import Mean, to_scalars
from dapo_jax.dapo.objectives import (
    ARRAYS,
    OBJECTIVES,
    SHARED,
    load_objective,
    options_of,
    wanted,
    with_shared_metrics,
)
from dapo_jax.dapo.responses import response_mean, response_sum
from dapo_jax.parallel.mesh import make_mesh

FIXTURES = np.load(Path(__file__).parent / "fixtures" / "objectives.npz")
SEEDS = ("s0", "s1")
ROWS, TOKENS = 20, 12
REAL = ("logprobs", "old_logprobs", "sampler_logprobs", "ref_logprobs")
COUNTS = 2.5e-8
"""verl, OpenRLHF, NeMo-RL and SkyRL add 1e-8 to counts. A response of one token, and its mean, each become smaller by 1e-8."""
FLOAT32_RATIO = 3e-7
"""SkyRL's DPPO rounds log-ratios of up to 2.6 to float32 (1.6e-7) before exp, and the result too (6e-8)."""


class Row(NamedTuple):
    """One comparison: objective, options and aggregation of this library, and the key of the other library's loss."""

    key: str
    objective: str
    aggregation: str = "token_mean"
    options: Any = MappingProxyType({})
    old: str = "old_logprobs"
    advantages: str = "advantages"
    correction: tuple[str, float, float] | None = None
    kl: tuple[str, float] | None = None
    drop: float | None = None
    selected: float = 1.0
    """The share of tokens with the largest covariance that KL-Cov selects."""
    all_rows: bool = False
    """The other library divides by all 20 rows, not by the 19 rows with tokens in the mask."""
    value: bool = True
    """False if only the gradient is comparable: the value has another form, or it contains a constant of the row without tokens."""
    tolerance: float = COUNTS
    """Relative to the largest gradient."""


EXACT = 1e-12
"""Tolerance for libraries that add nothing to counts: the rounding of float64 in sums of 115 terms with ratios up to 13.5."""
PPO = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2}
WIDE = {"clip_ratio_low": 0.1, "clip_ratio_high": 0.15}
GSPO = {"clip_ratio_low": 3e-4, "clip_ratio_high": 4e-4}
TIGHT = {"delta_low": 0.05, "delta_high": 0.1}
KL_TIGHT = {"divergence": "kl", "delta_low": 0.02, "delta_high": 0.05}
MEAN, SEQUENCE, SUM = "token_mean", "sequence_mean", "sequence_sum"
TABLE = [
    Row("grpo/verl", "clip", SEQUENCE, PPO),
    Row("grpo/verl_dual_clip_3", "clip", SEQUENCE, {**PPO, "dual_clip": 3.0}),
    Row("grpo/trl", "clip", SEQUENCE, PPO, all_rows=True, tolerance=EXACT),
    Row("grpo/openrlhf", "clip", SEQUENCE, PPO),
    Row("grpo/nemo_rl", "clip", SEQUENCE, PPO, all_rows=True),
    Row("dr_grpo/verl", "clip", "token_sum_norm", PPO),
    Row("dapo/verl", "clip", MEAN, {"dual_clip": 10.0}),
    Row("dapo/trl", "clip", tolerance=EXACT),
    Row("two_sided_clip/trl", "clip", MEAN, {**PPO, "dual_clip": 4.0}, tolerance=EXACT),
    Row("gspo/verl", "gspo", SEQUENCE, GSPO),
    Row("gspo/trl", "gspo", SEQUENCE, GSPO, all_rows=True, tolerance=EXACT),
    Row("gspo/verl_wide", "gspo", SEQUENCE, WIDE),
    Row("gspo/trl_wide", "gspo", SEQUENCE, WIDE, all_rows=True, tolerance=EXACT),
    Row("gspo/skyrl_wide", "gspo", SEQUENCE, WIDE, all_rows=True),
    Row("gspo/openrlhf_wide", "gspo", SEQUENCE, WIDE),
    Row("gspo/nemo_rl_wide", "gspo", SEQUENCE, WIDE, all_rows=True),
    Row("gspo/areal_wide", "gspo", MEAN, WIDE),
    Row("gspo/slime_wide", "gspo", SEQUENCE, WIDE),
    Row("gspo/verl_wide", "gspo_token", SEQUENCE, WIDE),
    Row("gspo_token/verl_wide", "gspo_token", SEQUENCE, WIDE, advantages="token_advantages"),
    Row(
        "luspo/trl",
        "gspo",
        SUM,
        {"clip_ratio_low": 2e-3, "clip_ratio_high": 2.5e-3},
        all_rows=True,
        tolerance=EXACT,
    ),
    Row("luspo/trl_wide", "gspo", SUM, WIDE, all_rows=True, tolerance=EXACT),
    Row("gmpo/verl", "gmpo", SEQUENCE, all_rows=True),
    Row("gmpo/trl", "gmpo", SEQUENCE, all_rows=True, value=False, tolerance=EXACT),
    Row("cispo/trl", "cispo", tolerance=EXACT),
    Row("cispo/trl_cap_2", "cispo", MEAN, {"cap": 2.0}, tolerance=EXACT),
    Row("cispo/verl", "cispo", MEAN, {"cap": 1.2}),
    Row("cispo/skyrl_defaults", "cispo", MEAN, {"floor": 1.0, "cap": 6.0}),
    Row("cispo/skyrl_0_to_5", "cispo"),
    Row("cispo/roll", "cispo", MEAN, {"floor": 0.9, "cap": 1.1}),
    Row("cispo/nemo_rl", "cispo", MEAN, {"floor": 0.8, "cap": 1.2}),
    Row("cispo/slime_0_to_5", "cispo", SEQUENCE),
    Row("sapo/verl", "sapo", SEQUENCE),
    Row("sapo/trl", "sapo", SEQUENCE, all_rows=True, tolerance=EXACT),
    Row("sapo/skyrl", "sapo", SEQUENCE, all_rows=True),
    Row("sapo/areal", "sapo", MEAN),
    Row("dppo_tv/verl", "dppo", MEAN, {"cap": 3.0}),
    Row("dppo_tv/verl_tight", "dppo", MEAN, {**TIGHT, "cap": 20.0}),
    Row("dppo_kl/verl_tight", "dppo", MEAN, {**KL_TIGHT, "cap": 20.0}),
    Row("dppo_tv/skyrl_sampler", "dppo", MEAN, TIGHT, old="sampler_logprobs", tolerance=FLOAT32_RATIO),
    Row("dppo_tv/skyrl_old", "dppo", MEAN, TIGHT, tolerance=FLOAT32_RATIO),
    Row("dppo_kl/skyrl_old", "dppo", MEAN, KL_TIGHT, tolerance=FLOAT32_RATIO),
    Row("prime/prime_rl", "dppo", MEAN, {"kl": 1e-3}, old="sampler_logprobs", tolerance=EXACT),
    Row("prime/prime_rl_tight", "dppo", MEAN, {**TIGHT, "kl": 0.1}, old="sampler_logprobs", tolerance=EXACT),
    Row("vespo/trl", "vespo", tolerance=EXACT),
    Row("gpg/verl", "reinforce", MEAN, {"cap": None}),
    Row("dro/verl", "dro"),
    Row("kimi/roll", "dro"),
    Row("topr/roll", "topr", tolerance=EXACT),
    Row("reinforce/roll_tis", "reinforce", MEAN, {"cap": 1.0}, tolerance=EXACT),
    Row("reinforce/nemo_rl", "reinforce", MEAN, {"cap": None}),
    Row(
        "reinforce/skyrl_importance_sampling", "reinforce", MEAN, {"cap": 20.0}, value=False, tolerance=EXACT
    ),
    Row("reinforce/verl_bypass", "reinforce", old="sampler_logprobs"),
    Row("kl_k3/trl", "clip", MEAN, PPO, kl=("k3", 0.1), tolerance=EXACT),
    Row("kl_unbiased/trl", "clip", MEAN, PPO, kl=("k3_unbiased", 0.1), tolerance=EXACT),
    Row("opsm/trl", "clip", SEQUENCE, PPO, drop=0.01, all_rows=True, tolerance=EXACT),
    Row("kl_cov/verl", "kl_cov", selected=2e-4),
    Row("kl_cov/verl_20_percent", "kl_cov", selected=0.2),
    Row("correction/openrlhf_token_mask", "clip", MEAN, PPO, correction=("mask", 0.5, 2.0)),
    Row("correction/openrlhf_seq_mask", "clip", MEAN, PPO, correction=("keep_responses", 0.9, 1.1)),
    Row("correction/nemo_rl_tis", "clip", MEAN, PPO, correction=("truncate", 0.0, 2.0)),
    Row("correction/nemo_rl_icepop", "clip", MEAN, PPO, correction=("mask", 0.5, 2.0)),
    Row("correction/nemo_rl_seq_mask_tis", "clip", MEAN, PPO, correction=("keep_responses", 0.9, 1.1)),
    Row("correction/verl_tis_token_in_dapo", "clip", correction=("truncate", 0.0, 2.0)),
]
NAMES = [f"{row.objective} {row.key}" for row in TABLE]
FORMS = {(row.objective, row.aggregation, row.correction, row.kl, row.drop): row for row in reversed(TABLE)}
"""The first row of each combination of formulas. The other rows have the same formulas with other numbers."""


class Layout(NamedTuple):
    """A microbatch. Each entry of `place` is the index of a token in the flattened batch, or -1 for a token outside the mask."""

    place: np.ndarray
    segment_ids: np.ndarray


ALONE = [Layout(np.arange(ROWS * TOKENS).reshape(ROWS, TOKENS), np.ones((ROWS, TOKENS), np.int32))]


def packed(seed):
    """Returns three microbatches. A row contains three responses in random order, each after a prompt token in the same segment, and padding."""
    mask, rng = FIXTURES[f"{seed}/in/mask"], np.random.default_rng(int(seed[1:]))
    parts, order = (
        [Layout(np.full((3, 40), -1), np.zeros((3, 40), np.int32)) for _ in range(3)],
        rng.permutation(ROWS),
    )
    for first in range(0, ROWS, 3):
        row, stop = first // 3, 0
        for segment, response in enumerate(order[first : first + 3], 1):
            last = max(np.flatnonzero(mask[response]), default=2) + 1
            parts[row % 3].place[row // 3, stop + 1 : stop + 1 + last] = response * TOKENS + np.arange(last)
            parts[row % 3].segment_ids[row // 3, stop : stop + 1 + last] = segment
            stop += 1 + last
    return parts


def largest_covariance(seed, frac):
    """Returns the max(1, int(frac n)) tokens with the largest covariance of advantage and log-probability. 1 selects all tokens."""
    mask = FIXTURES[f"{seed}/in/mask"]
    logprobs = FIXTURES[f"{seed}/in/logprobs"][mask]
    advantages = np.broadcast_to(FIXTURES[f"{seed}/in/advantages"][:, None], mask.shape)[mask]
    covariance = (advantages - advantages.mean()) * (logprobs - logprobs.mean())
    chosen = np.zeros(covariance.size, bool)
    chosen[np.argsort(-covariance)[: max(1, int(frac * covariance.size))]] = True
    selected = np.zeros(mask.shape, bool)
    selected[mask] = chosen
    return selected


def arrays_of(row, seed, dtype):
    """Returns the inputs, all [20, 12], with NaN outside the mask."""
    mask = FIXTURES[f"{seed}/in/mask"]
    arrays = {name: FIXTURES[f"{seed}/in/{name}"] for name in REAL}
    arrays["old_logprobs"] = FIXTURES[f"{seed}/in/{row.old}"]
    advantages = FIXTURES[f"{seed}/in/{row.advantages}"]
    arrays["advantages"] = np.broadcast_to(
        advantages if advantages.ndim == 2 else advantages[:, None], mask.shape
    )
    weights = token_weights(
        mask,
        aggregation=row.aggregation,
        group_ids=FIXTURES[f"{seed}/in/group_ids"],
        max_response_tokens=TOKENS,
    )
    arrays["weights"] = weights * (19 / 20 if row.all_rows else 1.0)
    arrays = {name: np.where(mask, array, np.nan).astype(dtype) for name, array in arrays.items()}
    return {**arrays, "mask": mask, "selected": largest_covariance(seed, row.selected)}


def placed(arrays, layout):
    """Returns the arrays of a microbatch."""
    blank = {"mask": False, "selected": False}
    filled = {
        name: np.where(
            layout.place < 0, np.asarray(blank.get(name, np.nan), array.dtype), array.ravel()[layout.place]
        )
        for name, array in arrays.items()
    }
    return {**filled, "segment_ids": layout.segment_ids}


def loss_of(row, logprobs, given):
    """Computes the loss of a microbatch in the way that an update does."""
    old, mask, ids, weights = (given[name] for name in ("old_logprobs", "mask", "segment_ids", "weights"))
    if row.correction:
        kind, low, high = row.correction
        how = {"correction": kind, "low": low, "high": high}
        weights = weights * importance_weights(old, given["sampler_logprobs"], mask, ids, **how)[0]
    of_objective = weights
    if row.drop is not None:
        arrays = logprobs, given["sampler_logprobs"], given["advantages"], mask, ids
        of_objective = weights * drop_off_policy(*arrays, delta=row.drop)[0]
    objective = load_objective(row.objective, row.options)
    arrays = {"weights": of_objective} | {name: given[name] for name in wanted(objective) - {"weights"}}
    loss, _ = objective(logprobs, old, given["advantages"], mask, **arrays)
    if row.kl:
        estimator, coefficient = row.kl
        how = {"estimator": estimator, "old_logprobs": old, "weights": weights}
        loss = loss + coefficient * kl_penalty(logprobs, given["ref_logprobs"], mask, **how)[0]
    return loss


def measured(row, seed, layouts, dtype):
    """Returns the sum of the losses of all microbatches, and the gradient [20, 12]."""
    arrays = arrays_of(row, seed, dtype)
    total, gradient = 0.0, np.zeros(ROWS * TOKENS)
    with jax.enable_x64(dtype == np.float64):
        for layout in layouts:
            given = {name: jnp.asarray(array) for name, array in placed(arrays, layout).items()}
            logprobs = given.pop("logprobs")
            loss, found = jax.value_and_grad(partial(loss_of, row))(logprobs, given)
            assert found.dtype == dtype
            assert not np.asarray(found)[~np.asarray(given["mask"])].any()
            total += float(loss)
            gradient[layout.place[layout.place >= 0]] = np.asarray(found)[layout.place >= 0]
    return total, gradient.reshape(ROWS, TOKENS)


def size_of(row, seed):
    """Returns the sum of the absolute values of w A and w A log p over all tokens: the rounding errors of a loss are relative to this value."""
    arrays = arrays_of(row, seed, np.float64)
    return np.nansum(arrays["weights"] * abs(arrays["advantages"]) * np.maximum(1.0, abs(arrays["logprobs"])))


# Slow: the same formulas with other numbers.
@pytest.mark.parametrize("row", TABLE, ids=NAMES)
@pytest.mark.parametrize("seed", ["s0", pytest.param("s1", marks=pytest.mark.slow)])
def test_loss_and_gradient_equal_the_other_library_s(row, seed):
    expected_loss, expected = (FIXTURES[f"{seed}/loss/{row.key}/{name}"] for name in ("loss", "grad"))
    for dtype in (np.float64, np.float32):
        # Log-probabilities above -8 are rounded to float32 by at most 2.4e-7, so a ratio changes by at most 4.8e-7 of its value.
        tolerance = row.tolerance if dtype == np.float64 else row.tolerance + 6e-7
        loss, gradient = measured(row, seed, ALONE, dtype)
        assert np.abs(gradient - expected).max() <= tolerance * np.abs(expected).max()
        if row.value:
            assert loss == pytest.approx(float(expected_loss), rel=0, abs=tolerance * size_of(row, seed))


@pytest.mark.parametrize(
    ("row", "seed"),
    [
        pytest.param(
            row,
            seed,
            id=f"{seed}-{name}",
            marks=() if row in FORMS.values() and seed == "s0" else pytest.mark.slow,
        )
        for row, name in zip(TABLE, NAMES, strict=True)
        for seed in SEEDS
    ],
)
def test_packed_shuffled_microbatches_add_up_to_the_same(row, seed):
    for dtype, tolerance in ((np.float64, 1e-15), (np.float32, 1e-6)):
        loss, gradient = measured(row, seed, packed(seed), dtype)
        expected_loss, expected = measured(row, seed, ALONE, dtype)
        assert np.abs(gradient - expected).max() <= tolerance * np.abs(expected).max()
        assert loss == pytest.approx(expected_loss, rel=0, abs=tolerance * size_of(row, seed))


def test_the_inputs_are_what_the_tolerances_assume():
    for seed in SEEDS:
        mask = FIXTURES[f"{seed}/in/mask"]
        assert sorted(mask.sum(axis=1))[:2] == [0, 1]
        assert all(FIXTURES[f"{seed}/in/{name}"][mask].min() > -8 for name in REAL)
        segments = [part.segment_ids.max() for part in packed(seed)]
        assert segments == [3, 3, 3]


# What the other libraries multiply tokens by. A weight of [20, 1] is the same for all tokens of a response.
WEIGHTS = {
    "verl_tis_token": ("truncate", 0.0, 2.0),
    "trl_token_truncate": ("truncate", 0.0, 2.0),
    "verl_icepop": ("mask", 0.5, 2.0),
    "trl_token_mask": ("mask", 0.5, 2.0),
    "verl_tis_sequence": ("truncate_responses", 0.0, 2.0),
    "trl_sequence_truncate": ("truncate_responses", 0.0, 3.0),
}


@pytest.mark.parametrize("key", WEIGHTS)
@pytest.mark.parametrize("seed", SEEDS)
def test_importance_weights_equal_the_other_library_s(key, seed):
    kind, low, high = WEIGHTS[key]
    arrays, mask = arrays_of(TABLE[0], seed, np.float64), FIXTURES[f"{seed}/in/mask"]
    names = ("old_logprobs", "sampler_logprobs", "mask")
    with jax.enable_x64(True):
        given = [jnp.asarray(arrays[name]) for name in names]
        ids = jnp.asarray(ALONE[0].segment_ids)
        found = np.asarray(importance_weights(*given, ids, correction=kind, low=low, high=high)[0])
    expected = np.broadcast_to(FIXTURES[f"{seed}/correction/{key}/weights"], mask.shape)
    np.testing.assert_allclose(found[mask], expected[mask], rtol=1e-14)
    cut = (found == 0) if kind == "mask" else (found == high)
    assert 0 < cut[mask].mean() < 1


@pytest.mark.parametrize("seed", SEEDS)
def test_the_dropped_responses_equal_slime_s(seed):
    """slime compares with the old policy, so it is given here in place of the sampler."""
    mask, arrays = FIXTURES[f"{seed}/in/mask"], arrays_of(TABLE[0], seed, np.float32)
    names = ("logprobs", "old_logprobs", "advantages", "mask")
    given = [jnp.asarray(arrays[name]) for name in names]
    kept, metrics = drop_off_policy(*given, jnp.asarray(ALONE[0].segment_ids), delta=0.01)
    expected = FIXTURES[f"{seed}/mask/opsm/slime/mask"]
    np.testing.assert_array_equal(np.asarray(kept)[mask], expected[mask])
    share = 1 - expected[mask].mean()
    assert 0 < share < 1
    assert to_scalars(metrics) == {"importance/dropped_frac": pytest.approx(share, rel=1e-6)}


PLAIN = [Row("", name, selected=0.2) for name in OBJECTIVES]


@pytest.mark.parametrize("row", PLAIN, ids=lambda row: row.objective)
def test_every_option_changes_the_gradient_or_the_loss(row):
    """Some ratios, or changes of probability, are between the two values of each bound."""
    defaults = options_of(OBJECTIVES[row.objective])
    assert defaults.keys() == set(CONFIGURED[row.objective])
    bounds = {"clip_ratio_low": 0.5, "clip_ratio_high": 2.5, "dual_clip": 1.5, "floor": 0.5, "cap": 1.1}
    other = {**bounds, "delta_low": 0.5, "delta_high": 0.5, "divergence": "kl", "kl": 0.1}
    for name, default in defaults.items():
        base = TIGHT if row.objective == "dppo" else {}
        value = other[name] if name in other else default * 0.5 + 0.01
        options = (base, {**base, name: value})
        results = [measured(row._replace(options=each), "s0", ALONE, np.float64) for each in options]
        assert not np.array_equal(results[0][1], results[1][1]), name


@pytest.mark.parametrize("row", PLAIN, ids=lambda row: row.objective)
def test_without_advantages_tokens_or_weights_there_is_no_gradient(row):
    """KL-Cov's and DRO's penalties do not depend on the advantage."""
    arrays = arrays_of(row, "s0", np.float32)
    for name, value in (("advantages", 0.0), ("weights", 0.0), ("mask", False)):
        given = {**arrays, name: np.full_like(arrays[name], value)}
        given = {key: jnp.asarray(array) for key, array in placed(given, ALONE[0]).items()}
        logprobs = given.pop("logprobs")
        loss, found = jax.value_and_grad(partial(loss_of, row))(logprobs, given)
        if name != "advantages" or row.objective not in ("kl_cov", "dro"):
            assert (float(loss), np.abs(found).max()) == (0.0, 0.0), name


@pytest.mark.parametrize("row", PLAIN, ids=lambda row: row.objective)
def test_extreme_ratios_give_finite_gradients(row):
    arrays = arrays_of(row, "s0", np.float32)
    for shift in (-1e4, 1e4):
        given = {**arrays, "old_logprobs": arrays["logprobs"] + np.float32(shift)}
        given = {key: jnp.asarray(array) for key, array in placed(given, ALONE[0]).items()}
        logprobs = given.pop("logprobs")
        loss, found = jax.value_and_grad(partial(loss_of, row))(logprobs, given)
        assert np.isfinite(loss)
        assert np.isfinite(found).all()


def test_kl_cov_does_not_push_tokens_down_in_a_first_update():
    """The log-ratio is exactly 0. The gradient of -r A is then -w A, with and without the penalty."""
    row = Row("", "kl_cov", old="logprobs")
    _, gradient = measured(row, "s0", ALONE, np.float64)
    arrays = arrays_of(row, "s0", np.float64)
    np.testing.assert_allclose(gradient, np.nan_to_num(-arrays["weights"] * arrays["advantages"]), rtol=1e-14)


def test_clip_shares_by_hand():
    """Ratios e^0.5 and e^-0.5 for A = 1, e^-0.5 and e^0.5 for A = -1, each response alone in its row. One of four tokens is clipped on each side."""
    logprobs = jnp.log(jnp.full((4, 1), 0.6)) + jnp.asarray([[0.5], [-0.5], [-0.5], [0.5]])
    old, mask, ids = jnp.log(jnp.full((4, 1), 0.6)), jnp.ones((4, 1), bool), jnp.ones((4, 1), jnp.int32)
    advantages, weights = jnp.asarray([[1.0], [1.0], [-1.0], [-1.0]]), jnp.ones((4, 1))
    for name in ("gspo", "gspo_token", "gmpo", "dppo"):
        objective = OBJECTIVES[name]
        arrays = {"weights": weights} | ({"segment_ids": ids} if "segment_ids" in wanted(objective) else {})
        _, metrics = objective(logprobs, old, advantages, mask, **arrays)
        assert to_scalars(metrics) == {"policy/clip_high_frac": 0.25, "policy/clip_low_frac": 0.25}, name
    _, metrics = OBJECTIVES["cispo"](logprobs, old, advantages, mask, weights=weights, floor=0.7, cap=1.5)
    assert to_scalars(metrics) == {"policy/clip_high_frac": 0.5, "policy/clip_low_frac": 0.5}


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [("gspo", 3e-4, 4e-4), ("gspo_token", 3e-4, 4e-4), ("gspo", 0.4, 0.3), ("gmpo", 0.3, 0.4)],
)
def test_each_side_of_a_clip_has_its_own_bound(name, low, high):
    """Six responses of two tokens, whose distances from 1 (of gmpo: from 0, in log space) are between the bounds, or beyond both.

    A = 1: +mid, +far, -far. A = -1: -mid, -far, +far. The second ones are beyond both bounds, the third ones are on the side without a clip, and of the first
    ones, the side with the smaller bound clips its own. So the shares are 2/6 there and 1/6 on the other side.
    """
    middle, far = (low + high) / 2, low + high
    distances = np.array([middle, far, -far, -middle, -far, far])
    logs = distances if name == "gmpo" else np.log1p(distances)
    old = jnp.full((6, 2), -3.0)
    # The mean over the two tokens of a GSPO response is its log-ratio. Tokens of GMPO are clipped one by one.
    spread = np.array([0.0, 0.0]) if name == "gmpo" else np.array([-0.5, 0.5])
    with jax.enable_x64(True):
        logprobs = jnp.asarray(-3.0 + logs[:, None] + spread)
        advantages = jnp.asarray(np.sign([[1.0], [1], [1], [-1], [-1], [-1]]) * np.ones(2))
        _, metrics = OBJECTIVES[name](
            logprobs, old.astype(float), advantages, jnp.ones((6, 2), bool), weights=jnp.ones((6, 2)),
            segment_ids=jnp.ones((6, 2), int), clip_ratio_low=low, clip_ratio_high=high,
        )  # fmt: skip
    shares = {"policy/clip_high_frac": 1 / 6, "policy/clip_low_frac": 1 / 6}
    shares["policy/clip_low_frac" if low < high else "policy/clip_high_frac"] = 2 / 6
    assert to_scalars(metrics) == pytest.approx(shares)


def test_a_token_without_an_advantage_counts_as_unchanged_in_gmpo():
    """Two responses of two tokens with the log-ratios 0.2 and 0.6.

    With A = 2 and 0, the mean is (0.2 + 0) / 2 = 0.1 and the loss -2 e^0.1 = -2.210342; only the first token has a gradient, half of the loss. With A = 2 and 2, the
    second log-ratio is clipped to 0.4, so the mean is 0.3 and each token has the loss -2 e^0.3 = -2.699718.
    """
    old, mask, ids = jnp.full((2, 2), -3.0), jnp.ones((2, 2), bool), jnp.ones((2, 2), jnp.int32)
    advantages = jnp.array([[2.0, 0.0], [2.0, 2.0]])

    def loss(logprobs, advantages):
        return OBJECTIVES["gmpo"](logprobs, old, advantages, mask, weights=jnp.ones((2, 2)), segment_ids=ids)[0]  # fmt: skip

    logprobs = old + jnp.array([[0.2, 0.6]])
    value, gradient = jax.value_and_grad(loss)(logprobs, advantages)
    assert float(value) == pytest.approx(-2.210342 - 2 * 2.699718, rel=1e-6)
    np.testing.assert_allclose(gradient, [[-1.105171, 0.0], [-2.699718, 0.0]], rtol=1e-5)
    value, gradient = jax.value_and_grad(loss)(logprobs, jnp.zeros((2, 2)))
    assert (float(value), np.abs(gradient).max()) == (0.0, 0.0)


# Slow: compile two gradients each. The three objectives take sums along responses by the same functions.
@pytest.mark.parametrize(
    "objective", ["gmpo", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gspo", "vespo"))]
)
def test_rows_split_over_devices_give_the_same_gradient(objective):
    """With `context`, a response is on several devices. `tests/parallel/training_layout_test.py` runs whole updates."""
    rng = np.random.default_rng(0)
    ids = np.sort(rng.integers(1, 4, (4, 64)), axis=1).astype(np.int32)
    mask = rng.random(ids.shape) < 0.8
    numbers = [rng.normal(mean, 0.05, ids.shape).astype(np.float32) for mean in (-2.0, -2.0, 0.0)]
    arrays = [*(np.where(mask, array, np.nan).astype(np.float32) for array in numbers), mask]
    weights = (mask / mask.sum()).astype(np.float32)

    def loss(logprobs, old, advantages, mask, weights, ids):
        return OBJECTIVES[objective](logprobs, old, advantages, mask, weights=weights, segment_ids=ids)[0]

    run = jax.jit(jax.value_and_grad(loss))
    whole = run(*map(jnp.asarray, (*arrays, weights, ids)))
    place = NamedSharding(make_mesh(data=2, context=4, fsdp=1), PartitionSpec("data", "context"))
    split = run(*(jax.device_put(array, place) for array in (*arrays, weights, ids)))
    assert float(split[0]) == pytest.approx(float(whole[0]), rel=1e-6)
    np.testing.assert_allclose(split[1], whole[1], rtol=0, atol=1e-6 * np.abs(whole[1]).max())


def test_sums_along_responses_by_hand():
    """Segments 1, 1, 2, 2, 2 and padding; the first token of segment 2 is outside the mask, and NaN."""
    values = jnp.asarray([[1.0, 2.0, jnp.nan, 4.0, 8.0, jnp.nan]])
    mask = jnp.asarray([[True, True, False, True, True, False]])
    ids = jnp.asarray([[1, 1, 2, 2, 2, 0]], jnp.int32)
    assert response_sum(values, mask, ids).tolist() == [[3.0, 3.0, 12.0, 12.0, 12.0, 0.0]]
    assert response_mean(values, mask, ids).tolist() == [[1.5, 1.5, 6.0, 6.0, 6.0, 0.0]]


def own_loss(logprobs, old_logprobs, advantages, mask, *, weights, segment_ids, entropy, strength=0.5):
    return jnp.sum(jnp.where(mask, weights * entropy, 0.0)) * strength, {
        "own/one": Mean(jnp.ones(()), jnp.ones(()))
    }


def test_keyword_only_parameters_without_a_default_are_arrays_and_others_are_options():
    assert wanted(own_loss) == {"weights", "segment_ids", "entropy"}
    assert options_of(own_loss) == {"strength": 0.5}
    assert options_of(dapo_loss).keys() == {"clip_ratio_low", "clip_ratio_high", "dual_clip"}
    loaded = load_objective(own_loss, {"strength": 2.0})
    assert (wanted(loaded), options_of(loaded)) == (wanted(own_loss), {"strength": 2.0})
    assert wanted(with_shared_metrics(loaded)) == wanted(own_loss)
    assert all(wanted(objective) <= set(ARRAYS) for objective in OBJECTIVES.values())


@pytest.mark.parametrize(
    ("spec", "options", "found"),
    [
        ("gsop", {}, "did you mean 'gspo'"),
        ("x", {}, "did you mean"),
        ("cispo", {"caps": 2.0}, "did you mean 'cap'"),
        ("gspo", {"weights": 1.0}, "no option 'weights'"),
        ("topr", {"zzz": 1.0}, "no option 'zzz', only []"),
    ],
)
def test_an_unknown_objective_or_option_is_refused_with_the_nearest_name(spec, options, found):
    with pytest.raises(ValueError, match=re.escape(found)):
        load_objective(spec, options)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_objective_logs_the_shared_metrics(name):
    """They are the metrics that `dapo_loss` measures, even if the objective has other bounds."""
    row = Row("", name)
    given = {
        key: jnp.asarray(array) for key, array in placed(arrays_of(row, "s0", np.float32), ALONE[0]).items()
    }
    objective = with_shared_metrics(OBJECTIVES[name])
    four = [given[key] for key in ("logprobs", "old_logprobs", "advantages", "mask")]
    arrays = {key: given[key] for key in wanted(objective) | {"weights"}}
    loss, metrics = objective(*four, **arrays)
    alone, _ = OBJECTIVES[name](*four, **arrays)
    expected = to_scalars(dapo_loss(*four)[1])
    assert float(loss) == float(alone)
    assert {key: to_scalars(metrics)[key] for key in SHARED} == {key: expected[key] for key in SHARED}
