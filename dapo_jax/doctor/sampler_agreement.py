"""How far the sampler's log-probabilities may be from the trainer's.

A file of its own: its limits are derived here, apart from the step that measures.
"""

from dataclasses import dataclass

from dapo_jax.doctor.check import Found


@dataclass(frozen=True)
class Limits:
    """The differences that rounding explains."""

    kl: float
    """KL of the sampler's policy from the trainer's, mean over sampled tokens, in nats."""
    largest: float
    """The largest difference of one token's two log-probabilities, in nats."""
    why: str


def limits_of(compute_dtype: str, platform: str) -> Limits:
    """The limits for the dtype in which products are computed.

    Both programs do the same sums in another order. In float32 a rounding is 6e-8 of a logit of about 20; over some dozen layers that
    makes 1e-5 nats, and a KL, half the mean square, of 1e-10. In bfloat16 a rounding is 4e-3: with
    SmolLM2-135M a mean of 0.011 nats and a KL of 1.7e-4 were seen where activations are rounded too (docs/metrics.md). Accelerators round the
    operands of float32 products as well, to bfloat16 or TF32, unless they are told otherwise. The limits are a good deal beyond what
    was seen; other weights, another position or another temperature are far beyond them.
    """
    if compute_dtype == "float32" and platform == "cpu":
        return Limits(kl=1e-6, largest=1e-3, why="float32 sums in another order")
    why = (
        "bfloat16 operands" if compute_dtype == "bfloat16" else f"float32 operands, which a {platform} rounds"
    )
    return Limits(kl=1e-3, largest=0.5, why=why)


def agreement(*, kl: float, largest: float, compute_dtype: str, platform: str) -> Found:
    """Whether two sets of log-probabilities of the same tokens are of one policy."""
    limits = limits_of(compute_dtype, platform)
    said = (
        f"KL {kl:.1e}, largest difference of log-probabilities {largest:.1e} nats; {limits.why} explain up to {limits.kl:g} and "
        f"{limits.largest:g}"
    )
    if kl <= limits.kl and largest <= limits.largest:  # NaN is neither
        return Found(message=said)
    return Found(
        message=said,
        state="failed",
        remedy="do not train: the ratio would be of two different policies. See whether it goes away with model.attention=xla, with "
        "model.compute_dtype=float32, or on one device, which tells what it comes from",
    )
