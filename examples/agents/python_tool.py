"""Solves a task with Python programs, in a process of its own. The programs run in a sandbox, and `reward.grader` grades the last answer.

dapo-jax train my_config.yaml environment.source="command:python examples/agents/python_tool.py" reward.grader=math
"""

import asyncio
import json
import os

from openai import OpenAI

from dapo_jax.environments.python_tool import python_tool

ROUNDS = 8
CODE = {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]}
TOOL = {"name": "python", "description": "Runs a Python program and returns its output.", "parameters": CODE}


async def main():
    with open(os.environ["DAPO_JAX_TASK"]) as file:
        task = json.load(file)
    client, python = OpenAI(), python_tool()
    messages = [{"role": "user", "content": task["prompt"]}]
    for _ in range(ROUNDS):
        answer = client.chat.completions.create(
            model="policy", messages=messages, tools=[{"type": "function", "function": TOOL}]
        )
        message = answer.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            return
        for call in message.tool_calls:
            code = json.loads(call.function.arguments).get("code", "")
            result = await python(str(code))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


asyncio.run(main())
