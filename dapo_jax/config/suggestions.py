"""The remedy for a key that does not exist: our name for it, or the nearest one there is.

A file of its own: it knows the names of other libraries, and nothing of reading files.
"""

import re
from collections.abc import Collection
from difflib import SequenceMatcher

from dapo_jax.config.schema import TrainConfig
from dapo_jax.config.section import rules_by_key

ALIASES = {alias: ours for ours, rules in rules_by_key(TrainConfig).items() for alias in rules.aliases}
"""A name of verl, TRL or open-instruct -> ours. Dotted ones win over their last part alone."""

NOTES = {
    alias: note
    for rules in rules_by_key(TrainConfig).values()
    for alias, note in rules.aliases.items()
    if note
}
"""A note where an alias is not the same quantity, or is easily taken for another."""

_NO_KEY = {
    "num_iterations ppo_epochs": "each response is trained on once; for several updates a step, make `batch.groups_per_update` smaller than "
    "`batch.prompts_per_step`",
    "use_vllm rollout.name": "the library samples with an engine of its own, whose keys are in `sampling`",
    "lr_scheduler_type": "the learning rate rises over `optimizer.warmup_steps` and is constant from then on",
    "push_to_hub": "after the run, upload the folder `model` in `run_dir`, which has the Hugging Face layout: hf upload ORG/NAME RUN_DIR/model",
    "logging_steps logging_strategy logging_first_step": "metrics are logged in every step; `log.rollouts_every_steps` is for sampled responses",
    "resume_from_checkpoint resume_mode": "the option --resume of the command continues from the last checkpoint",
    "multi_objective_aggregation": "the rewards of `reward.graders` are summed by weight, and advantages are computed from the sum",
    "importance_sampling_level": "ratios are taken token by token; a loss with another ratio is a function: train(config, objective=...)",
    "min_p repetition_penalty": "training needs samples of the whole distribution, from which the ratio is computed",
    "optim": "the optimizer is AdamW, whose keys are in `optimizer`",
    "eval_on_start val_before_train": "every run evaluates before its first step and after its last one; `eval.every_steps` adds to these",
    "adv_estimator": "advantages are those of groups: reward minus the mean, divided by the standard deviation with `loss.normalize_std`",
    "entropy_coeff": "the loss has no entropy bonus; `loss.clip_ratio_high` is what keeps up entropy",
    "disable_dropout": "the models have no dropout",
    "use_liger_kernel use_liger_loss": "log-probabilities are computed in parts of the vocabulary, `model.logprob_chunk_vocab` entries each",
    "sync_ref_model": "the reference policy of `loss.kl_coef` is the model at the start of the run",
}
NO_KEY = {name: answer for names, answer in _NO_KEY.items() for name in names.split()}
"""A name of verl or TRL for which there is no key here -> what to do instead."""

_NO_KEY_PREFIXES = {"vllm_": NO_KEY["use_vllm"], "hub_": NO_KEY["push_to_hub"]}


def alias_of(key: str, known: Collection[str]) -> str | None:
    """The alias that `key` ends with, the longest first, if what it stands for is one of the `known` keys or
    their sections.

    >>> alias_of("actor_rollout_ref.rollout.n", ["batch.group_size"])
    'rollout.n'
    """
    places = _places(known)
    return next((ending for ending in _endings(key) if ALIASES.get(ending) in places), None)


def _endings(key: str) -> list[str]:
    """The last parts of a dotted key in lower case, the longest first."""
    parts = key.lower().split(".")
    return [".".join(parts[start:]) for start in range(len(parts))]


def _places(known: Collection[str]) -> set[str]:
    """The keys and their sections."""
    return {place for each in known for place in (each, each.rpartition(".")[0])}


def nearest_keys(key: str, known: Collection[str], *, count: int = 3, least: float = 1.1) -> list[str]:
    """The dotted keys most like `key`, best first; a right last part in the wrong section counts as much
    as a right section with a misspelt last part. Likeness goes to 2 (equal); under `least` a key is left out.

    >>> nearest_keys("temperature", ["sampling.temperature", "eval.temperature", "seed"])
    ['eval.temperature', 'sampling.temperature']
    """

    def likeness(candidate: str) -> float:
        whole = SequenceMatcher(None, key, candidate).ratio()
        last = SequenceMatcher(None, key.rsplit(".", 1)[-1], candidate.rsplit(".", 1)[-1]).ratio()
        return whole + last

    scores = {candidate: likeness(candidate) for candidate in known}
    best = sorted(scores, key=lambda candidate: (-scores[candidate], candidate))[:count]
    return [candidate for candidate in best if scores[candidate] >= max(least, scores[best[0]] - 0.35)]


def instead_of(key: str, known: Collection[str]) -> str | None:
    """The answer to a key of another library that has none here, if the keys that the answer names are `known`.

    >>> instead_of("use_vllm", ["sampling.slots"])
    'the library samples with an engine of its own, whose keys are in `sampling`'
    """
    name = next((ending for ending in _endings(key) if ending in NO_KEY), key.lower().rpartition(".")[2])
    same_start = (answer for start, answer in _NO_KEY_PREFIXES.items() if name.startswith(start))
    answer = NO_KEY.get(name) or next(same_start, None)
    return answer if answer and set(re.findall("`([^`]+)`", answer)) <= _places(known) else None


def unknown_key(key: str, known: Collection[str]) -> str:
    """The remedy that follows "unknown key": what another library calls so, the nearest keys, or those there are."""
    alias = alias_of(key, known)
    if alias is not None:
        unit = f" ({NOTES[alias]})" if alias in NOTES else ""
        ours = f"`{alias}` of verl, TRL or open-instruct is `{ALIASES[alias]}` here{unit}"
        others = [near for near in nearest_keys(key, known, least=1.5) if near != ALIASES[alias]]
        return f"{ours}; or did you mean {_either(others)}?" if others else ours
    if answer := instead_of(key, known):
        return f"a name of verl or TRL without a key here: {answer}"
    # Or a name inside a misspelt mapping.
    near = nearest_keys(key, known) or nearest_keys(key.rpartition(".")[0], known, least=1.5)
    if near:
        return f"did you mean {_either(near)}?"
    top = sorted({candidate.split(".", 1)[0] for candidate in known})
    return f"nothing here is called like it; the top level has {', '.join(top)}"


def _either(keys: Collection[str]) -> str:
    return " or ".join(f"`{key}`" for key in keys)
