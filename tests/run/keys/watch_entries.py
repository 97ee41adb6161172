"""Watchers of the names in lists of mappings: datasets, graders, examples."""

from dapo_jax.config import GraderConfig, SourceConfig
from dapo_jax.config.data_schema import ExampleConfig
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
from tests.run.keys.watch_rewards import ALL_WRONG, PLAIN, RIGHT, WRONG, rewards
from tests.run.keys.watching import SEEN, watch

SCHEMAS = {
    "data.mixture": SourceConfig,
    "eval.datasets": SourceConfig,
    "data.few_shot": ExampleConfig,
    "reward.grader": GraderConfig,
}
MANY = {**MIXTURE, "dynamic_sampling.prompts_per_wave": 20, "dynamic_sampling.enabled": True}
SHOWN = {**IN_ORDER, "data.max_prompt_tokens": 40, "model.source": "chat_model"}


def notes(look):
    """The datasets with a skipped over-long prompt."""
    return [note.partition(":")[0] for note in look.run(prompts=None).notes if "longer" in note]


def of_other(look):
    """The number of prompts from the second dataset, of twenty."""
    return sum(text.endswith("+5") for text in look.texts())


def entry(key, name, see, *pairs, entry, others=(), also):
    """A watcher of a name in the entries of a list: the first entry is `entry` with the name, then come `others`."""
    values = [([{**entry, name: value}, *others], expected) for value, expected in pairs]
    return watch(key, see, *values, what=name, also=also)


def mixture(name, see, *pairs, entry_=TRAIN, others=(), also=MIXTURE):
    return entry("data.mixture", name, see, *pairs, entry=entry_, others=others, also=also)


def evaluated(name, see, *pairs, entry_=TRAIN):
    return entry("eval.datasets", name, see, *pairs, entry=entry_, also=IN_ORDER)


WATCHERS = [
    mixture("source", texts, ("jsonl", sums(1)), ("gsm8k", sums(3)), entry_=SUMS),
    mixture("path", first_text, (path("train"), "0+1"), (path("other"), "0+5")),
    mixture("source_options", texts, ({}, sums(1)), (OPTIONS, ["1+0", "1+1", "1+2"])),
    mixture("split", first_text, ("train[:1]", "0+1"), ("train[2:]", "2+1")),
    mixture("weight", of_other, (1.0, SEEN), (4.0, SEEN), others=[OTHER], also=MANY),
    mixture("name", notes, ("", ["long"]), ("mine", ["mine"]), entry_=LONG),
    evaluated("source", held_out, ("jsonl", {"sums": sums(1)}), ("gsm8k", {"gsm8k": sums(3)}), entry_=SUMS),
    evaluated(
        "path", held_out, (path("other"), {"other": sums(5)}), (path("test"), {"test": ["7+1", "8+1"]})
    ),
    evaluated(
        "source_options",
        held_out,
        ({}, {"train": sums(1, 4)}),
        (OPTIONS, {"train": ["1+0", "1+1", "1+2", "1+3"]}),
    ),
    evaluated("split", held_out, ("train[:1]", {"train": ["0+1"]}), ("train[3:]", {"train": ["3+1"]})),
    # An evaluation uses all prompts of a dataset, so a weight is refused.
    evaluated("weight", refusal(held_out), (1.0, ""), (2.0, "ConfigError")),
    evaluated("name", lambda look: list(held_out(look)), ("", ["train"]), ("mine", ["mine"])),
    entry(
        "data.few_shot",
        "prompt",
        first_text,
        ("2+3", "2+3=5\n\n0+1"),
        ("4+1", "4+1=5\n\n0+1"),
        entry={"response": "=5"},
        also=SHOWN,
    ),
    entry(
        "data.few_shot",
        "response",
        first_text,
        ("=5", "2+3=5\n\n0+1"),
        (":5", "2+3:5\n\n0+1"),
        entry={"prompt": "2+3"},
        also=SHOWN,
    ),
    entry("reward.grader", "grader", rewards, ("exact", RIGHT), ("dapo", WRONG), entry={}, also=ALL_WRONG),
    entry(
        "reward.grader",
        "weight",
        rewards,
        (1.0, RIGHT),
        (2.0, [2, -2, 2, -2]),
        entry={"grader": "exact"},
        also=PLAIN,
    ),
]
