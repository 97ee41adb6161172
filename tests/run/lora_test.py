"""Runs that train adapters: sampler and trainer agree, a resumed run equals the uninterrupted one, the written adapter loads."""

import json
import shutil
from functools import partial

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from dapo_jax.commands.convert import convert
from dapo_jax.commands.inference import sample
from dapo_jax.config import (
    ConfigError,
    LoraConfig,
    ModelConfig,
    ParallelConfig,
    SamplingConfig,
    load_config,
)
from dapo_jax.models.decoder import is_apart
from dapo_jax.models.folder import save_model
from dapo_jax.models.lora import lora_shape
from dapo_jax.numerics.quantization import Quantized
from dapo_jax.run.build import Run
from dapo_jax.run.meshes import meshes_of
from dapo_jax.run.policy import find_policy, load_policy
from dapo_jax.run.sampler_programs import sharing, transfer_of
from dapo_jax.run.train import train
from dapo_jax.testing import tiny_params
from dapo_jax.text.tokenizers import load_tokenizer, save_tokenizer


@pytest.fixture(scope="module")
def adapting(micro):
    """Makes configurations of two steps with adapters of rank 2, one update per step, a KL penalty, and a checkpoint at every step."""
    return partial(
        micro, lora=LoraConfig(rank=2, alpha=8.0), dynamic_sampling__surplus="discard", optimizer__epsilon=0.1, loss__kl_coef=0.1,
        batch__groups_per_update=2, steps=2, checkpoint__every_steps=1, checkpoint__keep=9,
    )  # fmt: skip


ONE_COPY = {"parallel__data": 8, "parallel__fsdp": 1}
SPLIT = {"parallel__data": 4, "parallel__fsdp": 2}


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(ONE_COPY, id="one copy of the base"),
        pytest.param(SPLIT, id="a copy for each", marks=pytest.mark.slow),
    ],
)
def adapted(request, adapting, run_micro, rows):
    """An uninterrupted run, and its mesh."""
    return run_micro(adapting(**request.param), eval_rows=rows), request.param


@pytest.mark.parametrize(
    ("axes", "sampling", "dtype", "once"),
    [
        ({"data": 8, "fsdp": 1}, {}, "float32", True),
        ({"data": 4, "fsdp": 2}, {}, "float32", False),
        # Slow: compiles other transfers. The cases around them have a shared and a separate base.
        pytest.param({"data": 4, "fsdp": 1, "tensor": 2}, {}, "bfloat16", True, marks=pytest.mark.slow),
        pytest.param(
            {"data": 8, "fsdp": 1}, {"weight_dtype": "int8"}, "float32", False, marks=pytest.mark.slow
        ),
    ],
    ids=str,
)
def test_trainer_and_sampler_share_frozen_weights_where_both_hold_them_alike(axes, sampling, dtype, once):
    parallel, sampling = ParallelConfig(**axes), SamplingConfig(**sampling)
    meshes = meshes_of(parallel)
    policy = load_policy(
        ModelConfig(source="preset:tiny", compute_dtype=dtype), lora=lora_shape(rank=2, alpha=8.0, targets=["mlp"]), mesh=meshes.train,
        sampler=meshes.sampler, shares=sharing(meshes, sampling, dtype=dtype),
    )  # fmt: skip
    assert is_apart(policy.frozen) == once
    assert bool(policy.unshared) != once
    transfer = transfer_of(policy, meshes, sampling, dtype=dtype)
    layers = [transfer(policy.params)["layers"][1] for _ in range(2)]
    places = [places_of(layer["down"].get_value()) for layer in layers]
    assert places[0] == places[1]
    if once:
        assert places[0] == places_of(policy.frozen["blocks"][1]["down"].get_value())


def places_of(array):
    whole = array.values if isinstance(array, Quantized) else array
    return [shard.data.unsafe_buffer_pointer() for shard in whole.addressable_shards]


