"""Training runs: what they write, that an interrupted one goes on as if nothing had been, and what each technique changes."""

import json

import jax
import numpy as np
import pytest

from dapo_jax.config import ConfigError
from dapo_jax.filtering import ShortfallError
from dapo_jax.models.folder import load_model
from dapo_jax.rollouts import Group, Prompt, Response, Rollout, Verdict
from dapo_jax.run.train import Run
from dapo_jax.trackers import read_metrics
from dapo_jax.trackers.rollout_log import read_rollouts

STEP_METRICS = {
    "rollout/": [
        "response_tokens", "response_tokens_max", "response_tokens_p95", "truncated_frac", "prompts", "waves",
        "mixed_frac", "all_correct_frac", "all_wrong_frac", "accuracy", "trained_accuracy", "trained_groups",
        "surplus_groups", "carried_groups",
    ],
    "reward/": ["mean", "std", "overlong_penalty"],
    "policy/": [
        "entropy", "sampled_prob", "clip_high_frac", "clip_low_frac", "clipped_high_prob", "dual_clip_frac",
        "kl_old_k1", "kl_old_k3", "ratio_max",
    ],
    "update/": ["loss", "grad_norm", "learning_rate", "skipped_frac"],
    "sync/": ["logprob_diff_mean", "logprob_diff_max", "sampler_trainer_kl"],
    "time/": ["sample_s", "update_s", "step_s"],
    "speed/": ["sampled_tokens_per_s", "trained_tokens_per_s"],
}  # fmt: skip


def params_of(result):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(result.policy.params)]


def equal(a, b):
    return all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


def test_every_metric_that_is_promised_is_in_every_step(finished):
    lines = read_metrics(finished.run_dir / "metrics.jsonl")
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4]
    promised = {where + name for where, names in STEP_METRICS.items() for name in names}
    for line in lines[1:]:
        assert promised <= line.keys()


def test_evaluation_stands_before_the_first_and_after_the_last_step(finished):
    evaluated = [line["step"] for line in finished.metrics if "eval/arithmetic/avg@4" in line]
    assert evaluated == [0, 4]
    assert {"eval/arithmetic/pass@4", "eval/arithmetic/cons@4"} <= finished.metrics[0].keys()


def test_the_first_step_starts_from_the_shipped_weights_and_warms_up(finished):
    assert [line["update/learning_rate"] for line in finished.metrics[1:]] == [0.025, 0.05, 0.05, 0.05]
    assert [line["update/skipped_frac"] for line in finished.metrics[1:]] == [0.0] * 4
    assert finished.metrics[1]["sync/logprob_diff_max"] < 1e-4  # sampler and trainer agree on the same weights


def test_on_step_sees_what_is_logged(finished, steps_seen):
    assert [step for step, _ in steps_seen] == [1, 2, 3, 4]
    for (_, seen), line in zip(steps_seen, finished.metrics[1:], strict=True):
        assert seen.keys() | {"step"} == line.keys()
        assert seen["reward/mean"] == line["reward/mean"]


def test_the_trained_model_is_written_as_a_folder(finished):
    _, params = load_model(finished.run_dir / "model")
    assert equal([np.asarray(leaf) for leaf in jax.tree.leaves(params)], params_of(finished))


def test_rollouts_to_read_are_written_when_due(finished):
    """Every two steps, one group of four."""
    files = sorted(path.name for path in (finished.run_dir / "rollouts").iterdir())
    assert files == ["step_000002.jsonl", "step_000004.jsonl"]
    rows = read_rollouts(finished.run_dir / "rollouts" / files[0])
    assert len(rows) == 4
    assert len({row["ordinal"] for row in rows}) == 1
    assert all(row["correct"] == (sum(row["response_token_ids"]) % 2 == 0) for row in rows)


def test_groups_are_carried_from_step_to_step(finished):
    """Otherwise the interruptions below would not cross a boundary with carried groups."""
    assert sum(line["rollout/carried_groups"] > 0 for line in finished.metrics[1:-1]) >= 2


