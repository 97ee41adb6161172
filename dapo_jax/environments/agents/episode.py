"""One agent's episode: its requests become turns of the policy."""

import asyncio
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from dapo_jax.environments.agents.chat import Answer, ChatRequest, Conversations
from dapo_jax.environments.calls import LostError, number_of, outcome
from dapo_jax.environments.protocol import Context, Step, Turn
from dapo_jax.text.http import RequestError

_CLOSING_S = 1.0
"""Seconds that a function has to end after it was cancelled."""
_CUT = {
    "max_turns": "the episode has no further turns (environment.max_turns): end the agent",
    "context_length_exceeded": "the conversation leaves no room for another answer (environment.episode_tokens): end the agent, or begin a shorter conversation",
}
"""The error for requests of an episode that was cut off, by the reason."""
_COUNTS = (
    "requests",
    "contexts",
    "retries",
    "parallel",
    "undelivered",
    "late",
    "tool_calls",
    "unparsed_calls",
)
"""The metrics of an episode. Their names begin with `agent_`."""


class Asked:
    """A request that waits for the policy's answer or has received it. Retries of the request receive the same answer."""

    def __init__(self, request: ChatRequest, *, trained: bool) -> None:
        self.request, self.trained = request, trained
        self.answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self.connections = 0
        """Number of open connections that wait for the answer."""
        self.delivered = False
        self.settled = asyncio.Event()
        """Set once the answer was delivered, or no connection waits for it."""

    @contextmanager
    def connection(self) -> Iterator[None]:
        """Context manager for a connection that waits for the answer."""
        self.connections += 1
        if not self.delivered:
            self.settled.clear()
        try:
            yield
        finally:
            self.connections -= 1
            if self.delivered or not self.connections:
                self.settled.set()


def episode_over() -> RequestError:
    """Returns the error for requests after the end of their episode."""
    return RequestError("this episode is over; end the agent", status=410, code="episode_over")


