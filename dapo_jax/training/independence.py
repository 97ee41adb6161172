"""Metrics that show whether the responses of a group are independent samples of the policy, computed on the host without jax.

Faults such as equal seeds in two engines copy responses within groups. Accuracy and loss hardly change, but groups lose their signal.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import product

import numpy as np
from jaxtyping import Bool, Float

from dapo_jax.dapo.rollouts import Group

NEVER_TWICE = 0.01
"""A response is improbable if its expected number of equal responses in its group is below this. Then at most one of 200 repeats another one by chance."""

_REFINEMENTS, _GRID = 6, 9


def independence_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Computes how many responses of the groups are equal, and how many groups have both verdicts, each with its expectation for independent responses.

    With Q_i = exp(sum of the log-probabilities of response i), two responses are equal with probability E[Q], and G responses have E[(1 - (1 - Q)^G) / Q] distinct ones.
    Responses are equal if all of their tokens are the same. Without two responses in each group, there are no metrics.

    Returns:
        `rollout/distinct_frac` and `rollout/distinct_expected_frac`: number of distinct responses by number of responses, and its expectation.
        `rollout/copies_z`: mean of (share of equal pairs - mean Q) over groups, in standard errors.
        `rollout/copies_frac`: share of responses that repeat an earlier, improbable response of their group (`NEVER_TWICE`).
        `rollout/mixed_expected_frac`: share of groups with both verdicts, for independent responses. The accuracies of prompts follow the beta distribution that
            fits the verdicts best, where each copy counts once.
        `rollout/verdict_lag_z`: the largest difference, over distances d, between the agreement of the verdicts of responses i and i + d and the agreement of all pairs,
            in standard errors. It is small if responses are independent.
    """
    size = min(len(group.rollouts) for group in groups)
    if size < 2:
        return {}
    rollouts = [group.rollouts[:size] for group in groups]
    digests = np.array([[rollout.response.draw.digest for rollout in group] for group in rollouts])
    chance = np.exp([[rollout.response.draw.logprob for rollout in group] for group in rollouts])
    verdicts = np.array([[rollout.correct for rollout in group] for group in rollouts])
    same = digests[:, :, None] == digests[:, None, :]
    repeats = np.tril(same, -1).any(axis=2)
    copies = repeats & ((size - 1) * chance < NEVER_TWICE)
    equal_pairs = (same.sum(axis=(1, 2)) - size) / (size * (size - 1))
    with np.errstate(divide="ignore", invalid="ignore"):
        distinct = np.where(chance < 1e-12, size, -np.expm1(size * np.log1p(-chance)) / chance)
    correct = Counter(
        (int(of[~copied].sum()), int((~copied).sum())) for of, copied in zip(verdicts, copies, strict=True)
    )
    return {
        "rollout/distinct_frac": 1.0 - float(repeats.mean()),
        "rollout/distinct_expected_frac": float(distinct.mean() / size),
        "rollout/copies_frac": float(copies.mean()),
        "rollout/copies_z": _in_standard_errors(equal_pairs - chance.mean(axis=1)),
        "rollout/mixed_expected_frac": _expected_mixed(correct, size),
        "rollout/verdict_lag_z": max(
            abs(_in_standard_errors(of_distance)) for of_distance in _lags(verdicts)
        ),
    }


def _in_standard_errors(of_groups: Float[np.ndarray, " groups"]) -> float:
    """Returns the mean over groups in standard errors, or 0 if the groups do not differ."""
    spread = of_groups.std(ddof=1) if len(of_groups) > 1 else 0.0
    return float(of_groups.mean() / spread * math.sqrt(len(of_groups))) if spread > 1e-12 else 0.0


def _lags(verdicts: Bool[np.ndarray, "groups size"]) -> list[Float[np.ndarray, " groups"]]:
    """Returns, for each distance d, how much more often the verdicts of the responses i and i + d of a group agree than the verdicts of all pairs."""
    size = verdicts.shape[1]
    correct = verdicts.sum(axis=1)
    wrong = size - correct
    all_pairs = (correct * (correct - 1) + wrong * (wrong - 1)) / (size * (size - 1))
    return [(verdicts[:, d:] == verdicts[:, :-d]).mean(axis=1) - all_pairs for d in range(1, size)]


def _expected_mixed(correct: Mapping[tuple[int, int], int], size: int) -> float:
    """Returns the expected share of groups of `size` responses with both verdicts. `correct` maps (number of correct responses, number of responses) to a number of
    groups. The accuracies of prompts have the beta distribution with the largest likelihood, found on a grid over its mean and a + b that is refined."""
    mean, mean_step = 0.5, 0.4998
    total, total_step = 0.0, math.log(1e3)  # the logarithm of a + b

    def log_likelihood(mean: float, total: float) -> float:
        a, b = mean * math.exp(total), (1 - mean) * math.exp(total)
        return sum(
            groups * (_log_beta(a + k, b + n - k) - _log_beta(a, b)) for (k, n), groups in correct.items()
        )

    for _ in range(_REFINEMENTS):
        steps = np.linspace(-1.0, 1.0, _GRID)
        means = np.unique(np.clip(mean + mean_step * steps, 2e-4, 1 - 2e-4)).tolist()
        totals = np.unique(np.clip(total + total_step * steps, -math.log(1e3), math.log(1e3))).tolist()
        mean, total = max(product(means, totals), key=lambda at: log_likelihood(*at))
        mean_step, total_step = mean_step / 3, total_step / 3
    a, b = mean * math.exp(total), (1 - mean) * math.exp(total)
    all_correct, all_wrong = (
        math.exp(_log_beta(*of) - _log_beta(a, b)) for of in ((a + size, b), (a, b + size))
    )
    return 1.0 - all_correct - all_wrong


def _log_beta(a: float, b: float) -> float:
    return math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)
