"""Samples as JSON, and which reward functions take whole groups or are awaited."""

import json
from functools import partial

import numpy as np
import pytest

from dapo_jax.rewards import whole_group
from dapo_jax.rewards.sample import call_of, is_async, is_whole_group, name_of, sample_of
from tests.rewards.samples import sample


async def judge(sample, *, strictness=1):
    return True


def plain(sample, *, strictness=1):
    return True


class AsyncJudge:
    async def __call__(self, sample):
        return True

    ask = __call__


class PlainJudge:
    __call__ = plain


def test_a_call_holds_all_that_a_reward_function_may_read():
    row = {"level": 3, "tags": ("a", "b"), "matrix": np.eye(2), "n": np.int64(5), "none": None}
    [found] = map(sample_of, json.loads(json.dumps(call_of([sample("Äπ\n34", row=row)]))))
    assert found.prompt.row == {**row, "tags": ["a", "b"], "matrix": [[1.0, 0.0], [0.0, 1.0]]}
    assert (found.response, found.answer, found.finish_reason) == ("Äπ\n34", "42", "stop")
    assert (found.prompt.ordinal, found.prompt.text, found.response_tokens) == (7, "6*7", 3)
    np.testing.assert_array_equal(found.prompt.tokens, [1, 2])


@pytest.mark.parametrize("value", [{1, 2}, {3: "an integer's name would become a text"}, b"bytes"])
def test_a_row_that_json_would_change_is_refused(value):
    with pytest.raises(TypeError, match=r"field 'tags' .*workers\.count=0"):
        call_of([sample("34", row={"tags": [value]})])


def test_coroutine_functions_are_async():
    partials = [partial(judge, strictness=2), partial(partial(judge)), partial(AsyncJudge())]
    assert all(map(is_async, [judge, AsyncJudge(), AsyncJudge().ask, whole_group(AsyncJudge()), *partials]))
    assert not any(map(is_async, [plain, partial(plain, strictness=2), PlainJudge(), len, lambda sample: 1]))


def test_a_whole_group_function_is_known_by_its_mark_also_inside_a_partial():
    marked = whole_group(lambda group, scale=1.0: [scale for _ in group])
    assert is_whole_group(marked)
    assert is_whole_group(partial(marked, scale=2.0))
    assert is_whole_group(whole_group(partial(plain)))
    assert not is_whole_group(plain)
    assert not is_whole_group(partial(plain))


def test_a_name_holds_no_address_so_that_it_is_the_same_in_every_run():
    assert name_of(partial(partial(plain), strictness=2)) == "plain"
    assert name_of(PlainJudge()) == "PlainJudge"
    assert name_of(AsyncJudge().ask) == "AsyncJudge.__call__"
