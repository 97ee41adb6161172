"""Scores of a policy on held-out prompts: avg@k, pass@j, cons@k and the reward. Each score is a mean over problems, with its standard error.

A problem is one held-out prompt with all its graded responses. `problem_scores` computes the scores of a problem, and `summarize` averages
them. `problem_record` returns a log record of a problem, and `table` formats averages.
"""

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import multimode
from typing import Any

import numpy as np

from dapo_jax.dapo.rollouts import Group, Rollout

_KEY = re.compile(r"eval/(.+)/([^/]+)")
_COUNTED = re.compile(r"(avg|pass|cons)@(\d+)")


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Returns the probability that k of the n samples, chosen without replacement, include a correct sample: 1 - C(n - c, k) / C(n, k).

    This is an unbiased estimate of the probability for k new samples (Chen et al. 2021, "Evaluating Large Language Models Trained on Code").

    Raises:
        ValueError: the arguments are inconsistent, for example k is larger than the number of samples.

    >>> pass_at_k(4, 1, 2), pass_at_k(4, 0, 4), pass_at_k(4, 3, 2)
    (0.5, 0.0, 1.0)
    """
    if not 0 <= correct <= samples or not 1 <= k <= samples:
        raise ValueError(f"need 0 <= correct <= samples and 1 <= k <= samples: {correct=}, {samples=}, {k=}")
    return 1.0 - math.comb(samples - correct, k) / math.comb(samples, k)


def consensus_answers(group: Group) -> list[str]:
    """Returns the most frequent extracted answer, or several answers if they are equally frequent, in the order of their first occurrence.

    Responses without an answer, or with an empty one, do not vote, so without any answer the list is empty. Answers are compared as strings: 1/2 and 0.5 are
    different votes, even if the grader accepts both.
    """
    return multimode(r.verdict.extracted for r in group.rollouts if r.verdict.extracted)


def consensus(group: Group) -> float:
    """Returns 1 if the most frequent extracted answer (see `consensus_answers`) is correct, otherwise 0.

    If several answers are equally frequent, returns the fraction of them that is correct. This is the probability that a random choice
    among them is correct.
    """
    leaders = consensus_answers(group)
    right = {rollout.verdict.extracted for rollout in group.rollouts if rollout.correct}
    return sum(answer in right for answer in leaders) / len(leaders) if leaders else 0.0


def problem_scores(group: Group) -> dict[str, float]:
    """Returns `avg@k`, `pass@j`, `cons@k` and `reward` of one problem with k responses.

    There is one `pass@j` for j = k and for each power of two from 2 up to k. pass@1 is omitted except for k = 1, because it equals avg@k.
    The reward is the mean over the responses, without the overlong penalty.
    """
    k = len(group.rollouts)
    correct = sum(rollout.correct for rollout in group.rollouts)
    draws = [*(2**power for power in range(1, (k - 1).bit_length())), k]
    return {
        f"avg@{k}": group.accuracy,
        **{f"pass@{j}": pass_at_k(k, correct, j) for j in draws},
        f"cons@{k}": consensus(group),
        "reward": float(np.mean([rollout.reward - rollout.overlong_penalty for rollout in group.rollouts])),
    }


def summarize(groups: Sequence[Group], *, name: str) -> dict[str, float]:
    """Returns the metrics of one evaluation, with names `eval/NAME/...`.

    `avg@k`, `pass@j`, `cons@k` and `reward` are means of `problem_scores` over problems. The same names with the suffix `_stderr` are their
    standard errors, which are NaN for a single problem. `response_tokens` and `truncated_frac` are means over responses, and `problems` is the
    number of problems. `cons@k` is omitted if no response has an extracted answer, for example if a reward function returns only a bool.

    Raises:
        ValueError: there are no groups, or their sizes differ.
    """
    sizes = {len(group.rollouts) for group in groups}
    if len(sizes) != 1:
        raise ValueError(f"evaluation needs groups of the same size, got sizes {sorted(sizes)}")
    problems = [problem_scores(group) for group in groups]
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    voted = any(rollout.verdict.extracted for rollout in rollouts)
    keys = [key for key in problems[0] if voted or not key.startswith("cons@")]
    per_problem = {key: [scores[key] for scores in problems] for key in keys}
    metrics = {
        **{key: float(np.mean(values)) for key, values in per_problem.items()},
        **{f"{key}_stderr": _standard_error(values) for key, values in per_problem.items()},
        "response_tokens": float(np.mean([rollout.response_tokens for rollout in rollouts])),
        "truncated_frac": float(np.mean([rollout.truncated for rollout in rollouts])),
        "problems": float(len(groups)),
    }
    return {f"eval/{name}/{key}": value for key, value in metrics.items()}


def lost_verdicts(groups: Sequence[Group]) -> str:
    """Returns a message with the number of responses without a verdict, and the first reason. It is empty if all responses have a verdict."""
    lost = [rollout.verdict for group in groups for rollout in group.rollouts if rollout.verdict.lost]
    if not lost:
        return ""
    count = sum(len(group.rollouts) for group in groups)
    return f"{len(lost)} of {count} responses got no verdict and count as wrong: {lost[0].reason or lost[0].lost}"


LOGGED_RESPONSES = 64
"""Number of responses that an evaluation logs per held-out dataset."""


def responses_kept(problems: int, responses: int = LOGGED_RESPONSES) -> list[int]:
    """Distributes `responses` evenly over the problems. Returns the number of responses to log for each problem.

    >>> responses_kept(3, 7), responses_kept(3, 2)
    ([3, 2, 2], [1, 1, 0])
    """
    share, more = divmod(responses, max(problems, 1))
    return [share + (index < more) for index in range(problems)]


def problem_record(group: Group, responses: int = 0) -> dict[str, Any]:
    """Returns a log record of one problem as JSON-serializable values: its scores, and the data from which they are computed.

    In the record, `place` is the index of the row in its file, if known. `extracted` lists the extracted answers (null if missing), most frequent first,
    each with its number of responses and of correct responses. `responses` contains the first few responses and their verdicts; the argument sets the number.
    """
    rollouts = group.rollouts
    answers = Counter(rollout.verdict.extracted for rollout in rollouts)
    right = Counter(rollout.verdict.extracted for rollout in rollouts if rollout.correct)
    return {
        "ordinal": group.prompt.ordinal,
        "place": group.prompt.row.get("source_row"),
        "prompt": group.prompt.text,
        "answer": group.prompt.answer,
        "samples": len(rollouts),
        "correct": sum(rollout.correct for rollout in rollouts),
        **problem_scores(group),
        "consensus_answers": consensus_answers(group),
        "extracted": [
            {"answer": answer, "count": count, "correct": right[answer]}
            for answer, count in answers.most_common()
        ],
        "response_tokens": float(np.mean([rollout.response_tokens for rollout in rollouts])),
        "truncated": sum(rollout.truncated for rollout in rollouts),
        "lost": sum(bool(rollout.verdict.lost) for rollout in rollouts),
        "responses": [_response_record(rollout) for rollout in rollouts[:responses]],
    }


def _response_record(rollout: Rollout) -> dict[str, Any]:
    verdict, score = rollout.verdict, rollout.verdict.score
    return {
        "response": rollout.text,
        "correct": rollout.correct,
        "extracted": verdict.extracted,
        "reason": verdict.reason,
        "score": float(score) if score is not None and math.isfinite(score) else None,
        "response_tokens": rollout.response_tokens,
        "finish_reason": rollout.response.finish_reason,
    }


def table(scores: Mapping[str, float | int | None], *, metric: str = "correct") -> str:
    """Formats the metrics of one or several evaluations as a text table, with one row per dataset and scores such as `0.434 ± 0.071`.

    A missing score, for example because datasets have different k, is shown as a dash. A missing standard error is omitted.

    Args:
        scores: results of `summarize`, merged if there are several datasets, or a line of metrics.jsonl. Other metrics are ignored.
        metric: value of `dynamic_sampling.metric`. With `score`, only the reward is shown, because then responses are not rated as correct or wrong.

    Raises:
        ValueError: the metrics contain no evaluation scores.
    """
    datasets: dict[str, dict[str, float | int | None]] = {}
    for key, value in scores.items():
        if match := _KEY.fullmatch(key):
            datasets.setdefault(match[1], {})[match[2]] = value
    counted = {key for metrics in datasets.values() for key in metrics if _COUNTED.fullmatch(key)}
    if not counted:
        raise ValueError(
            f"none of the {len(scores)} metrics is an evaluation score such as eval/NAME/avg@8; pass the result of `summarize`"
        )
    kinds = ("avg", "pass", "cons")
    by_kind = sorted(counted, key=lambda key: (kinds.index(key.split("@")[0]), int(key.split("@")[1])))
    columns = [] if metric == "score" else by_kind
    if any("reward" in metrics for metrics in datasets.values()):
        columns.append("reward")
    rows = [["dataset", *columns, "tokens", "truncated", "problems"]]
    digits = {"response_tokens": 1, "truncated_frac": 3, "problems": 0}
    for name, metrics in datasets.items():
        scored = [score_text(metrics.get(key), metrics.get(f"{key}_stderr")) for key in columns]
        rows.append([name, *scored, *(_decimal(metrics.get(key), digits[key]) for key in digits)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    # Names and scores are left-aligned, and the last three columns are right-aligned.
    sides = [str.ljust] * (len(columns) + 1) + [str.rjust] * 3
    return "".join(
        "  ".join(side(cell, width) for side, cell, width in zip(sides, row, widths, strict=True)) + "\n"
        for row in rows
    )


def _standard_error(values: Sequence[float]) -> float:
    """Returns the standard error of the mean of independent values: their standard deviation (with n - 1) divided by sqrt(n)."""
    return float(np.std(values, ddof=1) / math.sqrt(len(values))) if len(values) > 1 else math.nan


def score_text(value: float | int | None, error: float | int | None) -> str:
    """Formats a score with its standard error, if there is one: `0.434 ± 0.071`."""
    shown = _decimal(error, 3)
    return _decimal(value, 3) + (f" ± {shown}" if shown != "-" else "")


def _decimal(value: float | int | None, digits: int) -> str:
    return f"{value:.{digits}f}" if value is not None and math.isfinite(value) else "-"
