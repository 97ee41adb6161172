"""Observers of a run: per-token ratios pi / pi_old of logged rollouts, the counts of graders, the progress display, and profiler traces."""

import json
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import jax
import numpy as np
from jaxtyping import Array, Float

from dapo_jax.config import TrainConfig
from dapo_jax.dapo.dynamic_sampling import Collected
from dapo_jax.dapo.microbatch import Microbatch
from dapo_jax.dapo.rollouts import Group, Rollout
from dapo_jax.parallel.together import all_gather_bytes
from dapo_jax.rewards.code_grader import CodeGrader
from dapo_jax.rewards.judge import Judge
from dapo_jax.rollout.collector import Collector, Position
from dapo_jax.run.loop import Metrics, Observer, StepResult
from dapo_jax.run.training_pass import StepBatches
from dapo_jax.storage import AnyPath, files_below, write_whole
from dapo_jax.trackers.progress import Progress
from dapo_jax.trackers.rollout_log import LOGGED_GROUPS
from dapo_jax.training.minibatch import Minibatch, on_host
from dapo_jax.training.state import TrainState
from dapo_jax.training.update import Updater

TokenRatios = Mapping[tuple[int, int], Float[np.ndarray, " response"] | None]
"""Maps (ordinal, response index) of each trained rollout to the ratios of its tokens, or to None if the rollout is not in the loss."""


class Ratios(Observer):
    """Computes the per-token ratios pi / pi_old of logged rollouts with a forward pass. All processes must make the same calls."""

    def __init__(self, config: TrainConfig, *, batches: StepBatches, updater: Updater) -> None:
        self._config, self._batches, self._updater = config, batches, updater
        self._wanted: set[int] = set()
        self._groups: list[list[Group]] = []
        self._asked: tuple[list[Group], list[Array]] = [], []
        self.found: dict[tuple[int, int], Float[np.ndarray, " response"] | None] = {}
        """The `TokenRatios` of the last step. Empty if the rollouts of that step are not logged."""

    def after_sampling(self, step: int, collected: Collected) -> None:
        """Selects the trained rollouts to log, and splits the step's groups into one list for each update."""
        due = self._config.logs_rollouts(step)
        self._wanted = {group.prompt.ordinal for group in collected.logged(LOGGED_GROUPS)}
        trained = [group for group in collected.groups if due and group.prompt.ordinal in self._wanted]
        self.found = {(g.prompt.ordinal, index): None for g in trained for index, _ in g.indexed}
        self._groups = self._batches.split(collected.groups, step) if trained else []

    def before_update(self, state: TrainState, minibatch: Minibatch, *, index: int, count: int) -> None:
        """Starts to compute the ratios with the weights before the update."""
        groups = self._groups[index] if self._groups else []
        wanted = [group for group in groups if group.prompt.ordinal in self._wanted]
        self._asked = wanted, self._updater.ratios(state, minibatch, first=index == 0) if wanted else []

    def after_update(self, minibatch: Minibatch, metrics: Metrics, *, learning_rate: float) -> None:
        """Reads the ratios. The update is already dispatched, so the device does not wait for the host."""
        wanted, ratios = self._asked
        if not wanted:
            return
        by_response = {
            key: values
            for stack, of_tokens in zip(minibatch, on_host(ratios), strict=True)
            for key, values in responses_in(on_host(replace(stack.microbatches, recorded={})), of_tokens)
        }
        for group in wanted:
            for index, rollout in group.indexed:
                self.found[group.prompt.ordinal, index] = ratios_of(group, rollout, by_response)


def ratios_of(
    group: Group, rollout: Rollout, by_response: Mapping[bytes, np.ndarray]
) -> Float[np.ndarray, " response"] | None:
    """Returns one ratio per token of a response, with NaN for tokens that were not sampled, or None if the rollout is not in the loss.

    `by_response` contains the pairs that `responses_in` yields.
    """
    response, ratios = rollout.response, None
    for context, first, stop in response.parts(group.prompt.tokens):
        sampled = response.sampled[first:stop]
        tokens = np.concatenate([context.ids, response.tokens[first:stop]])
        values = by_response.get(_response_key(tokens, response.logprobs[first:stop][sampled]))
        if values is None:
            continue
        if ratios is None:
            ratios = np.full(len(response.tokens), np.nan, values.dtype)
        ratios[first:stop][sampled] = values
    return ratios


