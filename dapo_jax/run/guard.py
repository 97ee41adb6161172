"""The guard of a run detects skipped updates, non-finite weights and a mismatch between sampler and trainer. It also runs the watchdogs.

At the end of each step, it decides whether to stop the run. It uses only numbers that are the same in every process, so that all processes stop together.
"""

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Bool, PyTree

from dapo_jax.checkpoints.manifest import flattened
from dapo_jax.config import to_yaml
from dapo_jax.dapo.centering import HEAD_MAX, MOST_HEAD
from dapo_jax.dapo.dynamic_sampling import ShortfallError
from dapo_jax.dapo.metrics import Max
from dapo_jax.dapo.rollouts import Group
from dapo_jax.health.watchdogs import Watchdogs
from dapo_jax.parallel.processes import is_first
from dapo_jax.parallel.sharding import replicated
from dapo_jax.parallel.together import all_gather_bytes, broadcast_from_first
from dapo_jax.rollout.collector import Collector, Position
from dapo_jax.run.loop import Metrics, Observer, StepResult
from dapo_jax.run.session import Session
from dapo_jax.storage import entries, path_of
from dapo_jax.trackers.rollout_log import write_post_mortem
from dapo_jax.training.minibatch import Minibatch, on_host

IN_A_ROW = "update/skipped_in_a_row"
KL = "sync/sampler_trainer_kl"

MAX_SKIPPED_UPDATES = 3
"""Maximum number of consecutive skipped updates. If more are skipped, the run stops."""
POST_MORTEMS = 5
"""Maximum number of skipped updates that are written to the run's folder."""
WORDS = {
    "weights": "weights",
    "sampler_logprobs": "the sampler's log-probabilities",
    "advantages": "advantages",
    "trainer_logprobs": "the trainer's log-probabilities",
    "loss": "loss",
    "gradient": "gradient",
}
"""The checked quantities and their names in messages, in the order in which a step computes them. The first non-finite one usually causes the others."""

_FLAG = "nonfinite/"
_SHOWN = 3
"""Maximum number of prompts, parameters or tokens that a message lists."""


@dataclass(frozen=True)
class Update:
    """One update of a step: its minibatch, learning rate and metrics."""

    minibatch: Minibatch
    learning_rate: float
    metrics: Metrics

    def flags(self) -> dict[str, list[int]]:
        """Maps each non-finite quantity to the indices of the affected microbatches (for the gradient, parameters). Empty if the update was applied."""
        maxima = {name: metric.value for name, metric in self.metrics.items() if isinstance(metric, Max)}
        maxima = jax.device_get(maxima)
        flags = {name: np.flatnonzero(maxima.get(_FLAG + name, 0.0) > 0).tolist() for name in WORDS}
        return {name: indices for name, indices in flags.items() if indices}

    def stacks(self) -> list[dict[str, np.ndarray]]:
        """Copies the microbatches of the update to the host. All processes must call this method."""
        return [
            {name: array[: int(stack.count)] for name, array in on_host(stack.microbatches).arrays.items()}
            for stack in self.minibatch
        ]

    def named(
        self, flags: Mapping[str, Sequence[int]], groups: Sequence[Group], parameters: Sequence[str]
    ) -> dict[str, dict[str, Any]]:
        """Converts the indices from `flags()` to parameter names for the gradient, and to (stack, microbatch) pairs for all other quantities.

        For advantages, the result also contains the affected prompts; for the sampler's log-probabilities, the affected responses and tokens.
        """
        named: dict[str, dict[str, Any]] = {}
        capacities = [len(stack.microbatches.tokens) for stack in self.minibatch]
        microbatches = [[stack, index] for stack, count in enumerate(capacities) for index in range(count)]
        for name, indices in flags.items():
            if name == "gradient":
                named[name] = {"parameters": [parameters[index] for index in indices]}
                continue
            named[name] = {"microbatches": [microbatches[index] for index in indices]}
            if name == "sampler_logprobs":
                named[name]["responses"] = nonfinite_responses(groups)
            if name == "advantages":
                bad = [group.prompt.ordinal for group in groups if not np.isfinite(group.rewards).all()]
                named[name]["prompts"] = bad
        return named


class GuardError(RuntimeError):
    """The guard stopped the run, because further steps would be useless. The message states the cause."""

    def __init__(self, message: str, *, whole: StepResult | None = None) -> None:
        """`whole` is the last step's result, if its weights can still be used. A checkpoint of that step is then saved, so that the run can resume."""
        super().__init__(message)
        self.whole = whole


