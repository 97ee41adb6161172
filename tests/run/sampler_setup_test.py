"""Prompts and verdicts as the configuration has them: conversations through the chat template, texts up to a stop string."""

import logging
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice

import jax
import pytest

from dapo_jax.commands import sample
from dapo_jax.config import ConfigError, EvalConfig, EvaluateConfig, ModelConfig, SamplingConfig
from dapo_jax.dapo.rollouts import Group, Prompt, Response
from dapo_jax.dapo.tokens import Tokens
from dapo_jax.parallel.mesh import make_mesh, make_meshes
from dapo_jax.rollout.response_sampler import TRAINING
from dapo_jax.run.grader_setup import check_graders, grading
from dapo_jax.run.policy import load_policy
from dapo_jax.run.sampler_setup import response_sampler, sampler_spec
from dapo_jax.sampling.decoding import decoding
from dapo_jax.sampling.requests import Request

SYSTEM = "<|im_start|>system\nAdd.<|im_end|>\n"
OPENED = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"


def graded(policy, text, stop, reward=None):
    tokens = policy.tokenizer.encode(text)
    response = Response(record=Tokens(tokens), finish_reason="stop")
    prompt = Prompt(ordinal=0, tokens=tokens[:1], text="1+1", answer="2")
    config = EvaluateConfig(sampling=SamplingConfig(stop=stop))
    graders = grading(config, policy, graders=check_graders(config.reward, reward=reward))
    [group] = graders.groups([(prompt, (response,))])
    return group.rollouts[0]


def test_graders_see_the_text_before_the_stop_string_and_the_tokens_stay_whole(model):
    policy = load_policy(ModelConfig(source=model))
    cut, whole = (graded(policy, "1+1=2:?1", stop) for stop in ([":?"], []))
    assert (cut.text, cut.correct, cut.response_tokens) == ("1+1=2", True, 8)
    assert (whole.text, whole.correct, whole.response_tokens) == ("1+1=2:?1", False, 8)


def test_an_own_reward_function_sees_the_same(model):
    seen = []
    policy = load_policy(ModelConfig(source=model))
    graded(
        policy, "1=2:3", [":"], reward=lambda given: bool(seen.append((given.response, len(given.tokens))))
    )
    assert seen == [("1=2", 5)]


def test_a_stop_token_outside_the_vocabulary_is_an_error_of_the_configuration(model):
    with pytest.raises(ConfigError, match=r"sampling.stop_token_ids: 99999 .*; remove it"):
        sample(model, ["1+1"], stop_token_ids=[99_999], max_response_tokens=4, slots=2)


@pytest.mark.slow
def test_conversations_are_sampled_through_the_chat_template(chat_model):
    how = {"max_response_tokens": 6, "slots": 8}
    asked = ["1+1", [{"role": "user", "content": "2+2"}]]
    found = sample(chat_model, asked, chat=True, system_prompt="Add.", **how)
    assert [group.prompt.text for group in found] == [SYSTEM + OPENED.format(text) for text in ("1+1", "2+2")]
    [plain] = sample(chat_model, ["1+1"], **how)
    assert plain.prompt.text == "1+1"


# Slow: compiles a run. tests/data/prompts_test.py renders conversations, and tests/commands/inference_test.py samples in them.
@pytest.mark.slow
def test_a_conversation_is_trained_on_with_its_template_and_logged_readably(
    chat_model, micro, run_micro, tmp_path
):
    from dapo_jax.trackers.rollout_log import read_rollouts

    rows = [{"prompt": [{"role": "user", "content": f"{n}+1"}], "answer": str(n + 1)} for n in range(3)]
    config = micro(
        tmp_path / "run", steps=1, model__source=chat_model, batch__row_tokens=80, data__max_prompt_tokens=64,
        log__rollouts_every_steps=1,
    )  # fmt: skip
    config = replace(config, data=replace(config.data, system_prompt="Add."))
    result = run_micro(config, prompts=rows)
    logged = read_rollouts(result.run_dir / "rollouts" / "step_000001.jsonl")
    assert {row["prompt"] for row in logged} <= {SYSTEM + OPENED.format(f"{n}+1") for n in range(3)}
    assert all(row["row"]["prompt"][0]["role"] == "user" for row in logged)
    assert (result.run_dir / "model" / "chat_template.jinja").is_file()


