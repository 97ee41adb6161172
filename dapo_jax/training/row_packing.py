"""Packs examples into rows, and rows into microbatches.

A padding token costs as much compute as a real token, so packing minimizes padding. The attention cost of a row is its number of attention pairs: each
token is paired with each token to which it attends. A microbatch takes as long as its slowest row, so its rows should have similar lengths and costs.
"""

from bisect import bisect_left, insort
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, combinations, pairwise

import jax
import numpy as np
from jaxtyping import Float

from dapo_jax.dapo.batching import Example
from dapo_jax.dapo.microbatch import Microbatch, blank_microbatch
from dapo_jax.dapo.tokens import VALUES, Tokens


@dataclass(frozen=True, kw_only=True)
class Piece:
    """One or more responses to the same prompt that are packed as a unit, into the same row."""

    rollouts: tuple[int, ...]
    """Indices of the responses."""
    responses: tuple[int, ...]
    """Lengths of the responses in tokens."""
    prompt: Hashable
    """Identifies the prompt. Pieces with the same prompt share its tokens if they are in the same row."""
    prompt_tokens: int

    @property
    def response_tokens(self) -> int:
        """Total length of the responses."""
        return sum(self.responses)

    @property
    def tokens(self) -> int:
        """Total length of the prompt and the responses."""
        return self.prompt_tokens + self.response_tokens


PackedRow = list[Piece]


def pack(
    examples: Sequence[Example],
    weights: Float[np.ndarray, " examples"],
    *,
    row_tokens: int,
    rows_per_microbatch: int,
    shorter_rows: Sequence[int] = (),
    spread: int = 1,
    share_prompts: bool = True,
    pad_id: int = 0,
) -> list[Microbatch]:
    """Packs examples into rows of `row_tokens` tokens, and rows into microbatches of a few static shapes. Microbatches with the longest rows come first.

    Responses in a row share the tokens of their common prompt. The prompt is then computed once, and receives the gradients of all these responses.

    Args:
        examples: all examples of a minibatch.
        weights: weight of each example's tokens, from `example_weights`.
        row_tokens: length of a row.
        rows_per_microbatch: number of rows in a microbatch, a multiple of `spread`.
        shorter_rows: additional row lengths that a microbatch may have, so that the last microbatch is not mostly padding. Another program is compiled
            for each additional length.
        spread: number of device groups that share a microbatch. The first `rows_per_microbatch / spread` rows go to the first group, and so on. All
            groups get about the same attention cost.
        share_prompts: set to False if the attention implementation cannot attend to a second segment. Each example then gets its own copy of the prompt.
        pad_id: token id of padding.

    Raises:
        ValueError: an example is longer than a row.
    """
    for index, example in enumerate(examples):
        if example.tokens > row_tokens:
            raise ValueError(
                f"rollout {index} has {len(example.prompt)} prompt + {len(example.response)} response = {example.tokens} "
                f"tokens, over batch.row_tokens={row_tokens}; raise batch.row_tokens or lower sampling.max_response_tokens"
            )
    pieces = [
        Piece(
            rollouts=(index,),
            responses=(len(example.response),),
            prompt=example.prompt.ids.tobytes() if share_prompts else index,
            prompt_tokens=len(example.prompt),
        )
        for index, example in enumerate(examples)
    ]
    optional = ("noise", "teacher_logprobs")
    also = [name for name in optional if any(getattr(each, name) is not None for each in examples)]
    records = (tokens for example in examples for tokens in (example.prompt, example.response))
    arrays = {name: array for tokens in records for name, array in tokens.arrays.items()}
    recorded = tuple(
        (name, array.shape[1:], array.dtype.name) for name, array in arrays.items() if not VALUES[name].packed
    )
    lengths = sorted({row_tokens, *shorter_rows}, reverse=True)
    microbatches = []
    for length, rows in distribute_pieces(
        pieces, lengths=lengths, rows_per_microbatch=rows_per_microbatch, spread=spread
    ):
        microbatches.append(blank_microbatch((rows_per_microbatch, length), *also, recorded=recorded))
        microbatches[-1].tokens[:] = pad_id
        for index, row in enumerate(rows):
            arrays_of_row = jax.tree.map(lambda array, at=index: array[at], microbatches[-1])
            _write_row(arrays_of_row, row, examples, weights)
    return microbatches


