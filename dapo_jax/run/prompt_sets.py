"""Loads the prompts for training, evaluation and supervised fine-tuning from a configuration."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from datetime import date
from typing import Any, NamedTuple

import numpy as np

from dapo_jax.config import ConfigError, DataConfig, EvalConfig, SftConfig, TrainConfig
from dapo_jax.config.data_schema import SourceConfig
from dapo_jax.config.keys import prefixed
from dapo_jax.config.section import entries
from dapo_jax.dapo.rollouts import Prompt
from dapo_jax.data.prompts import DEMONSTRATIONS, PromptSource, held_out, measured_prompts, question_digest
from dapo_jax.data.rows import LoadedRows, checked_rows
from dapo_jax.data.sources import dataset_splits, load_rows
from dapo_jax.text.formatting import PromptFormat
from dapo_jax.text.tokenizers import Tokenizer

GivenRows = Sequence[Mapping[str, Any]]
"""Rows that are passed from Python instead of a dataset."""


@dataclass(frozen=True, kw_only=True)
class PromptSets:
    """The prompts of a run."""

    training: PromptSource
    notes: Sequence[str]
    """Messages about rows that are left out, and about training prompts in the evaluation."""
    questions: frozenset[bytes] = frozenset()
    """The `question_digest` of each prompt to train on. Except in a warm start, a dataset in which a question repeats is left out, because other fields distinguish its rows."""
    identity: Sequence[Mapping[str, Any]]
    """For each dataset to train on, its name and the number and sha256 of its prompts. Stored in checkpoints."""
    held_out: Mapping[str, Sequence[Prompt]] = field(default_factory=dict)
    """Maps the name of each evaluation dataset to its prompts. Empty if the run has no evaluation."""


class HeldOut(NamedTuple):
    """The prompts of the evaluation datasets."""

    prompts: dict[str, list[Prompt]]
    """Maps the name of each dataset to its prompts."""
    notes: list[str]
    """Messages about rows that are left out."""


def with_template_date(data: DataConfig, *, like: DataConfig | None = None) -> DataConfig:
    """Returns `data` with a date for chat templates to print: its own date if set, otherwise the date in `like`, otherwise today's date."""
    day = data.template_date or (like.template_date if like else "") or date.today().isoformat()
    return replace(data, template_date=day)


def prompt_sets(
    config: TrainConfig | SftConfig,
    tokenizer: Tokenizer,
    *,
    rows: GivenRows | None = None,
    eval_rows: GivenRows | None = None,
) -> PromptSets:
    """Loads the prompts for training and evaluation. If only `rows` are given from Python, there is no evaluation. Raises ConfigError if `training_prompts` or
    `held_out_prompts` failed."""
    compared = ("prompt", *DEMONSTRATIONS) if isinstance(config, SftConfig) else ("prompt",)
    training = training_prompts(config.data, tokenizer, seed=config.seed, rows=rows, compared=compared)
    if rows is not None and eval_rows is None:
        return training
    held_out, notes = held_out_prompts(config.data, config.eval, tokenizer, rows=eval_rows)
    notes = [*training.notes, *notes, *_trained_on(training.questions, held_out)]
    return replace(training, held_out=held_out, notes=notes)


def _trained_on(questions: frozenset[bytes], held_out: Mapping[str, Sequence[Prompt]]) -> Iterator[str]:
    """Yields a message for each evaluation dataset with prompts that are also trained on."""
    for name, prompts in held_out.items():
        if count := sum(question_digest(prompt.tokens, prompt.answer) in questions for prompt in prompts):
            yield (
                f"eval {name}: {count:,} of {len(prompts):,} prompts are also trained on, so the scores are not of new questions; "
                "choose another split or dataset in data.eval_split or eval.datasets"
            )


def training_prompts(
    data: DataConfig,
    tokenizer: Tokenizer,
    *,
    seed: int,
    rows: GivenRows | None = None,
    compared: tuple[str, ...] = ("prompt",),
) -> PromptSets:
    """Returns the prompts to train on, from the given rows or the configured dataset or mixture, without prompts that are too long. With `data.deduplicate`, rows of
    a file are repeated if the fields `compared` are equal. Raises ConfigError if a dataset cannot be read, or all of its prompts are too long."""
    sources = [_own_source(data, data.train_split)]
    if data.mixture and rows is None:
        sources = entries("data.mixture", data.mixture, SourceConfig)
    datasets: list[GivenRows] = []
    parts: list[Sequence[int]] = []
    notes: list[str] = []
    identity: list[Mapping[str, Any]] = []
    questions = set[bytes]()
    for source in sources:
        with _named(source, given=rows is not None):
            loaded = (
                _load(data, source, role="train", compared=compared)
                if rows is None
                else LoadedRows(checked_rows(rows))
            )
            lengths, digests, asked = measured_prompts(loaded, tokenizer, PromptFormat(data))
            kept = np.flatnonzero(lengths <= data.max_prompt_tokens)
            if len(loaded) and not len(kept):
                raise ValueError(
                    f"all {len(loaded):,} prompts are longer than data.max_prompt_tokens={data.max_prompt_tokens}; the shortest "
                    f"has {lengths.min()} tokens; raise data.max_prompt_tokens"
                )
        if loaded.note:
            notes.append(loaded.note)
        if dropped := len(loaded) - len(kept):
            whose = source.title if rows is None else "the rows given from Python"
            notes.append(
                f"{whose}: {dropped:,} of {len(loaded):,} prompts are longer than "
                f"data.max_prompt_tokens={data.max_prompt_tokens} and are left out"
            )
        parts.append((kept + sum(map(len, datasets))).tolist())
        datasets.append(loaded)
        questions |= {*asked} if len(compared) > 1 or len({*asked}) == len(asked) else set()
        whole = hashlib.sha256(b"".join(digests[index] for index in kept)).hexdigest()
        identity.append({"source": source.title, "count": len(kept), "sha256": whole})
    source = PromptSource(
        datasets[0] if len(datasets) == 1 else concatenated(datasets),
        tokenizer,
        seed=seed,
        max_prompt_tokens=data.max_prompt_tokens,
        prompt_format=PromptFormat(data),
        shuffle=data.shuffle,
        parts=parts,
        weights=[source.weight for source in sources],
    )
    return PromptSets(training=source, notes=notes, identity=identity, questions=frozenset(questions))


