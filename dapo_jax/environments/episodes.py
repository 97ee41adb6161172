"""The episodes of a run: many at a time on one event loop, each with its limits and rewards.

The loop runs in a thread of this process, in parallel with sampling. An episode that hangs, raises or returns nonsense is lost, and counted; the others are not affected.
"""

import asyncio
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
from jaxtyping import Int

from dapo_jax.dapo.rollouts import Continuation, DrawnTurn, Prompt, Standing, Verdict
from dapo_jax.environments.calls import (
    LostError,
    called,
    checked_episode,
    checked_scores,
    checked_step,
    lost_by,
    place_of,
)
from dapo_jax.environments.protocol import Context, Environment, Turn
from dapo_jax.environments.rendering import Rendering
from dapo_jax.rewards.async_calls import ENDING_S, EventLoop
from dapo_jax.rewards.functions import RewardError
from dapo_jax.rewards.sample import Sample, copied, read_only

_Value = TypeVar("_Value")

HELD_S = 10.0
"""Seconds for which an environment may hold the event loop before a warning; the next warning follows when they have doubled."""

_PROMPTS, _EPISODES = 4, 32
"""The least numbers of prompts and episodes after which a run ends because all episodes were lost."""

_CLOSINGS = 4096
"""The most groups whose episodes may be closing at the same time."""

_NO_ROOM = (
    "the episode begins{begins}, which leaves no room for a turn: an episode has up to sampling.max_response_tokens tokens after the prompt (or "
    "environment.episode_tokens), and a Context up to data.max_prompt_tokens + sampling.max_response_tokens; begin with less, or raise these"
)


@dataclass
class _Open:
    """An episode and its state."""

    prompt: Prompt
    standing: Standing = field(default_factory=Standing)
    episode: Any = None
    """Object of the environment; None: it has not begun in this process."""
    unheard: list[Turn] = field(default_factory=list)
    """Turns of an earlier process, which have to be replayed before the next turn."""
    score: float | None = None
    """Its reward from the comparison with the other episodes of its prompt, if the environment compares."""
    begins: str = ""
    """The number of tokens that it begins with, in words; empty if this process does not know it."""

    def lose(self, error: LostError) -> None:
        """Ends the episode without a reward."""
        self.standing.lost, self.standing.reason = error.lost, str(error)


