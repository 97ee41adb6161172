"""Processes of one run: none waits forever for another that is gone, and each prints why it ended."""

import re
import signal
import time

import pytest

from dapo_jax.cli import main
from dapo_jax.config import ConfigError
from dapo_jax.health.stopping import STOPPED
from dapo_jax.parallel.processes import described, wanted
from tests import several

WAITING = """
import sys
import os, signal, time
from contextlib import ExitStack
from dapo_jax.config import ConfigError
from dapo_jax.parallel import processes
from dapo_jax.parallel.together import all_gather_bytes
from dapo_jax.health.stopping import STOPPED, StoppedError, stopped_by_signals

def work(index, how):
    all_gather_bytes(b"all are here")
    print("ready", flush=True)
    if index != int(sys.argv[2]):
        all_gather_bytes(b"never answered")
    elif how == "raise":
        raise ValueError("seven is no prompt")
    elif how == "config":
        raise ConfigError("model.layers: found 0")
    elif how == "unwind":
        with ExitStack() as stack:
            stack.callback(lambda: all_gather_bytes(b"for which the others have no answer"))
            stack.push(processes.tell_others)
            raise ValueError("seven is no prompt")
    time.sleep(600)

with stopped_by_signals(processes.end) as stop:
    stop.grace_s = 6.0
    processes.start(stop=stop)
    import jax
    try:
        work(jax.process_index(), sys.argv[1])
    except StoppedError:
        print("stopped", flush=True)
        processes.leave()
        sys.exit(STOPPED)
    except Exception as error:
        configured = isinstance(error, ConfigError)
        processes.fail(2 if configured else 1, processes.described(error), by_all=configured)
"""


LEAVING = """
import sys
from dapo_jax.parallel import processes
processes.start()
processes._here._client = type("Slow", (), {"key_value_dir_get": lambda self, folder: __import__("time").sleep(1) or []})()
processes.leave()
assert not processes._here._listener.is_alive()
"""


def test_after_leave_no_thread_listens():
    """A thread that is in a call of the coordination service at the interpreter's end aborts the process."""
    several.run(LEAVING, processes=2, devices=1)


def ended(how, failing, *, processes=2, kill=None, within_s=60):
    """Returns [(status, output)] after one process has failed, and the seconds from then to the end."""
    started = several.start(WAITING, how, failing, processes=processes, devices=1)
    began = time.monotonic()
    if kill is not None:
        while "ready" not in started[failing].stdout.readline():
            pass
        time.sleep(1)
        began = time.monotonic()
        started[failing].send_signal(kill)
    if kill == signal.SIGSTOP:
        survivors = [each for index, each in enumerate(started) if index != failing]
        try:
            done = several.finish(survivors, within_s=within_s)
        finally:
            started[failing].kill()
            started[failing].communicate()
        done.insert(failing, (None, ""))
    else:
        done = several.finish(started, within_s=within_s)
    return done, time.monotonic() - began


