"""Compares the resident arrays of a plan with the live arrays of a tiny run, phase by phase."""

import gc

import jax
import pytest

from dapo_jax.checkpoints.checkpointer import Checkpointer
from dapo_jax.config import load_config
from dapo_jax.health.stalls import Watch
from dapo_jax.plan.memory import together
from dapo_jax.plan.plan import plan
from dapo_jax.run.build import Run
from dapo_jax.run.loop import Observer, run_steps
from dapo_jax.run.sampler_programs import engine_of

SMALL = [
    "sampling.slots=16", "dynamic_sampling.enabled=false", "batch.prompts_per_step=8", "batch.group_size=4", "batch.groups_per_update=4",
    "batch.rows_per_microbatch=8", "eval.every_steps=0", "loss.kl_coef=0.1", "sampling.prefill_tokens=4",
    "sampling.cache_tokens=4096", "parallel.fsdp=2", "parallel.data=4",
]  # fmt: skip
"""A prompt is longer than a row, a microbatch has eight responses, and the cache has room for all slots."""

SMALLS = 4096
"""Bytes of small arrays: random keys, metrics, the tokens of the last call."""


class Seen(Observer, Watch):
    """Records the bytes on the first device, by phase, of arrays that the run made."""

    def __init__(self):
        Watch.__init__(self, 0.0, end=lambda status, why: None)
        # Keeps references: a new array could get the address, and so the id, of a deleted one.
        self.before, self.found = jax.live_arrays(), {}

    def look(self, phase):
        gc.collect()
        device, buffers = jax.devices()[0], {}
        before = set(map(id, self.before))
        for array in jax.live_arrays():
            if id(array) in before:
                continue
            for shard in array.addressable_shards:
                if shard.device == device:
                    buffers[shard.data.unsafe_buffer_pointer()] = shard.data.nbytes
        self.found.setdefault(phase, []).append(sum(buffers.values()))

    def note(self, what, **_):
        if what == "sampling tokens":
            self.look("sampling")

    def before_update(self, state, minibatch, *, index, count):
        self.look("updates")

    def after_step(self, result):
        self.look("between")


@pytest.fixture(scope="module")
def counted(tmp_path_factory):
    """The plan of a run of two steps, and the recorded bytes."""
    return observed(tmp_path_factory.mktemp("run"))


# Slow: three more runs; the tests of `counted` check the same sums without adapters.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "frozen"),
    [
        ([], ["frozen weights", "sampler's frozen weights"]),
        (["parallel.data=8", "parallel.fsdp=1"], ["frozen weights"]),
    ],
    ids=["a copy for each", "one copy"],
)
def test_frozen_weights_below_adapters_are_counted(changes, frozen, tmp_path):
    """The sampler's copy stays between steps."""
    made, found = observed(tmp_path, "lora.rank=4", *changes)
    check_updates(made, found, *frozen)
    check_while_sampling(made, found)


def observed(folder, *changes):
    config = load_config("quickstart", [*SMALL, f"run_dir={folder}", *changes])
    engine_of.cache_clear()  # an engine of an earlier run has its rotations already
    seen = Seen()
    run = Run(config, watch=seen)
    try:
        with Checkpointer(folder / "checkpoints") as checkpointer:
            start = run.start(checkpointer, resume=False, say=print)
        state, position = start.state, start.position
        del start
        run_steps(
            state, position, steps=2, sampling=run.sampling, batches=run.batches, updater=run.updater, learning_rate=run.learning_rate,
            observers=[seen],
        )  # fmt: skip
    finally:
        run.close()
    return plan(config), seen.found


def parts(made, program):
    _, resident = together(program, made.resident, updates=made.work.updates)
    return {name: size for name, size in resident.items() if size}


def check_updates(made, found, *frozen):
    """State, frozen weights, reference policy, rotations, and at the start of updates the minibatches of a step."""
    resident = parts(made, "update_begin")
    assert list(resident) == ["train state", *frozen, "reference policy", "rotations", "minibatches"]
    total = sum(resident.values())
    assert max(found["updates"]) == pytest.approx(total, abs=SMALLS)
    assert max(found["between"]) == pytest.approx(total - resident["minibatches"], abs=SMALLS)


# Slow: a run of two steps. tests/run/build_test.py compares the bytes during updates with the train state.
@pytest.mark.slow
def test_arrays_during_updates_and_between_steps_are_counted(counted):
    check_updates(*counted)


def check_while_sampling(made, found):
    """The plan counts the recorded maximum. Whether a whole row of prompts is there then depends on the sampled tokens."""
    resident = parts(made, "generate")
    total = sum(resident.values())
    assert total - resident["prefilled prompts"] - SMALLS <= max(found["sampling"]) <= total + SMALLS
    return resident, total


# Slow: as above. tests/plan/memory_test.py adds up the arrays of each phase.
@pytest.mark.slow
def test_arrays_while_sampling_are_counted(counted):
    """Weights and cache, and a prompt in prefill while the previous one waits for slots."""
    made, found = counted
    resident, total = check_while_sampling(made, found)
    waiting = ["prefilled prompts", "sequence prefilled in chunks", "sequence that waits for its slot"]
    assert list(resident)[3:] == ["sampler weights", "decode state", *waiting]
    # At the end of sampling nothing is in prefill.
    least = total - sum(list(resident.values())[5:])
    assert min(found["sampling"]) == pytest.approx(least, abs=SMALLS)


FLYING = [
    "rollout.in_flight=48", "rollout.round_tokens=8", "dynamic_sampling.surplus=discard", "sampling.prefill_tokens=32", "sampling.cache_tokens=2048",
]  # fmt: skip
"""Three responses share a slot. A row of prefill has 32 of a sequence's 56 tokens, a page 16."""


# Slow: another run; `counted` checks the same sums without rollouts in flight.
@pytest.mark.slow
def test_arrays_with_rollouts_in_flight_are_counted(tmp_path):
    """A re-prefilled response waits for its slot while another is in prefill, and prompts are there."""
    made, found = observed(tmp_path, *FLYING)
    resident, _ = check_while_sampling(made, found)
    waiting = ["prefilled prompts", "sequence prefilled in chunks", "sequence that waits for its slot"]
    assert list(resident)[4:] == ["decode state", "paused responses", *waiting]
