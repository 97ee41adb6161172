"""The section `data`: the datasets, and the text around their questions. Imports no jax."""

from dataclasses import dataclass
from datetime import date
from pathlib import PurePath
from typing import Any

from dapo_jax.config.keys import POSITIVE, SIZE, key, refuse
from dapo_jax.config.section import Section, entries

TEMPLATES = {
    "dapo": (
        "Solve the following math problem step by step. The last line of your response should be of the form Answer: $Answer "
        "(without quotes) where $Answer is the answer to the problem.\n\n{prompt}\n\n"
        'Remember to put your answer on its own line after "Answer:".'
    )
}
"""Prompt templates by name. `dapo`: the instructions of the DAPO recipe, word by word."""


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
    """Empty: `train` in a mixture, `test` for evaluation, or the only split."""
    weight: float = key(1.0, range=POSITIVE)
    """Share of the mixture's prompts, relative to the other weights."""
    name: str = ""
    """Name in its metrics; empty: the source, and for `jsonl` the file."""

    @property
    def title(self) -> str:
        """The name in its metrics."""
        return self.name or (PurePath(self.path).stem if self.source == "jsonl" else self.source)


@dataclass(frozen=True, kw_only=True)
class ExampleConfig:
    """An entry of `data.few_shot`."""

    prompt: str
    """A question, like the prompt of a row."""
    response: str
    """The answer to show for it."""


@dataclass(frozen=True, kw_only=True)
class DataConfig(Section, at="data"):
    """The source of prompts."""

    source: str = key("arithmetic", not_empty=True, aliases="train_files dataset_name")
    """A dataset builder of `dapo_jax.data.builders`: arithmetic, one_digit_arithmetic and guess_number generate their rows; dapo_math_17k,
    aime_2024, gsm8k, math_500 and jsonl (any file) read them from `path`. `reasoning_gym:TASK` for generated questions of the package
    reasoning-gym; `mixture`; `rows` when rows are passed from Python."""
    path: str = ""
    """The parquet or JSON-lines file of the source, or a folder of files. Prepared at first use, then cached."""
    source_options: dict[str, Any] = key(default_factory=dict)
    """Options of the dataset. For jsonl the fields: {prompt: question, answer: solution}. For a reasoning_gym task its options, such as {min_words: 3, max_words: 5}."""
    mixture: list[dict[str, Any]] = key(default_factory=list)
    """The datasets of `data.source: mixture`: {source: ..., path: ..., weight: 1} for each dataset; see `SourceConfig`."""
    on_bad_row: str = key("error", choices=["error", "skip"])
    """Action for a row of a file with a missing or invalid field: error, or skip (left out, counted, logged)."""
    deduplicate: bool = True
    """Keep only the first row of a file with the same question; the number of dropped rows is logged."""
    train_split: str = key("train", not_empty=True)
    """Split to train on; a part of it is written `train[:100]`."""
    eval_split: str = key("test", not_empty=True)
    """Split to evaluate on, unless `eval.datasets` names datasets."""
    data_dir: str = key("~/.cache/dapo_jax/datasets", may_change=True)
    """Folder of prepared datasets."""
    prompt_template: str = "{prompt}"
    """Text of the prompt, with `{prompt}` for the row's question. For messages: text of the last user message. `dapo`: the
    instructions of the DAPO recipe."""
    few_shot: list[dict[str, str]] = key(default_factory=list)
    """Examples before the question, {prompt: ..., response: ...} each: as text, separated by empty lines, or as the first turns of a conversation."""
    chat: bool = False
    """Ask plain questions as a user's message, through the model's chat template. Rows with messages always use it."""
    system_prompt: str = ""
    """The system message before all messages; empty: the row's or the chat template's own."""
    chat_template_kwargs: dict[str, Any] = key(default_factory=dict, aliases="apply_chat_template_kwargs")
    """Further variables of the chat template: {enable_thinking: false} for Qwen3."""
    template_date: str = ""
    """The day that a chat template prints as today's date, such as 2024-07-26 (the time is midnight). Empty: the day on
    which a run begins; its config.yaml keeps it, for `--resume` and for later evaluation, sampling and serving."""
    shuffle: bool = True
    """Shuffle each epoch differently, by the run's seed."""
    max_prompt_tokens: int = key(2048, range=SIZE, aliases="max_prompt_length max_prompt_token_length")
    """Longest prompt, including the chat template. A longer prompt is left out of training and counted, because a truncated one would be another
    question; in evaluation it is an error. (Section 4.1)"""

    def check_together(self) -> None:
        if "{prompt}" not in self.prompt_template and self.prompt_template not in TEMPLATES:
            needs = f"{{prompt}} in it, or the name of a template: {', '.join(TEMPLATES)}"
            remedy = "put {prompt} where the question goes: without it every prompt would be the same text"
            self.refuse("prompt_template", needs, remedy)
        entries("data.few_shot", self.few_shot, ExampleConfig)
        entries("data.mixture", self.mixture, SourceConfig)
        if (self.source == "mixture") != bool(self.mixture):
            remedy = f"data.source is {self.source!r}: set data.source=mixture, or leave data.mixture out"
            self.refuse("mixture", "datasets with data.source = 'mixture', and none otherwise", remedy)
        try:
            date.fromisoformat(self.template_date or "2024-07-26")
        except ValueError:
            self.refuse("template_date", "a day as YEAR-MONTH-DAY", "write one such as 2024-07-26")
        for name in ("messages", "add_generation_prompt", "today", "strftime_now"):
            if name in self.chat_template_kwargs:
                key, value = f"data.chat_template_kwargs.{name}", self.chat_template_kwargs[name]
                refuse(key, value, "another name", "this one is set for every prompt: remove it")
