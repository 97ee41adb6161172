"""Formats the measurements of interleaved rounds: medians with their range, and ratios for each round."""

import json
import os
import platform
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def spread(values: Sequence[float], digits: int = 0) -> str:
    """Formats values as `median (lowest-highest)`."""
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"{middle:.{digits}f} ({low:.{digits}f}-{high:.{digits}f})"


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """Returns ours divided by theirs for each round, so that a temporary slowdown of the machine affects both."""
    return [a / b for a, b in zip(ours, theirs, strict=True)]


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a Markdown table with aligned columns."""
    lines = [list(header), *map(list, rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    text = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |"
        for line in lines
    ]
    text.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(text)


def machine() -> dict[str, Any]:
    """Returns the processor's name, the number of CPUs, the memory and the current load."""
    info = Path("/proc/cpuinfo")
    names = [line.partition(":")[2].strip() for line in info.read_text().splitlines() if "model name" in line]
    return {
        "processor": names[0] if names else platform.processor(),
        "cpus": os.cpu_count(),
        "memory_gb": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9,
        "load": os.getloadavg()[0],
    }


def write(path: Path, results: dict[str, Any]) -> None:
    """Writes the results to a JSON file, with the time and a description of the machine."""
    path.parent.mkdir(parents=True, exist_ok=True)
    stamped = {"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "machine": machine(), **results}
    path.write_text(json.dumps(stamped, indent=1) + "\n")
    print(f"\nwritten to {path}")


def with_table(text: str, name: str, made: str) -> str:
    """Inserts a table between the comments that mark its place in a page, or at the end of the page.

    >>> with_table("Rows:\\n<!-- ladder -->\\nold\\n<!-- end -->\\n", "ladder", "new")
    'Rows:\\n<!-- ladder -->\\nnew\\n<!-- end -->\\n'
    >>> with_table("<!-- ladder -->\\n<!-- end -->\\nText\\n", "ladder", "new")
    '<!-- ladder -->\\nnew\\n<!-- end -->\\nText\\n'
    """
    begin, end = f"<!-- {name} -->\n", "\n<!-- end -->\n"
    if begin not in text:
        return f"{text}{begin}{made}{end}"
    before, _, rest = text.partition(begin)
    return f"{before}{begin}{made}{end}{rest.partition(end.lstrip())[2]}"
