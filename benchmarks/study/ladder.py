"""The studies and their rows: the paper's ladder (Table 1), which adds one technique per row, as changes to a configuration."""

from dataclasses import dataclass, replace
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row, defined by its changes to the previous row of the ladder, or to the row `after` which it comes."""

    name: str
    title: str
    changes: tuple[str, ...]
    after: str = ""


LADDER = (
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
    Row(
        name="soft_punishment",
        title="+ soft overlong punishment",
        changes=("reward.overlong.enabled=true",),
    ),
    Row(name="token_level", title="+ token-level loss", changes=("loss.aggregation=token_mean",)),
    Row(
        name="dynamic_sampling",
        title="+ dynamic sampling (DAPO)",
        changes=("dynamic_sampling.enabled=true",),
    ),
)
LAST = LADDER[-1].name


@dataclass(frozen=True, kw_only=True)
class Study:
    """A study: its configuration, which has all techniques of the ladder, and its rows."""

    config: str
    base_model_config: str
    ladder: tuple[Row, ...]
    further: tuple[Row, ...]
    """Rows that are not in the paper's ladder. Each names the row of the ladder that it changes."""
    results: Path
    base_model: Path | None = None
    """Folder with the trained base model. If None, the base model is trained before the runs."""

    @property
    def rows(self) -> tuple[Row, ...]:
        """All rows."""
        return (*self.ladder, *self.further)

    def overrides(self, name: str) -> list[str]:
        """Returns the overrides for a row, including the changes of the rows before it, with one value per key.

        Raises:
            ValueError: there is no such row.
        """
        rows = {row.name: row for row in self.rows}
        if name not in rows:
            raise ValueError(f"no row {name!r}; there are {', '.join(rows)}")
        names = [row.name for row in self.ladder]
        last = rows[name].after or name
        path = [*self.ladder[: names.index(last) + 1], *([rows[name]] if rows[name].after else [])]
        values: dict[str, str] = {}
        for row in path:
            values |= dict(change.split("=", 1) for change in row.changes)
        return [f"{key}={value}" for key, value in values.items()]


def _with(name: str, *changes: str) -> tuple[Row, ...]:
    """Returns the ladder with additional changes in one row."""
    return tuple(
        replace(row, changes=(*row.changes, *changes)) if row.name == name else row for row in LADDER
    )


SUMS = Study(
    config="configs/study/dapo.yaml",
    base_model_config="configs/study/base_model_sft.yaml",
    # As in the released run scripts, the punishment replaces the filter.
    ladder=_with("soft_punishment", "reward.overlong.filter_truncated=false"),
    further=(
        Row(
            name="in_flight",
            title="DAPO, rollouts in flight",
            changes=("rollout.in_flight=128", "rollout.round_tokens=8"),
            after=LAST,
        ),
        # Added after the ladder's results were known, to test whether any upper clip can matter in this task.
        Row(
            name="no_upper_clip",
            title="no upper clip",
            changes=("loss.clip_ratio_high=1000",),
            after="overlong_filtering",
        ),
    ),
    results=Path("docs/results/study"),
)
PICKED_SUMS = Study(
    config="configs/study/picked_sums.yaml",
    base_model_config="configs/study/picked_sums_base_model_sft.yaml",
    ladder=LADDER,
    # Each technique removed alone from the last row. The row `token_level` is the last row without dynamic sampling.
    further=(
        Row(
            name="no_overlong_filtering",
            title="without overlong filtering",
            changes=("reward.overlong.filter_truncated=false",),
            after=LAST,
        ),
        Row(
            name="no_clip_higher",
            title="without clip-higher",
            changes=("loss.clip_ratio_high=0.2",),
            after=LAST,
        ),
        Row(
            name="no_soft_punishment",
            title="without soft overlong punishment",
            changes=("reward.overlong.enabled=false",),
            after=LAST,
        ),
        Row(
            name="no_token_level",
            title="without token-level loss",
            changes=("loss.aggregation=sequence_mean",),
            after=LAST,
        ),
    ),
    results=Path("docs/results/study_picked_sums"),
    base_model=Path("benchmarks/study/picked_sums_base"),
)
STUDIES = {"sums": SUMS, "picked_sums": PICKED_SUMS}
