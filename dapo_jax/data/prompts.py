"""Creates prompts from rows. Every host can compute the prompt at any position in the run.

A prompt's `ordinal` is its position in the run's sequence of prompts. `PromptSource` is a pure function of
(rows, seed, ordinal), so the state of the data pipeline is a single integer, the ordinal of the next prompt.
A checkpoint stores this integer. With H hosts, host h uses the ordinals h, h + H, h + 2H, ...
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Int32, Int64

from dapo_jax.dapo.rollouts import Prompt
from dapo_jax.data.rows import place_of
from dapo_jax.text.formatting import AS_IT_STANDS, PromptFormat
from dapo_jax.text.stop_strings import stop_ids, turn_end
from dapo_jax.text.thoughts import opening, without_thoughts
from dapo_jax.text.tokenizers import Tokenizer

if TYPE_CHECKING:
    import grain


class PromptSource:
    """An endless sequence of prompts with random access: `source[ordinal]` for any ordinal >= 0."""

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
        """Determines the order of the rows without loading any row.

        Args:
            rows: mappings with a `prompt` and an `answer`, from `load_rows` or `checked_rows`.
            tokenizer: tokenizes the prompt's text.
            seed, shuffle, weights: see `row_order`.
            max_prompt_tokens: maximum number of tokens in a prompt, including the template.
            prompt_format: adds the template text to a row's question.
            parts: for each dataset of a mixture, its indices in `rows`. Rows without an index are not used. If empty, all rows form one dataset.

        Raises:
            ValueError: there are no rows.
        """
        self.prompt_format = prompt_format
        parts = parts or [range(len(rows))]
        self._order = row_order(parts, weights=weights, seed=seed, shuffle=shuffle)
        self._prompt = partial(_prompt, rows, tokenizer, prompt_format, max_prompt_tokens)
        self.rows_per_epoch = sum(len(part) for part in parts)
        """Number of rows in use. With one dataset, ordinal o is in epoch o // rows_per_epoch."""

    def stream(self, start: int, *, stride: int, ahead: int) -> Iterator[Prompt]:
        """Yields the prompts at start, start + stride, ... Threads load and tokenize up to `ahead` prompts in advance."""
        import grain  # imported only if used, because it takes more than a second

        options = grain.ReadOptions(num_threads=2, prefetch_buffer_size=ahead)
        return iter(self._order.map_with_index(self._prompt)[start::stride].to_iter_dataset(options))

    def row_index(self, ordinal: int) -> int:
        """Returns the index of the row for the prompt at `ordinal`."""
        index = self._order[ordinal]
        assert index is not None  # Grain returns None only for filtered rows
        return index

    def __getitem__(self, ordinal: int) -> Prompt:
        """Returns the prompt at `ordinal` >= 0. Raises ValueError if it is longer than `max_prompt_tokens` or cannot be tokenized."""
        return self._prompt(ordinal, self.row_index(ordinal))


def row_order(
    parts: Sequence[Sequence[int]], *, weights: Sequence[float] = (), seed: int, shuffle: bool
) -> "grain.MapDataset[int]":
    """Returns the endless order in which rows are used: `order[place]` is the index of the row at position `place` >= 0.

    With one part, position p is in epoch p // len(part), and each epoch visits every row once. With `shuffle`, the order of an
    epoch depends on the seed and the epoch number. With several parts, each part has its own epochs. In any n consecutive
    positions, a part's share matches its weight to within one or two rows. The sequence of parts depends only on the weights.

    Args:
        parts: the row indices of each dataset. Raises ValueError if one is empty.
        weights: one weight per part. If empty, all parts have equal weights.
        seed: determines every epoch of every part.
        shuffle: whether to visit a part's rows in a new random order in each epoch. If false, the given order is used.
    """
    import grain  # imported only if used, because it takes more than a second

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
) -> tuple[Int64[np.ndarray, " rows"], list[bytes], list[bytes]]:
    """Returns each row's prompt length in tokens, a hash of each row's prompt tokens and grader fields, and its `question_digest`.

    Raises ValueError if a prompt cannot be tokenized.
    """
    lengths, digests, questions = [], [], []
    for index in range(len(rows)):
        row = rows[index]
        _, tokens = _encoded(row, tokenizer, index, prompt_format)
        lengths.append(len(tokens))
        questions.append(question_digest(tokens, row["answer"]))
        # Excludes a row's position in its file from the hash, because it does not affect training.
        seen = {name: row[name] for name in sorted(row) if name != "source_row"}
        content = json.dumps(seen, default=_plain, skipkeys=True).encode()
        digests.append(hashlib.sha256(tokens.tobytes() + content).digest())
    return np.array(lengths, np.int64), digests, questions


def question_digest(tokens: Int32[np.ndarray, " prompt"], answer: str) -> bytes:
    """Returns a hash of a prompt's tokens and its answer."""
    content = tokens.astype(np.int32).tobytes() + answer.encode("utf-8", "surrogatepass")
    return hashlib.blake2b(content, digest_size=8).digest()


def _plain(value: object) -> Any:
    """Converts values that JSON does not support: arrays to lists, bytes to hex text, and other objects to the name of their type."""
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
    """Returns evaluation prompts for the first `limit` rows, or for all rows if `limit` is 0. Their order is the order of the rows, with ordinals 0, 1, ...

    Raises:
        ValueError: a prompt is too long.
    """
    prompt = partial(_prompt, rows, tokenizer, prompt_format, max_prompt_tokens)
    return [prompt(index, index) for index in range(limit or len(rows))]


