"""A healthy configuration is found to be so, and of an injected fault exactly its own check fails, with what to do."""

import re
import shutil
from collections import namedtuple

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dapo_jax.config import to_yaml
from dapo_jax.doctor import examination as module
from dapo_jax.doctor.check import Finding
from dapo_jax.doctor.examination import verdict
from dapo_jax.locks import take
from dapo_jax.parallel.weights import WeightTransfer
from dapo_jax.run import sampler_setup, step_batches
from tests.doctor.conftest import write_model

RANDOM_ANYWAY = {"devices", "grade"}
"""What may be warned of in these tests: their packages have libtpu in them, and a model that knows nothing answers nothing right."""

PHASES = ("transfer", "sample", "grade", "update", "agreement", "evaluate", "checkpoint")

GRADERS = """
def wrong(sample):
    return False

def right(sample):
    return True

def tagged(sample):
    return sample.response == f"::{sample.answer}::"

def brief(sample):
    return -float(len(sample.response))

def long(sample):
    return float(len(sample.response))

def hangs(sample):
    while sample.response:
        pass
    return False
"""


@pytest.fixture(scope="module")
def graders(tmp_path_factory):
    path = tmp_path_factory.mktemp("graders") / "graders.py"
    path.write_text(GRADERS)
    return path


def failed(found):
    return {name for name, one in found.items() if one.state == "failed"}


def only_fails(found, *names):
    """Exactly these fail, and say what to do; what needs them is skipped because of them, all else is fine."""
    assert failed(found) == set(names)
    for name, one in found.items():
        if one.state == "skipped":
            assert any(one.message == f"because '{each}' failed" for each in names), (name, one)
        elif one.state == "warning":
            assert name in RANDOM_ANYWAY
    return found[names[0]]


def judged(found):
    return verdict(
        [Finding(name=name, found=one, seconds=0.0) for name, one in found.items()], configured=True
    )


def test_a_healthy_configuration_is_fine_in_every_check(healthy):
    assert {name for name, one in healthy.items() if one.state != "ok"} <= RANDOM_ANYWAY
    assert {"mesh", "model", "memory", "training data", "grader", "run_dir", *PHASES} <= healthy.keys()
    assert judged(healthy)[0]


def test_prompts_are_shown_as_the_model_reads_them(healthy):
    """Nine sums of three characters, one token each."""
    said, shown = healthy["training data"].message, healthy["training data"].details
    assert said.startswith("9 prompts to train on")
    first, text, last = shown[:3]
    assert first.startswith("prompt 0, 3 tokens, answer ")
    a, plus, b = text.strip().strip("'")
    assert last.strip() == f"it ends with the tokens '{a}' '{plus}' '{b}'"


def test_nothing_is_written_in_the_runs_folder_and_nothing_is_left_behind(healthy, settings, temporary):
    assert healthy["checkpoint"].state == "ok"
    assert not settings["run_dir"].exists()
    assert not list(temporary.iterdir())


def test_a_model_that_is_not_there(examined, tmp_path):
    found = only_fails(examined(quick=True, model__source=tmp_path / "none"), "model")
    assert f"cannot read a model from {tmp_path / 'none'}" in found.message


def test_a_file_of_weights_that_was_cut_short(examined, settings, tmp_path):
    folder = shutil.copytree(settings["model.source"], tmp_path / "cut")
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    found = only_fails(examined(quick=True, model__source=folder), "model")
    assert str(file) in found.message


def test_a_model_in_a_bucket_is_looked_at_there(examined, settings, bucket):
    bucket.store(settings["model.source"], "gs://bucket/model")
    found = examined(quick=True, model__source="gs://bucket/model")["model"]
    assert found.state == "ok"
    assert found.message.startswith("gs://bucket/model: ")
    assert " of weights, " in found.message
    name, (data, generation) = "model/model.safetensors", bucket.buckets["bucket"]["model/model.safetensors"]
    bucket.buckets["bucket"][name] = (data[:-100], generation)
    found = only_fails(examined(quick=True, model__source="gs://bucket/model"), "model")
    assert "gs://bucket/model/model.safetensors" in found.message


