"""The page of algorithms has a block for each name, with formulas that browsers can show."""

import re

import pytest
from _made import algorithms
from _made.formulas import plain
from docutils.utils.math import latex2mathml

from dapo_jax.config.algorithms import ALGORITHMS, GROUND
from dapo_jax.dapo.advantages import BASELINES, SCALES
from dapo_jax.dapo.aggregation import AGGREGATIONS
from tests.docs.blocks import ROOT

PAGE = (ROOT / "docs" / "algorithms.md").read_text(encoding="utf-8")
_, *FOUND = re.split(r"^### `(\w+)`\n", algorithms.markdown(), flags=re.MULTILINE)
BLOCKS = dict(zip(FOUND[::2], FOUND[1::2], strict=True))


@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_algorithm_has_its_idea_and_its_keys_and_a_source(name):
    idea, *rest = BLOCKS[name].strip().split("\n\n")
    keys = next(line for line in rest if line.startswith("Keys: "))
    different = {key for key, value in ALGORITHMS[name].items() if GROUND.get(key) != value}
    assert {each.partition("=")[0] for each in re.findall(r"`([^`]+)`", keys)} >= different - {
        "teacher.rewards"
    }
    assert "](https://" in rest[-1]
    assert idea.endswith(".")


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_formula_has_loss_weight_and_advantage_and_can_be_shown(name):
    [formula] = re.findall(r"\$\$ (.+) \$\$", BLOCKS[name])
    latex2mathml.tex2mathml(plain(formula, block=True), as_block=True)
    for symbol in (r"\ell", "w", "A"):
        assert f"{symbol} = " in formula


def test_every_weight_baseline_and_scale_has_a_formula():
    assert algorithms.WEIGHTS.keys() == set(AGGREGATIONS)
    assert algorithms.BASELINES.keys() == set(BASELINES)
    assert algorithms.SCALES.keys() == set(SCALES) - {"none"}
