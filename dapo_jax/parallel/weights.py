"""Weight transfer from the trainer to the samplers: cast, unstacked and resharded by one jitted program, called once per layer.

A scan over stacked layers copies each layer's weights on every decode step (measured 1.5 times slower on CPU), so the
sampler's copy has separate layers. The program takes the whole stack and the number of a layer, so the transfer needs memory for
one layer in addition to the trainer's and the sampler's arrays.
"""

import math

import jax
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Int, PyTree

from dapo_jax.dapo.quantization import quantized
from dapo_jax.models.decoder import is_apart
from dapo_jax.models.layout import output_dimensions
from dapo_jax.models.lora import merged, put_together
from dapo_jax.parallel.mesh import AXES, Meshes
from dapo_jax.parallel.sharding import SAMPLER_RULES, TRAINER_RULES, shardings, split
from dapo_jax.parallel.together import Together

SamplerWeights = dict[str, PyTree]
"""`layers`: a tuple of the blocks' states; `ends`: embedding, final norm, unembedding."""


def both_on(mesh: Mesh) -> Meshes:
    """Returns the meshes of a single process that trains and samples on one mesh."""
    types = (mesh.axis_types[0], *mesh.axis_types)
    publish = Mesh(mesh.devices[None], ("sampler", *AXES), axis_types=types)
    return Meshes(train=mesh, publish=publish, sampler=mesh, index=0)


class WeightTransfer:
    """Converts trainer parameters to this process's sampler weights. Every process calls it with the same parameters.

    Args:
        params: parameters of the decoder or their shapes, blocks stacked; may be adapters alone, or a base without them.
        where: all meshes of the run, or the one mesh on which a single process trains and samples.
        dtype: of the sampler's weights. Norms stay in float32, as in the trainer: rounded, they would double the distance between
            the sampler's log-probabilities and the trainer's.
        eight_bit: store matrices as int8 with a scale for each output, `Quantized`; biases and adapters stay in `dtype`.
        merged_by: add adapters to their matrices, in float32, with this factor; None keeps them separate.

    Raises:
        ValueError: a dimension is not divisible by its mesh axis.
    """

    def __init__(
        self, params: nnx.State, where: Mesh | Meshes, *, dtype: str, eight_bit: bool = False, merged_by: float | None = None
    ) -> None:  # fmt: skip
        meshes = both_on(where) if isinstance(where, Mesh) else where
        self._dtype, self._eight_bit, self._merged_by = dtype, eight_bit, merged_by
        # The CPU's runtime may hang with many collective programs in its queue.
        self._waits = meshes.train.devices.flat[0].platform == "cpu"
        self._count = jax.tree.leaves(params["blocks"])[0].shape[0]
        shapes = {
            "layer": jax.eval_shape(lambda blocks: self._cast(self._made(blocks, 0)), params["blocks"]),
            "ends": jax.eval_shape(self._cast, _ends(params)),
        }
        self._placed = shardings(params, meshes.train)
        self._source = shardings(shapes, meshes.train)
        self._target = shardings(shapes, meshes.publish, SAMPLER_RULES)
        self._sampler = shardings(shapes, meshes.sampler, SAMPLER_RULES)
        out = jax.tree.map(_shaped, shapes, self._sampler)
        self.shapes: SamplerWeights = {"layers": (out["layer"],) * self._count, "ends": out["ends"]}
        """Shapes and shardings of a call's result."""
        self._layer = Together(jax.jit(self._layer_program, out_shardings=self._target["layer"]))
        self._ends = Together(jax.jit(self._ends_program, out_shardings=self._target["ends"]))

    def __call__(self, params: nnx.State) -> SamplerWeights:
        """Casts and reshards on all devices, a collective call, and wraps the local shards on the sampler's mesh without a copy.

        The second call compiles nothing. The result stays valid when an update donates `params`.
        """
        layers = []
        for index in range(self._count):
            layer = local(self._layer(params["blocks"], np.int32(index)), self._sampler["layer"])
            layers.append(jax.block_until_ready(layer) if self._waits else layer)
        ends = local(self._ends(_ends(params)), self._sampler["ends"])
        return {"layers": tuple(layers), "ends": ends}

    def shared(self, params: nnx.State) -> SamplerWeights:
        """Returns the result of a call without a copy, for separate layers with the sampler's shardings (`shares_base`)."""
        layers = tuple(local(params["blocks"][index], self._sampler["layer"]) for index in range(self._count))
        return {"layers": layers, "ends": local(_ends(params), self._sampler["ends"])}

    def lower(self, params: nnx.State) -> dict[str, jax.stages.Lowered]:
        """Returns the two lowered programs of a call, `layer` (run for every layer) and `ends`, for the shapes of `params`."""
        placed = jax.tree.map(_shaped, params, self._placed)
        return {
            "layer": self._layer.lower(placed["blocks"], np.int32(0)),
            "ends": self._ends.lower(_ends(placed)),
        }

    def _layer_program(self, blocks: nnx.State, index: Int[Array, ""]) -> nnx.State:
        return self._move("layer", self._made(blocks, index))

    def _ends_program(self, ends: nnx.State) -> nnx.State:
        return self._move("ends", ends)

    def _made(self, blocks: nnx.State, index: int | Int[Array, ""]) -> nnx.State:
        """Returns a layer, with its adapters merged if `merged_by` is set."""
        layer = jax.tree.map(lambda leaf: leaf[index], blocks)
        return layer if self._merged_by is None else merged(layer, self._merged_by)

    def _move(self, part: str, tree: nnx.State) -> nnx.State:
        return jax.tree.map(_carry, self._cast(tree), self._source[part], self._target[part])

    def _cast(self, tree: nnx.State) -> nnx.State:
        def cast(leaf: nnx.Variable) -> nnx.Variable:
            axes = leaf.get_metadata()["axes"]
            if axes == ("norm",):
                return leaf
            # A product sums over the dimensions after the outputs; a bias has none.
            summed = tuple(range(output_dimensions(axes), len(axes)))
            if self._eight_bit and "rank" not in axes and summed:
                return leaf.replace(quantized(leaf[...], summed))
            return leaf.replace(leaf[...].astype(self._dtype))

        return jax.tree.map(cast, tree, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))


