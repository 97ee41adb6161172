"""The server of JetStream's protocol in a process of its own, compared with `dapo-jax sample`.

It samples four tokens per call and has a cache with pages of four tokens. `http_test` follows a run, with the same loop.
"""

import re
import signal
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stdout
from io import StringIO

import jax
import pytest

grpc = pytest.importorskip("grpc", reason="needs the extra jetstream")
pytest.importorskip("jetstream", reason="needs the extra jetstream")

from jetstream.core.proto import jetstream_pb2 as pb
from jetstream.core.proto import jetstream_pb2_grpc

from dapo_jax.config import ConfigError
from dapo_jax.serving.jetstream_server import JetStreamServer
from dapo_jax.serving.request_loop import RequestLoop
from dapo_jax.serving.serve import ServeOptions, serve
from dapo_jax.serving.served_requests import ServedLimits
from dapo_jax.testing import ScriptedEngine
from dapo_jax.text.formatting import AS_IT_STANDS, PromptFormat
from tests.serving.servers import CONFIG, LIMIT, PATIENCE_S, PROMPTS, ROOT, TOKENIZER, running

LIMITS = ServedLimits(
    model="tiny", tokenizer=TOKENIZER, vocabulary=CONFIG.vocab_size, max_prompt_tokens=9, max_response_tokens=LIMIT, most_responses=9
)  # fmt: skip


def samples(address, prompt, limit=LIMIT):
    """Returns the blocks of the response to a text or to token ids, each (text, tokens)."""
    content = {}
    if isinstance(prompt, str):
        content["text_content"] = pb.DecodeRequest.TextContent(text=prompt)
    elif prompt is not None:
        content["token_content"] = pb.DecodeRequest.TokenContent(token_ids=prompt)
    with grpc.insecure_channel(address) as channel:
        request = pb.DecodeRequest(max_tokens=limit, **content)
        parts = jetstream_pb2_grpc.OrchestratorStub(channel).Decode(request, timeout=PATIENCE_S)
        found = [part.stream_content.samples[0] for part in parts]
        return [(sample.text, list(sample.token_ids)) for sample in found]


class Client:
    """A gRPC client of one server."""

    def __init__(self, server):
        self.server = server
        self.channel = grpc.insecure_channel(server.address)
        self.stub = jetstream_pb2_grpc.OrchestratorStub(self.channel)
        assert self.stub.HealthCheck(pb.HealthCheckRequest(), timeout=PATIENCE_S).is_live

    def ask(self, *request):
        return samples(self.server.address, *request)

    def tokens(self, prompt, limit=LIMIT):
        return [token for _, tokens in self.ask(prompt, limit) for token in tokens]


@pytest.fixture(scope="module")
def server(policies, tmp_path_factory):
    """A client of the server. SIGTERM must end the server without an error."""
    options = ("--slots", 2, "--steps-per-call", 4)
    folder = tmp_path_factory.mktemp("server")
    policies[0].save(folder / "model")
    lengths = ("--max-prompt-tokens", 9, "--max-response-tokens", LIMIT)
    with running(folder, folder / "model", *options, *lengths, http=False) as process:
        yield Client(process)
        process.process.send_signal(signal.SIGTERM)
        assert process.process.wait(timeout=PATIENCE_S) == 0
        assert "stopping" in process.out.read_text()
        assert "Traceback" not in process.err.read_text()


@pytest.fixture(scope="module")
def direct(greedy):
    """[prompt] -> the tokens without the end token, which is not sent."""
    return {
        text: [token for token in response.tokens.tolist() if token != TOKENIZER.eos_id]
        for text, response in greedy[0].items()
    }


def test_concurrent_requests_are_answered_as_by_sample(server, direct, greedy):
    """Six at once, more than there are slots, as texts and as ids."""
    assert {response.finish_reason for response in greedy[0].values()} == {"stop", "length"}
    assert any(TOKENIZER.pad_id in tokens for tokens in direct.values())  # padding does not end a response
    with ThreadPoolExecutor(max_workers=len(PROMPTS)) as pool:
        from_text = dict(zip(PROMPTS, pool.map(server.ask, PROMPTS), strict=True))
        ids = [TOKENIZER.encode(text).tolist() for text in PROMPTS]
        from_ids = dict(zip(PROMPTS, pool.map(server.tokens, ids), strict=True))
    tokens = {text: [token for _, part in parts for token in part] for text, parts in from_text.items()}
    assert tokens == from_ids == direct
    assert {text: "".join(part for part, _ in parts) for text, parts in from_text.items()} == {
        text: TOKENIZER.decode(response.tokens) for text, response in greedy[0].items()
    }
    assert max(len(part) for parts in from_text.values() for _, part in parts) == 4


