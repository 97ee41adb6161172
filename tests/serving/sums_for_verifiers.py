"""An environment of the package `verifiers` (0.4): sums in two turns. `http_verifiers_test` runs it in a Python environment of its own.

Neither the library nor its tests import this module.
"""

import verifiers.v1 as vf
from openai import AsyncOpenAI


class SumData(vf.TaskData):
    """A sum with its answer."""

    answer: str


class SumTask(vf.Task[SumData]):
    """Rewards responses that contain the answer."""

    @vf.reward(weight=1.0)
    async def right(self, trace: vf.Trace) -> float:
        """Returns 1 if the last reply contains the answer, else 0."""
        return float(self.data.answer in str(trace.last_reply))


class SumsConfig(vf.TasksetConfig):
    """No options."""


class SumsTaskset(vf.Taskset[SumTask, SumsConfig]):
    """Three sums."""

    def load(self) -> list[SumTask]:
        """Returns all tasks."""
        asked = [(1, 2), (3, 4), (20, 22)]
        return [
            SumTask(SumData(idx=at, prompt=f"{a} + {b}", answer=str(a + b)), self.config.task)
            for at, (a, b) in enumerate(asked)
        ]


class TwoTurns(vf.Harness[vf.HarnessConfig]):
    """Asks twice in one conversation."""

    APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        """Calls the model twice with OpenAI's client."""
        messages = [{"role": "user", "content": data.prompt}]
        async with AsyncOpenAI(base_url=endpoint, api_key=secret) as client:
            for _ in range(2):
                answer = await client.chat.completions.create(model=ctx.model, messages=messages)
                content = answer.choices[0].message.content
                messages += [
                    {"role": "assistant", "content": content or ""},
                    {"role": "user", "content": "once more"},
                ]
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


__all__ = ["SumsTaskset", "TwoTurns"]
