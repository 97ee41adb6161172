"""A gRPC server for JetStream's protocol. It uses the same request loop as the HTTP server."""

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
import numpy as np
from google.protobuf.message import DecodeError
from jetstream.core.proto import jetstream_pb2

from dapo_jax.serving.request_loop import RequestLoop
from dapo_jax.serving.served_requests import GRACE_S, CheckedRequest, ServedLimits, ServerThread, sampled
from dapo_jax.serving.text import GrowingText
from dapo_jax.text.formatting import AS_IT_STANDS, PromptFormat
from dapo_jax.text.http import RequestError
from dapo_jax.text.stop_strings import stop_ids

_LONGEST_DETAILS = 1000
"""Maximum number of characters in an error message. Messages may quote long prompts, but gRPC sends them in a header."""
_CODES = {
    "queue_full": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "stopping": grpc.StatusCode.UNAVAILABLE,
    "not_finite": grpc.StatusCode.INTERNAL,
}
_messages: Any = jetstream_pb2  # a generated module without type annotations


class JetStreamServer(ServerThread):
    """Answers JetStream's `Decode` and `HealthCheck` calls. The arguments are described in `HttpServer`.

    `prompt_format` turns a request's text into a prompt, and `say` logs received messages that are not valid requests.
    """

    def __init__(
        self, requests: RequestLoop, limits: ServedLimits, prompt_format: PromptFormat = AS_IT_STANDS, *,
        host: str, port: int, say: Callable[[str], None],
    ) -> None:  # fmt: skip
        super().__init__(host, port)
        self._requests, self._limits, self._format, self._say = requests, limits, prompt_format, say

    async def _listen(self) -> int:
        # Without this option, two servers could share a port, and each would receive some of the requests.
        self._server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        port = self._server.add_insecure_port(self.address)
        name = _messages.DESCRIPTOR.services_by_name["Orchestrator"].full_name
        decoded, healthy = _messages.DecodeResponse, _messages.HealthCheckResponse
        decode = grpc.unary_stream_rpc_method_handler(self._decode, None, decoded.SerializeToString)
        health = grpc.unary_unary_rpc_method_handler(self._health, None, healthy.SerializeToString)
        handlers = {"Decode": decode, "HealthCheck": health}
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, handlers),))
        await self._server.start()
        return port

    async def _close(self) -> None:
        await self._server.stop(GRACE_S)
        await self._loop.shutdown_default_executor()

    async def _health(self, content: bytes, context: Any) -> Any:
        return _messages.HealthCheckResponse(is_live=not self._requests.ended.is_set())

    async def _decode(self, content: bytes, context: Any) -> None:
        """Streams one response in blocks of tokens. If the prompt was text, each block also contains the text of its tokens.

        As in JetStream, the end token is not sent. A response with fewer than `max_tokens` tokens therefore ended with an end token.
        `content` is the serialized request, which is parsed here because gRPC would print a traceback for an invalid message.
        """
        sample = _messages.DecodeResponse.StreamContent.Sample
        ends = stop_ids(self._limits.tokenizer)
        try:
            request = _messages.DecodeRequest.FromString(content)
            # Parsing runs in a thread, because tokenizing a prompt of several megabytes must not delay other requests.
            asked = await asyncio.to_thread(self._checked, request)
            after = None if self._format.data.chat else asked.prompt
            text = GrowingText(self._limits.tokenizer, after=after)
            async with sampled(self._requests, asked) as arriving:
                async for new in arriving:
                    tokens = new.record.ids.tolist()
                    if tokens and tokens[-1] in ends:
                        tokens.pop()
                    last, with_text = new.finish_reason is not None, request.HasField("text_content")
                    piece = sample(text=text.add(tokens, last=last) if with_text else "", token_ids=tokens)
                    block = _messages.DecodeResponse.StreamContent(samples=[piece])
                    await context.write(_messages.DecodeResponse(stream_content=block))
        except DecodeError:
            self._say(f"a message of {len(content)} bytes from {context.peer()} is not a DecodeRequest")
            text = "the message is not a DecodeRequest"
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, text)
        except RequestError as error:
            code = _CODES.get(error.code, grpc.StatusCode.INVALID_ARGUMENT)
            await context.abort(code, f"{error!s:.{_LONGEST_DETAILS}}")

    def _checked(self, request: Any) -> CheckedRequest:
        """Checks a request and tokenizes its prompt. Raises RequestError if it cannot be served."""
        limits, kind = self._limits, request.WhichOneof("content")
        if kind is None:
            raise RequestError("the request has no prompt; set text_content or token_content")
        if kind == "text_content":
            try:
                prompt = self._format.encode(request.text_content.text, limits.tokenizer)[1]
            except ValueError as error:
                raise RequestError(str(error)) from error
        else:
            ids = request.token_content.token_ids
            prompt = np.array(limits.checked_ids("token_content.token_ids", list(ids)), np.int32)
        return limits.request(prompt, request.max_tokens, stream=True)
