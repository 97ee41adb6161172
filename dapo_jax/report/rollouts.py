"""Lays out a run's rollouts for the browser: an index of numbers, which is loaded at the start, and compressed chunks of text.

A chunk contains all groups of one or more steps as compressed JSON (see `Rollouts._response`). `TYPES` describes the index.
"""

import importlib
import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, lru_cache
from importlib import resources
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from dapo_jax.config import LossConfig
from dapo_jax.config.keys import named
from dapo_jax.report.chunks import Laid, compressed, compressed_json, heads, key_of, read_checked, spaced
from dapo_jax.report.runs import RunFiles
from dapo_jax.storage import AnyPath, path_of
from dapo_jax.text.tokenizers import Tokenizer, load_tokenizer, named_tokenizer
from dapo_jax.trackers.rollout_log import read_rollouts

CHUNK_BYTES = 512 * 1024
"""Approximate number of characters per chunk before compression. A browser opens a chunk of this size in a few milliseconds."""

CORRECT, TRUNCATED, FLIPPED, TRAINED, LEFT_OUT = 1, 2, 4, 8, 16
"""Bits of the column `flags`. A flipped response is correct, although fewer than half of the responses to its question were correct at
the previous logged step with this question. A response is left out if overlong filtering excluded it from the loss."""


_UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""Tokenizers decode an incomplete UTF-8 character to this text."""
_LONGEST = 4
"""Maximum number of bytes in a UTF-8 character, and therefore of tokens that form one character."""

TYPES = {
    "flags": "u1", "clipped": "u4", "reward": "f4", "advantage": "f4", "penalty": "f4", "tokens": "u4",
    "group_step": "u4", "group_ordinal": "u4", "group_first": "u4", "group_question": "u4",
    "group_before": "i4", "group_chunk": "u4", "group_place": "u4",
}  # fmt: skip
"""Type of each column of the index. Entries are in step order, and unknown floats are NaN.

`tokens` and `clipped` are the numbers of sampled and clipped tokens. `group_first` is the index of a group's first rollout.
`group_question` is an index into `heads`; it is the same for groups with the same prompt and answer. `group_before` is the index of the
last group with the same question at an earlier logged step, or -1. `group_place` is the index of a group in its chunk.
"""


def lay_out(run: RunFiles, *, steps: int | None = None) -> Laid:
    """Loads the rollouts of at most `steps` of a run's logged steps (see `spaced`). A damaged file raises ConfigError."""
    laying = Rollouts(run)
    for file in spaced(run.logged, steps):
        laying.add(file)
    return laying.laid(logged=len(run.logged))


