"""Server processes, a run to serve, and an HTTP client of the standard library."""

import json
import os
import re
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any, NamedTuple

import jax

from dapo_jax.checkpoints.checkpointer import Checkpointer
from dapo_jax.config import TrainConfig
from dapo_jax.parallel.mesh import make_mesh
from dapo_jax.run.learner import optimizer_of
from dapo_jax.testing import tiny_decoder_config
from dapo_jax.text.tokenizers import CharTokenizer
from dapo_jax.training.state import init_state

ROOT = Path(__file__).absolute().parents[2]
PATIENCE_S = 240
"""Usually seconds suffice, but a loaded machine may take long to compile."""


TOKENIZER = CharTokenizer("0123456789+=:,?")
CONFIG = tiny_decoder_config(vocab_size=TOKENIZER.vocab_size, layers=1)
LIMIT = 10
PROMPTS = ("1+2", "40+2", "7", "12345+678", "0=0,1=1", "9:?")


def save(folder, step, policy):
    """Writes a checkpoint of a run."""
    optimizer = optimizer_of(TrainConfig(run_dir="unused").optimizer)
    with Checkpointer(folder / "checkpoints") as checkpointer:
        state = init_state(policy.params, optimizer, make_mesh(devices=jax.devices()[:1]))
        checkpointer.save(step, state, {"cursor": 0}, {})


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
        """The error message, after a check of the error object's shape."""
        error = self.json["error"]
        assert error.keys() == {"message", "type", "code"}
        return error["message"]


def ask(address, path, body=None, *, method=None, key=None, **headers):
    """Sends one request. `body` is JSON-like, or raw bytes."""
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
    """Returns the chunks of a complete stream."""
    assert answered.headers["content-type"].startswith("text/event-stream")
    *chunks, last, rest = answered.content.decode().split("\n\n")
    assert (last, rest) == ("data: [DONE]", "")
    return [json.loads(chunk.removeprefix("data: ")) for chunk in chunks]


def left_alone(address, path, body):
    """Returns a socket on which a request was sent, and whose answer is unread."""
    host, _, port = address.rpartition(":")
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: {address}\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    client = socket.create_connection((host, int(port)), timeout=PATIENCE_S)
    client.sendall(head.encode() + content)
    return client


HALVES = [
    b"",
    b"GET /v1/mod",
    b"POST /inference/v1/generate HTTP/1.1\r\nHost: a\r\n",
    b"POST /inference/v1/generate HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: 90\r\n\r\n{",
    b"\x16\x03\x01 no HTTP at all\r\n\r\n",
]
"""Incomplete requests."""


def flooded(address, count):
    """Returns open connections. On each, one of `HALVES` was sent."""
    host, _, port = address.rpartition(":")
    clients = []
    for number in range(count):
        clients.append(socket.create_connection((host, int(port)), timeout=PATIENCE_S))
        clients[-1].sendall(HALVES[number % len(HALVES)])
    return clients


def until(found, what):
    """Waits until `found()` is true."""
    deadline = time.monotonic() + 60
    while not found():
        assert time.monotonic() < deadline, f"waited for {what}"
        time.sleep(0.01)


class Running:
    """`dapo-jax serve` in a process of its own."""

    def __init__(self, folder, model, *arguments, http=True):
        self.out, self.err = folder / "out", folder / "err"
        command = [sys.executable, "-m", "dapo_jax.cli", "serve", model, *["--jetstream"] * (not http), "--port", 0, "--slots", 4, *arguments]  # fmt: skip
        environment = {**os.environ, "JAX_LOG_COMPILES": "1"}
        with self.out.open("w") as out, self.err.open("w") as err:
            self.process = subprocess.Popen(
                list(map(str, command)), cwd=ROOT, stdout=out, stderr=err, env=environment, start_new_session=True
            )  # fmt: skip

    def until(self, text):
        """Waits until the server has printed `text`."""
        deadline = time.monotonic() + PATIENCE_S
        while text not in self.out.read_text():
            assert self.process.poll() is None, self.err.read_text()[-2000:]
            assert time.monotonic() < deadline, f"waited for {text!r}"
            time.sleep(0.05)

    @property
    def address(self):
        """HOST:PORT."""
        return re.search(r"at (?:http://)?(127\.0\.0\.1:\d+)", self.out.read_text())[1]


@contextmanager
def running(folder, model, *arguments, **how):
    """Yields a server that is ready, and kills it at the end."""
    server = Running(folder, model, *arguments, **how)
    try:
        server.until("serving")
        yield server
    finally:
        server.process.kill()
        server.process.wait()
