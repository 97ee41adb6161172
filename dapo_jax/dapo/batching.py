"""From groups to microbatches: shuffle, split, pack. Host arrays.

Every token's weight in the loss is computed here from its whole minibatch, so packing, microbatching and sharding
change nothing in the gradient.
"""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Int

from dapo_jax.dapo.advantages import group_advantages
from dapo_jax.dapo.losses import token_weights
from dapo_jax.dapo.microbatch import Microbatch
from dapo_jax.dapo.rollouts import Group, Verdict
from dapo_jax.dapo.row_packing import PackedRow, Piece, share_out


@dataclass(frozen=True, kw_only=True)
class Example:
    """One prompt and response on its way into a microbatch."""

    prompt_tokens: Int[np.ndarray, " prompt"]
    response_tokens: Int[np.ndarray, " response"]
    logprobs: Float[np.ndarray, " response"]
    """The log-probabilities recorded while sampling, in nats; zeros for demonstrations."""
    advantage: float | Float[np.ndarray, " response"] = 1.0
    """One for all tokens, or one for each."""
    in_loss: bool = True
    """False: its tokens are left out of the loss (overlong filtering)."""
    sampled: Bool[np.ndarray, " response"] | None = None
    """True for the tokens that the policy sampled, which alone are in the loss; None: for all of them."""
    group: int = 0
    """The group of the minibatch that it belongs to, counted from 0."""
    rollout: int | None = None
    """The rollout of the minibatch that it is a part of, where an episode has several; None: a whole one."""

    @property
    def tokens(self) -> int:
        """Length in tokens, prompt and response together."""
        return len(self.prompt_tokens) + len(self.response_tokens)

    @property
    def mask(self) -> Bool[np.ndarray, " response"]:
        """True for the tokens that are in the loss."""
        sampled = np.ones(len(self.response_tokens), bool) if self.sampled is None else self.sampled
        return sampled & self.in_loss


def split_minibatches(
    groups: Sequence[Group], *, groups_per_update: int, seed: Sequence[int]
) -> list[list[Group]]:
    """Shuffles whole groups with the key `seed` and cuts them into minibatches of `groups_per_update`.

    The last may be smaller, when dynamic sampling trained on fewer groups than a step usually has.
    """
    order = np.random.default_rng(seed).permutation(len(groups))
    shuffled = [groups[i] for i in order]
    return [shuffled[i : i + groups_per_update] for i in range(0, len(shuffled), groups_per_update)]


def training_examples(
    groups: Sequence[Group],
    *,
    normalize_std: bool = True,
    filter_truncated: bool = False,
    by_turn: bool = False,
) -> list[Example]:
    """The rollouts of a minibatch with their advantages (Eq. 9).

    With `filter_truncated` (overlong filtering) a truncated response keeps its reward, so it counts in the group's
    mean and deviation, but is left out of the loss. With `by_turn` each turn of an episode has an advantage of its own
    (`turn_advantages`), else all of them have that of the episode. An episode whose environment began a context anew is an example for each context.
    """
    examples, count = [], 0
    for index, group in enumerate(groups):
        advantages = group_advantages(group.rewards[None], normalize_std=normalize_std)[0]
        of_turns = turn_advantages(group, normalize_std=normalize_std) if by_turn else {}
        for place, (rollout, advantage) in enumerate(zip(group.rollouts, advantages, strict=True)):
            response = rollout.response
            count, sampled, by_token = count + 1, response.sampled, of_turns.get(place)
            examples += [
                Example(
                    prompt_tokens=context,
                    response_tokens=response.tokens[first:stop],
                    logprobs=response.logprobs[first:stop],
                    advantage=float(advantage) if by_token is None else by_token[first:stop],
                    in_loss=not (filter_truncated and rollout.truncated),
                    sampled=sampled[first:stop] if response.turns else None,
                    group=index,
                    rollout=count if response.contexts else None,
                )
                for context, first, stop in response.parts(group.prompt.tokens)
            ]
    return examples


