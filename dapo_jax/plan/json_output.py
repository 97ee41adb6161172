"""A plan as data for programs."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from dapo_jax.plan.costs import cache_bytes_per_token
from dapo_jax.plan.freeing import held_in
from dapo_jax.plan.memory import MARGIN
from dapo_jax.plan.plan import SCHEMA_VERSION, Plan


def as_data(plan: Plan) -> dict[str, Any]:
    """The content of `--json`: numbers in bytes, seconds, operations; all memory and work is of one device."""
    return {
        "schema_version": SCHEMA_VERSION,
        "model": {
            "source": plan.config.model.source,
            "parameters": plan.decoder.parameters,
            "trained_parameters": plan.decoder.trained_parameters,
        },
        "layout": asdict(plan.layout),
        "topology": _topology(plan),
        "workload": {**asdict(plan.work), "context": plan.work.context},
        "cache": {**cache_of(plan), "fits": None if plan.cache_fit is None else asdict(plan.cache_fit)},
        "resident_bytes": asdict(plan.resident),
        "work": [asdict(work) for work in plan.works],
        "programs": [
            {
                **asdict(program),
                "memory": None
                if program.memory is None
                else {**asdict(program.memory), "needed": program.memory.needed},
            }
            for program in plan.programs
        ],
        "phases": [{**asdict(phase), "total": phase.total} for phase in plan.phases],
        "limit_bytes": plan.limit,
        "failures": plan.failures,
        "held": {name: [asdict(held) for held in held_in(plan, name)] for name in plan.failures},
        "fits": plan.fits if plan.programs else None,
        "roofline": None if plan.slice is None else _roofline(plan),
        "expected_step": _expected(plan),
    }


def swept_as_data(found: Sequence[tuple[str, Plan | str]]) -> list[dict[str, Any]]:
    """The content of `--json` for a sweep: each mesh's plan, or the reason why there is none; best first."""
    return [
        {"mesh": name, **({"reason": one} if isinstance(one, str) else as_data(one))} for name, one in found
    ]


def cache_of(plan: Plan) -> dict[str, int | float]:
    """Bytes of keys and values over all devices of a sampler, of a token and of the whole; its pages; responses side by side."""
    config, pages = plan.config, plan.pages
    token = cache_bytes_per_token(plan.decoder, config.sampling, compute_dtype=config.model.compute_dtype)
    tokens = pages.pools * pages.pool_pages * pages.page_tokens
    return {
        "bytes_per_token": token,
        "tokens": tokens,
        "bytes": token * tokens,
        "page_tokens": pages.page_tokens,
        "slots": config.sampling.slots,
        "holders": pages.holders,
        "slot_tokens": pages.capacity,
        "in_flight": plan.in_flight,
    }


def _topology(plan: Plan) -> dict[str, Any] | None:
    if plan.slice is None:
        return None
    made = plan.slice
    return {
        "name": made.name,
        "chips": made.chips,
        "hosts": made.hosts,
        "devices": made.chips * made.chip.devices,
        "hbm_bytes": made.chip.device_hbm_bytes,
        "margin": MARGIN,
    }


def _expected(plan: Plan) -> dict[str, Any]:
    found = plan.expected
    ways = {
        name: {
            **asdict(way),
            "kept_bytes": way.kept_bytes,
            "checkpoint_bytes": plan.checkpoint_bytes(way),
            "chip_hours": plan.chip_hours(way),
        }
        for name, way in (("waves", found.waves), ("flight", found.flight))
    }
    return {**asdict(found), **ways}


def _roofline(plan: Plan) -> dict[str, Any]:
    return {
        "step_s": plan.step_s,
        "mfu_bound": plan.mfu_bound,
        "xla_estimates": {
            phase: {**asdict(one), "seconds": one.seconds} for phase, one in plan.estimates.items()
        },
        "phases": [
            {
                "phase": bound.work.phase,
                "compute_s": bound.compute_s,
                "hbm_s": bound.hbm_s,
                "ici_s": bound.ici_s,
                "seconds": bound.seconds,
                "limit": bound.limit,
            }
            for bound in plan.bounds
        ],
    }
