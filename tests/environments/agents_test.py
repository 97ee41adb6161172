"""Agents that own their loop: requests become turns, and rewards are returned, posted or graded."""

import asyncio
import gc
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
import tracemalloc
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("aiohttp", reason="needs the extra http")

import aiohttp

from dapo_jax.dapo.advantages import group_advantages
from dapo_jax.dapo.batching import example_weights, training_examples
from dapo_jax.dapo.rollouts import Continuation, Group, Response, Rollout, Verdict
from dapo_jax.dapo.tokens import Tokens
from dapo_jax.environments import load_environment
from dapo_jax.environments.agents.chat import ChatRequest
from dapo_jax.environments.agents.environment import AgentEnvironment
from dapo_jax.environments.agents.episode import reward_of
from dapo_jax.environments.calls import LostError
from dapo_jax.sampling.requests import NOTHING, EpisodeLimits, Request
from dapo_jax.text.http import RequestError
from tests.environments.agent_clients import (
    CHAT,
    Client,
    Policy,
    counting,
    prompt_of,
    started,
    unreliable,
    user,
)
from tests.environments.playing import call, turn_of, verdicts_of
from tests.rewards.grading_pool_test import assert_ends

HERE = "tests/environments/agent_clients.py"
START, ANSWER = [user("start")], {"role": "assistant", "content": "one"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
        },
    }
]


def agents(play, **options):
    """An environment whose agents run a function of this file."""
    environment = AgentEnvironment("agent", f"{HERE}:counting", **options)
    environment.play = play
    return environment


def commands(tmp_path, code, **options):
    """An environment whose agents run a program."""
    (tmp_path / "program.py").write_text(code)
    return AgentEnvironment("command", f"{sys.executable} {tmp_path}/program.py", **options)


def outcome(environment, *texts, reason="stop", grade=None, **how):
    """Plays an episode with these turns, and returns its verdict and the player."""
    with started(environment, grade=grade, **how) as episodes:
        policy = Policy(episodes, prompt_of())
        policy.play(*texts, reason=reason)
        [verdict] = verdicts_of(episodes, policy.prompt)
    return verdict, policy


def test_requests_that_extend_the_conversation_are_turns_of_one_row():
    """Each context begins with all earlier tokens. The text between is the template's."""
    verdict, policy = outcome(agents(counting), "one", "two", "three")
    assert len(policy.befores[0].tokens) == 0, "the first request is the prompt, which the group shares"
    assert not any(before.new_context for before in policy.befores)
    between = "\n<|im_start|>user\nnext 0<|im_end|>\n<|im_start|>assistant\n"
    assert CHAT.spelled(policy.befores[1].tokens) == between
    assert (verdict.score, verdict.correct, verdict.turn_rewards) == (3.0, True, (0.0, 0.0, 3.0))
    assert (verdict.parts["agent_requests"], verdict.parts["agent_contexts"]) == (3, 1)


def test_with_the_templates_history_each_request_is_a_row_of_its_own():
    verdict, policy = outcome(agents(counting, history="template"), "one", "two", "three")
    assert [before.new_context for before in policy.befores] == [False, True, True]
    assert verdict.parts["agent_contexts"] == 3


async def parent_and_child(url, key, task):
    client = Client(url, key)
    answer = await client.chat(START)
    child = await client.chat([user("a part"), user("of it")])
    await client.chat([*START, answer, user(f"the child: {child['content']}")])
    return 1


def test_a_request_that_continues_an_earlier_turn_begins_with_its_exact_tokens():
    """Parent, child, parent: three rows."""
    verdict, policy = outcome(agents(parent_and_child), "one", "two", "three")
    _, child, again = policy.befores
    assert [before.new_context for before in policy.befores] == [False, True, True]
    assert CHAT.spelled(child.tokens).count("<|im_start|>") == 3, "two messages and the generation prompt"
    whole = np.concatenate([policy.prompt.tokens, policy.turns[0]])
    assert again.tokens[: len(whole)].tolist() == whole.tolist()
    between = "\n<|im_start|>user\nthe child: two<|im_end|>\n<|im_start|>assistant\n"
    assert CHAT.spelled(again.tokens[len(whole) :]) == between
    assert verdict.parts["agent_contexts"] == 3


