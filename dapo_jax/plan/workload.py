"""Computes the work of one step in prompts, responses, tokens and microbatches, under stated assumptions."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from dapo_jax.config import ConfigError, TrainConfig
from dapo_jax.training.minibatch import stack_capacity


@dataclass(frozen=True, kw_only=True)
class MeshSizes:
    """The axis sizes of the trainer mesh and of one sampler mesh, and the number of samplers."""

    train: Mapping[str, int]
    sampler: Mapping[str, int]
    samplers: int

    @property
    def devices(self) -> int:
        """Number of devices in the whole run."""
        return math.prod(self.train.values())

    @property
    def sampler_devices(self) -> int:
        """Number of devices of one sampler."""
        return math.prod(self.sampler.values())


@dataclass(frozen=True, kw_only=True)
class Assumptions:
    """Quantities that a configuration does not determine. The plan lists each value that it assumes."""

    response_tokens: int | float | None = None
    """Mean number of tokens per response. If None, `sampling.max_response_tokens` is assumed."""
    response_tokens_std: int | float = 0.0
    prompt_tokens: int | float | None = None
    """Mean number of tokens per prompt. If None, `data.max_prompt_tokens` is assumed."""
    informative: int | float = 0.5
    """Share of groups that are neither all correct nor all wrong."""
    turns: int | float | None = None
    """Mean number of turns per episode. If None, `environment.max_turns` is assumed."""
    sampling_share: float = 0.5
    """Fraction of the roofline that sample workers reach."""
    update_share: float = 0.5
    """Fraction of the roofline that the trainer of a run with sample workers reaches."""
    transfer_gbit_s: float = 10.0
    """Bandwidth in Gbit/s with which the weights reach all sample workers."""

    def __post_init__(self) -> None:
        shares = self.sampling_share, self.update_share
        if not (all(0 < share <= 1 for share in shares) and self.transfer_gbit_s > 0):
            raise ConfigError(
                f"--sampling-share={shares[0]:g} and --update-share={shares[1]:g} must be above 0 and at most 1, and --transfer={self.transfer_gbit_s:g} above 0"
            )


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The work of one step: its prompts, responses, tokens and microbatches."""

    prompts: int
    """Number of prompts sampled in one step, over all waves."""
    waves: int
    """Number of waves; 0 if rollouts are in flight."""
    responses: int
    """Number of sampled responses."""
    response_mean: float
    response_std: float
    longest: float
    """Assumed length of the longest response: two standard deviations above the mean, but at most the limit."""
    prompt_mean: float
    trained: int
    """Number of responses in the training batch."""
    updates: int
    microbatches: int
    """Microbatches per update if rows are packed without gaps."""
    room: int
    """Microbatches per update if all responses have the maximum length. The update program is compiled for this number."""
    microbatch_tokens: int
    """Tokens per microbatch, including padding."""
    reprefills: float
    """Number of re-prefills per episode between turns; 0 if its KV cache is kept."""
    notes: tuple[str, ...]
    """The assumptions as text."""

    @property
    def sequence(self) -> float:
        """Mean number of tokens of a prompt and its response together."""
        return self.prompt_mean + self.response_mean

    @property
    def context(self) -> float:
        """Mean number of cached tokens that a decoded token attends to.

        The tokens of a response of length L attend to prompt + 0, 1, ..., L - 1 tokens. The mean is prompt + E[L(L-1)/2] / E[L].
        """
        mean, square = self.response_mean, self.response_mean**2 + self.response_std**2
        return self.prompt_mean + (square - mean) / (2 * mean)

    @property
    def between(self) -> float:
        """Mean number of tokens in an episode when it waits between two turns, including the prompt. All turns are assumed to have the same length."""
        return self.prompt_mean + self.response_mean / 2

    @property
    def attended(self) -> float:
        """Mean number of query-key pairs in causal attention over n tokens of prompt and response: E[n(n+1)/2]."""
        return (self.sequence**2 + self.response_std**2 + self.sequence) / 2


