"""The HTTP server in this process, compared with the library's own sampler and the trainer's log-probabilities."""

import asyncio
import functools
import json
import os
import resource
import socket
import struct
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from threading import Event, Thread

import jax
import numpy as np
import pytest

pytest.importorskip("aiohttp", reason="needs the extra http")
from dapo_jax.dapo.batching import Example
from dapo_jax.dapo.rollouts import Prompt
from dapo_jax.dapo.tokens import Tokens
from dapo_jax.models.decoder import graph_of
from dapo_jax.models.tensors import shapes_of
from dapo_jax.parallel.mesh import make_mesh
from dapo_jax.parallel.weights import WeightTransfer
from dapo_jax.rewards import Sample
from dapo_jax.rewards.judge import Judge
from dapo_jax.sampling.continuous_batching import Sampler
from dapo_jax.sampling.decoding import decoding
from dapo_jax.sampling.engine import DecoderEngine
from dapo_jax.sampling.engine_spec import EngineSpec
from dapo_jax.serving import http_connections
from dapo_jax.serving.http_server import HttpServer
from dapo_jax.serving.request_loop import RequestLoop
from dapo_jax.serving.served_requests import ServedLimits
from dapo_jax.testing import tiny_decoder_config, tiny_params
from dapo_jax.text.conversations import conversation_ids
from dapo_jax.text.http import is_loopback
from dapo_jax.text.huggingface import HuggingFaceTokenizer
from dapo_jax.text.stop_strings import StopStrings
from dapo_jax.training.optimizer import make_optimizer
from dapo_jax.training.row_packing import pack
from dapo_jax.training.state import init_state
from dapo_jax.training.update import UpdateOptions, Updater
from tests.serving.servers import ask, events, flooded, left_alone, until
from tests.text.folders import files_of

TOKENIZER = HuggingFaceTokenizer(files_of(generation={"eos_token_id": [2, *range(200, 216)]}))
"""One token in twenty ends a response, so that responses of a random model end by stop and by length."""
CONFIG = tiny_decoder_config(vocab_size=TOKENIZER.vocab_size + 4, layers=1, max_positions=128)
LIMIT, LONGEST, SLOTS, MOST = 32, 64, 8, 260
GENERATE, CHAT, COMPLETE = "/inference/v1/generate", "/v1/chat/completions", "/v1/completions"
PROMPTS = [np.random.default_rng(n).integers(4, 200, 1 + 5 * n % 23).tolist() for n in range(8)]
PARAMS = [tiny_params(CONFIG, seed=seed) for seed in (8, 3)]
MESH = make_mesh(devices=jax.devices()[:1])
ASKED = {"role": "user", "content": "12 + 34"}
LIMITS = ServedLimits(
    model="tiny", tokenizer=TOKENIZER, vocabulary=CONFIG.vocab_size, max_prompt_tokens=LONGEST, max_response_tokens=LIMIT, most_responses=MOST,
    top_logprobs=3,
)  # fmt: skip


class WatchedEngine(DecoderEngine):
    """The engine, with a hook before each call."""

    calls = 0
    before = staticmethod(lambda: None)

    def generate(self, *arguments):
        type(self).calls += 1
        type(self).before()
        return super().generate(*arguments)


@contextmanager
def before_calls(hook):
    """Calls `hook` before each call of the engine inside the block."""
    WatchedEngine.before = staticmethod(hook)
    try:
        yield
    finally:
        WatchedEngine.before = staticmethod(lambda: None)


@pytest.fixture(scope="module")
def transfer():
    return WeightTransfer(shapes_of(CONFIG), MESH, dtype="float32")


@pytest.fixture(scope="module")
def engine():
    capacity, heads = LONGEST + LIMIT, LIMITS.top_logprobs
    spec = EngineSpec(
        slots=SLOTS, capacity=capacity, steps_per_call=4, stop_ids=TOKENIZER.stop_ids, heads=heads
    )
    return WatchedEngine(CONFIG, MESH, spec)


@pytest.fixture(scope="module")
def loop(engine, transfer):
    with RequestLoop(
        engine, transfer(PARAMS[0]), key=jax.random.key(1), version=5, most_responses=MOST
    ) as loop:
        yield loop
        assert loop.failure is None


@contextmanager
def serving(loop, *, api_key=""):
    logged = []
    with HttpServer(loop, LIMITS, host="127.0.0.1", port=0, api_key=api_key, say=logged.append) as server:
        yield server
    assert not logged


@pytest.fixture(scope="module")
def address(loop):
    with serving(loop) as server:
        yield server.address


def generate(address, prompt, **params):
    """The choices of one request, which must be answered."""
    answered = ask(address, GENERATE, {"token_ids": prompt, "sampling_params": {"logprobs": 1, **params}})
    assert answered.status == 200, answered.content
    return answered.json["choices"]


def tokens(choices):
    return [choice["token_ids"] for choice in choices]


