"""`convert`: models from one form into another."""

import argparse

from dapo_jax.cli.arguments import Commands, command, option


def add_to(commands: Commands) -> None:
    """Adds the command."""
    made = command(commands, "convert", convert, "Write a model with its tokenizer as a Hugging Face folder.")
    text = (
        "a .gguf file, a model folder, a run folder, an adapter folder of PEFT, preset:NAME or shipped:NAME"
    )
    made.add_argument("source", help=text)
    made.add_argument("target", help="a folder that does not exist yet, or is empty")
    text = "for a run that trained adapters, or an adapter folder: write a whole model, with the adapters added to the base; otherwise an adapter folder is written"
    option(made, "--merge", text)
    made.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="default float32")


def convert(arguments: argparse.Namespace) -> int:
    """Converts and prints a summary."""
    from dapo_jax.commands.convert import convert

    done = convert(arguments.source, arguments.target, dtype=arguments.dtype, merge=arguments.merge)
    kind = f"an adapter for a {done.family}, with" if done.adapter else f"a {done.family} of"
    print(
        f"{arguments.target}: {kind} {done.parameters:,} parameters, {done.tensor_bytes:,} bytes in {done.dtype}"
    )
    print(f"    {', '.join(done.files)}")
    return 0
