"""Where a plan does not fit: what lies on a device together, the largest first, and the keys of the configuration that would free it."""

from collections.abc import Callable
from dataclasses import dataclass

from dapo_jax.config import TrainConfig
from dapo_jax.plan.memory import together
from dapo_jax.plan.plan import Plan
from dapo_jax.plan.refusals import needed_bytes
from dapo_jax.plan.units import size

_LEAST = 0.005
"""Parts of a device's memory below this share are not worth a line."""


@dataclass(frozen=True, kw_only=True)
class Way:
    """A change of the configuration that takes less of a device's memory."""

    change: str
    """Keys with their values."""
    does: str = ""
    frees: int | None = None
    """Bytes; None: only a compilation would tell."""

    def __str__(self) -> str:
        """The change in words."""
        freed = [] if self.frees is None else [f"frees {size(self.frees)}"]
        return f"{self.change} {' and '.join(filter(None, (self.does, *freed)))}".rstrip()


@dataclass(frozen=True, kw_only=True)
class Held:
    """One kind of thing on a device."""

    part: str
    bytes: int
    ways: tuple[Way, ...]


def held_in(plan: Plan, program: str) -> list[Held]:
    """Everything on a device while `program` runs: what outlives it, the largest first, then what it adds; of one that was refused alone, what it needs."""
    phase = next((phase for phase in plan.phases if phase.program == program), None)
    found = together(program, plan.resident, updates=plan.work.updates)
    resident = {} if found is None else found[1]
    if phase is not None:
        added = {part: size for part, size in phase.parts.items() if part not in resident}
    else:
        refusal = next((one.refusal for one in plan.programs if one.name == program), "")
        added = {f"all of {program}": needed_bytes(refusal) or 0}
    ranked = sorted(resident.items(), key=lambda part: -part[1])
    least = _LEAST * (plan.limit or 0)
    return [
        Held(part=part, bytes=size, ways=_ways(plan, part, size))
        for part, size in (*ranked, *added.items())
        if size > least
    ]


def _ways(plan: Plan, part: str, held: int) -> tuple[Way, ...]:
    made: dict[str, Callable[[Plan, int], list[Way]]] = {
        "train state": _state,
        "gradient": lambda plan, held: [_more_chips(plan, held)],
        "reference policy": lambda _, held: [Way(change="loss.kl_coef=0", does="needs none", frees=held)],
        "decode state": _decode_state,
        "sampler weights": _weights,
        "frozen weights": lambda plan, held: [_more_chips(plan, held)],
        "sampler's frozen weights": _weights,
        "paused responses": _paused,
        "prefilled prompts": _prefix,
        "minibatches": _minibatches,
        "sequence read in parts": _longest,
        "sequence that waits for its slot": _longest,
    }
    if part in made:
        return tuple(made[part](plan, held))
    return tuple(_added(plan.config, plan)) if part.startswith(("added by update", "all of update")) else ()


def _state(plan: Plan, held: int) -> list[Way]:
    moments = plan.resident.moments
    kept = "keeps the moments in the host's memory"
    offload = [Way(change="optimizer.offload=true", does=kept, frees=moments)] if moments else []
    return [*offload, _more_chips(plan, held)]


