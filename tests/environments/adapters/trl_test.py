"""Classes written for TRL's `environment_factory`."""

import asyncio

import pytest

from dapo_jax.environments import load_environment
from tests.environments.playing import call, played, playing

ROW = {"prompt": [{"role": "user", "content": "Make 12."}], "answer": "12", "level": 2}


class Counter:
    """A counter that tools change."""

    def reset(self, answer, **row):
        self.value, self.goal, self.row = 0, int(answer), row
        return f" It is {self.value}."

    def add(self, amount: int) -> int:
        """
        Adds to the counter.

        Args:
            amount: how much
        """
        if amount < 0:
            raise ValueError("only upwards")
        self.value += amount
        return self.value

    async def double(self) -> str:
        """Doubles the counter."""
        self.value *= 2
        return f"now {self.value}"

    def get_reward(self):
        return float(self.value == self.goal)

    def _hidden(self):
        raise AssertionError

    @property
    def loud(self):
        raise AssertionError("a property is no tool")


class Bare:
    def reset(self, **row):
        return None


class Resetless:
    def get_reward(self):
        return 1.0


class Picture(Counter):
    def reset(self, **row):
        return [{"type": "image"}]


def far(completions, environments, level, prompts, completion_ids, log_metric, log_extra, **rest):
    log_metric("level", level[0])
    log_extra("goal", [environment.goal for environment in environments])
    far.rest, far.seen = rest, completions
    assert len(prompts) == len(completion_ids) == len(environments)
    return [float(instance.value) - level[0] if instance.value else None for instance in environments]


async def far_async(environments):
    return [float(environment.value) for environment in environments]


def rewards(environment, *episodes):
    async def all_of():
        played = [await playing(environment, ROW, *texts) for texts in episodes]
        return await environment.group_rewards([episode for _, _, episode in played])

    return asyncio.run(all_of())


def test_methods_are_tools_reset_is_shown_and_the_instance_gives_the_reward():
    environment = load_environment(f"trl:{__name__}:Counter")
    texts = [call("add", amount=6) + call("double"), call("add", amount=-1), "It is 12."]
    context, steps, episode = played(environment, ROW, *texts)
    assert context.contents == [{"role": "user", "content": "Make 12. It is 0."}]
    assert sorted(tool["function"]["name"] for tool in context.tools) == ["add", "double"]
    assert [message["content"] for message in steps[0].append] == ["6", "now 12"]
    assert steps[1].append[0]["content"] == "error: add: ValueError: only upwards"
    assert (steps[2].done, steps[2].correct) == (True, None), "the sum decides whether it is right"
    assert steps[2].metrics == {"tool_calls": 3.0, "tool_errors": 1.0}
    assert episode.instance.row == {"prompt": ROW["prompt"], "level": 2}
    cut_off = [call("add", amount=12)]
    assert rewards(environment, texts, ["no"], cut_off) == [1.0, 0.0, 1.0]


@pytest.mark.parametrize(("function", "first"), [("far", 1.0 + 10.0), ("far_async", 1.0 + 12.0)])
def test_a_reward_function_sees_the_instances_of_the_group(function, first):
    environment = load_environment(f"trl:{__name__}:Counter+{function}")
    assert rewards(environment, [call("add", amount=12), "12"], ["no"]) == [first, 0.0]


def test_a_reward_function_receives_the_conversation():
    rewards(load_environment(f"trl:{__name__}:Counter+far"), [call("add", amount=12), "12"])
    [conversation] = far.seen
    assert [message["role"] for message in conversation] == ["assistant", "tool", "assistant"]
    assert conversation[0]["tool_calls"][0]["function"] == {"name": "add", "arguments": {"amount": 12}}
    assert far.rest == {"answer": ["12"]}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Bare", r"get_reward\(\)"),
        ("Resetless", r"there is no method reset\(\*\*row\)"),
        ("Count", "did you mean 'Counter'"),
        ("Counter+fa", "did you mean 'far'"),
        ("Picture", "reset returned"),
    ],
)
def test_a_class_that_cannot_be_used_is_named(name, message):
    with pytest.raises(ValueError, match=message):
        played(load_environment(f"trl:{__name__}:{name}"), ROW)
