"""Groups graded while sampling continues, and several graders summed by weight."""

from concurrent.futures import Future

import numpy as np
import pytest

from dapo_jax.dapo.rollouts import Prompt, Response, Verdict
from dapo_jax.dapo.tokens import Tokens
from dapo_jax.rewards import grade_function
from dapo_jax.rewards.functions import RewardError
from dapo_jax.rewards.graders import kimi_length
from dapo_jax.rewards.grading import Grading, Part, immediately, part_names, summed, weighted_sum
from dapo_jax.rewards.shaping import Shaping, samples_of
from dapo_jax.text.tokenizers import ByteTokenizer
from tests.rewards.samples import sample, samples
from tests.text.stop_strings_test import SPACED

TOKENIZER = ByteTokenizer()
RULE = Shaping(correct=1.0, incorrect=-1.0)
ASKED = {"prompt": "1+1", "answer": "2"}


def sampled(ordinal, *texts):
    prompt = Prompt(ordinal=ordinal, tokens=np.array([2], np.int32), text="q", answer="yes")
    return prompt, tuple(
        Response(record=Tokens(tokens), finish_reason="stop") for tokens in map(TOKENIZER.encode, texts)
    )


def is_yes(samples):
    return [Verdict(correct=sample.response == sample.answer) for sample in samples]


def test_in_this_process_each_group_is_graded_before_the_next_is_sampled():
    events = []

    def sampler():
        for ordinal in (3, 1):
            events.append(f"sample {ordinal}")
            yield sampled(ordinal, "yes", "no")

    grading = Grading(submit=immediately(is_yes), tokenizer=TOKENIZER, shaping=Shaping(incorrect=-0.5))
    for group in grading.groups(sampler()):
        events.append(f"group {group.prompt.ordinal}")
        assert group.rewards.tolist() == [1.0, -0.5]
    assert events == ["sample 3", "group 3", "sample 1", "group 1"]


@pytest.mark.parametrize(("is_plain", "text"), [(True, "    END"), (False, "   END")])
def test_a_response_to_a_plain_prompt_keeps_its_first_space(is_plain, text):
    """Llama 2's decoder drops the first space of a text. After a plain prompt, a response does not begin a text."""
    tokens = SPACED.encode("a:")
    prompt = Prompt(ordinal=0, tokens=tokens, text="a:", answer="", is_plain=is_plain)
    response = Response(record=Tokens(SPACED.encode("    END", tokens)), finish_reason="stop")
    assert [sample.response for sample in samples_of(prompt, [response], tokenizer=SPACED)] == [text]


def test_sampling_does_not_wait_for_a_verdict_and_groups_keep_the_order_of_sampling():
    waiting, events = {}, []

    def submit(samples):
        return waiting.setdefault(samples[0].prompt.ordinal, Future())

    def sampler():
        for ordinal in range(3):
            events.append(f"sample {ordinal}")
            yield sampled(ordinal, "yes")
        events.append("sampled all")
        for ordinal in (2, 0, 1):  # the last is graded first
            waiting[ordinal].set_result([Verdict(correct=ordinal != 1)])

    grading = Grading(submit=submit, tokenizer=TOKENIZER, shaping=Shaping())
    groups = []
    for group in grading.groups(sampler()):
        events.append(f"group {group.prompt.ordinal}")
        groups.append(group)
    assert events == ["sample 0", "sample 1", "sample 2", "sampled all", "group 0", "group 1", "group 2"]
    assert [group.accuracy for group in groups] == [1.0, 0.0, 1.0]


def test_an_exception_of_the_grader_ends_the_groups():
    failed = Future()
    failed.set_exception(RuntimeError("reward function f raised"))
    grading = Grading(submit=lambda samples: failed, tokenizer=TOKENIZER, shaping=Shaping())
    with pytest.raises(RuntimeError, match="reward function f raised"):
        list(grading.groups([sampled(0, "yes")]))


def part(name, weight, reward=lambda sample: True, **fields):
    return Part(name=name, weight=weight, submit=immediately(grade_function(reward)), **fields)


def test_the_score_is_the_sum_of_weight_times_reward_and_the_first_decides_what_is_correct():
    """`=2`: 2 x 1 + 0.5 / 2 = 2.25. `=002`: 2 x 1 + 0.5 / 4 = 2.125. `=3`: 2 x -1 + 0.25 = -1.75, wrong though brevity is above 0."""
    brevity = part("brevity", 0.5, lambda sample: 1.0 / len(sample.response))
    submit = weighted_sum([part("exact", 2.0, "exact"), brevity], RULE)
    verdicts = submit(samples("=2", "=002", "=3", **ASKED)).result()
    assert [verdict.score for verdict in verdicts] == [2.25, 2.125, -1.75]
    assert [verdict.correct for verdict in verdicts] == [True, True, False]
    assert [verdict.extracted for verdict in verdicts] == ["2", "002", "3"]
    assert verdicts[1].parts == {"exact": 1.0, "brevity": 0.25}
    assert verdicts[2].reason == "sum of exact 2 x -1 (expected '2'), brevity 0.5 x 0.5"


