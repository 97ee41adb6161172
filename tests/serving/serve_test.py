"""`dapo-jax serve` from outside: processes of their own, gRPC over loopback, the library's sampler as the oracle.

Two servers stand for the whole file, since each takes seconds to import TensorFlow and to compile: `step` draws one
token a call, `block` four; `block` follows a run, and its cache has pages of four tokens. A driver whose thread fails kills its process, so none runs in here.
"""

import asyncio
import os
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import jax
import pytest

grpc = pytest.importorskip("grpc", reason="needs the extra jetstream")
pytest.importorskip("jetstream", reason="needs the extra jetstream")

from jetstream.core.proto import jetstream_pb2 as pb
from jetstream.core.proto import jetstream_pb2_grpc

from dapo_jax.checkpoints.checkpointer import Checkpointer
from dapo_jax.config import ModelConfig, TrainConfig, to_yaml
from dapo_jax.dapo.rollouts import Prompt
from dapo_jax.parallel.mesh import make_mesh
from dapo_jax.parallel.weights import weight_transfer
from dapo_jax.run.policy import Policy, optimizer_of
from dapo_jax.sampling.continuous_batching import Sampler
from dapo_jax.sampling.decoding import decoding
from dapo_jax.sampling.engine import DecoderEngine
from dapo_jax.testing import tiny_decoder_config, tiny_params
from dapo_jax.text.tokenizers import CharTokenizer
from dapo_jax.training.state import init_state

ROOT = Path(__file__).absolute().parents[2]
PATIENCE_S = 240
"""What works comes in seconds, but a loaded machine may take long to import TensorFlow and to compile."""

TOKENIZER = CharTokenizer("0123456789+=:,?")
LIMIT = 10
PROMPTS = ("1+2", "40+2", "7", "12345+678", "0=0,1=1", "9:?")
"""Six, for two and three slots."""


@dataclass
class Running:
    """A server process and what calls it."""

    process: subprocess.Popen
    folder: Path
    channel: Any = None
    stub: Any = None
    told: str = ""
    """What it printed at its start."""

    def printed(self, name):
        return (self.folder / name).read_text()

    def ask(self, prompt, limit=LIMIT):
        """The parts of the answer to a text or to token ids, each (text, tokens)."""
        content = (
            {"text_content": pb.DecodeRequest.TextContent(text=prompt)}
            if isinstance(prompt, str)
            else {"token_content": pb.DecodeRequest.TokenContent(token_ids=prompt)}
        )
        parts = self.stub.Decode(pb.DecodeRequest(max_tokens=limit, **content), timeout=PATIENCE_S)
        samples = [part.stream_content.samples[0] for part in parts]
        return [(sample.text, list(sample.token_ids)) for sample in samples]

    def tokens(self, prompt, limit=LIMIT):
        return [token for _, tokens in self.ask(prompt, limit) for token in tokens]


def started(folder, *arguments):
    """A server's process, not yet ready."""
    command = [sys.executable, "-m", "dapo_jax.cli", "serve", *map(str, arguments), "--port", "0"]
    limits = ["--max-prompt-tokens", "9", "--max-response-tokens", str(LIMIT), "--compilation-cache", ""]
    folder.mkdir()
    with (folder / "out").open("w") as out, (folder / "err").open("w") as err:
        environment = {**os.environ, "JAX_LOG_COMPILES": "1"}
        process = subprocess.Popen(
            command + limits, cwd=ROOT, stdout=out, stderr=err, env=environment, start_new_session=True
        )
    return Running(process, folder)


def until(found, server, what):
    """Waits for `found()` to be true while the server runs."""
    deadline = time.monotonic() + PATIENCE_S
    while not (value := found()):
        assert server.process.poll() is None, f"the server ended: {server.printed('err')[-2000:]}"
        assert time.monotonic() < deadline, (
            f"waited {PATIENCE_S} s for {what}: {server.printed('err')[-2000:]}"
        )
        time.sleep(0.05)
    return value


