"""An environment of verifiers for tests: three guesses of a number, which should be even. Its harness runs in this process."""

import openai
import verifiers.v1 as vf

from dapo_jax.data.builders.guess_number import LOWS, prompt_text


class EvenData(vf.TaskData):
    replies: str


class EvenTask(vf.Task[EvenData, vf.State, vf.TaskConfig]):
    @vf.reward(weight=0.5)
    async def even(self, task, trace) -> float:
        """Twice the share of even guesses."""
        texts = [node.message.content or "" for node in trace.nodes if node.message.role == "assistant"]
        return 2.0 * sum(text[-1:] in tuple("02468") for text in texts) / len(texts)

    @vf.metric
    async def guesses(self, task, trace) -> float:
        return float(trace.num_turns)


class EvenTaskset(vf.Taskset[EvenTask, vf.TasksetConfig]):
    def load(self):
        for low in LOWS:
            for replies in ("><", "<>"):
                yield EvenTask(EvenData(prompt=prompt_text(low), replies=replies), self.config.task)


class EvenHarness(vf.Harness[vf.HarnessConfig]):
    EXECUTES_CODE = NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        messages = [{"role": "user", "content": data.prompt}]
        async with openai.AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0) as client:
            for reply in (*data.replies, None):
                answer = await client.chat.completions.create(model=ctx.model, messages=messages)
                messages.append({"role": "assistant", "content": answer.choices[0].message.content})
                messages.append({"role": "user", "content": reply})
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


__all__ = ["EvenHarness", "EvenTaskset"]
