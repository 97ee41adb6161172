"""`dapo-jax serve --http` as a command: what it refuses, and one process that follows a run, is asked, and is ended by SIGTERM."""

import math
import re
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stdout
from io import StringIO
from queue import Queue

import jax
import numpy as np
import pytest

from dapo_jax.checkpoints.checkpointer import Checkpointer
from dapo_jax.cli import main
from dapo_jax.commands import sample
from dapo_jax.config import ConfigError, ModelConfig, TrainConfig, to_yaml
from dapo_jax.parallel.mesh import make_mesh
from dapo_jax.run.policy import Policy, optimizer_of
from dapo_jax.sampling.decoding import DecodingOptions
from dapo_jax.sampling.requests import OwnOptions
from dapo_jax.serving.http import HttpOptions, limits_of, request_loop, serve_http
from dapo_jax.testing import tiny_decoder_config, tiny_params
from dapo_jax.text.tokenizers import CharTokenizer
from dapo_jax.training.state import init_state
from tests.serving.http_client import ROOT, ask, running

TOKENIZER = CharTokenizer("0123456789+=:,?")
CONFIG = tiny_decoder_config(vocab_size=TOKENIZER.vocab_size, layers=1)
PROMPTS = ("1+2", "40+2", "7", "12345+678", "0=0,1=1", "9:?")
LIMIT = 10


def test_without_the_extra_the_error_names_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "dapo_jax.serving.http_server", None)
    with pytest.raises(ConfigError, match=r"needs aiohttp.*pip install -e '\.\[http\]'"):
        serve_http("shipped:quickstart", HttpOptions())