def connect(server):
    """Waits until the server has told its address, and calls it."""
    # The whole greeting: its last line is the client's.
    until(lambda: "flush=True)" in server.printed("out"), server, "its address")
    server.told = server.printed("out")
    channel = grpc.insecure_channel(re.search(r"127\.0\.0\.1:\d+", server.told)[0])
    server.channel, server.stub = channel, jetstream_pb2_grpc.OrchestratorStub(channel)
    assert server.stub.HealthCheck(pb.HealthCheckRequest(), timeout=PATIENCE_S).is_live


def ended(servers):
    """Their exit statuses after SIGTERM."""
    for server in servers:
        server.process.send_signal(signal.SIGTERM)
    return [server.process.wait(timeout=PATIENCE_S) for server in servers]


@pytest.fixture(scope="module")
def policies():
    """Two models of one shape; the greedy answers of the first end in all ways, and hold the padding's id."""
    decoder = tiny_decoder_config(vocab_size=TOKENIZER.vocab_size, layers=1)
    return [Policy(decoder=decoder, params=tiny_params(decoder, seed=s), tokenizer=TOKENIZER) for s in (8, 3)]


@pytest.fixture(scope="module")
def run_dir(policies, tmp_path_factory):
    """A run with the first model as its checkpoint of step 1."""
    folder = tmp_path_factory.mktemp("run")
    policies[1].save(folder / "model")  # what it began with: not what is served
    config = TrainConfig(run_dir=str(folder), model=ModelConfig(source=str(folder / "model")))
    (folder / "config.yaml").write_text(to_yaml(config))
    save(folder, 1, policies[0])
    return folder


def save(folder, step, policy):
    optimizer = optimizer_of(TrainConfig(run_dir="unused").optimizer)
    with Checkpointer(folder / "checkpoints") as checkpointer:
        state = init_state(policy.params, optimizer, make_mesh(devices=jax.devices()[:1]))
        checkpointer.save(step, state, {"cursor": 0}, {})


@pytest.fixture(scope="module")
def servers(policies, run_dir, tmp_path_factory):
    """Both servers, started side by side; SIGTERM must end them without an error."""
    folder = tmp_path_factory.mktemp("servers")
    policies[0].save(folder / "model")
    paged = ("--slots", 2, "--steps-per-call", 4, "--page-tokens", 4, "--follow", 0.2)
    running = {
        "step": started(folder / "step", folder / "model", "--slots", 3, "--steps-per-call", 1),
        "block": started(folder / "block", run_dir, *paged),
    }
    try:
        for server in running.values():
            connect(server)
        yield running
        assert ended(running.values()) == [0, 0]
        assert all("stopping" in server.printed("out") for server in running.values())
    finally:
        for server in running.values():
            server.process.kill()


@pytest.fixture(scope="module")
def direct(policies):
    """[policy][prompt] -> the response that the library's own sampler draws greedily."""
    mesh, config = make_mesh(devices=jax.devices()[:1]), policies[0].decoder
    transfer = weight_transfer(policies[0].params, mesh, dtype="float32")
    engine = DecoderEngine(
        config, slots=4, capacity=32, steps_per_call=8, stop_ids=(TOKENIZER.eos_id,), mesh=mesh
    )

    def answers(policy):
        left = [
            Prompt(ordinal=i, text=t, tokens=TOKENIZER.encode(t), answer="") for i, t in enumerate(PROMPTS)
        ]
        sampled = Sampler(engine, prefill_prompts=2).sample(
            transfer(policy.params), lambda count: [left.pop() for _ in left[:count]], key=jax.random.key(0),
            decoding=decoding(temperature=0.0), samples_per_prompt=1, max_response_tokens=LIMIT,
        )  # fmt: skip
        return {prompt.text: response for prompt, (response,) in sampled}

    return [answers(policy) for policy in policies]


def without_end(response):
    """The tokens that JetStream passes on: all but the end token."""
    return [token for token in response.tokens.tolist() if token != TOKENIZER.eos_id]


