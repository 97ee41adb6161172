"""Conversations with the shipped models are rendered as the prompts that they were trained on."""

import json
import re

import pytest

from dapo_jax.config import ModelConfig
from dapo_jax.run.sources import folder_of
from dapo_jax.serving.http_requests import read_chat, read_completions
from dapo_jax.serving.served_requests import ServedLimits
from dapo_jax.text.http import RequestError
from dapo_jax.text.tokenizers import load_tokenizer
from tests.serving.servers import ROOT


def user(text):
    return {"role": "user", "content": text}


def guess(text):
    return {"role": "assistant", "content": text}


def limits_of(name):
    tokenizer = load_tokenizer(folder_of(ModelConfig(source=f"shipped:{name}"), weights=False))
    return ServedLimits(
        model=name, tokenizer=tokenizer, vocabulary=64, max_prompt_tokens=64, max_response_tokens=64, most_responses=1
    )  # fmt: skip


def prompt_of(name, *messages):
    limits = limits_of(name)
    return limits.tokenizer.decode(read_chat(json.dumps({"messages": messages}).encode(), limits).prompt)


@pytest.mark.parametrize(
    ("name", "messages", "prompt"),
    [
        ("quickstart", [user("47+85")], "47+85"),
        ("quickstart", [user("47 + 85 = ?")], "47+85"),
        ("quickstart", [user([{"type": "text", "text": "47+85="}])], "47+85"),
        ("quickstart", [user("12+34"), guess("=46"), user("47+85")], "47+85"),
        ("turns_quickstart", [user("08-70:")], "08-70:"),
        ("turns_quickstart", [user("08-70:"), guess("39?"), user(">"), guess("55"), user("<")], "08-70:39?>55?<"),
    ],
)  # fmt: skip
def test_a_conversation_is_rendered_as_a_prompt_of_training(name, messages, prompt):
    assert prompt_of(name, *messages) == prompt


def test_the_requests_in_the_docs_are_understood():
    chat, scored = re.findall(r"-d '(.*)'", (ROOT / "docs" / "serve.md").read_text())
    assert prompt_of("quickstart", *json.loads(chat)["messages"]) == "47+85"
    [request] = read_completions(scored.encode(), limits_of("quickstart"))
    assert (request.echo, request.logprobs, request.max_tokens) == (True, True, 0)


@pytest.mark.parametrize("name", ["quickstart", "turns_quickstart"])
@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([user("hello")], "character 'h'"),
        ([{"role": "system", "content": "1"}, user("1+1")], "of the role system"),
    ],
)
def test_a_message_that_the_model_cannot_read_is_refused(name, messages, reason):
    with pytest.raises(RequestError) as refused:
        prompt_of(name, *messages)
    assert refused.value.status == 400
    assert reason in str(refused.value)
