"""A run's folder before it begins: what is there is not written over, not mixed with another run, and removed only if a run wrote it."""

import pytest

from dapo_jax.config import ConfigError, TrainConfig, to_yaml
from dapo_jax.locks import NAME
from dapo_jax.run.train import OF_A_RUN, _remove_run, check_run_dir
from dapo_jax.storage import path_of


@pytest.fixture
def make_run(tmp_path):
    """A folder as a run leaves it, without running one."""

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


def test_overwriting_is_offered_and_removes_what_a_run_wrote(make_run):
    run = make_run("run")
    with pytest.raises(ConfigError, match="overwrite=True to begin anew"):
        check(run)
    check(run, overwrite=True)
    _remove_run(path_of(run))
    assert [place.name for place in run.iterdir()] == [NAME]  # it is held


def test_a_folder_in_a_bucket_is_removed_too(bucket):
    run = path_of("gs://bucket/run")
    for name in ("config.yaml", "checkpoints/3/arrays", NAME):
        (run / name).write_text("x")
    check("gs://bucket/run", overwrite=True)
    _remove_run(run)
    assert [place.name for place in run.iterdir()] == [NAME]


@pytest.mark.parametrize("name", ["notes.txt", "data", "config.yaml.bak"])
def test_a_folder_with_other_things_in_it_is_not_touched(name, make_run):
    run = make_run("run")
    (run / name).mkdir()
    with pytest.raises(ConfigError, match=rf"it holds '{name}', which no run wrote"):
        check(run, overwrite=True)


def test_nothing_is_overwritten_where_there_is_no_run(tmp_path):
    check(tmp_path / "new", overwrite=True)
    assert not list(tmp_path.iterdir())


def test_going_on_and_beginning_anew_exclude_each_other(make_run):
    with pytest.raises(ConfigError, match="give one of them"):
        check(make_run("run"), resume=True, overwrite=True)


def test_all_that_a_run_writes_may_be_removed(finished):
    assert {place.name for place in finished.run_dir.iterdir()} <= set(OF_A_RUN)


def test_a_misspelt_run_is_not_begun_anew_when_it_is_to_go_on(make_run, tmp_path):
    run = make_run("quickstart")
    with pytest.raises(ConfigError, match=rf"there is no run to resume, but one in {run}; name that one"):
        check(tmp_path / "quikstart", resume=True)


@pytest.mark.parametrize("beside", ["seed0", "arithmetic", "lr_0.1"])
def test_a_run_that_is_another_is_begun_where_it_was_to_go_on(beside, make_run, tmp_path):
    """Whoever starts the same command again and again says --resume from the first time on."""
    make_run(beside)
    check(tmp_path / {"seed0": "seed1", "lr_0.1": "lr_0.2"}.get(beside, "run"), resume=True)


def test_what_is_changed_before_the_first_checkpoint_changes_no_run(make_run):
    """The remedy of a run that learnt nothing, such as another metric, is taken by `--resume`; also where a save was cut short."""
    run = make_run("run")
    other = TrainConfig(run_dir=str(run), seed=5)
    with pytest.raises(ConfigError, match="seed was 0, is 5"):
        check_run_dir(path_of(run), other, resume=True)
    (run / "checkpoints" / "3").rename(run / "checkpoints" / "3.damaged")
    with pytest.raises(ConfigError, match="seed was 0, is 5"):
        check_run_dir(path_of(run), other, resume=True)
    (run / "checkpoints" / "3.damaged").rename(run / "checkpoints" / "4.orbax-checkpoint-tmp")
    check_run_dir(path_of(run), other, resume=True)
