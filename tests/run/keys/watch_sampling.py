"""Watchers of `model`, `sampling`, `eval` and `parallel`: they see the engine, the programs of the update and the meshes."""

import jax
import numpy as np
from flax import nnx

from dapo_jax.rollout.collector import Position
from dapo_jax.run.policy import load_policy
from dapo_jax.run.sources import description_of
from dapo_jax.run.teacher_setup import teacher_of
from tests.run.keys.looking import ROWS, refusal, rounded
from tests.run.keys.watching import differs, echoes, watch


def of_engine(name):
    """Sees an attribute of the engine."""

    def see(look):
        look.run()
        return getattr(look.engine, name)

    return see


def cache_pages(look):
    """Tokens of a page, pages of a pool."""
    look.run()
    return [look.engine.page_sizes.page_tokens, look.engine.page_sizes.pool_pages]


def prefill_rows(look):
    """Rows and tokens per row of a prefill call."""
    look.run()
    return [look.engine.prefill_shape.rows, look.engine.prefill_shape.width]


def policy(look):
    return look.run().policy


def weights(look):
    """The sums of the first three arrays of the initial weights."""
    return rounded([np.asarray(leaf).sum() for leaf in jax.tree.leaves(policy(look).params)][:3])


def decoder(look):
    """The trainer's decoder."""
    look.run()
    return nnx.merge(look.updates.graph, look.updates.params)


def downloaded(name, model_of=lambda config: config.model):
    """Sees an argument of the download from the hub."""

    def see(look):
        load_policy(model_of(look.config))
        return look.noted("download")[name]

    return see


def transferred(look):
    """Dtypes of the sampler's weights; norms stay in float32."""
    return sorted({str(leaf.dtype) for leaf in jax.tree.leaves(look.run().sampling.transfer(None))})


def option(name):
    """Sees one of the update's options."""

    def see(look):
        look.run()
        return getattr(look.updates.options, name)

    return see


def tokens(look):
    """The numbers of tokens of the responses to the first prompt."""
    return [rollout.response_tokens for rollout in look.rollouts()]


def hows(look):
    """Temperature, top-p and top-k of the engine's first call."""
    return next(rounded([how.temperature, how.top_p, how.top_k]) for how in look.engine.hows)


def sampled_with(look):
    look.collected()
    return hows(look)


def evaluated_with(look):
    look.evaluated()
    return hows(look)


def keys(look):
    look.collected()
    return look.engine.keys[0]


def keys_of_evaluation(look):
    look.evaluated()
    return look.engine.keys[0]


def prompts_at_once(look):
    """The number of prompts in the first prefill; two groups of four fill eight slots."""
    look.collected()
    return len(look.engine.prefills[0])


def mesh(look):
    """The axes of the training mesh with sizes over 1; or that it was refused."""
    try:
        look.run()
    except ValueError:
        return "refused"
    return {axis: size for axis, size in look.updates.mesh.shape.items() if size > 1}


def sampler_mesh(look):
    look.run()
    return {axis: size for axis, size in look.engine.mesh.shape.items() if size > 1}


MICRO = {"model.source": "preset:micro", "model.tokenizer": "char:0123456789+=:,?"}
"""See `save_run`: checkpoint 2 of 3 is the best."""
TAUGHT = {"teacher.source": "hf:org/name", "dynamic_sampling.enabled": False}

FLYING = {"rollout.in_flight": 8, "rollout.round_tokens": 3}
"""Groups of four with responses of 3, 3, 6 and 6 tokens: two end in their first round, two in their second. Verdicts come a round later."""


def flight(look):
    """Rounds of the first step, and the first prompt without a started response; None in waves."""
    found = look.collected(reward=lambda sample: len(sample.tokens) > 3)
    return None if found.drawn_tokens is None else [found.rounds, found.cursor]


def first_answer(look):
    """The round at whose end the environment's first answer is due."""
    run = look.run()
    collector = run.sampling.collector(Position())
    first, *_ = collector.start()
    run.close()
    return collector.responses[first].due


