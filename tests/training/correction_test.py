"""The corrected gradient of a minibatch whose tokens several versions of the weights sampled, compared with float64.

The oracle shares no code with the library: one response per row, a Llama written out, the loss by its formulas, and weights by loops (`tests/oracle.py`).
The library computes in float32, with packed rows and shared prompts.
"""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dapo_jax.dapo.batching import Example
from dapo_jax.dapo.corrections import with_effective_share
from dapo_jax.dapo.metrics import to_scalars
from dapo_jax.dapo.tokens import Tokens
from dapo_jax.models.decoder import graph_of
from dapo_jax.parallel.mesh import make_mesh
from dapo_jax.parallel.training_layout import layout_of
from dapo_jax.testing import tiny_decoder_config, tiny_params
from dapo_jax.training.row_packing import pack
from dapo_jax.training.state import init_state
from dapo_jax.training.update import UpdateOptions, Updater
from tests import oracle

CONFIG = tiny_decoder_config(layers=1, embed_dim=16, mlp_dim=24, heads=2, kv_heads=1)
"""One layer, so that float32 rounding is below half of the tolerance: at most 4.4e-7, with and without XLA's optimizations. With two layers it is 1.5e-6."""
COUNT = 24
KEEP_GRADIENT = optax.trace(decay=0.0)
LOW, HIGH, KL = 0.2, 0.28, 0.3
CASES = {
    "truncate": ("truncate", (0.0, 1.15)),
    "mask": ("mask", (0.85, 1.15)),
    "keep_responses": ("keep_responses", (0.97, 1.05)),
    "bypass": ("none", (0.0, np.inf)),
}
"""Correction and bounds. `bypass` uses the sampler's log-probabilities as the old ones, without weights."""


def moved(params, seed, by):
    """Returns perturbed parameters."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda leaf: leaf + jnp.asarray(by * rng.standard_normal(leaf.shape), leaf.dtype), params
    )


PARAMS = tiny_params(CONFIG)
OLDER = [moved(PARAMS, seed, by) for seed, by in ((1, 0.02), (2, 0.015), (3, 0.01))]
"""Three versions of the weights; each sampled a part of every response."""
LATER, REFERENCE = moved(PARAMS, 4, 0.03), moved(PARAMS, 5, 0.03)
"""The weights before a later update of the step, and the reference policy."""


def in_float64(params):
    """Returns arrays by name: `query` is [layers, heads, head_dim, embed]."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return {jax.tree_util.keystr(path).split("'")[3]: np.asarray(leaf, np.float64) for path, leaf in leaves}


def logprobs_of(p, tokens, config=CONFIG):
    """Returns the log-probability of each token [n, seq] given the tokens before it, 0 in the first column."""
    every = jax.nn.log_softmax(logits_of(p, tokens, config)[:, :-1])
    chosen = jnp.take_along_axis(every, tokens[:, 1:, None], axis=-1)[..., 0]
    return jnp.pad(chosen, ((0, 0), (1, 0)))


def logits_of(p, tokens, config):
    """Returns the logits [n, seq, vocab] of the next tokens: Llama (Touvron et al. 2023) in the dtype of `p`."""
    seq = tokens.shape[1]
    half = config.head_dim // 2
    angles = np.arange(seq)[:, None] * config.ropes[0].theta ** (-np.arange(half) / half)[None]
    cos, sin = np.cos(angles)[None, :, None], np.sin(angles)[None, :, None]

    def norm(x, weight):
        return x / jnp.sqrt((x * x).mean(axis=-1, keepdims=True) + config.norm_eps) * weight[None, None]

    def turned(x):
        a, b = x[..., :half], x[..., half:]
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

    x = p["embedding"][tokens]
    for layer in range(config.layers):
        of = {name: value[layer] for name, value in p.items() if name not in ("embedding", "final_norm")}
        y = norm(x, of["attention_norm"])
        query, key, value = (jnp.einsum("hde,nte->nthd", of[name], y) for name in ("query", "key", "value"))
        each = config.heads // config.kv_heads
        key, value = (jnp.repeat(part, each, axis=2) for part in (turned(key), value))
        scores = jnp.einsum("nthd,nshd->nhts", turned(query), key) / config.head_dim**0.5
        scores = jnp.where(np.tril(np.ones((1, 1, seq, seq), bool)), scores, -1e30)
        seen = jnp.einsum("nhts,nshd->nthd", jax.nn.softmax(scores, axis=-1), value)
        x = x + jnp.einsum("ehd,nthd->nte", of["output"], seen)
        y = norm(x, of["mlp_norm"])
        gate, up = y @ of["gate"].T, y @ of["up"].T
        x = x + (gate / (1.0 + jnp.exp(-gate)) * up) @ of["down"].T
    logits, cap = norm(x, p["final_norm"]) @ p["embedding"].T, config.logit_cap
    return logits if cap is None else cap * jnp.tanh(logits / cap)


