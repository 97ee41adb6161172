"""The types that flow through the pipe on the host: prompts become groups of graded rollouts.

All hold numpy and Python values of natural length, and nothing here loads jax: grading workers import these types too.
What crosses to the device is a `dapo_jax.dapo.microbatch.Microbatch`.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from numbers import Real
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from jaxtyping import Bool, Float, Int

FinishReason = Literal["stop", "length"]
"""Why sampling ended: an end token, or the length limit."""


Lost = Literal["timeout", "memory", "died", "nonfinite", "raised"]
"""Why a grader gave no verdict: its time, its memory, its process, or a score that is NaN, infinite or beyond all use; or that the environment of an episode raised."""


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One question, ready for the sampler."""

    ordinal: int
    """The prompt's place in the run's prompt sequence: never repeats, though a question may."""
    tokens: Int[np.ndarray, " prompt"]
    text: str
    answer: str
    """The reference answer that a grader compares with."""
    row: Mapping[str, Any] = field(default_factory=dict)
    """The data row that the prompt was made from, for reward functions that need more than the answer."""


class Span(NamedTuple):
    """Tokens of a response that were drawn by the same weights: those from `first` on, up to the next span."""

    first: int
    version: int
    """Steps of the run that had been done; 0: the weights that it began with."""


class TurnSpan(NamedTuple):
    """One turn of an episode: the tokens from `first` up to `stop` were sampled. Those between two turns, and before the first, are the environment's."""

    first: int
    stop: int


class ContextSpan(NamedTuple):
    """A context that an environment put in place of all before it, the prompt included: the tokens from `first` up to `stop`."""

    first: int
    stop: int


class Continuation(NamedTuple):
    """The tokens that an environment puts before a turn."""

    tokens: Int[np.ndarray, " new"]
    anew: bool = False
    """They stand in place of all before them; else they are appended to it."""


class ResponsePart(NamedTuple):
    """The part of a response that was drawn behind one context."""

    context: Int[np.ndarray, " context"]
    first: int
    """Its first token behind the context."""
    stop: int


@dataclass(frozen=True, kw_only=True)
class DrawnTurn:
    """One turn as it was drawn."""

    tokens: Int[np.ndarray, " turn"]
    """The end token included, if there is one."""
    logprobs: Float[np.ndarray, " turn"]
    """In nats, at the sampling temperature."""
    finish_reason: FinishReason


@dataclass(kw_only=True)
class Standing:
    """An environment's account of an episode so far, without its tokens."""

    rewards: tuple[float, ...] = ()
    """The reward of each turn that it has answered."""
    correct: bool | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    lost: Lost | str = ""
    reason: str = ""

    @classmethod
    def of(cls, kept: Mapping[str, Any]) -> "Standing":
        """Returns the account that `dataclasses.asdict` and JSON took apart."""
        fields: dict[str, Any] = {**kept, "rewards": tuple(kept["rewards"])}
        return cls(**fields)


@dataclass(frozen=True, kw_only=True)
class Response:
    """The sampler's result for one slot, not graded yet: a response, or with an environment a whole episode."""

    tokens: Int[np.ndarray, " response"]
    """The sampled tokens, the end token included when there is one; of an episode those that its environment appended, too."""
    logprobs: Float[np.ndarray, " response"]
    """Log-probability of each token in nats, at the sampling temperature, under the weights that sampled it; 0 where it was not sampled."""
    finish_reason: FinishReason
    spans: tuple[Span, ...] = (Span(0, 0),)
    """The weights that drew its tokens: their versions rise, and the first span begins with token 0."""
    turns: tuple[TurnSpan, ...] = ()
    """The turns of an episode, in order; none: all tokens were sampled at once."""
    contexts: tuple[ContextSpan, ...] = ()
    """The contexts that begin anew, in order; none: every token was drawn behind the prompt and all tokens before it."""

    def parts(self, prompt: Int[np.ndarray, " prompt"]) -> list[ResponsePart]:
        """The parts that were drawn behind one context each, those left out in which nothing was sampled: each is a row of its own in training."""
        if not self.contexts:
            return [ResponsePart(prompt, 0, len(self.tokens))]
        begins = [(prompt, 0), *((self.tokens[first:stop], stop) for first, stop in self.contexts)]
        ends = [*(first for first, _ in self.contexts), len(self.tokens)]
        sampled = self.sampled
        return [
            ResponsePart(context, first, stop)
            for (context, first), stop in zip(begins, ends, strict=True)
            if sampled[first:stop].any()
        ]

    @property
    def sampled(self) -> Bool[np.ndarray, " response"]:
        """True for each token that the policy sampled."""
        if not self.turns:
            return np.ones(len(self.tokens), bool)
        found = np.zeros(len(self.tokens), bool)
        for first, stop in self.turns:
            found[first:stop] = True
        return found

    @property
    def sampled_tokens(self) -> int:
        """The number of tokens that the policy sampled: the length that all rules and means go by."""
        return sum(stop - first for first, stop in self.turns) if self.turns else len(self.tokens)

    @property
    def versions(self) -> Int[np.ndarray, " response"]:
        """The version of the weights that drew each token."""
        firsts, versions = zip(*self.spans, strict=True)
        return np.repeat(np.array(versions, np.int32), np.diff((*firsts, len(self.tokens))))


