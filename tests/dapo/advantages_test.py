"""`group_advantages`: Eq. 9 by hand, and the rounding errors that float64 avoids. `step_advantages`: every rule against other libraries and by hand.

fixtures/advantages.npz has two random batches of five groups of four responses (`s0/in/NAME`, `s1/in/NAME`), one response without a token, and what the functions
for advantages returned for them in float64: verl 0.9.1, TRL 1.16.0, SkyRL 0.3.0, OpenRLHF 0.11.2, prime-rl 559b44772, NeMo-RL 7ea279abf and RUCAIBox/Passk_Training
00474d7 with torch 2.13.0 on a CPU (`s0/advantage/NAME/LIBRARY_INPUT`, one number per response or per token).
"""

import itertools
import math
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dapo_jax import group_advantages
from dapo_jax.dapo.advantages import BASELINES, SCALES, best_of, step_advantages
from dapo_jax.dapo.batching import example_weights, training_examples
from dapo_jax.dapo.rollouts import TurnSpan
from dapo_jax.training.row_packing import pack
from tests.dapo.made import group_of, rollout_of

# A multiple of 1/8 up to 2^10 in size is exact in every dtype used here, and so are sums of a few.
exact_rewards = st.lists(st.integers(-8192, 8192), min_size=2, max_size=16).map(
    lambda xs: np.array([xs]) / 8.0
)


def test_two_of_four_by_hand():
    """Rewards 1, 1, -1, -1: mean 0, variance 4 / 3 with ddof = 1, so +-1 / (sqrt(4 / 3) + 1e-6)."""
    expected = 1.0 / (math.sqrt(4 / 3) + 1e-6)
    advantages = group_advantages(np.array([[1.0, 1.0, -1.0, -1.0]]))
    np.testing.assert_allclose(advantages, [[expected, expected, -expected, -expected]], rtol=1e-14)
    assert advantages.dtype == np.float64


def test_one_right_answer_in_sixteen():
    """Mean -7/8, deviations 15/8 and -1/8, variance (225 + 15) / 64 / 15 = 1/4: 3.75 and -0.25, less eps."""
    advantages = group_advantages(np.array([[1.0] + [-1.0] * 15]))
    np.testing.assert_allclose(advantages[0, :2], [1.875 / (0.5 + 1e-6), -0.125 / (0.5 + 1e-6)], rtol=1e-14)


def test_eps_is_added_to_the_standard_deviation():
    """Rewards 1 and -1: standard deviation sqrt(2), so 1 / (sqrt(2) + 1)."""
    advantages = group_advantages(np.array([[1.0, -1.0]]), eps=1.0)
    np.testing.assert_allclose(advantages[0, 0], 1.0 / (math.sqrt(2) + 1.0), rtol=1e-14)


def test_a_group_of_one_has_mean_zero_and_std_one():
    np.testing.assert_allclose(
        group_advantages(np.array([[2.0], [-1.0]])), np.array([[2.0], [-1.0]]) / (1 + 1e-6)
    )
    np.testing.assert_array_equal(group_advantages(np.array([[2.0]]), normalize_std=False), [[2.0]])


@pytest.mark.parametrize("group", [2, 7, 16])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("reward", [0.1, -1.0 / 3.0, 1e6 + 0.1])
def test_equal_rewards_give_exactly_zero(group, dtype, reward):
    rewards = np.full((2, group), reward, dtype)
    for normalize_std in (True, False):
        np.testing.assert_array_equal(
            group_advantages(rewards, normalize_std=normalize_std), np.zeros((2, group))
        )


def test_float32_arithmetic_would_make_advantages_of_equal_rewards():
    """A float32 mean of seven rewards of 0.1 is not 0.1, and the standard deviation is as small as the error."""
    rewards = np.full((1, 7), 0.1, np.float32)
    centered = rewards - rewards.mean(axis=1, keepdims=True, dtype=np.float32)
    in_float32 = centered / (rewards.std(axis=1, ddof=1, keepdims=True) + np.float32(1e-6))
    assert np.abs(in_float32).max() > 1e-3
    np.testing.assert_array_equal(group_advantages(rewards), np.zeros((1, 7)))


