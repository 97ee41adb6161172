"""`check_objective` finds faults that real libraries had, and nothing wrong with the losses of this package."""

import subprocess
import sys
from functools import partial

import jax
import jax.numpy as jnp
import pytest

from dapo_jax.dapo.losses import dapo_loss, kl_penalty, supervised_loss
from dapo_jax.dapo.metrics import Mean
from dapo_jax.dapo.objectives import OBJECTIVES
from dapo_jax.testing import check_objective
from dapo_jax.testing.objectives import PROPERTIES
from tests.docs.blocks import ROOT

QUICK = ("dapo", "cispo", "kl_cov")
# Slow: every property compiles several programs. tests/dapo/objectives_test.py compares all losses with other libraries, also packed.
LOSSES = [
    *(
        pytest.param(loss, marks=[] if name in QUICK else pytest.mark.slow)
        for name, loss in OBJECTIVES.items()
    ),
    supervised_loss,
    pytest.param(kl_penalty, marks=pytest.mark.slow),
    pytest.param(partial(dapo_loss, dual_clip=3.0), marks=pytest.mark.slow),
]
OTHER_OPTIONS = {"divergence": "kl", "estimator": "k1"}

constant = jax.lax.stop_gradient


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: getattr(loss, "__name__", "partial"))
def test_the_losses_of_the_package_have_all_properties(loss):
    report = check_objective(loss, options=OTHER_OPTIONS)
    assert not report.failed, report
    assert [row.name for row in report.properties] == list(PROPERTIES)


def clipped(lp, old, advantages, mask, *, low=0.2, high=0.28, clean=True, detached=True):
    """A copy of `dapo_loss` for one token: log p, the ratio and the surrogate, all 0 or 1 outside the mask."""
    if clean:
        lp, old, advantages = (jnp.where(mask, x, 0.0) for x in (lp, old, advantages))
    if detached:
        old, advantages = constant(old), constant(advantages)
    ratio = jnp.exp(jnp.clip(lp - old, -20, 20))
    return (
        lp,
        ratio,
        advantages,
        jnp.minimum(ratio * advantages, jnp.clip(ratio, 1 - low, 1 + high) * advantages),
    )


def summed(weights, mask, token_loss):
    return (jnp.where(mask, weights, 0.0) * token_loss).sum()


def share(mask, axis=None):
    """1 / the tokens in the mask."""
    count = mask.astype(jnp.float64).sum(axis=axis, keepdims=axis is not None)
    return 1.0 / jnp.maximum(count, 1.0)


def mean_of_the_microbatch(lp, old, advantages, mask, *, weights):
    *_, gain = clipped(lp, old, advantages, mask)
    return -jnp.where(mask, gain, 0.0).sum() * share(mask)


def mask_after_exp(lp, old, advantages, mask, *, weights):
    *_, gain = clipped(lp, old, advantages, mask, clean=False)
    return summed(weights, mask, -jnp.where(mask, gain, 0.0))


def weights_twice(lp, old, advantages, mask, *, weights):
    *_, gain = clipped(lp, old, advantages, mask)
    return summed(weights, mask, -weights * gain)


def maximum_for_negative_advantages(lp, old, advantages, mask, *, weights):
    _, ratio, a, _ = clipped(lp, old, advantages, mask)
    return summed(weights, mask, -jnp.minimum(ratio, jnp.clip(ratio, 0.8, 1.28)) * a)


def clip_on_the_wrong_side(lp, old, advantages, mask, *, weights):
    _, ratio, a, _ = clipped(lp, old, advantages, mask)
    return summed(weights, mask, -jnp.where(a > 0, jnp.maximum(ratio, 0.8), jnp.minimum(ratio, 1.28)) * a)


def gradient_through_old_logprobs(lp, old, advantages, mask, *, weights):
    *_, gain = clipped(lp, old, constant(advantages), mask, detached=False)
    return summed(weights, mask, -gain)


def gradient_through_advantages(lp, old, advantages, mask, *, weights):
    *_, gain = clipped(lp, constant(old), advantages, mask, detached=False)
    return summed(weights, mask, -gain)


def sum_over_padding(lp, old, advantages, mask):
    *_, gain = clipped(lp, old, advantages, mask, clean=False)
    return -gain.sum() * share(mask)


def divided_by_rows(lp, old, advantages, mask):
    *_, gain = clipped(lp, old, advantages, mask)
    return -(jnp.where(mask, gain, 0.0).sum(axis=1, keepdims=True) * share(mask, 1)).mean()


def divided_by_the_width_of_the_rows(lp, old, advantages, mask):
    *_, gain = clipped(lp, old, advantages, mask)
    return -jnp.where(mask, gain, 0.0).sum() / mask.shape[1]


