"""The folder of the tests of keys, and the fixture `look`."""

import json
import shutil
from dataclasses import replace
from importlib import import_module
from itertools import count

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from dapo_jax.checkpoints.checkpointer import Checkpointer
from dapo_jax.config import ModelConfig, TrainConfig, to_yaml
from dapo_jax.environments import Episodes
from dapo_jax.health.stalls import Watch
from dapo_jax.health.watchdogs import Watchdogs
from dapo_jax.models.decoder import graph_of
from dapo_jax.models.presets import PRESETS, Experts
from dapo_jax.parallel.weights import WeightTransfer
from dapo_jax.rewards.async_calls import AsyncCalls
from dapo_jax.rewards.grading_pool import GradingPool
from dapo_jax.rollout.group_sampling import GroupSampling
from dapo_jax.run import policy, sources, updater_setup
from dapo_jax.run.observers import Profile
from dapo_jax.testing import tiny_decoder_config
from dapo_jax.trackers import BUILT_IN
from tests.run.conftest import save_run
from tests.run.keys import doubles
from tests.run.keys.looking import FILES, Look

MODELS = ("model", "chat_model", "dated_model", "a_run")
DATED = "{{ strftime_now('%d.%m.%Y') }}{{ mark | default('') }} {% for m in messages %}{{ m.content }}{% endfor %}"
"""A chat template that prints the day and a variable."""


@pytest.fixture(scope="module")
def work(model, chat_model, tmp_path_factory):
    """A folder with models and questions."""
    folder = tmp_path_factory.mktemp("keys")
    (folder / "model").symlink_to(model)
    (folder / "chat_model").symlink_to(chat_model)
    shutil.copytree(chat_model, folder / "dated_model")
    (folder / "dated_model" / "chat_template.jinja").write_text(DATED)
    (folder / "datasets").mkdir()
    save_run(TrainConfig(run_dir=str(folder / "a_run"), model=ModelConfig(source=model)))
    (folder / "questions").mkdir()
    for name, rows in FILES.items():
        (folder / "questions" / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "questions" / "both").mkdir()
    for name in ("train.jsonl", "test.jsonl"):
        shutil.copy(folder / "questions" / name, folder / "questions" / "both")
    return folder


@pytest.fixture(scope="module")
def watched():
    """The last arguments of classes by name, and the doubles under `engine` and `updates`."""
    received = {}

    def engine(decoder, mesh, spec):
        received["engine"] = doubles.Engine(decoder, mesh, spec)
        return received["engine"]

    def updates(*arguments, **options):
        received["updates"] = doubles.Updates(*arguments, **options)
        return received["updates"]

    def download(name, *, revision, weights):
        received["download"] = {"revision": revision}
        return sources.Path("model")

    with pytest.MonkeyPatch.context() as patch:
        # Not shared with runs without doubles.
        patch.setattr("dapo_jax.run.sampler_setup.engine_of", engine)
        patch.setattr(updater_setup, "_shared_updater", updater_setup._new_updater)
        for place in ("run.updater_setup", "commands.sft"):
            patch.setattr(import_module(f"dapo_jax.{place}"), "Updater", updates)
        patch.setattr("dapo_jax.run.sources.download", download)
        patch.setattr(WeightTransfer, "__call__", lambda self, params: self.shapes)
        patch.setattr(GroupSampling, "not_arrived_frac", lambda self, params, weights: 0.0)
        patch.setattr("dapo_jax.run.records.to_yaml", doubles.once(to_yaml))
        micro = tiny_decoder_config(
            vocab_size=32, embed_dim=16, layers=1, heads=2, kv_heads=2, head_dim=8, mlp_dim=16
        )
        patch.setitem(PRESETS, "micro", micro)
        patch.setitem(PRESETS, "micro_moe", replace(micro, mlps=(Experts(8, 2, normalize=True),)))
        # The slowest functions run once for each set of arguments.
        for place in (policy, updater_setup):
            patch.setattr(place, "graph_of", doubles.once(graph_of))
        patch.setattr("dapo_jax.run.learner.load_policy", doubles.once(policy.load_policy))
        for cls in (Watch, Watchdogs, Checkpointer, Profile, GradingPool, AsyncCalls, Episodes):
            doubles.noting(patch, cls, received)
        # The trackers are doubles, so their packages and keys are not needed.
        patch.setattr("dapo_jax.run.run_dir.check_trackers", lambda log, run_dir: None)
        for name, cls in BUILT_IN.items():
            double = type(cls.__name__, (doubles.Tracker, cls), {})
            patch.setitem(BUILT_IN, name, double)
            doubles.noting(patch, cls, received, instead=double)
        yield received


@pytest.fixture
def look(work, watched, monkeypatch, tmp_path):
    """(values of keys) -> a `Look`, in a folder of its own."""
    places = count()

    def at(values, schema=TrainConfig):
        place = tmp_path / str(next(places))
        place.mkdir()
        for name in (*MODELS, "questions", "datasets"):
            (place / name).symlink_to(work / name)
        monkeypatch.chdir(place)
        return Look(schema, values, watched)

    cache = jax.config.jax_compilation_cache_dir
    yield at
    jax.config.update("jax_compilation_cache_dir", cache)
    compilation_cache.reset_cache()  # the folder of its run is gone
