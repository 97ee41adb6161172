"""JetStream's gRPC server in processes of its own, compared with `dapo-jax sample`.

Two servers are shared by all tests, since each takes seconds to import TensorFlow and to compile. `step` samples one token per call. `block` samples
four, follows a run, and has a cache with pages of four tokens. No driver runs in this process: an error in its threads would kill it.
"""

import asyncio
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, redirect_stdout
from io import StringIO

import pytest

grpc = pytest.importorskip("grpc", reason="needs the extra jetstream")
pytest.importorskip("jetstream", reason="needs the extra jetstream")

from jetstream.core.proto import jetstream_pb2 as pb
from jetstream.core.proto import jetstream_pb2_grpc

from tests.serving.servers import LIMIT, PATIENCE_S, PROMPTS, TOKENIZER, Running, save


class Client:
    """A gRPC client of one server."""

    def __init__(self, server):
        server.until("flush=True)")  # the last line of the greeting
        self.server, self.greeting = server, server.out.read_text()
        self.channel = grpc.insecure_channel(server.address)
        self.stub = jetstream_pb2_grpc.OrchestratorStub(self.channel)
        assert self.stub.HealthCheck(pb.HealthCheckRequest(), timeout=PATIENCE_S).is_live

    def ask(self, prompt, limit=LIMIT, **others):
        """Returns the blocks of the response to a text or to token ids, each (text, tokens)."""
        content = (
            {"text_content": pb.DecodeRequest.TextContent(text=prompt)}
            if isinstance(prompt, str)
            else {"token_content": pb.DecodeRequest.TokenContent(token_ids=prompt)}
        )
        request = pb.DecodeRequest(max_tokens=limit, **content, **others)
        samples = [part.stream_content.samples[0] for part in self.stub.Decode(request, timeout=PATIENCE_S)]
        return [(sample.text, list(sample.token_ids)) for sample in samples]

    def tokens(self, prompt, limit=LIMIT, **others):
        return [token for _, tokens in self.ask(prompt, limit, **others) for token in tokens]

    def logged(self):
        return self.server.err.read_text()


@pytest.fixture(scope="module")
def servers(policies, run_dir, tmp_path_factory):
    """Clients of both servers. SIGTERM must end the servers without an error."""
    folder = tmp_path_factory.mktemp("servers")
    policies[0].save(folder / "model")
    lengths = ("--max-prompt-tokens", 9, "--max-response-tokens", LIMIT)
    options = {
        "step": (folder / "model", "--slots", 3, "--steps-per-call", 1, *lengths),
        "block": (
            run_dir,
            "--slots",
            2,
            "--steps-per-call",
            4,
            "--page-tokens",
            4,
            "--follow",
            0.2,
            *lengths,
        ),
    }
    with ExitStack() as ends:
        running = {}
        for name, arguments in options.items():  # the servers start in parallel
            (folder / name).mkdir()
            running[name] = ends.enter_context(Running(folder / name, *arguments, http=False))
        clients = {name: Client(server) for name, server in running.items()}
        yield clients
        for client in clients.values():
            client.server.process.send_signal(signal.SIGTERM)
            assert client.server.process.wait(timeout=PATIENCE_S) == 0
            assert "stopping" in client.server.out.read_text()


@pytest.fixture(scope="module")
def direct(greedy):
    """[policy][prompt] -> the tokens without the end token, which JetStream removes."""
    return [
        {
            text: [token for token in response.tokens.tolist() if token != TOKENIZER.eos_id]
            for text, response in responses.items()
        }
        for responses in greedy
    ]


@pytest.mark.parametrize("name", ["step", "block"])
def test_concurrent_requests_are_answered_as_by_sample(name, servers, direct, greedy):
    """Six at once, more than there are slots, as texts and as ids."""
    server, expected = servers[name], direct[0]
    assert {response.finish_reason for response in greedy[0].values()} == {"stop", "length"}
    assert any(TOKENIZER.pad_id in tokens for tokens in expected.values())  # padding does not end a response
    with ThreadPoolExecutor(max_workers=len(PROMPTS)) as pool:
        from_text = dict(zip(PROMPTS, pool.map(server.ask, PROMPTS), strict=True))
        ids = [TOKENIZER.encode(text).tolist() for text in PROMPTS]
        from_ids = dict(zip(PROMPTS, pool.map(server.tokens, ids), strict=True))
    tokens = {text: [token for _, part in parts for token in part] for text, parts in from_text.items()}
    assert tokens == from_ids == expected
    assert {text: "".join(part for part, _ in parts) for text, parts in from_text.items()} == {
        text: TOKENIZER.decode(response.tokens) for text, response in greedy[0].items()
    }
    steps = {"step": 1, "block": 4}[name]
    assert max(len(part) for parts in from_text.values() for _, part in parts) == steps


@pytest.mark.parametrize("name", ["step", "block"])
@pytest.mark.parametrize("limit", [1, 4, 7])
def test_a_request_gets_as_many_tokens_as_it_asks_for(limit, name, servers, direct):
    """JetStream alone drops a block that exceeds the limit: with four tokens per call, 4 of 7 tokens would arrive."""
    expected = direct[0]["9:?"]
    assert len(expected) > 7
    assert servers[name].tokens("9:?", limit) == expected[:limit]


