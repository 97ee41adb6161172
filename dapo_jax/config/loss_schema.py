"""The sections `loss`, `advantage` and `teacher`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from dapo_jax.config.algorithms import ALGORITHMS, CLIP_RANGE, CLIPS, OBJECTIVES, OTHER_NAMES, SELECTIONS
from dapo_jax.config.keys import POSITIVE, SIZE, Range, Rules, check_value, key, named, refuse
from dapo_jax.config.section import Section
from dapo_jax.hints import nearest

SHARE = Range("more than 0 and at most 1", lambda v: 0 < v <= 1)
OPTIONS = {
    "dual_clip": Rules(range=Range("more than 1, or null (off)", lambda v: v > 1)),
    "floor": Rules(
        range=Range("0 to 1", lambda v: 0 <= v <= 1)
    ),  # the weight 1, of an on-policy token, is kept
    "cap": Rules(range=SIZE),
    "tau_positive": Rules(range=POSITIVE),
    "tau_negative": Rules(range=POSITIVE),
    "divergence": Rules(choices=("tv", "kl")),
    "frac": Rules(range=SHARE),
    "low": Rules(range=None),
    "high": Rules(range=None),
    "limit": Rules(range=POSITIVE),
}
"""Rules for options of objectives and selections. Other options are numbers of 0 or more."""
MAY_BE_NULL = ("clip.dual_clip", "dppo.cap", "reinforce.cap")


class Correction(NamedTuple):
    """The importance weighting of a run, with all defaults resolved. See `TrainConfig.correction`."""

    kind: str
    """Kind of importance weights: none, truncate, mask, keep_responses or truncate_responses."""
    low: float
    """Smallest weight that is kept. 0 means no lower bound."""
    high: float
    """Largest weight that is kept, or for truncate, the cap."""


IMPORTANCE_RANGES = {
    "truncate": (0.0, 2.0), "truncate_responses": (0.0, 2.0), "mask": (0.5, 2.0), "keep_responses": (0.99, 1.01),
}  # fmt: skip
"""Smallest and largest weight for each correction, if `loss.importance_range` is empty."""


@dataclass(frozen=True, kw_only=True)
class LossConfig(Section, at="loss"):
    """The loss, and the old log-probabilities, importance weights, token selection and KL penalty in it."""

    objective: str | dict[str, Any] = key(
        "clip",
        not_empty=True,
        options=OBJECTIVES,
        aliases="loss_mode policy_loss_type loss_type importance_sampling_level clip_ratio_c delta",
    )
    """The loss function: a name in `dapo_jax.dapo.objectives.OBJECTIVES` (clip, gspo, gspo_token, gmpo, cispo, sapo, dppo, vespo, reinforce, dro, topr, kl_cov), `module:function`,
    or `path/to/file.py:function`. clip is the loss of the paper, `dapo_jax.dapo_loss`. `algorithm: NAME` sets the objective and all keys that belong to it (see algorithms.md).
    Options are the objective's keyword parameters that have a default. Write them below the name, for example {cispo: {cap: 5}} or {clip: {dual_clip: 10}}. The clip ratios are keys of their own."""
    clip_ratio_low: float = key(CLIP_RANGE[0], range=SHARE, aliases="epsilon clip_ratio clip_lower")
    """Lower clip range, eps_low in Eq. 8."""
    clip_ratio_high: float = key(CLIP_RANGE[1], range=POSITIVE, aliases="epsilon_high clip_higher")
    """Upper clip range, eps_high in Eq. 8. With the same value as `clip_ratio_low`, this is the plain PPO clip."""
    aggregation: str = key(
        "token_mean",
        choices=["token_mean", "prompt_mean", "sequence_mean", "token_sum_norm", "sequence_sum"],
        aliases="loss_agg_mode masked_mean_axis",
    )
    """How token losses are averaged: token_mean, prompt_mean, sequence_mean, token_sum_norm or sequence_sum. See `dapo_jax.token_weights`."""
    old_logprobs: str = key(
        "trainer", choices=["trainer", "sampler"], aliases="bypass_mode bypass_old_logprob_for_rollout"
    )
    """Source of pi_old in the policy ratio. trainer: recomputed with the weights at the start of the step. sampler: recorded during sampling, possibly with older weights."""
    correction: str = key(
        "auto",
        choices=["auto", "none", "truncate", "mask", "keep_responses", "truncate_responses"],
        aliases="rollout_is rollout_rs rollout_is_mode tis vllm_importance_sampling_correction vllm_importance_sampling_mode",
    )
    """Importance weights that correct for tokens sampled with older or rounded weights. They are computed from each token's ratio pi_old / pi_sampler. truncate: min(ratio, C), where `importance_range` is [0, C].
    mask: the ratio, or 0 outside `importance_range`. keep_responses: the ratio, or 0 if the geometric mean of the ratios in the response is outside the range. truncate_responses:
    min(product of the ratios in the response, C) for all tokens of the response. In an episode with several contexts, each context counts as a response. auto: truncate if `rollout.in_flight` or `importance_range` is set, else none. With `old_logprobs: sampler`, auto means none, because the policy ratio of the loss already corrects for this."""
    importance_range: list[float] = key(
        default_factory=list,
        aliases="tis_imp_ratio_cap vllm_importance_sampling_cap truncated_importance_sampling_ratio_cap rollout_is_threshold vllm_importance_sampling_clip_max "
        "rollout_rs_threshold rollout_rs_threshold_lower rollout_is_threshold_lower vllm_importance_sampling_clip_min",
    )
    """Range of the ratio that mask keeps, or of the geometric mean that keep_responses keeps. Tokens or responses outside this range are excluded from the loss,
    but they count in the baseline and in the scale of the advantages, and in the mean over tokens. For truncate and truncate_responses, [0, C] sets the largest weight C.
    If empty, the range is [0, 2] for truncate and truncate_responses, [0.5, 2] for mask and [0.99, 1.01] for keep_responses."""
    drop_off_policy: float | None = key(None, aliases="off_policy_mask_threshold")
    """Exclude responses with a negative advantage whose mean log(pi_sampler / pi) over the tokens exceeds this limit, in nats per token (DeepSeek-V3.2,
    https://arxiv.org/abs/2512.02556). pi is the policy of the current update. null keeps all responses."""
    select: str | dict[str, Any] = key(
        "all",
        choices=[*SELECTIONS],
        options=SELECTIONS,
        aliases="top_entropy_quantile clip_cov_ratio kl_cov_ratio",
    )
    """Tokens of an update that enter the loss, selected once per step with the weights at its start. all: all tokens. high_entropy: the tokens with the highest entropy. low_covariance: all except random tokens among those with
    a high covariance of advantage and log-probability (Clip-Cov). high_covariance: the tokens that the objective kl_cov penalizes. low_second_moment: all except those with the largest log-ratio (M2PO).
    Write options below the name, for example {high_entropy: {frac: 0.2}}: frac for high_entropy and high_covariance, frac, low and high for low_covariance, limit for low_second_moment."""
    center: int = key(0)
    """Number k of most probable tokens with which the objective is centered (score centering, https://arxiv.org/abs/2609.20807). Centering removes the push that a token gets without any effect on the
    reward because the sampler is another policy, for example with 8-bit weights or in flight. The sampler records its k most probable tokens with each token, in 8 k bytes. 0 means no centering and no record."""
    kl_coef: float = key(0.0, aliases="beta kl_loss_coef use_kl_loss")
    """Weight of the KL penalty against the reference policy. If 0, no reference policy is loaded. (Section 2.3)"""
    kl_estimator: str = key(
        "k3",
        choices=["k3", "k3_unbiased"],
        aliases="use_bias_correction_kl use_unbiased_kl kl_loss_type",
        only_with="loss.kl_coef",
    )
    """Estimator of the KL divergence. k3: e^d - 1 - d with d = log(pi_ref / pi). k3_unbiased: k3 times pi / pi_old, whose gradient is the gradient of the
    divergence (DeepSeek-V3.2)."""

    def check_together(self) -> None:
        low, high = self.clip_ratio_low, self.clip_ratio_high
        kind, bounds = self.correction, self.importance_range
        if high < low:
            remedy = f"{high} < {low}: raise it, or lower loss.clip_ratio_low"
            self.refuse("clip_ratio_high", f"at least loss.clip_ratio_low = {low}", remedy)
        if self.old_logprobs == "sampler" and (bounds or kind not in ("auto", "none")):
            name, needs = ("importance_range", "[]") if bounds else ("correction", "auto or none")
            remedy = "pi_old / pi_sampler is then 1, and the ratio of the loss already corrects: set loss.old_logprobs=trainer, or leave it out"
            self.refuse(name, f"{needs} with loss.old_logprobs = 'sampler'", remedy)
        if bounds and kind == "none":
            remedy = "there are no weights: set loss.correction=truncate, or leave it out"
            self.refuse("importance_range", "[] with loss.correction = 'none'", remedy)
        keeps = kind in ("mask", "keep_responses")
        if bounds and not (
            len(bounds) == 2 and 0 <= bounds[0] <= 1 <= bounds[1] and keeps == (bounds[0] > 0)
        ):
            needs = f"two numbers with loss.correction = {kind!r}: {'more than 0 and at most 1' if keeps else '0'}, and 1 or more"
            remedy = f"the weight 1 must be kept: write for example {'[0.5, 2]' if keeps else '[0, 2], or set loss.correction=mask'}"
            self.refuse("importance_range", needs, remedy)
        self._check_objective()
        if self.center:
            self._check_center()

    def _check_center(self) -> None:
        """Checks that the weight of a token depends on this token only, so that its mean over all tokens is known."""
        select = named(self.select).name
        for name, bad, needs in (
            ("correction", self.correction.endswith("_responses"), "auto, none, truncate or mask"),
            ("drop_off_policy", self.drop_off_policy is not None, "null"),
            ("select", select not in ("all", "high_entropy"), "all or high_entropy"),
        ):
            if bad:
                remedy = "it depends on other tokens of the response, or on which token was sampled, so the mean to remove is not known: change it, or set loss.center=0"
                self.refuse(name, f"{needs} with loss.center = {self.center}", remedy)

    def _check_objective(self) -> None:
        """Checks the keys that depend on a built-in objective or selection. The options of other objectives are checked when the run is built."""
        (objective, options), (select, select_options) = named(self.objective), named(self.select)
        if ":" not in objective and objective not in OBJECTIVES:
            is_algorithm = objective in ALGORITHMS or objective in OTHER_NAMES
            near = nearest(objective, OBJECTIVES, least=0.0)[0]
            remedy = f"write algorithm: {objective}" if is_algorithm else f"did you mean {near}?"
            self.refuse("objective", f"{', '.join(OBJECTIVES)}, module:function or path.py:function", remedy)
        reads = OBJECTIVES.get(objective, CLIPS)
        for name, unset in zip(CLIPS, (CLIP_RANGE[:1], CLIP_RANGE[::-1]), strict=True):
            if name not in reads and getattr(self, name) not in unset:
                needs = f"{unset[0]} with loss.objective = {objective!r}, which does not read it"
                self.refuse(name, needs, "leave it out, or set loss.objective=clip")
        _check_options("loss.objective", objective, options, OBJECTIVES)
        _check_options("loss.select", select, select_options, SELECTIONS)
        low, high = select_options.get("low", 1.0), select_options.get("high", 5.0)
        if select == "low_covariance" and high <= low:
            remedy = "no covariance is between them: raise high, or lower low"
            refuse("loss.select.low_covariance.high", high, f"more than low = {low}", remedy)
        if objective == "kl_cov" and select == "all":
            remedy = "it penalizes the selected tokens: set loss.select=high_covariance"
            self.refuse("select", "a selection with loss.objective = 'kl_cov'", remedy)
        if select == "high_covariance" and objective in OBJECTIVES and objective != "kl_cov":
            remedy = "training on these tokens alone would end exploration: set loss.objective=kl_cov, or loss.select=low_covariance"
            self.refuse("select", f"low_covariance with loss.objective = {objective!r}", remedy)


