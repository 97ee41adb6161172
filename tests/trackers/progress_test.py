"""The progress view, rendered to text."""

import io
import math
import signal

import pytest
from rich.console import Console

from dapo_jax.trackers.progress import Progress

METRICS = {
    "rollout/accuracy": 0.609,
    "reward/mean": 0.2184,
    "rollout/response_tokens": 18.16,
    "policy/entropy": 0.41,
    "speed/sampled_tokens_per_s": 4130.0,
    "time/step_s": 1.86,
}


class Clock:
    """A clock that the test advances."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def plain():
    return Console(file=io.StringIO(), width=40)


def terminal():
    """Returns a console that redraws, and records the last view."""
    return Console(
        file=io.StringIO(), width=100, height=30, force_terminal=True, record=True, _environ={"TERM": "xterm"}
    )


def printed(console):
    return console.file.getvalue()


def view_of(progress):
    console = Console(file=io.StringIO(), width=100, record=True)
    console.print(progress._view())
    return console.export_text()


def test_work_before_the_first_step_is_a_line_or_a_phase():
    lines = []
    for terminal in (False, True):
        text = io.StringIO()
        Progress(4, console=Console(file=text, force_terminal=terminal, width=80)).starting("loading a model")
        lines.append(text.getvalue())
    assert lines == ["loading a model ...\n", ""]


def test_a_step_is_one_short_line_when_no_terminal_listens():
    clock, console = Clock(), plain()
    with Progress(120, console=console, clock=clock) as progress:
        for step in (11, 12):
            clock.now += 1.85
            progress.step(step, METRICS)
    # 108 steps to go at 1.85 s each: 199.8 s.
    assert printed(console).splitlines()[-1] == (
        "step  12/120  reward 0.218  acc 0.61  len 18.2  entropy 0.41  4.1k tok/s  1.9 s/step  eta 3m20s"
    )


def test_time_left_counts_what_happens_between_steps_but_not_the_first_compilation():
    clock = Clock()
    progress = Progress(10, console=plain(), clock=clock)
    clock.now = 500.0  # compiled
    progress.step(1, {"time/step_s": 3.0})
    assert progress.line().endswith("eta 27s")  # 9 x 3 s: nothing better is known yet
    for step in (2, 3):
        clock.now += 10.0  # 3 s of step, 7 s of evaluation
        progress.step(step, {"time/step_s": 3.0})
    assert progress.line().endswith("eta 1m10s")  # 7 x 10 s


@pytest.mark.parametrize("metrics", [{}, dict.fromkeys(METRICS, math.nan), dict.fromkeys(METRICS, math.inf)])
def test_a_missing_number_is_a_dash(metrics):
    console = plain()
    with Progress(9, console=console) as progress:
        progress.step(1, metrics)
    assert printed(console) == "step 1/9  reward -  acc -  len -  entropy -  - tok/s  - s/step  eta -\n"
    assert "nan" not in view_of(progress)


def test_evaluation_and_messages_are_lines_of_their_own():
    console = plain()
    with Progress(9, console=console) as progress:
        progress.phase("sampling", 3, 8)
        progress.evaluation(
            "arithmetic",
            {
                "eval/arithmetic/pass@8": 0.9,
                "eval/arithmetic/avg@8": 0.721,
                "eval/arithmetic/avg@8_stderr": 0.012,
                "eval/arithmetic/reward": 0.4421,
                "eval/arithmetic/reward_stderr": 0.0243,
                "eval/other/avg@8": 0.1,
            },
            4,
        )
        progress.message(
            "saved [bold]checkpoint[/bold] 4 in a folder whose name is longer than the console is wide"
        )
    assert printed(console) == (
        "eval  arithmetic  avg@8 0.72 ± 0.01  pass@8 0.90  reward 0.442 ± 0.0243  (step 4)\n"
        "saved [bold]checkpoint[/bold] 4 in a folder whose name is longer than the console is wide\n"
    )


def test_a_message_shows_no_token_and_nothing_that_a_terminal_would_obey(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_0123456789")
    console = plain()
    Progress(4, console=console).message("asked with hf_0123456789 \x1b[31m")
    assert printed(console) == "asked with $HF_TOKEN \\x1b[31m\n"


def test_an_evaluation_shows_what_counts_over_all_samples():
    """Of pass@2, pass@4 and pass@16, only the last is shown, because k is compared as a number."""
    console = plain()
    scores = {
        f"eval/a/{key}": 0.5 for key in ("avg@16", "pass@2", "pass@4", "pass@16", "cons@16", "problems")
    }
    with Progress(9, console=console) as progress:
        progress.evaluation("a", scores, 4)
        progress.evaluation("b", scores, 4)
    assert printed(console) == (
        "eval  a  avg@16 0.50  cons@16 0.50  pass@16 0.50  (step 4)\neval  b  -  (step 4)\n"
    )


def test_where_scores_count_no_share_of_correct_responses_is_shown():
    """With rewards below 0 no response counts as correct, so `acc 0.00` and `avg@8 0.00` would mislead."""
    console, metrics = plain(), METRICS | {"rollout/accuracy": 0.0, "reward/mean": -0.2238}
    with Progress(120, metric="score", console=console) as progress:
        progress.step(12, metrics)
        progress.evaluation("own", {"eval/own/avg@8": 0.0, "eval/own/reward": -0.31}, 12)
        text = view_of(progress)
    assert printed(console) == (
        "step  12/120  reward -0.224  len 18.2  entropy 0.41  4.1k tok/s  1.9 s/step  eta 3m21s\n"
        "eval  own  reward -0.31  (step 12)\n"
    )
    assert "-0.224" in text
    assert "accuracy" not in text


def test_the_live_view_shows_where_the_run_is():
    clock, console = Clock(), terminal()
    with Progress(120, console=console, clock=clock) as progress:
        progress.step(11, METRICS)
        clock.now += 1.85
        progress.step(12, METRICS)
        progress.evaluation("arithmetic", {"eval/arithmetic/avg@8": 0.72}, 10)
        progress.phase("sampling", 384, 512)
        clock.now += 65.0
        progress.message("kept above")
        text = view_of(progress)
    shown = [
        "12/120",
        "eta 3m20s",
        "sampling",
        "384/512",
        "1m05s",
        "0.61",
        "0.218",
        "18.2",
        "0.41",
        "4.1k",
        "1.9",
    ]
    assert [words for words in shown if words not in text] == []
    assert "arithmetic  avg@8 0.72  (step 10)" in text
    assert max(map(len, text.splitlines())) <= 80
    screen = printed(console)
    assert "kept above" in screen
    assert "384/512" in screen
    assert "step  12/120  reward" not in screen, "the live view replaces the plain lines"


def test_how_a_wave_goes_is_in_the_live_view_until_the_step_ends():
    console = terminal()
    with Progress(120, console=console) as progress:
        progress.wave("wave 2  prompts 31/48  mixed 3")
        assert "wave 2  prompts 31/48  mixed 3" in view_of(progress)
        progress.step(1, METRICS)
        assert "wave 2" not in view_of(progress)


def test_without_a_terminal_a_wave_is_a_line_after_a_quarter_of_a_minute_of_silence():
    clock, console = Clock(), plain()
    with Progress(120, console=console, clock=clock) as progress:
        for graded in range(1, 5):
            clock.now += 6.0
            progress.wave(f"prompts {graded}/48")
        progress.step(1, METRICS)  # at 24 s
        clock.now += 14.0
        progress.wave("prompts 1/48")
        clock.now += 1.0
        progress.wave("prompts 2/48")
    first, step, second = printed(console).splitlines()
    assert (first, second) == ("step 1  sampling: prompts 3/48", "step 2  sampling: prompts 2/48")
    assert step.startswith("step   1/120")


def test_the_live_view_can_be_drawn_before_anything_is_known():
    text = view_of(Progress(10, console=terminal()))
    assert "0/10" in text
    assert "eta -" in text
    assert "held out" in text


def test_an_exception_restores_the_cursor_and_no_signal_handler_changes():
    console = terminal()
    handler = signal.getsignal(signal.SIGINT)

    def interrupted():
        with Progress(10, console=console):
            assert signal.getsignal(signal.SIGINT) is handler
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert printed(console).rstrip().endswith("\x1b[?25h")  # show the cursor
    with Progress(10, console=console):
        pass  # a second view can start


def test_a_notebook_without_widgets_gets_plain_lines(monkeypatch):
    console = Console(file=io.StringIO(), force_jupyter=True)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    shown = []
    monkeypatch.setattr(console, "print", lambda text, **_: shown.append(text))
    with Progress(9, console=console) as progress:
        progress.step(1, {})
    assert shown == ["step 1/9  reward -  acc -  len -  entropy -  - tok/s  - s/step  eta -"]


def test_a_listener_gets_every_phase():
    phases = []
    progress = Progress(10, console=terminal())
    progress.listen(lambda *phase: phases.append(phase))
    progress.phase("update", 1, 16)
    progress.phase("checkpoint")
    assert phases == [("update", 1, 16), ("checkpoint", None, None)]
