"""Orbax's own words stay out of the terminal, and nobody else's do."""

import subprocess
import sys

import pytest

CALLED_BY_C = """
import asyncio, functools, threading
import tensorstore
from dapo_jax.checkpoints.retention import quiet_orbax

quiet_orbax()
quiet_orbax()

def fail(error):
    raise error

loop = asyncio.new_event_loop()
loop.close()
callbacks = {
    # What asyncio asks of tensorstore: to tell the loop when a write has ended.
    "closed loop": functools.partial(loop.call_soon_threadsafe, print),
    "other words": lambda _: fail(RuntimeError("something else")),
    "other kind": lambda _: fail(OSError("Event loop is closed")),
}
promise, future = tensorstore.Promise.new()
future.add_done_callback(callbacks[CASE])
thread = threading.Thread(target=promise.set_result, args=(1,))
thread.start()
thread.join()
"""

DELETED = """
from dapo_jax.checkpoints.retention import quiet_orbax

quiet_orbax()

class Owner:
    def __del__(self):
        raise RuntimeError("Event loop is closed")

Owner()
"""

NOBODY_WAITS = """
import asyncio, gc
from dapo_jax.checkpoints.retention import quiet_orbax

quiet_orbax()
written = {}
exec(compile("async def write(): raise OSError('no room')", CASE, "exec"), written)

async def main():
    for wrap in (lambda coroutine: coroutine, lambda coroutine: asyncio.to_thread(asyncio.run, coroutine)):
        task = asyncio.get_running_loop().create_task(wrap(written["write"]()))
        await asyncio.wait([task])
        del task
    gc.collect()

asyncio.run(main())
"""


def stderr_of(program, case=""):
    program = program.replace("CASE", repr(case))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("closed loop", None),
        ("other words", "RuntimeError: something else"),
        ("other kind", "OSError: Event loop is closed"),
    ],
)
def test_of_what_c_code_cannot_raise_only_that_a_loop_is_closed_is_left_out(case, words):
    told = stderr_of(CALLED_BY_C, case)
    assert (words in told) if words else (told == "")


def test_a_closed_loop_that_an_object_speaks_of_is_shown():
    assert "RuntimeError: Event loop is closed" in stderr_of(DELETED)


def test_errors_nobody_waits_for_are_left_out_where_orbax_raised_them():
    assert stderr_of(NOBODY_WAITS, "lib/orbax/checkpoint/write.py") == ""
    assert stderr_of(NOBODY_WAITS, "mine/write.py").count("OSError: no room") == 2
