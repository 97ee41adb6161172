"""From groups to microbatches: shuffle, split, pack. Host arrays.

Every token's weight in the loss is computed here from its whole minibatch, so packing, microbatching and sharding
change nothing in the gradient.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

from dapo_jax.dapo.advantages import group_advantages
from dapo_jax.dapo.losses import token_weights
from dapo_jax.dapo.microbatch import Microbatch
from dapo_jax.dapo.rollouts import Group
from dapo_jax.dapo.row_packing import Line, Piece, share_out


@dataclass(frozen=True, kw_only=True)
class Row:
    """One prompt and response on its way into a microbatch."""

    prompt_tokens: Int[np.ndarray, " prompt"]
    response_tokens: Int[np.ndarray, " response"]
    logprobs: Float[np.ndarray, " response"]
    """The log-probabilities recorded while sampling, in nats; zeros for demonstrations."""
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
    shorter_rows: Sequence[int] = (),
    spread: int = 1,
    share_prompts: bool = True,
    alone: bool = False,
    pad_id: int = 0,
) -> list[Microbatch]:
    """Packs rollouts into lines of `row_tokens` tokens and lines into microbatches of a few static shapes.

    Responses to one prompt that come into one line share it: the prompt is computed once, and takes the gradients of all of
    them. There is as little padding as is found; lines with about as much to attend to come into one microbatch
    (`dapo_jax.dapo.row_packing`). The rest is padding with no weight. Microbatches with the longest rows come first.

    Args:
        rows: the rollouts of a minibatch.
        weights: of each rollout's tokens, from `row_weights`.
        row_tokens: the length of a line.
        rows_per_microbatch: lines in a microbatch.
        shorter_rows: other lengths that all rows of a microbatch may have instead, so that what does not fill one of
            `row_tokens` is not mostly padding. For each a program is compiled.
        spread: over how many groups of devices these lie, the first `rows_per_microbatch / spread` on the first; each gets as
            much to attend to.
        share_prompts: False where attention cannot show a response another segment: every rollout has its own prompt.
        alone: one rollout a line, where attention cannot tell segments apart.
        pad_id: the token of padding.

    Raises:
        ValueError: a rollout is longer than a line, for cutting it would train on a response that was never sampled; or
            `spread` does not divide `rows_per_microbatch`.
    """
    if rows_per_microbatch % spread:
        raise ValueError(
            f"rows_per_microbatch={rows_per_microbatch} must be a multiple of the {spread} groups of devices it is spread "
            f"over; {-(-rows_per_microbatch // spread) * spread} is"
        )
    for index, row in enumerate(rows):
        if row.tokens > row_tokens:
            raise ValueError(
                f"rollout {index} has {len(row.prompt_tokens)} prompt + {len(row.response_tokens)} response = {row.tokens} "
                f"tokens, over batch.row_tokens={row_tokens}; raise batch.row_tokens or lower sampling.max_response_tokens"
            )
    shared = share_prompts and not alone
    pieces = [
        Piece(
            rollouts=(index,),
            responses=(len(row.response_tokens),),
            prompt=row.prompt_tokens.tobytes() if shared else index,
            prompt_tokens=len(row.prompt_tokens),
        )
        for index, row in enumerate(rows)
    ]
    lengths = sorted({row_tokens, *shorter_rows}, reverse=True)
    return [
        _microbatch(
            [[[(rows[i], float(weights[i])) for i in bundle] for bundle in _bundles(line)] for line in lines],
            shape=(rows_per_microbatch, length),
            pad_id=pad_id,
        )
        for length, lines in share_out(
            pieces, lengths=lengths, rows=rows_per_microbatch, spread=spread, alone=alone
        )
    ]


def _bundles(line: Line) -> list[list[int]]:
    """Indices of the rollouts of a line, those that share a prompt together."""
    of_prompt: dict[Hashable, list[int]] = {}
    for piece in line:
        of_prompt.setdefault(piece.prompt, []).extend(piece.rollouts)
    return list(of_prompt.values())


def _microbatch(
    lines: Sequence[Sequence[Sequence[tuple[Row, float]]]], *, shape: tuple[int, int], pad_id: int
) -> Microbatch:
    """Writes packed lines into fresh arrays; a line is a list of bundles, a bundle a list of rows with one prompt."""
    tokens = np.full(shape, pad_id, np.int32)
    segment_ids, prefix_ids, positions, previous = (np.zeros(shape, np.int32) for _ in range(4))
    mask = np.zeros(shape, bool)
    advantages, weighted, logprobs = (np.zeros(shape, np.float32) for _ in range(3))
    for line, bundles in enumerate(lines):
        stop, segment = 0, 0
        for bundle in bundles:
            prompt = bundle[0][0].prompt_tokens
            start, stop, segment = stop, stop + len(prompt), segment + 1
            head, prefix = stop - 1, segment
            tokens[line, start:stop], positions[line, start:stop] = prompt, np.arange(len(prompt))
            segment_ids[line, start:stop] = prefix_ids[line, start:stop] = segment
            previous[line, start + 1 : stop] = np.arange(start, head)
            for row, weight in bundle:
                count = len(row.response_tokens)
                segment += len(bundle) > 1
                place, stop = slice(stop, stop + count), stop + count
                tokens[line, place], logprobs[line, place] = row.response_tokens, row.logprobs
                positions[line, place] = len(prompt) + np.arange(count)
                segment_ids[line, place], prefix_ids[line, place] = segment, prefix
                previous[line, place] = [head, *range(place.start, stop - 1)][:count]
                mask[line, place] = row.in_loss
                advantages[line, place], weighted[line, place] = row.advantage, weight
    return Microbatch(
        tokens=tokens,
        segment_ids=segment_ids,
        prefix_ids=prefix_ids,
        previous=previous,
        positions=positions,
        mask=mask,
        advantages=advantages,
        weights=weighted,
        sampler_logprobs=logprobs,
        old_logprobs=np.zeros(shape, np.float32),
        ref_logprobs=np.zeros(shape, np.float32),
    )