def response_of(policy):
    """The response that the sampler makes of the player's turns."""
    request = Request(policy.prompt, 0, 0)
    limits = EpisodeLimits(max_turns=9, turn_tokens=0, episode_tokens=999, capacity=999)
    for before, turn in zip(policy.befores, policy.turns, strict=True):
        request.take_answer(before, limits)
        request.append(Tokens(turn, logprobs=np.full(len(turn), -0.5, np.float32)))
        request.end_turn("stop")
    request.finish_reason = "stop"
    assert [turn.before.tokens.tolist() for turn in request.drawn_turns] == [
        b.tokens.tolist() for b in policy.befores
    ]
    assert [turn.before.new_context for turn in request.drawn_turns] == [
        b.new_context for b in policy.befores
    ]
    return request.response()


def rollout_of(response, reward, forgotten=()):
    verdict = Verdict(correct=reward > 0, score=reward, forgotten=forgotten)
    return Rollout(response=response, text="", verdict=verdict, reward=reward)


def test_the_rows_of_an_episode_have_its_advantage_and_count_as_one_sequence():
    """Parent, child, parent are three rows. With rewards 1, 0, 0, 1, the advantage is (1 - 0.5) / std, and std of four is sqrt(1/3)."""
    _, policy = outcome(agents(parent_and_child), "one", "two", "three")
    plain = Response(record=Tokens(np.full(5, 7, np.int32)), finish_reason="stop")
    rollouts = (
        rollout_of(response_of(policy), 1.0),
        *(rollout_of(plain, reward) for reward in (0.0, 0.0, 1.0)),
    )
    group = Group(prompt=policy.prompt, rollouts=rollouts)
    advantages = group_advantages(np.array([group.rewards]))
    examples = training_examples([group], advantages.tolist())
    assert [example.advantage for example in examples[:3]] == pytest.approx(
        [0.5 / np.sqrt(1 / 3)] * 3, rel=1e-5
    )
    assert [example.response.ids[example.mask].tolist() for example in examples[:3]] == [
        turn.tolist() for turn in policy.turns
    ]
    sampled = sum(map(len, policy.turns))
    tokens = sampled + 3 * 5
    assert example_weights(examples).tolist() == pytest.approx([1 / tokens] * 6)
    # Each of the four sequences has the weight 1/4, which its sampled tokens share.
    of_sequences = example_weights(examples, aggregation="sequence_mean")
    assert of_sequences.tolist() == pytest.approx([0.25 / sampled] * 3 + [0.25 / 5] * 3)


def test_a_forgotten_turn_is_outside_the_loss():
    _, policy = outcome(agents(parent_and_child), "one", "two", "three")
    group = Group(prompt=policy.prompt, rollouts=(rollout_of(response_of(policy), 1.0, forgotten=(1,)),))
    examples = training_examples([group], [[1.0]])
    assert [bool(example.mask.any()) for example in examples] == [True, False, True]
    trained = len(policy.turns[0]) + len(policy.turns[2])
    assert example_weights(examples).tolist() == pytest.approx([1 / trained] * 3), (
        "a weight applies inside the mask"
    )


# Slow with 200 conversations: the same with other tokens.
@pytest.mark.parametrize("many", [8, pytest.param(200, marks=pytest.mark.slow)])
def test_random_tokens_stay_as_they_were_sampled(many):
    """Conversations of random tokens, which are mostly no valid UTF-8. Some turns are cut off. Each context has all earlier tokens and the template's text."""
    rng, ids = np.random.default_rng(0), np.arange(CHAT.vocab_size, dtype=np.int32)
    ordinary = [token for token in ids if CHAT.decode(ids[token : token + 1])]
    with started(agents(counting)) as episodes:
        for ordinal in range(many):
            policy = Policy(episodes, prompt_of(ordinal))
            reasons = rng.choice(["stop", "length"], 3)
            for reason in reasons:
                policy.play(rng.choice(ordinary, rng.integers(1, 12)), reason=str(reason))
            [verdict] = verdicts_of(episodes, policy.prompt)
            assert verdict.parts["agent_contexts"] == 1, verdict.reason
            for number, (reason, before) in enumerate(zip(reasons, policy.befores[1:], strict=False)):
                end = "" if reason == "stop" else "<|im_end|>"
                between = f"{end}\n<|im_start|>user\nnext {number}<|im_end|>\n<|im_start|>assistant\n"
                assert (CHAT.spelled(before.tokens), before.new_context) == (between, False)
            [example] = training_examples(
                [Group(prompt=policy.prompt, rollouts=(rollout_of(response_of(policy), 1.0),))], [[1.0]]
            )
            assert example.response.ids[example.mask].tolist() == np.concatenate(policy.turns).tolist()