@given(rewards=exact_rewards, shift=st.integers(-64, 64))
def test_shifting_a_groups_rewards_changes_nothing(rewards, shift):
    np.testing.assert_array_equal(group_advantages(rewards + shift), group_advantages(rewards))


@given(rewards=exact_rewards, seed=st.integers(0, 2**32 - 1))
def test_permuting_a_group_permutes_its_advantages(rewards, seed):
    order = np.random.default_rng(seed).permutation(rewards.shape[1])
    np.testing.assert_allclose(
        group_advantages(rewards[:, order]), group_advantages(rewards)[:, order], rtol=1e-12, atol=1e-15
    )


@pytest.mark.parametrize("kind", [np.float32, jnp.asarray, np.ndarray.tolist])
def test_rewards_may_be_any_array(kind):
    rewards = np.array([[1.0, -1.0, 0.5], [0.25, 1.0, 1.0]])
    np.testing.assert_array_equal(group_advantages(kind(rewards)), group_advantages(rewards))


@pytest.mark.parametrize(
    ("rewards", "eps", "words"),
    [
        (
            np.where(np.arange(32).reshape(4, 8) == 31, np.nan, 0.0),
            1e-6,
            r"rewards\[3, 7\] is nan, the first of 1",
        ),
        (np.zeros(4), 1e-6, r"\[prompts, group\]"),
        (np.zeros((3, 0)), 1e-6, r"\[prompts, group\]"),
        (np.zeros((1, 2)), 0.0, "eps must be positive, got 0"),
    ],
)
def test_rewards_without_an_advantage_are_refused(rewards, eps, words):
    with pytest.raises(ValueError, match=words):
        group_advantages(rewards, eps=eps)


FIXTURES = np.load(Path(__file__).parent / "fixtures" / "advantages.npz")
WEIGHTS = {"scores": 1.0, "format_rewards": 0.5}


def make_group(rewards, lengths, parts=None, *, truncated=(), penalties=None, ordinal=0):
    """A group of responses with these rewards and numbers of tokens. `parts` maps graders to their rewards."""
    rollouts = [
        rollout_of(
            length, truncated=index in truncated, reward=reward, penalty=penalties[index] if penalties else 0.0, correct=False,
            parts={name: each[index] for name, each in (parts or {}).items()},
        )
        for index, (reward, length) in enumerate(zip(rewards, lengths, strict=True))
    ]  # fmt: skip
    return group_of(rollouts, ordinal=ordinal)


def given_groups(seed, source):
    """The groups of a fixture. With two graders, as `source` a tuple, the rewards are their weighted sum."""
    inputs = {name: FIXTURES[f"{seed}/in/{name}"].astype(float) for name in ("correct", "rewards", *WEIGHTS)}
    rewards = (
        sum(WEIGHTS[name] * inputs[name] for name in source) if isinstance(source, tuple) else inputs[source]
    )
    parts = {name: inputs[name].reshape(5, 4) for name in WEIGHTS}
    lengths = FIXTURES[f"{seed}/in/mask"].sum(axis=1).reshape(5, 4)
    return [
        make_group(
            rewards.reshape(5, 4)[place], lengths[place], {name: each[place] for name, each in parts.items()}, ordinal=place
        )
        for place in range(5)
    ]  # fmt: skip


def of_step(groups, **rule):
    return np.concatenate(step_advantages(groups, **rule))


def differences(seed, name, found):
    """The difference from the fixture, over the tokens in the mask if it has a number for each token."""
    expected = FIXTURES[f"{seed}/advantage/{name}"]
    if expected.ndim == 2:
        return (found[:, None] - expected)[FIXTURES[f"{seed}/in/mask"]]
    return found - expected


