"""The package `verifiers`, unchanged and in an environment of its own, evaluates a served model: with its training client and over chat completions.

    DAPO_JAX_VERIFIERS=PYTHON pytest -n 0 tests/serving/http_verifiers_test.py

PYTHON is the interpreter of an environment with `pip install verifiers==0.4.0`. The test needs no network.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from dapo_jax.run.policy import Policy
from dapo_jax.testing import tiny_decoder_config, tiny_params
from dapo_jax.text.conversations import conversation_ids
from dapo_jax.text.huggingface import HuggingFaceTokenizer
from tests.serving.servers import ask, running
from tests.text.folders import files_of

PYTHON = os.environ.get("DAPO_JAX_VERIFIERS") or (
    sys.executable if importlib.util.find_spec("verifiers") else ""
)
TOKENIZER = HuggingFaceTokenizer(files_of())
TASKS, ROLLOUTS, TURNS, LIMIT = 3, 4, 2, 16

pytestmark = pytest.mark.skipif(
    not PYTHON, reason="needs verifiers: DAPO_JAX_VERIFIERS=PYTHON of an environment that has it"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    decoder = tiny_decoder_config(vocab_size=TOKENIZER.vocab_size, layers=1, max_positions=256)
    folder = tmp_path_factory.mktemp("model")
    Policy(decoder=decoder, params=tiny_params(decoder, seed=8), tokenizer=TOKENIZER).save(folder)
    return folder


@pytest.fixture(scope="module")
def server(model, tmp_path_factory):
    lengths = ("--max-prompt-tokens", 200, "--max-response-tokens", 24)
    with running(tmp_path_factory.mktemp("server"), model, "--model-name", "tiny", *lengths) as server:
        yield server


def evaluated(server, folder, kind, *options):
    """Returns the traces that `vf-eval` writes."""
    arguments = [
        "sums_for_verifiers", "--env.agent.harness.id", "sums_for_verifiers", "--env.agent.runtime.type", "subprocess",
        "--model", "tiny", "--client.type", kind, "--client.base-url", f"http://{server.address}/v1", "--client.api-key-var", "NO_KEY",
        "-n", str(TASKS), "-r", str(ROLLOUTS), "--no-push", "--no-rich", "-o", str(folder), "--run.dir", "run",
        "--sampling.temperature", "0.8", "--sampling.max-tokens", str(LIMIT), *options,
    ]  # fmt: skip
    program = "from verifiers.v1.cli.eval.main import main; main()"
    environment = {
        **os.environ, "PYTHONPATH": str(Path(__file__).parent), "HOME": str(folder), "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1",
        "NO_KEY": "EMPTY",
    }  # fmt: skip
    done = subprocess.run(
        [PYTHON, "-c", program, *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=240, check=False
    )  # fmt: skip
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    episodes = [json.loads(line) for line in (folder / "run" / "traces.jsonl").read_text().splitlines()]
    assert len(episodes) == TASKS * ROLLOUTS
    assert all(episode["ok"] and not episode["errors"] for episode in episodes)
    return [trace for episode in episodes for trace in episode["traces"]]


def test_a_trainers_rollouts_carry_the_servers_tokens_and_logprobs(server, model, tmp_path):
    """Groups of four with two turns each. Tokens and log-probabilities in the traces are the server's."""
    names = ("--client.renderer.name", "default", "--client.renderer-model-name", str(model))
    traces = evaluated(server, tmp_path, "train", *names)
    sampled = set()
    for trace in traces:
        answers = [node for node in trace["nodes"] if node["sampled"]]
        assert len(answers) == TURNS
        for node in answers:
            tokens = [token for token, mask in zip(node["token_ids"], node["mask"], strict=True) if mask]
            assert 0 < len(tokens) == len(node["logprobs"]) <= LIMIT
            assert (np.array(node["logprobs"]) < 0).all()
            sampled.add(tuple(tokens))
    assert len(sampled) == len(traces) * TURNS, "two rollouts are the same"
    first, second = traces[0]["nodes"][:2]
    whole = [*first["token_ids"], *second["token_ids"][: second["mask"].index(True)]]
    assert whole == conversation_ids([first["message"]], TOKENIZER).tolist(), "rendered as by the server"


def test_an_evaluation_runs_over_chat_completions(server, tmp_path):
    traces = evaluated(server, tmp_path, "eval")
    assert all(sum(node["sampled"] for node in trace["nodes"]) == TURNS for trace in traces)
    assert ask(server.address, "/health").status == 200
