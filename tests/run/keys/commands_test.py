"""`sft` and `evaluate` use each key of their configurations, except the keys of shared sections that only training uses."""

import pytest
from rich.console import Console

from dapo_jax.commands import evaluate, sft
from dapo_jax.config import EvaluateConfig, SftConfig
from dapo_jax.config.section import leaf_types
from dapo_jax.run import grader_setup
from dapo_jax.trackers.progress import Progress
from tests.run.keys.watching import noting_reads

SAMPLED_BY_EVAL_KEYS = {"sampling.temperature"}
NOTHING_SAMPLED_IS_LEARNT = {"reward.overlong.filter_truncated"}
GUESS = {"environment.source": "guess"}
AGENT = {"environment.source": "command:true"}
NOT_READ = {
    SftConfig: SAMPLED_BY_EVAL_KEYS | NOTHING_SAMPLED_IS_LEARNT,
    EvaluateConfig: SAMPLED_BY_EVAL_KEYS
    | NOTHING_SAMPLED_IS_LEARNT
    | {"eval.every_steps", "data.train_split", "data.shuffle", "environment.credit"},
}
JUDGE = """
def quick(sample):
    return True


async def judge(sample):
    return True
"""
SMALL = {
    "data.source": "gsm8k",
    "data.path": "questions/sums.jsonl",
    "data.eval_split": "train",
    "data.max_prompt_tokens": 8,
    "sampling.slots": 8,
    "sampling.max_response_tokens": 6,
    "eval.samples_per_prompt": 4,
}  # fmt: skip
SFT = {
    **SMALL,
    "run_dir": "run",
    "steps": 2,
    "model.source": "preset:micro",
    "max_response_tokens": 20,
    "batch.pairs_per_step": 2,
    "batch.rows_per_microbatch": 8,
    "batch.row_tokens": 32,
}  # fmt: skip
EVALUATE = {**SMALL, "data.source": "jsonl", "data.path": "questions/test.jsonl", "data.eval_split": "test"}
GRADERS = {"reward.grader": [{"grader": "judge.py:quick"}, {"grader": "judge.py:judge"}, {"grader": "code"}]}
"""One grader in workers, one awaited, one in a sandbox."""


class Right:
    """A grader that needs no sandbox."""

    def __init__(self, sandbox, limits, path):
        pass

    async def __call__(self, sample):
        return True

    def close(self):
        pass


def warm_start(config):
    sft(config, progress=Progress(config.steps, console=Console(quiet=True)))


def score(config):
    evaluate("model", config)


@pytest.mark.parametrize(
    ("schema", "command", "base", "ways"),
    [
        (
            SftConfig,
            warm_start,
            SFT,
            [
                {"optimizer.schedule": "linear"},
                {**GRADERS, "lora.rank": 2, "steps": 0},
                {"model.source": "hf:org/name", "steps": 0},
            ],
        ),
        (EvaluateConfig, score, EVALUATE, [{}, GRADERS, {**GUESS, "workers.count": 1}, AGENT]),
    ],
)
def test_every_key_of_the_other_commands_is_used(schema, command, base, ways, look, monkeypatch):
    monkeypatch.setattr(grader_setup, "load_sandbox", lambda backend, **options: None)
    monkeypatch.setattr(grader_setup, "CodeGrader", Right)
    found = set()
    for values in ways:
        config = look({**base, **values}, schema).config
        with open("judge.py", "w") as file:
            file.write(JUDGE)
        with noting_reads(schema, found):
            command(config)
    assert leaf_types(schema).keys() - found == NOT_READ[schema]
