"""Episodes of several turns: neither slots nor the time of environments change the sampled and the appended tokens."""

import itertools
import threading
from concurrent.futures import Future

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dapo_jax.dapo.rollouts import ContextSpan, Continuation
from dapo_jax.models.attention_mixer import ATTENTION
from dapo_jax.models.gated_delta import GatedDelta
from dapo_jax.sampling.cache_sizes import PageSizes
from dapo_jax.sampling.decoding import response_keys
from dapo_jax.testing import ScriptedEngine, tiny_decoder_config
from tests.sampling.continuous_batching_test import (
    EOS,
    KEY,
    LIMIT,
    MAX_PROMPT,
    assert_same,
    differences,
    made,
    prompts,
    sample,
    weights_of,
)


class Appending:
    """Environments that append what `answer(ordinal, index, turns so far)` gives: a list of ids, a Continuation, or None. Each answer comes after a random while."""

    def __init__(self, answer, *, max_turns=4, turn_tokens=0, episode_tokens=0, delays=None):
        self.answer, self.max_turns, self.turn_tokens = answer, max_turns, turn_tokens
        self.episode_tokens, self.delays, self.seen = episode_tokens, delays, {}

    def start(self, prompt, index):
        self.seen[prompt.ordinal, index] = []
        return self._later(prompt, index)

    def step(self, prompt, index, turn):
        self.seen[prompt.ordinal, index].append(turn)
        return self._later(prompt, index)

    def _later(self, prompt, index):
        found = Future()
        given = self.answer(prompt.ordinal, index, self.seen[prompt.ordinal, index])
        value = Continuation(np.array(given, np.int32)) if isinstance(given, list) else given
        if self.delays is None:
            found.set_result(value)
        else:
            threading.Timer(float(self.delays.uniform(0, 0.02)), found.set_result, [value]).start()
        return found


def episodes(engine, environments, asked, **how):
    return sample(engine, asked, environments=environments, **how)


def two_more(ordinal, index, turns):
    """Two tokens after each turn, nothing before the first."""
    return [] if not turns else [2 + (ordinal + len(turns)) % 18, 2 + index % 18]


def new_context(ordinal, index, turns):
    """Two tokens after each turn except the second, after which a new context of three begins. The third response begins with a new context, too."""
    if len(turns) == 2:
        return Continuation(np.array([2 + ordinal, 9, 2 + index], np.int32), new_context=True)
    if not turns and index == 2:
        return Continuation(np.array([4, 4 + ordinal], np.int32), new_context=True)
    return two_more(ordinal, index, turns)


def engine_of(slots, steps, **how):
    return made(slots, steps, has_turns=True, **how)


@pytest.fixture(scope="module")
def expected():
    """Turns of up to three tokens, four of them."""
    return episodes(engine_of(4, 8), Appending(two_more, turn_tokens=3), prompts(0, 1, 2, 3, 4))


@pytest.fixture(scope="module")
def expected_new_contexts():
    """The same with new contexts."""
    return episodes(engine_of(4, 8), Appending(new_context, turn_tokens=3), prompts(0, 1, 2, 3, 4))


def test_an_episode_has_the_sampled_and_the_appended_tokens(expected):
    kinds = set()
    for ordinal, responses in expected.items():
        for index, response in enumerate(responses):
            turns, tokens = response.turns, response.tokens
            assert turns[0].first == 0
            assert len(turns) <= 4
            for number, (before, after) in enumerate(itertools.pairwise(turns), start=1):
                appended = tokens[before.stop : after.first].tolist()
                assert appended == two_more(ordinal, index, [None] * number)
            assert turns[-1].stop == len(tokens), "nothing is appended to the last turn"
            np.testing.assert_array_equal(response.logprobs[~response.sampled], 0)
            assert (response.logprobs[response.sampled] < 0).all()
            assert response.sampled_tokens == sum(stop - first for first, stop in turns)
            assert all(stop - first <= 3 for first, stop in turns)
            assert response.finish_reason == "length", "this environment never ends"
            kinds.add(len(turns))
    assert kinds == {4}, "four turns of three tokens or less, with two tokens after each: the most"


def test_the_first_turn_equals_a_response_without_turns(expected):
    alone = sample(engine_of(4, 8), prompts(0, 1, 2, 3, 4), limit=3)
    for ordinal, responses in alone.items():
        for response, episode in zip(responses, expected[ordinal], strict=True):
            first, stop = episode.turns[0]
            np.testing.assert_array_equal(episode.tokens[first:stop], response.tokens)


