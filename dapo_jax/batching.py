"""From groups to microbatches: shuffle, split, pack. Host arrays; `put` is where they cross to the device.

Every token's weight in the loss is computed here from its whole minibatch, so packing, microbatching and sharding
change nothing in the gradient.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import numpy as np
from jaxtyping import Float, Int

from dapo_jax.advantages import group_advantages
from dapo_jax.losses import token_weights
from dapo_jax.rollouts import Group, Microbatch


@dataclass(frozen=True, kw_only=True)
class Row:
    """One prompt and response on its way into a microbatch."""

    prompt_tokens: Int[np.ndarray, " prompt"]
    response_tokens: Int[np.ndarray, " response"]
    logprobs: Float[np.ndarray, " response"]
    """As recorded while sampling; zeros for demonstrations."""
    advantage: float = 1.0
    in_loss: bool = True
    """False: the row is left out of the loss (overlong filtering)."""
    group: int = 0
    """Which group of the minibatch the row belongs to."""

    @property
    def tokens(self) -> int:
        """Length in tokens, prompt and response together."""
        return len(self.prompt_tokens) + len(self.response_tokens)


def split_minibatches(
    groups: Sequence[Group], *, groups_per_update: int, seed: Sequence[int]
) -> list[list[Group]]:
    """Shuffles whole groups with the key `seed` and cuts them into minibatches of `groups_per_update`.

    The last may be smaller, when dynamic sampling trained on fewer groups than a step usually has.
    """
    order = np.random.default_rng(seed).permutation(len(groups))
    shuffled = [groups[i] for i in order]
    return [shuffled[i : i + groups_per_update] for i in range(0, len(shuffled), groups_per_update)]


def rows_of(
    groups: Sequence[Group], *, normalize_std: bool = True, filter_truncated: bool = False
) -> list[Row]:
    """The rollouts of a minibatch with their advantages (Eq. 9).

    With `filter_truncated` (overlong filtering) a truncated response keeps its reward, so it counts in the group's
    mean and deviation, but is left out of the loss.
    """
    rows = []
    for index, group in enumerate(groups):
        advantages = group_advantages(group.rewards[None], normalize_std=normalize_std)[0]
        rows += [
            Row(
                prompt_tokens=group.prompt.tokens,
                response_tokens=rollout.response.tokens,
                logprobs=rollout.response.logprobs,
                advantage=float(advantage),
                in_loss=not (filter_truncated and rollout.truncated),
                group=index,
            )
            for rollout, advantage in zip(group.rollouts, advantages, strict=True)
        ]
    return rows


def row_weights(
    rows: Sequence[Row], *, aggregation: str = "token_mean", max_response_tokens: int | None = None
) -> Float[np.ndarray, " rows"]:
    """The weight of each row's tokens in the loss of the minibatch that `rows` make up; 0 for a row left out.

    All tokens of a row weigh the same under every aggregation of `losses.token_weights`.
    """
    longest = max(len(row.response_tokens) for row in rows)
    mask = np.stack([np.arange(longest) < (len(row.response_tokens) if row.in_loss else 0) for row in rows])
    weights = token_weights(
        mask,
        aggregation=aggregation,
        group_ids=np.array([row.group for row in rows], np.int32),
        max_response_tokens=max_response_tokens,
    )
    return np.asarray(weights)[:, 0]


def pack(
    rows: Sequence[Row],
    weights: Float[np.ndarray, " rows"],
    *,
    row_tokens: int,
    rows_per_microbatch: int,
    pad_id: int = 0,
) -> list[Microbatch]:
    """Packs rollouts into lines of `row_tokens` tokens and lines into microbatches of one static shape.

    First fit, longest first. Lines that are left over are padding with no weight.

    Raises:
        ValueError: a rollout is longer than a line. Cutting it would train on a response that was never sampled.
    """
    for index, row in enumerate(rows):
        if row.tokens > row_tokens:
            raise ValueError(
                f"rollout {index} has {len(row.prompt_tokens)} prompt + {len(row.response_tokens)} response = {row.tokens} "
                f"tokens, over batch.row_tokens={row_tokens}; raise batch.row_tokens or lower sampling.max_response_tokens"
            )
    lines = first_fit([row.tokens for row in rows], row_tokens)
    return [
        _microbatch(
            [
                [(rows[i], float(weights[i])) for i in line]
                for line in lines[start : start + rows_per_microbatch]
            ],
            shape=(rows_per_microbatch, row_tokens),
            pad_id=pad_id,
        )
        for start in range(0, len(lines), rows_per_microbatch)
    ]


def first_fit(sizes: Sequence[int], room: int) -> list[list[int]]:
    """The indices of `sizes`, longest first, each in the first line that still has room for it; none is over `room`."""
    lines: list[list[int]] = []
    left: list[int] = []
    for index in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        place = next((line for line, free in enumerate(left) if free >= sizes[index]), None)
        if place is None:
            place = len(lines)
            lines.append([])
            left.append(room)
        lines[place].append(index)
        left[place] -= sizes[index]
    return lines


def _microbatch(
    lines: Sequence[Sequence[tuple[Row, float]]], *, shape: tuple[int, int], pad_id: int
) -> Microbatch:
    """Writes packed lines into fresh arrays."""
    tokens = np.full(shape, pad_id, np.int32)
    segment_ids, positions = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    mask = np.zeros(shape, bool)
    advantages, weighted, logprobs = (np.zeros(shape, np.float32) for _ in range(3))
    for line, packed in enumerate(lines):
        start = 0
        for segment, (row, weight) in enumerate(packed, start=1):
            middle, stop = start + len(row.prompt_tokens), start + row.tokens
            tokens[line, start:middle] = row.prompt_tokens
            tokens[line, middle:stop] = row.response_tokens
            segment_ids[line, start:stop] = segment
            positions[line, start:stop] = np.arange(row.tokens)
            mask[line, middle:stop] = row.in_loss
            advantages[line, middle:stop] = row.advantage
            weighted[line, middle:stop] = weight
            logprobs[line, middle:stop] = row.logprobs
            start = stop
    return Microbatch(
        tokens=tokens,
        segment_ids=segment_ids,
        positions=positions,
        mask=mask,
        advantages=advantages,
        weights=weighted,
        sampler_logprobs=logprobs,
        old_logprobs=np.zeros(shape, np.float32),
        ref_logprobs=np.zeros(shape, np.float32),
    )


def stack(microbatches: Sequence[Microbatch], *, room: int) -> Microbatch:
    """Host microbatches of one shape in arrays of [room, rows, seq]; what is beyond their number is zeros."""

    def together(*parts: np.ndarray) -> np.ndarray:
        out = np.zeros((room, *parts[0].shape), parts[0].dtype)
        out[: len(parts)] = parts
        return out

    return jax.tree.map(together, *microbatches)
