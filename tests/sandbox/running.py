"""Runs programs in the sandbox of this machine. Tests that need one skip where it is missing.

The environment variable SANDBOX_BACKEND names another back-end than bubblewrap, for example podman:IMAGE.
"""

import asyncio
import atexit
import os
from functools import cache

import pytest

from dapo_jax.sandbox import Limits, Program, load_sandbox
from dapo_jax.sandbox.servers import ServerSandbox

BACKEND = os.environ.get("SANDBOX_BACKEND", "auto")
IN_CONTAINER = BACKEND != "auto"


@cache
def _tested():
    try:
        return load_sandbox(BACKEND)
    except ValueError as error:
        return str(error)


def made(*, slots):
    """A sandbox, or the reason to skip. A sandbox that is there but does not work is a failure."""
    tested = _tested()
    if isinstance(tested, str):
        refused = "namespace" in tested.partition("This system")[0] or "uid map" in tested
        assert refused or "not installed" in tested, tested
        pytest.skip(tested)
    return ServerSandbox(tested.start, slots=slots, remedy=tested.remedy)


def with_sandbox(job, *, slots=2):
    """The result of the coroutine function `job`, called with a sandbox on an event loop of its own."""
    sandbox = made(slots=slots)

    async def work():
        try:
            return await job(sandbox)
        finally:
            sandbox.close()

    return asyncio.run(work())


@cache
def _shared():
    """A sandbox and its event loop, which all tests of single programs share."""
    sandbox, runner = made(slots=1), asyncio.Runner()
    atexit.register(runner.close)
    atexit.register(sandbox.close)
    return sandbox, runner


def run(source, stdin=b"", **limits):
    """The outcome of one script."""
    program = Program(source=source, stdin=stdin, limits=Limits(**limits))
    sandbox, runner = _shared()
    return runner.run(sandbox.run(program))


def called(source, calls, **limits):
    """The replies of a program to calls, and its outcome."""

    async def job(sandbox):
        replies = []
        async with sandbox.live(Program(source=source, limits=Limits(**limits)), "calls") as live:
            for call in calls:
                await live.tell(call)
                if (reply := await live.said()) is None:
                    break
                replies.append(reply)
            return replies, await live.ended(stop=True)

    return with_sandbox(job)
