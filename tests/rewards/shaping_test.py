"""From responses to a graded group: text, verdicts, and rewards with and without length shaping."""

from dataclasses import replace

import numpy as np
import pytest

from dapo_jax.dapo.rollouts import Prompt, Response, TurnSpan, Verdict
from dapo_jax.dapo.tokens import Tokens
from dapo_jax.rewards import grade_function, grade_group
from dapo_jax.rewards.shaping import Shaping
from dapo_jax.text.tokenizers import ByteTokenizer

TOKENIZER = ByteTokenizer()
PROMPT = Prompt(ordinal=3, tokens=TOKENIZER.encode("1+1"), text="1+1", answer="2")
EXACT = grade_function("exact")
CAP = {"overlong": True, "max_response_tokens": 10, "buffer_tokens": 4}


def response(text, *, ended=True):
    tokens = np.array([*TOKENIZER.encode(text), *[TOKENIZER.eos_id] * ended], np.int32)
    finish_reason = "stop" if ended else "length"
    return Response(record=Tokens(tokens), finish_reason=finish_reason)


def group(*responses, grade=EXACT, **options):
    return grade_group(PROMPT, responses, tokenizer=TOKENIZER, grade=grade, shaping=Shaping(**options))


def test_group_keeps_order_text_and_responses():
    given = [response("=2"), response("=3"), response("=2", ended=False)]
    graded = group(*given)
    assert graded.prompt is PROMPT
    assert [rollout.text for rollout in graded.rollouts] == ["=2", "=3", "=2"]
    assert [rollout.correct for rollout in graded.rollouts] == [True, False, True]
    assert [rollout.truncated for rollout in graded.rollouts] == [False, False, True]
    assert all(rollout.response is one for rollout, one in zip(graded.rollouts, given, strict=True))


def test_the_rule_reward_is_plus_or_minus_one_or_the_configured_one_and_a_score_replaces_it():
    right_and_wrong = response("=2"), response("=3")
    assert group(*right_and_wrong).rewards.tolist() == [1.0, -1.0]
    assert group(*right_and_wrong, correct=0.5, incorrect=-0.25).rewards.tolist() == [0.5, -0.25]
    graded = group(response("=2"), grade=verdicts_of(-0.75), correct=9.0, incorrect=-9.0)
    assert (graded.rewards.tolist(), graded.rollouts[0].correct) == ([-0.75], False)


def verdicts_of(*scores):
    """A score is one; None is a verdict that was lost."""
    return lambda samples: [
        Verdict(correct=False, lost="timeout") if score is None else Verdict(correct=score > 0, score=score)
        for score in scores
    ]


@pytest.mark.parametrize(
    ("scores", "paid"),
    [
        ((-5.0, 3.0, None), -5.0),  # the worst of the group, not -1
        ((2.0, 3.0, None), -1.0),  # `incorrect` is worse than the worst of the group
        ((None, None, None), -1.0),
    ],
)
def test_a_lost_verdict_is_worth_no_more_than_the_worst_of_its_group(scores, paid):
    graded = group(response("=2"), response("=3"), response("=4"), grade=verdicts_of(*scores))
    assert graded.rewards.tolist() == [paid if score is None else score for score in scores]
    assert not graded.rollouts[2].correct
    assert graded.rollouts[2].verdict.lost == "timeout"


def test_a_lost_verdict_among_bools_is_a_wrong_one():
    verdicts = [Verdict(correct=True), Verdict(correct=False, lost="memory")]
    graded = group(response("=2"), response("=3"), grade=lambda samples: verdicts)
    np.testing.assert_array_equal(graded.rewards, [1.0, -1.0])
    assert graded.rollouts[1].verdict.score is None


def test_grader_sees_text_tokens_and_finish_reason():
    seen = []

    def grade(sample):
        asked = (sample.prompt.ordinal, sample.prompt.tokens.tolist(), sample.prompt.text, sample.answer)
        seen.append((asked, sample.response, len(sample.tokens), sample.finish_reason))
        return True

    group(response("=2"), response("=22", ended=False), grade=grade_function(grade))
    asked = (3, PROMPT.tokens.tolist(), "1+1", "2")
    assert seen == [(asked, "=2", 3, "stop"), (asked, "=22", 3, "length")]


@pytest.mark.parametrize(
    ("text", "ended", "penalty"),
    [
        ("=0002", True, 0.0),  # 5 + 1 end token = 6 = 10 - 4: the last free length
        ("=00002", True, -0.25),  # 7 tokens: (7 - 6) / 4; without its end token it would cost nothing
        ("=0000002", True, -0.75),  # 9 tokens: (9 - 6) / 4
        ("=000000002", False, -1.0),  # 10 tokens, cut off at the cap
    ],
)
def test_overlong_penalty_counts_tokens_with_the_end_token(text, ended, penalty):
    [rollout] = group(response(text, ended=ended), **CAP).rollouts
    assert rollout.overlong_penalty == pytest.approx(penalty)
    assert rollout.reward == pytest.approx(1.0 + penalty)
    assert rollout.correct


def test_the_penalty_counts_only_sampled_tokens():
    """The policy sampled 4 + 3 = 7 of 12 tokens, so the penalty is (7 - 6) / 4. All 12 would cost the full penalty."""
    turns = TurnSpan(0, 4), TurnSpan(9, 12)
    [rollout] = group(replace(response("=0000000002"), turns=turns), **CAP).rollouts
    assert (len(rollout.response.tokens), rollout.overlong_penalty, rollout.reward) == (12, -0.25, 0.75)


@pytest.mark.parametrize(
    ("text", "options", "reward"),
    [
        ("=000000003", {}, -2.0),  # a wrong answer at the cap
        ("=000000002", {"overlong": False}, 1.0),
        ("=000000002", {"penalty_factor": 0.5}, 0.5),
        ("=000000002", {"grade": grade_function(lambda sample: 0.25)}, -0.75),
        ("=ééé2", {"grade": grade_function(lambda sample: 1.0)}, 0.5),  # 8 bytes are 8 tokens: (8 - 6) / 4
    ],
)
def test_the_penalty_is_added_to_each_reward_by_the_number_of_tokens(text, options, reward):
    [rollout] = group(response(text, ended=False), **CAP | options).rollouts
    assert rollout.reward == reward
    assert rollout.overlong_penalty == 0.0 or "overlong" not in options