@pytest.mark.parametrize("name", ["step", "block"])
def test_concurrent_requests_are_answered_as_by_the_sampler(name, servers, direct):
    """Six at once, more than there are slots: the same tokens, whether text or ids were sent."""
    server, expected = servers[name], {text: without_end(r) for text, r in direct[0].items()}
    assert {response.finish_reason for response in direct[0].values()} == {"stop", "length"}
    assert any(TOKENIZER.pad_id in tokens for tokens in expected.values())  # padding ends no response
    with ThreadPoolExecutor(max_workers=len(PROMPTS)) as pool:
        from_text = dict(zip(PROMPTS, pool.map(server.ask, PROMPTS), strict=True))
        ids = [TOKENIZER.encode(text).tolist() for text in PROMPTS]
        from_ids = dict(zip(PROMPTS, pool.map(server.tokens, ids), strict=True))
    tokens = {text: [token for _, part in parts for token in part] for text, parts in from_text.items()}
    assert tokens == from_ids == expected
    assert {text: "".join(part for part, _ in parts) for text, parts in from_text.items()} == {
        text: TOKENIZER.decode(response.tokens) for text, response in direct[0].items()
    }
    steps = {"step": 1, "block": 4}[name]
    assert {len(part) for parts in from_text.values() for _, part in parts if part} >= {steps}
    assert max(len(part) for parts in from_text.values() for _, part in parts) == steps


@pytest.mark.parametrize("name", ["step", "block"])
@pytest.mark.parametrize("limit", [1, 4, 7])
def test_a_request_gets_as_many_tokens_as_it_asks_for(limit, name, servers, direct):
    """JetStream alone drops the block that goes beyond: of 7 tokens, four at a time, 4 would come."""
    expected = without_end(direct[0]["9:?"])
    assert len(expected) > 7
    assert servers[name].tokens("9:?", limit) == expected[:limit]


@pytest.mark.parametrize(
    ("prompt", "limit", "message"),
    [
        ("1+x", LIMIT, "character 'x' at position 2"),
        ("", LIMIT, "the prompt has 0 tokens; the server takes 1 to 9"),
        ("1" * 10, LIMIT, "the prompt has 10 tokens; the server takes 1 to 9 (its --max-prompt-tokens)"),
        ([3, 17], LIMIT, "token id 17 is not in the vocabulary of 17 ids, 0 to 16"),
        ("1+2", 0, "max_tokens is 0; the server takes 1 to 10"),
        ("1+2", 11, "max_tokens is 11; the server takes 1 to 10 (its --max-response-tokens)"),
    ],
)
def test_what_cannot_be_served_is_refused_and_harms_nobody(prompt, limit, message, servers, direct):
    """JetStream alone cuts a prompt that is too long, and ends its process at a text that cannot be encoded."""
    server = servers["step"]
    with pytest.raises(grpc.RpcError) as refused:
        server.ask(prompt, limit)
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert message in refused.value.details()
    assert server.tokens("7") == without_end(direct[0]["7"])


@pytest.mark.parametrize("content", [b"\xff" * 8, b"\x0a\x02\xff\xfe"], ids=["no message", "no UTF-8"])
def test_a_message_that_cannot_be_parsed_is_one_line_and_no_traceback(content, servers, direct):
    server = servers["step"]
    before = server.printed("err")
    call = server.channel.unary_stream("/jetstream_proto.Orchestrator/Decode")(content, timeout=PATIENCE_S)
    with pytest.raises(grpc.RpcError) as refused:
        list(call)
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert refused.value.details() == "the message is no DecodeRequest"
    said = server.printed("err").removeprefix(before)
    assert said.count(f"a message of {len(content)} bytes from ") == 1
    assert "Traceback" not in said
    assert server.tokens("7") == without_end(direct[0]["7"])


def test_what_is_wrong_with_a_prompt_of_megabytes_fits_into_the_answer(servers):
    with pytest.raises(grpc.RpcError) as refused:
        servers["step"].ask("x" + "1" * 3_000_000)
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert refused.value.details().startswith("character 'x' at position 0")


