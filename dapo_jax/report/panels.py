"""Which curves are drawn together, in the page and in PNGs alike."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from dapo_jax.report.tables import EQUAL, REST


@dataclass(frozen=True, kw_only=True)
class Series:
    """One line, or one layer of a stack."""

    key: str
    """The metric's name, in `PANELS` a pattern of it."""
    label: str
    """The name in the legend; in `PANELS` it may have groups of the pattern, as `\\1`."""
    band: str = ""
    """The metric with its standard error, drawn as a band; in `PANELS` as `label`."""


@dataclass(frozen=True, kw_only=True)
class Panel:
    """Curves that share their axes."""

    section: str
    title: str
    unit: str
    """The unit of the vertical axis; `share` is drawn in percent."""
    series: tuple[Series, ...]
    stacked: bool = False
    log: bool = False
    """A logarithmic axis."""
    note: str = ""
    """A remark that one must know to read it."""
    hidden: tuple[str, ...] = ()
    """Keys that are drawn only when asked for."""
    quiet: bool = False
    """Left out where all its values are 0, and so is each of its series."""
    exact: bool = False
    """Drawn as measured, never smoothed: steps would become slopes."""


def _series(**labels: str) -> tuple[Series, ...]:
    return tuple(Series(key=name.replace("__", "/"), label=label) for name, label in labels.items())


HELD_OUT = tuple(
    Series(key=rf"eval/(.+)/({kind}@(?:\d+|k))", label=r"\2 \1", band=r"eval/\1/\2_stderr")
    for kind in ("avg", "pass", "cons")
)

_ACCURACIES = (
    Panel(
        section="Learning",
        title="Held-out accuracy",
        unit="share",
        series=HELD_OUT,
        note="shaded: one standard error over problems",
    ),
    Panel(
        section="Learning",
        title="Training accuracy",
        unit="share",
        series=_series(
            rollout__accuracy="sampled, before the filter",
            rollout__trained_accuracy="trained on, after the filter",
        ),
    ),
)
"""Colours of what is right or wrong."""

_REWARDS = (
    Panel(
        section="Learning",
        title="Reward",
        unit="",
        series=_series(reward__mean="mean", reward__std="standard deviation"),
    ),
    Panel(
        section="Learning",
        title="Overlong penalty",
        unit="",
        series=_series(reward__overlong_penalty="mean"),
    ),
    Panel(
        section="Learning",
        title="Reward parts",
        unit="",
        series=(Series(key=r"reward/parts/(.+)", label=r"\1"),),
    ),
)
"""The section of training."""

_HELD_OUT_REWARD = Panel(
    section="Learning",
    title="Held-out reward",
    unit="",
    series=(Series(key=r"eval/(.+)/reward", label=r"\1", band=r"eval/\1/reward_stderr"),),
)

_BY_VERDICT = Panel(
    section="Dynamic sampling",
    title="Groups sampled",
    unit="share",
    stacked=True,
    series=_series(
        rollout__mixed_frac="mixed",
        rollout__all_correct_frac="all correct",
        rollout__all_wrong_frac="all wrong",
    ),
)

_SCORES_DIFFER = Panel(
    section="Dynamic sampling",
    title="Groups whose scores differ",
    unit="share",
    series=_series(rollout__scores_differ_frac="of those sampled"),
)

_BY_SCORE = Panel(
    section="Dynamic sampling",
    title="Groups sampled",
    unit="share",
    stacked=True,
    series=(
        *_series(rollout__scores_differ_frac="scores differ"),
        Series(key=EQUAL, label="all scores equal"),
    ),
)

