"""Advantages of the responses in a training step, on the host in float64.

In float32, the mean and the standard deviation of sixteen equal rewards both have rounding errors. Dividing the deviation from the mean by the
standard deviation then yields an advantage of up to 0.26 instead of 0.
"""

from collections.abc import Callable, Mapping, Sequence
from math import comb

import numpy as np
import numpy.typing as npt
from jaxtyping import Array, Float, Int

from dapo_jax.dapo.rollouts import Group
from dapo_jax.hints import check_choice

Advantages = Callable[[Sequence[Group]], Sequence[np.ndarray]]
"""The `advantages` argument of `train`: a function of all groups that a step trains on. It returns one array per group, with one number per rollout."""

BASELINES = ("group_mean", "leave_one_out", "length_weighted", "none")
SCALES = ("group_std", "group_mean", "batch_std", "whiten_tokens", "whiten_responses", "none")
_EPS = 1e-6


def group_advantages(
    rewards: npt.ArrayLike | Array, *, normalize_std: bool = True, eps: float = 1e-6
) -> Float[np.ndarray, "prompts group"]:
    r"""Normalizes rewards within the group of responses to a prompt (DAPO Eq. 9).

    $$ \hat A_i = \frac{R_i - \mathrm{mean}(R)}{\mathrm{std}(R) + \mathrm{eps}} $$

    The standard deviation is the sample standard deviation (ddof = 1). For a group of one response, mean 0 and standard deviation 1 are used.

    Args:
        rewards: `[prompts, group]`, the rewards of each prompt's responses after shaping, in any real dtype.
        normalize_std: divide by the standard deviation. If False, the advantage is R_i - mean(R).
        eps: keeps the quotient finite if all rewards of a group are nearly equal.

    Returns:
        float64 advantages of the same shape; exactly 0 in a group of equal rewards.

    Raises:
        ValueError: `rewards` is not two-dimensional, has empty groups or contains a non-finite value,
            or `eps` is not positive.

    >>> group_advantages([[1.0, -1.0, -1.0, -1.0], [1.0, 1.0, 1.0, 1.0]]).round(3).tolist()
    [[1.5, -0.5, -0.5, -0.5], [0.0, 0.0, 0.0, 0.0]]

    References:
        Yu et al., "DAPO: An Open-Source LLM Reinforcement Learning System at Scale", 2025,
        https://arxiv.org/abs/2503.14476
    """
    values = np.asarray(rewards, dtype=np.float64)
    if values.ndim != 2 or values.shape[1] == 0:
        raise ValueError(
            f"rewards must be [prompts, group] with at least one response per group, got shape {values.shape}"
        )
    bad = np.argwhere(~np.isfinite(values))
    if len(bad):
        prompt, response = bad[0]
        raise ValueError(
            f"rewards[{prompt}, {response}] is {values[prompt, response]}, the first of {len(bad)} values that are "
            "not finite. A single such reward makes the advantages of its whole group NaN. Fix the reward function."
        )
    if not eps > 0:
        raise ValueError(f"eps must be positive, got {eps}: a group of equal rewards would divide 0 by 0")
    if values.shape[1] == 1:
        return values / (1.0 + eps) if normalize_std else values.copy()

    # After the first reward is subtracted, equal rewards are exactly zero, and so are their advantages.
    shifted = values - values[:, :1]
    centered = shifted - shifted.mean(axis=1, keepdims=True)
    if not normalize_std:
        return centered
    return centered / (shifted.std(axis=1, ddof=1, keepdims=True) + eps)


