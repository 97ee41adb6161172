"""A conformance suite for losses: `check_objective` tests a loss on its own batches, property by property. It imports only jax and numpy.

A layout assigns the tokens of eight responses to rows, and a loss must return the same value and gradients for every layout. Each response has a prompt, and
longer responses contain two tokens outside the mask, like the result of a tool. Values outside the mask are random numbers.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

Batch = dict[str, Any]
Result = tuple[bool, str]

TOLERANCE, TOLERANCE_32 = 1e-9, 2e-5
"""Largest relative difference in float64, and between float32 and float64. Rounding errors of correct losses are near 1e-16 and 1e-6."""

PROMPT = 3
LENGTHS = np.array([1, 2, 3, 5, 7, 9, 12, 17, 4])  # the ninth response is outside the mask
RESPONSE = np.repeat(np.arange(9), LENGTHS + PROMPT)
POSITION = np.concatenate([np.arange(length + PROMPT) for length in LENGTHS])
FIRST = (POSITION == PROMPT) & (RESPONSE < 8)
POLICIES = ("old_logprobs", "sampler_logprobs", "ref_logprobs", "teacher_logprobs")
FLOATS = ("logprobs", *POLICIES, "advantages", "entropy", "weights")
_rng = np.random.default_rng(0)
_noise = _rng.standard_normal((4, len(RESPONSE)))
_logprobs = -_rng.exponential(size=len(RESPONSE)) - 0.02
_move = np.array([1.0, 0.0, -0.9, 0.0])[POSITION % 4] * np.where(RESPONSE == 3, -1, 1) + 0.2 * _noise[0]
_old = np.minimum(_logprobs - _move, -0.01)
_tool = (LENGTHS[RESPONSE] >= 5) & (POSITION >= PROMPT + 2) & (POSITION < PROMPT + 4)
TOKENS: dict[str, np.ndarray] = {
    "logprobs": _logprobs, "old_logprobs": _old, "sampler_logprobs": _old + 0.1 * _noise[1],
    "ref_logprobs": _logprobs + 0.5 * _noise[2], "teacher_logprobs": _logprobs + 0.5 * _noise[3],
    "advantages": np.array([1.1, -0.7, 0.4, -1.3, 0.9, -0.5, 1.6, 0.0, 1.0])[RESPONSE],
    "mask": (POSITION >= PROMPT) & ~_tool & (RESPONSE < 8), "selected": _noise[1] > 0,
    "weights": _rng.uniform(0.5, 1.5, 9)[RESPONSE] / len(RESPONSE), "entropy": np.abs(_noise[2]),
    "positions": POSITION, "group_ids": RESPONSE // 4,
}  # fmt: skip
"""One value per token. All tokens of a response have the same advantage and weight."""


class Property(NamedTuple):
    """Whether a loss has a property, and the measurement that decided it."""

    name: str
    passed: bool
    detail: str


class ObjectiveReport(NamedTuple):
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
    """Returns a table of properties: whether a loss depends on the layout of its batch, respects the mask, has the right gradient, and others.

    `docs/check_a_loss.md` explains each property. All arrays have the shape [rows, tokens]. The loss receives four by position, and others if it has a parameter
    with the name of the array. Other parameters with a default value are options.

    Args:
        objective: a function of `logprobs, old_logprobs, advantages, mask, *, ...` that returns a loss, or a loss and metrics. A loss without the parameter `weights` normalizes itself.
        options: another valid value for each option whose default is neither a number, a bool nor None.
        combine: how the training loop combines the losses of microbatches: `sum`, `mean`, or `tokens` (a mean weighted by the tokens in the mask).
            Defaults to `sum` for a loss with `weights`, and to `mean` for other losses.

    Raises:
        ValueError: `combine` is unknown. Errors that the loss raises for the first batch are not caught.
    """
    with jax.enable_x64(True):
        loss, rows = _Loss(objective, options or {}, combine), []
        for name, check in PROPERTIES.items():
            try:
                rows.append(Property(name, *check(loss)))
            except Exception as error:
                rows.append(Property(name, False, repr(error)[:200]))
    return ObjectiveReport(getattr(objective, "__name__", repr(objective)), tuple(rows))


def _layout(*rows: Sequence[int], width: int = 24, left: int = 0) -> np.ndarray:
    """Returns the index of the token at each place, or -1 for padding. `rows` contains the responses of each row."""
    layout = np.full((len(rows), width), -1)
    for row, responses in zip(layout, rows, strict=True):
        tokens = np.flatnonzero(np.isin(RESPONSE, responses))
        row[left : left + len(tokens)] = tokens
    return layout


EACH = [[response] for response in range(8)]
PLAIN, PACKED = _layout(*EACH), _layout([0, 1, 4], [3, 5], [], [7], [2, 6], [8], [], [])
SPARSE = _layout([], *EACH[:3], [8], *EACH[3:])
PARTS = np.split(PLAIN[[7, 0, 6, 1, 5, 2, 4, 3]], 4)


class _Loss:
    """A loss, and its value and gradients for one response per row."""

    def __init__(self, objective: Callable[..., Any], others: Mapping[str, Any], combine: str | None) -> None:
        self.objective, self.others = objective, others
        parameters = [p for p in inspect.signature(objective).parameters.values() if "VAR" not in p.kind.name]
        required = [p.name for p in parameters if p.kind != p.KEYWORD_ONLY and p.default is p.empty]
        known = {*TOKENS, "segment_ids"}
        order = ("logprobs", "old_logprobs", "advantages", "mask")
        self.positional = [n if n in known else usual for n, usual in zip(required, order, strict=False)]
        self.keywords = [p.name for p in parameters if p.name in known and p.name not in required]
        self.options = {p.name: p.default for p in parameters if p.name not in {*known, *required}}
        self.arrays = {*self.positional, *self.keywords}
        self.combine = combine or ("sum" if "weights" in self.arrays else "mean")
        if self.combine not in ("sum", "mean", "tokens"):
            raise ValueError(f"combine must be sum, mean or tokens, got {combine!r}")

        def value_of(arrays: Batch, batch: Batch, **options: Any) -> Any:
            return self.call(batch | arrays, **options)[0]

        self.slopes = jax.jit(jax.value_and_grad(value_of), static_argnames=[*self.options])
        self.value, self.gradient = self.measure(PLAIN)
        self.uses_advantages = self.difference(*self.measure(PLAIN, advantages=POSITION + 1.0)) > 0

    def evaluate(self, batch: Batch, **options: Any) -> tuple[Any, Any]:
        """Returns the value, and its gradient with respect to the log-probabilities."""
        value, slopes = self.slopes({"logprobs": batch["logprobs"]}, batch, **options)
        return value, slopes["logprobs"]

    def call(self, batch: Batch, **options: Any) -> tuple[Any, Any]:
        keywords = {name: batch[name] for name in self.keywords}
        result = self.objective(*(batch[name] for name in self.positional), **keywords, **options)
        return result if isinstance(result, tuple) else (result, {})

    def batch(self, layout: np.ndarray, fill: Any = None, dtype: str = "float64", **changes: Any) -> Batch:
        """Returns the arrays of a layout. `changes` override the values of all tokens. Values outside the mask are `fill` or random numbers."""
        tokens, live = {**TOKENS, **changes}, layout >= 0
        mask = live & tokens["mask"][layout]
        noise = -np.random.default_rng(layout.size).exponential(size=layout.shape)
        outside = dict.fromkeys(FLOATS, noise if fill is None else fill) | {"weights": 0.0}
        batch = {name: np.where(mask, tokens[name][layout], outside[name]).astype(dtype) for name in FLOATS}
        ids = {name: tokens[name][layout] for name in ("positions", "group_ids")}
        ids |= {"segment_ids": np.cumsum(live & (POSITION[layout] == 0), axis=1)}
        batch |= {name: np.where(live, array, 0).astype(np.int32) for name, array in ids.items()}
        batch |= {"mask": mask, "selected": mask & tokens["selected"][layout]}
        return {name: jnp.asarray(array) for name, array in batch.items()}

    def measure(self, layout: np.ndarray, **changes: Any) -> tuple[float, np.ndarray]:
        batch = self.batch(layout, **changes)
        return _by_token(layout, batch["mask"], *self.evaluate(batch))

    def difference(self, value: Any, gradient: np.ndarray) -> float:
        """Returns the larger of the relative differences of value and gradients, or infinity if one of them is not finite."""
        size = np.abs(self.gradient) + 1e-300
        of_value = abs(value - self.value) / (abs(self.value) + size.sum())
        largest = max(of_value, np.abs(gradient - self.gradient).max() / size.max())
        return float(largest) if np.isfinite(gradient.sum() + value) else np.inf

    def same(self, *layouts: np.ndarray, tolerance: float = TOLERANCE, **changes: Any) -> Result:
        largest = max(self.difference(*self.measure(layout, **changes)) for layout in layouts)
        return largest < tolerance, f"relative difference {largest:.0e}"

    def bounded(self, limit: float, **changes: Any) -> Result:
        value, slope = self.measure(PLAIN, **changes)
        largest = np.abs(slope).max()
        finite = bool(np.isfinite(value) and largest <= limit)
        return finite, f"loss {value:.3g}, largest gradient {largest:.3g}"

    def added(self, layouts: Sequence[np.ndarray], parts: Sequence[tuple[float, np.ndarray]]) -> Result:
        """Compares the combined parts with the whole batch."""
        counts = np.array([TOKENS["mask"][layout[layout >= 0]].sum() for layout in layouts])
        shares = {"sum": counts**0.0, "mean": counts**0.0 / len(counts), "tokens": counts / counts.sum()}
        values, gradients = (np.array(column) for column in zip(*parts, strict=True))
        differences = {
            kind: self.difference(share @ values, share @ gradients) for kind, share in shares.items()
        }
        exact = ", ".join(kind for kind, difference in differences.items() if difference < TOLERANCE)
        detail = f"relative difference {differences[self.combine]:.0e} for combine={self.combine}"
        return differences[self.combine] < TOLERANCE, f"{detail}; exact for {exact or 'no combination'}"


def _by_token(layout: np.ndarray, mask: Any, value: Any, gradient: Any) -> tuple[float, np.ndarray]:
    """Returns the gradient of each token. If a gradient outside the mask is not 0, all gradients are NaN."""
    mask, gradient = np.asarray(mask), np.asarray(gradient, np.float64)
    by_token = np.full(len(RESPONSE), 0.0 if (gradient[~mask] == 0).all() else np.nan)
    by_token[layout[mask]] += gradient[mask]
    return float(value), by_token


def _shards(loss: _Loss) -> Result:
    layouts = [*PARTS, *[np.full_like(PARTS[0], -1)] * (loss.combine == "sum")]  # one shard with padding only
    stacked = jax.tree.map(lambda *arrays: jnp.stack(arrays), *map(loss.batch, layouts))
    parts = zip(layouts, stacked["mask"], *jax.vmap(loss.evaluate)(stacked), strict=True)
    return loss.added(layouts, [_by_token(*part) for part in parts])


def _metrics(loss: _Loss) -> Result:
    metrics = jax.jit(lambda batch: loss.call(batch)[1])
    whole, *parts = (metrics(loss.batch(layout)) for layout in (PLAIN, *PARTS))
    total = {name: sum((part[name] for part in parts[1:]), parts[0][name]) for name in whole}
    flat = jax.tree.leaves
    wrong = [name for name in whole if not np.allclose(flat(total[name]), flat(whole[name]))]
    return not wrong, f"{len(whole)} metrics; do not add up: {', '.join(wrong) or 'none'}"


def _gradient(loss: _Loss) -> Result:
    size = np.abs(loss.gradient).sum()
    directions = np.random.default_rng(1).standard_normal((4, len(RESPONSE)))
    ends = (TOKENS["logprobs"] + step * directions for step in (1e-6, -1e-6))
    up, down = ([loss.measure(PLAIN, logprobs=one)[0] for one in end] for end in ends)
    error = abs(np.subtract(up, down) / 2e-6 - directions @ loss.gradient).max()
    forms = {
        "derivative of the value": error,
        "stop-gradient form: constants x logprobs": abs(loss.gradient @ TOKENS["logprobs"] - loss.value),
        "stop-gradient form: constants x exp(logprobs - their value)": abs(loss.gradient.sum() - loss.value),
    }
    fits = [form for form, difference in forms.items() if difference < 1e-6 * size]
    return bool(fits), fits[0] if fits else f"not the derivative; sum of absolute gradients {size:.3g}"


def _constants(loss: _Loss) -> Result:
    batch = loss.batch(PLAIN)
    _, slopes = loss.slopes({name: batch[name] for name in {*POLICIES, "advantages"} & loss.arrays}, batch)
    wrong = [name for name, slope in slopes.items() if not (slope == 0).all()]
    return not wrong, f"gradient flows through {', '.join(wrong) or 'logprobs only'}"


def _options(loss: _Loss) -> Result:
    batch, ignored = loss.batch(PLAIN), dict(loss.options)
    value, slope = loss.evaluate(batch)
    for name, default in loss.options.items():
        factors = () if isinstance(default, str) else (0.5, 2.0, 0.0)
        numbers = [factor * (default or 1.0) for factor in factors]
        for other in [loss.others[name]] if name in loss.others else numbers:
            with suppress(ValueError):  # outside the range of the option
                changed = loss.evaluate(batch, **{name: other})
                if changed[0] != value or (changed[1] != slope).any():
                    ignored.pop(name, None)
    return not ignored, f"{len(loss.options)} options; no effect changed: {', '.join(ignored) or 'none'}"


def _divides_by(loss: _Loss) -> Result:
    mask, group = TOKENS["mask"], RESPONSE // 4
    count = np.ones(len(mask))
    known = {
        "nothing": count, "tokens": count / mask.sum(), "responses": count / 8,
        "responses, then tokens of the response": count / 8 / np.bincount(RESPONSE, mask)[RESPONSE].clip(1),
        "groups, then tokens of the group": count / 2 / np.bincount(group, mask)[group].clip(1),
    }  # fmt: skip
    known = {"weights": TOKENS["weights"]} if "weights" in loss.arrays else known
    for shift in (0.0, 0.5):  # the second for a KL penalty, which has no gradient at a ratio of 1
        same = {"advantages": count, **dict.fromkeys(POLICIES, TOKENS["logprobs"] - shift)}
        one_token = loss.measure(PLAIN, mask=FIRST & (RESPONSE == 0), **same | {"weights": count})[1].sum()
        if one_token:
            divisor = loss.measure(SPARSE, **same)[1] / one_token
            fits = [name for name, right in known.items() if np.allclose(divisor[mask], right[mask], 1e-6, 0)]
            return bool(fits), fits[0] if fits else f"not {', nor '.join(known)}"
    return False, "a batch of one token has no gradient"


def _weights(loss: _Loss) -> Result:
    if "weights" not in loss.arrays:
        return True, "the loss has no weights"
    other = np.random.default_rng(2).uniform(0.5, 1.5, len(RESPONSE))
    value, slope = loss.measure(PLAIN, weights=other)
    value_of_sum, slope_of_sum = loss.measure(PLAIN, weights=1e-7 * (other + TOKENS["weights"]))
    difference = loss.difference(1e7 * value_of_sum - value, 1e7 * slope_of_sum - slope)
    return difference < TOLERANCE, f"relative difference {difference:.0e} for a sum of weights, times 1e-7"


def _direction(loss: _Loss) -> Result:
    logprobs, sign = TOKENS["logprobs"] - 1.0, np.sign(TOKENS["advantages"])
    for shift in (0.0, 0.6):
        old = dict.fromkeys(POLICIES, logprobs + shift * sign)
        push = -sign * loss.measure(PLAIN, logprobs=logprobs, mask=FIRST, **old)[1]
        wrong = FIRST & (sign != 0) & ~(push > 0)
        if loss.uses_advantages and wrong.any():
            problem = "wrong sign" if push[wrong].any() else "no gradient"
            move = f"after a move of {shift} nats against the advantage"
            return False, f"{problem} for advantages {set(sign[wrong])} {move}"
    return True, f"{'follows' if loss.uses_advantages else 'the loss does not use'} the advantages"


ZERO = {"advantages": 0.0 * POSITION, **dict.fromkeys(POLICIES, TOKENS["logprobs"])}
EXTREME = {
    "logprobs": np.where(RESPONSE % 2, -100.0, -1e-3),
    "advantages": np.where(RESPONSE % 4 < 2, 1.0, -1.0),
    **dict.fromkeys(POLICIES, np.where(RESPONSE % 2, -1e-3, -100.0)),
}
PROPERTIES: dict[str, Callable[[_Loss], Result]] = {
    "microbatches": lambda loss: loss.added(PARTS, [loss.measure(part) for part in PARTS]),
    "shards": _shards,
    "packing": lambda loss: loss.same(PACKED),
    "padding": lambda loss: loss.same(_layout(*EACH, width=32), _layout(*EACH, width=32, left=9)),
    "row order": lambda loss: loss.same(PLAIN[::-1], PLAIN[[5, 2, 7, 0, 3, 6, 1, 4]]),
    "empty rows": lambda loss: loss.same(SPARSE),
    "mask": lambda loss: loss.same(PLAIN, fill=np.nan),
    "nothing to learn": lambda loss: loss.bounded(0.0, mask=RESPONSE < 0, fill=np.nan),
    "metrics": _metrics, "gradient": _gradient, "constants": _constants, "options": _options,
    "divides by": _divides_by, "weights": _weights, "direction": _direction,
    "zero advantages": lambda loss: loss.bounded(1e38 * (not loss.uses_advantages), **ZERO),
    "extreme ratios": lambda loss: loss.bounded(1e38, dtype="float32", **EXTREME),
    "float32": lambda loss: loss.same(PLAIN, dtype="float32", tolerance=TOLERANCE_32),
}  # fmt: skip