@pytest.mark.parametrize("failing", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_an_exception_in_one_process_ends_the_others_with_its_message(failing):
    done, _ = ended("raise", failing, processes=3, within_s=140)
    assert [status for status, _ in done] == [1, 1, 1]
    for index, (_, output) in enumerate(done):
        assert "ValueError: seven is no prompt" in output
        assert (f"process {index} of 3 ends because process {failing} failed" in output) == (index != failing)
        assert "asked to stop" not in output


@pytest.mark.slow
def test_unwinding_does_not_wait_for_processes_that_wait_for_it():
    done, _ = ended("unwind", 1, within_s=145)
    assert [status for status, _ in done] == [1, 1]
    assert all("seven is no prompt" in output for _, output in done)


@pytest.mark.slow
def test_a_configuration_error_of_one_process_ends_all_with_status_2():
    done, _ = ended("config", 1, within_s=145)
    assert [status for status, _ in done] == [2, 2]
    assert all("model.layers: found 0" in output for _, output in done)


@pytest.mark.parametrize("kill", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_stop_of_one_process_stops_the_others_within_the_time_of_grace(kill):
    """The other one is in a collective, so it ends by its own time of grace."""
    done, took = ended("wait", 1, kill=kill, within_s=145)
    assert [status for status, _ in done] == [STOPPED, STOPPED]
    assert took < 30
    assert re.search("^stopped", done[1][1], re.MULTILINE)  # another thread may write before the line ends
    assert f"asked to stop by {kill.name} (process 1)" in done[0][1]


GONE = r"another process is gone: .*Start all processes again, with --resume"
BY_JAX = "coordination service|JAX distributed service"


@pytest.mark.parametrize(
    ("kill", "failing"),
    [
        (signal.SIGKILL, 1),
        (signal.SIGKILL, 0),
        # Slow: JAX waits for 20 s of heartbeats.
        pytest.param(signal.SIGSTOP, 1, marks=pytest.mark.slow),
        pytest.param(signal.SIGSTOP, 0, marks=pytest.mark.slow),
    ],
)
def test_a_process_that_dies_or_stops_without_an_error_ends_the_others(kill, failing):
    """The message is this library's, or JAX's when its service died with the first process or heartbeats were missed."""
    processes = 3 if kill == signal.SIGSTOP else 2
    done, took = ended("wait", failing, processes=processes, kill=kill, within_s=90)
    for index, (status, output) in enumerate(done):
        if index != failing:
            assert status != 0
            expected = GONE if (kill, failing) == (signal.SIGKILL, 1) else f"{GONE}|{BY_JAX}"
            assert re.search(expected, output), output
            assert "asked to stop" not in output
    assert took < 60


def test_the_environment_decides_whether_there_are_several():
    assert not wanted({})
    assert wanted({"JAX_COORDINATOR_ADDRESS": "localhost:1"})
    assert wanted({"DAPO_JAX_DISTRIBUTED": "1"})
    assert not wanted({"DAPO_JAX_DISTRIBUTED": "0", "JAX_COORDINATOR_ADDRESS": "localhost:1"})
    with pytest.raises(ConfigError, match=r"DAPO_JAX_DISTRIBUTED='yes'"):
        wanted({"DAPO_JAX_DISTRIBUTED": "yes"})


def test_a_configuration_error_that_all_see_is_printed_once():
    done = several.finish(
        several.start(several.COMMAND, "train", "configs/nope.yaml", processes=3, devices=1), within_s=60
    )
    assert [status for status, _ in done] == [2, 2, 2]
    assert [output.count("configs/nope.yaml: no such file") for _, output in done] == [1, 0, 0]


def test_output_and_messages_have_no_tokens_and_no_control_characters(monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef")
    error = ValueError("0123456789abcdef at https://me:word@host \x1b[31m")
    assert described(error) == r"ValueError: $WANDB_API_KEY at https://me:...@host \x1b[31m"
    secret = "hf_ThisIsNotToBeSeen0123456789"
    started = several.start(
        several.COMMAND, "train", f"{secret}\x1b[31m.yaml", processes=2, devices=1, HF_TOKEN=secret
    )
    first = several.finish(started, within_s=60)[0][1]
    assert "$HF_TOKEN\\x1b[31m.yaml: no such file" in first
    assert secret not in first
    assert "\x1b" not in first


@pytest.mark.parametrize("name", ["sft", "eval", "sample", "serve", "convert"])
def test_commands_for_one_process_refuse_several(name, monkeypatch, capsys):
    monkeypatch.setenv("DAPO_JAX_DISTRIBUTED", "1")
    others = {"sample": ["--prompt", "1+1"], "convert": ["folder"]}.get(name, [])
    assert main([name, "shipped:quickstart", *others]) == 2
    assert "but only train can run" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("number", "message"),
    [("", "JAX_NUM_PROCESSES=None.*set all three"), ("two", "JAX_NUM_PROCESSES=two.*set all three")],
)
def test_a_missing_or_wrong_number_of_processes_is_named(number, message):
    command = (several.COMMAND, "train", "configs/quickstart.yaml")
    started = several.start(*command, processes=1, devices=1, JAX_NUM_PROCESSES=number)
    [(status, output)] = several.finish(started, within_s=60)
    assert status == 2
    assert re.search(message, output, re.DOTALL)
