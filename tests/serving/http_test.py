"""`dapo-jax serve`: the options that both servers refuse, and one HTTP server in a process of its own that follows a run."""

import math
import re
import signal
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stdout
from io import StringIO

import jax
import pytest

from dapo_jax.cli import main
from dapo_jax.config import ConfigError
from dapo_jax.sampling.decoding import DecodingOptions
from dapo_jax.sampling.engine import DecoderEngine
from dapo_jax.serving import serve as serving
from dapo_jax.serving.serve import HttpOptions, ServeOptions, limits_of, request_loop, serve, serve_http
from tests.serving.servers import LIMIT, PROMPTS, ROOT, TOKENIZER, ask, running, save


@pytest.mark.parametrize(
    ("module", "call", "message"),
    [
        ("http_server", lambda: serve_http("shipped:quickstart", HttpOptions()), r"aiohttp.*\.\[http\]"),
        ("jetstream_server", lambda: serve("shipped:quickstart", ServeOptions()), r"\.\[jetstream\]"),
    ],
)
def test_without_the_extra_the_error_names_it(module, call, message, monkeypatch):
    monkeypatch.setitem(sys.modules, f"dapo_jax.serving.{module}", None)
    with pytest.raises(ConfigError, match=message):
        call()


@pytest.mark.parametrize("host", ["0.0.0.0", "[::]", "192.0.2.1", "example.org"])
def test_other_machines_need_a_key(host):
    """The host is refused before a model is loaded."""
    pytest.importorskip("aiohttp", reason="needs the extra http")
    with pytest.raises(ConfigError, match=f"--host {re.escape(host)} .*DAPO_JAX_API_KEY"):
        serve_http("no such model", HttpOptions(host=host))
    with pytest.raises(ConfigError, match=r"no such model|cannot listen on"):
        serve_http("no such model", HttpOptions(host=host, port=0), api_key="key")


@pytest.mark.parametrize(
    ("option", "value"),
    [("slots", 0), ("queue", -1), ("port", 65536), ("temperature", math.nan), ("temperature", 1e-9), ("seed", 2**32), ("follow_s", math.inf)],
)  # fmt: skip
def test_an_option_out_of_range_is_a_configuration_error(option, value):
    with pytest.raises(ConfigError, match=rf"{option.removesuffix('_s')}={value}"):
        HttpOptions(**{option: value})


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        (["--chat"], "--chat"),
        (["--jetstream", "--system-prompt", "a"], "--chat"),
        (["--jetstream", "--model-name", "a"], "--model-name"),
    ],
)
def test_options_that_do_not_fit_each_other_are_refused(arguments, option, capsys):
    assert main(["serve", "shipped:quickstart", *arguments]) == 2
    assert option in capsys.readouterr().err


@pytest.mark.parametrize("server", [["http"], ["jetstream", "--jetstream"]])
def test_a_port_that_is_taken_is_found_before_the_model_is_loaded(server, capsys):
    pytest.importorskip("aiohttp" if server[0] == "http" else "jetstream", reason="needs the extra")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", "no/such/model", "--port", str(port), *server[1:]]) == 2
    assert re.search(f"cannot listen on 127.0.0.1:{port}: .*--port 0", capsys.readouterr().err)


@pytest.mark.parametrize(
    ("options", "lengths"),
    [({}, (32, 32)), ({"max_prompt_tokens": 9}, (9, 55)), ({"max_response_tokens": 10}, (54, 10))],
)
def test_default_lengths_are_as_long_as_the_model_has_room_for(options, lengths, policies):
    limits = limits_of("preset:none", policies[0], HttpOptions(**options))
    assert (limits.max_prompt_tokens, limits.max_response_tokens) == lengths


def asked(server, text, **params):
    """Returns the choice of one request, which must succeed."""
    body = {"token_ids": TOKENIZER.encode(text).tolist(), "sampling_params": params}
    answered = ask(server.address, "/inference/v1/generate", body)
    assert answered.status == 200, answered.content
    return answered.json["choices"][0]


@pytest.fixture(scope="module")
def server(run_dir, tmp_path_factory):
    pytest.importorskip("aiohttp", reason="needs the extra http")
    lengths = ("--max-prompt-tokens", 9, "--max-response-tokens", LIMIT)
    with running(
        tmp_path_factory.mktemp("server"), run_dir, "--follow", 0.2, "--model-name", "run", *lengths
    ) as server:
        yield server
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(timeout=60) == 0, server.err.read_text()[-2000:]
        assert "stopping" in server.out.read_text()
        assert "Traceback" not in server.err.read_text()


