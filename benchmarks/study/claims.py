"""The paper's claims about each technique, which were fixed before the runs were made, and the paired tests of these claims."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from benchmarks.study.curves import Run, accuracy_at_tokens, final_accuracy, late, mean_accuracy
from benchmarks.study.ladder import LAST


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A claim about one measure, which compares `row` with `before`, for example the row above it."""

    technique: str
    row: str
    before: str
    measure: str
    of: Callable[[Run], float]
    up: bool
    """True if the paper claims that the technique raises the measure, False if it lowers the measure."""
    primary: bool = False
    """True for each technique's claim about held-out accuracy after equal updates. Holm's method corrects these claims for their number."""
    source: str
    """The section, figure or table that contains the claim."""


def _of_technique(
    technique: str,
    row: str,
    before: str,
    source: str,
    *more: tuple[str, Callable[[Run], float], bool, str],
) -> list[Claim]:
    accuracy = (
        ("accuracy, equal updates", final_accuracy, True, source),
        ("accuracy, equal tokens", accuracy_at_tokens, True, source),
        ("accuracy, mean of the run", mean_accuracy, True, source),
    )
    return [
        Claim(
            technique=technique,
            row=row,
            before=before,
            measure=measure,
            of=of,
            up=up,
            primary=of is final_accuracy,
            source=place,
        )
        for measure, of, up, place in (*accuracy, *more)
    ]


CLAIMS = (
    *_of_technique("overlong filtering", "overlong_filtering", "grpo", "Fig. 5, Table 1"),
    *_of_technique(
        "clip-higher",
        "clip_higher",
        "overlong_filtering",
        "Fig. 2a, Table 1",
        ("late entropy", late("policy/entropy"), True, "Fig. 2b"),
    ),
    *_of_technique(
        "soft overlong punishment",
        "soft_punishment",
        "clip_higher",
        "Table 1",
        ("late truncated share", late("rollout/truncated_frac"), False, "Section 3.4"),
    ),
    *_of_technique(
        "token-level loss",
        "token_level",
        "soft_punishment",
        "Table 1",
        ("late entropy", late("policy/entropy"), False, "Fig. 4a"),
        ("late response tokens", late("rollout/response_tokens"), False, "Fig. 4b"),
    ),
    *_of_technique("dynamic sampling", "dynamic_sampling", "token_level", "Fig. 6, Table 1"),
)


IN_FLIGHT = tuple(
    Claim(
        technique="rollouts in flight",
        row="in_flight",
        before=before,
        measure=f"{measure}, against {against}",
        of=of,
        up=True,
        primary=primary,
        source="benchmarks/study/README.md",
    )
    for before, against, measure, of, primary in (
        ("token_level", "no dynamic sampling", "accuracy, equal tokens", accuracy_at_tokens, True),
        ("dynamic_sampling", "waves", "accuracy, equal tokens", accuracy_at_tokens, True),
        ("dynamic_sampling", "waves", "accuracy, equal updates", final_accuracy, False),
    )
)
"""Tests whether dynamic sampling is worth its cost with rollouts in flight, where nothing is discarded."""


QUESTIONS = tuple(
    Claim(
        technique="no upper clip",
        row="no_upper_clip",
        before="overlong_filtering",
        measure=measure,
        of=of,
        up=True,
        source="Section 3.1",
    )
    for measure, of in (
        ("accuracy, equal updates", final_accuracy),
        ("accuracy, mean of the run", mean_accuracy),
        ("late entropy", late("policy/entropy")),
    )
)
"""The claims about the row without an upper clip."""


