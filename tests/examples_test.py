"""The example in one file learns, and stays small enough to be read."""

import re
import runpy
import sys

import jax
import pytest

from tests.structure_test import ROOT

EXAMPLE = ROOT / "examples" / "dapo_in_one_file.py"


def trained(monkeypatch, capsys, data_dir, *options):
    """The accuracy on held-out questions before and after, and the printed lines of the steps."""
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), "--data-dir", str(data_dir), *options])
    with jax.numpy_dtype_promotion(
        "standard"
    ):  # as in a program of a user's; optax raises a float to an integer count
        runpy.run_path(str(EXAMPLE), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    before, after = (float(re.search(r"accuracy ([\d.]+)", lines[place])[1]) for place in (0, -1))
    return before, after, lines[1:-1]


def test_a_short_form_samples_grades_and_updates(monkeypatch, capsys, tmp_path):
    """Two steps of four groups; what samples and what trains are one policy to 1e-9 nats."""
    options = ("--steps", "2", "--prompts-per-step", "4", "--eval-prompts", "4")
    before, after, steps = trained(monkeypatch, capsys, tmp_path, *options)
    assert 0 <= before <= 1
    assert 0 <= after <= 1
    assert len(steps) == 2
    for line in steps:
        assert float(re.search(r"KL\(sampler \|\| trainer\) ([\d.e+-]+)", line)[1]) < 1e-9
    # Four groups are one update, whose policy is still the one that sampled: nothing is clipped.
    assert all("clipped high 0.0000" in line for line in steps)


@pytest.mark.slow
def test_it_learns_addition(monkeypatch, capsys, tmp_path):
    before, after, _ = trained(monkeypatch, capsys, tmp_path)
    assert before < 0.6
    assert after >= 0.9