def responses_in(
    stack: Microbatch, values: Float[np.ndarray, "capacity rows seq"]
) -> Iterator[tuple[bytes, np.ndarray]]:
    """Yields (key, values of the sampled tokens) for each response in the loss. The key identifies a response: it consists of its prompt, its tokens and the
    sampler's log-probabilities, because equal tokens may have different ratios if they were sampled with other weights or experts."""
    arrays = {name: np.asarray(array) for name, array in vars(stack).items() if array is not None}
    for row in np.ndindex(stack.mask.shape[:2]):
        mask, segments = arrays["mask"][row], arrays["segment_ids"][row]
        for segment in np.unique(segments[mask]):
            sampled = mask & (segments == segment)
            prompt = arrays["prefix_ids"][row][sampled][0]
            tokens = arrays["tokens"][row][(segments == segment) | (segments == prompt)]
            key = _response_key(tokens, arrays["sampler_logprobs"][row][sampled])
            yield key, np.asarray(values[row])[sampled]


def _response_key(tokens: np.ndarray, logprobs: np.ndarray) -> bytes:
    return tokens.astype(np.int32).tobytes() + logprobs.astype(np.float32).tobytes()


_QUOTED = 200
"""Maximum number of characters that a message quotes from a prompt or a response."""


class GraderCounts(Observer):
    """Adds the counts of judges and of the grader `code` since the last step, in all processes, to the metrics of a step."""

    def __init__(self, graders: Sequence[Judge | CodeGrader]) -> None:
        self._graders, self._before = graders, Counter[str]()

    def after_step(self, result: StepResult) -> None:
        """Adds `reward/judge/*` and `reward/code/*`."""
        if not self._graders:
            return
        now = Counter[str]()
        for grader in self._graders:
            now.update({f"reward/{grader.kind}/{name}": count for name, count in grader.counts.items()})
        new = json.dumps({name: count - self._before[name] for name, count in now.items()}).encode()
        gathered = [json.loads(counts) for counts in all_gather_bytes(new, buffer_bytes=1024)]
        result.metrics.update({name: sum(counts[name] for counts in gathered) for name in now})
        self._before = now


class StepProgress(Observer):
    """Shows the progress of sampling and updates, and warns if groups have no learning signal or responses have no verdict."""

    def __init__(self, config: TrainConfig, shown: Progress) -> None:
        self._shown = shown
        self._metric, self._by_score = config.learnt_metric, config.dynamic_sampling.metric == "score"
        self._warned = self._warned_lost = False
        self._weight_rounds = config.rollout.weight_rounds

    def before_sampling(self, position: Position, collector: Collector) -> None:
        """Shows that sampling has started."""
        self._step, self._began, self._now = position.step + 1, position.cursor, collector
        self._first_wave = 0
        self._example: tuple[Group, int] | None = None
        self._shown.phase("sample", 0, collector.needed)

    def on_group(self, group: Group, collector: Collector) -> None:
        """Shows the number of groups so far, and warnings. Each kind of warning is shown at most once per run."""
        sampled, tally = self._now.cursor - self._began, self._now.tally
        self._first_wave = self._first_wave or sampled
        answered = [i for i, r in enumerate(group.rollouts) if r.text and r.verdict.extracted is not None]
        if answered and self._example is None:
            self._example = group, answered[0]
        self._shown.phase("sample", collector.kept, collector.needed)
        stage = f"{self._now.stage}  " if self._now.stage else ""
        outcomes = {
            "score": f"  scores differ in {tally.differing}",
            "correct": f"  mixed {tally.mixed}  all correct {tally.correct}  all wrong {tally.wrong}",
        }.get(self._metric, "")
        self._shown.wave(f"{stage}prompts {tally.groups}/{sampled}{outcomes}")
        lost = next((r.verdict for r in group.rollouts if r.verdict.lost), None)
        if lost is not None and not self._warned_lost:
            self._warned_lost = True
            self._shown.message(
                f"step {self._step}: a response to prompt {group.prompt.ordinal} got no verdict ({lost.reason or lost.lost}) and counts as "
                f"{'the worst of its group' if self._by_score or lost.parts else 'wrong'}{' for one grader' if lost.parts else ''}; the metric reward/lost counts all such responses"
            )
        if not self._warned and tally.groups >= self._first_wave and (why := self._without_signal()):
            self._warned = True
            self._shown.message(f"step {self._step}: {why}. {_quoted(*(self._example or (group, 0)))}")

    def after_sampling(self, step: int, collected: Collected) -> None:
        """Warns once if the further rounds of the previous step were enough for this step, so that responses wait and get old."""
        if self._weight_rounds and not collected.rounds:
            self._shown.message(
                f"step {step} needed no round of its own after the rollout.weight_rounds={self._weight_rounds} of the previous step: lower the key, because groups wait for "
                "training, and their tokens get older"
            )
            self._weight_rounds = 0

    def before_update(self, state: TrainState, minibatch: Minibatch, *, index: int, count: int) -> None:
        """Shows the number of finished updates."""
        self._shown.phase("update", index, count)

    def _without_signal(self) -> str:
        """Explains why no group so far has a learning signal. Returns an empty string if any group has a signal, any response is correct, or rewards are not learnt."""
        tally = self._now.tally
        if not self._metric or (self._by_score and tally.differing):
            return ""
        if self._by_score:
            return (
                f"the scores differ in none of the {tally.groups} groups so far, so there is nothing to learn from yet. Does the reward function "
                "return the same score for every response?"
            )
        if tally.wrong < tally.groups:
            return ""
        if tally.differing:
            return (
                f"every response in {tally.groups} groups counts as wrong, because only a score above 0 is correct. But the scores differ in "
                f"{tally.differing} of the groups: if the reward is a number rather than a verdict, set dynamic_sampling.metric=score"
            )
        return (
            f"every response in {tally.groups} groups is wrong, so there is nothing to learn from yet. If the response below is correct, the "
            "grader (reward.grader) does not accept its format. If the model does not understand the prompt format, change the prompt or the "
            "template (dapo-jax data show prints it). Otherwise the task is too hard: fine-tune the model (dapo-jax sft), or use easier prompts"
        )


