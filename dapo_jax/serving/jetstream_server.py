"""JetStream's driver and gRPC service around the engine adapter. Invalid requests are refused before they are queued.

An exception in one of the driver's threads kills the process, so no request may cause one. Upstream is archived: this module also works around the
bugs of its last release.
"""

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import jax
import numpy as np
from google.protobuf.message import DecodeError
from jetstream.core.proto import jetstream_pb2
from jetstream.core.utils.async_multifuture import AsyncMultifuture
from jetstream.engine import tokenizer_api

from dapo_jax.serving.adapter import BoundedPrompt, JetStreamEngine
from dapo_jax.serving.text import GrowingText


@contextmanager
def _root_logger_kept() -> Iterator[None]:
    """Restores the root logger: importing JetStream's orchestrator sets it to DEBUG and adds a handler."""
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    try:
        yield
    finally:
        root.setLevel(level)
        root.handlers[:] = handlers


with _root_logger_kept():
    from jetstream.core import orchestrator

_LONGEST_DETAILS = 1000
"""Characters of an error. It may quote a prompt, and gRPC sends it in a header."""
_GRACE_S = 10
"""Seconds that running requests have to finish when the server stops."""
_LOG = logging.getLogger(__name__)

_messages: Any = jetstream_pb2  # generated, without types


def _delete_pytree(p: Any) -> None:
    for leaf in jax.tree.leaves(p):
        if isinstance(leaf, jax.Array):
            leaf.delete()


orchestrator.delete_pytree = _delete_pytree  # JetStream's calls `jax.tree_map`, which jax has removed


class Driver(orchestrator.Driver):
    """JetStream's driver of one engine that prefills and generates. Its threads start at once; `stop` ends them."""

    def __init__(self, engine: JetStreamEngine) -> None:
        self._engine, params = engine, engine.load_params()
        self._tokenizer = engine.build_tokenizer(engine.get_tokenizer())
        super().__init__([engine], [engine], [params], [params], interleaved_mode=True, jax_padding=False)

    def _process_prefill_content(
        self,
        request: orchestrator.ActiveRequest,
        tokenizer: tokenizer_api.Tokenizer,
        is_bos: bool,
        max_prefill_length: int,
    ) -> tuple[Any, int]:
        """Returns the padded prompt with the request's limit, and a function that reports whether its client has left."""
        padded, length = self._tokenizer.pad(np.array(request.prefill_content, np.int32))

        def abandoned() -> bool:
            # gRPC cancels the channel also after a complete response.
            cancelled = request.return_channel.cancelled()
            return cancelled and (request.complete is None or not request.complete.all())

        prompt = BoundedPrompt(tokens=padded, max_response_tokens=request.max_tokens, abandoned=abandoned)
        return prompt, length

    def _generate_thread(self, idx: int) -> None:
        """Restarts JetStream's thread after its assertion that a slot is in use.

        The last response may end just before that assertion. All slots are free then, so a new decode state loses nothing.
        """
        while self.live:
            try:
                super()._generate_thread(idx)
                return
            except AssertionError:
                if self._generate_slots[idx].qsize() < self._engine.max_concurrent_decodes:
                    raise


