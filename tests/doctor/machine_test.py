"""Checks of the machine."""

import shutil
from collections import namedtuple
from dataclasses import replace

import jax
import pytest

from dapo_jax.doctor import machine
from dapo_jax.doctor.subject import STAND_IN, Subject

Usage = namedtuple("Usage", "total used free")
GIB = 2**30


def test_versions_and_extras_are_listed():
    versions = machine.versions().message
    assert f"jax {jax.__version__}" in versions
    assert all(f" {package} " in versions for package in machine.PACKAGES)
    assert "not installed" not in versions
    assert all(name in versions for name in machine.EXTRAS)


@pytest.mark.parametrize(
    ("free", "needed", "state"),
    [
        (10 * GIB, 8 * GIB, "ok"),  # 1 GiB is to be left
        (8 * GIB + GIB // 2, 8 * GIB, "warning"),
        (8 * GIB - 1, 8 * GIB, "failed"),
        (GIB // 2, 0, "warning"),
        (2**20, 0, "warning"),
        (2**20 - 1, 0, "failed"),  # metrics and logs are written too
    ],
)
def test_a_disk_needs_room_for_the_run_and_some_to_spare(free, needed, state, monkeypatch, tmp_path):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(2**50, 0, free))
    found = machine.disk(
        {"run_dir": (str(tmp_path / "a" / "b"), needed), "data.data_dir": (str(tmp_path), 0)}
    )
    assert found.state == state
    assert machine.disk({"run_dir": ("gs://bucket/run", 2**60)}).state == "ok", "a bucket takes no disk"
    assert found.message.startswith(f"{machine.gib(free)} free for run_dir, data.data_dir")
    assert ("run_dir or data.data_dir" in found.remedy) == (state != "ok")


def test_a_cache_that_cannot_be_written_to_is_a_failure(tmp_path):
    """A file cannot contain a folder, even for root."""
    (tmp_path / "file").write_text("")

    def checked(folder):
        return machine.compilation_cache(Subject(replace(STAND_IN, compilation_cache=folder)))

    found = checked(str(tmp_path / "file" / "xla"))
    assert found.state == "failed"
    assert "compilation_cache" in found.remedy
    assert checked("").state == "ok"


def test_an_unused_plugin_is_a_warning_with_the_reason(monkeypatch):
    installed = namedtuple("Distribution", "metadata")
    monkeypatch.setattr(machine, "distributions", lambda: [installed({"Name": "jax-cuda12-plugin"})])
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    found = machine.devices()
    assert found.state == "warning"
    assert "JAX_PLATFORMS=cpu keeps JAX from using jax-cuda12-plugin" in found.message
    monkeypatch.delenv("JAX_PLATFORMS")
    assert "JAX_PLATFORMS=cuda,cpu" in machine.devices().remedy


def test_a_driver_without_a_plugin_is_a_warning(monkeypatch, tmp_path):
    monkeypatch.setattr(machine, "distributions", list)
    monkeypatch.setattr(machine, "_NVIDIA", tmp_path)
    assert machine.devices().remedy == "pip install -e '.[cuda]'"
    monkeypatch.setattr(machine, "_NVIDIA", tmp_path / "none")
    assert machine.devices().state == "ok"


def test_little_memory_is_a_warning(monkeypatch):
    total, available = machine.host_bytes()
    assert 0 < available <= total
    monkeypatch.setattr(machine, "host_bytes", lambda: (16 * GIB, GIB))
    found = machine.host_memory()
    assert (found.state, found.message) == ("warning", "1.0 GiB available of 16.0 GiB")
