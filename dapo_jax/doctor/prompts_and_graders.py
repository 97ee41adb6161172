"""Checks the prompts, which are shown as the model receives them, and the grader, which must accept the reference answers."""

import time
from collections.abc import Sequence
from contextlib import suppress

from dapo_jax.config import ConfigError
from dapo_jax.dapo.rollouts import Prompt, Verdict
from dapo_jax.doctor.check import Found, shortened
from dapo_jax.doctor.subject import Subject
from dapo_jax.rewards.sample import Sample
from dapo_jax.run.grader_setup import environment_of, episodes_of, submit_of
from dapo_jax.run.prompt_sets import held_out_prompts, repeated_prompts, with_template_date
from dapo_jax.text.tokenizers import Tokenizer

FORMS = ("{answer}", "{marker}{answer}", "Answer: {answer}", "\\boxed{{answer}}", "#### {answer}", "<answer>{answer}</answer>")  # fmt: skip
"""The formats in which each reference answer is graded; `{marker}` is replaced by `reward.answer_marker`."""

GRADED = 8
"""Number of prompts whose reference answers are graded. It is small because a grader may call a paid service."""

SHOWN, LAST = 2, 8
"""Number of prompts to show, and number of tokens to show from the end of each prompt."""


def training_data(subject: Subject) -> Found:
    """Checks that there are prompts to train on, and shows a few as the model receives them."""
    source, notes = subject.training.training, subject.training.notes
    details = tuple(line for prompt in subject.prompts(SHOWN) for line in _shown(prompt, subject.tokenizer))
    message = "; ".join([f"{source.rows_per_epoch:,} prompts to train on", *notes])
    if repeated := repeated_prompts(subject.config, source.rows_per_epoch):
        often, remedy = repeated
        return Found(f"{message}; {often}", "warning", remedy, details)
    return Found(message, details=details)


def _shown(prompt: Prompt, tokenizer: Tokenizer) -> list[str]:
    """Formats a prompt and its last tokens, in which errors in a chat template are easy to see."""
    tokens, spelled = prompt.tokens, getattr(tokenizer, "spelled", tokenizer.decode)
    last = range(max(0, len(tokens) - LAST), len(tokens))
    pieces = " ".join(repr(spelled(tokens[at : at + 1])) for at in last)
    return [
        f"prompt {prompt.ordinal}, {len(tokens)} tokens, answer {prompt.answer!r}:",
        f"    {shortened(repr(prompt.text), 240)}",
        f"    it ends with the tokens {'... ' if len(tokens) > LAST else ''}{pieces}",
    ]


def evaluation_data(subject: Subject) -> Found:
    """Checks that there are prompts to evaluate on."""
    data, evaluation = with_template_date(subject.config.data), subject.config.eval
    datasets, notes = held_out_prompts(data, evaluation, subject.tokenizer, rows=subject.rows)
    counts = ", ".join(f"{name}: {len(prompts):,} prompts" for name, prompts in datasets.items())
    return Found("; ".join([counts, *notes]))


def grader(subject: Subject) -> Found:
    """Checks that the grader accepts reference answers and rejects an empty response, or that the environment can be created."""
    config = subject.config
    if source := config.environment.source:
        episodes = episodes_of(environment_of(config), config, subject.tokenizer)
        assert episodes is not None
        with episodes:
            problem = episodes.check(subject.prompts(1)[0], limit=config.episode_tokens)
        if problem:
            return Found(f"an episode of {source} was lost: {problem}", "warning", "fix environment.source")
        count = config.rollout.in_flight or config.prompts_per_wave * config.batch.group_size
        is_command = source.startswith("command:")
        processes = f"; up to {count:,} agents have a process at the same time" if is_command else ""
        return Found(f"rewards come from the environment {source}; no grader is used{processes}")
    first = config.reward.graders[0].grader if config.reward.graders else str(config.reward.grader)
    is_code = first.partition(":")[0] == "code"  # the first grader decides whether a response is correct
    asked = [_samples(subject, prompt, is_code=is_code) for prompt in subject.prompts(GRADED)]
    verdicts: list[list[Verdict]] = []
    workers = config.workers.of_graders
    submit, close = submit_of(config.reward, workers=workers, sandbox=config.sandbox)
    try:
        began = time.monotonic()
        for samples in asked:
            verdicts.append(submit(samples).result())
            if lost := next((verdict for verdict in verdicts[-1] if verdict.lost), None):
                remedy = f"fix the grader, or raise workers.timeout_s (now {workers.timeout_s:g})"
                # The check stops here, because the grader could run into the time limit for every further prompt too.
                return Found(f"a response got no verdict: {lost.reason}", "failed", remedy)
        seconds = time.monotonic() - began
    finally:
        close()
    if is_code:
        return _coded(asked, verdicts)
    took = f"{sum(map(len, asked))} responses in {seconds:.1f} s, with a limit of {workers.timeout_s:g} s per call"
    if config.dynamic_sampling.metric == "score":
        return _scored(verdicts, took)
    return _judged(asked, verdicts, took, own_form=bool(subject.right))


