"""The checks of a run's folder: a run is neither overwritten nor mixed with another, and only files of a run are removed."""

import os
import sys
from contextlib import nullcontext
from dataclasses import replace

import pytest

from dapo_jax.config import (
    ConfigError,
    ModelConfig,
    OptimizerConfig,
    TeacherConfig,
    TrainConfig,
    load_config,
    to_yaml,
)
from dapo_jax.run.run_dir import OF_A_RUN, check_run_dir, remove_run
from dapo_jax.storage import path_of
from dapo_jax.storage.locks import NAME
from dapo_jax.trackers import check_trackers


@pytest.fixture
def make_run(tmp_path):
    def make(name):
        folder = tmp_path / name
        (folder / "checkpoints" / "3").mkdir(parents=True)
        (folder / "config.yaml").write_text(to_yaml(TrainConfig(run_dir=str(folder))))
        for file in ("metrics.jsonl", NAME, "checkpoints/3/arrays"):
            (folder / file).write_text("x")
        return folder

    return make


def check(folder, **how):
    check_run_dir(path_of(folder), TrainConfig(run_dir=str(folder)), **{"resume": False, **how})


def test_overwrite_is_offered_and_removes_the_files_of_a_run(make_run):
    run = make_run("run")
    with pytest.raises(ConfigError, match="overwrite=True"):
        check(run)
    check(run, overwrite=True)
    remove_run(path_of(run))
    assert [place.name for place in run.iterdir()] == [NAME]  # the lock is held


def test_a_folder_in_a_bucket_is_removed_too(bucket):
    run = path_of("gs://bucket/run")
    for name in ("config.yaml", "checkpoints/3/arrays", NAME):
        (run / name).write_text("x")
    check("gs://bucket/run", overwrite=True)
    remove_run(run)
    assert [place.name for place in run.iterdir()] == [NAME]


def test_a_folder_with_other_things_in_it_is_not_touched(make_run):
    run = make_run("run")
    (run / "config.yaml.bak").touch()
    with pytest.raises(ConfigError, match=r"'config\.yaml\.bak'"):
        check(run, overwrite=True)


@pytest.mark.parametrize("place", ["run", "run/model", "run/checkpoints/3"])
def test_overwrite_does_not_remove_the_source_of_the_weights(place, make_run, bucket):
    run = make_run("run")
    config = TrainConfig(run_dir=str(run), model=ModelConfig(source=str(run.parent / place)))
    with pytest.raises(ConfigError, match=r"overwrite=True .*model\.source="):
        check_run_dir(run, config, resume=False, overwrite=True)
    for other in ("gs://bucket/model", "s3://none", f"{run}2"):
        check_run_dir(run, replace(config, model=ModelConfig(source=other)), resume=False, overwrite=True)


@pytest.mark.parametrize("key", ["model", "teacher"])
def test_overwrite_does_not_remove_the_run_from_which_a_source_started(key, make_run):
    """b started from a, and c from b. A cycle of other runs ends the search."""
    a, b, c, d = (make_run(name) for name in "abcd")
    for run, source in ((b, a), (c, b), (a, d), (d, a)):
        config = TrainConfig(run_dir=str(run), model=ModelConfig(source=str(source)))
        run.joinpath("config.yaml").write_text(to_yaml(config))

    def removes(run):
        section = ModelConfig(source=str(c)) if key == "model" else TeacherConfig(source=str(c), rewards=True)
        config = TrainConfig(run_dir=str(run), **{key: section})
        check_run_dir(run, config, resume=False, overwrite=True)

    for run in (a, b, c, d):
        with pytest.raises(ConfigError, match=rf"overwrite=True .*{key}\.source={c} needs this folder"):
            removes(run)
    removes(make_run("e"))


def test_overwrite_without_a_run_does_nothing(tmp_path):
    check(tmp_path / "new", overwrite=True)
    assert not list(tmp_path.iterdir())


def test_resume_and_overwrite_exclude_each_other(make_run):
    with pytest.raises(ConfigError, match=r"resume=True .*overwrite=True"):
        check(make_run("run"), resume=True, overwrite=True)


def test_all_that_a_run_writes_may_be_removed(finished):
    assert {place.name for place in finished.run_dir.iterdir()} <= set(OF_A_RUN)


@pytest.mark.parametrize(
    ("schedule", "began", "steps", "refused"),
    [
        ({}, 10, 20, False),
        ({"schedule": "linear", "warmup_steps": 0}, 10, 10, False),
        # Step 3 is saved. Without a warm-up, the rate decays from the first step.
        ({"schedule": "linear", "warmup_steps": 0}, 10, 20, True),
        # The last 4 of 10 steps decay: 6 steps are before them.
        ({"schedule": "cosine", "warmup_steps": 0, "decay_steps": 4}, 10, 20, False),
        # Of 6 steps, 2 are before the decay.
        ({"schedule": "cosine", "warmup_steps": 0, "decay_steps": 4}, 10, 6, True),
        ({"schedule": "cosine", "warmup_steps": 0, "decay_steps": 4}, 6, 10, True),
    ],
)
def test_the_number_of_steps_may_change_before_the_learning_rate_decays(
    schedule, began, steps, refused, make_run
):
    folder = make_run("run")
    config = TrainConfig(run_dir=str(folder), steps=began, optimizer=OptimizerConfig(**schedule))
    (folder / "config.yaml").write_text(to_yaml(config))
    expected = pytest.raises(ConfigError, match=f"steps={steps}.* {began}") if refused else nullcontext()
    with expected:
        check_run_dir(path_of(folder), replace(config, steps=steps), resume=True, overwrite=False)