class Rollouts:
    """Lays out the rollouts of one run for the page. `add` is called once per step, in order."""

    def __init__(self, run: RunFiles) -> None:
        self._run, self._by_score = run, run.by_score
        # With a teacher, every token has its own advantage, which is not logged.
        loss = None if run.config is None or run.config.teacher.source else run.config.loss
        self._loss = loss if loss and named(loss.objective).name == "clip" else None
        self._columns: dict[str, list[Any]] = {name: [] for name in TYPES}
        self._questions: dict[tuple[str, str], int] = {}
        self._latest: dict[int, tuple[int, float]] = {}
        """Question index -> the index of its last group at an earlier step, and the accuracy of this group."""
        self._open: list[dict[str, Any]] = []
        self._characters = 0
        self._chunks: list[bytes] = []
        self._steps: list[int] = []

    @cached_property
    def _pieces(self) -> "Pieces | None":
        # Loaded only when needed, because an active run may have no tokenizer before its first rollouts.
        tokenizer = tokenizer_of(self._run)
        return None if tokenizer is None else Pieces(tokenizer)

    def add(self, file: AnyPath) -> None:
        """Adds the groups of one step. A damaged file raises ConfigError."""
        rows = read_checked(file, read_rollouts)
        latest: dict[int, tuple[int, float]] = {}
        for _, of_group in groupby(rows, key=lambda row: row["ordinal"]):
            group = list(of_group)
            prompt, answer = group[0]["prompt"], group[0]["answer"]
            question = self._questions.setdefault((prompt, answer), len(self._questions))
            before, accuracy = self._latest.get(question, (-1, 1.0))
            share = sum(row["correct"] for row in group) / len(group)
            latest[question] = len(self._columns["group_step"]), share
            self._add(
                group_step=group[0]["step"],
                group_ordinal=group[0]["ordinal"],
                group_first=len(self._columns["flags"]),
                group_question=question,
                group_before=before,
                group_chunk=len(self._chunks),
                group_place=len(self._open),
            )
            flipped = accuracy < 0.5 and not self._by_score
            responses = [self._response(row, flipped=flipped) for row in group]
            self._open.append({"prompt": prompt, "answer": answer, "responses": responses})
            # The numbers stored for each token take about 20 characters.
            self._characters += sum(len(r["response"]) + 20 * len(r["response_token_ids"]) for r in group)
        self._latest |= latest
        if rows:
            self._steps.append(rows[0]["step"])
        if self._characters >= CHUNK_BYTES:
            self._close()

    def laid(self, *, logged: int) -> Laid:
        """Returns the layout of all added steps. `logged` is the run's number of logged steps. Later calls only append chunks."""
        self._close()
        # Four-byte columns come first, so that all columns are aligned.
        order = sorted(TYPES, key=lambda name: -int(TYPES[name][1]))
        index = b"".join(np.array(self._columns[name], dtype=f"<{TYPES[name]}").tobytes() for name in order)
        loss = self._loss
        about = {
            "columns": [(name, TYPES[name], len(self._columns[name])) for name in order],
            "heads": heads([prompt for prompt, _ in self._questions]),
            "keys": [key_of(*question) for question in self._questions],
            "steps": self._steps,
            "logged": logged,
            "pieces": bool(self._steps and self._pieces),
            "clip": loss
            and {"low": loss.clip_ratio_low, "high": loss.clip_ratio_high, "dual": _dual_clip(loss)},
        }
        return Laid(about=about, index=compressed(index), chunks=tuple(self._chunks))

    def _add(self, **values: Any) -> None:
        for name, value in values.items():
            self._columns[name].append(value)

    def _close(self) -> None:
        if self._open:
            self._chunks.append(compressed_json(self._open))
            self._open, self._characters = [], 0

    def _response(self, row: Mapping[str, Any], *, flipped: bool) -> dict[str, Any]:
        """Adds the numbers of a response to the index, and returns its entry for a chunk.

        In the entry, `lengths` contains the UTF-16 length of each token's text, and `ages` a (first token, age in steps) pair per span. An
        episode also has `turns` as (first token, end, reward), `contexts`, `forgotten`, and `size`, the number of tokens including
        environment tokens.
        """
        turns, in_loss, advantage, ratios = row.get("turns"), row["in_loss"], row["advantage"], row["ratios"]
        states = "" if self._loss is None or ratios is None else clip_states(ratios, advantage, self._loss)
        flags = (
            CORRECT * row["correct"]
            | TRUNCATED * (row["finish_reason"] == "length")
            | FLIPPED * (row["correct"] and flipped)
            | TRAINED * (in_loss is not None)
            | LEFT_OUT * (in_loss is False)
        )
        self._add(
            flags=flags,
            reward=row["reward"],
            advantage=advantage,
            penalty=row["overlong_penalty"],
            tokens=sum(stop - first for first, stop in turns or [(0, len(row["response_token_ids"]))]),
            clipped=sum(map(states.count, "^vd")),
        )
        text = row["response"]
        by_token: dict[str, Any] = {"nats": _scaled(row["logprobs"], -1000)}
        if self._pieces is not None and (pieces := self._pieces.of(row["response_token_ids"], text)):
            whole, texts = pieces
            by_token["lengths"] = [_units(piece) for piece in texts]
            if whole != text:  # graders received the text without its stop string
                by_token["graded"], text = _units(text), whole
        if states:
            by_token["clips"] = states
        if ratios is not None:
            by_token["ratios"] = _scaled(ratios, 10_000)
        if turns:
            rewards = row["turn_rewards"] or [None] * len(turns)
            by_token["turns"] = [[*turn, reward] for turn, reward in zip(turns, rewards, strict=True)]
            by_token["size"] = len(row["response_token_ids"])
            by_token |= {name: row[name] for name in ("contexts", "forgotten") if row.get(name)}
            # The environment's tokens have no log-probabilities.
            sampled = {at for turn in turns for at in range(*turn)}
            by_token["nats"] = [nats if at in sampled else None for at, nats in enumerate(by_token["nats"])]
        return {
            "text": text,
            "extracted": row["extracted"],
            "reason": row["reason"],
            "index": row["index"],
            "finish": row["finish_reason"],
            "ages": [[first, row["step"] - 1 - version] for first, version in row["spans"]],
            **({"score": row["score"]} if self._by_score else {}),
            **by_token,
        }


