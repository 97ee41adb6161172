"""The content of an update that was skipped because something in it was not finite.

FOLDER/report.json         what was not finite, and where; written last: a folder without it is not whole
FOLDER/arrays.safetensors  the update's microbatches as they were on the device; 0/tokens is [microbatches, rows, tokens] of stack 0
FOLDER/step_*.jsonl        its responses, as in RUN/rollouts
FOLDER/config.yaml         the run's configuration

A file of its own: its format is read by people and programs long after a run.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any

import numpy as np
from safetensors.numpy import load, save

from dapo_jax.dapo.rollouts import Group
from dapo_jax.storage import AnyPath, file_bytes, path_of, write_whole
from dapo_jax.trackers.rollout_log import read_rollouts, write_rollouts

SCHEMA_VERSION = 1
"""Version of the layout above."""


@dataclass(frozen=True, kw_only=True)
class PostMortem:
    """One skipped update."""

    report: dict[str, Any]
    stacks: list[dict[str, np.ndarray]]
    """A dict of arrays for each length of rows, named as the fields of `dapo_jax.dapo.microbatch.Microbatch`."""
    rollouts: list[dict[str, Any]]


def write_post_mortem(
    folder: AnyPath,
    *,
    report: Mapping[str, Any],
    stacks: Sequence[Mapping[str, np.ndarray]],
    groups: Sequence[Group],
    config: str,
) -> None:
    """Writes a post-mortem; one that is there is replaced.

    Args:
        folder: made if needed.
        report: what JSON can hold, `step` among it.
        stacks: arrays by name, for each length of rows.
        groups: what the update was made of.
        config: the run's, as YAML.

    Raises:
        OSError: it cannot be written; the message names the file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_rollouts(folder, report["step"], groups)
    write_whole(folder / "config.yaml", config.encode())
    arrays = {
        f"{index}/{name}": np.ascontiguousarray(array)
        for index, stack in enumerate(stacks)
        for name, array in stack.items()
    }
    write_whole(folder / "arrays.safetensors", save(arrays))
    whole = {"schema_version": SCHEMA_VERSION, **report}
    write_whole(folder / "report.json", json.dumps(whole, indent=1, allow_nan=False).encode())


def read_post_mortem(folder: str | PathLike[str]) -> PostMortem:
    """Reads what `write_post_mortem` wrote.

    Raises:
        ValueError: the folder holds no whole post-mortem, or one of a newer version.
    """
    place = path_of(folder)
    if not (place / "report.json").exists():
        raise ValueError(f"{place} has no report.json: it is no post-mortem, or writing it was cut short")
    report = json.loads(file_bytes(place / "report.json"))
    if report["schema_version"] > SCHEMA_VERSION:
        raise ValueError(
            f"{place} has schema_version {report['schema_version']}; this version of dapo_jax reads up to "
            f"{SCHEMA_VERSION}: upgrade dapo_jax"
        )
    stacks: dict[int, dict[str, np.ndarray]] = {}
    for key, array in load(file_bytes(place / "arrays.safetensors")).items():
        index, _, name = key.partition("/")
        stacks.setdefault(int(index), {})[name] = array
    return PostMortem(
        report=report,
        stacks=[stacks[index] for index in sorted(stacks)],
        rollouts=read_rollouts(place / f"step_{report['step']:06d}.jsonl"),
    )