def test_sampler_and_trainer_agree(adapted):
    """From the second step on the adapters are not zero."""
    result, _ = adapted
    for line in result.metrics[1:]:
        assert line["sync/logprob_diff_max"] <= 2e-5
        assert line["update/grad_norm"] > 0
    b = [
        leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(result.policy.params)
        if "lora_b" in jax.tree_util.keystr(path)
    ]
    assert min(float(abs(leaf).max()) for leaf in b) > 1e-3


def test_a_checkpoint_has_no_base(adapted):
    result, _ = adapted
    policy = find_policy(str(result.run_dir))
    names = json.loads((result.run_dir / "checkpoints" / "2" / "meta" / "metadata").read_text())["state"]
    sizes = {name: int(np.prod(shape)) for name, (shape, _) in names.items()}
    assert {name.split(".")[-1].rsplit("_lora", 1)[0] for name in sizes if "lora" in name} == {
        "query", "key", "value", "output", "gate", "up", "down",
    }  # fmt: skip
    assert load_config(result.run_dir / "config.yaml").lora.rank == 2
    assert sum(sizes.values()) <= 3 * policy.decoder.trained_parameters + 8


def test_an_interrupted_run_continues_bit_for_bit(adapting, resumed_at_each_step, adapted, same_run):
    result, layout = adapted
    same_run(resumed_at_each_step(adapting, 2, **layout), result)


# Slow: another run. The test above resumes on one mesh; tests/training/lora_test.py has the gradient on other meshes.
@pytest.mark.slow
def test_another_mesh_continues_with_the_adapters(adapting, run_micro, rows, adapted, tmp_path):
    """A shared base may have two copies from there on, and the other way round."""
    result, layout = adapted
    other = SPLIT if layout == ONE_COPY else ONE_COPY
    folder = tmp_path / "run"
    shutil.copytree(result.run_dir, folder)
    shutil.rmtree(folder / "checkpoints" / "2")
    shutil.rmtree(folder / "model")
    found = run_micro(adapting(folder, **other), eval_rows=rows, resume=True)
    for a, b in zip(jax.tree.leaves(found.policy.params), jax.tree.leaves(result.policy.params), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=0, atol=1e-4)


def test_the_reference_policy_is_the_base(adapted):
    """The KL to it is 0 at the first update and positive later."""
    first, second = adapted[0].metrics[-2:]
    assert first["policy/kl_ref_k3"] == pytest.approx(0.0, abs=1e-9)
    assert second["policy/kl_ref_k3"] > 1e-6


# Slow: four samplers. tests/models/adapter_folder_test.py writes adapters as PEFT does and merges them.
@pytest.mark.slow
def test_the_model_folder_is_an_adapter_and_merges_into_a_whole_model(adapted, tmp_path, model):
    result, _ = adapted
    described = json.loads((result.run_dir / "model" / "adapter_config.json").read_text())
    assert (described["r"], described["lora_alpha"], described["base_model_name_or_path"]) == (2, 8, model)
    done = convert(str(result.run_dir), str(tmp_path / "adapter"))
    assert done.adapter
    merged = convert(str(result.run_dir), str(tmp_path / "merged"), merge=True)
    again = convert(str(tmp_path / "adapter"), str(tmp_path / "again"), merge=True)
    assert not merged.adapter
    assert merged.parameters == again.parameters
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("merged", "again"))
    for name, tensor in first.items():
        np.testing.assert_array_equal(tensor, second[name])
    sources = (result.run_dir, tmp_path / "adapter", tmp_path / "merged", result.run_dir / "model")
    expected, *others = map(drawn, sources)
    for found in others:
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)
    assert np.abs(drawn(model) - expected).max() > 1e-2


def drawn(source):
    groups = sample(str(source), ["1+2=", "0+0="], temperature=0.0, max_response_tokens=6, slots=8)
    return np.concatenate([rollout.response.logprobs for group in groups for rollout in group.rollouts])


def test_there_is_nothing_to_merge_without_an_adapter(model, tmp_path):
    with pytest.raises(ConfigError, match="has no adapter to merge"):
        convert(model, str(tmp_path / "whole"), merge=True)
    assert not (tmp_path / "whole").exists()


