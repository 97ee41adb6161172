"""Host-side types: prompts, responses, verdicts, rollouts and groups.

Their arrays are numpy arrays without padding. This module does not import jax, because grading workers use these types too.
`dapo_jax.dapo.microbatch.Microbatch` is the corresponding type on the device.
"""

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from jaxtyping import Bool, Float, Int

from dapo_jax.dapo.tokens import Tokens

FinishReason = Literal["stop", "length"]
"""The reason why sampling ended: an end token ("stop"), or the length limit ("length")."""

Lost = Literal["timeout", "memory", "died", "nonfinite", "raised"]
"""Why a response has no verdict: the grader exceeded its time or memory limit, its process died, its score is not finite, or the environment raised."""


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One tokenized question, ready for the sampler."""

    ordinal: int
    """Position in the run's sequence of prompts. It is unique, even if the same question occurs again."""
    tokens: Int[np.ndarray, " prompt"]
    text: str
    answer: str
    """Reference answer for the grader."""
    row: Mapping[str, Any] = field(default_factory=dict)
    """The dataset row of the prompt, for reward functions that need more than the answer."""
    is_plain: bool = False
    """Whether the prompt is plain text, which a response continues, instead of a conversation."""


class Span(NamedTuple):
    """A range of response tokens that were sampled with the same weights. It begins at token `first` and ends where the next span begins."""

    first: int
    version: int
    """Number of training steps that produced these weights; 0 for the initial weights."""


class TurnSpan(NamedTuple):
    """One turn of an episode: the policy sampled the response tokens `[first:stop]`. Tokens outside of all turns come from the environment."""

    first: int
    stop: int


class ContextSpan(NamedTuple):
    """A new context in an episode: the response tokens `[first:stop]` replace the prompt and all earlier tokens."""

    first: int
    stop: int


class Draw(NamedTuple):
    """The tokens of a response in brief, to count equal responses and to compute how many are expected."""

    digest: int
    """The first 48 bits of the SHA-256 of the token ids."""
    logprob: float
    """Sum of the log-probabilities of the sampled tokens in nats, in float64."""


class Continuation(NamedTuple):
    """The tokens that an environment supplies before a turn."""

    tokens: Int[np.ndarray, " new"]
    new_context: bool = False
    """If True, the tokens are a new context, which replaces all earlier tokens. If False, they are appended."""
    limit: int = 0
    """Maximum number of tokens in the next turn. 0 means that only the limits of the run apply."""


class ResponsePart(NamedTuple):
    """The part of a response that was sampled in one context."""

    context: Tokens
    first: int
    """Index of the first response token after the context."""
    stop: int


@dataclass(frozen=True, kw_only=True)
class DrawnTurn:
    """One turn of an episode that the policy has sampled."""

    record: Tokens
    """The sampled tokens, including the end token if there is one."""
    finish_reason: FinishReason
    before: Continuation | None = None
    """The tokens that the environment supplied before the turn. None if they are unknown."""


@dataclass(kw_only=True)
class Standing:
    """The results that the environment has reported so far for one episode. The episode's tokens are stored elsewhere."""

    rewards: tuple[float, ...] = ()
    """The reward of each turn to which the environment has replied."""
    correct: bool | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    lost: Lost | Literal[""] = ""
    reason: str = ""
    over: bool = False
    """Whether the environment has ended the episode."""
    ungraded: bool = False
    """Whether the environment has left the reward to the grader."""
    forgotten: tuple[int, ...] = ()
    """The turns that stay out of the loss, by number."""
    turn_limit: int = 0
    """Maximum number of tokens in the current turn, see `Continuation.limit`."""

    @classmethod
    def of(cls, kept: Mapping[str, Any]) -> "Standing":
        """Restores a `Standing` from the dict that `dataclasses.asdict` returned, even if the dict was stored as JSON in between."""
        fields: dict[str, Any] = {**kept, "rewards": tuple(kept["rewards"])}
        fields["forgotten"] = tuple(kept.get("forgotten", ()))
        return cls(**fields)


