"""Checks of the machine."""

import jax
import pytest

from dapo_jax.config import ConfigError, load_config
from dapo_jax.doctor import machine
from dapo_jax.doctor.resources import memory
from dapo_jax.doctor.subject import STAND_IN, Subject
from dapo_jax.parallel import gpu_settings
from dapo_jax.parallel.mesh import Absent

GIB = 2**30


def test_versions_are_listed_and_missing_packages_named():
    found, _, missing = machine.versions().message.partition("; not installed: ")
    assert f"jax {jax.__version__}" in found
    assert all((f" {package} " in found) != (package in missing.split(", ")) for package in machine.PACKAGES)


def test_a_cache_that_cannot_be_written_to_is_a_failure(tmp_path):
    """A file cannot contain a folder, even for root."""
    (tmp_path / "file").write_text("")

    def checked(folder):
        before = jax.config.jax_compilation_cache_dir
        try:
            jax.config.update("jax_compilation_cache_dir", folder)
            return machine.compilation_cache(Subject(STAND_IN))
        finally:
            jax.config.update("jax_compilation_cache_dir", before)

    with pytest.raises(ConfigError, match=f"JAX_COMPILATION_CACHE_DIR={tmp_path}/file/xla"):
        checked(str(tmp_path / "file" / "xla"))
    assert checked("").state == "ok"


def test_an_unused_plugin_is_a_warning_with_the_reason(monkeypatch):
    monkeypatch.setattr(machine, "_PLUGINS", {"json": "cuda"})  # an installed package
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    found = machine.devices()
    assert found.state == "warning"
    assert "JAX_PLATFORMS=cpu keeps JAX from using json" in found.message
    monkeypatch.delenv("JAX_PLATFORMS")
    assert "JAX_PLATFORMS=cuda,cpu" in machine.devices().remedy


def test_gpus_are_reported_with_the_topology_to_plan_for(monkeypatch):
    """Without a limit, as with XLA_PYTHON_CLIENT_ALLOCATOR=platform, the memory of a known GPU is used."""
    gpus = [Absent(at, 0, "gpu", "NVIDIA H100 80GB HBM3") for at in range(4)]
    monkeypatch.setattr(jax, "devices", lambda: gpus)
    monkeypatch.setattr(jax, "local_device_count", lambda: len(gpus))
    assert machine.devices().message == "4 x NVIDIA H100 80GB HBM3 (`dapo-jax plan --topology h100:4`)"
    found = memory(Subject(load_config("quickstart")))
    assert f"of {71.19 * 0.95:.1f} GiB on a device" in found.message


def test_a_driver_without_a_plugin_is_a_warning(monkeypatch, tmp_path):
    (tmp_path / "nvidiactl").touch()
    monkeypatch.setattr(machine, "_PLUGINS", {})
    monkeypatch.setattr(gpu_settings, "_PLUGINS", ("no_such_plugin",))
    monkeypatch.setattr(gpu_settings, "_DEVICES", tmp_path)
    found = machine.devices()
    assert (found.state, found.remedy) == ("warning", "pip install -e '.[cuda]'")
    (tmp_path / "nvidiactl").unlink()
    assert machine.devices().state == "ok"


def test_cached_files_of_a_container_are_available_memory(monkeypatch, tmp_path):
    """Of 8 GiB, 7.5 are used. 4 + 2 GiB are cached files, and 0.5 GiB shared memory (part of `file`), which cannot be dropped: 8 - 7.5 + 6 = 6.5."""
    limit, used = 8 * GIB, 7 * GIB + GIB // 2
    (tmp_path / "meminfo").write_text("MemTotal:       67108864 kB\nMemAvailable:   33554432 kB\n")
    (tmp_path / "memory.current").write_text(f"{used}\n")
    stat = {
        "anon": GIB,
        "file": 6 * GIB + GIB // 2,
        "shmem": GIB // 2,
        "inactive_file": 4 * GIB,
        "active_file": 2 * GIB,
    }
    (tmp_path / "memory.stat").write_text("".join(f"{kind} {size}\n" for kind, size in stat.items()))
    monkeypatch.setattr(machine, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(machine, "_CGROUP", tmp_path)
    assert machine.host_bytes()[1] == 32 * GIB  # no limit, so MemAvailable
    (tmp_path / "memory.max").write_text("max\n")
    assert machine.host_bytes()[1] == 32 * GIB
    (tmp_path / "memory.max").write_text(f"{limit}\n")
    assert machine.host_bytes()[1] == 6 * GIB + GIB // 2


def test_little_memory_is_a_warning(monkeypatch):
    total, available = machine.host_bytes()
    assert 0 < available <= total
    monkeypatch.setattr(machine, "host_bytes", lambda: (16 * GIB, GIB))
    found = machine.host_memory()
    assert (found.state, found.message) == ("warning", "1.0 GiB available of 16.0 GiB")
