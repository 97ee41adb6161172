"""DAPO in one file: a language model learns two-digit addition on a CPU. The training loop is written out, and uses parts of the library.

    python examples/dapo_in_one_file.py            # 40 steps
    python examples/dapo_in_one_file.py --steps 2  # a short test

`dapo-jax train quickstart` is the complete version, with checkpoints, several processes, and rows that contain several responses. Equations are numbered as in
the paper (DAPO, https://arxiv.org/abs/2503.14476).
"""

import argparse
from collections.abc import Sequence
from functools import partial
from importlib import resources
from itertools import islice
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from dapo_jax import dapo_loss, overlong_penalty, to_scalars, token_weights
from dapo_jax.dapo.advantages import group_advantages
from dapo_jax.dapo.losses import k3
from dapo_jax.dapo.rollouts import Group, Prompt, Response, Rollout, Verdict
from dapo_jax.data import load_rows
from dapo_jax.data.prompts import PromptSource
from dapo_jax.models.decoder import graph_of
from dapo_jax.models.folder import load_model
from dapo_jax.parallel.mesh import make_mesh
from dapo_jax.parallel.weights import WeightTransfer
from dapo_jax.rollout.collector import Collector, Position
from dapo_jax.rollout.virtual_clock import ClockSizes
from dapo_jax.sampling.continuous_batching import Sampler
from dapo_jax.sampling.decoding import decoding
from dapo_jax.sampling.engine import DecoderEngine
from dapo_jax.sampling.engine_spec import EngineSpec
from dapo_jax.text.tokenizers import load_tokenizer

# A prompt has at most 8 tokens and a response at most 48. In the paper, these limits are 2,048 and 20,480 (Section 4.1).
PROMPT_TOKENS, RESPONSE_TOKENS, ROW_TOKENS = 8, 48, 8 + 48
# A step trains on 64 groups of 16 responses. An update uses 16 of these groups, in microbatches of 64 responses.
GROUPS_PER_STEP, GROUP_SIZE, GROUPS_PER_UPDATE, ROWS = 64, 16, 16, 64
CLIP_LOW, CLIP_HIGH = 0.2, 0.28  # Eq. 10, Clip-Higher
OVERLONG_BUFFER = 16  # Eq. 13: the penalty grows over the last 16 tokens before the limit
LEARNING_RATE, WARMUP_STEPS = 1e-4, 10
TEMPERATURE = 1.0


def grade(text: str, answer: str) -> Verdict:
    """The rule-based grader (Section 2.4): a response is correct if the text after its last `=` is the answer."""
    _, sign, extracted = text.rpartition("=")
    return Verdict(correct=bool(sign) and extracted.strip() == answer, extracted=extracted)


def rewarded(prompt: Prompt, responses: Sequence[Response], tokenizer) -> Group:
    """Returns the group with verdicts and rewards: +1 or -1 by the verdict, minus a penalty for a response near the length limit (Eq. 13)."""
    rollouts = []
    for response in responses:
        text = tokenizer.decode(response.tokens)
        verdict = grade(text, prompt.answer)
        penalty = overlong_penalty(
            len(response.tokens), max_response_tokens=RESPONSE_TOKENS, buffer_tokens=OVERLONG_BUFFER
        )
        reward = (1.0 if verdict.correct else -1.0) + float(penalty)
        rollouts.append(Rollout(response=response, text=text, verdict=verdict, reward=reward))
    return Group(prompt=prompt, rollouts=tuple(rollouts))