NONE, OTHERS, BY_LENGTH = {"scale": "none"}, {"baseline": "leave_one_out", "scale": "none"}, "length_weighted"
TOKENS = {"scale": "whiten_tokens"}
APART = {"rewards": "apart", "scale": "whiten_responses", "weights": WEIGHTS}
BOTH = tuple(WEIGHTS)
PARITY = [
    *((f"grpo/verl_{kind}", kind, {}, 1e-14) for kind in ("rewards", "scores")),
    *((f"dr_grpo/verl_{kind}", kind, NONE, 1e-14) for kind in ("rewards", "scores")),
    *((f"scale_none/trl_{kind}", kind, NONE, 1e-14) for kind in ("rewards", "scores")),
    ("dr_grpo/openrlhf", "scores", NONE, 1e-14),
    ("grpo/nemo_rl_no_std", "scores", NONE, 1e-14),
    *((f"rloo/verl_{kind}", kind, OTHERS, 1e-14) for kind in ("rewards", "scores")),
    ("rloo/openrlhf", "scores", OTHERS, 1e-14),
    ("grpo/nemo_rl_leave_one_out_no_std", "scores", OTHERS, 1e-14),
    *(
        (f"opo/verl_{kind}", kind, {"baseline": BY_LENGTH, "scale": "none"}, 1e-14)
        for kind in ("rewards", "scores")
    ),
    ("passk/rucaibox_k2", "correct", {"best_of": 2}, 1e-14),
    ("passk/rucaibox_k3", "correct", {"best_of": 3}, 1e-14),
    *((f"max_rl/skyrl_{kind}", kind, {"scale": "group_mean"}, 1e-14) for kind in ("scores", "correct")),
    # verl and NeMo-RL add 1e-8 to counts.
    *(
        (f"reinforce_plus_plus/verl_{kind}", kind, {"baseline": "none", **TOKENS}, 1e-9)
        for kind in ("rewards", "scores")
    ),
    *((f"reinforce_plus_plus_baseline/verl_{kind}", kind, TOKENS, 1e-9) for kind in ("rewards", "scores")),
    ("grpo/nemo_rl", "scores", {}, 3e-8),
    ("gdpo/nemo_rl", BOTH, APART, 2e-8),
    # In float32.
    ("gdpo/verl", BOTH, {**APART, **TOKENS}, 1e-6),
    # prime-rl adds no 1e-6 to the mean: of a mean of 1/4 it is 4e-6.
    ("max_rl/prime_rl_scores", "scores", {"scale": "group_mean"}, 1.3e-5),
    ("max_rl/prime_rl_correct", "correct", {"scale": "group_mean"}, 1.3e-5),
]


@pytest.mark.parametrize("seed", ["s0", "s1"])
@pytest.mark.parametrize(("name", "source", "rule", "tolerance"), PARITY, ids=[each[0] for each in PARITY])
def test_each_rule_returns_the_numbers_of_other_libraries(seed, name, source, rule, tolerance):
    found = of_step(given_groups(seed, source), **rule)
    assert np.abs(differences(seed, name, found)).max() <= tolerance


@pytest.mark.parametrize("seed", ["s0", "s1"])
@pytest.mark.parametrize(
    ("name", "scale", "eps", "of_group"),
    [
        ("scale_group/trl_rewards", "group_std", 1e-4, True),
        ("scale_group/trl_scores", "group_std", 1e-4, True),
        ("scale_batch/trl_rewards", "batch_std", 1e-4, False),
        ("scale_batch/trl_scores", "batch_std", 1e-4, False),
        ("group_norm/openrlhf", "group_std", 1e-9, True),
    ],
)
def test_other_libraries_add_another_constant_to_the_deviation(seed, name, scale, eps, of_group):
    """A (std + 1e-6) / (std + eps): TRL adds 1e-4, OpenRLHF 1e-9."""
    source = "rewards" if name.endswith("rewards") else "scores"
    rewards = FIXTURES[f"{seed}/in/{source}"].reshape(5, 4)
    deviation = np.repeat(rewards.std(axis=1, ddof=1), 4) if of_group else rewards.std(ddof=1)
    found = of_step(given_groups(seed, source), scale=scale) * (deviation + 1e-6) / (deviation + eps)
    assert np.abs(differences(seed, name, found)).max() <= 1e-14


