"""A kind of layer that the library does not know: one class and one row in the table of families, and a model trains, samples, pauses, resumes, quantizes, saves and plans.

The mixer averages one projection over the last tokens of a sequence. Its state has one row for each token before the current one.
"""

from dataclasses import dataclass
from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest

from dapo_jax.models import families
from dapo_jax.models.attention_mixer import ATTENTION
from dapo_jax.models.config_json import Family
from dapo_jax.models.families import describe, understand
from dapo_jax.models.folder import read_config
from dapo_jax.models.layer_kinds import Fixed, Mixer
from dapo_jax.models.parameters import Parameter
from dapo_jax.models.presets import DecoderConfig
from dapo_jax.models.recurrent import ancestors
from dapo_jax.plan.plan import plan
from tests.run.conftest import TOKENIZER, assert_synchronous

STEPS = 2
FLIGHT = {"rollout__round_tokens": 2, "rollout__in_flight": 16, "sampling__slots": 8}
"""Twice as many responses as slots, so that responses leave their slots and return with their states."""


@dataclass(frozen=True)
class Average(Mixer):
    """The mean of the last `tokens` values of a sequence. Values before its start are 0."""

    tokens: int

    stack = "average_blocks"

    def parameters(self, config):
        heads, embed = (config.heads, config.head_dim), config.embed_dim
        return {
            "value": Parameter(
                shape=(*heads, embed), axes=("heads", "head_dim", "embed"), fan_in=embed, tensor="average.v_proj.weight", target="v_proj"
            ),
            "output": Parameter(
                shape=(embed, *heads), axes=("embed", "heads", "head_dim"), fan_in=heads[0] * heads[1], tensor="average.o_proj.weight",
            ),
        }  # fmt: skip

    def mix(self, layer, x, rope, attend):
        out, kept = attend(*layer.project(("value",), x))
        return out.reshape(-1, out.shape[2]), kept

    def over_rows(self, config, rows):
        """A shared prompt is in the row once, so the tokens before a response are not the columns before it."""
        prefix = rows.segment_ids if rows.prefix_ids is None else rows.prefix_ids
        columns = ancestors(rows.segment_ids, prefix, self.tokens - 1)

        def attend(value):
            by_row = value.reshape(*value.shape[:2], *rows.segment_ids.shape)
            total = by_row
            for column in columns:
                before = jnp.take_along_axis(by_row, jnp.maximum(column, 0)[None, None], axis=3)
                total = total + jnp.where(column >= 0, before, 0.0)
            return (total / self.tokens).reshape(value.shape), None

        return attend

    def prefill(self, config, part, **data):
        def attend(value):
            ids, back = part.segment_ids, self.tokens - 1
            rows, width = ids.shape
            state = (
                self._empty(rows, part.dtype, heads=value.shape[:2]) if part.before is None else part.before
            )
            first = jnp.full((rows, 1), -1, ids.dtype) if part.before is None else ids[:, :1]
            wide = jnp.concatenate(
                [jnp.moveaxis(state, 0, 2), value.reshape(*value.shape[:2], rows, width)], axis=3
            )
            every = jnp.concatenate([jnp.repeat(first, back, axis=1), ids], axis=1)
            near = [(wide[..., i : i + width], every[:, i : i + width] == ids) for i in range(self.tokens)]
            total = sum(jnp.where(same, values, 0.0) for values, same in near)
            row, column = (part.last // width)[:, None], (part.last % width)[:, None]
            ends = column + 1 + jnp.arange(back)[None]
            same = every[row, ends] == ids[row, column]
            new = jnp.where(same[:, None, None], wide[:, :, row, ends].transpose(2, 0, 1, 3), 0.0)
            return (total / self.tokens).reshape(value.shape), new

        return attend

    def step(self, config, step, **data):
        def attend(value):
            wide = jnp.concatenate([step.state, jnp.moveaxis(value, -1, 0)[..., None]], axis=-1)
            new = jnp.where(step.live[:, None, None, None], wide[..., 1:], step.state)
            return jnp.moveaxis(wide.sum(-1), 0, -1) / self.tokens, new

        return attend

    def state(self, config, layer):
        heads = (config.heads, config.head_dim)
        return Fixed(lambda sequences, dtype: self._empty(sequences, dtype, heads=heads))

    def _empty(self, sequences, dtype, *, heads):
        return jnp.zeros((sequences, *heads, self.tokens - 1), np.promote_types(dtype, np.float32))

    def flops(self, config, *, decoding):
        return self.tokens * config.heads * config.head_dim, 0


MIXERS = (Average(3), ATTENTION, Average(3), ATTENTION)


TOY = Family(
    architecture="ToyForCausalLM",
    defaults={"average_tokens": 3},
    read=lambda values, fields, where: {"mixers": (Average(values["average_tokens"]), ATTENTION)},
    write=lambda config: {"average_tokens": config.mixers[0].tokens},
)
"""The row of the table of families."""


@pytest.fixture(scope="module")
def registered():
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(families.FAMILIES, "toy", TOY)
        yield


@pytest.fixture(scope="module")
def toy(registered, micro_of):
    sizes = {"embed_dim": 16, "layers": 4, "heads": 4, "kv_heads": 2, "head_dim": 8, "mlp_dim": 16}
    config = DecoderConfig(
        family="toy", vocab_size=TOKENIZER.vocab_size, max_positions=128, mixers=MIXERS, **sizes
    )
    assert understand(describe(config), "config.json") == config
    return partial(micro_of(config, STEPS), optimizer__learning_rate=1e-9)


@pytest.fixture(scope="module")
def flown(toy, run_micro, rows):
    return run_micro(toy(**FLIGHT), eval_rows=rows)


def test_responses_are_scored_as_they_were_sampled_in_rows_in_prefill_and_after_pauses(flown):
    """Float32 sums in another order differ by up to 2e-5, as in tests/run/gated_delta_test.py. The learning rate is so low that older weights are the same."""
    assert any(line["rollout/age_max"] > 0 for line in flown.metrics[1:])
    assert_synchronous(flown.metrics[1:])


def test_a_run_resumes_bit_for_bit(toy, resumed_at_each_step, flown, same_run):
    same_run(resumed_at_each_step(toy, STEPS, **FLIGHT), flown)


# Slow: another run. tests/models/joined_test.py and tests/sampling/continuous_batching_test.py have 8-bit weights.
@pytest.mark.slow
def test_the_sampler_quantizes_its_matrices(toy, run_micro, rows):
    int8 = {"loss__importance_range": [0.0, 2.0], "sampling__weight_dtype": "int8"}
    [line] = run_micro(toy(steps=1, **int8), eval_rows=rows).metrics[1:]
    assert 1e-4 < line["sync/logprob_diff_max"] < 0.5


def test_a_plan_counts_its_parameters_and_its_state(toy):
    """Two layers have 2 rows of 4 x 8 float32 values, and matrices of 2 x 16 x 32. Two layers with attention have matrices of 16 x (64 + 32) and 16 keys and values."""
    config = toy()
    made = plan(config)
    assert made.decoder == read_config(config.model.source)
    assert made.decoder.state_bytes == 2 * 2 * 32 * 4
    layers = 4 * (3 * 16 * 16 + 2 * 16) + 2 * 2 * 16 * 32 + 2 * 16 * (64 + 32)
    assert made.decoder.parameters == layers + 16 * (made.decoder.vocab_size + 1)
    assert made.token_bytes == {0: 2 * 2 * 8 * 4 * 2}
