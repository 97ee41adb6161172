"""The rows of the study: the paper's ladder (Table 1), which adds one technique per row, as changes to configs/study/dapo.yaml."""

from dataclasses import dataclass

CONFIG = "configs/study/dapo.yaml"
BASE_MODEL_CONFIG = "configs/study/base_model_sft.yaml"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row, defined by its changes to the previous row."""

    name: str
    title: str
    changes: tuple[str, ...]


ROWS = (
    Row(
        name="grpo",
        title="naive GRPO",
        changes=(
            "reward.overlong.enabled=false",
            "reward.overlong.filter_truncated=false",
            "loss.clip_ratio_high=0.2",
            "loss.aggregation=sequence_mean",
            "dynamic_sampling.enabled=false",
        ),
    ),
    Row(
        name="overlong_filtering",
        title="+ overlong filtering",
        changes=("reward.overlong.filter_truncated=true",),
    ),
    Row(name="clip_higher", title="+ clip-higher", changes=("loss.clip_ratio_high=0.28",)),
    # As in the released run scripts, the punishment replaces the filter.
    Row(
        name="soft_punishment",
        title="+ soft overlong punishment",
        changes=("reward.overlong.enabled=true", "reward.overlong.filter_truncated=false"),
    ),
    Row(name="token_level", title="+ token-level loss", changes=("loss.aggregation=token_mean",)),
    Row(
        name="dynamic_sampling",
        title="+ dynamic sampling (DAPO)",
        changes=("dynamic_sampling.enabled=true",),
    ),
)

FURTHER = (
    Row(
        name="in_flight",
        title="DAPO, rollouts in flight",
        changes=("rollout.in_flight=128", "rollout.round_tokens=8"),
    ),
)
"""Rows that are not in the paper's ladder, as changes to its last row."""

PROBES = (
    # Added after the ladder's results were known, to test whether any upper clip can matter in this task.
    Row(
        name="no_upper_clip",
        title="no upper clip",
        changes=(*ROWS[1].changes, "loss.clip_ratio_high=1000"),
    ),
)
"""Rows for questions that the ladder leaves open, as changes to its first row."""


def overrides(name: str) -> list[str]:
    """Returns the overrides for the row or probe `name`, including the changes of all rows before it, with one value per key.

    Raises:
        ValueError: there is no such row.
    """
    paths = {row.name: ROWS[: place + 1] for place, row in enumerate(ROWS)}
    paths |= {row.name: (*ROWS, row) for row in FURTHER}
    paths |= {probe.name: (ROWS[0], probe) for probe in PROBES}
    if name not in paths:
        raise ValueError(f"no row {name!r}; there are {', '.join(paths)}")
    values: dict[str, str] = {}
    for row in paths[name]:
        values |= dict(change.split("=", 1) for change in row.changes)
    return [f"{key}={value}" for key, value in values.items()]
