"""Messages about a step in progress: how far sampling and updates are, and warnings about groups without signal and responses without a verdict."""

from dapo_jax.config import TrainConfig
from dapo_jax.dapo.rollouts import Group, Rollout
from dapo_jax.rollout.collector import Collector, Position
from dapo_jax.run.loop import Observer
from dapo_jax.trackers.progress import Progress
from dapo_jax.training.minibatch import Minibatch
from dapo_jax.training.state import TrainState

_SHOWN = 200
"""Characters of a prompt and of a response that are quoted."""


class StepProgress(Observer):
    """Shows the progress of the steps of one run."""

    def __init__(self, config: TrainConfig, shown: Progress) -> None:
        self._shown = shown
        self._by_score = config.dynamic_sampling.metric == "score"
        self._told = self._told_lost = False

    def before_sampling(self, position: Position, collector: Collector) -> None:
        """Shows that sampling begins."""
        self._step, self._began, self._now = position.step + 1, position.cursor, collector
        self._first_wave = 0
        self._example: tuple[Group, int] | None = None
        self._shown.phase("sample", 0, collector.needed)

    def on_group(self, group: Group, collector: Collector) -> None:
        """Shows the groups so far, and warns early."""
        self._first_wave = self._first_wave or self._drawn()
        self._example = self._example or _telling(group)
        self._shown.phase("sample", collector.kept, collector.needed)
        self._shown.wave(self._words())
        if not self._told_lost and (
            lost := next((r.verdict for r in group.rollouts if r.verdict.lost), None)
        ):
            self._told_lost = True
            self._shown.message(
                f"step {self._step}: a response to prompt {group.prompt.ordinal} got no verdict ({lost.reason or lost.lost}) and counts as "
                f"{'the worst of its group' if self._by_score else 'wrong'}; reward/lost counts further ones"
            )
        if not self._told and self._now.tally.groups >= self._first_wave and (why := self._fruitless()):
            self._told = True
            self._shown.message(f"step {self._step}: {why}. {_quoted(*(self._example or (group, 0)))}")

    def before_update(self, state: TrainState, minibatch: Minibatch, *, index: int, count: int) -> None:
        """Shows how many updates are done."""
        self._shown.phase("update", index, count)

    def _drawn(self) -> int:
        return self._now.cursor - self._began

    def _words(self) -> str:
        tally = self._now.tally
        stage = f"{self._now.stage}  " if self._now.stage else ""
        found = (
            f"scores differ in {tally.differing}"
            if self._by_score
            else f"mixed {tally.mixed}  all right {tally.correct}  all wrong {tally.wrong}"
        )
        return f"{stage}prompts {tally.groups}/{self._drawn()}  {found}"

    def _fruitless(self) -> str:
        """Returns why no group so far has a signal; an empty text if one has, or if everything is right."""
        tally = self._now.tally
        if self._by_score:
            if tally.differing:
                return ""
            return (
                f"in none of the {tally.groups} groups so far do the scores differ, so there is nothing to learn from yet: the reward function "
                "may give the same whatever is written"
            )
        if tally.wrong < tally.groups:
            return ""
        if tally.differing:
            return (
                f"every response in {tally.groups} groups counts as wrong, since only a score above 0 is right; yet the scores differ in "
                f"{tally.differing}: if the reward is a number rather than a verdict, set dynamic_sampling.metric=score"
            )
        return (
            f"every response in {tally.groups} groups is wrong, so there is nothing to learn from yet. If the one below is right, the grader "
            "(reward.grader) does not take what is written, or looks for the answer elsewhere; if the model was asked in a form that it does "
            "not know, change prompt or template (dapo-jax data show prints prompts as a model reads them); else the task is too hard for it: "
            "warm it up (dapo-jax sft), or begin with easier prompts"
        )


def _telling(group: Group) -> tuple[Group, int] | None:
    """Returns group and index of a response from which an answer was extracted; groups in brief have no texts."""
    for index, rollout in enumerate(group.rollouts):
        if rollout.text and rollout.verdict.extracted is not None:
            return group, index
    return None


def _quoted(group: Group, index: int) -> str:
    prompt, rollout = group.prompt, group.rollouts[index]
    return (
        f"For example prompt {prompt.ordinal}, {_last(prompt.text)}, answer {_last(prompt.answer)}: response {_last(rollout.text)}, "
        f"{_judged(rollout)}"
    )


def _judged(rollout: Rollout) -> str:
    verdict = rollout.verdict
    said = "no answer found" if verdict.extracted is None else f"extracted {_last(verdict.extracted)}"
    judged = said if verdict.score is None else f"score {verdict.score:.3g}"
    return judged + (f" ({_last(verdict.reason)})" if verdict.reason else "")


def _last(text: str) -> str:
    """Returns the end of a text, where answers are."""
    return repr(text if len(text) <= _SHOWN else f"...{text[-_SHOWN:]}")