PANELS = (
    *_ACCURACIES,
    *_REWARDS,
    _HELD_OUT_REWARD,
    Panel(
        section="Responses",
        title="Response length",
        unit="tokens",
        series=_series(
            rollout__response_tokens="mean",
            rollout__trained_response_tokens="mean, trained on",
            rollout__response_tokens_p95="95th percentile",
            rollout__response_tokens_max="longest",
        ),
    ),
    Panel(
        section="Responses",
        title="Held-out response length",
        unit="tokens",
        series=(Series(key=r"eval/(.+)/response_tokens", label=r"\1"),),
    ),
    Panel(
        section="Responses",
        title="Truncated responses",
        unit="share",
        series=(
            *_series(rollout__truncated_frac="cut off at the limit"),
            Series(key=r"eval/(.+)/truncated_frac", label=r"held out: \1"),
        ),
    ),
    Panel(
        section="Responses",
        title="Responses without a verdict",
        unit="responses",
        quiet=True,
        series=_series(reward__lost="no verdict", reward__nonfinite="score not finite"),
    ),
    _BY_VERDICT,
    Panel(
        section="Dynamic sampling",
        title="Prompts and groups",
        unit="a step",
        series=_series(
            rollout__prompts="prompts drawn",
            rollout__trained_groups="kept, trained on",
            rollout__surplus_groups="beyond need",
            rollout__carried_groups="carried over",
        ),
    ),
    Panel(
        section="Dynamic sampling",
        title="Age of trained groups",
        unit="steps",
        quiet=True,
        series=_series(
            rollout__age_mean="oldest token, mean",
            rollout__age_p95="oldest token, 95th percentile",
            rollout__age_max="oldest token, largest",
            rollout__newest_age_mean="newest token, mean",
            rollout__newest_age_p95="newest token, 95th percentile",
            rollout__newest_age_max="newest token, largest",
        ),
        hidden=("rollout/newest_age_p95", "rollout/newest_age_max"),
        note="between the weights that drew a group's oldest or newest token and those that trained on it",
    ),
    Panel(
        section="Dynamic sampling",
        title="Tokens of earlier weights",
        unit="share",
        quiet=True,
        series=_series(
            rollout__earlier_tokens_frac="drawn by earlier weights",
            importance__ess_frac="effective sample size",
            importance__cut_frac="weight cut, or left out",
        ),
        note="of the tokens trained on; the last two are of their importance weights",
    ),
    Panel(
        section="Dynamic sampling",
        title="Importance weights",
        unit="",
        series=_series(importance__weight="mean", importance__weight_max="largest"),
        note="of the tokens trained on",
    ),
    Panel(
        section="Dynamic sampling",
        title="Waves",
        quiet=True,
        exact=True,
        unit="rounds of drawing",
        series=_series(rollout__waves="waves"),
    ),
    Panel(
        section="Dynamic sampling",
        title="Rounds",
        quiet=True,
        exact=True,
        unit="of rollouts in flight",
        series=_series(rollout__rounds="rounds"),
    ),
    _SCORES_DIFFER,
    Panel(section="Policy", title="Entropy", unit="nats a token", series=_series(policy__entropy="policy")),
    Panel(
        section="Policy",
        title="Probability of sampled tokens",
        unit="",
        series=_series(
            policy__sampled_prob="all tokens",
            policy__clipped_high_prob="clipped from above",
        ),
    ),
    Panel(
        section="Policy",
        title="Clipped tokens",
        unit="share",
        series=_series(
            policy__clip_high_frac="from above, A > 0",
            policy__clip_low_frac="from below, A < 0",
            policy__dual_clip_frac="by the dual clip",
        ),
    ),
    Panel(
        section="Policy",
        title="Change within a step",
        unit="nats",
        series=_series(policy__kl_old_k3="KL(old || new), k3", policy__kl_old_k1="KL(old || new), k1"),
    ),
    Panel(
        section="Policy",
        title="Distance from the reference",
        unit="nats",
        series=_series(policy__kl_ref_k3="KL, k3", policy__kl_ref_k1="KL, k1"),
    ),
    Panel(
        section="Policy",
        title="Ratio new / old",
        unit="",
        series=_series(policy__ratio_max="largest", policy__ratio="mean"),
    ),
    Panel(section="Updates", title="Loss", unit="", series=_series(update__loss="loss")),
    Panel(
        section="Updates",
        title="Gradient norm",
        unit="before clipping",
        series=_series(update__grad_norm="gradient norm"),
    ),
    Panel(
        section="Updates",
        title="Learning rate",
        unit="",
        exact=True,
        series=_series(update__learning_rate="learning rate"),
    ),
    Panel(
        section="Updates",
        title="Skipped updates",
        unit="share",
        quiet=True,
        exact=True,
        series=_series(update__skipped_frac="not finite, so skipped"),
    ),
    Panel(
        section="Updates",
        title="Not finite",
        unit="updates",
        quiet=True,
        exact=True,
        series=(Series(key=r"nonfinite/(.+)", label=r"\1"),),
    ),
    Panel(
        section="Updates",
        title="Watchdogs",
        unit="1: raised",
        quiet=True,
        exact=True,
        series=(Series(key=r"watchdog/(.+)", label=r"\1"),),
    ),
    Panel(
        section="Updates",
        title="Sampler against trainer",
        unit="nats",
        log=True,
        series=_series(
            sync__sampler_trainer_kl="KL(sampler || trainer)",
            sync__logprob_diff_mean="mean |difference|",
            sync__logprob_diff_max="largest |difference|",
        ),
        note="differences of log-probabilities; groups carried over were sampled with older weights",
    ),
    Panel(
        section="Time and memory",
        title="Time of a step",
        unit="s",
        stacked=True,
        series=(
            *_series(time__sample_s="sample", time__update_s="update"),
            Series(key=REST, label="rest, evaluation"),
        ),
    ),
    Panel(
        section="Time and memory",
        title="Throughput",
        unit="tokens/s",
        series=_series(
            speed__sampled_tokens_per_s="sampled, while sampling",
            speed__trained_tokens_per_s="trained on, while updating",
        ),
    ),
    Panel(
        section="Time and memory",
        title="Memory",
        unit="GiB",
        series=_series(
            memory__host_gib="host, the process",
            memory__device_gib="fullest device, after the step",
            memory__device_peak_gib="fullest device, at most so far",
        ),
    ),
)
"""In the order of the page. Keys are patterns that match a whole name."""

KNOWN = tuple(series for panel in (*PANELS, _BY_SCORE) for series in panel.series)
"""All that some panel is for, whether or not runs at hand need it."""


def panels_for(by_score: Collection[bool]) -> Sequence[Panel]:
    """`PANELS` as runs need them, of which each is judged by its scores or not.

    Rewards come first where some are; where all are, nothing counts right and wrong.
    """
    if not any(by_score):
        return PANELS
    rewards = (_HELD_OUT_REWARD, *_REWARDS)
    rest = [panel for panel in PANELS if panel not in (*_ACCURACIES, *rewards)]
    if not all(by_score):
        return (*rewards, *_ACCURACIES, *rest)
    rest.remove(_SCORES_DIFFER)  # it is in the one that takes the place of the verdicts'
    return (*rewards, *(_BY_SCORE if panel is _BY_VERDICT else panel for panel in rest))
