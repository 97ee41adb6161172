"""NaN put into weights, log-probabilities, advantages and the loss: found in the same step, named, the run as configured."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dapo_jax.cli import _outcome
from dapo_jax.config import ConfigError, load_config
from dapo_jax.dapo.losses import dapo_loss
from dapo_jax.dapo.tokens import Tokens
from dapo_jax.rollout.response_sampler import ResponseSampler
from dapo_jax.run.guard import GuardError
from dapo_jax.trackers import read_metrics
from dapo_jax.trackers.rollout_log import read_post_mortem
from dapo_jax.training.minibatch import with_array
from dapo_jax.training.update import Updater
from tests.docs.blocks import ROOT, blocks

HERE = Path(__file__)


def nan_loss(logprobs, old_logprobs, advantages, mask, *, weights):
    loss, metrics = dapo_loss(logprobs, old_logprobs, advantages, mask, weights=weights)
    return loss * jnp.nan, metrics


@pytest.fixture
def poison(monkeypatch):
    """Makes the given array of a prepared microbatch NaN at its last token in the loss: {step: (update, name)}, both from 1."""

    def put(where):
        honest, steps = Updater.prepare, iter(range(1, 100))

        def prepare(self, state, minibatches):
            prepared, step = honest(self, state, minibatches), next(steps)
            if step in where:
                update, name = where[step]
                [stack] = prepared[update - 1]
                array = np.array(getattr(stack.microbatches, name))
                array[tuple(np.argwhere(np.asarray(stack.microbatches.mask))[-1])] = np.nan
                placed = jax.device_put(array, getattr(stack.microbatches, name).sharding)
                prepared[update - 1] = with_array((stack,), name, lambda _: placed)
            return prepared

        monkeypatch.setattr(Updater, "prepare", prepare)

    return put


@pytest.fixture
def sampler_says(monkeypatch):
    """Changes the log-probabilities that training's responses come with."""

    def put(change):
        honest = ResponseSampler.sample

        def sample(self, *of, **how):
            for prompt, responses in honest(self, *of, **how):
                records = [Tokens(r.tokens, logprobs=change(prompt, r.logprobs)) for r in responses]
                yield (
                    prompt,
                    tuple(replace(r, record=record) for r, record in zip(responses, records, strict=True)),
                )

        monkeypatch.setattr(ResponseSampler, "sample", sample)

    return put


def steps_of(config):
    return [line for line in read_metrics(f"{config.run_dir}/metrics.jsonl") if line["step"]]


def finite(params):
    return all(np.isfinite(np.asarray(leaf)).all() for leaf in jax.tree.leaves(params))


def test_an_array_that_is_not_finite_is_named_and_the_run_continues(micro, run_micro, poison, shown):
    """Two updates a step; in the second of the first three steps something else is NaN each time."""
    config = micro()
    poison({1: (2, "advantages"), 2: (2, "sampler_logprobs"), 3: (2, "old_logprobs")})
    result = run_micro(config, progress=shown.progress(config))
    lines = steps_of(config)
    assert [line["update/skipped_frac"] for line in lines] == [0.5, 0.5, 0.5, 0.0]
    assert [line["update/skipped_in_a_row"] for line in lines] == [1, 1, 1, 0]
    # The first update of each step was applied, and its changes are the means of the step.
    of_updates = [name for name in lines[3] if name.startswith("update/")]
    assert not [name for name in of_updates for line in lines if line.get(name) is None]
    flags = ("advantages", "sampler_logprobs", "trainer_logprobs")
    found = [[line[f"nonfinite/{name}"] for name in flags] for line in lines]
    assert found == [[1, 0, 0], [0, 1, 0], [0, 0, 1], [0, 0, 0]]
    assert finite(result.policy.params)
    skipped = [text for text in shown.text().splitlines() if "was skipped" in text]
    assert [text.partition(": not")[0] for text in skipped] == [
        f"step {step}: update 2 of 2 was skipped" for step in (1, 2, 3)
    ]
    assert "not finite: advantages, " in skipped[0]
    assert "not finite: the sampler's log-probabilities; " in skipped[1]  # nothing else was
    assert "not finite: the trainer's log-probabilities, " in skipped[2]
    kept = sorted(path.name for path in Path(config.run_dir, "post_mortem").iterdir())
    assert kept == [f"step_{step:06d}_update_2" for step in (1, 2, 3)]


def test_a_post_mortem_holds_the_batch_and_the_places_that_are_not_finite(micro, run_micro, poison):
    config = micro(steps=1)
    poison({1: (2, "sampler_logprobs")})
    run_micro(config)
    folder = Path(config.run_dir, "post_mortem", "step_000001_update_2")
    assert {path.name for path in folder.iterdir()} == {
        "report.json", "arrays.safetensors", "step_000001.jsonl", "config.yaml",
    }  # fmt: skip
    found = read_post_mortem(folder)
    assert (found.report["step"], found.report["update"], found.report["learning_rate"]) == (1, 2, 0.025)
    [stack] = found.stacks
    [(microbatch, row, token)] = np.argwhere(~np.isfinite(stack["sampler_logprobs"]))
    assert stack["mask"][microbatch, row, token]
    assert found.report["nonfinite"] == {
        "sampler_logprobs": {"microbatches": [[0, int(microbatch)]], "responses": []}
    }
    # As they were on the device: scored, with the text of the four responses.
    assert stack["old_logprobs"][stack["mask"]].all()
    assert len(found.rollouts) == config.batch.group_size
    assert stack["mask"].sum() == sum(row["response_tokens"] for row in found.rollouts)
    kept = load_config(folder / "config.yaml")
    assert replace(kept, data=replace(kept.data, template_date="")) == config


