"""Writes and reads a run's logs: rollouts, evaluated problems, and post-mortems of skipped updates.

A post-mortem is a folder that contains:

report.json         the values that were not finite, and their positions; written last, so a folder without this file is incomplete
arrays.safetensors  the update's microbatches, as on the device; for example, 0/tokens is stack 0's array of shape [microbatches, rows, tokens]
step_*.jsonl        the update's responses, in the format of RUN/rollouts
config.yaml         the run's configuration
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from types import MappingProxyType
from typing import Any, TypeAlias
from urllib.parse import quote

import numpy as np
from jaxtyping import Float, Int
from safetensors.numpy import load, save

from dapo_jax.dapo.rollouts import Group, Rollout
from dapo_jax.rewards.grading import NOT_GRADED
from dapo_jax.storage import AnyPath, file_bytes, path_of, write_whole
from dapo_jax.terminal import visible
from dapo_jax.trackers.json_lines import SCHEMA_VERSION, read_lines, write_lines

Decode: TypeAlias = Callable[[Int[np.ndarray, " tokens"]], str]

LOGGED_GROUPS = 4
"""Number of groups per step whose rollouts are written."""


def write_rollouts(
    folder: str | PathLike[str],
    step: int,
    groups: Sequence[Group],
    *,
    advantages: Float[np.ndarray, "..."] | None = None,
    ratios: Mapping[tuple[int, int], Float[np.ndarray, " response"] | None] = MappingProxyType({}),
) -> AnyPath:
    """Writes one line per rollout to a file such as FOLDER/step_000010.jsonl, atomically, and returns the path.

    An existing file of the same step is replaced, because a resumed run may repeat the step.

    Args:
        folder: usually RUN_DIR/rollouts; created if needed.
        step: the step, which is part of the file name.
        groups: the groups to write, in this order.
        advantages: one per rollout in the order of `groups`, flat or as [groups, group size]; NaN for rollouts that were not trained on.
        ratios: (ordinal, response index) -> pi / pi_old of each token in the update that trained on the rollout, or None if the
            rollout was excluded from the loss. Rollouts that were not trained on have no entry.

    Raises:
        ValueError: the number of advantages differs from the number of rollouts.
        OSError: the file cannot be written; the message names the file.
    """
    found = [(group, index, rollout) for group in groups for index, rollout in group.indexed]
    values = [None] * len(found) if advantages is None else advantages.reshape(-1).tolist()
    pairs = zip(found, values, strict=True)
    rows = [{**_row(step, *each, ratios), "advantage": _rounded(value)} for each, value in pairs]
    path = path_of(folder) / f"step_{step:06d}.jsonl"
    write_lines(path, rows, what="rollouts")
    return path


def read_rollouts(path: str | PathLike[str]) -> list[dict[str, Any]]:
    """Returns the lines of a file that `write_rollouts` wrote, in order.

    Raises:
        ValueError: a line is not a rollout; the message names the file and the line.
    """
    return read_lines(path_of(path), what="a rollout", needs="response")


def write_problems(
    folder: str | PathLike[str], problems: Iterable[Mapping[str, Any]], *, name: str, step: int
) -> AnyPath:
    """Writes one line per evaluated problem to FOLDER/NAME.jsonl, atomically, and returns the path.

    In the file name, all characters except letters, digits and `_.-~` are percent-encoded. For example, `hf:ORG/NAME` becomes
    hf%3AORG%2FNAME.jsonl. An existing file is replaced.

    Args:
        folder: usually RUN_DIR/evaluations/step_000010; created if needed.
        problems: one `dapo_jax.evaluation.problem_record` per problem, in this order.
        name: the dataset's name.
        step: number of training steps before the evaluation. It is 0 before training and outside a run.

    Raises:
        OSError: the file cannot be written; the message names the file.
    """
    path = path_of(folder) / f"{quote(name, safe='')}.jsonl"
    head = {"schema_version": SCHEMA_VERSION, "step": step, "dataset": name}
    write_lines(path, [{**head, **problem} for problem in problems], what="the problems of an evaluation")
    return path


def read_problems(path: str | PathLike[str]) -> list[dict[str, Any]]:
    """Returns the lines of a file that `write_problems` wrote, in order.

    Raises:
        ValueError: a line is not a problem; the message names the file and the line.
    """
    return read_lines(path_of(path), what="a problem", needs="samples")


@dataclass(frozen=True, kw_only=True)
class PostMortem:
    """The post-mortem of one skipped update."""

    report: dict[str, Any]
    stacks: list[dict[str, np.ndarray]]
    """One dict of arrays per row length, with the field names of `dapo_jax.dapo.microbatch.Microbatch` as keys."""
    rollouts: list[dict[str, Any]]


def write_post_mortem(
    folder: AnyPath,
    *,
    report: Mapping[str, Any],
    stacks: Sequence[Mapping[str, np.ndarray]],
    groups: Sequence[Group],
    config: str,
) -> None:
    """Writes a post-mortem, replacing an existing one.

    `report` has JSON-serializable values and must contain `step`. `stacks` has one dict of arrays per row length. `groups` are the groups
    that the update trained on, and `config` is the run's configuration as YAML.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_rollouts(folder, report["step"], groups)
    write_whole(folder / "config.yaml", config.encode())
    arrays = {
        f"{index}/{name}": np.ascontiguousarray(array)
        for index, stack in enumerate(stacks)
        for name, array in stack.items()
    }
    write_whole(folder / "arrays.safetensors", save(arrays))
    whole = {"schema_version": SCHEMA_VERSION, **report}
    write_whole(folder / "report.json", json.dumps(whole, indent=1, allow_nan=False).encode())


