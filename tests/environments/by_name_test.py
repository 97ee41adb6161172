"""Environments of other libraries, by name."""

import sys

import pytest

from dapo_jax.environments import load_environment


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("skyrl_gim:gsm8k", "the module 'skyrl_gim' fails.*; did you mean skyrl_gym:...?"),
        ("openv:http://127.0.0.1:1", "did you mean openenv:...?"),
        ("Tinker:somewhere:Builder", "did you mean tinker:...?"),
        ("trl", "no environment is named 'trl'.*LIBRARY:NAME"),
        ("tinkr", "did you mean 'tinker'"),
        ("trl:nowhere:Class", "the module 'nowhere' fails"),
        ("tinker:nowhere.py:Builder", "there is no file nowhere.py"),
        ("openenv:nowhere:client", "the module 'nowhere' fails"),
        ("skyrl_gym:nowhere:Class", "the module 'nowhere' fails"),
        ("trl:", "must have the form module:function"),
    ],
)
def test_an_unknown_name_is_reported_with_the_nearest(source, message):
    with pytest.raises(ValueError, match=message):
        load_environment(source)


@pytest.mark.parametrize(
    ("module", "source"), [("openenv.core", "openenv:http://localhost:1"), ("skyrl_gym", "skyrl_gym:gsm8k")]
)
def test_a_missing_package_is_named_with_its_installation(module, source, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    extra = source.partition(":")[0].replace("_", "-")
    with pytest.raises(ValueError, match=rf"{source} needs .*package.*: pip install.*{extra}"):
        load_environment(source)


def test_an_environment_that_exits_while_it_is_made_is_named(tmp_path):
    """An exit with status 0 would end the run as if it were finished."""
    file = tmp_path / "mine.py"
    file.write_text("class Env:\n    def __init__(self):\n        raise SystemExit(0)\n")
    with pytest.raises(ValueError, match=r"mine\.py:Env: .*sys\.exit\(0\)"):
        load_environment(f"{file}:Env")
