"""Groups graded while sampling goes on."""

from concurrent.futures import Future

import numpy as np
import pytest

from dapo_jax.dapo.rollouts import Prompt, Response, Verdict
from dapo_jax.rewards.grading import Grading, immediately
from dapo_jax.rewards.shaping import Shaping
from dapo_jax.text.tokenizers import ByteTokenizer

TOKENIZER = ByteTokenizer()


def sampled(ordinal, *texts):
    prompt = Prompt(ordinal=ordinal, tokens=np.array([2], np.int32), text="q", answer="yes")
    responses = tuple(
        Response(
            tokens=TOKENIZER.encode(text), logprobs=np.zeros(len(text), np.float32), finish_reason="stop"
        )
        for text in texts
    )
    return prompt, responses


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


def test_sampling_does_not_wait_for_a_verdict_and_groups_keep_the_order_of_sampling():
    waiting, events = {}, []

    def submit(samples):
        [sample] = samples
        waiting[sample.prompt.ordinal] = Future()
        return [waiting[sample.prompt.ordinal]]

    def sampler():
        for ordinal in range(3):
            events.append(f"sample {ordinal}")
            yield sampled(ordinal, "yes")
        events.append("sampled all")
        waiting[2].set_result(Verdict(correct=True))  # the last is graded first
        waiting[0].set_result(Verdict(correct=True))
        waiting[1].set_result(Verdict(correct=False))

    grading = Grading(submit=submit, tokenizer=TOKENIZER, shaping=Shaping())
    groups = []
    for group in grading.groups(sampler()):
        events.append(f"group {group.prompt.ordinal}")
        groups.append(group)
    assert events == ["sample 0", "sample 1", "sample 2", "sampled all", "group 0", "group 1", "group 2"]
    assert [group.accuracy for group in groups] == [1.0, 0.0, 1.0]


def test_an_exception_of_the_grader_ends_the_groups():
    def submit(samples):
        future = Future()
        future.set_exception(RuntimeError("reward function f raised"))
        return [future]

    grading = Grading(submit=submit, tokenizer=TOKENIZER, shaping=Shaping())
    with pytest.raises(RuntimeError, match="reward function f raised"):
        list(grading.groups([sampled(0, "yes")]))


def test_closing_ends_what_was_started():
    closed = []
    Grading(submit=immediately(is_yes), tokenizer=TOKENIZER, shaping=Shaping()).close()
    Grading(
        submit=immediately(is_yes),
        tokenizer=TOKENIZER,
        shaping=Shaping(),
        on_close=lambda: closed.append(True),
    ).close()
    assert closed == [True]
