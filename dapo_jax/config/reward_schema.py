"""The sections `reward`, `environment`, `workers` and `cluster`."""

from dataclasses import dataclass
from typing import Any, NamedTuple

from dapo_jax.config.keys import POSITIVE, SIZE, Range, key
from dapo_jax.config.section import Section, entries


@dataclass(frozen=True, kw_only=True)
class OverlongConfig(Section, at="reward.overlong"):
    """Soft overlong punishment (Eq. 13) and overlong filtering (Section 3.4)."""

    enabled: bool = key(True, aliases="overlong_buffer.enable")
    """Add the soft overlong punishment to the rule-based reward."""
    buffer_tokens: int = key(4096, aliases="overlong_buffer.len")
    """L_cache, the number of tokens before the length limit over which the penalty grows."""
    penalty_factor: float = key(1.0)
    """Maximum penalty, for responses at the length limit. (Eq. 13)"""
    filter_truncated: bool = key(False, aliases="mask_truncated_completions")
    """Overlong filtering: exclude the tokens of truncated responses from the loss. Their rewards still count in the statistics of their groups."""

    def check_together(self) -> None:
        if self.enabled and self.buffer_tokens < 1:
            remedy = "make it larger, or set reward.overlong.enabled=false"
            self.refuse("buffer_tokens", "1 or more for the soft punishment", remedy)


@dataclass(frozen=True, kw_only=True)
class GraderConfig:
    """One of several graders, with its weight."""

    grader: str = key(not_empty=True)
    """The grader, in the same form as a single `reward.grader`."""
    weight: float = key(1.0, range=Range("a number that is not 0", lambda v: v != 0))
    """Weight of this grader's reward in the sum of rewards. A negative weight turns the reward into a penalty."""


@dataclass(frozen=True, kw_only=True)
class RewardConfig(Section, at="reward"):
    """Grading of responses: the graders, the reward for each verdict, and the overlong penalty."""

    grader: str | list[dict[str, Any]] = key(
        "exact", not_empty=True, aliases="reward_funcs custom_reward_function reward_weights"
    )
    """The grader: a name in `dapo_jax.rewards.GRADERS` (exact, dapo, dapo_boxed, math, gsm8k, math_verify), `reasoning_gym` (the task's own scorer),
    `module:function`, `path/to/file.py:function`, or `judge:FILE.yaml` (a language model with an API). For a function written for TRL or verl, add the prefix `trl:` or `verl:`.
    `code` or `code:FILE.yaml` runs the program in the response on tests, see [Train on code](train_on_code.md).
    Or a list of graders, for example [{grader: math}, {grader: "my.py:brief", weight: 0.5}]. The reward is then the weighted sum of the graders' rewards.
    Only the first grader decides whether a response is correct. The other graders only shape the reward. kimi_length is a length reward, which needs another grader before it."""
    answer_marker: str = "="
    """The exact grader compares the text after the last answer marker in the response with the reference answer. If the marker is empty, the grader compares the whole response."""
    correct: float = key(1.0, range=None)
    """Reward for a correct response if the grader returns no score. (Section 2.4)"""
    incorrect: float = key(-1.0, range=None)
    """Reward for a wrong response if the grader returns no score. (Section 2.4) If grading fails (time limit, memory, a dead worker), the reward is at most this value."""
    overlong: OverlongConfig = key(default_factory=OverlongConfig, aliases="overlong_buffer")

    def check_together(self) -> None:
        if self.correct <= self.incorrect:
            remedy = "raise it: a correct response must be worth more than a wrong one"
            self.refuse("correct", f"more than reward.incorrect = {self.incorrect}", remedy)
        if not isinstance(self.grader, str) and not self.graders:
            self.refuse("grader", "a grader", "write its name, or leave the key out")

    @property
    def graders(self) -> list[GraderConfig]:
        """The graders in a list. Empty for a single grader."""
        return [] if isinstance(self.grader, str) else entries("reward.grader", self.grader, GraderConfig)


_INHERITED = ["PATH", "HOME", "LANG"]
"""Default of `environment.variables`."""


