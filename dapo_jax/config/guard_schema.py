"""What a run does when something goes wrong: numbers that are not finite, a sampler that drifts from the trainer, runs that
learn nothing.

None of this changes a number of a healthy run.
"""

from dataclasses import dataclass

from dapo_jax.config.base import checked


@dataclass(frozen=True, kw_only=True)
class GuardConfig:
    """What is not finite, and how far sampler and trainer may differ."""

    max_skipped_updates: int = 3
    """An update with a loss, gradient, advantage or log-probability that is not finite is skipped. More than so many in a row stop
    the run; 0: the first does."""
    post_mortems: int = 5
    """Of so many skipped updates a run writes `run_dir/post_mortem/step_..._update_...`: the batch, what was not finite, the
    responses as text. 0: none."""
    max_mismatch_kl: float | None = None
    """Most that KL(sampler || trainer) may be, `sync/sampler_trainer_kl` in nats a token. null: no limit."""
    on_mismatch: str = "warn"
    """Over that limit: warn, stop, or correct: all tokens of the step get truncated importance weights
    min(pi_trainer / pi_sampler, `mismatch_cap`)."""
    mismatch_cap: float = 2.0
    """Of the weights with on_mismatch: correct. `loss.importance_cap` is the same for every step, whatever the mismatch."""

    __post_init__ = checked


@dataclass(frozen=True, kw_only=True)
class WatchdogsConfig:
    """Warnings about runs that go on and learn nothing. See `dapo_jax.health.watchdogs` for what each looks at."""

    enabled: bool = True
    """False: no warnings, and no `watchdog/` metrics."""
    window: int = 10
    """Steps at the full learning rate before the reward is called stuck; half of them for flat groups."""
    min_entropy: float = 0.05
    """Nats; below it, and below a tenth of what it was at first, entropy has collapsed, unless nearly all responses are right."""
    min_length_frac: float = 0.333
    """Of the mean length at first; below it, length has collapsed."""
    max_truncated_frac: float = 0.5
    """Above it, and above what it was at first by 0.25, too many responses are cut off."""
    min_mixed_frac: float = 0.02
    """Share of groups with both right and wrong responses, or with dynamic_sampling.metric=score of groups whose scores differ; below
    it, all are flat."""

    __post_init__ = checked