def recorded(look):
    """The values in minibatches, with layers and experts per token, and whether the engine records them."""
    look.run()
    return look.updates.options.recorded, look.engine.records_routes


def heads(look):
    """The values in minibatches, and the number of most probable tokens that the engine records."""
    look.run()
    return look.updates.options.recorded, look.engine.heads


WATCHERS = [
    watch(
        "loss.center",
        heads,
        (0, ((), 0)),
        (3, ((("head_ids", (3,), "int32"), ("head_logprobs", (3,), "float32")), 3)),
    ),
    watch(
        "rollout.routing_replay",
        recorded,
        ("off", ((), False)),
        ("sampler", ((("routes", (1, 2), "uint8"),), True)),
        also={**MICRO, "model.source": "preset:micro_moe"},
    ),
    # With 8: groups 0 and 1 at first, then 2, then 3 and half of 4. With 4: 0, half of 1 after a round, all of it and half of 2 after two, the rest of 2 after three,
    # half of 3 after four; group 1 has its verdict after five.
    watch("rollout.in_flight", flight, (0, None), (8, [3, 5]), (4, [5, 4]), also=FLYING),
    # In rounds of 6 all end in their first.
    watch("rollout.round_tokens", flight, (3, [3, 5]), (6, [2, 4]), also=FLYING),
    watch(
        "rollout.answer_rounds", flight, (1, [3, 5]), (0, [2, 3]), (2, [4, 6]), what="of graders", also=FLYING
    ),
    echoes(
        "rollout.answer_rounds",
        first_answer,
        1,
        0,
        3,
        what="of environments",
        also={**FLYING, "environment.source": "guess"},
    ),
    # Of 32 responses 16 end in the first round, and in the second 16 and 8 of those that took their places. With a bound of 1 no more than two steps' groups begin.
    watch(
        "rollout.max_staleness", flight, (0, [3, 18]), (1, [3, 4]), also={**FLYING, "rollout.in_flight": 32}
    ),
    # Vocabularies of 15 characters and 2 special ids, and of the chat model.
    watch("model.source", lambda look: policy(look).decoder.vocab_size, ("model", 17), ("chat_model", 336)),
    watch(
        "model.source",
        lambda look: policy(look).step,
        ("a_run", 3),
        ("a_run@best", 2),
        what="with a checkpoint",
    ),
    watch(
        "model.source",
        downloaded("revision"),
        ("hf:org/name", None),
        ("hf:org/name@main", "main"),
        what="with a revision",
    ),
    watch(
        "teacher.source",
        downloaded("revision", teacher_of),
        ("hf:org/name", None),
        ("hf:org/name@main", "main"),
        what="with a revision",
        also={"dynamic_sampling.enabled": False},
    ),
    # Bytes and 2 special ids; 12 characters and these.
    watch(
        "model.tokenizer",
        lambda look: description_of(look.config.model)[0].vocab_size,
        ("byte", 258),
        ("char:0123456789+-", 14),
        also={"model.source": "preset:micro"},
    ),
    echoes(
        "model.compute_dtype",
        lambda look: decoder(look).ends.compute_dtype,
        "float32",
        "bfloat16",
        what="of the trainer",
    ),
    echoes("model.compute_dtype", of_engine("compute_dtype"), "float32", "bfloat16", what="of the sampler"),
    watch(
        "model.compute_dtype",
        transferred,
        ("float32", ["float32"]),
        ("bfloat16", ["bfloat16", "float32"]),
        what="of the sampler's weights",
    ),
    watch("model.attention", refusal(policy), ("auto", ""), ("splash", "ConfigError")),
    echoes("model.remat", lambda look: decoder(look).remat, "none", "full"),
    echoes("sampling.temperature", option("temperature"), 1.0, 0.5, what="of the trainer"),
    watch("sampling.temperature", sampled_with, (1.0, [1, 1, 0]), (0.5, [0.5, 1, 0]), what="of the sampler"),
    watch("sampling.max_response_tokens", tokens, (6, [3, 3, 6, 6]), (9, [3, 3, 6, 9])),
    watch("sampling.max_response_tokens", of_engine("capacity"), (6, 10), (9, 13), what="room in a slot"),
    echoes("sampling.slots", of_engine("slots"), 8, 16),
    watch("sampling.slots", prompts_at_once, (8, 2), (16, 3), what="prompts read at once"),
    watch(
        "sampling.max_response_tokens",
        of_engine("steps_per_call"),
        (6, 3),
        (48, 8),
        (1024, 16),
        what="steps per call",
    ),
    # Prompts of up to 4 tokens are rows of 10, as long as a slot: 2 prompts fill the slots.
    watch("sampling.prefill_tokens", prefill_rows, (4096, [2, 10]), (8, [1, 8])),
    echoes("sampling.batch_invariant", of_engine("batch_invariant"), False, True),
    # Each prompt is a row then, and one of them is read at a time.
    watch("sampling.batch_invariant", prefill_rows, (False, [2, 10]), (True, [1, 10]), what="rows"),
    # A slot holds 10 tokens. Each of the 8 devices has 2 slots; of 512 tokens it has a page.
    watch("sampling.cache_tokens", cache_pages, (0, [10, 1]), (512, [64, 1]), also={"sampling.slots": 16}),
    echoes(
        "sampling.cache_dtype",
        of_engine("cache_dtype"),
        "",
        "int8",
        also={"loss.importance_range": [0.0, 2.0]},
    ),
    watch(
        "sampling.weight_dtype",
        transferred,
        ("", ["float32"]),
        ("int8", ["float32", "int8"]),
        also={"loss.importance_range": [0.0, 2.0]},
    ),
    # Of the response 1+1=2 with its end token, the first two stay; the others have no +.
    watch("sampling.stop", tokens, ([], [3, 3, 6, 6]), (["+"], [3, 3, 2, 6])),
    # The digit 3 is token 5: it ends the second response.
    watch("sampling.stop_token_ids", tokens, ([], [3, 3, 6, 6]), ([5], [3, 2, 6, 6])),
    differs("seed", keys, 0, 1, what="what is sampled"),
    differs("seed", keys_of_evaluation, 0, 1, what="what is sampled in evaluation"),
    differs("seed", weights, 0, 1, what="random weights", also=MICRO),
    watch(
        "eval.datasets",
        lambda look: list(look.held_out()),
        ([{"source": "jsonl", "path": "questions/test.jsonl"}], ["test"]),
        ([{"source": "jsonl", "path": "questions/other.jsonl", "name": "b"}], ["b"]),
        also={"data.source": "jsonl", "data.path": "questions/train.jsonl"},
    ),
    watch("eval.prompts", lambda look: len(look.evaluated()["arithmetic"]), (0, len(ROWS)), (2, 2)),
    watch("eval.temperature", evaluated_with, (1.0, [1, 1, 0]), (0.25, [0.25, 1, 0])),
    watch("eval.top_p", evaluated_with, (1.0, [1, 1, 0]), (0.5, [1, 0.5, 0])),
    watch("eval.top_k", evaluated_with, (0, [1, 1, 0]), (3, [1, 1, 3])),
    # Eight devices.
    watch("parallel.data", mesh, (1, {"fsdp": 8}), (2, {"data": 2, "fsdp": 4})),
    watch("parallel.fsdp", mesh, (-1, {"fsdp": 8}), (4, "refused")),
    watch("parallel.tensor", mesh, (1, {"fsdp": 8}), (2, {"fsdp": 4, "tensor": 2}), also=MICRO),
    watch("parallel.context", mesh, (1, {"fsdp": 8}), (2, {"fsdp": 4, "context": 2})),
    watch(
        "parallel.sampler_tensor", sampler_mesh, (0, {"data": 8}), (2, {"data": 4, "tensor": 2}), also=MICRO
    ),
    watch("parallel.sampler_hosts", refusal(policy), (1, ""), (2, "ConfigError")),
]