def _dual_clip(loss: LossConfig) -> float | None:
    return named(loss.objective).options.get("dual_clip")


def clip_states(ratios: Iterable[float | None], advantage: float, loss: LossConfig) -> str:
    """Returns the effect of clipping on each token (Eq. 8 and 10) as one character per token.

    `^`: clipped from above, because the ratio exceeds 1 + clip_ratio_high and the advantage is positive. `v`: clipped from below,
    because the ratio is under 1 - clip_ratio_low and the advantage is negative. `d`: the advantage is negative and the ratio exceeds
    the dual clip. Tokens in these three states have no gradient. `.`: not clipped. `-`: the ratio is unknown.

    >>> clip_states([1.3, 1.2, None], 1.0, LossConfig()), clip_states([1.3, 0.7], -1.0, LossConfig())
    ('^.-', '.v')
    """
    high, low = 1.0 + loss.clip_ratio_high, 1.0 - loss.clip_ratio_low
    dual = _dual_clip(loss) or math.inf

    def state(ratio: float | None) -> str:
        if ratio is None:
            return "-"
        if advantage > 0:
            return "^" if ratio > high else "."
        if advantage < 0:
            return "v" if ratio < low else "d" if ratio > dual else "."
        return "."

    return "".join(map(state, ratios))


def _scaled(values: Sequence[float | None], factor: int) -> list[int | None]:
    return [None if value is None else round(factor * value) for value in values]


def _units(text: str) -> int:
    """Returns the length in UTF-16 units, as in JavaScript."""
    return len(text) if text.isascii() else len(text.encode("utf-16-le", errors="replace")) // 2


def tokenizer_of(run: RunFiles) -> Tokenizer | None:
    """Returns the tokenizer from RUN/model if the run has finished, otherwise from its initial model, or None if neither exists.

    Nothing is downloaded: Hub models are only looked up in the local cache.
    """
    with suppress(ValueError):  # an unfinished run has no model folder
        return load_tokenizer(run.folder / "model")
    if run.config is None:
        return None
    model = run.config.model
    kind, _, name = model.parts.place.partition(":")
    if kind == "preset":
        return named_tokenizer(model.tokenizer)
    try:
        folder: AnyPath
        if kind == "shipped":
            folder = Path(str(resources.files("dapo_jax"))) / "assets" / name
        elif kind == "hf":
            hub = importlib.import_module("huggingface_hub")
            folder = Path(
                hub.snapshot_download(name, local_files_only=True, revision=model.parts.revision or None)
            )
        else:
            folder = path_of(model.parts.place)
            folder = folder / "model" if (folder / "config.yaml").is_file() else folder  # a run
        return load_tokenizer(folder)
    except Exception:  # without a tokenizer, the page only lacks token boundaries
        return None


class Pieces:
    """Splits a text into the parts that belong to its tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        def decoded(ids: tuple[int, ...]) -> str:
            return tokenizer.decode(np.array(ids, dtype=np.int64))

        self._decode, self._decoded = decoded, lru_cache(1 << 18)(decoded)

    def of(self, ids: Sequence[int], text: str) -> tuple[str, list[str]] | None:
        """Decodes `ids`, and returns the whole text and the part of each id. Returns None if it cannot be split or does not begin with `text`.

        The part of an end token is empty. If several tokens form one character, the last token's part is the character, and the others are empty.

        >>> from dapo_jax.text.tokenizers import ByteTokenizer
        >>> Pieces(ByteTokenizer()).of([67, 197, 171, 1], "Aé")
        ('Aé', ['A', '', 'é', ''])
        """
        try:
            whole, pieces = self._decode(tuple(ids)), self._pieces(ids)
        except ValueError:
            return None
        if (
            pieces and f" {whole}".startswith(text) and not whole.startswith(text)
        ):  # it continues a plain prompt
            whole, pieces = f" {whole}", [f" {pieces[0]}", *pieces[1:]]
        if not whole.startswith(text):
            return None
        return (whole, pieces) if "".join(pieces) == whole else None

    def _pieces(self, ids: Sequence[int]) -> list[str]:
        """Decodes each token together with the previous token, because some tokenizers drop the first space of a text."""
        pieces, start, done = [], 0, 0
        for end in range(1, len(ids) + 1):
            now, before = self._decoded(tuple(ids[start:end])), self._decoded(tuple(ids[start:done]))
            if now.endswith(_UNFINISHED) and end < len(ids) and end - done < _LONGEST:
                pieces.append("")
            else:
                pieces.append(now[len(before) :])
                start, done = done, end
        return pieces