def test_weights_that_are_not_numbers(examined, tmp_path):
    """One NaN in one array of many."""

    folder = write_model(tmp_path / "spoilt")
    tensors = load_file(folder / "model.safetensors")
    name = sorted(tensors)[3]
    tensors[name][(0,) * tensors[name].ndim] = np.nan
    save_file(tensors, folder / "model.safetensors")
    found = only_fails(examined(model__source=folder), "weights")
    assert f"{name} holds NaN or infinity" in found.message


def test_training_data_that_is_not_there(examined, tmp_path):
    found = only_fails(examined(quick=True, data__path=tmp_path / "none.jsonl"), "training data")
    assert str(tmp_path / "none.jsonl") in found.message


def test_waves_that_are_larger_than_the_data_are_warned_of(examined):
    """Nine rows: waves of three times two prompts fit, of three times four do not; without dynamic sampling a step draws what it trains on."""
    found = examined(quick=True, batch__prompts_per_step=4)["training data"]
    assert found.state == "warning"
    assert found.message.endswith("; the 12 prompts that are drawn at once ask each of 9 1.33 times")
    assert "dynamic_sampling.prompts_per_wave to at most 9" in found.remedy
    once = examined(quick=True, batch__prompts_per_step=4, dynamic_sampling__enabled="false")
    assert once["training data"].state == "ok"


def test_evaluation_data_that_is_not_there(examined, tmp_path):
    changed = {"eval__datasets": f"[{{source: jsonl, path: {tmp_path}/none.jsonl}}]"}
    assert "none.jsonl" in only_fails(examined(quick=True, **changed), "evaluation data").message


def test_a_grader_that_calls_right_answers_wrong(examined, graders):
    found = only_fails(examined(quick=True, reward__grader=f"{graders}:wrong"), "grader")
    assert "8 of 8 reference answers are called wrong" in found.message
    assert "reward.grader" in found.remedy
    assert "--right" in found.remedy


def test_an_environment_is_asked_and_no_grader(examined, tmp_path):
    """The first turn of an episode for each of the responses that were sampled; then with an environment that fails."""
    found = examined(environment__source="guess")
    assert found["grader"].message == "guess says what an episode is worth, and no grader is asked"
    assert "the environment answered 8 first turns" in found["grade"].message
    assert re.search("; behind '.+' the turn '.*' (hears '[<>]'|is the end)$", found["grade"].message)
    place = tmp_path / "failing.py"
    place.write_text(
        """
class Failing:
    def episode(self, row, seed):
        return self

    async def step(self, turn):
        raise ConnectionError("the shop is closed")
"""
    )
    found = examined(environment__source=f"{place}:Failing")["grade"]
    assert found.state == "failed"
    assert (
        "8 of 8 episodes were lost at their first turn: ConnectionError: the shop is closed" in found.message
    )


def test_an_environment_that_is_not_there(examined):
    found = only_fails(examined(quick=True, environment__source="gess"), "grader")
    assert "no environment is named 'gess'; did you mean 'guess'" in found.message


def test_a_grader_that_calls_nothing_right(examined, graders):
    found = only_fails(examined(quick=True, reward__grader=f"{graders}:right"), "grader")
    assert "an empty response" in found.message
    assert "would learn to say nothing" in found.remedy


def test_a_reward_of_numbers_is_told_how_to_count(examined, graders):
    """Numbers below 0 call every answer wrong, numbers above 0 an empty response that has any."""
    found = only_fails(examined(quick=True, reward__grader=f"{graders}:brief"), "grader")
    assert "dynamic_sampling.metric=score" in found.remedy


