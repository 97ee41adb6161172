"""The objects of a configuration: techniques that are switched on and off, and the memory of a run."""

import gc
import json
import re
import shutil
from dataclasses import replace

import jax
import numpy as np
import pytest

from dapo_jax.checkpoints.checkpointer import Checkpointer
from dapo_jax.checkpoints.manifest import META
from dapo_jax.cluster.engine import Cluster
from dapo_jax.config import ClusterConfig, ConfigError, EnvironmentConfig, OptimizerConfig, RolloutConfig
from dapo_jax.dapo.dynamic_sampling import ShortfallError
from dapo_jax.models.folder import load_model
from dapo_jax.run.build import Run
from dapo_jax.run.loop import Observer, run_steps
from dapo_jax.run.policy import Policy
from dapo_jax.run.resume_point import IDENTITY
from dapo_jax.testing import tiny_decoder_config, tiny_params
from dapo_jax.text.tokenizers import load_tokenizer
from dapo_jax.trackers.rollout_log import read_rollouts
from tests.run.conftest import assert_equal_weights, make_group, params_of


def test_a_minibatch_with_nothing_left_is_no_update(micro, rows):
    """AdamW would decay the weights in an update without tokens."""
    cut = make_group(2, "x.", [6, 6], truncated={0, 1})
    batches = Run(micro(reward__overlong__filter_truncated=True), prompts=rows, reward=bool).batches
    assert len(batches.minibatches([cut, make_group(1, "xx..")], 1)) == 1
    assert batches.minibatches([cut], 1) == []


FEW = {"data__train_split": "train[:64]"}
"""All prompts of a split are measured, which takes seconds for thousands."""


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"reward__grader": "exakt"}, "exakt"),
        ({"data__source": "jsonl", "data__path": "/missing.jsonl"}, r"data\.source='jsonl'.*/missing\.jsonl"),
        ({"data__train_split": "train[5:5]"}, r"'train\[5:5\]'.* 1,000 and 7,100 rows"),
        ({"data__eval_split": "test[5:5]", **FEW}, r"'test\[5:5\]'.* 1,000 and 7,100 rows"),
        ({"eval__datasets": [{"source": "jsonl", "path": "/held_out.jsonl"}], **FEW}, r"/held_out\.jsonl"),
    ],
)
def test_the_grader_and_the_data_are_checked_before_the_weights(
    changes, message, micro, model_without_weights
):
    with pytest.raises(ConfigError, match=message):
        Run(
            micro(
                model__source=model_without_weights,
                data__max_prompt_tokens=5,
                **changes,
            )
        )


def test_a_run_that_cannot_be_built_leaves_the_cluster(micro, monkeypatch):
    """Otherwise the next run of this process, for example in a notebook, would find a connection."""
    events = []

    class Connection(Cluster):
        def __init__(self, address):
            events.append(address)

        def close(self):
            events.append("closed")

    monkeypatch.setattr("dapo_jax.run.build.Cluster", Connection)
    cluster = ClusterConfig(address="auto", workers=True)
    with pytest.raises(ConfigError, match=r"/missing\.jsonl"):
        Run(micro(data__source="jsonl", data__path="/missing.jsonl", cluster=cluster))
    assert events == ["auto", "closed"]


def test_the_first_note_has_the_devices_the_parameters_and_the_prompts(micro, rows):
    run = Run(micro(), prompts=rows, reward=bool)
    count = f"{run.policy.decoder.parameters:,}"
    assert re.findall(r"[\d,]+", run.notes[0]) == [count, str(len(rows)), str(len(jax.devices()))]
    assert run.notes[0].endswith(jax.devices()[0].device_kind)


