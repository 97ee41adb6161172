"""Starting a server and asking it over HTTP, with the standard library alone."""

import json
import os
import re
import resource
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from functools import partial
from http.client import HTTPConnection
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).absolute().parents[2]
PATIENCE_S = 240
"""What works comes in seconds, but a loaded machine may take long to compile."""


class Answered(NamedTuple):
    """A whole answer."""

    status: int
    headers: dict[str, str]
    content: bytes

    @property
    def json(self) -> Any:
        """The content as JSON."""
        return json.loads(self.content)

    @property
    def message(self) -> str:
        """What is wrong; the shape of the error object is checked."""
        error = self.json["error"]
        assert error.keys() == {"message", "type", "code"}
        return error["message"]


def ask(address, path, body=None, *, method=None, key=None, **headers):
    """One request; `body` is JSON-like, or bytes as they are."""
    host, _, port = address.rpartition(":")
    connection = HTTPConnection(host, int(port), timeout=PATIENCE_S)
    try:
        if body is not None:
            headers = {"Content-Type": "application/json", **headers}
            body = body if isinstance(body, bytes) else json.dumps(body).encode()
        if key is not None:
            headers["Authorization"] = f"Bearer {key}"
        connection.request(method or ("GET" if body is None else "POST"), path, body=body, headers=headers)
        answer = connection.getresponse()
        return Answered(answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read())
    finally:
        connection.close()


def events(answered):
    """The chunks of a stream; its end is checked."""
    assert answered.headers["content-type"].startswith("text/event-stream")
    *chunks, last, rest = answered.content.decode().split("\n\n")
    assert (last, rest) == ("data: [DONE]", "")
    return [json.loads(chunk.removeprefix("data: ")) for chunk in chunks]


def left_alone(address, path, body):
    """A socket on which a request was sent, and whose answer nobody has read."""
    host, _, port = address.rpartition(":")
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: {address}\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    client = socket.create_connection((host, int(port)), timeout=PATIENCE_S)
    client.sendall(head.encode() + content)
    return client


class Running:
    """`dapo-jax serve --http` in a process of its own."""

    def __init__(self, folder, model, *arguments, key="", descriptors=None):
        self.out, self.err = folder / "out", folder / "err"
        command = [
            sys.executable,
            "-m",
            "dapo_jax.cli",
            "serve",
            model,
            "--http",
            "--port",
            0,
            "--slots",
            4,
            "--compilation-cache",
            "",
            *arguments,
        ]
        environment = {**os.environ, "JAX_LOG_COMPILES": "0" if descriptors else "1"}
        environment.pop("DAPO_JAX_API_KEY", None)
        if key:
            environment["DAPO_JAX_API_KEY"] = key
        limit = partial(resource.setrlimit, resource.RLIMIT_NOFILE, (descriptors, descriptors))
        with self.out.open("w") as out, self.err.open("w") as err:
            self.process = subprocess.Popen(
                list(map(str, command)),
                cwd=ROOT,
                stdout=out,
                stderr=err,
                env=environment,
                start_new_session=True,
                preexec_fn=limit if descriptors else None,
            )

    def until(self, text):
        """Waits until it has printed this."""
        deadline = time.monotonic() + PATIENCE_S
        while text not in self.out.read_text():
            assert self.process.poll() is None, self.err.read_text()[-2000:]
            assert time.monotonic() < deadline, f"waited for {text!r}"
            time.sleep(0.05)

    @property
    def address(self):
        """HOST:PORT."""
        return re.search(r"http://(127\.0\.0\.1:\d+)", self.out.read_text())[1]


@contextmanager
def running(folder, model, *arguments, **how):
    """A server that is ready, and is gone in the end."""
    server = Running(folder, model, *arguments, **how)
    try:
        server.until("serving")
        yield server
    finally:
        server.process.kill()
        server.process.wait()
