"""The update with score centering compared with the numbers of an independent implementation, and with the properties that the term must have.

`fixtures/centering.npz` has two random batches in float64: logits of the policy, the old policy and the sampler for 6 responses of up to 10 tokens, and for each objective the loss with
the term, its gradient by the logits, and the metrics. One response has a hole in its mask, one the advantage 0, and one no token. Tokens were moved so that each clip
and each bound is reached. In these tests, all records outside the mask are NaN.
"""

import json
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dapo_jax.dapo.centering import FLOOR
from dapo_jax.dapo.losses import dapo_loss
from dapo_jax.dapo.metrics import to_scalars
from dapo_jax.dapo.microbatch import blank_microbatch
from dapo_jax.dapo.objectives import cispo_loss, dro_loss, reinforce_loss
from dapo_jax.dapo.tokens import head_shapes
from dapo_jax.models.decoder import graph_of
from dapo_jax.parallel.mesh import make_mesh
from dapo_jax.testing import tiny_decoder_config, tiny_params
from dapo_jax.training.optimizer import make_optimizer
from dapo_jax.training.update import UpdateOptions, Updater

FIXTURES = np.load(Path(__file__).parent / "fixtures" / "centering.npz")
CASES = json.loads(str(FIXTURES["meta"]))["cases"]
KEYS = sorted(
    tuple(name.removesuffix("/loss").split("/"))
    for name in FIXTURES.files
    if name.endswith("/loss") and "exact" not in name
)


class OfLogits(Updater):
    """An updater whose policy is an array of logits [rows, seq, vocab], so that gradients are by the logits."""

    def loss(self, logits, microbatch, first):
        self.logits = logits
        return self._loss((self.model(parts()[1]),), microbatch, jnp.asarray(first))

    def term(self, logits, microbatch, first):
        self.logits = logits
        _, heads, entropy = self._logprobs((), microbatch)
        return self._centering(microbatch, heads, entropy, jnp.asarray(first))[0]

    def _logprobs(self, models, microbatch):
        every = jax.nn.log_softmax(self.logits / self._options.temperature)
        entropy = -(jnp.exp(every) * every).sum(-1)
        ids = filter(
            lambda each: each is not None, (microbatch.tokens[..., None], microbatch.recorded.get("head_ids"))
        )
        scores, *heads = (jnp.take_along_axis(every, each, axis=-1) for each in ids)
        return scores[..., 0], *heads, entropy


@cache
def parts():
    decoder = tiny_decoder_config(layers=1, embed_dim=16, mlp_dim=24, heads=2, kv_heads=1)
    return graph_of(decoder), tiny_params(decoder), make_optimizer(), make_mesh(devices=jax.devices()[:1])


def updater_of(case, heads, temperature=1.0):
    options = CASES[case] if isinstance(case, str) else case
    clips = {f"clip_ratio_{side}": options[f"clip_{side}"] for side in ("low", "high")}
    objectives = {
        "reinforce": partial(reinforce_loss, cap=options["cap"]),
        "clip": partial(dapo_loss, dual_clip=options["dual_clip"], **clips),
        "cispo": partial(cispo_loss, cap=options["cap"], floor=options["floor"]),
        "dro": dro_loss,
    }
    kind = options["correction"]
    bounds = options["importance_range"] if kind == "mask" else [0.0, options["importance_cap"]]
    graph, params, optimizer, mesh = parts()
    return OfLogits(
        graph, params, optimizer, mesh, objective=objectives[options["objective"]],
        options=UpdateOptions(
            temperature=temperature, correction=kind, importance_range=tuple(bounds),
            old_logprobs="sampler" if options["old"] == "sampler" else "trainer", recorded=head_shapes(heads),
        ),
    )  # fmt: skip


