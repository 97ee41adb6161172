"""Reward functions: what they get, what they may return, and how they are found."""

import dataclasses
import subprocess
import sys
import types

import numpy as np
import pytest

from dapo_jax.rewards import Sample, as_verdict, grade_function, load_function, whole_group
from dapo_jax.rewards.functions import RewardError
from dapo_jax.rollouts import Prompt, Verdict

PROMPT = Prompt(ordinal=7, tokens=np.array([5, 6], np.int32), text="1+1", answer="2", row={"level": 3})
SAMPLE = Sample(prompt=PROMPT, response="=2", tokens=np.array([4, 5, 1], np.int32), finish_reason="stop")


def graded(spec, **options):
    [verdict] = grade_function(spec, **options)([SAMPLE])
    return verdict


def test_sample_knows_its_answer_and_length():
    assert SAMPLE.answer == "2"
    assert SAMPLE.response_tokens == 3


@pytest.mark.parametrize("value", [True, False, np.True_, np.False_])
def test_bool_is_a_plain_verdict(value):
    assert as_verdict(value, name="f") == Verdict(correct=bool(value))


@pytest.mark.parametrize(
    ("value", "correct"),
    [
        (1.0, True),
        (0.25, True),
        (0.0, False),
        (-1.0, False),
        (2, True),
        (0, False),
        (np.float32(0.5), True),
        (np.int64(-3), False),
    ],
)
def test_number_is_a_score_that_is_correct_above_zero(value, correct):
    verdict = as_verdict(value, name="f")
    assert verdict == Verdict(correct=correct, score=float(value))
    assert type(verdict.score) is float


def test_verdict_stays_as_it_is():
    verdict = Verdict(correct=False, score=0.5, reason="half right")
    assert as_verdict(verdict, name="f") is verdict


@pytest.mark.parametrize(
    "value", [float("nan"), float("inf"), np.float32("-inf"), Verdict(correct=True, score=float("nan"))]
)
def test_score_that_is_not_finite_is_refused_with_the_functions_name(value):
    with pytest.raises(ValueError, match=r"reward function my\.py:f returned .*(nan|inf)"):
        as_verdict(value, name="my.py:f")


def test_of_a_group_only_the_response_with_a_score_that_is_not_finite_is_lost():
    @whole_group
    def scores(samples):
        return [1.0, float("inf"), False]

    verdicts = grade_function(scores, on_nonfinite="lost")([SAMPLE] * 3)
    assert [(verdict.correct, verdict.lost) for verdict in verdicts] == [
        (True, ""), (False, "nonfinite"), (False, ""),
    ]  # fmt: skip
    assert "scores returned inf" in verdicts[1].reason
    words = r"scores returned inf; .*; prompt 7 \('1\+1'\), response '=2'; .*reward\.on_nonfinite=lost"
    with pytest.raises(RewardError, match=words):
        grade_function(scores)([SAMPLE] * 3)


@pytest.mark.parametrize("value", [None, "1.0", [1.0], np.array([1.0, 2.0]), 1j])
def test_other_types_are_refused_with_the_functions_name(value):
    with pytest.raises(ValueError, match=r"reward function f returned .* must return a bool"):
        as_verdict(value, name="f")


def test_named_grader_compares_with_the_answer():
    assert graded("exact").correct
    assert not graded("exact", answer_marker="#").correct


def test_function_sees_the_sample_and_its_row():
    assert graded(lambda sample: sample.prompt.row["level"] / 4).score == 0.75


def test_unknown_grader_is_answered_with_the_nearest():
    with pytest.raises(ValueError, match="named 'exakt'; did you mean 'exact'"):
        grade_function("exakt")


def test_function_that_raises_names_the_prompt():
    def broken(sample):
        return sample.prompt.row["missing"]

    with pytest.raises(
        RuntimeError,
        match=r"broken raised KeyError: 'missing' \(functions_test\.py, line \d+\); prompt 7 \('1\+1'\), response '=2'",
    ):
        graded(broken)


def test_bad_result_is_an_error_when_graded():
    with pytest.raises(RewardError, match="returned None"):
        graded(lambda sample: None)


def samples(*responses):
    return [dataclasses.replace(SAMPLE, response=response) for response in responses]


@pytest.mark.parametrize("kind", [list, tuple, np.array])
def test_a_whole_group_function_sees_all_responses_and_answers_for_each(kind):
    seen = []

    @whole_group
    def reward(group):
        seen.append([sample.response for sample in group])
        return kind([1.0, 0.0, -2.0])

    verdicts = grade_function(reward)(samples("a", "b", "c"))
    assert seen == [["a", "b", "c"]]
    assert [(verdict.correct, verdict.score) for verdict in verdicts] == [
        (True, 1.0),
        (False, 0.0),
        (False, -2.0),
    ]


def test_a_function_of_one_response_is_called_once_for_each():
    verdicts = grade_function(lambda sample: sample.response == "=2")(samples("=3", "=2", "=2"))
    assert [verdict.correct for verdict in verdicts] == [False, True, True]