class AgentEpisode:
    """The requests of one agent. Turns are serial: a request that arrives while another one is being answered waits."""

    def __init__(
        self, play: Callable[[], Awaitable[Any]], *, appends: bool, on_end: Callable[[], int]
    ) -> None:
        """`play` runs the agent and returns its reward, or None. `appends` is False if each request begins a new context. `on_end` is called when the episode is
        over. It returns the number of requests that have arrived too late for other episodes."""
        self._play, self._appends, self._on_end = play, appends, on_end
        self._waiting: deque[Asked] = deque()
        self._current: Asked | None = None
        """The request that the policy is answering, or has answered last."""
        self._asked: dict[bytes, Asked] = {}
        """The latest request with each body."""
        self._changed = asyncio.Event()
        self._conversations = Conversations()
        self._counts = Counter[str]()
        self._reward: Step | None = None
        self._refusal: RequestError | None = None
        """The error for all further requests, once the episode is over or cut off."""
        self.on_refusal: Callable[[RequestError], None] = lambda error: None
        """Called with the error of a request, before it is refused because the episode is over or cut off."""
        self._agent: asyncio.Task[tuple[Any, BaseException | None]] | None = None

    async def start(self) -> Context:
        """Starts the agent, and returns the conversation of its first request. Raises LostError if it ends without a request."""
        self._agent = asyncio.create_task(outcome(self._play))
        self._agent.add_done_callback(lambda _: self._changed.set())
        step = await self._following()
        if step.context is None:
            raise LostError("the agent ended without a request")
        return step.context

    async def step(self, turn: Turn) -> Step:
        """Answers the waiting request with a turn, and returns the conversation of the next request, or the reward if the agent has ended."""
        asked = self._current
        assert asked is not None
        answer = Answer(asked.request, turn)
        self._conversations.add(asked.request.keys, answer)
        self._counts["tool_calls"] += len(answer.calls)
        self._counts["unparsed_calls"] += answer.unparsed
        if not asked.answer.done():
            asked.answer.set_result(answer)
            await asked.settled.wait()
        return await self._following()

    async def finish(self, reason: str) -> Step:
        """Refuses all further requests with an error that names the reason. Waits for the agent's end, and returns its reward."""
        assert self._agent is not None
        self._refuse(RequestError(_CUT[reason], code=reason))
        await asyncio.wait([self._agent])
        return self._last_step(forget=False)

    async def close(self) -> None:
        """Stops the agent, and refuses its requests from now on."""
        self._end()
        if self._agent is not None:
            await asyncio.wait([self._agent], timeout=_CLOSING_S)

    def ask(self, request: ChatRequest, *, retried: bool, trained: bool) -> Asked:
        """Accepts a request. A retry of an earlier request receives its answer. If not `trained`, the answer stays out of the loss. Raises RequestError if the episode
        is over or cut off."""
        if self._refusal is not None:
            self.on_refusal(self._refusal)
            raise self._refusal
        known = self._asked.get(request.digest)
        if known is not None and (retried or not (known.connections or known.delivered)):
            self._counts["retries"] += 1
            return known
        asked = self._asked[request.digest] = Asked(request, trained=trained)
        busy = self._waiting or (self._current is not None and not self._current.answer.done())
        self._counts["parallel"] += bool(busy)
        self._waiting.append(asked)
        self._changed.set()
        return asked

    def post(self, value: object) -> None:
        """Accepts the reward. Raises RequestError if the episode has a reward, or the value is not a reward."""
        if self._reward is not None:
            text = "the episode has a reward; only the first counts"
            raise RequestError(text, status=409, code="reward_set")
        try:
            self._reward = reward_of(value)
        except (LostError, ValueError) as error:
            raise RequestError(str(error), code="invalid_reward") from error

    async def _following(self) -> Step:
        """Waits for the agent's next request, or its end."""
        answered = self._current
        try:
            asked = await self._next()
        except asyncio.CancelledError:  # no request within the time limit
            self._end()
            raise
        lost = answered is not None and not answered.delivered
        forget = lost or (answered is not None and not answered.trained)
        self._counts["undelivered"] += lost
        if asked is None:
            return self._last_step(forget=forget)
        self._current, request, number = asked, asked.request, self._counts["requests"]
        after, known = self._conversations.extended(request.keys) if self._appends else (None, 0)
        self._counts["contexts"] += after is None or after < number - 1
        self._counts["requests"] += 1
        new, tools = request.body.messages[known:], request.tools if after is None else ()
        if after is not None:  # A template may write the names of the calls, which are not rendered again.
            names = [request.called.get(str(message.get("tool_call_id"))) for message in new]
            new = [{"name": name, **message} for name, message in zip(names, new, strict=True)]
        context = Context(new, tools, after if number else -1, request.max_tokens)
        return Step(context=context, forget=forget, metrics=self._metrics())

    async def _next(self) -> Asked | None:
        """Returns the agent's next request, or None if the agent has ended. Requests whose connection was closed before their turn are dropped."""
        assert self._agent is not None
        while not self._agent.done():
            while self._waiting:
                asked = self._waiting.popleft()
                if asked.connections:
                    return asked
                self._asked.pop(asked.request.digest, None)
            self._changed.clear()
            await self._changed.wait()
        return None

    def _last_step(self, *, forget: bool) -> Step:
        """Returns the last step of an episode whose agent has ended. Raises the agent's error if it gave no reward."""
        assert self._agent is not None
        self._end()
        result, error = self._agent.result()
        if self._reward is None and error is not None:
            raise error
        last = self._reward or (Step(reward=None, done=True) if result is None else reward_of(result))
        return replace(last, metrics={**last.metrics, **self._metrics()}, forget=forget)

    def _metrics(self) -> dict[str, float]:
        return {f"agent_{name}": float(self._counts[name]) for name in _COUNTS}

    def _end(self) -> None:
        """Ends the episode: stops the agent, and refuses all further requests."""
        self._counts["late"] += self._on_end()
        self._refuse(episode_over())
        if self._agent is not None and not self._agent.cancelling():
            self._agent.cancel()

    def _refuse(self, error: RequestError) -> None:
        self._refusal = error
        for asked in (*self._waiting, *([self._current] if self._current else ())):
            if not asked.answer.done():
                self.on_refusal(error)
                asked.answer.set_exception(error)
                asked.answer.exception()  # asyncio would log an error that no connection retrieves


def reward_of(value: object) -> Step:
    """Converts a number, a bool, or a mapping with `reward`, `correct` and `metrics` to a last step. Raises ValueError or LostError if it is not a reward."""
    fields: Mapping[str, Any] = value if isinstance(value, Mapping) else {"reward": value}
    reward, metrics = fields.get("reward"), fields.get("metrics", {})
    correct = fields.get("correct", reward if isinstance(reward, bool) else None)
    known = fields.keys() <= {"reward", "correct", "metrics"} and isinstance(metrics, Mapping)
    if reward is None or not known or not isinstance(correct, bool | None):
        need = 'a number, a bool, or an object {"reward": ..., "correct": ..., "metrics": {...}}'
        raise ValueError(f"a reward must be {need}; got {value!r:.200}")
    numbers = {str(name): number_of(number, f"the metric {name!r}:") for name, number in metrics.items()}
    return Step(reward=number_of(reward, "the reward is"), correct=correct, done=True, metrics=numbers)
