"""Splits the text of a response into its tokens."""

import importlib
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from importlib import resources
from pathlib import Path

import numpy as np

from dapo_jax.report.runs import RunFiles
from dapo_jax.storage import AnyPath, path_of
from dapo_jax.text.tokenizers import Tokenizer, load_tokenizer, named_tokenizer

_UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""The text of an incomplete character."""
_LONGEST = 4
"""A character has at most this many bytes and so at most this many tokens."""


def tokenizer_of(run: RunFiles) -> Tokenizer | None:
    """Returns the run's tokenizer, from RUN/model of a finished run or from its initial model; None if neither is there.

    It downloads nothing: models of the hub are only searched in the cache.
    """
    with suppress(ValueError):  # an unfinished run has no model folder
        return load_tokenizer(run.place / "model")
    if run.config is None:
        return None
    model = run.config.model
    kind, _, name = model.source.partition(":")
    if kind == "preset":
        return named_tokenizer(model.tokenizer)
    try:
        folder: AnyPath
        if kind == "shipped":
            folder = Path(str(resources.files("dapo_jax"))) / "assets" / name
        elif kind == "hf":
            hub = importlib.import_module("huggingface_hub")
            folder = Path(hub.snapshot_download(name, local_files_only=True, revision=model.revision or None))
        else:
            folder = path_of(model.source)
        return load_tokenizer(folder)
    except Exception:  # missing, damaged, or without its client: then only the borders of tokens are missing
        return None


class Pieces:
    """Splits texts into the parts of single tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        def decoded(ids: tuple[int, ...]) -> str:
            return tokenizer.decode(np.array(ids, dtype=np.int64))

        self._decode, self._decoded = decoded, lru_cache(1 << 18)(decoded)

    def of(self, ids: Sequence[int], text: str) -> tuple[str, list[str]] | None:
        """Returns the text of all ids, and the part of each; None if it does not begin with `text` or cannot be split.

        An end token has an empty part. If several tokens make one character, the last one has it, and the others are empty.

        >>> from dapo_jax.text.tokenizers import ByteTokenizer
        >>> Pieces(ByteTokenizer()).of([67, 197, 171, 1], "Aé")
        ('Aé', ['A', '', 'é', ''])
        """
        try:
            whole = self._decode(tuple(ids))
            if not whole.startswith(text):
                return None
            parts = self._parts(ids)
        except ValueError:
            return None
        return (whole, parts) if "".join(parts) == whole else None

    def _parts(self, ids: Sequence[int]) -> list[str]:
        """Decodes each token after the previous one, since some tokenizers drop the first space of a text."""
        parts, start, given = [], 0, 0
        for end in range(1, len(ids) + 1):
            now, before = self._decoded(tuple(ids[start:end])), self._decoded(tuple(ids[start:given]))
            if now.endswith(_UNFINISHED) and end < len(ids) and end - given < _LONGEST:
                parts.append("")
            else:
                parts.append(now[len(before) :])
                start, given = given, end
        return parts
