"""Folders of runs that are damaged: everything a run writes beside its checkpoints, and what they are in at all."""

import json
import shutil

import numpy as np
import yaml

from dapo_jax.config import load_config, to_yaml
from dapo_jax.dapo.rollouts import Group, Prompt, Response, Rollout, Verdict
from dapo_jax.trackers.rollout_log import write_rollouts
from tests.malformed.models import with_file
from tests.malformed.mutations import as_json, changed, damaged

CONFIG = """
run_dir: run
steps: 1
compilation_cache: ../xla
model: {source: model}
data: {source: jsonl, path: data.jsonl, data_dir: kept, max_prompt_tokens: 40}
sampling: {slots: 8, max_response_tokens: 4}
reward: {overlong: {buffer_tokens: 2}}
dynamic_sampling: {enabled: false}
batch: {prompts_per_step: 2, group_size: 4, groups_per_update: 2, rows_per_microbatch: 8}
eval: {prompts: 1, samples_per_prompt: 2, datasets: [{source: jsonl, path: data.jsonl}]}
log: {rollouts_every_steps: 1}
"""
ROWS = b"".join(b'{"prompt": "%d+1", "answer": "%d"}\n' % (number, number + 1) for number in range(4))

SAMPLE = ("sample", "run", "--prompt", "1", "--max-response-tokens", "2")
EVAL = ("eval", "run")
CONVERT = ("convert", "run", "out")
RESUME = ("train", "c.yaml", "--resume")
SCORE = ("score", "run/rollouts", "--grader", "exact", "--workers", "0")


def lay_out(folder):
    """Makes the files that the configuration names, and a run that has come to its configuration and its rollouts."""
    with_file("x", b"")(folder)
    (folder / "c.yaml").write_text(CONFIG)
    (folder / "data.jsonl").write_bytes(ROWS)
    (folder / "run" / "checkpoints").mkdir(parents=True)
    (folder / "run" / "config.yaml").write_text(to_yaml(load_config(folder / "c.yaml")))
    response = Response(
        tokens=np.array([1], np.int32), logprobs=np.zeros(1, np.float32), finish_reason="stop"
    )
    rollout = Rollout(response=response, text="2", verdict=Verdict(correct=True), reward=1.0)
    prompt = Prompt(
        ordinal=0,
        tokens=np.array([1], np.int32),
        text="1+1",
        answer="2",
        row={"prompt": "1+1", "answer": "2"},
    )
    write_rollouts(folder / "run" / "rollouts", 1, [Group(prompt=prompt, rollouts=(rollout, rollout))])


def damage(name, content):
    """Writes something else over a file of the run; None: removes it, or the folder."""

    def make(folder):
        path = folder / "run" / name
        if content is None:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            shutil.rmtree(path)
        old = path.read_bytes() if path.is_file() else b""
        path.write_bytes(content(old) if callable(content) else content)

    return make


def a_folder(name):
    def make(folder):
        path = folder / "run" / name
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        path.mkdir(parents=True)

    return make


def rollouts(**changes):
    """Changes fields of the first rollout."""

    def change(old):
        first, *others = old.splitlines()
        new = json.loads(first) | changes
        return b"\n".join([as_json({key: value for key, value in new.items() if value != "absent"}), *others])

    return damage("rollouts/step_000001.jsonl", change)


def without(key):
    def change(old):
        described = yaml.safe_load(old)
        del described[key]
        return yaml.safe_dump(described).encode()

    return change


def with_model(source):
    return lambda old: old.replace(b"source: model", f"source: {source}".encode())


