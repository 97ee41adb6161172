"""Finds the function of this library from which an operation of a compiled program originates.

XLA's text of an optimised program contains the Python stack of every operation, in four tables at the top. A fusion is attributed to its
matrix products, if it has any. An operation that XLA adds, such as a copy, is attributed to the operation or the loop that reads its result.

    python -m benchmarks.hlo_sources gsm8k_qwen3_0.6b --topology h100:1

compiles the programs of a configuration for a described GPU or TPU, and prints how many of their kernels have no known function.
"""

import argparse
import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path

from benchmarks import report

PACKAGE = "dapo_jax"
PRODUCTS = ("dot", "convolution", "ragged-dot", "custom-call")
"""Opcodes of matrix products, which take most of a fusion's time. A TPU computes products as convolutions, and a GPU may call cuBLAS."""
WITHOUT_KERNEL = frozenset(
    ("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "call", "conditional", "after-all",
     "partition-id", "replica-id", "async-start", "async-update", "async-done", "copy-start", "copy-done", "opt-barrier")
)  # fmt: skip
"""Opcodes of operations that do not run a kernel of their own."""
_FILE = re.compile(r'^(\d+) "(.*)"$')
_LOCATION = re.compile(r"^(\d+) \{file_name_id=(\d+) function_name_id=(\d+)")
_FRAME = re.compile(r"^(\d+) \{file_location_id=(\d+)(?: parent_frame_id=(\d+))?")
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) .*\{$")
_OPERATION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = .*? ([a-z][\w\-]*)\((.*?)\)")
_CALLS = re.compile(r"\b(?:calls|to_apply)=%?([\w.\-]+)")
_REGIONS = re.compile(r"\b(?:body|condition|(?:true|false|branch)_computations?)=\{?((?:%[\w.\-]+(?:, )?)+)")
_METADATA = re.compile(r"metadata=\{(.*?)\}")
_KERNEL = re.compile(r'\bname ?[=:] ?\\?"([^"\\]+)\\?"')


@dataclass(frozen=True)
class Source:
    """The origin of an operation in the library's code."""

    function: str | None
    """`file.py:function` of the innermost frame in this library, or None if XLA added the operation and everything inside it."""
    backward: bool
    """Whether the operation belongs to a backward pass."""


ANY = "module_"
"""A program name that matches all programs. If several programs have an operation of the same name, the largest program is used."""

UNKNOWN = Source(None, False)


@dataclass(frozen=True)
class Operation:
    """One line of a compiled program."""

    name: str
    opcode: str
    own: Source
    """The source according to the operation's own stack."""
    inside: str | None
    """Name of the computation that the operation calls, or None."""
    regions: tuple[str, ...]
    """If the operation is a loop or a branch, the names of its computations."""
    operands: tuple[str, ...]
    kernel: str
    """Name of the operation's GPU kernel, which a trace may contain instead of the operation's name."""


@dataclass(frozen=True)
class Program:
    """The operations of a compiled program, grouped by computation."""

    computations: dict[str, list[Operation]]

    def source(self, operation: Operation) -> Source:
        """Returns the most frequent source of the matrix products in an operation, else its own source, else the most frequent source inside it.

        An operation that XLA added, such as a copy, has the source of the operations or the loop that read its result.
        """
        return self._within(operation) or _most(self._of_readers(operation)) or UNKNOWN

    @property
    def operations(self) -> list[Operation]:
        """All operations of all computations."""
        return [one for part in self.computations.values() for one in part]

    def kernels(self) -> list[Operation]:
        """Returns the operations that run as kernels. Operations inside the computations that fusions and reductions call are excluded."""
        called = {one.inside for one in self.operations if one.opcode != "call" and one.inside}
        parts = (part for name, part in self.computations.items() if name not in called)
        return [one for part in parts for one in part if one.opcode not in WITHOUT_KERNEL]

    def by_name(self) -> dict[str, Source]:
        """Maps the name of every operation, and the name of its kernel, to the operation's source."""
        found: dict[str, Source] = {}
        for operation in self.operations:
            source = self.source(operation)
            found[operation.name] = source
            found.setdefault(operation.kernel, source)
        return found

    def _within(self, operation: Operation) -> Source | None:
        inside = list(self._inside(operation))
        products = [one.own for one in inside if one.opcode in PRODUCTS]
        return _most(products) or _most([operation.own]) or _most(one.own for one in inside)

    def _inside(self, operation: Operation) -> Iterable[Operation]:
        for one in self.computations.get(operation.inside or "", ()):
            yield one
            yield from self._inside(one)

    def _of_readers(self, operation: Operation) -> Iterable[Source]:
        waiting, seen = [operation.name], set[str]()
        while waiting:
            for one in self._readers[waiting.pop()]:
                if one.name in seen:  # read in several ways, which may be many millions
                    continue
                seen.add(one.name)
                if found := self._within(one):
                    yield found
                else:
                    waiting.append(one.name)

    @cached_property
    def _readers(self) -> dict[str, list[Operation]]:
        """Maps an operation's name to the operations that read its result. A loop or a branch reads the results of its computations."""
        found: dict[str, list[Operation]] = defaultdict(list)
        for operation in self.operations:
            results = [self.computations[region][-1].name for region in operation.regions]
            for name in (*operation.operands, *results):
                found[name].append(operation)
        return found


class Sources:
    """The programs that XLA dumped to a folder. Each is loaded when it is first needed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._program = cache(self._read)

    def of(self, program: str, operation: str) -> Source:
        """Returns the source of an operation or a kernel. `program` is the start of the dump's file name, such as `module_0004.jit_f`, or `ANY`."""
        return self._program(program).get(operation, UNKNOWN)

    def _read(self, program: str) -> dict[str, Source]:
        found = self._folder.glob(f"{program}*.*after_optimizations.txt")
        largest_last = sorted(found, key=lambda path: path.stat().st_size)
        return {
            name: source for path in largest_last for name, source in read(path.read_text()).by_name().items()
        }


def read(text: str) -> Program:
    """Parses the text of a program into operations with their sources."""
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
    # XLA may print the parent's number plus 1. In this case, the first frame, which has no parent, appears to be its own parent.
    after = 1 if frames.get("1", ("", ""))[1] == "1" else 0

    @cache
    def ours(frame: str) -> str | None:
        """Returns the innermost function of this library on a stack, skipping precision.py, because it does not show what a product is for."""
        while frame in frames:
            location, parent = frames[frame]
            file, function = locations[location]
            path = Path(names[file][0])
            if PACKAGE in path.parts and path.name != "precision.py":
                return f"{path.name}:{_plain(functions[function][0])}"
            frame = str(int(parent or 0) - after)
        return None

    computations: dict[str, list[Operation]] = {}
    part: list[Operation] = []
    for line in lines:
        if match := _COMPUTATION.match(line):
            part = computations.setdefault(match[1], [])
        elif match := _OPERATION.match(line):
            metadata = _METADATA.search(line)
            said = metadata[1] if metadata else ""
            frame, calls = re.search(r"stack_frame_id=(\d+)", said), _CALLS.search(line)
            own = Source(ours(frame[1]) if frame else None, "transpose(" in said)
            kernel = _KERNEL.search(line) if match[2] == "custom-call" else None
            name = re.sub(r"\W", "_", kernel[1] if kernel else match[1])
            operands = tuple(re.findall(r"%([\w.\-]+)", match[3]))
            regions = tuple(re.findall(r"%([\w.\-]+)", " ".join(_REGIONS.findall(line))))
            inside = calls[1] if calls else None
            part.append(Operation(match[1], match[2], own, inside, regions, operands, name))
    return Program(computations)


def unattributed(text: str) -> tuple[int, int]:
    """Returns the number of kernels without a known function, and the number of all kernels in a program."""
    program = read(text)
    kernels = program.kernels()
    return sum(program.source(one).function is None for one in kernels), len(kernels)


def _most(sources: Iterable[Source]) -> Source | None:
    counted = Counter(source for source in sources if source.function)
    return counted.most_common(1)[0][0] if counted else None


def _matched(pattern: re.Pattern[str], lines: list[str]) -> dict[str, tuple[str, ...]]:
    matches = (pattern.match(line) for line in lines)
    return {match.group(1): match.groups()[1:] for match in matches if match}


def _plain(function: str) -> str:
    """Removes the local part of a function's name: `Block._project.<locals>.<genexpr>` -> `Block._project`."""
    return function.split(".<locals>")[0]


def main() -> None:
    """Compiles the programs of a configuration, and prints a table of their kernels."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], prog="python -m benchmarks.hlo_sources"
    )
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--topology", required=True, help="as for `dapo-jax plan`, such as h100:1 or v6e-8")
    parser.add_argument("--only", nargs="+", help="programs whose names begin with these words")
    arguments = parser.parse_args()
    from dapo_jax.config import load_config
    from dapo_jax.plan.decoder import decoder_of
    from dapo_jax.plan.programs import Programs
    from dapo_jax.plan.topologies import devices_of, parse
    from dapo_jax.plan.workload import Assumptions, workload_of
    from dapo_jax.run.sources import lora_of

    config, made = load_config(arguments.config, arguments.overrides), parse(arguments.topology)
    devices, host = devices_of(made), devices_of(made.one_host) if made.hosts > 1 else None
    decoder = replace(decoder_of(config.model), lora=lora_of(config.lora))
    work = workload_of(config, Assumptions())
    programs = Programs(config, decoder, work, devices, host, made.chip.device_hbm_bytes)
    rows = []
    for name, lower in programs.lowered().items():
        if name.startswith(tuple(arguments.only or ("",))):
            unknown, all_of_them = unattributed(lower().compile().as_text())
            rows.append([name, str(all_of_them), str(unknown), f"{unknown / max(1, all_of_them):.1%}"])
            print(name, flush=True)
    print("\n" + report.table(["program", "kernels", "of an unknown function", "share"], rows))


if __name__ == "__main__":
    main()