def ratio_of_the_whole_row(lp, old, advantages, mask, *, weights):
    u = jnp.where(mask, lp - constant(old), 0.0).sum(axis=1, keepdims=True) * share(mask, 1)
    a = jnp.where(mask, constant(advantages), 0.0)
    return summed(weights, mask, -jnp.exp(jnp.clip(u, -20, 20)) * a)


def last_prompt_token_counted(lp, old, advantages, mask, *, weights):
    shifted = jnp.pad(mask, ((0, 0), (0, 1)))[:, 1:] | mask
    *_, gain = clipped(lp, old, advantages, shifted)
    return summed(jnp.max(weights, axis=1, keepdims=True), shifted, -gain)


def dual_clip_for_positive_advantages(lp, old, advantages, mask, *, weights):
    _, _, a, gain = clipped(lp, old, advantages, mask)
    return summed(weights, mask, -jnp.maximum(gain, 3.0 * a))


def ignored_option(lp, old, advantages, mask, *, weights, clip_ratio_high=0.28):
    *_, gain = clipped(lp, old, advantages, mask)
    return summed(weights, mask, -gain)


def abs_at_0(lp, old, advantages, mask, *, weights):
    lp, _, _, gain = clipped(lp, old, advantages, mask)
    return summed(weights, mask, 0.1 * jnp.abs(lp - jnp.where(mask, constant(old), 0.0)) - gain)


def overflow(lp, old, advantages, mask, *, weights):
    lp, old, a = (jnp.where(mask, x, 0.0) for x in (lp, constant(old), constant(advantages)))
    return summed(weights, mask, -jnp.exp(lp - old) * a)


def nan_for_rows_without_tokens(lp, old, advantages, mask):
    *_, gain = clipped(lp, old, advantages, mask)
    by_row = jnp.where(mask, gain, 0.0).sum(axis=1) / mask.sum(axis=1).astype(lp.dtype)
    return -by_row.mean()


def product_of_probabilities(lp, old, advantages, mask, *, weights):
    """The ratio of a response underflows in float32 for most responses; here, already for one token."""
    lp, old, a = (jnp.where(mask, x, 0.0) for x in (lp, constant(old), constant(advantages)))
    ratio = jnp.exp(lp - 102.0) / jnp.exp(old - 102.0)
    return summed(weights, mask, -jnp.clip(ratio, 1e-9, 1e9) * a)


def cumulative_sum_over_rows(lp, old, advantages, mask, *, weights):
    _, ratio, _, gain = clipped(lp, old, advantages, mask)
    drift = constant(jnp.cumsum(jnp.where(mask, ratio - 1.0, 0.0).sum(axis=1)))[:, None]
    return summed(weights, mask, -gain * (1.0 + 0.01 * drift))


def advantages_centred_in_each_shard(lp, old, advantages, mask, *, weights):
    mean = jnp.where(mask, advantages, 0.0).sum() * share(mask)
    *_, gain = clipped(lp, old, advantages - mean, mask)
    return summed(weights, mask, -gain)


def epsilon_that_matters(lp, old, advantages, mask, *, weights):
    """Normalizes by the sum of the weights plus 1e-8, and multiplies it back."""
    *_, gain = clipped(lp, old, advantages, mask)
    total = jnp.where(mask, weights, 0.0).sum()
    return summed(weights, mask, -gain) * total / (total + 1e-8)


def ratio_without_gradient(lp, old, advantages, mask, *, weights):
    *_, gain = clipped(constant(lp), old, advantages, mask)
    return summed(weights, mask, -gain) + 0.0 * jnp.where(mask, lp, 0.0).sum()


def ratio_in_bfloat16(lp, old, advantages, mask, *, weights):
    rounded = (jnp.where(mask, lp - constant(old), 0.0)).astype(jnp.bfloat16)
    a = jnp.where(mask, constant(advantages), 0.0)
    return summed(weights, mask, -jnp.exp(rounded).astype(a.dtype) * a)


def cispo_with_a_gradient_through_the_weight(lp, old, advantages, mask, *, weights):
    lp, ratio, a, _ = clipped(lp, old, advantages, mask)
    return summed(weights, mask, -jnp.clip(ratio, 0.0, 5.0) * a * lp)


def metric_averaged_in_each_microbatch(lp, old, advantages, mask, *, weights):
    _, ratio, _, gain = clipped(lp, old, advantages, mask)
    mean = jnp.where(mask, ratio, 0.0).sum() * share(mask)
    return summed(weights, mask, -gain), {"ratio": Mean(constant(mean), jnp.float64(1.0))}


def without_fault(lp, old, advantages, mask, *, weights, low=0.2, high=0.28):
    *_, gain = clipped(lp, old, advantages, mask, low=low, high=high)
    return summed(weights, mask, -gain)


