"""Which reward functions take whole groups, and which are awaited."""

from functools import partial

import pytest

from dapo_jax.rewards import whole_group
from dapo_jax.rewards.sample import is_async, is_whole_group, name_of


async def judge(sample, *, strictness=1):
    return True


def plain(sample, *, strictness=1):
    return True


class AsyncJudge:
    async def __call__(self, sample):
        return True

    async def ask(self, sample):
        return True


class PlainJudge:
    def __call__(self, sample):
        return True


@pytest.mark.parametrize(
    "function",
    [
        judge,
        partial(judge, strictness=2),
        partial(partial(judge), strictness=2),
        AsyncJudge(),
        partial(AsyncJudge()),
        AsyncJudge().ask,
        whole_group(AsyncJudge()),
    ],
)
def test_coroutine_functions_are_async(function):
    assert is_async(function)


@pytest.mark.parametrize(
    "function", [plain, partial(plain, strictness=2), PlainJudge(), len, lambda sample: 1]
)
def test_other_functions_are_not_async(function):
    assert not is_async(function)


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
    assert name_of(AsyncJudge().ask) == "AsyncJudge.ask"