def logprobs(choice):
    return np.array([entry["logprob"] for entry in choice["logprobs"]["content"]], np.float32)


@functools.cache
def updater_at(temperature):
    options = UpdateOptions(temperature=temperature)
    return Updater(graph_of(CONFIG), shapes_of(CONFIG), make_optimizer(), MESH, options=options)


def trained(examples, *, params=0, temperature=1.0):
    """The log-probabilities to which the trainer takes its ratios."""
    updater = updater_at(temperature)
    state, found = init_state(PARAMS[params], make_optimizer(), MESH), []
    for prompt, response in examples:
        row = Example(prompt=Tokens(prompt), response=Tokens(response))
        packed = pack([row], np.ones(1), row_tokens=LONGEST + LIMIT, rows_per_microbatch=1)
        [second] = updater.prepare(state, [packed, packed])[1]  # it scores the second minibatch of a step
        batch = jax.device_get(second.microbatches)
        found.append(batch.old_logprobs[batch.mask])
    return found


@pytest.mark.parametrize(
    "options", [{"temperature": 1.0}, {"temperature": 0.7}, {"temperature": 1.0, "top_p": 0.6, "top_k": 9}]
)
def test_logprobs_equal_the_trainers(options, address):
    """To 2e-5 for each token and the end token, without regard to top-p and top-k."""
    found = [(prompt, choice) for prompt in PROMPTS for choice in generate(address, prompt, n=2, **options)]
    examples = [(prompt, choice["token_ids"]) for prompt, choice in found]
    expected = trained(examples, temperature=options["temperature"])
    assert {choice["finish_reason"] for _, choice in found} == {"stop", "length"}
    for (_, choice), wanted in zip(found, expected, strict=True):
        ids = choice["token_ids"]
        assert [entry["token"] for entry in choice["logprobs"]["content"]] == [f"token_id:{t}" for t in ids]
        np.testing.assert_allclose(logprobs(choice), wanted, rtol=0, atol=2e-5)
        assert (ids[-1] in TOKENIZER.stop_ids) == (choice["finish_reason"] == "stop")
        assert choice["finish_reason"] == "stop" or len(ids) == LIMIT


def test_greedy_tokens_equal_the_samplers(address, engine, transfer):
    left = [
        Prompt(ordinal=i, text="", tokens=np.array(p, np.int32), answer="") for i, p in enumerate(PROMPTS)
    ]
    sampled = Sampler(engine).sample(
        transfer(PARAMS[0]), lambda count: [left.pop() for _ in left[:count]], key=jax.random.key(0),
        decoding=decoding(temperature=0.0), samples_per_prompt=1, max_response_tokens=LIMIT,
    )  # fmt: skip
    expected = {prompt.ordinal: response.tokens.tolist() for prompt, (response,) in sampled}
    assert {i: tokens(generate(address, p, temperature=0))[0] for i, p in enumerate(PROMPTS)} == expected


def test_an_answer_has_usage_spans_and_the_weights_version(address):
    """The request has fields that version 0.1.12 of the renderers' client sends."""
    ignored = {"skip_special_tokens": False, "routed_experts_prompt_start": 3}
    body = {"token_ids": PROMPTS[3], "model": "tiny", "request_id": "mine", "cache_salt": "5", "sampling_params": {"max_tokens": 5, "n": 2, **ignored}}  # fmt: skip
    answer = ask(address, GENERATE, body).json
    prompt, sampled = len(PROMPTS[3]), sum(map(len, tokens(answer["choices"])))
    usage = {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}
    assert (answer["request_id"], answer["usage"]) == ("mine", usage)
    assert [choice["logprobs"] for choice in answer["choices"]] == [None, None]
    assert [choice["spans"] for choice in answer["choices"]] == [[{"first": 0, "version": 5}]] * 2
    assert answer["weights_version"] == 5
    [card] = ask(address, "/v1/models").json["data"]
    assert (card["id"], card["max_prompt_tokens"], card["max_response_tokens"]) == ("tiny", LONGEST, LIMIT)


def test_a_seed_repeats_among_other_requests(address):
    def asked(seed, n=3):
        return tokens(generate(address, PROMPTS[2], seed=seed, n=n, temperature=1.0))

    alone = asked(7)
    with ThreadPoolExecutor(60) as pool:
        others = [
            pool.submit(generate, address, PROMPTS[i % 8], temperature=0.3 * (i % 4), top_p=0.5)
            for i in range(60)
        ]
        among = [pool.submit(asked, 7) for _ in range(6)]
        assert all(answer.result() == alone for answer in among)
        assert all(answer.result() for answer in others)
    assert asked(7, n=1) == alone[:1]
    assert len({str(ids) for ids in (*alone, *asked(8), *asked((1 << 40) + 7))}) == 9
    assert len({str(tokens(generate(address, PROMPTS[2]))) for _ in range(4)}) == 4  # without a seed


