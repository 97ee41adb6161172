"""A configuration's YAML file as plain values, or one message that says what is wrong with it."""

import io
import re
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dapo_jax.config.keys import ConfigError
from dapo_jax.config.shipped import shipped_configs
from dapo_jax.nearest import nearest
from dapo_jax.storage import AnyPath, entries

MAX_DEPTH = 32
"""Sections and lists inside one another. Parsers call themselves once a level, and one in C overruns its stack."""
MAX_DIGITS = 100
_LONG_NUMBER = re.compile(r"[-+]?[0-9][0-9a-fA-FxXob_:]*")
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def read_file(path: AnyPath) -> dict[Any, Any]:
    """The file's mapping, with interpolations left as text.

    Raises:
        ConfigError: there is no such file, or it is no YAML mapping.
    """
    if not path.is_file():
        raise ConfigError(_missing_file(path))
    try:
        text = path.read_text(encoding="utf-8")
        check_bounds(text)
        content = OmegaConf.to_container(OmegaConf.load(io.StringIO(text)), resolve=False)
    except yaml.MarkedYAMLError as error:
        raise ConfigError(_yaml_problem(error)) from None
    except OmegaConfBaseException as error:
        raise ConfigError(omegaconf_problem(error, error.full_key)) from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"found bytes that are not UTF-8 at {error.start}; save it as UTF-8 text") from None
    except (OSError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"cannot be read as `key: value` lines ({reason}); write YAML") from None
    if not content:
        raise ConfigError("the file holds no keys; it needs at least `run_dir: some/folder`")
    if not isinstance(content, dict):
        raise ConfigError(f"found a list of {len(content)}, needs `key: value` lines; remove the dashes")
    return content


def check_bounds(text: str) -> None:
    """Refuses YAML that would overrun a parser: the events of a text are told one by one, whatever is inside what.

    Aliases are bounded by OmegaConf, which expands them to 10,000 values at most.

    Raises:
        ConfigError: more than `MAX_DEPTH` sections and lists inside one another, or a number of over `MAX_DIGITS` digits.
        yaml.YAMLError: it is no YAML.
    """
    depth = 0
    for event in yaml.parse(text, Loader=_LOADER):
        line = f"line {event.start_mark.line + 1}: " if event.start_mark else ""
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            if depth > MAX_DEPTH:
                raise ConfigError(
                    f"{line}more than {MAX_DEPTH} lists and sections stand inside one another; no key needs that"
                )
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        elif isinstance(event, yaml.ScalarEvent) and event.implicit[0] and _is_too_long(event.value):
            raise ConfigError(
                f"{line}found a number of {len(event.value)} digits, needs at most {MAX_DIGITS}; quote it if it is a text"
            )


def _is_too_long(number: str) -> bool:
    return len(number) > MAX_DIGITS and _LONG_NUMBER.fullmatch(number) is not None


def _missing_file(path: AnyPath) -> str:
    shipped = shipped_configs()
    name = path.with_suffix("").as_posix().removeprefix("configs/")
    if name in shipped:
        return (
            f"no such file; the configuration of this name comes with the package, so give its name: {name}"
        )
    if not (path.suffix or path.is_absolute() or path.exists()):
        beside = path.with_suffix(".yaml")
        near = [beside] if beside.is_file() else nearest(name, shipped)
        remedy = f"did you mean {near[0]}?" if near else f"give a YAML file, or one of {', '.join(shipped)}"
        return f"no such file, and no configuration of this name comes with the package; {remedy}"
    folder, what = (path, "is a folder, needs a file") if path.is_dir() else (path.parent, "no such file")
    if not folder.is_dir():
        return f"no such file, and no folder {folder}; check the path (from {Path.cwd()})"
    near = _nearest_file(folder, path.stem)
    return f"{what}; " + (f"did you mean {near}?" if near else f"there are no YAML files in {folder}")


def _nearest_file(folder: AnyPath, stem: str) -> AnyPath | None:
    """The YAML file of a folder with the name most like `stem`."""
    there = [each for each in entries(folder) if each.suffix in (".yaml", ".yml")]
    return max(there, key=lambda each: SequenceMatcher(None, stem, each.stem).ratio(), default=None)


def _yaml_problem(error: yaml.MarkedYAMLError) -> str:
    mark = error.problem_mark or error.context_mark
    line = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
    duplicate = re.fullmatch(r"found duplicate key (.*)", error.problem or "")
    if duplicate:
        return f"{line}the key {duplicate[1]!r} stands twice in one section; keep one of the two"
    return f"{line}not YAML: {error.problem or error.context}; check quotes, brackets, tabs and indentation there"


def omegaconf_problem(error: OmegaConfBaseException, key: str | None) -> str:
    """The message for values that OmegaConf cannot hold: a broken interpolation, a key that is no text, a YAML tag."""
    reason = str(error).splitlines()[0]
    where = f"{key}: " if key else ""
    if "${" in reason:
        return f"{where}found an interpolation ({reason}); interpolations are not resolved: write the value"
    return f"{where}found what no key can hold ({reason}); write a plain value"
