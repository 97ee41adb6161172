"""The plan of a run with sample workers, by hand."""

import json
from dataclasses import asdict, replace

import pytest
from rich.console import Console

from dapo_jax.cli import main
from dapo_jax.config import ConfigError, load_config
from dapo_jax.plan.output import as_data, show, show_split
from dapo_jax.plan.plan import plan
from dapo_jax.plan.split import own_rounds, parse_workers, split, with_samplers, worker_plan
from dapo_jax.plan.topologies import parse
from dapo_jax.plan.workload import Assumptions

SIZES = [
    "rollout.in_flight=8", "rollout.round_tokens=4", "rollout.answer_rounds=0", "batch.group_size=4", "batch.prompts_per_step=2", "batch.groups_per_update=1",
    "batch.row_tokens=0", "sampling.max_response_tokens=12", "dynamic_sampling.enabled=false", "reward.overlong.enabled=false",
]  # fmt: skip
"""A step has 2 groups of 4 responses, as many as are in flight. Each response has 12 tokens, and so 3 rounds."""


def config_of(*changes):
    return load_config("quickstart", [*SIZES, *changes])


@pytest.mark.parametrize(
    ("name", "worker", "count"),
    [("v6e-8", "v6e:2x4", 1), ("v6e-4:2", "v6e:2x2", 2), ("v6e:2x2:4", "v6e:2x2", 4), ("h100:8", "h100:8", 1), ("h100:1:6", "h100:1", 6)],
)  # fmt: skip
def test_workers_have_the_names_of_topologies_and_a_count(name, worker, count):
    found, number = parse_workers(name, parse("v6e-8"))
    assert (found.name, number) == (worker, count)


@pytest.mark.parametrize(
    ("name", "trainer", "message"),
    [
        ("v6e-16:2", "v6e-8", r"found 4 hosts .* write v6e:2x2:8$"),
        ("h100:16", "h100:8", r"write h100:8:2$"),
        ("v6e-4:3", "v6e-16", r"found 3 workers, needs a multiple of 4, .* v6e:4x4$"),
        ("v6e-7", "v6e-8", r"--samplers 'v6e-7': no such"),
        ("v6e-4:0", "v6e-8", r"--samplers 'v6e-4:0'"),
    ],
)
def test_workers_of_several_hosts_or_unequal_numbers_are_refused(name, trainer, message):
    with pytest.raises(ConfigError, match=message):
        parse_workers(name, parse(trainer))


def test_rounds_of_a_step_by_hand():
    """All 8 responses end in their third round. With 2 further rounds, the next step needs 1 round. With 5, the groups of the next step are always ready. Only every second
    group is informative: a step has twice as many rounds. 2 turns of 6 tokens have 2 rounds each. With lengths that differ, a response of 6 tokens on
    average leaves on average half of its last round unused: 48 tokens of 8 responses have about 2 rounds."""
    assert [own_rounds(config_of(), Assumptions(), further) for further in (0, 1, 2, 3, 5)] == [3, 2, 1, 0, 0]
    half = config_of("dynamic_sampling.enabled=true", "dynamic_sampling.max_waves=100")
    assert own_rounds(half, Assumptions(informative=0.5), 0) == 6
    turns = config_of("environment.source=guess", "environment.max_turns=2")
    assert own_rounds(turns, Assumptions(), 0) == 2 * 2
    answered = replace(turns, rollout=replace(turns.rollout, answer_rounds=1))
    # An answer takes one round. Verdicts do, too, but the next groups begin meanwhile.
    assert own_rounds(answered, Assumptions(turns=2), 0) == 2 * 2 + 1
    spread = own_rounds(config_of(), Assumptions(response_tokens=6, response_tokens_std=3), 0)
    assert 1.7 < spread < 2.5


def test_a_step_has_as_many_rounds_with_fewer_groups_in_the_same_proportion():
    """32 groups in flight and 64 in a step are simulated as 16 and 32: two rounds of 3 each."""
    large = config_of("rollout.in_flight=128", "batch.prompts_per_step=64", "batch.groups_per_update=64")
    assert own_rounds(large, Assumptions(), 0) == 6


