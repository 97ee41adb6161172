"""Watchers of the names in the lists of datasets. The watchers of `data.few_shot` and `reward.grader` have the names in their lists."""

from tests.run.keys.looking import refusal
from tests.run.keys.watch_data import (
    IN_ORDER,
    LONG,
    MIXTURE,
    OPTIONS,
    OTHER,
    SUMS,
    TRAIN,
    first_text,
    held_out,
    path,
    sums,
    texts,
)
from tests.run.keys.watching import SEEN, watch

MANY = {**MIXTURE, "dynamic_sampling.prompts_per_wave": 20, "dynamic_sampling.enabled": True}


def notes(look):
    """The datasets with a skipped over-long prompt."""
    return [note.partition(":")[0] for note in look.run(prompts=None).notes if "longer" in note]


def of_other(look):
    """The number of prompts from the second dataset, of twenty."""
    return sum(text.endswith("+5") for text in look.texts())


def entry(key, name, see, *pairs, first=TRAIN, others=(), also=MIXTURE):
    """A watcher of a name in the entries of a list: the first entry is `first` with the name, then come `others`."""
    values = [([{**first, name: value}, *others], expected) for value, expected in pairs]
    return watch(key, see, *values, what=name, also=also)


WATCHERS = [
    entry("data.mixture", "source", texts, ("jsonl", sums(1)), ("gsm8k", sums(3)), first=SUMS),
    entry("data.mixture", "path", first_text, (path("train"), "0+1"), (path("other"), "0+5")),
    entry("data.mixture", "source_options", texts, ({}, sums(1)), (OPTIONS, ["1+0", "1+1", "1+2"])),
    entry("data.mixture", "split", first_text, ("train[:1]", "0+1"), ("train[2:]", "2+1")),
    entry("data.mixture", "weight", of_other, (1.0, SEEN), (4.0, SEEN), others=[OTHER], also=MANY),
    entry("data.mixture", "name", notes, ("", ["long"]), ("mine", ["mine"]), first=LONG),
    # An evaluation uses all prompts of a dataset, so a weight is refused.
    entry("eval.datasets", "weight", refusal(held_out), (1.0, ""), (2.0, "ConfigError"), also=IN_ORDER),
    entry(
        "eval.datasets",
        "name",
        lambda look: list(held_out(look)),
        ("", ["train"]),
        ("mine", ["mine"]),
        also=IN_ORDER,
    ),
]