def test_stop_tokens_and_stop_strings_end_a_response(address):
    sampled = ((seed, generate(address, PROMPTS[4], seed=seed)[0]["token_ids"]) for seed in range(100))
    seed, ids = next((seed, ids) for seed, ids in sampled if len(ids) > 8)
    [cut] = generate(address, PROMPTS[4], seed=seed, stop_token_ids=[ids[5], ids[3]])
    first = 1 + min(ids.index(ids[5]), ids.index(ids[3]))
    assert (cut["token_ids"], cut["finish_reason"]) == (ids[:first], "stop")
    [cut] = completions(address, PROMPTS[4], seed=seed, stop_token_ids=[ids[5], ids[3]])["choices"]
    assert cut["text"] == TOKENIZER.decode(np.array(ids[: first - 1], np.int32)), "as vLLM returns it"
    text = TOKENIZER.decode(np.array(ids[:6], np.int32))
    string = next(piece for at in range(1, len(text) - 1) if "\ufffd" not in (piece := text[at : at + 2]))
    place = StopStrings(TOKENIZER, [string]).find(np.array(ids, np.int32), 0)
    [cut] = generate(address, PROMPTS[4], seed=seed, stop=[string, "never this"])
    assert (cut["token_ids"], cut["finish_reason"]) == (ids[:place], "stop")


def completions(address, prompt, **body):
    answered = ask(address, COMPLETE, {"prompt": prompt, **body})
    assert answered.status == 200, answered.content
    choices = answered.json["choices"]
    assert [choice["index"] for choice in choices] == list(range(len(choices)))
    return answered.json


SCORED = {"echo": True, "logprobs": 1, "temperature": 0, "max_tokens": 1}


def test_an_echoed_prompt_has_the_trainers_logprobs(address):
    """As lm-eval 0.4.13 reads them: the last entry is the sampled token, and a token is greedy if it has the highest entry in `top_logprobs`."""
    examples = [(prompt, generate(address, prompt, temperature=0)[0]["token_ids"]) for prompt in PROMPTS]
    answer = completions(
        address, [prompt + greedy for prompt, greedy in examples], model="tiny", seed=1234, **SCORED
    )
    for (prompt, greedy), wanted, choice in zip(examples, trained(examples), answer["choices"], strict=True):
        table = choice["logprobs"]
        assert table["token_logprobs"][0] is table["top_logprobs"][0] is None
        assert {len(column) for column in table.values()} == {len(prompt) + len(greedy) + 1}
        np.testing.assert_allclose(table["token_logprobs"][len(prompt) : -1], wanted, rtol=0, atol=2e-5)
        pairs = list(zip(table["token_logprobs"], table["top_logprobs"], strict=True))
        assert all(found == max(top.values()) for found, top in pairs[len(prompt) :])
        assert not all(found == max(top.values()) for found, top in pairs[1 : len(prompt)]) or len(prompt) < 3
        ids = np.array(prompt + greedy, np.int32)
        assert choice["text"].startswith(TOKENIZER.decode(ids[:-8]))
    count = sum(len(prompt) + len(greedy) for prompt, greedy in examples)
    assert answer["usage"] == {"prompt_tokens": count, "completion_tokens": 8, "total_tokens": count + 8}
    assert (answer["object"], answer["weights_version"]) == ("text_completion", 5)


def test_a_prompt_may_be_a_text_or_ids_or_a_list_of_either(address):
    text = "12 + 34"
    ids = TOKENIZER.encode_prompt(text).tolist()
    found = [
        completions(address, prompt, **SCORED)["choices"] for prompt in (text, ids, [text, text], [ids, ids])
    ]
    alone = found[0][0]
    assert [len(choices) for choices in found] == [1, 1, 2, 2]
    for choice in (choice for choices in found for choice in choices):
        assert {**choice, "index": 0, "logprobs": None} == {**alone, "logprobs": None}
        scores, expected = (each["logprobs"]["token_logprobs"][1:] for each in (choice, alone))
        np.testing.assert_allclose(scores, expected, atol=1e-5)
    table, prompt = alone["logprobs"], completions(address, text, echo=True, max_tokens=0)["choices"][0]
    assert alone["text"].startswith(prompt["text"])
    assert prompt["text"].endswith(text)
    assert (prompt["logprobs"], prompt["finish_reason"]) == (None, "length")
    assert completions(address, text, **SCORED, stop=[text[:2]])["choices"][0] == alone
    starts, ends = table["text_offset"], [*table["text_offset"][1:], len(alone["text"])]
    pieces = [alone["text"][start:end] for start, end in zip(starts, ends, strict=True)]
    assert all(
        name == piece for name, piece in zip(table["tokens"], pieces, strict=True) if "\ufffd" not in name
    )


