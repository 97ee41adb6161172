"""Algorithms by name. `algorithm: NAME` in a file, or `algorithm=NAME` as an override, is replaced by the keys in `ALGORITHMS[NAME]`."""

from operator import attrgetter
from typing import Any

from dapo_jax.config.keys import shown

CLIPS = ("clip_ratio_low", "clip_ratio_high")
CLIP_RANGE = (0.2, 0.28)
"""DAPO's clip range, eps_low and eps_high in Eq. 8: the default of `loss.clip_ratio_low` and `loss.clip_ratio_high`."""

OBJECTIVES = {
    "clip": (*CLIPS, "dual_clip"),
    "gspo": CLIPS,
    "gspo_token": CLIPS,
    "gmpo": CLIPS,
    "cispo": ("floor", "cap"),
    "sapo": ("tau_positive", "tau_negative"),
    "dppo": ("divergence", "delta_low", "delta_high", "cap", "kl"),
    "vespo": ("k_positive", "lambda_positive", "k_negative", "lambda_negative"),
    "reinforce": ("cap",),
    "dro": ("beta",),
    "topr": (),
    "kl_cov": ("coef",),
}
"""Maps each built-in `loss.objective` to the keys in `CLIPS` that it reads, and to the names of its options."""

SELECTIONS = {
    "all": (), "high_entropy": ("frac",), "low_covariance": ("frac", "low", "high"), "high_covariance": ("frac",),
    "low_second_moment": ("limit",),
}  # fmt: skip
"""Maps each `loss.select` to the names of its options."""

GROUND: dict[str, Any] = {
    "loss.objective": "clip",
    "loss.clip_ratio_low": CLIP_RANGE[0],
    "loss.clip_ratio_high": CLIP_RANGE[0],
    "loss.aggregation": "token_mean",
    "loss.old_logprobs": "trainer",
    "loss.kl_coef": 0.0,
    "loss.kl_estimator": "k3",
    "loss.select": "all",
    "loss.drop_off_policy": None,
    "loss.center": 0,
    "advantage.baseline": "group_mean",
    "advantage.scale": "group_std",
    "advantage.rewards": "summed",
    "advantage.best_of": 1,
    "dynamic_sampling.enabled": False,
    "reward.overlong.enabled": False,
    "reward.overlong.filter_truncated": False,
    "batch.keep": 0,
    "teacher.source": "",
}
"""The keys that every algorithm sets, so that nothing remains of another algorithm. These values apply unless the row of the algorithm has another value."""


def _clip(low: float, high: float) -> dict[str, Any]:
    return {"loss.clip_ratio_low": low, "loss.clip_ratio_high": high}


def _objective(name: str, **options: Any) -> dict[str, Any]:
    return {"loss.objective": {name: options} if options else name}


def _select(name: str, **options: Any) -> dict[str, Any]:
    return {"loss.select": {name: options}}


_BY_SEQUENCE = {"loss.aggregation": "sequence_mean"}
_BY_SAMPLER = {"loss.old_logprobs": "sampler"}
_UNSCALED = {"advantage.scale": "none"}
_RAW = {"advantage.baseline": "none"}
_DAPO = {**_clip(*CLIP_RANGE), "dynamic_sampling.enabled": True, "reward.overlong.enabled": True}
_CISPO = _objective("cispo", cap=5.0)
_DPPO = {"divergence": "tv", "delta_low": 0.2, "delta_high": 0.2}

