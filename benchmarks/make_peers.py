"""Makes the peers' environments: `python -m benchmarks.make_peers [FOLDER] [--only tunix trl vllm]`.

Each gets a virtual environment of its own with the exact versions in `requirements/`. An environment that is there and
whole is left alone. The peers need the Python that runs this to be 3.11 or 3.12.
"""

import argparse
import shutil
import subprocess
import venv
from pathlib import Path

from benchmarks.systems import DEFAULT_PEERS

REQUIREMENTS = Path(__file__).parent / "requirements"
CPU_WHEELS = "https://download.pytorch.org/whl/cpu"
"""Where torch for CPU is (PyPI has the one for CUDA)."""
IMPORTS = {"tunix": "import tunix", "trl": "import torch, trl", "vllm": "import vllm"}


def main() -> None:
    """Makes the environments that are asked for and imports what they are for."""
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m benchmarks.make_peers")
    parser.add_argument("folder", type=Path, nargs="?", default=DEFAULT_PEERS)
    parser.add_argument("--only", nargs="+", choices=tuple(IMPORTS), default=list(IMPORTS))
    parser.add_argument(
        "--torch-index", default=CPU_WHEELS, help="index with torch for CPU; '' to ask only pip's own"
    )
    arguments = parser.parse_args()
    for name in arguments.only:
        make(arguments.folder.expanduser() / name, name, arguments.torch_index)


def make(folder: Path, name: str, torch_index: str) -> None:
    """Makes one environment, unless its record says that it holds these requirements."""
    wanted = (REQUIREMENTS / f"{name}.txt").read_text()
    record = folder / "requirements.txt"
    if record.exists() and record.read_text() == wanted:
        print(f"{folder}: is there")
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