def test_the_limit_of_a_request_is_the_limit_of_its_turn():
    """The lower limit applies, and the next turn has its own."""
    limits = EpisodeLimits(max_turns=9, turn_tokens=6, episode_tokens=999, capacity=999)
    request = Request(prompt_of(), 0, 0)
    for limit, expected in ((2, 2), (7, 6), (0, 6)):
        request.take_answer(Continuation(NOTHING, limit=limit), limits)
        assert request.limit == request.drawn + expected
        request.end_turn("stop")


CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1, "b": [2]}'}}
CALLED = {"role": "assistant", "content": "x", "tool_calls": [CALL]}


def calls(**function):
    return {
        "role": "assistant",
        "content": "x",
        "tool_calls": [{"id": "9", "type": "function", "function": function}],
    }


SAME = [
    (user("a"), user(" a\n")),
    (user("a"), {**user("a"), "name": None}),
    (user("a"), user([{"type": "text", "text": "a"}])),
    (user("ab"), user([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}])),
    (ANSWER, {**ANSWER, "tool_calls": []}),
    (ANSWER, {**ANSWER, "refusal": None, "audio": None, "annotations": []}),
    (ANSWER, {**ANSWER, "reasoning_content": "hm"}),
    (CALLED, calls(name="f", arguments='{"b":[2],"a":1}')),
    (CALLED, calls(name="f", arguments={"a": 1, "b": [2]})),
    ({**CALLED, "content": None}, {**calls(name="f", arguments='{"a": 1, "b": [2]}'), "content": ""}),
    (
        {"role": "tool", "content": "4", "tool_call_id": "1"},
        {"role": "tool", "content": "4", "tool_call_id": "2"},
    ),
    ({"role": "tool", "content": "4"}, {"role": "tool", "content": "4", "name": "f"}),
]
OTHER = [
    (user("a"), user("b")),
    (user("a"), user("A")),
    (user("a b"), user("a  b")),
    (user("a"), {"role": "system", "content": "a"}),
    (user("a"), {"role": "assistant", "content": "a"}),
    (CALLED, {**CALLED, "tool_calls": []}),
    (CALLED, {**CALLED, "content": "y"}),
    (CALLED, {**CALLED, "tool_calls": [CALL, CALL]}),
    (CALLED, calls(name="g", arguments='{"a": 1, "b": [2]}')),
    (CALLED, calls(name="f", arguments='{"a": 1, "b": [3]}')),
    (CALLED, calls(name="f", arguments='{"a": 1}')),
    (CALLED, calls(name="f", arguments='{"a": "1", "b": [2]}')),
    ({"role": "tool", "content": "4"}, {"role": "tool", "content": "5"}),
]


@pytest.mark.parametrize(
    ("one", "other", "same"), [(*pair, True) for pair in SAME] + [(*pair, False) for pair in OTHER]
)
def test_messages_are_the_same_whatever_a_client_adds(one, other, same):
    """Two messages are equal if their roles, stripped texts, and the names and arguments of their calls are equal."""
    keys = [
        ChatRequest(json.dumps({"messages": [message, user("?")]}).encode(), ()).keys[1]
        for message in (one, other)
    ]
    assert (keys[0] == keys[1]) is same


@pytest.mark.parametrize("change", ["missing", "exchanged", "tools"])
def test_a_conversation_that_differs_is_a_new_context(change):
    async def play(url, key, task):
        client = Client(url, key)
        before = [user("start"), {"role": "system", "content": "b"}]
        answer = await client.chat(before)
        other = {"missing": before[:1], "exchanged": before[::-1], "tools": before}[change]
        await client.chat([*other, answer, user("?")], tools=TOOLS if change == "tools" else None)
        return 1

    verdict, _ = outcome(agents(play), "one", "two")
    assert verdict.parts["agent_contexts"] == 2


@pytest.mark.parametrize("shown", ["8", "<think>7? No.</think>8"])
def test_thoughts_are_separate_and_an_answer_without_them_is_the_same_answer(shown):
    async def play(url, key, task):
        client = Client(url, key)
        answer = await client.chat(START)
        assert answer == {"role": "assistant", "content": "8", "reasoning_content": "7? No."}
        await client.chat([*START, {"role": "assistant", "content": shown}, user("?")])
        return 1

    verdict, _ = outcome(agents(play), "<think>7? No.</think>8", "two")
    assert verdict.parts["agent_contexts"] == 1, verdict.reason


