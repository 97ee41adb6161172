"""Attention, rows and packing fit together or are refused with the arithmetic. Eight virtual CPU devices."""

import math
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dapo_jax.config import AdvantageConfig, BatchConfig, ConfigError, LossConfig, ModelConfig, TrainConfig
from dapo_jax.dapo.advantages import step_advantages
from dapo_jax.dapo.corrections import importance_weights
from dapo_jax.dapo.losses import dapo_loss
from dapo_jax.dapo.metrics import to_scalars
from dapo_jax.dapo.tokens import Tokens
from dapo_jax.models.device_layout import Layout
from dapo_jax.parallel.mesh import Absent, make_mesh
from dapo_jax.parallel.training_layout import MeshLayout
from dapo_jax.run.training_pass import StepBatches, for_mesh, training_pass
from dapo_jax.testing import tiny_decoder_config
from tests.run.conftest import make_group

BF16 = ModelConfig(compute_dtype="bfloat16")


@dataclass(frozen=True)
class Card(Absent):
    """A GPU that is not present, of a compute capability."""

    compute_capability: str


DEVICES = {platform: Absent(0, 0, platform, "") for platform in ("cpu", "tpu")}
CAPABILITIES = {"gpu": "9.0", "b200": "10.0", "a100": "8.0", "mi300": "gfx942"}
DEVICES |= {name: Card(0, 0, "gpu", "", capability) for name, capability in CAPABILITIES.items()}


def chips(**axes):
    return make_mesh(fsdp=-1, **axes)


def passed(mesh, model=BF16, *, row_tokens=1000, head_dim=128, platform="cpu", cap=None, **batch):
    decoder = tiny_decoder_config(head_dim=head_dim, score_cap=cap)
    return training_pass(
        model, BatchConfig(**batch), mesh, decoder, row_tokens=row_tokens, device=DEVICES[platform]
    )


def test_one_device_has_the_plain_layout_and_packs_everything():
    found = passed(make_mesh(devices=jax.devices()[:1]))
    assert type(found.layout) is Layout
    assert (found.row_tokens, found.packing) == (
        1000,
        {"spread": 1, "share_prompts": True, "shorter_rows": ()},
    )


