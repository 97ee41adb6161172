"""Computes the memory use of a device from the arrays that are resident while each program runs."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from dapo_jax.plan.compiled import ProgramMemory

MARGIN = 0.05
"""Fraction of a device's memory that a plan leaves free for fragmentation and for buffers outside the programs."""


@dataclass(frozen=True, kw_only=True)
class Phase:
    """The arrays that are on a device while a program runs."""

    name: str
    program: str
    parts: dict[str, int]
    """The bytes of each kind of array."""

    @property
    def total(self) -> int:
        """Total bytes of all parts."""
        return sum(self.parts.values())


@dataclass(frozen=True, kw_only=True)
class Resident:
    """Bytes per device of the arrays that stay in memory between programs."""

    state: int
    """Trained parameters and optimizer moments."""
    moments: int = 0
    """The part of `state` that `optimizer.offload` would move to host memory; 0 if this option is already set."""
    loaded: int = 0
    """Offloaded moments that an update is assumed to keep on the device; 0 if the compiler counts their temporary copies."""
    reference: int = 0
    """The reference policy's parameters; 0 if there is no reference policy."""
    teacher: int = 0
    """The teacher's parameters; 0 if there is no teacher."""
    teaches_update: bool = False
    """Whether the teacher's parameters are arguments of the update's program."""
    base: int = 0
    """The trainer's frozen base weights, if adapters are trained."""
    shares_base: bool = False
    """Whether trainer and sampler share the frozen base weights."""
    sampler_base: int = 0
    """The sampler's own copy of the frozen base weights; 0 if it has none."""
    weights: int = 0
    """The sampler's weights, without the frozen base weights."""
    rotations: int = 0
    """The sampler's cosines and sines of the rotary embedding, for all positions."""
    minibatch: int = 0
    """The input arrays of one update."""
    shorter: int = 0
    """The part of `minibatch` whose rows are shorter than the longest rows."""
    gradient: int = 0
    """The gradient, which is kept between the programs of an update."""
    prefix: int = 0
    """KV cache and logits of the prompts prefilled in one call."""
    buffers: int = 0
    """KV cache and activations of a sequence during chunked prefill; 0 if every sequence fits in a prefill row."""
    reread: int = 0
    """KV cache and logits of a sequence after chunked prefill, before they are copied to its slot."""
    waiting: int = 0
    """The same as `reread`, for a second sequence that waits for a slot; 0 unless rollouts are in flight or prompts may exceed a prefill row."""
    decode_state: int = 0
    """The KV cache and the logits of all slots."""
    paused: int = 0
    """Logits and states of fixed size of responses outside the slots: of all responses in flight if there are fewer slots, and the states of episodes that wait for an
    environment."""


@dataclass(frozen=True, kw_only=True)
class CacheFit:
    """The largest KV cache that fits a sampler's devices."""

    tokens: int
    """Suggested `sampling.cache_tokens`: the number of tokens on all devices of one sampler."""
    slots: int
    """Suggested `sampling.slots`: the number of slots for `in_flight` responses."""
    in_flight: float
    """Number of responses decoded in parallel, if each has the assumed mean number of cached tokens."""


def as_compiled(there: Resident, programs: Mapping[str, ProgramMemory]) -> Resident:
    """Replaces sizes in `there`, which were computed from shapes, with the argument sizes of the compiled programs.

    Compiled sizes may be larger, because TPUs pad arrays to tiles of 8 x 128. For example, `head_dim=64` can double the KV cache.
    """
    generate, add, apply = (programs.get(name) for name in ("generate", "update_add_longest", "update_apply"))
    if generate is not None:
        # `generate` donates the decode state. Its other arguments are the weights and the rotary embedding.
        frozen = there.base if there.shares_base else there.sampler_base
        weights = generate.kept - there.rotations - frozen
        there = replace(there, decode_state=generate.aliased, weights=weights)
    if add is not None:
        # `update_add_longest` donates the gradient. The trained parameters, which have the gradient's size, are also its arguments.
        fixed = there.base + there.teacher * there.teaches_update
        minibatch = add.kept - add.aliased - fixed + there.shorter
        there = replace(there, gradient=add.aliased, minibatch=minibatch)
    if apply is not None:
        there = replace(there, state=apply.aliased - there.loaded)
    if (insert := programs.get("insert_rows") or programs.get("insert_row")) is not None:
        there = replace(there, prefix=insert.kept)
    if (insert := programs.get("insert_part")) is not None:
        there = replace(there, reread=insert.kept, waiting=insert.kept if there.waiting else 0)
    return there