class Guard(Observer):
    """The guard of one run. All processes must make the same calls."""

    def __init__(self, session: Session) -> None:
        """Raises GuardError if the initial weights are not finite."""
        self._session, self._config, start = session, session.config, session.start
        self._updates: list[Update] = []
        self._nonfinite: list[int] = []
        history = session.records.read() if session.records is not None else []
        if start.unfinished is not None:
            history = [*history, start.unfinished]
        dumped = len(entries(session.run_dir / "post_mortem")) if is_first() else 0
        before = history[-1].get(IN_A_ROW, 0) if history else 0
        self._dumped, self._in_a_row = json.loads(broadcast_from_first(json.dumps([dumped, before]).encode()))
        self._watchdogs = Watchdogs(metric=session.config.learnt_metric, history=history)
        if bad := nonfinite_leaves(start.state.params):
            step = start.position.step
            source = session.config.model.source
            whose = f"in the checkpoint of step {step}" if step else f"of model.source={source}"
            raise GuardError(f"the weights {whose} are not finite: {some(bad)}; start from different weights")

    def after_step(self, result: StepResult) -> None:
        """Checks the step, and adds the guard's metrics to `result.metrics`. Raises GuardError if the weights are not finite, or a limit in `config.guard` is
        exceeded. Before it is raised, the step's metrics are written."""
        self._session.check()  # first, because this observer and later ones write to the folder
        metrics, step = result.metrics, result.position.step
        skipped, drifted = self._skipped(result), self._drifted(step, metrics)
        drifted = drifted or self._unnormalized(step, metrics)
        bad = nonfinite_leaves(result.state.params)
        ruined = f"the weights are not finite after step {step}: {some(bad)}" if bad else ""
        metrics[IN_A_ROW] = self._in_a_row
        raised, warnings = self._watchdogs.step(metrics)
        metrics |= raised
        for warning in warnings:
            self._warn(step, warning)
        if problems := "; ".join(filter(None, (ruined, skipped, drifted))):
            self._session.shown.step(step, metrics)
            if self._session.records is not None:
                self._session.records.step(step, metrics)
            raise GuardError(problems, whole=None if ruined or drifted else result)

    def before_sampling(self, position: Position, collector: Collector) -> None:
        """Clears the previous step's list of groups with non-finite log-probabilities."""
        self._nonfinite = []

    def on_group(self, group: Group, collector: Collector) -> None:
        """Records the group for `on_shortfall` if any of its log-probabilities are not finite."""
        if nonfinite_responses([group]):
            self._nonfinite.append(group.prompt.ordinal)

    def on_shortfall(self, error: ShortfallError) -> None:
        """Raises GuardError if any process found non-finite log-probabilities, because they explain the shortfall."""
        # Each process has only the log-probabilities of its own groups, but all processes must raise the same error.
        gathered = all_gather_bytes(json.dumps(self._nonfinite).encode())
        if prompts := sorted({ordinal for ordinals in map(json.loads, gathered) for ordinal in ordinals}):
            raise GuardError(
                f"the sampler's log-probabilities are not finite (prompt {some(prompts)}), so its responses are meaningless; {error}"
            ) from error

    def after_update(self, minibatch: Minibatch, metrics: Metrics, *, learning_rate: float) -> None:
        """Stores the update, which is checked at the end of the step."""
        self._updates.append(Update(minibatch, learning_rate, metrics))

    def _skipped(self, result: StepResult) -> str:
        """Counts and reports skipped updates, and writes their batches to disk. Returns a reason to stop the run, or an empty string."""
        updates, self._updates = self._updates, []
        longest, last, step = 0, "", result.position.step
        for index, update in enumerate(updates):
            if not (flags := update.flags()):
                self._in_a_row = 0
                continue
            self._in_a_row += 1
            groups = self._session.run.batches.split(result.collected.groups, step)[index]
            named = update.named(flags, groups, list(flattened(result.state.params)))
            last = f"update {index + 1} of {len(updates)} was skipped: not finite: {described(named)}"
            if self._dumped < POST_MORTEMS:
                last += f"; the batch is in {self._post_mortem(step, index + 1, update, named, groups)}"
            self._warn(step, last)
            longest = max(longest, self._in_a_row)
        if longest <= MAX_SKIPPED_UPDATES:
            return ""
        return f"{longest} updates in a row were skipped up to step {step}, but at most {MAX_SKIPPED_UPDATES} are allowed; the last one: {last}"

    def _post_mortem(
        self, step: int, number: int, update: Update, named: Mapping[str, Any], groups: Sequence[Group]
    ) -> str:
        """Writes a skipped update to the run's folder, and returns the path of its subfolder."""
        self._dumped += 1
        name, stacks = f"post_mortem/step_{step:06d}_update_{number}", update.stacks()
        if is_first():
            report = {
                "step": step,
                "update": number,
                "skipped_in_a_row": self._in_a_row,
                "learning_rate": update.learning_rate,
                "nonfinite": named,
            }
            folder, config = self._session.run_dir / name, to_yaml(self._config)
            write_post_mortem(folder, report=report, stacks=stacks, groups=groups, config=config)
        return str(path_of(self._config.run_dir) / name)

    def _drifted(self, step: int, metrics: Mapping[str, float | int]) -> str:
        """Compares KL(sampler || trainer) with `guard.max_mismatch_kl`. Returns a reason to stop the run, or an empty string."""
        limit, kl = self._config.guard.max_mismatch_kl, metrics.get(KL)
        if limit is None or kl is None or kl <= limit:
            return ""
        return (
            f"step {step}: KL(sampler || trainer) is {kl:.3g} nats per token, over guard.max_mismatch_kl={limit:g}. Usual causes: "
            "tokens from earlier steps (dynamic_sampling.surplus=carry, rollout.in_flight), rounding to bfloat16, or different kernels. "
            "Set dynamic_sampling.surplus=discard or loss.correction=truncate, or raise the limit"
        )

    def _unnormalized(self, step: int, metrics: Mapping[str, float | int]) -> str:
        """Checks that no head of the sampler has a probability above 1. Returns a reason to stop the run, or an empty string."""
        largest = metrics.get(HEAD_MAX, 0.0)
        if largest <= MOST_HEAD:
            return ""
        return (
            f"step {step}: the sampler's {self._config.loss.center} most probable tokens have a probability of {largest:.6g} together, but it must be at most {MOST_HEAD}. "
            "Their record is not normalized over the whole vocabulary, so loss.center would train on it wrongly: report this error, or set loss.center=0"
        )

    def _warn(self, step: int, text: str) -> None:
        self._session.shown.message(f"step {step}: {text}")