FAULTS = {
    # The denominator of a part of the batch (verl, TRL, SkyRL, open-instruct).
    mean_of_the_microbatch: "microbatches",
    # 0 * inf and 0 * NaN (prime-rl, OpenRLHF, NeMo-RL).
    mask_after_exp: "mask",
    weights_twice: "weights",
    # The minimum of the ratios instead of the minimum of the products with A (takuseno/ppo).
    maximum_for_negative_advantages: "direction",
    clip_on_the_wrong_side: "direction",
    gradient_through_old_logprobs: "constants",
    gradient_through_advantages: "constants",
    # Only the denominator used the mask (ROLL).
    sum_over_padding: "mask",
    # The mean over rows counts rows without tokens (TRL, SkyRL).
    divided_by_rows: "empty rows",
    # The width of the padded batch as the normalizer of Dr. GRPO (verl).
    divided_by_the_width_of_the_rows: "padding",
    # GSPO by row in packed rows.
    ratio_of_the_whole_row: "packing",
    last_prompt_token_counted: "mask",
    # The lower bound c * A without the condition A < 0 (tianshou).
    dual_clip_for_positive_advantages: "direction",
    # An option that is swallowed by **kwargs (RLinf, verl).
    ignored_option: "options",
    # jax.grad(abs)(0.0) is 1.
    abs_at_0: "zero advantages",
    # exp of an unbounded log-ratio (prime-rl, slime).
    overflow: "extreme ratios",
    nan_for_rows_without_tokens: "nothing to learn",
    product_of_probabilities: "float32",
    cumulative_sum_over_rows: "row order",
    # Advantages that are normalized within a shard.
    advantages_centred_in_each_shard: "shards",
    epsilon_that_matters: "weights",
    ratio_without_gradient: "gradient",
    ratio_in_bfloat16: "gradient",
    cispo_with_a_gradient_through_the_weight: "direction",
    metric_averaged_in_each_microbatch: "metrics",
}
"""Each fault, and the property that must catch it. The comments name libraries that had it; `docs/check_a_loss.md` cites the threads."""


FIRST = {caught: fault for fault, caught in reversed(FAULTS.items())}
"""The first fault that each property catches."""


# Slow: every property compiles several programs. For each property, the first fault stays.
@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(fault, marks=[] if FIRST[caught] is fault else pytest.mark.slow)
        for fault, caught in FAULTS.items()
    ],
    ids=lambda fault: fault.__name__,
)
def test_a_seeded_fault_is_caught(fault):
    report = check_objective(fault)
    assert FAULTS[fault] in report.failed, report


def test_the_copy_without_a_fault_has_all_properties():
    report = check_objective(without_fault)
    assert not report.failed, report


def test_a_loss_that_normalizes_itself_is_checked_with_the_combination_of_its_training_loop():
    def token_mean(lp, old, advantages, mask):
        return dapo_loss(lp, old, advantages, mask)[0]

    assert set(check_objective(token_mean).failed) == {"microbatches", "shards"}
    report = check_objective(token_mean, combine="tokens")
    assert not report.failed, report
    assert {row.name: row.detail for row in report.properties}["divides by"] == "tokens"
    with pytest.raises(ValueError, match="combine must be sum, mean or tokens, got 'average'"):
        check_objective(token_mean, combine="average")


def test_forms_with_constant_factors_are_recognised():
    def ratio_to_itself(lp, old, advantages, mask, *, weights):
        live = jnp.where(mask, lp, 0.0)
        return summed(
            weights, mask, -jnp.exp(live - constant(live)) * jnp.where(mask, constant(advantages), 0.0)
        )

    forms = {
        loss: next(row.detail for row in check_objective(loss).properties if row.name == "gradient")
        for loss in (dapo_loss, OBJECTIVES["cispo"], ratio_to_itself)
    }
    assert forms[dapo_loss] == "derivative of the value"
    assert forms[OBJECTIVES["cispo"]].endswith("constants x logprobs")
    assert forms[ratio_to_itself].endswith("constants x exp(logprobs - their value)")


def test_an_error_in_one_property_is_a_row_of_the_table():
    def only_eight_rows(lp, old, advantages, mask, *, weights):
        if len(mask) != 8:
            raise TypeError("needs 8 rows")
        return dapo_loss(lp, old, advantages, mask, weights=weights)

    report = check_objective(only_eight_rows)
    assert {"microbatches", "shards", "empty rows"} <= set(report.failed)
    assert "FAILED  TypeError('needs 8 rows')" in str(report)


def test_the_suite_imports_only_jax_and_numpy():
    code = "import sys; from dapo_jax.testing import check_objective; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert not {"flax", "optax", "jaxtyping", "dapo_jax.models", "dapo_jax.sampling"} & loaded


def test_the_page_explains_each_property():
    page = (ROOT / "docs" / "check_a_loss.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1].strip() for line in page.splitlines() if line.startswith("| `")]
    assert rows == [f"`{name}`" for name in PROPERTIES]
