"""Reward functions that workers load. Each new worker imports this file, so it imports little."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from dapo_jax.rewards import whole_group


def hostile(sample):
    """A reward function that does what its response names; runs in a worker."""
    match sample.response:
        case "hang":
            time.sleep(600)
        case "eat":
            return len(bytearray(1 << 40)) > 0
        case "eat slowly":
            kept = []
            while True:
                kept.append(bytearray(1 << 24))
        case "die":
            os.kill(os.getpid(), signal.SIGKILL)
        case "interrupt":
            os.kill(os.getpid(), signal.SIGINT)
        case "exit":
            os._exit(3)
        case "start":
            started = subprocess.Popen(["sleep", "600"])
            Path(sample.answer).write_text(str(started.pid))
            time.sleep(600)
        case "raise":
            raise ZeroDivisionError("by hand")
        case "print":
            print("a line on the standard output")
        case "fork":
            os.fork()  # the child comes back from here as well
        case "leave soon":
            threading.Timer(0.1, os._exit, [9]).start()
        case "slow":
            time.sleep(0.4)
        case "count and die":
            with open(sample.answer, "a") as file:
                file.write("asked\n")
            os._exit(3)
        case "close its input":
            sys.stdin.close()
        case "read its input":
            return subprocess.run(["cat"], capture_output=True, check=True, timeout=5).stdout == b""
        case "spin":
            Path(sample.answer).write_text(str(os.getpid()))
            while True:
                pass
    return sample.response == sample.answer


def half_die(sample):
    if int(sample.response) % 2:
        os._exit(7)
    return True


@whole_group
def hostile_group(group):
    """Does what one of the responses names; otherwise the longest response is right."""
    for one in group:
        hostile(one)
    most = max(len(one.response) for one in group)
    return [len(one.response) == most for one in group]
