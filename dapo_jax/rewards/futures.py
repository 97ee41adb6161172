"""Futures of several verdicts: splits one answer, joins several."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeVar

_Part = TypeVar("_Part")
_Whole = TypeVar("_Whole")


def each(whole: Future[list[_Part]], count: int) -> list[Future[_Part]]:
    """Returns a future for each of the `count` elements of the result of `whole`. They raise the exception of `whole`.

    They raise RuntimeError if the result has another number of elements. Cancelling one of them does not affect the others.
    """
    parts: list[Future[_Part]] = [Future() for _ in range(count)]

    def spread(done: Future[list[_Part]]) -> None:
        if done.cancelled():
            for part in parts:
                part.cancel()
            return
        error = done.exception()
        if error is None and len(done.result()) != count:
            # An exception here would only be logged, and nothing would ever settle the parts.
            error = RuntimeError(f"{len(done.result())} results for {count} parts")
        for place, part in enumerate(parts):
            if not part.set_running_or_notify_cancel():
                continue
            if error is not None:
                part.set_exception(error)
            else:
                part.set_result(done.result()[place])

    whole.add_done_callback(spread)
    return parts


def joined(parts: Sequence[Future[_Part]], join: Callable[[list[_Part]], _Whole]) -> Future[_Whole]:
    """Returns a future of `join(results of all parts)`. It is cancelled if a part is, and raises the first part's exception."""
    whole: Future[_Whole] = Future()
    lock, waiting = threading.Lock(), len(parts)

    def done(_: Future[_Part]) -> None:
        nonlocal waiting
        with lock:
            waiting -= 1
            last = waiting == 0
        if last and any(part.cancelled() for part in parts):
            whole.cancel()
        elif last:
            try:
                whole.set_result(join([part.result() for part in parts]))
            except Exception as error:
                whole.set_exception(error)

    for part in parts:
        part.add_done_callback(done)
    return whole
