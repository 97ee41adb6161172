"""Names of TPU slices and of machines with GPUs."""

import sys
from types import SimpleNamespace

import jax
import pytest

from dapo_jax.config import ConfigError
from dapo_jax.plan.chips import CHIPS
from dapo_jax.plan.topologies import devices_of, here, parse


@pytest.mark.parametrize(
    ("name", "full", "chips", "hosts"),
    [
        # The numbers of v4 and v5p count cores, two per chip; 4 chips per host.
        ("v5p-256", "v5p:4x4x8", 128, 32),
        ("v4-8", "v4:2x2x1", 4, 1),
        # The numbers of flat slices count chips; up to 8 chips are on one host.
        ("v5litepod-64", "v5e:8x8", 64, 16),
        ("v5e-8", "v5e:2x4", 8, 1),
        ("v6e-1", "v6e:1x1", 1, 1),
        ("tpu7x:2x2x1", "tpu7x:2x2x1", 4, 1),
        # GPUs: one machine of up to 8, machines of 8, or machines of another size.
        ("h100:1", "h100:1", 1, 1),
        ("l40s:7", "l40s:7", 7, 1),
        ("a100-80gb:64", "a100-80gb:64", 64, 8),
        ("h100x8:64", "h100:64", 64, 8),
        ("h200x4:16", "h200x4:16", 16, 4),
        ("b200x4:4", "b200:4", 4, 1),
    ],
)
def test_known_names_are_parsed(name, full, chips, hosts):
    made = parse(name)
    assert (made.name, made.chips, made.hosts) == (full, chips, hosts)
    assert parse(made.name) == made


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("v6e-7", "v6e-4, v6e:2x2, v6e-8, v6e:2x4"),
        ("v5p:4x4", "v5p-32, v5p:2x2x4"),
        ("v5pod-8", "v5litepod-8"),
        ("h100", "h100:1, h100:2, h100:4, h100:8"),
        ("H100:8", "h100:8"),
        ("a100:8", "a100-80gb:1, a100-80gb:2, a100-80gb:4, a100-80gb:8"),
    ],
)
def test_an_unknown_name_is_answered_with_the_nearest(name, nearest):
    with pytest.raises(ConfigError, match=f"--topology '{name}': no such slice or machine") as error:
        parse(name)
    assert nearest in str(error.value)


@pytest.mark.parametrize(
    ("name", "found", "remedy"),
    [
        ("h100:0", "0 GPUs", "h100:8 or h100x4:16"),
        ("h100x16:32", "machines of 16", "h100:8 or h100x4:16"),
        ("h100:12", "12 GPUs", "h100:8, h100:16, or h100x6:12"),
    ],
)
def test_machines_that_cannot_be_filled_are_answered_with_some_that_can(name, found, remedy):
    with pytest.raises(ConfigError, match=f"--topology '{name}': .*{found}") as error:
        parse(name)
    assert remedy in str(error.value)


@pytest.mark.parametrize(("name", "extra"), [("h100:8", "cuda-plan"), ("v5e:2x2", "tpu")])
def test_a_missing_compiler_is_answered_with_its_extra(name, extra, monkeypatch):
    for module in ("libtpu", "jax_cuda12_plugin", "jax_cuda13_plugin"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=rf"--topology {name} .*\[{extra}\]"):
        devices_of(parse(name))


@pytest.mark.parametrize(
    ("name", "host"),
    [("v6e-64", "v6e:2x2"), ("v5litepod-8", "v5e:2x4"), ("v5p-256", "v5p:2x2x1"), ("h100x4:16", "h100:4")],
)
def test_a_host_is_a_separate_topology(name, host):
    assert parse(name).one_host.name == host
    assert parse(name).one_host.hosts == 1


def test_only_machines_with_gpus_have_a_network():
    assert [parse(name).has_network for name in ("v5p-256", "h100:8", "h100:16", "h100x1:2")] == [
        False,
        False,
        True,
        True,
    ]


def test_a_gpu_has_a_fraction_of_its_memory():
    """0.9 of 79.1 GiB, which is above JAX's default of 0.75 and leaves room for NCCL, cuDNN and the CUDA context."""
    assert CHIPS["h100"].device_hbm_bytes == int(0.9 * 79.1 * 2**30)
    assert f"device_memory_size: {int(79.1 * 2**30)}" in CHIPS["h100"].target


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("NVIDIA H200", "h200:2"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtx6000pro:2"),
        ("NVIDIA H200 MIG 1g.18gb", None),  # an eighth of the card's memory
        ("NVIDIA H200 NVL", None),  # fewer operations per second than the card with SXM
        ("NVIDIA H100 PCIe", None),
        ("TPU v5 lite", None),
    ],
)
def test_only_whole_cards_of_a_known_model_are_recognized(kind, name, monkeypatch):
    monkeypatch.setattr(jax, "devices", lambda: [SimpleNamespace(device_kind=kind)] * 2)
    monkeypatch.setattr(jax, "local_device_count", lambda: 2)
    assert here() == (name and parse(name))