def _quoted(group: Group, index: int) -> str:
    prompt, rollout = group.prompt, group.rollouts[index]
    verdict = rollout.verdict
    judged = "no answer found" if verdict.extracted is None else f"extracted {_end_of(verdict.extracted)}"
    if verdict.score is not None:
        judged = f"score {verdict.score:.3g}"
    reason = f" ({_end_of(verdict.reason)})" if verdict.reason else ""
    return (
        f"For example prompt {prompt.ordinal}, {_end_of(prompt.text)}, answer {_end_of(prompt.answer)}: "
        f"response {_end_of(rollout.text)}, {judged}{reason}"
    )


def _end_of(text: str) -> str:
    """Returns the end of a text, where the answer usually is."""
    return repr(text if len(text) <= _QUOTED else f"...{text[-_QUOTED:]}")


class Profile(Observer, AbstractContextManager["Profile"]):
    """Traces each step in `steps` with JAX's profiler, for xprof or TensorBoard's profile page. Each step has its own folder, such as `FOLDER/step_000010`, to which
    every process writes its own files."""

    def __init__(self, steps: Collection[int], folder: AnyPath) -> None:
        self._steps, self._folder = frozenset(steps), folder
        self._local: TemporaryDirectory[str] | None = None

    def before_sampling(self, position: Position, collector: Collector) -> None:
        """Starts the trace if the step is one of the selected steps."""
        if position.step + 1 in self._steps:
            # The profiler can only write local files, but the folder may be in a bucket.
            self._local = TemporaryDirectory(prefix="dapo_jax_profile_", ignore_cleanup_errors=True)
            jax.profiler.start_trace(self._local.name)

    def after_step(self, result: StepResult) -> None:
        """Stops the trace and copies its files to the folder. The last program of the step has finished."""
        if self._local is None:
            return
        local, self._local = self._local, None
        with local as folder:
            jax.profiler.stop_trace()
            for file in files_below(Path(folder)):
                step = f"step_{result.position.step:06d}"
                there = self._folder / step / file.relative_to(folder).as_posix()
                there.parent.mkdir(parents=True, exist_ok=True)
                write_whole(there, file.read_bytes())

    def __exit__(self, *_: object) -> None:
        """Discards the trace of a failed step."""
        if self._local is not None:
            with self._local:
                jax.profiler.stop_trace()
