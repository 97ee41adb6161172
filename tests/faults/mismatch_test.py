"""A sampler that says other log-probabilities than the trainer: over the limit the run warns, stops or corrects, as configured."""

import math
from dataclasses import replace

import jax
import numpy as np
import pytest

from dapo_jax.models.folder import load_model
from dapo_jax.run.guard import GuardError
from dapo_jax.run.response_sampler import ResponseSampler
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
