"""The configurations in the package are found by name from any folder."""

import shutil

import pytest

from dapo_jax.config import ConfigError, SftConfig, load_config, load_evaluation
from dapo_jax.config.reading import shipped_configs


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """Runs in a folder without configurations, like a user of the installed package."""
    monkeypatch.chdir(tmp_path)


def message_of(*arguments, **options):
    with pytest.raises(ConfigError) as error:
        load_config(*arguments, **options)
    return str(error.value)


def test_a_name_loads_the_file_in_the_package():
    assert {"quickstart", "quickstart_sft", "gsm8k_qwen3_0.6b", "study/dapo"} <= shipped_configs().keys()
    file = shipped_configs()["quickstart"]
    assert load_config("quickstart", ["seed=3"]) == load_config(file, ["seed=3"])
    assert load_config("quickstart_sft", schema=SftConfig).steps == 140
    assert load_config("study/dapo").data.source == "chain_sums"
    assert load_evaluation("quickstart").data == load_config(file).data


def test_a_file_that_is_there_wins_and_a_folder_does_not(tmp_path):
    (tmp_path / "quickstart").mkdir()
    assert load_config("quickstart").run_dir == "runs/quickstart"
    (tmp_path / "quickstart").rmdir()
    (tmp_path / "quickstart").write_text("run_dir: mine\n")
    assert load_config("quickstart").run_dir == "mine"
    assert load_config(tmp_path / "quickstart").run_dir == "mine"


def test_an_unknown_name_is_answered_with_the_nearest(tmp_path):
    assert "did you mean quickstart?" in message_of("quickstrat")
    assert "give a YAML file, or one of aime_2024, code_quickstart," in message_of("zzz")
    for path in ("quickstart.yaml", "configs/quickstart.yaml"):
        assert "did you mean quickstart?" in message_of(path)
    shutil.copy(shipped_configs()["quickstart"], tmp_path / "mine.yaml")
    assert "did you mean mine.yaml?" in message_of("mine")


def test_a_preemption_of_a_run_on_a_slice_costs_one_step_at_most():
    large = [name for name in shipped_configs() if name.startswith("dapo_qwen2.5_")]
    assert {"dapo_qwen2.5_32b", "dapo_qwen2.5_32b_early", "dapo_qwen2.5_7b"} <= set(large)
    for checkpoint in (load_config(name).checkpoint for name in large):
        assert checkpoint.every_steps == 1
        assert 1 <= checkpoint.keep <= 3, "a step of 32B is 393 GB"
