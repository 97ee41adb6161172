"""From groups to packed microbatches."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dapo_jax.dapo.advantages import step_advantages
from dapo_jax.dapo.batching import Example, example_weights, split_minibatches, training_examples
from dapo_jax.dapo.rollouts import Group, Prompt, Response, Rollout, Verdict
from dapo_jax.dapo.tokens import Tokens
from dapo_jax.training.row_packing import pack


def make_group(ordinal, rewards, *, truncated=(), lengths=None):
    lengths = lengths or [2] * len(rewards)
    rollouts = []
    for index, (reward, length) in enumerate(zip(rewards, lengths, strict=True)):
        response = Response(
            record=Tokens(
                np.arange(10, 10 + length, dtype=np.int32), logprobs=np.full(length, -0.5 - index, np.float32)
            ),
            finish_reason="length" if index in truncated else "stop",
        )
        rollouts.append(
            Rollout(response=response, text="", verdict=Verdict(correct=reward > 0), reward=reward)
        )
    prompt = Prompt(ordinal=ordinal, tokens=np.array([7, 8, 9], np.int32), text="?", answer="!")
    return Group(prompt=prompt, rollouts=tuple(rollouts))


def make_row(prompt, response, *, start=1, advantage=1.0, in_loss=True, group=0):
    """Returns an example whose tokens count up from `start`, with the negated tokens as log-probabilities."""
    tokens = np.arange(start, start + prompt + response, dtype=np.int32)
    return Example(
        prompt=Tokens(tokens[:prompt]),
        response=Tokens(tokens[prompt:], logprobs=-tokens[prompt:].astype(np.float32)),
        advantage=advantage,
        in_loss=in_loss,
        group=group,
    )


def test_shuffling_keeps_whole_groups():
    groups = [make_group(ordinal, [1.0, -1.0]) for ordinal in range(12)]
    minibatches = split_minibatches(groups, groups_per_update=4, seed=(0, 1))
    moved = [group for minibatch in minibatches for group in minibatch]
    assert [len(minibatch) for minibatch in minibatches] == [4, 4, 4]
    assert moved != groups
    assert sorted(map(id, moved)) == sorted(map(id, groups))


def test_the_order_depends_on_the_key_only():
    groups = [make_group(ordinal, [1.0]) for ordinal in range(12)]

    def order(seed):
        [minibatch] = split_minibatches(groups, groups_per_update=12, seed=seed)
        return [group.prompt.ordinal for group in minibatch]

    assert order((3, 7)) == order((3, 7))
    assert len({tuple(order(seed)) for seed in [(3, 7), (3, 8), (4, 7)]}) == 3


def test_a_short_step_ends_in_a_smaller_minibatch():
    groups = [make_group(ordinal, [1.0]) for ordinal in range(5)]
    sizes = [len(part) for part in split_minibatches(groups, groups_per_update=2, seed=(0,))]
    assert sizes == [2, 2, 1]


def test_advantages_compare_a_response_with_its_own_group():
    """[1, -1, -1, -1]: mean -0.5, std sqrt((1.5^2 + 3 * 0.5^2) / 3) = 1. [3, 1]: mean 2, std sqrt(2), +-1 / sqrt(2)."""
    groups = [make_group(0, [1.0, -1.0, -1.0, -1.0]), make_group(1, [3.0, 1.0])]
    rows = training_examples(groups, step_advantages(groups))
    expected = [1.5, -0.5, -0.5, -0.5, 0.5**0.5, -(0.5**0.5)]
    np.testing.assert_allclose([row.advantage for row in rows], expected, rtol=2e-6)
    assert [row.group for row in rows] == [0, 0, 0, 0, 1, 1]


def test_an_example_has_the_given_advantage_for_all_tokens_or_for_each():
    group, by_token = make_group(0, [3.0, 1.0, -1.0]), np.array([0.5, -0.5], np.float32)
    rows = training_examples([group], [[2.0, by_token, -2.0]])
    assert [np.ravel(row.advantage).tolist() for row in rows] == [[2.0], [0.5, -0.5], [-2.0]]


def test_overlong_filtering_keeps_the_reward_in_the_mean_but_the_tokens_out_of_the_loss():
    """Rewards [1, -1, -1, -2]: mean -0.75, deviations 1.75, -0.25, -0.25, -1.25, squares sum to 4.75, std
    sqrt(4.75 / 3) = 1.2583. Without the truncated -2 the mean would be -1/3 and the first advantage 1.1547."""
    group = make_group(0, [1.0, -1.0, -1.0, -2.0], truncated={3})
    advantages = step_advantages([group], filter_truncated=True)
    filtered = training_examples([group], advantages, filter_truncated=True)
    plain = training_examples([group], step_advantages([group]))
    expected = np.array([1.75, -0.25, -0.25, -1.25]) / np.sqrt(4.75 / 3)
    for rows in (filtered, plain):
        np.testing.assert_allclose([row.advantage for row in rows], expected, rtol=2e-6)
    assert [row.in_loss for row in filtered] == [True, True, True, False]
    assert all(row.in_loss for row in plain)


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        # Responses of 3 and 1 tokens in group 0, of 2 in group 1, and one of 9 that is left out: 6 tokens, 3 responses.
        ("token_mean", [1 / 6, 1 / 6, 1 / 6, 0]),
        ("prompt_mean", [1 / 2 / 4, 1 / 2 / 4, 1 / 2 / 2, 0]),
        ("sequence_mean", [1 / 3 / 3, 1 / 3 / 1, 1 / 3 / 2, 0]),
        ("token_sum_norm", [1 / (3 * 10), 1 / (3 * 10), 1 / (3 * 10), 0]),
    ],
)
def test_weights_are_those_of_the_whole_minibatch(aggregation, expected):
    rows = [
        make_row(2, 3), make_row(2, 1), make_row(2, 2, group=1), make_row(2, 9, group=1, in_loss=False)
    ]  # fmt: skip
    weights = example_weights(rows, aggregation=aggregation, max_response_tokens=10)
    np.testing.assert_allclose(weights, expected, rtol=1e-12)


def test_examples_without_a_token_have_no_weight():
    """Two episodes that were lost before their first turn."""
    assert example_weights([make_row(3, 0), make_row(3, 0)]).tolist() == [0, 0]


lengths = st.lists(st.tuples(st.integers(1, 6), st.integers(1, 10)), min_size=1, max_size=12)


@given(lengths=lengths, row_tokens=st.integers(16, 40), per=st.integers(1, 4))
def test_every_example_is_packed_exactly_once(lengths, row_tokens, per):
    rows, start = [], 1
    for index, (prompt, response) in enumerate(lengths):
        made = make_row(prompt, response, start=start, advantage=float(index), in_loss=index % 3 != 2)
        rows.append(made)
        start += made.tokens
    weights = np.arange(1.0, len(rows) + 1)
    microbatches = pack(rows, weights, row_tokens=row_tokens, rows_per_microbatch=per, pad_id=0)
    found = {}
    for m in microbatches:
        assert {field.shape for field in jax.tree.leaves(m)} == {(per, row_tokens)}
        for row in range(per):
            for segment in range(1, m.segment_ids[row].max() + 1):
                at = np.flatnonzero(m.segment_ids[row] == segment)
                assert (np.diff(at) == 1).all()  # without gaps
                found[int(m.tokens[row, at[0]])] = {name: array[row, at] for name, array in m.arrays.items()}
        padding = m.segment_ids == 0
        for field in jax.tree.leaves(m):
            assert not field[padding].any()
    assert len(found) == len(rows)
    for index, row in enumerate(rows):
        got, prompt = found[int(row.prompt.ids[0])], len(row.prompt.ids)
        np.testing.assert_array_equal(got["tokens"], [*row.prompt.ids, *row.response.ids])
        np.testing.assert_array_equal(got["positions"], np.arange(row.tokens))
        response = np.arange(row.tokens) >= prompt
        np.testing.assert_array_equal(got["mask"], response & row.in_loss)
        np.testing.assert_array_equal(got["weights"], response * weights[index])
        np.testing.assert_array_equal(got["advantages"], response * row.advantage)
        np.testing.assert_array_equal(got["sampler_logprobs"][prompt:], row.response.logprobs)
        assert not got["sampler_logprobs"][:prompt].any()
        assert not got["old_logprobs"].any()
        assert not got["ref_logprobs"].any()


def test_packing_fills_rows_longest_first():
    """Lengths 2, 3, 6, 5 in rows of 8: 6 + 2 and 5 + 3. In the given order it would be three rows: 2 + 3, 6, 5."""
    rows = [make_row(1, n, start=start) for n, start in ((1, 1), (2, 11), (5, 21), (4, 31))]
    [microbatch] = pack(rows, np.ones(4), row_tokens=8, rows_per_microbatch=2)
    assert microbatch.segment_ids.tolist() == [[1] * 6 + [2] * 2, [1] * 5 + [2] * 3]


def test_responses_to_one_prompt_follow_it_in_one_row():
    """Prompt [1, 2], responses of 3 and 2 tokens, longest first; then another prompt with its only response."""
    prompt = np.array([1, 2], np.int32)
    rows = [replace(make_row(2, n, start=start), prompt=Tokens(prompt)) for n, start in ((2, 10), (3, 20))]
    [m] = pack(
        [*rows, make_row(1, 2, start=31)], np.array([0.5, 2.0, 3.0]), row_tokens=11, rows_per_microbatch=1
    )
    assert m.tokens.tolist() == [[1, 2, *rows[1].response.ids, *rows[0].response.ids, 31, 32, 33, 0]]
    assert m.segment_ids.tolist() == [[1, 1, 2, 2, 2, 3, 3, 4, 4, 4, 0]]
    assert m.prefix_ids.tolist() == [[1, 1, 1, 1, 1, 1, 1, 4, 4, 4, 0]]
    assert m.positions.tolist() == [[0, 1, 2, 3, 4, 2, 3, 0, 1, 2, 0]]
    assert m.previous.tolist() == [[0, 0, 1, 2, 3, 1, 5, 0, 7, 8, 0]]
    assert m.weights.tolist() == [[0, 0, 2, 2, 2, 0.5, 0.5, 0, 3, 3, 0]]


def test_records_of_experts_are_packed_next_to_their_tokens():
    """One layer, one expert per token. A prompt has the record of the first response that has one; padding and tokens without a record have 255."""

    def record(*experts):
        return np.array(experts, np.uint8).reshape(-1, 1, 1)

    def with_routes(row, of_prompt, own):
        prompt, response = Tokens(row.prompt.ids, routes=of_prompt), Tokens(row.response.ids, routes=own)
        return replace(row, prompt=prompt, response=response)

    prompt = np.array([1, 2], np.int32)
    first, second, third = (replace(make_row(2, n, start=10 * n), prompt=Tokens(prompt)) for n in (3, 2, 1))
    rows = [
        first,  # lost before its first token was sampled
        with_routes(second, record(4, 5), record(6, 255)),
        with_routes(third, record(0, 0), record(255)),
        with_routes(make_row(1, 2, start=31), record(8), record(9, 255)),
    ]
    [m] = pack(rows, np.ones(4), row_tokens=13, rows_per_microbatch=1)
    assert m.tokens[0, :2].tolist() == [1, 2]
    assert m.recorded["routes"][0, :, 0, 0].tolist() == [
        4,
        5,
        255,
        255,
        255,
        6,
        255,
        255,
        8,
        9,
        255,
        255,
        255,
    ]
    assert m.recorded["routes"].dtype == np.uint8
    assert pack([first], np.ones(1), row_tokens=13, rows_per_microbatch=1)[0].recorded == {}


@given(groups=st.lists(st.tuples(st.integers(1, 6), st.lists(st.integers(1, 10), min_size=1, max_size=5)), min_size=1, max_size=5),
       row_tokens=st.integers(16, 60))  # fmt: skip
def test_a_token_sees_its_prompt_and_its_response_up_to_itself(groups, row_tokens):
    """Following `previous` back from the last token of each response finds the tokens that attention shows it."""
    rows, start = [], 1
    for prompt_length, lengths in groups:
        prompt = np.arange(start, start + prompt_length, dtype=np.int32)
        for length in lengths:
            start += 20
            rows.append(replace(make_row(1, length, start=start), prompt=Tokens(prompt)))
        start += 20
    microbatches = pack(rows, np.ones(len(rows)), row_tokens=row_tokens, rows_per_microbatch=1)
    m = jax.tree.map(lambda *parts: np.concatenate(parts), *microbatches)
    found = []
    for row, segment_ids in enumerate(m.segment_ids):
        scored = m.mask[row]
        for last in set(np.flatnonzero(scored)) - set(m.previous[row][scored]):
            walk = [last]
            while m.positions[row, walk[-1]] > 0:
                walk.append(m.previous[row, walk[-1]])
            own, prefix = segment_ids[last], m.prefix_ids[row, last]
            at = np.arange(row_tokens)
            seen = (at <= last) & ((segment_ids == own) | (segment_ids == prefix))
            assert sorted(walk) == np.flatnonzero(seen).tolist()
            np.testing.assert_array_equal(m.positions[row, walk[::-1]], np.arange(len(walk)))
            found.append(m.tokens[row, walk[::-1]].tolist())
    assert sorted(found) == sorted([*row.prompt.ids, *row.response.ids] for row in rows)


def one_prompt(*responses):
    """Returns responses of these lengths to the prompt [1, 2], whose tokens count up from 10, 20, ..."""
    prompt = np.array([1, 2], np.int32)
    return [
        replace(make_row(2, n, start=10 * k - 2), prompt=Tokens(prompt)) for k, n in enumerate(responses, 1)
    ]


def test_prompts_that_are_not_shared_are_repeated():
    """Each response and its own prompt are one segment, for attention that cannot see other segments."""
    rows = one_prompt(2, 3)
    [shared] = pack(rows, np.ones(2), row_tokens=9, rows_per_microbatch=1)
    [m] = pack(rows, np.ones(2), row_tokens=9, rows_per_microbatch=1, share_prompts=False)
    assert shared.tokens.tolist() == [[1, 2, 20, 21, 22, 10, 11, 0, 0]]
    assert m.tokens.tolist() == [[1, 2, 20, 21, 22, 1, 2, 10, 11]]
    assert m.segment_ids.tolist() == m.prefix_ids.tolist() == [[1] * 5 + [2] * 4]
    assert m.positions.tolist() == [[0, 1, 2, 3, 4, 0, 1, 2, 3]]
    assert m.previous.tolist() == [[0, 0, 1, 2, 3, 0, 5, 6, 7]]


@given(lengths=lengths, share=st.booleans(), spread=st.sampled_from([1, 2, 4]))
def test_packing_balances_the_pairs_of_attention(lengths, share, spread):
    """Pairs are counted in the arrays. Within a part rows are sorted by them, and the parts have about the same sum."""
    prompts = [np.arange(100 * prompt, 100 * prompt + prompt, dtype=np.int32) for prompt in range(7)]
    rows = [replace(make_row(1, response, start=9), prompt=Tokens(prompts[p])) for p, response in lengths]
    options = {"row_tokens": 20, "rows_per_microbatch": 4, "spread": spread, "share_prompts": share}
    at = np.arange(20)
    for m in pack(rows, np.ones(len(rows)), **options):
        own, prefix = m.segment_ids[:, :, None], m.prefix_ids[:, :, None]
        visible = (at <= at[:, None]) & ((own == m.segment_ids[:, None]) | (prefix == m.segment_ids[:, None]))
        pairs = (visible & (own > 0)).sum((1, 2)).reshape(spread, -1)
        assert (np.diff(pairs, axis=1) <= 0).all()
        # The sums differ by at most the largest row.
        assert np.ptp(pairs.sum(1)) <= pairs.max()


def test_remaining_examples_are_packed_into_shorter_rows():
    """Prompts of 1 and responses of 7, 7, 3 and 2 tokens: two rows of 8 are full, and the other two have 4 tokens instead of 8."""
    rows = [make_row(1, count) for count in (7, 3, 7, 2)]
    packed = pack(
        rows, np.ones(4), row_tokens=8, rows_per_microbatch=2, shorter_rows=(2, 4), share_prompts=False
    )
    assert [m.tokens.shape for m in packed] == [(2, 8), (2, 4)]
    assert [m.mask.sum(axis=1).tolist() for m in packed] == [[7, 7], [3, 2]]


def test_rows_that_do_not_fit_are_refused():
    message = r"rollout 1 has 30 prompt \+ 70 response = 100 tokens, over batch.row_tokens=99"
    with pytest.raises(ValueError, match=message):
        pack([make_row(3, 5), make_row(30, 70)], np.ones(2), row_tokens=99, rows_per_microbatch=1)
