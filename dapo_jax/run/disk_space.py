"""Compares free disk space with the number of bytes that a run will write."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, NamedTuple

from dapo_jax.config import ConfigError, TrainConfig
from dapo_jax.data.sources import prepared_folder
from dapo_jax.parallel.together import by_first
from dapo_jax.run.records import compilation_cache
from dapo_jax.storage import AnyPath, files_below, in_bucket, path_of, size_of

STATE_BYTES, EXPORT_BYTES = 12, 4
"""Bytes per parameter: at most 12 in a checkpoint (float32 weights, and up to two optimizer moments), and 4 in the model that is written after the last step."""

SPARE = 2**30
"""Number of bytes that should stay free on a disk after a run. If fewer would, a warning is shown."""

_LEAST = 2**20
"""Minimum free bytes on each disk, for a run's metrics, logs and configuration."""


class Room(NamedTuple):
    """The result of comparing the free disk space with the bytes that a run writes, as text for the user."""

    message: str
    state: Literal["ok", "warning", "failed"]
    remedy: str


def check_room(places: Mapping[str, tuple[str, int]]) -> str:
    """Returns a warning if the disks have little room for a run that writes these bytes (see `room_for`), otherwise an empty string. Raises ConfigError if the
    disks have too little room. It is raised in every process."""

    def checked() -> bytes:
        message, state, remedy = room_for(places)
        if state == "failed":
            raise ConfigError(f"the disk has too little room for this run: {message}: {remedy}")
        return f"the disk has little room for this run: {message}: {remedy}".encode() if remedy else b""

    return by_first(checked).decode()


def bytes_to_write(config: TrainConfig, parameters: int) -> dict[str, tuple[str, int]]:
    """Returns a dict from the configuration key or environment variable of a folder, such as `run_dir`, to the folder and the estimated bytes still to be written there."""
    checkpoint, evaluates = config.checkpoint, config.checkpoint.keep_best and config.eval.every_steps
    saved = 1 + (config.steps // checkpoint.every_steps if checkpoint.every_steps else 0)
    saved += config.steps // config.eval.every_steps if evaluates else 0
    most = checkpoint.keep + 1 + bool(evaluates)  # a save in progress, and the best checkpoint
    size = parameters * (min(saved, most) * STATE_BYTES + EXPORT_BYTES)
    if not in_bucket(config.run_dir):
        folders = [path_of(config.run_dir) / name for name in ("checkpoints", "model")]
        size -= sum(size_of(file) for folder in folders for file in files_below(folder))
    places = {"run_dir": (config.run_dir, max(0, size)), "TFDS_DATA_DIR": (prepared_folder(), 0)}
    return places | ({"JAX_COMPILATION_CACHE_DIR": (cache, 0)} if (cache := compilation_cache()) else {})


def room_for(places: Mapping[str, tuple[str, int]]) -> Room:
    """Compares the free space of each disk with the bytes to be written. `places` has the form of `bytes_to_write`. Buckets are assumed to have enough space."""
    disks: dict[int, list[str]] = {}
    for key, (folder, _) in places.items():
        if not in_bucket(folder):
            disks.setdefault(nearest(path_of(folder)).stat().st_dev, []).append(key)
    messages, remedies, state = [], [], "ok"
    for keys in disks.values():
        free = shutil.disk_usage(nearest(path_of(places[keys[0]][0]))).free
        needed = sum(places[key][1] for key in keys)
        more = f", {gib(needed)} needed" if needed else ""
        messages.append(f"{gib(free)} free for {', '.join(keys)}{more}")
        elsewhere = f"or set {' or '.join(keys)} to a folder on another disk"
        if free < max(needed, _LEAST):
            state = "failed"
            remedies.append(f"free {gib(max(needed, _LEAST) - free)} more, {elsewhere}")
        elif free < needed + SPARE:
            state = "warning" if state == "ok" else state
            remedies.append(
                f"{gib(SPARE)} of spare room is recommended: free {gib(needed + SPARE - free)} more, {elsewhere}"
            )
    messages += [f"{key} is in a bucket" for key, (folder, _) in places.items() if in_bucket(folder)]
    return Room("; ".join(messages), state, "; ".join(remedies))


def nearest(folder: AnyPath) -> Path:
    """Returns the folder if it exists, otherwise its nearest existing parent."""
    path = Path(folder).absolute()
    return next(folder for folder in (path, *path.parents) if folder.exists())


def gib(size: int) -> str:
    """Formats a number of bytes.

    >>> gib(3 * 2**29), gib(5 * 2**20)
    ('1.5 GiB', '5 MiB')
    """
    return f"{size / 2**30:,.1f} GiB" if size >= 2**30 else f"{size / 2**20:,.0f} MiB"
