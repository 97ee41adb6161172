"""The page of algorithms has each name, and formulas that browsers can show."""

import re

import pytest
from _made import algorithms
from _made.formulas import plain
from docutils.utils.math import latex2mathml

from dapo_jax.config.algorithms import ALGORITHMS, GROUND, NOT_OFFERED, OTHER_NAMES
from tests.docs.blocks import ROOT

PAGE = (ROOT / "docs" / "algorithms.md").read_text(encoding="utf-8")
ROWS = {
    row.split("`")[1]: re.split(r"(?<!\\)\|", row)[1:-1] for row in algorithms.markdown().splitlines()[2:]
}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_algorithm_has_its_keys_and_a_source_and_a_formula(name):
    _, keys, formula, source = ROWS[name]
    different = {key for key, value in ALGORITHMS[name].items() if GROUND.get(key) != value}
    assert {each.partition("=")[0] for each in re.findall(r"`([^`]+)`", keys)} >= different - {
        "teacher.rewards"
    }
    assert "](https://" in source
    assert formula.strip()


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_formula_can_be_shown(name):
    for formula in re.findall(r"\$([^$]+)\$", ROWS[name][2]):
        latex2mathml.tex2mathml(plain(formula.replace(r"\|", "|"), block=False))


def test_the_page_has_all_names_and_all_common_keys():
    for name in [*ALGORITHMS, *OTHER_NAMES, *NOT_OFFERED, *GROUND]:
        assert f"`{name}`" in PAGE, name
