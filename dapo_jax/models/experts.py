"""Mixture of experts: the choice of experts for each token, and the products of tokens with the matrices of their experts.

Tokens are sorted by expert into rows, and each expert's rows are padded to whole blocks, so that all shapes are static. A block is multiplied by the
matrix of one expert. On CPU, a loop runs over the blocks that contain tokens. On TPU, megablox multiplies all rows. On GPU, each block is multiplied by a copy of its
expert's matrix. The order of each sum does not depend on other tokens, and the number of operations is proportional to the number of tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import layout as memory
from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm, tgmm
from jaxtyping import Array, Float, Int, Integer

from dapo_jax.dapo.tokens import NO_ROUTE
from dapo_jax.models.architecture import Architecture
from dapo_jax.models.device_layout import Matrices
from dapo_jax.models.gated import gated_parameters, hidden_of, inputs_of
from dapo_jax.models.layer_kinds import Mlp
from dapo_jax.models.parameters import Parameter
from dapo_jax.numerics.precision import WeightSharding, gathered, rounded
from dapo_jax.numerics.quantization import Quantized


@dataclass(frozen=True)
class Experts(Mlp):
    """A mixture of experts (Shazeer et al. 2017, https://arxiv.org/abs/1701.06538). In each layer, a router chooses some MLPs for each token."""

    count: int
    """Number of experts in each layer."""
    chosen: int
    """Number of experts that each token uses."""
    normalize: bool
    """Whether the factors of a token's experts are divided by their sum, so that they sum to 1. If False, they are scores of all experts."""
    shared_dim: int = 0
    """Number of hidden features of the shared expert, an MLP that processes all tokens next to the chosen experts. If 0, there is no shared expert."""
    shared_gate: bool = False
    """Whether the output of the shared expert is multiplied by the sigmoid of a number for each token (Qwen2-MoE)."""
    sigmoid: bool = False
    """Whether the scores are sigmoids of the router's logits. If False, they are a softmax over all experts."""
    choice_bias: bool = False
    """Whether a bias is added to the scores to choose experts, but not to their factors (DeepSeek-V3, https://arxiv.org/abs/2412.19437). It has no gradient."""
    scale: float = 1.0
    """Factor of the outputs of the chosen experts, which is applied after `normalize`."""
    expert_scale: bool = False
    """Whether the factor of each expert is multiplied by a trained number, after `normalize` (Gemma 4)."""
    groups: int = 1
    """Number of groups of consecutive experts. A token chooses experts from some of the groups."""
    chosen_groups: int = 1
    """Number of groups from which a token chooses. The score of a group is the sum of its two largest scores."""
    latent: int = 0
    """If above 0, experts work in a space with this number of dimensions, and two further matrices map tokens to it and back."""
    biases: bool = False
    """Whether the router and the experts' matrices have biases (gpt-oss). In files, these matrices are transposed, and the columns of gate and up alternate."""

    group = "mlp"
    targets = ("gate_proj", "up_proj", "down_proj")

    def __post_init__(self) -> None:
        if not 0 < self.chosen <= self.count:
            raise ValueError(
                f"a token uses num_experts_per_tok={self.chosen} experts, but there are {self.count}; it must be 1 to {self.count}"
            )
        if not 0 < self.chosen_groups <= self.groups or self.count % self.groups:
            raise ValueError(
                f"n_group={self.groups} must divide the {self.count} experts, and topk_group={self.chosen_groups} must be 1 to {self.groups}"
            )
        if self.chosen > self.chosen_groups * (self.count // self.groups):
            raise ValueError(
                f"topk_group={self.chosen_groups} of n_group={self.groups} groups have {self.chosen_groups * self.count // self.groups} experts, "
                f"fewer than num_experts_per_tok={self.chosen}"
            )

    def parameters(self, config: Architecture) -> dict[str, Parameter]:
        embed, hidden, count = config.embed_dim, config.mlp_dim, self.count
        inner, names = self.latent or embed, (*inputs_of(config), "down")
        rows: dict[str, Any] = {
            "shape": (count, hidden, inner),
            "axes": ("experts", "mlp", "embed"),
            "fan_in": inner,
        }
        columns: dict[str, Any] = {
            "shape": (count, inner, hidden),
            "axes": ("experts", "embed", "mlp"),
            "fan_in": hidden * 2 * config.layers,
        }
        router = {"axes": ("features", "features"), "float32": True}
        of_each: dict[str, Any] = {"shape": (count,), "axes": ("features",), "float32": True}
        found = {"router": Parameter(shape=(count, embed), fan_in=embed, tensor="mlp.gate.weight", **router)}
        for name in names:
            matrix = columns if name == "down" else rows
            found[name] = Parameter(**matrix, tensor=f"mlp.experts.{{}}.{name}_proj.weight")
        if self.biases:
            found["router_bias"] = Parameter(**of_each, tensor="mlp.router.bias")
        for name in names if self.biases else ():
            blocks, both, axis = (0, "down", "features") if name == "down" else (hidden, "gate_up", "mlp")
            same: dict[str, Any] = {"tensor": f"mlp.experts.{both}_proj", "blocks": blocks}
            found[name] = replace(found[name], **same, is_transposed=True)
            same |= {"tensor": f"{same['tensor']}_bias", "shape": found[name].shape[:2]}
            found[f"{name}_biases"] = Parameter(axes=("experts", axis), **same)
        if self.choice_bias:
            found["choice_bias"] = Parameter(
                **of_each, is_trained=False, file_dtype="float32", tensor="mlp.gate.e_score_correction_bias"
            )
        if self.latent:
            found |= {
                "latent_in": Parameter(shape=(inner, embed), axes=("features", "embed"), fan_in=embed, tensor="mlp.fc1_latent_proj.weight"),
                "latent_out": Parameter(shape=(embed, inner), axes=("embed", "features"), fan_in=inner, tensor="mlp.fc2_latent_proj.weight"),
            }  # fmt: skip
        if self.expert_scale:
            found["expert_scale"] = Parameter(**of_each, start=1.0)
        if self.shared_dim:
            found |= gated_parameters(config, self.shared_dim, "shared_", "mlp.shared_expert.")
        if self.shared_gate:
            found["shared_factor"] = Parameter(
                shape=(1, embed), fan_in=embed, tensor="mlp.shared_expert_gate.weight", **router
            )
        return found

    @property
    def experts(self) -> "Experts":
        return self

    def apply(
        self, layer: Any, x: Float[Array, "embed part"], routes: Integer[Array, "tokens chosen"] | None, read: Float[Array, "embed part"] | None = None,
    ) -> tuple[Float[Array, "embed tokens"], Int[Array, "tokens chosen"] | None]:  # fmt: skip
        """Implements `Mlp.apply`. The router reads `read` if it is given, otherwise `x`."""
        dtype, layout = layer.compute_dtype, layer.layout
        read = x if read is None else read
        # Scores are in float32, whatever the compute dtype is, because the choice must not depend on rounding.
        wide = np.promote_types(dtype, np.float32)

        def scores(name: str) -> Array:
            operands = getattr(layer, name)[...].astype(wide), read.astype(wide)
            made = jnp.einsum("ei,it->et", *operands, precision=lax.Precision.HIGHEST)
            made = made + layer.router_bias[...].astype(wide)[:, None] if self.biases else made
            return layout.inner(made, "float32")

        bias = layer.choice_bias[...] if self.choice_bias else None
        own, used, factors = chosen(scores("router"), self, routes, bias)
        if self.expert_scale:
            factors = factors * layer.expert_scale[...][used]
        config, hidden = layer.config, hidden_of(layer.config)
        names = *inputs_of(config), "down"
        matrices = tuple(getattr(layer, name)[...] for name in names)
        mix = partial(mixture, hidden=hidden, width=config.mlp_dim, dtype=dtype)
        inputs, biases = layout.inner(x, dtype=dtype), ()
        if self.biases:
            biases = tuple(rounded(getattr(layer, f"{name}_biases")[...], dtype) for name in names)
        tokens = layer.project(("latent_in",), inputs)[0] if self.latent else inputs
        out = layout.experts(mix, tokens, factors, used, matrices, dtype, biases)
        if self.latent:
            out = layer.project(("latent_out",), out)[0]
        if self.shared_dim:
            products = layer.project(inputs_of(config, "shared_"), inputs)
            shared = layer.project(("shared_down",), hidden(*products))[0]
            out = out + (shared * jax.nn.sigmoid(scores("shared_factor")) if self.shared_gate else shared)
        return out, own

    def used(self, tokens: int | float) -> int | float:
        """If each token chooses k of E experts at random, n tokens use 1 - (1 - k / E)^n of them. Routers that were trained choose less evenly."""
        return 1 - (1 - self.chosen / self.count) ** tokens


def chosen(
    logits: Float[Array, "experts tokens"], experts: Experts, routes: Integer[Array, "tokens chosen"] | None, bias: Float[Array, " experts"] | None = None
) -> tuple[Int[Array, "tokens chosen"], Int[Array, "tokens chosen"], Float[Array, "tokens chosen"]]:  # fmt: skip
    """Chooses the experts of each token.

    Args:
        logits: scores of the router.
        experts: number of experts, how they are chosen, and how their factors are normalized.
        routes: forced choices, or `NO_ROUTE` in all entries of a token.
        bias: the bias of the choice.

    Returns:
        The router's own choice in the order of decreasing scores, the choice that is used, and the factors of the used experts' outputs.
    """
    scores = jax.nn.sigmoid(logits.T) if experts.sigmoid else jax.nn.softmax(logits.T)
    ranks = scores if bias is None else scores + bias[None].astype(scores.dtype)
    if experts.groups > 1:
        grouped = ranks.reshape(len(ranks), experts.groups, -1)
        strength = lax.top_k(grouped, min(2, grouped.shape[2]))[0].sum(2)
        best = lax.top_k(strength, experts.chosen_groups)[1]
        kept = (best[:, None, :] == jnp.arange(experts.groups, dtype=best.dtype)[None, :, None]).any(2)
        ranks = jnp.where(kept[:, :, None], grouped, -jnp.inf).reshape(ranks.shape)
    own = lax.top_k(ranks, experts.chosen)[1]
    used = own if routes is None else jnp.where(routes == NO_ROUTE, own, routes.astype(own.dtype))
    factors = jnp.take_along_axis(scores, used, axis=1)
    if experts.normalize:
        # Sigmoids, unlike probabilities, may all be almost 0.
        factors = factors / (factors.sum(1, keepdims=True) + (1e-20 if experts.sigmoid else 0.0))
    return own, used, factors if experts.scale == 1.0 else factors * experts.scale


def choices(record: Array | np.ndarray) -> Array:
    """Converts a record of experts, as it is stored, to int32 with `NO_ROUTE` where nothing is recorded."""
    return jnp.where(record == jnp.iinfo(record.dtype).max, NO_ROUTE, record.astype(jnp.int32))


class Rows(NamedTuple):
    """The arrangement of a layer's tokens in rows, sorted by expert."""

    token: Int[Array, " rows"]
    """The token in each row, or the number of tokens if the row is empty."""
    place: Int[Array, "tokens chosen"]
    """The row of each choice of a token, or the number of rows if the expert belongs to another device."""
    sizes: Int[Array, " experts"]
    """Number of rows of each expert, in whole blocks."""


def block_rows(choices: int, experts: int) -> int:
    """Returns the number of rows in a block: a power of 2, at most half of the mean number of choices per expert."""
    return min(128, max(8, 1 << max(choices // (2 * experts), 1).bit_length() - 1))


def arranged(routes: Int[Array, "tokens chosen"], first: int | Array, count: int, block: int) -> Rows:
    """Sorts the choices for the experts from `first` to `first + count` by expert, and pads the rows of each expert to whole blocks."""
    expert = routes.reshape(-1) - first
    expert = jnp.where((expert >= 0) & (expert < count), expert, count)
    order = jnp.argsort(expert, stable=True)
    of_row = expert[order]
    starts = jnp.searchsorted(of_row, jnp.arange(count + 1, dtype=of_row.dtype)).astype(jnp.int32)
    sizes = -(-jnp.diff(starts) // block) * block
    begins = jnp.cumsum(sizes) - sizes
    choices = expert.size
    most = min(choices * block, choices + count * (block - 1))
    tile = 512 if most >= 512 * count else 128
    rows = -(-most // tile) * tile
    index = jnp.arange(choices, dtype=jnp.int32)
    here = (begins - starts[:-1]).at[of_row].get(mode="fill", fill_value=0) + index
    here = jnp.where(of_row < count, here, rows)
    place = jnp.zeros_like(index).at[order].set(here, unique_indices=True)
    token = jnp.full(rows, len(routes), jnp.int32)
    token = token.at[here].set(order.astype(jnp.int32) // routes.shape[1], mode="drop")
    return Rows(token, place.reshape(routes.shape), sizes.astype(jnp.int32))


def mixture(
    x: Float[Array, "embed tokens"], factors: Float[Array, "tokens chosen"], routes: Int[Array, "tokens chosen"], matrices: Matrices, biases: Sequence[Array] = (), *,
    first: int | Int[Array, ""] = 0, hidden: Callable[..., Array], width: int = 0, dtype: str,
    sharding: tuple[WeightSharding | None, WeightSharding | None] = (None, None),
) -> Float[Array, "embed tokens"]:  # fmt: skip
    """Returns the sum of factor x down hidden(gate x, up x) over the experts of each token. Each product may have a bias.

    Args:
        x: normalized tokens.
        factors, routes: factor and number of each chosen expert.
        matrices: matrices of the experts that are on this device. Choices of other experts contribute nothing.
        biases: a bias [experts, outputs] for each of the matrices, or none.
        first: number of the first expert in `matrices`.
        hidden: maps the products with all matrices except the last, down, to the input of down.
        width: number of hidden features on all devices together. If there are biases, each device adds its share of the bias of down.
        sharding: how gate and up, and down are sharded (see `dapo_jax.numerics.precision.product`).
    """
    count = len(matrices[0])
    block = block_rows(routes.size, count)
    rows = arranged(routes, first, count, block)

    def multiplied(at: int, x: Array, sharding: WeightSharding | None) -> Array:
        made = checkpoint_name(grouped(matrices[at], x, rows.sizes, block, dtype, sharding), "projection")
        if not biases:
            return made
        # A product, unlike a lookup, has a gradient with a fixed order of summation.
        expert = _expert_at(rows.sizes, jnp.arange(0, len(x), block, jnp.int32))
        of_block = jax.nn.one_hot(expert, count, dtype=made.dtype)
        added = jnp.einsum("be,eo->bo", of_block, biases[at], precision=lax.Precision.HIGHEST)
        added = added * (biases[0].shape[1] / width) if at == last else added
        return (made.reshape(-1, block, made.shape[1]) + added[:, None]).reshape(made.shape)

    last = len(matrices) - 1
    inputs = _spread(x.T, rows.token, rows.place)
    features = hidden(*(multiplied(at, inputs, sharding[0]) for at in range(last)))
    outputs = multiplied(last, features, sharding[1])
    # A row's factor is looked up by the number of its choice. Empty rows have none.
    scale = jnp.zeros(len(outputs) + 1, factors.dtype).at[rows.place].set(factors)[:-1]
    return _collected(outputs * scale[:, None], rows.token, rows.place).T


@jax.custom_vjp
def _spread(x: Array, token: Array, place: Array) -> Array:
    """Copies each token to the rows of its experts."""
    return x.at[token].get(mode="fill", fill_value=0)


@jax.custom_vjp
def _collected(rows: Array, token: Array, place: Array) -> Array:
    """Adds the rows of each token, always in the same order. This is the transpose of `_spread`."""
    return rows.at[place].get(mode="fill", fill_value=0).sum(1)


# Gradients that JAX would derive use scatter-add, whose order of summation may vary on GPUs.
_spread.defvjp(
    lambda x, token, place: (_spread(x, token, place), (token, place)),
    lambda saved, cotangent: (_collected(cotangent, *saved), None, None),
)
_collected.defvjp(
    lambda rows, token, place: (_collected(rows, token, place), (token, place)),
    lambda saved, cotangent: (_spread(cotangent, *saved), None, None),
)


def grouped(
    stored: Array | Quantized, x: Float[Array, "rows inputs"], sizes: Int[Array, " experts"], block: int, dtype: str, sharding: WeightSharding | None
) -> Float[Array, "rows outputs"]:  # fmt: skip
    """Multiplies each row by the matrix of its expert, in `stored` [experts, outputs, inputs], like `dapo_jax.numerics.precision.product`.

    Expert e has `sizes[e]` rows, a multiple of `block`, after the rows of the experts before it. Later rows have no meaningful values.
    """
    if not isinstance(stored, Quantized):
        return _grouped(stored, x, sizes, block, dtype, sharding)
    expert = _expert_at(sizes, jnp.arange(len(x), dtype=jnp.int32))
    scale = stored.scale[..., 0].at[expert].get(mode="fill", fill_value=0)
    return _multiplied(stored.values, x, sizes, block, dtype) * scale


@partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def _grouped(
    stored: Array, x: Array, sizes: Array, block: int, dtype: str, sharding: WeightSharding | None
) -> Array:
    return _multiplied(_whole(stored, dtype, sharding), x, sizes, block, dtype)


def _grouped_backward(
    block: int, dtype: str, sharding: WeightSharding | None, saved: tuple[Array, Array, Array], cotangent: Array
) -> tuple[Array, Array, None]:  # fmt: skip
    stored, x, sizes = saved
    d_stored = _outer(cotangent, x, sizes, block, dtype)
    if sharding is not None:
        d_stored = sharding.summed(d_stored)
    d_x = _multiplied(_whole(stored, dtype, sharding), cotangent, sizes, block, dtype, transposed=True)
    return d_stored.astype(stored.dtype), d_x.astype(x.dtype), None


_grouped.defvjp(lambda *given: (_grouped(*given), given[:3]), _grouped_backward)


def _whole(stored: Array, dtype: str, sharding: WeightSharding | None) -> Array:
    """Gathers a weight like `gathered`. A weight that has the compute dtype is returned as it is, because the loop on CPU widens one expert at a time."""
    return stored if stored.dtype == dtype and sharding is None else gathered(stored, dtype, sharding)


def _multiplied(
    weight: Array, x: Array, sizes: Array, block: int, dtype: str, *, transposed: bool = False
) -> Array:
    """Multiplies each row by its expert's matrix, or by the transposed matrix."""
    wide = np.promote_types(dtype, np.float32)
    inputs, outputs = weight.shape[1:] if transposed else weight.shape[:0:-1]

    def looped(weight: Array, x: Array, sizes: Array) -> Array:
        def one(out: Array, at: Array, expert: Array, part: Array) -> Array:
            matrix = weight[expert].astype(wide)
            return lax.dynamic_update_slice_in_dim(out, part @ (matrix if transposed else matrix.T), at, 0)

        blank = jnp.zeros((len(x), outputs), wide)
        return _over_blocks(one, blank, sizes, block, [x.astype(wide)])

    def kernel(weight: Array, x: Array, sizes: Array) -> Array:
        tiling, turned = _tiles(len(x), len(sizes), inputs, outputs), _is_turned(*weight.shape[1:])
        weight = weight.astype(dtype).mT if turned else weight.astype(dtype)
        return gmm(x.astype(dtype), weight, sizes, wide, tiling, transpose_rhs=transposed == turned)

    def batched(weight: Array, x: Array, sizes: Array) -> Array:
        rows = x.astype(dtype).reshape(-1, block, inputs)
        matrices = weight[_expert_at(sizes, jnp.arange(0, len(x), block, jnp.int32))].astype(dtype)
        spec = "bri,bio->bro" if transposed else "bri,boi->bro"
        return jnp.einsum(spec, rows, matrices, preferred_element_type=wide).reshape(len(x), outputs)

    return _on_platform(weight, x, sizes, dtype=wide, cpu=looped, tpu=kernel, default=batched)


def _outer(left: Array, right: Array, sizes: Array, block: int, dtype: str) -> Array:
    """Returns the sum of left x right over the rows of each expert, [experts, left, right]."""
    wide = np.promote_types(dtype, np.float32)
    widths = left.shape[1], right.shape[1]

    def looped(left: Array, right: Array, sizes: Array, kind: Any = wide, steps: int | None = None) -> Array:
        def one(out: Array, at: Array, expert: Array, *parts: Array) -> Array:
            return out.at[expert].add(jnp.einsum("ro,ri->oi", *parts, preferred_element_type=wide))

        blank = jnp.zeros((len(sizes), *widths), wide)
        return _over_blocks(one, blank, sizes, block, [left.astype(kind), right.astype(kind)], steps)

    def kernel(left: Array, right: Array, sizes: Array) -> Array:
        left, right = (right, left) if (turned := _is_turned(*widths)) else (left, right)
        tiling = _tiles(len(left), len(sizes), left.shape[1], right.shape[1])
        out = tgmm(left.astype(dtype).T, right.astype(dtype), sizes, wide, tiling)
        return out.mT if turned else out

    # A GPU would wait for the host before each step of a loop without a fixed number of steps.
    fixed = partial(looped, kind=dtype, steps=len(left) // block)
    return _on_platform(left, right, sizes, dtype=wide, cpu=looped, tpu=kernel, default=fixed)


def _on_platform(*operands: Array, dtype: np.dtype, **forms: Callable[..., Array]) -> Array:
    if dtype == np.float64:
        del forms["tpu"]
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):  # as megablox needs
        return lax.platform_dependent(*operands, **forms)


def _tiles(rows: int, experts: int, inputs: int, outputs: int) -> tuple[int, int, int]:
    """Returns the tile sizes of megablox for products of [rows, inputs] and [inputs, outputs]. They fit in the memory of every TPU core."""
    large = rows % 512 == 0 and rows >= 512 * experts
    inner, outer = (min(1024, -(-size // 128) * 128) for size in (inputs, outputs))
    return 512 if large else 128, inner, outer


def _is_turned(rows: int, columns: int) -> bool:
    """Returns whether a TPU stores matrices [rows, columns] by columns, with less padding to 128. A kernel gets their transpose, which needs no copy."""
    return columns * -(-rows // 128) < rows * -(-columns // 128)


def as_stored(x: Array) -> Array:
    """Keeps the order in which a TPU stores an argument. For a result of a branch, the compiler would otherwise copy the argument to its default order."""
    if x.ndim < 2 or not _is_turned(*x.shape[-2:]):
        return x
    order = memory.Layout((*range(x.ndim - 2), x.ndim - 1, x.ndim - 2))
    ordered = partial(memory.with_layout_constraint, layouts=order)
    return lax.platform_dependent(x, tpu=ordered, default=lambda x: x)


def _expert_at(sizes: Array, row: Array) -> Array:
    return jnp.searchsorted(jnp.cumsum(sizes), row, side="right")


def _over_blocks(
    one: Callable[..., Array], start: Array, sizes: Array, block: int, rows: Sequence[Array], steps: int | None = None
) -> Array:  # fmt: skip
    """Calls `one(result so far, first row, expert, blocks of rows)` for each block that belongs to an expert, or for the first `steps` blocks."""

    def step(index: Array, so_far: Array) -> Array:
        at = index * block
        parts = (lax.dynamic_slice_in_dim(each, at, block, 0) for each in rows)
        return one(so_far, at, _expert_at(sizes, at), *parts)

    return lax.fori_loop(0, steps or sizes.sum(dtype=sizes.dtype) // block, step, start)