@pytest.mark.parametrize("every_steps", [1, 2])
def test_a_run_interrupted_after_every_step_in_turn_is_the_uninterrupted_run(
    every_steps, finished, micro, run_micro, rows, same_run
):
    """With a checkpoint every two steps the run goes on from before the step it was interrupted at, or from nothing."""
    config = micro(checkpoint__every_steps=every_steps)
    for stop in (1, 2, 3, 4):

        def interrupt(step, metrics, stop=stop):
            if step == stop:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            run_micro(config, eval_rows=rows, on_step=interrupt, resume=True)
    same_run(run_micro(config, eval_rows=rows, resume=True), finished)


def test_a_run_interrupted_while_it_samples_replays_the_step(finished, micro, run_micro, rows, same_run, even_sum):
    config, graded = micro(checkpoint__every_steps=1), 0

    def interrupt(sample):
        nonlocal graded
        graded += 1
        if graded == 60:  # 8 of the first evaluation, then at least 12 a step
            raise KeyboardInterrupt
        return even_sum(sample)

    with pytest.raises(KeyboardInterrupt):
        run_micro(config, eval_rows=rows, reward=interrupt)
    assert 0 < read_metrics(f"{config.run_dir}/metrics.jsonl")[-1]["step"] < 4
    same_run(run_micro(config, eval_rows=rows, resume=True), finished)


def test_a_resumed_run_may_go_on_for_longer(finished, micro, run_micro, same_run):
    """The number of steps is free to change: two steps and two more are four. Nothing but the last evaluation differs."""
    config = micro(steps=2)
    first = run_micro(config)
    assert [line["step"] for line in first.metrics] == [1, 2]
    whole = run_micro(micro(config.run_dir), resume=True)
    assert equal(params_of(whole), params_of(finished))


def test_resuming_under_another_configuration_is_refused_by_key(finished, micro, run_micro):
    changed = micro(finished.run_dir, optimizer__learning_rate=0.1, eval__prompts=1)
    with pytest.raises(ConfigError, match=r"optimizer\.learning_rate was 0\.05, is 0\.1") as error:
        run_micro(changed, resume=True)
    assert "eval.prompts" not in str(error.value)


def test_a_run_is_not_written_over(finished, micro, run_micro):
    with pytest.raises(ConfigError, match="already holds a run; resume it with --resume"):
        run_micro(micro(finished.run_dir))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data__source": "arithmetics"}, "did you mean 'arithmetic'"),
        ({"model__source": "shipped:quikstart"}, "these are: quickstart"),
        ({"reward__grader": "exat"}, "did you mean 'exact'"),
        ({"batch__rows_per_microbatch": 9}, r"rows_per_microbatch=9 .* parallel.fsdp = 8, .* 16 is"),
        ({"sampling__slots": 12}, r"slots=12 .* parallel.fsdp = 8, .* 16 is"),
        ({"batch__row_tokens": 0, "sampling__max_response_tokens": 500}, "504 positions, the model has 128"),
        ({"parallel__data": 3}, "multiple of 3 devices, 8 are there"),
    ],
)
def test_what_does_not_fit_is_said_before_anything_is_written(
    changes, message, micro, run_micro, rows, tmp_path
):
    """A folder with a config.yaml in it would be taken for a run when the corrected configuration is started."""
    config = micro(tmp_path / "run", **changes)
    with pytest.raises(ConfigError, match=message):
        run_micro(config, reward=None, prompts=None if "data__source" in changes else rows)
    assert not (tmp_path / "run").exists()


def make_group(ordinal, marks, lengths, *, truncated=()):
    rollouts = tuple(
        Rollout(
            response=Response(
                tokens=np.full(length, 5, np.int32),
                logprobs=np.full(length, -1.0, np.float32),
                finish_reason="length" if index in truncated else "stop",
            ),
            text="",
            verdict=Verdict(correct=mark == "x"),
            reward=1.0 if mark == "x" else -1.0,
        )
        for index, (mark, length) in enumerate(zip(marks, lengths, strict=True))
    )
    return Group(
        prompt=Prompt(ordinal=ordinal, tokens=np.array([3, 12, 4], np.int32), text="1+2", answer="3"),
        rollouts=rollouts,
    )