def test_an_answer_that_returns_without_its_calls_is_a_new_context():
    """The calls would stay in the context of the next turn, although the agent removed them."""

    async def play(url, key, task):
        client = Client(url, key)
        answer = await client.chat(START, tools=TOOLS)
        assert (answer["content"], len(answer["tool_calls"])) == ("I add.", 1)
        await client.chat([*START, {"role": "assistant", "content": "I add."}, user("go on")], tools=TOOLS)
        return 1

    verdict, _ = outcome(agents(play), f"I add. {call('add', a=1)}", "two")
    assert verdict.parts["agent_contexts"] == 2, verdict.reason


def test_tool_calls_are_parsed_and_their_results_continue_the_row():
    text = f"I add. {call('add', a=1)}"

    async def play(url, key, task):
        client = Client(url, key)
        _, answer = await client.post({"messages": START, "tools": TOOLS})
        [choice] = answer["choices"]
        [made] = choice["message"]["tool_calls"]
        assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", "I add.")
        assert (made["id"], made["function"]["name"], json.loads(made["function"]["arguments"])) == (
            "call00000",
            "add",
            {"a": 1},
        )
        broken = await client.chat(
            [*START, choice["message"], {"role": "tool", "tool_call_id": made["id"], "content": "4"}],
            tools=TOOLS,
        )
        assert broken == {"role": "assistant", "content": "<tool_call>\n{"}
        return 1

    with started(agents(play)) as episodes:
        policy = Policy(episodes, prompt_of())
        assert not policy.play(text, "<tool_call>\n{")
        [verdict] = verdicts_of(episodes, policy.prompt)
    parts = {name: value for name, value in verdict.parts.items() if "call" in name or "contexts" in name}
    assert parts == {"agent_tool_calls": 1, "agent_unparsed_calls": 1, "agent_contexts": 1}, verdict.reason


MADE = '{"name": "add", "arguments": {"a": 1}, "id": "Ab3dEf9hi"}'


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        (call("add", a=1) * 2, ["call00000", "call00001"]),
        (f"[TOOL_CALLS] [{MADE}]", ["Ab3dEf9hi"]),
        (f"[TOOL_CALLS] [{MADE}, {MADE}]", ["call00000", "call00001"]),  # a client needs different ids
    ],
)
def test_results_have_the_ids_and_the_names_of_their_calls(text, ids):
    """Clients return the id without the name, which the templates of gpt-oss and Gemma 4 write. Mistral's models write ids."""

    async def play(url, key, task):
        client = Client(url, key)
        answer = await client.chat(START, tools=TOOLS)
        results = [
            {"role": "tool", "tool_call_id": made["id"], "content": "4"} for made in answer["tool_calls"]
        ]
        await client.chat([*START, answer, *results], tools=TOOLS)
        return 1

    async def played():
        episode = await agents(play).episode({}, 1)
        await episode.start()
        step = await episode.step(turn_of(text))
        await episode.close()
        return step.context.contents

    results = asyncio.run(played())
    assert [(each["tool_call_id"], each["name"]) for each in results] == [(one, "add") for one in ids]


def test_a_stream_has_one_chunk_with_the_plain_answer():
    async def play(url, key, task):
        client, fields = Client(url, key), {"messages": START, "logprobs": True}
        stream = {"stream": True, "stream_options": {"include_usage": True}}
        async with client.open(fields | stream) as response:
            assert response.headers["Content-Type"].startswith("text/event-stream")
            events = (await response.text()).split("\n\n")
        *chunks, done, _ = [event.removeprefix("data: ") for event in events]
        chunk, last = map(json.loads, chunks)
        _, plain = await client.post(fields)
        [choice], [whole] = chunk["choices"], plain["choices"]
        assert (done, choice.pop("delta"), choice) == ("[DONE]", whole.pop("message"), whole)
        assert last["usage"] == plain["usage"]
        return plain["usage"]

    async def measured(*given):
        usage = await play(*given)
        return {"reward": 1, "metrics": usage}

    verdict, policy = outcome(agents(measured), "one", "one")
    tokens = len(policy.prompt.tokens), len(policy.turns[0])
    expected = {"prompt_tokens": tokens[0], "completion_tokens": tokens[1], "total_tokens": sum(tokens)}
    assert expected.items() <= verdict.parts.items(), verdict.reason


