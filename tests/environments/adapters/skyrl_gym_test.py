"""Classes of SkyRL-Gym's convention."""

import pytest

from dapo_jax.environments import load_environment
from tests.environments.playing import played

ROW = {"prompt": [{"role": "user", "content": "2+2?"}], "answer": "4", "extra_info": {"max_turns": 3}}


class Counting:
    """Counts to `answer`; what it begins with is another conversation than the row's."""

    closed = 0

    def __init__(self, env_config, extras):
        self.goal, self.config, self.turns = int(extras["reward_spec"]["ground_truth"]), env_config, 0

    def init(self, prompt):
        prompt[0]["content"] += " Count."
        return prompt, {}

    def step(self, text):
        self.turns += 1
        done = text == str(self.goal)
        observations = [] if done else [{"role": "user", "content": "on"}]
        metadata = {"heard": 1, "said": "x", "on": not done}
        return {"observations": observations, "reward": 0.5, "done": done, "metadata": metadata}

    def get_metrics(self):
        return {"steps": self.turns}

    def close(self):
        Counting.closed += 1


class Silent(Counting):
    def step(self, text):
        return {"observations": [], "reward": 0.0, "done": False, "metadata": {}}


class Rewriting(Counting):
    def step(self, text):
        return {**super().step(text), "postprocessed_action": text + "!"}


def test_an_own_class_of_the_convention_is_played():
    environment = load_environment(f"skyrl_gym:{__name__}:Counting")
    context, steps, _ = played(environment, ROW, "1", "4")
    assert context.contents == [{"role": "user", "content": "2+2? Count."}]
    assert ROW["prompt"][0]["content"] == "2+2?", "the row stays as it is"
    assert [(step.reward, step.done) for step in steps] == [(0.5, False), (0.5, True)]
    assert steps[0].append == [{"role": "user", "content": "on"}]
    assert steps[0].metrics == {"heard": 1.0, "on": 1.0}
    assert steps[1].metrics == {"heard": 1.0, "on": 0.0, "steps": 2.0}


@pytest.mark.parametrize(
    ("name", "message"), [("Silent", "returned no observation"), ("Rewriting", "postprocessed_action")]
)
def test_an_unsupported_result_is_an_error(name, message):
    with pytest.raises(ValueError, match=message):
        played(load_environment(f"skyrl_gym:{__name__}:{name}"), ROW, "1")
