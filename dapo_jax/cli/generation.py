"""`eval`, `sample` and `serve`: a model answers."""

import argparse
import json
import os
import signal
from dataclasses import fields
from functools import partial

from dapo_jax.cli.arguments import MODEL, Commands, add_conversation, add_overrides, command, printable
from dapo_jax.config import ConfigError
from dapo_jax.terminal import visible

API_KEY = "DAPO_JAX_API_KEY"
"""The environment variable with the key that requests over HTTP need."""

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
    _add_eval(
        command(commands, "eval", evaluate, "avg@k, pass@k, cons@k and the reward on held-out prompts.")
    )
    _add_sample(command(commands, "sample", sample, "Sample responses to prompts."))
    text = "Answer requests: over gRPC with JetStream (needs the extra jetstream), or with --http as vLLM's and OpenAI's servers do (needs the extra http)."
    _add_serve(command(commands, "serve", serve, text))


def evaluate(arguments: argparse.Namespace) -> int:
    """Evaluates and prints the table."""
    from dapo_jax.commands import evaluate
    from dapo_jax.evaluation import lost_verdicts, table

    told = [
        f"{key}={value}" for name, key in SHORT.items() if (value := getattr(arguments, name)) is not None
    ]
    named = {"source": arguments.data, "path": arguments.path, "split": arguments.split}
    dataset = {name: value for name, value in named.items() if value is not None}
    if dataset:
        told.append(f"eval.datasets=[{json.dumps({'source': 'jsonl', **dataset})}]")
    told += ["data.chat=true"] * arguments.chat
    found = evaluate(
        arguments.model, arguments.config, overrides=[*told, *arguments.overrides], keep=arguments.keep
    )
    print(table(found.scores, metric=found.metric), end="")
    for name, groups in found.groups.items():
        if lost := lost_verdicts(groups):
            print(f"{name}: {printable(lost)}")
    return 0


def _add_eval(made: argparse.ArgumentParser) -> None:
    made.add_argument("model", help=MODEL)
    add_overrides(made)
    made.add_argument(
        "--config",
        metavar="FILE",
        help="of an evaluation or a run; a run folder brings its own",
    )
    made.add_argument("--data", metavar="NAME", help="evaluate on this dataset")
    made.add_argument(
        "--path", metavar="PATH", help="the file or folder it is read from; alone: any file, see `jsonl`"
    )
    made.add_argument("--split", help="of the dataset (default test, or the only one)")
    for name, key in SHORT.items():
        made.add_argument(f"--{name.replace('_', '-')}", metavar="X", help=f"sets {key}")
    made.add_argument("--chat", action="store_true", help="sets data.chat=true")
    made.add_argument(
        "--keep", metavar="FOLDER", help="write every rollout and every problem's score to this folder"
    )


def sample(arguments: argparse.Namespace) -> int:
    """Samples and prints the responses."""
    from dapo_jax.commands import sample

    groups = sample(
        arguments.model,
        arguments.prompt,
        chat=arguments.chat,
        system_prompt=arguments.system_prompt,
        chat_template_kwargs=arguments.chat_template_kwargs,
        samples_per_prompt=arguments.n,
        temperature=arguments.temperature,
        top_p=arguments.top_p,
        top_k=arguments.top_k,
        max_response_tokens=arguments.max_response_tokens,
        stop=arguments.stop,
        stop_token_ids=arguments.stop_token_ids,
        seed=arguments.seed,
    )
    for group in groups:
        print(visible(group.prompt.text))
        for rollout in group.rollouts:
            print(f"    {visible(rollout.text)}{' ...' if rollout.truncated else ''}")
    return 0


def _add_sample(made: argparse.ArgumentParser) -> None:
    made.add_argument("model", help=MODEL)
    made.add_argument("--prompt", action="append", required=True, help="may be given several times")
    made.add_argument("-n", type=int, default=1, help="responses to each prompt")
    made.add_argument("--temperature", type=float, default=1.0, help="0 is greedy (default 1)")
    made.add_argument("--top-p", type=float, default=1.0, help="1 is off (default)")
    made.add_argument("--top-k", type=int, default=0, help="0 is off (default)")
    made.add_argument("--max-response-tokens", type=int, default=64)
    made.add_argument("--seed", type=int, default=0)
    add_conversation(made)
    made.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="ends a response; may be given several times",
    )
    made.add_argument(
        "--stop-token-ids", type=int, nargs="+", default=[], metavar="ID", help="end a response as well"
    )