def test_every_step_has_its_own_order_and_a_replayed_one_the_same(micro, rows):
    """Twenty groups, with their ordinal in place of a token."""
    groups = [make_group(ordinal, "x.", [1, 1]) for ordinal in range(20)]
    for ordinal, group in enumerate(groups):
        group.rollouts[0].response.tokens[0] = ordinal
    run = Run(micro(), prompts=rows, reward=bool)

    def order(step):
        return [
            int(m.tokens[m.mask & (m.advantages > 0)][0]) for [m] in run.batches.minibatches(groups, step)
        ]

    assert sorted(order(1)) == list(range(20))
    assert order(1) == order(1) != order(2)


def test_tools_without_a_chat_template_are_refused_before_anything_is_sampled(micro, rows, tmp_path):
    (tmp_path / "tools.py").write_text(
        "from dapo_jax.environments import ToolEnvironment\n"
        "def made():\n    return ToolEnvironment([], grade=lambda answer, row: True)\n"
    )
    source = f"{tmp_path}/tools.py:made"
    with pytest.raises(ConfigError, match=rf"environment {source}: .*no chat template"):
        Run(micro(environment=EnvironmentConfig(source=source)), prompts=rows)


def test_without_dynamic_sampling_a_step_trains_on_its_two_flat_groups(micro, run_micro):
    off = micro(dynamic_sampling__enabled=False, steps=1)
    [line] = run_micro(off, reward=lambda sample: True).metrics
    expected = {"rollout/prompts": 2, "rollout/trained_groups": 2, "rollout/all_correct_frac": 1.0,
                "rollout/trained_accuracy": 1.0, "rollout/waves": 1, "rollout/surplus_groups": 0}  # fmt: skip
    assert {name: line[name] for name in expected} == expected
    on = micro(steps=1, dynamic_sampling__max_waves=2)
    with pytest.raises(ShortfallError, match="of 6 groups, 6 were all correct, 0 all wrong"):
        run_micro(on, reward=lambda sample: True)


def test_a_run_that_resumes_knows_how_old_carried_groups_are(finished, micro, rows):
    with Checkpointer(finished.run_dir / "checkpoints") as checkpointer:
        start = Run(micro(), prompts=rows, reward=bool).start(checkpointer, resume=True, say=print)
    last = finished.metrics[-1]
    assert len(start.position.carry) == last["rollout/carried_groups"]
    assert all(group.oldest < last["step"] for group in start.position.carry)


def test_the_soft_overlong_punishment_changes_only_rewards(micro, run_micro):
    """Free up to 6 - 2 = 4 tokens, -0.5 at 5, -1 at 6."""
    logged = {"steps": 1, "log__rollouts_every_steps": 1}
    on = run_micro(micro(**logged))
    off = run_micro(micro(**logged, reward__overlong__enabled=False))
    shaped, plain = (read_rollouts(run.run_dir / "rollouts" / "step_000001.jsonl") for run in (on, off))
    penalties = {1: 0.0, 2: 0.0, 3: 0.0, 4: 0.0, 5: -0.5, 6: -1.0}
    for a, b in zip(shaped, plain, strict=True):
        assert a["overlong_penalty"] == penalties[a["response_tokens"]]
        assert a["reward"] == b["reward"] + penalties[a["response_tokens"]]
        assert b["reward"] == (1.0 if b["correct"] else -1.0)
        assert (a["response_token_ids"], a["correct"]) == (b["response_token_ids"], b["correct"])
    assert -1.0 in {row["overlong_penalty"] for row in shaped}
    [before], [after] = on.metrics, off.metrics
    assert after["reward/overlong_penalty"] == 0.0
    assert before["reward/mean"] == pytest.approx(after["reward/mean"] + before["reward/overlong_penalty"])
    same = [name for name in before if name.startswith("rollout/")]
    assert {name: before[name] for name in same} == {name: after[name] for name in same}