def turn_advantages(group: Group, *, normalize_std: bool = True) -> dict[int, Float[np.ndarray, " response"]]:
    """The advantage of each token of a group's episodes by reward-to-go: index of the rollout -> one number for each token.

    The return of turn k is the sum of the rewards from that turn on, and the overlong penalty. If rewards by turn do not add up to the scores, as where rewards
    were compared within the group, they count as 0: every turn has the episode's reward. The advantage is the return less the mean over the group's episodes that
    have a turn k, over the deviation of the episodes' rewards (Eq. 9 of a group whose episodes have one turn); 0 in a group of equal rewards. Rollouts without
    rewards by turn are left out.
    """
    told = {
        place: rollout
        for place, rollout in enumerate(group.rollouts)
        if rollout.response.turns and len(rollout.verdict.turn_rewards) == len(rollout.response.turns)
    }
    add_up = all(_add_up(each.verdict) for each in told.values())
    returns = {}
    for place, rollout in told.items():
        rewards = np.array(rollout.verdict.turn_rewards, np.float64) * add_up
        returns[place] = rollout.reward - np.concatenate([[0.0], np.cumsum(rewards)[:-1]])
    rewards = group.rewards
    differ = bool((rewards != rewards[0]).any())
    spread = rewards.std(ddof=1) + 1e-6 if normalize_std and differ else 1.0
    found = {}
    for place, rollout in told.items():
        advantages = np.zeros(len(rollout.response.tokens), np.float32)
        for turn, (first, stop) in enumerate(rollout.response.turns):
            mean = np.mean([each[turn] for each in returns.values() if len(each) > turn])
            advantages[first:stop] = (returns[place][turn] - mean) / spread if differ else 0.0
        found[place] = advantages
    return found


def _add_up(verdict: Verdict) -> bool:
    """Whether the rewards by turn add up to the score, up to the rounding of a sum."""
    score, total = verdict.score, sum(verdict.turn_rewards)
    return score is not None and math.isclose(score, total, rel_tol=1e-9, abs_tol=1e-9)


def example_weights(
    examples: Sequence[Example], *, aggregation: str = "token_mean", max_response_tokens: int | None = None
) -> Float[np.ndarray, " examples"]:
    """The weight of each example's tokens in the loss of the minibatch that `examples` make up; 0 for one left out.

    All tokens of a rollout weigh the same under every aggregation of `losses.token_weights`, also where it is several examples.
    """
    numbers: dict[tuple[str, int], int] = {}
    of_rollout = [
        numbers.setdefault(("alone", index) if one.rollout is None else ("part", one.rollout), len(numbers))
        for index, one in enumerate(examples)
    ]
    masks: list[list[np.ndarray]] = [[] for _ in numbers]
    groups = np.zeros(len(numbers), np.int32)
    for one, number in zip(examples, of_rollout, strict=True):
        masks[number].append(one.mask)
        groups[number] = one.group
    whole = [np.concatenate(parts) for parts in masks]
    longest = max([1, *map(len, whole)])  # episodes that were lost before their first turn have no token
    weights = token_weights(
        np.stack([np.pad(mask, (0, longest - len(mask))) for mask in whole]),
        aggregation=aggregation,
        group_ids=groups,
        max_response_tokens=max_response_tokens,
    )
    return np.asarray(weights).max(axis=1)[of_rollout]  # of those that are in the loss