class Server:
    """A gRPC server of JetStream's protocol, in a thread of its own; a context manager. At its end, running requests have 10 s to finish.

    Args:
        engine: answers requests.
        host: the interface, such as 127.0.0.1, or [::] for all.
        port: 0 takes a free port.
        max_prompt_tokens: longest prompt.
        max_response_tokens: largest `max_tokens` of a request.

    Raises:
        OSError: the address cannot be bound.
    """

    def __init__(
        self, engine: JetStreamEngine, *, host: str, port: int, max_prompt_tokens: int, max_response_tokens: int
    ) -> None:  # fmt: skip
        self.address = f"{host}:{port}"
        """HOST:PORT, with the port that was taken."""
        self._tokenizer = engine.build_tokenizer(engine.get_tokenizer())
        self._max_prompt_tokens, self._max_response_tokens = max_prompt_tokens, max_response_tokens
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="grpc server", daemon=True)
        self._thread.start()
        try:
            asyncio.run_coroutine_threadsafe(self._bind(), self._loop).result()
        except RuntimeError as error:
            self._end_loop()
            raise OSError(f"cannot listen at {self.address}: {error} --port 0 takes a free port") from error
        self._driver = Driver(engine)

    def __enter__(self) -> "Server":
        asyncio.run_coroutine_threadsafe(self._server.start(), self._loop).result()
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._server.stop(_GRACE_S), self._loop).result()
        self._driver.stop()
        self._end_loop()

    def _end_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    async def _bind(self) -> None:
        # Without this option, two servers share a port, and each gets some of the requests.
        self._server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        port = self._server.add_insecure_port(self.address)
        self.address = f"{self.address.rpartition(':')[0]}:{port}"
        name = _messages.DESCRIPTOR.services_by_name["Orchestrator"].full_name
        handlers = {
            "Decode": grpc.unary_stream_rpc_method_handler(
                self.decode, response_serializer=_messages.DecodeResponse.SerializeToString
            ),
            "HealthCheck": grpc.unary_unary_rpc_method_handler(
                self._health, response_serializer=_messages.HealthCheckResponse.SerializeToString
            ),
        }
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, handlers),))

    async def _health(self, content: bytes, context: Any) -> Any:
        return _messages.HealthCheckResponse(is_live=self._driver.live)

    async def decode(self, content: bytes, context: Any) -> AsyncIterator[Any]:
        """Streams one response: blocks of tokens, with their text if the prompt was a text.

        JetStream removes the end token, so a response with fewer tokens than `max_tokens` has ended by itself. `content` is the serialized
        request: if gRPC parsed it, an invalid message would print a traceback.
        """
        try:
            request = _messages.DecodeRequest.FromString(content)
            # In a thread: tokenizing a prompt of megabytes must not delay other requests.
            prompt = await asyncio.to_thread(self._prompt, request)
        except (DecodeError, ValueError) as error:
            text = f"{error!s:.{_LONGEST_DETAILS}}"
            if isinstance(error, DecodeError):
                text = "the message is no DecodeRequest"
                _LOG.warning(
                    "a message of %d bytes from %s is no DecodeRequest", len(content), context.peer()
                )
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, text)
            return
        channel = AsyncMultifuture()
        context.add_done_callback(channel.cancel)
        self._driver.place_request_on_prefill_queue(
            orchestrator.ActiveRequest(
                max_tokens=request.max_tokens,
                prefill_content=prompt,
                is_client_side_tokenization=True,  # the text is decoded here
                return_channel=channel,
            )
        )
        text = GrowingText(self._tokenizer.tokenizer) if request.HasField("text_content") else None
        async for [sample] in channel:
            yield _response("" if text is None else text.add(sample.token_ids), sample.token_ids)
        if text is not None and (rest := text.rest()):
            yield _response(rest, [])

    def _prompt(self, request: Any) -> list[int]:
        """Returns the ids of a request's prompt.

        Raises:
            ValueError: the request cannot be served.
        """
        kind = request.WhichOneof("content")
        if kind is None:
            raise ValueError("the request holds no prompt; set text_content or token_content")
        content = request.text_content.text if kind == "text_content" else request.token_content.token_ids
        prompt = self._tokenizer.prompt(content if isinstance(content, str) else list(content))
        for name, value, most, option in (
            ("the prompt's length in tokens", len(prompt), self._max_prompt_tokens, "--max-prompt-tokens"),
            ("max_tokens", request.max_tokens, self._max_response_tokens, "--max-response-tokens"),
        ):
            if not 0 < value <= most:
                raise ValueError(f"{name} is {value}; the server takes 1 to {most} (its {option})")
        return prompt.tolist()


def _response(text: str, tokens: list[int]) -> Any:
    stream = _messages.DecodeResponse.StreamContent
    return _messages.DecodeResponse(
        stream_content=stream(samples=[stream.Sample(text=text, token_ids=tokens)])
    )
