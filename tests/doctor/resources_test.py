"""The check of the model, for models whose description has a choice or a part that is not used, and the check of the cluster."""

import shutil
import sys
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from dapo_jax.config import (
    ConfigError,
    DataConfig,
    ModelConfig,
    OverlongConfig,
    RewardConfig,
    SamplingConfig,
    TrainConfig,
)
from dapo_jax.doctor.resources import cluster, memory, model
from dapo_jax.doctor.subject import STAND_IN, Subject
from dapo_jax.models.folder import load_model
from dapo_jax.text.tokenizers import CharTokenizer, save_tokenizer

GOLDEN = Path(__file__).parents[1] / "golden" / "families"


def reported(folder, name, *, response_tokens=6):
    shutil.copytree(GOLDEN / name, folder)
    save_tokenizer(CharTokenizer("0123456789"), folder)
    config = TrainConfig(
        run_dir="out",
        model=ModelConfig(source=str(folder)),
        data=DataConfig(max_prompt_tokens=4),
        sampling=SamplingConfig(max_response_tokens=response_tokens),
        reward=RewardConfig(overlong=OverlongConfig(enabled=False)),
    )
    return model(Subject(config)).message


@pytest.mark.parametrize(("response_tokens", "chosen"), [(12, "short_factor"), (13, "long_factor")])
def test_the_factors_of_longrope_are_reported(tmp_path, response_tokens, chosen):
    """The golden model was first trained on 16 tokens."""
    message = reported(tmp_path / "model", "phi3", response_tokens=response_tokens)
    assert f"RoPE uses {chosen}" in message
    assert "original_max_position_embeddings=16" in message


def test_tensors_that_are_not_loaded_are_counted_wherever_the_model_is_read(tmp_path):
    names = load_file(GOLDEN / "gemma3_wrapped" / "model.safetensors")
    count = sum(not name.startswith("language_model.") for name in names)
    told = f"{count} tensors of the image encoder or of additional heads are not loaded"
    assert told in reported(tmp_path / "model", "gemma3_wrapped")
    with pytest.warns(UserWarning, match=told):
        load_model(tmp_path / "model")


IN_FLIGHT = {
    "rollout__in_flight": 16, "rollout__round_tokens": 2, "batch__group_size": 8, "batch__row_tokens": 0, "cluster__address": "auto", "cluster__samplers": 2,
}  # fmt: skip
"""A step of 2 informative groups has 4 groups: 32 responses of 6 tokens, and so 3 rounds of 16. Verdicts are due one round later."""


def checked(configure, **changes):
    return cluster(Subject(configure(**IN_FLIGHT | changes)))


@pytest.mark.parametrize(
    ("changes", "state", "message"),
    [
        ({}, "ok", "2 sample workers on 1 x CPU each"),
        ({"rollout__weight_rounds": 6}, "ok", "rollout.weight_rounds=6"),
        ({"rollout__weight_rounds": 40}, "warning", "rollout.weight_rounds=40"),
        ({"cluster__resources": "{TPU: 4}"}, "ok", "2 sample workers on 4 x TPU each"),
        ({"cluster__resources": "{TPU: 4}", "sampling__batch_invariant": "true", "sampling__slots": 64}, "failed", "4 x TPU"),
    ],
)  # fmt: skip
def test_sample_workers_are_checked_without_a_cluster(configure, changes, state, message):
    pytest.importorskip("ray", reason="needs the extra `cluster`")
    found = checked(configure, **changes)
    assert found.state == state
    assert message in found.message
    assert bool(found.remedy) == (state != "ok")


def test_sample_workers_without_the_accelerator_that_trains_are_reported(configure, monkeypatch):
    pytest.importorskip("ray", reason="needs the extra `cluster`")
    subject = Subject(configure(**IN_FLIGHT))
    assert subject.planned
    monkeypatch.setattr("jax.default_backend", lambda: "tpu")
    found = cluster(subject)
    assert (found.state, "cluster.resources" in found.remedy) == ("warning", True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cluster__address": "10.0.0.7:6379"}, r"RAY_AUTH_MODE=token"),
        # 8 slots cannot be split over 3 devices, and weights over 2 devices need an even number.
        ({"cluster__resources": "{TPU: 3}"}, r"cluster\.resources=\{'TPU': 3\}: sampling\.slots=8"),
    ],
)
def test_a_cluster_that_a_run_would_refuse_is_found(configure, changes, message, monkeypatch):
    pytest.importorskip("ray", reason="needs the extra `cluster`")
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    with pytest.raises(ConfigError, match=message):
        checked(configure, **changes)


def test_a_missing_ray_is_found(configure, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"cluster\.address=auto needs ray: .*\[cluster\]"):
        checked(configure)
    assert cluster(Subject(STAND_IN)).state == "ok"


def test_the_trainers_memory_has_no_paused_responses_if_sample_workers_sample(configure):
    """80 responses in flight and 8 slots: one process has the logits of 80 paused responses, and a trainer with sample workers has none."""
    alone = {**IN_FLIGHT, "rollout__in_flight": 80, "cluster__address": "", "cluster__samplers": 0}
    assert "paused responses" in memory(Subject(configure(**alone))).message
    parted = {**IN_FLIGHT, "rollout__in_flight": 80}
    assert "paused responses" not in memory(Subject(configure(**parted))).message