def step_advantages(
    groups: Sequence[Group],
    *,
    baseline: str = "group_mean",
    scale: str = "group_std",
    rewards: str = "summed",
    best_of: int = 1,
    filter_truncated: bool = False,
    weights: Mapping[str, float] | None = None,
) -> list[np.ndarray]:
    """Returns the advantages of all responses in a step in float64, one array per group. x is the reward R minus a baseline, and the advantage is x divided by a scale.

    | baseline | x | |
    |---|---|---|
    | `group_mean` | R - mean(R) | GRPO, DAPO (Eq. 9) |
    | `leave_one_out` | R - mean(R of the other responses of the group) | RLOO, [2402.14740](https://arxiv.org/abs/2402.14740) |
    | `length_weighted` | R - sum(n R) / sum(n), where n is the number of a response's tokens in the loss | OPO, [2505.23585](https://arxiv.org/abs/2505.23585) |
    | `none` | R | REINFORCE |

    | scale | advantage | |
    |---|---|---|
    | `group_std` | x / (std(R) + 1e-6) | GRPO, DAPO (Eq. 9) |
    | `group_mean` | x / (mean(R) + 1e-6); 0 if mean(R) is not positive | MaxRL, [2602.02710](https://arxiv.org/abs/2602.02710) |
    | `batch_std` | x / (std(R over all groups) + 1e-6) | Lite PPO, [2508.08221](https://arxiv.org/abs/2508.08221) |
    | `whiten_tokens` | (x - mean(x)) / sqrt(var(x) + 1e-8), over all tokens in the loss | REINFORCE++, [2501.03262](https://arxiv.org/abs/2501.03262) |
    | `whiten_responses` | the same, over all responses | GDPO, [2601.05242](https://arxiv.org/abs/2601.05242) |
    | `none` | x | Dr. GRPO, [2503.20783](https://arxiv.org/abs/2503.20783) |

    mean(R) and std(R) are over the group. Variances have the count minus 1 in the denominator. If a standard deviation is 0, so are the advantages.

    Args:
        groups: all groups that the step trains on.
        baseline: one of the four names above.
        scale: one of the six names above.
        rewards: `summed`, or `apart` (GDPO): x is the weighted sum over the graders of (R - baseline) / (std(R) + 1e-6), where R is the reward from this grader. The
            overlong penalty is one more grader, with weight 1. `scale` then uses the standard deviation of x instead of R.
        best_of: the k of pass@k training. R is replaced by `best_of(R, k)`, and `group_std` divides by the standard deviation of the highest of k rewards.
        filter_truncated: truncated responses are excluded from the loss, so their number of tokens is 0.
        weights: the weight of each grader by its name in `Verdict.parts`, for `apart`. If None, all weights are 1.

    Raises:
        ValueError: a name is unknown, a group has fewer than `best_of` responses, or `apart` finds a verdict without the part of a grader.
    """
    check_choice("baseline", baseline, BASELINES)
    check_choice("scale", scale, SCALES)
    check_choice("rewards", rewards, ("summed", "apart"))
    verdicts = [one.verdict.parts for group in groups for one in group.rollouts]
    graders = weights or dict.fromkeys((name for parts in verdicts for name in parts), 1.0)
    lacking = [name for name in graders if any(name not in parts for parts in verdicts)]
    if rewards == "apart" and (lacking or not graders):
        raise ValueError(
            f"rewards='apart' needs one reward per grader in every Verdict.parts; found verdicts without {lacking or 'parts'}"
        )
    found = []
    for group in groups:
        lengths = [0 if filter_truncated and one.truncated else one.response_tokens for one in group.rollouts]
        tokens, best = np.array(lengths), _best_of(group.rewards[None], best_of)[0]
        x, spread = _minus_baseline(best, tokens, baseline), best
        deviation = _deviation(group.rewards, best_of)
        if rewards == "apart":
            parts = [(w, [one.verdict.parts[name] for one in group.rollouts]) for name, w in graders.items()]
            x = np.zeros(len(best))
            for weight, part in [*parts, (1.0, [one.overlong_penalty for one in group.rollouts])]:
                values = np.array(part, np.float64)
                term = _minus_baseline(_best_of(values[None], best_of)[0], tokens, baseline)
                x += weight * _divided(term, _deviation(values, best_of))
            spread, deviation = x, _deviation(x)
        if scale == "group_std":
            x = _divided(x, deviation)
        elif scale == "group_mean":
            x = x / (best.mean() + _EPS) if best.mean() > 0 else np.zeros(len(x))
        found.append((x, spread, tokens))
    x, spread, tokens = (np.concatenate(each) for each in zip(*found, strict=True))
    if scale == "batch_std":
        x = _divided(x, _deviation(spread))
    elif scale.startswith("whiten"):
        x = _whitened(x, tokens if scale == "whiten_tokens" else np.ones_like(tokens))
    return np.split(x, np.cumsum([len(group.rollouts) for group in groups])[:-1])


