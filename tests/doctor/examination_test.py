"""A healthy configuration passes every check; an injected fault fails exactly its own check, with a remedy."""

import io
import json
import re
import shutil
from collections import namedtuple
from dataclasses import replace

import jax
import numpy as np
import pytest
from rich.console import Console
from safetensors.numpy import load_file, save_file

from dapo_jax.config import to_yaml
from dapo_jax.doctor import examination as module
from dapo_jax.doctor.check import Found
from dapo_jax.doctor.examination import show, verdict
from dapo_jax.parallel.weights import WeightTransfer
from dapo_jax.run import training_pass
from dapo_jax.run.policy import Policy, find_policy
from dapo_jax.storage.locks import take
from dapo_jax.testing import tiny_decoder_config, tiny_params
from dapo_jax.text.huggingface import HuggingFaceTokenizer
from dapo_jax.training import update
from tests.run.conftest import save_micro_model
from tests.sandbox.running import run
from tests.text.folders import CHATML, files_of, write

UNSURE = {"devices", "grade"}
"""Checks that may warn in these tests: libtpu is installed, and an untrained model gives no right answer."""

STEP = ("step", "agreement", "shapes", "grade", "evaluate", "checkpoint")

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

ENVIRONMENT = """
class Failing:
    def episode(self, row, seed):
        return self

    async def step(self, turn):
        raise ConnectionError("the shop is closed")
"""

TOOLS = """
from dapo_jax.environments import ToolEnvironment

def add(a: int, b: int) -> int:
    return a + b

def made():
    return ToolEnvironment([add], grade=lambda answer, row: answer == row["answer"])
"""


@pytest.fixture(scope="module")
def graders(tmp_path_factory):
    path = tmp_path_factory.mktemp("graders") / "graders.py"
    path.write_text(GRADERS)
    return path


def failed(found):
    return {name for name, one in found.items() if one.state == "failed"}


def only_fails(found, name):
    """Exactly this check fails; checks that need it are skipped, all others pass. Returns its result."""
    assert failed(found) == {name}
    for other, one in found.items():
        if one.state == "skipped":
            assert one.message == f"because '{name}' failed", other
        elif one.state == "warning":
            assert other in UNSURE
    return found[name]


def test_a_healthy_configuration_passes_every_check(healthy, settings, temporary):
    """The run's folder stays empty, and temporary files are removed."""
    assert {name for name, one in healthy.items() if one.state != "ok"} <= UNSURE
    assert {"mesh", "model", "memory", "training data", "grader", "run_dir", *STEP} <= healthy.keys()
    assert verdict(healthy, configured=True)[0]
    assert not settings["run_dir"].exists()
    assert not list(temporary.iterdir())


def test_prompts_are_shown_as_the_model_reads_them(healthy):
    """Nine sums of three characters, one token each."""
    found = healthy["training data"]
    assert found.message.startswith("9 prompts to train on")
    first, text, last = found.details[:3]
    assert first.startswith("prompt 0, 3 tokens, answer ")
    a, plus, b = text.strip().strip("'")
    assert last.endswith(f"'{a}' '{plus}' '{b}'")


@pytest.mark.parametrize(
    ("changes", "check", "named"),
    [
        ({"model__source": "{tmp}/none"}, "model", "{tmp}/none"),
        ({"data__path": "{tmp}/none.jsonl"}, "training data", "{tmp}/none.jsonl"),
        ({"eval__datasets": "[{{source: jsonl, path: {tmp}/none.jsonl}}]"}, "evaluation data", "none.jsonl"),
        ({"environment__source": "gess"}, "grader", "guess"),
        ({"reward__grader": "{graders}:wrogn"}, "grader", "'wrong'"),
        ({"reward__grader": "{graders}:wrong"}, "grader", "8 of 8 reference answers"),
        ({"reward__grader": "{graders}:right"}, "grader", "an empty response"),
        ({"reward__grader": "{graders}:hangs", "workers__timeout_s": "0.05"}, "grader", "0.05 s"),
        ({"model__source": "{cut}"}, "model", "{cut}/model.safetensors"),
        ({"parallel__fsdp": "3"}, "mesh", "3 devices, but there are 8"),
    ],
)
def test_a_fault_fails_its_own_check(changes, check, named, examined, graders, settings, tmp_path):
    folder = shutil.copytree(settings["model.source"], tmp_path / "cut")
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-100])
    places = {"tmp": tmp_path, "graders": graders, "cut": folder}
    changes = {key: value.format(**places) for key, value in changes.items()}
    assert named.format(**places) in only_fails(examined(quick=True, **changes), check).message