def _more_chips(plan: Plan, held: int) -> Way:
    """Over twice as many devices there is half of it on each: those that hold copies, or others."""
    train = plan.layout.train
    if train["data"] % 2 == 0:
        change = f"parallel.fsdp={2 * train['fsdp']} parallel.data={train['data'] // 2}"
    else:
        rows, over = plan.config.batch.rows_per_microbatch, 2 * train["fsdp"] * train["data"]
        filled = f" batch.rows_per_microbatch={-(-rows // over) * over}" if rows % over else ""
        change = f"parallel.fsdp={2 * train['fsdp']}{filled} on a slice of twice the chips"
    return Way(change=change, frees=held // 2)


def _minibatches(plan: Plan, held: int) -> list[Way]:
    if plan.work.updates == 1:
        return []
    change = f"batch.prompts_per_step={plan.config.batch.prompts_per_step // 2}"
    return [Way(change=change, does="has half as many updates a step", frees=held // 2)]


def _decode_state(plan: Plan, held: int) -> list[Way]:
    config, pages, made = plan.config.sampling, plan.pages, []
    spread = plan.layout.sampler_devices // plan.layout.sampler["tensor"]
    tokens, least = (
        count * pages.page_tokens * pages.pools for count in (pages.pool_pages, pages.table_pages)
    )
    fits = plan.cache_fit
    fewer = max(least, tokens // 2) if fits is None or fits.tokens >= tokens else fits.tokens
    fewer -= fewer % (pages.page_tokens * pages.pools)
    if pages.table_pages > 1 and fewer < tokens:
        change = f"sampling.cache_tokens={fewer} (of {tokens})"
        made.append(Way(change=change, frees=(tokens - fewer) // spread * plan.token_bytes))
    if config.slots > spread and (fewer >= tokens or pages.table_pages == 1):
        half = config.slots // 2 // spread * spread
        made.append(
            Way(
                change=f"sampling.slots={half} (of {config.slots})",
                frees=held * (config.slots - half) // config.slots,
            )
        )
    if not config.cache_dtype:
        # Each number of 2 or 4 bytes becomes one of 1; of the scales there is one for a head's.
        in_bytes = (2 if plan.config.model.compute_dtype == "bfloat16" else 4) * plan.decoder.head_dim
        share = 1 - (plan.decoder.head_dim + 4) / in_bytes
        cache = tokens // spread * plan.token_bytes
        made.append(
            Way(change=f"sampling.cache_dtype=int8{_with_correction(plan.config)}", frees=int(cache * share))
        )
    return made


def _weights(plan: Plan, held: int) -> list[Way]:
    made, devices, tensor = [], plan.layout.sampler_devices, plan.layout.sampler["tensor"]
    wider = [
        more
        for more in range(tensor + 1, devices + 1)
        if devices % more == 0 and plan.decoder.kv_heads % more == 0
    ]
    if wider:
        change = f"parallel.sampler_tensor={wider[-1]} (now {tensor})"
        made.append(Way(change=change, frees=held - held * tensor // wider[-1]))
    if not plan.config.sampling.weight_dtype:
        each = 2 if plan.config.model.compute_dtype == "bfloat16" else 4
        change = f"sampling.weight_dtype=int8{_with_correction(plan.config)}"
        made.append(Way(change=change, frees=held - held // each))
    if not wider and plan.layout.samplers > 1:
        hosts = 2 * plan.config.parallel.sampler_hosts
        change = f"parallel.sampler_hosts={hosts} parallel.sampler_tensor={2 * tensor}"
        if plan.decoder.kv_heads % (2 * tensor) == 0:
            made.append(Way(change=change, does=f"has one sampler on {hosts} hosts", frees=held // 2))
    return made


def _with_correction(config: TrainConfig) -> str:
    """A note of the weights that eight bits need beside them; empty where there are some."""
    return " (with loss.importance_cap)" if config.correction.kind == "none" else ""


def _paused(plan: Plan, held: int) -> list[Way]:
    slots, group = plan.config.sampling.slots * plan.layout.samplers, plan.config.batch.group_size
    change = f"rollout.in_flight={slots // group * group} (of {plan.config.rollout.in_flight})"
    return [Way(change=change, does="has a slot for each", frees=held)] if slots >= group else []


def _prefix(plan: Plan, held: int) -> list[Way]:
    tokens, longest = plan.config.sampling.prefill_tokens, plan.config.data.max_prompt_tokens
    half = tokens // 2
    return [Way(change=f"sampling.prefill_tokens={half}", frees=held // 2)] if half >= longest else []


def _longest(plan: Plan, held: int) -> list[Way]:
    limit = plan.config.sampling.max_response_tokens
    return [Way(change=f"a lower sampling.max_response_tokens (now {limit})")]


def _added(config: TrainConfig, plan: Plan) -> list[Way]:
    made, train = [], plan.layout.train
    if config.model.remat != "full":
        made.append(Way(change="model.remat=full", does="computes activations again"))
    if config.model.compute_dtype != "bfloat16":
        made.append(Way(change="model.compute_dtype=bfloat16"))
    least = train["data"] * train["fsdp"]
    if config.batch.rows_per_microbatch > least:
        made.append(Way(change=f"batch.rows_per_microbatch={least} (now {config.batch.rows_per_microbatch})"))
    if not made:
        change = f"parallel.context={2 * train['context']} or parallel.tensor={2 * train['tensor']}"
        made.append(Way(change=change, does="with less of parallel.fsdp has fewer tokens on a device"))
    return made