def together(program: str, there: Resident, *, updates: int) -> tuple[str, dict[str, int]]:
    """Returns the phase in which a program runs, and the bytes of the arrays that are resident during it, without temporary arrays.

    Both are empty for a small program that never determines the peak. Between steps, the sampler keeps only its frozen weights.
    During sampling, the prompts of two prefill calls may be in memory, because responses to prompts from the first call may still
    wait for slots when the second call begins. The minibatches of all updates are in memory from the first update to the last.
    """
    between = {
        "train state": there.state,
        "frozen weights": there.base,
        "sampler's frozen weights": there.sampler_base,
        "reference policy": there.reference,
        "teacher": there.teacher,
        "rotations": there.rotations,
    }
    updating = {**between, "minibatches": updates * there.minibatch}
    accumulating = {**updating, "gradient": there.gradient}
    loaded = {"offloaded moments": there.loaded}
    sampler = {**between, "sampler weights": there.weights}
    cache = {**sampler, "decode state": there.decode_state, "paused responses": there.paused}
    prompts = {**cache, "prefilled prompts": 2 * there.prefix}
    chunk = {**cache, "prefilled prompts": there.prefix}
    # A sequence that was prefilled in chunks may wait for its slot while the next one is in prefill.
    waits = "sequence that waits for its slot"
    chunks = {**chunk, "sequence prefilled in chunks": there.buffers, waits: there.waiting}
    ended = {**chunk, waits: there.reread}
    known: dict[str, tuple[str, dict[str, int]]] = {
        "transfer": ("transfer: layers", sampler),
        "transfer_ends": ("transfer: embeddings", sampler),
        "prefill": ("sampling: prefill", prompts),
        "prefill_part": ("sampling: chunked prefill", chunks),
        "prefill_kept": ("sampling: end of a chunked prefill", {**chunks, **ended}),
        "prefill_empty": ("", {}),
        "fill": ("sampling: fill slots", prompts),
        "insert": ("sampling: fill slots", prompts),
        "fill_part": ("sampling: fill slots after a chunked prefill", ended),
        "insert_part": ("sampling: fill slots after a chunked prefill", ended),
        "paused": ("sampling: pause responses", prompts),
        "generate": ("sampling: decode", max(prompts, ended, chunks, key=lambda parts: sum(parts.values()))),
        "score": ("log-probabilities", updating),
        "score_shortest": ("log-probabilities: shortest rows", updating),
        "update_begin": ("update: start", updating),
        "update_add_longest": ("update: longest rows", accumulating),
        "update_add_shortest": ("update: shortest rows", accumulating),
        "update_apply": ("update: optimizer step", {**accumulating, **loaded}),
    }
    # The other names add a suffix to one of these, such as the stack of the layers.
    words = program.split("_")
    names = ("_".join(words[:count]) for count in range(len(words), 0, -1))
    return next((known[name] for name in names if name in known), ("", {}))


def phases(programs: Mapping[str, ProgramMemory], there: Resident, *, updates: int) -> list[Phase]:
    """Returns the phase of each compiled program (see `together`). Each phase also counts the code of all programs."""
    found, code = list[Phase](), sum(memory.code or 0 for memory in programs.values())
    for program, memory in programs.items():
        name, resident = together(program, there, updates=updates)
        if name:
            parts = {part: size for part, size in {**resident, "programs": code}.items() if size}
            parts[f"added by {program}"] = memory.added
            found.append(Phase(name=name, program=program, parts=parts))
    return found