@pytest.mark.parametrize(
    ("platform", "context", "batch", "attention", "packing"),
    [
        ("tpu", 1, {}, "splash", {"share_prompts": False}),
        ("gpu", 1, {}, "cudnn", {"share_prompts": True}),
        ("b200", 1, {}, "cudnn", {"share_prompts": True}),
        ("gpu", 2, {}, "xla", {"share_prompts": True}),
        ("a100", 1, {}, "xla", {"share_prompts": True}),
        ("mi300", 1, {}, "xla", {"share_prompts": True}),
        ("cpu", 1, {}, "xla", {"share_prompts": True}),
    ],
)
def test_attention_is_the_platforms_kernel_where_it_applies(platform, context, batch, attention, packing):
    found = passed(chips(context=context), platform=platform, **batch)
    assert isinstance(found.layout, MeshLayout)
    assert found.layout.attention == attention
    assert found.packing == {"spread": 8 // context, "shorter_rows": (), **packing}


def test_long_rows_may_be_halved_four_times_down_to_1024():
    """splash over context 2 x tensor 2: multiples of 512, so 22,528 / 8 = 2816 becomes 3072 and 1408 becomes 1536."""
    halves = passed(chips(context=2, tensor=2), platform="tpu", row_tokens=22_528).packing["shorter_rows"]
    assert halves == (11_264, 5632, 3072, 1536)
    assert passed(chips(), row_tokens=4096).packing["shorter_rows"] == (2048, 1024)
    assert passed(chips(), row_tokens=2000).packing["shorter_rows"] == ()


def test_in_float32_or_with_unusual_heads_a_gpu_has_no_kernel():
    assert passed(chips(), ModelConfig(), platform="gpu").layout.attention == "xla"
    widths = {
        width: passed(chips(), platform="gpu", head_dim=width).layout.attention for width in (8, 36, 256, 264)
    }
    assert widths == {8: "cudnn", 36: "xla", 256: "cudnn", 264: "xla"}


def test_default_rows_are_rounded_up_to_a_multiple_that_can_be_split():
    """splash: context 2 x 128 x tensor 4 = 1024; xla: context 2 x tensor 4 = 8."""
    assert passed(chips(context=2, tensor=4), platform="tpu", row_tokens=1030).row_tokens == 2048
    assert passed(chips(context=2, tensor=4), row_tokens=1030).row_tokens == 1032
    assert passed(chips(tensor=4), platform="tpu", row_tokens=22528).row_tokens == 22528


def test_configured_rows_that_cannot_be_split_are_refused():
    asked, decoder = BatchConfig(row_tokens=1030), tiny_decoder_config(head_dim=128)
    with pytest.raises(ConfigError, match=r"row_tokens=1030 .* = 8, .* 1032"):
        training_pass(BF16, asked, chips(context=2, tensor=4), decoder, row_tokens=1030)
    with pytest.raises(ConfigError, match=r"x 128 \(model.attention=splash\) = 512, .* 1536"):
        training_pass(BF16, asked, chips(tensor=4), decoder, row_tokens=1030, device=DEVICES["tpu"])


def test_cudnn_takes_no_split_rows_and_no_unusual_heads():
    model = replace(BF16, attention="cudnn")
    with pytest.raises(ConfigError, match=r"parallel.context=2 .*model.attention=xla"):
        passed(chips(context=2), model, platform="gpu")
    with pytest.raises(ConfigError, match=r"multiple of 8, at most 256.*head_dim=36.*model.attention=xla"):
        passed(chips(), model, platform="gpu", head_dim=36)


@pytest.mark.parametrize(("attention", "needed"), [("splash", "tpu"), ("cudnn", "gpu")])
def test_a_kernel_is_refused_where_its_chip_is_not(attention, needed):
    model = replace(BF16, attention=attention)
    with pytest.raises(ConfigError, match=f"attention={attention} .* {needed}, .* cpu"):
        passed(chips(), model)
    found = passed(chips(), model, platform=needed, row_tokens=1024)
    assert found.layout.attention == attention


def test_capped_scores_train_with_xla_on_a_gpu_and_the_run_reports_it():
    found = passed(chips(), platform="gpu", cap=50.0)
    assert found.layout == passed(chips()).layout
    assert "XLA operations" in found.note
    assert "attn_logit_softcapping" in found.note
    with pytest.raises(ConfigError, match=r"attention=cudnn .*caps them at 50: set model\.attention=auto"):
        passed(chips(), replace(BF16, attention="cudnn"), platform="gpu", cap=50.0)
    on_tpu = passed(chips(), platform="tpu", cap=50.0)
    assert (on_tpu.layout, on_tpu.note) == (passed(chips(), platform="tpu").layout, "")


def test_a_vocabulary_is_padded_for_both_meshes_and_only_if_needed():
    odd = tiny_decoder_config(vocab_size=21)
    two, four = make_mesh(fsdp=4, tensor=2), make_mesh(fsdp=2, tensor=4)
    assert for_mesh(odd, make_mesh()).vocab_rows == 21
    assert for_mesh(odd, two).vocab_rows == 22
    assert for_mesh(odd, two, four).vocab_rows % 4 == 0
    assert for_mesh(tiny_decoder_config(vocab_size=20), two, four).vocab_rows == 20


def test_the_policy_scores_each_response_after_the_prompt_of_the_teacher():
    """The teacher's prompts of the two groups have 2 and 5 tokens. The score of a token here is its id and its position."""
    batch = BatchConfig(prompts_per_step=2, groups_per_update=2, group_size=4, rows_per_microbatch=2)
    config = TrainConfig(run_dir="run", batch=batch)
    how = passed(make_mesh(devices=jax.devices()[:1]), row_tokens=12, rows_per_microbatch=2)
    asked = [np.full(2, 90, np.int32), np.full(5, 91, np.int32)]
    by_rule = partial(step_advantages, **vars(config.advantage))
    batches = StepBatches(
        config, how, pad_id=0, advantages=by_rule, teacher_prompt=lambda prompt: Tokens(asked[prompt.ordinal])
    )

    def score(packed):
        assert {array.shape for m in packed for array in m.arrays.values()} == {(2, 12)}
        return np.stack([m.tokens + m.positions / 100 for m in packed]).astype(np.float32)

    made = [make_group(at, "x..x", lengths=[2, 1, 3, 2]) for at in (0, 1)]
    groups = [
        replace(group, prompt=replace(group.prompt, tokens=np.full(3, 70 + at, np.int32)))
        for at, group in enumerate(made)
    ]
    for number, rollout in enumerate(rollout for group in groups for rollout in group.rollouts):
        rollout.response.record.ids[:] = 10 * number + np.arange(len(rollout.response.record))
    [packed] = batches.minibatches(groups, 1, score)
    found = 0
    for m in packed:
        for row, column in zip(*np.nonzero(m.mask), strict=True):
            own = m.tokens[row][m.segment_ids[row] == m.prefix_ids[row, column]]
            [group] = [group for group in groups if group.prompt.tokens[0] == own[0]]
            place = m.positions[row, column] - len(group.prompt.tokens) + len(asked[group.prompt.ordinal])
            assert m.teacher_logprobs[row, column] == np.float32(m.tokens[row, column] + place / 100)
            found += 1
    assert found == 2 * (2 + 1 + 3 + 2)


def test_responses_that_keep_responses_rejects_count_in_the_baseline_and_in_the_mean():
    """Rewards 1, -1, -1, -1 of two tokens each: the mean is -1/2, so the advantages are 3/2 and three times -1/2, each with the weight 1/8.

    The first response is rejected: its tokens are twice as probable as when they were sampled. In a first update, the loss of the others is 6 x 1/8 x 1/2 = 3/8. If the
    first did not count in the baseline, it would be 0; if it did not count in the mean over tokens, it would be 1/2.
    """
    loss = LossConfig(correction="keep_responses", old_logprobs="trainer")
    batch = BatchConfig(prompts_per_step=1, groups_per_update=1, group_size=4, rows_per_microbatch=4)
    config = TrainConfig(run_dir="run", loss=loss, batch=batch, advantage=AdvantageConfig(scale="none"))
    by_rule = partial(step_advantages, **vars(config.advantage))
    how = passed(make_mesh(devices=jax.devices()[:1]), row_tokens=5, rows_per_microbatch=4)
    batches = StepBatches(config, how, pad_id=0, advantages=by_rule)
    [[microbatch]] = batches.minibatches([make_group(0, "x...", lengths=[2, 2, 2, 2])], step=1)
    mask, advantages = microbatch.mask, microbatch.advantages
    assert sorted(advantages[mask].tolist()) == [-0.5] * 6 + [1.5] * 2
    sampled = microbatch.sampler_logprobs
    now = np.where(advantages > 0, sampled + math.log(2), sampled).astype(np.float32)
    low, high = config.correction.low, config.correction.high
    arrays = now, sampled, mask, microbatch.segment_ids
    ratios, metrics = importance_weights(
        *map(jnp.asarray, arrays), correction="keep_responses", low=low, high=high
    )
    assert to_scalars(metrics)["importance/cut_frac"] == 0.25
    value, _ = dapo_loss(*map(jnp.asarray, (now, now, advantages, mask)), weights=microbatch.weights * ratios)
    assert float(value) == pytest.approx(3 / 8, rel=1e-6)
