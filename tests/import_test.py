"""`from dapo_jax import dapo_loss` is for people who want the loss: it loads jax and numpy, and no framework."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import dapo_jax

ROOT = Path(dapo_jax.__file__).parent.parent
# etils is not among them: jax loads it itself.
HEAVY = {
    "flax", "optax", "orbax", "grain", "tensorflow", "tensorflow_datasets", "array_record", "sympy", "jetstream", "aiohttp",
    "ray", "rich", "safetensors", "tensorboardX", "tokenizers", "torch", "transformers", "wandb",
}  # fmt: skip


@pytest.fixture(scope="module")
def loaded_modules():
    """The modules of a new interpreter that has loaded every public name except `train`."""
    names = ", ".join(name for name in dapo_jax.__all__ if name != "train")
    return modules_after(f"from dapo_jax import {names}")


def modules_after(code):
    code = f"import sys; {code}; print(*sorted(sys.modules))"
    command = [sys.executable, "-c", code]
    return set(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split())


def test_the_package_alone_and_the_rewards_load_no_jax():
    """Each grading worker imports them."""
    assert "jax" not in modules_after("import dapo_jax")
    loaded = modules_after("import dapo_jax.rewards")
    assert "dapo_jax.rewards.math_grader" in loaded
    assert not {name.split(".")[0] for name in loaded} & {"jax", "sympy", *HEAVY}


def test_importing_the_public_names_stays_light(loaded_modules):
    assert "jax" in loaded_modules
    heavy = {name for name in loaded_modules if name.split(".")[0] in HEAVY}
    assert not heavy, f"they loaded {sorted(heavy)[:5]}"


def test_agents_are_imported_for_their_sources_alone():
    load = "from dapo_jax.environments import load_environment; load_environment"
    of_agents = {"aiohttp", "dapo_jax.environments.agents"}
    assert not of_agents & modules_after(f"{load}('guess')")
    assert of_agents <= modules_after(f"{load}('command:true')")


def test_every_public_name_is_there():
    light = set(dapo_jax.__all__) - {"train"}
    assert all(callable(getattr(dapo_jax, name)) for name in light)
    assert {"dapo_loss", "token_weights", "kl_penalty", "group_advantages", "overlong_penalty"} <= light
    assert {"token_logprobs", "chunked_logprobs", "Mean", "Max", "add_metrics", "to_scalars"} <= light
    assert set(dapo_jax.__all__) <= set(dir(dapo_jax))


def test_a_name_that_does_not_exist_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'dapo_jax' has no attribute 'dpo_loss'"):
        _ = dapo_jax.dpo_loss


def test_the_version_equals_the_project_file():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert dapo_jax.__version__ == project["version"]
