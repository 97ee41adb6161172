"""Reward functions as other trainers call them. Each new worker imports this file, so it imports little."""

import asyncio


def length_reward(completions, **kwargs):
    """As in TRL's documentation: reads nothing but the completions."""
    return [float(len(completion)) for completion in completions]


def conversational_reward(prompts, completions, completion_ids, **kwargs):
    [[message]], [ids] = completions, completion_ids
    assert prompts[0][-1]["role"] == "user"
    assert message["role"] == "assistant"
    return [1.0 if message["content"] == "42" and ids == [3, 4, 5] else -1.0]


def against_the_group(prompts, completions, answer, completion_ids, level, **kwargs):
    """Compares the responses with each other, which lists of one would not allow."""
    assert prompts == ["6*7"] * 3
    assert (answer, level) == (["42"] * 3, [5] * 3)
    assert completion_ids == [[3, 4, 5]] * 3
    mean = sum(len(completion) for completion in completions) / len(completions)
    return [mean - len(completion) for completion in completions]


def for_short_ones(completions, trainer_state, log_extra, log_metric):
    """TRL's keyword arguments, without the row's fields. None: the function does not apply to long responses."""
    log_metric("characters", sum(map(len, completions)))
    log_metric("characters", 0)  # a metric is the mean of its values
    log_extra("length", [len(completion) for completion in completions])
    log_extra("upper", [completion.upper() for completion in completions])
    step = trainer_state.global_step
    return [step + len(completion) if len(completion) < 4 else None for completion in completions]


def for_none(completions, **kwargs):
    assert {"trainer_state", "log_extra", "log_metric"} <= set(kwargs)
    return [None] * len(completions)


async def awaited_lengths(completions, **kwargs):
    await asyncio.sleep(0)
    return [float(len(completion)) for completion in completions]


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """As verl's own: a mapping with score, acc and pred."""
    assert (data_source, extra_info) == ("math_dapo", {"index": 5})
    right = solution_str == ground_truth
    return {"score": 1.0 if right else -1.0, "acc": right, "pred": solution_str}


async def compute_awaited(data_source, solution_str, ground_truth, extra_info=None):
    await asyncio.sleep(0)
    return {"score": 0.5, "acc": solution_str == ground_truth}
