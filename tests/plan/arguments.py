"""Finds the arguments that a compiled program copies before it uses them."""

from collections.abc import Iterator

from dapo_jax.plan import collectives

_NAMES = {"bitcast", "get-tuple-element", "copy-done", "opt-barrier", "tuple", "reshape"}
"""Instructions that give an array another name or shape."""
_MOVES = _NAMES | {"parameter", "copy", "copy-start", "transpose"}
"""Instructions that change only the layout of an array."""


def copied_arguments(text: str) -> Iterator[tuple[str, int]]:
    """Yields the type and the bytes of each whole argument in the device's memory that a program copies to another layout in this memory.

    A program holds such a copy in addition to the argument. A copy that is a result of the program is not counted. `text` is `compiled.as_text()`.
    """
    computations, entry = collectives._parsed(text)
    inside = computations[entry]

    def named(operands: list[str]) -> set[str]:
        """The operands, and the instructions whose results they are under another name."""
        found, left = set[str](), [name for name in operands if name in inside]
        while left:
            found.add(name := left.pop())
            if inside[name].opcode in _NAMES:
                left += [each for each in inside[name].operands if each in inside]
        return found

    def moves(made: collectives.Instruction) -> bool:
        called = collectives._CALLED.findall(made.rest) if made.opcode == "fusion" else []
        if called:
            return all(part.opcode in _MOVES for each in called for part in computations[each].values())
        return made.opcode in _MOVES - _NAMES - {"parameter"}

    results = {name for made in inside.values() if made.root for name in named(made.operands)}
    for name, made in inside.items():
        if name in results or made.root or not moves(made):
            continue
        sources = [inside[each] for each in named(made.operands)]
        if any(source.opcode == "parameter" and "S(" not in source.type for source in sources):
            result = (
                made.type.removeprefix("(").split("}")[0] + "}" if made.opcode == "copy-start" else made.type
            )
            if "S(" not in result:
                yield result, collectives.array_bytes(result)
