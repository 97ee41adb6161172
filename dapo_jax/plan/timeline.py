"""Responses side by side in the slots of samplers: when each starts, and how long it all takes.

All samplers at once, as rows of arrays; a response of no tokens is padding. Lengths and times of start are in decode steps of its sampler.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from dapo_jax.plan.sampling_time import DecodeTime

Table = Float[np.ndarray, "samplers responses"] | Int[np.ndarray, "samplers responses"]


class Decoded(NamedTuple):
    """The decoding of each sampler."""

    seconds: Float[np.ndarray, " samplers"]
    live_s: Float[np.ndarray, " samplers"]
    """The sum over slots of the time in which a response of theirs drew."""
    steps: Int[np.ndarray, " samplers"]
    """Decode steps, one after another."""


def by_sampler(
    sampler: Int[np.ndarray, " all"], count: int, *columns: Float[np.ndarray, " all"] | Int[np.ndarray, " all"]
) -> list[Table]:  # fmt: skip
    """Each column as a table with a row for each of `count` samplers, in the order in which they come, zeros behind them."""
    each = np.bincount(sampler, minlength=count)
    order = np.argsort(sampler, kind="stable")
    rows = sampler[order]
    places = np.arange(len(sampler)) - (np.cumsum(each) - each)[rows]
    made = []
    for column in columns:
        table = np.zeros((count, max(each.max(initial=0), 1)), column.dtype)
        table[rows, places] = column[order]
        made.append(table)
    return made


def starts_of(lengths: Table, places: int) -> Int[np.ndarray, "samplers responses"]:
    """The step at which each response starts, if the next one in line takes the first of `places` that is free."""
    starts = np.zeros(lengths.shape, np.int64)
    free = np.zeros((len(lengths), places), np.int64)
    first = lengths[:, :places]
    free[:, : first.shape[1]] = first
    rows = np.arange(len(lengths))
    for at in range(places, lengths.shape[1]):
        place = free.argmin(axis=1)
        starts[:, at] = free[rows, place]
        free[rows, place] += lengths[:, at]
    return np.where(lengths > 0, starts, 0)


def decoded(starts: Table, lengths: Table, held: Table, time: DecodeTime) -> Decoded:
    """The time of all steps, each of which takes what `time` says of the responses in the slots and of the tokens that these attend to.

    Args:
        starts: of each response.
        lengths: tokens that it draws.
        held: tokens of it that are in the cache when it starts, the prompt's among them; each that it draws is one more.
        time: seconds of a step.
    """
    ends = starts + lengths
    times = np.concatenate([starts, ends], axis=1)
    one = (lengths > 0).astype(np.int64)
    begins = np.where(lengths > 0, held - starts, 0)
    order = times.argsort(axis=1)
    times = np.take_along_axis(times, order, axis=1)
    # Between two of these times the same responses are live: `live` of them, which attend to `base` + step x `live` tokens.
    live, base = (
        np.take_along_axis(np.concatenate([change, -change], axis=1), order, axis=1).cumsum(axis=1)[:, :-1]
        for change in (one, begins)
    )
    steps = np.diff(times, axis=1)
    middle = (times[:, 1:] + times[:, :-1] - 1) / 2
    seconds = np.where(live > 0, steps * time(live, base + live * middle), 0.0)
    return Decoded(seconds.sum(axis=1), (live * seconds).sum(axis=1), ends.max(axis=1))
