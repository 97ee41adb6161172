"""Parses and writes configurations as YAML, and finds the configurations in the package."""

import re
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any

import yaml

from dapo_jax.config.keys import ConfigError
from dapo_jax.hints import nearest
from dapo_jax.storage import AnyPath, entries

_PACKAGE = Path(__file__).parent.parent
_FLOAT = re.compile(
    r"[-+]?(\d[\d_]*(\.[\d_]*)?[eE][-+]?\d+|\d[\d_]*\.[\d_]*|\.\d[\d_]*([eE][-+]?\d+)?|\.(inf|Inf|INF))$|\.(nan|NaN|NAN)$"
)
_INT = re.compile(r"[-+]?(0|[1-9][\d_]*|0x[\da-fA-F_]+)$")
"""Matches whole numbers, but not `12:30` and `010`, which YAML 1.1 reads as 750 and 8."""


class _Loader(yaml.SafeLoader):
    """Unlike PyYAML's loader, parses `1e-6` as a number, and `=`, `<<`, `010`, `12:30` and dates as text. Rejects a section in which a key occurs twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    problem = f"the key {key.value!r} occurs twice in one section; keep one of the two"
                    raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
                seen.add(key.value)
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Writes YAML in which text is quoted if `_Loader` would parse it as another type."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


for _each, _read_as_text in ((_Loader, (":int", ":value")), (_Dumper, ())):  # `=` is a value
    _changed = (":timestamp", ":float", *_read_as_text)
    _each.yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in known if not tag.endswith(_changed)]
        for first, known in _each.yaml_implicit_resolvers.items()
    }
    _each.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))
_Loader.add_implicit_resolver("tag:yaml.org,2002:int", _INT, list("-+0123456789"))
_Loader.add_constructor("tag:yaml.org,2002:merge", _Loader.construct_yaml_str)  # `<<`, unless it is a key


def read_yaml(text: str) -> Any:
    """Parses YAML text.

    Raises:
        yaml.YAMLError: the text is not YAML, contains a tag, or has a section in which a key occurs twice.
    """
    return _Loader(text).get_single_data()


def write_yaml(values: Mapping[str, Any]) -> str:
    """Returns values as YAML, which `read_yaml` parses back to the same values. Scalars and lists come first, followed by sections."""
    ordered = dict(sorted(values.items(), key=lambda item: isinstance(item[1], dict)))
    return yaml.dump(ordered, Dumper=_Dumper, allow_unicode=True, sort_keys=False)


def read_file(path: AnyPath) -> dict[Any, Any]:
    """Loads a YAML file that contains a mapping. Raises ConfigError if the file does not exist, is not YAML, or does not contain a mapping."""
    if not path.is_file():
        raise ConfigError(_missing_file(path))
    try:
        content = read_yaml(path.read_text(encoding="utf-8"))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        more = "" if "twice" in str(error.problem) else "; check brackets, tabs and indents, and quote ':'"
        raise ConfigError(f"{line}not YAML: {error.problem or error.context}{more}") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"cannot be read as `key: value` lines ({reason}); write YAML in UTF-8") from None
    if not content:
        raise ConfigError("the file contains no keys; it needs at least `run_dir: some/folder`")
    if not isinstance(content, dict):
        found = f"a list of {len(content)}" if isinstance(content, list) else repr(content)
        raise ConfigError(f"found {found:.80}, needs `key: value` lines, without dashes before them")
    return content


def shipped_configs() -> dict[str, Path]:
    """Returns the configurations in the package, as a mapping from names (`dapo-jax train NAME`) to files.

    A name is the path below `configs/` without its suffix, for example `study/dapo`. In a wheel, this folder is in the package. In a checkout, it is next to the package.
    """
    inside = _PACKAGE / "configs"
    folder = inside if inside.is_dir() else _PACKAGE.parent / "configs"
    files = sorted(folder.rglob("*.yaml"))
    return {file.relative_to(folder).with_suffix("").as_posix(): file for file in files}


def _missing_file(path: AnyPath) -> str:
    shipped = shipped_configs()
    name = path.with_suffix("").as_posix().removeprefix("configs/")
    there = [*map(str, entries(path.parent)), *shipped] if path.parent.is_dir() else shipped
    near = nearest(name, [each for each in there if each in shipped or each.endswith((".yaml", ".yml"))])
    remedy = f"did you mean {near[0]}?" if near else f"give a YAML file, or one of {', '.join(shipped)}"
    found = "is a folder, needs a file" if path.is_dir() else f"no such file (from {Path.cwd()})"
    return f"{found}; {remedy}"
