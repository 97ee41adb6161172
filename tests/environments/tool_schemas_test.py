"""Schemas of functions, and errors in calls."""

from typing import Any, Literal, Optional, Union

import pytest

from dapo_jax.environments.tool_schemas import schema_of, what_is_wrong


def look_up(
    word: str,
    among: list[str],
    most: int = 3,
    least: float | None = None,
    kind: Literal["noun", "verb"] = "noun",
    weights: dict[str, float] = {},  # noqa: B006
    place: Optional[tuple[int, str]] = None,  # noqa: UP045
    either: Union[int, str] = 0,  # noqa: UP007
    nested: list[dict[str, int]] | str | None = None,
    anything: Any = None,
    plain: list = [],  # noqa: B006
    sure: bool = False,
) -> list[str]:
    """Looks a word up
    in a list.

    Only the first are given.

    Args:
        word: the word, which
            may be long
        among (list of str): the list: any
        most: the most

        least: the least likeness
        kind: noun or verb
        weights: of each
        place: where
        either: or
        nested: deep
        anything: at all
        plain: a list
        sure: or not

    Returns:
        The words.
    """
    return [word, str(most)]


def test_a_schema_has_the_types_and_the_descriptions_of_the_docstring():
    function = schema_of(look_up)["function"]
    properties = function["parameters"]["properties"]
    assert function["name"] == "look_up"
    assert function["description"] == "Looks a word up\nin a list.\n\nOnly the first are given."
    assert function["parameters"]["required"] == ["word", "among"]
    assert properties["word"] == {"type": "string", "description": "the word, which may be long"}
    words = {"type": "array", "items": {"type": "string"}, "description": "the list: any"}
    assert properties["among"] == words
    assert properties["kind"]["enum"] == ["noun", "verb"]
    assert (properties["least"]["type"], properties["least"]["nullable"]) == ("number", True)
    assert properties["either"]["type"] == ["integer", "string"]


def test_a_method_has_no_self_and_a_function_without_arguments_none():
    class Clock:
        def now(self):
            """Tells the time."""

    parameters = {"type": "object", "properties": {}}
    function = {"name": "now", "description": "Tells the time.", "parameters": parameters}
    assert schema_of(Clock().now) == {"type": "function", "function": function}


@pytest.mark.parametrize(
    ("signature", "message"),
    [
        ("a", "tool f: argument a "),
        ("*a: int", r"tool f: \*a: int"),
        ("a: int, /", "tool f: a: int"),
        ("a: bytes", "tool f: argument a .*'bytes'"),
        ("a: 'Nowhere'", "tool f: .*'Nowhere'"),
    ],
)
def test_a_function_that_cannot_be_a_tool_is_named(signature, message):
    names = {}
    exec(f"def f({signature}): pass", names)
    with pytest.raises(ValueError, match=message):
        schema_of(names["f"])


PARAMETERS = schema_of(look_up)["function"]["parameters"]
GOOD = {"word": "a", "among": []}


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"most": 4, "least": 0.5, "kind": "verb", "weights": {"a": 1}, "sure": True},
        {"least": None, "place": None, "nested": None},
        {"place": [1, "a"], "either": "x", "nested": [{"a": 1}], "anything": {"b": [None]}},
        {"nested": "text", "either": 3, "plain": [1, "a"]},
    ],
)
def test_arguments_that_fit_are_let_through(more):
    assert what_is_wrong({**GOOD, **more}, PARAMETERS) == ""


@pytest.mark.parametrize(
    ("arguments", "begins"),
    [
        ({"word": "a"}, "argument 'among' is missing"),
        ({**GOOD, "mist": 1}, "unknown argument 'mist'; the arguments are ['among', 'anything',"),
        ({**GOOD, "word": 1}, "word must be string; got 1"),
        ({**GOOD, "most": True}, "most must be integer; got True"),
        ({**GOOD, "sure": 1}, "sure must be boolean; got 1"),
        ({**GOOD, "kind": "adverb"}, "kind must be one of ['noun', 'verb']; got 'adverb'"),
        ({**GOOD, "among": ["a", 2]}, "among[1] must be string; got 2"),
        ({**GOOD, "weights": {"a": "b"}}, "weights['a'] must be number; got 'b'"),
        ({**GOOD, "place": [1]}, "place must have 2 items; got 1"),
        ({**GOOD, "place": [1, 2]}, "place[1] must be string; got 2"),
        ({**GOOD, "either": []}, "either must be integer or string; got []"),
        ({**GOOD, "nested": [{"a": "b"}]}, "nested[0]['a'] must be integer; got 'b'"),
        ({**GOOD, "word": ["x" * 1000]}, "word must be string; got ['xxxx"),
    ],
)
def test_the_first_error_is_returned(arguments, begins):
    found = what_is_wrong(arguments, PARAMETERS)
    assert found.startswith(begins)
    assert len(found) < 300
