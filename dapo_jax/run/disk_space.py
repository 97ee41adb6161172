"""Whether the disks have room for what a run writes."""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dapo_jax.config import ConfigError, TrainConfig
from dapo_jax.parallel.gather import broadcast_from_first
from dapo_jax.parallel.processes import is_first
from dapo_jax.storage import AnyPath, files_below, in_bucket, path_of, size_of

STATE_BYTES, EXPORT_BYTES = 12, 4
"""Bytes of a parameter: in a checkpoint (float32 weights and two moments), and in the model that is written at the end."""

TOKEN_BYTES = 8
"""Bytes of a token of a response that is not trained on yet, in a checkpoint: its number and its log-probability."""

SPARE = 2**30
"""Bytes that a disk should have left beyond what is needed."""

LEAST = 2**20
"""Bytes without which nothing is begun: of metrics, logs and the configuration."""


@dataclass(frozen=True, kw_only=True)
class Room:
    """The space on the disks, in words for a person."""

    message: str
    state: Literal["ok", "warning", "failed"]
    remedy: str


def check_room(config: TrainConfig, parameters: int) -> str:
    """A warning where the disks have little room for a run of so many parameters, empty where they have enough.

    Raises:
        ConfigError: they have too little; in every process.
    """
    found = ["", ""]
    if is_first():
        room = room_for(written_by(config, parameters))
        found[room.state == "failed"] = f"{room.message}: {room.remedy}" if room.remedy else ""
    warning, refusal = (part.decode() for part in map(broadcast_from_first, map(str.encode, found)))
    if refusal:
        raise ConfigError(f"the disk has too little room for this run: {refusal}")
    return f"the disk has little room for this run: {warning}" if warning else ""


def written_by(config: TrainConfig, parameters: int) -> dict[str, tuple[str, int]]:
    """Key -> folder, and bytes that a run will write there beyond what it has written."""
    checkpoint = (
        parameters * STATE_BYTES + _waiting(config) * config.sampling.max_response_tokens * TOKEN_BYTES
    )
    size = _checkpoints(config) * checkpoint + parameters * EXPORT_BYTES
    there = 0
    if not in_bucket(config.run_dir):
        folders = [path_of(config.run_dir) / name for name in ("checkpoints", "model")]
        there = sum(size_of(file) for folder in folders for file in files_below(folder))
    places = {"run_dir": (config.run_dir, max(0, size - there)), "data.data_dir": (config.data.data_dir, 0)}
    return places | ({"compilation_cache": (config.compilation_cache, 0)} if config.compilation_cache else {})


def _checkpoints(config: TrainConfig) -> int:
    """The number of checkpoints that lie there at once at most: those that are kept, the best, and while the newest is written the one that goes for it."""
    checkpoint, best = config.checkpoint, 0
    saved = 1 + (config.steps // checkpoint.every_steps if checkpoint.every_steps else 0)
    if checkpoint.keep_best and config.eval.every_steps:
        best = 1
        saved += config.steps // config.eval.every_steps
    return min(saved, checkpoint.keep + best + 1)


def _waiting(config: TrainConfig) -> int:
    """Responses that a checkpoint holds at most, or nearly: what is in flight and a step's groups that wait, or of waves the surplus that is kept."""
    batch, in_flight = config.batch, config.rollout.in_flight
    if in_flight:
        return in_flight + batch.prompts_per_step * batch.group_size
    return config.prompts_per_wave * batch.group_size if config.dynamic_sampling.surplus == "carry" else 0


def room_for(places: Mapping[str, tuple[str, int]]) -> Room:
    """Free space where things are written: key -> (folder, bytes that will be written there). What lies in a bucket has no end."""
    local = {
        key: (nearest(path_of(folder)), size)
        for key, (folder, size) in places.items()
        if not in_bucket(folder)
    }
    said: list[str] = []
    state, remedies = "ok", []
    for device in dict.fromkeys(folder.stat().st_dev for folder, _ in local.values()):
        keys = [key for key, (folder, _) in local.items() if folder.stat().st_dev == device]
        free = shutil.disk_usage(local[keys[0]][0]).free
        needed = sum(local[key][1] for key in keys)
        need = f", {gib(needed)} needed" if needed else ""
        said.append(f"{gib(free)} free for {', '.join(keys)}{need}")
        elsewhere = f"or set {' or '.join(keys)} to a folder on another disk"
        if free < max(needed, LEAST):
            state = "failed"
            remedies.append(f"free {gib(max(needed, LEAST) - free)} more, {elsewhere}")
        elif free < needed + SPARE:
            state = "warning" if state == "ok" else state
            remedies.append(
                f"{gib(SPARE)} beyond what is needed is advised: free {gib(needed + SPARE - free)}, {elsewhere}"
            )
    said += [f"{key} lies in a bucket" for key in places if key not in local]
    return Room(message="; ".join(said), state=state, remedy="; ".join(remedies))


def nearest(folder: AnyPath) -> Path:
    """The folder, or the nearest above it that is there; a file if one is in its way."""
    path = Path(folder).absolute()
    return next(each for each in (path, *path.parents) if each.exists())


def gib(size: int) -> str:
    """Bytes in a unit that suits them.

    >>> gib(3 * 2**29), gib(5 * 2**20)
    ('1.5 GiB', '5 MiB')
    """
    return f"{size / 2**30:,.1f} GiB" if size >= 2**30 else f"{size / 2**20:,.0f} MiB"
