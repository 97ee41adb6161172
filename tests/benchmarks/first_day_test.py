"""The command that measures an accelerator in one go, on a CPU."""

import argparse
import json
import os
import subprocess
import sys
import time

import pytest

from benchmarks import gpu, kinds
from benchmarks.first_day import PARTS, SIZES, Day, _learned
from benchmarks.workload import Workload
from dapo_jax.config import load_config
from dapo_jax.plan.plan import plan
from dapo_jax.plan.topologies import parse
from dapo_jax.training.update import Updater
from tests.gpu_test import OF_TESTS
from tests.several import ROOT


@pytest.fixture
def day(tmp_path):
    return Day(argparse.Namespace(out=tmp_path / "out", card=None, platforms="cpu"), tmp_path)


def written(day):
    return json.loads((day.arguments.out / "first_day.json").read_text())["parts"]


def test_a_part_that_is_cut_short_or_fails_leaves_its_results(day):
    with day.part("slow", 0.2 / 60):
        day.add("first", "1")
        time.sleep(30)
    with day.part("broken", 1):
        day.add("second", "2", seconds=[2.0])
        day.command("dapo_jax", "no-such-command")
    with day.part("last", 1):
        day.add("third", "3")
    assert [part["results"][0]["what"] for part in written(day).values()] == ["first", "second", "third"]
    endings = [part["ended"] for part in written(day).values()]
    assert endings[0].startswith("cut short after")
    assert "no-such-command" in endings[1]
    assert endings[2] == "whole"
    page = (day.arguments.out / "first_day.md").read_text()
    assert page.count("ended early") == 2


def test_the_process_of_a_part_that_is_cut_short_ends(day, tmp_path, monkeypatch):
    """The module writes a file after its time is over, if it lives. The line that it printed before is kept."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "lingering.py").write_text(
        f"import time, pathlib\nprint('first: 1', flush=True)\ntime.sleep(3)\npathlib.Path({str(tmp_path / 'late')!r}).touch()\n"
    )
    with day.part("slow", 1.5 / 60):
        day.command("lingering", each=lambda line: day.add(*line.split(": ")))
    assert written(day)["slow"]["results"] == [{"what": "first", "value": "1"}]
    time.sleep(2.5)
    assert not (tmp_path / "late").exists()


def test_mixed_lengths_are_those_of_the_benchmark_of_nano_vllm(tmp_path):
    """Its page gives 133,966 tokens of responses. The prompts are drawn before."""
    (tmp_path / "config.json").write_text('{"vocab_size": 151936}')
    workload = Workload(model=str(tmp_path), prompts=256, samples=1, mixed=[100, 1024])
    assert workload.tokens == 133_966
    assert sum(map(len, workload.prompt_ids())) == 142_827
    assert Workload.from_json(workload.to_json()) == workload


def test_equal_runs_differ_in_clocks_alone(tmp_path):
    lines = [{"step": 1, "loss": float("nan"), "time/step_s": 1.0}, {"step": 2, "loss": 0.5, "speed/x": 3}]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    assert _learned(tmp_path / "metrics.jsonl") == [
        {"step": "1", "loss": "nan"},
        {"step": "2", "loss": "0.5"},
    ]


@pytest.mark.parametrize(("shift", "verdict"), [(0.0, "KL"), (0.01, "failed:")])
def test_sampler_and_trainer_of_a_preset_are_compared(shift, verdict, monkeypatch, capsys):
    """Log-probabilities that are 0.01 nats too low have a KL of 0.01^2 / 2 = 5e-5, above the limit of 1e-6."""
    whole = Updater.logprobs
    monkeypatch.setattr(Updater, "logprobs", lambda *arguments: whole(*arguments) - shift)
    monkeypatch.setattr(sys, "argv", ["kinds", "tiny"])
    kinds.main()
    assert capsys.readouterr().out.split()[:2] == ["tiny:", verdict]


# Slow: runs every part, with about 20 processes that compile.
@pytest.mark.slow
def test_every_part_runs_on_a_cpu(tmp_path):
    command = [sys.executable, "-m", "benchmarks.first_day", "--out", tmp_path, "--minutes", "5"]
    # With the settings of the tests, programs have no lines of Python and are not written, so a profile has no functions.
    environment = {name: value for name, value in os.environ.items() if name not in OF_TESTS}
    subprocess.run(command, cwd=ROOT, check=True, env=environment)
    found = json.loads((tmp_path / "first_day.json").read_text())["parts"]
    assert {name: part["ended"] for name, part in found.items()} == dict.fromkeys(PARTS, "whole")
    assert [one["value"] for one in found["repeats"]["results"]] == ["equal in every metric"] * 2
    assert sum("tokens_s" in one for one in found["choices"]["results"]) == 10


# Slow: compiles a model of 0.6 billion parameters. The programs of small models are compiled in tests/plan.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("topology", "needs"), [("h100:1", "jax_cuda12_plugin"), ("v6e-1", "libtpu")], ids=["h100", "v6e"]
)
def test_the_programs_for_an_accelerator_compile_and_fit(topology, needs):
    """Rows of 16,384 tokens: a prompt and its eight responses."""
    pytest.importorskip(needs, reason="the extra cuda-plan or tpu")
    sizes = SIZES["accelerator"]
    prompts, samples, prompt, new = sizes["update"]
    assert prompt + samples * new == 16_384
    config = load_config(
        "quickstart",
        [
            f"model.source=preset:{sizes['size']}", f"model.compute_dtype={gpu.DTYPE}", "model.remat=full",
            f"data.max_prompt_tokens={prompt}", f"sampling.max_response_tokens={new}", "reward.overlong.enabled=false",
            f"batch.prompts_per_step={prompts}", f"batch.group_size={samples}", f"batch.groups_per_update={prompts}",
            f"batch.row_tokens={prompt + samples * new}", "batch.rows_per_microbatch=1",
            f"sampling.slots={sizes['rollout'][0] * sizes['rollout'][1]}",
        ],
    )  # fmt: skip
    made = plan(config, topology=parse(topology))
    assert made.fits
    assert {"generate", "update_add_longest", "update_apply"} <= {program.name for program in made.programs}
