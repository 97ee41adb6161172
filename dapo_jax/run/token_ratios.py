"""The ratio pi / pi_old of every token of the rollouts that are written down, as the update that trains on it takes it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np
from jaxtyping import Float

from dapo_jax.config import TrainConfig
from dapo_jax.dapo.dynamic_sampling import Collected, Collector
from dapo_jax.dapo.metrics import Metric
from dapo_jax.dapo.microbatch import Microbatch
from dapo_jax.dapo.rollouts import Group
from dapo_jax.training.loop import Pipe
from dapo_jax.training.minibatch import Minibatch, on_host
from dapo_jax.training.state import TrainState

Split = Callable[[Sequence[Group], int], list[list[Group]]]
"""(groups, step) -> the groups of each of its updates."""
TokenRatios = Mapping[tuple[int, int], Float[np.ndarray, " response"] | None]
"""(ordinal, response index) -> a ratio for each token of a rollout that was trained on; None if it was left out of the loss."""


class Ratios:
    """Those of one run's steps. Costs a forward pass over the minibatches concerned, in steps whose rollouts are written.

    All processes make the same calls.
    """

    def __init__(
        self,
        config: TrainConfig,
        *,
        split: Split,
        ratios: Callable[..., list[jax.Array]],
    ) -> None:
        """`ratios` is `Updater.ratios`."""
        self._config, self._split, self._ratios = config, split, ratios
        self._wanted: set[int] = set()
        self._groups: list[list[Group]] = []
        self._next = 0
        self._found: dict[tuple[int, int], Float[np.ndarray, " response"] | None] = {}

    def watching(self, pipe: Pipe) -> Pipe:
        """The same pipe, seen through."""
        return replace(
            pipe,
            finish=partial(self._finish, pipe.finish),
            minibatches=partial(self._minibatches, pipe.minibatches),
            update=partial(self._update, pipe.update),
        )

    def of_step(self) -> TokenRatios:
        """What was found in the last step; empty if its rollouts are not written."""
        return self._found

    def _finish(self, finish: Callable[[Collector], Collected], collector: Collector) -> Collected:
        collected = finish(collector)
        self._wanted = {
            group.prompt.ordinal for group in collected.sampled[: self._config.log.rollout_groups]
        }
        return collected

    def _minibatches(
        self, minibatches: Callable[..., list[list[Microbatch]]], groups: Sequence[Group], step: int
    ) -> list[list[Microbatch]]:
        due = self._config.logs_rollouts(step)
        trained = [group for group in groups if due and group.prompt.ordinal in self._wanted]
        self._found = {(g.prompt.ordinal, index): None for g in trained for index in range(len(g.rollouts))}
        self._groups = self._split(groups, step) if trained else []
        self._next = 0
        return minibatches(groups, step)

    def _update(
        self, update: Callable[..., Any], state: TrainState, minibatch: Minibatch, **how: Any
    ) -> tuple[TrainState, dict[str, Metric]]:
        if self._groups:
            self._look(state, minibatch, self._groups[self._next], first=how["first"])
            self._next += 1
        return update(state, minibatch, **how)

    def _look(self, state: TrainState, minibatch: Minibatch, groups: Sequence[Group], *, first: bool) -> None:
        wanted = [group for group in groups if group.prompt.ordinal in self._wanted]
        if not wanted:
            return
        ratios = self._ratios(state, minibatch, first=first)
        # The same response to the same question has the same ratios, wherever in the minibatch it stands.
        of_text = {
            (prompt.tobytes(), response.tobytes()): values
            for stack, found in zip(minibatch, on_host(ratios), strict=True)
            for prompt, response, values in responses_in(on_host(stack.microbatches), found)
        }
        for group in wanted:
            prompt = group.prompt.tokens.astype(np.int32).tobytes()
            for index, rollout in enumerate(group.rollouts):
                response = rollout.response.tokens.astype(np.int32).tobytes()
                self._found[group.prompt.ordinal, index] = of_text.get((prompt, response))


def responses_in(
    stack: Microbatch, values: Float[np.ndarray, "room rows seq"]
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """(prompt's tokens, response's tokens, its part of `values`) of each response in the loss of a stack [room, rows, seq]."""
    for place in np.ndindex(stack.mask.shape[:2]):
        tokens, mask = np.asarray(stack.tokens[place]), np.asarray(stack.mask[place])
        segments, prefixes = np.asarray(stack.segment_ids[place]), np.asarray(stack.prefix_ids[place])
        for segment in np.unique(segments[mask]):
            response = mask & (segments == segment)
            prompt = ~mask & (segments == prefixes[response][0])
            yield tokens[prompt], tokens[response], np.asarray(values[place])[response]