@pytest.mark.parametrize(
    ("prompt", "limit", "message"),
    [
        (None, LIMIT, "set text_content or token_content"),
        ("1+x", LIMIT, "character 'x' at position 2"),
        ("1" * 10, LIMIT, "10 tokens; the server accepts 1 to 9: shorten it, or serve with a larger --max-prompt-tokens"),
        ([3, 17], LIMIT, "token id 17, which is not in the vocabulary of 17 ids, 0 to 16"),
        ("1+2", 11, "max_tokens is 11; the server accepts 1 to 10: lower it, or serve with a larger --max-response-tokens"),
        ("x" + "1" * 3_000_000, LIMIT, "character 'x' at position 0"),
    ],
)  # fmt: skip
def test_an_invalid_request_is_refused_and_others_are_served(prompt, limit, message, server, direct):
    with pytest.raises(grpc.RpcError) as refused:
        server.ask(prompt, limit)
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert message in refused.value.details()
    assert len(refused.value.details()) <= 1000
    assert server.tokens("9:?", 4) == direct["9:?"][:4]


def test_a_message_that_cannot_be_parsed_is_logged_in_one_line(server, direct):
    content = b"\x0a\x02\xff\xfe"  # not UTF-8
    call = server.channel.unary_stream("/jetstream_proto.Orchestrator/Decode")(content, timeout=PATIENCE_S)
    with pytest.raises(grpc.RpcError) as refused:
        list(call)
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "DecodeRequest" in refused.value.details()
    assert server.server.out.read_text().count(f"a message of {len(content)} bytes from ") == 1
    assert server.tokens("7") == direct["7"]


def full_loop():
    """A loop that has no room for a request."""
    engine = ScriptedEngine(lambda ordinal, index: [1], slots=2, capacity=20)
    return RequestLoop(engine, None, key=jax.random.key(0), version=0, most_responses=0)


def server_of(loop, prompt_format=AS_IT_STANDS, port=0, limits=LIMITS):
    return JetStreamServer(loop, limits, prompt_format, host="127.0.0.1", port=port, say=print)


def test_a_server_without_room_and_a_server_that_stops_have_their_own_status():
    with full_loop() as loop, server_of(loop) as server:
        with pytest.raises(grpc.RpcError, match=r"needs 1 more; the server accepts 0: .*--queue") as refused:
            samples(server.address, "1")
        assert refused.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        loop.__exit__()
        with pytest.raises(grpc.RpcError) as refused:
            samples(server.address, "1")
        assert refused.value.code() == grpc.StatusCode.UNAVAILABLE


def test_others_are_answered_while_a_long_prompt_is_tokenized():
    """The tokenizer of the first request waits for the second request, which has no turn if tokenizing blocks the event loop."""
    other = threading.Event()

    class Waiting(PromptFormat):
        def encode(self, prompt, tokenizer):
            if prompt == "2":
                other.set()
            raise ValueError("refused" if other.wait(10) else "the event loop was blocked")

    with server_of(full_loop(), Waiting()) as server, ThreadPoolExecutor(2) as pool:
        for asked in [pool.submit(samples, server.address, prompt) for prompt in ("1", "2")]:
            assert "refused" in asked.exception().details()


def test_a_port_that_is_taken_is_refused():
    """By default gRPC shares a port among servers, and each gets some of the requests."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=f"127.0.0.1:{port}.*--port 0"), server_of(full_loop(), port=port):
            pass


def test_the_client_in_the_docs_works(server, greedy):
    """The program of docs/use_a_model.md, with this server's address and limit."""
    page = (ROOT / "docs" / "use_a_model.md").read_text()
    lines = re.search(r"\n(    import grpc\n.*flush=True\)\n)", page, re.DOTALL)[1].splitlines()
    client = "\n".join(line.removeprefix("    ") for line in lines)
    client = client.replace("127.0.0.1:9000", server.server.address).replace(
        "max_tokens=64", f"max_tokens={LIMIT}"
    )
    with redirect_stdout(StringIO()) as printed:
        exec(client, {})
    assert printed.getvalue() == TOKENIZER.decode(greedy[0]["1+2"].tokens)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"follow_s": 1.0}, "`checkpoints`"),
        ({"max_prompt_tokens": 40, "max_response_tokens": 30}, "70 positions.* 64"),
        ({"max_prompt_tokens": 0, "max_response_tokens": 64}, "--max-prompt-tokens 1 .* 65 positions.* 64"),
        ({"chat": True}, "--chat"),
        ({"slots": 9}, "slots=9"),
    ],
)
def test_options_that_do_not_fit_the_model_are_configuration_errors(options, message, policies, tmp_path):
    policies[0].save(tmp_path / "model")
    usual = {"max_prompt_tokens": 9, "max_response_tokens": LIMIT}
    with pytest.raises(ConfigError, match=message):
        serve(str(tmp_path / "model"), ServeOptions(**usual | options))