GROUPS = [
    make_group(0, "x...", [1, 2, 3, 6], truncated={3}),
    make_group(1, "xx..", [2, 2, 2, 2]),
]


def minibatches_of(config, rows, groups=GROUPS):
    return Run(config, prompts=rows, reward=bool).pipe.minibatches(groups, 1)


def differing(found, expected):
    """The fields in which two steps' microbatches differ."""
    return {
        name
        for a, b in zip(sum(found, []), sum(expected, []), strict=True)
        for name in a.__dataclass_fields__
        if not np.array_equal(getattr(a, name), getattr(b, name))
    }


def test_aggregation_changes_the_weights_and_nothing_else(micro, rows):
    """One update over both groups: 12 + 8 = 20 tokens, 8 responses."""
    one_update = {"batch__groups_per_update": 2}
    mean = minibatches_of(micro(**one_update), rows)
    sequence = minibatches_of(micro(**one_update, loss__aggregation="sequence_mean"), rows)
    assert differing(mean, sequence) == {"weights"}
    [[m]] = mean
    np.testing.assert_allclose(m.weights[m.mask], 1 / 20, rtol=1e-6)
    [[m]] = sequence
    by_length = sorted(weight for weight in m.weights[m.mask])
    lengths = [1, 2, 3, 6, 2, 2, 2, 2]
    expected = sorted(1 / 8 / length for length in lengths for _ in range(length))
    np.testing.assert_allclose(by_length, expected, rtol=1e-6)


def test_normalize_std_changes_the_advantages_and_nothing_else(micro, rows):
    plain = minibatches_of(micro(loss__normalize_std=False), rows)
    assert differing(minibatches_of(micro(), rows), plain) == {"advantages"}
    values = {round(float(a), 4) for minibatch in plain for m in minibatch for a in m.advantages[m.mask]}
    assert values == {1.5, -0.5, 1.0, -1.0}  # 1 - (-0.5), -1 - (-0.5); 1 - 0, -1 - 0


def test_filtering_truncated_responses_takes_their_tokens_out_and_leaves_rewards_alone(micro, rows):
    """The truncated response has 6 of 20 tokens. Advantages stay: its reward still counts in its group."""
    one_update = {"batch__groups_per_update": 2}
    [[m]] = minibatches_of(micro(**one_update), rows)
    [[filtered]] = minibatches_of(micro(**one_update, reward__overlong__filter_truncated=True), rows)
    assert differing([[m]], [[filtered]]) == {"mask", "weights"}
    assert (m.mask.sum(), filtered.mask.sum()) == (20, 14)
    np.testing.assert_allclose(filtered.weights[filtered.mask], 1 / 14, rtol=1e-6)
    assert not filtered.weights[~filtered.mask].any()


def test_a_minibatch_with_nothing_left_is_no_update(micro, rows):
    """AdamW would decay the weights for an update without a single token."""
    cut = make_group(2, "x.", [6, 6], truncated={0, 1})
    config = micro(reward__overlong__filter_truncated=True)
    assert len(minibatches_of(config, rows, [cut, GROUPS[1]])) == 1
    assert minibatches_of(config, rows, [cut]) == []


def test_every_step_shuffles_anew_and_a_replayed_one_alike(micro, rows):
    """Twenty groups told apart by their ordinal in place of a token."""
    groups = [make_group(ordinal, "x.", [1, 1]) for ordinal in range(20)]
    for ordinal, group in enumerate(groups):
        group.rollouts[0].response.tokens[0] = ordinal
    run = Run(micro(), prompts=rows, reward=bool)

    def order(step):
        return [
            int(m.tokens[m.mask & (m.advantages > 0)][0]) for [m] in run.pipe.minibatches(groups, step)
        ]

    assert sorted(order(1)) == list(range(20))
    assert order(1) == order(1) != order(2)