def _write_row(
    m: Microbatch, row: PackedRow, examples: Sequence[Example], weights: Float[np.ndarray, " examples"]
) -> None:
    """Writes a packed row into the arrays of `m`, which have shape [seq]."""
    of_prompt: dict[Hashable, list[int]] = {}
    for piece in row:
        of_prompt.setdefault(piece.prompt, []).extend(piece.rollouts)
    stop, segment = 0, 0
    for bundle in of_prompt.values():
        # Responses that were lost before their first token have a prompt without recorded values.
        prompt = max((examples[i].prompt for i in bundle), key=lambda tokens: bool(tokens.processed))
        start, stop, segment = stop, stop + len(prompt), segment + 1
        head, prefix = stop - 1, segment
        _write_token_values(m, slice(start, stop), prompt)
        m.positions[start:stop] = np.arange(len(prompt))
        m.segment_ids[start:stop] = m.prefix_ids[start:stop] = segment
        m.previous[start + 1 : stop] = np.arange(start, head)
        for example, weight in ((examples[i], float(weights[i])) for i in bundle):
            count = len(example.response)
            segment += len(bundle) > 1
            span, stop = slice(stop, stop + count), stop + count
            _write_token_values(m, span, example.response)
            m.positions[span] = len(prompt) + np.arange(count)
            m.segment_ids[span], m.prefix_ids[span] = segment, prefix
            m.previous[span] = [head, *range(span.start, stop - 1)][:count]
            m.mask[span], m.advantages[span] = example.mask, example.advantage
            for name, values in (("noise", example.noise), ("teacher_logprobs", example.teacher_logprobs)):
                if values is not None:
                    getattr(m, name)[span] = values
            m.weights[span] = weight if example.sampled is None else weight * example.sampled


def _write_token_values(m: Microbatch, span: slice, tokens: Tokens) -> None:
    for name, values in tokens.arrays.items():
        m.arrays[VALUES[name].packed or name][span] = values


def distribute_pieces(
    pieces: Sequence[Piece], *, lengths: Sequence[int], rows_per_microbatch: int, spread: int
) -> list[tuple[int, list[PackedRow]]]:
    """Distributes pieces over microbatches, and returns (row length, rows) of each microbatch, longest rows first. For the arguments, see `pack`.

    With a single length in `lengths`, the last microbatch may be mostly padding. With several lengths, some pieces are packed into microbatches of
    shorter rows if this reduces the number of computed tokens.
    """
    packed = _least_padding(pieces, lengths, rows_per_microbatch)
    split = partial(balanced_microbatches, rows_per_microbatch=rows_per_microbatch, spread=spread)
    microbatches = ((_length(rows, lengths), rows) for rows in chain.from_iterable(map(split, packed)))
    return sorted(microbatches, key=lambda microbatch: -microbatch[0])


