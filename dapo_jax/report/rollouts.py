"""A run's rollouts as a browser opens them: an index of numbers that is read at once, and compressed chunks of text.

A chunk holds the groups of whole steps as JSON, compressed; `_group` says what is in it, and `Index` what the index has.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise, takewhile
from typing import Any

import numpy as np

from dapo_jax.config import LossConfig
from dapo_jax.report.checked_lines import check_kinds, read_checked
from dapo_jax.report.index import CORRECT, FLIPPED, LEFT_OUT, TRAINED, TRUNCATED, Index, compressed
from dapo_jax.report.questions import question_key
from dapo_jax.report.runs import RunFiles
from dapo_jax.report.tokens import Pieces, tokenizer_of
from dapo_jax.storage import AnyPath
from dapo_jax.trackers.rollout_log import read_rollouts

CHUNK_BYTES = 512 * 1024
"""The size of a chunk's JSON, about, before it is compressed: a browser opens it in some milliseconds."""

_KINDS = {
    "step": int,
    "ordinal": int,
    "prompt": str,
    "answer": str,
    "response": str,
    "response_token_ids": list,
}
_HEAD = 96
"""Characters of a prompt that a list shows."""
_FRAME = 16
"""Characters that all prompts begin or end with are left out of a list where they are at least so many."""


@dataclass(frozen=True, kw_only=True)
class Laid:
    """The rollouts of one run, or its evaluations."""

    about: Mapping[str, Any]
    """The page's description of them, as JSON can."""
    index: bytes
    chunks: Sequence[bytes]


def lay_out(run: RunFiles, *, steps: int | None = None) -> Laid:
    """Reads a run's rollouts.

    Args:
        run: whose.
        steps: how many logged steps at most, evenly spaced, the first and the last among them; None: all.

    Raises:
        ConfigError: a file of rollouts is damaged; names it and the line.
    """
    laying = Laying(run)
    for file in spaced(run.logged, steps):
        laying.step(file)
    return laying.laid(logged=len(run.logged))


