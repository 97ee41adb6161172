"""One answer is split, and several are joined."""

import random
import threading
from concurrent.futures import CancelledError, Future

import pytest

from dapo_jax.rewards.futures import each, joined


def test_each_element_of_an_answer_has_its_future():
    whole = Future()
    parts = each(whole, 3)
    assert not any(part.done() for part in parts)
    whole.set_result("abc")
    assert [part.result() for part in parts] == ["a", "b", "c"]


def test_an_error_or_a_cancellation_of_the_answer_is_each_elements():
    failed, cancelled = Future(), Future()
    of_failed, of_cancelled = each(failed, 2), each(cancelled, 2)
    failed.set_exception(RuntimeError("no answer"))
    cancelled.cancel()
    for part in of_failed:
        with pytest.raises(RuntimeError, match="no answer"):
            part.result()
    assert all(part.cancelled() for part in of_cancelled)


def test_an_answer_of_another_length_is_an_error():
    whole = Future()
    parts = each(whole, 2)
    whole.set_result("abc")
    for part in parts:
        with pytest.raises(RuntimeError, match="3 results for 2"):
            part.result(timeout=5)


def test_an_element_that_is_cancelled_keeps_nothing_from_the_others():
    """Each part belongs to its caller."""
    fine, failed = Future(), Future()
    of_fine, of_failed = each(fine, 3), each(failed, 3)
    of_fine[0].cancel()
    of_failed[1].cancel()
    fine.set_result("abc")
    failed.set_exception(RuntimeError("no answer"))
    assert [part.result(timeout=5) for part in of_fine[1:]] == ["b", "c"]
    assert all(isinstance(part.exception(timeout=5), RuntimeError) for part in (of_failed[0], of_failed[2]))
    assert of_fine[0].cancelled()


def test_joined_waits_for_all_and_keeps_their_order():
    parts = [Future(), Future(), Future()]
    whole = joined(parts, tuple)
    for place in (2, 0, 1):
        assert not whole.done()
        parts[place].set_result(place)
    assert whole.result() == (0, 1, 2)


def test_the_first_parts_error_counts_and_a_cancelled_part_cancels():
    parts = [Future(), Future()]
    whole = joined(parts, tuple)
    parts[1].set_exception(ValueError("second"))
    parts[0].set_exception(RuntimeError("first"))
    with pytest.raises(RuntimeError, match="first"):
        whole.result()
    parts = [Future(), Future()]
    whole = joined(parts, tuple)
    parts[0].set_result(1)
    parts[1].cancel()
    with pytest.raises(CancelledError):
        whole.result(timeout=5)


def test_parts_that_end_at_the_same_moment_in_many_threads_are_joined_once():
    for _ in range(50):
        parts = [Future() for _ in range(8)]
        whole, start = joined(parts, sum), threading.Barrier(8)

        def end(part, start=start):
            start.wait()
            part.set_result(1)

        threads = [threading.Thread(target=end, args=(part,)) for part in random.sample(parts, 8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert whole.result(timeout=5) == 8
