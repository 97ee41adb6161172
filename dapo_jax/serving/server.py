"""JetStream's gRPC server around its orchestrator: from an address to a clean stop. One to a process.

A file of its own: only here gRPC is started and stopped.
"""

import asyncio
import functools
import os
import socket
from types import TracebackType
from unittest import mock

import grpc

from dapo_jax.serving.adapter import JetStreamEngine
from dapo_jax.serving.jetstream_fixes import server_lib
from dapo_jax.serving.orchestrator import Driver, Orchestrator, register


class Server(server_lib.JetStreamServer):
    """JetStream's server, at one interface's address instead of all, with the mended orchestrator behind it.

    A context manager: it answers from its beginning to its end, which lets the requests in flight finish for 10 s.

    Args:
        engine: answers.
        host: the interface, such as 127.0.0.1, or [::] for all.
        port: 0 lets the system choose.
        max_prompt_tokens: the longest prompt that is taken.
        max_response_tokens: the largest `max_tokens` that a request may ask for.

    Raises:
        OSError: nothing can listen there.
    """

    def __init__(
        self, engine: JetStreamEngine, *, host: str, port: int, max_prompt_tokens: int, max_response_tokens: int
    ) -> None:  # fmt: skip
        self.address = f"{host}:{_free_port(host, port)}"
        driver = Driver(engine)
        service = functools.partial(
            Orchestrator,
            engine=engine,
            max_prompt_tokens=max_prompt_tokens,
            max_response_tokens=max_response_tokens,
        )
        # JetStream's server names all of them itself.
        ours = (
            mock.patch.object(server_lib, "_HOST", host),
            mock.patch.object(server_lib.orchestrator, "LLMOrchestrator", service),
            mock.patch.object(server_lib.jetstream_pb2_grpc, "add_OrchestratorServicer_to_server", register),
        )
        try:
            with ours[0], ours[1], ours[2]:
                super().__init__(
                    driver, 1, self.address.rpartition(":")[2], grpc.insecure_server_credentials()
                )
        except RuntimeError as error:
            driver.stop()
            self._loop.call_soon_threadsafe(self._loop.stop)  # or its thread would keep the process alive
            raise OSError(f"cannot listen at {self.address}: {error}") from error

    def stop(self) -> None:
        """Refuses new requests, waits for those in flight, then ends every thread."""
        # JetStream stops its driver first, and then waits for responses that nobody writes any more.
        asyncio.run_coroutine_threadsafe(self._async_stop(), self._loop).result()
        super().stop()

    def __enter__(self) -> "Server":
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def _free_port(host: str, port: int) -> int:
    """`port`, or a free one for 0. gRPC itself would share a port that another server listens on."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host.strip("[]"), port, type=socket.SOCK_STREAM
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            if os.name == "posix":
                # What is left of the connections of a server that was stopped a moment ago does not count.
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            return probe.getsockname()[1]
    except OSError as error:
        raise OSError(
            f"cannot listen at {host}:{port}: {error.strerror or error}; --port 0 takes a free port"
        ) from error
