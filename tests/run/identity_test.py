"""A checkpoint knows its run: what differs is refused by name, and what is damaged is passed over."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from etils import epath
from safetensors.numpy import load_file, save_file

from dapo_jax.checkpoints.checkpointer import Checkpointer
from dapo_jax.checkpoints.manifest import META, write_manifest
from dapo_jax.config import ConfigError
from dapo_jax.run.identity import IDENTITY, model_files
from dapo_jax.run.policy import find_policy

STEP, BEFORE = 2, 1


@pytest.fixture(scope="module")
def trained(micro, run_micro, rows):
    """Two steps with carried groups, a checkpoint at each."""
    config = micro(steps=STEP, checkpoint__every_steps=1)
    return run_micro(config, eval_rows=rows)


@pytest.fixture
def run_dir(trained, tmp_path):
    return shutil.copytree(trained.run_dir, tmp_path / "run")


@pytest.fixture
def resumed(run_dir, micro, run_micro):
    """Resumes the copy under changed keys; there is nothing left to train."""

    def resume(rows_changed=None, **changes):
        more = {} if rows_changed is None else {"prompts": rows_changed}
        return run_micro(micro(run_dir, steps=STEP, **changes), resume=True, **more)

    return resume


def step_folder(run_dir, step=STEP):
    return Path(run_dir) / "checkpoints" / str(step)


def rewritten(folder, change):
    """Changes what a checkpoint says of itself, and makes its manifest anew."""
    path = folder / META
    meta = json.loads(path.read_text())
    change(meta)
    path.write_text(json.dumps(meta))
    write_manifest(epath.Path(folder))


def as_of_old(meta):
    """As earlier versions of this library wrote it."""
    del meta["step"]
    meta["progress"]["seed"] = meta["progress"].pop(IDENTITY)["config"]["seed"]


@pytest.mark.parametrize("alone", [False, True])
def test_a_run_that_found_too_few_groups_goes_on_with_fewer(alone, run_dir, resumed):
    """The error names this remedy, and the checkpoint to go on from. Whether the key was free when that was written does not matter."""
    if alone:
        (run_dir / "config.yaml").unlink()
        rewritten(
            step_folder(run_dir),
            lambda meta: meta["progress"][IDENTITY]["config"].update(
                {"dynamic_sampling.on_shortfall": "error"}
            ),
        )
    resumed(dynamic_sampling__on_shortfall="train_fewer")
    assert not (run_dir / "checkpoints" / f"{STEP}.damaged").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": 1}, "seed was 0, is 1"),
        ({"optimizer__learning_rate": 0.1}, r"optimizer\.learning_rate was 0\.05, is 0\.1"),
        (
            {"reward__correct": 2.0, "loss__kl_coef": 0.1},
            r"reward\.correct was 1\.0, .*loss\.kl_coef was 0\.0",
        ),
    ],
)
def test_without_its_configuration_a_run_is_known_by_its_checkpoint(changes, message, run_dir, resumed):
    (run_dir / "config.yaml").unlink()
    with pytest.raises(ConfigError, match=f"checkpoint .*/{STEP} is of another run, .*{message}"):
        resumed(**changes)
    assert not (run_dir / "config.yaml").exists()


def test_without_its_configuration_a_run_goes_on(trained, run_dir, resumed, same_run):
    (run_dir / "config.yaml").unlink()
    same_run(resumed(eval__prompts=1), trained)


def test_without_its_configuration_a_run_is_not_written_over(run_dir, micro, run_micro):
    (run_dir / "config.yaml").unlink()
    with pytest.raises(ConfigError, match="already holds a run; resume it with --resume"):
        run_micro(micro(run_dir, steps=STEP))


@pytest.mark.parametrize(
    "change",
    [
        lambda rows: [*rows[:-1], {**rows[-1], "answer": "5"}],
        lambda rows: [*rows[:-1], {**rows[-1], "prompt": "2+3"}],
        lambda rows: [*rows[:-1], {**rows[-1], "level": 1}],
        lambda rows: rows[:-1],
        lambda rows: rows[::-1],
    ],
    ids=["answer", "prompt", "field", "fewer", "order"],
)
def test_other_prompts_are_refused(change, rows, resumed):
    with pytest.raises(ConfigError, match=r"the prompts were 9 of arithmetic \(sha256 .*\), are [89] of"):
        resumed(change(rows))


def test_where_rows_were_read_does_not_matter(trained, rows, resumed, same_run):
    same_run(resumed([{**row, "source_row": "elsewhere"} for row in rows]), trained)


def test_a_checkpoint_of_another_run_is_refused_and_stays(trained, run_dir, micro, run_micro, resumed):
    """Beside a config.yaml that has not changed."""
    other = run_micro(micro(steps=STEP, checkpoint__every_steps=1, seed=3))
    shutil.rmtree(step_folder(run_dir))
    shutil.copytree(step_folder(other.run_dir), step_folder(run_dir))
    with pytest.raises(ConfigError, match=rf"{STEP} is of another run, .*: seed was 3, is 0"):
        resumed()
    with pytest.raises(ConfigError, match=rf"{STEP} is of another run, .*: seed was 3, is 0"):
        find_policy(str(run_dir))
    assert sorted(path.name for path in (run_dir / "checkpoints").iterdir()) == ["1", "2"]


def test_a_model_folder_whose_files_were_changed_is_refused(model, micro, run_micro, rows, tmp_path):
    """The weights that a run began with matter to its KL penalty alone."""
    begun = shutil.copytree(model, tmp_path / "model")
    configs = [
        micro(tmp_path / name, steps=1, model__source=str(begun), loss__kl_coef=kl_coef)
        for name, kl_coef in (("without", 0.0), ("with", 0.1))
    ]
    for config in configs:
        run_micro(config)
    weights = load_file(begun / "model.safetensors")
    save_file({name: value + 1 for name, value in weights.items()}, begun / "model.safetensors")
    run_micro(configs[0], resume=True)
    with pytest.raises(
        ConfigError, match=r"the model's model\.safetensors is not the one that the run began"
    ):
        run_micro(configs[1], resume=True)
    described = json.loads((begun / "config.json").read_text())
    (begun / "config.json").write_text(json.dumps({**described, "rope_theta": 1e6}))
    with pytest.raises(ConfigError, match=r"the model's config\.json is not the one"):
        run_micro(configs[0], resume=True)
    with pytest.raises(ConfigError, match=r"the model's config\.json is not the one"):
        find_policy(configs[0].run_dir)


def test_weights_are_told_apart_without_being_read_whole(tmp_path):
    """Every 4th number is another one, as after a step of training all are."""
    found = set()
    for value in (0.0, 1e-6):
        numbers = np.zeros(1 << 20, np.float32)
        numbers[::4] = value
        save_file({"w": numbers}, tmp_path / "model.safetensors")
        found.add(model_files(tmp_path, weights=True)["model.safetensors"])
    assert len(found) == 2
    assert model_files(tmp_path, weights=False) == model_files(None, weights=True) == {}


def test_a_checkpoint_of_before_goes_on_and_it_is_said(
    trained, run_dir, resumed, same_run, capsys, micro, rows
):
    rewritten(step_folder(run_dir), as_of_old)
    same_run(resumed(), trained)
    (run_dir / "config.yaml").unlink()
    with pytest.raises(ConfigError, match="seed was 0, is 1"):
        resumed(seed=1)


def test_what_could_not_be_checked_is_said_once(trained, run_dir, micro, rows):
    from dapo_jax.run.build import Run

    said = []
    rewritten(step_folder(run_dir), as_of_old)
    run = Run(micro(run_dir, steps=STEP), prompts=rows, reward=bool)
    with Checkpointer(run_dir / "checkpoints") as checkpointer:
        run.start(checkpointer, resume=True, say=said.append)
    [message] = said
    assert "is of an earlier version of dapo_jax" in message
    assert "was not checked" in message


def progress(**changes):
    return lambda meta: meta["progress"].update(changes)


DAMAGED = {
    "no place": lambda meta: meta["progress"].pop("cursor"),
    "a place that is text": progress(cursor="9"),
    "a place that is true": progress(cursor=True),
    "a place below 0": progress(cursor=-1),
    "a place of 30 digits": progress(cursor=10**30),
    "a place that is no number": progress(cursor=float("nan")),
    "metrics that are a number": progress(unfinished_metrics=3),
    "metrics without end": progress(unfinished_metrics="[" * 100_000),
    "metrics that are a list": progress(unfinished_metrics="[1]"),
    "metrics of text": progress(unfinished_metrics='{"a": "b"}'),
    "a run that is a list": progress(run=[1]),
    "a run without a configuration": progress(run={"model": {}}),
    "a run whose model is text": progress(run={"config": {}, "model": "m"}),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_progress_that_no_run_has_written_is_damage(name, run_dir, micro, rows):
    rewritten(step_folder(run_dir), DAMAGED[name])
    boundary, [said] = started(run_dir, micro, rows)
    assert boundary.position.step == BEFORE
    assert f"checkpoint {step_folder(run_dir)} is damaged" in said
    assert f"it is now {step_folder(run_dir)}.damaged. Taking step {BEFORE} instead" in said


def started(run_dir, micro, rows):
    """(where the run goes on from, what was said)."""
    from dapo_jax.run.build import Run

    said = []
    run = Run(micro(run_dir, steps=STEP), prompts=rows, reward=bool)
    with Checkpointer(run_dir / "checkpoints") as checkpointer:
        return run.start(checkpointer, resume=True, say=said.append), said


STRANGE = {
    "shorter tokens": lambda carry: carry.update(tokens=carry["tokens"][:-1]),
    "no rewards": lambda carry: carry.pop("rewards"),
    "ordinals of later prompts": lambda carry: carry.update(ordinals=carry["ordinals"] + 10**6),
    "ordinals below 0": lambda carry: carry.update(ordinals=carry["ordinals"] - 10**6),
    "lengths below 0": lambda carry: carry.update(lengths=-carry["lengths"]),
    "endless lengths": lambda carry: carry.update(lengths=carry["lengths"] + 2**62),
    "texts of brackets": lambda carry: carry.update(texts=np.full_like(carry["texts"], ord("["))),
    "texts of numbers": lambda carry: carry.update(texts=np.full_like(carry["texts"], ord("1"))),
    "rewards of text": lambda carry: carry.update(rewards=carry["rewards"].astype("U4")),
    "verdicts in rows": lambda carry: carry.update(correct=carry["correct"].reshape(1, -1)),
}


@pytest.mark.parametrize("name", STRANGE)
def test_carried_groups_that_no_run_has_written_are_damage(name, run_dir, micro, rows):
    """Written by the library itself, so that nothing but their content is strange."""
    config = micro(run_dir, steps=STEP)
    boundary, _ = started(run_dir, micro, rows)
    with Checkpointer(run_dir / "checkpoints") as checkpointer:
        found = checkpointer.restore(jax.eval_shape(lambda: boundary.state))
        assert found.carry, "the run is to carry groups here"
        STRANGE[name](found.carry)
        checkpointer.save(STEP + 1, found.state, found.progress, found.carry)
    boundary, [said] = started(run_dir, lambda *_, **__: replace(config, steps=STEP + 1), rows)
    assert boundary.position.step == STEP
    assert f"{step_folder(run_dir, STEP + 1)} is damaged: of the groups that it carries over, '" in said


def test_what_a_checkpoint_of_others_is_called_does_not_colour_the_terminal(run_dir):
    """The warning names the file that is too many, and takes the checkpoint before."""
    (step_folder(run_dir) / "\x1b[31m").write_text("")
    with pytest.warns(
        UserWarning, match=r"\\x1b\[31m is not of this checkpoint.* Taking step 1 instead"
    ) as said:
        assert find_policy(str(run_dir)).step == BEFORE
    assert not any("\x1b" in str(each.message) for each in said)
