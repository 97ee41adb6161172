"""The site builds without a warning and without the network, and no link in it is broken."""

import os
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from tests.docs.blocks import ROOT

pytest.importorskip("sphinx", reason="the site needs the extra `docs`")

# Slow: builds the whole site. tests/readme_test.py finds the files and sections of links, tests/docs/docstrings_test.py translates
# docstrings, and tests/docs/api_test.py lists the names of the pages.
pytestmark = pytest.mark.slow


BUILD = """
import socket, sys

def refuse(*address, **more):
    raise OSError(f"the site asked the network: {address}")

socket.socket.connect = socket.getaddrinfo = refuse
from sphinx.cmd.build import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Builds the site like `sphinx-build -W docs SITE`, without access to the network."""
    folder = tmp_path_factory.mktemp("site")
    words = ["-W", "--keep-going", "-q", "-d", folder / "doctrees", ROOT / "docs", folder / "html"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", BUILD, *map(str, words)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return folder / "html"


class Page(HTMLParser):
    """The anchors of a page, and its links."""

    def __init__(self, path):
        super().__init__()
        self.places, self.links, self.fetched = set(), [], []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self.places |= {given[name] for name in ("id", "name") if given.get(name)}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        if tag in ("script", "link", "img") and (given.get("src") or given.get("href")):
            self.fetched.append(given.get("src") or given["href"])


@pytest.fixture(scope="module")
def pages(site):
    return {path: Page(path) for path in sorted(site.rglob("*.html"))}


def test_every_link_inside_the_site_leads_to_a_place_that_exists(site, pages):
    broken = []
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = path if not parts.path else Path(path.parent, unquote(parts.path)).resolve()
            known = pages[target].places if target in pages else set()
            if not target.exists() or (
                parts.fragment and target in pages and unquote(parts.fragment) not in known
            ):
                broken.append(f"{path.relative_to(site)}: {link}")
    assert not broken, "\n".join(broken)


def test_a_page_fetches_nothing_from_elsewhere(pages):
    outside = {link for page in pages.values() for link in page.fetched if urlsplit(link).netloc}
    assert not outside
