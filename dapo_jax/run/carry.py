"""Groups as plain arrays: carried ones for a checkpoint, sampled ones for other processes. Prompts are not stored: their
ordinals give them back.

A group in brief has all that metrics and scores are made of, but neither tokens nor text: about 100 bytes a response.
"""

import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dapo_jax.rollouts import Group, Prompt, Response, Rollout, Verdict


def carry_arrays(groups: Sequence[Group], *, brief: bool = False) -> dict[str, np.ndarray]:
    """Flattens groups, with `brief` without tokens, log-probabilities, texts and reasons; empty for no groups."""
    if not groups:
        return {}
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    scores = [rollout.verdict.score for rollout in rollouts]
    texts = [json.dumps(_words(rollout, brief)).encode() for rollout in rollouts]
    drawn = {}
    if not brief:
        drawn["tokens"] = np.concatenate([rollout.response.tokens for rollout in rollouts])
        drawn["logprobs"] = np.concatenate([rollout.response.logprobs for rollout in rollouts])
    return {
        "ordinals": np.array([group.prompt.ordinal for group in groups], np.int64),
        "group_sizes": np.array([len(group.rollouts) for group in groups], np.int64),
        "lengths": np.array([rollout.response_tokens for rollout in rollouts], np.int64),
        **drawn,
        "truncated": np.array([rollout.truncated for rollout in rollouts]),
        "correct": np.array([rollout.correct for rollout in rollouts]),
        "scored": np.array([score is not None for score in scores]),
        "scores": np.array([score or 0.0 for score in scores], np.float64),
        "rewards": np.array([rollout.reward for rollout in rollouts], np.float64),
        "penalties": np.array([rollout.overlong_penalty for rollout in rollouts], np.float64),
        "text_lengths": np.array([len(text) for text in texts], np.int64),
        "texts": np.frombuffer(b"".join(texts), np.uint8),
    }


def _words(rollout: Rollout, brief: bool) -> list[Any]:
    verdict = rollout.verdict
    text, reason = ("", "") if brief else (rollout.text, verdict.reason)
    return [text, reason, verdict.extracted, verdict.lost, dict(verdict.parts)]


def carry_groups(arrays: dict[str, np.ndarray], prompt_at: Callable[[int], Prompt]) -> list[Group]:
    """The groups that `carry_arrays` flattened. In brief ones, tokens are as many zeros, which take no memory."""
    if not arrays:
        return []
    total = int(arrays["lengths"].sum())
    tokens = arrays.get("tokens", np.broadcast_to(np.int32(0), total))
    logprobs = arrays.get("logprobs", np.broadcast_to(np.float32(0), total))
    ends, text_ends = np.cumsum(arrays["lengths"]), np.cumsum(arrays["text_lengths"])

    def rollout(i: int) -> Rollout:
        span = slice(int(ends[i] - arrays["lengths"][i]), int(ends[i]))
        text_span = slice(int(text_ends[i] - arrays["text_lengths"][i]), int(text_ends[i]))
        text, reason, extracted, *later = json.loads(arrays["texts"][text_span].tobytes())
        return Rollout(
            response=Response(
                tokens=tokens[span],
                logprobs=logprobs[span],
                finish_reason="length" if arrays["truncated"][i] else "stop",
            ),
            text=text,
            verdict=Verdict(
                correct=bool(arrays["correct"][i]),
                extracted=extracted,
                reason=reason,
                score=float(arrays["scores"][i]) if arrays["scored"][i] else None,
                lost=later[0] if later else "",  # older checkpoints have neither
                parts=later[1] if len(later) > 1 else {},
            ),
            reward=float(arrays["rewards"][i]),
            overlong_penalty=float(arrays["penalties"][i]),
        )

    starts = np.cumsum(arrays["group_sizes"]) - arrays["group_sizes"]
    return [
        Group(prompt=prompt_at(int(ordinal)), rollouts=tuple(rollout(i) for i in range(start, start + size)))
        for ordinal, start, size in zip(arrays["ordinals"], starts, arrays["group_sizes"], strict=True)
    ]
