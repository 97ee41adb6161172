"""The prompts of a run and its graders: prompts as the model reads them, graders on answers that are known to be right."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jaxtyping import Int

from dapo_jax.config import ConfigError, TrainConfig
from dapo_jax.dapo.rollouts import Prompt, Verdict
from dapo_jax.data.prompts import PromptSource
from dapo_jax.doctor.check import Found, shortened
from dapo_jax.rewards.sample import Sample
from dapo_jax.run.environment_setup import environment_of
from dapo_jax.run.grader_setup import submit_of
from dapo_jax.run.prompt_sets import GivenRows, dated, drawn_too_often, held_out_prompts, training_prompts
from dapo_jax.text.tokenizers import Tokenizer

FORMS = (
    "{answer}",
    "{marker}{answer}",
    "Answer: {answer}",
    "\\boxed{{answer}}",
    "#### {answer}",
    "<answer>{answer}</answer>",
)
"""How a right response may be written; `{marker}` is `reward.answer_marker`."""

GRADED = 8
"""Prompts whose answers are graded; a grader may ask a service that is paid by the call."""

SHOWN, LAST = 2, 8
"""Prompts that are shown, and how many of their last tokens."""


@dataclass(frozen=True)
class Asked:
    """The prompts and graders of a configuration, for a model's tokenizer."""

    config: TrainConfig
    tokenizer: Tokenizer
    rows: GivenRows | None = None
    """Instead of the configured dataset."""
    form: str = ""
    """How a right response is written, with `{answer}` in it; empty: in one of `FORMS`."""

    @cached_property
    def source(self) -> tuple[PromptSource, Sequence[str]]:
        """The prompts to train on, and what is to be said of them."""
        source, asked = training_prompts(
            dated(self.config.data), self.tokenizer, seed=self.config.seed, rows=self.rows
        )
        return source, asked.notes

    def prompts(self, count: int) -> list[Prompt]:
        """The first that a run would ask."""
        source = self.source[0]
        return [source[ordinal] for ordinal in range(min(count, source.rows_per_epoch))]

    def data(self) -> Found:
        """Whether the prompts to train on can be had, with some as the model reads them."""
        source, notes = self.source
        details = [line for prompt in self.prompts(SHOWN) for line in self._shown(prompt)]
        said = "; ".join([f"{source.rows_per_epoch:,} prompts to train on", *notes])
        if found := drawn_too_often(self.config, source.rows_per_epoch):
            often, remedy = found
            return Found(message=f"{said}; {often}", state="warning", remedy=remedy, details=tuple(details))
        return Found(message=said, details=tuple(details))

    def held_out(self) -> Found:
        """Whether the prompts to evaluate on can be had."""
        rows = self.rows
        found = held_out_prompts(dated(self.config.data), self.config.eval, self.tokenizer, rows=rows)
        return Found(
            message=", ".join(f"{name}: {len(prompts):,} prompts" for name, prompts in found.items())
        )

    def grader(self) -> Found:
        """Whether the graders call reference answers right, and no answer wrong; or whether the environment can be made."""
        if source := self.config.environment.source:
            environment_of(self.config.environment)
            return Found(message=f"{source} says what an episode is worth, and no grader is asked")
        prompts, limit = self.prompts(GRADED), self.config.reward.timeout_s
        submit, close = submit_of(self.config.reward)
        try:
            began = time.monotonic()
            asked = [self._samples(prompt) for prompt in prompts]
            verdicts: list[list[Verdict]] = []
            for samples in asked:
                verdicts.append([future.result() for future in submit(samples)])
                if lost := next((verdict for verdict in verdicts[-1] if verdict.lost), None):
                    return self._lost(lost)  # the others would take their time too
            seconds = time.monotonic() - began
        finally:
            if close is not None:
                close()
        took = f"{sum(map(len, asked))} responses in {seconds:.1f} s, where one call may take {limit:g} s"
        if self.config.dynamic_sampling.metric == "score":
            return _scored(asked, verdicts, took=took)
        return _judged(asked, verdicts, took=took, own_form=bool(self.form))

    def _lost(self, verdict: Verdict) -> Found:
        reward = self.config.reward
        return Found(
            message=f"a response got no verdict: {verdict.reason}",
            state="failed",
            remedy=f"mend the grader, or raise reward.timeout_s (now {reward.timeout_s:g})",
        )

    def _samples(self, prompt: Prompt) -> list[Sample]:
        """Responses to a prompt: the right answer in all ways in which the model can write it, and last an empty one."""
        marker = self.config.reward.answer_marker
        written = [
            form.replace("{marker}", marker).replace("{answer}", prompt.answer)
            for form in ((self.form,) if self.form else FORMS)
        ]
        samples = []
        for text in dict.fromkeys(written):
            try:
                tokens = self.tokenizer.encode(text)
            except ValueError:
                continue  # a tokenizer of few characters
            samples.append(_sample(prompt, text, tokens))
        if not samples:
            raise ConfigError(
                f"model.source={self.config.model.source!r}: its tokenizer cannot write the answer {prompt.answer!r} in any of the forms "
                f"{', '.join(map(repr, written))}; take another model or dataset"
            )
        return [*samples, _sample(prompt, "", np.zeros(0, np.int32))]

    def _shown(self, prompt: Prompt) -> list[str]:
        """A prompt as the model reads it, and its last tokens one by one: what a chat template leaves at the end is easily wrong."""
        tokens = prompt.tokens
        pieces = [
            repr(self.tokenizer.decode(tokens[at : at + 1]))
            for at in range(max(0, len(tokens) - LAST), len(tokens))
        ]
        dots = "... " if len(tokens) > LAST else ""
        return [
            f"prompt {prompt.ordinal}, {len(tokens)} tokens, answer {prompt.answer!r}:",
            f"    {shortened(repr(prompt.text), 240)}",
            f"    it ends with the tokens {dots}{' '.join(pieces)}",
        ]