def even_rows(pieces: Sequence[Piece], *, room: int, multiple: int) -> list[PackedRow]:
    """Packs pieces into as few rows as possible. Each row has at most `room` tokens or a single piece. The number of rows is a multiple of `multiple`.

    The pieces are then distributed evenly over these rows: a binary search finds the lowest limit on row length that needs no additional rows.
    """
    rows = _fewest_rows(pieces, room)
    count = -(-len(rows) // multiple) * multiple
    too_low, limit = sum(map(filled_tokens, rows)) // count, room
    while limit - too_low > 1 + room // 64:
        lower = (too_low + limit) // 2
        tried = _fewest_rows(pieces, lower)
        if len(tried) <= count:
            rows, limit = tried, lower
        else:
            too_low = lower
    return rows + [[] for _ in range(count - len(rows))]


def balanced_microbatches(
    rows: Sequence[PackedRow], *, rows_per_microbatch: int, spread: int
) -> list[list[PackedRow]]:
    """Splits rows into microbatches, so that the rows in a microbatch have similar attention costs, and its `spread` device groups have similar total costs.

    Rows are sorted by attention cost and split into microbatches. Within a microbatch, `spread` rows at a time are assigned to the device groups, one row
    to each group. The most expensive of these rows goes to the group with the lowest cost so far.
    """
    ordered = sorted(rows, key=attention_pairs, reverse=True)
    out: list[list[PackedRow]] = []
    for start in range(0, len(ordered), rows_per_microbatch):
        groups: list[list[PackedRow]] = [[] for _ in range(spread)]
        pairs = [0] * spread
        for first in range(start, start + rows_per_microbatch, spread):
            least_first = sorted(range(spread), key=pairs.__getitem__)
            for group, row in zip(least_first, ordered[first : first + spread], strict=True):
                groups[group].append(row)
                pairs[group] += attention_pairs(row)
        out.append([row for group in groups for row in group])
    return out


def filled_tokens(row: PackedRow) -> int:
    """Returns the number of tokens in a row. A prompt that several pieces share is counted once."""
    prompts = {piece.prompt: piece.prompt_tokens for piece in row}
    return sum(prompts.values()) + sum(piece.response_tokens for piece in row)


def attention_pairs(row: PackedRow) -> int:
    """Returns the number of attention pairs in a row. Each token is paired with all tokens that it attends to, including itself.

    >>> attention_pairs([Piece(rollouts=(0, 1), responses=(2, 1), prompt="p", prompt_tokens=3)])  # 1+2+3, then 4+5, then 4
    19
    """
    prompts = {piece.prompt: piece.prompt_tokens for piece in row}
    of_prompts = sum(tokens * (tokens + 1) // 2 for tokens in prompts.values())
    return of_prompts + sum(
        tokens * piece.prompt_tokens + tokens * (tokens + 1) // 2
        for piece in row
        for tokens in piece.responses
    )


def _length(rows: Sequence[PackedRow], lengths: Sequence[int]) -> int:
    """Returns the shortest of the `lengths` into which all rows fit."""
    return min(length for length in lengths if length >= max(map(filled_tokens, rows)))


def _least_padding(
    pieces: Sequence[Piece], lengths: Sequence[int], rows_per_microbatch: int
) -> list[list[PackedRow]]:
    """Packs pieces with little padding. Returns one list of rows per row length in use, each with a multiple of `rows_per_microbatch` rows."""
    room = lengths[0]
    even = even_rows(pieces, room=room, multiple=rows_per_microbatch)
    if len(lengths) == 1:
        return [even]
    # Every microbatch gathers the weights again, so an additional short microbatch must save at least 1/64 of a full microbatch.
    fee = room // 64
    ordered = sorted(even, key=filled_tokens, reverse=True)
    starts = range(0, len(even), rows_per_microbatch)
    most = sum(_length(ordered[start : start + rows_per_microbatch], lengths) for start in starts)
    # A lower bound on the total length: no padding, and every prompt only once.
    least = filled_tokens(list(pieces)) / rows_per_microbatch
    ways = (pieces, _bundle_by_prompt(pieces, room, least=room - room // 32))
    mixes = []
    for short in chain.from_iterable(combinations(lengths[1:], count) for count in range(1, len(lengths))):
        fewest = max(0, -int((sum(short) - least) // room))
        mixes += [(full * room + sum(short) + fee * len(short), full, short) for full in (fewest, fewest + 1)]
    for cost, full, short in sorted(mixes):
        if cost >= most:
            break
        short_rows = [length for length in short for _ in range(rows_per_microbatch)]
        opened = [room] * full * rows_per_microbatch + short_rows
        for way in ways:
            rows = _best_fit(way, room, opened)
            if len(rows) == len(opened):
                cuts = [0, *range(full * rows_per_microbatch, len(rows) + 1, rows_per_microbatch)]
                return [rows[a:b] for a, b in pairwise(cuts) if b > a]
    return [even]


def _fewest_rows(pieces: Sequence[Piece], room: int) -> list[PackedRow]:
    """Tries two packings and returns the one with fewer rows. The first bundles the responses to each prompt. The second keeps only bundles that almost fill a row."""
    ways = (_best_fit(_bundle_by_prompt(pieces, room, least=least), room) for least in (0, room - room // 32))
    return min(ways, key=lambda rows: (len(rows), sum(map(filled_tokens, rows))))


def _bundle_by_prompt(pieces: Sequence[Piece], room: int, *, least: int) -> list[Piece]:
    """Joins pieces with the same prompt into bundles that fill a row as well as possible. Bundles of fewer than `least` tokens are split up again."""
    of_prompt: dict[Hashable, list[Piece]] = {}
    for piece in pieces:
        of_prompt.setdefault(piece.prompt, []).append(piece)
    bundles = []
    for same in of_prompt.values():
        rest = same
        while rest:
            sizes = [piece.response_tokens for piece in rest]
            chosen = _largest_sum(sizes, room - rest[0].prompt_tokens) or [0]
            joined = [rest[i] for i in chosen]
            rest = [piece for i, piece in enumerate(rest) if i not in chosen]
            bundle = Piece(
                rollouts=tuple(index for piece in joined for index in piece.rollouts),
                responses=tuple(tokens for piece in joined for tokens in piece.responses),
                prompt=joined[0].prompt,
                prompt_tokens=joined[0].prompt_tokens,
            )
            bundles += [bundle] if bundle.tokens >= least else joined
    return bundles


def _largest_sum(sizes: Sequence[int], room: int) -> list[int]:
    """Returns the indices of the `sizes` whose sum is as large as possible without exceeding `room`, largest size first.

    >>> _largest_sum([5, 4, 3], 7)
    [1, 2]
    """
    order = sorted(range(len(sizes)), key=lambda i: sizes[i])
    within = (1 << max(room + 1, 1)) - 1
    sums = [1]  # bit n of sums[k] is set if some of the k smallest sizes add up to n
    for index in order:
        sums.append((sums[-1] | sums[-1] << sizes[index]) & within)
    total, chosen = sums[-1].bit_length() - 1, []
    for count in reversed(range(len(order))):
        if not sums[count] >> total & 1:
            chosen.append(order[count])
            total -= sizes[order[count]]
    return chosen


def _best_fit(pieces: Sequence[Piece], room: int, opened: Sequence[int] = ()) -> list[PackedRow]:
    """Packs pieces with the best-fit-decreasing heuristic: longest pieces first, each into the fullest row with enough free tokens.

    Rows that already contain a piece's prompt are preferred. `opened` contains the lengths of the initial rows. Rows of `room` tokens are added if needed.
    """
    rows: list[PackedRow] = [[] for _ in opened]
    left = list(opened)
    """Free tokens of each row."""
    free = sorted((tokens, row) for row, tokens in enumerate(opened))
    """Pairs (free tokens, row index), in ascending order."""
    rows_of: dict[Hashable, list[int]] = {}
    for piece in sorted(pieces, key=lambda piece: -piece.tokens):
        need = piece.response_tokens
        with_prompt = [(left[row], row) for row in rows_of.get(piece.prompt, ()) if left[row] >= need]
        if with_prompt:
            fullest = min(with_prompt)
        else:
            need = piece.tokens
            if not free or free[-1][0] < need:
                left.append(max(room, need))
                insort(free, (left[-1], len(rows)))
                rows.append([])
            fullest = free[bisect_left(free, (need, -1))]
            rows_of.setdefault(piece.prompt, []).append(fullest[1])
        free.pop(bisect_left(free, fullest))
        tokens, row = fullest
        left[row] = tokens - need
        insort(free, (left[row], row))
        rows[row].append(piece)
    return rows
