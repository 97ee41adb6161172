"""Metrics of the rollouts in a step, computed on the host without jax.

Dynamic sampling trains only on informative groups, so metrics of trained groups are biased. The metrics therefore cover both sampled and trained groups.
"""

import re
from collections.abc import Sequence

import numpy as np

from dapo_jax.dapo.dynamic_sampling import Collected, scores_differ
from dapo_jax.dapo.rollouts import Group, Rollout
from dapo_jax.rewards.grading import NOT_GRADED
from dapo_jax.training.independence import independence_metrics


def rollout_metrics(collected: Collected) -> dict[str, float | int]:
    """Computes the metrics `rollout/*` and `reward/*` of a step in float64.

    Lengths are in tokens, including the end token. If enough groups were carried over from earlier steps, the step samples nothing, and the metrics of
    sampled responses are omitted. Metrics of verdicts and rewards are omitted if no response was graded.
    """
    sampled = [rollout for group in collected.sampled for rollout in group.rollouts]
    trained = [rollout for group in collected.groups for rollout in group.rollouts]
    in_flight: dict[str, float | int] = {}
    if collected.drawn_tokens is not None:
        in_flight = {"rollout/rounds": collected.rounds, "rollout/drawn_tokens": collected.drawn_tokens}
    if collected.solved.visits:
        in_flight["rollout/resting_frac"] = collected.solved.resting_frac(collected.cursor)
    metrics = {
        "rollout/prompts": len(collected.sampled),
        "rollout/waves": collected.waves,
        "rollout/trained_groups": len(collected.groups),
        "rollout/surplus_groups": collected.surplus,
        "rollout/carried_groups": len(collected.carry),
        **_ages(collected),
        **in_flight,
        "rollout/trained_accuracy": float(np.mean([rollout.correct for rollout in trained])),
        "rollout/trained_response_tokens": float(np.mean([rollout.response_tokens for rollout in trained])),
        **(_sampled_metrics(collected.sampled, sampled) if sampled else {}),
    }
    if any(rollout.verdict != NOT_GRADED for rollout in trained):
        return metrics
    of_verdicts = re.compile(r"reward/|rollout/(trained_)?accuracy|rollout/(all_|mixed_|scores_|verdict_)")
    return {name: value for name, value in metrics.items() if not of_verdicts.match(name)}


def _ages(collected: Collected) -> dict[str, float | int]:
    """Returns the staleness of the trained groups: the age of their oldest and newest tokens in steps, and the fraction sampled with earlier weights."""
    now, groups = collected.version, collected.groups
    oldest, newest = [now - group.oldest for group in groups], [now - group.newest for group in groups]
    responses = [rollout.response for group in groups for rollout in group.rollouts]
    tokens = sum(response.sampled_tokens for response in responses)
    current = sum(int(response.sampled[response.versions == now].sum()) for response in responses)
    return {
        "rollout/age_mean": float(np.mean(oldest)),
        "rollout/age_p95": float(np.percentile(oldest, 95)),
        "rollout/age_max": max(oldest),
        "rollout/newest_age_mean": float(np.mean(newest)),
        "rollout/newest_age_p95": float(np.percentile(newest, 95)),
        "rollout/newest_age_max": max(newest),
        "rollout/earlier_tokens_frac": 1.0 - current / max(tokens, 1),
    }


def _sampled_metrics(groups: Sequence[Group], rollouts: Sequence[Rollout]) -> dict[str, float | int]:
    lengths = np.array([rollout.response_tokens for rollout in rollouts])
    rewards = np.array([rollout.reward for rollout in rollouts])
    accuracy = np.array([group.accuracy for group in groups])
    parts: dict[str, list[float]] = {}
    for rollout in rollouts:  # an environment may omit a metric in some episodes
        for name, value in rollout.verdict.parts.items():
            parts.setdefault(name, []).append(value)
    scored = any(rollout.verdict.score is not None for rollout in rollouts)
    turns = [len(rollout.response.turns) for rollout in rollouts]
    of_turns = {"rollout/turns": float(np.mean(turns))} if any(turns) else {}
    differ = {"rollout/scores_differ_frac": float(np.mean([scores_differ(group) for group in groups]))}
    return {
        "rollout/accuracy": float(np.mean([rollout.correct for rollout in rollouts])),
        "rollout/all_correct_frac": float(np.mean(accuracy == 1.0)),
        "rollout/all_wrong_frac": float(np.mean(accuracy == 0.0)),
        "rollout/mixed_frac": float(np.mean((accuracy > 0.0) & (accuracy < 1.0))),
        **independence_metrics(groups),
        **(differ if scored else {}),
        **of_turns,
        "rollout/response_tokens": float(lengths.mean()),
        "rollout/response_tokens_max": int(lengths.max()),
        "rollout/response_tokens_p95": float(np.percentile(lengths, 95)),
        "rollout/truncated_frac": float(np.mean([rollout.truncated for rollout in rollouts])),
        "reward/lost": sum(rollout.verdict.lost != "" for rollout in rollouts),
        "reward/nonfinite": sum(rollout.verdict.lost == "nonfinite" for rollout in rollouts),
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std()),
        "reward/overlong_penalty": float(np.mean([rollout.overlong_penalty for rollout in rollouts])),
        **{f"reward/parts/{name}": float(np.mean(parts[name])) for name in sorted(parts)},
    }
