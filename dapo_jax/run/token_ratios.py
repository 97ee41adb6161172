"""The ratio pi / pi_old of every token in the rollouts that a run writes, as the update computes it."""

from collections.abc import Iterator, Mapping

import numpy as np
from jaxtyping import Float

from dapo_jax.config import TrainConfig
from dapo_jax.dapo.dynamic_sampling import Collected
from dapo_jax.dapo.microbatch import Microbatch
from dapo_jax.dapo.rollouts import Group, Rollout
from dapo_jax.run.loop import Observer
from dapo_jax.run.step_batches import StepBatches
from dapo_jax.trackers.rollout_log import LOGGED_GROUPS
from dapo_jax.training.minibatch import Minibatch, on_host
from dapo_jax.training.state import TrainState
from dapo_jax.training.update import Updater

TokenRatios = Mapping[tuple[int, int], Float[np.ndarray, " response"] | None]
"""(ordinal, response index) -> the ratio of each token of a trained rollout; None if the rollout is not in the loss."""


class Ratios(Observer):
    """Computes the ratios by a forward pass over the minibatches with written rollouts. All processes make the same calls."""

    def __init__(self, config: TrainConfig, *, batches: StepBatches, updater: Updater) -> None:
        self._config, self._batches, self._updater = config, batches, updater
        self._wanted: set[int] = set()
        self._groups: list[list[Group]] = []
        self._found: dict[tuple[int, int], Float[np.ndarray, " response"] | None] = {}

    def of_step(self) -> TokenRatios:
        """Returns the ratios of the last step; empty if its rollouts are not written."""
        return self._found

    def after_sampling(self, step: int, collected: Collected) -> None:
        """Finds the rollouts to write, and the updates that train on them."""
        due = self._config.logs_rollouts(step)
        self._wanted = {group.prompt.ordinal for group in collected.logged(LOGGED_GROUPS)}
        trained = [group for group in collected.groups if due and group.prompt.ordinal in self._wanted]
        self._found = {(g.prompt.ordinal, index): None for g in trained for index in range(len(g.rollouts))}
        self._groups = self._batches.split(collected.groups, step) if trained else []

    def before_update(self, state: TrainState, minibatch: Minibatch, *, index: int, count: int) -> None:
        """Computes the ratios under the weights before the update."""
        groups = self._groups[index] if self._groups else []
        wanted = [group for group in groups if group.prompt.ordinal in self._wanted]
        if not wanted:
            return
        ratios = self._updater.ratios(state, minibatch, first=index == 0)
        # The same response to the same prompt has the same ratios at every place of the minibatch.
        of_text = {
            tokens.tobytes(): values
            for stack, found in zip(minibatch, on_host(ratios), strict=True)
            for tokens, values in responses_in(on_host(stack.microbatches), found)
        }
        for group in wanted:
            for index, rollout in enumerate(group.rollouts):
                self._found[group.prompt.ordinal, index] = _of_rollout(group, rollout, of_text)


def _of_rollout(
    group: Group, rollout: Rollout, of_text: Mapping[bytes, np.ndarray]
) -> Float[np.ndarray, " response"] | None:
    """Returns the values of a rollout's tokens, NaN for tokens that were not sampled; None if it is not in the loss."""
    response, found = rollout.response, None
    for context, first, stop in response.parts(group.prompt.tokens):
        tokens = np.concatenate([context, response.tokens[first:stop]]).astype(np.int32)
        if (values := of_text.get(tokens.tobytes())) is None:
            continue
        if found is None:
            found = np.full(len(response.tokens), np.nan, values.dtype)
        found[first:stop][response.sampled[first:stop]] = values
    return found


def responses_in(
    stack: Microbatch, values: Float[np.ndarray, "capacity rows seq"]
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields for each response in the loss of a stack [capacity, rows, seq]: tokens of prompt and response, values of the sampled tokens."""
    for place in np.ndindex(stack.mask.shape[:2]):
        tokens, mask = np.asarray(stack.tokens[place]), np.asarray(stack.mask[place])
        segments, prefixes = np.asarray(stack.segment_ids[place]), np.asarray(stack.prefix_ids[place])
        for segment in np.unique(segments[mask]):
            sampled = mask & (segments == segment)
            seen = (segments == segment) | (segments == prefixes[sampled][0])
            yield tokens[seen], np.asarray(values[place])[sampled]
