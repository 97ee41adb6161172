"""A conformance suite for losses: `check_objective` tests a loss on its own batches, property by property. It imports only jax and numpy.

The batch contains eight responses of 1 to 90 tokens in two groups, each after a prompt of three tokens. Responses of 8 or more tokens contain two tokens outside
the mask, like the result of a tool. A layout assigns these tokens to rows, and a loss must return the same value and gradient for every layout. Values outside
the mask are random numbers that differ between layouts.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Result = tuple[bool, str]
Measured = tuple[float, np.ndarray]
"""The value of a loss and the gradient of each token."""

TOLERANCE = 1e-9
"""Largest relative difference between two layouts. Everything is in float64, so rounding errors are about 1e-15."""
TOLERANCE_32 = 2e-5
"""Largest relative difference between float32 and float64. The rounding of log-probabilities near -5 alone is about 1e-6."""

PROMPT = 3
LENGTHS = np.array([1, 3, 8, 21, 34, 55, 60, 90, 12])
"""Response tokens of the eight responses, and of a ninth response that is entirely outside the mask."""
RESPONSE = np.repeat(np.arange(9), LENGTHS + PROMPT)
POSITION = np.concatenate([np.arange(length + PROMPT) for length in LENGTHS])
FIRST = (POSITION == PROMPT) & (RESPONSE < 8)
POLICIES = ("old_logprobs", "sampler_logprobs", "ref_logprobs", "teacher_logprobs")
FLOATS = ("logprobs", *POLICIES, "advantages", "entropy", "weights")
POSITIONAL = ("logprobs", "old_logprobs", "advantages", "mask")


@dataclass(frozen=True)
class Property:
    """Whether a loss has a property, and the measurement that decided it."""

    name: str
    passed: bool
    detail: str


@dataclass(frozen=True)
class ObjectiveReport:
    """The results of `check_objective`. `str()` returns them as a table."""

    objective: str
    properties: tuple[Property, ...]

    @property
    def failed(self) -> tuple[str, ...]:
        """The names of the properties that the loss does not have."""
        return tuple(row.name for row in self.properties if not row.passed)

    def __str__(self) -> str:
        rows = (f"{row.name:<17}{'ok' if row.passed else 'FAILED':<8}{row.detail}" for row in self.properties)
        return "\n".join((self.objective, *rows))


def check_objective(
    objective: Callable[..., Any], *, options: Mapping[str, Any] | None = None, combine: str | None = None
) -> ObjectiveReport:
    """Tests whether a loss depends on the layout of its batch, respects the mask, and has the right gradient.

    `docs/check_a_loss.md` explains every property. The first four arrays are passed by position. A parameter with the name of an array receives this array:
    `weights`, `segment_ids`, `positions`, `group_ids`, `selected`, `entropy`, `sampler_logprobs`, `ref_logprobs` or `teacher_logprobs`, all of shape
    [rows, tokens]. Other parameters with a default value are options.

    Args:
        objective: (logprobs, old_logprobs, advantages, mask, *, ...) -> loss, or (loss, metrics). Without a parameter `weights`, the loss must be normalized.
        options: another valid value for each option whose default is neither a number, a bool nor None.
        combine: how the training loop combines the losses of microbatches: `sum`, `mean`, or `tokens` (a mean weighted by the tokens in the mask).
            Defaults to `sum` for a loss with `weights`, and to `mean` for other losses.

    Returns:
        One row per property. The rows `metrics` and `weights` are missing if the loss has none.

    Raises:
        ValueError: `combine` is unknown. Errors that the loss raises for the first batch are not caught.
    """
    with jax.enable_x64(True):
        loss = _Loss(objective, options or {}, combine)
        return ObjectiveReport(getattr(objective, "__name__", repr(objective)), tuple(_properties(loss)))


def _properties(loss: "_Loss") -> Iterator[Property]:
    for name, check in PROPERTIES.items():
        if (name == "metrics" and not loss.metrics(PLAIN)) or (name == "weights" and name not in loss.arrays):
            continue
        try:
            yield Property(name, *check(loss))
        except Exception as error:
            yield Property(name, False, repr(error)[:200])


def _layout(*rows: Sequence[int], width: int = 96, left: int = 0) -> np.ndarray:
    """Returns the index of the token at each place of each row, or -1 for padding. `rows` contains the responses of each row."""
    layout = np.full((len(rows), width), -1)
    for places, responses in zip(layout, rows, strict=True):
        tokens = [token for response in responses for token in np.flatnonzero(RESPONSE == response)]
        places[left : left + len(tokens)] = tokens
    return layout


EACH = [[response] for response in range(8)]
PLAIN = _layout(*EACH)
PACKED = _layout([0, 1, 2, 8], [4, 5], [7], [3, 6])
SPARSE = _layout([], *EACH[:3], [8], *EACH[3:], [])
PARTS = np.split(PLAIN[[7, 0, 6, 1, 5, 2, 4, 3]], 4)


class _Loss:
    """A loss, and its value and gradient for one response per row."""

    def __init__(
        self, objective: Callable[..., Any], alternatives: Mapping[str, Any], combine: str | None
    ) -> None:
        self.objective, self.alternatives = objective, alternatives
        self.tokens = _tokens()
        parameters = [p for p in inspect.signature(objective).parameters.values() if "VAR" not in p.kind.name]
        required = [p.name for p in parameters if p.kind != p.KEYWORD_ONLY and p.default is p.empty]
        known = {*self.tokens, "mask", "segment_ids"}
        self.positional = [n if n in known else p for n, p in zip(required, POSITIONAL, strict=False)]
        self.keywords = [p.name for p in parameters if p.name in known and p.name not in required]
        self.options = {p.name: p.default for p in parameters if p.name not in {*known, *required}}
        self.arrays = {*self.positional, *self.keywords}
        self.combine = combine or ("sum" if "weights" in self.arrays else "mean")
        if self.combine not in ("sum", "mean", "tokens"):
            raise ValueError(f"combine must be sum, mean or tokens, got {combine!r}")
        self.value, self.gradient = self.measure(PLAIN)
        shifted = self.measure(PLAIN, advantages=self.tokens["advantages"] + 1.0)
        self.uses_advantages = self.difference(*shifted) > 0

    def call(self, batch: dict[str, Any], **options: Any) -> tuple[Any, Any]:
        keywords = {name: batch[name] for name in self.keywords}
        result = self.objective(*(batch[name] for name in self.positional), **keywords, **options)
        return result if isinstance(result, tuple) else (result, {})

    def metrics(self, layout: np.ndarray) -> dict[str, Any]:
        """Returns the metrics that can be added. A plain number has no count, so it cannot be combined over microbatches."""
        found = self.call(self.batch(layout))[1]
        return {name: metric for name, metric in found.items() if not hasattr(metric, "dtype")}

    def batch(
        self, layout: np.ndarray, *, fill: float | None = None, dtype: str = "float64", **changes: np.ndarray
    ) -> dict[str, Any]:
        """Returns the arrays of a layout. `changes` override the values of all tokens. Values outside the mask are `fill` or random numbers."""
        tokens, live = {**self.tokens, **changes}, layout >= 0
        starts = live & (np.diff(np.where(live, RESPONSE[layout], -1), axis=1, prepend=-1) != 0)
        mask = live & tokens["mask"][layout]
        noise = -np.random.default_rng(layout.size).exponential(size=layout.shape)
        outside = {name: noise if fill is None else fill for name in FLOATS} | {"weights": 0.0}
        batch = {name: np.where(mask, tokens[name][layout], outside[name]).astype(dtype) for name in FLOATS}
        for name in ("positions", "group_ids"):
            batch[name] = np.where(live, tokens[name][layout], 0).astype(np.int32)
        batch |= {"mask": mask, "selected": mask & tokens["selected"][layout]}
        batch["segment_ids"] = np.where(live, np.cumsum(starts, axis=1), 0).astype(np.int32)
        return {name: jnp.asarray(array) for name, array in batch.items()}

    def evaluate(self, batch: dict[str, Any], **options: Any) -> tuple[Any, Any]:
        return jax.value_and_grad(lambda lp: self.call({**batch, "logprobs": lp}, **options)[0])(
            batch["logprobs"]
        )

    def measure(self, layout: np.ndarray, **changes: Any) -> Measured:
        batch = self.batch(layout, **changes)
        return _by_token(layout, batch["mask"], *self.evaluate(batch))

    def difference(self, value: float, gradient: np.ndarray, than: Measured | None = None) -> float:
        """Returns the larger of the relative differences of value and gradient, or infinity if one of them is NaN."""
        right, slope = than or (self.value, self.gradient)
        by_value = abs(value - right) / (abs(right) + np.abs(slope).sum() + 1e-300)
        by_gradient = np.abs(gradient - slope).max() / (np.abs(slope).max() + 1e-300)
        return float(max(by_value, by_gradient)) if np.isfinite(by_value + by_gradient) else np.inf

    def same(self, *layouts: np.ndarray, tolerance: float = TOLERANCE, **changes: Any) -> Result:
        largest = max(self.difference(*self.measure(layout, **changes)) for layout in layouts)
        return largest < tolerance, f"relative difference {largest:.0e}"

    def added(self, parts: Sequence[Measured], counts: np.ndarray) -> Result:
        """Compares the combined parts with the whole batch."""
        shares = {
            "sum": counts * 0 + 1.0,
            "mean": counts * 0 + 1 / len(counts),
            "tokens": counts / counts.sum(),
        }
        values, gradients = np.array([value for value, _ in parts]), np.array([slope for _, slope in parts])
        found = {how: self.difference(share @ values, share @ gradients) for how, share in shares.items()}
        exact = [how for how, difference in found.items() if difference < TOLERANCE]
        detail = f"relative difference {found[self.combine]:.0e} for combine={self.combine}; exact for "
        return self.combine in exact, detail + (", ".join(exact) or "no combination")


def _tokens() -> dict[str, np.ndarray]:
    """Returns one value per token. Advantages and weights are the same for all tokens of a response, and one response has the advantage 0."""
    rng = np.random.default_rng(0)
    size = len(RESPONSE)
    logprobs = -rng.exponential(size=size) - 0.02
    outliers = (rng.random(size) < 0.15) * rng.choice([-1.0, 1.0], size)
    old = np.minimum(logprobs - 0.2 * rng.standard_normal(size) - outliers, -0.01)
    tool = (LENGTHS[RESPONSE] >= 8) & (POSITION >= PROMPT + 2) & (POSITION < PROMPT + 4)
    return {
        "logprobs": logprobs,
        "old_logprobs": old,
        "sampler_logprobs": old + 0.1 * rng.standard_normal(size),
        "ref_logprobs": logprobs + 0.5 * rng.standard_normal(size),
        "teacher_logprobs": logprobs + 0.5 * rng.standard_normal(size),
        "advantages": np.array([1.1, -0.7, 0.4, -1.3, 0.9, -0.5, 1.6, 0.0, 1.0])[RESPONSE],
        "mask": (POSITION >= PROMPT) & ~tool & (RESPONSE < 8),
        "weights": rng.uniform(0.5, 1.5, 9)[RESPONSE] / size,
        "entropy": rng.exponential(size=size),
        "selected": rng.random(size) < 0.5,
        "positions": POSITION,
        "group_ids": RESPONSE // 4,
    }


def _by_token(layout: np.ndarray, mask: Any, value: Any, gradient: Any) -> Measured:
    """Returns the gradient of each token. If a gradient outside the mask is not 0, all gradients are NaN."""
    mask, gradient = np.asarray(mask), np.asarray(gradient, np.float64)
    found = np.full(len(RESPONSE), 0.0 if (gradient[~mask] == 0).all() else np.nan)
    found[layout[mask]] += gradient[mask]
    return float(value), found


def _microbatches(loss: _Loss) -> Result:
    counts = np.array([loss.tokens["mask"][part[part >= 0]].sum() for part in PARTS])
    return loss.added([loss.measure(part) for part in PARTS], counts)


def _shards(loss: _Loss) -> Result:
    layouts = [*PARTS, *[np.full_like(PARTS[0], -1)] * (loss.combine == "sum")]  # one shard with padding only
    batches = [loss.batch(layout) for layout in layouts]
    stacked = {name: jnp.stack([batch[name] for batch in batches]) for name in batches[0]}
    parts = zip(layouts, stacked["mask"], *jax.vmap(loss.evaluate)(stacked), strict=True)
    return loss.added([_by_token(*part) for part in parts], np.asarray(stacked["mask"].sum(axis=(1, 2))))


def _mask(loss: _Loss) -> Result:
    passed, detail = loss.same(PLAIN, fill=-0.3)
    return loss.same(PLAIN, fill=np.nan) if passed else (passed, detail)


def _nothing_to_learn(loss: _Loss) -> Result:
    value, slope = loss.measure(PLAIN, mask=RESPONSE < 0, fill=np.nan)
    return value == 0 and not slope.any(), f"loss {value:.3g}, largest gradient {np.abs(slope).max():.3g}"


def _metrics(loss: _Loss) -> Result:
    whole, *parts = (loss.metrics(layout) for layout in (PLAIN, *PARTS))
    wrong = []
    for name, metric in whole.items():
        total = parts[0][name]
        for part in parts[1:]:
            total = total + part[name]
        if not all(
            np.allclose(*pair, rtol=TOLERANCE)
            for pair in zip(*map(jax.tree.leaves, (total, metric)), strict=True)
        ):
            wrong.append(name)
    return (
        not wrong,
        f"not the sum of the microbatches: {', '.join(wrong)}" if wrong else f"{len(whole)} metrics",
    )


def _gradient(loss: _Loss) -> Result:
    rng = np.random.default_rng(1)
    size = np.abs(loss.gradient).sum()

    def error(direction: np.ndarray) -> float:
        up, down = (
            loss.measure(PLAIN, logprobs=loss.tokens["logprobs"] + step * direction)[0]
            for step in (1e-6, -1e-6)
        )
        return float(abs((up - down) / 2e-6 - direction @ loss.gradient) / size)

    if not size > 0:
        return False, f"the sum of absolute gradients is {size}"
    by_token = max(error(rng.standard_normal(len(RESPONSE))) for _ in range(6))
    if by_token < 1e-6:
        return True, f"derivative of the value, relative difference {by_token:.0e}"
    if abs(loss.gradient @ loss.tokens["logprobs"] - loss.value) < TOLERANCE * size:
        return True, "stop-gradient form: constant factors x logprobs"
    if abs(loss.gradient.sum() - loss.value) < TOLERANCE * size:
        return True, "stop-gradient form: constant factors x exp(logprobs - stop_gradient(logprobs))"
    if max(error(rng.standard_normal(9)[RESPONSE]) for _ in range(6)) < 1e-6:
        return True, "straight-through form: derivative of the value for a whole response, not for each token"
    return False, f"differs from the derivative of the value by {by_token:.0e}"


def _constants(loss: _Loss) -> Result:
    batch = loss.batch(PLAIN)
    others = {name: batch[name] for name in (*POLICIES, "advantages") if name in loss.arrays}
    slopes = jax.grad(lambda others: loss.call({**batch, **others})[0])(others)
    wrong = [name for name, slope in slopes.items() if not (slope == 0).all()]
    return not wrong, f"gradient flows through {', '.join(wrong) or 'logprobs only'}"


def _inputs(loss: _Loss) -> Result:
    batch = loss.batch(PACKED)
    start = loss.evaluate(batch)

    def matters(name: str, *values: Any) -> bool:
        for value in values:
            with suppress(ValueError):  # a value outside the range of an option
                arrays, options = ({name: value}, {}) if name in loss.arrays else ({}, {name: value})
                found = loss.evaluate({**batch, **arrays}, **options)
                if found[0] != start[0] or (found[1] != start[1]).any():
                    return True
        return False

    ignored = []
    for name in loss.keywords:
        array = batch[name]
        changed = ~array if array.dtype == bool else array + 1.0 if name in FLOATS else jnp.zeros_like(array)
        ignored += [] if matters(name, changed) else [name]
    for name, default in loss.options.items():
        if name in loss.alternatives:
            values = [loss.alternatives[name]]
        elif isinstance(default, bool):
            values = [not default]
        else:
            values = (
                [0.5 * (default or 1.0), 2 * (default or 1.0)]
                if isinstance(default, int | float | None)
                else []
            )
        ignored += (
            [] if matters(name, *values) else [name if values else f"{name} (not tried, see `options`)"]
        )
    return not ignored, f"no effect: {', '.join(ignored)}" if ignored else "all have an effect"


def _divides_by(loss: _Loss) -> Result:
    mask = loss.tokens["mask"]
    count = np.ones(len(mask))
    known = {
        "nothing": count,
        "the tokens in the mask": count / mask.sum(),
        "responses": count / 8,
        "responses, then tokens of the response": count / 8 / np.bincount(RESPONSE, mask)[RESPONSE],
        "groups, then tokens of the group": count / 2 / np.bincount(RESPONSE // 4, mask)[RESPONSE // 4],
    }
    known = {"weights": loss.tokens["weights"]} if "weights" in loss.arrays else known
    for shift in (0.0, 0.5):  # the second for a KL penalty, which has no gradient at a ratio of 1
        same = {"advantages": count, **dict.fromkeys(POLICIES, loss.tokens["logprobs"] - shift)}
        one_token = loss.measure(PLAIN[:1], **same, weights=count)[1].sum()
        if one_token:
            found = loss.measure(SPARSE, **same)[1] / one_token
            fits = [
                name
                for name, weight in known.items()
                if np.allclose(found[mask], weight[mask], rtol=1e-6, atol=0)
            ]
            return bool(fits), fits[0] if fits else f"none of: {'; '.join(known)}"
    return False, "a batch of one token has no gradient"


def _weights(loss: _Loss) -> Result:
    one, two = np.random.default_rng(2).uniform(0.5, 1.5, (2, len(RESPONSE)))
    (value_1, slope_1), (value_2, slope_2), added, (value, slope) = (
        loss.measure(PLAIN, weights=weights) for weights in (one, two, one + two, 1e-7 * one)
    )
    by_sum = loss.difference(*added, than=(value_1 + value_2, slope_1 + slope_2))
    by_scale = loss.difference(1e7 * value, 1e7 * slope, than=(value_1, slope_1))
    return max(
        by_sum, by_scale
    ) < TOLERANCE, f"relative difference {by_sum:.0e} for a sum, {by_scale:.0e} for x 1e-7"


def _direction(loss: _Loss) -> Result:
    if not loss.uses_advantages:
        return True, "the loss does not use advantages"
    logprobs, sign = loss.tokens["logprobs"] - 1.0, np.sign(loss.tokens["advantages"])
    for shift, where in ((0.0, "at a ratio of 1"), (0.6, "after a move of 0.6 nats against the advantage")):
        old = dict.fromkeys(POLICIES, logprobs + shift * sign)
        push = -sign * loss.measure(PLAIN, logprobs=logprobs, mask=FIRST, **old)[1]
        for name, chosen in (("positive", FIRST & (sign > 0)), ("negative", FIRST & (sign < 0))):
            if not (push[chosen] > 0).all():
                return (
                    False,
                    f"{name} advantages: {'wrong sign' if (push[chosen] < 0).any() else 'no gradient'} {where}",
                )
    return True, "the gradient has the sign of the advantage"


def _extreme_ratios(loss: _Loss) -> Result:
    high = np.where(RESPONSE % 2, -100.0, -1e-3)
    advantages = np.where(RESPONSE % 4 < 2, 1.0, -1.0)
    others = {"advantages": advantages, **dict.fromkeys(POLICIES, -100.0 - 1e-3 - high)}
    value, slope = loss.measure(PLAIN, logprobs=high, dtype="float32", **others)
    return bool(
        np.isfinite(value + slope).all()
    ), f"loss {value:.3g}, largest gradient {np.abs(slope).max():.3g}"


def _zero_advantages(loss: _Loss) -> Result:
    zero = {"advantages": np.zeros(len(RESPONSE))}
    off_policy = loss.measure(PLAIN, **zero)
    value, slope = loss.measure(PLAIN, **zero, **dict.fromkeys(POLICIES, loss.tokens["logprobs"]))
    if not loss.uses_advantages or not np.isfinite(off_policy[1].sum() + off_policy[0] + value):
        return (
            not loss.uses_advantages,
            "not finite" if loss.uses_advantages else "the loss does not use advantages",
        )
    return (
        not slope.any(),
        f"largest gradient {np.abs(slope).max():.3g}, at other ratios {np.abs(off_policy[1]).max():.3g}",
    )


PROPERTIES: dict[str, Callable[[_Loss], Result]] = {
    "microbatches": _microbatches,
    "shards": _shards,
    "packing": lambda loss: loss.same(PACKED),
    "padding": lambda loss: loss.same(_layout(*EACH, width=128), _layout(*EACH, width=128, left=20)),
    "row order": lambda loss: loss.same(PLAIN[::-1], PLAIN[[5, 2, 7, 0, 3, 6, 1, 4]]),
    "empty rows": lambda loss: loss.same(SPARSE),
    "mask": _mask,
    "nothing to learn": _nothing_to_learn,
    "metrics": _metrics,
    "gradient": _gradient,
    "constants": _constants,
    "inputs": _inputs,
    "divides by": _divides_by,
    "weights": _weights,
    "direction": _direction,
    "extreme ratios": _extreme_ratios,
    "float32": lambda loss: loss.same(PLAIN, dtype="float32", tolerance=TOLERANCE_32),
    "zero advantages": _zero_advantages,
}
