"""Which curves are drawn together, in the page and in PNGs alike. A panel of which no run has a metric is not there."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from dapo_jax.report.tables import REST, Table


@dataclass(frozen=True, kw_only=True)
class Series:
    """One line, or one layer of a stack."""

    key: str
    """The metric's name, in `PANELS` a pattern of it."""
    label: str
    """What it is called; in `PANELS` it may have groups of the pattern, as `\\1`."""
    band: str = ""
    """The metric with its standard error, drawn as a band; in `PANELS` as `label`."""


@dataclass(frozen=True, kw_only=True)
class Panel:
    """Curves that share their axes."""

    section: str
    title: str
    unit: str
    """Of the vertical axis; `share` is drawn in percent."""
    series: tuple[Series, ...]
    stacked: bool = False
    log: bool = False
    """A logarithmic axis."""
    note: str = ""
    """What one must know to read it."""
    hidden: tuple[str, ...] = ()
    """Keys that are drawn only when asked for."""
    quiet: bool = False
    """Left out where all its values are 0."""


def _series(**labels: str) -> tuple[Series, ...]:
    return tuple(Series(key=name.replace("__", "/"), label=label) for name, label in labels.items())


_HELD_OUT = tuple(
    Series(key=rf"eval/(.+)/({kind}@\d+)", label=r"\2 \1", band=r"eval/\1/\2_stderr")
    for kind in ("avg", "pass", "cons")
)

PANELS = (
    Panel(
        section="Learning",
        title="Held-out accuracy",
        unit="share",
        series=_HELD_OUT,
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
        title="Truncated responses",
        unit="share",
        series=_series(rollout__truncated_frac="cut off at the limit"),
    ),
    Panel(
        section="Responses",
        title="Responses without a verdict",
        unit="responses",
        quiet=True,
        series=_series(reward__lost="no verdict", reward__nonfinite="score not finite"),
    ),
    Panel(
        section="Dynamic sampling",
        title="Groups sampled",
        unit="share",
        stacked=True,
        series=_series(
            rollout__mixed_frac="mixed",
            rollout__all_correct_frac="all correct",
            rollout__all_wrong_frac="all wrong",
        ),
    ),
    Panel(
        section="Dynamic sampling",
        title="Prompts drawn and groups kept",
        unit="groups",
        series=_series(
            rollout__prompts="prompts drawn",
            rollout__trained_groups="kept, trained on",
            rollout__surplus_groups="mixed beyond need",
            rollout__carried_groups="carried over",
        ),
    ),
    Panel(
        section="Dynamic sampling",
        title="Waves",
        unit="rounds of drawing",
        series=_series(rollout__waves="waves"),
    ),
    Panel(section="Policy", title="Entropy", unit="nats a token", series=_series(policy__entropy="policy")),
    Panel(
        section="Policy",
        title="Probability of sampled tokens",
        unit="probability",
        series=_series(
            policy__sampled_prob="all tokens",
            policy__clipped_high_prob="tokens clipped from above",
        ),
    ),
    Panel(
        section="Policy",
        title="Clipped tokens",
        unit="share",
        series=_series(
            policy__clip_high_frac="from above (A > 0)",
            policy__clip_low_frac="from below (A < 0)",
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
        series=_series(update__learning_rate="learning rate"),
    ),
    Panel(
        section="Updates",
        title="Skipped updates",
        unit="share",
        quiet=True,
        series=_series(update__skipped_frac="not finite, so skipped"),
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
        section="Time",
        title="Time of a step",
        unit="s",
        stacked=True,
        series=(
            *_series(time__sample_s="sample", time__update_s="update"),
            Series(key=REST, label="rest, with evaluation"),
        ),
    ),
    Panel(
        section="Time",
        title="Throughput",
        unit="tokens/s",
        series=_series(
            speed__sampled_tokens_per_s="sampled, while sampling",
            speed__trained_tokens_per_s="trained on, while updating",
        ),
    ),
)
"""In the order of the page. Keys are patterns that match a whole name."""

OTHER = "Other metrics"
"""The section of what `PANELS` do not name."""

_PARTS = re.compile(r"eval/.+_stderr|time/(?:step|eval)_s")
"""What is drawn as a part of something else."""


def panels_of(tables: Sequence[Table]) -> tuple[list[Panel], list[str]]:
    """The panels that these runs fill, with the names of their metrics in place of patterns; and the titles of quiet ones."""
    names = list(dict.fromkeys(name for table in tables for name in table.columns))
    found, zero, used = [], [], set[str]()
    for panel in PANELS:
        series = tuple(_matching(panel.series, names))
        used |= {each.key for each in series}
        if panel.quiet and series and not any(_any(table, each.key) for table in tables for each in series):
            zero.append(panel.title)
        elif series:
            found.append(_with(panel, series))
    left = [name for name in names if name not in used and not _PARTS.fullmatch(name)]
    others = [
        Panel(section=OTHER, title=name, unit="", series=(Series(key=name, label=name),))
        for name in sorted(left)
    ]
    return found + others, zero


def _any(table: Table, key: str) -> bool:
    """True if a metric is ever not 0."""
    return any(table.columns.get(key, ()))


def _matching(patterns: Sequence[Series], names: Sequence[str]) -> Iterator[Series]:
    for pattern in patterns:
        for name in names:
            if match := re.fullmatch(pattern.key, name):
                band = match.expand(pattern.band)
                yield Series(key=name, label=match.expand(pattern.label), band=band if band in names else "")


def _with(panel: Panel, series: tuple[Series, ...]) -> Panel:
    """Of one dataset alone the name says nothing; of pass@2, pass@4, ... only the last is drawn at first."""
    if panel.series is not _HELD_OUT:
        return replace(panel, series=series)
    datasets = {each.key.split("/", 1)[1].rpartition("/")[0] for each in series}
    if len(datasets) == 1:
        only = f" {datasets.pop()}"
        series = tuple(
            Series(key=each.key, label=each.label.removesuffix(only), band=each.band) for each in series
        )
    most: dict[str, Series] = {}
    for each in series:
        kind = each.key.rpartition("@")[0]
        if kind not in most or _count(each) > _count(most[kind]):
            most[kind] = each
    shown = {each.key for kind, each in most.items() if "cons" not in kind.rpartition("/")[2]}
    hidden = tuple(each.key for each in series if each.key not in shown)
    return replace(panel, series=series, hidden=hidden)


def _count(series: Series) -> int:
    return int(series.key.rpartition("@")[2])
