"""What the mathematics should give, in float64 numpy with Python loops: slow, obvious, no code of the library."""

import math

import numpy as np


def tokens_of(mask):
    """The (row, column) of every masked-in token."""
    return [(i, t) for i in range(mask.shape[0]) for t in range(mask.shape[1]) if mask[i, t]]


def mean_weights(mask):
    """The plain token mean: 1 / (tokens in the mask)."""
    return np.full(mask.shape, 1.0 / max(len(tokens_of(mask)), 1))


def dapo_loss(logprobs, old_logprobs, advantages, mask, low=0.2, high=0.28, dual_clip=None, weights=None):
    """Eq. 8 and its gradient in closed form: d r / d logprob = r, and 0 wherever a constant was chosen."""
    weights = mean_weights(mask) if weights is None else weights
    loss, gradient = 0.0, np.zeros(mask.shape)
    for i, t in tokens_of(mask):
        advantage = float(advantages[i] if np.ndim(advantages) == 1 else advantages[i, t])
        difference = float(logprobs[i, t]) - float(old_logprobs[i, t])
        ratio = math.exp(min(max(difference, -20.0), 20.0))
        moves = abs(difference) < 20.0
        objective = ratio * advantage
        clipped = min(max(ratio, 1 - low), 1 + high) * advantage
        if clipped < objective:
            objective, moves = clipped, False
        if dual_clip is not None and advantage < 0 and objective < dual_clip * advantage:
            objective, moves = dual_clip * advantage, False
        loss -= float(weights[i, t]) * objective
        gradient[i, t] = -float(weights[i, t]) * ratio * advantage if moves else 0.0
    return loss, gradient


def kl_penalty(logprobs, ref_logprobs, mask, estimator, weights=None, old_logprobs=None):
    """The penalty and its gradient: with d = ref - logprob, d(-d) = 1 and d(e^d - 1 - d) = 1 - e^d. For r k3, r k3 + r (1 - e^d) = -r d."""
    weights = mean_weights(mask) if weights is None else weights
    penalty, gradient = 0.0, np.zeros(mask.shape)
    for i, t in tokens_of(mask):
        difference = float(ref_logprobs[i, t]) - float(logprobs[i, t])
        d = min(max(difference, -20.0), 20.0)
        value, slope = (-d, 1.0) if estimator == "k1" else (math.expm1(d) - d, -math.expm1(d))
        if estimator == "k3_unbiased":
            ratio = math.exp(float(logprobs[i, t]) - float(old_logprobs[i, t]))
            value, slope = ratio * value, -ratio * d
        penalty += float(weights[i, t]) * value
        # A clamped d is constant, so the gradient of r k3 with respect to the log-probability is then r k3.
        clamped = value if estimator == "k3_unbiased" else 0.0
        gradient[i, t] = float(weights[i, t]) * (slope if abs(difference) < 20.0 else clamped)
    return penalty, gradient


def token_weights(mask, aggregation, group_ids, max_response_tokens):
    """Each aggregation as its definition in words: a mean of means, spelled out."""
    weights = np.zeros(mask.shape)
    lengths = [int(row.sum()) for row in mask]
    responses = [i for i, length in enumerate(lengths) if length]
    prompts = {int(group_ids[i]) for i in responses}
    for i, t in tokens_of(mask):
        group_tokens = sum(lengths[j] for j in responses if group_ids[j] == group_ids[i])
        weights[i, t] = {
            "token_mean": 1.0 / sum(lengths),
            "prompt_mean": 1.0 / len(prompts) / group_tokens,
            "sequence_mean": 1.0 / len(responses) / lengths[i],
            "token_sum_norm": 1.0 / (len(responses) * max_response_tokens),
            "sequence_sum": 1.0 / len(responses),
        }[aggregation]
    return weights


def logprob_and_entropy(logits, target, temperature):
    """One token: log-softmax of the tempered logits at the target, and -sum p log p."""
    scores = [float(x) / temperature for x in logits]
    top = max(scores)
    log_total = top + math.log(sum(math.exp(x - top) for x in scores))
    return scores[target] - log_total, -sum(math.exp(x - log_total) * (x - log_total) for x in scores)


def importance_weights(logprobs, sampler_logprobs, mask, segment_ids, correction, low, high):
    """The weight of each token that the sampler has drawn: its ratio or the product over its response, bounded by itself or by the geometric mean over its response; 0 outside the mask."""
    weights = np.zeros(mask.shape)
    for i, t in tokens_of(mask):
        same = [u for j, u in tokens_of(mask) if j == i and segment_ids[i, u] == segment_ids[i, t]]
        over = same if correction == "keep_responses" else [t]
        difference = {u: float(logprobs[i, u]) - float(sampler_logprobs[i, u]) for u in same}
        mean = sum(difference[u] for u in over) / len(over)
        own = sum(difference.values()) if correction == "truncate_responses" else difference[t]
        ratio, judged = (math.exp(min(max(value, -20.0), 20.0)) for value in (own, mean))
        kept = (
            min(ratio, high) if correction.startswith("truncate") else ratio if low <= judged <= high else 0.0
        )
        weights[i, t] = {"none": 1.0}.get(correction, kept)
    return weights
