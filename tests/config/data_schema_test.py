"""The checks of the section `data` and of datasets for evaluation."""

import pytest

from dapo_jax.config import ConfigError, DataConfig, EvalConfig, TrainConfig, load_config, to_yaml
from dapo_jax.config.data_schema import SourceConfig

MIXED = [{"source": "gsm8k", "path": "gsm8k"}, {"source": "jsonl", "path": "own.jsonl", "weight": 3}]


def test_a_mixture_and_datasets_survive_yaml(tmp_path):
    config = TrainConfig(
        run_dir="r",
        data=DataConfig(
            source="mixture",
            mixture=MIXED,
            few_shot=[{"prompt": "1+1", "response": "2"}],
            prompt_template="dapo",
        ),
        eval=EvalConfig(datasets=[{"source": "aime_2024", "path": "aime.parquet"}]),
    )
    (tmp_path / "c.yaml").write_text(to_yaml(config))
    assert load_config(tmp_path / "c.yaml") == config


@pytest.mark.parametrize("source", ["own.jsonl", "~/sets/own.jsonl", "./own", "/sets/own.parquet"])
def test_a_file_as_the_source_is_named_without_folder_and_suffix(source):
    assert SourceConfig(source=source).title == SourceConfig(source="jsonl", path=source).title == "own"
    assert SourceConfig(source="reasoning_gym:chain_sum").title == "reasoning_gym:chain_sum"


GSM8K = {"source": "gsm8k"}


@pytest.mark.parametrize(
    ("schema", "values", "message"),
    [
        (DataConfig, {"source": "mixture"}, r"data\.mixture: found \[\], .*data\.source = 'mixture'"),
        (DataConfig, {"mixture": MIXED}, r"data\.mixture: .*data\.source is 'arithmetic'"),
        (DataConfig, {"source": "mixture", "mixture": [GSM8K | {"weight": 0}]}, r"data\.mixture\[0\]\.weight: found 0"),
        (DataConfig, {"on_bad_row": "ignore"}, r"data\.on_bad_row: found 'ignore', needs error or skip"),
        (DataConfig, {"prompt_template": "dappo"}, r"data\.prompt_template: found 'dappo'.*dapo; put \{prompt\}"),
        (DataConfig, {"few_shot": [{"prompt": "1"}]}, r"data\.few_shot\[0\]: .*needs a response"),
        (DataConfig, {"few_shot": [{"prompt": "1", "response": 2}]}, r"data\.few_shot\[0\]\.response: found 2"),
        (EvalConfig, {"datasets": [{"source": "mixture"}]}, r"eval\.datasets\[0\]\.source: found 'mixture'"),
        (EvalConfig, {"datasets": [GSM8K | {"weight": 2}]}, r"eval\.datasets\[0\]\.weight: found 2.0"),
        (EvalConfig, {"datasets": [GSM8K, GSM8K]}, r"eval\.datasets\[1\]\.name: found 'gsm8k'"),
        (EvalConfig, {"datasets": [GSM8K | {"name": "a/b"}]}, r"eval\.datasets\[0\]\.name: found 'a/b'"),
    ],
)  # fmt: skip
def test_values_that_contradict_each_other_are_refused(schema, values, message):
    with pytest.raises(ConfigError, match=message):
        schema(**values)


def test_an_entry_that_is_not_a_mapping_is_named_with_its_place(tmp_path):
    (tmp_path / "c.yaml").write_text("run_dir: r\n")
    with pytest.raises(ConfigError, match=r"data\.few_shot\[1\]: found '1\+1=2', needs a mapping"):
        load_config(tmp_path / "c.yaml", ["data.few_shot=[{prompt: a, response: b}, 1+1=2]"])