def test_a_model_in_a_bucket_is_examined_there(examined, settings, bucket):
    bucket.store(settings["model.source"], "gs://bucket/model")
    found = examined(quick=True, model__source="gs://bucket/model")["model"]
    assert found.state == "ok"
    assert " of weights, " in found.message
    name, (data, generation) = "model/model.safetensors", bucket.buckets["bucket"]["model/model.safetensors"]
    bucket.buckets["bucket"][name] = (data[:-100], generation)
    found = only_fails(examined(quick=True, model__source="gs://bucket/model"), "model")
    assert "gs://bucket/model/model.safetensors" in found.message


def test_one_nan_in_the_weights(examined, tmp_path):
    folder = tmp_path / "spoilt"
    save_micro_model(folder)
    tensors = load_file(folder / "model.safetensors")
    name = sorted(tensors)[3]
    tensors[name][(0,) * tensors[name].ndim] = np.nan
    save_file(tensors, folder / "model.safetensors")
    assert name in only_fails(examined(model__source=folder), "weights").message


def test_waves_that_are_larger_than_the_data_are_a_warning(examined):
    """There are nine rows, but a wave has three times four prompts. Without dynamic sampling, a step samples four."""
    found = examined(quick=True, batch__prompts_per_step=4)["training data"]
    assert found.state == "warning"
    assert "1.33 times" in found.message
    assert "dynamic_sampling.prompts_per_wave" in found.remedy
    once = examined(quick=True, batch__prompts_per_step=4, dynamic_sampling__enabled="false")
    assert once["training data"].state == "ok"


def test_an_environment_is_examined_instead_of_a_grader(examined, tmp_path):
    """Each sampled response is the first turn of an episode; then with an environment that fails."""
    found = examined(environment__source="guess")
    assert "guess" in found["grader"].message
    assert "8 first turns" in found["grade"].message
    assert re.search(r"the turn '.*' after '.+' with ('[<>]'|the end)$", found["grade"].message)
    place = tmp_path / "failing.py"
    place.write_text(ENVIRONMENT)
    found = examined(environment__source=f"{place}:Failing")["grade"]
    assert found.state == "failed"
    assert "8 of 8 episodes" in found.message
    assert "ConnectionError: the shop is closed" in found.message


def test_the_grader_code_is_examined_by_a_program_that_does_nothing(examined, tmp_path):
    """The second row of the second file expects no output, so a policy would learn to print nothing."""
    run("pass")  # skips without bubblewrap
    tests = [{"inputs": ["1\n"], "outputs": [output]} for output in ("2", "")]
    found = []
    for number in (1, 2):
        path = tmp_path / f"{number}.jsonl"
        rows = [{"prompt": f"{n}+1", "input_output": one} for n, one in enumerate(tests[:number])]
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        data = {
            "data__source": "code",
            "data__path": path,
            "eval__datasets": f"[{{source: code, path: {path}}}]",
        }
        grader = "code" if number == 1 else "[{grader: code}, {grader: dapo, weight: 0.1}]"
        found.append(examined(quick=True, reward__grader=grader, **data)["grader"])
    assert (found[0].state, found[1].state) == ("ok", "failed")
    assert found[0].message == "the sandbox passed its test, and the tests of 1 prompts can be read"
    assert "a program that does nothing passes the tests of prompt" in found[1].message


@pytest.fixture(scope="module")
def chatting(tmp_path_factory):
    """A model folder with a byte-level tokenizer and a chat template without tools; and a file with an environment of one tool."""
    folder = tmp_path_factory.mktemp("chatting")
    tokenizer = HuggingFaceTokenizer(files_of())
    decoder = tiny_decoder_config(vocab_size=tokenizer.vocab_size, max_positions=2000)
    Policy(decoder=decoder, params=tiny_params(decoder), tokenizer=tokenizer).save(folder / "model")
    (folder / "tools.py").write_text(TOOLS)
    return folder


