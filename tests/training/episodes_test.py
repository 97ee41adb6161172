"""The gradient of a minibatch of episodes compared with float64: tokens of the environment are context only.

The oracle is the Llama of `correction_test`, with one turn per row. The library computes advantages, weights and packed rows of groups.
"""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dapo_jax.dapo.advantages import step_advantages
from dapo_jax.dapo.batching import example_weights, training_examples, turn_advantages
from dapo_jax.dapo.corrections import importance_weights
from dapo_jax.dapo.rollouts import ContextSpan, Group, Prompt, Response, Rollout, TurnSpan, Verdict
from dapo_jax.dapo.tokens import Tokens
from dapo_jax.models.decoder import graph_of
from dapo_jax.parallel.training_layout import layout_of
from dapo_jax.training.row_packing import pack
from dapo_jax.training.state import init_state
from dapo_jax.training.update import UpdateOptions, Updater
from tests.training.correction_test import (
    CONFIG,
    HIGH,
    KEEP_GRADIENT,
    LOW,
    OLDER,
    PARAMS,
    exact_logprobs,
    in_float64,
    logprobs_of,
    one_device,
)

LONGEST = 48
"""A bound on the tokens of a turn and its context."""


def episode(rng, prompt, *, fresh=0.0):
    """Returns an episode with two to four turns of one to four tokens, and up to two tokens of the environment before each turn and after the last.

    `fresh` is the probability of a new context before each turn and at the end."""
    tokens, turns, rewards = rng.integers(2, CONFIG.vocab_size, rng.integers(0, 3)).tolist(), [], []
    contexts = []

    def begin():
        if rng.random() < fresh:
            contexts.append(ContextSpan(len(tokens), len(tokens) + 3))
            tokens.extend(rng.integers(2, CONFIG.vocab_size, 3).tolist())

    for _ in range(rng.integers(2, 5)):
        begin()
        first = len(tokens)
        tokens += rng.integers(2, CONFIG.vocab_size, rng.integers(1, 5)).tolist()
        turns.append(TurnSpan(first, len(tokens)))
        rewards.append(float(rng.integers(0, 2)))
        tokens += rng.integers(2, CONFIG.vocab_size, rng.integers(0, 3)).tolist()
    begin()
    tokens = np.array(tokens, np.int32)
    # Log-probabilities of an older policy; the sampler records 0 for tokens of the environment.
    recorded = np.zeros(len(tokens), np.float32)
    for first, stop, context in with_context(prompt.tokens, tokens, turns, contexts):
        whole = np.zeros((1, LONGEST), np.int32)  # of one width, so that one program computes all
        whole[0, : len(context) + stop - first] = [*context, *tokens[first:stop]]
        recorded[first:stop] = exact_logprobs(OLDER[0], whole)[0, len(context) :][: stop - first]
    response = Response(
        record=Tokens(tokens, logprobs=recorded),
        finish_reason="stop",
        turns=tuple(turns),
        contexts=tuple(contexts),
    )
    verdict = Verdict(correct=sum(rewards) > 0, score=sum(rewards), turn_rewards=rewards)
    return Rollout(response=response, text="", verdict=verdict, reward=sum(rewards))


def with_context(prompt, tokens, turns, contexts):
    """Yields each turn with its context: from the last new context, or from the prompt."""
    for first, stop in turns:
        fresh = [context.first for context in contexts if context.stop <= first]
        yield first, stop, tokens[fresh[-1] : first] if fresh else np.concatenate([prompt, tokens[:first]])


@cache
def groups(seed, fresh=0.0):
    rng, found = np.random.default_rng(seed), []
    for ordinal in range(5):
        prompt = Prompt(
            ordinal=ordinal, tokens=rng.integers(2, CONFIG.vocab_size, rng.integers(2, 6)).astype(np.int32), text="", answer=""
        )  # fmt: skip
        found.append(
            Group(prompt=prompt, rollouts=tuple(episode(rng, prompt, fresh=fresh) for _ in range(4)))
        )
    return found


def examples_of(given, *, by_turn=False):
    turns = [turn_advantages(group) if by_turn else {} for group in given]
    pairs = zip(turns, step_advantages(given), strict=True)
    return training_examples(
        given, [[of.get(place, value) for place, value in enumerate(values)] for of, values in pairs]
    )