def workload_of(config: TrainConfig, assumed: Assumptions) -> Workload:
    """Returns the work of one step with this configuration. Raises ConfigError if an assumed length exceeds the configured limit, or dynamic sampling would
    need too many waves."""
    batch, notes = config.batch, list[str]()
    limit, prompt_limit = config.sampling.max_response_tokens, config.data.max_prompt_tokens
    mean = _length("--response-tokens", assumed.response_tokens, "sampling.max_response_tokens", limit, notes)
    prompt = _length("--prompt-tokens", assumed.prompt_tokens, "data.max_prompt_tokens", prompt_limit, notes)
    prompts, waves = _sampled(config, assumed.informative, notes)
    again = prompts * batch.group_size * (prompt + mean / 2)
    reprefills = _reprefills(config, assumed.turns, again, notes)
    kept = batch.kept or batch.group_size
    per_update, rows = batch.groups_per_update * kept, batch.rows_per_microbatch
    packed = math.ceil(per_update * (prompt + mean) / config.row_tokens)
    longest_per_row = max(1, config.row_tokens // (prompt_limit + limit))
    most = math.ceil(math.ceil(per_update / longest_per_row) / rows)
    return Workload(
        prompts=prompts,
        waves=waves,
        responses=prompts * batch.group_size,
        response_mean=mean,
        response_std=float(assumed.response_tokens_std),
        longest=min(float(limit), mean + 2 * assumed.response_tokens_std),
        prompt_mean=prompt,
        trained=batch.prompts_per_step * kept,
        updates=batch.prompts_per_step // batch.groups_per_update,
        microbatches=math.ceil(packed / rows),
        room=stack_capacity(most),
        microbatch_tokens=rows * config.row_tokens,
        reprefills=reprefills,
        notes=tuple(notes),
    )


def _reprefills(config: TrainConfig, turns: int | float | None, again: float, notes: list[str]) -> float:
    """Returns the number of re-prefills per episode. If all episodes of a step are re-prefilled once, these are `again` tokens."""
    most = config.environment.max_turns
    if not config.environment.source:
        if turns is not None:
            raise ConfigError(f"--turns={turns:g} needs environment.source; there are no turns without it")
        return 0.0
    if turns is not None and not 1 <= turns <= most:
        raise ConfigError(f"--turns={turns:g} must be at least 1 and at most environment.max_turns = {most}")
    count = most if turns is None else turns
    default = f" (--turns was not given: environment.max_turns = {most})" if turns is None else ""
    tokens = f"{(count - 1) * again:,.0f} tokens per step"
    kept = not config.sampling.batch_invariant
    notes.append(
        f"{count:g} turns per episode{default}; "
        + (f"the KV cache is kept between turns; re-prefilling all episodes would add {tokens}" if kept
           else f"sampling.batch_invariant re-prefills the episode before each turn except the first, {tokens}")
    )  # fmt: skip
    notes.append("all tokens of an episode are counted as sampled; the environment's own time is not counted")
    return 0.0 if kept else float(count - 1)


def _length(option: str, given: int | float | None, key: str, limit: int, notes: list[str]) -> float:
    if given is None:
        notes.append(f"{option} was not given: the maximum is assumed, {key} = {limit}")
        return float(limit)
    if not 0 < given <= limit:
        raise ConfigError(f"{option}={given} must be above 0 and at most {key} = {limit}")
    notes.append(f"{option} {given:g}")
    return float(given)


def _sampled(config: TrainConfig, informative: int | float, notes: list[str]) -> tuple[int, int]:
    """Returns the number of prompts to sample per step, and the number of waves in which they are sampled."""
    dynamic, needed, wave = config.dynamic_sampling, config.batch.prompts_per_step, config.prompts_per_wave
    flight = config.rollout.in_flight
    if config.rollout.saved:
        notes.append("rollout.saved: a step trains on saved responses, and samples none")
        return 0, 0
    if not dynamic.enabled:
        notes.append(f"no dynamic sampling:{'' if flight else ' one wave,'} every group is trained on")
        return needed, 0 if flight else 1
    if not 0 < informative <= 1:
        raise ConfigError(f"--informative={informative} must be above 0 and at most 1")
    share, waves = f"--informative {informative:g}", math.ceil(needed / (informative * wave))
    if waves > dynamic.max_waves and (flight or dynamic.on_shortfall != "train_fewer"):
        raise ConfigError(
            f"with {share}, a wave of {wave} prompts yields {informative * wave:g} groups to train on; {needed} groups need {waves} waves, "
            f"more than dynamic_sampling.max_waves={dynamic.max_waves}: raise this limit or dynamic_sampling.prompts_per_wave"
        )
    if waves > dynamic.max_waves:
        waves = dynamic.max_waves
        few = f"about {informative * wave * waves:g} of {needed} groups (dynamic_sampling.on_shortfall=train_fewer)"
        notes.append(f"{few} are trained on; the cost of updates is computed for all groups")
    elif flight or dynamic.surplus == "carry":
        prompts = math.ceil(needed / informative)
        how = f"in waves of up to {wave}; surplus groups are carried over"
        how = f"with {flight} responses in flight" if flight else how
        notes.append(f"{share}: {prompts} prompts per step {how}")
        return prompts, 0 if flight else waves
    notes.append(f"{share}: {waves} waves of {wave} prompts per step")
    return waves * wave, waves
