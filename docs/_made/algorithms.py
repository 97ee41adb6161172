"""The blocks of the page of algorithms, from their keys and from the docstrings of the functions that compute them."""

import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

from _made import keys
from _made.tables import table
from dapo_jax import config
from dapo_jax.config.algorithms import ALGORITHMS, GROUND, NOT_OFFERED, OTHER_NAMES, ROWS
from dapo_jax.config.keys import named
from dapo_jax.config.reading import write_yaml
from dapo_jax.dapo import selections
from dapo_jax.dapo.objectives import OBJECTIVES

ARXIV = "https://arxiv.org/abs/"
PAPERS = {
    "dapo": ["2503.14476"],
    "grpo": ["2402.03300"],
    "dr_grpo": ["2503.20783"],
    "gspo": ["2507.18071"],
    "gspo_token": ["2507.18071"],
    "cispo": ["2506.13585"],
    "rloo": ["2402.14740"],
    "reinforce_plus_plus": ["2501.03262"],
    "reinforce_plus_plus_baseline": ["2501.03262"],
    "gmpo": ["2507.20673"],
    "sapo": ["2511.20347"],
    "dppo": ["2602.04879"],
    "prime": ["2602.04879"],
    "vespo": ["2602.10693"],
    "luspo": ["2602.05261"],
    "lite_ppo": ["2508.08221"],
    "scale_rl": ["2510.13786"],
    "opo": ["2505.23585"],
    "max_rl": ["2602.02710"],
    "pass_at_k": ["2508.10751"],
    "gdpo": ["2601.05242"],
    "gpg": ["2504.02546"],
    "score_centering": ["2609.20807"],
    "dro": ["2405.19107", "2501.12599"],
    "topr": ["2503.14286"],
    "deepseek_v3_2": ["2512.02556"],
    "high_entropy": ["2506.01939"],
    "clip_cov": ["2505.22617"],
    "kl_cov": ["2505.22617"],
    "m2po": ["2510.01161"],
    "gfpo": ["2508.09726"],
    "opd": ["2601.02780"],
}
"""Numbers on arXiv."""
ELSEWHERE = {
    "reinforce": "[Williams 1992](https://doi.org/10.1007/BF00992696)",
    "opd": "[Thinking Machines 2025](https://thinkingmachines.ai/blog/on-policy-distillation/)",
}

