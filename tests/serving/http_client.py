"""Asking a server over HTTP with the standard library alone."""

import json
import socket
from http.client import HTTPConnection
from typing import Any, NamedTuple

PATIENCE_S = 120


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
