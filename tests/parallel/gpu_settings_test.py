"""Settings of JAX and XLA on NVIDIA GPUs: they apply only where a GPU is, and never replace the user's."""

import os
import subprocess
import sys

import pytest

from dapo_jax.cli import main
from dapo_jax.doctor.machine import settings
from dapo_jax.parallel import gpu_settings

VARIABLES = ("JAX_PLATFORMS", "XLA_FLAGS", "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
MINE = " ".join(f"--{name}={value}" for name, value in gpu_settings.FLAGS.items())


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """A machine with a device file and a plugin, whose environment sets nothing."""
    (tmp_path / "nvidia0").touch()
    monkeypatch.setattr(gpu_settings, "_DEVICES", tmp_path)
    monkeypatch.setattr(gpu_settings, "_PLUGINS", ("json",))
    for name in (*VARIABLES, "LIBTPU_INIT_ARGS"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def applied():
    gpu_settings.apply()
    return {name: os.environ[name] for name in VARIABLES if name in os.environ}


def test_a_gpu_gets_all_settings_and_a_second_call_adds_nothing(gpu):
    assert applied() == applied() == {"XLA_FLAGS": MINE, "XLA_CLIENT_MEM_FRACTION": "0.9"}


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({"XLA_FLAGS": "--xla_dump_to=dumps"}, {"XLA_FLAGS": f"--xla_dump_to=dumps {MINE}"}),
        (
            {"XLA_FLAGS": "--xla_gpu_exclude_nondeterministic_ops=false"},
            {"XLA_FLAGS": f"--xla_gpu_exclude_nondeterministic_ops=false {MINE.split()[1]}"},
        ),
        ({"XLA_FLAGS": "flags.txt"}, {"XLA_FLAGS": "flags.txt"}),
        ({"XLA_CLIENT_MEM_FRACTION": "0.5"}, {"XLA_CLIENT_MEM_FRACTION": "0.5"}),
    ],
)
def test_the_user_s_values_stay(gpu, given, found):
    for name, value in given.items():
        gpu.setenv(name, value)
    assert applied() == {"XLA_FLAGS": MINE, "XLA_CLIENT_MEM_FRACTION": "0.9"} | found


def test_the_former_name_of_the_memory_fraction_stays_alone(gpu):
    """jaxlib refuses both names together."""
    gpu.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.7")
    assert applied() == {"XLA_FLAGS": MINE, "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.7"}


def test_without_a_gpu_or_its_plugin_nothing_is_set(gpu, tmp_path):
    gpu.setattr(gpu_settings, "_PLUGINS", ("no_such_plugin",))
    assert applied() == {}
    gpu.setattr(gpu_settings, "_PLUGINS", ("json",))
    gpu.setenv("JAX_PLATFORMS", "cpu")
    assert applied() == {"JAX_PLATFORMS": "cpu"}
    gpu.setenv("JAX_PLATFORMS", "cuda,cpu")
    assert applied().keys() == {"JAX_PLATFORMS", "XLA_FLAGS", "XLA_CLIENT_MEM_FRACTION"}
    (tmp_path / "nvidia0").unlink()
    gpu.delenv("XLA_FLAGS")
    assert "XLA_FLAGS" not in applied()


def test_a_gpu_that_is_not_used_is_reported_with_the_remedy(gpu, tmp_path):
    assert "JAX_PLATFORMS=cuda" in gpu_settings.unused()  # JAX skips a GPU that it cannot initialize
    gpu.setenv("JAX_PLATFORMS", "cpu")
    assert "JAX_PLATFORMS=cpu" in gpu_settings.unused()
    gpu.setattr(gpu_settings, "_PLUGINS", ("no_such_plugin",))
    assert "[cuda]" in gpu_settings.unused()
    (tmp_path / "nvidia0").unlink()
    assert gpu_settings.unused() == ""
    gpu.setenv("JAX_PLATFORMS", "cuda,cpu")
    assert "[cuda]" in gpu_settings.unused()


def test_a_command_that_uses_a_model_applies_them_and_the_doctor_shows_them(gpu, capsys):
    assert settings().message == "the defaults of JAX"
    assert main(["eval", "no/such/model", "run_dir=x"]) == 2
    assert settings().message == f"XLA_FLAGS={MINE}, XLA_CLIENT_MEM_FRACTION=0.9"


def python(flags):
    return subprocess.run(
        [sys.executable, "-c", "import jax; jax.devices()"],
        env={"PATH": "/usr/bin:/bin", "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


def test_xla_accepts_the_flags():
    """XLA ends a process with an unknown flag, also for a flag of GPUs on a machine without one."""
    assert python(MINE).returncode == 0
    done = python(f"{MINE} --xla_gpu_no_such_flag=true")
    assert done.returncode != 0
    assert "Unknown flag in XLA_FLAGS: --xla_gpu_no_such_flag" in done.stderr