REMOVED = tuple(
    Claim(
        technique=f"without {technique}",
        row=row,
        before=LAST,
        measure=measure,
        of=of,
        up=up,
        primary=of is final_accuracy,
        source=source,
    )
    for technique, row, *more in (
        ("overlong filtering", "no_overlong_filtering"),
        ("clip-higher", "no_clip_higher", ("late entropy", late("policy/entropy"), False, "Fig. 2b")),
        (
            "soft overlong punishment",
            "no_soft_punishment",
            ("late truncated share", late("rollout/truncated_frac"), True, "Section 3.4"),
        ),
        (
            "token-level loss",
            "no_token_level",
            ("late response tokens", late("rollout/response_tokens"), True, "Fig. 4b"),
        ),
        ("dynamic sampling", "token_level"),
    )
    for measure, of, up, source in (
        ("accuracy, equal updates", final_accuracy, False, "Table 1"),
        ("accuracy, mean of the run", mean_accuracy, False, "Table 1"),
        *more,
    )
)
"""The claims about rows without one technique, which are compared with all of DAPO."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The result of a paired comparison over seeds."""

    claim: Claim
    before: float
    after: float
    difference: float
    """Mean over seeds of `row` minus `before`. `low` and `high` are its 95% interval by Student's t."""
    low: float
    high: float
    effect: float
    """The mean difference divided by the standard deviation of the differences (Cohen's d for paired samples)."""
    p: float
    """Exact two-sided p-value: the share of all ways to flip the differences' signs for which the mean is at least as far from 0."""
    corrected_p: float
    """For a primary claim, `p` corrected by Holm's method; otherwise `p`."""

    @property
    def words(self) -> str:
        """Whether the claim holds in this study, at the 5% level."""
        if self.corrected_p >= 0.05:
            return "undecided"
        return "holds" if (self.difference > 0) == self.claim.up else "the opposite"


def judge(
    runs: dict[tuple[str, int], Run], seeds: Sequence[int], claims: Sequence[Claim] = CLAIMS
) -> list[Verdict]:
    """Tests every claim by comparing its two rows over the same seeds."""
    pairs = [
        (
            np.array([claim.of(runs[claim.before, seed]) for seed in seeds]),
            np.array([claim.of(runs[claim.row, seed]) for seed in seeds]),
        )
        for claim in claims
    ]
    p = [sign_flip_p(after - before) for before, after in pairs]
    primary = [index for index, claim in enumerate(claims) if claim.primary]
    corrected = dict(zip(primary, holm([p[index] for index in primary]), strict=True))
    return [
        _verdict(claim, before, after, p[index], corrected.get(index, p[index]))
        for index, (claim, (before, after)) in enumerate(zip(claims, pairs, strict=True))
    ]


def _verdict(claim: Claim, before: np.ndarray, after: np.ndarray, p: float, corrected: float) -> Verdict:
    differences = after - before
    mean, deviation, count = differences.mean(), differences.std(ddof=1), len(differences)
    reach = stats.t.ppf(0.975, count - 1) * deviation / np.sqrt(count)
    return Verdict(
        claim=claim,
        before=float(before.mean()),
        after=float(after.mean()),
        difference=float(mean),
        low=float(mean - reach),
        high=float(mean + reach),
        effect=float(mean / deviation) if deviation > 0 else float("nan"),
        p=p,
        corrected_p=corrected,
    )


def sign_flip_p(differences: np.ndarray) -> float:
    """Returns the p-value of the two-sided sign-flip test for a mean of 0, over all 2^n flips. The smallest possible value is 2 / 2^n.

    >>> sign_flip_p(np.array([1.0, 2.0, 3.0]))  # 2 of 8
    0.25
    """
    flips = np.array(list(itertools.product((1.0, -1.0), repeat=len(differences))))
    means = np.abs(flips @ differences)
    return float(np.mean(means >= means[0] - 1e-12))


def holm(p: Sequence[float]) -> list[float]:
    """Corrects n p-values by Holm's method: multiplies the smallest by n, the next by n - 1, and so on, without changing their order.

    >>> holm([0.04, 0.01])
    [0.04, 0.02]
    """
    order = np.argsort(p)
    raised = np.maximum.accumulate([p[index] * (len(p) - place) for place, index in enumerate(order)])
    found = np.empty(len(p))
    found[order] = np.minimum(raised, 1.0)
    return found.tolist()