def test_completions_are_the_tokens_of_generate(address):
    """Choices are ordered by prompt, then by response."""
    options = {"n": 2, "seed": 3, "temperature": 0.9, "stop": ["e"], "max_tokens": 20}
    answer = completions(address, PROMPTS[:2], logprobs=0, **options)
    expected = [choice for prompt in PROMPTS[:2] for choice in generate(address, prompt, **options)]
    for choice, same in zip(answer["choices"], expected, strict=True):
        ids, table = np.array(same["token_ids"], np.int32), choice["logprobs"]
        assert choice["text"] == StopStrings(TOKENIZER, ["e"]).decode(ids)
        assert (choice["finish_reason"], choice["spans"]) == (same["finish_reason"], same["spans"])
        np.testing.assert_allclose(table["token_logprobs"], logprobs(same), rtol=0, atol=1e-5)
        assert table["top_logprobs"] is None
    assert completions(address, "1", max_tokens=2)["choices"][0]["logprobs"] is None


def test_scores_use_new_weights_and_wait_in_the_queue(address, loop, transfer):
    old = completions(address, PROMPTS[5], **SCORED)
    with pytest.raises(ValueError, match="no such weights"):  # weights that cannot be made change nothing
        loop.take(lambda: (_ for _ in ()).throw(ValueError("no such weights")), 9)
    assert completions(address, PROMPTS[5], **SCORED)["choices"] == old["choices"]
    loop.take(lambda: transfer(PARAMS[1]), 6)
    try:
        new = completions(address, PROMPTS[5], **SCORED)
    finally:
        loop.take(lambda: transfer(PARAMS[0]), 5)
    assert (old["weights_version"], new["weights_version"]) == (5, 6)
    assert old["choices"][0]["logprobs"]["token_logprobs"] != new["choices"][0]["logprobs"]["token_logprobs"]
    with before_calls(lambda: time.sleep(0.05)):
        running = left_alone(address, GENERATE, params(n=MOST - 3, seed=1))
        until(lambda: loop.under_way == MOST - 3, "the queue")
        answered = ask(address, COMPLETE, {"prompt": [[5]] * 4, **SCORED})
        assert (answered.status, answered.json["error"]["code"]) == (503, "queue_full")
        until(lambda: loop.under_way <= MOST - 3, "the cancelled prompts")
        assert len(completions(address, [[5]] * 3, **SCORED)["choices"]) == 3
        running.close()
        until(lambda: loop.under_way == 0, "the slots")


def chat(address, **body):
    answered = ask(address, CHAT, {"messages": [ASKED], **body})
    assert answered.status == 200, answered.content
    return answered.json


def test_a_conversation_is_rendered_as_in_training(address):
    system = {"role": "system", "content": "be <|im_end|> brief"}
    parts = [{"type": "text", "text": "1"}, {"type": "text", "text": "+1"}]
    asked = {
        "messages": [system, {"role": "user", "content": parts}],
        "return_token_ids": True,
        "logprobs": True,
    }
    answer = chat(address, **asked, seed=4, model="tiny")
    prompt = conversation_ids([system, {"role": "user", "content": "1+1"}], TOKENIZER).tolist()
    assert answer["prompt_token_ids"] == prompt
    assert prompt.count(2) == 2
    [choice] = answer["choices"]
    [same] = generate(address, prompt, seed=4)
    assert choice["token_ids"] == same["token_ids"]
    np.testing.assert_allclose(logprobs(choice), logprobs(same), rtol=0, atol=1e-5)
    text = TOKENIZER.decode(np.array(choice["token_ids"], np.int32))
    assert choice["message"] == {"role": "assistant", "content": text}
    assert "token_ids" not in chat(address)["choices"][0]


def test_a_judge_can_be_asked_here(address, tmp_path):
    """The random model's reply has no score, so the verdict's reason quotes it."""
    settings = {"url": f"http://{address}/v1", "model": "tiny", "prompt": "{response}", "on_failure": "lost"}
    (tmp_path / "judge.yaml").write_text(json.dumps(settings | {"options": {"max_tokens": 9}}))
    judge = Judge(str(tmp_path / "judge.yaml"))
    prompt = Prompt(ordinal=0, tokens=np.array([1], np.int32), text="", answer="")
    graded = Sample(prompt=prompt, response="12 + 34", tokens=prompt.tokens, finish_reason="stop")
    verdict = asyncio.run(judge(graded))
    same = chat(address, temperature=0, max_tokens=9)
    assert f"replied {same['choices'][0]['message']['content']!r:.200}, but judge.score" in verdict.reason
    assert judge.counts == {"calls": 1, "cache_hits": 0, "tokens": same["usage"]["total_tokens"]}