def test_kl_dual_clip_and_importance_weights_are_logged_where_they_are_set(micro, run_micro, finished):
    """The KL to the initial policy is positive after two updates. Sampler and trainer agree, so the weights are 1 up to rounding."""
    config = micro(
        steps=1, loss__kl_coef=0.1, loss__objective={"clip": {"dual_clip": 1.01}}, loss__correction="mask"
    )
    [line] = run_micro(config).metrics
    assert line["policy/kl_ref_k3"] > 0
    assert line["policy/dual_clip_frac"] > 0
    assert "policy/kl_ref_k3" not in finished.metrics[1]
    assert finished.metrics[1]["policy/dual_clip_frac"] == 0
    found = {name: value for name, value in line.items() if name.startswith("importance/")}
    ones = {"importance/weight": 1.0, "importance/weight_max": 1.0, "importance/ess_frac": 1.0}
    assert found == pytest.approx({**ones, "importance/cut_frac": 0.0}, abs=1e-4)
    assert found["importance/weight_max"] != 1.0
    assert not [name for name in finished.metrics[1] if name.startswith("importance/")]


def test_an_own_objective_replaces_the_loss(micro, run_micro):
    """An objective of 0 leaves only the decay of 0.025 x 0.1 per update, in two updates."""

    def nothing(logprobs, old_logprobs, advantages, mask, *, weights):
        return 0.0 * logprobs.sum(), {}

    config = micro(steps=1)
    result = run_micro(config, objective=nothing)
    _, start = load_model(config.model.source)
    for a, b in zip(params_of(result), jax.tree.leaves(start), strict=True):
        np.testing.assert_allclose(a, np.asarray(b) * (1 - 0.025 * 0.1) ** 2, rtol=1e-5)


def held_now():
    return sum(array.nbytes for array in jax.live_arrays())


def response_bytes():
    gc.collect()
    return held_now()


def own_bytes(state, kl_coef):
    weights, whole = (sum(leaf.nbytes for leaf in jax.tree.leaves(tree)) for tree in (state.params, state))
    return weights, whole + (weights if kl_coef else 0)


# Slow without a penalty: the same run with one reference less.
@pytest.mark.parametrize("kl_coef", [pytest.param(0.0, marks=pytest.mark.slow), 0.1])
def test_the_initial_weights_are_not_kept_next_to_the_state(kl_coef, micro, rows, tmp_path):
    """After its start, also from a checkpoint, a run holds its state, with a KL penalty one reference, and little else."""
    config = micro(loss__kl_coef=kl_coef)
    with Checkpointer(tmp_path) as checkpointer:
        for resume in (False, True):
            before = response_bytes()
            run = Run(config, prompts=rows, reward=bool)
            begun = run.start(checkpointer, resume=resume, say=print)
            weights, own = own_bytes(begun.state, kl_coef)
            assert own <= response_bytes() - before < own + weights / 4
            if not resume:
                checkpointer.save(1, begun.state, begun.progress(run.identity), {})
                checkpointer.wait()
            del run, begun


class Held(Observer):
    """Notes the bytes on the devices around each update and at each of its programs. In the second step every stack is used twice, so
    an update has two programs."""

    def __init__(self):
        self.updates, self.programs, self.stacks = [], {1: [], 2: []}, 0

    def before_updates(self, minibatches):
        self.stacks += 1
        noted = self.programs[self.stacks]

        class Noting(tuple):
            def __iter__(self):
                for stack in tuple.__iter__(self):
                    noted.append(held_now())
                    yield stack

        return [Noting(tuple(minibatch) * self.stacks) for minibatch in minibatches]

    def before_update(self, state, minibatch, *, index, count):
        self.updates.append(held_now())

    def after_update(self, minibatch, metrics, *, learning_rate):
        self.updates.append(held_now())


@pytest.fixture(scope="module")
def wider_model(model, tmp_path_factory):
    """A model of 42,752 parameters, so that the state is large against the other arrays of a step."""
    tokenizer = load_tokenizer(model)
    decoder = tiny_decoder_config(
        vocab_size=tokenizer.vocab_size, embed_dim=64, layers=1, heads=4, kv_heads=2, head_dim=16, mlp_dim=152
    )
    folder = tmp_path_factory.mktemp("wider")
    Policy(decoder=decoder, params=tiny_params(decoder), tokenizer=tokenizer).save(folder)
    return str(folder)


