"""The command line: arguments to one function per command.

Exit status: 0 done; 2 for a usage or configuration error, said in one message; 1 otherwise.
"""

import argparse
import json
import signal
import sys
from collections.abc import Sequence
from dataclasses import fields
from functools import partial
from typing import Any

from dapo_jax.config import ConfigError, SftConfig, TrainConfig, load_config, to_yaml


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit status."""
    arguments = _parser().parse_args(argv)
    # Imported late: `dapo-jax config` and usage errors answer without loading jax.
    try:
        return arguments.command(arguments)
    except ConfigError as error:
        print(f"dapo-jax {arguments.name}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"dapo-jax {arguments.name}: interrupted", file=sys.stderr)
        return 1
    except (RuntimeError, OSError) as error:
        if not _is_ours(error):
            raise
        print(f"dapo-jax {arguments.name}: {error}", file=sys.stderr)
        return 1


def _is_ours(error: Exception) -> bool:
    """True if the error's own message says all there is: a traceback would only hide it."""
    from dapo_jax.filtering import ShortfallError

    return isinstance(error, ShortfallError)


def _train(arguments: argparse.Namespace) -> int:
    config = load_config(arguments.config, arguments.overrides)
    from dapo_jax.run import train

    result = train(config, resume=arguments.resume)
    scored = [line for line in result.metrics if any(key.startswith("eval/") for key in line)]
    if scored:
        name = next(key for key in scored[0] if key.startswith("eval/") and "/avg@" in key)
        before, after = scored[0], scored[-1]
        print(
            f"{name}: {before[name]:.3f} before (step {before['step']}), {after[name]:.3f} after step {after['step']}"
        )
    print(f"metrics, rollouts, checkpoints and the trained model are in {result.run_dir}")
    return 0


def _sft(arguments: argparse.Namespace) -> int:
    config = load_config(arguments.config, arguments.overrides, schema=SftConfig)
    from dapo_jax.run import sft

    result = sft(config)
    for name, value in result.metrics.items():
        if name.startswith("eval/"):
            print(f"{name}: {value:.3f}")
    print(f"the model is in {config.run_dir}/model")
    return 0


def _eval(arguments: argparse.Namespace) -> int:
    from dapo_jax.run import evaluate

    scores = evaluate(
        arguments.model,
        data=arguments.data,
        split=arguments.split,
        samples_per_prompt=arguments.k,
        prompts=arguments.prompts,
        temperature=arguments.temperature,
        top_p=arguments.top_p,
        top_k=arguments.top_k,
        grader=arguments.grader,
        answer_marker=arguments.answer_marker,
        source_options=arguments.source_options,
        prompt_template=arguments.prompt_template,
        **_asked(arguments),
        max_prompt_tokens=arguments.max_prompt_tokens,
        max_response_tokens=arguments.max_response_tokens,
        slots=arguments.slots,
        seed=arguments.seed,
        keep=arguments.keep,
    )
    for name, value in scores.items():
        print(f"{name}: {value:.4f}")
    return 0


def _sample(arguments: argparse.Namespace) -> int:
    from dapo_jax.run import sample

    groups = sample(
        arguments.model,
        arguments.prompt,
        samples_per_prompt=arguments.n,
        temperature=arguments.temperature,
        top_p=arguments.top_p,
        top_k=arguments.top_k,
        max_response_tokens=arguments.max_response_tokens,
        seed=arguments.seed,
        **_asked(arguments),
    )
    for group in groups:
        print(group.prompt.text)
        for rollout in group.rollouts:
            print(f"    {rollout.text}{' ...' if rollout.truncated else ''}")
    return 0


def _convert(arguments: argparse.Namespace) -> int:
    from dapo_jax.run.convert import convert

    done = convert(arguments.source, arguments.target, dtype=arguments.dtype)
    print(
        f"{done.folder}: a {done.family} of {done.parameters:,} parameters, {done.tensor_bytes:,} bytes in {done.dtype}"
    )
    print(f"    {', '.join(done.files)}")
    return 0


