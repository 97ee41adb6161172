"""Lines of a run's files, checked down to what the report's layout leans on; the rest may be missing, as in files of older versions."""

from collections.abc import Callable, Mapping
from typing import Any

from dapo_jax.config import ConfigError
from dapo_jax.storage import AnyPath

Line = dict[str, Any]


def read_checked(
    file: AnyPath, read: Callable[[AnyPath], list[Line]], check: Callable[[Line, str], None], *, what: str
) -> list[Line]:
    """Reads a file whose lines `check` takes; `what` a line is, for the message.

    Raises:
        ConfigError: the file cannot be read, or a line is not what the layout needs; names it.
    """
    try:
        lines = read(file)
        for number, line in enumerate(lines, 1):
            check(line, f"{file}, {what} {number}")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{error}; mend that file, or move it away") from error
    return lines


def check_kinds(line: Mapping[str, Any], kinds: Mapping[str, type], where: str) -> None:
    """Refuses a line that lacks one of the names of `kinds`, or has another kind of value there.

    Raises:
        ValueError: it is one.
    """
    for name, kind in kinds.items():
        if not isinstance(line.get(name), kind):
            raise ValueError(f"{where}: {name!r} is {line.get(name)!r:.60}; it must be {kind.__name__}")