@dataclass(frozen=True, kw_only=True, init=False)
class Verdict:
    """A grader's answer on one response, before any shaping.

    Scalars of numpy, arrays without dimensions of any library, fractions and decimals are taken as Python's bool, number
    or text; `correct` may be 0 or 1.

    Raises:
        ValueError: a field holds something else, such as the text "no" in `correct`; it names field and value.
    """

    correct: bool
    extracted: str | None = None
    """The answer found in the response; None if there was none."""
    reason: str = ""
    """Why the verdict is what it is, for a person who reads rollouts."""
    score: float | None = None
    """A graded score that replaces the +1 / -1 of the rule reward; None for a plain verdict."""
    lost: Lost | Literal[""] = ""
    """Why the grader gave no verdict, so that the response counts as wrong; empty if it gave one."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """In a sum of several graders, each one's reward before its weight. `correct` is then the first one's, `score` the sum. Of an episode, its environment's metrics."""
    turn_rewards: tuple[float, ...] = ()
    """The reward of each turn of an episode; `score` is the sum. A reward that was compared within the group counts as the reward of the last turn."""

    def __init__(
        self,
        *,
        correct: object,
        extracted: object = None,
        reason: object = "",
        score: object = None,
        lost: object = "",
        parts: object = (),
        turn_rewards: object = (),
    ) -> None:
        given = locals()
        for name, (take, need) in _VERDICT_FIELDS.items():
            found = given[name]
            try:
                object.__setattr__(self, name, take(found))
            except (TypeError, ValueError):
                raise ValueError(
                    f"Verdict: {name}={found!r:.200} ({type(found).__name__}), needs {need}; convert it before it is returned"
                ) from None


def plain_scalar(value: Any) -> Any:
    """Python's own value of a numpy scalar, or of an array without dimensions of any library; all else as it is."""
    if getattr(value, "ndim", None) == 0 and callable(getattr(value, "item", None)):
        return value.item()
    return value


def as_float(value: Any) -> float:
    """The float of a real number, a decimal or an array without dimensions: an infinity for one beyond all floats.

    Raises:
        ValueError: it is no number.
    """
    number = plain_scalar(value)
    if not isinstance(number, Real | Decimal):
        raise ValueError(f"{value!r:.200} is no number")
    try:
        return float(number)
    except OverflowError:
        return math.inf if abs(number) == number else -math.inf
    except ValueError:  # a signalling NaN of `decimal`
        return math.nan


def _as_bool(value: Any) -> bool:
    value = plain_scalar(value)
    if isinstance(value, bool):
        return value
    if as_float(value) not in (0.0, 1.0):
        raise ValueError
    return bool(value)


def _as_text(value: Any) -> str:
    value = plain_scalar(value)
    if isinstance(value, str):
        return str(value)
    if isinstance(value, Real | Decimal):
        return str(value)
    raise ValueError


def _as_lost(value: Any) -> str:
    if not isinstance(value, str) or value not in ("", *get_args(Lost)):
        raise ValueError
    return value


def _as_parts(value: Any) -> dict[str, float]:
    if not all(isinstance(name, str) for name in value):
        raise ValueError
    return {name: as_float(part) for name, part in value.items()}


_VERDICT_FIELDS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "correct": (_as_bool, "a bool"),
    "extracted": (lambda value: None if value is None else _as_text(value), "text, a number or None"),
    "reason": (lambda value: "" if value is None else _as_text(value), "text"),
    "score": (lambda value: None if value is None else as_float(value), "a number or None"),
    "lost": (_as_lost, f"one of {get_args(Lost)} or an empty text"),
    "parts": (lambda value: _as_parts(dict(value)), "a mapping of names to numbers"),
    "turn_rewards": (lambda value: tuple(as_float(reward) for reward in value), "numbers"),
}
"""The reading of each field of a verdict, and what it needs."""


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """One sampled and graded response."""

    response: Response
    text: str
    """The response decoded without special tokens: what the grader saw."""
    verdict: Verdict
    reward: float
    """The number that the advantage is computed from: the verdict's reward plus the overlong penalty."""
    overlong_penalty: float = 0.0
    """The part of `reward` that is length shaping (DAPO Eq. 13), in [-penalty_factor, 0]."""

    @property
    def correct(self) -> bool:
        """The grader's verdict, before any shaping."""
        return self.verdict.correct

    @property
    def truncated(self) -> bool:
        """True if sampling stopped at the length limit rather than at an end token."""
        return self.response.finish_reason == "length"

    @property
    def response_tokens(self) -> int:
        """Length of the response in tokens that were sampled, the end token included."""
        return self.response.sampled_tokens


@dataclass(frozen=True, kw_only=True)
class Group:
    """The graded responses to one prompt, in the order of their response index."""

    prompt: Prompt
    rollouts: tuple[Rollout, ...]

    @property
    def oldest(self) -> int:
        """The version of the weights that drew its oldest token."""
        return min(rollout.response.spans[0].version for rollout in self.rollouts)

    @property
    def newest(self) -> int:
        """The version of the weights that drew its newest token."""
        return max(rollout.response.spans[-1].version for rollout in self.rollouts)

    @property
    def rewards(self) -> Float[np.ndarray, " group"]:
        """One shaped reward per rollout, in float64."""
        return np.array([rollout.reward for rollout in self.rollouts], dtype=np.float64)

    @property
    def accuracy(self) -> float:
        """The fraction of rollouts that are correct."""
        return sum(rollout.correct for rollout in self.rollouts) / len(self.rollouts)
