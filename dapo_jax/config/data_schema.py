"""The section `data`: where prompts come from and what is put around them. Imports no jax."""

from dataclasses import dataclass
from datetime import date
from pathlib import PurePath
from typing import Any

from dapo_jax.config.keys import POSITIVE, SIZE, key
from dapo_jax.config.prompt_templates import TEMPLATES
from dapo_jax.config.section import Section, entries
from dapo_jax.config.values import refuse


@dataclass(frozen=True, kw_only=True)
class SourceConfig:
    """One dataset of several: an entry of `data.mixture` or `eval.datasets`."""

    source: str = key(not_empty=True)
    """The dataset, named like `data.source`."""
    path: str = ""
    """The files, named like `data.path`."""
    source_options: dict[str, Any] = key(default_factory=dict)
    """Options of the dataset, like `data.source_options`."""
    split: str = ""
    """Empty: `train` in a mixture, `test` for evaluation, or the only split there is."""
    weight: float = key(1.0, range=POSITIVE)
    """Its share of the prompts that a mixture draws, beside the other weights."""
    name: str = ""
    """Names its metrics; empty: the source, and for `jsonl` the file."""

    @property
    def title(self) -> str:
        """The name of its metrics."""
        return self.name or (PurePath(self.path).stem if self.source == "jsonl" else self.source)


@dataclass(frozen=True, kw_only=True)
class ExampleConfig:
    """An entry of `data.few_shot`."""

    prompt: str
    """The question, as a row would have it."""
    response: str
    """The answer that is shown to it."""


@dataclass(frozen=True, kw_only=True)
class DataConfig(Section, at="data"):
    """Where prompts come from."""

    source: str = key("arithmetic", not_empty=True, aliases=["train_files", "dataset_name"])
    """A dataset builder of `dapo_jax.data.builders`: arithmetic, one_digit_arithmetic and guess_number make their rows up; dapo_math_17k,
    aime_2024, gsm8k, math_500 and jsonl (any file) read them from `path`. `reasoning_gym:TASK` for questions that the package
    reasoning-gym makes up; `mixture`; `rows` when rows are passed from Python."""
    path: str = ""
    """The parquet or JSON-lines file that the source is read from, or a folder of them. Prepared at first use, then cached."""
    source_options: dict[str, Any] = key(default_factory=dict)
    """Options of the dataset. For jsonl the fields {prompt: question, answer: solution}. For a reasoning_gym task its own, such as {min_words: 3, max_words: 5}."""
    mixture: list[dict[str, Any]] = key(default_factory=list)
    """The datasets of `data.source: mixture`: {source: ..., path: ..., weight: 1} for each dataset; see `SourceConfig`."""
    on_bad_row: str = key("error", choices=["error", "skip"])
    """A row of a file without what it needs: error, or skip (left out, counted, said)."""
    deduplicate: bool = True
    """Keep the first of a file's rows that ask the same; how many were dropped is said."""
    train_split: str = key("train", not_empty=True)
    """Trained on; a part of it is written `train[:100]`."""
    eval_split: str = key("test", not_empty=True)
    """Evaluated on unless `eval.datasets` names others."""
    data_dir: str = key("~/.cache/dapo_jax/datasets", may_change=True)
    """Where prepared datasets are kept."""
    prompt_template: str = "{prompt}"
    """Text of the prompt; `{prompt}` stands for the row's question. Of messages: text of the last user message. `dapo`: the
    instructions of the DAPO recipe."""
    few_shot: list[dict[str, str]] = key(default_factory=list)
    """Examples shown before the question, {prompt: ..., response: ...} each: as text, or in a conversation as its first turns."""
    few_shot_separator: str = "\n\n"
    """Between examples and question where they are text."""
    chat: bool = False
    """Ask plain questions as a user's message, through the model's chat template. Rows that hold messages do anyway."""
    system_prompt: str = ""
    """The system message that messages begin with; empty: none but the row's or the chat template's own."""
    chat_template_kwargs: dict[str, Any] = key(default_factory=dict, aliases=["apply_chat_template_kwargs"])
    """Further variables of the chat template: {enable_thinking: false} for Qwen3."""
    template_date: str = ""
    """The day that a chat template prints which asks for today's date, such as 2024-07-26 (the time is midnight). Empty: the day on
    which a run begins; its config.yaml keeps it, for `--resume` and for what evaluates, samples or serves the run later."""
    shuffle: bool = True
    """Shuffle each epoch anew by the run's seed."""
    max_prompt_tokens: int = key(2048, range=SIZE, aliases=["max_prompt_length", "max_prompt_token_length"])
    """A longer prompt, chat template and all, is left out of training and counted, for truncating it would ask another
    question; in evaluation it is an error. (Section 4.1)"""

    def check_together(self) -> None:
        """Checks what its values say about each other."""
        if "{prompt}" not in self.prompt_template and self.prompt_template not in TEMPLATES:
            refuse(
                "data.prompt_template",
                self.prompt_template,
                f"{{prompt}} in it, or the name of a template: {', '.join(TEMPLATES)}",
                "put {prompt} where the question goes: without it every prompt would be the same text",
            )
        check_source("data", self.source, self.source_options)
        entries("data.few_shot", self.few_shot, ExampleConfig)
        for part in entries("data.mixture", self.mixture, SourceConfig):
            check_source("data.mixture[]", part.source, part.source_options)
        if (self.source == "mixture") != bool(self.mixture):
            refuse(
                "data.mixture",
                self.mixture,
                "datasets with data.source = 'mixture', and none otherwise",
                f"data.source is {self.source!r}: set data.source=mixture, or leave data.mixture out",
            )
        if self.mixture and self.path:
            refuse(
                "data.path",
                self.path,
                "nothing beside data.mixture",
                "write the path into the entry of the dataset",
            )
        try:
            proper = (
                not self.template_date
                or date.fromisoformat(self.template_date).isoformat() == self.template_date
            )
        except ValueError:
            proper = False
        if not proper:
            refuse(
                "data.template_date",
                self.template_date,
                "a day as YEAR-MONTH-DAY, or nothing",
                "write one such as 2024-07-26",
            )
        for name in ("messages", "add_generation_prompt", "today", "strftime_now"):
            if name in self.chat_template_kwargs:
                key = f"data.chat_template_kwargs.{name}"
                refuse(
                    key,
                    self.chat_template_kwargs[name],
                    "another name",
                    "this one is set for every prompt: remove it",
                )


def check_source(key: str, source: str, options: dict[str, Any]) -> None:
    """Refuses options of a dataset that takes none; `key` is that of the section or of the entry."""
    if options and source != "jsonl" and not source.startswith("reasoning_gym:"):
        refuse(
            f"{key}.source_options",
            options,
            f"{key}.source = 'jsonl' or of the form reasoning_gym:TASK",
            f"{source!r} takes no options: leave the key out",
        )