@pytest.mark.parametrize("seed", ["s0", "s1"])
@pytest.mark.parametrize(
    ("name", "baseline"),
    [
        ("reinforce_plus_plus/nemo_rl", "none"),
        ("reinforce/openrlhf", "none"),
        ("reinforce_plus_plus_baseline/nemo_rl", "group_mean"),
        ("reinforce_baseline/openrlhf", "group_mean"),
    ],
)
def test_other_libraries_whiten_by_the_variance_over_n(seed, name, baseline):
    """Times sqrt(N / (N - 1)) for N tokens. They add their 1e-8 in other places: 1e-8 beside a variance of 0.06 is 1e-7 of an advantage."""
    tokens = FIXTURES[f"{seed}/in/mask"].sum()
    found = of_step(given_groups(seed, "scores"), baseline=baseline, **TOKENS)
    assert np.abs(differences(seed, name, found * np.sqrt(tokens / (tokens - 1)))).max() <= 2e-7


@pytest.mark.parametrize("seed", ["s0", "s1"])
def test_gdpo_of_trl_is_the_same_formula_with_larger_constants(seed):
    """Each grader over its deviation in the group plus eps, the weighted sum over its deviation in the step: TRL adds 1e-4 to both."""

    def written_out(eps, divisor):
        total = np.zeros((5, 4))
        for name, weight in WEIGHTS.items():
            part = FIXTURES[f"{seed}/in/{name}"].reshape(5, 4)
            total += (
                weight * (part - part.mean(1, keepdims=True)) / (part.std(1, ddof=1, keepdims=True) + eps)
            )
        return ((total - total.mean()) / divisor(total.std(ddof=1))).ravel()

    trl = written_out(1e-4, lambda deviation: deviation + 1e-4)
    assert np.abs(differences(seed, "gdpo/trl", trl)).max() <= 1e-14
    ours = written_out(1e-6, lambda deviation: math.sqrt(deviation**2 + 1e-8))
    np.testing.assert_allclose(of_step(given_groups(seed, BOTH), **APART), ours, atol=1e-14)


@pytest.mark.parametrize("seed", ["s0", "s1"])
def test_max_rl_of_rewards_of_plus_and_minus_one_is_zero_where_the_mean_is_not_positive(seed):
    """SkyRL divides 1 by 1e-6 where half of a group is right, and turns the sign where fewer are. The configuration refuses such rewards."""
    expected = FIXTURES[f"{seed}/advantage/max_rl/skyrl_rewards"]
    found = of_step(given_groups(seed, "rewards"), scale="group_mean")
    positive = np.repeat(FIXTURES[f"{seed}/in/rewards"].reshape(5, 4).mean(axis=1) > 0, 4)
    assert np.abs(expected).max() == pytest.approx(1e6)
    np.testing.assert_allclose(found[positive], expected[positive], atol=1e-14)
    assert not found[~positive].any()


@pytest.mark.parametrize("seed", ["s0", "s1"])
def test_gfpo_is_the_rule_for_the_kept_responses(seed):
    """The two shortest of four, and zeros for the others."""
    groups = [group.best(2, by="shortest") for group in given_groups(seed, "scores")]
    found = np.zeros((5, 4))
    for row, group, advantages in zip(found, groups, step_advantages(groups), strict=True):
        row[list(group.kept)] = advantages
    assert np.abs(differences(seed, "gfpo/verl_grpo_of_2_shortest", found.ravel())).max() <= 1e-14


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_best_of_is_the_mean_over_all_subsets(k):
    rewards = np.array([[0.5, -1.0, 0.5, 2.0, 0.25]])
    expected = [
        np.mean([max(own, *(rewards[0, list(others)])) for others in itertools.combinations(set(range(5)) - {i}, k - 1)])
        if k > 1
        else own
        for i, own in enumerate(rewards[0])
    ]  # fmt: skip
    np.testing.assert_allclose(best_of(rewards, k), [expected], rtol=1e-14)


