"""Combines the data and the files in `assets` into one HTML page.

Prompts and responses are untrusted, so they never become markup. They are JSON or base64 in script elements that are not executed, and
the page's own script puts them into text nodes. The content security policy allows only the page's own script and style, by their
hashes. It allows no connections, except that a page served with `--watch` may connect to its own server.
"""

import base64
import hashlib
import html
import json
import re
from collections.abc import Sequence
from importlib import resources
from typing import Any

from dapo_jax.report.chunks import Laid

STYLES = ("style.css", "charts.css", "rollouts.css", "problems.css", "timeline.css")
SCRIPTS = (
    "base.js", "scales.js", "chart.js", "store.js", "heat.js", "curves.js", "filters.js", "list.js", "tokens.js", "strip.js",
    "detail.js", "browser.js", "problems.js", "timeline.js", "configuration.js", "main.js",
)  # fmt: skip
"""The page's scripts, in the order in which they are concatenated into one function."""
WATCHING = "watch.js"
"""The only script that makes requests. A page that is written to a file does not contain it."""


def page_of(title: str, data: dict[str, Any], packed: dict[str, bytes], *, watching: bool = False) -> str:
    """Returns the page as HTML. Its scripts load `data` at startup. All numbers in `data` must be finite. `packed` is the result of `packed_of`.

    If `watching` is set, the page requests new data, and chunks that are not in `packed`, from its server.
    """
    style = "\n".join(_asset(name) for name in STYLES)
    scripts = (*SCRIPTS[:-1], WATCHING, SCRIPTS[-1]) if watching else SCRIPTS
    script = "(() => {\n'use strict';\n" + "\n".join(_asset(name) for name in scripts) + "\n})();"
    connect = "connect-src 'self'; " if watching else ""
    inactive = [f'<script type="application/json" id="data">{inert(data)}</script>\n']
    for name, content in packed.items():
        text = base64.b64encode(content).decode("ascii")
        inactive.append(f'<script type="application/gzip" id="{name}">{text}</script>\n')
    contents = {
        "policy": f"default-src 'none'; {connect}script-src {_hash(script)}; style-src {_hash(style)}; base-uri 'none'; form-action 'none'",
        "title": html.escape(title),
        "style": style,
        "script": script,
        "data": "".join(inactive),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda name: contents[name[1]], _asset("page.html"))


def inert(value: Any) -> str:
    """Returns the value as JSON for a script element. It contains no characters that could end the element or begin a comment.

    >>> inert("</script><!-- & \\u2028")
    '"\\\\u003c/script\\\\u003e\\\\u003c!-- \\\\u0026 \\\\u2028"'
    """
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))  # escapes all non-ASCII characters
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def packed_of(runs: Sequence[tuple[Laid, Laid]]) -> dict[str, bytes]:
    """Returns the compressed rollouts and evaluations of all runs. The keys are the element ids that the page's scripts use."""
    packed: dict[str, bytes] = {}
    for number, (rollouts, evaluations) in enumerate(runs):
        packed |= {f"index-{number}": rollouts.index, f"eval-index-{number}": evaluations.index}
        packed |= {f"chunk-{number}-{index}": chunk for index, chunk in enumerate(rollouts.chunks)}
        packed |= {f"eval-{number}-{index}": chunk for index, chunk in enumerate(evaluations.chunks)}
    return packed


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode("utf-8")).digest()
    return f"'sha256-{base64.b64encode(digest).decode('ascii')}'"


def _asset(name: str) -> str:
    return (resources.files("dapo_jax.report") / "assets" / name).read_text(encoding="utf-8")
