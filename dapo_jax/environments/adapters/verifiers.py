"""Environments of verifiers 0.4: `verifiers:NAME`, or `verifiers:FILE.toml` with the table `env` of verifiers' own commands.

verifiers runs each rollout itself. Its interception server forwards the requests of its agents to our server of agents, in one HTTP client for all episodes.
Each request has the identifier of its trace in the header `X-Session-ID`, and this identifier is the key of the episode.
"""

import asyncio
import importlib
import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

from dapo_jax.data.verifiers_tasks import environment_config
from dapo_jax.environments.agents.environment import AgentEnvironment, Play
from dapo_jax.environments.calls import LostError
from dapo_jax.rewards.functions import loading
from dapo_jax.text.http import RequestError


class VerifiersEnvironment(AgentEnvironment):
    """Runs the rollouts of a verifiers environment. The policy is its only trainable agent; it may also play other agents, whose turns stay out of the loss."""

    def __init__(self, kind: str, name: str, **options: Any) -> None:
        """Loads the environment. Raises ValueError if this is not possible. `options` are further arguments of `AgentEnvironment`."""
        config, self._name = environment_config(name), f"{kind}:{name}"
        self._package: Any = importlib.import_module("verifiers.v1")
        make = partial(self._package.load_environment, config)
        self._environment: Any = loading(self._name, "creating the environment", make)
        self._trained = ""
        """Name of the trainable agent."""
        # A failed request ends the rollout, whose episode then has the error as its reason.
        logging.getLogger("verifiers.v1.interception").setLevel(logging.ERROR)
        super().__init__(kind, name, **options)

    def _loaded(self, kind: str, name: str, variables: Sequence[str]) -> Play:
        return self._rollout

    async def _start(self) -> None:
        """Starts the server, and the services that verifiers needs until the event loop ends. Raises LostError unless exactly one agent is trainable."""
        roles = dict[str, SimpleNamespace]()

        def add(role: str, spec: Any) -> SimpleNamespace:
            return roles.setdefault(role, SimpleNamespace(trainable=spec.client is None))

        await self._environment.setup(self._package.Agents(self._environment.config, add))
        trained = [role for role, agent in roles.items() if agent.trainable]
        if len(trained) != 1:
            remedy = "in the environment's setup(agents), set agents.NAME.trainable = False for the others, or give them a client of their own"
            text = f"{self._name} has {len(trained)} trainable agents ({', '.join(trained)}), but needs 1: {remedy}"
            raise LostError(text, every=True)
        [self._trained] = trained
        serving = asyncio.get_running_loop().create_future()

        async def serve() -> None:
            async with self._environment.serving():
                serving.set_result(None)
                await asyncio.Event().wait()

        self._serving = asyncio.create_task(serve())
        await asyncio.wait([serving, self._serving], return_when=asyncio.FIRST_COMPLETED)
        if self._serving.done():
            self._serving.result()
        await super()._start()

    async def _rollout(self, url: str, key: str, row: Mapping[str, Any]) -> Any:
        """Runs a rollout. Returns the reward of the trainable agent's traces, and their metrics. Raises LostError if the rollout failed."""
        verifiers, environment = self._package, self._environment
        kind = type(environment.taskset).task_type()
        if "task" not in row:
            need = f"needs rows from data.source={self._name}; found a row with the fields {sorted(row)}"
            raise LostError(f"environment.source={self._name} {need}", every=True)
        task = kind(kind.data_type().model_validate_json(row["task"]), environment.config.taskset.task)
        client = verifiers.EvalClientConfig(base_url=url, api_key_var="")  # the trace has the key
        context = verifiers.ModelContext(model="policy", client=client)
        traces = list[Any]()

        def stop(error: RequestError) -> None:
            """Stops the rollout as at a limit of verifiers, which scores it although the request is refused."""
            for trace in traces:
                if not trace.is_completed:
                    trace.stop("max_turns" if error.code == "max_turns" else "max_total_tokens")

        self.server.episode(key).on_refusal = stop

        def begin(trace: Any) -> None:
            mark = "" if trace.agent.name == self._trained else "frozen"
            trace.id = f"{key}.{mark}{len(traces)}"
            traces.append(trace)

        played = await environment.run_episode(task, context, on_trace=begin)
        if not environment.complete(played):
            errors = [*played.errors, *(error for trace in played.traces for error in trace.errors)]
            texts = [f"{error.type}: {error.message:.500}" for error in errors] or ["it is not complete"]
            raise LostError(f"the rollout of {self._name} failed: {texts[-1]}")
        own = [trace for trace in played.traces if trace.agent.name == self._trained]
        rewards = [trace.reward for trace in own if trace.rewards]
        metrics = defaultdict[str, float](float)
        for trace in own:
            scores = {name: reward.value for name, reward in trace.rewards.items() if reward is not None}
            for name, value in {**trace.metrics, **scores}.items():
                metrics[name] += (value or 0.0) / len(own)
        return {"reward": sum(rewards) / len(rewards), "metrics": metrics} if rewards else None
