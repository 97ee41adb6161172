"""Weight transfer from the trainer to the samplers. A jitted program, called once per layer, casts, unstacks and reshards the weights.

A scan over stacked layers would copy each layer's weights in every decoding step. On CPU, such a scan was measured to be 1.5 times slower.
The sampler therefore stores layers separately. The program's arguments are the whole stack and a layer index, so in addition to the trainer's and the
sampler's arrays, the transfer needs memory for only one layer.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Int, PyTree, UInt32

from dapo_jax.models.decoder import is_apart, stacks_of
from dapo_jax.models.joined import joined
from dapo_jax.models.parameters import is_float32, output_dimensions, repeated_heads
from dapo_jax.numerics.quantization import quantized
from dapo_jax.parallel.mesh import AXES, Meshes
from dapo_jax.parallel.sharding import SAMPLER_RULES, TRAINER_RULES, shardings, split
from dapo_jax.parallel.together import Together, all_gather_bytes

SamplerWeights = dict[str, PyTree]
"""The sampler's weights. `layers` is a tuple with the state of each block, in which matrices may be joined (see `models.joined`). `ends` contains the embedding, the final norm and the unembedding."""


def both_on(mesh: Mesh) -> Meshes:
    """Returns the meshes for a single process that trains and samples on the same mesh."""
    types = (mesh.axis_types[0], *mesh.axis_types)
    publish = Mesh(mesh.devices[None], ("sampler", *AXES), axis_types=types)
    return Meshes(train=mesh, publish=publish, sampler=mesh, index=0)


@dataclass(frozen=True)
class Cast:
    """Casts the weights of a layer to the dtypes of the sampler, and repeats key heads."""

    dtype: str
    eight_bit: bool
    tensor: int
    """The size of the sampler's axis `tensor`."""

    def __call__(self, tree: nnx.State) -> nnx.State:
        """Returns the weights with the shapes and dtypes of the sampler, before they move."""
        return jax.tree.map(self._leaf, tree, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))

    def _leaf(self, leaf: nnx.Variable) -> nnx.Variable:
        axes = leaf.get_metadata()["axes"]
        if "kv_heads" in axes:
            heads = leaf.shape[at := axes.index("kv_heads")]
            copies = repeated_heads(heads, self.tensor) // heads
            leaf = leaf.replace(jnp.repeat(leaf[...], copies, axis=at)) if copies > 1 else leaf
        if is_float32(leaf):
            return leaf
        # A matrix product sums over all dimensions after the output dimensions. A bias has only output dimensions.
        summed = tuple(range(output_dimensions(axes).stop, len(axes)))
        if self.eight_bit and "rank" not in axes and summed:
            return leaf.replace(quantized(leaf[...], summed))
        return leaf.replace(leaf[...].astype(self.dtype))


