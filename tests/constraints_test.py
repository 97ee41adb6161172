"""Constraints: the versions that the tests ran with, and the hashes of their files."""

import re
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "constraints"
PINS = sorted(path for path in FOLDER.glob("py*.txt") if ".hashes." not in path.name)


def pins_of(path):
    """Name, as indices compare names, and version of each line that is no comment."""
    lines = [line.split()[0] for line in path.read_text().splitlines() if not line.startswith("#")]
    return {re.sub(r"[-_.]+", "-", line).lower() for line in lines}


def test_there_are_pins_of_each_python_that_the_checks_run_on():
    assert [path.name for path in PINS] == ["py311.txt", "py312.txt", "py313.txt"]


@pytest.mark.parametrize("pins", PINS, ids=lambda path: path.stem)
def test_every_pin_has_its_hash(pins):
    """After a change of the pins: `python3.11 constraints/hash.py`, and so for each Python."""
    hashes = pins.with_suffix(".hashes.txt")
    assert pins_of(hashes) == pins_of(pins)
    lines = [line for line in hashes.read_text().splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"\S+==\S+ --hash=sha256:[0-9a-f]{64}", line) for line in lines)
