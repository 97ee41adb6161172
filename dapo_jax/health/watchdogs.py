"""Warnings about runs that go on and learn nothing, from the metrics of their steps. Numbers in, words out: no jax, no files.

Several may hold at one time, since one brings the next: a policy without entropy gives flat groups, and flat groups a reward that
stays. Only the first in the order of `NAMES` is then raised.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

NAMES = ("length_collapse", "entropy_collapse", "truncation", "flat_groups", "reward_stuck")
"""In the order of cause."""

START, RECENT = 3, 3
"""Steps whose mean is what entropy and lengths were at first, and what they are now."""

NEARLY_ALL_RIGHT = 0.9
"""An accuracy at which a policy may well be sure of itself, and its reward has no room left."""

SEEN = (
    "policy/entropy",
    "reward/mean",
    "reward/std",
    "rollout/accuracy",
    "rollout/all_correct_frac",
    "rollout/mixed_frac",
    "rollout/prompts",
    "rollout/response_tokens",
    "rollout/scores_differ_frac",
    "rollout/truncated_frac",
    "update/learning_rate",
)
"""The metrics that are looked at."""

Step = Mapping[str, Any]
"""Metrics of a step; what was not measured is absent, None or NaN."""

Seen = Mapping[str, Sequence[float]]
"""The values of each metric of `SEEN` that were measured, step by step."""


class Watchdogs:
    """Takes the steps of a run one by one. What it says depends on their metrics alone, so a resumed run that is given the lines of
    the steps before goes on as the uninterrupted one would."""

    def __init__(
        self,
        *,
        window: int = 10,
        min_entropy: float = 0.05,
        min_length_frac: float = 0.333,
        max_truncated_frac: float = 0.5,
        min_mixed_frac: float = 0.02,
        metric: str = "correct",
        history: Iterable[Step] = (),
    ) -> None:
        """`metric` is `dynamic_sampling.metric`; `history` has the metrics of earlier steps."""
        self._metric = metric
        self._limits = {
            "window": window,
            "min_entropy": min_entropy,
            "min_length_frac": min_length_frac,
            "max_truncated_frac": max_truncated_frac,
            "min_mixed_frac": min_mixed_frac,
        }
        self._reach = max(window, START, RECENT)
        self._seen: dict[str, list[float]] = {name: [] for name in SEEN}
        for step in history:
            if "update/learning_rate" in step:
                self._see(step)
        self._raised = next(iter(self._holds()), "")

    def step(self, metrics: Step) -> tuple[dict[str, int], list[str]]:
        """Takes a finished step.

        Returns:
            `watchdog/NAME` for each, 1 while it is raised; and the warning, if it was not raised at the step before.
        """
        self._see(metrics)
        holds = self._holds()
        before, self._raised = self._raised, next(iter(holds), "")
        said = [holds[self._raised]] if self._raised not in ("", before) else []
        return {f"watchdog/{name}": int(name == self._raised) for name in NAMES}, said

    def _see(self, step: Step) -> None:
        """Keeps of a long run only what is looked at: the first values of each metric and the last."""
        for name, values in self._seen.items():
            value = step.get(name)
            if value is not None and math.isfinite(value):
                values.append(float(value))
            if len(values) > 2 * self._reach:
                del values[self._reach]

    def _holds(self) -> dict[str, str]:
        return warnings(self._seen, metric=self._metric, **self._limits)


def warnings(
    seen: Seen,
    *,
    window: int,
    min_entropy: float,
    min_length_frac: float,
    max_truncated_frac: float,
    min_mixed_frac: float,
    metric: str = "correct",
) -> dict[str, str]:
    """Name and text of each warning that holds after the last of what was `seen`, in the order of `NAMES`.

    * `length_collapse`: responses are shorter than `min_length_frac` of what they were.
    * `entropy_collapse`: the entropy is below `min_entropy` and below a tenth of what it was, and not nearly all is right.
    * `truncation`: more than `max_truncated_frac` of the responses are cut off, and 0.25 more than were.
    * `flat_groups`: for half of `window`, less than `min_mixed_frac` of the groups had both right and wrong responses; with the
      `metric` score, scores that differ.
    * `reward_stuck`: after `window` steps at the full learning rate the mean reward of the last half of them is not above that
      of the run's first steps by twice the noise, and not nearly all is right.

    What something was is its mean over the first three steps, what it is its mean over the last three. With the `metric` score nothing
    is ever nearly all right: a score may have no highest value.
    """
    done = metric == "correct" and _nearly_all_right(seen)
    flat = _equal_scores if metric == "score" else _flat_groups
    found = {
        "length_collapse": _length_collapse(seen, min_length_frac),
        "entropy_collapse": _entropy_collapse(seen, min_entropy, done=done),
        "truncation": _truncation(seen, max_truncated_frac),
        "flat_groups": flat(seen, window // 2, min_mixed_frac),
        "reward_stuck": _reward_stuck(seen, window, done=done),
    }
    return {name: found[name] for name in NAMES if found[name]}


def _length_collapse(seen: Seen, least: float) -> str:
    pair = _then_and_now(seen, "rollout/response_tokens")
    if pair is None or pair[1] >= least * pair[0]:
        return ""
    return (
        f"length collapse: responses have {pair[1]:.1f} tokens on average, at first {pair[0]:.1f}. Usual causes: the reward prefers "
        "brevity (an overlong penalty that begins too early, a grader that accepts an empty or guessed answer); "
        "loss.aggregation=sequence_mean. Read the rollouts; raise sampling.max_response_tokens or lower "
        "reward.overlong.buffer_tokens; make the grader ask for what is missing"
    )


def _entropy_collapse(seen: Seen, least: float, *, done: bool) -> str:
    pair = _then_and_now(seen, "policy/entropy")
    if pair is None or done or pair[1] >= min(least, 0.1 * pair[0]):
        return ""
    return (
        f"entropy collapse: {pair[1]:.2g} nats a token, at first {pair[0]:.2g}: the policy hardly tries anything new. Usual causes: "
        "a learning rate that is too high; an upper clip as low as the lower; many updates on one step's responses. Lower "
        "optimizer.learning_rate, raise loss.clip_ratio_high, raise batch.groups_per_update; go on from an earlier checkpoint"
    )


def _truncation(seen: Seen, most: float) -> str:
    pair = _then_and_now(seen, "rollout/truncated_frac")
    if pair is None or pair[1] <= max(most, pair[0] + 0.25):
        return ""
    return (
        f"truncation: {pair[1]:.0%} of the responses are cut off at the length limit, at first {pair[0]:.0%}. Usual causes: the "
        "reward grows with length; responses repeat themselves; a stop token or stop string that the policy no longer writes. Read "
        "the rollouts; enable reward.overlong, check sampling.stop, or raise sampling.max_response_tokens if they need the room"
    )


def _flat_groups(seen: Seen, span: int, least: float) -> str:
    mixed = seen["rollout/mixed_frac"][-span:]
    if len(mixed) < span or _mean(mixed) >= least:
        return ""
    right = _mean(seen["rollout/all_correct_frac"][-span:])
    differ = seen["rollout/scores_differ_frac"][-span:]
    if differ and _mean(differ) >= least:
        return (
            f"flat groups: in the last {span} steps {_mean(mixed):.1%} of the groups had scores both above 0, which count as right, and not; "
            f"yet the scores differ in {_mean(differ):.0%}. If the reward is a number rather than a verdict, set dynamic_sampling.metric=score"
        )
    return (
        f"flat groups: in the last {span} steps {_mean(mixed):.1%} of the groups had both right and wrong responses; {right:.0%} were "
        "all right, the rest all wrong, and these teach nothing. Usual causes: all right: the prompts are too easy; all wrong: too "
        "hard, or the grader never matches (dapo-jax score shows what it extracts); one verdict for whatever is written. Change "
        "data, model or grader, or raise batch.group_size"
    )


def _equal_scores(seen: Seen, span: int, least: float) -> str:
    differ = seen["rollout/scores_differ_frac"][-span:]
    if len(differ) < span or _mean(differ) >= least:
        return ""
    return (
        f"flat groups: in the last {span} steps the scores differed in {_mean(differ):.1%} of the groups; one score for all responses to a "
        "prompt teaches nothing. Usual causes: a reward function that gives the same whatever is written, or only a few values; responses "
        "that have become alike. Read the rollouts; change data or reward function, or raise batch.group_size"
    )


def _reward_stuck(seen: Seen, window: int, *, done: bool) -> str:
    rates = seen["update/learning_rate"][-window:]
    rewards, half = seen["reward/mean"], window // 2
    still_warming_up = len(rates) < window or max(rates) != min(rates)
    if still_warming_up or len(rewards) < 2 * half or done:
        return ""
    then, now = _mean(rewards[:half]), _mean(rewards[-half:])
    spread, prompts = seen["reward/std"], seen["rollout/prompts"]
    noise = math.hypot(_error(spread[:half], prompts[:half]), _error(spread[-half:], prompts[-half:]))
    if now > then + 2 * noise:
        return ""
    return (
        f"reward stuck: {now:.3g} on average in the last {half} steps, {then:.3g} in the first {half}, with a standard error of "
        f"{noise:.2g}: it has not risen. Usual causes: a learning rate that is too low (or updates that are skipped: "
        "update/skipped_frac); a reward that does not depend on what is written. Read the rollouts; raise "
        "optimizer.learning_rate"
    )


def _error(spread: Sequence[float], prompts: Sequence[float]) -> float:
    """Standard error of the mean reward, as if all responses to a prompt had the same: then it is not less than this."""
    return math.sqrt(_mean([one * one for one in spread]) / max(sum(prompts), 1.0))


def _nearly_all_right(seen: Seen) -> bool:
    accuracy = seen["rollout/accuracy"][-RECENT:]
    return bool(accuracy) and _mean(accuracy) >= NEARLY_ALL_RIGHT


def _then_and_now(seen: Seen, name: str) -> tuple[float, float] | None:
    """The means over the first and the last steps, once these are not the same ones."""
    values = seen[name]
    return (_mean(values[:START]), _mean(values[-RECENT:])) if len(values) >= START + RECENT else None


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan
