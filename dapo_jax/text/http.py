"""Rules that the HTTP servers of this package share: errors in OpenAI's format, the Host header, and the bodies of requests."""

import asyncio
import ipaddress
from contextlib import suppress
from typing import Any

PATIENCE_S = 60
"""Maximum number of seconds for a client to send a request body, or to receive one chunk of a stream."""


class RequestError(Exception):
    """Raised for a request that is answered with an error: a message, an HTTP status, and a machine-readable name of the error (`code`)."""

    def __init__(self, message: str, *, status: int = 400, code: str = "invalid_value") -> None:
        super().__init__(message)
        self.status, self.code = status, code


def is_loopback(host: str) -> bool:
    """Returns whether a host name or address can be reached only from this machine."""
    if host == "localhost":
        return True
    with suppress(ValueError):
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    return False


def error_object(error: RequestError) -> dict[str, Any]:
    """Returns OpenAI's error object."""
    kind = "authentication_error" if error.status == 401 else "invalid_request_error"
    kind = "server_error" if error.status >= 500 else kind
    return {"error": {"message": str(error), "type": kind, "code": error.code}}


def host_name(host: str) -> str:
    """Returns the name or address in a Host header, without the port."""
    if host.startswith("["):
        return host.partition("]")[0] + "]"
    return host.partition(":")[0].lower()


async def read_body(request: Any) -> bytes:
    """Returns the body of a request. Raises RequestError for another content type or encoding, or if the body does not arrive in time."""
    for name, value, accepted in (
        ("Content-Type", request.content_type, "application/json"),
        ("Content-Encoding", request.headers.get("Content-Encoding", "identity"), "identity"),
    ):
        if value != accepted:
            text = f"the header {name} is {value[:80]!r}; the server accepts {accepted}"
            raise RequestError(text, status=415, code="unsupported_media_type")
    try:
        async with asyncio.timeout(PATIENCE_S):
            return await request.read()
    except TimeoutError as error:
        text = f"the body did not arrive within {PATIENCE_S} s"
        raise RequestError(text, status=408, code="timeout") from error
