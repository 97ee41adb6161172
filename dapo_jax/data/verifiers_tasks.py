"""Tasks of verifiers as rows. Needs the package verifiers 0.4."""

import importlib
import tomllib
from itertools import islice
from pathlib import Path
from typing import Any

from dapo_jax.hints import needing


def environment_config(place: str) -> Any:
    """Returns the configuration of a verifiers environment. `place` is the name of a taskset, or a TOML file with the table `env` of verifiers' own commands.

    Without a file, agents run in processes on this machine (verifiers' runtime `subprocess`). Raises ValueError if the package is missing, or the environment cannot
    be loaded.
    """
    with needing("verifiers", f"verifiers:{place} needs the package verifiers 0.4"):
        verifiers = importlib.import_module("verifiers.v1")
        loaders = importlib.import_module("verifiers.v1.utils.loaders")
    is_file = place.endswith(".toml")
    try:
        given = tomllib.loads(Path(place).read_text())["env"] if is_file else {"taskset": {"id": place}}
        config = loaders.resolve_env_config(given)
    except Exception as error:  # importing the environment runs its code
        raise ValueError(f"verifiers:{place}: {type(error).__name__}: {error}") from error
    for name, agent in [] if is_file else [*config]:
        if isinstance(agent, verifiers.AgentConfig):
            setattr(config, name, agent.model_copy(update={"runtime": verifiers.SubprocessConfig()}))
    return config


def verifiers_rows(place: str, count: int) -> list[dict[str, Any]]:
    """Returns the first `count` tasks of a verifiers environment as rows. The field `task` has the whole task as JSON. Raises ValueError as `environment_config`."""
    taskset = environment_config(place).taskset
    loaded = importlib.import_module("verifiers.v1").load_taskset(taskset)
    return [_row(task.data) for task in islice(loaded, count)]


def _row(data: Any) -> dict[str, Any]:
    said = data.prompt or data.name or f"task {data.idx}"
    prompt = [{"role": "user", "content": said}] if isinstance(said, str) else said
    system = [{"role": "system", "content": data.system_prompt}] if data.system_prompt else []
    messages = [
        message if isinstance(message, dict) else message.model_dump(exclude_none=True) for message in prompt
    ]
    answer = str(getattr(data, "answer", ""))
    return {"prompt": system + messages, "answer": answer, "task": data.model_dump_json()}
