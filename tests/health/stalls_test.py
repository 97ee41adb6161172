"""A wait without progress ends the run with a report of every thread and process."""

import json
import threading
import time

import pytest

from dapo_jax.health.stalls import Watch, interrupt


class Ended(list):
    """Records how a watch ended the run. It waits, since a real end does not return."""

    def __init__(self):
        super().__init__()
        self.event = threading.Event()

    def __call__(self, status, why):
        self.append((status, why))
        self.event.set()
        threading.Event().wait(0.05)


@pytest.fixture
def ended():
    return Ended()


def hang(seconds):
    time.sleep(seconds)


def test_a_wait_beyond_the_limit_reports_the_wait_the_line_and_the_key(ended, capfd):
    with Watch(0.2, end=ended) as watch:
        thread = threading.Thread(target=hang, args=(1.0,), name="a reader of prompts")
        thread.start()
        watch.note("reading prompts")
        assert ended.event.wait(5)
    thread.join()
    status, why = ended[0]
    assert status == 1
    assert "while reading prompts" in why
    assert "stall_timeout_s (now 0.2" in why
    report = capfd.readouterr().err
    assert "thread a reader of prompts:" in report
    assert "thread MainThread:" in report
    assert "stalls_test.py" in report
    assert " hang: time.sleep(seconds)" in report


def test_in_a_notebook_the_main_thread_is_interrupted_and_the_process_continues(capfd):
    """During its sleep, not after it."""
    began = time.monotonic()
    with Watch(0.2, end=interrupt), pytest.raises(KeyboardInterrupt):
        time.sleep(60)
    assert time.monotonic() - began < 60
    assert "stalled: no progress" in capfd.readouterr().err


def test_progress_defers_the_limit(ended):
    """Six reports 0.1 s apart take 0.6 s, twice the limit."""
    with Watch(0.3, end=ended) as watch:
        for number in range(6):
            watch.phase("update", number, 6)
            time.sleep(0.1)
    assert not ended


def test_without_a_limit_and_after_the_block_nothing_watches(ended):
    before = threading.active_count()
    with Watch(0.0, end=ended):
        assert threading.active_count() == before
    with Watch(0.1, end=ended):
        pass
    time.sleep(0.3)
    assert not ended


def sent(count, what, *, for_others=False, stalled=False):
    return json.dumps([count, what, for_others, stalled])


def test_waiting_for_others_is_no_stall_as_long_as_one_of_them_makes_progress(ended):
    counts = iter(range(10**6))
    with Watch(0.2, end=ended, received=lambda: {1: sent(next(counts), "sampling")}) as watch:
        watch.note("waiting for the others", for_others=True)
        time.sleep(0.8)
        assert not ended
        # Its own wait is a stall whatever the others do.
        watch.note("reading prompts")
        assert ended.event.wait(5)


def test_waiting_for_others_without_progress_is_a_stall_and_reports_them(ended, capfd):
    posts = []
    received = {"broadcast": posts.append, "received": lambda: {1: sent(7, "reading prompts")}}
    with Watch(0.2, end=ended, **received) as watch:
        watch.note("waiting for the others", for_others=True)
        assert ended.event.wait(5)
    assert "process 1: reading prompts, for 0 s" in capfd.readouterr().err
    assert json.loads(posts[0]) == [2, "waiting for the others", True, False]
    assert json.loads(posts[-1]) == [2, "waiting for the others", True, True]


def test_a_process_reports_its_threads_when_another_stalls_and_continues(ended, capfd):
    with Watch(0.4, end=ended, received=lambda: {0: sent(1, "reading prompts", stalled=True)}) as watch:
        for _ in range(6):
            watch.note("sampling")
            time.sleep(0.1)
    assert not ended
    report = capfd.readouterr().err
    assert report.count("thread MainThread:") == 1
    assert "this process: sampling" in report
