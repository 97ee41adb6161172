"""From responses to a graded group: text, verdicts, and rewards with and without length shaping."""

import numpy as np
import pytest

from dapo_jax.dapo.rollouts import Prompt, Response, Verdict
from dapo_jax.rewards import grade_function, grade_group
from dapo_jax.rewards.shaping import Shaping
from dapo_jax.text import ByteTokenizer

TOKENIZER = ByteTokenizer()
PROMPT = Prompt(ordinal=3, tokens=TOKENIZER.encode("1+1"), text="1+1", answer="2")
EXACT = grade_function("exact")
CAP = {"overlong": True, "max_response_tokens": 10, "buffer_tokens": 4}


def response(text, *, ended=True):
    tokens = (
        np.append(TOKENIZER.encode(text), np.int32(TOKENIZER.eos_id)) if ended else TOKENIZER.encode(text)
    )
    return Response(
        tokens=tokens, logprobs=np.zeros(len(tokens), np.float32), finish_reason="stop" if ended else "length"
    )


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


def test_rule_reward_is_plus_or_minus_one():
    np.testing.assert_array_equal(group(response("=2"), response("=3")).rewards, [1.0, -1.0])


def test_configured_rewards_replace_plus_and_minus_one():
    graded = group(response("=2"), response("=3"), correct=0.5, incorrect=-0.25)
    np.testing.assert_array_equal(graded.rewards, [0.5, -0.25])


def test_score_replaces_the_rule_reward():
    graded = group(
        response("=2"),
        grade=lambda samples: [Verdict(correct=False, score=0.75)],
        correct=9.0,
        incorrect=-9.0,
    )
    np.testing.assert_array_equal(graded.rewards, [0.75])
    assert not graded.rollouts[0].correct


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
    assert graded.rewards[2] == paid
    assert [score for score in scores if score is not None] == [
        reward for reward, score in zip(graded.rewards, scores, strict=True) if score is not None
    ]
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


def test_wrong_answer_at_the_cap_has_reward_minus_two():
    [rollout] = group(response("=000000003", ended=False), **CAP).rollouts
    assert rollout.reward == -2.0


def test_penalty_off_leaves_long_responses_alone():
    [rollout] = group(response("=000000002", ended=False), **(CAP | {"overlong": False})).rollouts
    assert rollout.reward == 1.0
    assert rollout.overlong_penalty == 0.0


def test_penalty_factor_scales_the_penalty():
    [rollout] = group(response("=000000002", ended=False), **CAP, penalty_factor=0.5).rollouts
    assert rollout.reward == 0.5


def test_penalty_is_added_to_scores_too():
    [rollout] = group(
        response("=000000002", ended=False), grade=grade_function(lambda sample: 0.25), **CAP
    ).rollouts
    assert rollout.reward == -0.75


def test_length_is_in_tokens_not_characters():
    """Four characters of two bytes each are 8 tokens, 9 with the end token: (9 - 6) / 4 = 0.75."""
    [rollout] = group(response("éééé"), **CAP).rollouts
    assert rollout.overlong_penalty == -0.75
