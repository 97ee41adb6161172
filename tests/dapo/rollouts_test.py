"""The conversion of a verdict's fields, and the responses of a group that are kept."""

import re
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from dapo_jax.dapo.advantages import step_advantages
from dapo_jax.dapo.rollouts import Verdict
from dapo_jax.dapo.tokens import Tokens
from dapo_jax.rewards import as_verdict
from dapo_jax.rollout.checkpoint_arrays import group_arrays, groups_of
from tests.dapo.made import group_of, rollout_of
from tests.docs.blocks import ROOT, blocks


@pytest.mark.parametrize("kind", [bool, int, float, np.bool_, np.int64, np.array, jnp.array])
def test_values_that_mean_true_or_false(kind):
    for right in (True, False):
        assert Verdict(correct=kind(right)).correct is right


@pytest.mark.parametrize("quarter", [0.25, np.float32(0.25), np.array(0.25), jnp.array(0.25)])
def test_numbers_of_any_kind_are_scores(quarter):
    verdict = Verdict(correct=True, score=quarter, parts={"a": quarter}, turn_rewards=[quarter])
    assert (verdict.score, verdict.parts, verdict.turn_rewards) == (0.25, {"a": 0.25}, (0.25,))
    assert type(verdict.score) is float
    assert as_verdict(quarter, name="f") == Verdict(correct=True, score=0.25)
    assert Verdict(correct=True, extracted=quarter).extracted == "0.25"


@pytest.mark.parametrize(
    ("field", "value", "kind"),
    [
        ("correct", "no", "str"),
        ("correct", 0.5, "float"),
        ("correct", re.match("a", "a"), "Match"),
        ("score", "0.5", "str"),
        ("extracted", ["34"], "list"),
        ("reason", b"bytes", "bytes"),
        ("lost", "perhaps", "str"),
        ("parts", {"a": "b"}, "dict"),
        ("parts", {1: 1.0}, "dict"),
        ("turn_rewards", 3, "int"),
    ],
)
def test_other_values_are_refused_by_field_and_value(field, value, kind):
    with pytest.raises(ValueError, match=rf"Verdict: {field}=.*\({kind}\), needs ") as raised:
        Verdict(**{"correct": True, field: value})
    assert repr(value)[:40] in str(raised.value)


@pytest.mark.parametrize(
    ("by", "count", "kept"),
    [
        # Of 3, 2, 2, 5 and 0 tokens.
        ("shortest", 1, (4,)),
        ("shortest", 2, (1, 4)),
        ("shortest", 3, (1, 2, 4)),
        ("shortest", 4, (0, 1, 2, 4)),
        # 1 / 3, -1 / 2, -1 / 2, 2 / 5 and, for no token, -1.
        ("reward_per_token", 1, (3,)),
        ("reward_per_token", 2, (0, 3)),
        ("reward_per_token", 3, (0, 1, 3)),
        ("reward_per_token", 5, (0, 1, 2, 3, 4)),
    ],
)
def test_the_best_responses_stay_in_their_order_and_know_their_index(by, count, kept):
    group = make_group("x..x.", [3, 2, 2, 5, 0])
    rewards = [1.0, -1.0, -1.0, 2.0, -1.0]
    rollouts = [replace(one, reward=reward) for one, reward in zip(group.rollouts, rewards, strict=True)]
    group = replace(group, rollouts=tuple(rollouts))
    best = group.best(count, by=by)
    assert best.kept == kept
    assert best.indexed == [(index, rollouts[index]) for index in kept]
    assert group.indexed == list(enumerate(rollouts))
    assert group.best(0, by=by) is group


def likely_group(verdicts, surprise, tokens=2):
    """A group in which response i has the mean log-probability -surprise[i]. The log-probabilities of its tokens differ."""
    group = make_group(verdicts, [tokens] * len(verdicts))
    rollouts = [
        replace(one, response=replace(one.response, record=Tokens(one.response.tokens, logprobs=np.float32([-s - 0.1, -s + 0.1]))))
        for one, s in zip(group.rollouts, surprise, strict=True)
    ]  # fmt: skip
    return replace(group, rollouts=tuple(rollouts))


def test_the_likeliest_of_the_good_responses_are_dropped_first():
    """The example of GRPODropout. Of 8 responses, 7 are kept: 3 correct and 4 wrong have the mean 3 / 7 and, with ddof 1, the standard deviation 0.53452, so the
    advantages are (1 - 3 / 7) / 0.53452 = 1.0690 and -3 / 7 / 0.53452 = -0.8018."""
    surprise = [0.2, 0.3, 0.6, 0.9, 0.4, 0.5, 0.7, 1.0]
    group = likely_group("xxxx....", surprise)
    kept = group.best(7, by="improbable")
    assert kept.kept == (1, 2, 3, 4, 5, 6, 7)
    [found] = step_advantages([kept])
    np.testing.assert_allclose(found, [1.0690] * 3 + [-0.8018] * 4, atol=5e-5)
    orders = [group.best(count, by="improbable").kept for count in (6, 5, 4, 3)]
    assert orders == [(2, 3, 4, 5, 6, 7), (3, 4, 5, 6, 7), (3, 4, 5, 6), (3, 4, 5)]
    # The only correct response stays, so that the group has a signal. A response is compared by the mean over its tokens, not by the sum.
    assert likely_group("....x...", surprise).best(7, by="improbable").kept == (0, 1, 2, 3, 4, 5, 6)
    longer = likely_group("xxx.", [0.4, 0.3, 0.5, 0.1])
    first = replace(longer.rollouts[0].response, record=Tokens(np.arange(9), logprobs=np.full(9, -0.4, np.float32)))  # fmt: skip
    longer = replace(longer, rollouts=(replace(longer.rollouts[0], response=first), *longer.rollouts[1:]))
    assert longer.best(3, by="improbable").kept == (0, 2, 3)
    # The exact rule, as the page has it, drops the first as well. The numbers of the example are in the page's program.
    page: dict = {}
    exec(blocks(ROOT / "docs" / "write_an_objective.md")[-1].text, page)
    [exact] = page["improbable_advantages"]([group])
    np.testing.assert_allclose(exact, [0, *[1.0439] * 3, *[-0.8269] * 4], atol=5e-5)
    assert not page["improbable_advantages"]([likely_group("xx", [1, 2])])[0].any()
    # Another process has the digest of the tokens instead of the tokens.
    [brief] = groups_of(group_arrays([group], whole=[False]), lambda ordinal: group.prompt)
    assert brief.best(7, by="improbable").kept == kept.kept


def make_group(verdicts, lengths):
    pairs = zip(verdicts, lengths, strict=True)
    return group_of(rollout_of(length, correct=mark == "x", reward=mark == "x") for mark, length in pairs)
