"""Folders that a configuration or a command names: found, and tried before anything that takes long."""

from pathlib import Path

from dapo_jax.config import ConfigError
from dapo_jax.locks import Lock, LockedError, Lost, take
from dapo_jax.storage import AnyPath, check_access, in_bucket, path_of


def place_of(value: str | AnyPath, *, key: str, write: bool) -> AnyPath:
    """The folder that `value` names, tried out at once. A local one is absolute: a reward function may change the working folder.

    Args:
        value: a local path, or `gs://BUCKET/FOLDER`.
        key: what it is the value of, for the message.
        write: whether something will be written there.

    Raises:
        ConfigError: gcsfs is not installed, there is no such bucket, or nothing can be written there.
    """
    try:
        folder = path_of(value)
        check_access(folder, write=write)
        return folder if in_bucket(folder) else Path(folder).absolute()
    except (ValueError, FileNotFoundError) as error:  # of the working folder, which was removed
        raise ConfigError(f"{key}={value}: {error}") from error


def locked(folder: AnyPath, *, value: str, key: str, lost: Lost) -> Lock:
    """The lock of a folder that `place_of` has found, which is made if it is not there; to be taken before anything is looked for in it.

    Args:
        folder: where nobody else may write.
        value: how it was named, for the message.
        key: what that is the value of, for the message.
        lost: called with an exit status and a message if a lease in a bucket is lost.

    Raises:
        ConfigError: another process has it, or the folder cannot be written.
    """
    try:
        return take(folder, lost=lost)
    except LockedError as error:
        raise ConfigError(f"{key}={value}: {error}") from error
