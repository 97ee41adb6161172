"""Turns rows into prompts, in an order that any host can compute for any position in the run.

A prompt's `ordinal` is its position in the run's sequence of prompts. `PromptSource` is a pure function of
(rows, seed, ordinal), so the state of the data pipeline is one integer: the ordinal of the next prompt.
A checkpoint stores this integer; of H hosts, host h takes the ordinals h, h + H, h + 2H, ...
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Int32, Int64

from dapo_jax.dapo.rollouts import Prompt
from dapo_jax.data.rows import place_of
from dapo_jax.text.formatting import AS_IT_STANDS, PromptFormat
from dapo_jax.text.tokenizers import Tokenizer

if TYPE_CHECKING:
    import grain


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
        parts: Sequence[Sequence[int]] = (),
        weights: Sequence[float] = (),
    ) -> None:
        """Builds the order of the rows without reading one.

        Args:
            rows: mappings with a `prompt` and an `answer`, from `load_rows` or `checked_rows`.
            tokenizer: turns the prompt's text into tokens.
            seed: decides the order of every epoch.
            max_prompt_tokens: longest prompt that is accepted, including the template.
            prompt_format: the text around a row's question.
            shuffle: visit the rows in a new order each epoch; False: in their own order.
            parts: the indices in `rows` of each dataset of a mixture; empty: one dataset with all rows. Other rows are never used.
            weights: the sampling weight of each part; empty: equal weights.

        Raises:
            ValueError: there are no rows.
        """
        parts = parts or [range(len(rows))]
        self._order = row_order(parts, weights=weights, seed=seed, shuffle=shuffle)
        self._prompt = _maker(rows, tokenizer, prompt_format, max_prompt_tokens)
        self.rows_per_epoch = sum(len(part) for part in parts)
        """Number of rows in use; with one dataset, ordinal o is in epoch o // rows_per_epoch."""

    def stream(self, start: int, *, stride: int, ahead: int) -> Iterator[Prompt]:
        """Yields the prompts at start, start + stride, ...; threads read and tokenize up to `ahead` of them in advance."""
        import grain  # takes more than a second

        options = grain.ReadOptions(num_threads=2, prefetch_buffer_size=ahead)
        return iter(self._order.map_with_index(self._prompt)[start::stride].to_iter_dataset(options))

    def row_index(self, ordinal: int) -> int:
        """Returns the index of the row at `ordinal`."""
        index = self._order[ordinal]
        assert index is not None  # None is a filtered row in Grain, and nothing is filtered here
        return index

    def __getitem__(self, ordinal: int) -> Prompt:
        """Returns the prompt at `ordinal`, which is at least 0.

        Raises:
            ValueError: the row's prompt is longer than `max_prompt_tokens` or cannot be tokenized.
        """
        return self._prompt(ordinal, self.row_index(ordinal))


def row_order(
    parts: Sequence[Sequence[int]], *, weights: Sequence[float] = (), seed: int, shuffle: bool
) -> "grain.MapDataset[int]":
    """Returns the endless order of the rows: `order[place]` is the row at any place >= 0.

    With one part, place p is in epoch p // len(part), and an epoch visits each row once. With `shuffle`, its order depends
    on the seed and the epoch; otherwise it is the part's own. Of several parts each goes through its own epochs. Among any n
    places a part has its share of the weights, to within one or two. The choice of the part depends on the weights alone.

    Args:
        parts: the row numbers of each dataset.
        weights: one for each part; empty: equal weights.
        seed: decides every epoch of every part.
        shuffle: a new order each epoch.

    Raises:
        ValueError: a part has no rows.
    """
    import grain  # takes more than a second

    if not parts or not all(len(part) for part in parts):
        raise ValueError("there are no rows to sample from; the split or the list of rows is empty")
    orders = []
    for number, part in enumerate(parts):
        order = grain.MapDataset.source(part)
        if shuffle:
            order = order.seed(seed + number).shuffle()
        orders.append(order.repeat())
    return orders[0] if len(orders) == 1 else grain.MapDataset.mix(orders, list(weights) or None)


def measured_prompts(
    rows: Sequence[Mapping[str, Any]], tokenizer: Tokenizer, prompt_format: PromptFormat
) -> tuple[Int64[np.ndarray, " rows"], list[bytes]]:
    """Returns the number of tokens of each row's prompt, and a digest of its tokens and of the row that graders see.

    Raises:
        ValueError: a prompt cannot be tokenized.
    """
    lengths, digests = np.zeros(len(rows), np.int64), []
    for index in range(len(rows)):
        row = rows[index]
        _, tokens = _encoded(row, tokenizer, index, prompt_format)
        lengths[index] = len(tokens)
        # The place of a row in a file does not affect training.
        seen = {name: row[name] for name in sorted(row) if name != "source_row"}
        content = json.dumps(seen, default=_plain, skipkeys=True).encode()
        digests.append(hashlib.sha256(tokens.tobytes() + content).digest())
    return lengths, digests


