"""Writes `constraints/pyXY.hashes.txt`: the pins of `constraints/pyXY.txt` with the sha256 of the file that pip takes of each.

    python3.12 constraints/hash.py

Run it with each Python after its pins have changed, on Linux x86-64, where `.ci/run` uses them: other systems take other files. It asks the
package index through pip, which reads the files' hashes and downloads none that comes with its metadata.
"""

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent


def hashed(report: Mapping[str, Any], pins: str) -> str:
    """The content of a file with hashes.

    Args:
        report: what `pip install --report` wrote.
        pins: name of the file with the pins, for the header.

    Raises:
        ValueError: a package is from elsewhere than an index, or without its sha256.
    """
    lines = [
        f"# The pins of {pins} and the files of Linux x86-64 that they stand for; made by hash.py.",
        f"# Use: pip install --no-deps --require-hashes -r constraints/{pins.replace('.txt', '.hashes.txt')}",
    ]
    for package in sorted(report["install"], key=lambda package: package["metadata"]["name"].lower()):
        pin = f"{package['metadata']['name']}=={package['metadata']['version']}"
        found = package["download_info"]
        digest = found.get("archive_info", {}).get("hashes", {}).get("sha256")
        if digest is None or not found["url"].startswith("https://"):
            raise ValueError(f"{pin} is from {found['url']}: a file of an index with its sha256 is needed")
        lines.append(f"{pin} --hash=sha256:{digest}")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Hashes the pins of the Python that runs this."""
    pins = FOLDER / "py{}{}.txt".format(*sys.version_info)
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--dry-run",
        "--ignore-installed",
        "--no-deps",
        "--quiet",
    ]
    done = subprocess.run(
        [*command, "--report", "-", "-r", pins], stdout=subprocess.PIPE, text=True, check=True
    )
    written = pins.with_suffix(".hashes.txt")
    content = hashed(json.loads(done.stdout), pins.name)
    written.write_text(content)
    print(f"{written}: {content.count('--hash=')} packages")


if __name__ == "__main__":
    main()