def test_an_episode_without_tools_or_without_room_for_a_turn_is_reported(chatting, examined):
    """A template with tools writes more than the six tokens of a response around a sum; a tenth of a thousand is enough."""
    keys = {"model__source": chatting / "model", "data__max_prompt_tokens": 99, "quick": True}
    keys["environment__source"] = f"{chatting}/tools.py:made"
    assert re.search(r"tools\.py:made.*`tools`", only_fails(examined(**keys), "grader").message)
    template = CHATML.replace("{%", "{{ tools }}{%", 1)
    write(chatting / "model", {"chat_template.jinja": template.encode()})
    found = examined(**keys)["grader"]
    assert found.state == "warning"
    assert "environment.episode_tokens" in found.message
    assert examined(environment__episode_tokens=1000, **keys)["grader"].state == "ok"


@pytest.mark.parametrize(
    ("metric", "grader", "state", "begins", "remedy"),
    [
        # Numbers below 0 grade every answer as wrong.
        ("correct", "brief", "failed", "8 of 8 reference answers", "dynamic_sampling.metric=score"),
        # The longest form of the answer that this model's characters can write is =0 to =4.
        ("score", "long", "ok", "reference answers score 2, an empty response 0;", ""),
        ("score", "brief", "warning", "reference answers score -1, an empty response -0;", "write nothing"),
        ("score", "wrong", "failed", "the grader returned a verdict", "dynamic_sampling.metric=correct"),
    ],
)
def test_with_scores_answers_must_score_more_than_an_empty_response(
    metric, grader, state, begins, remedy, examined, graders
):
    changes = {"dynamic_sampling__metric": metric, "reward__grader": f"{graders}:{grader}"}
    found = examined(quick=True, **changes)["grader"]
    assert (found.state, found.message[: len(begins)]) == (state, begins)
    assert remedy in found.remedy


@pytest.fixture
def tagged(graders):
    """A grader that no response of a model with random weights satisfies, and the form of a right response."""
    return {"reward__grader": f"{graders}:tagged", "right": "::{answer}::"}


def test_only_wrong_responses_are_a_warning(examined, graders, tagged):
    """A model with random weights writes no right sum, in responses as long as the run's."""
    grader = {"reward__grader": f"{graders}:tagged"}
    found = examined(quick=True, **grader)["grader"]
    assert found.state == "failed"
    assert "--right" in found.remedy
    results = examined(**tagged)
    assert results["grader"].state == "ok"
    found = results["grade"]
    assert (found.state, found.message.partition(",")[0]) == ("warning", "0 of 8 are correct")
    assert "dapo-jax sft" in found.remedy


# Slow: compiles a step with a teacher. tests/run/teacher_setup_test.py has runs without rewards.
@pytest.mark.slow
def test_a_run_that_learns_from_a_teacher_alone_may_have_only_wrong_responses(
    examined, tagged, configure, tmp_path
):
    policy = find_policy(configure().model.source)
    replace(policy, params=jax.tree.map(lambda leaf: 0.5 * leaf, policy.params)).save(tmp_path / "teacher")
    found = examined(teacher__source=tmp_path / "teacher", dynamic_sampling__enabled=False, **tagged)["grade"]
    assert (found.state, found.message.partition(",")[0], found.remedy) == ("ok", "0 of 8 are correct", "")


# Slow: a whole examination. tests/run/teacher_setup_test.py has runs.
@pytest.mark.slow
def test_a_policy_that_teaches_itself_is_examined_with_the_longer_prompt(examined):
    own = {"teacher__source": "self", "teacher__prompt": "{answer}:{prompt}"}
    found = examined(dynamic_sampling__enabled=False, **own)
    assert not failed(found)
    assert found["shapes"].state == "ok"


def test_a_full_disk(examined, monkeypatch):
    """The micro model needs only the minimum that a disk should have."""
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(2**30, 2**30, 0))
    found = only_fails(examined(quick=True), "disk")
    assert found.message.startswith("0 MiB free for run_dir, TFDS_DATA_DIR, JAX_COMPILATION_CACHE_DIR")
    assert "run_dir or TFDS_DATA_DIR or JAX_COMPILATION_CACHE_DIR" in found.remedy


def test_a_folder_with_this_run_can_be_resumed_unless_it_is_in_use(examined, configure, tmp_path):
    (tmp_path / "config.yaml").write_text(to_yaml(configure(run_dir=tmp_path)))
    with take(tmp_path, lost=lambda *_: None):
        only_fails(examined(quick=True, run_dir=tmp_path), "run_dir")
    before = {path.name for path in tmp_path.iterdir()}
    found = examined(quick=True, run_dir=tmp_path)
    assert not failed(found)
    assert found["run_dir"].state == "warning"
    assert "--resume" in found["run_dir"].remedy
    assert {path.name for path in tmp_path.iterdir()} == before
    (tmp_path / "config.yaml").write_text(to_yaml(configure(run_dir=tmp_path, seed=7)))
    (tmp_path / "checkpoints" / "1").mkdir(parents=True)
    assert "seed was 7, is 0" in only_fails(examined(quick=True, run_dir=tmp_path), "run_dir").message