def test_others_are_answered_while_a_long_prompt_is_tokenized():
    """The tokenizer waits for what another call does: on the loop's own thread that call would never have its turn."""
    from dapo_jax.serving.orchestrator import Orchestrator

    other = threading.Event()

    class Tokenizer:
        def prompt(self, content):
            raise ValueError("refused" if other.wait(10) else "the loop stood still")

    service = Orchestrator.__new__(Orchestrator)
    service._tokenizer, service._max_prompt_tokens, service._max_response_tokens = Tokenizer(), 1, 1
    request = pb.DecodeRequest(max_tokens=1, text_content=pb.DecodeRequest.TextContent(text="1"))

    async def calls():
        asyncio.get_running_loop().call_later(0.01, other.set)
        return [part async for part in service.Decode(request)]

    with pytest.raises(ValueError, match="refused"):
        asyncio.run(calls())


def test_a_request_without_a_prompt_is_refused(servers):
    with pytest.raises(grpc.RpcError, match="set text_content or token_content"):
        list(servers["step"].stub.Decode(pb.DecodeRequest(max_tokens=1), timeout=PATIENCE_S))


def test_the_end_token_is_not_among_the_ids_and_the_page_says_so(servers, direct):
    [ended] = [text for text, response in direct[0].items() if response.finish_reason == "stop"][:1]
    tokens = servers["step"].tokens(ended)
    assert [*tokens, TOKENIZER.eos_id] == direct[0][ended].tokens.tolist()
    assert len(tokens) < LIMIT
    page = " ".join((ROOT / "docs" / "use_a_model.md").read_text().split())
    assert "The token that ends a response is not among them" in page


def test_ids_with_a_session_are_answered(servers, direct):
    """JetStream alone ends its process at these: it looks for the shape of a list."""
    ids = TOKENIZER.encode("40+2").tolist()
    content = pb.DecodeRequest.TokenContent(token_ids=ids)
    request = pb.DecodeRequest(session_cache="mine", max_tokens=LIMIT, token_content=content)
    parts = servers["step"].stub.Decode(request, timeout=PATIENCE_S)
    tokens = [token for part in parts for token in part.stream_content.samples[0].token_ids]
    assert tokens == without_end(direct[0]["40+2"])


def test_many_short_requests_are_all_answered(servers, direct):
    """Slots run empty again and again, which JetStream alone does not always survive."""
    server, first = servers["step"], without_end(direct[0]["9:?"])[:1]
    with ThreadPoolExecutor(max_workers=4) as pool:
        assert list(pool.map(lambda _: server.tokens("9:?", 1), range(100))) == [first] * 100


def test_a_client_that_leaves_harms_nobody(servers, direct):
    server = servers["block"]
    content = pb.DecodeRequest.TextContent(text="9:?")
    calls = [server.stub.Decode(pb.DecodeRequest(max_tokens=LIMIT, text_content=content)) for _ in range(4)]
    for call in calls:
        call.cancel()
    assert server.tokens("9:?") == without_end(direct[0]["9:?"])


def test_the_client_that_it_prints_works(servers, direct):
    """The lines behind the greeting, as they stand; they ask for 1+2."""
    lines = servers["step"].told.splitlines()
    client = "\n".join(line[4:] for line in lines if line.startswith("    "))
    with redirect_stdout(StringIO()) as printed:
        exec(compile(client, "client", "exec"), {})
    assert printed.getvalue() == TOKENIZER.decode(direct[0]["1+2"].tokens)


def test_a_new_checkpoint_is_served_without_a_restart_and_compiles_nothing(
    servers, direct, policies, run_dir
):
    """There and back: the answers are the new weights', from the same process and programs."""
    server = servers["block"]
    old, new = (without_end(answers["12345+678"]) for answers in direct)
    assert old != new
    assert server.tokens("12345+678") == old
    compiled = server.printed("err").count("Compiling jit")
    assert compiled > 0
    for step, policy, expected in ((2, policies[1], new), (3, policies[0], old)):
        save(run_dir, step, policy)
        until(lambda step=step: f"now serving step {step}" in server.printed("out"), server, f"step {step}")
        assert server.tokens("12345+678") == expected
    assert server.printed("err").count("Compiling jit") == compiled