class Laying:
    """Rollouts of one step after the other, on their way into index and chunks."""

    def __init__(self, run: RunFiles) -> None:
        self._loss = None if run.config is None else run.config.loss
        self._by_score = run.by_score
        tokenizer = tokenizer_of(run) if run.logged else None
        self._pieces = None if tokenizer is None else Pieces(tokenizer)
        self._index, self._questions = Index(), dict[tuple[str, str], int]()
        self._latest: dict[int, tuple[int, float]] = {}
        """Question -> its last group of the steps so far, and that one's accuracy."""
        self._open: list[str] = []
        self._chunks: list[bytes] = []
        self._steps: list[int] = []
        self._seen = dict.fromkeys(("advantage", "ratios", "in_loss", "pieces", "spans"), False)

    def step(self, file: AnyPath) -> None:
        """Adds the groups of one step.

        Raises:
            ConfigError: the file is damaged; names it and the line.
        """
        rows = read_checked(file, read_rollouts, _check, what="rollout")
        latest: dict[int, tuple[int, float]] = {}
        for _, of_group in groupby(rows, key=lambda row: row["ordinal"]):
            group = list(of_group)
            question = self._question(group[0])
            before, was = self._latest.get(question, (-1, 1.0))
            flipped = was < 0.5 and not self._by_score
            states = [self._states(row) for row in group]
            self._numbers(group, states, question, before, flipped=flipped)
            accuracy = sum(bool(row["correct"]) for row in group) / len(group)
            latest[question] = len(self._index.group_step) - 1, accuracy
            self._open.append(
                json.dumps(self._group(group, states), ensure_ascii=False, separators=(",", ":"))
            )
        self._latest |= latest
        if rows:
            self._steps.append(rows[0]["step"])
        if sum(map(len, self._open)) >= CHUNK_BYTES:
            self._close()

    def laid(self, *, logged: int) -> Laid:
        """All that was laid out so far; `logged` is how many steps the run has on file. A chunk that was handed out stays as it is."""
        self._close()
        index, columns = self._index.packed()
        loss = self._loss
        about = {
            "columns": columns,
            "heads": heads([prompt for prompt, _ in self._questions]),
            "keys": [question_key(*question) for question in self._questions],
            "steps": self._steps,
            "logged": logged,
            "chunks": len(self._chunks),
            "recorded": self._seen,
            "clip": loss
            and {"low": loss.clip_ratio_low, "high": loss.clip_ratio_high, "dual": loss.dual_clip},
        }
        return Laid(about=about, index=index, chunks=tuple(self._chunks))

    def _close(self) -> None:
        if self._open:
            text = "[" + ",".join(self._open) + "]"
            self._chunks.append(compressed(text.encode("utf-8", errors="replace")))
            self._open = []

    def _question(self, row: Mapping[str, Any]) -> int:
        return self._questions.setdefault((row["prompt"], row["answer"]), len(self._questions))

    def _numbers(
        self,
        group: Sequence[Mapping[str, Any]],
        states: Sequence[str | None],
        question: int,
        before: int,
        *,
        flipped: bool,
    ) -> None:
        index = self._index
        index.group_step.append(group[0]["step"])
        index.group_ordinal.append(group[0]["ordinal"])
        index.group_first.append(len(index.flags))
        index.group_question.append(question)
        index.group_before.append(before)
        index.group_chunk.append(len(self._chunks))
        index.group_place.append(len(self._open))
        for row, state in zip(group, states, strict=True):
            correct, in_loss = bool(row["correct"]), row.get("in_loss")
            index.flags.append(
                CORRECT * correct
                | TRUNCATED * (row.get("finish_reason") == "length")
                | FLIPPED * (correct and flipped)
                | TRAINED * (in_loss is not None or row.get("ratios") is not None)
                | LEFT_OUT * (in_loss is False)
            )
            index.reward.append(as_float(row.get("reward")))
            index.advantage.append(as_float(row.get("advantage")))
            index.penalty.append(as_float(row.get("overlong_penalty")))
            turns = _turns(row)
            sampled = len(row["response_token_ids"])
            index.tokens.append(sampled if turns is None else sum(stop - first for first, stop, _ in turns))
            index.clipped.append(0 if state is None else sum(map(state.count, "^vd")))
            for key in ("advantage", "ratios", "in_loss"):
                self._seen[key] = self._seen[key] or row.get(key) is not None

    def _group(self, group: Sequence[Mapping[str, Any]], states: Sequence[str | None]) -> dict[str, Any]:
        """The entry of a group in a chunk; a response's `lengths` are its tokens', in UTF-16 units, and its `ages` what `_ages` says. An episode
        has its `turns`, its `contexts` and its `size`, the tokens of its environment among them."""
        return {
            "prompt": group[0]["prompt"],
            "answer": group[0]["answer"],
            "responses": [self._response(row, state) for row, state in zip(group, states, strict=True)],
        }

    def _response(self, row: Mapping[str, Any], states: str | None) -> dict[str, Any]:
        text, said = row["response"], {}
        if self._pieces is not None and (cut := self._pieces.of(row["response_token_ids"], text)):
            whole, parts = cut
            said["lengths"] = [_units(part) for part in parts]
            self._seen["pieces"] = True
            if whole != text:  # what a stop string took from it
                said["graded"], text = _units(text), whole
        if _fits(row, "logprobs"):
            said["nats"] = [None if value is None else round(-1000 * value) for value in row["logprobs"]]
        if states is not None:
            said["clips"] = states
        if states is not None or _fits(row, "ratios"):
            said["ratios"] = [None if value is None else round(10_000 * value) for value in row["ratios"]]
        if (turns := _turns(row)) is not None:
            said |= {"turns": turns, "size": len(row["response_token_ids"])}
            if contexts := _contexts(row, turns):
                said["contexts"] = contexts
            if "nats" in said:
                said["nats"] = _of_turns(said["nats"], turns)
        if (ages := _ages(row)) is not None:
            said["ages"] = ages
            self._seen["spans"] = True
        return {
            "text": text,
            "extracted": row.get("extracted"),
            "reason": row.get("reason") or "",
            "index": row.get("index"),
            "finish": row.get("finish_reason"),
            **({"score": row.get("score")} if self._by_score else {}),
            **said,
        }

    def _states(self, row: Mapping[str, Any]) -> str | None:
        advantage = as_float(row.get("advantage"))
        if self._loss is None or math.isnan(advantage) or not _fits(row, "ratios"):
            return None
        return clip_states(row["ratios"], advantage, self._loss)


def clip_states(ratios: Iterable[float | None], advantage: float, loss: LossConfig) -> str:
    """The effect of the clip on each token (Eq. 8 and 10): a character for each.

    `^` the ratio is over 1 + clip_ratio_high and the advantage positive; `v` it is under 1 - clip_ratio_low and the advantage
    negative: such a token has no gradient. `d` the advantage is negative and the ratio over the dual clip. `.` none of
    these, `-` no ratio is known.

    >>> clip_states([1.3, 1.2, None], 1.0, LossConfig()), clip_states([1.3, 0.7], -1.0, LossConfig())
    ('^.-', '.v')
    """
    high, low = 1.0 + loss.clip_ratio_high, 1.0 - loss.clip_ratio_low
    dual = math.inf if loss.dual_clip is None else loss.dual_clip

    def state(ratio: float | None) -> str:
        if ratio is None:
            return "-"
        if advantage > 0:
            return "^" if ratio > high else "."
        if advantage < 0:
            return "v" if ratio < low else "d" if ratio > dual else "."
        return "."

    return "".join(map(state, ratios))


def _check(row: Mapping[str, Any], where: str) -> None:
    check_kinds(row, _KINDS, where)
    for name in ("step", "ordinal"):
        if not 0 <= row[name] < 1 << 32:
            raise ValueError(f"{where}: {name!r} is {row[name]}; it must be from 0 to {(1 << 32) - 1}")
    if not isinstance(row.get("correct"), bool):
        raise ValueError(f"{where}: 'correct' is {row.get('correct')!r:.60}; it must be true or false")


