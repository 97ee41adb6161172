"""Which reward functions take whole groups, and which are awaited."""

from functools import partial

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


def test_coroutine_functions_are_async():
    called = [judge, AsyncJudge(), AsyncJudge().ask, whole_group(AsyncJudge())]
    assert all(
        map(is_async, [*called, partial(judge, strictness=2), partial(partial(judge)), partial(AsyncJudge())])
    )
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
    assert name_of(AsyncJudge().ask) == "AsyncJudge.ask"
