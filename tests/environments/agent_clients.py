"""Agents for tests, and a driver that plays the policy for them with given turns."""

import asyncio
import os
import random
from contextlib import asynccontextmanager

import aiohttp
import numpy as np

from dapo_jax.dapo.rollouts import DrawnTurn, Prompt
from dapo_jax.dapo.tokens import Tokens
from dapo_jax.environments import Episodes
from dapo_jax.environments.rendering import Rendering
from dapo_jax.text.huggingface import HuggingFaceTokenizer
from tests.text.folders import CHATML, files_of

TOOLS = "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
CHAT = HuggingFaceTokenizer(files_of(template=TOOLS + CHATML))


class Client:
    """Sends requests with the key of an episode."""

    def __init__(self, url, key):
        self.url, self.key = url, key

    @asynccontextmanager
    async def open(self, body, route="/chat/completions", **headers):
        headers = {"Authorization": f"Bearer {self.key}", **headers}
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{self.url}{route}", json=body, headers=headers) as response,
        ):
            yield response

    async def post(self, body, route="/chat/completions", **headers):
        """Returns the status and the parsed answer."""
        async with self.open(body, route, **headers) as response:
            return response.status, await response.json()

    async def chat(self, messages, **fields):
        """Returns the message of the answer."""
        status, answer = await self.post({"model": "m", "messages": messages, **fields})
        assert status == 200, answer
        return answer["choices"][0]["message"]


def user(text):
    return {"role": "user", "content": text}


async def counting(url, key, task):
    """Asks three times, and is worth the number of answers."""
    client, messages = Client(url, key), [user("start")]
    for number in range(3):
        messages += [await client.chat(messages), user(f"next {number}")]
    return 3


async def guessing_at_random(url, key, task):
    """Plays the environment `guess` with replies that differ each time."""
    return await guessing(url, key, task, reply=lambda: random.choice("<>"))


async def guessing(url, key, task, reply=None):
    """Plays the environment `guess`."""
    client, messages, guesses = Client(url, key), [user(task["prompt"])], 0
    while True:
        status, answer = await client.post({"messages": messages})
        if status != 200:
            return {"reward": 0.0, "correct": False, "metrics": {"guesses": float(guesses), "malformed": 0.0}}
        [choice], guesses = answer["choices"], guesses + 1
        text = choice["message"]["content"]
        if delay := float(os.environ.get("DELAY", 0)):
            await asyncio.sleep(random.random() * delay)
        malformed = not (len(text) in (1, 2) and text.isdigit()) or choice["finish_reason"] == "length"
        metrics = {"guesses": float(guesses), "malformed": float(malformed)}
        if malformed:
            return {"reward": 0.0, "correct": False, "metrics": metrics}
        if int(text) == int(task["answer"]):
            return {"reward": 1.0, "correct": True, "metrics": metrics}
        answer = reply() if reply else ">" if int(text) < int(task["answer"]) else "<"
        messages += [choice["message"], user(answer)]


def prompt_of(ordinal=0, text="start", **row):
    """A prompt whose tokens are the conversation of one user message."""
    tokens = CHAT.encode_prompt(CHAT.chat_template.render([user(text)]))
    return Prompt(ordinal=ordinal, tokens=tokens, text=text, answer="a", row=row)


def started(environment, **how):
    settings = {"seed": 1, "max_turns": 8, "timeout_s": 10.0, "calls": 2000, "text_of": CHAT.decode, **how}
    return Episodes(environment, Rendering(tokenizer=CHAT), **settings)


class Policy:
    """Plays the turns of one episode, and keeps the context of each."""

    def __init__(self, episodes, prompt, index=0):
        self.episodes, self.prompt, self.index = episodes, prompt, index
        self.contexts, self.befores, self.turns = [], [], []
        self.next = episodes.start(prompt, index)

    def play(self, *texts, reason="stop"):
        """Answers requests with these texts or token ids. Returns whether the episode continues."""
        for text in texts:
            self.answer(text, reason)
        return self.next.result(30) is not None

    def answer(self, text, reason="stop"):
        """Waits for a request and answers it."""
        before = self.next.result(30)
        assert before is not None, self.episodes.standing(self.prompt, self.index).reason
        last = np.concatenate([self.contexts[-1], self.turns[-1]]) if self.turns else self.prompt.tokens
        self.contexts.append(before.tokens if before.new_context else np.concatenate([last, before.tokens]))
        self.befores.append(before)
        sampled = CHAT.encode(text) if isinstance(text, str) else text
        tokens = np.array([*sampled, *([CHAT.eos_id] if reason == "stop" else [])], np.int32)
        self.turns.append(tokens)
        record = Tokens(tokens, logprobs=np.full(len(tokens), -0.5, np.float32))
        turn = DrawnTurn(record=record, finish_reason=reason, before=before)
        self.next = self.episodes.step(self.prompt, self.index, turn)


async def unreliable(url, key, task):
    """One agent in ten raises, one in ten hangs, one in twenty asks twice at once. The others ask three times."""
    client, kind = Client(url, key), task["number"] % 20
    answer = await client.chat([user("start")])
    if kind in (0, 10):
        raise RuntimeError("it failed")
    if kind in (1, 11):
        await asyncio.sleep(600)
    again = [user("start"), answer, user("again")]
    if kind == 2:
        await asyncio.gather(client.chat(again), client.chat(again))
    else:
        await client.chat([*again, await client.chat(again), user("and again")])
    return task["number"]