def microbatches(groups: Sequence[Group]) -> list[dict[str, np.ndarray]]:
    """Returns the microbatches of an update, with one rollout per row, padded to `ROW_TOKENS`. All values for a token are in its own column."""
    count = sum(len(group.rollouts) for group in groups)
    batch = {
        "tokens": np.zeros((count, ROW_TOKENS), np.int32),
        "mask": np.zeros((count, ROW_TOKENS), bool),  # True on response tokens, including the end token
        "segments": np.zeros((count, ROW_TOKENS), np.int32),  # 1 on prompt and response, 0 on padding
        "sampler_logprobs": np.zeros((count, ROW_TOKENS), np.float32),
        "advantages": np.zeros(count, np.float32),
    }
    row = 0
    for group in groups:
        # Eq. 9: how much better a response is than the mean of its group, in standard deviations.
        advantages = group_advantages(group.rewards[None])[0]
        for rollout, advantage in zip(group.rollouts, advantages, strict=True):
            start = len(group.prompt.tokens)
            stop = start + len(rollout.response.tokens)
            batch["tokens"][row, :start] = group.prompt.tokens
            batch["tokens"][row, start:stop] = rollout.response.tokens
            batch["mask"][row, start:stop] = True
            batch["segments"][row, :stop] = 1
            batch["sampler_logprobs"][row, start:stop] = rollout.response.logprobs
            batch["advantages"][row] = advantage
            row += 1
    # Token-level mean (Eq. 12) over the whole update, as in the released code: each weight is 1 / (response tokens), so gradients are added.
    batch["weights"] = np.asarray(token_weights(batch["mask"]))
    return [{name: array[at : at + ROWS] for name, array in batch.items()} for at in range(0, count, ROWS)]


def token_logprobs(graph: nnx.GraphDef, params: nnx.State, batch: dict[str, jax.Array]) -> jax.Array:
    """Returns log pi(token | all tokens before it) [rows, seq]. The hidden state of a column predicts the token in the next column."""
    decoder = nnx.merge(graph, params)
    tokens, segments = batch["tokens"], batch["segments"]
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    hidden = decoder(
        tokens, positions, segments, segments
    )  # the segments limit attention if rows are packed, and identify the prompts
    before = jnp.roll(hidden, 1, axis=1)  # column 0 receives a meaningless state, but is never in the mask
    logprobs, _ = decoder.ends.layout.logprobs(
        before.reshape(-1, hidden.shape[-1]),
        decoder.ends.unembedding(),
        tokens.reshape(-1),
        vocab_size=decoder.ends.config.vocab_size,
        temperature=TEMPERATURE,
        chunk_vocab=2048,
        dtype="float32",
    )
    return logprobs.reshape(tokens.shape)