def read_post_mortem(folder: str | PathLike[str]) -> PostMortem:
    """Reads a folder that `write_post_mortem` wrote.

    Raises:
        ValueError: the post-mortem is missing or incomplete.
    """
    place = path_of(folder)
    if not (place / "report.json").exists():
        raise ValueError(f"{place} has no report.json: it is not a post-mortem, or it is incomplete")
    report = json.loads(file_bytes(place / "report.json"))
    stacks: dict[int, dict[str, np.ndarray]] = {}
    for key, array in load(file_bytes(place / "arrays.safetensors")).items():
        index, _, name = key.partition("/")
        stacks.setdefault(int(index), {})[name] = array
    return PostMortem(
        report=report,
        stacks=[stacks[index] for index in sorted(stacks)],
        rollouts=read_rollouts(place / f"step_{report['step']:06d}.jsonl"),
    )


def format_rollouts(groups: Sequence[Group], *, metric: str = "correct", decode: Decode | None = None) -> str:
    """Formats rollouts as text: each group's question and answer, followed by its responses with their verdicts, or with
    their scores if `metric` is `score`. Control characters are escaped.

    If `decode` is given, each turn of an episode begins a new line, and each line of the environment begins with a `>`.
    """
    parts: list[str] = []
    for group in groups:
        correct = sum(rollout.correct for rollout in group.rollouts)
        counted = f"{correct}/{len(group.rollouts)} correct, " if metric == "correct" else ""
        graded = any(rollout.verdict != NOT_GRADED for rollout in group.rollouts)
        found = f"{counted}mean reward {group.rewards.mean():+.3g}" if graded else "not graded"
        parts.append(f"prompt {group.prompt.ordinal}: {found}")
        parts.append(_indented(group.prompt.text))
        parts.append(f"  answer: {group.prompt.answer}")
        for index, rollout in group.indexed:
            parts.append(f"  [{index}] {_summary(rollout, metric)}")
            text = [_indented(rollout.text, "      ")]
            parts += _turns(rollout, decode) if decode and rollout.response.turns else text
        parts.append("")
    return visible("\n".join(parts).rstrip("\n") + "\n")


def _turns(rollout: Rollout, decode: Decode) -> Iterator[str]:
    """Yields the text of each turn of an episode, and the environment's text between the turns."""
    done, tokens = 0, rollout.response.tokens
    for first, stop in rollout.response.turns:
        yield from [_indented(decode(tokens[done:first]), "      > ")] * (first > done)
        yield _indented(decode(tokens[first:stop]), "      ")
        done = stop


def _row(
    step: int,
    group: Group,
    index: int,
    rollout: Rollout,
    ratios: Mapping[tuple[int, int], Float[np.ndarray, " response"] | None],
) -> dict[str, Any]:
    """Returns one rollout's log line as a dict, in which long lists come last.

    `in_loss` is null if the rollout was not trained on. Only episodes have `turns`, `turn_rewards`, `contexts` and `forgotten`. Each turn is given as
    [first token, end). `forgotten` has the numbers of the turns outside the loss.
    """
    found, response, turns = ratios.get(key := (group.prompt.ordinal, index)), rollout.response, {}
    if response.turns:
        rewards = [_rounded(reward) for reward in rollout.verdict.turn_rewards]
        turns = {"turns": [list(turn) for turn in response.turns], "turn_rewards": rewards}
    if rollout.verdict.forgotten:
        turns["forgotten"] = list(rollout.verdict.forgotten)
    if response.contexts:
        turns["contexts"] = [list(context) for context in response.contexts]
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
        "finish_reason": response.finish_reason,
        "spans": [list(span) for span in response.spans],
        **turns,
        "row": dict(group.prompt.row),
        "prompt_token_ids": group.prompt.tokens.tolist(),
        "response_token_ids": response.tokens.tolist(),
        "logprobs": [_rounded(value) for value in response.logprobs.tolist()],
        "in_loss": found is not None if key in ratios else None,
        "ratios": None if found is None else [_rounded(value) for value in found.tolist()],
    }


def _rounded(value: float | None) -> float | None:
    """Rounds to six decimal places. Returns None for nan and infinity."""
    return round(float(value), 6) if value is not None and math.isfinite(value) else None


def _summary(rollout: Rollout, metric: str) -> str:
    verdict, graded = rollout.verdict, rollout.verdict != NOT_GRADED
    by_score = not graded or (metric == "score" and verdict.score is not None)
    judged = f"score {verdict.score:+.3g}" if by_score else "correct" if verdict.correct else "wrong"
    words = [judged, f"reward {rollout.reward:+.3g}"] if graded else []
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
