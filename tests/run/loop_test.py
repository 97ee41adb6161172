"""The loop with a scripted sampler and a counting update, without a model, files or configuration."""

import itertools

import numpy as np
import pytest

from dapo_jax.dapo.dynamic_sampling import ShortfallError
from dapo_jax.dapo.metrics import Mean
from dapo_jax.rollout.collector import Collector, Position
from dapo_jax.rollout.group_sampling import GroupSampling
from dapo_jax.rollout.virtual_clock import ClockSizes
from dapo_jax.run.loop import Observer, run_steps
from dapo_jax.run.training_pass import StepBatches
from dapo_jax.training.state import TrainState
from dapo_jax.training.update import Updater
from tests.run.conftest import make_group


class Script(Observer):
    """The parts of a run, which note their calls. Even ordinals are mixed groups, odd ones all correct. `params` counts the updates;
    the sampler's weights are `params` times 10."""

    def __init__(self, *, mixed=lambda ordinal: ordinal % 2 == 0, updates_per_step=2):
        self.seen, self.results, self.hooks, self.measured = [], [], [], {}
        self.mixed, self.updates = mixed, updates_per_step

    def run(self, *, steps, position=None, params=0, clock=None):
        seconds = itertools.count()
        return run_steps(
            TrainState(params, None),
            position or Position(),
            steps=steps,
            sampling=ScriptedSampling(self),
            batches=CountedBatches(self),
            updater=CountingUpdater(self),
            learning_rate=lambda step: step / 10,
            observers=[self],
            clock=clock or (lambda: float(next(seconds))),
        )

    def before_sampling(self, position, collector):
        self.hooks.append(("before_sampling", position.step, collector.needed))

    def on_group(self, group, collector):
        self.hooks.append(("on_group", group.prompt.ordinal, collector.kept))

    def on_shortfall(self, error):
        self.hooks.append(("on_shortfall", str(error)[:16]))

    def after_sampling(self, step, collected):
        self.hooks.append(("after_sampling", step, len(collected.groups)))

    def before_updates(self, minibatches):
        self.hooks.append(("before_updates", len(minibatches)))
        return minibatches

    def before_update(self, state, minibatch, *, index, count):
        self.hooks.append(("before_update", state.params, index, count))

    def after_update(self, minibatch, metrics, *, learning_rate):
        self.hooks.append(("after_update", sorted(metrics), learning_rate))

    def after_step(self, result):
        self.hooks.append(("after_step", result.position.step))
        self.results.append(result)


class ScriptedSampling(GroupSampling):
    def __init__(self, script):
        self._script = script

    def transfer(self, params):
        return params * 10

    def not_arrived_frac(self, params, weights):
        return 0.0

    def collector(self, position):
        sizes = ClockSizes(in_flight=6, samples_per_prompt=2, needed=2, answer_rounds=0, waves=True)
        return Collector.after(position, sizes, max_groups=12)

    def groups(self, weights, collector):
        while ordinals := [one.ordinal for one in collector.start() if one.index == 0]:
            for ordinal in reversed(ordinals):
                self._script.seen.append(("sample", ordinal, weights))
                verdicts = "x." if self._script.mixed(ordinal) else "xx"
                group = make_group(ordinal, verdicts, version=collector.clock.version)
                collector.end_group(group)
                yield group

    def more_rounds(self, collector):
        return collector.finish

    def worker_metrics(self):
        return {}

    def seconds(self):
        return {"sample": 0.5, "grade": 0.25}


class CountedBatches(StepBatches):
    def __init__(self, script):
        self._script = script

    def minibatches(self, groups, step, score):
        self._script.seen.append(("split", tuple(group.prompt.ordinal for group in groups), step))
        return [[] for _ in range(self._script.updates)]


class CountingUpdater(Updater):
    def __init__(self, script):
        self._script = script

    def prepare(self, state, minibatches):
        self._script.seen.append(("prepare", state.params))
        return minibatches

    def update(self, state, minibatch, *, learning_rate, first):
        self._script.seen.append(("update", state.params, learning_rate, first))
        metrics = {"update/loss": Mean(np.float32(state.params), np.float32(1.0)), **self._script.measured}
        return TrainState(state.params + 1, None), metrics