def test_resume_of_a_misspelt_run_does_not_start_over(make_run, tmp_path):
    run = make_run("quickstart")
    with pytest.raises(ConfigError, match=rf"no run to resume, but there is a run in {run}"):
        check(tmp_path / "quikstart", resume=True)


@pytest.mark.parametrize("beside", ["seed0", "arithmetic", "lr_0.1"])
def test_resume_of_a_run_with_another_name_begins_it(beside, make_run, tmp_path):
    """One command with --resume serves the first start and every restart."""
    make_run(beside)
    check(tmp_path / {"seed0": "seed1", "lr_0.1": "lr_0.2"}.get(beside, "run"), resume=True)


def test_the_configuration_may_change_before_the_first_checkpoint(make_run):
    """Also if a save was interrupted."""
    run = make_run("run")
    other = TrainConfig(run_dir=str(run), seed=5)
    with pytest.raises(ConfigError, match="seed was 0, is 5"):
        check_run_dir(path_of(run), other, resume=True)
    (run / "checkpoints" / "3").rename(run / "checkpoints" / "3.damaged")
    with pytest.raises(ConfigError, match="seed was 0, is 5"):
        check_run_dir(path_of(run), other, resume=True)
    (run / "checkpoints" / "3.damaged").rename(run / "checkpoints" / "4.orbax-checkpoint-tmp")
    check_run_dir(path_of(run), other, resume=True)


@pytest.mark.parametrize("name", ["checkpoints", "evaluations", "model", "rollouts"])
@pytest.mark.parametrize("how", [{"resume": True}, {"resume": False}, {"overwrite": True}], ids=str)
def test_a_link_to_a_disk_that_is_not_mounted_is_no_empty_folder(name, how, tmp_path):
    """A run would start over and cut its metrics."""
    run, disk = tmp_path / "run", tmp_path / "disk"
    run.mkdir()
    (run / name).symlink_to(disk)
    with pytest.raises(ConfigError, match=rf"run_dir={run}: {name} .*mount"):
        check(run, **how)
    disk.mkdir()
    check(run, **how)


def test_a_relative_run_dir_stays_where_it_was_when_a_grader_changes_the_working_folder(
    micro, run_micro, even_sum, tmp_path, monkeypatch
):
    for name in ("here", "elsewhere"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "here")

    def wandering(sample):
        os.chdir(tmp_path / "elsewhere")
        return even_sum(sample)

    result = run_micro(micro("run", steps=2, checkpoint__every_steps=1), reward=wandering)
    run = tmp_path / "here" / "run"
    assert result.run_dir == run
    assert {"checkpoints", "config.yaml", "metrics.jsonl", "model", "status.json"} <= set(os.listdir(run))
    assert not os.listdir(tmp_path / "elsewhere")
    assert load_config(run / "config.yaml").run_dir == "run"
    monkeypatch.chdir(tmp_path / "here")
    again = run_micro(micro("run", steps=3, checkpoint__every_steps=1), reward=wandering, resume=True)
    assert [line["step"] for line in again.metrics] == [1, 2, 3]


@pytest.mark.parametrize(
    ("tracker", "missing", "message"),
    [
        ("tensorboard", "tensorboardX", r"log\.trackers=tensorboard: .*tensorboardX"),
        ("wandb", "wandb", r"log\.trackers=wandb: .*the package wandb"),
        ("wandb", "key", r"log\.trackers=wandb: .*API key.*wandb login"),
    ],
)
def test_a_run_whose_tracker_cannot_be_opened_does_not_make_its_folder(
    tracker, missing, message, micro, run_micro, tmp_path, monkeypatch
):
    (tmp_path / "wandb.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_IDENTITY_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    if missing != "key":
        monkeypatch.setitem(sys.modules, missing, None)
    config = micro(tmp_path / "run", log__trackers=[tracker], steps=1)
    with pytest.raises(ConfigError, match=message):
        run_micro(config)
    assert not (tmp_path / "run").exists()
    if missing == "key":
        monkeypatch.setenv("WANDB_MODE", "offline")
        check_trackers(config.log, config.run_dir)
        monkeypatch.delenv("WANDB_MODE")
        (tmp_path / "netrc").write_text("machine api.wandb.ai login user password key\n")
        check_trackers(config.log, config.run_dir)