@dataclass(frozen=True, kw_only=True)
class EnvironmentConfig(Section, at="environment"):
    """Multi-turn episodes, in which an environment responds to the policy and supplies the rewards."""

    source: str = key("", aliases="environment_factory env_class")
    """The environment. `guess` is a number-guessing game. `module:name` or `path/to/file.py:name` is a class or function that is called without arguments and returns an environment.
    Environments from other libraries have the forms `trl:PLACE:Class` (`trl:PLACE:Class+function` with a reward function), `skyrl_gym:ID` or `skyrl_gym:PLACE:Class`, `openenv:URL`, and
    `tinker:PLACE:Builder`. PLACE is a module or a file. An environment replaces the graders in `reward`. If empty, a response is a single turn, and graders supply the rewards.
    `agent:FILE.py:FUNCTION` and `command:PROGRAM ARGS` are agents: an async function or a program that sends the policy requests in OpenAI's chat format. If an agent gives no reward,
    `reward.grader` grades the last answer, unless it has its default value. `verifiers:NAME` runs the rollouts of an environment of verifiers 0.4."""
    max_turns: int = key(8, range=SIZE, aliases="max_turns_per_episode max_assistant_turns")
    """Maximum number of turns per episode. Longer episodes are truncated."""
    turn_tokens: int = key(0)
    """Maximum number of tokens per turn. 0 means that only the episode's limit applies."""
    episode_tokens: int = key(0)
    """Maximum number of tokens per episode, including the environment's tokens. 0 means `sampling.max_response_tokens`. A larger limit requires an environment that starts new contexts, because
    each context has at most `data.max_prompt_tokens` + `sampling.max_response_tokens` tokens. The overlong penalty and filter use this limit."""
    concurrency: int = key(64, range=SIZE)
    """Maximum number of environments or agents that work at the same time. The others wait."""
    variables: list[str] = key(default_factory=lambda: [*_INHERITED])
    """Names of the environment variables that a `command:` agent inherits. Secrets that are not listed do not reach it."""
    history: str = key("append", choices=["append", "template"])
    """How a request of an agent continues an earlier one. append: its context has the exact tokens of the earlier turns, and the new messages. template: all of its messages are rendered by the chat template
    in a new context, as by a server, so each turn becomes a training sequence."""
    credit: str = key("episode", choices=["episode", "turn"])
    """Credit assignment to turns. episode: all turns get the advantage of the episode's reward. turn: the advantage of a turn is (reward-to-go - mean) / std. The mean is over the group's episodes that reached
    this turn, and std is the standard deviation of the group's rewards. If an environment compares episodes (`group_rewards`), the reward from this comparison replaces the turn rewards, and is credited to the last turn."""

    def check_together(self) -> None:
        if self.variables != _INHERITED and not self.source.startswith("command:"):
            self.refuse("variables", f"{_INHERITED}, unless the source is a command", "leave it out")
        if self.history != "append" and not self.is_agent:
            self.refuse("history", "append, unless the source is an agent", "leave it out")

    @property
    def is_agent(self) -> bool:
        """Whether the environment is an agent that owns its loop."""
        return self.source.startswith(("agent:", "command:", "verifiers:"))


@dataclass(frozen=True, kw_only=True)
class SandboxConfig(Section, at="sandbox"):
    """The sandbox in which the grader `code` runs programs that the model wrote."""

    backend: str = key("auto", not_empty=True, aliases="code_provider sandbox_fusion.url", may_change=True)
    """bubblewrap isolates programs with namespaces and a filter of system calls (Linux). `podman:IMAGE` and `docker:IMAGE` run them in containers, and `remote:URL` on a service. unsafe limits their
    time and memory, but does not isolate them: it is for programs that you trust. auto is bubblewrap. [The page about code](train_on_code.md#other-sandboxes) compares them. If a back-end is missing
    or leaks, the run is refused before it starts."""
    slots: int = key(0, aliases="sandbox_fusion.max_concurrent parallel_code_exec_per_proc", may_change=True)
    """Number of programs that run at once. 0 means the number of cores. Verdicts do not depend on it."""
    python: str = key("", may_change=True)
    """Interpreter of the programs, such as `/usr/bin/python3`. Programs can only import packages that it has. Empty means the system's python3, or else the interpreter of the run. In a container, it is
    an interpreter of the image."""
    limits: dict[str, Any] = key(default_factory=dict, aliases="sandbox_fusion.memory_limit_mb")
    """Limits of a program that differ from their defaults, for example {cpu_s: 6, memory_mb: 1024}. [The page about code](train_on_code.md#limits-and-verdicts) lists them. Limits in a dataset's
    rows come first."""


