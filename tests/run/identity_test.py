"""A checkpoint knows its run: a resume under another configuration, other prompts or another model is refused."""

import json
import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dapo_jax.config import ConfigError
from dapo_jax.run.policy import find_policy
from dapo_jax.run.resume_point import model_files

STEP = 2


@pytest.fixture(scope="module")
def trained(micro, run_micro, rows):
    """A run of two steps with a checkpoint at each."""
    config = micro(steps=STEP, checkpoint__every_steps=1)
    return run_micro(config, eval_rows=rows)


@pytest.fixture
def run_dir(trained, tmp_path):
    return shutil.copytree(trained.run_dir, tmp_path / "run")


@pytest.fixture
def resumed(run_dir, micro, run_micro):
    """Resumes the copy with changed keys; no step is left to train."""

    def resume(rows_changed=None, **changes):
        more = {} if rows_changed is None else {"prompts": rows_changed}
        return run_micro(micro(run_dir, steps=STEP, **changes), resume=True, **more)

    return resume


def step_folder(run_dir, step=STEP):
    return Path(run_dir) / "checkpoints" / str(step)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": 1}, "seed was 0, is 1"),
        (
            {"reward__correct": 2.0, "loss__kl_coef": 0.1},
            r"reward\.correct was 1\.0, .*loss\.kl_coef was 0\.0",
        ),
    ],
)
def test_without_its_configuration_a_run_is_known_by_its_checkpoint(changes, message, run_dir, resumed):
    (run_dir / "config.yaml").unlink()
    with pytest.raises(ConfigError, match=f"checkpoint .*/{STEP} belongs to another run, .*{message}"):
        resumed(**changes)
    assert not (run_dir / "config.yaml").exists()


def test_without_its_configuration_a_run_goes_on(trained, run_dir, resumed, same_run):
    (run_dir / "config.yaml").unlink()
    same_run(resumed(eval__prompts=1), trained)


def test_without_its_configuration_a_run_is_not_written_over(run_dir, micro, run_micro):
    (run_dir / "config.yaml").unlink()
    with pytest.raises(ConfigError, match="already contains a run; resume it with --resume"):
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


def test_the_place_of_rows_does_not_matter(trained, rows, resumed, same_run):
    same_run(resumed([{**row, "source_row": "elsewhere"} for row in rows]), trained)


def test_a_checkpoint_of_another_run_is_refused_and_stays(trained, run_dir, micro, run_micro, resumed):
    """Next to an unchanged config.yaml."""
    other = run_micro(micro(steps=STEP, checkpoint__every_steps=1, seed=3))
    shutil.rmtree(step_folder(run_dir))
    shutil.copytree(step_folder(other.run_dir), step_folder(run_dir))
    with pytest.raises(ConfigError, match=rf"{STEP} belongs to another run, .*: seed was 3, is 0"):
        resumed()
    with pytest.raises(ConfigError, match=rf"{STEP} belongs to another run, .*: seed was 3, is 0"):
        find_policy(str(run_dir))
    assert sorted(path.name for path in (run_dir / "checkpoints").iterdir()) == ["1", "2"]


def near_reference(logprobs, old_logprobs, advantages, mask, *, weights, ref_logprobs):
    """An objective that requires the reference policy."""
    return (weights * jnp.where(mask, logprobs - ref_logprobs, 0.0) ** 2).sum(), {}


def change_weights(folder):
    weights = load_file(folder / "model.safetensors")
    save_file({name: value + 1 for name, value in weights.items()}, folder / "model.safetensors")


# Slow: compiles another update. The test below has a KL penalty.
@pytest.mark.slow
def test_a_changed_reference_policy_of_an_objective_is_refused(model, micro, run_micro, tmp_path):
    begun = shutil.copytree(model, tmp_path / "model")
    requires = micro(tmp_path / "requires", steps=1, model__source=str(begun))
    run_micro(requires, objective=near_reference)
    change_weights(begun)
    with pytest.raises(ConfigError, match=r"the model's model\.safetensors has changed"):
        run_micro(requires, resume=True, objective=near_reference)


def test_a_model_folder_whose_files_were_changed_is_refused(model, micro, run_micro, rows, tmp_path):
    """The initial weights matter only if they are the reference policy of a KL penalty."""
    begun = shutil.copytree(model, tmp_path / "model")
    configs = [
        micro(tmp_path / name, steps=1, model__source=str(begun), loss__kl_coef=kl_coef)
        for name, kl_coef in (("without", 0.0), ("with", 0.1))
    ]
    for config in configs:
        run_micro(config)
    change_weights(begun)
    run_micro(configs[0], resume=True)
    with pytest.raises(ConfigError, match=r"the model's model\.safetensors has changed"):
        run_micro(configs[1], resume=True)
    described = json.loads((begun / "config.json").read_text())
    (begun / "config.json").write_text(json.dumps({**described, "rope_theta": 1e6}))
    with pytest.raises(ConfigError, match=r"the model's config\.json has changed"):
        run_micro(configs[0], resume=True)
    with pytest.raises(ConfigError, match=r"the model's config\.json has changed"):
        find_policy(configs[0].run_dir)


def test_the_digest_of_weights_differs_without_reading_them_whole(tmp_path):
    """Every 4th number differs; after a step of training all do."""
    found = set()
    for value in (0.0, 1e-6):
        numbers = np.zeros(1 << 20, np.float32)
        numbers[::4] = value
        save_file({"w": numbers}, tmp_path / "model.safetensors")
        found.add(model_files(tmp_path, weights=True)["model.safetensors"])
    assert len(found) == 2
    assert model_files(tmp_path, weights=False) == model_files(None, weights=True) == {}
