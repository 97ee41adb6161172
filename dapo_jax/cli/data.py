"""The commands `data`, `score` and `convert`, for datasets, graders and model files."""

import argparse
import re
from collections.abc import Iterator
from contextlib import contextmanager

from dapo_jax.cli.arguments import Commands, add_conversation, command, json_object, option, passed
from dapo_jax.config import ConfigError, DataConfig

_NAMED = ("on_bad_row", "prompt_template", "system_prompt", "chat_template_kwargs")
_OPTIONS = {
    "data.chat=true (--chat)": "--chat",
    "data.chat=true": "--chat",
    "data.chat=false": "no --chat",
    "data.deduplicate=false": "--keep-repeated",
    "data.source": "dataset",
    "data.path": "--from",
    "data.source_options": "--options",
    **{f"data.{name}": f"--{name.replace('_', '-')}" for name in _NAMED},
}
"""Maps configuration keys to the options of the `data` commands that set them."""


def add_to(commands: Commands) -> None:
    """Adds the commands `data`, `score` and `convert` to the parser."""
    text = "Prepare or inspect a dataset."
    verbs = commands.add_parser("data", help=text, description=text)
    verbs = verbs.add_subparsers(dest="verb", required=True, metavar="VERB")
    _add_dataset(command(verbs, "prepare", prepare))
    shown = command(verbs, "show", show)
    _add_dataset(shown)
    option(shown, "--split", "split to show (default train, or the only split)", default="")
    option(shown, "--model", "model whose tokenizer and chat template are used (default: bytes)", default="")
    option(shown, "--prompt-template", "template with {prompt}, or dapo", "TEXT", default="{prompt}")
    add_conversation(shown)
    option(shown, "-n", "number of prompts to show", default=3)
    parser = command(commands, "score", score)
    parser.add_argument("rollouts", help="a JSONL file with rollouts, or a folder of such files")
    settings = {"dest": "graders", "action": "append", "required": True}
    option(parser, "--grader", "grader to apply; may be given several times", "GRADER", **settings)
    option(parser, "--answer-marker", "answer marker of the exact grader", "TEXT", default="=")
    option(parser, "--show", "number of disagreements to show for each pair of graders", default=5)
    option(parser, "--workers", "number of grading processes", default=2)
    option(parser, "--timeout-s", "time limit in seconds for one response", default=10.0)
    parser = command(commands, "convert", convert)
    text = "a .gguf file, a model folder, a run folder, an adapter folder, preset:NAME or shipped:NAME"
    parser.add_argument("source", help=text)
    parser.add_argument("target", help="a folder that does not exist or is empty")
    text = "merge the adapters of a run or an adapter folder into the base model, and write a complete model instead of an adapter folder"
    option(parser, "--merge", text)
    option(parser, "--dtype", "dtype of all tensors", choices=("float32", "bfloat16"), default="float32")


def _add_dataset(parser: argparse.ArgumentParser) -> None:
    text = "dapo_math_17k, aime_2024, gsm8k, math_500, a JSON Lines or parquet file, arithmetic, reasoning_gym:TASK, ..."
    parser.add_argument("source", metavar="NAME", help=text)
    option(parser, "--from", "file or folder of the dataset", "PATH", dest="path", default="")
    settings = {"dest": "source_options", "type": json_object, "default": {}}
    option(parser, "--options", 'for jsonl: {"prompt": "question"}', "JSON", **settings)
    option(parser, "--on-bad-row", "action if a row is invalid", choices=("error", "skip"), default="error")
    option(parser, "--keep-repeated", "keep rows that repeat the question of an earlier row")


def prepare(arguments: argparse.Namespace) -> int:
    """Load, check and store the rows of a dataset, and report the rows that are left out."""
    from dapo_jax.commands.datasets import prepare

    with _in_options():
        print(prepare(_dataset(arguments)), end="")
    return 0


def show(arguments: argparse.Namespace) -> int:
    """Show the number of prompts, their lengths in tokens, and a few prompts as a model receives them."""
    from dapo_jax.commands.datasets import show

    data = _dataset(arguments)
    with _in_options():
        print(show(data, split=arguments.split, model=arguments.model, count=arguments.n), end="")
    return 0


@contextmanager
def _in_options() -> Iterator[None]:
    """Replaces configuration keys in error messages with the command-line options that set them."""
    try:
        yield
    except ConfigError as error:
        message = str(error)
        for key, name in _OPTIONS.items():
            message = re.sub(rf"\b{re.escape(key)}(?![\w.])", name, message).replace(f"{name}=", f"{name} ")
        raise ConfigError(message) from error


def _dataset(arguments: argparse.Namespace) -> DataConfig:
    return DataConfig(deduplicate=not arguments.keep_repeated, **passed(DataConfig, arguments))


def score(arguments: argparse.Namespace) -> int:
    """Grade saved rollouts again, and show the responses on which graders disagree."""
    from dapo_jax.commands.score import describe, score

    print(describe(score(**passed(score, arguments)), show=arguments.show), end="")
    return 0


def convert(arguments: argparse.Namespace) -> int:
    """Convert a model and its tokenizer to a Hugging Face model folder."""
    from dapo_jax.commands.convert import convert

    done = convert(**passed(convert, arguments))
    kind = f"an adapter for a {done.family}, with" if done.adapter else f"a {done.family} of"
    print(
        f"{arguments.target}: {kind} {done.parameters:,} parameters, {done.tensor_bytes:,} bytes in {done.dtype}"
        + (f", without {done.skipped} tensors of the image encoder" if done.skipped else "")
    )
    print(f"    {', '.join(done.files)}")
    return 0
