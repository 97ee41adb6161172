"""Rollouts to read: JSON lines for programs, plain text for a person."""

import math
from collections.abc import Mapping, Sequence
from os import PathLike
from types import MappingProxyType
from typing import Any

import numpy as np
from jaxtyping import Float

from dapo_jax.dapo.rollouts import Group, Rollout
from dapo_jax.storage import AnyPath, path_of
from dapo_jax.terminal import visible
from dapo_jax.trackers.json_lines import read_lines, write_lines

SCHEMA_VERSION = 1
"""Version of a line's keys; raised when a reader of the older ones could not use a line."""


def write_rollouts(
    folder: str | PathLike[str],
    step: int,
    groups: Sequence[Group],
    *,
    advantages: Float[np.ndarray, "..."] | None = None,
    ratios: Mapping[tuple[int, int], Float[np.ndarray, " response"] | None] = MappingProxyType({}),
) -> AnyPath:
    """Writes one line per rollout to FOLDER/step_000010.jsonl, whole or not at all, and returns its path.

    A file of the same step is replaced: a resumed run writes what it wrote before.

    Args:
        folder: usually RUN_DIR/rollouts; created if needed.
        step: names the file.
        groups: in the order they are to be read.
        advantages: one per rollout in the order of `groups`, flat or as [groups, group size].
        ratios: (ordinal, response index) -> pi / pi_old of each token in the update that trained on the rollout, None if its loss
            left it out; no entry for rollouts that were not trained on.

    Raises:
        ValueError: there are not as many advantages as rollouts.
        OSError: it cannot be written; the message names the file.
    """
    count = sum(len(group.rollouts) for group in groups)
    if advantages is not None and advantages.size != count:
        raise ValueError(
            f"{advantages.size} advantages for {count} rollouts in {len(groups)} groups; one per rollout is needed"
        )
    values = [None] * count if advantages is None else advantages.reshape(-1).tolist()
    rows = [
        _row(step, group, index, rollout) | _in_update(ratios, (group.prompt.ordinal, index))
        for group in groups
        for index, rollout in enumerate(group.rollouts)
    ]
    path = path_of(folder) / f"step_{step:06d}.jsonl"
    write_lines(
        path,
        [row | {"advantage": _rounded(value)} for row, value in zip(rows, values, strict=True)],
        what="rollouts",
    )
    return path


def read_rollouts(path: str | PathLike[str]) -> list[dict[str, Any]]:
    """The lines of a file that `write_rollouts` wrote, in order.

    Raises:
        ValueError: a line is not a rollout, or is of a newer version; the message names file and line number.
    """
    return read_lines(path_of(path), what="a rollout", version=SCHEMA_VERSION, needs="response")


def format_rollouts(groups: Sequence[Group], limit: int, *, metric: str = "correct") -> str:
    """Up to `limit` rollouts as text: each group's question and answer, then its responses with their verdicts, or with the `metric`
    score their scores.

    Characters that a terminal would obey are written out, so that it may be printed.
    """
    parts: list[str] = []
    shown = 0
    for group in groups:
        if shown >= limit:
            break
        correct = sum(rollout.correct for rollout in group.rollouts)
        found = f"{correct}/{len(group.rollouts)} correct, " if metric == "correct" else ""
        parts.append(f"prompt {group.prompt.ordinal}: {found}mean reward {group.rewards.mean():+.3g}")
        parts.append(_indented(group.prompt.text))
        parts.append(f"  answer: {group.prompt.answer}")
        for index, rollout in enumerate(group.rollouts[: limit - shown]):
            parts.append(f"  [{index}] {_summary(rollout, metric)}")
            parts.append(_indented(rollout.text, "      "))
            shown += 1
        parts.append("")
    if hidden := sum(len(group.rollouts) for group in groups) - shown:
        parts.append(f"({hidden} more rollouts)")
    return visible("\n".join(parts).rstrip("\n") + "\n")


def _row(step: int, group: Group, index: int, rollout: Rollout) -> dict[str, Any]:
    """The line of one rollout; reading order first, long lists last."""
    return {
        "schema_version": SCHEMA_VERSION,
        "step": step,
        "ordinal": group.prompt.ordinal,
        "index": index,
        "prompt": group.prompt.text,
        "answer": group.prompt.answer,
        "response": rollout.text,
        "correct": rollout.correct,
        "extracted": rollout.verdict.extracted,
        "reason": rollout.verdict.reason,
        "score": _rounded(rollout.verdict.score),
        "reward": _rounded(rollout.reward),
        "overlong_penalty": _rounded(rollout.overlong_penalty),
        "response_tokens": rollout.response_tokens,
        "finish_reason": rollout.response.finish_reason,
        "spans": [list(span) for span in rollout.response.spans],
        **_of_turns(rollout),
        "row": dict(group.prompt.row),
        "prompt_token_ids": group.prompt.tokens.tolist(),
        "response_token_ids": rollout.response.tokens.tolist(),
        "logprobs": [_rounded(value) for value in rollout.response.logprobs.tolist()],
    }


def _of_turns(rollout: Rollout) -> dict[str, Any]:
    """The turns of an episode as [first token, token behind the last], and what each was worth."""
    if not rollout.response.turns:
        return {}
    return {
        "turns": [list(turn) for turn in rollout.response.turns],
        "turn_rewards": [_rounded(reward) for reward in rollout.verdict.turn_rewards],
        **({"contexts": [list(one) for one in contexts]} if (contexts := rollout.response.contexts) else {}),
    }


def _in_update(
    ratios: Mapping[tuple[int, int], Float[np.ndarray, " response"] | None], rollout: tuple[int, int]
) -> dict[str, Any]:
    """The part of a rollout in training: `in_loss` is null if it was not trained on."""
    found = ratios.get(rollout)
    return {
        "in_loss": found is not None if rollout in ratios else None,
        "ratios": None if found is None else [_rounded(value) for value in found.tolist()],
    }


def _rounded(value: float | None) -> float | None:
    """Six decimals are more than a reader needs; JSON has no nan and no infinity, so those become null."""
    return round(float(value), 6) if value is not None and math.isfinite(value) else None


def _summary(rollout: Rollout, metric: str) -> str:
    verdict, by_score = rollout.verdict, metric == "score" and rollout.verdict.score is not None
    judged = f"score {verdict.score:+.3g}" if by_score else "correct" if verdict.correct else "wrong"
    words = [judged, f"reward {rollout.reward:+.3g}"]
    if rollout.overlong_penalty:
        words.append(f"overlong penalty {rollout.overlong_penalty:+.2f}")
    words.append(f"{rollout.response_tokens} tokens{', cut off' if rollout.truncated else ''}")
    if verdict.extracted is not None or not by_score:
        words.append("no answer found" if verdict.extracted is None else f"extracted {verdict.extracted!r}")
    if verdict.reason:
        words.append(verdict.reason)
    return " | ".join(words)


def _indented(text: str, by: str = "  ") -> str:
    return "\n".join(by + line for line in text.split("\n"))