class AdapterTransfer:
    """Converts adapters to this process's sampler weights; the base is transferred in the first call only."""

    def __init__(self, adapters: WeightTransfer, base: WeightTransfer, frozen: nnx.State) -> None:
        """`frozen` is the base with stacked layers; with separate layers if `shares_base`: then the sampler uses the same arrays."""
        self._adapters, self._base, self._frozen = adapters, base, frozen
        self._moved: SamplerWeights | None = None
        self.base_shapes = base.shapes
        self.shapes = _joined(base.shapes, adapters.shapes)
        """Shapes and shardings of a call's result; `base_shapes` is its part without adapters."""

    def __call__(self, params: nnx.State) -> SamplerWeights:
        """A collective call with adapters as `params`. The base in the result is the same in every call."""
        if self._moved is None:
            transfer = self._base.shared if is_apart(self._frozen) else self._base
            self._moved = transfer(self._frozen)
        return _joined(self._moved, self._adapters(params))

    def lower(self, params: nnx.State) -> dict[str, jax.stages.Lowered]:
        """Returns the lowered program that every call runs for each layer, for adapters of the shapes of `params`."""
        return {"layer": self._adapters.lower(params)["layer"]}


class MergingTransfer:
    """Converts adapters to sampler weights without adapters: every call adds them to the base in float32 and transfers the sum."""

    def __init__(self, whole: WeightTransfer, frozen: nnx.State) -> None:
        """`whole` takes base and adapters, and merges by their scale; `frozen` is the base, layers stacked."""
        self._whole, self._frozen, self.shapes = whole, frozen, whole.shapes

    def __call__(self, params: nnx.State) -> SamplerWeights:
        """A collective call with adapters as `params`."""
        return self._whole(put_together(params, self._frozen))

    def lower(self, params: nnx.State) -> dict[str, jax.stages.Lowered]:
        """Returns the two lowered programs of a call; see `WeightTransfer.lower`."""
        return self._whole.lower(put_together(params, self._frozen))


