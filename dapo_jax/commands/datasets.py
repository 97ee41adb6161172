"""Prepares and shows datasets, without loading weights."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dapo_jax.config import ConfigError, DataConfig, ModelConfig
from dapo_jax.config.keys import prefixed
from dapo_jax.data.prompts import measured_prompts
from dapo_jax.data.sources import prepared_folder
from dapo_jax.rewards.graders import UNREAD_BY
from dapo_jax.run.prompt_sets import every_split, with_template_date
from dapo_jax.run.sources import folder_of, source_of
from dapo_jax.terminal import visible
from dapo_jax.text.formatting import PromptFormat
from dapo_jax.text.tokenizers import ByteTokenizer, Tokenizer, load_tokenizer

SHOWN = 5
"""Maximum number of reference answers to show per grader that the grader cannot parse."""

_QUANTILES = {"min": 0.0, "median": 0.5, "p95": 0.95, "p99": 0.99, "max": 1.0}


def prepare(data: DataConfig) -> str:
    """Prepares the dataset if needed. Returns a report with the number of rows, the rows left out, and the reference answers that graders cannot parse. Raises
    ConfigError if the dataset cannot be loaded. The message names the file and line of an invalid row."""
    splits = every_split(data)
    lines = []
    for split, rows in splits.items():
        lines.append(f"{split}: {rows.note or f'{data.source}: {len(rows):,} prompts'}")
        if rows.note:  # only datasets from files have notes, and only their references may be unparsable
            lines += [f"{split}: {line}" for line in _unread_references(rows)]
    return visible("\n".join([*lines, f"stored in {prepared_folder()}"]) + "\n")


def _unread_references(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns one line for each grader that cannot fully parse every reference answer. The line quotes the first such answers."""
    lines = []
    for grader, unread_by in UNREAD_BY.items():
        unread = [row for row in rows if row.get("answer") and unread_by(row["answer"])]
        if unread:
            first = ", ".join(f"{row['answer']!r:.60} ({row['source_row']})" for row in unread[:SHOWN])
            more = ", ..." if len(unread) > SHOWN else ""
            lines.append(f"{len(unread):,} references that {grader} cannot parse completely: {first}{more}")
    return lines


def show(data: DataConfig, *, split: str = "", model: str = "", count: int = 3) -> str:
    """Returns text with the number and lengths of the prompts in a split, and the first `count` prompts as a model receives them.

    `split` defaults to `train`, or to the first split if there is no split `train`. `model` is a `model.source`, whose tokenizer and chat template are used. If it is
    empty, prompts are tokenized as bytes. Raises ConfigError if there is no such dataset, split or model, or a prompt cannot be tokenized.
    """
    data = with_template_date(data)
    splits = every_split(data)
    split = split or ("train" if "train" in splits else next(iter(splits)))
    if split not in splits:
        raise ConfigError(f"--split: found {split!r}, needs a split of {data.source}: {', '.join(splits)}")
    rows = splits[split]
    tokenizer: Tokenizer = ByteTokenizer()
    if model:
        with prefixed(f"--model {model!r}"):
            source = source_of(ModelConfig(source=model))
            folder = folder_of(source.base, weights=False)
            tokenizer = load_tokenizer(source.tokenizer or folder, folder)
    with prefixed(f"data.source={data.source!r}, split {split!r}"):
        lengths, *_ = measured_prompts(rows, tokenizer, PromptFormat(data))
        shown = [(row, *PromptFormat(data).encode(row["prompt"], tokenizer)) for row in rows[: max(0, count)]]
    unit = "tokens" if model else "bytes"
    # With a limit of this many tokens, at least this share of the prompts is kept.
    found = {name: np.quantile(lengths, share, method="higher") for name, share in _QUANTILES.items()}
    marks = " ".join(f"{name} {length}" for name, length in found.items())
    lines = [
        rows.note or f"{data.source}: {len(rows):,} prompts",
        f"split {split} (of {', '.join(splits)}): {len(rows):,} prompts",
        f"prompt length in {unit}{f' of {model}' if model else ''}: {marks}",
    ]
    for row, text, tokens in shown:
        where = f"{row['source_row']}, " if "source_row" in row else ""
        lines += ["", f"--- {where}{len(tokens)} {unit}, answer {row['answer']!r}", text]
    return visible("\n".join(lines) + "\n")
