"""The expected step, in waves and with rollouts in flight: a simulation on the host, from assumed lengths and the roofline's times of single decode steps.

Both ways sample the same responses. In waves each sampler takes its share of a wave's ordinals, keeps its slots full as long as something waits, and waits for
the others at the wave's end. In flight they go by the run's own clock. Decode steps are those of the longest sampler, of each wave or round.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice

import numpy as np
from jaxtyping import Float, Int

from dapo_jax.config import DynamicSamplingConfig, TrainConfig
from dapo_jax.plan.lengths import Responses, log_normal
from dapo_jax.plan.sampling_time import IN_STEPS, READ_UTILISATION, SamplingTime
from dapo_jax.plan.timeline import by_sampler, decoded, starts_of
from dapo_jax.plan.workload import Workload
from dapo_jax.rollout.group_sampling import dealt
from dapo_jax.rollout.virtual_clock import ClockSizes, ResponseId, VirtualClock
from dapo_jax.sampling.pages import PageSizes

TOKEN_BYTES = 8
"""Bytes of a token and its log-probability in a checkpoint."""

_STEPS = 4
"""Steps whose mean is told, after those in which the pipe fills."""

_EXACT = 1e-9
"""So that three thirds are one in floating point, too."""

_ROUNDS = 1500
"""Beyond so many rounds no further step is begun."""


@dataclass(frozen=True, kw_only=True)
class Samplers:
    """The samplers of a run, which are alike."""

    count: int
    places: int
    """Responses that each decodes side by side: slots, or as many as its pages hold."""
    prompt_tokens: float
    time: SamplingTime
    cache_tokens: int | float = math.inf
    """Tokens that the pages of each hold."""
    spare_tokens: float = 0.0
    """Tokens of its last page that a response leaves empty."""
    readings: float = 0.0
    """Times that an episode is read again between its turns, which are alike; 0 where none is."""


@dataclass(kw_only=True)
class Step:
    """One step of a simulation."""

    seconds: float = 0.0
    """The time of sampling; in decode steps where there is no chip."""
    live_s: float = 0.0
    """The time in which a response drew, summed over the slots of all samplers."""
    read_s: float = 0.0
    """The time of reading, as the mean over samplers."""
    decode_steps: int = 0
    rounds: int = 0
    drawn_tokens: int = 0
    thrown_away_tokens: int = 0
    """Tokens of informative groups that no step trains on."""
    read_again_tokens: float = 0.0
    ages: list[int] = field(default_factory=list)
    """Steps since the first token of each group was drawn, of those that are trained on."""
    kept_tokens: int = 0
    """Tokens of responses in flight, and of groups that have no verdict or wait, when the step ends."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """One way of sampling, as the mean over steps."""

    seconds: float | None
    """None without a chip."""
    step_s: float | None
    """The whole step: sampling, and the roofline of all other phases."""
    read_s: float | None
    """The part of `seconds` in which a sampler reads, prompts or what it had drawn."""
    decode_steps: float
    idle_frac: float
    """The part of the time in which a slot that there is room for draws nothing."""
    drawn_tokens: float
    thrown_away_tokens: float
    """Tokens of informative groups that no step trains on."""
    read_again_tokens: float
    age_mean: float
    """Steps since a group's oldest token was drawn, over the groups that are trained on."""
    age_p95: float
    age_max: int
    kept_tokens: float
    """Tokens of what goes on or waits at a step's end: a checkpoint has them."""

    @property
    def kept_bytes(self) -> float:
        """Bytes of these in a checkpoint: tokens and log-probabilities."""
        return TOKEN_BYTES * self.kept_tokens


@dataclass(frozen=True, kw_only=True)
class ExpectedStep:
    """A step in waves and with rollouts in flight."""

    in_flight: int
    """Responses in flight: those of the configuration, or `suggested`."""
    configured: bool
    """Whether the configuration keeps rollouts in flight."""
    round_tokens: int
    waves: Sampling
    flight: Sampling
    assumed: tuple[str, ...]
    """The assumptions of both, in words."""


