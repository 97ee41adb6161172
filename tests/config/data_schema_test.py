"""What the keys about data say about each other."""

import pytest

from dapo_jax.config import ConfigError, DataConfig, EvalConfig, TrainConfig, load_config, to_yaml

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


def test_a_dataset_to_evaluate_on_is_one_override(tmp_path):
    (tmp_path / "c.yaml").write_text("run_dir: r\n")
    config = load_config(tmp_path / "c.yaml", ["eval.datasets=[{source: aime_2024, path: aime.parquet}]"])
    assert config.eval.datasets == [{"source": "aime_2024", "path": "aime.parquet"}]


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: DataConfig(source="mixture"), r"data\.mixture: found \[\], needs datasets with data\.source = 'mixture'"),
        (lambda: DataConfig(mixture=MIXED), r"data\.source is 'arithmetic': set data\.source=mixture"),
        (lambda: DataConfig(source="mixture", mixture=MIXED, path="x"), r"data\.path: .* nothing beside data\.mixture"),
        (
            lambda: DataConfig(source="mixture", mixture=[{"source": "gsm8k", "weight": 0}]),
            r"data\.mixture\[0\]\.weight: found 0, needs more than 0",
        ),
        (
            lambda: DataConfig(source="mixture", mixture=[{"source": "gsm8k", "wieght": 1}]),
            r"data\.mixture\[0\]\.wieght: found 1, .* did you mean weight\?",
        ),
        (lambda: DataConfig(source="mixture", mixture=[{"path": "x"}]), r"data\.mixture\[0\]: .*needs a source"),
        (
            lambda: DataConfig(source="mixture", mixture=[{"source": "gsm8k", "source_options": {"a": 1}}]),
            r"data\.mixture\[\]\.source_options: .*'gsm8k' takes no options",
        ),
        (lambda: DataConfig(on_bad_row="ignore"), r"data\.on_bad_row: found 'ignore', needs error or skip"),
        (lambda: DataConfig(prompt_template="dappo"), r"or the name of a template: dapo; put \{prompt\}"),
        (lambda: DataConfig(few_shot=[{"prompt": "1"}]), r"data\.few_shot\[0\]: .*needs a response"),
        (lambda: DataConfig(few_shot=[{"prompt": "1", "response": 2}]), r"data\.few_shot\[0\]\.response: found 2"),
        (lambda: EvalConfig(datasets=[{"source": "mixture"}]), r"eval\.datasets\[0\]\.source: found 'mixture'"),
        (
            lambda: EvalConfig(datasets=[{"source": "gsm8k", "weight": 2}]),
            r"eval\.datasets\[0\]\.weight: found 2.0, needs nothing; every prompt is evaluated",
        ),
        (
            lambda: EvalConfig(datasets=[{"source": "gsm8k"}, {"source": "jsonl", "path": "x/gsm8k.jsonl"}]),
            r"eval\.datasets\[1\]\.name: found 'gsm8k', needs a name of its own",
        ),
        (
            lambda: EvalConfig(datasets=[{"source": "gsm8k", "name": "a/b"}]),
            r"eval\.datasets\[0\]\.name: found 'a/b', needs a name without '/'",
        ),
    ],
)  # fmt: skip
def test_what_contradicts_itself_is_refused(build, message):
    with pytest.raises(ConfigError, match=message):
        build()


def test_an_entry_that_is_no_mapping_is_named_with_its_place(tmp_path):
    (tmp_path / "c.yaml").write_text("run_dir: r\n")
    with pytest.raises(ConfigError, match=r"data\.few_shot\[1\]: found '1\+1=2', needs a mapping"):
        load_config(tmp_path / "c.yaml", ["data.few_shot=[{prompt: a, response: b}, 1+1=2]"])
