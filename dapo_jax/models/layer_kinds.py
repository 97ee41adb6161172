"""The contract of a kind of layer: a mixer, which combines the tokens of a sequence, and an MLP, which processes each token alone.

A kind is a frozen value. It has the table of its parameters, its computation over whole rows, in prefill and in decoding, its state, and its
operations. All other modules loop over the kinds of a decoder (`DecoderConfig.kinds`). To add a kind, write a subclass of `Mixer` or `Mlp` in a file of its
own, and add a row to the table in `families.py` or `presets.py`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
from jaxtyping import Array, Float, Int, Integer

from dapo_jax.models.architecture import Architecture
from dapo_jax.models.device_layout import Layout
from dapo_jax.models.parameters import Parameter, is_matrix, norm, repeated_heads
from dapo_jax.models.projections import Projections
from dapo_jax.models.rope import RopeTables

Attend = Callable[..., tuple[Array, Any]]
"""The part of a mixer that combines tokens. It maps the mixer's inputs, such as query, key and value, each [heads, head_dim, tokens], to the output per head,
and a second value, such as the new state."""


@dataclass(frozen=True)
class Paged:
    """A state that grows with the sequence: a key and a value of each token, in pages. Devices along `tensor` have different heads."""

    kv_heads: int
    head_dim: int
    tokens: int = 0
    """Number of last tokens that a query reads, or 0 for all."""
    value_dim: int | None = None
    """If given, the value of a token is the first `value_dim` entries of its key, so only keys are stored, and each device along `tensor` has all of them."""

    @property
    def arrays(self) -> int:
        """Number of stored arrays: keys and values, or keys alone."""
        return 2 if self.value_dim is None else 1

    @property
    def options(self) -> dict[str, int]:
        """Arguments of the functions of a cache."""
        return {} if self.value_dim is None else {"value_dim": self.value_dim}

    def heads_on(self, tensor: int) -> int:
        """Returns the number of heads on each of `tensor` devices, with repeated ones."""
        return repeated_heads(self.kv_heads, tensor) // tensor


@dataclass(frozen=True)
class Fixed:
    """A state of fixed size per sequence."""

    empty: Callable[[int, str], Any]
    """Maps a number of sequences and the compute dtype to the state before the first token. Sequences are the first dimension of all arrays, heads the second."""

    @property
    def bytes(self) -> int:
        """Size in bytes of the state of one sequence, with the compute dtype float32."""
        arrays = jax.tree.leaves(jax.eval_shape(lambda: self.empty(1, "float32")))
        return sum(array.size * array.dtype.itemsize for array in arrays)


@dataclass(frozen=True)
class TrainingRows:
    """The rows of one training pass."""

    segment_ids: Int[Array, "batch seq"]
    prefix_ids: Int[Array, "batch seq"] | None
    positions: Int[Array, "batch seq"]
    layout: Layout
    dtype: str


@dataclass(frozen=True)
class PrefillPart:
    """The rows of one prefill call, or a chunk of one sequence."""

    segment_ids: Int[Array, "rows seq"]
    positions: Int[Array, "rows seq"]
    last: Int[Array, " prompts"]
    """Flat indices of the last token of each prompt."""
    before: Any
    """For a chunk, the state before it (for a `Paged` state, keys and values [kv_heads, head_dim, room], or keys and None), otherwise None. For a mixer with a
    `source`, the keys and values of that layer: of all rows, or for a chunk, of the sequence up to the end of the chunk."""
    start: Int[Array, ""]
    """For a chunk, the number of tokens before it."""
    store: Callable[[Array, Array | None, int], Any]
    """Converts keys and values [kv_heads, head_dim, tokens] of some rows to the layout of the cache. Values may be None."""
    dtype: str
    is_chunk: bool


@dataclass(frozen=True)
class DecodingStep:
    """One decoding step."""

    state: Any
    """The state of this layer: its cache if it is `Paged`, or a `Fixed` state."""
    live: Array
    """[slots], whether each slot processes a token. The states of other slots must not change."""
    extend: Callable[..., tuple[Array, Any]]
    """Appends keys and values to a cache and attends to it. The arguments are cache, query, key, value (None if `Paged.value_dim` is given), and `window` and the
    like. A mixer with a `source` has no key and value."""


class Mixer(ABC):
    """A kind of mixer. Subclasses are frozen dataclasses."""

    stack: ClassVar[str]
    """The name of the stacked parameters of layers with this mixer, in checkpoints too."""
    group: ClassVar[str] = ""
    targets: ClassVar[tuple[str, ...]] = ()
    """The names of the matrices that may have adapters, and the name of all of them together in `lora.targets`."""

    @abstractmethod
    def parameters(self, config: Architecture) -> dict[str, Parameter]:
        """Returns the parameters of one layer. `output` is the matrix whose product is added to the residual stream."""

    @abstractmethod
    def mix(
        self, layer: Projections, x: Float[Array, "embed tokens"], rope: RopeTables, attend: Attend
    ) -> tuple[Float[Array, "features tokens"], Any]:
        """Returns the input of the output projection, and the second result of `attend`, which `over_rows`, `prefill` or `step` returned."""

    @abstractmethod
    def over_rows(self, config: Architecture, rows: TrainingRows) -> Attend:
        """Returns the function for whole rows in training. It also takes the layer's `data` as keywords."""

    @abstractmethod
    def prefill(self, config: Architecture, part: PrefillPart, **data: Any) -> Attend:
        """Returns the function for prompts. Its second result is the keys and values of all tokens (from `part.store`), or the `Fixed` states after `part.last`."""

    @abstractmethod
    def step(self, config: Architecture, step: DecodingStep, **data: Any) -> Attend:
        """Returns the function for one token of each slot. Its second result is the new state."""

    @abstractmethod
    def state(self, config: Architecture, layer: int) -> Paged | Fixed | None:
        """Returns the form of the state of a layer, or None if it reads the state of an earlier layer."""

    @property
    def source(self) -> "Mixer | None":
        """The mixer whose keys and values this mixer reads, in the last layer before it with that mixer. None: it has its own."""
        return None

    def data(self, config: Architecture) -> Mapping[str, tuple[int, ...]]:
        """Returns numbers for each layer of the decoder. Layers that differ only in these numbers share a stack."""
        return {}

    def row_dim(self, config: Architecture) -> int:
        """Returns the number of dimensions of a head in attention over rows."""
        return config.head_dim

    @abstractmethod
    def flops(self, config: Architecture, *, decoding: bool) -> tuple[int, int]:
        """Returns the operations per token and per pair of a query and a key, without products with parameters."""