def _sample(prompt: Prompt, text: str, tokens: Int[np.ndarray, " response"]) -> Sample:
    return Sample(prompt=prompt, response=text, tokens=tokens, finish_reason="stop")


def _judged(
    asked: Sequence[Sequence[Sample]],
    verdicts: Sequence[Sequence[Verdict]],
    *,
    took: str,
    own_form: bool,
) -> Found:
    """The finding on graders whose verdicts count."""
    numbers = any(one.score is not None for each in verdicts for one in each)
    by_score = (
        "; a score counts as right above 0: if these numbers are the reward itself, set dynamic_sampling.metric=score"
        if numbers
        else ""
    )
    empty = [samples[-1] for samples, each in zip(asked, verdicts, strict=True) if each[-1].correct]
    if empty:
        return Found(
            message=f"an empty response to {_named(empty[0].prompt)} is called right",
            state="failed",
            remedy=f"mend the grader: a policy would learn to say nothing{by_score}",
        )
    wrong = [
        (samples, each)
        for samples, each in zip(asked, verdicts, strict=True)
        if not any(one.correct for one in each[:-1])
    ]
    if not wrong:
        form = next(sample.response for sample, one in zip(asked[0], verdicts[0], strict=True) if one.correct)
        return Found(
            message=f"{len(asked)} of {len(asked)} reference answers are right when written like {form!r}, and an empty response is wrong; "
            f"{took}"
        )
    samples, each = wrong[0]
    reason = f" ({each[0].reason})" if each[0].reason else ""
    told = (
        ""
        if own_form
        else "; if it wants them written in a way of its own, say in which: --right '<result>{answer}</result>'"
    )
    return Found(
        message=f"{len(wrong)} of {len(asked)} reference answers are called wrong, such as {samples[0].prompt.answer!r} to "
        f"{_named(samples[0].prompt)}, written as {', '.join(repr(sample.response) for sample in samples[:-1])}{reason}",
        state="failed" if 2 * len(wrong) >= len(asked) else "warning",
        remedy=f"take the grader that fits these answers (reward.grader){told}{by_score}",
    )


def _scored(asked: Sequence[Sequence[Sample]], verdicts: Sequence[Sequence[Verdict]], *, took: str) -> Found:
    """The finding on reward functions whose scores count: there may be no right answer, but silence must not be the best one."""
    scores = [[one.score for one in each if one.score is not None] for each in verdicts]
    if any(len(known) < len(each) for known, each in zip(scores, verdicts, strict=True)):
        return Found(
            message="a plain verdict was given, and dynamic_sampling.metric=score needs scores",
            state="failed",
            remedy="return a number from the reward function, or set dynamic_sampling.metric=correct",
        )
    best, empty = [max(known[:-1]) for known in scores], [known[-1] for known in scores]
    said = f"reference answers score {_span(best)}, an empty response {_span(empty)}; {took}"
    if any(nothing >= answer for nothing, answer in zip(empty, best, strict=True)):
        return Found(
            message=said,
            state="warning",
            remedy="where an empty response scores as much as an answer, a policy may learn to say nothing: see that this is what you mean",
        )
    return Found(message=said)


def _span(values: Sequence[float]) -> str:
    low, high = min(values), max(values)
    return f"{low:g}" if low == high else f"{low:g} to {high:g}"


def _named(prompt: Prompt) -> str:
    return f"prompt {prompt.ordinal} ({shortened(prompt.text, 60)!r})"
