"""The index and the chunks of a run's rollouts, decoded as in the page."""

import gzip
import json
import random

import jax.numpy as jnp
import numpy as np
import pytest

from dapo_jax.config import ConfigError, DynamicSamplingConfig, LossConfig
from dapo_jax.dapo.losses import dapo_loss
from dapo_jax.report import rollouts
from dapo_jax.report.chunks import heads
from dapo_jax.report.rollouts import CORRECT, FLIPPED, LEFT_OUT, TRAINED, TRUNCATED, clip_states, lay_out
from dapo_jax.report.runs import read_runs
from tests.report.made import rollout_line, write_rollouts, write_run


def laid_out(folder, **how):
    return lay_out(read_runs([folder])[0], **how)


def columns_of(laid):
    content, columns, place = gzip.decompress(laid.index), {}, 0
    for name, kind, length in laid.about["columns"]:
        assert place % int(kind[1]) == 0, f"{name} is not aligned"
        columns[name] = np.frombuffer(content, f"<{kind}", length, place)
        place += length * int(kind[1])
    assert place == len(content)
    return columns


def chunks_of(laid):
    return [json.loads(gzip.decompress(chunk)) for chunk in laid.chunks]


def line(step, ordinal, index, **changes):
    return rollout_line(
        step, ordinal, index, rng=random.Random(step * 1000 + ordinal * 10 + index), **changes
    )


@pytest.fixture
def run(tmp_path):
    return write_run(tmp_path / "run", steps=4, groups=3, group_size=2)


def test_numbers_and_texts_come_back(run):
    rows = [
        json.loads(text)
        for file in sorted(run.glob("rollouts/*.jsonl"))
        for text in file.read_text().splitlines()
    ]
    laid = laid_out(run)
    columns, chunks = columns_of(laid), chunks_of(laid)
    assert columns["group_step"].tolist() == [step for step in (1, 2, 3, 4) for _ in range(3)]
    assert columns["group_first"].tolist() == list(range(0, 24, 2))
    np.testing.assert_allclose(columns["reward"], [row["reward"] for row in rows])
    np.testing.assert_allclose(columns["advantage"], [row["advantage"] for row in rows])
    assert columns["tokens"].tolist() == [row["response_tokens"] for row in rows]
    for group, (chunk, place) in enumerate(zip(columns["group_chunk"], columns["group_place"], strict=True)):
        texts = chunks[chunk][place]
        assert texts["prompt"] == rows[2 * group]["prompt"]
        for response, row in zip(texts["responses"], rows[2 * group : 2 * group + 2], strict=True):
            assert response["text"] == row["response"]
            assert response["lengths"] == [1] * len(row["response"]) + [0]
            np.testing.assert_allclose(response["nats"], -1000 * np.array(row["logprobs"]), atol=0.5)
            np.testing.assert_allclose(response["ratios"], 10_000 * np.array(row["ratios"]), atol=0.5)


def test_chunks_hold_whole_steps(run, monkeypatch):
    monkeypatch.setattr(rollouts, "CHUNK_BYTES", 1)
    laid = laid_out(run)
    assert columns_of(laid)["group_chunk"].tolist() == [chunk for chunk in range(4) for _ in range(3)]
    assert [len(chunk) for chunk in chunks_of(laid)] == [3] * 4


def test_flags_describe_a_response(run):
    rows = [
        line(5, 0, 0, correct=True),
        line(5, 0, 1, correct=False, in_loss=False),
        line(5, 0, 2, correct=True, in_loss=None, ratios=None),
    ]
    write_rollouts(run, 5, rows)
    flags = columns_of(laid_out(run))["flags"][-3:].tolist()
    assert flags == [CORRECT | TRAINED, TRUNCATED | TRAINED | LEFT_OUT, CORRECT]


@pytest.mark.parametrize(
    ("before", "flipped"), [([False, False, True], True), ([False, True], False), ([True, True], False)]
)
def test_a_correct_response_is_flipped_if_fewer_than_half_were_right_before(before, flipped, tmp_path):
    run = write_run(tmp_path / "run", steps=1, groups=1)
    ask = {"prompt": "why?"}
    write_rollouts(run, 5, [line(5, 9, i, correct=False, **ask) for i in range(3)])
    write_rollouts(run, 7, [line(7, 10, i, correct=right, **ask) for i, right in enumerate(before)])
    # Two groups of one step: neither is earlier.
    write_rollouts(run, 9, [line(9, n, i, correct=i == 0, **ask) for n in (11, 12) for i in range(2)])
    columns = columns_of(laid_out(run))
    assert columns["group_before"].tolist() == [-1, -1, 1, 2, 2]
    found = [bool(flags & FLIPPED) for flags in columns["flags"][-4:]]
    assert found == [flipped, False] * 2


def test_a_response_has_the_age_of_its_weights(tmp_path):
    """In step 9 the weights have done 8 steps; version 5 is three steps older."""
    run = write_run(tmp_path / "run", steps=1, every=2, groups=1)
    spans = ([[0, 8]], [[0, 5], [1, 6], [4, 8]], [[0, 2]])
    rows = [line(9, 0, i, response="abcd", spans=each) for i, each in enumerate(spans)]
    without_tokens = line(9, 0, 3, response="", response_token_ids=[], logprobs=[], ratios=[])
    write_rollouts(run, 9, [*rows, without_tokens])
    ages = [response["ages"] for response in chunks_of(laid_out(run))[0][0]["responses"]]
    assert ages == [[[0, 0]], [[0, 3], [1, 2], [4, 0]], [[0, 6]], [[0, 0]]]