def test_a_request_may_ask_for_the_most_likely_tokens(address):
    """A greedy token is the first of them, and each entry has the form of a sampled token's."""
    how = {"logprobs": True, "return_tokens_as_token_ids": True, "max_tokens": 6}
    [greedy] = chat(address, temperature=0, top_logprobs=1, **how)["choices"]
    for entry in greedy["logprobs"]["content"]:
        [top] = entry.pop("top_logprobs")
        assert top == entry
    [three] = chat(address, seed=3, top_logprobs=3, **how)["choices"]
    [two] = chat(address, seed=3, top_logprobs=2, **how)["choices"]
    for entry, same in zip(three["logprobs"]["content"], two["logprobs"]["content"], strict=True):
        tops = entry["top_logprobs"]
        assert same["top_logprobs"] == tops[:2]
        assert len({top["token"] for top in tops}) == 3
        assert [top["logprob"] for top in tops] == sorted((top["logprob"] for top in tops), reverse=True)
        assert entry["logprob"] <= tops[0]["logprob"]
    assert all(
        not entry["top_logprobs"] for entry in chat(address, **how)["choices"][0]["logprobs"]["content"]
    )
    for wrong, remedy in (
        ({"top_logprobs": 4}, "--top-logprobs"),
        ({"top_logprobs": 1, "logprobs": False}, "logprobs to true"),
    ):
        answered = ask(address, CHAT, {"messages": [ASKED], "logprobs": True, **wrong})
        assert answered.status == 400
        assert remedy in answered.message


@pytest.mark.parametrize("as_ids", [False, True])
def test_logprobs_have_the_bytes_of_their_tokens(as_ids, address):
    """A random model samples halves of characters, end tokens, and ids outside the tokenizer's vocabulary."""
    unknown, options = (
        set(),
        {"logprobs": True, "return_token_ids": True, "return_tokens_as_token_ids": as_ids},
    )
    for seed in range(12):
        answer = chat(address, seed=seed, **options)
        [choice] = answer["choices"]
        same = generate(address, answer["prompt_token_ids"], seed=seed)[0]["logprobs"]["content"]
        entries = choice["logprobs"]["content"]
        assert [entry["bytes"] for entry in entries] == [entry["bytes"] for entry in same]
        pairs = zip(choice["token_ids"], entries, strict=True)
        unknown |= {token for token, entry in pairs if entry["bytes"] is None}
        joined = b"".join(bytes(entry["bytes"] or []) for entry in entries)
        assert joined.decode("utf-8", "replace") == choice["message"]["content"]
        assert as_ids == entries[0]["token"].startswith("token_id:")
    assert unknown == {token for token in unknown if token >= TOKENIZER.vocab_size}