def _serve(arguments: argparse.Namespace) -> int:
    from dapo_jax.run.serve import ServeOptions, serve

    # A process manager's way of ending a process is the keyboard's.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    told = {field.name: getattr(arguments, field.name) for field in fields(ServeOptions)}
    serve(arguments.model, ServeOptions(**told), say=partial(print, flush=True))
    return 0


def _asked(arguments: argparse.Namespace) -> dict[str, Any]:
    """How prompts are put and where responses end: the options that `eval` and `sample` share."""
    names = ("chat", "system_prompt", "chat_template_kwargs", "stop", "stop_token_ids")
    return {name: getattr(arguments, name) for name in names}


def _json_object(text: str) -> dict[str, Any]:
    try:
        read = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {error}") from error
    if not isinstance(read, dict):
        raise argparse.ArgumentTypeError(f'{text!r} is no JSON object such as {{"enable_thinking": false}}')
    return read


def _score(arguments: argparse.Namespace) -> int:
    from dapo_jax.run.score import describe, score

    scores = score(
        arguments.rollouts,
        arguments.grader,
        answer_marker=arguments.answer_marker,
        workers=arguments.workers,
        timeout_s=arguments.timeout_s,
    )
    print(describe(scores, show=arguments.show), end="")
    return 0


def _config(arguments: argparse.Namespace) -> int:
    schema = SftConfig if arguments.sft else TrainConfig
    print(to_yaml(load_config(arguments.config, arguments.overrides, schema=schema)), end="")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dapo-jax", description="DAPO reinforcement learning of language models in JAX."
    )
    commands = parser.add_subparsers(dest="name", required=True, metavar="COMMAND")

    def command(name: str, function: object, text: str) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=text, description=text)
        made.set_defaults(command=function)
        return made

    def configured(made: argparse.ArgumentParser) -> None:
        made.add_argument("config", help="a YAML file")
        made.add_argument("overrides", nargs="*", metavar="key=value", help="replaces a key of the file")

    def sampled(made: argparse.ArgumentParser, top_p: float) -> None:
        made.add_argument(
            "model", help="preset:NAME, shipped:NAME, hf:ORG/NAME, a model folder, or a run folder"
        )
        made.add_argument("--temperature", type=float, default=1.0, help="0 is greedy (default 1)")
        made.add_argument("--top-p", type=float, default=top_p, help=f"1 is off (default {top_p:g})")
        made.add_argument("--top-k", type=int, default=0, help="0 is off (default)")
        made.add_argument("--max-response-tokens", type=int, default=64)
        made.add_argument("--seed", type=int, default=0)
        made.add_argument(
            "--chat", action="store_true", help="ask prompts as a user, through the chat template"
        )
        made.add_argument("--system-prompt", default="", metavar="TEXT", help="of every conversation")
        made.add_argument("--chat-template-kwargs", type=_json_object, default={}, metavar="JSON")
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

    train = command("train", _train, "Train a policy by DAPO.")
    configured(train)
    train.add_argument("--resume", action="store_true", help="go on from the last checkpoint in run_dir")
    configured(command("sft", _sft, "Warm a model up on prompt / response pairs."))
    evaluate = command("eval", _eval, "avg@k, pass@k and cons@k on held-out prompts.")
    sampled(evaluate, top_p=1.0)
    evaluate.add_argument("--data", default="arithmetic", help="dataset (default arithmetic)")
    evaluate.add_argument("--split", default="test")
    evaluate.add_argument("--k", type=int, default=8, help="responses to a prompt (default 8)")
    evaluate.add_argument("--prompts", type=int, default=0, help="how many prompts; 0 is all (default)")
    evaluate.add_argument(
        "--grader", default="exact", help="a grader's name, module:function or file.py:function"
    )
    evaluate.add_argument(
        "--answer-marker",
        default="=",
        metavar="TEXT",
        help="what the exact grader's answer follows; '': nothing",
    )
    evaluate.add_argument(
        "--prompt-template", default="{prompt}", metavar="TEXT", help="text around the question {prompt}"
    )
    evaluate.add_argument(
        "--source-options", type=_json_object, default={}, metavar="JSON", help="of --data reasoning_gym:TASK"
    )
    evaluate.add_argument("--max-prompt-tokens", type=int, default=64)
    evaluate.add_argument("--slots", type=int, default=128)
    evaluate.add_argument(
        "--keep", metavar="FOLDER", help="write every rollout to a JSONL file in this folder"
    )
    one = command("sample", _sample, "Sample responses to prompts.")
    sampled(one, top_p=1.0)
    one.add_argument("--prompt", action="append", required=True, help="may be given several times")
    one.add_argument("-n", type=int, default=1, help="responses to each prompt")
    _add_score(command("score", _score, "Grade saved rollouts again, and show where graders disagree."))
    made = command("convert", _convert, "Write a model as a Hugging Face folder, tokenizer and all.")
    made.add_argument(
        "source", help="a .gguf file, a model folder, a run folder, preset:NAME or shipped:NAME"
    )
    made.add_argument("target", help="a folder that does not exist yet, or is empty")
    made.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="default float32")
    _add_serve(
        command("serve", _serve, "Answer requests over gRPC with JetStream (needs the extra jetstream).")
    )
    shown = command("config", _config, "Print a configuration with every default filled in.")
    configured(shown)
    shown.add_argument("--sft", action="store_true", help="the file is a warm start's")
    return parser