@pytest.fixture
def compiles_nothing(caplog):
    """Within, no program may be compiled."""

    @contextmanager
    def checked():
        with jax.log_compiles(), caplog.at_level(logging.WARNING):
            caplog.clear()
            yield
        lines = [record.getMessage() for record in caplog.records]
        assert [line for line in lines if "Compiling jit(" in line and "_program" in line] == []

    return checked


@pytest.fixture
def sampler_of(model):
    """Makes the sampler of a policy on one device, with prompts of up to 8 and responses of up to 16 tokens."""

    def make(slots, *, in_flight=0, **sampling):
        mesh = make_mesh(devices=jax.devices()[:1], fsdp=1)
        policy = load_policy(ModelConfig(source=model), mesh=mesh)
        config = SamplingConfig(slots=slots, max_response_tokens=16, **sampling)
        lengths = {"max_prompt_tokens": 8, "group_size": 2, "page_tokens": 4}
        spec = sampler_spec(config, **lengths, compute_dtype="float32", in_flight=in_flight)
        sampler = response_sampler(policy, make_meshes(mesh), spec, seed=0)
        return policy, sampler, sampler.transfer(policy.params)

    return make


# Slow: compiles all programs of a sampler. tests/sampling/engine_test.py compiles them beforehand, and the test below samples in rounds.
@pytest.mark.slow
def test_compiled_programs_sample_evaluate_and_prefill_again_without_compiling(sampler_of, compiles_nothing):
    """Two rows of 16 tokens at a time; six pages of 4 tokens are one sequence of 24, so responses are preempted and prefilled again."""
    policy, sampler, weights = sampler_of(4, cache_tokens=24)
    asked = EvalConfig(samples_per_prompt=2, temperature=0.5, top_p=0.7)
    sampler.compile({"temperature": 1.0}, {"temperature": 0.5, "top_p": 0.7})
    prompts = [
        Prompt(ordinal=i, tokens=policy.tokenizer.encode("1+1=2+10"[: i + 1]), text="", answer="")
        for i in range(8)
    ]
    left = iter(prompts)
    with compiles_nothing():
        found = sampler.sample(
            weights, lambda n: list(islice(left, n)), decoding=decoding(), samples=2, domain=TRAINING
        )
        assert len(list(found)) == 8
        ungraded = lambda sampled: [Group(prompt=prompt, rollouts=()) for prompt, _ in sampled]  # noqa: E731
        sampler.evaluate(weights, prompts, ungraded, asked, name="a", step=0)


def test_compiled_programs_sample_in_rounds_and_turns_without_compiling(sampler_of, compiles_nothing):
    """Two responses in turns of one slot: a prompt is prefilled, one response pauses and returns, and new weights prefill both again."""
    policy, sampler, weights = sampler_of(1, in_flight=2, prefill_tokens=16)
    sampler.compile({"temperature": 1.0})
    prompt = Prompt(ordinal=0, tokens=policy.tokenizer.encode("1+1=2+1"), text="", answer="")
    requests = [Request(prompt, index, 0) for index in range(2)]
    with compiles_nothing():
        for _ in range(2):
            rounds = sampler.rounds(weights, decoding=decoding())
            for _ in range(2):
                found = rounds.draw(requests, 3)
                assert not any(part.finish_reason for part in found), "another seed is needed"
            requests = [request.rest() for request in requests]
    assert [request.drawn for request in requests] == [12, 12]


def test_each_evaluation_dataset_and_step_has_random_keys_of_its_own(sampler_of):
    """The same prompt under two names and after two steps. 16 tokens at a high temperature do not agree by chance."""
    policy, sampler, weights = sampler_of(4)
    prompt = Prompt(ordinal=0, tokens=policy.tokenizer.encode("1+1="), text="", answer="")
    config = EvalConfig(samples_per_prompt=2, temperature=2.0, top_p=1.0)

    def tokens(name, step):
        found = []

        def kept(sampled):
            found.extend(
                tuple(response.tokens.tolist()) for _, responses in sampled for response in responses
            )
            return []

        sampler.evaluate(weights, [prompt], kept, config, name=name, step=step)
        return found

    first = tokens("a", 0)
    assert len(set(first)) == 2
    assert tokens("a", 0) == first
    assert not set(first) & {*tokens("b", 0), *tokens("a", 1)}
