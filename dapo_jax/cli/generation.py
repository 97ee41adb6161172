"""`eval`, `sample` and `serve`: the commands in which a model generates."""

import argparse
import json
import os
import signal
from dataclasses import fields
from functools import partial
from inspect import signature

from dapo_jax.cli.arguments import (
    MODEL,
    Commands,
    add_conversation,
    add_overrides,
    command,
    option,
    printable,
)
from dapo_jax.config import ConfigError
from dapo_jax.terminal import visible

API_KEY = "DAPO_JAX_API_KEY"
"""Environment variable with the key that HTTP requests must send."""

SHORT = {
    "k": "eval.samples_per_prompt",
    "prompts": "eval.prompts",
    "temperature": "eval.temperature",
    "top_p": "eval.top_p",
    "top_k": "eval.top_k",
    "grader": "reward.grader",
    "prompt_template": "data.prompt_template",
    "max_prompt_tokens": "data.max_prompt_tokens",
    "max_response_tokens": "sampling.max_response_tokens",
    "slots": "sampling.slots",
    "seed": "seed",
}
"""Options of `eval` -> the keys that they set."""


def add_to(commands: Commands) -> None:
    """Adds the commands."""
    _add_eval(command(commands, "eval", evaluate))
    _add_sample(command(commands, "sample", sample))
    _add_serve(command(commands, "serve", serve))


def evaluate(arguments: argparse.Namespace) -> int:
    """Measure avg@k, pass@k, cons@k and the reward on held-out prompts."""
    from dapo_jax.commands import evaluate
    from dapo_jax.evaluation import lost_verdicts, table

    given = {name: value for name, value in vars(arguments).items() if value is not None}
    overrides = [f"{key}={given[name]}" for name, key in SHORT.items() if name in given]
    named = {"data": "source", "path": "path", "split": "split"}
    if dataset := {key: given[name] for name, key in named.items() if name in given}:
        overrides.append(f"eval.datasets=[{json.dumps({'source': 'jsonl', **dataset})}]")
    overrides += ["data.chat=true"] * arguments.chat
    found = evaluate(
        arguments.model, arguments.config, overrides=[*overrides, *arguments.overrides], keep=arguments.keep
    )
    print(table(found.scores, metric=found.metric), end="")
    for name, groups in found.groups.items():
        if lost := lost_verdicts(groups):
            print(f"{name}: {printable(lost)}")
    return 0


def _add_eval(made: argparse.ArgumentParser) -> None:
    made.add_argument("model", help=MODEL)
    add_overrides(made)
    option(made, "--config", "of an evaluation or a run (default: the one of the run folder)", "FILE")
    option(made, "--data", "evaluate on this dataset", "NAME")
    option(made, "--path", "the dataset's file or folder; without --data: any file, see `jsonl`", "PATH")
    option(made, "--split", "of the dataset (default test, or the only one)", "SPLIT")
    for name, key in SHORT.items():
        option(made, f"--{name.replace('_', '-')}", f"sets {key}", "X")
    option(made, "--chat", "sets data.chat=true")
    option(made, "--keep", "write every rollout and every problem's score to this folder", "FOLDER")


def sample(arguments: argparse.Namespace) -> int:
    """Sample responses to prompts."""
    from dapo_jax.commands import sample

    named = signature(sample).parameters
    how = {name: value for name, value in vars(arguments).items() if name in named}
    groups = sample(arguments.model, arguments.prompt, samples_per_prompt=arguments.n, **how)
    for group in groups:
        print(visible(group.prompt.text))
        for rollout in group.rollouts:
            print(f"    {visible(rollout.text)}{' ...' if rollout.truncated else ''}")
    return 0