@pytest.mark.parametrize(
    ("prompt", "limit", "message"),
    [
        ("1+x", LIMIT, "character 'x' at position 2"),
        ("", LIMIT, "the prompt's length in tokens is 0; the server takes 1 to 9"),
        (
            "1" * 10,
            LIMIT,
            "the prompt's length in tokens is 10; the server takes 1 to 9 (its --max-prompt-tokens)",
        ),
        ([3, 17], LIMIT, "token id 17 is not in the vocabulary of 17 ids, 0 to 16"),
        ("1+2", 0, "max_tokens is 0; the server takes 1 to 10"),
        ("1+2", 11, "max_tokens is 11; the server takes 1 to 10 (its --max-response-tokens)"),
    ],
)
def test_an_invalid_request_is_refused_and_others_are_served(prompt, limit, message, servers, direct):
    """JetStream alone cuts a prompt that is too long, and a text that cannot be encoded kills its process."""
    server = servers["step"]
    with pytest.raises(grpc.RpcError) as refused:
        server.ask(prompt, limit)
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert message in refused.value.details()
    assert server.tokens("7") == direct[0]["7"]


@pytest.mark.parametrize("content", [b"\xff" * 8, b"\x0a\x02\xff\xfe"], ids=["no message", "no UTF-8"])
def test_a_message_that_cannot_be_parsed_is_logged_in_one_line(content, servers, direct):
    server = servers["step"]
    before = server.logged()
    call = server.channel.unary_stream("/jetstream_proto.Orchestrator/Decode")(content, timeout=PATIENCE_S)
    with pytest.raises(grpc.RpcError) as refused:
        list(call)
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "DecodeRequest" in refused.value.details()
    logged = server.logged().removeprefix(before)
    assert logged.count(f"a message of {len(content)} bytes from ") == 1
    assert "Traceback" not in logged
    assert server.tokens("7") == direct[0]["7"]


def test_the_error_about_a_prompt_of_megabytes_is_short(servers):
    with pytest.raises(grpc.RpcError) as refused:
        servers["step"].ask("x" + "1" * 3_000_000)
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert refused.value.details().startswith("character 'x' at position 0")


def test_others_are_answered_while_a_long_prompt_is_tokenized():
    """The tokenizer waits for another call, which has no turn if tokenizing blocks the event loop."""
    from dapo_jax.serving.jetstream_server import Server

    other = threading.Event()

    class Tokenizer:
        def prompt(self, content):
            raise ValueError("refused" if other.wait(10) else "the event loop was blocked")

    class Context:
        async def abort(self, code, details):
            raise grpc.RpcError(details)

    server = Server.__new__(Server)
    server._tokenizer = Tokenizer()
    request = pb.DecodeRequest(max_tokens=1, text_content=pb.DecodeRequest.TextContent(text="1"))

    async def calls():
        asyncio.get_running_loop().call_later(0.01, other.set)
        return [part async for part in server.decode(request.SerializeToString(), Context())]

    with pytest.raises(grpc.RpcError, match="refused"):
        asyncio.run(calls())


def test_a_request_without_a_prompt_is_refused(servers):
    with pytest.raises(grpc.RpcError, match="set text_content or token_content"):
        list(servers["step"].stub.Decode(pb.DecodeRequest(max_tokens=1), timeout=PATIENCE_S))


def test_the_end_token_is_not_among_the_ids(servers, greedy):
    [text] = [text for text, response in greedy[0].items() if response.finish_reason == "stop"][:1]
    tokens = servers["step"].tokens(text)
    assert [*tokens, TOKENIZER.eos_id] == greedy[0][text].tokens.tolist()
    assert len(tokens) < LIMIT


def test_ids_with_a_session_are_answered(servers, direct):
    """In JetStream alone they kill the process."""
    ids = TOKENIZER.encode("40+2").tolist()
    assert servers["step"].tokens(ids, session_cache="mine") == direct[0]["40+2"]


def test_many_short_requests_are_all_answered(servers, direct):
    """All slots become free again and again, which JetStream alone does not always survive."""
    server, first = servers["step"], direct[0]["9:?"][:1]
    with ThreadPoolExecutor(max_workers=4) as pool:
        assert list(pool.map(lambda _: server.tokens("9:?", 1), range(100))) == [first] * 100


def test_a_client_that_leaves_does_not_affect_others(servers, direct):
    server = servers["block"]
    content = pb.DecodeRequest.TextContent(text="9:?")
    calls = [server.stub.Decode(pb.DecodeRequest(max_tokens=LIMIT, text_content=content)) for _ in range(4)]
    for call in calls:
        call.cancel()
    assert server.tokens("9:?") == direct[0]["9:?"]


def test_the_client_in_the_greeting_works(servers, greedy):
    lines = servers["step"].greeting.splitlines()
    client = "\n".join(line[4:] for line in lines if line.startswith("    "))
    with redirect_stdout(StringIO()) as printed:
        exec(compile(client, "client", "exec"), {})
    assert printed.getvalue() == TOKENIZER.decode(greedy[0]["1+2"].tokens)


def test_a_new_checkpoint_is_served_without_a_restart_and_compiles_nothing(
    servers, direct, policies, run_dir
):
    """Twice: to another model and back, in the same process with the same programs."""
    server = servers["block"]
    old, new = (answers["12345+678"] for answers in direct)
    assert old != new
    assert server.tokens("12345+678") == old
    compiled = server.logged().count("Compiling jit")
    assert compiled > 0
    for step, policy, expected in ((2, policies[1], new), (3, policies[0], old)):
        save(run_dir, step, policy)
        server.server.until(f"now serving step {step}")
        assert server.tokens("12345+678") == expected
    assert server.logged().count("Compiling jit") == compiled