class WeightTransfer:
    """Converts trainer parameters to this process's sampler weights. Every process calls it with the same parameters.

    Key heads are repeated until they can be split over the sampler's axis `tensor`.

    Args:
        params: decoder parameters with stacked layers, or their shapes. They may consist of adapters only, or of a base without adapters.
        where: all meshes of the run, or the mesh on which a single process trains and samples.
        dtype: dtype of the sampler's weights. Norms and the like remain in float32, as in the trainer, because rounding them would double the
            difference between the sampler's and the trainer's log-probabilities.
        eight_bit: store matrices as int8 with one scale per output (`Quantized`). Biases and adapters remain in `dtype`.
        places: `DecoderConfig.places`; required if there are layers of several kinds.
        join: join matrices that multiply the same tokens (see `dapo_jax.models.joined`). None: except on CPU, where joined matrices are not faster.

    Raises:
        ValueError: a dimension is not divisible by the size of its mesh axis.
    """

    def __init__(
        self, params: nnx.State, where: Mesh | Meshes, *, dtype: str, eight_bit: bool = False,
        places: Sequence[tuple[str, int]] = (), join: bool | None = None,
    ) -> None:  # fmt: skip
        meshes = both_on(where) if isinstance(where, Mesh) else where
        self._cast = Cast(dtype, eight_bit, meshes.sampler.shape["tensor"])
        # The CPU runtime may hang if many collective programs are queued.
        self._waits = meshes.train.devices.flat[0].platform == "cpu"
        stacks = stacks_of(params)
        layers = range(jax.tree.leaves(params[stacks[0]])[0].shape[0])
        self._places = places or [(stacks[0], index) for index in layers]
        shapes = {
            "ends": jax.eval_shape(self._cast, _ends(params)),
            **{
                name: jax.eval_shape(lambda blocks: self._cast(_layer(blocks, 0)), params[name])
                for name in stacks
            },
        }
        self._placed = shardings(params, meshes.train)
        self._source = shardings(shapes, meshes.train)
        self._target = shardings(shapes, meshes.publish, SAMPLER_RULES)
        join = meshes.sampler.devices.flat[0].platform != "cpu" if join is None else join
        self._join = partial(joined, parts=self._cast.tensor) if join else lambda part: part
        shapes = {name: jax.eval_shape(self._join, part) for name, part in shapes.items()}
        made = shardings(shapes, meshes.publish, SAMPLER_RULES)
        self._sampler = shardings(shapes, meshes.sampler, SAMPLER_RULES)
        out = jax.tree.map(_shaped, shapes, self._sampler)
        # Adapters may be in the layers of one stack only.
        layers = tuple(out.get(name, nnx.State({})) for name, _ in self._places)
        self.shapes: SamplerWeights = {"layers": layers, "ends": out["ends"]}
        """Shapes and shardings of the transferred weights."""
        self._layer = {
            name: Together(jax.jit(partial(self._layer_program, name), out_shardings=made[name]))
            for name in stacks
        }
        self._ends = Together(jax.jit(self._ends_program, out_shardings=made["ends"]))

    def __call__(self, params: nnx.State) -> SamplerWeights:
        """Casts and reshards the weights on all devices (a collective call), and turns the local shards into arrays on the sampler's mesh without copying them.

        Only the first call compiles. The result remains valid after an update that donates `params`.
        """
        return self.whole([*self.parts(params)])

    def parts(self, params: nnx.State) -> Iterator[nnx.State]:
        """Transfers the weights one part at a time: each layer, then the ends. So a caller that sends parts elsewhere needs memory for only one layer."""
        for name, index in self._places:
            if name not in self._layer:
                yield nnx.State({})
                continue
            layer = local(self._layer[name](params[name], np.int32(index)), self._sampler[name])
            yield jax.block_until_ready(layer) if self._waits else layer
            del layer  # before the next one is made
        yield local(self._ends(_ends(params)), self._sampler["ends"])

    def placed(self, index: int, leaves: Sequence[np.ndarray]) -> nnx.State:
        """Places one of the `parts` of another process, given by its arrays, on the sampler's devices. Raises ValueError if the arrays have other shapes or dtypes."""
        shapes, structure = jax.tree.flatten([*self.shapes["layers"], self.shapes["ends"]][index])
        found, expected = ([f"{leaf.dtype}{leaf.shape}" for leaf in tree] for tree in (leaves, shapes))
        if found != expected:
            raise ValueError(
                f"part {index} of the weights has the arrays {found}, needs {expected}: sampler and trainer need equal devices per copy of the weights"
            )
        pairs = zip(leaves, shapes, strict=True)
        return jax.tree.unflatten(structure, [jax.device_put(leaf, shape.sharding) for leaf, shape in pairs])

    def whole(self, parts: Sequence[nnx.State]) -> SamplerWeights:
        """Returns the sampler's weights, which consist of all `parts`."""
        return {"layers": tuple(parts[:-1]), "ends": parts[-1]}

    def shared(self, params: nnx.State) -> SamplerWeights:
        """Returns sampler weights that share the arrays of `params`, which must be separate per layer and sharded as in the sampler (see `shares_base`)."""
        layers = tuple(local(params[name][index], self._sampler[name]) for name, index in self._places)
        return {"layers": layers, "ends": local(_ends(params), self._sampler["ends"])}

    def lower(self, params: nnx.State) -> dict[str, jax.stages.Lowered]:
        """Lowers the programs that a call executes, for the shapes of `params`: one for each stack, which runs once per layer, and `ends`."""
        placed = jax.tree.map(_shaped, params, self._placed)
        return {
            **{name: program.lower(placed[name], np.int32(0)) for name, program in self._layer.items()},
            "ends": self._ends.lower(_ends(placed)),
        }

    def checksums(self, params: nnx.State) -> UInt32[np.ndarray, " parts"]:
        """Returns the checksum of each layer of `params`, and of the ends, as the sampler stores them. A collective call. A layer without parameters has 0."""
        program, apart = _checksums_of(self._cast), is_apart(params)
        parts = [
            () if name not in self._layer else (params[name][at],) if apart else (params[name], np.int32(at))
            for name, at in self._places
        ]
        # Each program needs memory for a layer, so they run one after the other.
        found = [int(program(*part)) if part else 0 for part in (*parts, (_ends(params),))]
        return np.array(found, np.uint32)

    def _layer_program(self, name: str, blocks: nnx.State, index: Int[Array, ""]) -> nnx.State:
        return self._move(name, _layer(blocks, index))

    def _ends_program(self, ends: nnx.State) -> nnx.State:
        return self._move("ends", ends)

    def _move(self, part: str, tree: nnx.State) -> nnx.State:
        return self._join(jax.tree.map(_carry, self._cast(tree), self._source[part], self._target[part]))


