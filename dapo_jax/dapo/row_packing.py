"""Which rollouts share a row, and which rows stand side by side: lengths in, indices out.

Through the weights every row of one length costs the same, for its padding is computed too. What differs is attention: the
pairs of a token and a token it sees. A microbatch takes as long as its slowest row, so there are first as few tokens of rows as
possible, then rows of much the same length, and then rows with about as many pairs in one microbatch.
"""

from bisect import bisect_left, insort
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import chain, combinations, pairwise


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Responses to one prompt that are put into a row together."""

    rollouts: tuple[int, ...]
    """Their indices."""
    responses: tuple[int, ...]
    """Their lengths in tokens."""
    prompt: Hashable
    """Pieces with the same one share it if they come into one row."""
    prompt_tokens: int

    @property
    def response_tokens(self) -> int:
        """Length of the responses together."""
        return sum(self.responses)

    @property
    def tokens(self) -> int:
        """Length with the prompt."""
        return self.prompt_tokens + self.response_tokens


PackedRow = list[Piece]


def share_out(
    pieces: Sequence[Piece],
    *,
    lengths: Sequence[int],
    rows_per_microbatch: int,
    spread: int,
    alone: bool = False,
) -> list[tuple[int, list[PackedRow]]]:
    """Microbatches of `rows_per_microbatch` rows, which have one length in each of them: one of `lengths`, which are given longest first.

    With one length, what is left over after the full microbatches fills one of its own, mostly with padding. With shorter ones
    too, some rollouts come into microbatches of shorter rows, as far as that leaves less to compute.

    Args:
        pieces: of the rollouts.
        lengths: of rows; the first holds the longest piece.
        rows_per_microbatch: rows that one forward and backward pass takes.
        spread: over how many groups of devices these lie.
        alone: each piece has a row of its own.
    """
    # With no room to share, each has a row of its own.
    parts = (
        [even_rows(pieces, room=0, multiple=rows_per_microbatch)]
        if alone
        else _least_padding(pieces, lengths, rows_per_microbatch)
    )
    made = []
    for rows in parts:
        ordered = side_by_side(rows, rows_per_microbatch=rows_per_microbatch, spread=spread)
        made += [
            ordered[start : start + rows_per_microbatch]
            for start in range(0, len(ordered), rows_per_microbatch)
        ]
    return sorted(((_length(rows, lengths), rows) for rows in made), key=lambda one: -one[0])


def even_rows(pieces: Sequence[Piece], *, room: int, multiple: int) -> list[PackedRow]:
    """Rows of at most `room` tokens or one piece, their number a multiple of `multiple`: as few as are found, then as even.

    Where rows are left over, responses spread into them instead of leaving them empty: the limit is lowered as far as the number
    of rows allows.
    """
    rows = _fewest(pieces, room)
    count = -(-len(rows) // multiple) * multiple
    too_low, limit = sum(map(filled_tokens, rows)) // count, room
    while limit - too_low > 1 + room // 64:
        lower = (too_low + limit) // 2
        tried = _fewest(pieces, lower)
        if len(tried) <= count:
            rows, limit = tried, lower
        else:
            too_low = lower
    return rows + [[] for _ in range(count - len(rows))]


def side_by_side(rows: Sequence[PackedRow], *, rows_per_microbatch: int, spread: int) -> list[PackedRow]:
    """The rows in an order in which every `rows_per_microbatch` of them are alike, and the `spread` equal parts of these too.

    Sorted by the pairs that attention has to see, cut into microbatches, and in each dealt out: the next `spread` rows to
    the parts, the greatest to the part that has least.
    """
    ordered = sorted(rows, key=seen_pairs, reverse=True)
    out: list[PackedRow] = []
    for start in range(0, len(ordered), rows_per_microbatch):
        parts: list[list[PackedRow]] = [[] for _ in range(spread)]
        pairs = [0] * spread
        for first in range(start, start + rows_per_microbatch, spread):
            least_first = sorted(range(spread), key=pairs.__getitem__)
            for part, row in zip(least_first, ordered[first : first + spread], strict=True):
                parts[part].append(row)
                pairs[part] += seen_pairs(row)
        out += [row for part in parts for row in part]
    return out


def filled_tokens(row: PackedRow) -> int:
    """Length of a row; pieces with the same prompt share it."""
    prompts = {piece.prompt: piece.prompt_tokens for piece in row}
    return sum(prompts.values()) + sum(piece.response_tokens for piece in row)


def seen_pairs(row: PackedRow) -> int:
    """The number of pairs of a token and one that it sees, itself among them.

    >>> seen_pairs([Piece(rollouts=(0, 1), responses=(2, 1), prompt="p", prompt_tokens=3)])  # 1+2+3, then 4+5, then 4
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
    """The shortest of `lengths` that holds each of the rows."""
    return min(length for length in lengths if length >= max(map(filled_tokens, rows)))


