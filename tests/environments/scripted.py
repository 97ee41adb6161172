"""An environment that does what the turn names, for tests of workers."""

import asyncio
import json
import os
import re
import signal
import threading
import time
from pathlib import Path

from dapo_jax.environments import Context, Step


class Scripted:
    """Appends all turns of an episode so far, so an answer is right only if all earlier turns arrived in order."""

    def episode(self, row, seed):
        if row.get("begins") == "not":
            raise ValueError("no such task")
        return ScriptedEpisode(row, seed)


class Compared(Scripted):
    """The longest episode is worth most."""

    async def group_rewards(self, episodes):
        if episodes[0].row.get("compare") == "exit":
            os._exit(4)
        return [float(len(each.heard)) for each in episodes]


class ScriptedEpisode:
    def __init__(self, row, seed):
        self.row, self.seed, self.heard = row, seed, []

    async def start(self):
        match self.row.get("begins"):
            case "a context":
                return Context("c" * self.row["level"])
            case "with nothing":
                return None
        return "?"

    async def step(self, turn):
        command, _, rest = turn.text.partition(" ")
        match command:
            case "sleep":
                await asyncio.sleep(float(rest))
            case "stall":  # blocks the event loop
                time.sleep(float(rest))
            case "hold":  # Python's lock, for hours
                re.match("(a+)+$", "a" * 60 + "b")
            case "exit":
                os._exit(3)
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "once":  # the worker dies of it the first time
                if not Path(rest).exists():
                    Path(rest).write_text("")
                    os._exit(5)
            case "threads":  # they never end
                for _ in range(int(rest)):
                    threading.Thread(target=threading.Event().wait, daemon=True).start()
            case "take":
                return Step(append=str(len(bytearray(int(rest) << 20)) >> 20))
            case "huge":
                return Step(append="x" * int(rest))
            case "raise":
                raise ValueError("no such tool")
            case "append":
                return Step(append={"bytes": b"\xff", "ids": [10**6], "deep": deep(10_000)}[rest])
            case "row":
                return Step(append=json.dumps(self.row, sort_keys=True))
            case "echo":
                arrays = turn.tokens, turn.logprobs
                fields = [*(each.tolist() for each in arrays), *(str(each.dtype) for each in arrays)]
                return Step(append=json.dumps([*fields, turn.finish_reason, turn.number, self.seed]))
            case "pid":
                return Step(append=str(os.getpid()))
            case "print":
                print("a line on the standard output", flush=True)
            case "context":
                return Step(context=Context([*map(ord, rest)]))
            case "done":
                metrics = {"heard": float(len(self.heard))}
                return Step(reward=1.0, done=True, correct=True, append=b"no JSON", metrics=metrics)
        self.heard.append(turn.text)
        return Step(append="|".join(self.heard), reward=0.5)

    async def close(self):
        if "closed" in self.row:
            with open(self.row["closed"], "a") as file:
                file.write(f"{'|'.join(self.heard)}\n")


def deep(count):
    found = []
    for _ in range(count):
        found = [found]
    return found