class AdapterTransfer:
    """Converts adapters to this process's sampler weights. Only the first call transfers the base."""

    def __init__(self, adapters: WeightTransfer, base: WeightTransfer, frozen: nnx.State) -> None:
        """`frozen` is the base, with stacked layers. If `shares_base` returns True, `frozen` has separate layers, and the sampler uses the same arrays."""
        self._adapters, self._base, self._frozen = adapters, base, frozen
        self._moved: SamplerWeights | None = None
        self.base_shapes = base.shapes
        self.shapes = _with_adapters(base.shapes, adapters.shapes)
        """Shapes and shardings of the transferred weights. The attribute `base_shapes` contains only the base."""

    def __call__(self, params: nnx.State) -> SamplerWeights:
        """Transfers the adapters in `params`, as a collective call. Every call returns the same base arrays."""
        return self.whole([*self.parts(params)])

    def parts(self, params: nnx.State) -> Iterator[nnx.State]:
        """Transfers the adapters one part at a time (see `WeightTransfer.parts`)."""
        return self._adapters.parts(params)

    def placed(self, index: int, leaves: Sequence[np.ndarray]) -> nnx.State:
        """Places the adapters of one part (see `WeightTransfer.placed`)."""
        return self._adapters.placed(index, leaves)

    def whole(self, parts: Sequence[nnx.State]) -> SamplerWeights:
        """Returns the sampler's weights, which consist of this process's base and the adapters in `parts`."""
        if self._moved is None:
            transfer = self._base.shared if is_apart(self._frozen) else self._base
            self._moved = transfer(self._frozen)
        return _with_adapters(self._moved, self._adapters.whole(parts))

    def checksums(self, params: nnx.State) -> UInt32[np.ndarray, " parts"]:
        """Returns the checksums of `WeightTransfer`, of base and adapters together."""
        return self._base.checksums(self._frozen) + self._adapters.checksums(params)

    def lower(self, params: nnx.State) -> dict[str, jax.stages.Lowered]:
        """Lowers the programs that each call executes, for adapters with the shapes of `params` (see `WeightTransfer.lower`)."""
        return self._adapters.lower(params)


def not_arrived_frac(
    transfer: WeightTransfer | AdapterTransfer, params: nnx.State, weights: SamplerWeights
) -> float:
    """Returns the share of the layers whose weights differ between trainer and samplers, over all processes. A collective call. The parameters before and after the blocks count as one layer.

    Compared are sums over all bits that do not depend on the order, because the sampler joins and shards matrices in another way. A sum is equal by chance with probability 2^-32.
    """
    expected, held = transfer.checksums(params), held_checksums(weights)
    found = [np.frombuffer(message, np.uint32) for message in all_gather_bytes(held.tobytes())]
    return float(np.mean([each != expected for each in found]))


def held_checksums(weights: SamplerWeights) -> UInt32[np.ndarray, " parts"]:
    """Returns the checksum of each layer of a sampler's weights, and of the ends. They equal the result of `WeightTransfer.checksums` if all weights have arrived."""
    return np.array([_checksums_of(None)(part) for part in (*weights["layers"], weights["ends"])], np.uint32)


