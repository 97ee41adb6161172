"""The advantages of a run: of the whole step, the same in the log, by a function of the user, and of kept responses only."""

from dataclasses import replace

import numpy as np
import pytest

from dapo_jax.config import AdvantageConfig, ConfigError, EnvironmentConfig, OverlongConfig, RewardConfig
from dapo_jax.dapo.advantages import step_advantages
from dapo_jax.run.build import Run
from dapo_jax.trackers.rollout_log import read_rollouts
from tests.run.conftest import make_group

LOGGED = {"steps": 2, "log__rollouts_every_steps": 1}
WHITE = {"baseline": "none", "scale": "whiten_tokens"}


def rows_of(result):
    return [
        read_rollouts(result.run_dir / "rollouts" / f"step_{step:06d}.jsonl")
        for step in range(1, result.metrics[-1]["step"] + 1)
    ]


@pytest.fixture
def noted():
    """A rule that keeps what it was given and what it returned, in each step."""

    def rule(groups):
        found = step_advantages(groups, **WHITE)
        rule.steps.append((groups, found))
        return found

    rule.steps = []
    return rule


def test_a_function_of_the_user_replaces_the_rule_and_the_log_has_its_numbers(
    micro, run_micro, noted, same_run
):
    """The function sees the whole step of two updates, once. With the rule of the configuration, the run is the same."""
    config = micro(**LOGGED, dynamic_sampling__surplus="discard")
    result = run_micro(config, advantages=noted)
    for rows, (groups, found) in zip(rows_of(result), noted.steps, strict=True):
        assert len(groups) == 2
        expected = {
            (group.prompt.ordinal, index): round(value, 6)
            for group, values in zip(groups, found, strict=True)
            for index, value in enumerate(values)
        }
        logged = {
            (row["ordinal"], row["index"]): row["advantage"] for row in rows if row["in_loss"] is not None
        }
        assert logged == expected
    same_run(
        run_micro(replace(config, run_dir=f"{config.run_dir}_rule", advantage=AdvantageConfig(**WHITE))),
        result,
    )


def test_the_updates_have_the_advantages_of_the_whole_step_in_float32(micro, rows):
    """Three groups, one in each update."""
    groups = [make_group(ordinal, verdicts) for ordinal, verdicts in enumerate(("x...", "xx..", "xxx."))]
    batches = Run(replace(micro(), advantage=AdvantageConfig(**WHITE)), prompts=rows, reward=bool).batches
    minibatches = batches.minibatches(groups, 1)
    assert len(minibatches) == 3
    expected = np.concatenate(step_advantages(groups, **WHITE))
    assert list(batches.advantages.values()) == expected.tolist()
    found = np.concatenate([m.advantages[m.mask] for minibatch in minibatches for m in minibatch])
    np.testing.assert_array_equal(np.unique(found), np.unique(expected.astype(np.float32)))


def test_of_kept_responses_the_shortest_are_trained_on_and_all_are_logged(micro, run_micro):
    config = micro(**LOGGED, batch__keep=2, dynamic_sampling__enabled=False)
    result = run_micro(config)
    for metrics, rows in zip(result.metrics, rows_of(result), strict=True):
        lengths = []
        for ordinal in {row["ordinal"] for row in rows}:
            group = [row for row in rows if row["ordinal"] == ordinal]
            kept = sorted(sorted(range(4), key=lambda index: group[index]["response_tokens"])[:2])
            assert [row["index"] for row in group] == [0, 1, 2, 3]
            assert [row["index"] for row in group if row["in_loss"]] == kept
            assert [row["index"] for row in group if row["advantage"] is not None] == kept
            assert [row["index"] for row in group if row["ratios"] is not None] == kept
            pair = [group[index]["reward"] for index in kept]
            assert [np.sign(group[index]["advantage"]) for index in kept] == [
                np.sign(pair[0] - pair[1]),
                np.sign(pair[1] - pair[0]),
            ]
            lengths += [group[index]["response_tokens"] for index in kept]
        assert metrics["rollout/trained_response_tokens"] == pytest.approx(np.mean(lengths))
        assert metrics["rollout/response_tokens"] == pytest.approx(
            np.mean([row["response_tokens"] for row in rows])
        )


def test_a_function_that_returns_other_shapes_is_refused(micro, rows):
    groups = [make_group(0, "x..."), make_group(1, "xx..")]
    for wrong in (np.zeros(8), [np.zeros(4)], [np.zeros(4), np.zeros(3)]):
        batches = Run(
            micro(), prompts=rows, reward=bool, advantages=lambda groups, wrong=wrong: wrong
        ).batches
        with pytest.raises(ValueError, match=r"need one number per rollout: \[\(4,\), \(4,\)\]"):
            batches.minibatches(groups, 1)


APART = {
    "advantage": AdvantageConfig(rewards="apart"),
    "reward": RewardConfig(
        grader=[{"grader": "exact"}, {"grader": "math"}], overlong=OverlongConfig(enabled=False)
    ),
}


@pytest.mark.parametrize(
    ("changes", "how", "message"),
    [
        (
            {"environment": EnvironmentConfig(source="guess", credit="turn")},
            {"advantages": step_advantages},
            r"environment\.credit=turn .*credit=episode",
        ),
        (APART, {"reward": bool}, r"advantage\.rewards=apart .*advantage\.rewards=summed"),
    ],
)
def test_combinations_without_a_meaning_are_refused_before_the_model_is_loaded(
    changes, how, message, micro, rows
):
    config = replace(micro(model__source="no/such/model"), **changes)
    with pytest.raises(ConfigError, match=message):
        Run(config, prompts=rows, **how)