class Episodes:
    """The episodes of a run, for the sampler and for grading. A context manager: leaving it ends the thread."""

    def __init__(
        self,
        environment: Environment,
        rendering: Rendering,
        *,
        text_of: Callable[[Int[np.ndarray, " turn"]], str],
        seed: int,
        max_turns: int,
        turn_tokens: int = 0,
        episode_tokens: int = 0,
        timeout_s: float = 30.0,
        calls: int = 64,
        name: str = "of this run",
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        """Starts the thread.

        Args:
            environment: makes the episodes.
            rendering: tokenizes what they append.
            text_of: gives the text of a turn, up to its stop string.
            seed: of the run; an episode's seed depends on it and on the prompt's ordinal.
            max_turns: the most turns of an episode.
            turn_tokens: the most tokens of a turn; 0: as many as the episode may have.
            episode_tokens: the most tokens of an episode; 0: as many as a response may have.
            timeout_s: time limit of one call, without the wait before it.
            calls: the most calls at the same time; the others wait.
            name: of the environment, for messages.
            on_close: called when the thread has ended.
        """
        self._environment, self._rendering, self._text_of, self._seed = environment, rendering, text_of, seed
        self.max_turns, self.turn_tokens, self.episode_tokens = max_turns, turn_tokens, episode_tokens
        self._name, self._on_close = name, on_close
        self._called = partial(called, timeout_s=timeout_s)
        self._judged, self._prompts_judged, self._all_lost = 0, 0, True
        self._open: dict[tuple[int, int], _Open] = {}
        self._room = asyncio.Semaphore(calls)
        self._closings: deque[Future[None]] = deque(maxlen=_CLOSINGS)
        self._loop = EventLoop("a task of an environment raised; the episodes continue")
        threading.Thread(target=self._watch, daemon=True, name="environments watch").start()

    def __enter__(self) -> "Episodes":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self, prompt: Prompt, index: int) -> Future[Continuation | None]:
        """Begins an episode. The result is put before the first turn; None if the episode was lost."""
        opened = self._open[prompt.ordinal, index] = _Open(prompt)

        async def begin() -> Continuation:
            before = self._continuation(await self._begun(opened), after=None)
            opened.begins = f" with {len(before.tokens)} tokens"
            return before

        return self._submit(opened, begin)

    def reopen(self, prompt: Prompt, index: int, turns: Sequence[DrawnTurn], standing: Standing) -> None:
        """Opens an episode of an earlier process, whose environment has answered `turns`. They are replayed before the next turn."""
        opened = self._open[prompt.ordinal, index] = _Open(prompt, replace(standing))
        opened.unheard = [self._turn(turn, number) for number, turn in enumerate(turns)]

    def standing(self, prompt: Prompt, index: int) -> Standing:
        """Returns a copy of the environment's account of an episode so far."""
        return replace(self._open[prompt.ordinal, index].standing)

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Within, all episodes are new ones, whatever their ordinals, as in an evaluation."""
        opened, self._open = self._open, {}
        try:
            yield
        finally:
            if self._open:  # it was cut short
                self._soon(self._closed([*self._open.values()]))
            self._open = opened

    def step(self, prompt: Prompt, index: int, turn: DrawnTurn) -> Future[Continuation | None]:
        """Hands over a turn. The result is put before the next turn; None: the episode is over, or was lost."""
        opened = self._open[prompt.ordinal, index]
        standing = opened.standing
        given = self._turn(turn, len(standing.rewards))
        standing.rewards = (*standing.rewards, 0.0)

        async def answer() -> Continuation | None:
            await self._catch_up(opened)
            answered = await self._called(opened.episode.step, given)
            step = checked_step(answered)
            standing.rewards = (*standing.rewards[:-1], step.reward)
            standing.metrics = {**standing.metrics, **step.metrics}
            standing.correct = standing.correct if step.correct is None else step.correct
            follows = answered.append if answered.context is None else answered.context
            return None if step.done else self._continuation(follows, after=turn.tokens)

        return self._submit(opened, answer)

    def verdicts(self, samples: Sequence[Sample]) -> Future[list[Verdict]]:
        """Returns the verdicts of the episodes of one prompt, in the order of their indices: `rewards.functions.Submit`.

        The future raises RewardError if every episode so far was lost: then the environment is at fault.
        """
        found: Future[list[Verdict]] = Future()
        opened = [self._open.pop((sample.prompt.ordinal, index)) for index, sample in enumerate(samples)]
        for one in opened:
            if not one.standing.lost and not one.standing.rewards:
                one.lose(LostError(_NO_ROOM.format(begins=one.begins)))
        group_rewards = getattr(self._environment, "group_rewards", None)
        if group_rewards is None:
            self._judge(opened, found)
            self._soon(self._closed(opened))
            return found

        async def compare() -> None:
            await self._compare(group_rewards, opened)
            self._judge(opened, found)
            await self._closed(opened)

        def settle(_: Future[None]) -> None:
            if not found.done():  # the environment's code cancelled the task
                reason = "the task that compares the rewards of a group was cancelled"
                found.set_result([Verdict(correct=False, lost="raised", reason=reason)] * len(opened))

        self._soon(compare()).add_done_callback(settle)
        return found

    def _soon(self, closing: Coroutine[Any, Any, None]) -> Future[None]:
        """Begins work on the event loop that closes episodes in the end; `close` waits for it."""
        self._closings.append(self._loop.submit(closing))
        return self._closings[-1]

    def _judge(self, opened: Sequence[_Open], found: Future[list[Verdict]]) -> None:
        """Settles the verdicts of the episodes of one prompt."""
        self._judged, self._prompts_judged = self._judged + len(opened), self._prompts_judged + 1
        self._all_lost = self._all_lost and all(one.standing.lost for one in opened)
        if self._all_lost and self._prompts_judged >= _PROMPTS and self._judged >= _EPISODES:
            found.set_exception(
                RewardError(
                    f"environment {self._name}: all {self._judged} episodes so far, of {self._prompts_judged} prompts, were lost, the last one: "
                    f"{opened[-1].standing.reason}; correct the environment"
                )
            )
        else:
            found.set_result([_verdict(one.standing, one.score) for one in opened])

    async def _compare(self, group_rewards: Callable[..., Any], opened: Sequence[_Open]) -> None:
        """Takes the compared rewards of the episodes that are not lost. If that fails, all of them are lost."""
        for one in opened:
            await self._guarded(one, partial(self._catch_up, one))
        kept = [one for one in opened if not one.standing.lost]
        try:
            given = await self._called(group_rewards, [one.episode for one in kept])
            for one, score in zip(kept, checked_scores(given, count=len(kept)), strict=True):
                one.score = score
        except Exception as error:
            for one in kept:
                one.lose(lost_by(error))

    def close(self) -> None:
        """Closes the episodes, as far as that ends soon, and ends the thread; calls in progress are given up."""
        if not self._loop.closing.is_set():
            self._soon(self._closed([*self._open.values()]))
            wait(self._closings, timeout=ENDING_S / 2)
        self._loop.close(ENDING_S / 2)
        self._on_close()

    def _turn(self, turn: DrawnTurn, number: int) -> Turn:
        return Turn(
            tokens=read_only(turn.tokens),
            logprobs=read_only(turn.logprobs),
            text=self._text_of(turn.tokens),
            finish_reason=turn.finish_reason,
            number=number,
        )

    async def _begun(self, opened: _Open) -> object:
        """Makes the episode, and returns the result of its `start`. Raises LostError if the environment makes no episode."""
        prompt = opened.prompt
        seed = int(np.random.SeedSequence((self._seed, prompt.ordinal)).generate_state(1)[0])
        own = {name: copied(value) for name, value in prompt.row.items()}
        row = {"prompt": prompt.text, "answer": prompt.answer, **own}
        opened.episode = checked_episode(await self._called(self._environment.episode, row, seed))
        start = getattr(opened.episode, "start", None)
        begins = None if start is None else await self._called(start)
        return "" if begins is None else begins

    async def _catch_up(self, opened: _Open) -> None:
        """Replays to an episode of an earlier process the turns that it has not received in this one. Raises LostError if it fails."""
        if opened.episode is None:
            await self._begun(opened)
        assert opened.episode is not None
        while opened.unheard:
            await self._called(opened.episode.step, opened.unheard[0])
            del opened.unheard[0]

    async def _closed(self, opened: Sequence[_Open]) -> None:
        """Calls the `close` of the episodes that have one; errors in it are ignored."""

        async def close(one: _Open) -> None:
            with suppress(Exception):
                if callable(end := getattr(one.episode, "close", None)):
                    await self._called(end)

        await asyncio.gather(*map(close, opened))

    def _continuation(self, follows: Any, *, after: Int[np.ndarray, " turn"] | None) -> Continuation:
        """Returns the tokens of an appended value or a new context. Raises LostError if it cannot be rendered."""
        if isinstance(follows, Context):
            return Continuation(self._rendering.context_ids(follows), anew=True)
        return Continuation(self._rendering.ids(follows, after=after))

    def _watch(self) -> None:
        """Warns about an environment that holds the event loop. It counts its own looks instead of seconds, since a process may be suspended."""
        answered, held, due = threading.Event(), 0.0, HELD_S
        answered.set()
        while not self._loop.closing.wait(HELD_S / 10):
            if answered.is_set():
                answered.clear()
                held, due = 0.0, HELD_S
                with suppress(RuntimeError):  # the loop was closed
                    self._loop.loop.call_soon_threadsafe(answered.set)
                continue
            held += HELD_S / 10
            if held < due:
                continue
            due *= 2
            frame = sys._current_frames().get(self._loop.thread.ident or 0)
            place = "" if frame is None else place_of(reversed([*traceback.walk_stack(frame)]))
            with suppress(OSError, ValueError, AttributeError):  # there may be no standard error
                print(
                    f"environment {self._name}: it has held the event loop for {held:.0f} s{place}, and no other episode can continue: await what takes "
                    "long, write a function that blocks without `async`, or set environment.workers=1 or more",
                    file=sys.stderr,
                    flush=True,
                )

    async def _guarded(self, opened: _Open, work: Callable[[], Coroutine[Any, Any, _Value]]) -> _Value | None:
        """Returns the result of `work`, or None if the episode is lost in it, or was lost before."""
        if opened.standing.lost:
            return None
        try:
            async with self._room:
                return await work()
        except (Exception, asyncio.CancelledError) as error:  # the environment may cancel tasks of this loop
            if isinstance(error, asyncio.CancelledError) and self._loop.closing.is_set():
                raise
            opened.lose(lost_by(error))
        return None

    def _submit(
        self, opened: _Open, work: Callable[[], Coroutine[Any, Any, Continuation | None]]
    ) -> Future[Continuation | None]:
        answered: Future[Continuation | None] = Future()

        def settle(done: Future[Continuation | None]) -> None:
            if done.cancelled() or done.exception() is not None:  # before it began, by the environment's code
                opened.lose(lost_by(asyncio.CancelledError()))
                answered.set_result(None)
            else:
                answered.set_result(done.result())

        self._loop.submit(self._guarded(opened, work)).add_done_callback(settle)
        return answered


def _verdict(one: Standing, score: float | None) -> Verdict:
    if one.lost:
        return Verdict(correct=False, lost=one.lost, reason=one.reason, parts=one.metrics)
    # A compared reward replaces the rewards by turn, and counts as the reward of the last turn.
    rewards = one.rewards if score is None else (*[0.0] * len(one.rewards[1:]), score)
    correct = sum(rewards) > 0 if one.correct is None else one.correct
    return Verdict(correct=correct, score=sum(rewards), parts=one.metrics, turn_rewards=rewards)
