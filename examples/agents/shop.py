"""A shopping assistant, written for OpenAI's server: it searches a catalogue, fills a basket within a budget, and explains its choice.

As an agent of a run, it needs no change, because OpenAI's client reads the base URL and the key from the environment:

    dapo-jax train my_config.yaml environment.source="command:python examples/agents/shop.py" 'environment.variables=[PATH, HOME, LANG]'

Only its last lines are for the run: they read the task, and post the reward.
"""

import json
import os
import sys
import urllib.request

import openai

CATALOGUE = {
    "lamp": {"price": 30, "tags": ["light", "desk"]},
    "candle": {"price": 4, "tags": ["light", "gift"]},
    "notebook": {"price": 6, "tags": ["paper", "desk"]},
    "pen": {"price": 2, "tags": ["paper", "desk", "gift"]},
    "mug": {"price": 9, "tags": ["kitchen", "gift"]},
}
SYSTEM = "You are a shopping assistant. Use the tools to search and to fill the basket. Stay within the budget. Then explain your choice in one sentence."


def function(name, description, **properties):
    parameters = {"type": "object", "properties": properties, "required": [*properties]}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}  # fmt: skip


TOOLS = [
    function("search", "Lists the items with a tag.", tag={"type": "string"}),
    function("add", "Adds items to the basket.", item={"type": "string"}, count={"type": "integer"}),
    function("show_basket", "Shows the basket and its total price."),
]


class Shop:
    """The state of one customer."""

    def __init__(self, budget):
        self.budget, self.basket = budget, {}

    @property
    def total(self):
        return sum(CATALOGUE[item]["price"] * count for item, count in self.basket.items())

    def search(self, tag):
        found = {item: entry["price"] for item, entry in CATALOGUE.items() if tag in entry["tags"]}
        return found or f"nothing has the tag {tag}"

    def add(self, item, count):
        if item not in CATALOGUE:
            return f"there is no {item}"
        self.basket[item] = self.basket.get(item, 0) + int(count)
        return self.show_basket()

    def show_basket(self):
        return {"basket": self.basket, "total": self.total, "budget": self.budget}


def call(shop, name, arguments):
    """Runs a tool. The model reads errors, and can try again."""
    try:
        return json.dumps(getattr(shop, name)(**json.loads(arguments)))
    except (AttributeError, TypeError, ValueError) as error:
        return f"error: {error}"


def serve(wish, budget, *, rounds=10):
    """Talks to the model until it stops calling tools. Returns the shop and the explanation."""
    client, shop = openai.OpenAI(), Shop(budget)
    messages = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": f"{wish} The budget is {budget}."},
    ]
    settings = {"model": os.environ.get("MODEL", "gpt-5.5"), "temperature": 0.3, "max_completion_tokens": 400, "tools": TOOLS}  # fmt: skip
    for _ in range(rounds):
        answer = client.chat.completions.create(messages=messages, parallel_tool_calls=False, **settings)
        message = answer.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            break
        for made in message.tool_calls:
            result = call(shop, made.function.name, made.function.arguments)
            messages.append({"role": "tool", "tool_call_id": made.id, "content": result})
    messages.append({"role": "user", "content": "Summarize the basket for the receipt."})
    stream = client.chat.completions.create(messages=messages, stream=True, **settings)
    receipt = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    return shop, receipt


def main():
    wish, budget = sys.argv[1], int(sys.argv[2])
    shop, receipt = serve(wish, budget)
    print(receipt, shop.basket, shop.total)


def train():
    """One episode of a run: the reward is 1 if the basket has an item with the wished tag and is within the budget."""
    with open(os.environ["DAPO_JAX_TASK"]) as file:
        task = json.load(file)
    tag, budget = task["answer"].split()
    try:
        shop, _ = serve(task["prompt"], int(budget))
        fits = any(tag in CATALOGUE[item]["tags"] for item in shop.basket) and shop.total <= shop.budget
    except openai.BadRequestError:  # environment.max_turns is reached, or the context is full
        fits = False
    url, key = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    urllib.request.urlopen(urllib.request.Request(f"{url}/reward", json.dumps(fits).encode(), headers))


if __name__ == "__main__":
    train() if "DAPO_JAX_TASK" in os.environ else main()
