"""Writes run folders like those of `dapo-jax train`."""

import json
import math
import random

from dapo_jax.config import TrainConfig, to_yaml
from dapo_jax.text.tokenizers import CharTokenizer, save_tokenizer
from dapo_jax.trackers.rollout_log import write_problems

ALPHABET = "0123456789+=:,? abcdefghijklmnopqrstuvwxyz<>/\"'&!-()\n"
TOKENIZER = CharTokenizer(ALPHABET)
HOSTILE = "</script><img src=x onerror=alert(1)> <!-- & \u2028"


def metrics_line(step, rng):
    """The metrics of one step. Every fifth step has an evaluation."""
    share = 1 - math.exp(-step / 30)
    mixed = max(0.05, 0.9 - 0.6 * share)
    line = {
        "step": step, "rollout/prompts": 6, "rollout/trained_groups": 4, "rollout/trained_accuracy": 0.5 + rng.gauss(0, 0.03),
        "rollout/accuracy": 0.3 + 0.6 * share + rng.gauss(0, 0.03), "rollout/all_correct_frac": 0.8 * (1 - mixed),
        "rollout/all_wrong_frac": 0.2 * (1 - mixed), "rollout/mixed_frac": mixed, "rollout/response_tokens": 20 + 20 * share,
        "reward/mean": -0.4 + 1.2 * share, "reward/std": 0.9, "policy/entropy": 1.0 - 0.6 * share, "update/loss": rng.gauss(0, 0.2),
        "update/learning_rate": 1e-6 * min(1.0, step / 20), "time/sample_s": 8.0, "time/update_s": 12.0, "time/step_s": 20.5,
        "time/grade_s": 1.5, "time/wait_s": 0.5, "time/logprobs_s": 3.0, "time/checkpoint_s": 0.25, "time/between_s": 1.0,
    }  # fmt: skip
    if step % 5 == 0:
        line |= {"eval/aime_2024/avg@8": 0.4 + 0.5 * share, "eval/aime_2024/avg@8_stderr": 0.02,
                 "eval/aime_2024/pass@8": 0.7 + 0.2 * share, "time/eval_s": 30.0}  # fmt: skip
    return line


def rollout_line(step, ordinal, index, *, rng, prompt=None, response=None, correct=None, **changes):
    """One rollout, as rollout_log writes them, with ratios."""
    text = (
        response if response is not None else f"{ordinal}+{index}={'a long way to go ' * rng.randrange(1, 5)}"
    )
    correct = rng.random() < 0.5 if correct is None else correct
    ids = [*TOKENIZER.encode(text).tolist(), TOKENIZER.eos_id]
    return {
        "schema_version": 1, "step": step, "ordinal": ordinal, "index": index,
        "prompt": prompt if prompt is not None else f"what is {ordinal}+{ordinal}?", "answer": "2",
        "response": text, "correct": correct, "extracted": "2" if correct else None, "reason": "",
        "score": 1.0 if correct else -1.0, "reward": 1.0 if correct else -1.0, "overlong_penalty": 0.0,
        "response_tokens": len(ids), "finish_reason": "stop" if correct else "length",
        "spans": [[0, step - 1]], "row": {}, "prompt_token_ids": [2, 3], "response_token_ids": ids,
        "logprobs": [round(-rng.expovariate(2.0), 6) for _ in ids], "advantage": 1.5 if correct else -0.5,
        "in_loss": True, "ratios": [round(math.exp(rng.gauss(0, 0.15)), 6) for _ in ids],
    } | changes  # fmt: skip


def write_run(
    folder, *, steps=10, every=1, groups=2, group_size=4, seed=0, line=rollout_line, tokenizer=True, **config
):
    """A run folder: configuration, metrics of `steps` steps, rollouts of each `every`th, and the tokenizer."""
    rng = random.Random(seed)
    (folder / "rollouts").mkdir(parents=True)
    made = TrainConfig(run_dir=str(folder), seed=seed, steps=steps, **config)
    (folder / "config.yaml").write_text(to_yaml(made))
    lines = [{"step": 0, "eval/aime_2024/avg@8": 0.4, "eval/aime_2024/pass@8": 0.7, "time/eval_s": 30.0}]
    lines += [metrics_line(step, rng) for step in range(1, steps + 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    for step in range(every, steps + 1, every):
        rows = [
            line(step, step * groups + group, index, rng=rng)
            for group in range(groups)
            for index in range(group_size)
        ]
        write_rollouts(folder, step, rows)
    if tokenizer:
        save_tokenizer(TOKENIZER, folder / "model")
    return folder


def problem_line(place, right, samples=8, *, kept=1, response="thus \\boxed{2}", **changes):
    """One problem of an evaluation; its first `right` responses are correct."""
    given = [
        {"answer": "2", "count": right, "correct": right},
        {"answer": None, "count": samples - right, "correct": 0},
    ]
    return {
        "ordinal": place, "place": f"held_out.jsonl, line {place + 1}", "prompt": f"problem {place}: 1+1?", "answer": "2",
        "samples": samples, "correct": right, "extracted": [each for each in given if each["count"]],
        "response_tokens": 12.0, "truncated": 0, "lost": 0,
        "responses": [
            {
                "response": f"{response} #{index}", "correct": index < right, "extracted": "2" if index < right else None, "reason": "equal",
                "score": None, "response_tokens": 12, "finish_reason": "stop" if index < right else "length",
            }
            for index in range(kept)
        ],
    } | changes  # fmt: skip


def write_evaluation(folder, step, problems, *, name="aime_2024"):
    return write_problems(folder / "evaluations" / f"step_{step:06d}", problems, name=name, step=step)


def write_metrics(folder, *lines):
    """Writes a run that has only metrics."""
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def write_rollouts(folder, step, rows):
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "rollouts" / f"step_{step:06d}.jsonl").write_text(text)