def _check_options(
    key: str, choice: str, options: dict[str, Any], known: Mapping[str, Sequence[str]]
) -> None:
    names = [name for name in known.get(choice, options) if name not in CLIPS]
    if unknown := next((name for name in options if name not in names), None):
        near = nearest(unknown, names, least=0.0) or ["none, so leave it out"]
        remedy = f"set loss.{unknown}" if unknown in CLIPS else f"the nearest option is {near[0]}"
        refuse(f"{key}.{choice}.{unknown}", options[unknown], f"an option of {choice}", remedy)
    for name, value in options.items() if choice in known else ():  # not for functions of the user
        rules = OPTIONS.get(name, Rules())
        number = float | None if f"{choice}.{name}" in MAY_BE_NULL else float
        check_value(f"{key}.{choice}.{name}", value, str if rules.choices else number, rules)


@dataclass(frozen=True, kw_only=True)
class AdvantageConfig(Section, at="advantage"):
    """Advantages, which are computed from the rewards of all groups of a step. The default is Eq. 9."""

    baseline: str = key(
        "group_mean",
        choices=["group_mean", "leave_one_out", "length_weighted", "none"],
        aliases="adv_estimator advantage_estimator",
    )
    """Value that is subtracted from a reward. group_mean: mean reward of the group. leave_one_out: mean reward of the other responses (RLOO). length_weighted: mean over
    the tokens of the group, so that long responses count more (OPO). none: 0. (Eq. 9)"""
    scale: str = key(
        "group_std",
        choices=["group_std", "group_mean", "batch_std", "whiten_tokens", "whiten_responses", "none"],
        aliases="scale_rewards norm_adv_by_std_in_grpo",
    )
    """How the difference is scaled. group_std: divided by the standard deviation of the group's rewards (Eq. 9). group_mean: divided by the group's mean reward (MaxRL). batch_std: divided by the standard
    deviation of all rewards of the step. whiten_tokens and whiten_responses: mean 0 and variance 1 over the tokens or the responses of the step. none: not scaled."""
    rewards: str = key("summed", choices=["summed", "apart"])
    """Treatment of several graders. summed: the advantage is computed from the sum of their rewards. apart: the reward of each grader is normalized within its group, and the weighted
    sum of the results is then scaled (GDPO, https://arxiv.org/abs/2601.05242)."""
    best_of: int = key(1, range=SIZE)
    """Train for the best of k responses (pass@k, https://arxiv.org/abs/2508.10751): the reward of a response becomes the expected maximum over this response and k - 1 others of its group."""