@pytest.fixture(scope="module")
def sides():
    """The plans of a trainer and of one of 2 sample workers, of shapes alone."""
    pytest.importorskip("libtpu", reason="the extra tpu")
    config = with_samplers(
        config_of("rollout.weight_rounds=5", "sampling.slots=8", "batch.rows_per_microbatch=4"), 2
    )
    trainer = plan(config, topology=parse("v5e:2x2"), only=["no_program"])
    return trainer, worker_plan(trainer, parse("v5e:2x2"), 2, assumed=Assumptions(), only=["no_program"])


def test_the_waits_of_both_sides_by_hand(sides, capsys):
    """30 s of sampling in 3 rounds of 10 s, 15 s of updates, and 5 s of transfer. One after the other, they are 50 s. During the update, 2 rounds begin (15 / 10): then a step
    takes 5 + 10 + 20 s, and the workers wait only for the transfer. 5 further rounds take 50 s, although a step needs only 3."""
    trainer, worker = sides
    size = worker.resident.weights
    assumed = Assumptions(
        sampling_share=worker.step_s / 30, update_share=trainer.step_s / 15, transfer_gbit_s=8 * size / 5e9
    )
    found = split(trainer, worker, assumed)
    assert (found.sampling_s, found.update_s, found.transfer_s) == pytest.approx((30, 15, 5))
    assert (found.rounds, found.suggested, found.weight_bytes) == (3, 2, size)
    rows = [tuple(asdict(step).values()) for step in found.steps]
    assert rows == [
        pytest.approx((0, 50, 20, 35, 0)), pytest.approx((2, 35, 5, 20, 2 / 3)), pytest.approx((5, 55, 5, 40, 1))
    ]  # fmt: skip
    slow = split(trainer, worker, replace(assumed, update_share=trainer.step_s / 1500))
    assert slow.suggested == 3  # all rounds of a step, and not more
    several = replace(trainer, sizes=replace(trainer.sizes, samplers=2))
    assert split(several, worker, assumed).suggested == 0
    show_split(found, assumed, Console(width=160))
    printed = capsys.readouterr().out
    assert "2 (suggested)" in printed
    assert "--transfer" in printed


def test_each_side_has_its_own_arrays_and_phases(sides, capsys):
    """The weights of the tiny model are whole on every device."""
    trainer, worker = sides
    assert (worker.resident.state, worker.resident.gradient, worker.resident.minibatch) == (0, 0, 0)
    assert worker.resident.weights == trainer.resident.weights > 0
    assert trainer.resident.state > 0
    assert [work.phase for work in worker.works] == ["prefill", "decode"]
    assert {"prefill", "decode"}.isdisjoint(work.phase for work in trainer.works)
    assert worker.sizes.samplers == 2
    assert worker.in_flight == 4
    show(worker, Console(width=160))
    printed = capsys.readouterr().out
    assert "each of 2 sample workers: v5e:2x2" in printed
    assert "checkpoint" not in printed
    assert as_data(worker)["sizes"]["samplers"] == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--samplers", "v6e-8"], "--topology"),
        (["--samplers", "v6e-8", "--topology", "v6e-8"], "rollout.in_flight"),
        (["--sampling-share", "1.5"], "--sampling-share=1.5"),
    ],
)
def test_misuse_of_the_command_is_reported(words, message, capsys):
    assert main(["plan", "quickstart", *words]) == 2
    assert message in capsys.readouterr().err


# Slow: compiles two programs on each side. The tests above have the numbers.
@pytest.mark.slow
def test_the_command_plans_both_sides(capsys):
    pytest.importorskip("libtpu", reason="the extra tpu")
    words = ["--topology", "v5e:2x2", "--samplers", "v5e-1:2", "--only", "insert", "--json", "-"]
    changes = [*SIZES, "sampling.slots=8", "batch.rows_per_microbatch=4"]
    assert main(["plan", "quickstart", *changes, *words]) == 0
    data = json.loads(capsys.readouterr().out)
    assert [program["name"] for program in data["sampler"]["programs"]]
    assert data["split"]["steps"][0]["weight_rounds"] == 0
