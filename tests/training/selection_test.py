"""`UpdateOptions.select`: an update selects tokens once, with the weights at the start of the step. Packing, microbatches and devices do not change the selection."""

from dataclasses import replace

import jax
import numpy as np
import optax
import pytest

from dapo_jax.dapo.batching import Example
from dapo_jax.dapo.losses import dapo_loss
from dapo_jax.dapo.metrics import to_scalars
from dapo_jax.dapo.objectives import kl_cov_loss, wanted
from dapo_jax.dapo.selections import SELECTIONS
from dapo_jax.dapo.tokens import Tokens
from dapo_jax.models.decoder import graph_of
from dapo_jax.parallel.mesh import make_mesh
from dapo_jax.parallel.training_layout import layout_of
from dapo_jax.testing import tiny_decoder_config, tiny_params
from dapo_jax.training.row_packing import pack
from dapo_jax.training.state import init_state
from dapo_jax.training.update import UpdateOptions, Updater

CONFIG = tiny_decoder_config(layers=1, embed_dim=16, mlp_dim=16, heads=2, kv_heads=2)
KEEP_GRADIENT = optax.trace(decay=0.0)
OPTIONS = {
    "high_entropy": (("frac", 0.3),),
    "low_covariance": (("frac", 0.1), ("low", 0.1), ("high", 5.0)),
    "high_covariance": (("frac", 0.2),),
    "low_second_moment": (("limit", 0.2),),
}
ONE = make_mesh(devices=jax.devices()[:1])
EIGHT = make_mesh(fsdp=2, tensor=2, context=2)


def examples(count=24, seed=0):
    """Responses of 4 to 20 tokens. Their recorded log-probabilities are all different, so they identify the tokens."""
    rng = np.random.default_rng(seed)
    made = []
    for index in range(count):
        response = rng.integers(2, CONFIG.vocab_size, rng.integers(4, 21)).astype(np.int32)
        made.append(
            Example(
                prompt=Tokens(rng.integers(2, CONFIG.vocab_size, 5).astype(np.int32)),
                response=Tokens(response, logprobs=rng.normal(-4.0, 0.5, len(response)).astype(np.float32)),
                advantage=float(rng.normal()),
                in_loss=index != 3,
                noise=rng.random(len(response)).astype(np.float32),
            )
        )
    return made


ROWS = examples()
WEIGHT = 1.0 / sum(row.mask.sum() for row in ROWS)


def packed(rows=ROWS, *, row_tokens=32, per=8, shorter=()):
    weights = np.array([WEIGHT * row.in_loss for row in rows])
    return pack(rows, weights, row_tokens=row_tokens, rows_per_microbatch=per, shorter_rows=shorter)


def make_updater(select, mesh=ONE, *, objective=dapo_loss, old_logprobs="trainer"):
    options = UpdateOptions(
        old_logprobs=old_logprobs,
        logprob_chunk_vocab=64,
        select=select,
        select_options=OPTIONS.get(select, ()),
    )
    graph = graph_of(CONFIG, layout=layout_of(mesh, attention="xla"))
    params = jax.eval_shape(lambda: tiny_params(CONFIG))
    return Updater(graph, params, KEEP_GRADIENT, mesh, objective=objective, options=options)


def fresh(mesh=ONE):
    return init_state(tiny_params(CONFIG), KEEP_GRADIENT, mesh)


def by_token(minibatch, name):
    """Maps the recorded log-probability of each token in the mask to its entry in the array `name`."""
    found = {}
    for stack in minibatch:
        m = jax.tree.map(np.asarray, stack.microbatches)
        found |= dict(
            zip(m.sampler_logprobs[m.mask].tolist(), getattr(m, name)[m.mask].tolist(), strict=True)
        )
    assert len(found) == sum(row.mask.sum() for row in ROWS)
    return found


def scores_of(recorded):
    """Log-probabilities that differ from the recorded ones by -1 to 1, and entropies from 0 to 1, computed on the host."""
    numbers = np.asarray(recorded)
    entropy = np.mod(64 * numbers, np.float32(1))
    return tuple(jax.device_put(each, recorded.sharding) for each in (numbers + 2 * entropy - 1, entropy))


WAYS = {
    "shuffled": lambda: packed([ROWS[i] for i in np.random.default_rng(1).permutation(len(ROWS))]),
    "one row per microbatch": lambda: packed(row_tokens=64, per=1),
    "three lengths": lambda: packed(row_tokens=64, per=2, shorter=(32, 16)),
}


def all_but_slow(*quick):
    """Returns all selections; a selection that is not in `quick` is slow."""
    return [pytest.param(name, marks=[] if name in quick else pytest.mark.slow) for name in SELECTIONS]


