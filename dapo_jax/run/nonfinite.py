"""Names the quantities that are not finite, in a skipped update or in weights. The guard decides about them."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Bool, PyTree

from dapo_jax.dapo.metrics import Max, Metric
from dapo_jax.dapo.rollouts import Group
from dapo_jax.parallel.sharding import replicated
from dapo_jax.training.minibatch import Minibatch, on_host

WORDS = {
    "weights": "weights",
    "sampler_logprobs": "the sampler's log-probabilities",
    "advantages": "advantages",
    "trainer_logprobs": "the trainer's log-probabilities",
    "loss": "loss",
    "gradient": "gradient",
}
"""In the order in which a step computes them: the first one usually caused the others."""

_FLAG = "nonfinite/"
_SHOWN = 3


@dataclass(frozen=True)
class Update:
    """One update of a step: its minibatch, learning rate and metrics."""

    minibatch: Minibatch
    learning_rate: float
    metrics: Mapping[str, Metric]

    def flags(self) -> dict[str, list[int]]:
        """Returns the places that are not finite, by quantity: microbatches, or parameters of the gradient. Empty if the update was applied."""
        found = jax.device_get(
            {name: metric for name, metric in self.metrics.items() if name.startswith(_FLAG)}
        )
        places = {
            name.removeprefix(_FLAG): np.flatnonzero(np.asarray(metric.value) > 0).tolist()
            for name, metric in found.items()
            if isinstance(metric, Max)
        }
        return {name: places[name] for name in WORDS if places.get(name)}

    def stacks(self) -> list[dict[str, np.ndarray]]:
        """Returns its microbatches on the host. Every process must call this."""
        return [
            {name: array[: int(stack.count)] for name, array in vars(on_host(stack.microbatches)).items()}
            for stack in self.minibatch
        ]

    def named(
        self, flags: Mapping[str, Sequence[int]], groups: Sequence[Group], parameters: Sequence[str]
    ) -> dict[str, dict[str, Any]]:
        """Returns the places of `flags` by name: prompts, responses and tokens, (stack, microbatch), parameters."""
        found: dict[str, dict[str, Any]] = {}
        for name, places in flags.items():
            if name == "gradient":
                found[name] = {"parameters": [parameters[place] for place in places]}
                continue
            found[name] = {"microbatches": [self._stack_and_place(place) for place in places]}
            if name == "sampler_logprobs":
                found[name]["responses"] = strange_responses(groups)
            if name == "advantages":
                found[name]["prompts"] = [
                    g.prompt.ordinal for g in groups if not np.isfinite(g.rewards).all()
                ]
        return found

    def _stack_and_place(self, place: int) -> list[int]:
        for index, stack in enumerate(self.minibatch):
            capacity = len(stack.microbatches.tokens)
            if place < capacity:
                return [index, place]
            place -= capacity
        raise AssertionError("there is a flag for each microbatch")


def strange_responses(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """Returns the responses with a log-probability from the sampler that is not finite: prompt, index in the group, tokens."""
    return [
        {"ordinal": group.prompt.ordinal, "index": index, "tokens": tokens.tolist()}
        for group in groups
        for index, rollout in enumerate(group.rollouts)
        if len(tokens := np.flatnonzero(~np.isfinite(rollout.response.logprobs)))
    ]


def in_words(named: Mapping[str, Mapping[str, Any]]) -> str:
    """Returns one line: the quantities, with the first few prompts or parameters of each."""
    return ", ".join(WORDS[name] + _where(places) for name, places in named.items()) or "nothing flagged"


def _where(places: Mapping[str, Any]) -> str:
    if "parameters" in places:
        return f" ({some(places['parameters'])})"
    prompts = places.get("prompts") or sorted({one["ordinal"] for one in places.get("responses", ())})
    return f" (prompt {some(prompts)})" if prompts else ""


def some(names: Sequence[object]) -> str:
    """Returns the first few names, and the number of the others.

    >>> some([4, 8, 15, 16, 23])
    '4, 8, 15 and 2 more'
    """
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(map(str, names[:_SHOWN])) + more


def leaf_names(tree: PyTree) -> list[str]:
    """Returns the dotted path of each leaf, in the order of `jax.tree.leaves`, as in a checkpoint."""
    names = [
        jax.tree_util.keystr(keys, simple=True, separator=".")
        for keys, _ in jax.tree_util.tree_flatten_with_path(tree)[0]
    ]
    return [name.removesuffix(".value") for name in names]


def nonfinite_leaves(tree: PyTree) -> list[str]:
    """Returns the dotted paths of the leaves of `tree` (arrays on one mesh) with a value that is not finite. Every process must call this."""
    bad = np.asarray(_program(jax.tree.leaves(tree)[0].sharding.mesh)(tree))
    return [name for name, one in zip(leaf_names(tree), bad, strict=True) if one]


@functools.cache
def _program(mesh: Mesh) -> Any:
    return jax.jit(_bad, out_shardings=replicated(mesh))


def _bad(tree: PyTree) -> Bool[Array, " leaves"]:
    return jnp.stack([~jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(tree)])