def _least_padding(
    pieces: Sequence[Piece], lengths: Sequence[int], rows_per_microbatch: int
) -> list[list[PackedRow]]:
    """Rows of the longest length, then those of each shorter microbatch; every list has a multiple of `rows_per_microbatch` rows."""
    room = lengths[0]
    even = even_rows(pieces, room=room, multiple=rows_per_microbatch)
    if len(lengths) == 1:
        return [even]
    # Every microbatch gathers the weights once more; 1/64 of a full one is about what a short one has to save to be worth it.
    fee = room // 64
    ordered = sorted(even, key=filled_tokens, reverse=True)
    most = sum(
        _length(ordered[start : start + rows_per_microbatch], lengths)
        for start in range(0, len(even), rows_per_microbatch)
    )
    least = (
        filled_tokens(list(pieces)) / rows_per_microbatch
    )  # if every prompt stood only once, and without a gap
    ways = (pieces, _bundled(pieces, room, least=room - room // 32))
    mixes = []
    for short in chain.from_iterable(combinations(lengths[1:], count) for count in range(1, len(lengths))):
        fewest = max(0, -int((sum(short) - least) // room))
        mixes += [(full * room + sum(short) + fee * len(short), full, short) for full in (fewest, fewest + 1)]
    for cost, full, short in sorted(mixes):
        if cost >= most:
            break
        opened = [room] * full * rows_per_microbatch + [
            length for length in short for _ in range(rows_per_microbatch)
        ]
        for way in ways:
            rows = _best_fit(way, room, opened)
            if len(rows) == len(opened):
                cuts = [0, *range(full * rows_per_microbatch, len(rows) + 1, rows_per_microbatch)]
                return [rows[a:b] for a, b in pairwise(cuts) if b > a]
    return [even]


def _fewest(pieces: Sequence[Piece], room: int) -> list[PackedRow]:
    """The better of two ways: responses to a prompt stay together, or only those that about fill a row by themselves."""
    ways = (_best_fit(_bundled(pieces, room, least=least), room) for least in (0, room - room // 32))
    return min(ways, key=lambda rows: (len(rows), sum(map(filled_tokens, rows))))


def _bundled(pieces: Sequence[Piece], room: int, *, least: int) -> list[Piece]:
    """Pieces with the same prompt made one, as full a row as can be at a time, where that comes to `least` tokens."""
    of_prompt: dict[Hashable, list[Piece]] = {}
    for piece in pieces:
        of_prompt.setdefault(piece.prompt, []).append(piece)
    bundles = []
    for same in of_prompt.values():
        rest = same
        while rest:
            sizes = [piece.response_tokens for piece in rest]
            chosen = _fullest(sizes, room - rest[0].prompt_tokens) or [0]
            parts = [rest[i] for i in chosen]
            rest = [piece for i, piece in enumerate(rest) if i not in chosen]
            bundle = Piece(
                rollouts=tuple(index for part in parts for index in part.rollouts),
                responses=tuple(tokens for part in parts for tokens in part.responses),
                prompt=parts[0].prompt,
                prompt_tokens=parts[0].prompt_tokens,
            )
            bundles += [bundle] if bundle.tokens >= least else parts
    return bundles


def _fullest(sizes: Sequence[int], room: int) -> list[int]:
    """The indices of those `sizes` whose sum comes closest to `room` from below, largest first.

    >>> _fullest([5, 4, 3], 7)
    [1, 2]
    """
    order = sorted(range(len(sizes)), key=lambda i: sizes[i])
    within = (1 << max(room + 1, 1)) - 1
    sums = [1]  # bit n of the k-th: some of the first k sizes come to n
    for index in order:
        sums.append((sums[-1] | sums[-1] << sizes[index]) & within)
    total, chosen = sums[-1].bit_length() - 1, []
    for place in reversed(range(len(order))):
        if not sums[place] >> total & 1:
            chosen.append(order[place])
            total -= sizes[order[place]]
    return chosen


def _best_fit(pieces: Sequence[Piece], room: int, opened: Sequence[int] = ()) -> list[PackedRow]:
    """Longest first, each into the row that it leaves least room in: one that has its prompt, or else any other.

    There are rows of `opened` tokens, and as many of `room` as are needed beside them.
    """
    rows: list[PackedRow] = [[] for _ in opened]
    left = list(opened)
    free = sorted((tokens, row) for row, tokens in enumerate(opened))
    """(tokens left, row), least first."""
    having: dict[Hashable, list[int]] = {}
    for piece in sorted(pieces, key=lambda piece: -piece.tokens):
        need = piece.response_tokens
        homes = [(left[row], row) for row in having.get(piece.prompt, ()) if left[row] >= need]
        if homes:
            place = min(homes)
        else:
            need = piece.tokens
            at = bisect_left(free, (need, -1))
            if at < len(free):
                place = free[at]
            else:
                place = (max(room, need), len(rows))
                rows.append([])
                left.append(place[0])
                insort(free, place)
            having.setdefault(piece.prompt, []).append(place[1])
        free.pop(bisect_left(free, place))
        tokens, row = place
        left[row] = tokens - need
        insort(free, (left[row], row))
        rows[row].append(piece)
    return rows
