"""Warns about runs that continue without learning. The warnings depend only on the metrics of the steps so far.

Several conditions may hold at once, because one can cause another. For example, a policy without entropy leads to flat groups, which
lead to a constant reward. In such cases, only the first warning in the order of `NAMES` is raised.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

NAMES = (
    "sampler_scale",
    "copies",
    "length_collapse",
    "entropy_collapse",
    "truncation",
    "flat_groups",
    "reward_stuck",
)
"""Names of the warnings, ordered from causes to consequences."""

START, RECENT = 3, 3
"""Number of steps over which a metric is averaged for its first value and for its current value."""

WINDOW = 10
"""Minimum number of steps before a warning about a stuck reward. Half as many suffice for a warning about flat groups."""

MIN_ENTROPY = 0.05
MIN_LENGTH_FRAC = 0.333
MAX_TRUNCATED_FRAC = 0.5
MIN_MIXED_FRAC = 0.02

MAX_SIGN_BALANCE = 3.0
"""Largest healthy sign balance of sampler and trainer; the smallest is its inverse. Healthy runs with rounding or an 8-bit sampler have 0.6 to 1.3."""

MAX_STALE_FRAC = 0.1
"""Fraction of tokens from earlier weights above which the policy's own change may have moved the sign balance."""

MAX_COPIES_Z, MAX_COPIES_FRAC, MAX_LAG_Z = 4.0, 0.01, 5.0
"""Independent responses exceed the first in one of 30,000 steps, and the last in one of 100,000. At most 0.5% of them repeat an improbable response."""

MIN_GROUPS = 48
"""Minimum number of groups over the last `RECENT` steps. Standard errors over fewer groups are too uncertain."""

NEARLY_ALL_RIGHT = 0.9
"""Accuracy above which low entropy and a constant reward are expected."""

SEEN = (
    "policy/entropy",
    "reward/mean",
    "reward/std",
    "rollout/accuracy",
    "rollout/all_correct_frac",
    "rollout/copies_frac",
    "rollout/copies_z",
    "rollout/earlier_tokens_frac",
    "rollout/mixed_frac",
    "rollout/prompts",
    "rollout/response_tokens",
    "rollout/scores_differ_frac",
    "rollout/truncated_frac",
    "rollout/verdict_lag_z",
    "sync/sign_balance",
    "teacher/reverse_kl",
    "update/learning_rate",
)
"""Metrics that the warnings use."""

StepMetrics = Mapping[str, Any]
"""Metrics of a step. A value that was not measured is absent, None or NaN."""

Seen = Mapping[str, Sequence[float]]
"""The measured values of each metric, step by step."""


class Watchdogs:
    """Raises warnings step by step. They depend only on metrics, so a resumed run that loads its earlier metrics raises the same warnings."""

    def __init__(self, *, metric: str = "correct", history: Iterable[StepMetrics] = ()) -> None:
        """`metric` is `TrainConfig.learnt_metric`; `history` contains the metrics of earlier steps."""
        self._metric = metric
        self._seen: dict[str, list[float]] = defaultdict(list)
        for step in history:
            if "update/learning_rate" in step:
                self._see(step)
        self._raised = next(iter(warnings(self._seen, metric=metric)), "")

    def step(self, metrics: StepMetrics) -> tuple[dict[str, int], list[str]]:
        """Adds the metrics of a finished step. Returns the metric `watchdog/NAME` of each warning, which is 1 while the warning is raised, and the texts of newly raised warnings."""
        self._see(metrics)
        holds = warnings(self._seen, metric=self._metric)
        before, self._raised = self._raised, next(iter(holds), "")
        new = [holds[self._raised]] if self._raised not in ("", before) else []
        return {f"watchdog/{name}": int(name == self._raised) for name in NAMES}, new

    def _see(self, step: StepMetrics) -> None:
        for name in SEEN:
            value = step.get(name)
            if value is not None and math.isfinite(value):
                self._seen[name].append(float(value))


