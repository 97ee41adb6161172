"""Every public name has its place in the API pages."""

import importlib
import inspect
import re

import pytest

from tests.docs.blocks import ROOT

LISTED = {
    name
    for page in (ROOT / "docs" / "api").glob("*.md")
    for name in re.findall(r"^\.\. auto\w+:: ([\w.]+)$", page.read_text(), re.MULTILINE)
}


def found(name):
    module, _, last = name.rpartition(".")
    return getattr(importlib.import_module(module), last)


@pytest.mark.parametrize(
    "module", ["dapo_jax", "dapo_jax.rewards", "dapo_jax.run", "dapo_jax.trackers", "dapo_jax.config"]
)
def test_every_name_that_a_package_offers_is_listed(module):
    """Dataclasses of a configuration have their own page, so they are not required here."""
    there = {id(found(name)) for name in LISTED}
    package = importlib.import_module(module)
    names = getattr(package, "__all__", [name for name in vars(package) if not name.startswith("_")])
    offered = {name: getattr(package, name) for name in names if not name.endswith("Config")}
    missing = {
        name for name, value in offered.items() if not inspect.ismodule(value) and id(value) not in there
    }
    assert not missing


@pytest.mark.parametrize(
    "module",
    [
        "dapo.losses",
        "dapo.advantages",
        "dapo.corrections",
        "dapo.logprobs",
        "dapo.metrics",
        "dapo.dynamic_sampling",
        "rollout.collector",
        "rollout.virtual_clock",
        "evaluation",
        "dapo.rollouts",
        "sampling.interface",
    ],
)
def test_every_function_and_class_of_a_module_is_listed(module):
    there = {id(found(name)) for name in LISTED}
    imported = importlib.import_module(f"dapo_jax.{module}")
    public = {
        name: thing
        for name, thing in vars(imported).items()
        if not name.startswith("_")
        and (inspect.isclass(thing) or inspect.isfunction(thing))
        and thing.__module__ == imported.__name__
    }
    assert public
    assert not {name for name, thing in public.items() if id(thing) not in there}