def packed(given, *, by_turn=False):
    examples = examples_of(given, by_turn=by_turn)
    return pack(examples, example_weights(examples), row_tokens=64, rows_per_microbatch=2)


@cache
def updater_of(mesh):
    options = UpdateOptions(logprob_chunk_vocab=8, old_logprobs="sampler")
    graph = graph_of(CONFIG, layout=layout_of(mesh, attention="xla"))
    return Updater(graph, PARAMS, KEEP_GRADIENT, mesh, options=options)


def gradient(minibatch):
    """Returns the library's gradient of a minibatch, with the sampler's log-probabilities as the old ones, so that some ratios are clipped."""
    mesh = one_device()
    updater, state = updater_of(mesh), init_state(PARAMS, KEEP_GRADIENT, mesh)
    [prepared] = updater.prepare(state, [minibatch])
    state, _ = updater.update(state, prepared, learning_rate=1.0, first=True)
    return in_float64(state.opt_state.trace)


def returns_by_hand(group, by_turn):
    """Returns the advantage of each turn of each episode."""
    rewards = np.array([rollout.reward for rollout in group.rollouts])
    scale = rewards.std(ddof=1) + 1e-6
    if not by_turn:
        return [[(reward - rewards.mean()) / scale] * 9 for reward in rewards]
    if (rewards == rewards[0]).all():
        return [[0.0] * 9 for _ in rewards]
    to_go = [
        [sum(each.verdict.turn_rewards[turn:]) for turn in range(len(each.response.turns))] for each in group.rollouts
    ]  # fmt: skip
    return [
        [(value - np.mean([other[turn] for other in to_go if len(other) > turn])) / scale for turn, value in enumerate(each)]
        for each in to_go
    ]  # fmt: skip


def exact_gradient(given, by_turn):
    by_episode = [each for group in given for each in returns_by_hand(group, by_turn)]
    rollouts = [(group.prompt.tokens, rollout.response) for group in given for rollout in group.rollouts]
    turns = [  # one row per turn, with its context
        (response, first, stop, context, value)
        for (prompt, response), values in zip(rollouts, by_episode, strict=True)
        for (first, stop, context), value in zip(
            with_context(prompt, response.tokens, response.turns, response.contexts), values, strict=False
        )
    ]
    width = max(len(context) + stop - first for _, first, stop, context, _ in turns)
    tokens, mask = np.zeros((len(turns), width), np.int32), np.zeros((len(turns), width), bool)
    old, advantage = np.zeros((len(turns), width)), np.zeros((len(turns), width))
    for row, (response, first, stop, context, value) in enumerate(turns):
        place = slice(len(context), len(context) + stop - first)
        tokens[row, : place.stop] = [*context, *response.tokens[first:stop]]
        mask[row, place], advantage[row, place] = True, np.float32(value)
        old[row, place] = response.logprobs[first:stop]
    count = float(mask.sum())

    def loss(p):
        ratio = jnp.exp(jnp.where(mask, logprobs_of(p, tokens) - old, 0.0))
        gain = jnp.minimum(ratio * advantage, jnp.clip(ratio, 1 - LOW, 1 + HIGH) * advantage)
        return -(jnp.where(mask, gain, 0.0)).sum() / count

    with jax.enable_x64(True):
        return {name: np.asarray(leaf) for name, leaf in jax.jit(jax.grad(loss))(in_float64(PARAMS)).items()}


@pytest.mark.parametrize("by_turn", [False, True], ids=["episode", "turn"])
# Slow: episodes without new contexts. Half of the turns of seed 5 continue, too.
@pytest.mark.parametrize(
    ("seed", "fresh"), [(5, 0.5), *(pytest.param(seed, 0.0, marks=pytest.mark.slow) for seed in (3, 7))]
)
def test_the_gradient_of_episodes_equals_the_formulas(by_turn, seed, fresh):
    given = groups(seed, fresh)
    rows = sum(
        len(rollout.response.parts(group.prompt.tokens)) for group in given for rollout in group.rollouts
    )
    assert (rows > 20) == (fresh > 0), "new contexts make more rows than episodes"
    minibatch = packed(given, by_turn=by_turn)
    assert any(m.segment_ids.max() > 4 for m in minibatch), "episodes share their prompts"
    found, expected = gradient(minibatch), exact_gradient(given, by_turn)
    largest = max(np.abs(leaf).max() for leaf in expected.values())
    errors = {name: np.abs(found[name] - leaf).max() / largest for name, leaf in expected.items()}
    assert max(errors.values()) <= 1e-6, errors


