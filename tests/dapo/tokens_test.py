"""One record for all values of a token. A further value is an entry of `VALUES`, and no other code names it."""

import numpy as np
import pytest

from dapo_jax.dapo.batching import Example, training_examples
from dapo_jax.dapo.rollouts import ContextSpan, Group, Prompt, Response, Rollout, TurnSpan, Verdict
from dapo_jax.dapo.tokens import HEADS, VALUES, Tokens, TokenValue, bytes_per_token, join
from dapo_jax.training.row_packing import pack

FURTHER = {
    "value": TokenValue(dtypes=("float32",), blank=1.0),
    "top": TokenValue(dtypes=("int16",), blank=-1),
    "load": TokenValue(dtypes=("int16",), blank=-1, processed=True),
}
"""A scalar and a row of three that come with sampling, and a row of three that comes with processing a token."""


@pytest.fixture(autouse=True, params=[[], ["value"], ["top"], ["load"], list(FURTHER)], ids="-".join)
def further(request, monkeypatch):
    """The names of further values of a token."""
    for name in request.param:
        monkeypatch.setitem(VALUES, name, FURTHER[name])
    return request.param


def numbered(first, stop, *left_out):
    """Tokens whose values are functions of their ids, except values that are left out."""
    ids = np.arange(first, stop)
    arrays = {"logprobs": -ids / 8, "routes": (ids % 200)[:, None, None], "value": -ids / 4}
    arrays |= {name: 1 + ids[:, None] * [1, 2, 3] for name in ("top", "load", *HEADS)}
    return Tokens(ids, **{n: array for n, array in arrays.items() if n in VALUES and n not in left_out})


def assert_same(found, expected):
    """The same values with the same dtypes."""
    np.testing.assert_equal(found.arrays, expected.arrays)
    assert {n: a.dtype for n, a in found.arrays.items()} == {n: a.dtype for n, a in expected.arrays.items()}


def blank(tokens):
    """Whether each optional value of each token is blank, by value."""
    return {
        name: (array == VALUES[name].blank_as(array.dtype)).reshape(len(array), -1).all(1).tolist()
        for name, array in tokens.arrays.items()
        if not VALUES[name].packed
    }


def test_cut_join_and_append_keep_all_values(further):
    whole = numbered(3, 12)
    assert set(whole.arrays) == {"tokens", "logprobs", "routes", *HEADS, *further}
    assert_same(join([whole.cut(0, 4), whole.cut(4, 4), whole.cut(4)]), whole)
    for sizes in ((4, 5), (0, 9), (1,) * 9):
        grown, first = Tokens(), 0
        for size in sizes:
            grown.append(whole.cut(first, first + size))
            first += size
        assert_same(grown, whole)
    assert_same(whole.cut(4), numbered(7, 12))


def test_a_record_that_grows_by_thousands_keeps_all_values():
    """The arrays double their room: 256, 512, 1024, 2048 tokens."""
    grown = numbered(0, 250)
    for first in range(250, 2000, 50):
        grown.append(numbered(first, first + 50))
    assert_same(grown, numbered(0, 2000))


def test_values_that_are_left_out_are_blank(further):
    mixed = join([numbered(0, 2, "logprobs"), Tokens([7]), numbered(3, 5, *FURTHER, "routes", *HEADS)])
    grown = Tokens()
    for part in (numbered(0, 2, "logprobs"), Tokens([7]), numbered(3, 5, *FURTHER, "routes", *HEADS)):
        grown.append(part)
    assert_same(grown, mixed)
    assert mixed.logprobs.tolist() == [0.0, 0.0, 0.0, -0.375, -0.5]
    assert blank(mixed) == {name: [False, False, True, True, True] for name in ("routes", *HEADS, *further)}


def test_a_token_keeps_its_first_processed_values():
    """Token 1 is processed later than the others. Entries after the last token are ignored."""
    tokens = numbered(0, 4, "routes", "load")
    assert (tokens.settled, tokens.processed) == (0, {})
    known = numbered(0, 9).processed
    tokens.fill(0, {name: array[:1] for name, array in known.items()})
    assert tokens.settled == 1
    tokens.fill(2, {name: array[2:] for name, array in known.items()})
    tokens.fill(0, {name: array + 1 for name, array in known.items()})
    assert tokens.settled == 4
    for name, array in tokens.processed.items():
        np.testing.assert_array_equal(array, [known[name][0], known[name][1] + 1, *known[name][2:4]])
    tokens.end(3)
    assert tokens.settled == 2
    tokens.end(2)
    assert tokens.settled == 1
    tokens.append(Tokens([9, 9]))  # the array still has the value of the token that was at index 3
    assert all(
        flags == [False, True, True, True] for name, flags in blank(tokens).items() if VALUES[name].processed
    )


def test_views_and_copies():
    whole = numbered(0, 6)
    view, copy = whole.cut(2, 5), whole.copy()
    view.append(Tokens([1]))
    assert_same(whole, copy)  # appending to a view does not write into the whole
    whole.end(1)
    assert_same(copy, numbered(0, 6))


def test_wrong_values_are_refused():
    with pytest.raises(ValueError, match="no value 'rewards'"):
        Tokens([1], rewards=[1.0])
    with pytest.raises(ValueError, match="logprobs has 2 entries for 1 "):
        Tokens([1], logprobs=[1.0, 2.0])


def test_the_bytes_of_a_token_are_its_arrays():
    whole = numbered(0, 1)
    shapes = tuple(
        (name, array.shape[1:], array.dtype.name)
        for name, array in whole.arrays.items()
        if not VALUES[name].packed
    )
    assert bytes_per_token(shapes) == sum(array.nbytes for array in whole.arrays.values())
    assert bytes_per_token() == 8


def test_all_values_are_packed_next_to_their_tokens(further):
    """A prompt of three tokens and two sampled ones; then a new context of two, and two sampled tokens, in a row of twelve."""
    record = numbered(10, 16)
    response = Response(
        record=record, prompt_values=numbered(5, 8).processed, finish_reason="stop",
        turns=(TurnSpan(0, 2), TurnSpan(4, 6)), contexts=(ContextSpan(2, 4),),
    )  # fmt: skip
    prompt = Prompt(ordinal=0, tokens=np.arange(5, 8, dtype=np.int32), text="", answer="")
    rollout = Rollout(response=response, text="", verdict=Verdict(correct=True), reward=1.0)
    rows = training_examples([Group(prompt=prompt, rollouts=(rollout,))], [[1.0]])
    whole = join([numbered(5, 8, "logprobs", "value", "top", *HEADS), record])
    assert_same(join([part for row in rows for part in (row.prompt, row.response)]), whole)
    [m] = pack(rows, np.ones(2), row_tokens=12, rows_per_microbatch=1)
    assert set(m.recorded) == {"routes", *HEADS, *further}
    for name in VALUES:
        packed = m.arrays[VALUES[name].packed or name][0]
        assert packed.dtype in VALUES[name].dtypes
        np.testing.assert_array_equal(packed, join([whole, Tokens([0] * 3)]).arrays[name], name)


def test_without_a_record_the_row_has_no_array():
    [m] = pack(
        [Example(prompt=Tokens([1]), response=Tokens([2]))], np.ones(1), row_tokens=3, rows_per_microbatch=1
    )
    assert m.recorded == {}