def warnings(seen: Seen, *, metric: str) -> dict[str, str]:
    """Returns the name and text of each warning whose condition holds after the last step, in the order of `NAMES`.

    * `sampler_scale`: the sign balance of sampler and trainer exceeds `MAX_SIGN_BALANCE`, or is below its inverse.
    * `copies`: over the last `RECENT` steps, a group has more equal responses than independent ones would (means above `MAX_COPIES_Z` or `MAX_COPIES_FRAC`), or the verdicts
      of responses at one distance agree too often (`MAX_LAG_Z`).
    * `length_collapse`: responses are shorter than `MIN_LENGTH_FRAC` of their first length.
    * `entropy_collapse`: the entropy is below `MIN_ENTROPY` and below a tenth of its first value, accuracy is below 0.9, and there is no teacher.
    * `truncation`: the share of truncated responses exceeds `MAX_TRUNCATED_FRAC`, and exceeds its first value by 0.25.
    * `flat_groups`: over the last `WINDOW // 2` steps, less than `MIN_MIXED_FRAC` of the groups had both correct and wrong responses
      (or different scores, if `metric` is `score`).
    * `reward_stuck`: after `WINDOW` steps in which the learning rate did not rise or fall below a half, the mean reward of the last `WINDOW // 2` steps exceeds the mean of
      the first `WINDOW // 2` steps by at most two standard errors of the difference, and accuracy is below 0.9.

    The next three conditions compare means over the last and the first three steps. If `metric` is `score`, accuracy is
    ignored, because a score may have no maximum. If it is empty, rewards are not learnt, and the last two conditions never hold.
    """
    accuracy = seen["rollout/accuracy"][-RECENT:]
    done = metric == "correct" and bool(accuracy) and _mean(accuracy) >= NEARLY_ALL_RIGHT
    holding: dict[str, str] = {}
    balance = _mean(seen["sync/sign_balance"][-RECENT:]) if len(seen["sync/sign_balance"]) >= RECENT else 1.0
    if not 1 / MAX_SIGN_BALANCE <= balance <= MAX_SIGN_BALANCE:
        stale = _mean(seen["rollout/earlier_tokens_frac"][-RECENT:] or [0.0])
        moved = (
            f"the policy has changed since then ({stale:.0%} of the tokens are from earlier weights; lower optimizer.learning_rate or the age of rollouts), "
            if stale > MAX_STALE_FRAC
            else ""
        )
        holding["sampler_scale"] = (
            f"sampler scale: the trainer finds sampled tokens less likely than the sampler in {balance:.3g} times as much of the training signal as more "
            f"likely, and rounding gives about 1. Usual causes: {moved}another temperature, a cap or a scale of the logits in one of the two, a "
            "weight that was not transferred. Run dapo-jax doctor"
        )
    if text := _copies(seen):
        holding["copies"] = text
    first, now = _first_and_now(seen, "rollout/response_tokens")
    if now < MIN_LENGTH_FRAC * first:
        holding["length_collapse"] = (
            f"length collapse: responses have {now:.1f} tokens on average, down from {first:.1f}. Usual causes: the reward prefers "
            "brevity (an overlong penalty that begins too early, a grader that accepts an empty or guessed answer); "
            "loss.aggregation=sequence_mean. Read the rollouts; raise sampling.max_response_tokens or lower "
            "reward.overlong.buffer_tokens; make the grader require the missing part"
        )
    first, now = _first_and_now(seen, "policy/entropy")
    if now < min(MIN_ENTROPY, 0.1 * first) and not done and not seen["teacher/reverse_kl"]:
        holding["entropy_collapse"] = (
            f"entropy collapse: {now:.2g} nats per token, down from {first:.2g}: the policy hardly explores. Usual causes: "
            "the learning rate is too high; the upper clip range is as small as the lower; a step has too many updates. Lower "
            "optimizer.learning_rate, raise loss.clip_ratio_high, raise batch.groups_per_update; resume from an earlier checkpoint"
        )
    first, now = _first_and_now(seen, "rollout/truncated_frac")
    if now > max(MAX_TRUNCATED_FRAC, first + 0.25):
        holding["truncation"] = (
            f"truncation: {now:.0%} of the responses are truncated at the length limit, up from {first:.0%}. Usual causes: the "
            "reward grows with length; responses repeat themselves; the policy no longer writes a stop token or stop string. Read "
            "the rollouts; enable reward.overlong, check sampling.stop, or raise sampling.max_response_tokens if the task needs it"
        )
    if metric and (text := _flat_groups(seen, metric)):
        holding["flat_groups"] = text
    if metric and not done and (text := _reward_stuck(seen)):
        holding["reward_stuck"] = text
    return holding


