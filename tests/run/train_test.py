"""Training runs: their files, and that an interrupted run equals an uninterrupted one."""

import io
import json
import re
import time
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from dapo_jax.checkpoints.checkpointer import Checkpointer
from dapo_jax.checkpoints.manifest import META
from dapo_jax.config import ConfigError, ModelConfig, load_config
from dapo_jax.run.policy import load_policy
from dapo_jax.run.resume_point import IDENTITY
from dapo_jax.run.run_dir import check_run_dir
from dapo_jax.trackers import read_metrics
from dapo_jax.trackers.progress import Progress
from dapo_jax.trackers.rollout_log import read_problems, read_rollouts
from dapo_jax.trackers.run_status import read_status
from tests.run.conftest import assert_equal_weights


def test_every_step_that_samples_logs_the_same_metrics(finished):
    """`metrics_page_test.py` compares them with docs/metrics.md. A step with enough carried groups does not sample."""
    lines = read_metrics(finished.run_dir / "metrics.jsonl")
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4]
    # Only with an evaluation, with clipped tokens, and with tokens of earlier weights.
    sometimes = re.compile("eval|clipped_high_prob|sign_balance|advantage_association")
    names = [
        ({name for name in line if not sometimes.search(name)}, line["rollout/prompts"] > 0)
        for line in lines[1:]
    ]
    first, sampled = names[0]
    assert sampled
    learning = {name for name in first if not name.startswith(("rollout/", "reward/", "watchdog/"))}
    for found, sampled in names[1:]:
        assert found == first if sampled else found >= learning
    assert any(sampled for _, sampled in names[1:])


def test_the_phases_of_a_step_are_parts_of_its_time(finished):
    """Each step saves a checkpoint, so the next one logs its time."""
    lines = finished.metrics[1:]
    for line in lines:
        grade, wait, logprobs = (line[f"time/{name}_s"] for name in ("grade", "wait", "logprobs"))
        assert 0 <= grade <= line["time/sample_s"]
        assert wait == 0
        assert 0 < logprobs < line["time/update_s"]
        assert line["time/between_s"] >= line["time/checkpoint_s"]
    assert lines[0]["time/between_s"] == lines[0]["time/checkpoint_s"] == 0
    assert all(line["time/checkpoint_s"] > 0 for line in lines[1:])
    assert any(line["time/grade_s"] > 0 for line in lines)


def test_there_is_an_evaluation_before_the_first_and_after_the_last_step(finished):
    evaluated = [line["step"] for line in finished.metrics if "eval/arithmetic/avg@4" in line]
    assert evaluated == [0, 4]
    assert {"eval/arithmetic/pass@2", "eval/arithmetic/pass@4"} <= finished.metrics[0].keys()


def test_the_name_of_the_algorithm_is_in_the_configuration_and_in_checkpoints(finished):
    assert (finished.run_dir / "config.yaml").read_text().startswith("# algorithm: dapo\n")
    progress = json.loads((finished.run_dir / "checkpoints" / "4" / META).read_text())["progress"]
    assert progress[IDENTITY]["algorithm"] == "dapo"


def test_a_run_keeps_the_size_of_its_waves_and_is_compared_by_it(micro, run_micro):
    """Two prompts a step: waves of six by default. A configuration that sets six is of the same run."""
    config = micro(steps=0, dynamic_sampling__prompts_per_wave=0)
    run_dir = Path(run_micro(config).run_dir)
    kept = load_config(run_dir / "config.yaml")
    assert kept.dynamic_sampling.prompts_per_wave == 6
    config = replace(config, data=kept.data)
    check_run_dir(run_dir, config, resume=True)
    check_run_dir(run_dir, replace(config, dynamic_sampling=config.resolved().dynamic_sampling), resume=True)
    other = replace(config, dynamic_sampling=replace(config.dynamic_sampling, prompts_per_wave=1536))
    (run_dir / "checkpoints" / "1").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"dynamic_sampling\.prompts_per_wave was 6, is 1536"):
        check_run_dir(run_dir, other, resume=True)


def test_the_score_of_each_problem_is_written_at_every_evaluation(finished):
    files = sorted(path for path in (finished.run_dir / "evaluations").rglob("*") if path.is_file())
    names = [str(path.relative_to(finished.run_dir)) for path in files]
    assert names == [f"evaluations/step_00000{step}/arithmetic.jsonl" for step in (0, 4)]
    for path, line in zip(files, (finished.metrics[0], finished.metrics[-1]), strict=True):
        problems = read_problems(path)
        assert [problem["ordinal"] for problem in problems] == [0, 1]
        assert {problem["step"] for problem in problems} == {line["step"]}
        for key in ("avg@4", "pass@2", "pass@4"):
            mean = sum(problem[key] for problem in problems) / 2
            assert line[f"eval/arithmetic/{key}"] == pytest.approx(mean)
        for problem in problems:  # all of the two times four that the default of 64 has room for
            assert len(problem["responses"]) == problem["samples"] == 4
            assert sum(each["correct"] for each in problem["responses"]) == problem["correct"]


