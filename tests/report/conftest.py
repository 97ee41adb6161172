"""The browser of this folder's tests."""

import pytest

from tests.report.chromium import chromium


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    with chromium(tmp_path_factory.mktemp("profile")) as started:
        yield started
