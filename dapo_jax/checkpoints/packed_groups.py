"""Groups as plain arrays: carried ones for a checkpoint, sampled ones for other processes. Prompts are not stored: their
ordinals give them back.

A group in brief has all that metrics and scores are made of, but neither tokens nor text: about 100 bytes a response.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from dapo_jax.checkpoints.packed_spans import check_spans, span_arrays, spans_of
from dapo_jax.checkpoints.packed_turns import check_turns, contexts_of, turn_arrays, turns_of
from dapo_jax.dapo.rollouts import Group, Prompt, Response, Rollout, Verdict


def carry_arrays(groups: Sequence[Group], *, brief: bool = False, texts: int = 0) -> dict[str, np.ndarray]:
    """Flattens groups; empty for no groups.

    Args:
        groups: to flatten.
        brief: leaves out tokens, log-probabilities, texts and reasons.
        texts: of how many responses of each group, the first ones, texts and reasons stay where `brief` leaves them out.
    """
    if not groups:
        return {}
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    scores = [rollout.verdict.score for rollout in rollouts]
    told = [not brief or place < texts for group in groups for place in range(len(group.rollouts))]
    words = [json.dumps(_words(*each)).encode() for each in zip(rollouts, told, strict=True)]
    drawn = {}
    if not brief:
        drawn["tokens"] = np.concatenate([rollout.response.tokens for rollout in rollouts])
        drawn["logprobs"] = np.concatenate([rollout.response.logprobs for rollout in rollouts])
    return {
        "ordinals": np.array([group.prompt.ordinal for group in groups], np.int64),
        "group_sizes": np.array([len(group.rollouts) for group in groups], np.int64),
        "lengths": np.array([len(rollout.response.tokens) for rollout in rollouts], np.int64),
        **span_arrays([rollout.response.spans for rollout in rollouts]),
        **turn_arrays(rollouts),
        **drawn,
        "truncated": np.array([rollout.truncated for rollout in rollouts]),
        "correct": np.array([rollout.correct for rollout in rollouts]),
        "scored": np.array([score is not None for score in scores]),
        "scores": np.array([score or 0.0 for score in scores], np.float64),
        "rewards": np.array([rollout.reward for rollout in rollouts], np.float64),
        "penalties": np.array([rollout.overlong_penalty for rollout in rollouts], np.float64),
        "text_lengths": np.array([len(each) for each in words], np.int64),
        "texts": np.frombuffer(b"".join(words), np.uint8),
    }


def _words(rollout: Rollout, told: bool) -> list[Any]:
    verdict = rollout.verdict
    text, reason = (rollout.text, verdict.reason) if told else ("", "")
    return [text, reason, verdict.extracted, verdict.lost, dict(verdict.parts)]


def carry_groups(
    arrays: dict[str, np.ndarray], prompt_at: Callable[[int], Prompt], *, version: int = 0
) -> list[Group]:
    """The groups that `carry_arrays` flattened. In brief ones, tokens are as many zeros, which take no memory.

    `version` is that of the weights now, from which older checkpoints count the age of groups.
    """
    if not arrays:
        return []
    arrays = _with_spans(arrays, version)
    total = int(arrays["lengths"].sum())
    tokens = arrays.get("tokens", np.broadcast_to(np.int32(0), total))
    logprobs = arrays.get("logprobs", np.broadcast_to(np.float32(0), total))
    ends, text_ends = np.cumsum(arrays["lengths"]), np.cumsum(arrays["text_lengths"])
    spans, turns, turn_rewards = spans_of(arrays), *turns_of(arrays)
    contexts = contexts_of(arrays)

    def rollout(i: int) -> Rollout:
        span = slice(int(ends[i] - arrays["lengths"][i]), int(ends[i]))
        text_span = slice(int(text_ends[i] - arrays["text_lengths"][i]), int(text_ends[i]))
        text, reason, extracted, *later = json.loads(arrays["texts"][text_span].tobytes())
        return Rollout(
            response=Response(
                tokens=tokens[span],
                logprobs=logprobs[span],
                finish_reason="length" if arrays["truncated"][i] else "stop",
                spans=spans[i],
                turns=turns[i],
                contexts=contexts[i],
            ),
            text=text,
            verdict=Verdict(
                correct=bool(arrays["correct"][i]),
                extracted=extracted,
                reason=reason,
                score=float(arrays["scores"][i]) if arrays["scored"][i] else None,
                lost=later[0] if later else "",  # older checkpoints have neither
                parts=later[1] if len(later) > 1 else {},
                turn_rewards=turn_rewards[i],
            ),
            reward=float(arrays["rewards"][i]),
            overlong_penalty=float(arrays["penalties"][i]),
        )

    sizes = arrays["group_sizes"]
    starts = np.cumsum(sizes) - sizes
    return [
        Group(
            prompt=prompt_at(int(ordinal)),
            rollouts=tuple(rollout(i) for i in range(start, start + size)),
        )
        for ordinal, start, size in zip(arrays["ordinals"], starts, sizes, strict=True)
    ]


def _with_spans(arrays: dict[str, np.ndarray], version: int) -> dict[str, np.ndarray]:
    """The arrays with spans, which older checkpoints have not: they say how many steps before `version` a group was sampled, the oldest not even
    that, and then it is one step at least."""
    if "span_counts" in arrays:
        return arrays
    sizes = arrays["group_sizes"]
    versions = np.repeat(version - arrays.get("ages", np.ones_like(sizes)), sizes)
    whole = {"span_counts": np.ones_like(versions), "span_firsts": np.zeros_like(versions)}
    return {**arrays, **whole, "span_versions": versions}


def check_carry(arrays: dict[str, np.ndarray], *, cursor: int, vocabulary: int, version: int) -> None:
    """Refuses arrays that `carry_groups` cannot take apart: those of a checkpoint may come from anywhere.

    A log-probability may be NaN, which a sampler can give, and which the guards name in the update.

    Args:
        arrays: not in brief.
        cursor: ordinals are below it.
        vocabulary: tokens are below it.
        version: that of the weights now.

    Raises:
        ValueError: an array is missing, or is not what `carry_arrays` makes of groups; names it.
    """
    if not arrays:
        return
    for name, (kind, _) in _ARRAYS.items():
        array = arrays.get(name)
        if array is None or array.ndim != 1 or array.dtype.kind != kind:
            raise ValueError(f"{name!r} is missing or of another kind")
    for name, (_, counted_by) in _ARRAYS.items():
        count = _total(arrays, counted_by) if counted_by else len(arrays["ordinals"])
        if len(arrays[name]) != count:
            raise ValueError(f"{name!r} has {len(arrays[name]):,} entries instead of {count:,}")
    if arrays["group_sizes"].size and arrays["group_sizes"].min() < 1:
        raise ValueError("'group_sizes' has a group without responses")
    for name in ("scores", "rewards", "penalties"):
        if not np.isfinite(arrays[name]).all():
            raise ValueError(f"{name!r} has one that is not finite")
    _check_spans(arrays, version)
    check_turns(arrays)
    for name, end, what in (
        ("ordinals", cursor, "a prompt that was drawn"),
        ("tokens", vocabulary, "the vocabulary"),
    ):
        if arrays[name].size and not 0 <= arrays[name].min() <= arrays[name].max() < end:
            raise ValueError(f"{name!r} has one that is not from 0 to {end - 1}, of {what}")
    text_ends = np.cumsum(arrays["text_lengths"])
    for start, end in zip(text_ends - arrays["text_lengths"], text_ends, strict=True):
        _check_words(arrays["texts"][start:end].tobytes())
    carry_groups(arrays, _no_prompt)  # verdicts have checks of their own


def _check_spans(arrays: dict[str, np.ndarray], version: int) -> None:
    """Refuses spans that do not follow each other, and ages of older checkpoints that are none."""
    ages, groups = arrays.get("ages"), len(arrays["ordinals"])
    if ages is not None and (
        ages.shape != (groups,) or ages.dtype.kind != "i" or not ((ages >= 0) & (ages <= version)).all()
    ):
        raise ValueError("'ages' is not one number of steps for each group")
    if (arrays.get("span_counts", np.ones(1)) < 1).any():
        raise ValueError("'span_counts' has a response without a span")
    check_spans(_with_spans(arrays, version), lengths=arrays["lengths"], version=version)


def _no_prompt(ordinal: int) -> Prompt:
    return Prompt(ordinal=ordinal, tokens=np.empty(0, np.int32), text="", answer="")


def _total(arrays: Mapping[str, np.ndarray], name: str) -> int:
    """The sum of an array of lengths, which must not be negative, nor so large that their sum has no place in 64 bits."""
    lengths = arrays[name]
    if lengths.size and not 0 <= lengths.min() <= lengths.max() <= np.iinfo(np.int64).max // lengths.size:
        raise ValueError(f"{name!r} has one that is negative, or too large")
    return int(lengths.sum())


def _check_words(text: bytes) -> None:
    """Refuses a text that is not of `_words`; older checkpoints have only the first three, or four."""
    try:
        words = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"'texts' has one that is not JSON: {error}") from error
    kinds = (str, str, str | None, str, dict)
    if not isinstance(words, list) or not 3 <= len(words) <= 5 or not all(map(isinstance, words, kinds)):
        raise ValueError(f"'texts' has one that is not of a response: {text[:60]!r}")


_ARRAYS = {
    **dict.fromkeys(("ordinals", "group_sizes"), ("i", "")),
    **dict.fromkeys(("lengths", "text_lengths"), ("i", "group_sizes")),
    **dict.fromkeys(("truncated", "correct", "scored"), ("b", "group_sizes")),
    **dict.fromkeys(("scores", "rewards", "penalties"), ("f", "group_sizes")),
    "tokens": ("i", "lengths"),
    "logprobs": ("f", "lengths"),
    "texts": ("u", "text_lengths"),
}
"""Kind of each array, and the array of lengths that its entries add up to; none: there is one for each group."""