def _plain(value: object) -> Any:
    """Replaces values that JSON lacks: arrays by lists, bytes by hex text, other objects by their type."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    return value.hex() if isinstance(value, bytes) else type(value).__name__


def held_out(
    rows: Sequence[Mapping[str, Any]],
    tokenizer: Tokenizer,
    *,
    max_prompt_tokens: int,
    prompt_format: PromptFormat = AS_IT_STANDS,
    limit: int = 0,
) -> list[Prompt]:
    """Returns the first `limit` rows (0: all) as prompts in their own order, with ordinals 0, 1, ...

    Raises:
        ValueError: a prompt is too long.
    """
    prompt = _maker(rows, tokenizer, prompt_format, max_prompt_tokens)
    return [prompt(index, index) for index in range(limit or len(rows))]


def _maker(
    rows: Sequence[Mapping[str, Any]],
    tokenizer: Tokenizer,
    prompt_format: PromptFormat,
    max_prompt_tokens: int,
) -> Callable[[int, int], Prompt]:
    """Returns a function of (ordinal, index of the row) that makes a prompt."""

    def prompt(ordinal: int, index: int) -> Prompt:
        row = rows[index]
        text, tokens = _encoded(row, tokenizer, index, prompt_format)
        if not 0 < len(tokens) <= max_prompt_tokens:
            raise ValueError(
                f"{place_of(row, index)}: the prompt has {len(tokens)} tokens, not 1 to data.max_prompt_tokens={max_prompt_tokens}; "
                f"raise data.max_prompt_tokens or drop the row. It begins {text[:60]!r}"
            )
        return Prompt(ordinal=ordinal, tokens=tokens, text=text, answer=row["answer"], row=row)

    return prompt


def _encoded(
    row: Mapping[str, Any], tokenizer: Tokenizer, index: int, prompt_format: PromptFormat
) -> tuple[str, Int32[np.ndarray, " prompt"]]:
    try:
        return prompt_format.encode(row["prompt"], tokenizer)
    except ValueError as error:
        raise ValueError(f"{place_of(row, index)}: {error}") from error


class PromptStream:
    """One host's share of a run's prompts: ordinals h, h + H, h + 2H, ... Threads read and tokenize them ahead of the sampler."""

    def __init__(self, source: PromptSource, *, hosts: int = 1, ahead: int = 128) -> None:
        """Opens the stream of one of `hosts` without reading a row; up to `ahead` prompts are tokenized ahead."""
        self._source, self._hosts, self._ahead = source, hosts, ahead
        self._next, self._prompts = -1, iter(list[Prompt]())

    def at(self, ordinal: int) -> Prompt:
        """Returns the prompt at `ordinal`; the next ones are then prepared.

        Raises:
            ValueError: its row cannot be turned into a prompt.
        """
        if ordinal != self._next:
            self._prompts = self._source.stream(ordinal, stride=self._hosts, ahead=self._ahead)
        prompt = next(self._prompts)
        self._next = ordinal + self._hosts
        return prompt


class PairSource:
    """Random access to an endless sequence of supervised pairs for a warm start: `source[i]` for any i >= 0.

    Pair i has the prompt at ordinal i, and one of its row's demonstrations with the end token. Demonstrations are the row's `responses`, or
    its single `response`; the choice depends on (seed, i) alone.
    """

    def __init__(
        self, prompts: PromptSource, tokenizer: Tokenizer, *, seed: int, max_response_tokens: int
    ) -> None:
        """Keeps the prompts; `max_response_tokens` includes the end token."""
        self._prompts, self._tokenizer, self._seed = prompts, tokenizer, seed
        self._max_response_tokens = max_response_tokens

    def __getitem__(self, i: int) -> tuple[Int32[np.ndarray, " prompt"], Int32[np.ndarray, " response"]]:
        """Returns the tokens of pair `i`: of the prompt, and of the response with the end token.

        Raises:
            ValueError: the row has no demonstration, or a text is too long or cannot be tokenized.
        """
        prompt = self._prompts[i]
        place = place_of(prompt.row, self._prompts.row_index(i))
        choices = _demonstrations(prompt.row, place)
        text = choices[int(np.random.default_rng([self._seed, i]).integers(len(choices)))]
        try:
            response = np.append(self._tokenizer.encode(text), np.int32(self._tokenizer.eos_id))
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from error
        if len(response) > self._max_response_tokens:
            raise ValueError(
                f"{place}: the response has {len(response) - 1} + 1 end token = {len(response)} tokens, "
                f"over max_response_tokens={self._max_response_tokens}; raise it or drop the row"
            )
        return prompt.tokens, response


def _demonstrations(row: Mapping[str, Any], place: str) -> Sequence[str]:
    choices = row["responses"] if "responses" in row else [row["response"]] if "response" in row else []
    if isinstance(choices, str) or not choices or not all(isinstance(choice, str) for choice in choices):
        raise ValueError(
            f"{place} needs a demonstration: 'responses', a list of strings, or 'response', a string; "
            f"its fields are {sorted(map(str, row))}"
        )
    return choices