def test_the_page_opens_a_post_mortem(micro, run_micro, poison, tmp_path, monkeypatch, capsys):
    """The unchanged program of docs/guards.md, on a run that left one."""
    config = micro(steps=1)
    poison({1: (2, "sampler_logprobs")})
    run_micro(config)
    [program] = [block.text for block in blocks(ROOT / "docs" / "guards.md") if block.language == "python"]
    place = tmp_path / re.search(r'"(runs/[^"]+)"', program)[1]
    place.parent.mkdir(parents=True)
    place.symlink_to(Path(config.run_dir, "post_mortem", "step_000001_update_2"))
    monkeypatch.chdir(tmp_path)
    exec(compile(program, "docs/guards.md", "exec"), {})
    assert "sampler_logprobs" in capsys.readouterr().out


def test_a_loss_that_is_never_finite_stops_the_run_which_resumes_from_the_last_good_checkpoint(
    micro, run_micro, shown
):
    """Two updates a step and at most three in a row: after the second step they are four. A checkpoint at every step."""
    config = micro(checkpoint__every_steps=1)
    with pytest.raises(GuardError) as caught:
        run_micro(config, objective=nan_loss, progress=shown.progress(config))
    message = "; ".join([str(caught.value), *caught.value.__notes__])
    for words in (
        "4 updates in a row were skipped up to step 2",
        "update 2 of 2 was skipped: not finite: loss, gradient (",
        "post_mortem/step_000002_update_2",
        # It has the weights before the skipped updates.
        f"the last good checkpoint is from step 2 in {config.run_dir}/checkpoints: --resume continues from it",
    ):
        assert words in message
    assert [line["update/skipped_frac"] for line in steps_of(config)] == [1.0, 1.0]
    assert _outcome(caught.value, "train") == (1, f"dapo-jax train: {message}")
    named = json.loads(
        Path(config.run_dir, "post_mortem", "step_000001_update_1", "report.json").read_text()
    )["nonfinite"]
    assert {"blocks.down", "blocks.up"} < set(named["gradient"]["parameters"])

    # The checkpoint's weights are finite, so a run with another objective continues from it.
    result = run_micro(config, resume=True)
    assert [line["update/skipped_in_a_row"] for line in steps_of(config)] == [2, 4, 0, 0]
    assert finite(result.policy.params)


def test_weights_that_are_not_finite_are_named_before_anything_is_sampled(model, micro, run_micro, tmp_path):
    shutil.copytree(model, tmp_path / "bad")
    tensors = load_file(tmp_path / "bad" / "model.safetensors")
    tensors["model.embed_tokens.weight"][0, 0] = np.nan
    save_file(tensors, tmp_path / "bad" / "model.safetensors")
    config = micro(model__source=str(tmp_path / "bad"))

    def never(sample):
        raise AssertionError("a response was sampled")

    with pytest.raises(ConfigError, match=r"model\.source=.*bad.*: model\.embed_tokens\.weight contains NaN"):
        run_micro(config, reward=never)


def test_weights_that_an_update_ruins_are_named_in_the_same_step_and_never_saved(micro, run_micro):
    """The rate overflows float32, so the first update makes weights of infinity, and the second finds nothing finite."""
    config = micro(optimizer__learning_rate=1e39, checkpoint__every_steps=1)
    with (
        np.errstate(over="ignore"),
        pytest.raises(
            GuardError, match=r"the weights are not finite after step 1: .*\nthere is no checkpoint yet"
        ),
    ):
        run_micro(config)
    assert len(steps_of(config)) == 1
    assert not Path(config.run_dir, "checkpoints").exists()


def test_a_sampler_without_log_probabilities_is_named_although_its_groups_are_flat(
    micro, run_micro, sampler_says
):
    """Otherwise the run would end with the advice to change the data."""
    sampler_says(lambda prompt, logprobs: np.full_like(logprobs, np.nan))
    with pytest.raises(GuardError, match=r"sampler's log-probabilities are not finite \(prompt 0, 1, 2 and "):
        run_micro(micro(), reward=lambda sample: False)


def test_the_prompt_is_named_whose_response_has_a_log_probability_that_is_not_finite(
    micro, run_micro, sampler_says, shown
):
    """Of every prompt's responses: then the trained ones too, and with a limit of 0 the first step ends the run."""

    def change(prompt, logprobs):
        return np.where(np.arange(len(logprobs)) == 0, -np.inf, logprobs).astype(np.float32)

    sampler_says(change)
    config = micro()
    with pytest.raises(GuardError, match=r"not finite: the sampler's log-probabilities \(prompt \d\)"):
        run_micro(config)
    folder = Path(config.run_dir, "post_mortem", "step_000001_update_1")
    responses = read_post_mortem(folder).report["nonfinite"]["sampler_logprobs"]["responses"]
    assert [(one["index"], one["tokens"]) for one in responses] == [(index, [0]) for index in range(4)]


OFF = 0.5
"""Nats by which the sampler's log-probability of every token is too low."""


def test_log_probabilities_that_differ_from_the_trainers_stop_the_run(micro, run_micro, sampler_says):
    """Without carried groups, whose staleness would be a mismatch too."""
    sampler_says(lambda prompt, logprobs: logprobs - np.float32(OFF))
    config = micro(steps=2, dynamic_sampling__surplus="discard", guard__max_mismatch_kl=0.1)
    with pytest.raises(
        GuardError, match=r"step 1: KL\(sampler \|\| trainer\) is 0\.149 .*\nthere is no checkpoint yet"
    ):
        run_micro(config)
    assert len(steps_of(config)) == 1