@pytest.mark.parametrize("host", ["0.0.0.0", "[::]", "192.0.2.1", "example.org"])
def test_beyond_this_machine_nothing_is_served_without_a_key(host):
    """Refused before a model is looked for."""
    pytest.importorskip("aiohttp", reason="needs the extra http")
    with pytest.raises(ConfigError, match=f"--host {re.escape(host)} can be reached.*set DAPO_JAX_API_KEY"):
        serve_http("no such model", HttpOptions(host=host))
    with pytest.raises(ConfigError, match="no such model"):
        serve_http("no such model", HttpOptions(host=host, compilation_cache=""), api_key="key")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"slots": 0}, "slots=0 must be at least 1"),
        ({"queue": -1}, "queue=-1 must be at least 0"),
        ({"max_prompt_tokens": -1}, "max_prompt_tokens=-1 must be at least 0"),
        ({"port": 65536}, "port=65536 must be from 0"),
        ({"temperature": math.inf}, "temperature=inf must be 0"),
        ({"temperature": math.nan}, "temperature=nan must be 0"),
        ({"temperature": 1e-9}, "temperature=1e-09 must be 0"),
        ({"top_p": math.nan}, "top_p=nan must be in"),
        ({"top_k": 2**31}, "top_k=2147483648 must be 1 to"),
        ({"seed": 2**32}, "seed=4294967296 must be from 0"),
        ({"follow_s": math.inf}, "follow=inf must be more than 0"),
    ],
)
def test_an_option_out_of_range_is_a_configuration_error(options, message):
    with pytest.raises(ConfigError, match=message):
        HttpOptions(**options)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--http", "--chat"], "--chat is of the other server: leave it out"),
        (["--http", "--system-prompt", "a"], "--system-prompt is of the other server: leave it out"),
        (["--queue", "5"], "--queue is of the other server: give --http too"),
        (["--queue", "0"], "--queue is of the other server: give --http too"),
        (["--batch-invariant"], "--batch-invariant is of the other server: give --http too"),
    ],
)
def test_options_of_the_other_server_are_refused(arguments, message, capsys):
    assert main(["serve", "shipped:quickstart", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.fixture(scope="module")
def policies():
    return [Policy(decoder=CONFIG, params=tiny_params(CONFIG, seed=s), tokenizer=TOKENIZER) for s in (8, 3)]


@pytest.mark.parametrize(
    ("given", "lengths"),
    [({}, (32, 32)), ({"max_prompt_tokens": 9}, (9, 55)), ({"max_response_tokens": 10}, (54, 10))],
)
def test_lengths_that_are_not_given_are_what_the_model_has_room_for(given, lengths, policies):
    limits = limits_of("preset:none", policies[0], HttpOptions(**given))
    assert (limits.max_prompt_tokens, limits.max_response_tokens) == lengths


@pytest.mark.parametrize("given", [(64, 0), (60, 5), (0, 64)])
def test_lengths_that_the_model_has_no_room_for_are_refused(given, policies):
    with pytest.raises(ConfigError, match="positions; the model has 64: lower one"):
        limits_of(
            "preset:none", policies[0], HttpOptions(max_prompt_tokens=given[0], max_response_tokens=given[1])
        )


def save(folder, step, policy):
    optimizer = optimizer_of(TrainConfig(run_dir="unused").optimizer)
    with Checkpointer(folder / "checkpoints") as checkpointer:
        state = init_state(policy.params, optimizer, make_mesh(devices=jax.devices()[:1]))
        checkpointer.save(step, state, {"cursor": 0}, {})


def asked(server, text, **params):
    """The choice of one request, which must be answered."""
    body = {"token_ids": TOKENIZER.encode(text).tolist(), "sampling_params": params}
    answered = ask(server.address, "/inference/v1/generate", body)
    assert answered.status == 200, answered.content
    return answered.json["choices"][0]


@pytest.fixture(scope="module")
def run_dir(policies, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    policies[1].save(folder / "model")  # what it began with: not what is served
    config = TrainConfig(run_dir=str(folder), model=ModelConfig(source=str(folder / "model")))
    (folder / "config.yaml").write_text(to_yaml(config))
    save(folder, 1, policies[0])
    return folder


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
        assert "stopping; requests in flight have 10 s to finish" in server.out.read_text()
        assert "Traceback" not in server.err.read_text()


@pytest.fixture(scope="module")
def greedy(policies, tmp_path_factory):
    """[policy][prompt] -> the tokens of `dapo-jax sample` at temperature 0."""
    found = []
    for at, policy in enumerate(policies):
        folder = tmp_path_factory.mktemp(f"model{at}")
        policy.save(folder)
        groups = sample(
            str(folder), PROMPTS, temperature=0.0, max_response_tokens=LIMIT, compilation_cache=""
        )
        found.append({group.prompt.text: group.rollouts[0].response.tokens.tolist() for group in groups})
    return found


def test_greedy_is_what_sample_draws(server, greedy):
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        found = dict(
            zip(PROMPTS, pool.map(lambda text: asked(server, text, temperature=0), PROMPTS), strict=True)
        )
    assert {text: choice["token_ids"] for text, choice in found.items()} == greedy[0]
    assert {choice["finish_reason"] for choice in found.values()} == {"stop", "length"}
    assert {str(choice["spans"]) for choice in found.values()} == {"[{'first': 0, 'version': 1}]"}


def test_over_several_devices_the_same_is_drawn(policies, greedy):
    """As the command makes it, on the eight devices of this process."""
    options = HttpOptions(slots=16, max_prompt_tokens=9, max_response_tokens=LIMIT)
    loop, _ = request_loop(policies[0], options, limits_of("preset:none", policies[0], options))
    came = Queue()
    own = OwnOptions(decoding=DecodingOptions(temperature=0.0))
    with loop:
        for at, text in enumerate(PROMPTS):
            tokens = TOKENIZER.encode(text)
            loop.submit(
                tokens, own, count=1, max_tokens=LIMIT, listener=lambda told, at=at: came.put((at, told))
            )
        found = dict(came.get(timeout=60) for _ in PROMPTS)
    assert {PROMPTS[at]: told.tokens.tolist() for at, told in found.items()} == greedy[0]


def test_a_run_is_followed_while_requests_run_and_nothing_compiles(server, run_dir, policies, greedy):
    """There and back, with four clients that ask all the time: no answer is an error, and in the end all are the new weights'."""
    assert asked(server, PROMPTS[3], temperature=0)["token_ids"] == greedy[0][PROMPTS[3]]
    asked(server, PROMPTS[3], seed=1)
    compiled = server.err.read_text().count("Compiling jit")
    assert compiled > 0
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
        assert set(versions) <= {step - 1, step}
        assert step - 1 in versions
        choice = asked(server, PROMPTS[3], temperature=0)
        assert (choice["token_ids"], choice["spans"]) == (
            greedy[policy][PROMPTS[3]],
            [{"first": 0, "version": step}],
        )
    assert server.err.read_text().count("Compiling jit") == compiled


def test_the_client_that_the_page_prints_works(server):
    """The lines of docs/serve.md, with this server's address; and the lines of commands around them name options that there are."""
    page = (ROOT / "docs" / "serve.md").read_text()
    program = re.search(r"\n((?:    .*\n|\n)*    print\(choice.*\n)", page)[1]
    lines = [line.removeprefix("    ") for line in program.splitlines()]
    with redirect_stdout(StringIO()) as printed:
        exec("\n".join(lines).replace("127.0.0.1:9000", server.address), {})
    assert re.fullmatch(r"\[[\d, ]+\] \[[-\d., e]+\]\n", printed.getvalue())


def test_it_listens_at_this_machine_alone(server):
    """Unless `--host` says otherwise."""
    assert server.address.startswith("127.0.0.1:")
    card = ask(server.address, "/v1/models").json["data"][0]
    assert card["id"] == "run"
    assert np.isscalar(card["weights_version"])