def exact_logprobs(params, tokens):
    with jax.enable_x64(True):
        return np.asarray(jax.jit(logprobs_of)(in_float64(params), tokens))


class Batch:
    """A minibatch of six prompts with four responses each; one response is not in the loss. It has packed rows, and one row per response."""

    def __init__(self, seed):
        rng = np.random.default_rng(seed)
        prompts = [
            rng.integers(2, CONFIG.vocab_size, length).astype(np.int32) for length in (3, 5, 4, 6, 3, 4)
        ]
        self.prompts = [prompts[i // 4] for i in range(COUNT)]
        self.responses = [
            rng.integers(2, CONFIG.vocab_size, rng.integers(4, 14)).astype(np.int32) for _ in range(COUNT)
        ]
        ends = [len(p) + len(r) for p, r in zip(self.prompts, self.responses, strict=True)]
        self.tokens = np.zeros((COUNT, max(ends)), np.int32)
        column = np.arange(max(ends))
        sampled = np.stack(
            [(column >= len(p)) & (column < end) for p, end in zip(self.prompts, ends, strict=True)]
        )
        for row, (p, r) in enumerate(zip(self.prompts, self.responses, strict=True)):
            self.tokens[row, : ends[row]] = [*p, *r]
        self.in_loss = np.arange(COUNT) != 6
        self.mask = sampled & self.in_loss[:, None]
        self.advantages = rng.normal(0.8, 1.0, COUNT)
        self.weights = (rng.uniform(0.5, 1.5, COUNT) * self.in_loss / 120).astype(np.float32)
        # The three versions sampled one part of each response after the other.
        by = [exact_logprobs(params, self.tokens) for params in OLDER]
        cuts = [sorted(rng.choice(np.arange(1, len(r)), 2, replace=False)) for r in self.responses]
        version = np.stack(
            [
                (column >= len(p) + a).astype(int) + (column >= len(p) + b)
                for p, (a, b) in zip(self.prompts, cuts, strict=True)
            ]
        )
        assert all(len(set(version[row][sampled[row]])) == 3 for row in range(COUNT))
        self.sampler = np.where(sampled, np.choose(version, by), 0.0).astype(np.float32)

    def packed(self):
        """Returns microbatches of two rows of 48 tokens."""
        examples = [
            Example(
                prompt=Tokens(prompt),
                response=Tokens(
                    response, logprobs=self.sampler[row, len(prompt) : len(prompt) + len(response)]
                ),
                advantage=float(self.advantages[row]),
                in_loss=bool(self.in_loss[row]),
                group=row // 4,
            )
            for row, (prompt, response) in enumerate(zip(self.prompts, self.responses, strict=True))
        ]
        return pack(examples, self.weights.astype(np.float64), row_tokens=48, rows_per_microbatch=2)


@cache
def batches():
    return Batch(3), Batch(6)


def prox_of(case, batch):
    """Returns the old log-probabilities of a later minibatch, at the start of the step."""
    return batch.sampler.astype(np.float64) if case == "bypass" else exact_logprobs(PARAMS, batch.tokens)


def exact_weights(case, batch):
    kind, bounds = CASES[case]
    ids = np.ones(batch.mask.shape, int)
    return oracle.importance_weights(prox_of(case, batch), batch.sampler, batch.mask, ids, kind, *bounds)


def exact_gradient(case, batch, params, *, kl):
    r"""Returns the gradient of $-\sum w c \min(r A, \mathrm{clip}(r) A) + \beta \sum w c (e^\delta - 1 - \delta)$, with c the importance weight and $\delta = \log \pi_\text{ref} - \log \pi_\theta$."""
    prox, weight = (
        prox_of(case, batch),
        exact_weights(case, batch) * batch.weights.astype(np.float64)[:, None],
    )
    advantage = batch.advantages.astype(np.float32).astype(np.float64)[:, None]
    reference = exact_logprobs(REFERENCE, batch.tokens)

    def loss(p):
        logprobs = jnp.where(batch.mask, logprobs_of(p, batch.tokens), 0.0)
        ratio = jnp.exp(logprobs - np.where(batch.mask, prox, 0.0))
        gain = jnp.minimum(ratio * advantage, jnp.clip(ratio, 1 - LOW, 1 + HIGH) * advantage)
        delta = np.where(batch.mask, reference, 0.0) - logprobs
        return (weight * (kl * (jnp.exp(delta) - 1.0 - delta) - gain)).sum()

    with jax.enable_x64(True):
        return {name: np.asarray(leaf) for name, leaf in jax.jit(jax.grad(loss))(in_float64(params)).items()}


def one_device():
    return make_mesh(devices=jax.devices()[:1])


def measured(case, *, kl):
    """Returns the library's gradients of a first and a later minibatch, and the scalars of both updates."""
    kind, bounds = CASES[case]
    options = UpdateOptions(
        logprob_chunk_vocab=8,
        old_logprobs="sampler" if case == "bypass" else "trainer",
        correction=kind,
        importance_range=bounds,
        kl_coef=kl,
    )
    mesh, reference = one_device(), REFERENCE if kl else None
    graph = graph_of(CONFIG, layout=layout_of(mesh, attention="xla"))
    updater = Updater(graph, PARAMS, KEEP_GRADIENT, mesh, options=options, reference=reference)
    prepared = updater.prepare(init_state(PARAMS, KEEP_GRADIENT, mesh), [each.packed() for each in batches()])
    found, metrics = [], []
    for params, minibatch, first in zip((PARAMS, LATER), prepared, (True, False), strict=True):
        state = init_state(params, KEEP_GRADIENT, mesh)
        state, of_update = updater.update(state, minibatch, learning_rate=1.0, first=first)
        found.append(in_float64(state.opt_state.trace))
        metrics.append(of_update)
    return found, with_effective_share(to_scalars(metrics))


def clipped(params, batch, case):
    """Returns the share of tokens whose ratio is clipped."""
    ratio = np.exp(exact_logprobs(params, batch.tokens) - prox_of(case, batch))[batch.mask]
    return ((ratio > 1 + HIGH) | (ratio < 1 - LOW)).mean()


def test_the_cases_are_not_trivial():
    """Rows hold several responses to a prompt, every rule changes some tokens but not all, no weight is within rounding of a bound, and some ratios are
    clipped."""
    for batch, params in zip(batches(), (PARAMS, LATER), strict=True):
        parts = batch.packed()
        assert len(parts) > 1
        assert max(m.segment_ids.max() for m in parts) >= 5
        assert any((m.prefix_ids != m.segment_ids).any() for m in parts)
        difference = (prox_of("truncate", batch) - batch.sampler)[batch.mask]
        assert 0.1 < difference.std() < 1.0
        for case in ("truncate", "mask", "keep_responses"):
            kind, (low, high) = CASES[case]
            weights = exact_weights(case, batch)[batch.mask]
            cut = (weights == high) if kind == "truncate" else (weights == 0)
            assert 0.1 < cut.mean() < 0.9
            for by in (1 - 1e-5, 1 + 1e-5):
                ids = np.ones(batch.mask.shape, int)
                arrays = prox_of(case, batch), batch.sampler, batch.mask, ids
                near = oracle.importance_weights(*arrays, kind, low * by, high * by)[batch.mask]
                np.testing.assert_array_equal(near == 0, weights == 0)
        assert clipped(params, batch, "bypass") > 0.05
        assert len(np.unique(batch.weights)) == COUNT
    assert clipped(LATER, batches()[1], "truncate") > 0.05


@pytest.mark.parametrize(
    "kl", [pytest.param(0.0, id="no KL"), pytest.param(KL, id="KL", marks=pytest.mark.slow)]
)
# Slow: compiles two updates each. "keep_responses" drops tokens as "mask" does, tests/training/teacher_test.py truncates, and tests/training/episodes_test.py has the
# sampler's log-probabilities as the old ones, as "bypass" does; tests/dapo/corrections_test.py compares all weights with the oracle.
@pytest.mark.parametrize(
    "case",
    [pytest.param(name, marks=[] if name == "keep_responses" else pytest.mark.slow) for name in CASES],
)
def test_the_corrected_gradient_equals_the_formulas(case, kl):
    gradients, scalars = measured(case, kl=kl)
    for batch, params, found in zip(batches(), (PARAMS, LATER), gradients, strict=True):
        expected = exact_gradient(case, batch, params, kl=kl)
        largest = max(np.abs(leaf).max() for leaf in expected.values())
        errors = {name: np.abs(found[name] - leaf).max() / largest for name, leaf in expected.items()}
        assert max(errors.values()) <= 1e-6, errors
    weights = np.concatenate([exact_weights(case, batch)[batch.mask] for batch in batches()])
    if case == "bypass":
        assert not [name for name in scalars if name.startswith("importance/")]
        return
    cut = weights == (CASES[case][1][1] if case == "truncate" else 0.0)
    expected = {
        "importance/weight": weights.mean(),
        "importance/weight_max": weights.max(),
        "importance/cut_frac": cut.mean(),
        "importance/ess_frac": weights.sum() ** 2 / (len(weights) * (weights**2).sum()),
    }
    assert {name: scalars[name] for name in scalars if name.startswith("importance/")} == pytest.approx(
        expected, rel=1e-5
    )
