"""Faults that no loss curve shows, in runs of the quickstart: each moves the metrics that docs/healthy.md names, and a healthy run moves none.

Four steps, of which the first two have no tokens of earlier weights. `pytest -m slow -s` prints the metrics of each run, which the page shows.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from rich.console import Console

from dapo_jax.config import load_config
from dapo_jax.numerics.precision import WeightSharding
from dapo_jax.parallel.weights import WeightTransfer
from dapo_jax.rollout import group_sampling
from dapo_jax.run import train, updater_setup
from dapo_jax.sampling import engine
from dapo_jax.sampling.decoding import decoding, response_keys
from dapo_jax.trackers.progress import Progress
from dapo_jax.training import update

pytestmark = pytest.mark.slow

SHOWN = (
    "rollout/copies_z", "rollout/copies_frac", "rollout/verdict_lag_z", "rollout/mixed_frac", "rollout/mixed_expected_frac", "sync/logprob_diff_mean",
    "sync/sign_balance", "sync/not_arrived_frac", "stored", "step_min", "rollout/accuracy", "update/loss", "update/grad_norm",
)  # fmt: skip


def equal_keys(monkeypatch):
    """Responses i and i + 8 have the same key, as in two engines with equal seeds."""

    def keys(key, ordinals, indices, turns):
        return response_keys(key, ordinals, indices % 8, turns)

    monkeypatch.setattr(engine, "response_keys", keys)


def old_weights(monkeypatch):
    """The sampler keeps its first weights."""
    plain, first = WeightTransfer.__call__, []

    def transfer(self, params):
        return first[0] if first else first.append(plain(self, params)) or first[0]

    monkeypatch.setattr(WeightTransfer, "__call__", transfer)


def sharp_sampler(monkeypatch):
    """The sampler's logits are 5% too large, because the scale of the last norm was applied twice in part."""
    plain = WeightTransfer.__call__

    def transfer(self, params):
        norm = params["ends"]["final_norm"]
        scaled = jax.tree.map(lambda leaf: leaf, params)
        scaled["ends"]["final_norm"] = norm.replace(norm[...] * 1.05)
        return plain(self, scaled)

    monkeypatch.setattr(WeightTransfer, "__call__", transfer)


def lost_gradient(monkeypatch):
    """The gradient of the down projections is 0: a reduction was left out."""
    plain = update.Updater._apply_program

    def applied(self, state, sums, learning_rate):
        grads, loss = sums

        def without(path, leaf):
            return jnp.zeros_like(leaf) if "down" in jax.tree_util.keystr(path) else leaf

        lost = jax.tree_util.tree_map_with_path(without, grads)
        return plain(self, state, (lost, loss), learning_rate)

    monkeypatch.setattr(update.Updater, "_apply_program", applied)


def rounded_weights(monkeypatch):
    """The weights of the trainer are kept in bfloat16."""
    plain = update.Updater._apply_program

    def applied(self, state, sums, learning_rate):
        new, metrics = plain(self, state, sums, learning_rate)
        rounded = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16).astype(jnp.float32), new.params)
        return replace(new, params=rounded), metrics

    monkeypatch.setattr(update.Updater, "_apply_program", applied)


def own_slice(monkeypatch):
    """Each device keeps a slice of its own gradient instead of a slice of the sum over the devices."""

    def sliced(self, whole):
        size = whole.shape[self.dim] // lax.axis_size(self.axis)
        return lax.dynamic_slice_in_dim(whole, lax.axis_index(self.axis) * size, size, self.dim)

    monkeypatch.setattr(WeightSharding, "summed", sliced)


def dropped_flag(monkeypatch):
    """The temperature is not passed on to the sampler."""
    monkeypatch.setattr(group_sampling, "decoding", lambda temperature: decoding())


def forget():
    """Runs share compiled programs, which would be without the fault, or with the fault of another run."""
    updater_setup._shared_updater.cache_clear()
    jax.clear_caches()