@pytest.mark.parametrize("stop", [[], ["e"], ["a", "th"]])
@pytest.mark.parametrize("seed", range(2))
def test_a_stream_adds_up_to_the_whole_answer(seed, stop, address):
    body = talk(n=3, seed=seed, stop=stop, logprobs=True, return_token_ids=True, temperature=1.2)
    whole = chat(address, **body)
    stream = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = events(ask(address, CHAT, {**body, **stream}))
    assert len(chunks) > 6
    assert chunks[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    assert chunks.pop()["usage"] == whole["usage"]
    for index, expected in enumerate(whole["choices"]):
        parts = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
        assert parts[0]["delta"]["role"] == "assistant"
        assert "".join(part["delta"].get("content", "") for part in parts) == expected["message"]["content"]
        assert [token for part in parts for token in part.get("token_ids", [])] == expected["token_ids"]
        logged = [part["logprobs"]["content"] for part in parts if part.get("logprobs")]
        names = [entry["token"] for entry in expected["logprobs"]["content"]]
        assert [entry["token"] for entries in logged for entry in entries] == names
        reasons = [part["finish_reason"] for part in parts]
        assert reasons == [None] * (len(parts) - 1) + [expected["finish_reason"]]
        text = StopStrings(TOKENIZER, stop).decode(np.array(expected["token_ids"], np.int32))
        assert text == expected["message"]["content"]


def test_clients_that_leave_free_their_slots_and_nothing_is_logged(address, engine, loop, caplog):
    """Sixty requests of 32 tokens would take eight slots about 60 calls of the engine; here they end much earlier.

    Half of the connections are closed, and half are reset.
    """
    with before_calls(lambda: time.sleep(0.02)):
        before = engine.calls
        long = {"token_ids": PROMPTS[0], "sampling_params": {"seed": 11, "stop": ["never this"]}}
        stream = {"messages": [ASKED], "stream": True, "seed": 3}
        clients = [left_alone(address, *(GENERATE, long) if at % 2 else (CHAT, stream)) for at in range(60)]
        until(lambda: loop.under_way > 40, "the requests")
        for at, client in enumerate(clients):
            if at % 4 > 1:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            client.close()
        until(lambda: loop.under_way == 0, "the slots")
        assert engine.calls - before < 40
    assert generate(address, PROMPTS[0], seed=2) == generate(address, PROMPTS[0], seed=2)
    assert not caplog.records


def test_new_weights_are_taken_while_requests_run(address, engine, loop, transfer):
    """Each token has the log-probability under the weights that sampled it, which have prefilled all tokens before it. No request is dropped."""
    taking = []

    def before():
        if engine.calls == third - 2:
            until(lambda: loop.under_way >= SLOTS, "requests for all slots")
        if engine.calls == third and not taking:
            taking.append(Thread(target=loop.take, args=(lambda: transfer(PARAMS[1]), 6)))
            taking[0].start()
            until(lambda: loop._actions, "the weights")

    third = engine.calls + 3
    try:
        with before_calls(before), ThreadPoolExecutor(20) as pool:
            asked = [(PROMPTS[at % 8], {"seed": 20 + at}) for at in range(20)]
            found = list(pool.map(lambda each: generate(address, each[0], **each[1])[0], asked))
        taking[0].join()
        assert [each["version"] for each in generate(address, PROMPTS[0])[0]["spans"]] == [6]
        assert ask(address, "/v1/models").json["data"][0]["weights_version"] == 6
    finally:
        loop.take(lambda: transfer(PARAMS[0]), 5)
    examples = [(prompt, choice["token_ids"]) for (prompt, _), choice in zip(asked, found, strict=True)]
    by_old, by_new = (trained(examples, params=params) for params in range(2))
    both = 0
    for choice, old, new in zip(found, by_old, by_new, strict=True):
        versions = [span["version"] for span in choice["spans"]]
        assert versions in ([5], [6], [5, 6])
        first_new = next((span["first"] for span in choice["spans"] if span["version"] == 6), len(old))
        both += 0 < first_new < len(old)
        expected = np.concatenate([old[:first_new], new[first_new:]])
        np.testing.assert_allclose(logprobs(choice), expected, rtol=0, atol=2e-5)
    assert both >= 2


def params(**given):
    return {"token_ids": [5], "sampling_params": given}


def talk(**given):
    return {"messages": [ASKED], **given}


MALFORMED = [
    (GENERATE, b'{"token_ids": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply"),
    (GENERATE, b'{"token_ids": [5], "sampling_params": {"temperature": NaN}}', "not JSON"),
    (GENERATE, b'{"token_ids": [1' + b"0" * 30 + b"]}", "vocabulary of 324"),
    (GENERATE, {}, "`token_ids`"),
    (GENERATE, {"token_ids": [5] * 65}, "65 tokens; the server accepts 1 to 64: shorten it, or serve with a larger --max-prompt-tokens"),
    (GENERATE, {"token_ids": [5, "6"]}, "token_ids[1]: Expected `int`, got `str`; found '6'"),
    (GENERATE, {"token_ids": [-1]}, "the token id -1, which is not in the vocabulary of 324 ids, 0 to 323"),
    (GENERATE, {"token_ids": [5], "model": "other"}, "model is 'other'; this server has only 'tiny'"),
    (GENERATE, {"token_ids": [5], "sampling_param": {}}, "did you mean 'sampling_params'"),
    (GENERATE, {"token_ids": [5], "stream": True}, "'stream'=True, which this server does not support: leave it out, or set it to False"),
    (GENERATE, params(max_tokens=0), "max_tokens is 0; the server accepts 1 to 32: use 1 or more"),
    (GENERATE, params(top_k=2**31), "top_k=2147483648"),
    (GENERATE, params(n=MOST + 1), f"n is {MOST + 1}; the server accepts 1 to {MOST}: lower it, or serve with a larger --queue"),
    (GENERATE, params(seed=-1), "seed: Expected `int` >= 0; found -1"),
    (GENERATE, params(stop=["a"] * 17), "stop: Expected `array` of length <= 16"),
    (GENERATE, params(stop_token_ids=[999]), "stop_token_ids has the token id 999"),
    (COMPLETE, {"prompt": [[]]}, "the prompt has 0 tokens; the server accepts 1 to 64: use 1 or more"),
    (COMPLETE, {"prompt": [5, "a"]}, "prompt: found [5, 'a'], a list of several types"),
    (COMPLETE, {"prompt": ["1"] * 999}, "found 999 prompts; the server accepts up to "),
    (COMPLETE, {"prompt": [[5], [999]]}, "prompt has the token id 999"),
    (COMPLETE, {"prompt": "1", "echo": True}, "max_tokens is None; with echo, which scores the prompt, the server accepts 0 or 1"),
    (CHAT, {"messages": [{"role": "user"}]}, "message 0: 'content' must be a string"),
    (CHAT, {"messages": [{"role": "<|im_end|>", "content": "a"}]}, "messages[0].role is '<|im_end|>'"),
    (CHAT, {"messages": [ASKED, {"role": "assistant", "content": "a"}]}, "the last message is the assistant's"),
    (CHAT, {"messages": [{"role": "user", "content": "\ud800"}]}, "not JSON"),
    (CHAT, talk(stream_options={"what": 1}), "stream_options has the field 'what'=1"),
    (CHAT, talk(max_completion_tokens=99, max_tokens=3), "max_completion_tokens is 99"),
    *((CHAT, talk(chat_template_kwargs={name: 1}), f"chat_template_kwargs sets '{name}'") for name in ("messages", "eos_token", "raise_exception")),
    (CHAT, talk(chat_template_kwargs=functools.reduce(lambda inner, _: {"a": inner}, range(300), {})), "messages: "),
]  # fmt: skip


def test_a_request_that_cannot_be_served_is_refused_by_field_value_and_need(address, loop):
    for path, body, message in MALFORMED:
        answered = ask(address, path, body)
        assert answered.status == (404 if "model is" in message else 400), (path, body, answered)
        assert message in answered.message
        assert len(answered.message) < 1500
    assert loop.under_way == 0
    assert generate(address, PROMPTS[2], temperature=0) == generate(address, PROMPTS[2], temperature=0)


@pytest.mark.parametrize(
    ("path", "method", "body", "headers", "status"),
    [
        ("/nothing", "GET", None, {}, 404),
        (GENERATE, "GET", None, {}, 405),
        (GENERATE, "POST", {}, {"Content-Type": "text/plain"}, 415),
        (GENERATE, "POST", {}, {"Content-Encoding": "gzip"}, 415),
        (GENERATE, "POST", b" " * (2 << 20), {}, 413),
        ("/v1/models", "GET", None, {"Host": "evil.example"}, 403),
    ],
)
def test_other_paths_methods_types_and_hosts_are_refused(path, method, body, headers, status, address):
    answered = ask(address, path, body, method=method, **headers)
    assert answered.status == status
    assert answered.message


def test_a_full_queue_refuses_requests_with_retry_after(address, loop):
    with before_calls(lambda: time.sleep(0.05)):
        first = left_alone(address, GENERATE, params(n=MOST, seed=1))
        until(lambda: loop.under_way == MOST, "the queue")
        answered = ask(address, GENERATE, params(n=SLOTS * 8))
        assert (answered.status, answered.headers["retry-after"]) == (503, "1")
        assert f"{SLOTS * 8} more; the server accepts {MOST}" in answered.message
        assert answered.json["error"]["code"] == "queue_full"
        first.close()
        until(lambda: loop.under_way == 0, "the slots")


def test_with_a_key_every_route_but_health_needs_it(loop):
    with serving(loop, api_key="s3cret") as server:
        for path, body in (
            ("/v1/models", None),
            (GENERATE, params(max_tokens=2)),
            (CHAT, talk(max_tokens=2)),
            ("/x", None),
        ):
            for key in (None, "", "S3cret", "s3cret0", "\u00e9"):
                answered = ask(server.address, path, body, key=key and key.encode().decode("latin-1"))
                assert (answered.status, answered.json["error"]["code"]) == (401, "invalid_api_key")
            assert ask(server.address, path, body, key="s3cret").status == (404 if path == "/x" else 200)
        assert ask(server.address, "/v1/models", Authorization="Basic s3cret").status == 401
        assert ask(server.address, "/health", Host="anywhere").json == {"status": "ok", "weights_version": 5}


def test_running_requests_are_finished_when_the_server_stops(loop):
    with before_calls(lambda: time.sleep(0.02)), ThreadPoolExecutor(1) as pool:
        with serving(loop) as server:
            answer = pool.submit(ask, server.address, GENERATE, params(seed=3))
            until(lambda: loop.under_way == 1, "the request")
        assert answer.result().status == 200
        with pytest.raises(OSError, match="refused"):
            ask(server.address, "/health")


@contextmanager
def few_connections(loop, **how):
    """A server that holds 20 connections, because the process may open few more files when it starts."""
    logged = []
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = len(os.listdir("/dev/fd")) + http_connections._OWN_DESCRIPTORS
    resource.setrlimit(resource.RLIMIT_NOFILE, (free + 20, hard))
    try:
        server = HttpServer(loop, LIMITS, host="127.0.0.1", port=0, say=logged.append, **how)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert server._connections.most in (19, 20, 21)
    with server:
        yield server.address
    assert not logged


def closed(client):
    """Whether the server has closed a connection."""
    try:
        return client.recv(1 << 16) == b""
    except ConnectionError:
        return True


def test_connections_that_send_half_a_request_make_room_for_whole_ones(loop, caplog):
    """Three times as many connections as the server holds, and one client with the key."""
    with few_connections(loop, api_key="s3cret") as address:
        assert ask(address, GENERATE, params(max_tokens=2), key="s3cret").status == 200
        clients = flooded(address, 60)
        begun = time.monotonic()
        assert ask(address, GENERATE, params(max_tokens=2), key="s3cret").status == 200
        assert time.monotonic() - begun < 2.0
        assert sum(closed(client) for client in clients[:40:5]) == 8  # connections that had sent nothing
        for client in clients:
            client.close()
    assert not caplog.records


def test_a_client_that_does_not_complete_its_headers_is_disconnected(loop, monkeypatch):
    monkeypatch.setattr(http_connections, "_HEAD_S", 0.5)
    with few_connections(loop, api_key="") as address:
        begun = time.monotonic()
        [silent, slow] = flooded(address, 2)
        with suppress(ConnectionError):
            while time.monotonic() - begun < 10:
                slow.sendall(b"a")
                time.sleep(0.05)
        assert 0.5 <= time.monotonic() - begun < 5
        assert closed(silent)


def status(client):
    try:
        answer = client.recv(1 << 16)
    except ConnectionError:
        answer = b""
    return int(answer.split()[1]) if answer else "closed"


def test_connections_with_running_requests_stay_and_further_ones_get_503(loop):
    held = Event()
    try:
        with before_calls(lambda: held.wait(60)), few_connections(loop, api_key="") as address:
            asked = [left_alone(address, GENERATE, params(max_tokens=2)) for _ in range(30)]
            time.sleep(0.5)
            held.set()
            statuses = [status(client) for client in asked]
            assert 18 <= statuses.count(200) <= 21
            assert set(statuses) <= {200, 503, "closed"}
    finally:
        held.set()


NO_HTTP = [
    b"\x16\x03\x01\x00\xa5\x01\x00\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost a\r\n\r\n",
    b"GET / HTTP/1.1\r\nA: " + b"x" * 10_000 + b"\r\n\r\n",
    b"POST /v1/models HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
    b"POST /inference/v1/generate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    b"GET /v1/models HTTP/1.1\r\nHost: [\r\n\r\n",
]  # fmt: skip


def test_a_request_that_is_not_http_gets_400_and_is_not_logged(address, caplog):
    host, _, port = address.rpartition(":")
    for sent in NO_HTTP:
        with socket.create_connection((host, int(port)), timeout=10) as client:
            client.sendall(sent)
            head, _, content = client.recv(1 << 16).partition(b"\r\n\r\n")
        assert 400 <= int(head.split()[1]) < 500
        assert json.loads(content)["error"].keys() == {"message", "type", "code"}
    assert not caplog.records


def samples(address):
    """The samples of `/metrics` by name and labels, without the prefix."""
    answered = ask(address, "/metrics")
    assert answered.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    lines = answered.content.decode().splitlines()
    pairs = [line.removeprefix("dapo_jax_").split(" ") for line in lines if not line.startswith("#")]
    return {name: float(value) for name, value in pairs}


def test_prometheus_reads_the_counts_of_requests_and_the_load(loop):
    """With Prometheus' own parser, if it is installed. 20 responses in 8 slots: 12 wait."""
    with serving(loop) as server:
        address = server.address
        answered = [generate(address, PROMPTS[1], n=2), generate(address, PROMPTS[3], seed=1)]
        assert ask(address, GENERATE, {"token_ids": []}).status == 400
        assert ask(address, "/health").status == 200
        found = samples(address)
        assert (found['requests_total{status="200"}'], found['requests_total{status="400"}']) == (2, 1)
        assert found["prompt_tokens_total"] == len(PROMPTS[1]) + len(PROMPTS[3])
        assert found["sampled_tokens_total"] == sum(
            len(ids) for choices in answered for ids in tokens(choices)
        )
        buckets = [value for name, value in found.items() if name.startswith("request_seconds_bucket")]
        assert buckets == sorted(buckets)
        assert (
            buckets[-1] == found['request_seconds_bucket{le="+Inf"}'] == found["request_seconds_count"] == 3
        )
        assert 0 < found["request_seconds_sum"] < 3 * 250
        idle = {"responses_running": 0, "responses_waiting": 0, "cache_used_ratio": 0, "weights_version": 5}
        assert {name: found[name] for name in idle} == idle
        held = Event()
        with before_calls(lambda: held.wait(60)):
            running = left_alone(address, GENERATE, params(n=20, seed=1))
            try:
                until(lambda: samples(address)["responses_running"] == SLOTS, "the slots")
                found = samples(address)
            finally:
                held.set()
        assert found["responses_waiting"] == 20 - SLOTS
        assert 0 < found["cache_used_ratio"] <= 1
        running.close()
        until(lambda: loop.under_way == 0, "the slots")
        assert samples(address)["cache_used_ratio"] == 0
        parser = pytest.importorskip("prometheus_client.parser")
        families = {f.name: f for f in parser.text_string_to_metric_families(ask(address, "/metrics").content.decode())}  # fmt: skip
    kinds = {name: family.type for name, family in families.items()}
    assert (kinds["dapo_jax_requests"], kinds["dapo_jax_request_seconds"]) == ("counter", "histogram")
    assert sum(sample.value for sample in families["dapo_jax_requests"].samples) >= 4
    assert all(name.startswith("dapo_jax_") for name in kinds)


def test_loopback_addresses_are_recognized():
    assert all(map(is_loopback, ("127.0.0.1", "127.9.0.1", "localhost", "[::1]", "::1")))
    assert not any(
        map(is_loopback, ("0.0.0.0", "[::]", "10.0.0.1", "example.org", "", "localhost.example.org"))
    )
