"""The spans of responses as plain arrays: which weights drew which of their tokens."""

from collections.abc import Mapping, Sequence

import numpy as np

from dapo_jax.dapo.rollouts import Span

SPAN_ARRAYS = ("span_counts", "span_firsts", "span_versions")


def span_arrays(responses: Sequence[Sequence[Span]]) -> dict[str, np.ndarray]:
    """Flattens the spans of each response."""
    spans = [span for of_response in responses for span in of_response]
    return {
        "span_counts": np.array([len(of_response) for of_response in responses], np.int64),
        "span_firsts": np.array([span.first for span in spans], np.int64),
        "span_versions": np.array([span.version for span in spans], np.int64),
    }


def spans_of(arrays: Mapping[str, np.ndarray]) -> list[tuple[Span, ...]]:
    """The spans that `span_arrays` flattened."""
    counts, firsts, versions = (arrays[name].tolist() for name in SPAN_ARRAYS)
    spans = list(map(Span, firsts, versions))
    ends = np.cumsum(counts, dtype=np.int64).tolist()
    return [tuple(spans[end - count : end]) for count, end in zip(counts, ends, strict=True)]


def check_spans(
    arrays: Mapping[str, np.ndarray], *, lengths: np.ndarray, version: int, least: int | float = -np.inf
) -> None:
    """Refuses arrays that are no spans of responses of so many tokens each.

    Args:
        arrays: those of `span_arrays`.
        lengths: tokens of each response. One without any has no span, or one at its beginning.
        version: that of the weights now.
        least: the lowest version that there can be; older checkpoints count back from `version`, perhaps below 0.

    Raises:
        ValueError: names the array.
    """
    counts, firsts, versions = (arrays[name] for name in SPAN_ARRAYS)
    enough = counts.shape == lengths.shape and counts.dtype.kind == "i"
    if not (enough and ((counts >= 1) | ((counts == 0) & (lengths == 0))).all()):
        raise ValueError(
            "'span_counts' is not one number, 1 or more where there are tokens, for each response"
        )
    if (counts > np.maximum(lengths, 1)).any():
        raise ValueError("'span_counts' has a response of more spans than tokens")
    total = int(counts.sum())
    for name, array in (("span_firsts", firsts), ("span_versions", versions)):
        if array.shape != (total,) or array.dtype.kind != "i":
            raise ValueError(f"{name!r} is not one number for each of {total:,} spans")
    begins = np.zeros(total, bool)
    begins[(np.cumsum(counts) - counts)[counts > 0]] = True
    follows = ~begins[1:]
    if (firsts[begins] != 0).any() or (np.diff(firsts)[follows] <= 0).any():
        raise ValueError(
            "'span_firsts' has spans that do not begin with a response's first token and follow each other"
        )
    if (firsts >= np.repeat(np.maximum(lengths, 1), counts)).any():
        raise ValueError("'span_firsts' has a span that begins behind its response's last token")
    rise = (np.diff(versions)[follows] > 0).all()
    if not rise or (versions > version).any() or (versions < least).any():
        raise ValueError(f"'span_versions' has versions that do not rise up to {version}")
