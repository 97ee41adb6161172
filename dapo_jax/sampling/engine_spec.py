"""The sizes and options of a decoding engine."""

from collections.abc import Sequence
from dataclasses import dataclass

from jax.sharding import Mesh

from dapo_jax.models.presets import DecoderConfig
from dapo_jax.parallel.mesh import batch_shards
from dapo_jax.sampling.cache_sizes import PageSizes
from dapo_jax.sampling.caches import (
    Kind,
    check_page_tokens,
    kind_for,
    page_tokens_for,
    sizes_for,
    token_bytes,
)
from dapo_jax.sampling.prompt_packing import PrefillShape, prefill_shape

_ROWS, _TOKENS = 4, 4096
"""Default maximum numbers of rows and tokens per prefill call."""

BLOCK_SLOTS = 8
"""Number of slots per device that a batch-invariant engine decodes together. The summation order in a program depends on its shapes, so the shapes must not
depend on the number of slots."""


@dataclass(frozen=True, kw_only=True)
class EngineSpec:
    """The sizes and options of a `DecoderEngine`."""

    slots: int
    """Number of sequences that are decoded together."""
    capacity: int
    """Maximum number of tokens in a prompt and its response together."""
    steps_per_call: int
    """Maximum number of tokens per slot that a call to `generate` samples."""
    stop_ids: Sequence[int]
    """The tokens that end a response."""
    compute_dtype: str = "float32"
    cache_dtype: str = ""
    """Dtype of keys and values. Defaults to `compute_dtype`."""
    page_tokens: int = 0
    """Number of tokens per page: on a TPU a multiple of 16, or of 128 for an 8-bit cache; on a GPU a power of two, 16 or more. Defaults to
    `caches.page_tokens_for`."""
    cache_tokens: int = 0
    """Number of tokens of the whole cache (see `caches.sizes_for`)."""
    cache_bytes: int | None = None
    """Size of the cache in bytes on each device, used if `cache_tokens` is 0. If None, the cache has room for all slots at full length."""
    cache: Kind | None = None
    """The kind of cache. Defaults to the kind for the platform."""
    prefill: PrefillShape | None = None
    """Rows and tokens per prefill call. Defaults to at most 4 rows and 4,096 tokens."""
    in_flight: int = 0
    """Number of responses in flight. Each may have pages in the cache. If there are fewer slots, responses take turns in the slots. All responses are
    re-prefilled when the weights change."""
    batch_invariant: bool = False
    """Whether no bit of a response may depend on the number of slots or on other requests. If `prefill` is given, its `alone` must be True."""
    has_turns: bool = False
    """Whether responses are multi-turn episodes. While its environment works, an episode keeps its pages until other responses need them; at most `slots` episodes
    can. The answer's tokens are then fed. A batch-invariant engine re-prefills instead, because feeding rounds differently."""
    records_routes: bool = False
    """Whether the experts that a model with experts chooses for each token are returned."""
    heads: int = 0
    """Number of most probable tokens that are returned for each sampled token, with their log-probabilities. 0 returns none."""

    @property
    def stored_dtype(self) -> str:
        """The dtype of keys and values."""
        return self.cache_dtype or self.compute_dtype

    @property
    def prefill_shape(self) -> PrefillShape:
        """The shape of a prefill call."""
        longest = {"longest": self.capacity, "capacity": self.capacity, "alone": self.batch_invariant}
        return self.prefill or prefill_shape(**longest, prompts=_ROWS, tokens=_TOKENS)

    @property
    def parks(self) -> bool:
        """Whether episodes keep their pages and states outside the slots between two turns."""
        return self.has_turns and not self.batch_invariant

    def cache_kind(self, mesh: Mesh, config: DecoderConfig) -> Kind:
        """Returns the kind of cache of a decoder on a mesh. Sequences that leave their slots keep their pages."""
        leaves_slots = self.in_flight > 0 or self.batch_invariant or self.has_turns
        paged = leaves_slots or self.page_tokens > 0 or self.cache_tokens > 0
        sizes = {"capacity": self.capacity, "paged": paged, "states": config.paged}
        return self.cache or kind_for(mesh, dtype=self.stored_dtype, **sizes)

    def page_sizes(self, config: DecoderConfig, mesh: Mesh, *, holders: int, call_tokens: int) -> PageSizes:
        """Returns the sizes of the pages for `holders` sequences (see `caches.sizes_for`)."""
        kind, dtype, capacity = self.cache_kind(mesh, config), self.stored_dtype, self.capacity
        slots = BLOCK_SLOTS * batch_shards(mesh.shape) if self.batch_invariant else self.slots
        if self.page_tokens:
            check_page_tokens(kind, self.page_tokens, capacity=capacity, dtype=dtype)
        tokens = self.page_tokens or page_tokens_for(
            kind, mesh, config, slots=slots, capacity=capacity, dtype=dtype
        )
        return sizes_for(
            kind, mesh, holders=holders, capacity=capacity, page_tokens=tokens, cache_tokens=self.cache_tokens, room=self.cache_bytes,
            token_bytes=token_bytes(config, mesh, dtype=dtype, kind=kind), call_tokens=call_tokens,
        )  # fmt: skip

    def check(self, config: DecoderConfig, mesh: Mesh) -> None:
        """Raises ValueError if the slots cannot be split evenly over the mesh, or sequences are longer than the model's maximum position."""
        spread = batch_shards(mesh.shape)
        if self.slots % spread:
            raise ValueError(
                f"sampling.slots={self.slots} must be a multiple of parallel.data x parallel.fsdp = {spread}, "
                f"because slots are split over these axes; for example {self.slots // spread * spread + spread}"
            )
        block = spread * BLOCK_SLOTS
        if self.batch_invariant and self.slots % block:
            raise ValueError(
                f"sampling.slots={self.slots} must be a multiple of {BLOCK_SLOTS} x parallel.data x parallel.fsdp = {block} with sampling.batch_invariant=true, "
                f"because each device decodes {BLOCK_SLOTS} slots at a time; for example {-(-self.slots // block) * block}"
            )
        if self.heads > config.vocab_size:
            raise ValueError(
                f"{self.heads} most probable tokens were asked for, but the model has {config.vocab_size}: lower loss.center (in serve, --top-logprobs)"
            )
        if self.capacity > config.max_positions:
            raise ValueError(
                f"prompt and response need {self.capacity} positions, but the model has {config.max_positions}; "
                "lower data.max_prompt_tokens or sampling.max_response_tokens"
            )