# Slow: compiles seven selections each. tests/dapo/selections_test.py tests the rules; a covariance, which has more sums over devices, stays.
@pytest.mark.parametrize("select", all_but_slow("high_covariance"))
def test_selected_tokens_do_not_depend_on_packing_microbatches_or_devices(select):
    """The program for selections gets scores that are the same for each token, so that rounding in the model does not matter."""

    def chosen(mesh, microbatches):
        updater = make_updater(select, mesh)
        [placed] = updater._placing.put([microbatches])
        kinds = 2 if select == "high_entropy" else 1
        updater._scored = lambda model, stack: scores_of(stack.microbatches.sampler_logprobs)[:kinds]
        return by_token(updater._selected(placed, updater.model(fresh(mesh).params)), "selected")

    expected = chosen(ONE, packed())
    assert 0 < sum(expected.values()) < len(expected)
    for way in WAYS.values():
        assert chosen(ONE, way()) == expected
    assert chosen(EIGHT, packed()) == expected
    assert chosen(EIGHT, packed(row_tokens=64, per=8, shorter=(32, 16))) == expected


# Slow: compiles two updates each. The update is the same for every selection, and tests/dapo/selections_test.py tests the rules.
@pytest.mark.parametrize("select", all_but_slow("high_entropy"))
def test_an_update_trains_on_the_selected_tokens(select):
    """The gradient is that of weights that are 0 for the tokens that are not selected. `prepare` selects in each update, the first too."""
    updater, plain = make_updater(select), make_updater("all")
    microbatches = packed()
    state = fresh()
    first, second = updater.prepare(state, [microbatches, packed(row_tokens=64)])
    assert by_token(first, "selected") == by_token(second, "selected")
    assert first[0].microbatches.noise is None
    kept = np.asarray(first[0].microbatches.selected)
    state, metrics = updater.update(state, first, learning_rate=0.0, first=True)
    selected = by_token(first, "selected")
    assert to_scalars(metrics)["policy/selected_frac"] == pytest.approx(
        sum(selected.values()) / len(selected), rel=1e-6
    )
    zeroed = [replace(m, weights=m.weights * kept[i], noise=None) for i, m in enumerate(microbatches)]
    [expected] = plain.prepare(fresh(), [zeroed])
    expected, of_plain = plain.update(fresh(), expected, learning_rate=0.0, first=True)
    assert "policy/selected_frac" not in of_plain
    for found, leaf in zip(
        jax.tree.leaves(state.opt_state), jax.tree.leaves(expected.opt_state), strict=True
    ):
        np.testing.assert_allclose(found, leaf, rtol=0, atol=1e-6 * np.abs(leaf).max() + 1e-12)


def test_the_scores_are_of_the_policy_even_if_the_old_policy_is_the_sampler():
    """The entropy and the log-probabilities come from the trainer, and the ratio is to the sampler."""
    for select in ("high_entropy", "low_second_moment"):
        by_trainer, by_sampler = (make_updater(select, old_logprobs=old) for old in ("trainer", "sampler"))
        [one], [two] = (updater.prepare(fresh(), [packed()]) for updater in (by_trainer, by_sampler))
        assert by_token(one, "selected") == by_token(two, "selected")
        assert by_token(two, "old_logprobs") == by_token(two, "sampler_logprobs")
        assert by_token(one, "old_logprobs") != by_token(two, "old_logprobs")


def test_an_objective_that_requires_the_selection_gets_all_tokens_with_their_weights():
    """KL-Cov trains on all tokens. With the ratio 1, its penalty has no gradient, so the gradient is that of all tokens."""
    found = []
    for select, objective in (("high_covariance", kl_cov_loss), ("all", dapo_loss)):
        updater = make_updater(select, objective=objective)
        [minibatch] = updater.prepare(fresh(), [packed()])
        state, _ = updater.update(fresh(), minibatch, learning_rate=0.0, first=True)
        found.append(state.opt_state)
    for a, b in zip(*map(jax.tree.leaves, found), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-6 * np.abs(b).max() + 1e-12)


@pytest.mark.slow  # lowers two programs for each selection
def test_without_a_selection_the_programs_have_no_array_of_it():
    """The array of selected tokens is one more argument of the update, and the entropy is a result of scoring only if it is required."""
    state = jax.eval_shape(fresh)

    def programs(select):
        updater = make_updater(select)
        update = updater.programs(state, capacity=1, rows=8, lengths=[32])["update_add_longest"]()
        score = updater.lower_score(updater.model(state.params), capacity=1, rows=8, row_tokens=32)
        return len(jax.tree.leaves(update.in_avals)), len(jax.tree.leaves(score.out_info))

    arguments, scores = programs("all")
    assert scores == 1
    for select, function in SELECTIONS.items():
        assert programs(select) == (arguments + 1, 1 + ("entropy" in wanted(function)))