def serve(arguments: argparse.Namespace) -> int:
    """Serves until it is ended."""
    from dapo_jax.serving.http import HttpOptions, serve_http
    from dapo_jax.serving.serve import ServeOptions, serve

    # A process manager's way of ending a process is the keyboard's.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    mine, other = (HttpOptions, ServeOptions) if arguments.http else (ServeOptions, HttpOptions)
    known, others = ({field.name for field in fields(kind)} for kind in (mine, other))
    given = {name: value for name, value in vars(arguments).items() if value is not None}
    told_others = given.keys() & (others - known)
    if wrong := sorted(
        name for name in told_others if given[name] is not False and given[name] not in ([], "")
    ):
        option = "--" + wrong[0].replace("_", "-")
        raise ConfigError(
            f"{option} is of the other server: {'leave it out' if arguments.http else 'give --http too'}"
        )
    told = {name: value for name, value in given.items() if name in known}
    say = partial(print, flush=True)
    if arguments.http:
        serve_http(arguments.model, HttpOptions(**told), api_key=os.environ.get(API_KEY, "").strip(), say=say)
    else:
        serve(arguments.model, ServeOptions(**told), say=say)
    return 0


def _add_serve(made: argparse.ArgumentParser) -> None:
    made.add_argument("model", help=MODEL)
    made.add_argument(
        "--http", action="store_true",
        help="HTTP instead of gRPC: token ids at /inference/v1/generate, messages at /v1/chat/completions",
    )  # fmt: skip
    made.add_argument(
        "--host", default="127.0.0.1",
        help=f"the interface; [::] is every one (default 127.0.0.1); over HTTP another than this machine's needs a key in {API_KEY}",
    )  # fmt: skip
    made.add_argument("--port", type=int, default=9000, help="0 takes a free one (default 9000)")
    made.add_argument(
        "--follow", dest="follow_s", type=float, nargs="?", const=5.0, metavar="SECONDS",
        help="serve each new checkpoint of the run folder; looks for one every 5 s unless told otherwise",
    )  # fmt: skip
    made.add_argument("--slots", type=int, default=16, help="responses decoded side by side (default 16)")
    made.add_argument(
        "--max-prompt-tokens", type=int,
        help="longer prompts are refused (default 64; over HTTP 1024, or what the model has room for)",
    )  # fmt: skip
    made.add_argument(
        "--max-response-tokens", type=int,
        help="at most, of a request (default 64; over HTTP 1024, or what the model has room for)",
    )  # fmt: skip
    made.add_argument(
        "--temperature", type=float,
        help="of all requests, over HTTP of those without one; 0 is greedy (default 0; over HTTP 1)",
    )  # fmt: skip
    made.add_argument("--top-p", type=float, default=1.0, help="1 is off (default)")
    made.add_argument("--top-k", type=int, default=0, help="0 is off (default)")
    made.add_argument("--seed", type=int, default=0, help="of requests without one")
    add_conversation(made)
    made.add_argument(
        "--model-name", metavar="NAME", help="over HTTP: what requests call the model (default MODEL)"
    )
    made.add_argument(
        "--queue", type=int, metavar="RESPONSES",
        help="over HTTP: responses that wait for a slot; requests beyond are told to come again (default 1024)",
    )  # fmt: skip
    made.add_argument(
        "--batch-invariant", action="store_true",
        help="over HTTP: no bit of a response depends on what is served beside it; needs a multiple of 8 slots for each device",
    )  # fmt: skip
    made.add_argument(
        "--steps-per-call", type=int, default=4, help="tokens to a streamed message (default 4)"
    )
    made.add_argument(
        "--page-tokens",
        type=int,
        default=0,
        help="tokens of a page of the cache (default: what suits the platform)",
    )
    made.add_argument("--compute-dtype", choices=("float32", "bfloat16"), default="float32")
    made.add_argument("--compilation-cache", default="~/.cache/dapo_jax/xla", metavar="FOLDER")
