"""Rows become prompts, in an order that any host can compute for any place in the run.

A prompt's `ordinal` is its place in the run's sequence of prompts. `PromptSource` is a pure function of
(rows, seed, ordinal), so the whole state of the data pipeline is one integer: the ordinal of the next prompt.
A checkpoint stores that integer; hosts that share the work take ordinals h, h + H, h + 2H, ...
"""

import os
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from dapo_jax.data.chat import Message
from dapo_jax.data.formatting import AS_IT_STANDS, PromptFormat, checked_messages
from dapo_jax.data.reasoning_gym import PREFIX, reasoning_gym_rows
from dapo_jax.data.tokenizers import Tokenizer
from dapo_jax.rollouts import Prompt


class PromptSource:
    """Random access to an endless sequence of prompts: `source[ordinal]` for any ordinal >= 0."""

    def __init__(
        self,
        rows: Sequence[Mapping[str, Any]],
        tokenizer: Tokenizer,
        *,
        seed: int,
        max_prompt_tokens: int,
        prompt_format: PromptFormat = AS_IT_STANDS,
        shuffle: bool = True,
    ) -> None:
        """Builds the order of the rows; no row is read yet.

        Args:
            rows: mappings with a `prompt` and an `answer`, from `load_rows` or `checked_rows`.
            tokenizer: turns the prompt's text into tokens.
            seed: decides the order of every epoch.
            max_prompt_tokens: longest prompt that is accepted, with all that is put around the question.
            prompt_format: what is put around a row's question.
            shuffle: visit the rows in a new order each epoch; False: in their own order.

        Raises:
            ValueError: there are no rows, or the seed is negative.
        """
        from dapo_jax.data.order import row_order  # Grain takes more than a second to import

        self._rows = rows
        self._row_at = row_order(len(rows), seed=seed, shuffle=shuffle)
        self._tokenizer = tokenizer
        self._prompt_format = prompt_format
        self._max_prompt_tokens = max_prompt_tokens

    @property
    def rows_per_epoch(self) -> int:
        """Number of rows: ordinal o is in epoch o // rows_per_epoch."""
        return len(self._rows)

    def row_index(self, ordinal: int) -> int:
        """Which row is asked at `ordinal`.

        Raises:
            IndexError: the ordinal is negative.
        """
        if ordinal < 0:
            raise IndexError(f"ordinals count from 0; got {ordinal}")
        return self._row_at(ordinal)

    def __getitem__(self, ordinal: int) -> Prompt:
        """The prompt at `ordinal`.

        Raises:
            IndexError: the ordinal is negative.
            ValueError: the row's prompt is longer than `max_prompt_tokens` or cannot be tokenized.
        """
        index = self.row_index(ordinal)
        return make_prompt(
            self._rows[index],
            self._tokenizer,
            index=index,
            ordinal=ordinal,
            prompt_format=self._prompt_format,
            max_prompt_tokens=self._max_prompt_tokens,
        )


def held_out(
    rows: Sequence[Mapping[str, Any]],
    tokenizer: Tokenizer,
    *,
    max_prompt_tokens: int,
    prompt_format: PromptFormat = AS_IT_STANDS,
    limit: int = 0,
) -> list[Prompt]:
    """The first `limit` rows (0: all) as prompts in their own order, with ordinals 0, 1, ...

    Raises:
        ValueError: fewer than `limit` rows, or a prompt that is too long.
    """
    if not 0 <= limit <= len(rows):
        raise ValueError(f"asked for {limit} held-out prompts of {len(rows)} rows; give 0 for all of them")
    return [
        make_prompt(
            rows[index],
            tokenizer,
            index=index,
            ordinal=index,
            prompt_format=prompt_format,
            max_prompt_tokens=max_prompt_tokens,
        )
        for index in range(limit or len(rows))
    ]