def main() -> float:
    """Trains the model, prints one line per step, and returns the accuracy on held-out questions."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--prompts-per-step", type=int, default=GROUPS_PER_STEP)
    parser.add_argument("--eval-prompts", type=int, default=256)
    parser.add_argument("--data-dir", default=Path.home() / ".cache/dapo_jax/datasets")
    options = parser.parse_args()

    # The policy: a decoder with half a million parameters that ships with the package, and its tokenizer.
    folder = Path(str(resources.files("dapo_jax"))) / "assets" / "quickstart"
    tokenizer = load_tokenizer(folder)
    config, params = load_model(folder)
    graph = graph_of(config)

    # The data: the ordinal of a prompt and the seed determine its row and all random numbers of its responses.
    prompts = PromptSource(
        load_rows("arithmetic", "train", data_dir=options.data_dir),
        tokenizer,
        seed=0,
        max_prompt_tokens=PROMPT_TOKENS,
    )
    held_out = PromptSource(
        load_rows("arithmetic", "test", data_dir=options.data_dir),
        tokenizer,
        seed=0,
        max_prompt_tokens=PROMPT_TOKENS,
        shuffle=False,
    )

    # The sampler: an engine with 64 slots. When a response ends, the next one uses its slot.
    mesh = make_mesh(devices=jax.devices()[:1])
    engine = DecoderEngine(
        config, mesh, EngineSpec(slots=64, capacity=ROW_TOKENS, steps_per_call=8, stop_ids=tokenizer.stop_ids)
    )
    sampler, transfer = Sampler(engine, prefill_prompts=4), WeightTransfer(params, mesh, dtype="float32")
    sample = partial(
        sampler.sample, decoding=decoding(temperature=TEMPERATURE), max_response_tokens=RESPONSE_TOKENS
    )
    train_key, eval_key = jax.random.split(jax.random.key(0))

    # The update: AdamW on the gradient of the clipped objective.
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1.0, weight_decay=0.1))
    opt_state = optimizer.init(params)
    logprobs_of = jax.jit(partial(token_logprobs, graph))

    @jax.jit
    def gradient(params, batch, old_logprobs):
        def loss(params):
            logprobs = token_logprobs(graph, params, batch)
            return dapo_loss(
                logprobs,
                old_logprobs,
                batch["advantages"],
                batch["mask"],
                weights=batch["weights"],
                clip_ratio_low=CLIP_LOW,
                clip_ratio_high=CLIP_HIGH,
            )

        return jax.grad(loss, has_aux=True)(params)

    @jax.jit
    def apply(params, opt_state, grads, learning_rate):
        changes, opt_state = optimizer.update(grads, opt_state, params)
        return jax.tree.map(lambda leaf, change: leaf + learning_rate * change, params, changes), opt_state

    def accuracy() -> float:
        left = (held_out[ordinal] for ordinal in range(options.eval_prompts))
        sampled = sample(
            transfer(params), lambda n: list(islice(left, n)), key=eval_key, samples_per_prompt=4
        )
        graded = [rewarded(prompt, responses, tokenizer) for prompt, responses in sampled]
        return float(np.mean([group.accuracy for group in graded]))

    print(f"before training: accuracy {accuracy():.3f}", flush=True)
    cursor = 0
    needed = options.prompts_per_step  # also the number of prompts in a wave
    waves = ClockSizes(in_flight=needed * GROUP_SIZE, samples_per_prompt=GROUP_SIZE, needed=needed, answer_rounds=0, waves=True)  # fmt: skip
    for step in range(1, options.steps + 1):
        # 1. Sample until enough groups are neither all correct nor all wrong (Eq. 11, Algorithm 1).
        sampler_weights = transfer(params)
        collector = Collector.after(Position(step=step - 1, cursor=cursor), waves, keeps_surplus=False)
        waiting: list[int] = []

        def draw(count: int, collector: Collector = collector, waiting: list[int] = waiting) -> list[Prompt]:
            if not waiting:  # starts the next wave as soon as it is certain to be needed
                waiting.extend(one.ordinal for one in collector.start() if one.index == 0)
            return [prompts[waiting.pop(0)] for _ in range(min(count, len(waiting)))]

        # The sampler requests prompts while other groups end, so waves overlap. Random keys are folded from ordinals.
        for prompt, responses in sample(sampler_weights, draw, key=train_key, samples_per_prompt=GROUP_SIZE):
            collector.end_group(rewarded(prompt, responses, tokenizer))
        collected = collector.finish()
        cursor = collected.cursor

        # 2. Split the groups into updates. The old policy is the policy that sampled them, so its log-probabilities are computed before any update.
        order = np.random.default_rng(step).permutation(len(collected.groups))
        updates = [
            microbatches([collected.groups[i] for i in order[start : start + GROUPS_PER_UPDATE]])
            for start in range(0, len(order), GROUPS_PER_UPDATE)
        ]
        old = [[logprobs_of(params, part) for part in update] for update in updates]
        # The mismatch between sampler and trainer on some tokens. Anything above rounding error indicates a bug.
        mask, sampled_by = updates[0][0]["mask"], updates[0][0]["sampler_logprobs"]
        mismatch = float(k3(old[0][0] - sampled_by)[mask].mean())

        # 3. Update (Eq. 8). The gradients of the microbatches are added.
        rate, measured = LEARNING_RATE * min(1.0, step / WARMUP_STEPS), []
        for update, old_of_update in zip(updates, old, strict=True):
            grads = jax.tree.map(jnp.zeros_like, params)
            for part, old_logprobs in zip(update, old_of_update, strict=True):
                new, metrics = gradient(params, part, old_logprobs)
                grads = jax.tree.map(jnp.add, grads, new)
                measured.append(metrics)
            params, opt_state = apply(params, opt_state, grads, rate)

        sampled_accuracy = np.mean([group.accuracy for group in collected.sampled])
        clipped = to_scalars(measured)["policy/clip_high_frac"]
        print(
            f"step {step:3d}  accuracy {sampled_accuracy:.3f}  prompts {len(collected.sampled)}  clipped high {clipped:.4f}  "
            f"KL(sampler || trainer) {mismatch:.1e}",
            flush=True,
        )
    after = accuracy()
    print(f"after {options.steps} steps: accuracy {after:.3f}")
    return after


if __name__ == "__main__":
    main()