def test_each_turn_has_keys_of_its_own():
    """Otherwise a policy that forgets would repeat itself in every turn. No key of a turn is the key of a token of the first turn."""
    ordinals, indices = jnp.arange(3, dtype=jnp.int32), jnp.array([0, 1, 5], jnp.int32)
    plain = response_keys(KEY, ordinals, indices)
    keys = [response_keys(KEY, ordinals, indices, jnp.full(3, turn, jnp.int32)) for turn in range(3)]
    keys += [jax.vmap(jax.random.fold_in, (0, None))(plain, position) for position in range(4)]
    data = [jax.random.key_data(each).tolist() for each in keys]
    assert data[0] == jax.random.key_data(plain).tolist()
    assert len({tuple(pair) for each in data for pair in each}) == 21


@pytest.mark.parametrize(
    ("slots", "steps", "how"),
    [
        (4, 8, {}),
        # Slow: a sampler each. Random schedules have other slots below.
        pytest.param(4, 1, {}, marks=pytest.mark.slow),
        pytest.param(16, 8, {}, marks=pytest.mark.slow),
        pytest.param(16, 3, {"page_tokens": 4, "cache_tokens": 48}, marks=pytest.mark.slow),
    ],
)
def test_slots_and_the_time_of_environments_change_no_episode(
    slots, steps, how, expected, expected_new_contexts
):
    for seed, answer, same in ((0, two_more, expected), (1, new_context, expected_new_contexts)):
        late = Appending(answer, turn_tokens=3, delays=np.random.default_rng(seed))
        found = episodes(engine_of(slots, steps, **how), late, prompts(0, 1, 2, 3, 4))
        assert_same(found, same)
        for ordinal, responses in same.items():
            assert [each.turns for each in found[ordinal]] == [each.turns for each in responses]
            assert [each.contexts for each in found[ordinal]] == [each.contexts for each in responses]


def test_appended_tokens_are_fed_to_pages_that_stayed():
    """Prompts of eight tokens, one appended to each turn: only the prompts are prefilled. Tokens and log-probabilities equal an engine's that re-prefills everything."""

    def one_more(ordinal, index, turns):
        return [] if not turns else [2 + (ordinal + index) % 18]

    engine, again = engine_of(4, 8), engine_of(8, 8, batch_invariant=True)
    read, prefill = [], engine.prefill

    def counted(params, sequences):
        read.extend(len(sequence) for sequence in sequences)
        return prefill(params, sequences)

    engine.prefill = counted
    asked = [prompt for prompt in prompts(*range(16)) if len(prompt.tokens) == MAX_PROMPT]
    found = episodes(engine, Appending(one_more, turn_tokens=3), asked, samples=4)
    assert read == [MAX_PROMPT] * len(asked) == [MAX_PROMPT] * 2
    assert_same(found, episodes(again, Appending(one_more, turn_tokens=3), asked, samples=4))
    assert all(len(response.turns) == 4 for responses in found.values() for response in responses)


# Slow with a slot for each episode: compiles other samplers of the same model.
@pytest.mark.parametrize("slots", [4, pytest.param(12, marks=pytest.mark.slow)])
def test_recurrent_states_wait_for_the_next_turn(slots):
    """Three turns each of twelve episodes of a model with Gated DeltaNet, in fewer slots or in as many: only the two prompts are prefilled. An engine that prefills each turn
    samples the same. If the last token of a turn were in its state, or a state were another response's, log-probabilities would differ by far more than 2e-5."""
    config = tiny_decoder_config(layers=2, mixers=(GatedDelta(2, 4, 8, 8), ATTENTION))
    weights, asked = weights_of(config=config), prompts(5, 7)
    assert min(len(prompt.tokens) for prompt in asked) == 6, "long enough that feeding is cheaper"

    def one_more(ordinal, index, turns):
        return [] if not turns else [2 + (ordinal + index) % 18]

    engine, again = engine_of(slots, 3, config=config), engine_of(8, 3, config=config, batch_invariant=True)
    read, prefill = [], engine.prefill

    def counted(params, sequences):
        read.extend(sequence.tolist() for sequence in sequences)
        return prefill(params, sequences)

    engine.prefill = counted
    kept, reread = (
        episodes(each, Appending(one_more, max_turns=3, turn_tokens=3), asked, weights=weights)
        for each in (engine, again)
    )
    assert_same(kept, reread, logprob_tolerance=2e-5)
    assert {len(response.turns) for group in kept.values() for response in group} == {3}
    assert read == [prompt.tokens.tolist() for prompt in asked]


