"""Reward functions: what they get, what they may return, and how they are found."""

import re
import sys

import numpy as np
import pytest

from dapo_jax.dapo.rollouts import Verdict
from dapo_jax.health.stopping import StoppedError
from dapo_jax.rewards import as_verdict, grade_function, load_function, whole_group
from dapo_jax.rewards.functions import RewardError, load_reward
from tests.rewards.samples import sample, samples

SAMPLE = sample("=2", prompt="1+1", answer="2")


def graded(spec, **options):
    [verdict] = grade_function(spec, **options)([SAMPLE])
    return verdict


@pytest.mark.parametrize(
    ("value", "correct"),
    [(0.25, True), (0.0, False), (-1, False), (np.float32(0.5), True), (np.int64(-3), False)],
)
def test_number_is_a_score_that_is_correct_above_zero(value, correct):
    verdict = as_verdict(value, name="f")
    assert verdict == Verdict(correct=correct, score=float(value))
    assert type(verdict.score) is float


def test_one_verdict_object_for_all_responses_is_each_ones_as_it_was_returned():
    one = Verdict(correct=True, parts={"n": 0})

    def counted(sample):
        one.parts["n"] += 1
        return one

    assert [verdict.parts for verdict in grade_function(counted)([SAMPLE] * 2)] == [{"n": 1}, {"n": 2}]


def test_a_verdict_that_is_lost_and_correct_is_refused():
    with pytest.raises(RewardError, match="<lambda> returned a verdict with correct=True and lost='timeout'"):
        graded(lambda sample: Verdict(correct=True, lost="timeout"))
    assert graded(lambda sample: Verdict(correct=False, lost="timeout")).lost == "timeout"
    # A sum of several graders may be both: the first decides whether the response is correct, and another was lost.
    assert graded(lambda sample: Verdict(correct=True, lost="timeout", parts={"a": 1.0, "b": -1.0})).correct


@pytest.mark.parametrize(
    "score",
    [
        1e200,
        -1e31,
        np.float64(1e308),
        Verdict(correct=True, score=1e200),
        float("nan"),
        np.float32("-inf"),
        Verdict(correct=True, score=float("inf")),
    ],
)
def test_a_score_whose_advantages_would_overflow_is_refused_by_name(score):
    with pytest.raises(RewardError, match=r"<lambda> returned .*(1e\+|nan|inf).*1e\+30"):
        graded(lambda sample: score)
    assert graded(lambda sample: -1e30).score == -1e30


def test_a_score_that_is_not_finite_is_refused_with_its_prompt_and_response():
    @whole_group
    def scores(samples):
        return [1.0, float("inf"), False]

    with pytest.raises(RewardError, match=r"scores returned inf; .*; prompt 7 \('1\+1'\), response '=2'"):
        grade_function(scores)([SAMPLE] * 3)


@pytest.mark.parametrize("value", [None, "1.0", [1.0], np.array([1.0, 2.0]), 1j])
def test_other_types_are_refused_with_the_functions_name(value):
    with pytest.raises(ValueError, match=r"reward function f returned .* must return a bool"):
        as_verdict(value, name="f")


def writes_tokens(sample):
    sample.tokens[:] = 0


def writes_prompt_tokens(sample):
    sample.prompt.tokens[:] = 0


@pytest.mark.parametrize(
    "writes", [writes_tokens, writes_prompt_tokens, whole_group(lambda group: writes_tokens(group[0]))]
)
def test_a_function_that_writes_to_the_tokens_is_refused_and_they_stay(writes):
    """They are the trainer's own: written to, other tokens would be trained on than were sampled."""
    handed_over = sample("=2")
    with pytest.raises(RewardError, match=r"raised ValueError: .*read-only \(functions_test\.py, line \d+\)"):
        grade_function(writes)([handed_over])
    np.testing.assert_array_equal(handed_over.tokens, [3, 4, 5])
    np.testing.assert_array_equal(handed_over.prompt.tokens, [1, 2])
    assert handed_over.tokens.flags.writeable  # the caller's array is as it was


def test_changes_of_a_row_do_not_reach_other_calls():
    row = {"level": 3, "tags": ["a"], "deep": {"n": np.zeros(2)}}

    def counts(sample):
        changed = sample.prompt.row
        changed["level"] += 1
        changed["tags"].append("b")
        changed["deep"]["n"] += 1
        return changed["level"] + len(changed["tags"]) + changed["deep"]["n"].sum()

    assert [verdict.score for verdict in grade_function(counts)([sample(row=row)] * 2)] == [8.0, 8.0]
    assert (row["level"], row["tags"]) == (3, ["a"])
    assert not row["deep"]["n"].any()


def test_long_responses_are_handed_over_without_a_copy():
    seen = []
    graded(lambda sample: bool(seen.append(sample)))
    assert np.shares_memory(seen[0].tokens, SAMPLE.tokens)


def test_function_that_raises_names_the_prompt():
    def broken(sample):
        return sample.prompt.row["missing"]

    place = r"\(functions_test\.py, line \d+\); prompt 7 \('1\+1'\), response '=2'"
    with pytest.raises(RuntimeError, match=rf"broken raised KeyError: 'missing' {place}"):
        graded(broken)