def _fits(row: Mapping[str, Any], key: str) -> bool:
    """True if there is a number, or null, for every token."""
    values = row.get(key)
    if not isinstance(values, list) or len(values) != len(row["response_token_ids"]):
        return False
    return set(map(type, values)) <= {int, float, type(None)} and math.isfinite(sum(filter(None, values)))


def _turns(row: Mapping[str, Any]) -> list[tuple[int, int, float | None]] | None:
    """(first token, token behind the last, reward) of each turn of an episode; None of a response without turns, or if they cannot be."""
    turns, rewards = row.get("turns"), row.get("turn_rewards")
    if not isinstance(turns, list) or not turns:
        return None
    if any(not isinstance(turn, list) or list(map(type, turn)) != [int, int] for turn in turns):
        return None
    edges = [edge for turn in turns for edge in turn]
    if edges != sorted(edges) or not 0 <= edges[0] <= edges[-1] <= len(row["response_token_ids"]):
        return None
    known = isinstance(rewards, list) and len(rewards) == len(turns)
    given = [as_float(reward) for reward in rewards] if known else [math.nan] * len(turns)
    return [
        (first, stop, None if math.isnan(reward) else reward)
        for (first, stop), reward in zip(turns, given, strict=True)
    ]


def _contexts(
    row: Mapping[str, Any], turns: Sequence[tuple[int, int, float | None]]
) -> list[tuple[int, int]]:
    """(first token, token behind the last) of each context of an episode that begins anew; none if they cannot be."""
    contexts = row.get("contexts")
    if not isinstance(contexts, list) or any(
        not isinstance(one, list) or list(map(type, one)) != [int, int] for one in contexts
    ):
        return []
    found = [(first, stop) for first, stop in contexts]
    # What was sampled is of no context.
    edges = [edge for each in sorted([*found, *(turn[:2] for turn in turns)]) for edge in each]
    rising = all(low < high for low, high in pairwise(edge for each in found for edge in each))
    within = (
        rising and edges == sorted(edges) and 0 <= edges[0] <= edges[-1] <= len(row["response_token_ids"])
    )
    return found if within else []


def _of_turns(nats: Sequence[int | None], turns: Sequence[tuple[int, int, float | None]]) -> list[int | None]:
    """The numbers of the tokens that were sampled; None for those of the environment."""
    found: list[int | None] = [None] * len(nats)
    for first, stop, _ in turns:
        found[first:stop] = nats[first:stop]
    return found


def _ages(row: Mapping[str, Any]) -> list[tuple[int, int]] | None:
    """(first token, age) of each span of a response: how many steps before this one the weights were that drew it. None if that is not
    on file, or cannot be."""
    spans, now = row.get("spans"), row["step"] - 1
    if not isinstance(spans, list) or not spans:
        return None
    if any(not isinstance(span, list) or list(map(type, span)) != [int, int] for span in spans):
        return None
    firsts, versions = zip(*spans, strict=True)
    rising = all(low < high for values in (firsts, versions) for low, high in pairwise(values))
    within = firsts[-1] < max(1, len(row["response_token_ids"])) and 0 <= versions[0] <= versions[-1] <= now
    return (
        [(first, now - version) for first, version in spans] if firsts[0] == 0 and rising and within else None
    )


def spaced(files: Sequence[AnyPath], count: int | None) -> Iterator[AnyPath]:
    """`count` of the files at most, evenly spaced, the first and the last among them; None: all."""
    if count is None or count >= len(files):
        return iter(files)
    # From the end, so that one alone is the last.
    places = np.linspace(len(files) - 1, 0, count).round().astype(int)[::-1]
    return (files[place] for place in places)


def heads(prompts: Sequence[str]) -> list[str]:
    """One line for each prompt that tells it apart: without what is put around every question.

    >>> heads(["Solve this task, please: 1+1", "Solve this task, please: 2+3"])
    ['1+1', '2+3']
    """
    several = len(set(prompts)) > 1
    before = _common(prompts) if several else ""
    before = before[: before.rfind(" ") + 1] if len(before) >= _FRAME else ""
    rest = [prompt[len(before) :] for prompt in prompts]
    after = _common([text[::-1] for text in rest]) if several else ""
    after = after[: after.rfind(" ") + 1] if len(after) >= _FRAME else ""
    lines = [" ".join(text[: len(text) - len(after)][: 4 * _HEAD].split()) for text in rest]
    return [line if len(line) <= _HEAD else line[: _HEAD - 1] + "…" for line in lines]


def _common(texts: Sequence[str]) -> str:
    """The beginning that all texts share."""
    low, high = min(texts), max(texts)  # whatever these two share, all that lie between them share
    same = takewhile(lambda pair: pair[0] == pair[1], zip(low, high, strict=False))
    return low[: sum(1 for _ in same)]


def _units(text: str) -> int:
    """Length as JavaScript counts it."""
    return len(text) if text.isascii() else len(text.encode("utf-16-le", errors="replace")) // 2


def as_float(value: Any) -> float:
    """A number of a file; NaN where there is none."""
    return float(value) if isinstance(value, int | float) else math.nan