def test_the_first_step_starts_from_the_shipped_weights_and_warms_up(finished):
    assert [line["update/learning_rate"] for line in finished.metrics[1:]] == [0.025, 0.05, 0.05, 0.05]
    assert [line["update/skipped_frac"] for line in finished.metrics[1:]] == [0.0] * 4
    assert (
        finished.metrics[1]["sync/logprob_diff_max"] < 1e-4
    )  # sampler and trainer agree on the same weights


def test_on_step_receives_the_logged_metrics(finished, steps_seen):
    assert [step for step, _ in steps_seen] == [1, 2, 3, 4]
    for (_, seen), line in zip(steps_seen, finished.metrics[1:], strict=True):
        assert seen.keys() | {"step"} == line.keys()
        assert seen["update/loss"] == line["update/loss"]


def test_a_finished_run_has_written_its_model(finished):
    assert_equal_weights(load_policy(ModelConfig(source=str(finished.run_dir / "model"))), finished)
    assert read_status(finished.run_dir).state == "finished"


def test_rollouts_to_read_are_written_when_due(finished):
    """The first step, the last, and every two steps: the three groups of the first step, of four responses."""
    files = sorted(path.name for path in (finished.run_dir / "rollouts").iterdir())
    assert files == [f"step_00000{step}.{kind}" for step in (1, 2, 4) for kind in ("jsonl", "txt")]
    rows = read_rollouts(finished.run_dir / "rollouts" / files[0])
    assert len(rows) == 12
    text = (finished.run_dir / "rollouts" / files[1]).read_text()
    assert all(row["response"] in text for row in rows)
    assert len({row["ordinal"] for row in rows}) == 3
    assert all(row["correct"] == (sum(row["response_token_ids"]) % 2 == 0) for row in rows)


def test_groups_are_carried_from_step_to_step(finished):
    """Otherwise the interruptions below would not cross a boundary with carried groups."""
    assert sum(line["rollout/carried_groups"] > 0 for line in finished.metrics[1:-1]) >= 2


@pytest.mark.parametrize("every_steps", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_run_interrupted_after_every_step_in_turn_is_the_uninterrupted_run(
    every_steps, finished, micro, run_micro, rows, same_run
):
    """With a checkpoint every two steps, an interrupted step is repeated, or the run begins again."""
    config = micro(checkpoint__every_steps=every_steps)
    for stop in (1, 2, 3, 4):

        def interrupt(step, metrics, stop=stop):
            if step == stop:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            run_micro(config, eval_rows=rows, on_step=interrupt, resume=True)
    same_run(run_micro(config, eval_rows=rows, resume=True), finished)


def test_a_run_interrupted_while_it_samples_replays_the_step(
    finished, micro, run_micro, rows, same_run, even_sum
):
    config, graded = micro(checkpoint__every_steps=1), 0

    def interrupt(sample):
        nonlocal graded
        graded += 1
        if graded == 30:  # 8 of the first evaluation, 12 of the first step, then at least 8 a step
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
    shown = io.StringIO()
    said = Progress(4, console=Console(file=shown, width=10_000))
    whole = run_micro(micro(config.run_dir), resume=True, progress=said)
    assert f"continuing from {config.run_dir}/checkpoints/2\n" in shown.getvalue()
    assert_equal_weights(whole, finished)


def test_without_a_checkpoint_a_resumed_run_begins_at_step_0(micro, run_micro):
    config, shown = micro(steps=0), io.StringIO()
    run_micro(config, resume=True, progress=Progress(0, console=Console(file=shown, width=10_000)))
    assert f"there is no checkpoint in {config.run_dir}/checkpoints" in shown.getvalue()


def test_a_resumed_run_has_no_rollouts_and_evaluations_of_steps_that_it_has_not_reached(micro, run_micro):
    """Without a checkpoint, nothing is left of the first attempt, whose configuration may differ."""
    config = micro(
        steps=2, checkpoint__every_steps=0, checkpoint__keep_best=False, log__rollouts_every_steps=1
    )
    run_dir = Path(config.run_dir)
    for folder in ("rollouts", "evaluations"):
        (run_dir / folder).mkdir(parents=True)
    for name in ("step_000001.jsonl", "step_000003.jsonl", "step_000003.txt"):
        (run_dir / "rollouts" / name).touch()
    for name in ("step_000000", "step_000004"):
        (run_dir / "evaluations" / name).mkdir()
        (run_dir / "evaluations" / name / "old.jsonl").touch()
    run_micro(config, resume=True)
    assert {file.name for file in (run_dir / "rollouts").glob("*.jsonl")} == {
        "step_000001.jsonl",
        "step_000002.jsonl",
    }
    assert not (run_dir / "rollouts" / "step_000003.txt").exists()
    assert not [*run_dir.glob("evaluations/*/old.jsonl")]


def test_a_run_is_neither_written_over_nor_resumed_under_another_configuration(finished, micro, run_micro):
    with pytest.raises(ConfigError, match="already contains a run; resume it with --resume"):
        run_micro(micro(finished.run_dir))
    changed = micro(finished.run_dir, optimizer__learning_rate=0.1, eval__prompts=1)
    with pytest.raises(ConfigError, match=r"optimizer\.learning_rate was 0\.05, is 0\.1") as error:
        run_micro(changed, resume=True)
    assert "eval.prompts" not in str(error.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data__source": "arithmetics"}, "did you mean 'arithmetic'"),
        ({"model__source": "shipped:quikstart"}, "available: code_quickstart, quickstart"),
        ({"reward__grader": "exat"}, "did you mean 'exact'"),
        ({"sampling__slots": 12}, r"slots=12 .* parallel.fsdp = 8, .* 16"),
        ({"batch__row_tokens": 0, "sampling__max_response_tokens": 500}, "504 positions, .* has 128"),
        ({"parallel__data": 3}, "multiple of 3 devices, but there are 8"),
    ],
)
def test_keys_that_do_not_fit_are_refused_before_anything_is_written(
    changes, message, micro, run_micro, rows, tmp_path
):
    """A folder with a config.yaml would be taken for a run when the corrected configuration is started."""
    config = micro(tmp_path / "run", **changes)
    with pytest.raises(ConfigError, match=message):
        run_micro(config, reward=None, prompts=None if "data__source" in changes else rows)
    assert not (tmp_path / "run").exists()