# Slow: a run of a wider model each. `test_the_initial_weights_are_not_kept_next_to_the_state` has a bound of the same arrays.
@pytest.mark.slow
@pytest.mark.parametrize(("kl_coef", "in_flight"), [(0.0, 0), (0.0, 8), (0.1, 0)])
def test_during_an_update_the_devices_hold_the_train_state_and_one_gradient(
    kl_coef, in_flight, wider_model, micro, rows, even_sum, tmp_path
):
    """No initial weights, no weights or cache of the sampler, and with a KL penalty one reference. The gradient is there while the
    programs of each row length run, whether the update has one length or two."""
    config = micro(
        steps=2,
        model__source=wider_model,
        loss__kl_coef=kl_coef,
        dynamic_sampling__surplus="discard" if in_flight else "carry",
        rollout=RolloutConfig(in_flight=in_flight, round_tokens=2),
    )
    before, held = response_bytes(), Held()
    run = Run(config, prompts=rows, reward=even_sum)
    with Checkpointer(tmp_path) as checkpointer:
        start = run.start(checkpointer, resume=False, say=print)
    weights, own = own_bytes(start.state, kl_coef)
    assert own > (4 if kl_coef else 3) * weights
    run_steps(
        start.state, start.position, steps=config.steps, sampling=run.sampling, batches=run.batches,
        updater=run.updater, learning_rate=run.learning_rate, observers=[held],
    )  # fmt: skip
    run.close()
    # Two updates a step.
    assert [len(held.updates), len(held.programs[1]), len(held.programs[2])] == [8, 2, 4]
    for found, expected in (
        (held.updates, own),
        (held.programs[1], own + weights),
        (held.programs[2], own + weights),
    ):
        assert expected <= min(found) - before
        assert max(found) - before < expected + weights / 2


@pytest.fixture
def begun(model, micro, run_micro, tmp_path):
    """(kl_coef) -> the configuration of a run after two steps, whose model folder has lost its weights."""

    def make(kl_coef=0.0):
        folder = shutil.copytree(model, tmp_path / "model")
        saved = {"steps": 2, "checkpoint__every_steps": 1}
        config = micro(tmp_path / "run", model__source=str(folder), loss__kl_coef=kl_coef, **saved)
        run_micro(config)
        (folder / "model.safetensors").unlink()
        return config

    return make


def test_a_resumed_run_does_not_need_its_initial_weights(begun, run_micro, finished):
    config = begun()
    resumed = run_micro(replace(config, steps=4), resume=True)
    assert_equal_weights(resumed, finished)
    before, after = (
        json.loads((resumed.run_dir / "checkpoints" / step / META).read_text())["progress"][IDENTITY]["model"]
        for step in ("2", "4")
    )
    assert "model.safetensors" in before
    assert before == after


# Slow: compiles another update. tests/run/identity_test.py refuses a changed reference policy on resume.
@pytest.mark.slow
def test_a_resumed_run_with_a_kl_penalty_needs_its_initial_weights(begun, run_micro):
    """They are the reference."""
    with pytest.raises(ConfigError, match=r"cannot read .*model\.safetensors"):
        run_micro(replace(begun(kl_coef=0.1), steps=4), resume=True)


# Slow: three runs. tests/training/optimizer_test.py has the moments of Muon, and the tests above resume.
@pytest.mark.slow
def test_a_run_with_muon_resumes_from_its_single_moments(micro, run_micro, same_run):
    """A resumed run with AdamW would need two for a matrix."""
    changes = {"optimizer__name": "muon", "checkpoint__every_steps": 1}
    whole = run_micro(micro(steps=3, **changes))
    config = micro(steps=2, **changes)
    run_micro(config)
    same_run(run_micro(replace(config, steps=3), resume=True), whole)
    with pytest.raises(ConfigError, match=r"optimizer\.name"):
        run_micro(
            replace(config, steps=4, optimizer=OptimizerConfig(learning_rate=0.05, warmup_steps=2)),
            resume=True,
        )
