"""The table of algorithms, from their rows and from the docstrings of the functions that compute them."""

import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

from _made import keys
from _made.tables import table
from dapo_jax import config
from dapo_jax.config.algorithms import ALGORITHMS, GROUND, NOT_OFFERED, OTHER_NAMES, ROWS
from dapo_jax.config.reading import write_yaml
from dapo_jax.dapo import selections
from dapo_jax.dapo.advantages import step_advantages
from dapo_jax.dapo.losses import token_weights
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


def markdown() -> str:
    """All algorithms, each with its keys, its formulas and its papers."""
    return table(["`algorithm`", "keys", "formula", "source"], map(_row, ROWS))


def ground() -> str:
    """The keys that all algorithms set."""
    return table(["key", "value"], [[f"`{key}`", f"`{_written(value)}`"] for key, value in GROUND.items()])


def not_offered() -> str:
    """The names that are answered with a sentence."""
    return table(["name", "why, and what to use"], [[f"`{name}`", why] for name, why in NOT_OFFERED.items()])


def _row(name: str) -> list[str]:
    also = [other for other, known in OTHER_NAMES.items() if known == name]
    written = [f"`{key}={_written(value)}`" for key, value in ROWS[name].items() if GROUND.get(key) != value]
    papers = [f"[{number}]({ARXIV}{number})" for number in PAPERS.get(name, [])]
    return [
        f"`{name}`" + (f" (also `{'`, `'.join(also)}`)" if also else ""),
        ", ".join(written),
        "; ".join(formulas(name)),
        ", ".join(filter(None, [ELSEWHERE.get(name, ""), *papers])),
    ]


def formulas(name: str) -> Iterator[str]:
    """What an algorithm computes otherwise than plain clipping; for `dapo`, the clipped loss itself."""
    row, loss, advantage = ALGORITHMS[name], config.LossConfig, config.AdvantageConfig
    if row["loss.objective"] != "clip" or name == "dapo":
        yield _formula(OBJECTIVES[row["loss.objective"]])
    if row["loss.select"] != "all":
        yield _formula(getattr(selections, row["loss.select"]))
    if row["loss.aggregation"] != GROUND["loss.aggregation"]:
        yield f"weight of a token: {_cell(token_weights, row['loss.aggregation'])}"
    if row["loss.drop_off_policy"] is not None:
        yield _first(loss, "drop_off_policy")
    if row["advantage.rewards"] != "summed":
        yield _first(advantage, "rewards", "apart")
    if row["advantage.best_of"] > 1:
        yield _first(advantage, "best_of")
    if row["batch.keep"]:
        yield _first(config.BatchConfig, "keep", sentences=2)
    if name == "opd":
        yield (inspect.getdoc(config.TeacherConfig) or "").removesuffix(".")
    elif any(row[key] != GROUND[key] for key in ("advantage.baseline", "advantage.scale")):
        x = _cell(step_advantages, row["advantage.baseline"])
        scale = row["advantage.scale"].replace("responses", "tokens")
        scaled = _cell(step_advantages, scale, last=True)
        if scale != row["advantage.scale"]:
            scaled = scaled.replace("tokens in the loss", "responses")
        yield f"A = {x}" if scaled == "x" else f"x = {x}, A = {scaled}"


def _formula(function: Callable[..., Any]) -> str:
    """The first formula in the docstring."""
    found = re.search(r"\$\$(.*?)\$\$", inspect.getdoc(function) or "", re.DOTALL)
    assert found, f"{function} has no formula"
    return f"${' '.join(found[1].split())}$"


def _cell(function: Callable[..., Any], name: str, *, last: bool = False) -> str:
    """The second cell of the row `name` in a table of the docstring: the first such row, or the last."""
    rows = re.findall(rf"^\| `{name}` \| (.*?) \|", inspect.getdoc(function) or "", re.MULTILINE)
    return rows[-1 if last else 0].removesuffix(".")


def _first(section: type, key: str, value: str = "", sentences: int = 1) -> str:
    """The first sentences of a key's text, or of the part about `value`, without references."""
    text = re.sub(r" \([^()]*https?:[^()]*\)", "", keys.texts(section)[key])
    text = text.partition(f"{value}: ")[2] if value else text
    return ". ".join(re.split(r"[.](?:\s+|$)", text)[:sentences])


def _written(value: Any) -> str:
    if isinstance(value, dict):
        inside = ", ".join(write_yaml({name: one}).strip() for name, one in value.items())
        return f"{{{inside}}}"
    return '""' if value == "" else write_yaml({"x": value}).removeprefix("x: ").strip()