@pytest.mark.parametrize(("holders", "again"), [(2, True), (8, False)])
def test_preempted_pages_are_re_prefilled(holders, again):
    """Two slots; eight episodes whose environments take a while. With table rows for two episodes, the other episodes are re-prefilled."""
    sizes = PageSizes(holders=holders, capacity=48, page_tokens=8, pools=1, pool_pages=6 * holders)
    engine = ScriptedEngine(
        lambda *_: [5, 5, EOS], slots=2, capacity=48, steps_per_call=3, stop_ids=[EOS], page_sizes=sizes, feed_tokens=4
    )  # fmt: skip
    late = Appending(lambda *_: [], max_turns=3, delays=np.random.default_rng(0))
    asked = [prompt for prompt in prompts(*range(16)) if len(prompt.tokens) == MAX_PROMPT]
    found = episodes(engine, late, asked, samples=4, limit=40, weights={})
    assert all(len(response.turns) == 3 for responses in found.values() for response in responses)
    lengths = [len(sequence) for call in engine.prefills for sequence in call]
    assert (max(lengths) > MAX_PROMPT) == again
    assert len(lengths) >= len(asked)


# Slow: compiles two samplers. tests/sampling/continuous_batching_test.py changes no bit, and tests/run/turns_test.py has batch-invariant episodes.
@pytest.mark.slow
def test_batch_invariant_episodes_change_no_bit():
    few, many = (
        episodes(
            engine_of(slots, 5, batch_invariant=True), Appending(new_context, turn_tokens=3), prompts(0, 1, 2)
        )
        for slots in (8, 32)
    )
    assert_same(many, few, logprob_tolerance=0)


def test_a_new_context_is_all_that_the_next_turn_follows(expected_new_contexts):
    for ordinal, responses in expected_new_contexts.items():
        for index, response in enumerate(responses):
            begins = response.turns[2].first
            new_context = ContextSpan(begins - 3, begins)
            assert response.contexts == ((ContextSpan(0, 2), new_context) if index == 2 else (new_context,))
            assert response.tokens[begins - 3 : begins].tolist() == [2 + ordinal, 9, 2 + index]
            first, second = response.parts(np.array([1], np.int32))
            assert first.context.ids.tolist() == ([4, 4 + ordinal] if index == 2 else [1])
            assert (first.first, first.stop) == (2 if index == 2 else 0, begins - 3)
            assert (second.context.ids.tolist(), second.first, second.stop) == (
                [2 + ordinal, 9, 2 + index],
                begins,
                len(response.tokens),
            )


def test_logprobs_of_whole_episodes_equal_the_trainers(expected, expected_new_contexts):
    """To 2e-5 in float32, over all turns, after appended tokens and in new contexts."""
    for sampled in (expected, expected_new_contexts):
        found = differences(sampled)
        assert np.abs(found).max() <= 2e-5
        assert len(found) < sum(len(response.tokens) for group in sampled.values() for response in group)


def test_an_environment_may_begin_and_end_the_episode():
    def answer(ordinal, index, turns):
        if not turns:
            return [5] * (1 + index)
        return [7] if len(turns) < 2 else None

    environments = Appending(answer, turn_tokens=2)
    found = episodes(engine_of(4, 4), environments, prompts(1, 3))
    for responses in found.values():
        for index, response in enumerate(responses):
            assert response.turns[0].first == 1 + index
            assert response.tokens[: 1 + index].tolist() == [5] * (1 + index)
            assert len(response.turns) == 2
            assert response.finish_reason == "stop"
    for (ordinal, index), turns in environments.seen.items():
        response = found[ordinal][index]
        for turn, (first, stop) in zip(turns, response.turns, strict=True):
            np.testing.assert_array_equal(turn.record.ids, response.tokens[first:stop])
            np.testing.assert_array_equal(turn.record.logprobs, response.logprobs[first:stop])
            assert turn.finish_reason == ("stop" if turn.record.ids[-1] == EOS else "length")


def test_a_stop_rule_ends_a_turn_by_the_tokens_of_this_turn_alone():
    """A turn ends with its first 5. The environment appends a 5 and a 7, and a call samples three tokens."""
    scripts = [3, 5, 3, EOS], [3, 3, 5, EOS], [EOS]
    engine = ScriptedEngine(
        lambda ordinal, index, turn=0: scripts[turn], slots=2, capacity=48, steps_per_call=3, stop_ids=[EOS]
    )

    def stop(ids, start):
        return next((n + 1 for n in range(start, len(ids)) if ids[n] == 5), None)

    environments = Appending(lambda ordinal, index, turns: [5, 7] if turns else [], max_turns=3)
    found = episodes(engine, environments, prompts(0), samples=1, limit=20, weights={}, stop=stop)
    assert found[0][0].tokens.tolist() == [3, 5, 5, 7, 3, 3, 5, 5, 7, EOS]
    assert [tuple(turn) for turn in found[0][0].turns] == [(0, 2), (4, 7), (9, 10)]


