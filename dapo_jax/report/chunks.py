"""Helper functions for the layout of rollouts and evaluations: compression, file loading with clear errors, and shortened prompts."""

import gzip
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import numpy as np

from dapo_jax.config import ConfigError
from dapo_jax.storage import AnyPath

_HEAD = 96
"""Maximum number of characters of a prompt that a list shows."""
_FRAME = 16
"""If all prompts in a list share a beginning or an end of at least this many characters, the list omits it."""


@dataclass(frozen=True, kw_only=True)
class Laid:
    """Either the rollouts or the evaluations of one run, in the form that the page loads."""

    about: Mapping[str, Any]
    """A JSON-serializable description of `index` and `chunks`."""
    index: bytes
    """Compressed numbers that the page loads at the start."""
    chunks: Sequence[bytes]
    """Compressed texts that the page loads on demand."""


def compressed(content: bytes) -> bytes:
    """Compresses with gzip. The same content always results in the same bytes."""
    return gzip.compress(content, compresslevel=6, mtime=0)


def compressed_json(value: Any) -> bytes:
    """Returns a value as compressed JSON."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return compressed(text.encode("utf-8", errors="replace"))


def read_checked(file: AnyPath, read: Callable[[AnyPath], list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Returns `read(file)`. A damaged file raises ConfigError, whose message names the file and the line."""
    try:
        return read(file)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{error}; repair that file, or move it away") from error


def key_of(prompt: str, answer: str) -> str:
    """Returns a key of 16 characters for a prompt and its answer. The page compares these keys instead of whole texts.

    >>> key_of("1+1=", "2") == key_of("1+1=", "2"), key_of("1+1=", "2") == key_of("1+1=2", "")
    (True, False)
    """
    # The prompt's length marks where the answer begins. `surrogatepass`, because both may contain half a surrogate pair.
    text = f"{len(prompt)} {prompt}{answer}".encode("utf-8", errors="surrogatepass")
    return hashlib.blake2b(text, digest_size=8).hexdigest()


def spaced(files: Sequence[AnyPath], count: int | None) -> Iterator[AnyPath]:
    """Yields at most `count` of the files, evenly spaced, including the first and the last. `None` means all files."""
    if count is None or count >= len(files):
        return iter(files)
    # Starts from the end, so that the last file is returned if `count` is 1.
    indices = np.linspace(len(files) - 1, 0, count).round().astype(int)[::-1]
    return (files[index] for index in indices)


def heads(prompts: Sequence[str]) -> list[str]:
    """Returns one short line for each prompt, without the beginning and the end that all prompts have in common.

    >>> heads(["Solve this task, please: 1+1", "Solve this task, please: 2+3"])
    ['1+1', '2+3']
    """
    before = _frame(prompts)
    rest = [prompt[before:] for prompt in prompts]
    after = _frame([text[::-1] for text in rest])
    lines = [" ".join(text[: len(text) - after][: 4 * _HEAD].split()) for text in rest]
    return [line if len(line) <= _HEAD else line[: _HEAD - 1] + "…" for line in lines]


def _frame(texts: Sequence[str]) -> int:
    """Returns how many characters, in whole words, all texts share at the beginning; 0 if fewer than `_FRAME` or if all texts are the same."""
    low, high = min(texts, default=""), max(texts, default="")  # any prefix these two share is common to all
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(low, high, strict=False)))
    return low[:same].rfind(" ") + 1 if low != high and same >= _FRAME else 0