@given(right=st.integers(0, 12), k=st.integers(1, 12))
def test_the_mean_and_the_deviation_of_the_best_of_k_are_those_of_pass_at_k(right, k):
    """P = 1 - C(n - c, k) / C(n, k) for c correct of n. Above the baseline P, a correct response has 1 - P, over sqrt(P (1 - P)) + 1e-6."""
    rewards = np.arange(12) < right
    passed = 1 - math.comb(12 - right, k) / math.comb(12, k)
    group = make_group(rewards, [1] * 12)
    np.testing.assert_allclose(best_of(group.rewards[None], k).mean(), passed, atol=1e-15)
    if k > 1 and right:
        found = of_step([group], best_of=k)
        np.testing.assert_allclose(
            found[0], (1 - passed) / (math.sqrt(passed * (1 - passed)) + 1e-6), rtol=1e-8, atol=1e-8
        )


@given(rewards=exact_rewards, k=st.integers(1, 16))
def test_equal_rewards_stay_equal_bit_for_bit_in_the_best_of_k(rewards, k):
    found = best_of(rewards, min(k, rewards.shape[1]))[0]
    for reward in set(rewards[0]):
        assert len(set(found[rewards[0] == reward])) == 1


@pytest.mark.parametrize("k", [0, 4])
def test_a_best_of_more_than_the_group_is_refused(k):
    with pytest.raises(ValueError, match=rf"best_of={k} .* 3"):
        best_of(np.zeros((2, 3)), k)


@pytest.mark.parametrize("key", ["baseline", "scale", "rewards"])
def test_an_unknown_name_is_refused(key):
    with pytest.raises(ValueError, match=f"{key}='summde' is not one of"):
        step_advantages([make_group([1.0, 0.0], [1, 1])], **{key: "summde"})


@pytest.mark.parametrize(
    ("parts", "weights", "lacking"),
    [
        ({"a": [1.0, 0.0]}, {"a": 1.0, "b": 1.0}, "'b'"),
        ({"a": [1.0, 0.0]}, None, "'b'"),  # the other group has a grader b
        ({}, None, "'a', 'b'"),
    ],
)
def test_apart_refuses_a_verdict_without_the_reward_of_a_grader(parts, weights, lacking):
    other = make_group([1.0, 0.0], [1, 1], {"a": [1.0, 0.0], "b": [0.0, 0.0]})
    groups = [make_group([1.0, 0.0], [1, 1], parts), other]
    with pytest.raises(ValueError, match=rf"without \[{lacking}\]"):
        step_advantages(groups, rewards="apart", weights=weights)


def test_apart_without_any_parts_is_refused():
    with pytest.raises(ValueError, match="without parts"):
        step_advantages([make_group([1.0, 0.0], [1, 1], {})], rewards="apart")


RULES = list(itertools.product(BASELINES, SCALES, ["summed", "apart"], [1, 3]))


def made_rule(baseline, scale, rewards, k):
    return {
        "baseline": baseline,
        "scale": scale,
        "rewards": rewards,
        "best_of": k,
        "weights": {"a": 1.0, "b": 0.5},
    }


@pytest.mark.parametrize("reward", [0.1, -1.0 / 3.0, 1e6 + 0.1])
def test_equal_rewards_are_exact_zeros_under_every_rule(reward):
    """Equal in the whole step. But R is R without a baseline and a deviation."""
    parts = {"a": [reward] * 7, "b": [0.3] * 7}
    groups = [make_group([reward] * 7, range(7), parts, ordinal=ordinal) for ordinal in range(3)]
    for baseline, scale, rewards, k in RULES:
        found = of_step(groups, **made_rule(baseline, scale, rewards, k))
        if baseline == "none" and rewards == "summed" and scale in ("none", "group_mean"):
            assert (found == found[0]).all()
        else:
            np.testing.assert_array_equal(found, np.zeros(21), str((baseline, scale, rewards, k)))


