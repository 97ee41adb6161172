"""Test doubles for code that samples or trains: an engine that follows a script, and a small decoder that compiles in a second."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Int, PRNGKeyArray, PyTree

from dapo_jax.models.decoder import end_parameters
from dapo_jax.models.presets import DecoderConfig
from dapo_jax.models.tensors import shapes_of
from dapo_jax.sampling.cache_sizes import PageSizes, slot_pages
from dapo_jax.sampling.decoding import Decoding
from dapo_jax.sampling.interface import Insertion, ResultTokens

Script = Callable[[int, int], Sequence[int]]
"""A function from the ordinal of the prompt and the index of the response in its group to the tokens of the response."""


@dataclass(frozen=True, kw_only=True)
class ScriptedSlot:
    """One slot and its progress through the script."""

    tokens: tuple[int, ...]
    """The complete response, truncated at its length limit."""
    drawn: int = 0

    @property
    def live(self) -> bool:
        return self.drawn < len(self.tokens)


FREE = ScriptedSlot(tokens=())


class ScriptedEngine:
    """Implements `sampling.interface.Engine` without a model: every response comes from `script`.

    A response ends at its first end token or at its length limit. The log-probability of a token is its negated id, so that tests can
    check that tokens and log-probabilities stay aligned.

    >>> engine = ScriptedEngine(lambda ordinal, index: [ordinal, index, 1], slots=4, capacity=32)
    """

    def __init__(
        self,
        script: Script,
        *,
        slots: int,
        capacity: int,
        steps_per_call: int = 4,
        stop_ids: Sequence[int] = (1,),
        page_sizes: PageSizes | None = None,
        feed_tokens: int = 0,
    ) -> None:
        """Creates an engine whose responses have the tokens that `script` returns. For the sizes, see `sampling.engine_spec.EngineSpec`.

        Args:
            page_sizes: sizes of the pages in the KV cache. None: room for `capacity` tokens in every slot.
            feed_tokens: maximum number of new context tokens to feed to a resumed response. In this engine, feeding costs no decoding step.
        """
        self.slots, self.capacity, self.stop_ids = slots, capacity, tuple(stop_ids)
        self.steps_per_call, self.page_sizes = steps_per_call, page_sizes or slot_pages(slots, capacity)
        self._script, self.feed_tokens = script, feed_tokens
        self.prefills: list[list[np.ndarray]] = []
        """The prompts of each call to `prefill`."""
        self.released: list[int] = []
        """The released slots, in order."""
        self.inserted: list[tuple[int, int]] = []
        """(ordinal, index) of every response that was inserted into a slot, in order. A response that is re-prefilled occurs several times."""
        self.pauses = 0
        """Number of calls to `park`."""
        self.live_slots: list[int] = []
        """Number of slots that sampled a token, for each decoding step."""

    def init_decode_state(self) -> tuple[ScriptedSlot, ...]:
        """Returns a state in which every slot is free."""
        return (FREE,) * self.slots

    def prefill(
        self,
        params: PyTree,
        prompts: Sequence[Int[np.ndarray, " _"]],
        routes: Sequence[np.ndarray | None] = (),
    ) -> Iterator[list[tuple[int, Int[np.ndarray, " prompts"], int]]]:
        """Records the prompts and yields one batch with their lengths, which must be passed to `insert`."""
        self.prefills.append(list(prompts))
        lengths = np.array([len(prompt) for prompt in prompts], np.int32)
        yield [(index, lengths, index) for index in range(len(prompts))]

    def insert(
        self, prefix: Int[np.ndarray, " prompts"], state: PyTree, insertion: Insertion, key: PRNGKeyArray
    ) -> tuple[ScriptedSlot, ...]:
        """Puts responses into slots. Raises ValueError if a response may exceed the capacity of its slot, or its script has neither an end token nor enough
        tokens."""
        slots = list(state)
        names = ("slots", "prompts", "ordinals", "indices", "limits", "drawn", "turns")
        columns = (getattr(insertion, name).tolist() for name in names)
        fed = [len(tokens) for tokens in insertion.fed] or [0] * len(insertion.slots)
        for slot, row, ordinal, index, limit, drawn, turn, more in zip(*columns, fed, strict=True):
            prompt = prefix[row] + more - drawn
            if prompt + limit > self.capacity:
                raise ValueError(
                    f"a prompt of {prompt} tokens and a response of {limit} tokens = {prompt + limit} tokens exceed "
                    f"capacity={self.capacity}"
                )
            slots[slot] = ScriptedSlot(tokens=self._response(ordinal, index, limit, turn), drawn=drawn)
            self.inserted.append((ordinal, index))
        return tuple(slots)

    def generate(
        self,
        params: PyTree,
        state: PyTree,
        decoding: Decoding,
        min_live: int = 1,
        tables: tuple[Int[np.ndarray, "slots table_pages"], ...] = (),
        until: Int[np.ndarray, " slots"] | None = None,
    ) -> tuple[tuple[ScriptedSlot, ...], ResultTokens]:
        """Samples up to `steps_per_call` tokens in every live slot, and at most `until` tokens of each response.

        Returns early if fewer than `min_live` slots are still sampling.
        """
        slots = list(state)
        until = np.full(self.slots, self.capacity, np.int32) if until is None else until
        tokens = np.zeros((self.slots, self.steps_per_call), np.int32)
        valid = np.zeros((self.slots, self.steps_per_call), bool)
        for step in range(self.steps_per_call):
            drawing = [at for at, slot in enumerate(slots) if slot.live and slot.drawn < until[at]]
            if not drawing or (step and len(drawing) < min_live):
                break
            self.live_slots.append(len(drawing))
            for at in drawing:
                slot = slots[at]
                tokens[at, step], valid[at, step] = slot.tokens[slot.drawn], True
                slots[at] = replace(slot, drawn=slot.drawn + 1)
        going = np.array([slot.live for slot in slots])
        logprobs = -tokens.astype(np.float32)
        return tuple(slots), ResultTokens(tokens=tokens, logprobs=logprobs, valid=valid, live=going)

    def park(
        self,
        state: PyTree,
        parked: Int[np.ndarray, " rows"] | None,
        slots: Sequence[int],
        rows: Sequence[int],
    ) -> Int[np.ndarray, " rows"]:
        """Returns the number of tokens sampled so far for each paused response. Pass it to `insert` in place of the prompt lengths."""
        self.pauses += 1
        drawn = np.zeros(self.page_sizes.holders, np.int32) if parked is None else parked
        drawn[list(rows)] = [state[slot].drawn for slot in slots]
        return drawn

    parks_states = False

    def parked_prefix(
        self, lengths: Sequence[int], parked: PyTree | None, rows: Sequence[int]
    ) -> Int[np.ndarray, " responses"]:
        """Returns a prefix for responses whose pages already contain `lengths` tokens. In this engine, the prefix is `lengths`."""
        return np.array(lengths, np.int32)

    def release(self, state: PyTree, slots: Sequence[int]) -> tuple[ScriptedSlot, ...]:
        """Frees the given slots. Their responses may be unfinished."""
        self.released += slots
        return tuple(FREE if index in slots else slot for index, slot in enumerate(state))

    def _response(self, ordinal: int, index: int, limit: int, turn: int = 0) -> tuple[int, ...]:
        tokens = tuple(self._script(ordinal, index, *[turn] * (turn > 0)))
        ends = [at for at, token in enumerate(tokens) if token in self.stop_ids]
        if ends:
            tokens = tokens[: ends[0] + 1]
        elif len(tokens) < limit:
            raise ValueError(
                f"the script of response {index} to prompt {ordinal} has {len(tokens)} tokens, but none of the end tokens "
                f"{self.stop_ids}; it needs an end token, or as many tokens as the limit of {limit}"
            )
        return tokens[:limit]


def tiny_decoder_config(**changes: Any) -> DecoderConfig:
    """Returns a Llama-like configuration with 2 layers, a vocabulary of 20 tokens, and even sizes that can be sharded. `changes` override fields."""
    sizes: dict[str, Any] = {
        "vocab_size": 20, "embed_dim": 32, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 8, "mlp_dim": 48,
        "max_positions": 64,
    }  # fmt: skip
    sizes["family"] = "qwen2" if changes.get("qkv_bias") else "qwen3" if changes.get("qk_norm") else "llama"
    return DecoderConfig(**{**sizes, **changes})


def tiny_params(config: DecoderConfig, *, seed: int = 0) -> nnx.State:
    """Returns random decoder parameters without compiling. No norm has factors of 1 and no bias is 0, so a test fails if one of them is ignored."""
    rng, tables = np.random.default_rng(seed), {"ends": end_parameters(config)}
    tables |= {stack: kind.parameters(config) for stack, kind in config.stacks.items()}

    def fill(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> jax.Array:
        part, name = (key.key for key in path[:2])
        start = tables[part][name].start if name in tables[part] else 0.0
        start = 0.0 if callable(start) else start
        return jnp.asarray(start + 0.2 * rng.standard_normal(leaf.shape), leaf.dtype)

    return jax.tree_util.tree_map_with_path(fill, shapes_of(config))