def test_where_scores_count_answers_are_to_score_more_than_silence(examined, graders):
    """The longest form of the answer is `<answer>...</answer>`; of those that this model's characters can write it is =0 to =4."""
    score = {"quick": True, "dynamic_sampling__metric": "score"}
    found = examined(**score, reward__grader=f"{graders}:long")["grader"]
    assert (found.state, found.message.partition(";")[0]) == (
        "ok",
        "reference answers score 2, an empty response 0",
    )
    found = examined(**score, reward__grader=f"{graders}:brief")["grader"]
    assert (found.state, found.message.partition(";")[0]) == (
        "warning",
        "reference answers score -1, an empty response -0",
    )
    assert "say nothing" in found.remedy
    found = only_fails(examined(**score, reward__grader=f"{graders}:wrong"), "grader")
    assert "needs scores" in found.message


def test_responses_of_which_none_is_right_are_not_called_ok(examined, graders):
    """A model with random weights writes no right sum, in responses as long as the run's."""
    found = examined(reward__grader=f"{graders}:tagged", right="::{answer}::")["grade"]
    assert (found.state, found.message.partition(",")[0]) == ("warning", "0 of 8 are right")
    assert "warmed up" in found.remedy
    score = {"dynamic_sampling__metric": "score", "reward__grader": f"{graders}:long"}
    found = examined(**score)["grade"]
    assert found.state == "ok"
    assert found.message.startswith("rewards from ")


def test_a_grader_that_hangs(examined, graders):
    found = only_fails(
        examined(quick=True, reward__grader=f"{graders}:hangs", reward__timeout_s=0.05), "grader"
    )
    assert "no verdict within 0.05 s" in found.message
    assert "raise reward.timeout_s" in found.remedy


def test_a_grader_that_is_not_there(examined, graders):
    found = only_fails(examined(quick=True, reward__grader=f"{graders}:wrogn"), "grader")
    assert "did you mean 'wrong'?" in found.message


def test_a_grader_with_a_form_of_its_own_is_told_the_form(examined, graders):
    grader = f"{graders}:tagged"
    assert examined(quick=True, reward__grader=grader)["grader"].state == "failed"
    assert examined(quick=True, reward__grader=grader, right="::{answer}::")["grader"].state == "ok"


def test_a_disk_that_is_full(examined, monkeypatch):
    """The micro model has less than 10,000 parameters: what is needed is the least that a disk should have, a sixteenth GiB."""
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(2**30, 2**30, 0))
    found = only_fails(examined(quick=True), "disk")
    assert found.message.startswith("0 MiB free for run_dir, data.data_dir, compilation_cache")
    assert "set run_dir or data.data_dir or compilation_cache to a folder on another disk" in found.remedy


def test_a_folder_that_holds_the_run_of_another_configuration(examined, configure, tmp_path):
    (tmp_path / "config.yaml").write_text(to_yaml(configure(run_dir=tmp_path, seed=7)))
    (tmp_path / "checkpoints" / "1").mkdir(parents=True)
    found = only_fails(examined(quick=True, run_dir=tmp_path), "run_dir")
    assert "seed was 7, is 0" in found.message
    assert "choose another run_dir" in found.remedy


def test_a_folder_in_which_a_run_is_at_work_is_called_live(examined, configure, tmp_path):
    (tmp_path / "config.yaml").write_text(to_yaml(configure(run_dir=tmp_path)))
    with take(tmp_path, lost=lambda *_: None):
        found = only_fails(examined(quick=True, run_dir=tmp_path), "run_dir")
        assert "a run is at work there, by this process itself" in found.message
    assert examined(quick=True, run_dir=tmp_path)["run_dir"].state == "warning"  # it can be resumed


def test_a_folder_that_holds_this_run_can_be_resumed(examined, configure, tmp_path):
    (tmp_path / "config.yaml").write_text(to_yaml(configure(run_dir=tmp_path)))
    found = examined(quick=True, run_dir=tmp_path)
    assert not failed(found)
    assert found["run_dir"].state == "warning"
    assert "--resume" in found["run_dir"].remedy
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]


def test_memory_that_does_not_suffice(examined, monkeypatch):
    monkeypatch.setattr("dapo_jax.doctor.resources.host_bytes", lambda: (2**20, 2**20))
    found = only_fails(examined(quick=True, sampling__slots=1024), "memory")
    assert "of 1 MiB available in the host's memory" in found.message
    assert "lower sampling.slots" in found.remedy


