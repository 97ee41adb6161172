"""Classes of SkyRL-Gym's convention."""

import re

import pytest

from dapo_jax.dapo.rollouts import Prompt, Standing
from dapo_jax.environments import Episodes, load_environment
from dapo_jax.environments.rendering import Rendering
from dapo_jax.text.stop_strings import StopStrings
from tests.environments.playing import TOKENIZER, drawn, played

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


class Searching(Counting):
    """Looks for the end of a query, which users of SkyRL set as a stop string."""

    def step(self, text):
        query = re.search("<search>(.*)</search>", text)
        return {"observations": [], "reward": float(query is not None), "done": True}


def test_an_action_has_the_stop_string_that_ended_it():
    environment = load_environment(f"skyrl_gym:{__name__}:Searching")
    prompt = Prompt(ordinal=0, tokens=TOKENIZER.encode("q"), text="q", answer="4", row=ROW)
    text_of = StopStrings(TOKENIZER, ["</search>"]).decode
    rendering = Rendering(tokenizer=TOKENIZER)
    with Episodes(environment, rendering, text_of=text_of, seed=1, max_turns=2) as episodes:
        episodes.reopen(prompt, 0, [], Standing())
        assert episodes.step(prompt, 0, drawn("<search>x</search>")).result(30) is None
        assert episodes.standing(prompt, 0).rewards == (1.0,)


@pytest.mark.parametrize(
    ("name", "message"), [("Silent", "returned no observation"), ("Rewriting", "postprocessed_action")]
)
def test_an_unsupported_result_is_an_error(name, message):
    with pytest.raises(ValueError, match=message):
        played(load_environment(f"skyrl_gym:{__name__}:{name}"), ROW, "1")
