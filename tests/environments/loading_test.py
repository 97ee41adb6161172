"""Environments of other libraries, by name."""

import pytest

from dapo_jax.environments import load_environment
from dapo_jax.environments.adapters import ADAPTERS


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("skyrl_gim:gsm8k", "cannot import the module 'skyrl_gim'.*; did you mean skyrl_gym:...?"),
        ("openv:http://127.0.0.1:1", "did you mean openenv:...?"),
        ("Tinker:somewhere:Builder", "did you mean tinker:...?"),
        ("trl", "no environment is named 'trl'.*LIBRARY:NAME"),
        ("tinkr", "did you mean 'tinker'"),
        ("trl:nowhere:Class", "cannot import the module 'nowhere'"),
        ("tinker:nowhere.py:Builder", "there is no file nowhere.py"),
        ("openenv:nowhere:client", "cannot import the module 'nowhere'"),
        ("skyrl_gym:nowhere:Class", "cannot import the module 'nowhere'"),
        ("trl:", "names no function"),
    ],
)
def test_what_cannot_be_found_is_named_with_the_nearest(source, message):
    with pytest.raises(ValueError, match=message):
        load_environment(source)


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("def __init__(self): raise SystemExit(0)", r"making the environment calls sys\.exit\(0\)"),
        ("def __init__(self): raise GeneratorExit", "making the environment fails with GeneratorExit"),
        ("episode = property(lambda self: sys.exit(0))", r"`episode` calls sys\.exit\(0\)"),
        ("episode = property(lambda self: 1 / 0)", "`episode` fails with ZeroDivisionError"),
    ],
)
def test_an_environment_that_exits_or_raises_while_it_is_made_is_named(code, said, tmp_path):
    """An exit with status 0 would end the run as if it were done."""
    file = tmp_path / "mine.py"
    file.write_text(f"import sys\nclass Env:\n    {code}\n")
    with pytest.raises(ValueError, match=said):
        load_environment(f"{file}:Env")


def test_the_libraries_have_the_names_that_the_documentation_gives():
    assert sorted(ADAPTERS) == ["openenv", "reasoning_gym", "skyrl_gym", "tinker", "trl"]
