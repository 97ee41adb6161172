"""The tasks of EvalPlus whose rows do not say everything: JSON has lost types of their inputs, or they are compared in their own way."""

from typing import Any

_SHAPES = {
    "t": "2 116 132 143 222 261 273 394 399 421 424 429 470 560 579 596 616 630 726 740 744 809",
    "lt": "63 64 70 94 120 237 272 299 400 409 417 438 473 614 780",
    "lt .": "75 413 444 753",
    ". t": "106 750",
    "ls": "115",
    "f c": "124",
    "t .": "250 307 405 446 617 720 763 808",
    "tt": "259 278 401 445",
    "lt . .": "722",
    "c": "252",
    "ttttttttt": "580 615 791",
}
"""Tasks of MBPP+ by the shapes of their arguments. The last shape also counts for further arguments. A letter is the type at one depth: t for tuple, l for list or
dictionary, s for set, f for float, c for complex. A dot leaves an argument as it is."""
_TASKS = {f"Mbpp/{task}": shape.split() for shape, tasks in _SHAPES.items() for task in tasks.split()}
_COMPARISONS = {
    "set": "similar_elements find_char_long common_in_nested_lists extract_singly larg_nnum intersection_array find_dissimilar Diff",
    "found": "check_str text_match_three text_starta_endb",
    "zero": "find_zero",
}
COMPARISONS = {name: comparison for comparison, names in _COMPARISONS.items() for name in names.split()}
"""Maps names of functions to comparisons, see `same_result`."""
_TYPES: dict[str, Any] = {"t": tuple, "s": lambda items: set(items) or {}}


def typed(task: str, arguments: list[Any]) -> list[Any]:
    """Returns the arguments of a task with their types.

    >>> typed("Mbpp/75", [[[1, 2]], 3]), typed("HumanEval/75", [[[1, 2]], 3])
    ([[(1, 2)], 3], [[[1, 2]], 3])
    """
    shapes = _TASKS.get(task, ["."])
    return [_shaped(value, shapes[min(n, len(shapes) - 1)]) for n, value in enumerate(arguments)]


def _shaped(value: Any, shape: str) -> Any:
    if shape[:1] in ("f", "c"):
        return {"f": float, "c": complex}[shape[0]](value)
    if isinstance(value, dict):
        return {key: _shaped(item, shape[1:]) for key, item in value.items()}
    if isinstance(value, list):
        return _TYPES.get(shape[:1], list)([_shaped(item, shape[1:]) for item in value])
    return value