def make_prompt(
    row: Mapping[str, Any],
    tokenizer: Tokenizer,
    *,
    index: int,
    ordinal: int,
    prompt_format: PromptFormat,
    max_prompt_tokens: int,
) -> Prompt:
    """The prompt of one row; `index`, the row's place among the rows, is only named in errors.

    Raises:
        ValueError: the prompt is longer than `max_prompt_tokens`, empty, or cannot be tokenized.
    """
    try:
        text, tokens = prompt_format.encode(row["prompt"], tokenizer)
    except ValueError as error:
        raise ValueError(f"row {index}: {error}") from error
    if not 0 < len(tokens) <= max_prompt_tokens:
        raise ValueError(
            f"row {index}: the prompt has {len(tokens)} tokens, not 1 to data.max_prompt_tokens={max_prompt_tokens}; "
            f"raise data.max_prompt_tokens or drop the row. It begins {text[:60]!r}"
        )
    return Prompt(ordinal=ordinal, tokens=tokens, text=text, answer=row["answer"], row=row)


def load_rows(
    source_name: str,
    split: str,
    data_dir: str | os.PathLike[str],
    options: Mapping[str, Any] = MappingProxyType({}),
) -> Sequence[Mapping[str, Any]]:
    """The rows of a dataset builder's split, text as `str`, read from disk on access; or those of a reasoning-gym task.

    A builder's dataset is prepared under `data_dir` at first use and found there afterwards. A task's questions are made
    up at each use, the same ones from the same options.

    Args:
        source_name: a module of `dapo_jax.data.builders`, or `reasoning_gym:TASK`.
        split: a split such as `train`, or a part of one: `train[:100]`.
        data_dir: folder of prepared datasets; `~` is expanded.
        options: of a task, see `reasoning_gym_rows`; a builder has none.

    Raises:
        ValueError: no builder, task or split of that name, or options that do not fit.
        RuntimeError: the dataset cannot be written to `data_dir`.
    """
    if source_name.startswith(PREFIX):
        return reasoning_gym_rows(source_name.removeprefix(PREFIX), split, options)
    if options:
        raise ValueError(f"dataset {source_name!r} takes no options; got {dict(options)}")
    from dapo_jax.data.builders import read_split  # loads TensorFlow Datasets

    return read_split(source_name, split, data_dir)


def checked_rows(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Rows given from Python, each with a `prompt` and an `answer`; other fields are kept as they are.

    A prompt is a string, or a list of messages with a `role` and a `content` each. An integer answer is turned into its decimal text.

    Raises:
        ValueError: no rows, or a field that is missing, empty or of another type; names the row and the field.
    """
    if not rows:
        raise ValueError('no rows were given; each is a mapping such as {"prompt": "1+1", "answer": "2"}')
    return [
        {**row, "prompt": _prompt_field(row, index), "answer": _answer_field(row, index)}
        for index, row in enumerate(rows)
    ]


def _prompt_field(row: Mapping[str, Any], index: int) -> str | list[Message]:
    value = _field(row, index, "prompt")
    if isinstance(value, str):
        return _not_empty(value, index, "prompt")
    try:
        return checked_messages(value)
    except ValueError as error:
        raise ValueError(f"row {index}: {error}") from error


def _answer_field(row: Mapping[str, Any], index: int) -> str:
    value = _field(row, index, "answer")
    # bool is an int to Python, but True is no answer that anybody meant to write as "True".
    if isinstance(value, int | np.integer) and not isinstance(value, bool):
        return str(int(value))
    if not isinstance(value, str):
        raise ValueError(
            f"row {index}: 'answer' must be a string or an integer; got {value!r} ({type(value).__name__})"
        )
    return _not_empty(value, index, "answer")


def _field(row: Mapping[str, Any], index: int, name: str) -> Any:
    if not isinstance(row, Mapping):
        raise ValueError(
            f"row {index} is a {type(row).__name__}; a row is a mapping with 'prompt' and 'answer'"
        )
    if name not in row:
        raise ValueError(f"row {index} has no field {name!r}; its fields are {sorted(map(str, row))}")
    return row[name]


def _not_empty(value: str, index: int, name: str) -> str:
    if not value.strip():
        raise ValueError(f"row {index}: {name!r} is empty; drop the row or fill the field")
    return value