@dataclass(frozen=True, kw_only=True)
class TeacherConfig(Section, at="teacher"):
    """On-policy distillation: a teacher model scores the tokens that the policy sampled, and log(pi_teacher / pi_old) is the advantage of a token."""

    source: str = key("", aliases="teacher_model_name_or_path teacher_model_revision")
    """The teacher, in the same form as `model.source`. It must have the same tokenizer as the policy. `self`: the policy at the start of the step, which reads `teacher.prompt` in place of
    the prompt. If empty, there is no teacher."""
    prompt: str = key("")
    """The question that the teacher reads with `source: self`, in place of `data.prompt_template`. A name in braces is a column of the row, for example `{prompt} The answer is {answer}.`
    A prompt has at most `data.max_prompt_tokens` tokens."""
    coef: float = key(1.0, range=POSITIVE)
    """Factor of the teacher's advantages, or of the divergence from the teacher."""
    kl: str = key("sampled", choices=["sampled", "full"])
    """How to approach the teacher. `sampled`: by the advantages of the sampled tokens. `full`: by a term of the loss, the KL divergence from the policy to the teacher over the
    whole vocabulary at each token."""
    rewards: bool = key(False)
    """Add the advantages of the rewards to the teacher's advantages. If false, training responses are not graded, all groups are trained on, and graders are used only in evaluations."""

    @property
    def is_self(self) -> bool:
        """Whether the policy is its own teacher, with another prompt."""
        return self.source == "self"