def _add_score(made: argparse.ArgumentParser) -> None:
    made.add_argument("rollouts", help="a JSONL file of rollouts, or a folder of them")
    made.add_argument("--grader", action="append", required=True, help="may be given several times")
    made.add_argument("--answer-marker", default="=", metavar="TEXT", help="of the exact grader")
    made.add_argument("--show", type=int, default=5, help="disagreements shown for each pair (default 5)")
    made.add_argument("--workers", type=int, default=2, help="grading processes (default 2)")
    made.add_argument("--timeout-s", type=float, default=10.0, help="for one response (default 10)")


def _add_serve(made: argparse.ArgumentParser) -> None:
    made.add_argument("model", help="preset:NAME, shipped:NAME, a model folder, or a run folder")
    made.add_argument(
        "--host", default="127.0.0.1", help="the interface; [::] is every one (default 127.0.0.1)"
    )
    made.add_argument("--port", type=int, default=9000, help="0 takes a free one (default 9000)")
    made.add_argument(
        "--follow", dest="follow_s", type=float, nargs="?", const=5.0, metavar="SECONDS",
        help="serve each new checkpoint of the run folder; looks for one every 5 s unless told otherwise",
    )  # fmt: skip
    made.add_argument("--slots", type=int, default=16, help="responses decoded side by side (default 16)")
    made.add_argument(
        "--max-prompt-tokens", type=int, default=64, help="longer prompts are refused (default 64)"
    )
    made.add_argument(
        "--max-response-tokens", type=int, default=64, help="at most, of a request (default 64)"
    )
    made.add_argument("--temperature", type=float, default=0.0, help="of all requests; 0 is greedy (default)")
    made.add_argument("--top-p", type=float, default=1.0, help="1 is off (default)")
    made.add_argument("--top-k", type=int, default=0, help="0 is off (default)")
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--chat", action="store_true", help="a request's text is a user's message")
    made.add_argument("--system-prompt", default="", metavar="TEXT", help="of every conversation")
    made.add_argument("--chat-template-kwargs", type=_json_object, default={}, metavar="JSON")
    made.add_argument(
        "--steps-per-call", type=int, default=4, help="tokens to a streamed message (default 4)"
    )
    made.add_argument("--compute-dtype", choices=("float32", "bfloat16"), default="float32")
    made.add_argument("--compilation-cache", default="~/.cache/dapo_jax/xla", metavar="FOLDER")


if __name__ == "__main__":
    sys.exit(main())