def test_clip_higher_acts_from_the_second_update_of_a_step_on(micro, run_micro):
    """One update a step has ratio 1, and no clip to be felt: the weights are the same bit for bit. With two, the second is
    clipped at 1.02 or at 1.5, which is all that differs in what is sampled and rewarded."""
    narrow = {"steps": 1, "loss__clip_ratio_low": 0.02, "loss__clip_ratio_high": 0.02}
    wide = {**narrow, "loss__clip_ratio_high": 0.5}
    once = {"batch__groups_per_update": 2}
    assert equal(
        params_of(run_micro(micro(**narrow, **once))), params_of(run_micro(micro(**wide, **once)))
    )
    cut, free = run_micro(micro(**narrow)), run_micro(micro(**wide))
    assert not equal(params_of(cut), params_of(free))
    before, after = cut.metrics[0], free.metrics[0]
    assert before["policy/clip_high_frac"] > after["policy/clip_high_frac"]
    same = [name for name in before if name.startswith(("rollout/", "reward/", "policy/ratio_max"))]
    assert {name: before[name] for name in same} == {name: after[name] for name in same}


def test_without_dynamic_sampling_flat_groups_are_trained_on_and_no_further_prompt_is_drawn(micro, run_micro):
    """All correct: with the filter there is nothing to learn from, without it a step is its two prompts."""
    off = micro(dynamic_sampling__enabled=False, steps=1)
    [line] = run_micro(off, reward=lambda sample: True).metrics
    expected = {"rollout/prompts": 2, "rollout/trained_groups": 2, "rollout/all_correct_frac": 1.0,
                "rollout/trained_accuracy": 1.0, "rollout/waves": 1, "rollout/surplus_groups": 0}  # fmt: skip
    assert {name: line[name] for name in expected} == expected
    on = micro(steps=1, dynamic_sampling__max_waves=2)
    with pytest.raises(ShortfallError, match="of 6 groups 6 were all correct, 0 all wrong"):
        run_micro(on, reward=lambda sample: True)


def test_the_soft_overlong_punishment_changes_rewards_by_the_penalty_and_nothing_that_is_sampled(
    micro, run_micro
):
    """Free up to 6 - 2 = 4 tokens, -0.5 at 5, -1 at 6."""
    logged = {"steps": 1, "log__rollouts_every_steps": 1}
    on = run_micro(micro(**logged))
    off = run_micro(micro(**logged, reward__overlong__enabled=False))
    shaped, plain = ([json.loads(line) for line in
                      (result.run_dir / "rollouts" / "step_000001.jsonl").read_text().splitlines()]
                     for result in (on, off))  # fmt: skip
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


def test_the_samplers_logprobs_agree_with_the_trainers_at_another_temperature(micro, run_micro):
    """Tempered on both sides, or the ratio of a first update would not be 1: the old log-probabilities are the sampler's
    here, so it is 1 but for rounding."""
    once = {"batch__groups_per_update": 2, "steps": 1}
    config = micro(**once, sampling__temperature=0.6, loss__old_logprobs="sampler")
    [line] = run_micro(config).metrics
    assert 0 < line["sync/logprob_diff_max"] < 1e-4
    assert line["policy/ratio_max"] == pytest.approx(1.0, abs=1e-4)
    assert line["policy/ratio_max"] != 1.0


def test_the_kl_to_the_reference_policy_is_computed_when_asked_for(micro, run_micro, finished):
    """The reference is the policy that training starts from: 0 at the first update, above it after two."""
    [line] = run_micro(micro(steps=1, loss__kl_coef=0.1, loss__dual_clip=1.01, loss__importance_cap=2.0)).metrics
    assert line["policy/kl_ref_k3"] > 0
    assert line["policy/dual_clip_frac"] > 0
    assert "policy/kl_ref_k3" not in finished.metrics[1]
    assert finished.metrics[1]["policy/dual_clip_frac"] == 0


def test_an_own_objective_replaces_the_loss(micro, run_micro):
    """One that is 0 leaves the weights where they are, but for the decay of 0.025 x 0.1 an update, two updates."""

    def nothing(logprobs, old_logprobs, advantages, mask, *, weights):
        return 0.0 * logprobs.sum(), {}

    config = micro(steps=1)
    result = run_micro(config, objective=nothing)
    _, start = load_model(config.model.source)
    for a, b in zip(params_of(result), jax.tree.leaves(start), strict=True):
        np.testing.assert_allclose(a, np.asarray(b) * (1 - 0.025 * 0.1) ** 2, rtol=1e-5)
