"""The turns of episodes as plain arrays: which of a response's tokens were sampled, and what each turn was worth."""

from collections.abc import Mapping, Sequence

import numpy as np

from dapo_jax.dapo.rollouts import ContextSpan, Rollout, TurnSpan

_NAMES = ("turn_firsts", "turn_stops", "reward_counts", "turn_rewards")


def turn_arrays(rollouts: Sequence[Rollout]) -> dict[str, np.ndarray]:
    """Flattens the turns of each rollout; empty if none has any."""
    turns = [rollout.response.turns for rollout in rollouts]
    if not any(turns):
        return {}
    rewards = [rollout.verdict.turn_rewards for rollout in rollouts]
    return {
        "turn_counts": np.array([len(each) for each in turns], np.int64),
        "turn_firsts": np.array([turn.first for each in turns for turn in each], np.int64),
        "turn_stops": np.array([turn.stop for each in turns for turn in each], np.int64),
        "reward_counts": np.array([len(each) for each in rewards], np.int64),
        "turn_rewards": np.array([reward for each in rewards for reward in each], np.float64),
        **_context_arrays(rollouts),
    }


def _context_arrays(rollouts: Sequence[Rollout]) -> dict[str, np.ndarray]:
    contexts = [rollout.response.contexts for rollout in rollouts]
    if not any(contexts):
        return {}
    return {
        "context_counts": np.array([len(each) for each in contexts], np.int64),
        "context_firsts": np.array([one.first for each in contexts for one in each], np.int64),
        "context_stops": np.array([one.stop for each in contexts for one in each], np.int64),
    }


def turns_of(
    arrays: Mapping[str, np.ndarray],
) -> tuple[list[tuple[TurnSpan, ...]], list[tuple[float, ...]]]:
    """The turns that `turn_arrays` flattened, and their rewards, of each response."""
    if "turn_counts" not in arrays:
        count = len(arrays["lengths"])
        return [()] * count, [()] * count
    firsts, stops, _, rewards = (arrays[name].tolist() for name in _NAMES)
    turns = list(map(TurnSpan, firsts, stops))
    return _cut(turns, arrays["turn_counts"]), _cut(rewards, arrays["reward_counts"])


def contexts_of(arrays: Mapping[str, np.ndarray]) -> list[tuple[ContextSpan, ...]]:
    """The contexts that begin anew, of each response."""
    if "context_counts" not in arrays:
        return [()] * len(arrays["lengths"])
    spans = map(ContextSpan, arrays["context_firsts"].tolist(), arrays["context_stops"].tolist())
    return _cut(list(spans), arrays["context_counts"])


def _cut(values: Sequence, counts: np.ndarray) -> list[tuple]:
    ends = np.cumsum(counts, dtype=np.int64).tolist()
    return [tuple(values[end - count : end]) for count, end in zip(counts.tolist(), ends, strict=True)]


def check_turns(arrays: Mapping[str, np.ndarray]) -> None:
    """Refuses arrays that are no turns of the responses whose `lengths` are there.

    Raises:
        ValueError: names the array.
    """
    if "turn_counts" not in arrays:
        if "context_counts" in arrays:
            raise ValueError("'context_counts' are there without 'turn_counts'")
        return
    lengths, contexts = arrays["lengths"], "context_counts" in arrays
    for name in ("turn_counts", "reward_counts", *(["context_counts"] if contexts else [])):
        counts = arrays.get(name)
        if counts is None or counts.shape != lengths.shape or counts.dtype.kind != "i" or (counts < 0).any():
            raise ValueError(f"{name!r} is not one number, 0 or more, for each response")
        if (counts > lengths + 1).any():
            raise ValueError(f"{name!r} has more turns than a response has tokens")
    totals = {
        "turn_firsts": ("i", "turn_counts"),
        "turn_stops": ("i", "turn_counts"),
        "turn_rewards": ("f", "reward_counts"),
    }
    if contexts:
        totals |= {"context_firsts": ("i", "context_counts"), "context_stops": ("i", "context_counts")}
    for name, (kind, counted) in totals.items():
        total = int(arrays[counted].sum())
        array = arrays.get(name)
        if array is None or array.shape != (total,) or array.dtype.kind != kind:
            raise ValueError(f"{name!r} is not one number for each of {total:,} turns")
    if not np.isfinite(arrays["turn_rewards"]).all():
        raise ValueError("'turn_rewards' has one that is not finite")
    for turns, contexts, length in zip(
        turns_of(arrays)[0], contexts_of(arrays), lengths.tolist(), strict=True
    ):
        edges = [edge for span in sorted([*turns, *contexts]) for edge in span]
        if edges != sorted(edges) or any(not 0 <= edge <= length for edge in edges):
            raise ValueError(
                "'turn_firsts' and 'turn_stops' have turns, or contexts beside them, that do not follow each other within their response"
            )
