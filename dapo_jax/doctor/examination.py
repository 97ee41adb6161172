"""Lists the checks of `dapo-jax doctor`, runs them, and prints the results with an overall verdict."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import jax
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dapo_jax.config import TrainConfig
from dapo_jax.config.keys import without_secrets
from dapo_jax.doctor import machine, resources
from dapo_jax.doctor import prompts_and_graders as prompts
from dapo_jax.doctor.check import Check, Found, examine
from dapo_jax.doctor.subject import STAND_IN, SUMS, Subject
from dapo_jax.doctor.tiny_step import TinyStep
from dapo_jax.terminal import visible

OWN_MODEL = {"cpu": 10**9, "gpu": 10**10, "tpu": 10**10}
"""Maximum number of parameters, by platform, for which the tiny step uses the run's own model. Larger models are replaced, unless `full` is set."""

_DRIVER = "set JAX_PLATFORMS=cpu, or repair the driver that the message names"
_GRADER = "fix the reward function, or set another reward.grader"
_STEP = "a run would fail with the same error: check that jax matches the driver, and run `dapo-jax doctor` without a configuration"

MACHINE = (
    Check("versions", lambda _: machine.versions()),
    Check("devices", lambda _: machine.devices(), remedy=_DRIVER),
    Check("settings", lambda _: machine.settings()),
    Check("host memory", lambda _: machine.host_memory()),
    Check("disk", resources.disk),
    Check("compilation cache", machine.compilation_cache),
)
CONFIGURATION = (
    Check("mesh", resources.mesh, needs=("devices",)),
    Check("model", resources.model),
    Check("memory", resources.memory, needs=("mesh", "model")),
    Check("cluster", resources.cluster, needs=("mesh", "model")),
    Check("training data", prompts.training_data, needs=("model",)),
    Check("evaluation data", prompts.evaluation_data, needs=("model",)),
    Check("grader", prompts.grader, needs=("training data",), remedy=_GRADER),
    Check("run_dir", resources.run_dir),
    Check("metrics", resources.metrics),
)


def examination(
    config: TrainConfig | None = None,
    *,
    full: bool = False,
    quick: bool = False,
    right: str = "",
    before: Callable[[Check], object] = lambda check: None,
) -> dict[str, Found]:
    """Runs all checks in about a minute, and returns their results by name. Without `config`, checks only the machine, with a tiny model.

    If `quick` is set, the tiny step is skipped. `full` and `right` are described in `Subject`. `before` is called with each check
    just before the check runs.
    """
    subject, checks = Subject(right=right, full=full, rows=SUMS), MACHINE
    if config is not None:
        subject, checks = Subject(config, right=right, full=full), (*MACHINE, *CONFIGURATION)
    with TinyStep() as step:
        return examine([*checks, *([] if quick else _of_step(step))], subject, before=before)


def _of_step(step: TinyStep) -> list[Check]:
    """Returns the checks that run the tiny training step or use its results."""

    def weights(subject: Subject) -> Found:
        platform, count = jax.default_backend(), subject.described[0].parameters
        if subject.full or count <= (limit := OWN_MODEL[platform]):
            return step.weights(subject)
        result = step.weights(Subject(STAND_IN, rows=SUMS))
        large = f"the model has {count:,} parameters, over {limit:,} for a {platform}"
        message = f"{result.message}; this is preset:tiny, because {large}"
        return Found(message, "warning", "--full uses the model itself")

    needs = ("devices", "mesh", "model", "memory", "training data")
    return [
        Check("weights", weights, needs, _STEP),
        Check("step", lambda _: step.step(), ("weights",), _STEP),
        Check("agreement", lambda _: step.agree(), ("step",), _STEP),
        Check("shapes", lambda _: step.shapes(), ("step",), _STEP),
        Check("grade", lambda _: step.grade(), ("step", "grader"), _STEP),
        Check("evaluate", lambda _: step.evaluate(), ("step",), _STEP),
        Check("checkpoint", lambda _: step.checkpoint(), ("step",), _STEP),
    ]


def verdict(results: Mapping[str, Found], *, configured: bool) -> tuple[bool, str]:
    """Returns whether training can start, and a one-sentence summary."""
    what = "This configuration" if configured else "This machine"
    failed = [name for name, result in results.items() if result.state == "failed"]
    if failed:
        return False, f"{what} cannot train here: see {_listed(failed)}."
    unsure = [name for name, result in results.items() if result.state != "ok"]
    but = f", but see {_listed(unsure)}" if unsure else ""
    if "weights" not in results:
        return True, f"{what} passed all checks{but}; no training step was tried."
    return True, f"{what} can train here{but}."


def _listed(names: Sequence[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


_STYLES = {"ok": "green", "warning": "yellow", "failed": "bold red", "skipped": "dim"}


def show(results: Mapping[str, Found], console: Console, *, configured: bool) -> None:
    """Prints the results, the remedies and the verdict. Control characters in prompts and responses are escaped."""
    table = Table(show_edge=False, pad_edge=False)
    table.add_column("check", no_wrap=True)
    table.add_column("state", no_wrap=True)
    table.add_column("result", overflow="fold")
    for name, result in results.items():
        text = Text(_shown(result.message))
        if result.remedy:
            text.append(f"\n-> {_shown(result.remedy)}", style="bold")
        table.add_row(name, Text(result.state, style=_STYLES[result.state]), text)
    console.print(table)
    details = [_shown(line) for result in results.values() for line in result.details]
    for line in (*([""] if details else []), *details, ""):
        console.print(line, markup=False, highlight=False)
    good, sentence = verdict(results, configured=configured)
    console.print(Text(sentence, style="bold green" if good else "bold red"))


def as_data(results: Mapping[str, Found], *, configured: bool) -> dict[str, Any]:
    """Returns the results and the verdict as JSON-serializable data, which `--json` prints."""
    good, sentence = verdict(results, configured=configured)
    checks = [
        {"name": name, **asdict(result), "seconds": round(result.seconds, 3)}
        for name, result in results.items()
    ]
    return {"schema_version": 2, "can_train": good, "verdict": sentence, "checks": checks}


def _shown(text: str) -> str:
    """Removes access tokens and passwords from the text, and escapes control characters."""
    return visible(without_secrets(text))
