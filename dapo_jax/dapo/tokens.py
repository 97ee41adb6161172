"""`Tokens`: the ids of consecutive tokens, and the values that the sampler records for each token.

The engine's results, requests, responses, checkpoints, exchanges between processes, training examples and the rows of an update all use this record. To record a further
value for each token, add an entry to `VALUES`, and have the engine return it. No other code copies values one by one.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float, Int, UInt

NO_ROUTE = -1
"""Entry of a token's chosen experts where nothing is recorded. All entries of a token are equal to it, and the token then chooses its experts itself. Records have unsigned
integers, which store it as their largest number."""

Shapes = tuple[tuple[str, tuple[int, ...], str], ...]
"""The names of optional values that a run records, each with its shape per token and its dtype."""

_FIRST_TOKENS = 256
"""Initial size of the arrays to which tokens are appended, in tokens."""


@dataclass(frozen=True, kw_only=True)
class TokenValue:
    """How one value of each token is stored."""

    dtypes: tuple[str, ...]
    """The dtypes that an array of the value may have. Other arrays are converted to the first one."""
    blank: int | float
    """The value where nothing is recorded: in prompts, in tokens from environments, and in padding."""
    processed: bool = False
    """Whether the model computes the value when it processes a token. Prompts and tokens from environments then have it too, and the last token lacks it. Other values
    are known as soon as a token is sampled."""
    packed: str = ""
    """The field of `Microbatch` for a value that every run records. All other values are optional and are packed into `Microbatch.recorded`. Their shapes per token
    come from the model, and `Tokens` has no array of such a value until one is recorded."""

    def stored(self, array: Any) -> np.ndarray:
        """Converts an array to a dtype of this value."""
        array = np.asarray(array)
        return array if array.dtype in self.dtypes else array.astype(self.dtypes[0])

    def blank_as(self, dtype: Any) -> np.ndarray:
        """Returns `blank` in a dtype. An unsigned integer stores -1 as its largest number."""
        return np.array(self.blank).astype(dtype)


VALUES = {
    "tokens": TokenValue(dtypes=("int32",), blank=0, packed="tokens"),
    "logprobs": TokenValue(dtypes=("float32",), blank=0.0, packed="sampler_logprobs"),
    "routes": TokenValue(dtypes=("uint8", "uint16"), blank=NO_ROUTE, processed=True),
    "head_ids": TokenValue(dtypes=("int32",), blank=0),
    "head_logprobs": TokenValue(dtypes=("float32",), blank=0.0),
}
"""The values of a token, by their names in the engine's results, in checkpoints and in exchanges. The first is the token's id."""


HEADS = ("head_ids", "head_logprobs")
"""The values of a position's head: the most probable tokens of the sampler, most probable first, and their log-probabilities in nats."""


def head_shapes(count: int) -> Shapes:
    """Returns the optional values of a run that records the `count` most probable tokens at each position. Empty if `count` is 0."""
    return tuple((name, (count,), VALUES[name].dtypes[0]) for name in HEADS) if count else ()


def values_of(result: Any, *, processed: bool) -> dict[str, Any]:
    """Returns the arrays of an engine's result, by value: only values that come with processing a token, or only values that come with sampling it."""
    names = [name for name, value in VALUES.items() if value.processed == processed]
    return {name: array for name in names if (array := getattr(result, name, None)) is not None}


def bytes_per_token(shapes: Sequence[tuple[str, tuple[int, ...], str]] = ()) -> int:
    """Returns the size of a token's record in bytes. `shapes` has the optional values that are recorded."""
    always = (((), value.dtypes[0]) for value in VALUES.values() if value.packed)
    sizes = [*always, *((shape, dtype) for _, shape, dtype in shapes)]
    return sum(np.dtype(dtype).itemsize * math.prod(shape) for shape, dtype in sizes)


