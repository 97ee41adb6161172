"""Defines the panels of the page and of the PNGs, and selects the panels and series for which runs have metrics. The chart of a panel is in `assets/chart.js`."""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dapo_jax.report.tables import EQUAL, REST, Table

OTHER = "Other metrics"
"""The section for metrics that no panel in `PANELS` shows."""

_INCLUDED = re.compile(
    r"eval/.+(_stderr|/problems)|time/(step|eval|grade|wait|logprobs|checkpoint|between)_s"
)
"""Metrics without a panel in `OTHER`, because another panel includes them or because they never change."""


@dataclass(frozen=True, kw_only=True)
class Series:
    """One line in a panel, or one layer in a stacked panel."""

    key: str
    """The metric's name, or in `PANELS`, a regular expression that matches it."""
    label: str
    """The name in the legend. In `PANELS`, it may refer to groups in `key`, for example `\\1`."""
    band: str = ""
    """The metric that contains the standard error, which is plotted as a band. Empty for a series without a band."""


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One chart, whose series share their axes."""

    section: str
    title: str
    unit: str
    """The unit of the vertical axis; `share` is shown in percent."""
    series: tuple[Series, ...]
    stacked: bool = False
    log: bool = False
    """Use a logarithmic vertical axis."""
    help: str = "A metric that has no panel of its own."
    """A sentence for readers who do not know the metric."""
    note: str = ""
    """A note that is shown with the panel."""
    hidden: tuple[str, ...] = ()
    """Keys of series that the page shows only if the reader selects them."""
    quiet: bool = False
    """Omit series whose values are all 0, and the panel if no series is left."""
    exact: bool = False
    """Never smooth the values."""


def _panel(section: str, title: str, unit: str, labels: Mapping[str, str], **options: Any) -> Panel:
    """Creates a panel from a mapping of patterns to labels."""
    series = tuple(Series(key=key, label=label) for key, label in labels.items())
    return Panel(section=section, title=title, unit=unit, series=series, **options)


_ACCURACY_KINDS = {rf"eval/(.+)/({kind}@(?:\d+|k))": r"\2 \1" for kind in ("avg", "pass", "cons")}
_HELD_OUT = _panel("Learning", "Held-out accuracy", "share", _ACCURACY_KINDS, note="shaded: one standard error over problems", help="Accuracy on problems that are never trained on: this curve shows whether the policy improves.")  # fmt: skip
_ACCURACIES = (
    _HELD_OUT,
    _panel("Learning", "Training accuracy", "share", {
        "rollout/accuracy": "sampled, before the filter", "rollout/trained_accuracy": "trained on, after the filter",
    }, help="Share of correct responses to the sampled prompts; below 0.1 or above 0.9, few groups are informative."),
)  # fmt: skip
_REWARDS = (
    _panel("Learning", "Reward", "", {"reward/mean": "mean", "reward/std": "standard deviation"}, help="Mean and spread of the rewards that responses receive, with the overlong penalty."),
    _panel("Learning", "Overlong penalty", "", {"reward/overlong_penalty": "mean"}, help="Mean penalty for responses near the length limit; it should return to 0."),
    _panel("Learning", "Reward parts", "", {r"reward/parts/(?!agent_)(.+)": r"\1"}, help="Mean of each grader's score or of each metric that an environment reports."),
)  # fmt: skip
_HELD_OUT_REWARD = _panel("Learning", "Held-out reward", "", {r"eval/(.+)/reward": r"\1"}, help="Mean reward on problems that are never trained on.")  # fmt: skip
_DIFFER = "rollout/scores_differ_frac"
_BY_VERDICT = _panel("Dynamic sampling", "Groups sampled", "share", {
    "rollout/mixed_frac": "mixed", "rollout/all_correct_frac": "all correct", "rollout/all_wrong_frac": "all wrong",
}, stacked=True, help="Only mixed groups, in which some responses are better than others, teach the policy something.")  # fmt: skip
_BY_SCORE = _panel("Dynamic sampling", "Groups sampled", "share", {
    _DIFFER: "scores differ", EQUAL: "all scores equal",
}, stacked=True, help="Only groups whose scores differ teach the policy something.")  # fmt: skip
_SCORES_DIFFER = _panel("Dynamic sampling", "Groups whose scores differ", "share", {_DIFFER: "of all sampled groups"}, help="Only these groups teach the policy something.")  # fmt: skip
_QUIET, _EXACT = {"quiet": True}, {"exact": True}

PANELS = (
    *_ACCURACIES,
    *_REWARDS,
    _HELD_OUT_REWARD,
    _panel("Responses", "Response length", "tokens", {
        "rollout/response_tokens": "mean", "rollout/trained_response_tokens": "mean, trained on",
        "rollout/response_tokens_p95": "95th percentile", "rollout/response_tokens_max": "longest",
    }, help="Number of sampled tokens per response; a sudden change often means that the policy exploits the reward."),
    _panel("Responses", "Held-out response length", "tokens", {r"eval/(.+)/response_tokens": r"\1"}, help="Number of sampled tokens per response in evaluations."),
    _panel("Responses", "Truncated responses", "share", {
        "rollout/truncated_frac": "cut off at the limit", r"eval/(.+)/truncated_frac": r"held out: \1",
    }, help="Share of responses that reach the length limit; a high share wastes tokens and hides answers."),
    _panel("Responses", "Responses without a verdict", "responses", {
        "reward/lost": "no verdict", "reward/nonfinite": "score not finite",
    }, **_QUIET, help="Responses whose grader or environment failed; they count as wrong."),
    _panel("Responses", "Requests of agents", "per episode", {r"reward/parts/agent_(requests|contexts|tool_calls)": r"\1"}, help="Requests that an agent sends in an episode; with more than one context, an episode has several training sequences."),
    _panel("Responses", "Irregular requests of agents", "per episode", {r"reward/parts/agent_(retries|parallel|undelivered|late|unparsed_calls)": r"\1"}, **_QUIET, help="Requests that were repeated, overlapped or came after the end, answers that nobody received, and calls that stayed a text."),
    _BY_VERDICT,
    _panel("Dynamic sampling", "Distinct responses", "share", {
        "rollout/distinct_frac": "distinct", "rollout/distinct_expected_frac": "distinct, if independent", "rollout/copies_frac": "copies",
        "rollout/mixed_expected_frac": "mixed groups, if independent",
    }, **_QUIET, help="Share of responses that differ from all earlier ones of their group; far below the expectation, responses are copies."),
    _panel("Dynamic sampling", "Dependence of responses", "standard errors", {
        "rollout/copies_z": "equal responses", "rollout/verdict_lag_z": "agreement of verdicts",
    }, **_QUIET, help="How far equal responses and equal verdicts exceed those of independent responses; above 5 is a fault."),
    _panel("Dynamic sampling", "Prompts and groups", "per step", {
        "rollout/prompts": "prompts sampled", "rollout/trained_groups": "groups trained on", "rollout/surplus_groups": "surplus groups",
        "rollout/carried_groups": "carried over",
    }, help="How many prompts a step samples until it has enough groups to train on."),
    _panel("Dynamic sampling", "Age of trained groups", "steps", {
        "rollout/age_mean": "oldest token, mean", "rollout/age_p95": "oldest token, 95th percentile",
        "rollout/age_max": "oldest token, largest", "rollout/newest_age_mean": "newest token, mean",
        "rollout/newest_age_p95": "newest token, 95th percentile", "rollout/newest_age_max": "newest token, largest",
    }, hidden=("rollout/newest_age_p95", "rollout/newest_age_max"), **_QUIET,
        note="staleness: number of steps between sampling a group's oldest or newest token and training on the group", help="How old the weights were that sampled the groups of a step."),
    _panel("Dynamic sampling", "Tokens of earlier weights", "share", {
        "rollout/earlier_tokens_frac": "sampled by earlier weights", "importance/ess_frac": "effective sample size",
        "importance/cut_frac": "weight capped, or token left out",
    }, note="over the tokens trained on; the last two describe their importance weights", **_QUIET, help="How much of the training data earlier weights sampled, and how much of it the correction keeps."),
    _panel("Dynamic sampling", "Importance weights", "", {
        "importance/weight": "mean", "importance/weight_max": "largest",
    }, note="over the tokens trained on", help="Weights that correct for tokens of earlier weights; a mean far from 1 means stale data."),
    _panel("Dynamic sampling", "Waves", "waves per step", {"rollout/waves": "waves"}, **_QUIET, **_EXACT, help="A step samples another wave of prompts until it has enough informative groups."),
    _panel("Dynamic sampling", "Rounds", "rounds per step", {"rollout/rounds": "rounds"}, **_QUIET, **_EXACT, help="A step with rollouts in flight decodes so many rounds before it has enough groups."),
    _SCORES_DIFFER,
    _panel("Policy", "Entropy", "nats per token", {"policy/entropy": "policy"}, help="Uncertainty about the next token; a fall to 0 ends exploration."),
    _panel("Policy", "Probability of sampled tokens", "", {
        "policy/sampled_prob": "all tokens", "policy/clipped_high_prob": "clipped from above",
    }, help="Mean probability of the tokens when they were sampled; clipped tokens should be less likely ones."),
    _panel("Policy", "Clipped tokens", "share", {
        "policy/clip_high_frac": "from above, A > 0", "policy/clip_low_frac": "from below, A < 0",
        "policy/dual_clip_frac": "by the dual clip",
    }, help="Share of tokens without a gradient, because the policy already moved far on them."),
    _panel("Policy", "Change within a step", "nats", {
        "policy/kl_old_k3": "KL(old || new), k3", "policy/kl_old_k1": "KL(old || new), k1",
    }, help="How far the updates of a step move the policy."),
    _panel("Policy", "Distance from the reference", "nats", {
        "policy/kl_ref_k3": "KL, k3", "policy/kl_ref_k1": "KL, k1",
    }, help="How far the policy is from the reference policy, usually the initial weights."),
    _panel("Policy", "Ratio new / old", "", {"policy/ratio_max": "largest", "policy/ratio": "mean"}, help="Probability of a token after the updates divided by its probability before; the mean should stay near 1."),
    _panel("Updates", "Loss", "", {"update/loss": "loss"}, help="The objective that the optimizer minimizes; it need not fall while the policy improves."),
    _panel("Updates", "Gradient norm", "before clipping", {"update/grad_norm": "gradient norm"}, help="Length of the gradient before clipping; spikes point to a few extreme tokens."),
    _panel("Updates", "Learning rate", "", {"update/learning_rate": "learning rate"}, **_EXACT, help="The optimizer's step size, with warm-up and decay."),
    _panel("Updates", "Step of each parameter", "by learning rate", {r"update/step_rms/(.+)": r"\1"}, **_QUIET, log=True, help="Root mean square of a parameter's change by the learning rate; near 0, the parameter has no gradient."),
    _panel("Updates", "Change of each parameter", "by its norm", {r"update/ratio/(.+)": r"\1"}, **_QUIET, log=True, help="Norm of a parameter's change by the norm of its weights; compare a parameter with its own past."),
    _panel("Updates", "Stored weights that change", "share", {
        "update/stored_changed_frac": "changed", "update/stored_predicted_frac": "predicted",
    }, **_QUIET, help="Share of weights whose rounded value in the sampler changes in an update; far below the prediction, weights are kept rounded."),
    _panel("Updates", "Skipped updates", "share", {
        "update/skipped_frac": "not finite, so skipped",
    }, **_QUIET, **_EXACT, help="Share of updates that were left out because a value was not finite."),
    _panel("Updates", "Not finite", "updates", {r"nonfinite/(.+)": r"\1"}, **_QUIET, **_EXACT, help="Number of updates in which each quantity was not finite."),
    _panel("Updates", "Watchdogs", "1 = raised", {r"watchdog/(.+)": r"\1"}, **_QUIET, **_EXACT, help="Warnings about the run's health, each with its threshold in the configuration."),
    _panel("Updates", "Sampler against trainer", "nats", {
        "sync/sampler_trainer_kl": "KL(sampler || trainer)", "sync/logprob_diff_mean": "mean |difference|",
        "sync/logprob_diff_max": "largest |difference|",
    }, log=True, note="differences of log-probabilities; groups carried over were sampled with older weights", help="Sampler and trainer should give the same tokens the same probability, except for rounding."),
    _panel("Updates", "Asymmetry of sampler and trainer", "", {
        "sync/sign_balance": "sign balance", "sync/advantage_association": "association with advantages",
    }, log=True, **_QUIET, help="Both are near 1 if sampler and trainer differ by rounding; a balance above 3 or below 1/3 is a different scale or temperature."),
    _panel("Updates", "Weights that the sampler lacks", "share of layers", {
        "sync/not_arrived_frac": "did not arrive",
    }, **_QUIET, **_EXACT, help="Share of layers whose weights in the sampler differ from the trainer's; anything above 0 is a fault."),
    _panel("Time and memory", "Time per step", "s", {
        "time/sample_s": "sampling", "time/update_s": "updates", REST: "evaluation and rest",
    }, stacked=True, help="Where the seconds of a step go."),
    _panel("Time and memory", "Throughput", "tokens/s", {
        "speed/sampled_tokens_per_s": "sampled, while sampling", "speed/trained_tokens_per_s": "trained on, while updating",
    }, help="Tokens per second of sampling and of training."),
    _panel("Time and memory", "Memory", "GiB", {
        "memory/host_gib": "host, the process", "memory/device_gib": "fullest device, after the step",
        "memory/device_peak_gib": "fullest device, peak so far",
    }, help="Memory of the host process and of the fullest device."),
)  # fmt: skip
"""All panels in the order of the page. Keys are regular expressions that match a full metric name."""

_KNOWN = tuple(series for panel in (*PANELS, _BY_SCORE) for series in panel.series)


def panels_for(by_score: Collection[bool]) -> Sequence[Panel]:
    """Returns the panels for a set of runs. `by_score` has one value per run, True if the run's groups are judged by scores instead of verdicts.

    If any run is judged by scores, reward panels come first. If all runs are judged by scores, the panels that depend on verdicts are omitted.
    """
    if not any(by_score):
        return PANELS
    rewards = (_HELD_OUT_REWARD, *_REWARDS)
    rest = [panel for panel in PANELS if panel not in (*_ACCURACIES, *rewards)]
    if not all(by_score):
        return (*rewards, *_ACCURACIES, *rest)
    rest.remove(_SCORES_DIFFER)  # because `_BY_SCORE` shows the same metric
    return (*rewards, *(_BY_SCORE if panel is _BY_VERDICT else panel for panel in rest))


def panels_of(tables: Sequence[Table]) -> tuple[list[Panel], list[str]]:
    """Returns the panels for which the runs have metrics, with metric names in place of patterns. Also returns the titles of omitted all-zero panels."""
    names = list(dict.fromkeys(name for table in tables for name in table.columns))
    active = {name for name in names if any(any(table.columns.get(name, ())) for table in tables)}
    chosen, zero = [], []
    for panel in panels_for([table.by_score for table in tables]):
        series = tuple(_matching(panel.series, names))
        lines = tuple(line for line in series if line.key in active or not panel.quiet)
        if lines:
            panel = _held_out(panel, lines, tables) if panel is _HELD_OUT else replace(panel, series=lines)
            chosen.append(panel)
        elif series:
            zero.append(panel.title)
    known = {series.key for series in _matching(_KNOWN, names)}
    left = [name for name in names if name not in known and not _INCLUDED.fullmatch(name)]
    chosen += [_panel(OTHER, name, "", {name: "value"}) for name in sorted(left) if name in active]
    if count := sum(name not in active for name in left):
        zero.append(f"{count} other metric{'s' * (count > 1)}")
    return chosen, zero


def _matching(patterns: Sequence[Series], names: Sequence[str]) -> Iterator[Series]:
    for pattern in patterns:
        for name in names:
            if match := re.fullmatch(pattern.key, name):
                band = f"{name}_stderr"
                yield Series(key=name, label=match.expand(pattern.label), band=band if band in names else "")


def _held_out(panel: Panel, series: tuple[Series, ...], tables: Sequence[Table]) -> Panel:
    """Omits the dataset name from labels if there is only one dataset. Shows each metric over k samples only for the largest k that all evaluations have."""
    if len(set(map(_dataset, series))) == 1:
        only = f" {_dataset(series[0])}"
        series = tuple(replace(line, label=line.label.removesuffix(only)) for line in series)
    shown, fell_back = set[str](), set[str]()
    logged = list[set[str]]()
    for table in tables:
        known = {line.key: table.columns[line.key] for line in series if line.key in table.columns}
        rows = zip(*known.values(), strict=True)
        logged += [{key for key, value in zip(known, row, strict=True) if value is not None} for row in rows]
    for kind in dict.fromkeys(line.key.partition("@")[0] for line in series):
        counted = {line.key for line in series if line.key.partition("@")[0] == kind}
        common = set.intersection(*(keys & counted for keys in logged if keys & counted))
        if kind.endswith("/cons") or not common:
            continue
        most = max(common, key=_count)
        shown.add(most)
        if most != max(counted, key=_count):
            fell_back.add(most.rpartition("/")[2])
    hidden = tuple(line.key for line in series if line.key not in shown)
    panel = replace(panel, series=series, hidden=hidden)
    if not fell_back:
        return panel
    at = ", ".join(sorted(fell_back))
    note = f"{panel.note}; evaluations differ in k: {at} is the largest that all have, and avg@k has the same expectation for every k"
    return replace(panel, title=f"{panel.title}, {at}", note=note)


def _dataset(series: Series) -> str:
    return series.key.removeprefix("eval/").rpartition("/")[0]


def _count(key: str) -> int:
    """Returns the k in a metric's name, or 0 if the name ends in @k."""
    count = key.rpartition("@")[2]
    return int(count) if count.isdecimal() else 0