def test_openais_client_parses_equal_plain_and_streamed_answers():
    openai = pytest.importorskip("openai")

    async def play(url, key, task):
        async with openai.AsyncOpenAI(base_url=url, api_key=key) as client:
            create, asked = client.chat.completions.create, {"model": "m", "messages": START, "tools": TOOLS}
            plain = await create(**asked)
            stream = await create(**asked, stream=True, stream_options={"include_usage": True})
            first, *_, last = [chunk async for chunk in stream]
        [made], [streamed] = plain.choices[0].message.tool_calls, first.choices[0].delta.tool_calls
        assert (made.function.name, json.loads(made.function.arguments)) == ("add", {"a": 1})
        assert streamed.function.model_dump() == made.function.model_dump()
        assert first.choices[0].delta.content == plain.choices[0].message.content == "I add."
        assert last.usage == plain.usage
        assert plain.usage.prompt_tokens + plain.usage.completion_tokens == plain.usage.total_tokens
        return 1

    text = f"I add. {call('add', a=1)}"
    verdict, _ = outcome(agents(play), text, text)
    assert verdict.score == 1, verdict.reason


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"n": 2}, "n is 2"),
        ({"stop": ["x"]}, "stop is"),
        ({"stop_token_ids": [3]}, "stop_token_ids"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"stream": True, "stream_options": {"include_tokens": True}}, "stream_options .*include_tokens"),
        ({"return_token_ids": True}, "return_token_ids is True"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"chat_template_kwargs": {"a": 1}}, "chat_template_kwargs"),
        ({"tools": [{"type": "function"}]}, r"tools\[0\]"),
        ({"messages": [*START, ANSWER]}, "messages: the last message is the assistant's"),
        (
            {"messages": [user([{"type": "image_url", "image_url": {"url": "x"}}])]},
            "messages: message 0.*image_url",
        ),
        ({"messages": []}, "messages"),
        ({"prompt": "x"}, "prompt"),
    ],
)
def test_a_field_that_cannot_be_served_is_refused_by_name(fields, named):
    with pytest.raises(RequestError, match=named) as caught:
        ChatRequest(json.dumps({"messages": START, **fields}).encode(), ["!"])
    assert caught.value.status == 400


def test_fields_of_the_run_are_replaced_and_noted_once(capsys):
    async def play(url, key, task):
        client, ask = (
            Client(url, key),
            {"temperature": 0.1, "top_p": 0.5, "seed": 3, "presence_penalty": 1, "stop": "!", "user": "u"},
        )
        messages = [*START, await client.chat(START, **ask), user("?")]
        await client.chat(messages, **ask)
        return 1

    verdict, _ = outcome(agents(play, stop=["!"]), "one", "two")
    assert verdict.score == 1, verdict.reason
    noted = re.findall(r"requests set (\w+)", capsys.readouterr().err)
    assert noted == ["presence_penalty", "seed", "temperature", "top_p"]


def test_a_smaller_max_tokens_limits_the_turn():
    async def play(url, key, task):
        await Client(url, key).chat(START, max_tokens=2)
        return 1

    _, policy = outcome(agents(play), "one")
    assert policy.befores[0].limit == 2


# Rewards.


@pytest.mark.parametrize(
    ("value", "reward"),
    [
        (0.5, (0.5, None, {})),
        (True, (1.0, True, {})),
        (False, (0.0, False, {})),
        ({"reward": 2, "correct": False, "metrics": {"m": 1}}, (2.0, False, {"m": 1.0})),
    ],
)
def test_a_reward_is_a_number_a_bool_or_an_object(value, reward):
    found = reward_of(value)
    assert (found.reward, found.correct, found.metrics) == reward


@pytest.mark.parametrize(
    "value",
    [
        "1",
        [1],
        {"score": 1},
        {"reward": 1, "more": 2},
        {"reward": 1, "correct": 3},
        float("nan"),
        {"reward": None},
    ],
)
def test_a_value_that_is_no_reward_is_refused(value):
    with pytest.raises((LostError, ValueError)):
        reward_of(value)


async def posting(url, key, task):
    client = Client(url, key)
    assert (await client.post("no", "/reward"))[0] == 400
    assert (await client.post({"reward": 0.5, "metrics": {"m": 2}}, "/reward"))[0] == 200
    status, error = await client.post(1, "/reward")
    assert (status, error["error"]["code"]) == (409, "reward_set")
    await client.chat(START)


def test_a_reward_is_posted_once():
    verdict, _ = outcome(agents(posting), "one")
    assert (verdict.score, verdict.parts["m"]) == (0.5, 2.0), verdict.reason