ROWS: dict[str, dict[str, Any]] = {
    "dapo": _DAPO,
    "grpo": _BY_SEQUENCE,
    "dr_grpo": {"loss.aggregation": "token_sum_norm", **_UNSCALED},
    "gspo": {**_objective("gspo"), **_clip(3e-4, 4e-4), **_BY_SEQUENCE},
    "gspo_token": {**_objective("gspo_token"), **_clip(3e-4, 4e-4), **_BY_SEQUENCE},
    "cispo": _CISPO,
    "rloo": {"advantage.baseline": "leave_one_out", **_UNSCALED},
    "reinforce_plus_plus": {**_RAW, "advantage.scale": "whiten_tokens"},
    "reinforce_plus_plus_baseline": {"advantage.scale": "whiten_tokens"},
    "gmpo": {**_objective("gmpo"), **_clip(0.4, 0.4), **_BY_SEQUENCE},
    "sapo": {**_objective("sapo", tau_positive=1.0, tau_negative=1.05), **_BY_SEQUENCE},
    "dppo": {**_objective("dppo", **_DPPO), **_BY_SAMPLER},
    "prime": {**_objective("dppo", **_DPPO, kl=1e-3), **_BY_SAMPLER},
    "vespo": {**_objective("vespo"), **_BY_SAMPLER},
    "luspo": {**_objective("gspo"), **_clip(2e-3, 2.5e-3), "loss.aggregation": "sequence_sum"},
    "lite_ppo": {"advantage.scale": "batch_std"},
    "scale_rl": {**_CISPO, "loss.aggregation": "prompt_mean", "advantage.scale": "batch_std"},
    "opo": {"advantage.baseline": "length_weighted", **_UNSCALED},
    "max_rl": {"advantage.scale": "group_mean", "reward.incorrect": 0.0},
    "pass_at_k": {"advantage.best_of": 4, "reward.incorrect": 0.0},
    "gdpo": {"advantage.rewards": "apart", "advantage.scale": "whiten_responses"},
    "reinforce": {**_objective("reinforce", cap=2.0), **_BY_SAMPLER, **_UNSCALED},
    "gpg": {**_objective("reinforce", cap=None), **_BY_SAMPLER, **_UNSCALED},
    "score_centering": {**_objective("reinforce", cap=2.0), **_BY_SAMPLER, **_UNSCALED, "loss.center": 32},
    "dro": {**_objective("dro", beta=0.1), **_UNSCALED},
    "topr": {**_objective("topr"), **_RAW, **_UNSCALED},
    "deepseek_v3_2": {
        **_BY_SEQUENCE,
        "loss.drop_off_policy": 0.5,
        "loss.kl_coef": 1e-3,
        "loss.kl_estimator": "k3_unbiased",
    },
    "high_entropy": {**_DAPO, **_select("high_entropy", frac=0.2)},
    "clip_cov": {**_clip(1.0, 1.0), **_select("low_covariance", frac=2e-4, low=1.0, high=5.0)},
    "kl_cov": {**_objective("kl_cov", coef=1.0), **_select("high_covariance", frac=2e-3)},
    "m2po": _select("low_second_moment", limit=0.04),
    "gfpo": {"batch.keep": 8, "batch.group_size": 16},
    "opd": {**_RAW, **_UNSCALED, "teacher.rewards": False},
}
"""The keys in which an algorithm differs from `GROUND`."""

ALGORITHMS = {name: GROUND | row for name, row in ROWS.items()}
"""Maps the name of an algorithm to its keys (dotted key -> value)."""
del ALGORITHMS["opd"]["teacher.source"]  # the user names the teacher

OTHER_NAMES = {
    "drgrpo": "dr_grpo", "reinforce++": "reinforce_plus_plus", "geo_mean": "gmpo", "maxrl": "max_rl", "passk": "pass_at_k",
    "importance_sampling": "reinforce", "kimi": "dro", "on_policy_distillation": "opd",
}  # fmt: skip
"""Maps other names of algorithms to names in `ALGORITHMS`."""

_CRITIC = "it trains a critic, which this library does not have; reinforce_plus_plus and rloo need no critic"
NOT_OFFERED = {
    "ppo": _CRITIC,
    "vapo": _CRITIC,
    "remax": "its baseline is the reward of an extra greedy response per prompt, which is not sampled here; rloo uses the other responses as the baseline",
    "grpo_passk": "it rewards only the best response of a group and is not offered; pass_at_k is another method, which rewards the expected best of k responses",
    "otb": "its baseline needs the sum of squared probabilities at each token, which is not computed here; opo has a baseline that is weighted by length",
    "bnpo": "TRL's loss_type of this name is a mean over the tokens of the batch, which is loss.aggregation=token_mean; the BNPO paper normalizes rewards by a Beta distribution, "
    "which is not offered",
    "tis": "truncated importance sampling can be combined with every algorithm except vespo: set loss.correction=truncate",
    "icepop": "it can be combined with every algorithm except vespo: set loss.correction=mask",
    "mis": "masked importance sampling can be combined with every algorithm except vespo: set loss.correction=mask for tokens, or keep_responses for responses",
    "two_sided_clip": "it is an algorithm with clipping and a dual clip: set loss.objective={clip: {dual_clip: 4}}",
}
"""Maps names of algorithms that are not offered to the reason and the alternative."""

DEFINING = (
    "loss.objective", "loss.select", "advantage.baseline", "advantage.scale", "advantage.rewards", "advantage.best_of",
    "batch.keep", "teacher.source",
)  # fmt: skip
"""Keys that a file may not set next to `algorithm`, if the algorithm sets them too. A mapping has no order, so it would be unclear which value wins."""


def algorithm_name(config: Any) -> str:
    """Returns the name of the algorithm whose keys a `TrainConfig` has, or of the most similar algorithm with the values of the other keys.

    >>> from dapo_jax.config import load_config
    >>> algorithm_name(load_config("quickstart", ["algorithm=gspo", "loss.kl_coef=0.1"]))
    'gspo with loss.kl_coef=0.1'
    """
    changes = dict[str, list[str]]()
    for name, keys in ALGORITHMS.items():
        values = [(key, attrgetter(key)(config), usual) for key, usual in keys.items()]
        changes[name] = [f"{key}={shown(value)}" for key, value, usual in values if value != usual]
    name = min(changes, key=lambda name: len(changes[name]))
    return f"{name} with {', '.join(changes[name])}" if changes[name] else name