def test_the_order_of_groups_and_responses_changes_nothing():
    rng = np.random.default_rng(3)
    given = [
        [(rng.normal(), int(rng.integers(0, 9)), {"a": rng.normal(), "b": float(rng.integers(2))}) for _ in range(4)]
        for _ in range(5)
    ]  # fmt: skip
    orders = [rng.permutation(4) for _ in given]

    def made(group):
        rewards, lengths, parts = zip(*group, strict=True)
        return make_group(rewards, lengths, {name: [each[name] for each in parts] for name in "ab"})

    moved = [made([group[i] for i in order]) for group, order in zip(given, orders, strict=True)][::-1]
    for rule in itertools.starmap(made_rule, RULES):
        found, back = (
            step_advantages([made(group) for group in given], **rule),
            step_advantages(moved, **rule),
        )
        for a, b, order in zip(found, back[::-1], orders, strict=True):
            np.testing.assert_allclose(a[order], b, rtol=1e-12, atol=1e-12, err_msg=str(rule))


@given(rewards=st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=300))
def test_the_default_rule_is_that_of_one_group_bit_for_bit(rewards):
    groups = [make_group(rewards, [1] * len(rewards)), make_group([1.0, 0.0], [1, 1])]
    for scale in ("group_std", "none"):
        expected = group_advantages(np.array([rewards]), normalize_std=scale == "group_std")[0]
        np.testing.assert_array_equal(step_advantages(groups, scale=scale)[0], expected)


def test_responses_outside_the_loss_count_in_means_of_responses_only():
    """Rewards 4 and 0 of 1 and 3 tokens, and of 1 token in the other group 1 and 1.
    By length: 4 - 1 = 3 and 0 - 1 = -1; without the truncated second response the mean is 4. Over tokens: 4, 0, 0, 0, 1, 1 with the mean 1, without it
    4, 1, 1 with the mean 2. Over responses: 4, 0, 1, 1 with the mean 3/2 in both cases."""
    groups = [make_group([4.0, 0.0], [1, 3], truncated={1}), make_group([1.0, 1.0], [1, 1], ordinal=1)]

    def of(filter_truncated, **rule):
        return of_step(groups, filter_truncated=filter_truncated, **rule)

    by_length = {"baseline": "length_weighted", "scale": "none"}
    assert of(False, **by_length).tolist() == [3.0, -1.0, 0.0, 0.0]
    assert of(True, **by_length).tolist() == [0.0, -4.0, 0.0, 0.0]
    assert of(True, scale="none").tolist() == of(False, scale="none").tolist() == [2.0, -2.0, 0.0, 0.0]
    tokens = {"baseline": "none", "scale": "whiten_tokens"}
    deviation = math.sqrt((9 + 1 + 1 + 1) / 5 + 1e-8)
    np.testing.assert_allclose(of(False, **tokens), np.array([3, -1, 0, 0]) / deviation, rtol=1e-14)
    np.testing.assert_allclose(
        of(True, **tokens), np.array([2, -2, -1, -1]) / math.sqrt((4 + 1 + 1) / 2 + 1e-8), rtol=1e-14
    )
    responses = {"baseline": "none", "scale": "whiten_responses"}
    deviation = math.sqrt((6.25 + 2.25 + 0.25 + 0.25) / 3 + 1e-8)
    for left_out in (False, True):
        np.testing.assert_allclose(
            of(left_out, **responses), np.array([2.5, -1.5, -0.5, -0.5]) / deviation, rtol=1e-14
        )


