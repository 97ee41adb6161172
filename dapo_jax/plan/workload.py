"""The workload of a step: how many prompts, responses, tokens and microbatches, under stated assumptions."""

import math
from dataclasses import dataclass

from dapo_jax.config import ConfigError, TrainConfig
from dapo_jax.training.minibatch import stack_capacity


@dataclass(frozen=True, kw_only=True)
class Assumptions:
    """Quantities that a configuration does not say. Each has a default that is said in the report."""

    response_tokens: int | float | None = None
    """The mean; None: every response is as long as it may be."""
    response_tokens_std: int | float = 0.0
    prompt_tokens: int | float | None = None
    """The mean; None: every prompt is as long as it may be."""
    informative: int | float = 0.5
    """The share of groups that are neither all correct nor all wrong."""
    turns: int | float | None = None
    """The mean of an episode; None: every episode has as many as it may have."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One step."""

    prompts: int
    """Sampled, over all waves."""
    waves: int
    """0 where rollouts stay in flight (`rollout.in_flight`)."""
    responses: int
    """Sampled."""
    response_mean: float
    response_std: float
    longest: float
    """The longest response: two standard deviations above the mean, at most the limit."""
    prompt_mean: float
    trained: int
    """Responses that are trained on."""
    updates: int
    microbatches: int
    """The microbatches of one update, if rows are packed without a gap."""
    room: int
    """Microbatches that an update's program has room for when all responses are as long as they may be."""
    microbatch_tokens: int
    """Tokens of one microbatch with its padding."""
    informative: float
    """The share of groups that are; 1 without dynamic sampling."""
    readings: float
    """Times that an episode is read again between its turns, with its prompt and all that was before; 0 where none is."""
    notes: tuple[str, ...]
    """The assumptions, in words."""

    @property
    def sequence(self) -> float:
        """Mean tokens of a prompt and its response."""
        return self.prompt_mean + self.response_mean

    @property
    def context(self) -> float:
        """Mean entries of the cache that a decoded token attends to.

        A response of L tokens attends to prompt + 0, 1, ... L - 1: over all tokens prompt + E[L(L-1)/2] / E[L].
        """
        mean, square = self.response_mean, self.response_mean**2 + self.response_std**2
        return self.prompt_mean + (square - mean) / (2 * mean)

    @property
    def between(self) -> float:
        """Mean tokens of an episode between two turns, its prompt among them: of T turns that are alike prompt + L k / T for k = 1 ... T - 1."""
        return self.prompt_mean + self.response_mean / 2

    @property
    def attended(self) -> float:
        """Mean query-key pairs of a causal sequence of prompt and response: E[n(n+1)/2]."""
        return (self.sequence**2 + self.response_std**2 + self.sequence) / 2