@dataclass(frozen=True, kw_only=True)
class Response:
    """The sampler's result before grading: a single response or, with an environment, a whole episode."""

    record: Tokens
    """Sampled tokens, including the end token if there is one. In an episode, also the tokens that the environment supplied."""
    finish_reason: FinishReason
    spans: tuple[Span, ...] = (Span(0, 0),)
    """The version of the weights for each range of tokens, in token order. The first span begins at token 0."""
    turns: tuple[TurnSpan, ...] = ()
    """The turns of an episode, in order. Empty for a response without an environment."""
    contexts: tuple[ContextSpan, ...] = ()
    """The new contexts of an episode, in order. If empty, every token follows the prompt and all earlier tokens."""
    prompt_values: Mapping[str, np.ndarray] = field(default_factory=dict)
    """The values that the model computed for the tokens of the prompt (see `TokenValue.processed`). Responses to a prompt share these arrays if they started together."""
    known_draw: Draw | None = None
    """The result of `draw`, for a response whose tokens are not in this process."""

    @property
    def tokens(self) -> Int[np.ndarray, " response"]:
        """The ids in `record`."""
        return self.record.ids

    @property
    def logprobs(self) -> Float[np.ndarray, " response"]:
        """The log-probabilities in `record`, in nats."""
        return self.record.logprobs

    @property
    def draw(self) -> Draw:
        """A digest of all tokens, and the log-probability of the sampled ones."""
        if self.known_draw is not None:
            return self.known_draw
        digest = hashlib.sha256(np.ascontiguousarray(self.tokens, "<i4").tobytes()).digest()
        logprob = float(self.logprobs[self.sampled].sum(dtype=np.float64))
        return Draw(int.from_bytes(digest[:6], "little"), logprob)

    def parts(self, prompt: Int[np.ndarray, " prompt"]) -> list[ResponsePart]:
        """Splits the response into one part per context, and returns the parts that contain sampled tokens. Each part becomes a training example."""
        context = Tokens(prompt, **self.prompt_values)
        if not self.contexts:
            return [ResponsePart(context, 0, len(self.tokens))]
        begins = [(context, 0), *((self.record.cut(first, stop), stop) for first, stop in self.contexts)]
        ends = [*(first for first, _ in self.contexts), len(self.tokens)]
        parts = (ResponsePart(*begin, stop) for begin, stop in zip(begins, ends, strict=True))
        sampled = self.sampled
        return [part for part in parts if sampled[part.first : part.stop].any()]

    @property
    def sampled(self) -> Bool[np.ndarray, " response"]:
        """True for each token that the policy sampled."""
        if not self.turns:
            return np.ones(len(self.tokens), bool)
        sampled = np.zeros(len(self.tokens), bool)
        for first, stop in self.turns:
            sampled[first:stop] = True
        return sampled

    @property
    def sampled_tokens(self) -> int:
        """Number of tokens that the policy sampled. Length limits, penalties and metrics use this number as the response length."""
        return sum(stop - first for first, stop in self.turns) if self.turns else len(self.tokens)

    @property
    def versions(self) -> Int[np.ndarray, " response"]:
        """Version of the weights that sampled each token."""
        firsts, versions = zip(*self.spans, strict=True)
        return np.repeat(np.array(versions, np.int32), np.diff((*firsts, len(self.tokens))))


@dataclass(frozen=True, kw_only=True, init=False)
class Verdict:
    """A grader's verdict on one response, before any reward shaping.

    NumPy scalars and zero-dimensional arrays are converted to a Python bool, number or string. `correct` may be 0 or 1.

    Raises:
        ValueError: a field has the wrong type, such as the string "no" for `correct`. The message names the field and the value.
    """

    correct: bool
    extracted: str | None = None
    """The answer found in the response, if there is one."""
    reason: str = ""
    """Explanation of the verdict, shown with the rollout."""
    score: float | None = None
    """A score that replaces the rule-based reward of +1 or -1. If None, the rule-based reward is used."""
    lost: Lost | Literal[""] = ""
    """The reason why there is no verdict; empty if there is a verdict. A response without a verdict is treated as wrong."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """The reward from each grader before weighting, if there are several. `correct` then comes from the first grader, and `score` is the weighted sum.
    In an episode, `parts` contains the environment's metrics."""
    turn_rewards: tuple[float, ...] = ()
    """The reward of each turn of an episode. `score` is their sum. A reward from `group_rewards` replaces these rewards and is assigned to the last turn."""
    forgotten: tuple[int, ...] = ()
    """The turns of an episode that stay out of the loss, by number."""

    def __init__(
        self,
        *,
        correct: Any,
        extracted: Any = None,
        reason: Any = "",
        score: Any = None,
        lost: Any = "",
        parts: Any = MappingProxyType({}),
        turn_rewards: Any = (),
        forgotten: Any = (),
    ) -> None:
        given = locals()
        for name, (convert, need) in _VERDICT_FIELDS.items():
            found = given[name]
            try:
                object.__setattr__(self, name, convert(found))
            except (TypeError, ValueError):
                raise ValueError(
                    f"Verdict: {name}={found!r:.200} ({type(found).__name__}), needs {need}; convert the value in the reward function"
                ) from None


def plain_scalar(value: Any) -> Any:
    """Converts a NumPy scalar or zero-dimensional array to its Python value. Other values are returned unchanged."""
    return value.item() if getattr(value, "ndim", None) == 0 else value


def as_float(value: Any) -> float:
    """Converts a number to float. An integer that is too large for a float becomes infinity.

    Raises:
        ValueError: the value is not a number.
    """
    number = plain_scalar(value)
    if not isinstance(number, int | float):
        raise ValueError(f"{value!r:.200} is not a number")
    try:
        return float(number)
    except OverflowError:
        return math.inf


