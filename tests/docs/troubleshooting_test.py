"""The messages in the headings of the troubleshooting page are in the library."""

import re

import pytest

from tests.docs.blocks import ROOT

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
MESSAGES = [
    code for line in PAGE.splitlines() if line.startswith("### ") for code in re.findall(r"`([^`]+)`", line)
]


@pytest.fixture(scope="module")
def source():
    """Returns the source of the library, with strings that continue on the next line joined."""
    text = "\n".join(path.read_text() for path in (ROOT / "dapo_jax").rglob("*.py"))
    return re.sub(r'"\s*\n\s*f?"', "", text)


@pytest.mark.parametrize("message", MESSAGES)
def test_a_message_on_the_page_is_in_the_library(message, source):
    parts = [part.strip() for part in message.split("...")]
    assert all(part in source for part in parts), [part for part in parts if part not in source]
