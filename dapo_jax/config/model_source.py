"""The parts of a model's source: `RUN@best` is a checkpoint of a run, and `hf:ORG/NAME@COMMIT` a revision of a model on the Hugging Face Hub."""

from typing import NamedTuple


class SourceParts(NamedTuple):
    """The parts of a model's source."""

    place: str
    """The source without the other parts."""
    revision: str = ""
    """Branch, tag or commit of a model on the Hugging Face Hub."""
    checkpoint: str = "last"
    """The checkpoint of a run to load: last or best."""


def source_parts(source: str) -> SourceParts:
    """Splits `hf:ORG/NAME@COMMIT` and `RUN@best`.

    >>> source_parts("runs/mine@best")
    SourceParts(place='runs/mine', revision='', checkpoint='best')
    """
    place, _, part = source.rpartition("@")
    if place.startswith("hf:"):
        return SourceParts(place, revision=part)
    return SourceParts(place, checkpoint=part) if place and part in ("last", "best") else SourceParts(source)