def changed(given, change):
    """Returns the groups with changed responses."""

    def of(rollout):
        return replace(rollout, response=change(rollout.response))

    return [replace(group, rollouts=tuple(map(of, group.rollouts))) for group in given]


def test_recorded_logprobs_of_the_environment_change_no_bit():
    given = groups(3)

    def garbage(response):
        logprobs = np.where(response.sampled, response.logprobs, np.float32(-7.5))
        return replace(response, record=Tokens(response.tokens, logprobs=logprobs))

    found = gradient(packed(changed(given, garbage)))
    for name, leaf in gradient(packed(given)).items():
        np.testing.assert_array_equal(leaf, found[name])


def test_tokens_of_the_environment_matter_only_as_context():
    given = groups(3)

    def other_end(response):
        tokens = response.tokens.copy()
        tokens[response.turns[-1].stop :] = 2 + (tokens[response.turns[-1].stop :] - 1) % 18
        return replace(response, record=Tokens(tokens, logprobs=response.logprobs))

    def other_answers(response):
        tokens = np.where(response.sampled, response.tokens, 2 + (response.tokens - 1) % 18)
        return replace(response, record=Tokens(tokens, logprobs=response.logprobs))

    assert any((other_end(r.response).tokens != r.response.tokens).any() for g in given for r in g.rollouts)
    plain, at_end, before = (
        gradient(packed(each)) for each in (given, changed(given, other_end), changed(given, other_answers))
    )
    for name, leaf in plain.items():
        if name == "embedding":  # a sum over the tokens of the vocabulary, in another order
            np.testing.assert_allclose(at_end[name], leaf, rtol=0, atol=1e-8)
        else:
            np.testing.assert_array_equal(at_end[name], leaf)
    assert any((before[name] != leaf).any() for name, leaf in plain.items())


def test_a_forgotten_last_turn_trains_as_an_episode_without_it():
    """Nobody received that turn, so neither its tokens nor its share of the mean may enter the gradient. Rounding differs with the rows' lengths."""
    given = groups(3)

    def forget(rollout):
        verdict = replace(rollout.verdict, forgotten=(len(rollout.response.turns) - 1,))
        return replace(rollout, verdict=verdict)

    def without(response):
        turns = response.turns[:-1]
        return replace(response, record=response.record.cut(0, turns[-1].stop), turns=turns)

    forgotten = [replace(group, rollouts=tuple(map(forget, group.rollouts))) for group in given]
    found, expected = gradient(packed(forgotten)), gradient(packed(changed(given, without)))
    largest = max(np.abs(leaf).max() for leaf in expected.values())
    assert max(np.abs(found[name] - leaf).max() for name, leaf in expected.items()) <= 1e-6 * largest


def test_only_sampled_tokens_count():
    given = groups(3)
    sampled = sum(rollout.response.sampled_tokens for group in given for rollout in group.rollouts)
    assert sampled < sum(len(rollout.response.tokens) for group in given for rollout in group.rollouts)
    assert sum(int(m.mask.sum()) for m in packed(given)) == sampled
    assert set(example_weights(examples_of(given))) == {1 / sampled}


def test_an_episode_weighs_the_same_in_however_many_rows_it_is():
    """The mean over sequences is one over episodes: each token weighs 1 / (episodes x sampled tokens of its episode)."""
    given = groups(5, 0.5)
    examples = examples_of(given)
    lengths = [
        (rollout.response.sampled_tokens, len(rollout.response.parts(group.prompt.tokens)))
        for group in given
        for rollout in group.rollouts
    ]
    assert max(rows for _, rows in lengths) > 1
    expected = [1 / (len(lengths) * length) for length, rows in lengths for _ in range(rows)]
    np.testing.assert_allclose(example_weights(examples, aggregation="sequence_mean"), expected, rtol=1e-6)
    assert sum(float(m.weights.sum()) for m in packed(given)) == pytest.approx(1.0, rel=1e-6)


