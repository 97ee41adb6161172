"""The models and the run that both servers serve."""

import pytest

from dapo_jax.commands import sample
from dapo_jax.config import ModelConfig, TrainConfig, to_yaml
from dapo_jax.run.policy import Policy
from dapo_jax.testing import tiny_params
from tests.serving.servers import CONFIG, LIMIT, PROMPTS, TOKENIZER, save


@pytest.fixture(scope="session")
def policies():
    """Two models of one shape. The greedy responses of the first end in all ways, and contain the padding's id."""
    return [Policy(decoder=CONFIG, params=tiny_params(CONFIG, seed=s), tokenizer=TOKENIZER) for s in (8, 3)]


@pytest.fixture(scope="module")
def run_dir(policies, tmp_path_factory):
    """A run with the first model as its checkpoint of step 1."""
    folder = tmp_path_factory.mktemp("run")
    policies[1].save(folder / "model")  # the initial model, which is not served
    config = TrainConfig(run_dir=str(folder), model=ModelConfig(source=str(folder / "model")))
    (folder / "config.yaml").write_text(to_yaml(config))
    save(folder, 1, policies[0])
    return folder


@pytest.fixture(scope="session")
def greedy(policies, tmp_path_factory):
    """[policy][prompt] -> the response of `dapo-jax sample` at temperature 0."""
    found = []
    for at, policy in enumerate(policies):
        folder = tmp_path_factory.mktemp(f"model{at}")
        policy.save(folder)
        groups = sample(str(folder), PROMPTS, temperature=0.0, max_response_tokens=LIMIT)
        found.append({group.prompt.text: group.rollouts[0].response for group in groups})
    return found