def best_of(rewards: Float[np.ndarray, "prompts group"], k: int) -> Float[np.ndarray, "prompts group"]:
    """Replaces each reward by the expected highest reward among the response and k - 1 random others of its group (pass@k training).

    See Chen et al. 2025, https://arxiv.org/abs/2508.10751. The mean of the new rewards over the group is the expected highest of k rewards, which is pass@k if rewards are
    0 and 1. Equal rewards stay equal.

    Raises:
        ValueError: k is not between 1 and the size of a group.

    >>> best_of(np.array([[1.0, 0.0, 0.0, 0.0]]), 2).round(3).tolist()
    [[1.0, 0.333, 0.333, 0.333]]
    """
    size = rewards.shape[1]
    if not 1 <= k <= size:
        raise ValueError(f"best_of={k} must be between 1 and the number of responses in a group, {size}")
    if k == 1:
        return rewards
    shifted = rewards - rewards[:, :1]
    ordered = np.sort(shifted, axis=1)
    # If p of the other responses are not better, the highest of k is the response itself (j = p) or the one at place j > p.
    ways = [
        [comb(p, k - 1) if j == p else comb(j - 1, k - 2) if j > p else 0 for j in range(size)]
        for p in range(size)
    ]
    shares = np.array([[count / comb(size - 1, k - 1) for count in row] for row in ways])
    places = (ordered[:, None, :] <= shifted[:, :, None]).sum(axis=2) - 1
    return rewards[:, :1] + np.take_along_axis((shares * ordered[:, None, :]).sum(axis=2), places, axis=1)


_best_of = best_of  # `step_advantages` has a parameter of this name


def _minus_baseline(
    rewards: Float[np.ndarray, " group"], tokens: Int[np.ndarray, " group"], baseline: str
) -> Float[np.ndarray, " group"]:
    if baseline == "none":
        return rewards
    if baseline == "length_weighted":
        shifted = rewards - rewards[0]
        return shifted - (tokens * shifted).sum() / max(tokens.sum(), 1)
    centered = group_advantages(rewards[None], normalize_std=False)[0]
    return centered if baseline == "group_mean" else centered * len(rewards) / max(len(rewards) - 1, 1)


def _deviation(rewards: Float[np.ndarray, " rewards"], k: int = 1) -> float:
    """Returns the sample standard deviation, or 1 for a single reward. For k > 1, returns the standard deviation of the highest of k of the rewards."""
    shifted, size = rewards - rewards[0], len(rewards)
    if k == 1:
        return float(shifted.std(ddof=1)) if size > 1 else 1.0
    ordered, shares = np.sort(shifted), np.array([comb(j, k - 1) / comb(size, k) for j in range(size)])
    return float(np.sqrt((shares * (ordered - (shares * ordered).sum()) ** 2).sum()))


def _divided(x: Float[np.ndarray, " group"], deviation: float) -> Float[np.ndarray, " group"]:
    return x / (deviation + _EPS) if deviation else np.zeros(len(x))


def _whitened(x: Float[np.ndarray, " responses"], counts: Int[np.ndarray, " responses"]) -> np.ndarray:
    """Returns (x - mean) / sqrt(variance + 1e-8), where each x counts as often as given."""
    total, shifted = counts.sum(), x - x[0]
    centered = shifted - (counts * shifted).sum() / max(total, 1)
    return centered / np.sqrt((counts * centered**2).sum() / max(total - 1, 1) + 1e-8)
