"""An environment of the package `verifiers` (0.4), which the test of it runs in an environment of Python of its own: sums in two turns.

Nothing here is imported by the library or by its tests.
"""

import verifiers.v1 as vf
from openai import AsyncOpenAI


class SumData(vf.TaskData):
    """A sum with its answer."""

    answer: str


class SumTask(vf.Task[SumData]):
    """Counts how often the answer stands in what the model said."""

    @vf.reward(weight=1.0)
    async def right(self, trace: vf.Trace) -> float:
        """The share of right answers."""
        return float(self.data.answer in str(trace.last_reply))


class SumsConfig(vf.TasksetConfig):
    """No knobs."""


class SumsTaskset(vf.Taskset[SumTask, SumsConfig]):
    """Three sums."""

    def load(self) -> list[SumTask]:
        """All of them."""
        asked = [(1, 2), (3, 4), (20, 22)]
        return [
            SumTask(SumData(idx=at, prompt=f"{a} + {b}", answer=str(a + b)), self.config.task)
            for at, (a, b) in enumerate(asked)
        ]


class TwoTurns(vf.Harness[vf.HarnessConfig]):
    """Asks, and asks again behind the answer."""

    APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        """Two calls of the model, by OpenAI's own client."""
        messages = [{"role": "user", "content": data.prompt}]
        async with AsyncOpenAI(base_url=endpoint, api_key=secret) as client:
            for _ in range(2):
                said = await client.chat.completions.create(model=ctx.model, messages=messages)
                content = said.choices[0].message.content
                messages += [
                    {"role": "assistant", "content": content or ""},
                    {"role": "user", "content": "once more"},
                ]
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


__all__ = ["SumsTaskset", "TwoTurns"]