def pack(
    examples: Sequence[Example],
    weights: Float[np.ndarray, " examples"],
    *,
    row_tokens: int,
    rows_per_microbatch: int,
    shorter_rows: Sequence[int] = (),
    spread: int = 1,
    share_prompts: bool = True,
    alone: bool = False,
    pad_id: int = 0,
) -> list[Microbatch]:
    """Packs examples into rows of `row_tokens` tokens and rows into microbatches of a few static shapes.

    Responses to one prompt that come into one row share it: the prompt is computed once, and takes the gradients of all of
    them. There is as little padding as is found; rows with about as much to attend to come into one microbatch
    (`dapo_jax.dapo.row_packing`). The rest is padding with no weight. Microbatches with the longest rows come first.

    Args:
        examples: all of a minibatch.
        weights: of each example's tokens, from `example_weights`.
        row_tokens: the length of a row.
        rows_per_microbatch: rows in a microbatch.
        shorter_rows: other lengths that all rows of a microbatch may have instead, so that what does not fill one of
            `row_tokens` is not mostly padding. For each a program is compiled.
        spread: over how many groups of devices these lie, the first `rows_per_microbatch / spread` on the first; each gets as
            much to attend to.
        share_prompts: False where attention cannot show a response another segment: every example has its own prompt.
        alone: one example a row, where attention cannot tell segments apart.
        pad_id: the token of padding.

    Raises:
        ValueError: an example is longer than a row, for cutting it would train on a response that was never sampled; or
            `spread` does not divide `rows_per_microbatch`.
    """
    if rows_per_microbatch % spread:
        raise ValueError(
            f"rows_per_microbatch={rows_per_microbatch} must be a multiple of the {spread} groups of devices it is spread "
            f"over; {-(-rows_per_microbatch // spread) * spread} is"
        )
    for index, one in enumerate(examples):
        if one.tokens > row_tokens:
            raise ValueError(
                f"rollout {index} has {len(one.prompt_tokens)} prompt + {len(one.response_tokens)} response = {one.tokens} "
                f"tokens, over batch.row_tokens={row_tokens}; raise batch.row_tokens or lower sampling.max_response_tokens"
            )
    shared = share_prompts and not alone
    pieces = [
        Piece(
            rollouts=(index,),
            responses=(len(one.response_tokens),),
            prompt=one.prompt_tokens.tobytes() if shared else index,
            prompt_tokens=len(one.prompt_tokens),
        )
        for index, one in enumerate(examples)
    ]
    lengths = sorted({row_tokens, *shorter_rows}, reverse=True)
    return [
        _microbatch(
            [
                [[(examples[i], float(weights[i])) for i in bundle] for bundle in _bundles(row)]
                for row in rows
            ],
            shape=(rows_per_microbatch, length),
            pad_id=pad_id,
        )
        for length, rows in share_out(
            pieces, lengths=lengths, rows_per_microbatch=rows_per_microbatch, spread=spread, alone=alone
        )
    ]


def _bundles(row: PackedRow) -> list[list[int]]:
    """Indices of the examples of a row, those that share a prompt together."""
    of_prompt: dict[Hashable, list[int]] = {}
    for piece in row:
        of_prompt.setdefault(piece.prompt, []).extend(piece.rollouts)
    return list(of_prompt.values())


def _microbatch(
    rows: Sequence[Sequence[Sequence[tuple[Example, float]]]], *, shape: tuple[int, int], pad_id: int
) -> Microbatch:
    """Writes packed rows into fresh arrays; a row is a list of bundles, a bundle a list of examples with one prompt, each with its weight."""
    tokens = np.full(shape, pad_id, np.int32)
    segment_ids, prefix_ids, positions, previous = (np.zeros(shape, np.int32) for _ in range(4))
    mask = np.zeros(shape, bool)
    advantages, weighted, logprobs = (np.zeros(shape, np.float32) for _ in range(3))
    for row, bundles in enumerate(rows):
        stop, segment = 0, 0
        for bundle in bundles:
            prompt = bundle[0][0].prompt_tokens
            start, stop, segment = stop, stop + len(prompt), segment + 1
            head, prefix = stop - 1, segment
            tokens[row, start:stop], positions[row, start:stop] = prompt, np.arange(len(prompt))
            segment_ids[row, start:stop] = prefix_ids[row, start:stop] = segment
            previous[row, start + 1 : stop] = np.arange(start, head)
            for one, weight in bundle:
                count = len(one.response_tokens)
                segment += len(bundle) > 1
                place, stop = slice(stop, stop + count), stop + count
                tokens[row, place], logprobs[row, place] = one.response_tokens, one.logprobs
                positions[row, place] = len(prompt) + np.arange(count)
                segment_ids[row, place], prefix_ids[row, place] = segment, prefix
                previous[row, place] = [head, *range(place.start, stop - 1)][:count]
                mask[row, place] = one.mask
                advantages[row, place] = one.advantage
                weighted[row, place] = weight if one.sampled is None else weight * one.sampled
    return Microbatch(
        tokens=tokens,
        segment_ids=segment_ids,
        prefix_ids=prefix_ids,
        previous=previous,
        positions=positions,
        mask=mask,
        advantages=advantages,
        weights=weighted,
        sampler_logprobs=logprobs,
        old_logprobs=np.zeros(shape, np.float32),
        ref_logprobs=np.zeros(shape, np.float32),
    )
