"""The compiled programs of a run. Runs in the same process share them, so a second run with the same shapes and options compiles nothing.

For example, a notebook that trains again with another learning rate, seed or dataset starts immediately. Cached programs contain no weights.
"""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from typing import Any

import jax
from flax import nnx
from jax.stages import Lowered

from dapo_jax.config import SamplingConfig
from dapo_jax.models.decoder import is_apart
from dapo_jax.models.lora import parted
from dapo_jax.models.presets import DecoderConfig
from dapo_jax.models.tensors import shapes_of
from dapo_jax.parallel.mesh import Meshes
from dapo_jax.parallel.together import meet
from dapo_jax.parallel.weights import (
    AdapterTransfer,
    SamplerWeights,
    WeightTransfer,
    shares_base,
)
from dapo_jax.run.policy import Policy
from dapo_jax.sampling.decoding import Decoding
from dapo_jax.sampling.engine import DecoderEngine

_KEPT = 4

_AT_ONCE = 8
"""Maximum number of programs compiled at the same time. Compiling a large program takes gigabytes of host memory."""


engine_of = lru_cache(maxsize=_KEPT)(DecoderEngine)
"""Returns the sampler's engine (see `DecoderEngine`). Calls with the same arguments return the same engine."""


def compile_sampling(engine: Any, weights: SamplerWeights, decodings: Iterable[Decoding]) -> None:
    """Compiles all sampling programs of `engine` (see `DecoderEngine.programs`) in parallel, then waits for all other processes. `weights` and `decodings` may be shapes.

    Without this wait, a process could time out in a collective while another process is still compiling.
    """
    for decoding in decodings:
        leaves, structure = jax.tree.flatten((weights, decoding))
        _compiled(engine, structure, tuple(leaves))
    meet()


@lru_cache(maxsize=2 * _KEPT)
def _compiled(engine: Any, structure: Any, leaves: tuple[Any, ...]) -> None:
    # Only one program depends on `decoding`. From the second `decoding` on, the other programs are in the cache.
    lowered = [lower() for lower in engine.programs(*jax.tree.unflatten(structure, leaves)).values()]
    with ThreadPoolExecutor(max_workers=_AT_ONCE) as threads:
        for _ in threads.map(Lowered.compile, lowered):
            pass  # the iteration raises errors from the threads


Transfer = WeightTransfer | AdapterTransfer
"""A function from trained parameters to sampler weights."""


def transfer_of(policy: Policy, meshes: Meshes, sampling: SamplingConfig, *, dtype: str) -> Transfer:
    """Returns the transfer of weights from trainer to sampler: an `AdapterTransfer` if there are adapters, otherwise a `WeightTransfer`."""
    eight_bit = sampling.weight_dtype == "int8"
    transfer = partial(_transfer, policy.decoder, meshes, dtype=dtype, eight_bit=eight_bit)
    if policy.decoder.lora is None:
        return transfer()
    # Arrays that are shared with the trainer have its form.
    base = transfer(of_base=True, join=False if is_apart(policy.frozen) else None)
    return AdapterTransfer(transfer(), base, policy.frozen)


@lru_cache(maxsize=2 * _KEPT)
def _transfer(
    decoder: DecoderConfig, meshes: Meshes, *, of_base: bool = False, **options: Any
) -> WeightTransfer:
    """Returns the transfer of the trained parameters, or of the base under adapters."""
    trained, frozen = parted(shapes_of(decoder))
    return WeightTransfer(frozen if of_base else trained, meshes, **options, places=decoder.places)


def sharing(meshes: Meshes, sampling: SamplingConfig, *, dtype: str) -> Callable[[nnx.State], bool]:
    """Returns a function that takes the shapes of a LoRA base, and returns whether a sampler with this `dtype` shares the trainer's arrays (see `shares_base`).

    Arrays are not shared if the sampler's weights are int8.
    """
    if sampling.weight_dtype:
        return lambda frozen: False
    return partial(shares_base, meshes=meshes, dtype=dtype)
