"""The wheel, alone in a fresh environment: what a user has who never saw the checkout."""

import json
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
SHIPPED = ("README.md", "LICENSE", "MANIFEST.in", "pyproject.toml", "setup.py")


def run(*command, cwd):
    done = subprocess.run([*map(str, command)], cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def copy_checkout(source):
    """Copies the part of the checkout that builds the package."""
    for folder in ("dapo_jax", "configs"):
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in SHIPPED:
        shutil.copy(ROOT / name, source / name)


def environment(place):
    """Makes an environment without this package, and returns its Python and its folder of packages."""
    venv.create(place, with_pip=True)
    python = place / "bin" / "python"
    where = "import sysconfig; print(sysconfig.get_path('purelib'))"
    return python, Path(run(python, "-c", where, cwd=place).strip())


def add_dependencies(packages):
    """Adds the packages of the environment that runs the tests, except for this one.

    A folder that a .pth file names is searched after `packages`. Python does not read the .pth files in it, so an editable checkout stays hidden.
    """
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"))


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The scripts' folder of an environment with the wheel, which was made from the source distribution."""
    place = tmp_path_factory.mktemp("wheel")
    source = place / "source"
    copy_checkout(source)
    build = "from setuptools import build_meta; print(build_meta.build_sdist('..'))"
    sdist = run(sys.executable, "-c", build, cwd=source).splitlines()[-1]
    shutil.unpack_archive(place / sdist, place)
    unpacked = place / sdist.removesuffix(".tar.gz")
    build = "from setuptools import build_meta; print(build_meta.build_wheel('..'))"
    wheel = run(sys.executable, "-c", build, cwd=unpacked).splitlines()[-1]
    python, packages = environment(place / "venv")
    run(python, "-m", "pip", "install", "--no-index", "--no-deps", place / wheel, cwd=place)
    add_dependencies(packages)
    assert run(python, "-c", "import dapo_jax; print(dapo_jax.__file__)", cwd=place).startswith(str(place))
    return python.parent


def test_it_trains_two_steps_of_the_quickstart_by_name(installed, tmp_path):
    printed = run(
        installed / "dapo-jax",
        "train",
        "quickstart",
        "steps=2",
        "eval.every_steps=0",
        "run_dir=mine",
        cwd=tmp_path,
    )
    assert "mine" in printed
    lines = (tmp_path / "mine" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[-1])["step"] == 2
    assert (tmp_path / "mine" / "model" / "model.safetensors").is_file()


def test_it_has_every_configuration_of_the_checkout(installed, tmp_path):
    names = "from dapo_jax.config.reading import shipped_configs; print(*shipped_configs())"
    there = sorted((ROOT / "configs").rglob("*.yaml"))
    found = run(installed / "python", "-c", names, cwd=tmp_path).split()
    assert found == sorted(path.relative_to(ROOT / "configs").with_suffix("").as_posix() for path in there)
    assert run(installed / "dapo-jax", "config", "study/dapo", cwd=tmp_path) == run(
        Path(sys.executable).with_name("dapo-jax"), "config", ROOT / "configs/study/dapo.yaml", cwd=tmp_path
    )


@pytest.fixture(scope="module")
def next_to_a_clone(tmp_path_factory):
    """A folder with the clone `dapo_jax`, and the Python of an environment that has it by the two steps of `pip install -e`."""
    place = tmp_path_factory.mktemp("editable")
    copy_checkout(place / "dapo_jax")
    build = "from setuptools import build_meta; print(build_meta.build_editable('..'))"
    wheel = run(sys.executable, "-c", build, cwd=place / "dapo_jax").splitlines()[-1]
    python, packages = environment(place / "venv")
    run(python, "-m", "pip", "install", "--no-index", "--no-deps", place / wheel, cwd=place)
    add_dependencies(packages)
    (place / "mine.py").write_text(
        "from dapo_jax import dapo_loss, token_weights\nprint(dapo_loss.__name__)\n"
    )
    return place, python


def test_what_runs_next_to_a_clone_imports_the_library_and_not_the_clones_folder(next_to_a_clone):
    """Python searches the script's folder first, where `dapo_jax` is the clone."""
    place, python = next_to_a_clone
    assert run(python, "mine.py", cwd=place) == "dapo_loss\n"
    assert "quickstart" in run(python, "-m", "dapo_jax.cli", "config", "quickstart", cwd=place)