def test_an_episode_has_its_new_contexts(tmp_path):
    """Seven tokens: a context of one in place of the prompt, a turn of two, a context of two, and a turn of two."""
    run = write_run(tmp_path / "run", steps=1, groups=1)
    parts = {"turns": [[1, 3], [5, 7]], "turn_rewards": [0.5, -0.25], "contexts": [[0, 1], [3, 5]]}
    ratios = [None, 1.3, 1.0, None, None, 1.0, 1.3]
    rows = [
        line(1, 0, 0, response="abcdef", correct=True, logprobs=[-0.5] * 7, ratios=ratios, **parts),
        line(1, 0, 1, response="abcdef"),
    ]
    write_rollouts(run, 1, rows)
    laid = laid_out(run)
    episode, other = chunks_of(laid)[0][0]["responses"]
    assert episode["contexts"] == [[0, 1], [3, 5]]
    assert episode["turns"] == [[1, 3, 0.5], [5, 7, -0.25]]
    assert episode["nats"] == [None, 500, 500, None, None, 500, 500]
    assert episode["clips"] == "-^.--.^", "1.3 is over 1.28; tokens that were not sampled have no ratio"
    assert episode["size"] == 7
    assert not {"contexts", "turns", "size"} & set(other)
    columns = columns_of(laid)
    assert columns["tokens"].tolist() == [4, 7]
    assert columns["clipped"][0] == 2


def test_the_text_after_a_stop_string_is_kept_separately(tmp_path):
    run = write_run(tmp_path / "run", steps=1, groups=1)
    row = line(1, 0, 0, response="one\ntwo")
    write_rollouts(run, 1, [row | {"response": "one"}])
    [response] = chunks_of(laid_out(run))[0][0]["responses"]
    assert (response["text"], response["graded"]) == ("one\ntwo", 3)


@pytest.mark.parametrize(
    ("steps", "kept"), [(None, [1, 2, 3, 4]), (9, [1, 2, 3, 4]), (2, [1, 4]), (1, [4]), (0, [])]
)
def test_fewer_steps_are_spread_over_the_run(steps, kept, run):
    laid = laid_out(run, steps=steps)
    assert laid.about["steps"] == kept
    assert laid.about["logged"] == 4


def test_a_damaged_file_is_named(run):
    (run / "rollouts" / "step_000002.jsonl").write_text('{"schema_version": 1, "resp')
    with pytest.raises(ConfigError, match=r"step_000002\.jsonl, line 1"):
        laid_out(run)


@pytest.mark.parametrize("advantage", [1.0, -1.0, 0.0])
@pytest.mark.parametrize("dual", [None, 3.0])
def test_clip_states_agree_with_the_loss(advantage, dual):
    """The shares that dapo_loss reports for the same ratios."""
    ratios = np.array([0.5, 0.79, 0.81, 1.0, 1.27, 1.29, 2.9, 3.1], np.float32)
    loss = LossConfig(objective={"clip": {"dual_clip": dual}} if dual else "clip")
    states = clip_states(ratios.tolist(), advantage, loss)
    _, metrics = dapo_loss(
        jnp.log(ratios)[None], jnp.zeros((1, 8)), jnp.array([advantage], jnp.float32), jnp.ones((1, 8), bool),
        clip_ratio_low=loss.clip_ratio_low, clip_ratio_high=loss.clip_ratio_high, dual_clip=dual,
    )  # fmt: skip
    for state, name in (("^", "clip_high_frac"), ("v", "clip_low_frac"), ("d", "dual_clip_frac")):
        metric = metrics[f"policy/{name}"]
        assert states.count(state) == round(float(metric.total)), name


@pytest.mark.parametrize(("objective", "clipped"), [("clip", True), ("gspo", False)])
def test_only_the_objective_clip_has_clip_marks(objective, clipped, tmp_path):
    """Tokens of a ratio of 2 with a positive advantage."""
    run = write_run(tmp_path / "run", steps=1, every=9, loss=LossConfig(objective=objective))
    row = line(1, 5, 0, correct=True)
    write_rollouts(run, 1, [row | {"ratios": [2.0] * len(row["ratios"])}])
    laid = laid_out(run)
    [[group]] = chunks_of(laid)
    assert ("clips" in group["responses"][0]) is clipped
    assert bool(columns_of(laid)["clipped"][0]) is clipped
    assert (laid.about["clip"] is not None) is clipped
    assert group["responses"][0]["ratios"]


def test_heads_omit_the_text_around_every_question():
    around = "Solve this, step by step: {} Put the answer in a box, please."
    assert heads([around.format(text) for text in ("1+1?", "12+2?")]) == ["1+1?", "12+2?"]
    assert heads(["the same prompt " * 2]) == ["the same prompt the same prompt"]
    assert heads(["4", "41"]) == ["4", "41"]
    assert heads([]) == []
    assert len(heads(["x" * 500])[0]) == 96


def test_runs_judged_by_scores_have_scores_and_no_flips(tmp_path):
    judged = {"dynamic_sampling": DynamicSamplingConfig(metric="score")}
    for name, config in (("score", judged), ("correct", {})):
        run = write_run(tmp_path / name, steps=2, every=9, **config)
        for step in (1, 2):
            write_rollouts(run, step, [line(step, 5, 0, prompt="why?", correct=step == 2, score=-0.75)])
        laid = laid_out(run)
        groups = [group for chunk in chunks_of(laid) for group in chunk]
        scores = [response.get("score") for group in groups for response in group["responses"]]
        assert scores == ([-0.75, -0.75] if config else [None, None])
        assert bool(columns_of(laid)["flags"][1] & FLIPPED) is not bool(config)