@pytest.mark.parametrize("beginning", [None, [5] * LIMIT], ids=["lost", "too long"])
def test_an_episode_without_a_turn_costs_no_other(beginning):
    def answer(ordinal, index, turns):
        return beginning if index == 2 and not turns else two_more(ordinal, index, turns)

    found = episodes(engine_of(4, 4), Appending(answer, turn_tokens=3), prompts(0, 1))
    plain = episodes(engine_of(4, 4), Appending(two_more, turn_tokens=3), prompts(0, 1))
    for ordinal, responses in found.items():
        lost = responses[2]
        assert (len(lost.tokens), lost.sampled_tokens, lost.finish_reason) == (0, 0, "stop")
        others = [each for index, each in enumerate(responses) if index != 2]
        same = [each for index, each in enumerate(plain[ordinal]) if index != 2]
        assert_same({ordinal: others}, {ordinal: same})


@pytest.mark.parametrize("seed", range(30))
def test_random_environments_get_every_script(seed):
    """Any slots, pages, appended lengths, ends and delays: an episode is its scripts and the appended tokens, up to its limits."""
    rng = np.random.default_rng(seed)
    limit, slots = int(rng.integers(8, 40)), int(rng.integers(1, 9))

    def script(ordinal, index, turn=0):
        length = int(np.random.default_rng((seed, ordinal, index, turn)).integers(1, 12))
        return [100 * ordinal + 10 * index + turn + 2] * (length - 1) + [EOS]

    def answer(ordinal, index, turns):
        own = np.random.default_rng((seed, 1, ordinal, index, len(turns)))
        if turns and own.random() < 0.2:
            return None
        if own.random() < 0.3:
            return Continuation(np.full(own.integers(1, min(9, limit)), 8, np.int32), new_context=True)
        return [7] * int(own.integers(0, 4))

    holders = slots * int(rng.integers(1, 4))
    most = int(rng.integers(6, 6 * holders + 1))
    sizes = PageSizes(holders=holders, capacity=48, page_tokens=8, pools=1, pool_pages=most)
    engine = ScriptedEngine(
        script,
        slots=slots,
        capacity=48,
        steps_per_call=3,
        stop_ids=[EOS],
        page_sizes=sizes,
        feed_tokens=int(rng.choice([0, 2, 64])),
    )
    environments = Appending(
        answer, max_turns=int(rng.integers(1, 6)), turn_tokens=int(rng.integers(0, 9)), delays=rng
    )
    asked = prompts(*range(5))
    for ordinal, responses in episodes(
        engine, environments, asked, samples=3, limit=limit, weights={}
    ).items():
        for index, response in enumerate(responses):
            tokens, turns, contexts, over = [], [], [], None
            context = len(prompts(*range(ordinal + 1))[ordinal].tokens)

            def goes_on(before, context, tokens=tokens, contexts=contexts):
                if isinstance(before, list):
                    tokens += before
                    return context + len(before)
                contexts.append((len(tokens), len(tokens) + len(before.tokens)))
                tokens += before.tokens.tolist()
                return len(before.tokens)

            context = goes_on(answer(ordinal, index, []), context)
            while over is None:
                room = min(limit - len(tokens), environments.turn_tokens or limit, 48 - context)
                first = len(tokens)
                tokens += script(ordinal, index, *[len(turns)] * (len(turns) > 0))[:room]
                turns.append((first, len(tokens)))
                context += len(tokens) - first
                said = answer(ordinal, index, turns)
                if said is None:
                    cut = len(tokens) == limit and tokens[-1] != EOS
                    over = "length" if cut else "stop"
                    continue
                more = len(said if isinstance(said, list) else said.tokens)
                whole = more + (context if isinstance(said, list) else 0)
                if len(turns) == environments.max_turns or len(tokens) + more >= limit or whole >= 48:
                    over = "length"
                else:
                    context = goes_on(said, context)
            assert response.tokens.tolist() == tokens
            assert [tuple(turn) for turn in response.turns] == turns
            assert [tuple(one) for one in response.contexts] == contexts
            assert response.finish_reason == over