IDEAS = {
    "dapo": "The clip is wider above 1 than below, the loss is a mean over all tokens, groups without both verdicts are replaced, and responses near the length limit are penalized.",
    "grpo": "The advantage compares a response with its group. Each response has the same weight, whatever its length.",
    "dr_grpo": "GRPO without two biases: advantages are not divided by the standard deviation, and a loss is not divided by the length of its own response.",
    "gspo": "A whole response has one ratio, the geometric mean of its tokens' ratios, and is clipped as a whole. The paper uses it for models with experts, whose token ratios vary more.",
    "gspo_token": "GSPO with a gradient through each token's own log-probability, so the tokens of a response may have different advantages.",
    "cispo": "The ratio is a bounded constant weight, and nothing is clipped away, so every token keeps a gradient.",
    "rloo": "The baseline of a response is the mean reward of the other responses of its group.",
    "reinforce_plus_plus": "There is no baseline of the group. Rewards are normalized over all tokens of the step.",
    "reinforce_plus_plus_baseline": "The group's mean is subtracted, and the differences are normalized over all tokens of the step.",
    "gmpo": "A response counts with the geometric mean of its clipped ratios, which one large ratio affects less than a sum.",
    "sapo": "A sigmoid of the ratio replaces the clip, so the gradient falls smoothly as the ratio moves away from 1.",
    "dppo": "A token is dropped if its probability has changed too much since it was sampled. A ratio would drop unlikely tokens after tiny changes.",
    "prime": "DPPO with a squared log-ratio as an additional term, as in prime-rl.",
    "vespo": "Responses that were sampled with older weights count with a smooth function of the ratio of the whole response.",
    "luspo": "GSPO with a sum over the tokens of a response instead of a mean, so a long response keeps its weight.",
    "lite_ppo": "The baseline is the mean of the group, and the scale is the standard deviation over the whole step.",
    "scale_rl": "The loss of CISPO with a mean over prompts, and advantages that are scaled over the whole step.",
    "opo": "The baseline weights the rewards of a group by length, which the paper derives as the choice with the least variance.",
    "max_rl": "Advantages are divided by the group's mean reward, so rare correct responses count more.",
    "pass_at_k": "The policy is trained for the best of k responses, which rewards different attempts.",
    "gdpo": "Each of several graders is normalized within the group before they are added, so no grader dominates by its scale.",
    "reinforce": "The policy gradient, weighted by the ratio to the sampler's policy, which is capped.",
    "gpg": "The policy gradient without any ratio: with `cap: null`, every weight is 1.",
    "score_centering": "REINFORCE with a capped ratio, without the mean push that comes from a sampler that differs from the policy. `loss.center` works with other objectives, too.",
    "dro": "A quadratic penalty on the log-ratio replaces the clip.",
    "topr": "Good responses are always learned. Other responses are weighted by their ratio, which is at most 1.",
    "deepseek_v3_2": "GRPO with a KL penalty to the reference policy. Bad responses that the policy has moved away from are excluded (`loss.drop_off_policy`).",
    "high_entropy": "DAPO on the fifth of the tokens with the highest entropy, where the policy decides between ways to continue.",
    "clip_cov": "Excludes a few of the tokens that lower entropy most, whose advantage and log-probability deviate together from their means.",
    "kl_cov": "Penalizes the log-ratio of the tokens that lower entropy most, instead of a clip.",
    "m2po": "For stale tokens: tokens with the largest log-ratios are excluded until the mean square of the rest is below a limit.",
    "gfpo": "More responses are sampled than trained on. Only the shortest of each group are kept, so responses become shorter.",
    "opd": "A teacher model scores the tokens that the policy sampled. There are no rewards, and each token has its own advantage.",
}
"""The idea of each algorithm, in one or two sentences."""
NEXT = r", \qquad "
CLIP = r"\ell = -\min\big(r A, \mathrm{clip}(r, 1-\epsilon_\text{low}, 1+\epsilon_\text{high}) A\big)"
WEIGHTS = {
    "token_mean": r"\frac{1}{N}",
    "prompt_mean": r"\frac{1}{K\, N_\text{group}}",
    "sequence_mean": r"\frac{1}{M\, n}",
    "token_sum_norm": r"\frac{1}{M\, n_\text{max}}",
    "sequence_sum": r"\frac{1}{M}",
}
"""`loss.aggregation` -> the weight of a token; `token_weights` has the same table in words."""
BASELINES = {
    "group_mean": r"R - \mathrm{mean}(R)",
    "leave_one_out": r"R - \mathrm{mean}(R \text{ of the other responses})",
    "length_weighted": r"R - \frac{\sum n R}{\sum n}",
    "none": "R",
}
"""`advantage.baseline` -> x; `step_advantages` has the same table in words, and the next one."""
SCALES = {
    "group_std": r"\frac{x}{\mathrm{std}(R) + 10^{-6}}",
    "group_mean": r"\frac{x}{\mathrm{mean}(R) + 10^{-6}} \text{ if } \mathrm{mean}(R) > 0 \text{ else } 0",
    "batch_std": r"\frac{x}{\mathrm{std}_\text{step}(R) + 10^{-6}}",
    "whiten_tokens": r"\frac{x - \mathrm{mean}_\text{step}(x)}{\sqrt{\mathrm{var}_\text{step}(x) + 10^{-8}}} \text{ over all tokens}",
    "whiten_responses": r"\frac{x - \mathrm{mean}_\text{step}(x)}{\sqrt{\mathrm{var}_\text{step}(x) + 10^{-8}}} \text{ over all responses}",
}
"""`advantage.scale` -> A; with `none`, A is x."""
APART = r"x = \sum_\text{graders} \text{weight} \cdot \frac{R - \mathrm{mean}(R)}{\mathrm{std}(R) + 10^{-6}}"
TEACHER = r"A = \text{coef}\, (\log p_\text{teacher} - \log q)"