def test_keep_responses_judges_the_part_after_each_context_separately():
    """Two turns of two tokens, the second in a new context. Ratios 2, 1/2 have the mean 1 and are kept; 4, 4 are beyond the range. Over all four
    tokens the mean would be 2, and the whole episode left out."""
    response = Response(
        record=Tokens(np.array([5, 6, 7, 5, 6], np.int32)), finish_reason="stop",
        turns=(TurnSpan(0, 2), TurnSpan(3, 5)), contexts=(ContextSpan(2, 3),),
    )  # fmt: skip
    prompt = Prompt(ordinal=0, tokens=np.array([2], np.int32), text="", answer="")
    rollout = Rollout(response=response, text="", verdict=Verdict(correct=True), reward=1.0)
    examples = examples_of([Group(prompt=prompt, rollouts=(rollout,))])
    [row] = pack(examples, example_weights(examples), row_tokens=8, rows_per_microbatch=1)
    assert row.segment_ids.tolist() == [[1, 1, 1, 2, 2, 2, 0, 0]]
    ratios = np.array([[1.0, 2.0, 0.5, 1.0, 4.0, 4.0, 1.0, 1.0]], np.float32)
    arrays = map(jnp.asarray, (np.log(ratios), row.sampler_logprobs, row.mask, row.segment_ids))
    weights, _ = importance_weights(*arrays, correction="keep_responses", low=0.9, high=1.1)
    assert np.asarray(weights)[row.mask].round(4).tolist() == [2.0, 0.5, 0.0, 0.0]


def group_of(*rewards, scores=None, penalties=None):
    """Returns a group of episodes with these rewards by turn; each turn has a sampled token and a token of the environment."""
    rollouts = []
    for index, each in enumerate(rewards):
        tokens = np.arange(2, 2 + 2 * len(each)).astype(np.int32)
        turns = tuple(TurnSpan(2 * k, 2 * k + 1) for k in range(len(each)))
        response = Response(
            record=Tokens(tokens), finish_reason="stop", turns=turns
        )  # fmt: skip
        score, penalty = scores[index] if scores else sum(each), penalties[index] if penalties else 0.0
        verdict = Verdict(correct=True, score=score, turn_rewards=each)
        rollouts.append(
            Rollout(response=response, text="", verdict=verdict, reward=score + penalty, overlong_penalty=penalty)
        )  # fmt: skip
    prompt = Prompt(ordinal=0, tokens=np.array([2], np.int32), text="", answer="")
    return Group(prompt=prompt, rollouts=tuple(rollouts))


def by_turn(group):
    """Returns the advantage of each turn of each episode."""
    found = turn_advantages(group)
    assert all((values[1::2] == 0).all() for values in found.values()), "tokens of the environment have none"
    return [values[::2].tolist() for values in found.values()]


def test_advantages_by_turn_by_hand():
    """Rewards 1, 0 | 0, 1 | 0: returns (1, 0), (1, 1), (0). Of turn 0 the mean is 2/3, of turn 1 a half; rewards 1, 1, 0 deviate by 0.57735."""
    first, second, third = by_turn(group_of((1.0, 0.0), (0.0, 1.0), (0.0,)))
    scale = 0.57735 + 1e-6
    np.testing.assert_allclose(first, [1 / 3 / scale, -0.5 / scale], rtol=1e-5)
    np.testing.assert_allclose(second, [1 / 3 / scale, 0.5 / scale], rtol=1e-5)
    np.testing.assert_allclose(third, [-2 / 3 / scale], rtol=1e-5)
    assert by_turn(group_of((1.0, 0.0), (0.0, 1.0))) == [[0.0, 0.0]] * 2, "equal rewards"


def test_a_compared_reward_is_the_return_of_every_turn():
    """Compared rewards 1 and 0, rewards by turn (+1, 0) and (-1, 0), which add up to the score of the first episode alone. The mean is a half and the deviation
    0.70711, so each turn of the better episode has +0.70711, and each turn of the other -0.70711."""
    found = by_turn(group_of((1.0, 0.0), (-1.0, 0.0), scores=(1.0, 0.0)))
    np.testing.assert_allclose(found, [[0.70711] * 2, [-0.70711] * 2], rtol=1e-4)


def test_a_penalty_for_length_is_in_the_return_of_every_turn():
    """Rewards (1, 0) and (0, 0), the first with a penalty of -1/2: rewards 1/2 and 0, returns (1/2, -1/2) and (0, 0). The deviation is 0.35355."""
    found = by_turn(group_of((1.0, 0.0), (0.0, 0.0), penalties=(-0.5, 0.0)))
    np.testing.assert_allclose(found, [[0.70711, -0.70711], [-0.70711, 0.70711]], rtol=1e-4)