def test_tokens_of_the_environment_count_in_no_length():
    """Episodes of 5 and 4 tokens. The policy sampled 1 and 3 of them; rewards 4 and 0.

    OPO: the baseline is (1 x 4 + 3 x 0) / 4 = 1, so 3 and -1. With 5 and 4 tokens, it would be 20 / 9. REINFORCE++: over the tokens 4, 0, 0, 0, the mean is 1 and the
    variance (9 + 1 + 1 + 1) / 3 = 4, so 3 / 2 and -1 / 2. With 5 and 4 tokens, the mean would be 20 / 9, too.
    """
    plain = make_group([4.0, 0.0], [5, 4])
    turns = ((TurnSpan(1, 2),), (TurnSpan(0, 1), TurnSpan(2, 4)))
    rollouts = tuple(
        replace(one, response=replace(one.response, turns=its))
        for one, its in zip(plain.rollouts, turns, strict=True)
    )
    groups = [replace(plain, rollouts=rollouts)]
    assert of_step(groups, baseline="length_weighted", scale="none").tolist() == [3.0, -1.0]
    found = of_step(groups, baseline="none", scale="whiten_tokens")
    np.testing.assert_allclose(found, np.array([3.0, -1.0]) / math.sqrt(4 + 1e-8), rtol=1e-14)
    found = of_step(groups, baseline="group_mean", scale="whiten_tokens")  # 2 and -2, with the mean -1
    np.testing.assert_allclose(found, np.array([3.0, -1.0]) / math.sqrt(4 + 1e-8), rtol=1e-14)


def test_apart_normalizes_each_grader_and_the_penalty_and_then_weighs_them():
    """Grader a: 2, 0, b: 0, 10, penalty 0, -0.5: 1, -5 and 0.25 above the means, with the deviations sqrt(2), 5 sqrt(2), sqrt(2) / 4 and the weights 1, 3, 1."""
    group = make_group([2.0, 29.5], [1, 1], {"a": [2.0, 0.0], "b": [0.0, 10.0]}, penalties=[0.0, -0.5])
    [found] = step_advantages([group], rewards="apart", scale="none", weights={"a": 1.0, "b": 3.0})
    root = math.sqrt(2)
    expected = 1 / (root + 1e-6) - 3 * 5 / (5 * root + 1e-6) + 0.25 / (root / 4 + 1e-6)
    np.testing.assert_allclose(found, [expected, -expected], rtol=1e-14)
    # Over their own deviation, expected x sqrt(2), the sums are +-1 / sqrt(2), even if the sums of the rewards are equal.
    flat = make_group([0.0, 0.0], [1, 1], {"a": [2.0, 0.0], "b": [0.0, 10.0]}, penalties=[0.0, -0.5])
    for scale, groups in (("group_std", [group, flat]), ("batch_std", [flat])):
        scaled = step_advantages(groups, rewards="apart", scale=scale, weights={"a": 1.0, "b": 3.0})[-1]
        np.testing.assert_allclose(
            scaled, np.array([expected, -expected]) / (-expected * root + 1e-6), rtol=1e-14
        )
    [equal] = step_advantages([group], rewards="apart", scale="none")
    np.testing.assert_allclose(
        equal[0], 0.25 / (root / 4 + 1e-6) + 1 / (root + 1e-6) - 5 / (5 * root + 1e-6), rtol=1e-14
    )


def test_training_rounds_the_advantages_of_a_step_once_to_float32():
    rng = np.random.default_rng(0)
    groups = [make_group(rng.normal(size=4), [1, 2, 3, 4], ordinal=ordinal) for ordinal in range(3)]
    advantages = step_advantages(groups, baseline="none", scale="whiten_tokens")
    rows = training_examples(groups, advantages)
    packed = pack(rows, example_weights(rows), row_tokens=12, rows_per_microbatch=2)
    found = np.concatenate([m.advantages[m.mask] for m in packed])
    expected = np.repeat(np.concatenate(advantages), [1, 2, 3, 4] * 3).astype(np.float32)
    np.testing.assert_array_equal(np.sort(found), np.sort(expected))
    assert not np.isin(found, np.concatenate(advantages)).all()
