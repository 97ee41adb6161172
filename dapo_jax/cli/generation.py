"""The commands `eval`, `sample` and `serve`, in which a model generates responses."""

import argparse
import json
import os
import signal
from functools import partial

from dapo_jax.cli.arguments import (
    MODEL,
    Commands,
    add_conversation,
    add_overrides,
    command,
    option,
    passed,
    printable,
)
from dapo_jax.config import ConfigError
from dapo_jax.config.keys import refuse
from dapo_jax.terminal import visible

API_KEY = "DAPO_JAX_API_KEY"
"""Environment variable that contains the API key. HTTP requests must send this key."""

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
"""Maps options of `eval` to the configuration keys that they set."""


def add_to(commands: Commands) -> None:
    """Adds the commands `eval`, `sample` and `serve` to the parser."""
    parser = command(commands, "eval", evaluate)
    parser.add_argument("model", help=MODEL)
    add_overrides(parser)
    option(parser, "--config", "configuration file (default: the run's configuration)", "FILE")
    option(parser, "--data", "dataset to evaluate on", "NAME")
    option(parser, "--path", "file or folder of the dataset; without --data, loaded as `jsonl`", "PATH")
    option(parser, "--split", "split of the dataset (default test, or the only split)", "SPLIT")
    for name, key in SHORT.items():
        option(parser, f"--{name.replace('_', '-')}", f"sets {key}", "X")
    option(parser, "--chat", "sets data.chat=true")
    option(parser, "--keep", "write all rollouts and the score of each problem to this folder", "FOLDER")
    parser = command(commands, "sample", sample)
    parser.add_argument("model", help=MODEL)
    option(parser, "--prompt", "prompt text; may be given several times", action="append", required=True)
    option(parser, "-n", "number of responses per prompt", default=1)
    option(parser, "--temperature", "sampling temperature; 0: greedy", default=1.0)
    _add_cuts(parser)
    option(parser, "--max-response-tokens", "maximum number of tokens per response", default=64)
    option(parser, "--seed", "random seed for sampling", default=0)
    add_conversation(parser)
    option(parser, "--stop", "string that ends a response; repeatable", "TEXT", action="append", default=[])
    option(parser, "--stop-token-ids", "token ids that end a response", "ID", type=int, nargs="+", default=[])
    parser = command(commands, "serve", serve)
    parser.add_argument("model", help=MODEL)
    option(parser, "--jetstream", "serve JetStream's gRPC protocol instead of HTTP (extra jetstream, 2.3 GB)")
    text = f"address to listen on; [::]: all addresses; over HTTP, all except loopback addresses require an API key in {API_KEY}"
    option(parser, "--host", text, default="127.0.0.1")
    option(parser, "--port", "port to listen on; 0: a free port", default=9000)
    text = "switch to each new checkpoint of the run folder, and look for new checkpoints every SECONDS (default 5)"
    option(parser, "--follow", text, "SECONDS", dest="follow_s", type=float, nargs="?", const=5.0)
    option(parser, "--slots", "number of responses that are decoded in parallel", default=16)
    text = "maximum number of tokens per prompt; longer prompts are refused (default 1024, or the model's limit; with --jetstream 64)"
    option(parser, "--max-prompt-tokens", text, type=int)
    text = "maximum number of tokens per response (default 1024, or the model's limit; with --jetstream 64)"
    option(parser, "--max-response-tokens", text, type=int)
    text = "sampling temperature; over HTTP, only for requests without a temperature; 0: greedy (default 1; with --jetstream 0)"
    option(parser, "--temperature", text, type=float)
    _add_cuts(parser)
    option(parser, "--seed", "random seed for requests without a seed", default=0)
    add_conversation(parser)
    option(parser, "--model-name", "over HTTP: name that requests use for the model (default MODEL)", "NAME")
    text = "over HTTP: maximum number of most likely tokens with log-probabilities that a request may ask for (default 0)"
    option(parser, "--top-logprobs", text, type=int)
    text = "maximum number of waiting responses; further requests are asked to retry (default 1024)"
    option(parser, "--queue", text, "RESPONSES", type=int)
    text = "make responses bitwise independent of other requests; requires a multiple of 8 slots per device"
    option(parser, "--batch-invariant", text)
    option(parser, "--steps-per-call", "tokens per streamed message", default=4)
    text = "dtype of activations and matrix products"
    option(parser, "--compute-dtype", text, choices=("float32", "bfloat16"), default="float32")


def evaluate(arguments: argparse.Namespace) -> int:
    """Measure avg@k, pass@k, cons@k and the reward on held-out prompts."""
    from dapo_jax.commands import evaluate
    from dapo_jax.evaluation import table

    values = {name: value for name, value in vars(arguments).items() if value is not None}
    overrides = [f"{key}={values[name]}" for name, key in SHORT.items() if name in values]
    named = {"data": "source", "path": "path", "split": "split"}
    dataset = {key: values[name] for name, key in named.items() if name in values}
    if dataset.keys() == {"split"}:
        needs = "--data or --path, or the key data.eval_split without eval.datasets"
        refuse("--split", arguments.split, needs, "name the dataset that has the split")
    if dataset:
        overrides.append(f"eval.datasets=[{json.dumps({'source': 'jsonl', **dataset})}]")
    overrides += ["data.chat=true"] * arguments.chat + arguments.overrides
    evaluation = evaluate(arguments.model, arguments.config, overrides=overrides, keep=arguments.keep)
    print(table(evaluation.scores, metric=evaluation.metric), end="")
    print("".join(f"{printable(note)}\n" for note in evaluation.notes), end="")
    return 0


def sample(arguments: argparse.Namespace) -> int:
    """Sample responses to prompts."""
    from dapo_jax.commands import sample

    options = passed(sample, arguments)
    groups = sample(arguments.model, arguments.prompt, samples_per_prompt=arguments.n, **options)
    for group in groups:
        print(visible(group.prompt.text))
        for rollout in group.rollouts:
            print(f"    {visible(rollout.text)}{' ...' if rollout.truncated else ''}")
    return 0


def _add_cuts(parser: argparse.ArgumentParser) -> None:
    option(parser, "--top-p", "probability mass for nucleus sampling; 1: off", default=1.0)
    option(parser, "--top-k", "number of most likely tokens to sample from; 0: off", default=0)


def serve(arguments: argparse.Namespace) -> int:
    """Serve a model over HTTP, with an API like vLLM's and OpenAI's (extra http), or with --jetstream over gRPC (extra jetstream)."""
    from dapo_jax.serving.serve import HttpOptions, ServeOptions, serve, serve_http

    # A process manager sends SIGTERM, which should have the same effect as Ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    mine, other = (ServeOptions, HttpOptions) if arguments.jetstream else (HttpOptions, ServeOptions)
    options, others = passed(mine, arguments), passed(other, arguments)
    for name in sorted(others.keys() - options.keys()):
        if others[name]:
            remedy = "leave it out" if arguments.jetstream else "leave it out, or add --jetstream"
            raise ConfigError(f"--{name.replace('_', '-')} is an option of the other server: {remedy}")
    say = partial(print, flush=True)
    if arguments.jetstream:
        serve(arguments.model, ServeOptions(**options), say=say)
    else:
        key = os.environ.get(API_KEY, "").strip()
        serve_http(arguments.model, HttpOptions(**options), api_key=key, say=say)
    return 0
