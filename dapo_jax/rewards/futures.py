"""Futures of several verdicts: one answer taken apart, several answers put together."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeVar

_Part = TypeVar("_Part")
_Whole = TypeVar("_Whole")


def each(whole: Future[list[_Part]], count: int) -> list[Future[_Part]]:
    """A future for each of the `count` elements that `whole` will hold; what it raises, each of them raises.

    They raise RuntimeError if it holds another number of elements. One that is cancelled gets nothing, and the others theirs.
    """
    parts: list[Future[_Part]] = [Future() for _ in range(count)]

    def spread(done: Future[list[_Part]]) -> None:
        if done.cancelled():
            for part in parts:
                part.cancel()
            return
        error = done.exception()
        if error is None and len(done.result()) != count:
            # Raised here, it would be logged and each part waited for in vain.
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
    """A future of `join` of all parts, which is cancelled if one of them is; of several errors the first part's counts."""
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