def markdown() -> str:
    """A block for each algorithm: its idea, its formulas in the notation of the page, its keys and its papers."""
    return "\n".join(map(_block, ROWS))


def ground() -> str:
    """The keys that all algorithms set."""
    return table(["key", "value"], [[f"`{key}`", f"`{_written(value)}`"] for key, value in GROUND.items()])


def not_offered() -> str:
    """The names that are answered with a sentence."""
    return table(["name", "why, and what to use"], [[f"`{name}`", why] for name, why in NOT_OFFERED.items()])


def _block(name: str) -> str:
    also = [other for other, known in OTHER_NAMES.items() if known == name]
    written = [f"`{key}={_written(value)}`" for key, value in ROWS[name].items() if GROUND.get(key) != value]
    papers = [f"[{number}]({ARXIV}{number})" for number in PAPERS.get(name, [])]
    lines = [
        f"### `{name}`",
        IDEAS[name],
        f"$$ {NEXT.join(formulas(name))} $$",
        *(f"{sentence}." for sentence in rules(name)),
        f"Keys: {', '.join(written)}." + (f" Other names: `{'`, `'.join(also)}`." if also else ""),
        f"Paper: {', '.join(filter(None, [ELSEWHERE.get(name, ''), *papers]))}.",
    ]
    return "\n\n".join(lines) + "\n"


def formulas(name: str) -> Iterator[str]:
    """The loss of a token, its weight in the sum, and the advantage; and the condition for a token to be in the loss, if there is one."""
    row = ALGORITHMS[name]
    objective, select = (named(row[key]).name for key in ("loss.objective", "loss.select"))
    yield CLIP if objective == "clip" else _formula(OBJECTIVES[objective])
    yield f"w = {WEIGHTS[row['loss.aggregation']]}"
    if name == "opd":
        yield TEACHER
    else:
        x = BASELINES[row["advantage.baseline"]]
        scale = SCALES.get(row["advantage.scale"])
        first = APART if row["advantage.rewards"] == "apart" else f"x = {x}"
        yield f"{first}{NEXT}A = {scale}" if scale else f"A = {x}"
    if select != "all":
        selected = "selected" if objective == "kl_cov" else "in the loss"
        yield rf"\text{{{selected}: }} {_formula(getattr(selections, select))}"


def rules(name: str) -> Iterator[str]:
    """The first sentence about each key that no formula shows."""
    row, loss, advantage = ALGORITHMS[name], config.LossConfig, config.AdvantageConfig
    if row["loss.kl_coef"]:
        yield "`loss.kl_coef`: a KL penalty against the reference policy, which the formula leaves out, is added to the loss"
    if row["loss.drop_off_policy"] is not None:
        yield f"`loss.drop_off_policy`: {_first(loss, 'drop_off_policy')}"
    if row["advantage.best_of"] > 1:
        yield f"`advantage.best_of`: {_first(advantage, 'best_of')}"
    if row["batch.keep"]:
        yield f"`batch.keep`: {_first(config.BatchConfig, 'keep', sentences=2)}"


def _formula(function: Callable[..., Any]) -> str:
    """The first formula in the docstring."""
    found = re.search(r"\$\$(.*?)\$\$", inspect.getdoc(function) or "", re.DOTALL)
    assert found, f"{function} has no formula"
    return " ".join(found[1].split())


def _first(section: type, key: str, value: str = "", sentences: int = 1) -> str:
    """The first sentences of a key's text, or of the part about `value`, without references."""
    text = re.sub(r" \([^()]*https?:[^()]*\)", "", keys.texts(section)[key])
    text = text.partition(f"{value}: ")[2] if value else text
    return ". ".join(re.split(r"[.](?:\s+|$)", text)[:sentences])


def _written(value: Any) -> str:
    if isinstance(value, dict):
        return f"{{{', '.join(f'{name}: {_written(inner)}' for name, inner in value.items())}}}"
    return '""' if value == "" else write_yaml({"x": value}).removeprefix("x: ").strip()
