"""Similar names, and the command that installs an extra."""

import re
from pathlib import Path

from dapo_jax import hints
from dapo_jax.hints import how_to_install, nearest

ROOT = Path(__file__).resolve().parents[1]


def test_a_word_is_matched_in_any_case_or_not_at_all():
    assert nearest("BFLOAT", ("float32", "bfloat16")) == ["bfloat16"]
    assert nearest("bf16", ("FLOAT32", "BFloat16")) == ["BFloat16"]
    assert nearest("xyz", ("float32", "bfloat16")) == []


def test_the_best_comes_first_and_no_more_than_asked_for():
    assert nearest("xyz", ("float32", "bfloat16"), least=0.0) != []
    assert nearest("math", ("maths", "moth", "path", "gsm8k"), count=2) == ["maths", "path"]


def test_a_checkout_is_installed_from_its_folder(monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    assert how_to_install("gcs") == "pip install -e '.[gcs]'"
    monkeypatch.chdir(tmp_path)
    assert how_to_install("gcs") == f"pip install -e '.[gcs]' in {ROOT}"


def test_a_wheel_has_no_checkout(monkeypatch, tmp_path):
    monkeypatch.setattr(hints, "__file__", str(tmp_path / "site-packages" / "dapo_jax" / "hints.py"))
    assert how_to_install("gcs") == "pip install 'WHEEL[gcs]', where WHEEL is the path of the wheel"


def test_no_message_installs_the_package_from_an_index():
    for path in (*(ROOT / "dapo_jax").rglob("*.py"), *ROOT.glob("docs/*.md")):
        assert not re.search(r"pip install '?dapo_jax", path.read_text()), path
