"""The remedy for a key that does not exist: our name for it, or the nearest one there is.

A file of its own: it knows the names of other libraries, and nothing of reading files.
"""

from collections.abc import Collection
from difflib import SequenceMatcher

from dapo_jax.config.schema import TrainConfig
from dapo_jax.config.section import rules_by_key

ALIASES = {alias: ours for ours, rules in rules_by_key(TrainConfig).items() for alias in rules.aliases}
"""A name of verl, TRL or open-instruct -> ours. Dotted ones win over their last part alone."""

NOTES = {
    alias: note
    for rules in rules_by_key(TrainConfig).values()
    for alias, note in rules.aliases.items()
    if note
}
"""A note where an alias is not the same quantity, or is easily taken for another."""


def alias_of(key: str, known: Collection[str]) -> str | None:
    """The alias that `key` ends with, the longest first, if what it stands for is one of the `known` keys or
    their sections.

    >>> alias_of("actor_rollout_ref.rollout.n", ["batch.group_size"])
    'rollout.n'
    """
    places = {place for each in known for place in (each, each.rpartition(".")[0])}
    parts = key.lower().split(".")
    endings = (".".join(parts[start:]) for start in range(len(parts)))
    return next((ending for ending in endings if ALIASES.get(ending) in places), None)


def nearest_keys(key: str, known: Collection[str], *, count: int = 3, least: float = 1.1) -> list[str]:
    """The dotted keys most like `key`, best first; a right last part in the wrong section counts as much
    as a right section with a misspelt last part. Likeness goes to 2 (equal); under `least` a key is left out.

    >>> nearest_keys("temperature", ["sampling.temperature", "eval.temperature", "seed"])
    ['eval.temperature', 'sampling.temperature']
    """

    def likeness(candidate: str) -> float:
        whole = SequenceMatcher(None, key, candidate).ratio()
        last = SequenceMatcher(None, key.rsplit(".", 1)[-1], candidate.rsplit(".", 1)[-1]).ratio()
        return whole + last

    scores = {candidate: likeness(candidate) for candidate in known}
    best = sorted(scores, key=lambda candidate: (-scores[candidate], candidate))[:count]
    return [candidate for candidate in best if scores[candidate] >= max(least, scores[best[0]] - 0.35)]


def unknown_key(key: str, known: Collection[str]) -> str:
    """The remedy that follows "unknown key": what another library calls so, the nearest keys, or those there are."""
    alias = alias_of(key, known)
    if alias is not None:
        unit = f" ({NOTES[alias]})" if alias in NOTES else ""
        ours = f"`{alias}` of verl, TRL or open-instruct is `{ALIASES[alias]}` here{unit}"
        others = [near for near in nearest_keys(key, known, least=1.5) if near != ALIASES[alias]]
        return f"{ours}; or did you mean {_either(others)}?" if others else ours
    # Or a name inside a misspelt mapping.
    near = nearest_keys(key, known) or nearest_keys(key.rpartition(".")[0], known, least=1.5)
    if near:
        return f"did you mean {_either(near)}?"
    top = sorted({candidate.split(".", 1)[0] for candidate in known})
    return f"nothing here is called like it; the top level has {', '.join(top)}"


def _either(keys: Collection[str]) -> str:
    return " or ".join(f"`{key}`" for key in keys)