@cache
def _checksums_of(cast: Cast | None) -> Together:
    """Returns the program that computes the checksum of a layer, or of the layer at an index in a stack, after `cast`. All runs of a process share it."""

    def program(tree: nnx.State, index: Int[Array, ""] | None = None) -> UInt32[Array, ""]:
        tree = tree if index is None else _layer(tree, index)
        total = jnp.uint32(0)
        for leaf in jax.tree.leaves(cast(tree) if cast else tree):
            bits = lax.bitcast_convert_type(leaf, f"uint{8 * leaf.dtype.itemsize}").astype(jnp.uint32)
            # This polynomial maps different numbers of 32 bits to different numbers, so opposite changes of two weights do not cancel each other.
            total += jnp.sum(bits * (2 * bits + 1))
        return total

    return Together(jax.jit(program))


def shares_base(frozen: nnx.State, meshes: Meshes, *, dtype: str) -> bool:
    """Returns whether trainer and sampler can share one copy of the base. The base must have the sampler's `dtype` and equal
    shardings in trainer and sampler, and a single sampler must use all devices. `frozen` is the base, or its shapes, with stacked layers."""
    variables = jax.tree.leaves(frozen, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))
    kinds = {each.dtype.name for each in variables if not is_float32(each)}
    alike = [(mesh.size, mesh.shape["tensor"]) for mesh in (meshes.train, meshes.sampler)]
    if meshes.count > 1 or alike[0] != alike[1] or kinds != {dtype}:
        return False
    trained = jax.tree.leaves(shardings(frozen, meshes.train, TRAINER_RULES))
    sampled = jax.tree.leaves(shardings(frozen, meshes.sampler, SAMPLER_RULES))
    sizes = [leaf.ndim for leaf in jax.tree.leaves(frozen)]
    return all(one.is_equivalent_to(*other) for one, *other in zip(trained, sampled, sizes, strict=True))


def _with_adapters(base: SamplerWeights, adapters: SamplerWeights) -> SamplerWeights:
    layers = zip(base["layers"], adapters["layers"], strict=True)
    return {"layers": tuple(nnx.merge_state(*pair) for pair in layers), "ends": base["ends"]}


def local(tree: PyTree, placed: PyTree) -> PyTree:
    """Wraps the local buffers of `tree` with the shardings `placed`, on a mesh of this process's devices. A jitted program cannot do this.

    The caller must no longer use `tree`, because deleting or donating either tree also deletes the buffers of the other.
    """

    def wrap(whole: Array, sharding: NamedSharding) -> Array:
        shards = [shard.data for shard in whole.addressable_shards]
        return jax.make_array_from_single_device_arrays(whole.shape, sharding, shards)

    return jax.tree.map(wrap, tree, placed)


def _layer(blocks: nnx.State, index: int | Int[Array, ""]) -> nnx.State:
    return jax.tree.map(lambda leaf: leaf[index], blocks)


def _ends(params: nnx.State) -> nnx.State:
    """Returns the parameters before and after the blocks. The result is empty if `params` consists of adapters only."""
    return params["ends"] if "ends" in params else nnx.State({})


def _shaped(leaf: Array | jax.ShapeDtypeStruct, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _carry(array: Array, source: NamedSharding, target: NamedSharding) -> Array:
    for stage in stages(array.shape, source, target):
        array = lax.with_sharding_constraint(array, stage)
    return array


def stages(shape: tuple[int, ...], source: NamedSharding, target: NamedSharding) -> list[NamedSharding]:
    """Returns the shardings through which an array moves from `source` to `target`, on two meshes with the same devices in the same order.

    For a direct move between different meshes, the compiler would gather whole arrays, or sum them padded with zeros. So a
    dimension that must be gathered is first sharded over all remaining devices, and all other dimensions get the target's sharding. This
    moves pieces without copying them to several devices. Then the pieces are gathered, first inside a sampler, then between samplers.
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
    """Returns the mesh axes in `cut` that have more than one device."""
    return {axis for axes in cut for axis in axes if sharding.mesh.shape[axis] > 1}


def _free(sharding: NamedSharding, cut: list[tuple[str, ...]]) -> tuple[str, ...]:
    """Returns the mesh axes with more than one device that are not in `cut`. An array that is sharded by `cut` is replicated over them."""
    used = _busy(sharding, cut)
    return tuple(axis for axis, size in sharding.mesh.shape.items() if size > 1 and axis not in used)


def _divides(shape: tuple[int, ...], sharding: NamedSharding) -> bool:
    parts = [math.prod(sharding.mesh.shape[axis] for axis in axes) for axes in split(sharding, len(shape))]
    return all(size % count == 0 for size, count in zip(shape, parts, strict=True))