def test_an_episode_without_a_reward_is_graded_or_lost():
    graded = []

    def grade(samples):
        graded.extend(sample.response for sample in samples)
        verdicts = Future()
        verdicts.set_result([Verdict(correct=True, extracted="x") for _ in samples])
        return verdicts

    async def play(url, key, task):
        await Client(url, key).chat(START)

    verdict, _ = outcome(agents(play), "one", grade=grade)
    assert (graded, verdict.correct, verdict.score, verdict.extracted) == (["one"], True, None, "x")
    assert verdict.parts["agent_requests"] == 1
    verdict, _ = outcome(agents(play), "one")
    assert verdict.lost == "raised"
    assert "no reward" in verdict.reason


# Ends.


async def silent(url, key, task):
    return 1


async def hanging(url, key, task):
    await Client(url, key).chat(START)
    await asyncio.sleep(60)


async def raising(url, key, task):
    await Client(url, key).chat(START)
    raise KeyError("answr")


@pytest.mark.parametrize(
    ("play", "turns", "lost", "reason"),
    [
        (silent, 0, "raised", "ended without a request"),
        (hanging, 1, "timeout", "within 0.5 s"),
        (raising, 1, "raised", r"KeyError: 'answr' \(agents_test\.py, line \d+\)"),
    ],
)
def test_an_agent_that_fails_loses_its_episode_alone(play, turns, lost, reason):
    verdict, _ = outcome(agents(play), *["one"] * turns, timeout_s=0.5) if turns else (None, None)
    if not turns:
        with started(agents(play)) as episodes:
            assert episodes.start(prompt_of(), 0).result(10) is None
            [verdict] = verdicts_of(episodes, prompt_of())
    assert verdict.lost == lost
    assert re.search(reason, verdict.reason)


async def endless(url, key, task):
    client, messages, rounds, status = Client(url, key), [*START], -1, 200
    while status == 200:
        status, answer = await client.post({"messages": messages})
        rounds += 1
        messages += [answer["choices"][0]["message"], user("?")] if status == 200 else []
    return {"reward": rounds, "metrics": {answer["error"]["code"]: status}}


@pytest.mark.parametrize(("most", "code"), [(3, "max_turns"), (8, "context_length_exceeded")])
def test_an_episode_that_is_cut_off_counts_the_reward_of_its_agent(most, code):
    """The sampler ends the episode after three turns. The next request is refused, and the agent ends."""
    verdict, _ = outcome(agents(endless), "one", "two", "three", max_turns=most)
    assert (verdict.score, verdict.lost, verdict.parts[code]) == (3.0, "", 400.0)
    assert verdict.turn_rewards == (0.0, 0.0, 3.0)


# Retries.


def test_a_marked_retry_has_the_same_answer_and_is_no_turn():
    async def play(url, key, task):
        client = Client(url, key)
        first = await client.post({"messages": START})
        return float(first == await client.post({"messages": START}, **{"x-stainless-retry-count": "1"}))

    verdict, _ = outcome(agents(play), "one")
    assert (verdict.score, verdict.parts["agent_retries"], verdict.parts["agent_requests"]) == (1.0, 1, 1)


async def closing(client, body, seconds=0.2):
    """Sends a request and closes the connection before the answer."""
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(client.post(body), seconds)


def test_a_request_that_is_sent_again_after_its_connection_was_closed_is_one_turn():
    async def play(url, key, task):
        client = Client(url, key)
        await closing(client, {"messages": START})
        _, answer = await client.post({"messages": START})
        return float(answer["choices"][0]["message"]["content"] == "one")

    with started(agents(play)) as episodes:
        policy = Policy(episodes, prompt_of())
        policy.next.result(10)
        time.sleep(0.4)
        assert not policy.play("one")
        [verdict] = verdicts_of(episodes, policy.prompt)
    assert (verdict.score, verdict.parts["agent_retries"], verdict.forgotten) == (1.0, 1, ()), verdict.reason


def test_a_turn_that_nobody_received_stays_out_of_the_loss():
    async def play(url, key, task):
        client = Client(url, key)
        await closing(client, {"messages": START})
        await asyncio.sleep(0.5)
        await client.chat([user("another")])
        return 1

    with started(agents(play)) as episodes:
        policy = Policy(episodes, prompt_of())
        policy.next.result(10)
        time.sleep(0.4)
        assert not policy.play("one", "two")
        [verdict] = verdicts_of(episodes, policy.prompt)
    assert (verdict.forgotten, verdict.parts["agent_undelivered"]) == ((0,), 1), verdict.reason


