"""Constraints: the versions that the tests ran with, and the hashes of their files."""

import importlib.util
import re
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "constraints"
PINS = sorted(path for path in FOLDER.glob("py*.txt") if ".hashes." not in path.name)


def hash_script():
    spec = importlib.util.spec_from_file_location("constraints_hash", FOLDER / "hash.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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


def test_the_checks_install_only_files_with_these_hashes():
    run = (FOLDER.parent / ".ci" / "run").read_text()
    assert "--no-deps --require-hashes -r" in run
    assert "install --no-deps -e ." in run


def package(url, digest="0" * 64):
    hashes = {} if digest is None else {"sha256": digest}
    return {
        "metadata": {"name": "Some_Package", "version": "1.0"},
        "download_info": {"url": url, "archive_info": {"hashes": hashes}},
    }


def test_a_file_with_hashes_names_each_package_once():
    report = {"install": [package("https://index.example/some_package-1.0-py3-none-any.whl")]}
    *header, line = hash_script().hashed(report, "py311.txt").splitlines()
    assert line == f"Some_Package==1.0 --hash=sha256:{'0' * 64}"
    assert all(each.startswith("# ") for each in header)


@pytest.mark.parametrize(
    "found",
    [package("https://index.example/a.whl", None), package("file:///wheels/a.whl")],
    ids=["no hash", "local"],
)
def test_a_file_without_an_index_is_refused(found):
    with pytest.raises(ValueError, match=r"Some_Package==1\.0 is from .*: a file of an index"):
        hash_script().hashed({"install": [found]}, "py311.txt")