def expected_step(
    config: TrainConfig,
    work: Workload,
    pages: PageSizes,
    *,
    samplers: int,
    room: float,
    time: SamplingTime | None = None,
    other_s: float = 0.0,
) -> ExpectedStep:
    """The step that `config` describes, both ways.

    Args:
        config: of the run.
        work: its assumed lengths.
        pages: of a sampler's cache.
        samplers: how many there are.
        room: responses that a sampler has room for side by side.
        time: of decode steps and of what is read; None: nobody knows, and decode steps are counted.
        other_s: seconds of the phases of a step that do not sample.
    """
    batch, group, limit = config.batch, config.batch.group_size, config.sampling.max_response_tokens
    draw = log_normal(mean=work.response_mean, std=work.response_std, limit=limit, samples=group)
    places = max(1, int(room))
    held = Samplers(
        count=samplers,
        places=places,
        prompt_tokens=work.prompt_mean,
        time=time or IN_STEPS,
        cache_tokens=pages.pools * pages.pool_pages * pages.page_tokens if pages.runs_out else math.inf,
        spare_tokens=pages.page_tokens / 2 if pages.runs_out else 0.0,
        readings=work.readings,
    )
    in_flight = config.rollout.in_flight or suggested(config, places, samplers=samplers)
    round_tokens = min(config.rollout.round_tokens, limit)
    sizes = ClockSizes(
        in_flight=in_flight,
        samples_per_prompt=group,
        needed=batch.prompts_per_step,
        verdict_rounds=config.rollout.verdict_rounds,
        max_age_steps=config.rollout.max_age_steps,
    )
    responses = Responses(draw, informative=work.informative)
    waves = in_waves(
        responses,
        held,
        needed=batch.prompts_per_step,
        prompts_per_wave=config.prompts_per_wave,
        dynamic=config.dynamic_sampling,
    )
    flight = by_clock(responses, held, sizes, round_tokens=round_tokens)
    # The pipe is full once all that began together has ended.
    fills = 2 * -(-limit // round_tokens) + sizes.verdict_rounds
    first = 2 if config.dynamic_sampling.surplus == "carry" else 0
    return ExpectedStep(
        in_flight=in_flight,
        configured=config.rollout.in_flight > 0,
        round_tokens=round_tokens,
        waves=_mean(list(islice(waves, first, first + _STEPS)), held, None if time is None else other_s),
        flight=_mean(_settled(flight, fills=fills), held, None if time is None else other_s),
        assumed=_assumed(work, held, limit, in_flight, config.rollout.in_flight > 0, round_tokens),
    )


def suggested(config: TrainConfig, places: int, *, samplers: int) -> int:
    """The number of responses in flight that `samplers` with so many `places` each have room for, in whole groups. Where the pages give out before the slots an eighth of
    them is left free, since what a sampler holds goes up and down: what does not fit is read again in every round."""
    room, group = places * samplers, config.batch.group_size
    if places < config.sampling.slots:
        room -= room // 8
    return max(1, room // group) * group


def in_waves(
    responses: Responses,
    samplers: Samplers,
    *,
    needed: int,
    prompts_per_wave: int,
    dynamic: DynamicSamplingConfig,
) -> Iterator[Step]:
    """Step after step in waves, of which those that are certain to be needed are sampled as one, by the run's own clock."""
    group, wave = responses.lengths([0]).shape[1], prompts_per_wave if dynamic.enabled else needed
    clock = VirtualClock(
        ClockSizes(
            in_flight=wave * group, samples_per_prompt=group, needed=needed, verdict_rounds=0, waves=True
        )
    )
    while True:
        step = Step()
        while started := list(chain.from_iterable(iter(clock.start, []))):
            ordinals = sorted({one.ordinal for one in started})
            _sample_wave(step, np.array(ordinals), responses, samplers)
            for ordinal in ordinals:
                informative = not dynamic.enabled or responses.informative(ordinal)
                clock.end_group(ordinal, informative=informative)
        step.ages = list(clock.end_step().values())
        left = int(responses.lengths(sorted(clock.ready)).sum())
        if dynamic.surplus == "carry":
            step.kept_tokens = left
        else:
            step.thrown_away_tokens = left
            clock.ready.clear()
        yield step


def by_clock(
    responses: Responses, samplers: Samplers, sizes: ClockSizes, *, round_tokens: int
) -> Iterator[Step]:
    """Step after step with rollouts in flight, by the run's own clock."""
    clock, going = VirtualClock(sizes), _Going(sizes.in_flight, samplers.count)
    kept: dict[int, int] = {}
    """Tokens of the responses that have ended, of groups that have not been trained on."""
    while True:
        step = Step()
        while not clock.step_ends:
            busy = np.zeros(samplers.count)
            if not step.rounds:  # new weights: where enough groups wait nothing is read for no round
                going.spread()
                busy += _read_again(step, going, samplers)
            started = clock.start()
            read = going.take(started, responses)
            busy += samplers.time.read(
                *_sequences(read, read * samplers.prompt_tokens, samplers.prompt_tokens)
            )
            _sample_round(step, busy, going, samplers, round_tokens)
            ended = going.leave()
            for one, length in ended:
                kept[one.ordinal] = kept.get(one.ordinal, 0) + length
            due = clock.end_round([one for one, _ in ended])
            verdicts = {ordinal: responses.informative(ordinal) for ordinal in due}
            clock.judge(verdicts)
            for ordinal in (ordinal for ordinal, informative in verdicts.items() if not informative):
                del kept[ordinal]
        ages = clock.end_step()
        for ordinal in ages:
            del kept[ordinal]
        step.ages = list(ages.values())
        step.kept_tokens = sum(kept.values()) + int(going.drawn.sum())
        yield step


class _Going:
    """The responses in flight, as arrays that belong together."""

    def __init__(self, in_flight: int, samplers: int) -> None:
        """None is yet. Each sampler has a share of the places, as `Places` of a run has them."""
        self.most = np.array(
            [in_flight // samplers + (sampler < in_flight % samplers) for sampler in range(samplers)]
        )
        self.ordinal, self.index, self.sampler, self.drawn, self.length = (
            np.zeros(0, np.int64) for _ in range(5)
        )

    def spread(self) -> None:
        """Gives those that go on places anew."""
        self._keep(np.lexsort((self.index, self.ordinal)))
        self.sampler = dealt(self.drawn, len(self.most))

    def take(self, started: Sequence[ResponseId], responses: Responses) -> Float[np.ndarray, " samplers"]:
        """Takes those that start, in order, to where places are free. Returned are the prompts that each sampler reads for that."""
        count = len(self.most)
        if not started:
            return np.zeros(count)
        new = np.array(started, np.int64)
        free = self.most - np.bincount(self.sampler, minlength=count)
        sampler = np.repeat(np.arange(count), free)[: len(new)]
        ordinals, which = np.unique(new[:, 0], return_inverse=True)
        length = responses.lengths(ordinals.tolist())[which, new[:, 1]]
        columns = (new[:, 0], new[:, 1], sampler, np.zeros(len(new), np.int64), length)
        self.ordinal, self.index, self.sampler, self.drawn, self.length = (
            np.concatenate(pair) for pair in zip(self._columns, columns, strict=True)
        )
        pairs = np.unique(np.stack([sampler, new[:, 0]]), axis=1)
        return np.bincount(pairs[0], minlength=count).astype(float)

    def leave(self) -> list[tuple[ResponseId, int]]:
        """Lets go of those that have ended, which are returned with their lengths."""
        ends = self.drawn == self.length
        gone = [column[ends].tolist() for column in (self.ordinal, self.index, self.length)]
        self._keep(~ends)
        return [(ResponseId(ordinal, index), length) for ordinal, index, length in zip(*gone, strict=True)]

    @property
    def _columns(self) -> tuple[Int[np.ndarray, " going"], ...]:
        return self.ordinal, self.index, self.sampler, self.drawn, self.length

    def _keep(self, which: np.ndarray) -> None:
        self.ordinal, self.index, self.sampler, self.drawn, self.length = (
            column[which] for column in self._columns
        )


def _sample_wave(
    step: Step, ordinals: Int[np.ndarray, " groups"], responses: Responses, samplers: Samplers
) -> None:
    """Each sampler takes the ordinals that are its number modulo all; the wave ends with the last one."""
    found = responses.lengths(ordinals.tolist())
    of = ordinals % samplers.count
    [lengths] = by_sampler(np.repeat(of, found.shape[1]), samplers.count, found.reshape(-1))
    held = np.full(lengths.shape, samplers.prompt_tokens)
    took = decoded(starts_of(lengths, samplers.places), lengths, held, samplers.time.decode)
    prompts = np.bincount(of, minlength=samplers.count).astype(float)
    read = samplers.time.read(*_sequences(prompts, prompts * samplers.prompt_tokens, samplers.prompt_tokens))
    every = found.reshape(-1)
    read += _read_between_turns(
        step, np.repeat(of, found.shape[1]), np.zeros(len(every)), every, every, samplers
    )
    step.seconds += float((took.seconds + read).max())
    step.read_s += float(read.mean())
    step.live_s += float(took.live_s.sum())
    step.decode_steps += int(took.steps.max())
    step.rounds += 1
    step.drawn_tokens += int(found.sum())


def _sample_round(
    step: Step, busy: Float[np.ndarray, " samplers"], going: _Going, samplers: Samplers, tokens: int
) -> None:
    """Every response in flight draws up to so many tokens; where there are more than places they take turns. `busy` are seconds for what was read before."""
    left = np.minimum(going.length - going.drawn, tokens)
    held = going.drawn + samplers.prompt_tokens
    lengths, before = by_sampler(going.sampler, samplers.count, left, held)
    took = decoded(starts_of(lengths, samplers.places), lengths, before, samplers.time.decode)
    before_round, going.drawn = going.drawn, going.drawn + left
    busy = busy + _read_between_turns(step, going.sampler, before_round, going.drawn, going.length, samplers)
    # What the pages do not hold gives way, and is read again for its turn.
    count = np.bincount(going.sampler, minlength=samplers.count)
    there = np.bincount(going.sampler, held + left + samplers.spare_tokens, minlength=samplers.count)
    over = np.maximum(there - samplers.cache_tokens, 0.0)
    mean = there / np.maximum(count, 1)
    read = samplers.time.read(*_sequences(over / np.maximum(mean, 1.0), over, mean))
    step.seconds += float((took.seconds + read + busy).max())
    step.read_s += float((read + busy).mean())
    step.live_s += float(took.live_s.sum())
    step.decode_steps += int(took.steps.max())
    step.rounds += 1
    step.drawn_tokens += int(left.sum())
    step.read_again_tokens += float(over.sum())


def _read_between_turns(
    step: Step,
    sampler: Int[np.ndarray, " responses"],
    before: np.ndarray,
    drawn: np.ndarray,
    length: np.ndarray,
    samplers: Samplers,
) -> Float[np.ndarray, " samplers"]:
    """Seconds in which each sampler reads its episodes again, at the ends of turns that they come to from `before` to `drawn` of `length` tokens."""
    if not samplers.readings:
        return np.zeros(samplers.count)
    turn = length / (samplers.readings + 1)

    def read_until(tokens: np.ndarray) -> np.ndarray:
        """Sequences, tokens and query-key pairs: the sums over k = 1 ... n of 1, of c = prompt + k turns, and of c (c + 1) / 2."""
        n, prompt = np.minimum(np.floor(tokens / turn + _EXACT), samplers.readings), samplers.prompt_tokens
        firsts, squares = n * (n + 1) / 2, n * (n + 1) * (2 * n + 1) / 6
        held = n * prompt + turn * firsts
        return np.stack(
            [n, held, (n * prompt**2 + 2 * prompt * turn * firsts + turn**2 * squares + held) / 2]
        )

    count, tokens, pairs = (
        np.bincount(sampler, each, minlength=samplers.count)
        for each in read_until(drawn) - read_until(before)
    )
    step.read_again_tokens += float(tokens.sum())
    return samplers.time.read(tokens, pairs, count)


def _read_again(step: Step, going: _Going, samplers: Samplers) -> Float[np.ndarray, " samplers"]:
    """Seconds in which each sampler reads what goes on, each response with its prompt."""
    length = going.drawn + samplers.prompt_tokens
    count, tokens, pairs = (
        np.bincount(going.sampler, each, minlength=samplers.count).astype(float)
        for each in (np.ones(len(length)), length, length * (length + 1) / 2)
    )
    step.read_again_tokens += float(tokens.sum())
    return samplers.time.read(tokens, pairs, count)


def _sequences(
    count: Float[np.ndarray, " samplers"], tokens: Float[np.ndarray, " samplers"], length: float | np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The arguments of `ReadTime` for sequences of one length."""
    return tokens, tokens * (length + 1) / 2, count


def _settled(steps: Iterator[Step], *, fills: int) -> list[Step]:
    """Steps after the first, and after `fills` rounds."""
    rounds, found = 0, list[Step]()
    for number, step in enumerate(steps):
        if number and rounds >= fills:
            found.append(step)
        rounds += step.rounds
        if len(found) == _STEPS or (found and rounds > _ROUNDS):
            break
    return found


def _mean(steps: Sequence[Step], samplers: Samplers, other_s: float | None) -> Sampling:
    """`other_s` is None where seconds are decode steps."""
    count, seconds = len(steps), sum(step.seconds for step in steps)
    room = samplers.count * samplers.places * seconds
    ages = np.array([age for step in steps for age in step.ages])
    each = seconds / count
    return Sampling(
        seconds=None if other_s is None else each,
        step_s=None if other_s is None else each + other_s,
        read_s=None if other_s is None else sum(step.read_s for step in steps) / count,
        decode_steps=sum(step.decode_steps for step in steps) / count,
        idle_frac=1 - sum(step.live_s for step in steps) / room if room else 0.0,
        drawn_tokens=sum(step.drawn_tokens for step in steps) / count,
        thrown_away_tokens=sum(step.thrown_away_tokens for step in steps) / count,
        read_again_tokens=sum(step.read_again_tokens for step in steps) / count,
        age_mean=float(ages.mean()),
        age_p95=float(np.quantile(ages, 0.95, method="higher")),
        age_max=int(ages.max()),
        kept_tokens=sum(step.kept_tokens for step in steps) / count,
    )


def _assumed(
    work: Workload, samplers: Samplers, limit: int, in_flight: int, configured: bool, round_tokens: int
) -> tuple[str, ...]:
    spread = work.response_std / work.response_mean
    lengths = (
        f"responses are log-normal, cut at {limit:,} tokens: {work.response_mean:,.0f} on average with the cut, a spread of {spread:.2f} before it"
        if spread and work.response_mean < limit
        else f"all responses have {work.response_mean:,.0f} tokens"
    )
    each = "decode steps are counted alike, and reading takes nothing (there is no --topology)"
    if samplers.time is not IN_STEPS:
        each = (
            f"a decode step takes the roofline's time for what is in the slots then, and reading its operations at {READ_UTILISATION:.0%} of the "
            "peak; nobody waits for graders"
        )
    where = "rollout.in_flight"
    if not configured:
        where = "the configuration has no rollout.in_flight: whole groups for all slots, or for seven eighths of the pages if these give out before"
    return (
        f"{lengths}; lengths say nothing of each other, nor of which groups are informative",
        each,
        f"each of {samplers.count} samplers decodes {samplers.places} responses side by side; waves do not overlap; what pages do not hold is read again in each round",
        f"{in_flight:,} responses in flight ({where}), in rounds of {round_tokens:,} tokens; what goes on is read again in each step",
        f"the mean of up to {_STEPS} steps, after those in which the pipe fills",
    )
