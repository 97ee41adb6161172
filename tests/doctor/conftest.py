"""A micro model, a file of sums, and a configuration that uses both."""

import json
import tempfile

import pytest

from dapo_jax.config import load_config
from dapo_jax.doctor.examination import examination
from tests.run.conftest import save_micro_model

SUMS = [{"prompt": f"{a}+{b}", "answer": str(a + b)} for a in range(3) for b in range(3)]


@pytest.fixture(scope="session")
def settings(tmp_path_factory):
    """The keys of a healthy configuration."""
    folder = tmp_path_factory.mktemp("healthy")
    save_micro_model(folder / "model")
    data = folder / "sums.jsonl"
    data.write_text("".join(f"{json.dumps(row)}\n" for row in SUMS))
    return {
        "run_dir": folder / "runs" / "one",
        "model.source": folder / "model",
        "data.source": "jsonl",
        "data.path": data,
        "data.max_prompt_tokens": 8,
        "eval.datasets": f"[{{source: jsonl, path: {data}}}]",
        "sampling.slots": 8,
        "sampling.max_response_tokens": 6,
        "reward.overlong.buffer_tokens": 2,
        "batch.rows_per_microbatch": 8,
        "batch.prompts_per_step": 2,
        "batch.groups_per_update": 1,
    }


@pytest.fixture(scope="session")
def configure(settings):
    """Returns a function that makes the configuration with some keys changed."""

    file = settings["run_dir"].parent.with_name("config.yaml")
    file.write_text("seed: 0\n")

    def make(**changes):
        keys = settings | {key.replace("__", "."): value for key, value in changes.items()}
        return load_config(file, [f"{key}={value}" for key, value in keys.items()])

    return make


@pytest.fixture(scope="session")
def examined(configure):
    """Returns a function that examines the configuration with some keys changed: check -> result."""

    def examine(*, right="", full=False, quick=False, **changes):
        return examination(configure(**changes), full=full, quick=quick, right=right)

    return examine


@pytest.fixture(scope="session")
def healthy(examined, temporary):
    """The results for the unchanged configuration."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(temporary))
        return examined()


@pytest.fixture(scope="session")
def temporary(tmp_path_factory):
    """The folder of temporary files while the healthy configuration is examined."""
    return tmp_path_factory.mktemp("temporary")