def test_too_little_memory(examined, monkeypatch):
    monkeypatch.setattr("dapo_jax.doctor.resources.host_bytes", lambda: (2**20, 2**20))
    found = only_fails(examined(quick=True, sampling__slots=1024), "memory")
    assert "of 1 MiB available in the host's memory" in found.message
    assert "the prefilled prompts: sampling.prefill_tokens=448;" in found.remedy


def test_a_sampler_that_disagrees_with_the_trainer(examined, monkeypatch):
    """Its weights are a tenth larger."""
    plain = WeightTransfer.__call__

    def enlarged(self, params):
        return plain(self, jax.tree.map(lambda leaf: leaf * 1.1, params))

    monkeypatch.setattr(WeightTransfer, "__call__", enlarged)
    assert "do not train" in only_fails(examined(), "agreement").remedy


def test_rows_that_depend_on_the_number_of_rows(examined, monkeypatch):
    """With two rows on a device, each row gets the tokens of the other. Programs of the usual temperature were compiled before."""
    plain = update._hidden

    def swapped(model, m):
        return plain(model, replace(m, tokens=m.tokens[::-1]) if m.tokens.shape[0] == 2 else m)

    monkeypatch.setattr(update, "_hidden", swapped)
    assert "depend on other rows" in only_fails(examined(sampling__temperature=0.9), "shapes").remedy


def test_a_phase_that_raises(examined, monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("the update\nis broken")

    monkeypatch.setattr(training_pass, "example_weights", broken)
    found = examined()
    message = "RuntimeError: the update is broken (in the tiny step, while updating)"
    assert only_fails(found, "step").message == message
    assert found["agreement"].state == found["checkpoint"].state == "skipped"


def test_metrics_that_cannot_be_sent_are_a_failure(examined, monkeypatch, tmp_path):
    """Either wandb is not installed, or it has no key."""
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    # Without a model the later checks are skipped, which saves time.
    found = examined(quick=True, log__trackers="[wandb]", model__source="preset:none")["metrics"]
    assert found.state == "failed"
    assert "wandb" in found.message


# Slow: makes two tiny steps, one of them with preset:tiny.
@pytest.mark.slow
def test_another_model_makes_the_step_if_the_own_one_is_too_large(examined, monkeypatch):
    monkeypatch.setitem(module.OWN_MODEL, "cpu", 100)
    found = examined()
    assert not failed(found)
    assert re.search("preset:tiny.* over 100 for a cpu", found["weights"].message)
    good, sentence = verdict(found, configured=True)
    assert good
    assert "weights" in sentence
    assert examined(full=True)["weights"].state == "ok"


def test_without_a_model_its_dependents_are_skipped_and_the_verdict_names_it(examined, tmp_path):
    found = examined(model__source=tmp_path / "none")
    skipped = {name for name, one in found.items() if one.state == "skipped"}
    assert skipped == {"memory", "cluster", "training data", "evaluation data", "grader", "weights", *STEP}
    assert {found[name].message for name in skipped} == {"because 'model' failed"}
    assert {found[name].state for name in ("mesh", "run_dir", "metrics", "disk")} == {"ok"}
    assert verdict(found, configured=True) == (False, "This configuration cannot train here: see model.")


def test_control_characters_are_escaped_and_tokens_and_passwords_are_not_printed(monkeypatch):
    """Prompts and responses are untrusted: ESC would colour the screen, and the other character reverses the line."""
    monkeypatch.setenv("HF_TOKEN", "hf_0123456789")
    evil, out = "\x1b[31m\u202e hf_0123456789 at https://me:word@host", io.StringIO()
    found = Found(evil, remedy=evil, details=(f"prompt 0: {evil}",))
    show({"prompts": found}, Console(file=out, width=200), configured=True)
    assert not {"\x1b", "\u202e"} & set(out.getvalue())
    assert out.getvalue().count("\\x1b[31m\\u202e $HF_TOKEN at https://me:...@host") == 3