def test_one_step_flows_from_prompts_to_metrics():
    """Of ordinals 0, 1, 2 (in reverse) 0 and 2 are mixed. Two updates follow, the first with the weights of the sampler."""
    script = Script()
    state = script.run(steps=1)
    assert script.seen == [
        ("sample", 2, 0), ("sample", 1, 0), ("sample", 0, 0), ("split", (0, 2), 1), ("prepare", 0),
        ("update", 0, 0.1, True), ("update", 1, 0.1, False),
    ]  # fmt: skip
    assert state.params == 2
    [result] = script.results
    assert result.position == Position(step=1, cursor=3, carry=[])
    expected = {
        "rollout/prompts": 3, "rollout/waves": 1, "rollout/trained_groups": 2, "rollout/accuracy": 4 / 6,
        "rollout/trained_accuracy": 0.5, "rollout/all_correct_frac": 1 / 3, "rollout/mixed_frac": 2 / 3,
        "update/loss": 0.5,  # the mean of 0 and 1
        "update/learning_rate": 0.1, "time/sample_s": 1.0, "time/update_s": 2.0, "time/step_s": 3.0,
        "time/grade_s": 0.25, "time/wait_s": 0.0, "time/logprobs_s": 1.0, "time/between_s": 0.0,
        "speed/sampled_tokens_per_s": 15.0,  # three groups of 2 + 3 tokens
        "speed/trained_tokens_per_s": 5.0,
    }  # fmt: skip
    assert {name: result.metrics[name] for name in expected} == pytest.approx(expected)


def test_the_time_between_steps_is_that_of_observers_after_the_step():
    """A step reads the clock four times, and the observer twice after it: 3 seconds from the end of a step to the next."""
    script = Script()
    seconds = itertools.count()
    script.after_step = lambda result: (script.results.append(result), next(seconds), next(seconds))
    script.run(steps=2, clock=lambda: float(next(seconds)))
    assert [result.metrics["time/between_s"] for result in script.results] == [0.0, 3.0]


def test_weights_positions_and_carried_groups_move_from_step_to_step():
    """Waves 0-2, 3-5, 6-8, 9-11. The groups with even ordinals are mixed. Step 1 trains 0, 2. Step 2 has only 4 in its first wave and
    6, 8 in the next: it trains 4, 6 and carries 8. Step 3 needs one more: 10. Weights are fixed within a step."""
    script = Script()
    script.run(steps=3)
    weights = [event[2] for event in script.seen if event[0] == "sample"]
    assert weights == [0] * 3 + [20] * 6 + [40] * 3
    assert [event[1] for event in script.seen if event[0] == "split"] == [(0, 2), (4, 6), (8, 10)]
    assert [result.position.cursor for result in script.results] == [3, 9, 12]
    carried = [[group.prompt.ordinal for group in result.position.carry] for result in script.results]
    assert carried == [[], [8], []]


def test_a_run_from_a_position_equals_the_uninterrupted_one():
    whole, rest = Script(), Script()
    whole.run(steps=4)
    middle = whole.results[1]
    rest.run(steps=4, position=middle.position, params=middle.state.params)
    assert [r.position for r in rest.results] == [r.position for r in whole.results[2:]]
    assert rest.seen == whole.seen[whole.seen.index(("split", (4, 6), 2)) + 4 :]


def test_a_finished_run_has_nothing_left_to_do():
    script = Script()
    assert script.run(steps=3, position=Position(step=3, cursor=9), params=5).params == 5
    assert script.seen == script.results == []


def test_a_shortfall_is_reported_and_raised_before_any_update():
    script = Script(mixed=lambda ordinal: False)
    with pytest.raises(ShortfallError, match="of 12 groups, 12 were all correct"):
        script.run(steps=1)
    assert not [event for event in script.seen if event[0] in ("prepare", "update")]
    assert script.hooks[-1] == ("on_shortfall", "dynamic sampling")


def test_a_step_without_minibatches_has_no_update_and_no_metric_of_one():
    """Overlong filtering may leave no token."""
    script = Script(updates_per_step=0)
    assert script.run(steps=1).params == 0
    metrics = script.results[0].metrics
    assert "update/loss" not in metrics
    assert metrics["rollout/trained_groups"] == 2


def test_hooks_are_called_in_order():
    """Groups 2, 1, 0. Groups 2 and 0 are mixed. Then two updates."""
    script = Script()
    script.run(steps=1)
    assert script.hooks == [
        ("before_sampling", 0, 2),
        ("on_group", 2, 1), ("on_group", 1, 1), ("on_group", 0, 2),
        ("after_sampling", 1, 2), ("before_updates", 2),
        ("before_update", 0, 0, 2), ("after_update", ["update/loss"], 0.1),
        ("before_update", 1, 1, 2), ("after_update", ["update/loss"], 0.1),
        ("after_step", 1),
    ]  # fmt: skip


def test_the_updates_take_the_minibatches_that_a_hook_returns():
    class Fewer(Script):
        def before_updates(self, minibatches):
            return super().before_updates(minibatches)[1:]

    script = Fewer(updates_per_step=3)
    assert script.run(steps=1).params == 2
    assert script.hooks.count(("before_updates", 3)) == 1
    assert [hook for hook in script.hooks if hook[0] == "before_update"][-1] == ("before_update", 1, 1, 2)
