"""Names of TPU slices."""

import pytest

from dapo_jax.config import ConfigError
from dapo_jax.plan.topologies import parse


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
    ],
)
def test_known_names_are_parsed(name, full, chips, hosts):
    made = parse(name)
    assert (made.name, made.chips, made.hosts) == (full, chips, hosts)


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("v6e-7", "v6e-4, v6e:2x2, v6e-8, v6e:2x4"),
        ("v5e:3x3", "v5e-8, v5e:2x4"),
        ("v5p:4x4", "v5p-32, v5p:2x2x4"),
        ("v5pod-8", "v5litepod-8"),
        ("h100-8", "v4-8"),
    ],
)
def test_an_unknown_name_is_answered_with_the_nearest(name, nearest):
    with pytest.raises(ConfigError, match="no such slice") as error:
        parse(name)
    assert nearest in str(error.value)


@pytest.mark.parametrize(
    ("name", "host"), [("v6e-64", "v6e:2x2"), ("v5litepod-8", "v5e:2x4"), ("v5p-256", "v5p:2x2x1")]
)
def test_a_host_is_a_separate_slice(name, host):
    assert parse(name).one_host.name == host
    assert parse(name).one_host.hosts == 1
