"""`data` and `score`: what is asked, and how answers are graded, without a model."""

import argparse
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from dapo_jax.cli.arguments import Commands, add_conversation, command, json_object
from dapo_jax.config import ConfigError, DataConfig

OPTIONS = {
    "data.chat=true (--chat)": "--chat",
    "data.chat=true": "--chat",
    "data.chat=false": "no --chat",
    "data.deduplicate=false": "--keep-repeated",
    "data.source": "dataset",
    "data.path": "--from",
    "data.source_options": "--options",
    "data.on_bad_row": "--on-bad-row",
    "data.data_dir": "--data-dir",
    "data.prompt_template": "--prompt-template",
    "data.system_prompt": "--system-prompt",
    "data.chat_template_kwargs": "--chat-template-kwargs",
}
"""Keys of a configuration -> the options of `data` that set them."""


def add_to(commands: Commands) -> None:
    """Adds the commands."""
    made = commands.add_parser(
        "data", help="Prepare a dataset, or look at one.", description="Prepare a dataset, or look at one."
    )
    verbs = made.add_subparsers(dest="verb", required=True, metavar="VERB")
    _add_dataset(
        command(
            verbs, "prepare", prepare, "Read, check and keep a dataset's rows, and say what was left out."
        )
    )
    shown = command(
        verbs, "show", show, "Counts, lengths in tokens, and a few prompts as a model reads them."
    )
    _add_dataset(shown)
    shown.add_argument("--split", default="", help="(default train, or the only one)")
    shown.add_argument(
        "--model", default="", help="whose tokenizer counts and whose chat template is used (default: bytes)"
    )
    shown.add_argument(
        "--prompt-template", default="{prompt}", metavar="TEXT", help="around the question {prompt}; or dapo"
    )
    add_conversation(shown)
    shown.add_argument("-n", type=int, default=3, help="prompts shown (default 3)")
    _add_score(
        command(commands, "score", score, "Grade saved rollouts again, and show where graders disagree.")
    )


def _add_dataset(made: argparse.ArgumentParser) -> None:
    made.add_argument(
        "source",
        metavar="NAME",
        help="dapo_math_17k, aime_2024, gsm8k, math_500, jsonl, arithmetic, reasoning_gym:TASK, ...",
    )
    made.add_argument(
        "--from", dest="path", default="", metavar="PATH", help="the file or folder it is read from"
    )
    made.add_argument(
        "--options", type=json_object, default={}, metavar="JSON", help='of jsonl: {"prompt": "question"}'
    )
    made.add_argument("--on-bad-row", choices=("error", "skip"), default="error", help="(default error)")
    made.add_argument("--keep-repeated", action="store_true", help="do not drop rows that ask the same")
    made.add_argument("--data-dir", default="~/.cache/dapo_jax/datasets", help="where it is kept")


def prepare(arguments: argparse.Namespace) -> int:
    """Prepares and says what each split has."""
    from dapo_jax.commands.datasets import prepare

    with _in_options():
        print(prepare(_dataset(arguments)), end="")
    return 0


def show(arguments: argparse.Namespace) -> int:
    """Shows the dataset."""
    from dapo_jax.commands.datasets import show

    data = replace(
        _dataset(arguments),
        prompt_template=arguments.prompt_template,
        chat=arguments.chat,
        system_prompt=arguments.system_prompt,
        chat_template_kwargs=arguments.chat_template_kwargs,
    )
    with _in_options():
        print(show(data, split=arguments.split, model=arguments.model, count=arguments.n), end="")
    return 0


@contextmanager
def _in_options() -> Iterator[None]:
    """Errors speak of options, where those of a run speak of keys."""
    try:
        yield
    except ConfigError as error:
        message = str(error)
        for key, option in OPTIONS.items():
            message = re.sub(rf"\b{re.escape(key)}(?![\w.])", option, message)
            message = message.replace(f"{option}=", f"{option} ")
        if "no dataset builder is named" in message and "did you mean" not in message:
            message += ", and reasoning_gym:TASK for questions that the package reasoning-gym makes up"
        raise ConfigError(message) from error


def _dataset(arguments: argparse.Namespace) -> DataConfig:
    return DataConfig(
        source=arguments.source,
        path=arguments.path,
        source_options=arguments.options,
        on_bad_row=arguments.on_bad_row,
        deduplicate=not arguments.keep_repeated,
        data_dir=arguments.data_dir,
    )


def score(arguments: argparse.Namespace) -> int:
    """Grades again and prints the comparison."""
    from dapo_jax.commands.score import describe, score

    scores = score(
        arguments.rollouts,
        arguments.grader,
        answer_marker=arguments.answer_marker,
        workers=arguments.workers,
        timeout_s=arguments.timeout_s,
    )
    print(describe(scores, show=arguments.show), end="")
    return 0


def _add_score(made: argparse.ArgumentParser) -> None:
    made.add_argument("rollouts", help="a JSONL file of rollouts, or a folder of them")
    made.add_argument("--grader", action="append", required=True, help="may be given several times")
    made.add_argument("--answer-marker", default="=", metavar="TEXT", help="of the exact grader")
    made.add_argument("--show", type=int, default=5, help="disagreements shown for each pair (default 5)")
    made.add_argument("--workers", type=int, default=2, help="grading processes (default 2)")
    made.add_argument("--timeout-s", type=float, default=10.0, help="for one response (default 10)")
