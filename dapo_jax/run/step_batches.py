"""Turns a step's groups into the minibatches of its updates."""

from collections.abc import Sequence

from dapo_jax.config import TrainConfig
from dapo_jax.dapo.batching import example_weights, split_minibatches, training_examples
from dapo_jax.dapo.microbatch import Microbatch
from dapo_jax.dapo.rollouts import Group
from dapo_jax.run.training_pass import TrainingPass
from dapo_jax.training.row_packing import pack


class StepBatches:
    """The batches of one run's steps."""

    def __init__(self, config: TrainConfig, training_pass: TrainingPass, *, pad_id: int) -> None:
        self._config, self._pass, self._pad_id = config, training_pass, pad_id

    def split(self, groups: Sequence[Group], step: int) -> list[list[Group]]:
        """Returns the groups of each update of a step."""
        config, filtered = self._config, self._config.reward.overlong.filter_truncated
        split = split_minibatches(
            groups, groups_per_update=config.batch.groups_per_update, seed=(config.seed, step)
        )
        # If overlong filtering left no token, or every episode was lost before its first turn, an update would only apply weight decay.
        return [
            minibatch
            for minibatch in split
            if any(
                rollout.response_tokens and not (filtered and rollout.truncated)
                for group in minibatch
                for rollout in group.rollouts
            )
        ]

    def minibatches(self, groups: Sequence[Group], step: int) -> list[list[Microbatch]]:
        """Returns the microbatches of each update of a step, on the host."""
        return [self._packed(minibatch) for minibatch in self.split(groups, step)]

    def _packed(self, groups: Sequence[Group]) -> list[Microbatch]:
        config = self._config
        examples = training_examples(
            groups,
            normalize_std=config.loss.normalize_std,
            filter_truncated=config.reward.overlong.filter_truncated,
            by_turn=config.environment.credit == "turn",
        )
        weights = example_weights(
            examples,
            aggregation=config.loss.aggregation,
            max_response_tokens=config.episode_tokens,
        )
        return pack(
            examples,
            weights,
            row_tokens=self._pass.row_tokens,
            rows_per_microbatch=config.batch.rows_per_microbatch,
            pad_id=self._pad_id,
            **self._pass.packing,
        )
