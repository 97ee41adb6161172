"""`dapo-jax doctor`: the table, the verdict, and the exit status."""

import json

import pytest

from dapo_jax.cli import main
from tests.run.conftest import save_micro_model


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "400")


@pytest.fixture
def file(tmp_path):
    save_micro_model(tmp_path / "model")
    (tmp_path / "sums.jsonl").write_text('{"prompt": "1+1", "answer": "2"}\n')
    config = tmp_path / "config.yaml"
    config.write_text(
        f"{{run_dir: {tmp_path}/run, model: {{source: {tmp_path}/model}}, batch: {{rows_per_microbatch: 8}}, "
        f"sampling: {{slots: 8, max_response_tokens: 8}}, reward: {{overlong: {{enabled: false}}}}, "
        f"data: {{source: jsonl, path: {tmp_path}/sums.jsonl, max_prompt_tokens: 8}}, "
        f"eval: {{datasets: [{{source: jsonl, path: {tmp_path}/sums.jsonl}}]}}}}"
    )
    return str(config)


def test_a_healthy_configuration_ends_with_0(file, capsys):
    assert main(["doctor", file, "--quick"]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[0].split() == ["check", "┃", "state", "┃", "result"]
    assert "prompt 0, 3 tokens, answer '2':" in out
    assert "This configuration passed all checks" in out.splitlines()[-1]


def test_a_failure_ends_with_1_and_programs_read_it_as_json(file, capsys):
    assert main(["doctor", file, "model.source=preset:tinny", "--quick", "--json", "-"]) == 1
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert found["can_train"] is False
    assert err.splitlines()[-1] == found["verdict"] == "This configuration cannot train here: see model."
    states = {check["name"]: check["state"] for check in found["checks"]}
    assert (states["model"], states["memory"], states["run_dir"]) == ("failed", "skipped", "ok")


def test_without_a_configuration_the_machine_alone_is_examined(capsys):
    assert main(["doctor", "--quick"]) == 0
    out = capsys.readouterr().out
    assert "host memory" in out
    assert "model" not in out
    assert "This machine passed all checks" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["none.yaml"], "none.yaml"), (["FILE", "--right", "<b>"], "--right: found '<b>', needs {answer}")],
)
def test_a_configuration_error_is_one_message_and_status_2(arguments, message, file, capsys):
    assert main(["doctor", *(file if text == "FILE" else text for text in arguments)]) == 2
    assert message in capsys.readouterr().err