class Tokens:
    """Consecutive tokens with their recorded values. Only the owner of a response that is being sampled changes them; later stages only read them."""

    def __init__(self, tokens: Any = (), **values: Any) -> None:
        """Creates a record from token ids and one array per value. Missing values are blank.
        Raises ValueError if `VALUES` has no such value, or the arrays have different lengths."""
        given = {"tokens": tokens, **{name: array for name, array in values.items() if array is not None}}
        if unknown := given.keys() - VALUES.keys():
            raise ValueError(
                f"a token has no value {min(unknown)!r}, only {', '.join(VALUES)}: add it to VALUES"
            )
        self._arrays = {name: VALUES[name].stored(array) for name, array in given.items()}
        self._count = len(self._arrays["tokens"])
        for name, value in VALUES.items():
            if name not in self._arrays and value.packed:
                self._arrays[name] = _blank(name, self._count)
        for name, array in self._arrays.items():
            if len(array) != self._count:
                raise ValueError(
                    f"{name} has {len(array)} entries for {self._count} tokens: give one entry per token"
                )

    def __len__(self) -> int:
        return self._count

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        """The array of each value."""
        return {name: array[: self._count] for name, array in self._arrays.items()}

    @property
    def processed(self) -> dict[str, np.ndarray]:
        """The arrays of values that come with processing a token. Empty if nothing is recorded."""
        return {name: array for name, array in self.arrays.items() if VALUES[name].processed}

    @property
    def sampled(self) -> "Tokens":
        """The tokens without values that come with processing a token."""
        return Tokens(**{name: array for name, array in self.arrays.items() if not VALUES[name].processed})

    @property
    def ids(self) -> Int[np.ndarray, " tokens"]:
        """The token ids."""
        return self._arrays["tokens"][: self._count]

    @property
    def logprobs(self) -> Float[np.ndarray, " tokens"]:
        """The log-probabilities in nats, at the sampling temperature and under the weights that sampled each token; 0 for tokens that were not sampled."""
        return self._arrays["logprobs"][: self._count]

    @property
    def routes(self) -> UInt[np.ndarray, "tokens layers chosen"] | None:
        """The experts that the sampler chose for each token, `NO_ROUTE` where nothing is recorded. None if nothing is recorded at all."""
        return self.arrays.get("routes")

    @property
    def settled(self) -> int:
        """Number of tokens up to the last one with values that come with processing."""
        firsts = {name: array[:, *[0] * (array.ndim - 1)] for name, array in self.processed.items()}
        known = [
            np.flatnonzero(first != VALUES[name].blank_as(first.dtype)) for name, first in firsts.items()
        ]
        return min((int(places[-1]) + 1 if len(places) else 0 for places in known), default=0)

    def cut(self, first: int = 0, stop: int | None = None) -> "Tokens":
        """Returns the tokens from `first` to `stop`, as views."""
        return Tokens(**{name: array[first:stop] for name, array in self.arrays.items()})

    def copy(self) -> "Tokens":
        """Returns a copy that shares no memory."""
        return Tokens(**{name: array.copy() for name, array in self.arrays.items()})

    def append(self, new: "Tokens") -> None:
        """Appends tokens. Full arrays double their size, because a response grows by a few tokens at a time."""
        if not len(new):
            return
        first, stop = self._count, self._count + len(new)
        if stop > len(self._arrays["tokens"]):
            room = max(stop, 2 * len(self._arrays["tokens"]), _FIRST_TOKENS)
            known, self._arrays = self.arrays, {}
            for name, array in known.items():
                self._array(name, array, room)[:first] = array
        self._count = stop
        for name, array in new.arrays.items():
            self._array(name, array)[first:stop] = array
        for name in self._arrays.keys() - new.arrays.keys():
            self._arrays[name][first:stop] = VALUES[name].blank_as(self._arrays[name].dtype)

    def fill(self, first: int, values: Mapping[str, np.ndarray]) -> None:
        """Records values of the tokens from index `first` on. A token keeps its first values, and entries after the last token are ignored."""
        for name, new in values.items():
            known = self._array(name, new)[first : min(self._count, first + len(new))]
            np.copyto(known, new[: len(known)], where=known == VALUES[name].blank_as(known.dtype))

    def end(self, count: int) -> None:
        """Removes all tokens after the first `count`, and the values of the last token that come with processing it."""
        self._count = count
        for name, array in self.processed.items():
            array[-1:] = VALUES[name].blank_as(array.dtype)

    def _array(self, name: str, like: np.ndarray, room: int = 0) -> np.ndarray:
        """Returns the array of a value, which is longer than the tokens. Creates it if necessary, with the dtype of `like` and its shape per token."""
        if name not in self._arrays:
            self._arrays[name] = _blank(name, room or len(self._arrays["tokens"]), like).copy()
        return self._arrays[name]


def join(parts: Sequence[Tokens]) -> Tokens:
    """Concatenates tokens. If only some parts have a value, it is blank in the other parts."""
    known = {name: array for part in parts for name, array in part.arrays.items()}
    whole = {
        name: [part.arrays.get(name, _blank(name, len(part), like)) for part in parts]
        for name, like in known.items()
    }
    return Tokens(**{name: np.concatenate(arrays) for name, arrays in whole.items()})


def _blank(name: str, count: int, like: np.ndarray | None = None) -> np.ndarray:
    """Returns blank values of tokens, which occupy no memory and cannot be written. They have the dtype of `like` and its shape per token."""
    dtype, shape = (VALUES[name].dtypes[0], ()) if like is None else (like.dtype, like.shape[1:])
    return np.broadcast_to(VALUES[name].blank_as(dtype), (count, *shape))
