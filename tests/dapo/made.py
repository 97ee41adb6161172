"""Graded groups whose tokens do not matter."""

import numpy as np

from dapo_jax.dapo.rollouts import Group, Prompt, Response, Rollout, Span, Verdict
from dapo_jax.dapo.tokens import Tokens

WHOLE = (Span(0, 0),)


def rollout_of(length=1, *, truncated=False, spans=WHOLE, reward=0.0, penalty=0.0, **verdict):
    """A rollout of `length` equal tokens. Other keywords are fields of its verdict."""
    record, reason = Tokens(np.full(length, 5, np.int32)), "length" if truncated else "stop"
    return Rollout(
        response=Response(record=record, finish_reason=reason, spans=spans), text="", verdict=Verdict(**verdict),
        reward=float(reward), overlong_penalty=penalty,
    )  # fmt: skip


def group_of(rollouts, *, ordinal=0, answer="!", row=()):
    """The group of these rollouts."""
    prompt = Prompt(ordinal=ordinal, tokens=np.array([2], np.int32), text="?", answer=answer, row=dict(row))
    return Group(prompt=prompt, rollouts=tuple(rollouts))
