"""A sampler whose log-probabilities differ from the trainer's: above the limit the run warns or stops, as configured."""

import math
from dataclasses import replace

import numpy as np
import pytest

from dapo_jax.rollout.response_sampler import ResponseSampler
from dapo_jax.run.guard import GuardError
from dapo_jax.trackers import read_metrics

OFF = 0.5
"""Nats by which the sampler's log-probability of every token is too low: d = 0.5 everywhere."""
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
    """Two steps without carried groups, whose staleness would be a mismatch too."""

    def make(**changes):
        return micro(**{"steps": 2, "dynamic_sampling__surplus": "discard", **changes})

    return make


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
