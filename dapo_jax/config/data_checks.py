"""The rules of `data` and of the datasets in `eval`; see `checks`."""

from datetime import date
from typing import Any

from dapo_jax.config.data_schema import DataConfig, ExampleConfig, SourceConfig
from dapo_jax.config.entries import entries
from dapo_jax.config.schema import EvalConfig
from dapo_jax.config.templates import TEMPLATES
from dapo_jax.config.values import refuse


def check_data(data: DataConfig) -> None:
    """Checks what the data section's values say about each other."""
    if "{prompt}" not in data.prompt_template and data.prompt_template not in TEMPLATES:
        refuse(
            "data.prompt_template",
            data.prompt_template,
            f"{{prompt}} in it, or the name of a template: {', '.join(TEMPLATES)}",
            "put {prompt} where the question goes: without it every prompt would be the same text",
        )
    _check_source("data", data.source, data.source_options)
    entries("data.few_shot", data.few_shot, ExampleConfig)
    for part in entries("data.mixture", data.mixture, SourceConfig):
        _check_source("data.mixture[]", part.source, part.source_options)
    if (data.source == "mixture") != bool(data.mixture):
        refuse(
            "data.mixture",
            data.mixture,
            "datasets with data.source = 'mixture', and none otherwise",
            f"data.source is {data.source!r}: set data.source=mixture, or leave data.mixture out",
        )
    if data.mixture and data.path:
        refuse(
            "data.path",
            data.path,
            "nothing beside data.mixture",
            "write the path into the entry of the dataset",
        )
    try:
        proper = (
            not data.template_date or date.fromisoformat(data.template_date).isoformat() == data.template_date
        )
    except ValueError:
        proper = False
    if not proper:
        refuse(
            "data.template_date",
            data.template_date,
            "a day as YEAR-MONTH-DAY, or nothing",
            "write one such as 2024-07-26",
        )
    for name in ("messages", "add_generation_prompt", "today", "strftime_now"):
        if name in data.chat_template_kwargs:
            key = f"data.chat_template_kwargs.{name}"
            refuse(
                key,
                data.chat_template_kwargs[name],
                "another name",
                "this one is set for every prompt: remove it",
            )


def _check_source(key: str, source: str, options: dict[str, Any]) -> None:
    if options and source != "jsonl" and not source.startswith("reasoning_gym:"):
        refuse(
            f"{key}.source_options",
            options,
            f"{key}.source = 'jsonl' or of the form reasoning_gym:TASK",
            f"{source!r} takes no options: leave the key out",
        )


def check_eval(config: EvalConfig) -> None:
    """Checks the datasets that are evaluated on."""
    parts = entries("eval.datasets", config.datasets, SourceConfig)
    titles = [part.title for part in parts]
    for place, part in enumerate(parts):
        key = f"eval.datasets[{place}]"
        _check_source(key, part.source, part.source_options)
        if part.source == "mixture":
            refuse(f"{key}.source", part.source, "one dataset", "write an entry for each dataset")
        if part.weight != 1:
            refuse(f"{key}.weight", part.weight, "nothing", "every prompt is evaluated: leave it out")
        if "/" in part.title or part.title.startswith("."):
            needs = "a name without '/' that does not begin with '.'"
            refuse(f"{key}.name", part.title, needs, "files are named by it, and metrics eval/NAME/...")
        if part.title in titles[:place]:
            refuse(
                f"{key}.name",
                part.title,
                "a name of its own",
                "two datasets would share their metrics: write name: ... in the entry",
            )