@pytest.mark.parametrize("kind", [list, tuple, np.array])
def test_a_whole_group_function_sees_all_responses_and_answers_for_each(kind):
    seen = []

    @whole_group
    def reward(group):
        seen.append([sample.response for sample in group])
        return kind([1.0, 0.0, -2.0])

    verdicts = grade_function(reward)(samples("a", "b", "c"))
    assert seen == [["a", "b", "c"]]
    assert [verdict.score for verdict in verdicts] == [1.0, 0.0, -2.0]
    assert [verdict.correct for verdict in verdicts] == [True, False, False]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        *(([True] * found, f"returned {found} verdicts for 2 responses") for found in (0, 1, 3)),
        *((value, r"for 2 responses; .* list") for value in (1.0, None, "ab", Verdict(correct=True))),
    ],
)
def test_a_group_needs_a_list_with_a_verdict_for_each_response(value, words):
    with pytest.raises(RewardError, match=words):
        grade_function(whole_group(lambda group: value))(samples("a", "b"))


def test_an_async_function_is_not_graded_without_an_event_loop():
    async def judge(sample):
        return True

    with pytest.raises(ValueError, match=r"judge is async and needs an event loop"):
        grade_function(judge)


def reward_file(folder, text):
    path = folder / "my_reward.py"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("name", "message"),
    [("number", "'number' is of type int, which cannot be called"), ("", "must have the form"), ("gread", "did you mean 'grade'")],
)  # fmt: skip
def test_a_name_without_a_function_is_refused(name, message, tmp_path):
    file = reward_file(tmp_path, "number = 3\ndef grade(sample):\n    return True\n")
    with pytest.raises(ValueError, match=message):
        load_function(f"{file}:{name}")


def test_a_file_that_fails_is_named_with_its_error(tmp_path):
    for text, error in (("1 / 0", "ZeroDivisionError"), ("def f(:", "SyntaxError")):
        file = reward_file(tmp_path, text)
        with pytest.raises(ValueError, match=rf"{file} fails with {error}"):
            load_function(f"{file}:f")


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


@pytest.fixture
def own_imports(monkeypatch):
    """Takes back what a test adds to Python's path and modules."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        del sys.modules[name]


NEIGHBOURS = """
import hints
from bare.more import more
from parts.scale import scale

def f(sample):
    from late import offset
    return hints.base * scale + offset + more
"""
"""Imports a file, files of a package and of a plain folder, and a file when it is called."""


@pytest.mark.usefixtures("own_imports")
def test_a_file_imports_the_files_next_to_it(tmp_path):
    for name, text in {
        "parts/__init__.py": "", "parts/scale.py": "scale = 10", "bare/more.py": "more = 100",
        "hints.py": "from deeper import base", "deeper.py": "base = 2", "late.py": "offset = 3",
    }.items():  # fmt: skip
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert load_function(f"{reward_file(tmp_path, NEIGHBOURS)}:f")(SAMPLE) == 2 * 10 + 3 + 100


def test_a_file_or_module_that_exits_while_it_is_loaded_is_named_and_ends_nothing(tmp_path, monkeypatch):
    path = tmp_path / "leaves.py"
    path.write_text("import sys\ndef f(sample):\n    return True\nsys.exit(0)\n")
    before = set(sys.modules)
    with pytest.raises(ValueError, match=re.escape(f"{path} calls sys.exit(0) while it is loaded")):
        load_function(f"{path}:f")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=re.escape("the module 'leaves' calls sys.exit(0)")):
        load_function("leaves:f")
    assert not {name for name in set(sys.modules) - before if "leaves" in name}


def test_a_function_that_raises_what_is_no_exception_is_named_and_a_stop_of_the_run_passes():
    def raising(error):
        def reward(sample):
            raise error

        return reward

    for error in (GeneratorExit(), BaseException("x"), SystemExit(0)):
        with pytest.raises(RewardError, match=f"raised {type(error).__name__}.*; prompt 7"):
            graded(raising(error))
    for error in (KeyboardInterrupt(), StoppedError("SIGTERM")):
        with pytest.raises(type(error)):
            graded(raising(error))


@pytest.mark.parametrize(("grader", "reads_thoughts"), [("math", False), ("gsm8k", False), ("dapo", True)])
def test_a_response_that_ends_in_thoughts_of_its_prompt_has_no_answer(grader, reads_thoughts):
    """The chat template ends the prompt with `<think>`, and the response is cut off before `</think>`."""
    for text, correct in (("<think>\n", reads_thoughts), ("<think>\n\n</think>\n", True)):
        [verdict] = grade_function(grader)([sample("Answer: 2", prompt=text, answer="2")])
        assert verdict.correct is correct


@pytest.mark.parametrize(
    ("head", "library"),
    [
        ("def f(completions, **kwargs)", "trl"),
        ("def f(prompts, completions, answer, **kwargs)", "trl"),
        ("async def f(completions, trainer_state=None)", "trl"),
        ("def f(data_source, solution_str, ground_truth, extra_info=None)", "verl"),
        ("def f(solution_str, ground_truth, method='strict')", "verl"),
    ],
)
def test_a_function_of_another_library_is_answered_with_its_prefix(head, library, tmp_path):
    file = reward_file(tmp_path, f"{head}:\n    return 1.0\n")
    spec = f"{file}:f"
    with pytest.raises(ValueError, match=re.escape(f"{library}:{spec}")):
        load_reward(spec)
    assert load_reward(f"{library}:{spec}").name == f"{library}:{spec}"
    with pytest.raises(ValueError, match=rf"adapters\.{library}_reward"):
        load_reward(load_function(spec))
    assert load_reward(lambda completions: True).name  # a function with one parameter may call it so