def _add_sample(made: argparse.ArgumentParser) -> None:
    made.add_argument("model", help=MODEL)
    option(made, "--prompt", "may be given several times", action="append", required=True)
    option(made, "-n", "responses to each prompt", default=1)
    option(made, "--temperature", "0 is greedy", default=1.0)
    _add_cuts(made)
    option(made, "--max-response-tokens", "length limit", default=64)
    option(made, "--seed", "of sampling", default=0)
    add_conversation(made)
    option(made, "--stop", "ends a response; may be given several times", "TEXT", action="append", default=[])
    option(made, "--stop-token-ids", "end a response as well", "ID", type=int, nargs="+", default=[])


def _add_cuts(made: argparse.ArgumentParser) -> None:
    option(made, "--top-p", "1 is off", default=1.0)
    option(made, "--top-k", "0 is off", default=0)


def serve(arguments: argparse.Namespace) -> int:
    """Answer requests: over gRPC with JetStream (needs the extra jetstream), or with --http like vLLM's and OpenAI's servers (needs the extra http)."""
    from dapo_jax.serving.serve import HttpOptions, ServeOptions, serve, serve_http

    # A process manager sends SIGTERM where a person presses Ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    mine, other = (HttpOptions, ServeOptions) if arguments.http else (ServeOptions, HttpOptions)
    known, others = ({field.name for field in fields(kind)} for kind in (mine, other))
    given = {name: value for name, value in vars(arguments).items() if value is not None}
    for name in sorted(given.keys() & (others - known)):
        if given[name]:
            remedy = "leave it out" if arguments.http else "give --http too"
            raise ConfigError(f"--{name.replace('_', '-')} is an option of the other server: {remedy}")
    options = {name: value for name, value in given.items() if name in known}
    say = partial(print, flush=True)
    if arguments.http:
        key = os.environ.get(API_KEY, "").strip()
        serve_http(arguments.model, HttpOptions(**options), api_key=key, say=say)
    else:
        serve(arguments.model, ServeOptions(**options), say=say)
    return 0


def _add_serve(made: argparse.ArgumentParser) -> None:
    made.add_argument("model", help=MODEL)
    text = "HTTP instead of gRPC: token ids at /inference/v1/generate, messages at /v1/chat/completions"
    option(made, "--http", text)
    text = f"the interface; [::] is every one; over HTTP any but this machine's needs a key in {API_KEY}"
    option(made, "--host", text, default="127.0.0.1")
    option(made, "--port", "0 is a free one", default=9000)
    text = "serve each new checkpoint of the run folder, and look for one every SECONDS (default 5)"
    option(made, "--follow", text, "SECONDS", dest="follow_s", type=float, nargs="?", const=5.0)
    option(made, "--slots", "responses decoded in parallel", default=16)
    text = "longer prompts are refused (default 64; over HTTP 1024, or what the model has room for)"
    option(made, "--max-prompt-tokens", text, type=int)
    text = "most tokens of a response (default 64; over HTTP 1024, or what the model has room for)"
    option(made, "--max-response-tokens", text, type=int)
    text = "of all requests, over HTTP of requests without one; 0 is greedy (default 0; over HTTP 1)"
    option(made, "--temperature", text, type=float)
    _add_cuts(made)
    option(made, "--seed", "of requests without one", default=0)
    add_conversation(made)
    option(made, "--model-name", "over HTTP: the model's name in requests (default MODEL)", "NAME")
    text = "responses that may wait for a slot; further requests are asked to retry (default 1024)"
    option(made, "--queue", text, "RESPONSES", type=int)
    text = "no bit of a response depends on other requests; needs a multiple of 8 slots for each device"
    option(made, "--batch-invariant", text)
    option(made, "--steps-per-call", "tokens per streamed message", default=4)
    text = "tokens per page of the KV cache; 0 is chosen for the platform"
    option(made, "--page-tokens", text, default=0)
    text = "dtype of activations and matrix products"
    option(made, "--compute-dtype", text, choices=("float32", "bfloat16"), default="float32")
    option(made, "--compilation-cache", "of compiled programs", "FOLDER", default="~/.cache/dapo_jax/xla")
