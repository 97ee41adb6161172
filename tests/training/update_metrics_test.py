"""The metrics of updates by hand, and the pictures of faults that no loss shows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dapo_jax.dapo.metrics import to_scalars
from dapo_jax.training.update_metrics import change_metrics, mismatch_metrics, with_association


def mismatch(delta, advantages, *, mask=None, first=True):
    delta, advantages = (jnp.array([values], jnp.float32) for values in (delta, advantages))
    mask = jnp.ones(delta.shape, bool) if mask is None else jnp.array([mask])
    return with_association(
        to_scalars(mismatch_metrics(delta, jnp.zeros_like(delta), mask, advantages, jnp.bool_(first)))
    )


DELTA, ADVANTAGES = [-0.1, 0.1, -0.1, 0.1, 0.0], [-1.0, -2.0, 3.0, 4.0, 9.0]


def test_the_balance_of_signs_by_hand():
    """S-- = 1, S-+ = 2, S+- = 3, S++ = 4: (1 + 3) / (2 + 4), and (1 / 2) / (3 / 4)."""
    found = mismatch(DELTA, ADVANTAGES)
    assert found["sync/sign_balance"] == pytest.approx(4 / 6)
    assert found["sync/advantage_association"] == pytest.approx(2 / 3)
    # Without the third token: S+- = 0, so there is no association.
    found = mismatch(DELTA, ADVANTAGES, mask=[True, True, False, True, True])
    assert found["sync/sign_balance"] == pytest.approx(1 / 6)
    assert "sync/advantage_association" not in found


def test_rounding_and_later_updates_have_no_balance():
    names = {"sync/sign_balance", "sync/advantage_association"}
    assert not names & mismatch([delta * 1e-4 for delta in DELTA], ADVANTAGES).keys()
    assert not names & mismatch(DELTA, ADVANTAGES, first=False).keys()


@pytest.mark.parametrize(
    ("scale", "low", "high"), [(1.05, 3.0, np.inf), (0.95, 0.0, 1 / 3), (1.0, 0.8, 1.25)]
)
def test_a_scale_of_the_samplers_logits_has_one_sign(scale, low, high):
    """20,000 tokens of 64 logits. A sharper sampler finds the tokens that it samples more likely than the trainer does; without a scale, the mismatch is noise of 0.01."""
    rng = np.random.default_rng(0)
    trainer = rng.normal(0.0, 8.0, (20_000, 64))
    sampler = trainer * scale + (rng.normal(0.0, 0.01, trainer.shape) if scale == 1.0 else 0.0)
    logp, logq = (values - np.log(np.exp(values).sum(-1, keepdims=True)) for values in (trainer, sampler))
    tokens = (logq + rng.gumbel(size=logq.shape)).argmax(-1)[:, None]
    delta = np.take_along_axis(logp - logq, tokens, 1)[:, 0]
    found = mismatch(delta, rng.choice([-1.0, 1.0], len(delta)))
    assert low < found["sync/sign_balance"] < high


def param(values, **metadata):
    return nnx.Param(jnp.array(values, jnp.float32), float32=metadata.pop("float32", False), **metadata)


def test_the_size_of_changes_by_hand():
    """Weights 3 and 4 with changes 1 and -1 and a rate of 0.1: ratio 0.1 sqrt(2) / 5, step 1. A parameter at 0 has no ratio."""
    old = nnx.State({"a": {"w": param([3.0, 4.0])}, "b": {"w": param([0.0, 0.0])}})
    changes = nnx.State({"a": {"w": param([1.0, -1.0])}, "b": {"w": param([0.0, 0.2])}})
    new = nnx.State({"a": {"w": param([3.1, 3.9])}, "b": {"w": param([0.0, 0.02])}})
    found = to_scalars(change_metrics(old, new, changes, jnp.float32(0.1), stored="float32"))
    assert found == pytest.approx(
        {
            "update/ratio/a.w": 0.1 * 2**0.5 / 5,
            "update/step_rms/a.w": 1.0,
            "update/step_rms/b.w": 0.2 / 2**0.5,
        }
    )


@pytest.mark.parametrize("kept", ["float32", "bfloat16"])
def test_weights_that_are_kept_in_bfloat16_change_less_often_than_predicted(kept):
    """Weights with a standard deviation of 0.02 and changes of +-1e-6. A distance of neighbouring numbers is 2^-14 near 0.01. Weights in float32 cross a
    boundary as often as predicted; 4e5 weights and a share of 0.04 have a standard error of 0.8%."""
    rng = np.random.default_rng(0)
    weight = jnp.array(rng.normal(0.0, 0.02, 400_000), kept).astype(jnp.float32)
    change = rng.choice([-1.0, 1.0], weight.shape).astype(np.float32)
    new = (weight + 1e-6 * change).astype(kept).astype(jnp.float32)
    states = (
        nnx.State({"w": param(values), "n": param([1.0], float32=True)}) for values in (weight, new, change)
    )
    found = to_scalars(change_metrics(*states, jnp.float32(1e-6), stored="bfloat16"))
    ratio = found["update/stored_changed_frac"] / found["update/stored_predicted_frac"]
    assert found["update/stored_predicted_frac"] == pytest.approx(0.0425, abs=0.001)
    assert 0.97 < ratio < 1.03 if kept == "float32" else 0.44 < ratio < 0.5


def test_more_weights_than_an_int32_counts():
    """The down matrices of a model with 32B parameters: 64 x 27648 x 5120 = 9.06e9 in one stack."""
    large = nnx.State(
        {"down": nnx.Param(jax.ShapeDtypeStruct((64, 27_648, 5_120), jnp.float32), float32=False)}
    )
    found = jax.eval_shape(
        lambda state: change_metrics(state, state, state, jnp.float32(1e-6), stored="bfloat16"), large
    )
    assert {"update/stored_changed_frac", "update/step_rms/down"} <= set(found)
