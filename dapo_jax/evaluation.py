"""What is said of a policy on held-out prompts: avg@k, pass@k, cons@k, each a mean over prompts with its standard error."""

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np

from dapo_jax.rollouts import Group


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """The chance that k of the samples, drawn without putting back, hold a correct one: 1 - C(n - c, k) / C(n, k).

    Unbiased for the chance that k fresh samples do (Chen et al. 2021, "Evaluating Large Language Models Trained on Code").

    >>> pass_at_k(4, 1, 2), pass_at_k(4, 0, 4), pass_at_k(4, 3, 2)
    (0.5, 0.0, 1.0)
    """
    if not 0 <= correct <= samples or not 1 <= k <= samples:
        raise ValueError(
            f"need 0 <= correct <= samples and 1 <= k <= samples; got {correct=}, {samples=}, {k=}"
        )
    return 1.0 - math.comb(samples - correct, k) / math.comb(samples, k)


def consensus(group: Group) -> float:
    """1 if the most frequent extracted answer is correct, else 0; equally frequent ones share.

    Responses without an answer do not vote; with no answer at all the consensus is wrong.
    """
    votes = Counter(r.verdict.extracted for r in group.rollouts if r.verdict.extracted is not None)
    if not votes:
        return 0.0
    top = max(votes.values())
    leaders = [answer for answer, count in votes.items() if count == top]
    right = {rollout.verdict.extracted for rollout in group.rollouts if rollout.correct}
    return sum(answer in right for answer in leaders) / len(leaders)


def summarize(groups: Sequence[Group], *, name: str) -> dict[str, float]:
    """`eval/<name>/avg@k`, `pass@k`, `cons@k` and their standard errors over prompts; lengths in tokens.

    Raises:
        ValueError: there are no groups, or they differ in size.
    """
    sizes = {len(group.rollouts) for group in groups}
    if len(sizes) != 1:
        raise ValueError(f"evaluation needs groups of one size, got sizes {sorted(sizes)}")
    k = sizes.pop()
    per_prompt = {
        f"avg@{k}": [group.accuracy for group in groups],
        f"pass@{k}": [pass_at_k(k, sum(r.correct for r in group.rollouts), k) for group in groups],
        f"cons@{k}": [consensus(group) for group in groups],
    }
    scores = {f"eval/{name}/{key}": float(np.mean(values)) for key, values in per_prompt.items()}
    errors = {
        f"eval/{name}/{key}_stderr": float(np.std(values, ddof=1) / math.sqrt(len(values)))
        if len(values) > 1
        else math.nan
        for key, values in per_prompt.items()
    }
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    return {
        **scores,
        **errors,
        f"eval/{name}/response_tokens": float(np.mean([rollout.response_tokens for rollout in rollouts])),
        f"eval/{name}/truncated_frac": float(np.mean([rollout.truncated for rollout in rollouts])),
    }