class Workers(NamedTuple):
    """Worker processes and the time limit of a call."""

    count: int
    timeout_s: float


GRADER_WORKERS, ENVIRONMENT_WORKERS = Workers(2, 10.0), Workers(0, 30.0)
"""The workers of a grader and of an environment, unless the section `workers` sets others."""


@dataclass(frozen=True, kw_only=True)
class WorkersConfig(Section, at="workers"):
    """Worker processes for graders, or for the environment if there is one."""

    count: int | None = key(None, may_change=True)
    """Number of worker processes per grader, or for the environment. null means 2 for graders and 0 for an environment. If 0, graders and environments run in the main process, graders
    without a time limit. Graders that only compare text (exact, dapo, dapo_boxed, gsm8k), reasoning_gym, kimi_length, async functions and functions passed from Python always run in
    the main process. If an environment in a worker blocks, runs out of memory or exits, only its own episode is lost, because a new worker replays the turns of the other episodes."""
    timeout_s: float | None = key(None, range=POSITIVE)
    """Time limit in seconds for one call. null means 10 for graders and 30 for an environment. A grader's call grades one response, or a whole group if the function accepts groups. If a call
    takes longer, its responses count as wrong. Judges have their own limit. An environment's call is one turn. If it takes longer or raises an error, the episode is lost and counts as wrong.
    Its reward is the lowest in its group, but at most `reward.incorrect`."""

    @property
    def of_graders(self) -> Workers:
        """The workers of each grader."""
        return self._with_defaults(*GRADER_WORKERS)

    @property
    def of_environment(self) -> Workers:
        """The workers of an environment."""
        return self._with_defaults(*ENVIRONMENT_WORKERS)

    def _with_defaults(self, count: int, timeout_s: float) -> Workers:
        count = count if self.count is None else self.count
        return Workers(count, timeout_s if self.timeout_s is None else self.timeout_s)


@dataclass(frozen=True, kw_only=True)
class ClusterConfig(Section, at="cluster"):
    """Other machines, which are the nodes of a Ray cluster, see [On several machines](several_machines.md)."""

    address: str = key("")
    """The Ray cluster: `HOST:PORT` of its head, or `auto` for the cluster that was started on this machine (needs the `cluster` extra). Empty means no cluster. A cluster that other machines
    can reach needs RAY_AUTH_MODE=token."""
    workers: bool = key(False)
    """Run the worker processes of graders or of the environment on the nodes that offer CPUs to Ray, in proportion to these CPUs. `workers.count` is their number. Their limits stay the same, and
    results do not depend on it."""
    samplers: int = key(0, only_with="rollout.in_flight")
    """Number of sample workers of each training process: processes on other devices that sample the responses in flight (`rollout.in_flight`). The training devices then sample evaluations
    only. 0 means that they sample everything."""
    resources: dict[str, int] = key(default_factory=dict, only_with="cluster.samplers")
    """Resources that each sample worker takes from its node, for example {GPU: 1}, or {TPU: 4} for all chips of a host. {} means CPUs."""
    round_s: float = key(120.0, range=POSITIVE, only_with="cluster.samplers")
    """Time limit of a round in seconds. A sample worker counts as dead if a round takes longer, and also longer than 10 times the median of its last rounds."""

    def check_together(self) -> None:
        host, _, port = self.address.rpartition(":")
        if self.address not in ("", "auto") and not (host and port.isdigit()):
            self.refuse("address", "auto or HOST:PORT", "`ray start --head` prints the address")
        if self.address and not (self.workers or self.samplers):
            self.refuse(
                "address", "cluster.workers or cluster.samplers", "set one of them, or leave the address out"
            )
        if self.samplers and not self.address:
            self.refuse("samplers", "cluster.address", "set it, or leave cluster.samplers out")
        for name, count in self.resources.items():
            if type(count) is not int or count < 1:
                self.refuse(
                    "resources", f"a whole number of 1 or more for {name}", "write for example {GPU: 1}"
                )