class Mlp(ABC):
    """A kind of MLP. Subclasses are frozen dataclasses."""

    stack: ClassVar[str] = "mlp_blocks"
    """The name of the stacked parameters of layers without a mixer."""
    group: ClassVar[str] = ""
    targets: ClassVar[tuple[str, ...]] = ()
    """The names of its adapted matrices (see `Mixer`)."""

    @property
    def experts(self) -> Any:
        """The experts of this MLP (`experts.Experts`), or None."""
        return None

    @abstractmethod
    def parameters(self, config: Architecture) -> dict[str, Parameter]:
        """Returns the parameters of one layer. `down` is the matrix whose product is added to the residual stream."""

    @abstractmethod
    def apply(
        self,
        layer: Projections,
        x: Float[Array, "embed part"],
        routes: Integer[Array, "tokens chosen"] | None,
    ) -> tuple[Float[Array, "embed tokens"], Int[Array, "tokens chosen"] | None]:
        """Returns the product that is added to the residual stream, and the layer's own choice for each token if it makes a choice.

        `routes` contains choices to use, or `NO_ROUTE` for its own choice.
        """

    def add(
        self,
        layer: Any,
        x: Float[Array, "embed part"],
        routes: Integer[Array, "tokens chosen"] | None,
        inputs: Float[Array, "features part"] | None,
    ) -> tuple[Float[Array, "embed part"], Int[Array, "tokens chosen"] | None]:
        """Returns the residual stream after the MLP, and the second result of `apply`. `inputs` are the layer's own embeddings, if there are any."""
        normed = layer.normed("mlp_norm", x) if layer.config.norm_place != "outputs" else x
        product, own = self.apply(layer, normed, routes)
        return layer.added(x, "down", "mlp_out_norm", product), own

    def used(self, tokens: int | float) -> int | float:
        """Returns the share of the parameters with the axis `experts` that `tokens` tokens use."""
        return self.experts.used(tokens) if self.experts else 1.0


@dataclass(frozen=True)
class LayerKind:
    """A kind of layer. Either part may be missing."""

    mixer: Mixer | None
    mlp: Mlp | None

    @property
    def stack(self) -> str:
        """The name of a stack of such layers, if a decoder has no other kind with the same name."""
        return self.mixer.stack if self.mixer else Mlp.stack

    def parameters(self, config: Architecture) -> dict[str, Parameter]:
        """Returns all parameters of one layer, without adapters."""
        before, after = config.norm_place != "outputs", config.norm_place != "inputs"
        sublayers = {"attention": self.mixer, "mlp": self.mlp}
        tensors = {"attention": "input_layernorm.weight", "mlp": "post_attention_layernorm.weight"}
        parameters: dict[str, Parameter] = {}
        for name, sublayer in sublayers.items():
            if before and sublayer:
                parameters[f"{name}_norm"] = norm(config, config.embed_dim, tensor=tensors[name])
            if after and sublayer:
                parameters[f"{name}_out_norm"] = norm(config, config.embed_dim)
        for sublayer in sublayers.values():
            parameters |= sublayer.parameters(config) if sublayer else {}
        return parameters

    def matrix_parameters(self, config: Architecture, tokens: int | float = 1) -> int | float:
        """Returns the number of entries of the matrices that `tokens` tokens use."""
        matrices = [matrix for matrix in self.parameters(config).values() if is_matrix(matrix.axes)]
        share = self.mlp.used(tokens) if self.mlp else 1.0
        return sum(matrix.size * (share if "experts" in matrix.axes else 1) for matrix in matrices)