def _copies(seen: Seen) -> str:
    if sum(seen["rollout/prompts"][-RECENT:]) < MIN_GROUPS:
        return ""
    names, limits = ("copies_z", "copies_frac", "verdict_lag_z"), (MAX_COPIES_Z, MAX_COPIES_FRAC, MAX_LAG_Z)
    recent = [seen[f"rollout/{name}"][-RECENT:] for name in names]
    if not any(
        len(values) == RECENT and _mean(values) > most for values, most in zip(recent, limits, strict=True)
    ):
        return ""
    shown = ", ".join(
        f"rollout/{name} {_mean(values):.3g}" for name, values in zip(names, recent, strict=True) if values
    )
    return (
        f"copies: the responses of a group are not independent ({shown}), so groups have less signal than their size. Usual causes: several "
        "samplers with the same random numbers, a prompt that is in the dataset twice with the same key, an environment that repeats its "
        "first episode. Read the rollouts of a group; compare runs with one and with several processes"
    )


def _flat_groups(seen: Seen, metric: str) -> str:
    span = WINDOW // 2
    mixed, differ = (seen[f"rollout/{name}_frac"][-span:] for name in ("mixed", "scores_differ"))
    judged = differ if metric == "score" else mixed
    if len(judged) < span or _mean(judged) >= MIN_MIXED_FRAC:
        return ""
    if metric == "score":
        return (
            f"flat groups: in the last {span} steps the scores differed in {_mean(differ):.1%} of the groups; the policy learns nothing "
            "from a group with equal scores. Usual causes: a reward function that returns the same value for every response, or only "
            "a few values; responses that have become alike. Read the rollouts; change data or reward function, or raise batch.group_size"
        )
    head = f"flat groups: in the last {span} steps {_mean(mixed):.1%} of the groups had both correct and wrong responses"
    if differ and _mean(differ) >= MIN_MIXED_FRAC:
        return (
            f"{head}, where a score above 0 counts as correct; but the scores differ in {_mean(differ):.0%} of the groups. "
            "If the reward is a number rather than a verdict, set dynamic_sampling.metric=score"
        )
    right = _mean(seen["rollout/all_correct_frac"][-span:])
    return (
        f"{head}; {right:.0%} were all correct, and the policy learns nothing from all-correct or all-wrong groups. Usual causes: the prompts are "
        "too easy (all correct) or too hard (all wrong); the grader never matches (dapo-jax score shows the extracted answers), or returns "
        "the same verdict for every response. Change data, model or grader, or raise batch.group_size"
    )


def _reward_stuck(seen: Seen) -> str:
    rates = seen["update/learning_rate"][-WINDOW:]
    rewards, half = seen["reward/mean"], WINDOW // 2
    if min(len(rates), len(rewards)) < WINDOW or rates != sorted(rates, reverse=True):  # still warming up
        return ""
    if min(rates) < max(rates) / 2:
        return ""
    first, now = _mean(rewards[:half]), _mean(rewards[-half:])
    spread, prompts = seen["reward/std"], seen["rollout/prompts"]
    noise = math.hypot(_error(spread[:half], prompts[:half]), _error(spread[-half:], prompts[-half:]))
    if now > first + 2 * noise:
        return ""
    return (
        f"reward stuck: the mean reward was {now:.3g} in the last {half} steps and {first:.3g} in the first {half}, with a standard error of "
        f"{noise:.2g}, so it has not risen. Usual causes: the learning rate is too low; updates are skipped "
        "(update/skipped_frac); the reward does not depend on the response. Read the rollouts; raise "
        "optimizer.learning_rate"
    )


def _error(spread: Sequence[float], prompts: Sequence[float]) -> float:
    """Returns an upper bound on the standard error of the mean reward, assuming that all responses to a prompt have the same reward."""
    return math.sqrt(_mean([std * std for std in spread]) / max(sum(prompts), 1.0))


def _first_and_now(seen: Seen, name: str) -> tuple[float, float]:
    """Returns the means over the first and the last steps, or NaN as long as these steps overlap."""
    values = seen[name]
    if len(values) < START + RECENT:
        return math.nan, math.nan
    return _mean(values[:START]), _mean(values[-RECENT:])


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan
