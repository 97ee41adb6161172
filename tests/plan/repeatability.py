"""Finds the operations in compiled programs whose results may differ between two equal runs on a GPU."""

import re
from collections.abc import Iterator

_FLOATS = ("f16", "bf16", "f32", "f64", "f8")
_SUMS_IN_ANY_ORDER = re.compile(r"__cudnn\$conv\w*Backward|select-and-scatter\(")
"""Gradients of convolutions, and of pooling."""
_CUDNN_BACKWARD = re.compile(r"__cudnn\$fmha\w*Backward")
"""Adds with atomics, unless XLA requires determinism (`gpu_settings.FLAGS`)."""


def not_repeatable(text: str, *, flags: dict[str, str]) -> list[str]:
    """Returns the lines of a compiled program that add in arbitrary order or write to one place several times.

    These are scatters whose indices may be equal, except integer sums, and calls that are known to use atomics. `flags` are the flags
    of XLA that a run sets.
    """
    strict = flags.get("xla_gpu_exclude_nondeterministic_ops") == "true"
    calls = [line for line in text.splitlines() if _SUMS_IN_ANY_ORDER.search(line)]
    calls += [line for line in text.splitlines() if _CUDNN_BACKWARD.search(line) and not strict]
    return calls + list(_scatters(text))


def _scatters(text: str) -> Iterator[str]:
    roots, inside = {}, ""
    for line in text.splitlines():
        if begins := re.match(r"(?:ENTRY )?%([\w.-]+) \(.*\{$", line):
            inside = begins[1]
        elif line.startswith("  ROOT "):
            roots[inside] = line
    for line in text.splitlines():
        found = re.search(r"= \(?(\w+)\[.* scatter\(.*to_apply=%([\w.-]+)", line)
        if found is None or "unique_indices=true" in line:
            continue
        sums = re.search(r" (add|and|or|maximum|minimum)\(", roots[found[2]])
        if found[1].startswith(_FLOATS) or not sums:
            yield line.strip()