@pytest.fixture
def run(tmp_path, monkeypatch):
    def go(fault=None, *options):
        name = fault.__name__ if fault else "healthy"
        if fault is not None:
            forget()
            fault(monkeypatch)
        config = load_config(
            "quickstart",
            [f"run_dir={tmp_path / f'{name}{len(options)}'}", "steps=4", "eval.prompts=16", *options],
        )
        lines = train(config, progress=Progress(config.steps, console=Console(quiet=True))).metrics[1:]
        seen = [shown(line) for line in lines]
        print(f"\n{name} {' '.join(options)}")
        for metric in SHOWN:
            print(
                f"{metric:30}",
                *(f"{line[metric]:10.3g}" if metric in line else f"{'-':>10}" for line in seen),
            )
        return seen

    forget()
    yield go
    forget()


def shown(line):
    """The metrics of a step that the tests look at."""
    steps = [value for name, value in line.items() if name.startswith("update/step_rms/")]
    kept = {name: value for name, value in line.items() if name in SHOWN}
    if changed := line.get("update/stored_changed_frac"):
        kept["stored"] = changed / line["update/stored_predicted_frac"]
    return kept | {"step_min": min(steps)}


HEALTHY = {
    "rollout/copies_z": (-4.0, 4.0),
    "rollout/copies_frac": (0.0, 0.01),
    "rollout/verdict_lag_z": (0.0, 5.0),
    "sync/sign_balance": (1 / 3, 3.0),
    "sync/not_arrived_frac": (0.0, 0.0),
    "stored": (0.9, 1.1),
    "step_min": (0.05, 3.5),
}
"""The ranges of the page."""


def outside(lines):
    return {
        name
        for name, (low, high) in HEALTHY.items()
        if any(name in line and not low <= line[name] <= high for line in lines)
    }


BFLOAT16 = "model.compute_dtype=bfloat16"


@pytest.mark.parametrize(
    "options",
    [
        [],
        [BFLOAT16],
        ["sampling.weight_dtype=int8", "loss.correction=truncate"],
        ["rollout.in_flight=1024", "rollout.round_tokens=8"],
        ["lora.rank=8", "optimizer.learning_rate=1e-3"],
        ["algorithm=grpo"],
        ["algorithm=gspo"],
        ["algorithm=cispo"],
        ["optimizer.schedule=cosine"],
        ["dynamic_sampling.surplus=discard"],
    ],
    ids=str,
)
def test_a_healthy_run_stays_inside_the_ranges(options, run):
    assert outside(run(None, *options)) == set()


@pytest.mark.parametrize(
    ("fault", "options", "moved"),
    [
        (equal_keys, [], {"rollout/copies_z", "rollout/copies_frac", "rollout/verdict_lag_z"}),
        (old_weights, [], {"sync/not_arrived_frac"}),
        (sharp_sampler, [], {"sync/sign_balance", "sync/not_arrived_frac"}),
        (lost_gradient, [], {"step_min"}),
        (rounded_weights, [BFLOAT16], {"stored"}),
        (dropped_flag, ["sampling.temperature=0.8"], {"sync/sign_balance"}),
    ],
)
def test_a_fault_moves_its_metrics_alone(fault, options, moved, run):
    assert outside(run(fault, *options)) == moved


def test_weights_that_do_not_arrive_are_a_mismatch_that_grows(run):
    """A step has four updates. Compared are steps without tokens of earlier weights."""
    options = ["dynamic_sampling.surplus=discard"]
    healthy, stale = run(None, *options), run(old_weights, *options)
    assert max(line["sync/logprob_diff_mean"] for line in healthy) < 1e-6
    assert [line["sync/logprob_diff_mean"] > 1e-3 for line in stale] == [False, True, True, True]


def test_a_slice_in_place_of_a_sum_changes_the_gradient_norm_alone(run):
    """Adam hides the fault from every range. The norm of the first step does not depend on the number of devices, up to rounding: without `fsdp`, gradients are not
    scattered. A slice comes from one of eight devices, so its norm is between 1/8 (equal gradients) and 1/sqrt(8) = 0.35 (independent gradients) of the sum. The
    gradients of norms are not scattered, so 0.5 is the limit."""
    steps = "steps=1"
    [whole], [scattered], [sliced] = (
        run(None, steps, "parallel.fsdp=1", "parallel.data=-1"), run(None, steps), run(own_slice, steps),
    )  # fmt: skip
    norm = "update/grad_norm"
    assert scattered[norm] == pytest.approx(whole[norm], rel=0.01)
    assert sliced[norm] < 0.5 * scattered[norm]
    assert outside([sliced]) == set()
