"""Functions, keys, defaults and tests on the page about the paper exist."""

import importlib
import re

import pytest
from _made import keys

from dapo_jax import config
from tests.docs.blocks import ROOT

PAGE = (ROOT / "docs" / "paper.md").read_text()
KEYS = keys.all_keys(config.TrainConfig)


def table(heading):
    rows = [
        line
        for line in PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0].splitlines()
        if line.startswith("|")
    ]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows[2:]]


def code(text):
    return re.findall(r"`([^`]+)`", text)


@pytest.mark.parametrize("row", table("The table"), ids=lambda row: f"{row[0]} {row[1][:20]}")
def test_every_function_of_the_table_exists(row):
    [function] = code(row[2])
    module, _, name = f"dapo_jax.{function}".rpartition(".")
    assert callable(getattr(importlib.import_module(module), name))


@pytest.mark.parametrize(
    "row", [*table("The table"), *table("Hyperparameters")], ids=lambda row: f"{row[0]} {row[1][:20]}"
)
def test_every_key_has_the_default_of_the_table(row):
    named = code(row[-1])
    assert named
    for text in named:
        name, _, default = text.partition("=")
        assert KEYS[name].default == default, name