def test_an_objective_that_does_not_fit_is_refused_before_anything_is_written(micro, run_micro, tmp_path):
    def scalar(logprobs, old_logprobs, advantages, mask, *, weights):
        return (logprobs * weights).sum()

    with pytest.raises(ValueError, match=r"objective .*scalar .*float32.*\(loss, metrics\)"):
        run_micro(micro(tmp_path / "run"), objective=scalar)
    assert not (tmp_path / "run").exists()


def test_a_run_keeps_the_day_on_which_it_began(micro, run_micro):
    config = micro(steps=0)
    run_micro(config)
    kept = Path(config.run_dir) / "config.yaml"
    today = load_config(kept).data.template_date
    assert today
    kept.write_text(kept.read_text().replace(today, "2024-07-26"))
    run_micro(config, resume=True)
    assert load_config(kept).data.template_date == "2024-07-26"
    other = replace(config, data=replace(config.data, template_date="2024-07-27"))
    (Path(config.run_dir) / "checkpoints" / "1").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"data\.template_date was '2024-07-26', is '2024-07-27'"):
        run_micro(other, resume=True)


def test_a_second_train_of_one_folder_is_refused(micro, run_micro):
    config, refused = micro(steps=2), []

    def again(step, metrics):
        with pytest.raises(ConfigError, match=r"run_dir=.*: in use by this process itself"):
            run_micro(config, resume=True)
        refused.append(step)

    assert [line["step"] for line in run_micro(config, on_step=again).metrics] == refused == [1, 2]


def test_after_an_error_the_folder_is_free_again(micro, run_micro):
    config = micro(steps=1)
    with pytest.raises(ConfigError, match="no shipped model 'nothing'"):
        run_micro(replace(config, model=replace(config.model, source="shipped:nothing")))

    def fails(step, metrics):
        raise ValueError("on_step")

    with pytest.raises(ValueError, match="on_step"):
        run_micro(config, on_step=fails)
    assert len(run_micro(config, resume=True).metrics) == 1


def test_the_wait_for_the_previous_save_is_time_for_checkpoints(micro, run_micro, rows, monkeypatch):
    """A search for the best score waits for the save that is under way, here for half a second after each evaluation."""
    best = Checkpointer.best

    def slow(self, measure):
        time.sleep(0.5)
        return best(self, measure)

    monkeypatch.setattr(Checkpointer, "best", slow)
    lines = run_micro(micro(steps=2, eval__every_steps=1), eval_rows=rows).metrics
    assert [line["time/checkpoint_s"] > 0.5 for line in lines if "time/checkpoint_s" in line] == [False, True]
