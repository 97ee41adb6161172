"""JetStream's own orchestrator with requests checked at the door.

An exception in one of its threads kills the process at once, so no request may cause one: what cannot be served is
refused before it is queued.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from jetstream.engine import tokenizer_api

from dapo_jax.serving.adapter import JetStreamEngine
from dapo_jax.serving.engine_types import BoundedPrompt
from dapo_jax.serving.jetstream_fixes import messages, orchestrator
from dapo_jax.serving.text import GrowingText

_LONGEST_DETAILS = 1000
"""Characters: a message may quote a prompt, and details travel in a header, which is bounded."""
_LOG = logging.getLogger(__name__)


def register(service: "Orchestrator", server: Any) -> None:
    """Makes `service` answer at `server`, as JetStream's generated function does, but for who parses requests."""
    handlers = {
        "Decode": grpc.unary_stream_rpc_method_handler(
            service.decode_bytes, response_serializer=messages.DecodeResponse.SerializeToString
        ),
        "HealthCheck": grpc.unary_unary_rpc_method_handler(
            service.HealthCheck,
            request_deserializer=lambda content: messages.HealthCheckRequest(),  # it has no fields
            response_serializer=messages.HealthCheckResponse.SerializeToString,
        ),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, handlers),))


_SERVICE = messages.DESCRIPTOR.services_by_name["Orchestrator"].full_name


class Driver(orchestrator.Driver):
    """JetStream's driver over one engine that both prefills and generates. Its threads start at once; `stop` ends them."""

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
        """The prompt with what the engine is not told otherwise: the request's limit, and whether it is still there.

        (JetStream's own puts a token in front of token ids, and fails on them when the request names a session.)
        """
        channel = request.return_channel
        padded, length = self._tokenizer.pad(self._tokenizer.prompt(request.prefill_content or []))

        def abandoned() -> bool:
            # A channel is cancelled too after its response has ended.
            return channel.cancelled() and (request.complete is None or not request.complete.all())

        return BoundedPrompt(
            tokens=padded, max_response_tokens=request.max_tokens, abandoned=abandoned
        ), length

    def _generate_thread(self, idx: int) -> None:
        """JetStream's, begun again when it trips over its own assertion.

        It asserts that a slot is in use; the last response may end between its look at the slots and that assertion.
        Then no slot holds anything, so a new state loses nothing.
        """
        while self.live:
            try:
                super()._generate_thread(idx)
                return
            except AssertionError:
                if self._generate_slots[idx].qsize() < self._engine.max_concurrent_decodes:
                    raise


class Orchestrator(orchestrator.LLMOrchestrator):
    """JetStream's gRPC service: refuses what cannot be served, and puts text together token by token.

    Args:
        driver: what requests are handed to.
        engine: the engine behind it.
        max_prompt_tokens: the longest prompt that is taken.
        max_response_tokens: the largest `max_tokens` that a request may ask for.
    """

    def __init__(
        self, driver: Driver, engine: JetStreamEngine, *, max_prompt_tokens: int, max_response_tokens: int
    ) -> None:
        super().__init__(driver)
        self._tokenizer = engine.build_tokenizer(engine.get_tokenizer())
        self._max_prompt_tokens, self._max_response_tokens = max_prompt_tokens, max_response_tokens

    async def decode_bytes(self, content: bytes, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
        """Does what `Decode` does, for a message as it came.

        gRPC itself prints a traceback for one that cannot be parsed.
        """
        try:
            request = messages.DecodeRequest.FromString(content)
        except DecodeError:
            _LOG.warning("a message of %d bytes from %s is no DecodeRequest", len(content), context.peer())
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the message is no DecodeRequest")
        async for response in self.Decode(request, context):
            yield response

    async def Decode(  # noqa: N802  (gRPC's name)
        self, request: Any, context: grpc.aio.ServicerContext | None = None
    ) -> AsyncIterator[Any]:
        """Streams one response: the text that each block of tokens completes, and the tokens, without the one that ends it.

        JetStream keeps the end token to itself; a response of fewer tokens than were asked for has ended by it.
        """
        try:
            # In a thread, of which the server has one: a prompt of megabytes takes long, and others are answered meanwhile.
            await asyncio.to_thread(self._check, request)
        except ValueError as error:
            if context is None:
                raise
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"{error!s:.{_LONGEST_DETAILS}}")
        text = GrowingText(self._tokenizer.tokenizer)
        async for response in super().Decode(request, context):
            sample = response.stream_content.samples[0]
            if request.HasField("text_content"):
                sample.text = text.add(list(sample.token_ids))
            yield response
        if rest := text.rest():
            yield _text_response(rest)

    def should_buffer_response(self, response: Any) -> bool:
        """Never: characters in parts are put together here."""
        return False

    def _check(self, request: Any) -> None:
        kind = request.WhichOneof("content")
        if kind is None:
            raise ValueError("the request holds no prompt; set text_content or token_content")
        content = (
            request.text_content.text if kind == "text_content" else list(request.token_content.token_ids)
        )
        length, longest = len(self._tokenizer.prompt(content)), self._max_prompt_tokens
        if not 0 < length <= longest:
            raise ValueError(
                f"the prompt has {length} tokens; the server takes 1 to {longest} (its --max-prompt-tokens)"
            )
        if not 0 < request.max_tokens <= self._max_response_tokens:
            raise ValueError(
                f"max_tokens is {request.max_tokens}; the server takes 1 to {self._max_response_tokens} "
                "(its --max-response-tokens)"
            )


def _text_response(text: str) -> Any:
    stream = messages.DecodeResponse.StreamContent
    return messages.DecodeResponse(stream_content=stream(samples=[stream.Sample(text=text)]))