def repeated_prompts(config: TrainConfig, rows: int) -> tuple[str, str] | None:
    """If more prompts are sampled together than the dataset contains, returns a description of the problem and a remedy. Otherwise returns None."""
    count = config.prompts_per_wave if config.dynamic_sampling.enabled else config.batch.prompts_per_step
    if count <= rows:
        return None
    return (
        f"{count:,} prompts are sampled together, but there are only {rows:,}: each is sampled {count / rows:.3g} times",
        f"set dynamic_sampling.prompts_per_wave and batch.prompts_per_step to at most {rows}, or use more data",
    )


def held_out_prompts(
    data: DataConfig, config: EvalConfig, tokenizer: Tokenizer, *, rows: GivenRows | None = None
) -> HeldOut:
    """Returns the prompts of each evaluation dataset by name, and messages about rows that are left out. The datasets are the given rows, or `eval.datasets`, or the eval split of `data.source`. Raises
    ConfigError if a dataset cannot be read, or a prompt is too long. Long prompts are not left out, because that would change the score."""
    prompts, notes = dict[str, list[Prompt]](), list[str]()
    default = [_own_source(data, data.eval_split)]
    for source in _evaluation_sources(data, config) if rows is None else default:
        with _named(source, given=rows is not None):
            loaded = _load(data, source, role="test") if rows is None else LoadedRows(checked_rows(rows))
            prompts[source.title] = held_out(
                loaded,
                tokenizer,
                max_prompt_tokens=data.max_prompt_tokens,
                prompt_format=PromptFormat(data),
                limit=min(config.prompts, len(loaded)),
            )
        if loaded.leaves_out:
            notes.append(f"eval {source.title}: {loaded.note}")
    return HeldOut(prompts, notes)


def every_split(data: DataConfig) -> dict[str, LoadedRows]:
    """Returns all splits of the configured dataset by name, and prepares the dataset if necessary. Raises ConfigError if the dataset cannot be read. The
    message names the file and line of an invalid row."""
    whole = _own_source(data, "")
    with _named(whole):
        splits = dataset_splits(data.source, **_reading(data, whole))
        return {split: _load(data, _own_source(data, split), role=split) for split in splits}


def concatenated(lists: Sequence[GivenRows]) -> LoadedRows:
    """Concatenates lists of rows without a copy."""
    ends = np.cumsum([len(rows) for rows in lists])

    def read(index: int) -> Mapping[str, Any]:
        which = int(np.searchsorted(ends, index, side="right"))
        return lists[which][index - int(ends[which])]  # the index is negative

    return LoadedRows(range(int(ends[-1])), read=read)


def _evaluation_sources(data: DataConfig, config: EvalConfig) -> list[SourceConfig]:
    if config.datasets:
        return entries("eval.datasets", config.datasets, SourceConfig)
    if data.mixture:
        raise ConfigError(
            "eval.datasets: found [], needs the datasets to evaluate on, because data.mixture has no eval split; write "
            "{source: ..., path: ...} for each dataset, or train from Python without evaluation"
        )
    return [_own_source(data, data.eval_split)]


def _own_source(data: DataConfig, split: str) -> SourceConfig:
    return SourceConfig(source=data.source, path=data.path, source_options=data.source_options, split=split)


def _load(
    data: DataConfig, source: SourceConfig, *, role: str, compared: tuple[str, ...] = ("prompt",)
) -> LoadedRows:
    split, or_only = source.split or role, not source.split
    return load_rows(source.source, split, or_only=or_only, **_reading(data, source, compared))


def _reading(
    data: DataConfig, source: SourceConfig, compared: tuple[str, ...] = ("prompt",)
) -> dict[str, Any]:
    """Returns the common arguments of `load_rows` and `dataset_splits`."""
    return {
        "options": source.source_options,
        "path": source.path,
        "on_bad_row": data.on_bad_row,
        "deduplicate": compared if data.deduplicate else (),
    }


def _named(source: SourceConfig, *, given: bool = False) -> AbstractContextManager[None]:
    """Returns a context manager that converts errors to ConfigErrors, and adds the dataset's name or a note about rows from Python to the message."""
    split = f", split {source.split!r}" if source.split else ""
    name = "the rows given from Python" if given else f"data.source={source.source!r}{split}"
    return prefixed(name, RuntimeError)  # which is raised if a dataset cannot be stored