def test_a_lost_part_is_worth_the_wrong_reward_and_all_reasons_are_kept():
    parts = [part("exact", 1.0), part("judge", 0.5), part("other", 1.0)]
    verdicts = [
        [Verdict(correct=True)],
        [Verdict(correct=False, lost="timeout", reason="no verdict within 1 s")],
        [Verdict(correct=False, lost="memory")],
    ]
    [verdict] = summed(parts, verdicts, RULE)
    assert (verdict.correct, verdict.lost, verdict.score) == (True, "timeout", 1.0 - 0.5 - 1.0)
    judge = "judge 0.5 x -1 (no verdict within 1 s)"
    assert verdict.reason == f"sum of exact 1 x 1, {judge}, other 1 x -1 (memory)"


@pytest.mark.parametrize("weight", [2.0, -2.0])
@pytest.mark.parametrize("scores", [(0.25, 1.0), (-7.0, 3.0), (None, None)])
def test_a_lost_part_never_adds_more_than_the_worst_of_its_group(scores, weight):
    """Two graded responses and a lost one: what it adds, weight x reward, is at most what each of them adds."""
    graded = [Verdict(correct=(score or 1) > 0, score=score) for score in scores]
    verdicts = [*graded, Verdict(correct=False, lost="timeout")]
    sums = summed([part("a", weight)], [verdicts], RULE)
    assert sums[2].score <= min(sums[0].score, sums[1].score)


def test_a_sum_is_there_when_its_last_part_is_and_has_its_error():
    def sum_with(future):
        late = Part(name="late", weight=1.0, submit=lambda samples: future)
        return weighted_sum([part("exact", 1.0, "exact"), late], RULE)(samples("=2", **ASKED))

    late, broken = Future(), Future()
    whole, failed = sum_with(late), sum_with(broken)
    assert not whole.done()
    late.set_result([Verdict(correct=False, score=0.5)])
    assert whole.result()[0].score == 1.5
    broken.set_exception(RuntimeError("the judge raised"))
    with pytest.raises(RuntimeError, match="the judge raised"):
        failed.result()


def test_a_sum_that_would_overflow_is_refused_with_its_terms():
    """Each score is within bounds: 10 x 1e30 is not, and 1e300 x 1e10 is an infinity."""
    for weight, score, total in [(10.0, 1e30, r"1e\+31"), (1e300, 1e10, "inf"), (-1e300, 1e10, "-inf")]:
        parts = [part("exact", 1.0, "exact"), part("big", weight, lambda sample, n=score: n)]
        future = weighted_sum(parts, RULE)(samples("=2", **ASKED))
        with pytest.raises(RewardError, match=rf"sum of rewards exact 1 x 1 \(.*\), big .* is {total}; "):
            future.result()


def test_names_are_short_and_unique():
    names = ["math", "a.py:f", "trl:b.py:f", "f_2", "module:f"]
    assert part_names(names) == ["math", "f", "f_2", "f_2_2", "f_3"]


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        # 0.5 - (n - 2) / 8: 0.5, 0.25, -0.5. A wrong response gets at most 0.
        ((2, 4, 10, 2, 4, 10), [0.5, 0.25, -0.5, 0.0, 0.0, -0.5]),
        ((3, 3, 3, 3, 3, 3), [0.0] * 6),
    ],
)
def test_the_length_reward_of_kimi_is_positive_for_correct_responses_only(lengths, expected):
    """The first three are correct. Next to a score of +-1, half of it: the sum is +-1 + 0.5 x."""
    responses = zip(["=2"] * 3 + ["=3"] * 3, lengths, strict=True)
    group = [sample(response, tokens=[0] * length, **ASKED) for response, length in responses]
    parts = [part("exact", 1.0, "exact"), part("kimi_length", 0.5, kimi_length, only_correct=True)]
    verdicts = weighted_sum(parts, RULE)(group).result()
    assert [verdict.parts["kimi_length"] for verdict in verdicts] == expected
    signs = zip([1, 1, 1, -1, -1, -1], expected, strict=True)
    assert [verdict.score for verdict in verdicts] == [sign + 0.5 * x for sign, x in signs]