class Batch:
    """The inputs of one batch as float64 arrays."""

    def __init__(self, seed, vocab):
        of = {name: FIXTURES[f"{seed}/{vocab}/in/{name}"] for name in (
            "logits", "old_logits", "sampler_logits", "tokens", "advantages", "mask", "weights",
        )}  # fmt: skip
        self.logits, self.tokens, self.mask = of["logits"], of["tokens"], of["mask"]
        self.advantages, self.weights = of["advantages"], of["weights"]
        self.old, self.sampler = of["old_logits"], of["sampler_logits"]

    def microbatch(self, old, ids, temperature=1.0, tokens=None):
        """The arrays of an update. `ids` are the heads, and `old` names the old policy."""
        tokens = self.tokens if tokens is None else tokens
        of_sampler, of_old = (logprobs(each, temperature) for each in (self.sampler, self.old))
        before = {"sampler": of_sampler, "trainer": of_old, "current": of_old * np.nan}[old]
        recorded = {} if ids is None else {"head_ids": ids, "head_logprobs": self.known(of_sampler, ids)}
        arrays = {
            "tokens": tokens,
            "mask": self.mask,
            "advantages": np.broadcast_to(self.advantages[:, None], tokens.shape),
            "weights": self.weights,
            "sampler_logprobs": self.known(of_sampler, tokens[..., None])[..., 0],
            "old_logprobs": self.known(before, tokens[..., None])[..., 0],
            "recorded": recorded,
            "old_head_logprobs": None if ids is None else self.known(before, ids),
        }
        return jax.tree.map(jnp.asarray, replace(blank_microbatch(tokens.shape), **arrays))

    def known(self, scores, ids):
        """The entries of `ids`, and NaN outside the mask."""
        return np.where(self.mask[..., None], np.take_along_axis(scores, ids, axis=-1), np.nan)


def logprobs(logits, temperature=1.0):
    tempered = logits / temperature
    return tempered - np.logaddexp.reduce(tempered, axis=-1, keepdims=True)


def likeliest(logits, count):
    return np.argsort(-logits, axis=-1, kind="stable")[..., :count].astype(np.int32)


QUICK = {("clip_truncate", 1.0), ("clip_sampler", -1.0)}


def gradient(updater, batch, microbatch, *, first):
    """The gradient of the loss by the logits, the loss, and the metrics."""

    program = jax.value_and_grad(updater.loss, has_aux=True)
    (value, metrics), found = program(jnp.asarray(batch.logits), microbatch, first)
    return np.asarray(found), float(value), metrics


def tiers(key):
    """Slow: all except eight heads of the first batch, and one whole vocabulary. Each takes up to a second, and the others have the same code."""
    quick = key[0] == "s0" and (key[-1] == "k8" or key[2:] == ("clip_truncate", "k12"))
    return pytest.param(key, id="/".join(key), marks=[] if quick else pytest.mark.slow)


@pytest.mark.parametrize("key", [*map(tiers, KEYS)])
def test_the_gradient_and_the_metrics_are_the_references(x64, key):
    """1e-12 of the largest number: about 100 operations in float64, each with an error of 1.1e-16 of numbers up to 10. The loss is the objective alone; the reference adds the term."""
    seed, vocab, case, *heated, heads = key
    temperature = float(heated[0][1:]) if heated else 1.0
    batch, name, old = Batch(seed, vocab), "/".join(key), CASES[case]["old"]
    ids = FIXTURES["/".join([seed, vocab, "in", *heated, heads, "ids"])]
    updater = updater_of(case, ids.shape[-1], temperature)
    microbatch = batch.microbatch(old, ids, temperature)
    found, loss, metrics = gradient(updater, batch, microbatch, first=old == "current")
    whole = int(heads[1:]) == batch.logits.shape[-1]
    expected = FIXTURES["/".join([seed, vocab, case, "exact", "grad"]) if whole else f"{name}/grad"]
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12 * np.abs(expected).max())
    assert not found[~batch.mask].any()
    term = float(updater.term(jnp.asarray(batch.logits), microbatch, old == "current"))
    assert loss + term == pytest.approx(float(FIXTURES[f"{name}/loss"]), abs=1e-12)
    scalars = to_scalars(metrics)
    for metric in ("push", "sampler_head", "trainer_head"):
        if f"{name}/{metric}" in FIXTURES.files:
            # A token with the advantage 0 is not pushed.
            counted = (batch.advantages != 0)[:, None] | (metric != "push")
            mean = (FIXTURES[f"{name}/{metric}"] * counted)[batch.mask].mean()
            assert scalars[f"center/{metric}"] == pytest.approx(mean, abs=1e-12), metric


