"""`train`, `sft`, and `config`, which shows what they would read."""

import argparse

from dapo_jax.cli.arguments import Commands, add_overrides, command
from dapo_jax.config import EvaluateConfig, SftConfig, TrainConfig, load_config, to_yaml


def add_to(commands: Commands) -> None:
    """Adds the commands."""
    made = command(commands, "train", train, "Train a policy by DAPO.")
    _configured(made)
    made.add_argument("--resume", action="store_true", help="go on from the last checkpoint in run_dir")
    _configured(command(commands, "sft", sft, "Warm a model up on prompt / response pairs."))
    made = command(commands, "config", config, "Print a configuration with every default filled in.")
    _configured(made)
    kinds = made.add_mutually_exclusive_group()
    kinds.add_argument("--sft", action="store_true", help="the file is a warm start's")
    kinds.add_argument("--eval", action="store_true", help="the file is an evaluation's")


def _configured(made: argparse.ArgumentParser) -> None:
    made.add_argument("config", help="a YAML file")
    add_overrides(made)


def train(arguments: argparse.Namespace) -> int:
    """Trains, and says how evaluation changed."""
    config = load_config(arguments.config, arguments.overrides)
    from dapo_jax.parallel.processes import is_first
    from dapo_jax.run import train

    result = train(config, resume=arguments.resume, stop=arguments.stop)
    scored = [line for line in result.metrics if any(key.startswith("eval/") for key in line)]
    for name in (
        (key for key in scored[0] if "/avg@" in key and not key.endswith("_stderr")) if scored else ()
    ):
        before, after = scored[0], scored[-1]
        print(
            f"{name}: {before[name]:.3f} before (step {before['step']}), {after[name]:.3f} after step {after['step']}"
        )
    if is_first():
        print(f"metrics, rollouts, evaluations, checkpoints and the trained model are in {result.run_dir}")
    return 0


def sft(arguments: argparse.Namespace) -> int:
    """Warms up, and says how evaluation ended."""
    config = load_config(arguments.config, arguments.overrides, schema=SftConfig)
    from dapo_jax.evaluation import table
    from dapo_jax.run import sft

    result = sft(config)
    if any(key.startswith("eval/") for key in result.metrics):
        print(table(result.metrics), end="")
    print(f"the model is in {config.run_dir}/model")
    return 0


def config(arguments: argparse.Namespace) -> int:
    """Prints the configuration."""
    schema = SftConfig if arguments.sft else EvaluateConfig if arguments.eval else TrainConfig
    print(to_yaml(load_config(arguments.config, arguments.overrides, schema=schema)), end="")
    return 0