EARLY = [
    *((f"config.yaml: {name}", damage("config.yaml", content), command)
      for name, content in {
          "nothing": b"", "no YAML": b"{", "zero bytes": b"\x00" * 50, "not UTF-8": b"run_dir: \xff", "a list": b"- 1",
          # In a key, or the half might be a file of its own.
          "half": lambda old: old[: old.rindex(b":", 0, len(old) // 2)], "brackets": b"[" * 50_000, "another key": lambda old: old + b"\nmore: 1\n",
          "no run_dir": without("run_dir"), "a text as optimizer": lambda old: old.replace(b"beta1: 0.9", b"beta1: x"),
      }.items() for command in (SAMPLE, EVAL, CONVERT, RESUME)),
    # Not RESUME: a run without a checkpoint begins anew, with the model that its command names.
    *((f"config.yaml: {name}", damage("config.yaml", with_model(source)), command)
      for name, source in {
          "a model that is gone": "nowhere", "a model out of the folder": "../../x", "a preset": "preset:x", "a shipped path": "shipped:../../x",
          "a hub name": "hf:../../x",
      }.items() for command in (SAMPLE, EVAL, CONVERT)),
    *((f"rollouts: {name}", make, SCORE)
      for name, make in {
          "nothing": damage("rollouts/step_000001.jsonl", b""), "gone": damage("rollouts", None), "no JSON": damage("rollouts/step_000001.jsonl", b"x"),
          "a list": damage("rollouts/step_000001.jsonl", b"[]"), "brackets": damage("rollouts/step_000001.jsonl", b"[" * 100_000),
          "a version of text": rollouts(schema_version="x"), "a newer version": rollouts(schema_version=99), "a version of null": rollouts(schema_version=None),
          **{f"no {key}": rollouts(**{key: "absent"}) for key in ("step", "ordinal", "answer", "prompt", "correct", "row", "prompt_token_ids", "response_token_ids", "reason", "index", "finish_reason", "extracted")},
          "tokens of text": rollouts(response_token_ids="x"), "tokens of lists": rollouts(prompt_token_ids=[[1], [2, 3]]), "tokens of many digits": rollouts(prompt_token_ids=[2**70]),
          "a response of numbers": rollouts(response=3), "an answer of null": rollouts(answer=None), "a row of text": rollouts(row="x"), "a row of null": rollouts(row=None),
          "truth of text": rollouts(correct="x"), "a step of text": rollouts(step="x"), "an ordinal of lists": rollouts(ordinal=[1]),
          "a row that names a grader": rollouts(row={"grader": "os:system", "source_row": ["x"]}),
      }.items()),
]  # fmt: skip
"""Cases that are said before a checkpoint is read."""

LATE = [
    *((f"{what}: {name}", make, command)
      for what, make in {
          "no config.yaml": damage("config.yaml", None), "config.yaml a folder": a_folder("config.yaml"),
          "no checkpoints": damage("checkpoints", None), "empty checkpoints": a_folder("checkpoints"),
          "a step of text": damage("checkpoints/x", b"x"), "a step that is a file": damage("checkpoints/7", b"x"),
          "a step below 0": a_folder("checkpoints/-1"),
      }.items() for name, command in {"sample": SAMPLE, "resume": RESUME}.items()),
    *((f"metrics.jsonl: {name}", damage("metrics.jsonl", content), RESUME)
      for name, content in {
          "nothing": b"", "gone": None, "no JSON": b"x\ny\n", "a list": b"[]\n[]\n", "steps of text": b'{"step": "1"}\n{"step": "2"}\n',
          "brackets": b"[" * 100_000 + b"\n{}\n", "half": lambda old: old[: len(old) // 2], "not UTF-8": b'{"step": 1, "\xff": 1}\n{"step": 2}\n',
          "a step of many digits": b'{"step": ' + b"9" * 5000 + b"}\n{}\n", "steps of truth": b'{"step": true}\n', "another run's": b'{"step": 99}\n',
          "the other way round": lambda old: b"\n".join(old.splitlines()[::-1]) + b"\n",
      }.items()),
    ("metrics.jsonl: a folder", a_folder("metrics.jsonl"), RESUME),
    ("metrics: a file", damage("metrics", b"x"), RESUME),
    ("rollouts: a file", damage("rollouts", b"x"), RESUME),
    ("evaluations: a file", damage("evaluations", b"x"), RESUME),
]  # fmt: skip
"""Cases for a run that was trained."""


def fuzzed(rng):
    """Damages a file of a run, and the command for it."""
    if rng.integers(2):
        command = (SAMPLE, EVAL, CONVERT)[rng.integers(3)]
        return damage("config.yaml", lambda old: damaged(old, rng)), command

    def change(old):
        if rng.integers(2):
            return damaged(old, rng)
        return b"\n".join(as_json(changed(json.loads(line), rng)) for line in old.splitlines())

    return damage("rollouts/step_000001.jsonl", change), SCORE