def test_nothing_is_compiled_after_the_server_is_ready_and_each_request_is_one_line(server):
    """A response, one with a seed, and a scored prompt: each has the 3 tokens of the prompt and 1 sampled token."""
    compiled = server.err.read_text().count("Compiling jit")
    assert compiled > 0
    asked(server, "1+2", max_tokens=1, temperature=0)
    asked(server, "1+2", max_tokens=1, seed=7)
    body = {"prompt": "1+2", "max_tokens": 1, "echo": True, "logprobs": 1}
    assert ask(server.address, "/v1/completions", body).status == 200
    assert ask(server.address, "/a%0Ab%1b[31m", method="GET").status == 404
    assert server.err.read_text().count("Compiling jit") == compiled
    lines = [line for line in server.err.read_text().splitlines() if re.match("(POST|GET) /", line)]
    heads = [re.sub(r" \d+\.\d\d s$", "", line) for line in lines[-4:]]
    sampled = "POST /inference/v1/generate 200 3+1 tokens"
    last = ["POST /v1/completions 200 3+1 tokens", "GET /a%0Ab%1b[31m 404 0+0 tokens"]
    assert heads == [sampled, sampled, *last]


def test_every_option_reaches_the_loop(policies, monkeypatch):
    made = []

    class Noted(DecoderEngine):
        def __init__(self, config, mesh, spec):
            made.append(vars(spec))
            super().__init__(config, mesh, spec)

    monkeypatch.setattr(serving, "DecoderEngine", Noted)
    monkeypatch.setattr(serving, "compile_sampling", lambda *_: None)
    options = HttpOptions(
        slots=64, queue=3, max_prompt_tokens=17, max_response_tokens=7, temperature=0.7, top_p=0.9, top_k=5, seed=3, steps_per_call=2,
        compute_dtype="bfloat16", batch_invariant=True,
    )  # fmt: skip
    limits = limits_of("preset:none", policies[0], options)
    loop, transfer = request_loop(policies[0], options, limits)
    assert limits.decoding == DecodingOptions(temperature=0.7, top_p=0.9, top_k=5)
    assert limits.most_responses == loop._most == 67
    assert loop._loop._key == jax.random.key(3)
    [given] = made
    expected = {"slots": 64, "capacity": 24, "steps_per_call": 2, "compute_dtype": "bfloat16", "batch_invariant": True}  # fmt: skip
    assert expected.items() <= given.items()
    assert jax.tree.leaves(transfer.shapes["ends"]["embedding"])[0].dtype == "bfloat16"


def test_a_run_is_followed_while_requests_run_and_nothing_compiles(server, run_dir, policies, greedy):
    """Twice, with four clients that send requests all the time: no request fails, and later answers are from the new weights."""

    def greedy_answer():
        choice = asked(server, PROMPTS[3], temperature=0)
        return choice["token_ids"], choice["spans"]

    def expected(policy, step):
        return greedy[policy][PROMPTS[3]].tokens.tolist(), [{"first": 0, "version": step}]

    assert greedy_answer() == expected(0, 1)
    compiled = server.err.read_text().count("Compiling jit")
    for step, policy in ((2, 1), (3, 0)):
        ending = []
        versions = []

        def client(at, ending=ending, versions=versions):
            while not ending:
                versions.extend(span["version"] for span in asked(server, PROMPTS[at])["spans"])

        with ThreadPoolExecutor(4) as pool:
            clients = [pool.submit(client, at) for at in range(4)]
            save(run_dir, step, policies[policy])
            server.until(f"now serving step {step}")
            ending.append(True)
            for each in clients:
                each.result()
        assert step - 1 in versions
        assert set(versions) <= {step - 1, step}
        assert greedy_answer() == expected(policy, step)
    assert server.err.read_text().count("Compiling jit") == compiled


def test_the_client_in_the_docs_works(server):
    """The program of docs/serve.md, with this server's address."""
    page = (ROOT / "docs" / "serve.md").read_text()
    program = re.search(r"\n((?:    .*\n|\n)*    print\(choice.*\n)", page)[1]
    lines = [line.removeprefix("    ") for line in program.splitlines()]
    with redirect_stdout(StringIO()) as printed:
        exec("\n".join(lines).replace("127.0.0.1:9000", server.address), {})
    assert re.fullmatch(r"\[[\d, ]+\] \[[-\d., e]+\]\n", printed.getvalue())