def test_training_continues_from_an_adapter_folder(adapted, adapting, run_micro, rows):
    """With new moments. The base of the folder stays the base of the result."""
    result, layout = adapted
    config = adapting(model__source=str(result.run_dir / "model"), steps=1, **layout)
    found = run_micro(config, eval_rows=rows)
    [before] = [value for name, value in found.metrics[0].items() if name.endswith("avg@4")]
    [ended] = [value for name, value in result.metrics[-1].items() if name.endswith("avg@4")]
    assert before == pytest.approx(ended, abs=0.5)
    described = json.loads((found.run_dir / "model" / "adapter_config.json").read_text())
    assert described["base_model_name_or_path"] == result.policy.base


@pytest.mark.parametrize(
    ("lora", "key"),
    [
        (lora_shape(rank=4, alpha=8.0, targets=["all"]), "lora.rank"),
        (lora_shape(rank=2, alpha=4.0, targets=["all"]), "lora.alpha"),
        (lora_shape(rank=2, alpha=8.0, targets=["mlp"]), "lora.targets"),
    ],
)
def test_an_adapter_of_another_shape_is_refused(lora, key, adapted):
    with pytest.raises(ConfigError, match=f"{key} is"):
        load_policy(ModelConfig(source=str(adapted[0].run_dir / "model")), lora=lora)


def test_all_weights_of_an_adapter_folder_are_not_trained(adapted, adapting, run_micro):
    source = str(adapted[0].run_dir / "model")
    with pytest.raises(ConfigError, match=r"lora\.rank=0 .* set lora\.rank=2 lora\.alpha=8"):
        run_micro(adapting(model__source=source, lora=LoraConfig()))


def test_another_base_or_rank_is_refused(adapted, adapting, run_micro, rows, model, tmp_path):
    """The base has the same sizes and other weights."""
    result, layout = adapted
    base, folder = tmp_path / "base", tmp_path / "run"
    decoder = result.policy.decoder.base
    save_model(base, decoder, tiny_params(decoder, seed=9))
    save_tokenizer(load_tokenizer(model), base)
    shutil.copytree(result.run_dir, folder)
    with pytest.raises(ConfigError, match=r"lora\.rank was 2, is 3"):
        train(
            adapting(folder, lora=LoraConfig(rank=3, alpha=8.0), steps=5, **layout), resume=True, prompts=rows
        )
    text = (folder / "config.yaml").read_text().replace(model, str(base))
    (folder / "config.yaml").write_text(text)
    changed = r"model\.safetensors has changed since the run began"
    with pytest.raises(ConfigError, match=changed):
        find_policy(str(folder))
    with pytest.raises(ConfigError, match=changed):
        run_micro(adapting(folder, model__source=str(base), steps=5, **layout), resume=True, eval_rows=rows)


@pytest.mark.parametrize(
    "keys",
    [
        "lora.targets=[mlp]",
        "lora.rank=2 lora.targets=[lm_head]",
        "lora.rank=2 lora.targets=[]",
        "lora.rank=2 lora.alpha=0",
    ],
)
def test_keys_that_do_not_fit_together_are_refused(keys):
    *_, last = keys.split()
    with pytest.raises(ConfigError, match=last.partition("=")[0]):
        load_config("quickstart", keys.split())


def test_a_run_that_starts_from_an_adapter_says_that_its_reference_is_the_base(
    adapted, adapting, rows, model
):
    """The first reference of a run with all weights is its own initial policy."""
    result, layout = adapted
    folder = str(result.run_dir / "model")
    for changes, named in (
        ({"model__source": folder, **layout}, f"{model} without adapters"),
        ({**layout, "lora": LoraConfig()}, f"the initial {model}"),
    ):
        run = Run(adapting(loss__kl_coef=0.25, steps=1, **changes), prompts=rows, reward=lambda sample: 0.0)
        try:
            assert [note for note in run.notes if "loss.kl_coef" in note] == [
                f"loss.kl_coef=0.25: the reference policy is {named}"
            ]
        finally:
            run.close()
    config = adapting(model__source=folder, loss__kl_coef=0.0, **layout)
    run = Run(config, prompts=rows, reward=lambda sample: 0.0)
    assert not [note for note in run.notes if "reference" in note]
    run.close()
