"""Creates the environments of the other systems: `python -m benchmarks.make_peers [FOLDER] [--only tunix trl vllm]`.

Each system gets its own virtual environment with the exact versions in `requirements/`. A complete environment is left
unchanged. Run this script with Python 3.11 or 3.12, because the other systems require one of these versions.
"""

import argparse
import shutil
import subprocess
import venv
from pathlib import Path

from benchmarks.systems import DEFAULT_PEERS

REQUIREMENTS = Path(__file__).parent / "requirements"
CPU_WHEELS = "https://download.pytorch.org/whl/cpu"
"""Package index with torch for CPU. On Linux, PyPI has torch for CUDA instead."""
IMPORTS = {"tunix": "import tunix", "trl": "import torch, trl", "vllm": "import vllm"}


def main() -> None:
    """Creates the requested environments, and checks that their systems can be imported."""
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m benchmarks.make_peers")
    parser.add_argument("folder", type=Path, nargs="?", default=DEFAULT_PEERS)
    parser.add_argument("--only", nargs="+", choices=tuple(IMPORTS), default=list(IMPORTS))
    parser.add_argument(
        "--torch-index", default=CPU_WHEELS, help="index with torch for CPU; '' for pip's default only"
    )
    arguments = parser.parse_args()
    for name in arguments.only:
        make(arguments.folder.expanduser() / name, name, arguments.torch_index)


def make(folder: Path, name: str, torch_index: str) -> None:
    """Creates one environment, unless its record shows that it already contains these requirements."""
    wanted = (REQUIREMENTS / f"{name}.txt").read_text()
    record = folder / "requirements.txt"
    if record.exists() and record.read_text() == wanted:
        print(f"{folder}: already exists")
        return
    print(f"{folder}: installing", flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    more = ["--extra-index-url", torch_index] if torch_index and "+cpu" in wanted else []
    install = [python, "-m", "pip", "install", "--quiet", "--no-deps", *more]
    subprocess.run([*install, "--requirement", REQUIREMENTS / f"{name}.txt"], check=True)
    subprocess.run([python, "-c", IMPORTS[name]], check=True, stdout=subprocess.DEVNULL)
    record.write_text(wanted)


if __name__ == "__main__":
    main()
