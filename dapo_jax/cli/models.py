"""`convert`: models from one form into another."""

import argparse

from dapo_jax.cli.arguments import Commands, command


def add_to(commands: Commands) -> None:
    """Adds the commands."""
    made = command(commands, "convert", convert, "Write a model as a Hugging Face folder, tokenizer and all.")
    made.add_argument(
        "source",
        help="a .gguf file, a model folder, a run folder, an adapter folder of PEFT, preset:NAME or shipped:NAME",
    )
    made.add_argument("target", help="a folder that does not exist yet, or is empty")
    made.add_argument(
        "--merge",
        action="store_true",
        help="of a run that trained adapters, or of an adapter folder: add them to the base and write a whole model; else an adapter folder is written",
    )
    made.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="default float32")


def convert(arguments: argparse.Namespace) -> int:
    """Converts and says what was written."""
    from dapo_jax.commands.convert import convert

    done = convert(arguments.source, arguments.target, dtype=arguments.dtype, merge=arguments.merge)
    what = f"an adapter for a {done.family}, with" if done.adapter else f"a {done.family} of"
    print(
        f"{arguments.target}: {what} {done.parameters:,} parameters, {done.tensor_bytes:,} bytes in {done.dtype}"
    )
    print(f"    {', '.join(done.files)}")
    return 0
