"""The files of a run next to its checkpoints."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from dapo_jax.config import ConfigError, LogConfig
from dapo_jax.run.records import Records, use_compilation_cache
from dapo_jax.trackers import check_trackers, read_metrics


@pytest.mark.parametrize(("resume_step", "kept"), [(-1, []), (0, [0]), (1, [0, 1])])
def test_resuming_keeps_the_lines_up_to_the_checkpoint(resume_step, kept, micro, tmp_path):
    """-1 is a run without a checkpoint: the evaluation before training is repeated, so its line is removed too."""
    with Records(micro(), tmp_path, resume_step=None) as records:
        for step in (0, 1, 2):
            records.step(step, {"reward/mean": 0.5})
    with Records(micro(), tmp_path, resume_step=resume_step) as records:
        assert [line["step"] for line in records.read()] == kept


def test_a_new_run_does_not_append_to_another_runs_metrics(micro, tmp_path):
    with Records(micro(), tmp_path, resume_step=None) as records:
        records.step(0, {"reward/mean": 0.5})
    with pytest.raises(FileExistsError, match=r"metrics\.jsonl already contains"):
        Records(micro(), tmp_path, resume_step=None)


@pytest.mark.slow  # starts two processes
def test_programs_compiled_by_one_process_are_read_from_a_bucket_by_the_next(bucket):
    code = """if True:
        import jax
        from dapo_jax.run.records import use_compilation_cache
        use_compilation_cache()
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        found = []
        jax.monitoring.register_event_listener(lambda event, **_: found.append(event))
        jax.jit(lambda x: x * 2 + 1)(jax.numpy.float32(3)).block_until_ready()
        print(found.count("/jax/compilation_cache/cache_hits"), found.count("/jax/compilation_cache/cache_misses"))
    """
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent.parent)}
    environment["JAX_COMPILATION_CACHE_DIR"] = "gs://bucket/xla"
    counts, stored = [], []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
        )
        counts.append([int(word) for word in done.stdout.split()])
        stored.append(bucket.files("gs://bucket/xla"))
    (hits, misses), (hits_again, misses_again) = counts
    assert any("jit__lambda" in name for name in stored[0])
    assert (hits, misses_again) == (0, 0)
    assert misses == hits_again > 0
    assert stored[0] == stored[1]


def test_tensorboard_takes_the_same_numbers(micro, tmp_path):
    pytest.importorskip("tensorboardX")
    with Records(micro(log__trackers=["tensorboard"]), tmp_path, resume_step=None) as records:
        records.step(1, {"reward/mean": 0.5})
    assert list((tmp_path / "tensorboard").iterdir())
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"step": 1, "reward/mean": 0.5}]


OWN = """
class Counting:
    def __init__(self, run_dir):
        self.path = run_dir / "counted.txt"

    def log(self, step, metrics):
        with open(self.path, "a") as file:
            file.write(f"{step} {metrics['reward/mean']}\\n")

    def close(self):
        pass
"""


def test_a_class_in_a_file_is_a_tracker(micro, tmp_path):
    (tmp_path / "my.py").write_text(OWN)
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    with Records(micro(log__trackers=[f"{tmp_path}/my.py:Counting"]), run_dir, resume_step=None) as records:
        for step in (1, 2):
            records.step(step, {"reward/mean": step / 2})
    assert (run_dir / "counted.txt").read_text() == "1 0.5\n2 1.0\n"


@pytest.mark.parametrize("name", ["tensorbord", "my.py:Nothing", "no_such_module:Tracker"])
def test_a_tracker_that_does_not_exist_is_refused(name):
    with pytest.raises(ConfigError, match=r"log\.trackers: "):
        check_trackers(LogConfig(trackers=[name]), "runs/x")


@pytest.mark.parametrize(("asked", "kept"), [(0.0, 0.0), (1.0, 0.1)])
def test_a_user_s_lower_threshold_of_the_compilation_cache_stays(asked, kept, tmp_path):
    limit = "jax_persistent_cache_min_compile_time_secs"
    names = ("jax_compilation_cache_dir", limit, "jax_persistent_cache_min_entry_size_bytes")
    before = {name: getattr(jax.config, name) for name in names}
    try:
        jax.config.update(limit, asked)
        jax.config.update("jax_compilation_cache_dir", str(tmp_path))
        use_compilation_cache()
        assert getattr(jax.config, limit) == kept
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