def workload_of(config: TrainConfig, assumed: Assumptions) -> Workload:
    """The step that `config` describes.

    Raises:
        ConfigError: assumed lengths are beyond the configuration's, or so few groups would be informative that dynamic sampling
            runs out of waves.
    """
    limit, notes = config.sampling.max_response_tokens, []
    mean = _length("--response-tokens", assumed.response_tokens, "sampling.max_response_tokens", limit, notes)
    prompt = _length("--prompt-tokens", assumed.prompt_tokens, "data.max_prompt_tokens", config.data.max_prompt_tokens, notes)  # fmt: skip
    prompts, waves = _sampled(config, assumed.informative, notes)
    batch = config.batch
    readings = _between_turns(config, assumed.turns, prompts * batch.group_size * (prompt + mean / 2), notes)
    each, rows = batch.groups_per_update * batch.group_size, batch.rows_per_microbatch
    packed = math.ceil(each * (prompt + mean) / config.row_tokens)
    # At the limit a row holds so many rollouts.
    fits = max(1, config.row_tokens // (config.data.max_prompt_tokens + limit))
    most = math.ceil(math.ceil(each / fits) / rows)
    return Workload(
        prompts=prompts,
        waves=waves,
        responses=prompts * batch.group_size,
        response_mean=mean,
        response_std=float(assumed.response_tokens_std),
        longest=min(float(limit), mean + 2 * assumed.response_tokens_std),
        prompt_mean=prompt,
        trained=batch.prompts_per_step * batch.group_size,
        updates=batch.prompts_per_step // batch.groups_per_update,
        microbatches=math.ceil(packed / rows),
        room=stack_capacity(most),
        microbatch_tokens=rows * config.row_tokens,
        informative=float(assumed.informative) if config.dynamic_sampling.enabled else 1.0,
        readings=readings,
        notes=tuple(notes),
    )


def _between_turns(config: TrainConfig, given: int | float | None, tokens: float, notes: list[str]) -> float:
    """Times that each episode is read again; `tokens` are those of all responses of a step, read once between two turns."""
    most = config.environment.max_turns
    if not config.environment.source:
        if given is not None:
            raise ConfigError(f"--turns={given:g}: without an environment.source there are no turns")
        return 0.0
    if given is not None and not 1 <= given <= most:
        raise ConfigError(f"--turns={given:g} must be at least 1 and at most environment.max_turns = {most}")
    turns = most if given is None else given
    told = (
        f"--turns was not given: an episode has environment.max_turns = {most}, which is the most"
        if given is None
        else f"--turns {given:g}"
    )
    again = f"{(turns - 1) * tokens:,.0f} tokens a step"
    if config.sampling.batch_invariant:
        how = (
            f"each but the first reads the episode again with its prompt (sampling.batch_invariant), {again}"
        )
    else:
        how = f"what is appended is fed to the pages that an episode keeps; if none kept them, {again} more would be read"
    notes.append(f"{told}; {how}")
    notes.append(
        "the tokens of a response are those of an episode, and count as sampled where the environment appends them, too; not counted are the time of its answers, "
        "and contexts that it begins anew"
    )
    return float(turns - 1) if config.sampling.batch_invariant else 0.0


def _length(option: str, given: int | float | None, key: str, limit: int, notes: list[str]) -> float:
    if given is None:
        notes.append(f"{option} was not given: all are as long as {key} = {limit} allows, which is the most")
        return float(limit)
    if not 0 < given <= limit:
        raise ConfigError(f"{option}={given} must be above 0 and at most {key} = {limit}")
    notes.append(f"{option} {given:g}")
    return float(given)


def _sampled(config: TrainConfig, informative: int | float, notes: list[str]) -> tuple[int, int]:
    dynamic, needed, wave = config.dynamic_sampling, config.batch.prompts_per_step, config.prompts_per_wave
    flight = config.rollout.in_flight
    if not dynamic.enabled:
        notes.append(f"no dynamic sampling:{'' if flight else ' one wave,'} all groups are trained on")
        return needed, 0 if flight else 1
    if not 0 < informative <= 1:
        raise ConfigError(f"--informative={informative} must be above 0 and at most 1")
    waves = math.ceil(needed / (informative * wave))
    if waves > dynamic.max_waves and dynamic.on_shortfall == "train_fewer" and not flight:
        waves = dynamic.max_waves
        notes.append(
            f"with --informative {informative:g} a step of {waves} x {wave} prompts trains on about {informative * wave * waves:g} of {needed} groups "
            "(dynamic_sampling.on_shortfall=train_fewer); its updates are counted as if on all"
        )
        return waves * wave, waves
    if waves > dynamic.max_waves:
        raise ConfigError(
            f"with --informative {informative:g} a wave of {wave} prompts gives "
            f"{informative * wave:g} groups; {needed} need {waves} waves, over "
            f"dynamic_sampling.max_waves={dynamic.max_waves}: raise it or dynamic_sampling.prompts_per_wave"
        )
    if flight:
        prompts = math.ceil(needed / informative)
        notes.append(
            f"--informative {informative:g}: {prompts} prompts a step, of which {flight} responses stay in flight and none is thrown away"
        )
        return prompts, 0
    if dynamic.surplus == "carry":
        prompts = math.ceil(needed / informative)
        notes.append(
            f"--informative {informative:g}: {prompts} prompts a step, since what is left over is carried, in waves of at most {wave}"
        )
        return prompts, waves
    notes.append(f"--informative {informative:g}: {waves} waves of {wave} prompts a step")
    return waves * wave, waves
