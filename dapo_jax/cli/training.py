"""The commands `train`, `sft` and `config`, which prints the configuration that the other two would use."""

import argparse
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence

from dapo_jax.cli.arguments import Commands, add_config, command, option
from dapo_jax.config import ALGORITHMS, EvaluateConfig, SftConfig, TrainConfig, load_config, to_yaml
from dapo_jax.config.loading import changed_yaml


def add_to(commands: Commands) -> None:
    """Adds the commands `train`, `sft` and `config` to the parser."""
    parser = command(commands, "train", train)
    add_config(parser)
    parser.epilog = f"algorithm=NAME sets all keys of an algorithm: {', '.join(ALGORITHMS)}"
    option(parser, "--resume", "resume from the last checkpoint in run_dir")
    add_config(command(commands, "sft", sft))
    parser = command(commands, "config", config)
    add_config(parser)
    option(parser, "--changed", "print only keys that differ from their defaults")
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--sft", action="store_true", help="CONFIG is for a supervised warm start")
    kinds.add_argument("--eval", action="store_true", help="CONFIG is for an evaluation")


def train(arguments: argparse.Namespace) -> int:
    """Train a policy with DAPO."""
    config = load_config(arguments.config, arguments.overrides)
    from dapo_jax.parallel.processes import is_first, wanted

    if not wanted():
        # Printed before the slow imports. If there are several processes, it is not known yet which of them should print.
        print(f"{config.steps} steps in {config.run_dir}: starting ...", flush=True)
    from dapo_jax.run import train
    from dapo_jax.storage import path_of

    result = train(config, resume=arguments.resume, stop=arguments.stop)
    for line in _held_out(result.metrics, metric=config.dynamic_sampling.metric):
        print(line)
    if is_first():
        run = path_of(config.run_dir)
        print(f"metrics, rollouts, evaluations, checkpoints and the trained model are in {run}")
        print(f"look inside:   dapo-jax report {shlex.quote(str(run))}")
        print(f"ask the model: dapo-jax sample {shlex.quote(str(run))} --prompt TEXT -n 4")
    return 0


def _held_out(lines: Sequence[Mapping[str, float | int]], *, metric: str) -> Iterator[str]:
    """Yields a line for each score in the last evaluation. The line also contains the score in the first evaluation, if it is available.

    The first score is not available if the evaluation settings were changed when the run was resumed.
    """
    from dapo_jax.evaluation import score_text

    evaluations = [line for line in lines if any(key.startswith("eval/") for key in line)]
    shown = r"eval/.+/(avg@\d+|reward)" if metric == "correct" else "eval/.+/reward"
    for name in evaluations[-1] if evaluations else ():
        if re.fullmatch(shown, name):
            before, after = (
                score_text(line[name], line.get(f"{name}_stderr")) if name in line else ""
                for line in (evaluations[0], evaluations[-1])
            )
            earlier = f" {before} before (step {evaluations[0]['step']})," if before else ""
            yield f"{name}:{earlier} {after} after step {evaluations[-1]['step']}"


def sft(arguments: argparse.Namespace) -> int:
    """Train a model on prompt / response pairs, as a supervised warm start."""
    config = load_config(arguments.config, arguments.overrides, schema=SftConfig)
    print(f"warm start of {config.model.source} in {config.run_dir}, {config.steps} steps", flush=True)
    from dapo_jax.commands import sft
    from dapo_jax.evaluation import table

    result = sft(config)
    if any(key.startswith("eval/") for key in result.metrics):
        print(table(result.metrics), end="")
    model = shlex.quote(f"{config.run_dir}/model")
    print(f"the model is in {config.run_dir}/model")
    print(f"ask it:        dapo-jax sample {model} --prompt TEXT -n 4")
    print(f"train it:      dapo-jax train CONFIG model.source={model}")
    return 0


def config(arguments: argparse.Namespace) -> int:
    """Print a configuration with all defaults."""
    schema = SftConfig if arguments.sft else EvaluateConfig if arguments.eval else TrainConfig
    written = changed_yaml if arguments.changed else to_yaml
    print(written(load_config(arguments.config, arguments.overrides, schema=schema)), end="")
    return 0