def shares_base(frozen: nnx.State, meshes: Meshes, *, dtype: str) -> bool:
    """Returns whether one copy of a base serves trainer and sampler: one sampler with all devices, the same sharding of every array, and
    the sampler's `dtype`. `frozen` may be shapes, layers stacked."""
    variables = jax.tree.leaves(frozen, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))
    kinds = {each.dtype.name for each in variables if each.get_metadata()["axes"] != ("norm",)}
    if meshes.count > 1 or meshes.train.size != meshes.sampler.size or kinds != {dtype}:
        return False
    trained = jax.tree.leaves(shardings(frozen, meshes.train, TRAINER_RULES))
    sampled = jax.tree.leaves(shardings(frozen, meshes.sampler, SAMPLER_RULES))
    sizes = [leaf.ndim for leaf in jax.tree.leaves(frozen)]
    return all(one.is_equivalent_to(*other) for one, *other in zip(trained, sampled, sizes, strict=True))


def _joined(base: SamplerWeights, adapters: SamplerWeights) -> SamplerWeights:
    layers = zip(base["layers"], adapters["layers"], strict=True)
    return {"layers": tuple(nnx.merge_state(*pair) for pair in layers), "ends": base["ends"]}


def local(tree: PyTree, placed: PyTree) -> PyTree:
    """Returns the same buffers with shardings of a mesh of this process's devices, which no jitted program can do.

    The caller must drop `tree`: deleting or donating one of the two deletes the other.
    """

    def wrap(whole: Array, sharding: NamedSharding) -> Array:
        shards = [shard.data for shard in whole.addressable_shards]
        return jax.make_array_from_single_device_arrays(whole.shape, sharding, shards)

    return jax.tree.map(wrap, tree, placed)


def _ends(params: nnx.State) -> nnx.State:
    """Returns the parameters before and after the blocks; empty for adapters."""
    return params["ends"] if "ends" in params else nnx.State({})


def _shaped(leaf: Array | jax.ShapeDtypeStruct, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _carry(array: Array, source: NamedSharding, target: NamedSharding) -> Array:
    for stage in stages(array.shape, source, target):
        array = lax.with_sharding_constraint(array, stage)
    return array


def stages(shape: tuple[int, ...], source: NamedSharding, target: NamedSharding) -> list[NamedSharding]:
    """Returns the shardings that an array takes from `source` to `target`, two meshes over the same devices in the same order.

    Otherwise the compiler gathers whole arrays, or adds them up with zeros elsewhere, if the meshes do not match. So the dimension
    that the target needs whole is first split over all devices, while the other dimension takes the target's axis: pieces change
    places without copies. Then the pieces are gathered, inside a sampler and between samplers.
    """
    have, want = split(source, len(shape)), split(target, len(shape))
    gathered = [d for d in range(len(shape)) if _busy(source, have[d : d + 1]) - set(want[d])]
    if not gathered:
        return [source, target]
    dimension = gathered[0]

    def finer(sharding: NamedSharding, cut: list[tuple[str, ...]], axes: tuple[str, ...]) -> NamedSharding:
        entries = [entry + axes if d == dimension else entry for d, entry in enumerate(cut)]
        return NamedSharding(sharding.mesh, PartitionSpec(*(entry or None for entry in entries)))

    free = _free(target, want)
    pieces = [
        finer(source, have, _free(source, have)),
        finer(target, want, free),
        finer(target, want, free[:1]),
    ]
    return [source, *(stage for stage in pieces if _divides(shape, stage)), target]


def _busy(sharding: NamedSharding, cut: list[tuple[str, ...]]) -> set[str]:
    """Returns the axes of `cut` with more than one device."""
    return {axis for axes in cut for axis in axes if sharding.mesh.shape[axis] > 1}


def _free(sharding: NamedSharding, cut: list[tuple[str, ...]]) -> tuple[str, ...]:
    """Returns the axes with more than one device over which an array with this split is replicated."""
    used = _busy(sharding, cut)
    return tuple(axis for axis, size in sharding.mesh.shape.items() if size > 1 and axis not in used)


def _divides(shape: tuple[int, ...], sharding: NamedSharding) -> bool:
    parts = [math.prod(sharding.mesh.shape[axis] for axis in axes) for axes in split(sharding, len(shape))]
    return all(size % count == 0 for size, count in zip(shape, parts, strict=True))