def test_a_mesh_that_the_devices_do_not_make_up(examined):
    found = only_fails(examined(quick=True, parallel__fsdp=3), "mesh")
    assert "3 devices, 8 are there" in found.message


def test_a_sampler_that_disagrees_with_the_trainer(examined, monkeypatch):
    """Its weights are a tenth larger."""
    plain = sampler_setup.transfer_of

    def enlarged(policy, meshes, sampling, **how):
        class Enlarged(WeightTransfer):
            def __call__(self, params):
                return super().__call__(jax.tree.map(lambda leaf: leaf * 1.1, params))

        made = plain(policy, meshes, sampling, **how)
        enlarged = object.__new__(Enlarged)
        enlarged.__dict__.update(made.__dict__)
        return enlarged

    monkeypatch.setattr(sampler_setup, "transfer_of", enlarged)
    found = only_fails(examined(), "agreement")
    assert "do not train" in found.remedy


def test_a_phase_that_raises(examined, monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("the update\nis broken")

    monkeypatch.setattr(step_batches, "example_weights", broken)
    found = examined()
    assert only_fails(found, "update").message == "RuntimeError: the update is broken"
    assert found["agreement"].state == found["checkpoint"].state == "skipped"
    assert found["grade"].state in ("ok", "warning")


def test_metrics_that_need_a_key_of_a_service(examined, monkeypatch, tmp_path):
    find = module.machine.importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *rest: name == "wandb" or find(name, *rest))
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    netrc = tmp_path / "netrc"
    monkeypatch.setenv("NETRC", str(netrc))
    # What comes after it costs time and is the same.
    wants = {"log__wandb": "true", "model__source": "preset:none"}
    assert "wandb login" in examined(quick=True, **wants)["metrics"].remedy
    netrc.write_text("machine api.wandb.ai login user password key\n")
    assert examined(quick=True, **wants)["metrics"].state == "ok"


def test_an_extra_that_the_metrics_need(examined, monkeypatch):
    find = module.machine.importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name, *rest: None if name == "wandb" else find(name, *rest)
    )
    found = examined(quick=True, log__wandb="true", model__source="preset:none")["metrics"]
    assert found.state == "failed"
    assert "pip install -e '.[wandb]'" in found.remedy


@pytest.mark.slow
def test_of_a_model_that_is_too_large_another_makes_the_step(examined, monkeypatch):
    monkeypatch.setitem(module.OWN_MODEL, "cpu", 100)
    found = examined()
    assert not failed(found)
    assert "preset:tiny in its place" in found["weights"].message
    assert "over 100 for a cpu" in found["weights"].message
    assert judged(found)[0]
    assert "weights." in judged(found)[1]
    assert examined(full=True)["weights"].state == "ok"


def test_without_the_step_the_verdict_says_so(examined):
    good, sentence = judged(examined(quick=True))
    assert good
    assert sentence.startswith("Nothing was found that keeps this configuration from training here")
    assert sentence.endswith("no step was tried.")


def test_what_cannot_be_without_it_is_skipped_because_of_it(examined, tmp_path):
    """Of a model: its memory, the prompts in its tokens, the grader on these prompts, and the whole step."""
    found = examined(model__source=tmp_path / "none")
    skipped = {name for name, one in found.items() if one.state == "skipped"}
    assert skipped == {"memory", "training data", "evaluation data", "grader", "weights", *PHASES}
    assert {found[name].message for name in skipped} == {"because 'model' failed"}
    assert {found[name].state for name in ("mesh", "run_dir", "metrics", "disk")} == {"ok"}


def test_a_verdict_names_what_failed_and_says_no(examined, tmp_path):
    found = examined(model__source=tmp_path / "none", run_dir="gs:/nothing", reward__timeout_s=1.0)
    good, sentence = judged(found)
    assert not good
    assert sentence.startswith("This configuration cannot train here: see model")
