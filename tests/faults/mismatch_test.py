"""A sampler that says other log-probabilities than the trainer: over the limit the run warns, stops or corrects, as configured."""

import math
from dataclasses import replace

import jax
import numpy as np
import pytest

from dapo_jax.models.folder import load_model
from dapo_jax.rollout.response_sampler import ResponseSampler
from dapo_jax.run.guard import GuardError
from dapo_jax.trackers import read_metrics

OFF = 0.5
"""By so many nats the sampler says less than is true of every token: d = 0.5 everywhere."""
KL = math.exp(OFF) - 1 - OFF  # 0.1487


@pytest.fixture
def drifting(monkeypatch):
    honest = ResponseSampler.sample

    def sample(self, *of, **how):
        for prompt, responses in honest(self, *of, **how):
            yield prompt, tuple(replace(r, logprobs=r.logprobs - np.float32(OFF)) for r in responses)

    monkeypatch.setattr(ResponseSampler, "sample", sample)


@pytest.fixture
def limited(micro):
    """Two steps, without carried groups, which would be a mismatch of their own."""

    def make(**changes):
        return micro(**{"steps": 2, "dynamic_sampling__surplus": "discard", **changes})

    return make


def moved(result, config):
    """How far the run has moved each weight."""
    _, params = load_model(config.model.source)
    pairs = zip(jax.tree.leaves(result.policy.params), jax.tree.leaves(params), strict=True)
    return np.concatenate([(np.asarray(new) - np.asarray(old)).ravel() for new, old in pairs])


def test_over_the_limit_the_run_warns_once(limited, run_micro, drifting, shown):
    config = limited(guard__max_mismatch_kl=0.1)
    result = run_micro(config, progress=shown.progress(config))
    assert [line["sync/sampler_trainer_kl"] for line in result.metrics] == pytest.approx([KL, KL], rel=1e-3)
    assert (
        shown.text().count("KL(sampler || trainer) is 0.149 nats a token, over guard.max_mismatch_kl=0.1")
        == 1
    )


def test_over_the_limit_the_run_stops(limited, run_micro, drifting):
    config = limited(guard__max_mismatch_kl=0.1, guard__on_mismatch="stop")
    with pytest.raises(
        GuardError, match=r"step 1: KL\(sampler \|\| trainer\) is 0\.149 .*\nthere is no checkpoint yet"
    ):
        run_micro(config)
    assert [line["step"] for line in read_metrics(f"{config.run_dir}/metrics.jsonl")] == [1]


SIZES_COUNT = {"optimizer__max_grad_norm": 1e6, "optimizer__epsilon": 1.0}
"""A gradient 1.5 times as large is otherwise scaled back, by the clip and by AdamW."""


@pytest.mark.slow  # the weights are update_test's, and that the key asks for them keys_test's
def test_over_the_limit_the_steps_updates_are_corrected_as_by_truncated_importance_weights(
    limited, run_micro, drifting, shown
):
    """The ratio is e^0.5 = 1.65 everywhere, cut at 1.5: with `loss.importance_cap` the update's own program weighs by it."""
    one = {"steps": 1, **SIZES_COUNT}
    limit = {"guard__max_mismatch_kl": 0.1, "guard__on_mismatch": "correct", "guard__mismatch_cap": 1.5}
    config = limited(**one, **limit)
    corrected = run_micro(config, progress=shown.progress(config))
    assert [line["sync/corrected"] for line in corrected.metrics] == [1]
    assert "It is corrected by weights of at most 1.5" in shown.text()
    expected = moved(run_micro(limited(**one, loss__importance_cap=1.5)), config)
    assert np.abs(expected).max() > 1e-4
    # The old log-probabilities of the first update come from another program: they differ by a few roundings.
    np.testing.assert_allclose(moved(corrected, config), expected, rtol=0, atol=0.01 * np.abs(expected).max())


@pytest.mark.slow
def test_under_the_limit_correcting_changes_not_a_bit_and_nothing_is_said(
    limited, run_micro, drifting, same_run, shown
):
    plain = run_micro(limited(**SIZES_COUNT))
    config = limited(guard__max_mismatch_kl=0.2, guard__on_mismatch="correct", **SIZES_COUNT)
    found = run_micro(config, progress=shown.progress(config))
    assert [line.pop("sync/corrected") for line in found.metrics] == [0, 0]
    same_run(found, plain)
    assert "KL(sampler" not in shown.text()
