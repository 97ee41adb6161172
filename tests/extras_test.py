"""What an error says to install can be typed where the package is."""

import re
from pathlib import Path

import pytest

from dapo_jax import extras
from dapo_jax.extras import how_to_install

ROOT = Path(__file__).resolve().parents[1]


def test_a_checkout_is_installed_from_its_folder(monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    assert how_to_install("gcs") == "pip install -e '.[gcs]'"
    monkeypatch.chdir(tmp_path)
    assert how_to_install("gcs") == f"pip install -e '.[gcs]' in {ROOT}"


def test_a_wheel_has_no_checkout(monkeypatch, tmp_path):
    monkeypatch.setattr(extras, "__file__", str(tmp_path / "site-packages" / "dapo_jax" / "extras.py"))
    assert how_to_install("gcs") == "pip install 'WHEEL[gcs]', with the wheel's path for WHEEL"


@pytest.mark.parametrize(
    "path",
    [*sorted((ROOT / "dapo_jax").rglob("*.py")), *sorted(ROOT.glob("docs/*.md"))],
    ids=lambda path: path.name,
)
def test_nobody_is_told_to_install_from_an_index_what_is_on_none(path):
    assert not re.search(r"pip install '?dapo_jax", path.read_text())
