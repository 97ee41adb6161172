"""Converts groups to the training examples of an update: splits the groups into minibatches, and computes token weights and the advantages of turns on the host.

The loss weight of each token is computed here from the whole minibatch. Packing, microbatching and sharding therefore do not change the gradient.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float

from dapo_jax.dapo.aggregation import token_weights
from dapo_jax.dapo.rollouts import Group
from dapo_jax.dapo.tokens import Tokens


@dataclass(frozen=True, kw_only=True)
class Example:
    """A prompt and a response to train on."""

    prompt: Tokens
    response: Tokens
    advantage: float | Float[np.ndarray, " response"] = 1.0
    """The advantage of all response tokens, or one advantage per token."""
    in_loss: bool = True
    """If False, no token of this example enters the loss (overlong filtering)."""
    sampled: Bool[np.ndarray, " response"] | None = None
    """True for tokens that the policy sampled. Other tokens do not enter the loss. If None, the policy sampled all tokens."""
    noise: Float[np.ndarray, " response"] | None = None
    """A random number from 0 to 1 for each token, if a selection requires it."""
    teacher_logprobs: Float[np.ndarray, " response"] | None = None
    """The log-probability of each token under the teacher, if it is known before the update."""
    group: int = 0
    """Index of the example's group in the minibatch."""
    rollout: int | None = None
    """Identifies the episode if it was split into several examples, one per context. If None, the example is a complete rollout."""

    @property
    def tokens(self) -> int:
        """Total length of prompt and response in tokens."""
        return len(self.prompt) + len(self.response)

    @property
    def mask(self) -> Bool[np.ndarray, " response"]:
        """True for tokens that enter the loss."""
        sampled = np.ones(len(self.response), bool) if self.sampled is None else self.sampled
        return sampled & self.in_loss


def split_minibatches(
    groups: Sequence[Group], *, groups_per_update: int, seed: Sequence[int]
) -> list[list[Group]]:
    """Shuffles the groups with the random seed `seed` and splits them into minibatches of `groups_per_update` groups.

    The last minibatch is smaller if dynamic sampling found fewer groups than a step normally trains on.
    """
    order = np.random.default_rng(seed).permutation(len(groups))
    shuffled = [groups[i] for i in order]
    return [shuffled[i : i + groups_per_update] for i in range(0, len(shuffled), groups_per_update)]


def training_examples(
    groups: Sequence[Group],
    advantages: Sequence[Iterable[float | np.ndarray]],
    *,
    filter_truncated: bool = False,
) -> list[Example]:
    """Converts the rollouts of a minibatch to examples.

    If the environment started new contexts in an episode, the episode becomes one example per context.

    Args:
        groups: groups of the minibatch.
        advantages: for each group, one advantage per rollout (`step_advantages`): a number, or an array with one value per token (`turn_advantages`).
        filter_truncated: exclude truncated responses from the loss (overlong filtering). Their rewards still enter their group's mean and standard deviation.
    """
    examples, count = [], 0
    for index, (group, of_group) in enumerate(zip(groups, advantages, strict=True)):
        for rollout, advantage in zip(group.rollouts, of_group, strict=True):
            response = rollout.response
            count, sampled = count + 1, response.sampled
            for turn in rollout.verdict.forgotten:
                sampled[slice(*response.turns[turn])] = False
            examples += [
                Example(
                    prompt=context,
                    response=response.record.cut(first, stop),
                    advantage=advantage[first:stop]
                    if isinstance(advantage, np.ndarray)
                    else float(advantage),
                    in_loss=not (filter_truncated and rollout.truncated),
                    sampled=sampled[first:stop] if response.turns else None,
                    group=index,
                    rollout=count if response.contexts else None,
                )
                for context, first, stop in response.parts(group.prompt.tokens)
            ]
    return examples


def turn_advantages(group: Group, *, normalize_std: bool = True) -> dict[int, Float[np.ndarray, " response"]]:
    """Computes per-token advantages from the reward-to-go of each turn. The result maps the index of a rollout to one advantage per token.

    The return of turn k is the sum of the rewards from turn k to the last turn, plus the overlong penalty. If the per-turn rewards
    do not add up to the score, they are ignored, and the return of every turn is the episode's reward.

    The advantage of turn k is its return minus the mean return over the episodes of the group that have a turn k. The difference is divided by the
    standard deviation of the episodes' rewards. For single-turn episodes, this is Eq. 9. If all rewards of the group are equal, the advantages are 0.
    Rollouts without per-turn rewards are omitted from the result.
    """
    by_turn = {
        index: rollout
        for index, rollout in enumerate(group.rollouts)
        if rollout.response.turns and len(rollout.verdict.turn_rewards) == len(rollout.response.turns)
    }
    verdicts = [rollout.verdict for rollout in by_turn.values()]
    add_up = all(
        verdict.score is not None and math.isclose(verdict.score, sum(verdict.turn_rewards), abs_tol=1e-9)
        for verdict in verdicts
    )
    returns = {}
    for index, rollout in by_turn.items():
        rewards = np.array(rollout.verdict.turn_rewards, np.float64) * add_up
        returns[index] = rollout.reward - np.concatenate([[0.0], np.cumsum(rewards)[:-1]])
    rewards = group.rewards
    differ = bool((rewards != rewards[0]).any())
    spread = rewards.std(ddof=1) + 1e-6 if normalize_std and differ else 1.0
    by_rollout = {}
    for index, rollout in by_turn.items():
        advantages = np.zeros(len(rollout.response.tokens), np.float32)
        for turn, (first, stop) in enumerate(rollout.response.turns):
            mean = np.mean([episode[turn] for episode in returns.values() if len(episode) > turn])
            advantages[first:stop] = (returns[index][turn] - mean) / spread if differ else 0.0
        by_rollout[index] = advantages
    return by_rollout


def example_weights(
    examples: Sequence[Example], *, aggregation: str = "token_mean", max_response_tokens: int | None = None
) -> Float[np.ndarray, " examples"]:
    """Returns the per-token loss weight of each example, or 0 if the example is excluded from the loss. `examples` is the whole minibatch.

    One weight per example is enough: in every aggregation of `aggregation.token_weights`, all tokens of a rollout have the same weight, even if the rollout is split.
    """
    numbers: dict[tuple[str, int], int] = {}
    rollouts = [
        numbers.setdefault(
            ("alone", index) if example.rollout is None else ("part", example.rollout), len(numbers)
        )
        for index, example in enumerate(examples)
    ]
    masks: list[list[np.ndarray]] = [[] for _ in numbers]
    groups = np.zeros(len(numbers), np.int32)
    for example, number in zip(examples, rollouts, strict=True):
        masks[number].append(example.mask)
        groups[number] = example.group
    whole = [np.concatenate(parts) for parts in masks]
    longest = max([1, *map(len, whole)])  # an episode that failed before its first turn has no tokens
    weights = token_weights(
        np.stack([np.pad(mask, (0, longest - len(mask))) for mask in whole]),
        aggregation=aggregation,
        group_ids=groups,
        max_response_tokens=max_response_tokens,
    )
    return np.asarray(weights).max(axis=1)[rollouts]  # the weight inside the mask; it is 0 outside