def _coded(asked: Sequence[Sequence[Sample]], verdicts: Sequence[Sequence[Verdict]]) -> Found:
    """Checks the verdicts of the grader `code` on programs that do nothing."""
    for [sample], [verdict] in zip(asked, verdicts, strict=True):
        if verdict.correct:
            message = f"a program that does nothing passes the tests of {_named(sample.prompt)}"
            return Found(message, "failed", "remove such rows: their tests test nothing")
    return Found(f"the sandbox passed its test, and the tests of {len(asked)} prompts can be read")


def _samples(subject: Subject, prompt: Prompt, *, is_code: bool) -> list[Sample]:
    """Returns responses with the reference answer, in all formats that the tokenizer can encode, followed by an empty response. For code, returns an empty program."""
    if is_code:
        return [Sample(prompt=prompt, response="pass", tokens=prompt.tokens, finish_reason="stop")]
    marker, source = subject.config.reward.answer_marker, subject.config.model.source
    forms = (subject.right,) if subject.right else FORMS
    written = [form.replace("{marker}", marker).replace("{answer}", prompt.answer) for form in forms]
    samples = []
    for text in (*dict.fromkeys(written), ""):
        with suppress(ValueError):  # the tokenizer may lack some characters
            tokens = subject.tokenizer.encode(text)
            samples.append(Sample(prompt=prompt, response=text, tokens=tokens, finish_reason="stop"))
    if len(samples) < 2:
        raise ConfigError(
            f"model.source={source!r}: its tokenizer cannot encode the answer {prompt.answer!r} in any of the formats "
            f"{', '.join(map(repr, written))}; use another model or dataset"
        )
    return samples


def _judged(
    asked: Sequence[Sequence[Sample]], verdicts: Sequence[Sequence[Verdict]], took: str, *, own_form: bool
) -> Found:
    """Checks the verdicts of a grader that judges responses as correct or wrong."""
    by_score = ""
    if any(verdict.score is not None for group in verdicts for verdict in group):
        by_score = "; a score above 0 counts as correct: if the score is the reward, set dynamic_sampling.metric=score"
    pairs = list(zip(asked, verdicts, strict=True))
    for samples, group in pairs:
        if group[-1].correct:
            message = f"an empty response to {_named(samples[0].prompt)} is graded as correct"
            remedy = f"fix the grader: a policy would learn to write nothing{by_score}"
            return Found(message, "failed", remedy)
    wrong = [pair for pair in pairs if not any(verdict.correct for verdict in pair[1][:-1])]
    if not wrong:
        form = next(sample.response for sample, verdict in zip(*pairs[0], strict=True) if verdict.correct)
        return Found(
            f"{len(asked)} of {len(asked)} reference answers are graded as correct, for example {form!r}, and empty responses as wrong; {took}"
        )
    samples, group = wrong[0]
    reason = f" ({group[0].reason})" if group[0].reason else ""
    form = "" if own_form else "; if it expects another format, add --right '<result>{answer}</result>'"
    return Found(
        f"{len(wrong)} of {len(asked)} reference answers are graded as wrong, for example {samples[0].prompt.answer!r} to "
        f"{_named(samples[0].prompt)}, written as {', '.join(repr(sample.response) for sample in samples[:-1])}{reason}",
        "failed" if 2 * len(wrong) >= len(asked) else "warning",
        f"set reward.grader to a grader that fits these answers{form}{by_score}",
    )


def _scored(verdicts: Sequence[Sequence[Verdict]], took: str) -> Found:
    """Checks the scores from a grader. A task may have no correct answer, but an empty response must not get the best score."""
    scores = [[verdict.score for verdict in group if verdict.score is not None] for group in verdicts]
    if any(len(known) < len(group) for known, group in zip(scores, verdicts, strict=True)):
        return Found(
            "the grader returned a verdict without a score, and dynamic_sampling.metric=score needs scores",
            "failed",
            "return a number from the reward function, or set dynamic_sampling.metric=correct",
        )
    best, empty = [max(known[:-1]) for known in scores], [known[-1] for known in scores]
    message = f"reference answers score {_span(best)}, an empty response {_span(empty)}; {took}"
    if any(nothing >= answer for nothing, answer in zip(empty, best, strict=True)):
        remedy = "an empty response scores as much as an answer, so a policy may learn to write nothing: check that this is intended"
        return Found(message, "warning", remedy)
    return Found(message)


def _span(values: Sequence[float]) -> str:
    low, high = min(values), max(values)
    return f"{low:g}" if low == high else f"{low:g} to {high:g}"


def _named(prompt: Prompt) -> str:
    return f"prompt {prompt.ordinal} ({shortened(prompt.text, 60)!r})"
