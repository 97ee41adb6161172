"""The code on the page about new models is the code of the library and of the toy kind."""

from tests.docs.blocks import ROOT, blocks
from tests.prose import SOURCES

PAGE = ROOT / "docs" / "new_model.md"


def test_the_code_of_the_page_exists():
    files = [*SOURCES, ROOT / "tests" / "run" / "toy_kind_test.py"]
    known = {line.strip() for path in files for line in path.read_text().splitlines()}
    shown = [line.removeprefix("+").strip() for block in blocks(PAGE) for line in block.text.splitlines()]
    assert len(shown) > 20
    missing = [line for line in shown if line and line not in known and not (ROOT / line).is_file()]
    assert not missing, missing