def _prompt(
    rows: Sequence[Mapping[str, Any]],
    tokenizer: Tokenizer,
    prompt_format: PromptFormat,
    max_prompt_tokens: int,
    ordinal: int,
    index: int,
) -> Prompt:
    row = rows[index]
    text, tokens = _encoded(row, tokenizer, index, prompt_format)
    if not 0 < len(tokens) <= max_prompt_tokens:
        raise ValueError(
            f"{place_of(row, index)}: the prompt has {len(tokens)} tokens; a prompt needs 1 to data.max_prompt_tokens={max_prompt_tokens}: "
            f"raise data.max_prompt_tokens or remove the row. The prompt begins with {text[:60]!r}"
        )
    is_plain = prompt_format.is_plain(row["prompt"])
    return Prompt(ordinal=ordinal, tokens=tokens, text=text, answer=row["answer"], row=row, is_plain=is_plain)


def _encoded(
    row: Mapping[str, Any], tokenizer: Tokenizer, index: int, prompt_format: PromptFormat
) -> tuple[str, Int32[np.ndarray, " prompt"]]:
    try:
        return prompt_format.encode(row["prompt"], tokenizer)
    except ValueError as error:
        raise ValueError(f"{place_of(row, index)}: {error}") from error


class PromptStream:
    """The prompts of host h among H hosts, with ordinals h, h + H, h + 2H, ... Threads load and tokenize prompts before the sampler needs them."""

    def __init__(self, source: PromptSource, *, hosts: int = 1, ahead: int = 128) -> None:
        """Creates the stream for one of `hosts` hosts, without loading any row. Up to `ahead` prompts are tokenized in advance."""
        self._source, self._hosts, self._ahead = source, hosts, ahead
        self._next, self._prompts = -ahead, iter(list[Prompt]())

    def at(self, ordinal: int) -> Prompt:
        """Returns the prompt at `ordinal`, with the errors of `PromptSource`. Threads then prepare the prompts that follow."""
        if not self._next <= ordinal < self._next + self._ahead:
            self._next = ordinal
            self._prompts = self._source.stream(ordinal, stride=self._hosts, ahead=self._ahead)
        for _ in range(self._next, ordinal, self._hosts):
            next(self._prompts)  # prompts that rest
        prompt = next(self._prompts)
        self._next = ordinal + self._hosts
        return prompt


class PairSource:
    """An endless sequence of supervised pairs for a warm start, with random access: `source[i]` for any i >= 0.

    Pair i has the prompt at ordinal i, and one demonstration from the same row. It ends with `turn_end` if the prompt is a conversation,
    otherwise with `eos_id`, or with another end token if its text spells one at its end. A row's demonstrations are its `responses`, or its
    single `response`. Only (seed, i) decides which one is chosen.
    """

    def __init__(
        self, prompts: PromptSource, tokenizer: Tokenizer, *, seed: int, max_response_tokens: int
    ) -> None:
        """Stores the source of the prompts. `max_response_tokens` includes the end token."""
        self._prompts, self._tokenizer, self._seed = prompts, tokenizer, seed
        self._max_response_tokens, self._turn_end = max_response_tokens, turn_end(tokenizer)
        self._ends = stop_ids(tokenizer)

    def __getitem__(self, i: int) -> tuple[Int32[np.ndarray, " prompt"], Int32[np.ndarray, " response"]]:
        """Returns the tokens of pair `i`: the prompt, and the response with the end token.

        Raises ValueError if the row has no demonstration, a text is too long or cannot be tokenized, or the response contains an end token before its end
        or does not fit the thoughts that the prompt opens.
        """
        prompt = self._prompts[i]
        where = place_of(prompt.row, self._prompts.row_index(i))
        choices = _demonstrations(prompt.row, where)
        text = choices[int(np.random.default_rng([self._seed, i]).integers(len(choices)))]
        is_turn = self._prompts.prompt_format.data.chat or not isinstance(prompt.row["prompt"], str)
        end = self._turn_end if is_turn else self._tokenizer.eos_id
        try:
            response = self._tokenizer.encode(text, prompt.tokens)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
        mark = opening(prompt.text)
        if mark and (text.lstrip().startswith(mark) or not without_thoughts(text, prompt.text).strip()):
            raise ValueError(
                f"{where}: the prompt ends with {mark!r}, so the response must not begin with it again, and must end the thoughts before its answer; it is {text!r:.80}. "
                "Change it, or set data.chat_template_kwargs so that the prompt opens no thoughts, such as {enable_thinking: false}"
            )
        ended = np.flatnonzero(np.isin(response, self._ends))
        if not len(ended):
            response = np.append(response, np.int32(end))
        elif (at := int(ended[0])) < (last := len(response) - 1):
            raise ValueError(
                f"{where}: the response has the end token {response[at]} at position {at} of {last}, so the tokens after it could never be sampled; remove them"
            )
        if (count := len(response)) > self._max_response_tokens:
            raise ValueError(
                f"{where}: the response and its end token have {count} tokens, more than "
                f"max_response_tokens={self._max_response_tokens}; raise it or remove the row"
            )
        return prompt.tokens, response


DEMONSTRATIONS = ("response", "responses")
"""The fields of a row that may have its demonstrations."""


def _demonstrations(row: Mapping[str, Any], where: str) -> Sequence[str]:
    choices = row["responses"] if "responses" in row else [row["response"]] if "response" in row else []
    if isinstance(choices, str) or not choices or not all(isinstance(choice, str) for choice in choices):
        raise ValueError(
            f"{where} needs a demonstration, either 'responses' (a list of strings) or 'response' (a string); "
            f"its fields are {sorted(map(str, row))}"
        )
    return choices
