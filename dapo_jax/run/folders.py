"""Folders that a configuration or a command names: checked before any long work."""

from pathlib import Path

from dapo_jax.config import ConfigError
from dapo_jax.locks import Lock, LockedError, Lost, take
from dapo_jax.storage import AnyPath, check_access, in_bucket, path_of


def place_of(value: str | AnyPath, *, key: str, write: bool) -> AnyPath:
    """Returns the folder that `value` names, and checks access. A local one is absolute: a reward function may change the working folder.

    Args:
        value: a local path, or `gs://BUCKET/FOLDER`.
        key: names the value in the message.
        write: whether something will be written there.

    Raises:
        ConfigError: gcsfs is not installed, there is no such bucket, or nothing can be written there.
    """
    try:
        folder = path_of(value)
        folder.exists()  # raises for a name that the file system does not take
        check_access(folder, write=write)
        return folder if in_bucket(folder) else Path(folder).absolute()
    except (ValueError, OSError) as error:
        raise ConfigError(f"{key}={value}: {error}") from error


def locked(folder: AnyPath, *, value: str, key: str, lost: Lost) -> Lock:
    """Takes the lock of a folder from `place_of`, before anything is read or written in it; makes the folder if necessary.

    Args:
        folder: to lock.
        value: names it in the message.
        key: names the value in the message.
        lost: see `dapo_jax.locks.Lost`.

    Raises:
        ConfigError: another process has it, or the folder cannot be written.
    """
    try:
        return take(folder, lost=lost)
    except LockedError as error:
        raise ConfigError(f"{key}={value}: {error}") from error