def test_a_whole_group_function_is_found_in_a_file(tmp_path):
    text = "from dapo_jax.rewards import whole_group\n@whole_group\ndef f(group):\n    return [len(group)] * len(group)\n"
    verdicts = grade_function(f"{reward_file(tmp_path, text)}:f")(samples("a", "b"))
    assert [verdict.score for verdict in verdicts] == [2.0, 2.0]


@pytest.mark.parametrize(("count", "found"), [(3, 2), (2, 3), (2, 0)])
def test_a_wrong_number_of_verdicts_names_both_numbers(count, found):
    reward = whole_group(lambda group: [True] * found)
    with pytest.raises(RewardError, match=f"returned {found} verdicts for {count} responses"):
        grade_function(reward)(samples(*"abc"[:count]))


@pytest.mark.parametrize("value", [1.0, True, None, "ab", Verdict(correct=True)])
def test_one_verdict_for_a_whole_group_is_refused(value):
    with pytest.raises(
        RewardError, match=r"for 2 responses; one that takes a whole group must return a list"
    ):
        grade_function(whole_group(lambda group: value))(samples("a", "b"))


def test_a_whole_group_function_that_raises_names_the_prompt_and_how_many_responses():
    @whole_group
    def broken(group):
        raise KeyError("missing")

    with pytest.raises(
        RuntimeError,
        match=r"broken raised KeyError: 'missing' \(functions_test\.py, line \d+\); prompt 7 .*, 3 responses$",
    ):
        grade_function(broken)(samples("a", "b", "c"))


def test_an_async_function_is_not_graded_without_an_event_loop():
    async def judge(sample):
        return True

    with pytest.raises(ValueError, match=r"judge is async and needs an event loop"):
        grade_function(judge)


def test_a_coroutine_of_a_plain_function_is_refused_with_the_remedy():
    async def judge(sample):
        return True

    with pytest.raises(
        RewardError, match="returned a coroutine; it is awaited only if `async def` defines it"
    ):
        grade_function(lambda sample: judge(sample))([SAMPLE])


def reward_file(tmp_path, text, name="my_reward.py"):
    path = tmp_path / name
    path.write_text(text)
    return path


def test_function_is_loaded_from_a_file(tmp_path):
    path = reward_file(tmp_path, "def short(sample):\n    return sample.response_tokens < 5\n")
    assert graded(f"{path}:short") == Verdict(correct=True)


def test_file_may_define_dataclasses(tmp_path):
    """A dataclass looks its module up in sys.modules while the file runs."""
    text = "from dataclasses import dataclass\n@dataclass\nclass A:\n    x: 'int' = 1\ndef f(sample):\n    return A().x\n"
    assert load_function(f"{reward_file(tmp_path, text)}:f")(SAMPLE) == 1


def test_files_of_one_name_in_two_folders_stay_apart(tmp_path):
    functions = []
    for value in (1, 2):
        (tmp_path / str(value)).mkdir()
        path = reward_file(tmp_path / str(value), f"def f(sample):\n    return {value}\n")
        functions.append(load_function(f"{path}:f"))
    assert [function(SAMPLE) for function in functions] == [1, 2]


def test_function_is_loaded_from_a_module(monkeypatch):
    module = types.ModuleType("my_rewards")
    module.always = lambda sample: True
    monkeypatch.setitem(sys.modules, "my_rewards", module)
    assert graded("my_rewards:always").correct


@pytest.mark.parametrize("spec", ["reward.py", ":f", "module:"])
def test_spec_without_module_or_function_is_refused(spec):
    with pytest.raises(ValueError, match="names no function; write module:function"):
        load_function(spec)


def test_missing_file_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"there is no file .*absent\.py"):
        load_function(f"{tmp_path}/absent.py:f")


def test_missing_module_is_named():
    with pytest.raises(ValueError, match="cannot import the module 'no_such_module'"):
        load_function("no_such_module:f")


def test_missing_function_is_answered_with_the_nearest(tmp_path):
    path = reward_file(tmp_path, "def reward(sample):\n    return 1\n")
    with pytest.raises(ValueError, match="has no 'rewrad'; did you mean 'reward'"):
        load_function(f"{path}:rewrad")


def test_name_that_is_no_function_is_refused(tmp_path):
    path = reward_file(tmp_path, "reward = 3\n")
    with pytest.raises(ValueError, match="'reward' is of type int, which cannot be called"):
        load_function(f"{path}:reward")


def test_file_that_fails_to_run_says_why_and_is_forgotten(tmp_path):
    path = reward_file(tmp_path, "import nowhere_to_be_found\n")
    before = set(sys.modules)
    with pytest.raises(
        ValueError, match="fails to run: ModuleNotFoundError: No module named 'nowhere_to_be_found'"
    ):
        load_function(f"{path}:f")
    assert not {name for name in set(sys.modules) - before if name.startswith("dapo_jax_file")}


def test_importing_the_rewards_stays_light():
    heavy = {"flax", "optax", "orbax", "grain", "tensorflow_datasets", "omegaconf"}
    code = "import sys, dapo_jax.rewards; print(*{m.split('.')[0] for m in sys.modules})"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert not heavy & set(loaded.split())
