"""Folders that a configuration or a command names: found, and tried when they lie in a bucket."""

from dapo_jax.config import ConfigError
from dapo_jax.storage import AnyPath, check_access, path_of


def place_of(value: str | AnyPath, *, key: str, write: bool) -> AnyPath:
    """The folder that `value` names; one in a bucket is tried out at once, before anything that takes long.

    Args:
        value: a local path, or `gs://BUCKET/FOLDER`.
        key: what it is the value of, for the message.
        write: whether something will be written there.

    Raises:
        ConfigError: gcsfs is not installed, there is no such bucket, or something is not permitted there.
    """
    try:
        folder = path_of(value)
        check_access(folder, write=write)
    except ValueError as error:
        raise ConfigError(f"{key}={value}: {error}") from error
    return folder