# Slow: 24 gradients each. The quick cases have both signs, with and without the trainer's old policy.
@pytest.mark.parametrize(
    ("case", "advantage"),
    [
        pytest.param(case, advantage, marks=[] if (case, advantage) in QUICK else pytest.mark.slow)
        for case in CASES
        for advantage in (1.0, -1.0)
    ],
)
def test_a_constant_advantage_moves_nothing_on_average(x64, case, advantage):
    """The mean of the gradient over the tokens of the sampler is 0 if the heads are the whole vocabulary, and without the term it is not. 1e-12: sums of 12 numbers in float64."""
    batch, old = Batch("s0", "v12"), CASES[case]["old"]
    batch.advantages = np.full(len(batch.tokens), advantage)
    probabilities = np.exp(logprobs(batch.sampler))
    largest = {}
    for heads in (12, 0):
        ids = likeliest(batch.sampler, heads) if heads else None
        updater, mean = updater_of(case, heads), 0.0
        for token in range(12):
            microbatch = batch.microbatch(old, ids, tokens=np.full_like(batch.tokens, token))
            found, *_ = gradient(updater, batch, microbatch, first=old == "current")
            mean = mean + probabilities[..., token, None] * found
        largest[heads] = np.abs(mean).max() / batch.weights.max()
    assert largest[12] <= 1e-12
    assert largest[0] > 1e-3


@pytest.mark.parametrize("heads", [4, pytest.param(12, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "case",
    [
        "clip_truncate",
        *map(
            partial(pytest.param, marks=pytest.mark.slow),
            ("plain", "truncate", "mask", "clip_sampler", "clip_dual_truncate", "cispo_truncate"),
        ),
    ],
)
def test_the_samplers_own_policy_is_not_changed(x64, case, heads):
    """If policy, old policy and sampler are the same, the gradient is the objective's to rounding, 1e-12 as above, and nothing is pushed. After a head of the whole vocabulary,
    the tail has the probability `FLOOR` in place of 0, which the push of a token contains once."""
    batch, old = Batch("s0", "v12"), CASES[case]["old"]
    batch.old = batch.sampler = batch.logits
    ids = likeliest(batch.sampler, heads)
    first = old == "current"
    found, _, metrics = gradient(updater_of(case, heads), batch, batch.microbatch(old, ids), first=first)
    plain, *_ = gradient(updater_of(case, 0), batch, batch.microbatch(old, None), first=first)
    np.testing.assert_allclose(found, plain, rtol=0, atol=1e-12 * np.abs(plain).max())
    assert to_scalars(metrics)["center/push"] <= (1e-12 if heads < 12 else FLOOR)


def test_an_objective_whose_weight_depends_on_the_size_of_the_advantage(x64):
    """DRO has the penalty 0.05 u^2 on the log-ratio u, and so the gradient -A + 0.1 u by the log-probability. Its mean over the sampler's tokens is 0 with the term."""
    batch = Batch("s0", "v12")
    case = {**CASES["plain"], "objective": "dro"}
    ids, mean = likeliest(batch.sampler, 12), 0.0
    updater = updater_of(case, 12)
    for token in range(12):
        microbatch = batch.microbatch("sampler", ids, tokens=np.full_like(batch.tokens, token))
        found, *_ = gradient(updater, batch, microbatch, first=False)
        mean = mean + np.exp(logprobs(batch.sampler))[..., token, None] * found
    assert np.abs(mean).max() <= 1e-12 * np.abs(found).max()


def test_the_order_of_rows_changes_no_number(x64):
    batch, order = Batch("s0", "v12"), [3, 0, 5, 1, 4, 2]
    ids, updater = likeliest(batch.sampler, 4), updater_of("clip_truncate", 4)
    found, loss, _ = gradient(updater, batch, batch.microbatch("trainer", ids), first=False)
    for name in ("logits", "old", "sampler", "tokens", "mask", "advantages", "weights"):
        setattr(batch, name, getattr(batch, name)[order])
    again, value, _ = gradient(updater, batch, batch.microbatch("trainer", ids[order]), first=False)
    np.testing.assert_allclose(again, found[order], rtol=0, atol=1e-15)
    assert value == pytest.approx(loss, abs=1e-15)