def test_equal_requests_at_the_same_time_are_two_turns():
    async def play(url, key, task):
        client = Client(url, key)
        answers = await asyncio.gather(client.chat(START), client.chat(START))
        return float({answer["content"] for answer in answers} == {"one", "two"})

    verdict, _ = outcome(agents(play), "one", "two")
    assert (verdict.score, verdict.parts["agent_parallel"], verdict.parts["agent_requests"]) == (1.0, 1, 2), (
        verdict.reason
    )


# Security.


def test_a_key_opens_its_own_episode_alone():
    """Wrong keys, ended episodes, other hosts and other routes are refused. The server listens on a loopback address."""
    found = {}

    async def play(url, key, task):
        client = Client(url, key)
        found["no key"] = (await Client(url, "").post({"messages": START}))[0]
        found["another key"] = (await Client(url, "0" * 32).post({"messages": START}))[0]
        found["host"] = (await client.post({"messages": START}, Host="example.org"))[0]
        status, answer = await client.post({}, "/completions")
        found["route"] = (status, "POST /v1/chat/completions" in answer["error"]["message"])
        found["media"] = (await client.post({"messages": START}, **{"Content-Type": "text/plain"}))[0]
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"{url}/models", headers={"Authorization": f"Bearer {key}"}) as models,
        ):
            found["models"] = [model["id"] for model in (await models.json())["data"]]
        if "ended" in task:
            status, answer = await Client(url, task["ended"]).post({"messages": START})
            found["ended"] = (status, answer["error"]["code"])
        await client.chat(START)
        found["key"], found["url"] = key, url
        return 1

    with started(agents(play)) as episodes:
        first = prompt_of(0)
        Policy(episodes, first).play("one")
        verdicts_of(episodes, first)
        second = prompt_of(1, ended=found["key"])
        Policy(episodes, second).play("one")
        [verdict] = verdicts_of(episodes, second)
        port = int(found["url"].split(":")[2].removesuffix("/v1"))
        listening = [
            line.split()[1] for line in Path("/proc/net/tcp").read_text().splitlines() if " 0A " in line
        ]
        assert [address for address in listening if address.endswith(f":{port:04X}")] == [
            f"0100007F:{port:04X}"
        ]
    assert verdict.score == 1, verdict.reason
    assert found.pop("key") != ""
    assert found.pop("url").startswith("http://127.0.0.1:")
    assert found == {"no key": 401, "another key": 401, "host": 403, "route": (404, True), "media": 415, "models": ["policy"], "ended": (410, "episode_over")}  # fmt: skip
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=1)


async def repeating(url, key, task):
    client = Client(url, key)
    answer = await client.chat([user(f"{task['number']}")])
    return float(answer["content"] == f"answer {task['number']}")


@pytest.mark.parametrize("many", [50, pytest.param(1000, marks=pytest.mark.slow)])
def test_episodes_at_the_same_time_never_receive_the_answer_of_another(many):
    """Slow with 1000 episodes: the same with more connections."""
    with started(agents(repeating), timeout_s=60.0) as episodes:
        policies = [Policy(episodes, prompt_of(number, number=number)) for number in range(many)]
        for number, policy in enumerate(policies):
            assert not policy.play(f"answer {number}")
        verdicts = [verdicts_of(episodes, policy.prompt)[0] for policy in policies]
    assert [verdict.score for verdict in verdicts] == [1.0] * many


def step_of(episodes, ordinals, kinds):
    """Plays one episode of each prompt. Returns the verdicts."""
    policies = [Policy(episodes, prompt_of(ordinal, number=kinds(ordinal))) for ordinal in ordinals]
    for policy in policies:
        policy.answer("one")
    for policy in [policy for policy in policies if policy.next.result(30) is not None]:
        assert not policy.play("two", "three")
    return [verdicts_of(episodes, policy.prompt)[0] for policy in policies]


def resources(episodes):
    """The bytes that are allocated, and the numbers of threads, tasks and open files."""
    for _ in range(3):
        gc.collect()
    tasks = asyncio.all_tasks(episodes._loop.loop)
    counts = threading.active_count(), len(tasks), len(list(Path("/proc/self/fd").iterdir()))
    return tracemalloc.get_traced_memory()[0], counts