def _checked(value: Any, holds: bool) -> Any:
    if not holds:
        raise ValueError
    return value


def _as_text(value: Any) -> str:
    value = plain_scalar(value)
    return str(_checked(value, isinstance(value, str | int | float)))


def _as_parts(value: Any) -> dict[str, float]:
    _checked(value, isinstance(value, Mapping) and all(isinstance(name, str) for name in value))
    return {name: as_float(part) for name, part in value.items()}


_VERDICT_FIELDS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "correct": (lambda value: bool(_checked(value, as_float(value) in (0.0, 1.0))), "a bool"),
    "extracted": (lambda value: None if value is None else _as_text(value), "text, a number or None"),
    "reason": (_as_text, "text"),
    "score": (lambda value: None if value is None else as_float(value), "a number or None"),
    "lost": (
        lambda value: _checked(value, value in ("", *get_args(Lost))),
        f"one of {get_args(Lost)} or an empty text",
    ),
    "parts": (_as_parts, "a mapping of names to numbers"),
    "turn_rewards": (lambda value: tuple(map(as_float, value)), "numbers"),
    "forgotten": (lambda value: tuple(map(int, value)), "numbers of turns"),
}
"""The conversion function of each verdict field, and a description of the expected type."""


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """One sampled and graded response."""

    response: Response
    text: str
    """The response decoded without special tokens, as passed to the grader."""
    verdict: Verdict
    reward: float
    """The verdict's reward plus the overlong penalty. Advantages are computed from this reward."""
    overlong_penalty: float = 0.0
    """The overlong penalty in `reward` (DAPO Eq. 13), in [-penalty_factor, 0]."""

    @property
    def correct(self) -> bool:
        """Whether the grader judged the response correct, before any reward shaping."""
        return self.verdict.correct

    @property
    def truncated(self) -> bool:
        """True if sampling stopped at the length limit rather than at an end token."""
        return self.response.finish_reason == "length"

    @property
    def response_tokens(self) -> int:
        """Number of sampled tokens, including the end token."""
        return self.response.sampled_tokens


@dataclass(frozen=True, kw_only=True)
class Group:
    """The graded responses to one prompt, in the order of their response index."""

    prompt: Prompt
    rollouts: tuple[Rollout, ...]
    kept: tuple[int, ...] = ()
    """The index of each rollout among all responses to the prompt, if `best` removed some. Empty if all responses are present."""

    @property
    def indexed(self) -> list[tuple[int, Rollout]]:
        """The rollouts, each with its index among all responses to the prompt."""
        return list(zip(self.kept or range(len(self.rollouts)), self.rollouts, strict=True))

    @property
    def oldest(self) -> int:
        """Version of the weights that sampled the oldest token of the group."""
        return min(rollout.response.spans[0].version for rollout in self.rollouts)

    @property
    def newest(self) -> int:
        """Version of the weights that sampled the newest token of the group."""
        return max(rollout.response.spans[-1].version for rollout in self.rollouts)

    @property
    def rewards(self) -> Float[np.ndarray, " group"]:
        """The reward of each rollout after shaping, in float64."""
        return np.array([rollout.reward for rollout in self.rollouts], dtype=np.float64)

    @property
    def accuracy(self) -> float:
        """Fraction of the group's rollouts that are correct."""
        return sum(rollout.correct for rollout in self.rollouts) / len(self.rollouts)

    def best(self, count: int, *, by: str) -> "Group":
        """Returns the group with only its `count` best responses (GFPO, https://arxiv.org/abs/2508.09726), or the group itself if `count` is 0.

        The best responses are the shortest or, for `by="reward_per_token"`, the responses with the highest reward per sampled token. For `by="improbable"`, the
        responses with more than the mean reward that the policy finds likely are dropped first (GRPODropout, https://arxiv.org/abs/2610.11854). Kept are, in
        this order: the least likely of the responses above the mean, the responses at or below the mean, and the others above the mean, the least likely first.
        How likely a response is, is its mean log-probability per token when it was sampled. Ties go to the lower index.
        """
        if not count:
            return self
        lengths = np.array([rollout.response_tokens for rollout in self.rollouts])
        if by == "improbable":
            likely = [rollout.response.draw.logprob for rollout in self.rollouts] / np.maximum(lengths, 1)
            above = self.rewards > self.rewards.mean()
            rank = above.astype(int)
            # A group without a response above the mean has no signal.
            rank[np.argmin(np.where(above, likely, np.inf))] = -1
            order = np.lexsort((np.where(above, likely, 0.0), rank))
        else:
            rates = self.rewards / np.maximum(lengths, 1)
            order = np.argsort(lengths if by == "shortest" else -rates, kind="stable")
        kept = tuple(sorted(order[:count].tolist()))
        return replace(self, rollouts=tuple(self.rollouts[index] for index in kept), kept=kept)
