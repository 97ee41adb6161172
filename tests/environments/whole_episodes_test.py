"""Whole episodes, from the sampler over environments to verdicts: a scripted engine calls the tools of our own environment and of other libraries'."""

import json

import pytest

from dapo_jax.dapo.rollouts import DrawnTurn, Prompt
from dapo_jax.dapo.tokens import Tokens
from dapo_jax.environments import Episodes, ToolEnvironment, load_environment
from dapo_jax.environments.rendering import Rendering
from dapo_jax.sampling.continuous_batching import Sampler
from dapo_jax.sampling.decoding import decoding
from dapo_jax.testing import ScriptedEngine
from dapo_jax.text.huggingface import HuggingFaceTokenizer
from dapo_jax.text.stop_strings import StopStrings
from tests.environments.fidelity_test import decoded, own
from tests.environments.playing import call, verdicts_of
from tests.environments.tools_test import add
from tests.sampling.continuous_batching_test import KEY
from tests.text.folders import byte_level_json, files_of

TOKENIZER, KWARGS = own(False)
ASKED = [{"role": "user", "content": "What is 6 * 7?"}]
ROW = {"prompt": ASKED, "answer": "42", "extra_info": {"max_turns": 3}}
WRONG, RIGHT, BROKEN = call("multiply", a=6, b="7"), call("multiply", a=6, b=7), "<tool_call>{</tool_call>"


def multiply(a: int, b: int) -> int:
    """Multiplies two integers."""
    return a * b


def ends_right(text, row):
    return text.endswith(row["answer"])


class Multiplying:
    """The same, as TRL has it."""

    def reset(self, **row):
        self.answer, self.found = int(row["answer"]), None

    def multiply(self, a: int, b: int) -> int:
        """Multiplies two integers."""
        self.found = a * b
        return self.found

    def get_reward(self):
        return float(self.found == self.answer)


def sampled(environment, scripts, *, max_turns=4, limit=1200):
    """Returns responses whose turns `scripts` gives by index, and their verdicts."""
    text = TOKENIZER.chat_template.render(ASKED)
    prompt = Prompt(ordinal=5, tokens=TOKENIZER.encode(text), text=text, answer="42", row=ROW)

    def script(ordinal, index, turn=0):
        return [*TOKENIZER.encode(scripts[index][turn]).tolist(), TOKENIZER.eos_id]

    engine = ScriptedEngine(script, slots=2, capacity=2000, stop_ids=[TOKENIZER.eos_id])
    rendering = Rendering(tokenizer=TOKENIZER, template_kwargs=KWARGS)
    with Episodes(environment, rendering, text_of=TOKENIZER.decode, seed=1, max_turns=max_turns) as episodes:
        asked = iter([prompt])
        limits = {"samples_per_prompt": len(scripts), "max_response_tokens": limit}
        [(_, responses)] = Sampler(engine, prefill_prompts=1).sample(
            {}, lambda count: list(asked)[:count], key=KEY, decoding=decoding(), environments=episodes, **limits
        )  # fmt: skip
        return responses, verdicts_of(episodes, prompt, len(responses))


def conversation(said, results, tools):
    """The template's own text of the conversation, up to the end of the last answer."""
    told = list(ASKED)
    for text, result in zip(said, [*results, None], strict=True):
        told.append({"role": "assistant", "content": text})
        told += [] if result is None else [{"role": "tool", "content": result}]
    text = TOKENIZER.chat_template.render(told, {"tools": tools, **KWARGS})
    return text.removesuffix("\n<|im_start|>assistant\n")