def nonfinite_responses(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """Returns the responses for which the sampler returned non-finite log-probabilities, with prompt, index in the group, and tokens."""
    return [
        {"ordinal": group.prompt.ordinal, "index": index, "tokens": tokens.tolist()}
        for group in groups
        for index, rollout in group.indexed
        if len(tokens := np.flatnonzero(~np.isfinite(rollout.response.logprobs)))
    ]


def described(named: Mapping[str, Mapping[str, Any]]) -> str:
    """Describes the result of `Update.named` in one line, which lists the first few prompts or parameters of each kind of problem."""
    return ", ".join(WORDS[name] + _location(problem) for name, problem in named.items())


def _location(problem: Mapping[str, Any]) -> str:
    if "parameters" in problem:
        return f" ({some(problem['parameters'])})"
    responses = problem.get("responses", ())
    prompts = problem.get("prompts") or sorted({response["ordinal"] for response in responses})
    return f" (prompt {some(prompts)})" if prompts else ""


def some(names: Sequence[object]) -> str:
    """Formats the first few names, and the number of remaining names.

    >>> some([4, 8, 15, 16, 23])
    '4, 8, 15 and 2 more'
    """
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(map(str, names[:_SHOWN])) + more


def nonfinite_leaves(tree: PyTree) -> list[str]:
    """Returns the dotted paths of all leaves with non-finite values. The leaves are arrays on one mesh. All processes must call this function."""
    bad = np.asarray(_program(jax.tree.leaves(tree)[0].sharding.mesh)(tree))
    return [name for name, is_bad in zip(flattened(tree), bad, strict=True) if is_bad]


@functools.cache
def _program(mesh: Mesh) -> Callable[[PyTree], Bool[Array, " leaves"]]:
    def bad(tree: PyTree) -> Bool[Array, " leaves"]:
        return jnp.stack([~jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(tree)])

    return jax.jit(bad, out_shardings=replicated(mesh))
