"""Plays the environment `guess` as an agent, with the standard library alone. The run equals a run with `environment.source=guess` bit for bit.

dapo-jax train turns_quickstart environment.source="command:python examples/agents/guess.py" rollout.in_flight=64
"""

import json
import os
import urllib.error
import urllib.request


def post(route, body):
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"}
    url = os.environ["OPENAI_BASE_URL"] + route
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)) as answer:
        return json.load(answer)


with open(os.environ["DAPO_JAX_TASK"]) as file:
    task = json.load(file)
messages, guesses, number = [{"role": "user", "content": task["prompt"]}], 0, int(task["answer"])
reward, malformed = None, 0.0
while reward is None:
    try:
        [choice] = post("/chat/completions", {"messages": messages})["choices"]
    except urllib.error.HTTPError:  # environment.max_turns is reached
        reward = 0.0
        break
    text, guesses = choice["message"]["content"], guesses + 1
    malformed = float(not (len(text) in (1, 2) and text.isdigit()) or choice["finish_reason"] == "length")
    if malformed:
        reward = 0.0
    elif int(text) == number:
        reward = 1.0
    else:
        messages += [choice["message"], {"role": "user", "content": ">" if int(text) < number else "<"}]
metrics = {"guesses": guesses, "malformed": malformed}
post("/reward", {"reward": reward, "correct": reward == 1.0, "metrics": metrics})