def steps_of_200_agents():
    """15 steps, in which each failing agent is lost and each episode is counted once. Steps 6 to 15 add less than 48 bytes for each of their 2,000 episodes: one object
    for each would be more. A closed group once kept 2.7 KiB."""
    kinds, lost = range(20), {0: "raised", 10: "raised", 1: "timeout", 11: "timeout"}
    tracemalloc.start()
    with started(agents(unreliable), timeout_s=8.0) as episodes:
        for step in range(15):
            ordinals = range(200 * step, 200 * (step + 1))
            verdicts = step_of(episodes, ordinals, lambda ordinal: ordinal)
            assert [verdict.lost for verdict in verdicts] == [lost.get(kind, "") for kind in kinds] * 10
            scores = [None if ordinal % 20 in lost else ordinal for ordinal in ordinals]
            assert [verdict.score for verdict in verdicts] == scores
            requests = [verdict.parts["agent_requests"] for verdict in verdicts if not verdict.lost]
            assert requests == [3.0] * 160
            if step == 4:
                before, counts = resources(episodes)
        after, counts_after = resources(episodes)
    assert after - before < 48 * 2000, f"{after - before:,} bytes"
    assert counts_after == counts


# Slow: each step lasts 12 s, because agents hang. 500 such steps last more than an hour. Each kind of agent has a test of its own.
@pytest.mark.slow
def test_of_200_agents_at_once_those_that_fail_are_lost_and_nothing_is_kept():
    """In a process of its own, because the type checker of the tests remembers each function that a call defines."""
    code = "from tests.environments.agents_test import steps_of_200_agents; steps_of_200_agents()"
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)


# Commands.

PROGRAM = """
import json, os, sys, urllib.request

def post(route, body):
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + route, json.dumps(body).encode(), headers)
    return json.load(urllib.request.urlopen(request))

task = json.load(open(os.environ["DAPO_JAX_TASK"]))
answer = post("/chat/completions", {"messages": [{"role": "user", "content": task["prompt"]}]})["choices"][0]["message"]["content"]
"""


def test_a_command_has_its_own_folder_the_listed_variables_and_nothing_else(tmp_path, monkeypatch):
    """Its whole group of processes is killed at the end, and its folder is deleted."""
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    code = (
        PROGRAM
        + """
import subprocess
child = subprocess.Popen(["sleep", "600"])
environment = open("/proc/self/environ").read()
open(answer, "w").write(json.dumps([environment, os.getcwd(), os.listdir(), child.pid, task]))
post("/reward", {"reward": 0.25})
"""
    )
    verdict, _ = outcome(commands(tmp_path, code, variables=["PATH", "MISSING"]), f"{tmp_path}/found")
    assert verdict.score == 0.25, verdict.reason
    environment, folder, files, child, task = json.loads((tmp_path / "found").read_text())
    names = {line.partition("=")[0] for line in environment.strip("\0").split("\0")}
    assert names == {"PATH", "OPENAI_BASE_URL", "OPENAI_API_KEY", "DAPO_JAX_TASK"}
    assert files == []
    assert not Path(folder).exists()
    assert task["prompt"] == "start"
    assert isinstance(task["seed"], int)
    assert_ends(child)


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("raise ValueError('no such task')", "exit status 1: ValueError: no such task"),
        ("os.kill(os.getpid(), 9)", "SIGKILL: no output"),
        ("", "no reward"),
    ],
)
def test_a_command_that_ends_without_a_reward_is_lost_with_its_last_line(code, reason, tmp_path):
    verdict, _ = outcome(commands(tmp_path, PROGRAM + code, variables=["PATH"]), "one")
    assert verdict.lost == "raised"
    assert reason in verdict.reason


def test_a_command_that_fails_after_its_reward_keeps_it(tmp_path):
    verdict, _ = outcome(commands(tmp_path, PROGRAM + "post('/reward', 1)\nsys.exit(3)"), "one")
    assert (verdict.score, verdict.lost) == (1.0, "")


def test_a_command_that_hangs_is_killed(tmp_path):
    code = PROGRAM + "open(answer, 'w').write(str(os.getpid()))\nimport time\ntime.sleep(60)"
    verdict, _ = outcome(commands(tmp_path, code), f"{tmp_path}/pid", timeout_s=2.0)
    assert verdict.lost == "timeout"
    assert_ends(int((tmp_path / "pid").read_text()))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("command:", "no program ''"),
        ("command:no_such_program --x", "no program 'no_such_program'"),
        ("command:python 'x", "No closing quotation"),
        (f"agent:{HERE}:user", "async def user"),
        (f"agent:{HERE}:usr", "has no 'usr'; did you mean 'user'"),
    ],
)
def test_an_agent_that_cannot_start_is_refused(source, message):
    with pytest.raises(ValueError, match=message):
        load_environment(source)
