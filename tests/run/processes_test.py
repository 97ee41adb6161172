"""Errors and findings of one process lead all processes of a run the same way, so that none waits for ever."""

import os
import re

import pytest

from dapo_jax.config import TrainConfig, to_yaml
from dapo_jax.storage.locks import take
from tests import several

TRAIN = """
import sys
import errno
import os
from dataclasses import replace
from dapo_jax.config import load_config
from dapo_jax.parallel import processes
from dapo_jax.run import train

processes.start()
config = load_config(sys.argv[1])

def full(*_):
    raise OSError(errno.ENOSPC, "No space left on device")

for run_dir in sys.argv[2:]:
    if run_dir.endswith("full"):
        os.pwrite = full
    try:
        train(replace(config, run_dir=run_dir))
    except Exception as error:
        print(f"found {type(error).__name__}: {error}", flush=True)
print("all have answered", flush=True)
processes.leave()
"""


def found(output):
    return [line for line in output.splitlines() if line.startswith("found ")]


def test_a_folder_that_the_first_process_cannot_use_is_refused_by_all(tmp_path):
    """It is locked by this process, has a name that is too long, or is on a full disk."""
    (tmp_path / "run.yaml").write_text(to_yaml(TrainConfig(run_dir="x")))
    locked, too_long, full = tmp_path / "run", tmp_path / ("x" * 300), tmp_path / "full"
    with take(locked, lost=lambda status, why: None):
        command = [TRAIN, tmp_path / "run.yaml", locked, too_long, full]
        outputs = several.run(*command, processes=2, devices=1, within_s=300)
    for output, kind in zip(
        outputs, ("OSError: ", "RuntimeError: the first process failed: OSError: "), strict=True
    ):
        refused, unnamed, failed = found(output)
        assert re.match(rf"found ConfigError: run_dir={locked}: .* process {os.getpid()} on", refused)
        assert re.match(rf"found ConfigError: run_dir={too_long}: .*File name too long", unnamed)
        assert re.match(f"found {kind}.*No space left", failed)
        assert "all have answered" in output
    assert not locked.exists()


STRANGE = """
import sys
import io
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from rich.console import Console

from dapo_jax.checkpoints.checkpointer import Checkpointer
from dapo_jax.config import TrainConfig
from dapo_jax.dapo.dynamic_sampling import ShortfallError
from dapo_jax.parallel import processes
from dapo_jax.dapo.rollouts import Group, Prompt, Response, Rollout, Verdict
from dapo_jax.dapo.tokens import Tokens
from dapo_jax.run.guard import Guard, GuardError
from dapo_jax.trackers.progress import Progress
from dapo_jax.rollout.collector import Collector, Position
from dapo_jax.rollout.virtual_clock import ClockSizes
from dapo_jax.run.resume_point import ResumePoint
from dapo_jax.run.training_pass import StepBatches
from dapo_jax.training.state import TrainState

processes.start()
index, folder = jax.process_index(), Path(sys.argv[1])
here = NamedSharding(Mesh(np.array(jax.devices()), ("x",)), PartitionSpec())
ones = jax.make_array_from_callback((2,), here, lambda _: np.ones(2, np.float32))
state = TrainState(params={"w": ones}, opt_state=())

def group(ordinal):
    # As after a wave: groups of other processes have no log-probabilities.
    mine = ordinal % 2 == index
    logprobs = np.full(3 if mine else 0, np.nan if ordinal == int(sys.argv[2]) else -1.0, np.float32)
    response = Response(record=Tokens(np.zeros(len(logprobs)), logprobs=logprobs), finish_reason="stop")
    rollout = Rollout(response=response, text="", verdict=Verdict(correct=False), reward=-1.0)
    return Group(prompt=Prompt(ordinal=ordinal, tokens=np.zeros(1, np.int32), text="", answer=""), rollouts=(rollout, rollout))

class NoBatches(StepBatches):
    def __init__(self):
        pass

with Checkpointer(folder / "checkpoints") as checkpointer:
    guard = Guard(SimpleNamespace(
        config=TrainConfig(run_dir=str(folder)), run_dir=folder, start=ResumePoint(state=state, position=Position()),
        run=SimpleNamespace(batches=NoBatches()), records=None, shown=Progress(1, console=Console(quiet=True)), check=lambda: None,
    ))
    sizes = ClockSizes(in_flight=8, samples_per_prompt=2, needed=1, answer_rounds=0, waves=True)
    collector = Collector.after(Position(), sizes, max_groups=4)
    guard.before_sampling(Position(), collector)
    collector.start()
    for each in map(group, range(4)):
        collector.end_group(each)
        guard.on_group(each, collector)
    try:
        try:
            collector.finish()
        except ShortfallError as error:
            guard.on_shortfall(error)
            raise
    except (GuardError, ShortfallError) as error:
        print(f"found {type(error).__name__}: {error}", flush=True)
processes.leave()
"""


@pytest.mark.parametrize(
    ("strange", "kind", "named"),
    [
        (1, "GuardError: the sampler's log-probabilities are not finite", "(prompt 1)"),
        pytest.param(9, "ShortfallError: dynamic", "", marks=pytest.mark.slow),
    ],
)
def test_bad_log_probabilities_of_one_process_are_reported_by_all(strange, kind, named, tmp_path):
    """Prompt 1 was sampled by the second process; prompt 9 by none, so all are finite."""
    outputs = several.run(STRANGE, tmp_path, strange, processes=2, devices=1, within_s=300)
    [[first], [second]] = map(found, outputs)
    assert first == second
    assert first.startswith(f"found {kind}")
    assert named in first


UNREADABLE = """
import sys
import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dapo_jax.checkpoints.manifest import DamagedError
from dapo_jax.checkpoints.checkpointer import Checkpointer
from dapo_jax.parallel import processes
from dapo_jax.parallel.together import broadcast_from_first

processes.start()
here = NamedSharding(Mesh(np.array(jax.devices()), ("x",)), PartitionSpec())
state = lambda step: {"w": jax.make_array_from_callback((2,), here, lambda _: np.full(2, step, np.float32))}
whole = Checkpointer._meta

def checked(self, step):
    if step == 2 and jax.process_index() == 1:
        raise DamagedError("step 2 cannot be read by process 1")
    return whole(self, step)

with Checkpointer(sys.argv[1]) as checkpointer:
    for step in (1, 2):
        checkpointer.save(step, state(step), {}, {})
    checkpointer.wait()
    Checkpointer._meta = checked
    said = []
    found = checkpointer.restore_last(lambda step: checkpointer.restore(state(0), step, rows=2), say=said.append)
    print(f"found {found.step} {float(found.state['w'].addressable_shards[0].data[0])} {said}", flush=True)
    broadcast_from_first(b"")
processes.leave()
"""


@pytest.mark.slow  # starts two processes
def test_a_checkpoint_that_one_process_cannot_read_is_passed_over_by_all(tmp_path):
    outputs = several.run(UNREADABLE, tmp_path / "checkpoints", processes=2, devices=1, within_s=300)
    said = "found 1 1.0 ['step 2 cannot be read by process 1. Using step 1 instead']"
    assert [found(output) for output in outputs] == [[said], [said]]
