"""A server in a container of podman or docker. It has no namespaces for each program, so programs run one after another, and leave nothing."""

import asyncio
import os
import socket
import subprocess
import tempfile
from collections.abc import Sequence
from typing import Any

from dapo_jax.sandbox.protocol import Program
from dapo_jax.sandbox.server import SOCKET, TASKS
from dapo_jax.sandbox.servers import Server, ServerError

_START_S = 60.0
_END_S = 10.0
_MEMORY = "4g"
"""Memory of a container. A program with a higher limit of its own is killed at this size."""
_ALONE = f"""--rm --init=false --pull never --network none --read-only --cap-drop ALL --security-opt no-new-privileges --security-opt label=disable
    --user 65534:65534 --pids-limit {TASKS} --memory {_MEMORY} --memory-swap {_MEMORY} --ulimit nofile=1024:1024 --ulimit nproc=4096:4096 --log-driver none
    --tmpfs /tmp:size=32m,mode=1777 --tmpfs /dev/shm:size=32m,mode=1777"""


def in_container(engine: str, image: str, command: Sequence[str]) -> list[str]:
    """Returns a command that runs `command` in a container without network, rights, and files that can be written to, except in two small folders."""
    of_podman = ["--read-only-tmpfs=false"] if os.path.basename(engine) == "podman" else []
    return [engine, "run", *_ALONE.split(), *of_podman, image, *command]


class ContainerServer(Server):
    """A server that connects to a socket of this process. The container ends when the socket is closed, so it also ends with this process."""

    def _start(self, command: Sequence[str], popen: dict[str, Any]) -> None:
        self._folder = tempfile.TemporaryDirectory()
        path = f"{self._folder.name}/socket"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.bind(path)
        os.chmod(path, 0o666)  # only the container can find it, because the folder is private
        self._socket.listen(1)
        self._socket.setblocking(False)
        engine, run, *rest = command
        mounted = [engine, run, "--volume", f"{path}:{SOCKET}", *rest]
        self.process = subprocess.Popen(mounted, stdin=subprocess.DEVNULL, **popen)
        self._is_connected = False

    async def begin(self, program: Program, mode: str) -> None:
        """Waits for the container if it is new, and starts a program. Raises ServerError if the container does not start."""
        for _ in range(round(_START_S / 0.02)):
            if self._is_connected:
                return await super().begin(program, mode)
            try:
                connected, _ = self._socket.accept()
            except BlockingIOError:
                if self.process.poll() is not None:
                    break
                await asyncio.sleep(0.02)
            else:
                self._socket.close()  # programs cannot connect to it
                self._folder.cleanup()  # nothing is left if this process is killed
                connected.setblocking(False)
                self._socket, self._is_connected = connected, True
        raise ServerError(self._last_words())

    def _end(self) -> None:
        try:
            self.process.wait(_END_S)  # removes the container
        except subprocess.TimeoutExpired:
            super()._end()
        self._folder.cleanup()
