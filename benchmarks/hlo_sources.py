"""From an operation of a compiled program to the function of this library that it comes from.

XLA's text dump of an optimised program lists the Python stack of every operation, in four tables at the top.
"""

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

PACKAGE = "dapo_jax"
_FILE = re.compile(r'^(\d+) "(.*)"$')
_LOCATION = re.compile(r"^(\d+) \{file_name_id=(\d+) function_name_id=(\d+)")
_FRAME = re.compile(r"^(\d+) \{file_location_id=(\d+)(?: parent_frame_id=(\d+))?")
_OPERATION = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = .*metadata=\{(.*?)\}")


@dataclass(frozen=True)
class Source:
    """Where an operation comes from."""

    function: str | None
    """`file.py:function`, of the innermost frame in this library; None if XLA made the operation itself."""
    backward: bool
    """It belongs to a backward pass."""


class Sources:
    """The dumped programs of a folder, read when they are asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._program = cache(self._read)

    def of(self, program: str, operation: str) -> Source:
        """The source of an operation; `program` is as in the dump's file names, `module_0004.jit_f`."""
        return self._program(program).get(operation, Source(None, False))

    def _read(self, program: str) -> dict[str, Source]:
        found = list(self._folder.glob(f"{program}.*after_optimizations.txt"))
        return _operations(found[0].read_text()) if found else {}


def _operations(text: str) -> dict[str, Source]:
    """Every operation of a program with its source."""
    tables: dict[str, list[str]] = {}
    current = None
    lines = text.splitlines()
    for line in lines:
        if line in ("FileNames", "FunctionNames", "FileLocations", "StackFrames"):
            current = tables.setdefault(line, [])
        elif current is not None and line[:1].isdigit():
            current.append(line)
        elif line:
            current = None
    names = _matched(_FILE, tables.get("FileNames", []))
    functions = _matched(_FILE, tables.get("FunctionNames", []))
    locations = _matched(_LOCATION, tables.get("FileLocations", []))
    frames = _matched(_FRAME, tables.get("StackFrames", []))

    @cache
    def ours(frame: str) -> str | None:
        """The innermost function of this library on a stack that says what a product is for."""
        seen: set[str] = set()
        while frame in frames and frame not in seen:
            seen.add(frame)
            location, parent = frames[frame]
            file, function = locations[location]
            path = Path(names[file][0])
            if PACKAGE in path.parts and path.name != "precision.py":
                return f"{path.name}:{_plain(functions[function][0])}"
            frame = parent or ""
        return None

    found = {}
    for line in lines:
        if match := _OPERATION.match(line):
            name, metadata = match.groups()
            frame = re.search(r"stack_frame_id=(\d+)", metadata)
            backward = "transpose(" in metadata
            found[name] = Source(ours(frame.group(1)) if frame else None, backward)
    return found


def _matched(pattern: re.Pattern[str], lines: list[str]) -> dict[str, tuple[str, ...]]:
    matches = (pattern.match(line) for line in lines)
    return {match.group(1): match.groups()[1:] for match in matches if match}


def _plain(function: str) -> str:
    """`Block._project.<locals>.<genexpr>` -> `Block._project`."""
    return function.split(".<locals>")[0]
