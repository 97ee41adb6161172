"""Agents as an environment: functions and programs that send requests to a server next to them."""

import asyncio
import json
import os
import shlex
import shutil
import signal
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from dapo_jax.environments.agents.episode import AgentEpisode
from dapo_jax.environments.agents.server import AgentServer
from dapo_jax.environments.calls import LostError
from dapo_jax.environments.protocol import Step
from dapo_jax.rewards.functions import load_function
from dapo_jax.rewards.sample import is_async, plain_row

_TAIL_BYTES = 4096

Play = Callable[[str, str, Mapping[str, Any]], Awaitable[Any]]
"""An agent: an async function of the base URL, the key and the row, which returns the reward or None."""


class AgentEnvironment:
    """Creates an agent for each episode, and the server that answers all of them."""

    def __init__(
        self, kind: str, name: str, *, variables: Sequence[str] = (), stop: Sequence[str] = (), history: str = "append"
    ) -> None:  # fmt: skip
        """Loads the agent: `agent` and a function (`FILE.py:FUNCTION`), or `command` and a command line. Raises ValueError if it cannot be loaded.

        `stop` are the stop strings of the run. For `variables` and `history`, see the section `environment` of the configuration.
        """
        self.play = self._loaded(kind, name, variables)
        self.appends, self._starting = history == "append", asyncio.Lock()
        self.server = AgentServer(f"{kind}:{name}", stop)

    def _loaded(self, kind: str, name: str, variables: Sequence[str]) -> Play:
        """Returns the function that runs an agent. Raises ValueError if it cannot be loaded."""
        if kind == "command":
            return partial(run_command, command_words(name), variables)
        if not is_async(play := load_function(name)):
            raise ValueError(
                f"agent:{name} must be `async def {name.rpartition(':')[2]}(client_url, key, task)`"
            )
        return play

    async def _start(self) -> None:
        """Starts the server before the first episode."""
        await self.server.start()

    async def episode(self, row: Mapping[str, Any], seed: int) -> "AgentEpisode":
        """Creates the episode for a response. The agent receives the row, and the seed as its field `seed`."""
        async with self._starting:
            if not self.server.url:
                await self._start()
        server, key = self.server, self.server.key()
        agent = partial(self.play, server.url, key, {"seed": seed, **row})
        episode = AgentEpisode(agent, appends=self.appends, on_end=partial(server.close, key))
        server.open(key, episode)
        return episode

    async def finish(self, episode: "AgentEpisode", reason: str) -> Step:
        """Refuses the agent's next requests, and returns the reward when it has ended."""
        return await episode.finish(reason)


def command_words(line: str) -> list[str]:
    """Splits a command line as a shell does, without running a shell. Paths of files become absolute, because the command runs in its own folder.

    Raises ValueError if the line cannot be split, or there is no such program.
    """
    try:
        words = shlex.split(line)
    except ValueError as error:
        raise ValueError(f"command:{line}: {error}") from error
    if not words or shutil.which(words[0]) is None:
        program = words[0] if words else ""
        raise ValueError(f"command:{line}: there is no program {program!r} in PATH; write its path")
    is_path = [os.sep in words[0], *(Path(word).is_file() for word in words[1:])]
    return [str(Path(word).absolute()) if path else word for word, path in zip(words, is_path, strict=True)]


async def run_command(words: Sequence[str], variables: Sequence[str], url: str, key: str, row: Mapping[str, Any]) -> None:  # fmt: skip
    """Runs a command to its end, in a folder of its own. Then kills all processes of its group, and deletes the folder.

    Raises LostError if the exit status is not 0, with the last line of its output.
    """
    folder = Path(await asyncio.to_thread(tempfile.mkdtemp, prefix="dapo_jax_agent_"))
    try:
        (folder / "work").mkdir()
        (folder / "task.json").write_text(json.dumps(plain_row(row, instead="use agent:FILE.py:FUNCTION")))
        own = {"OPENAI_BASE_URL": url, "OPENAI_API_KEY": key, "DAPO_JAX_TASK": str(folder / "task.json")}
        inherited = {name: os.environ[name] for name in variables if name in os.environ}
        with open(folder / "output", "wb") as output:
            process = await asyncio.create_subprocess_exec(
                *words, env={**inherited, **own}, cwd=folder / "work", stdin=asyncio.subprocess.DEVNULL, stdout=output,
                stderr=output, start_new_session=True,
            )  # fmt: skip
        try:
            status = await process.wait()
        finally:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
        if status:
            with open(folder / "output", "rb") as output:
                output.seek(max(0, os.fstat(output.fileno()).st_size - _TAIL_BYTES))
                lines = output.read().decode(errors="replace").strip().splitlines()
            how = f"exit status {status}" if status > 0 else signal.Signals(-status).name
            raise LostError(f"the agent ended with {how}: {lines[-1] if lines else 'no output'!s:.300}")
    finally:
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