@pytest.mark.parametrize("kind", ["own", "trl"])
def test_an_episode_of_tools_is_the_conversation_that_the_template_writes(kind):
    tools = ToolEnvironment([multiply], ends_right)
    environment = tools if kind == "own" else load_environment(f"trl:{__name__}:Multiplying")
    scripts = [[WRONG, RIGHT, "It is 42"], [BROKEN, "It is 41"], ["It is 43"], [RIGHT, RIGHT, RIGHT, RIGHT]]
    responses, verdicts = sampled(environment, scripts)
    results = ["error: multiply: b must be integer; got '7'", "42"]
    text = conversation(scripts[0], results, tools._tools.schemas)
    assert decoded(TOKENIZER, responses[0].tokens) == text
    assert responses[0].tokens.tolist() == TOKENIZER.encode(text).tolist()
    assert [len(response.turns) for response in responses] == [3, 2, 1, 4]
    assert [verdict.lost for verdict in verdicts] == [""] * 4
    # The last is cut off before it answers: a grade needs an answer, an instance of TRL's convention has a state.
    assert [verdict.correct for verdict in verdicts] == [True, False, False, kind == "trl"]
    assert [verdict.parts.get("tool_errors", 0.0) for verdict in verdicts] == [1.0, 1.0, 0.0, 0.0]
    assert [verdict.parts["tool_calls"] for verdict in verdicts] == [2.0, 1.0, 0.0, 4.0]


MARKS = ("<tool_call>", "</tool_call>")
TOOL_TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }} {{ m.tool_call_id }}\n{{ m.content }}<|im_end|>{% endfor %}{{ tools }}"


def answer_to_a_call(template, said, stop=()):
    """Plays a turn in which the policy says `said`. Returns the appended text, or None after an answer, and the metrics."""
    described = json.loads(byte_level_json())
    for number, content in enumerate(MARKS, start=320):
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        described["added_tokens"].append({"id": number, "content": content, "special": True, **flags})
    tokenizer = HuggingFaceTokenizer(files_of(json.dumps(described), template=template))
    prompt = Prompt(ordinal=0, tokens=tokenizer.encode("q"), text="q", answer="3", row={})
    tokens = tokenizer.encode(said)
    turn = DrawnTurn(record=Tokens(tokens), finish_reason="stop")
    text_of = StopStrings(tokenizer, stop).decode if stop else tokenizer.decode
    environment = ToolEnvironment([add], lambda text, row: text == row["answer"])
    with Episodes(
        environment, Rendering(tokenizer=tokenizer), text_of=text_of, seed=1, max_turns=2
    ) as episodes:
        episodes.start(prompt, 0).result(5)
        answered = episodes.step(prompt, 0, turn).result(5)
        metrics = episodes.standing(prompt, 0).metrics
    return None if answered is None else tokenizer.decode(answered.tokens), metrics


CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'


@pytest.mark.parametrize("stop", [(), ("END",)])
def test_a_call_between_special_tokens_is_run(stop):
    """Decoding omits special tokens, so the text of the turn is bare JSON, which is an answer."""
    appended, metrics = answer_to_a_call(TOOL_TEMPLATE, CALL + ("END" if stop else "<|im_end|>"), stop)
    assert metrics == {"tool_calls": 1.0, "tool_errors": 0.0}
    # Mistral's templates refuse a result without an id of nine characters.
    assert appended.startswith("tool 000000000\n3")


@pytest.mark.parametrize(("made", "repeated"), [("Ab3dEf9hi", "Ab3dEf9hi"), ("1", "0" * 9)])
def test_a_result_repeats_the_id_that_the_model_wrote_in_its_call(made, repeated):
    """Templates of Mistral write the id next to the result. They refuse other ids than nine letters and digits."""
    text = f'[TOOL_CALLS] [{{"name": "add", "arguments": {{"a": 1, "b": 2}}, "id": "{made}"}}]'
    appended, _ = answer_to_a_call(TOOL_TEMPLATE, f"{text}<|im_end|>", ())
    assert appended.startswith(f"tool {repeated}\n3")


@pytest.mark.parametrize(
    ("before", "calls"), [("", 0.0), ("A sum.</think>", 1.0), ("A sum. " + CALL + "</think>", 1.0)]
)
def test_a_call_in_thoughts_that_the_template_opened_is_not_run(before, calls):
    """The generation prompt ends with `<think>`, so a turn without `</think>` consists of thoughts."""
    template = TOOL_TEMPLATE + "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
    assert answer_to_a_call(template, f"{before}{CALL}<|im_end|>")[1]["tool_calls"] == calls
