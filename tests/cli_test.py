"""The command line: what it prints, and that an error is one message and an exit status."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from dapo_jax.cli import main
from dapo_jax.config import load_config
from dapo_jax.run.policy import Policy
from dapo_jax.testing import tiny_decoder_config, tiny_params
from dapo_jax.text.tokenizers import CharTokenizer
from dapo_jax.trackers import read_metrics
from dapo_jax.trackers.rollout_log import read_rollouts

ROOT = Path(__file__).parents[1]
QUICKSTART = str(ROOT / "configs" / "quickstart.yaml")

GRADERS = '''
from pathlib import Path

def right(sample):
    return True

def wrong(sample):
    return False

def even(sample):
    """About half are; stops the run at once while a file called `stop` lies beside this one."""
    if Path(__file__).with_name("stop").exists():
        raise KeyboardInterrupt
    return int(sample.tokens.sum()) % 2 == 0
'''


@pytest.fixture(scope="module", autouse=True)
def home(tmp_path_factory):
    """Datasets and compiled programs go to `~/.cache`: a home of the tests' own, with the dataset prepared."""
    from dapo_jax.data import load_rows

    folder = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(folder))
        load_rows("arithmetic", "test[:1]", "~/.cache/dapo_jax/datasets")
        yield folder


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model folder: one layer, 16 wide, the quickstart's alphabet."""
    tokenizer = CharTokenizer("0123456789+=:,?")
    decoder = tiny_decoder_config(
        vocab_size=tokenizer.vocab_size, embed_dim=16, layers=1, heads=2, kv_heads=1, head_dim=8, mlp_dim=16,
        max_positions=128,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("model")
    Policy(decoder=decoder, params=tiny_params(decoder), tokenizer=tokenizer).save(folder)
    return str(folder)


@pytest.fixture(scope="module")
def graders(tmp_path_factory):
    path = tmp_path_factory.mktemp("graders") / "graders.py"
    path.write_text(GRADERS)
    return path


@pytest.fixture(scope="module")
def cut(model, graders):
    """Arguments that train the quickstart's configuration on the micro model, cut to seconds."""

    def arguments(run_dir, grader="even"):
        return [
            "train", QUICKSTART, f"run_dir={run_dir}", "steps=2", f"model.source={model}",
            f"reward.grader={graders}:{grader}", "sampling.slots=8", "sampling.max_response_tokens=6",
            "reward.overlong.buffer_tokens=2", "dynamic_sampling.prompts_per_wave=2", "dynamic_sampling.max_waves=4",
            "batch.prompts_per_step=2", "batch.group_size=4", "batch.groups_per_update=1", "batch.row_tokens=14",
            "batch.rows_per_microbatch=8", "eval.prompts=2", "eval.samples_per_prompt=4", "checkpoint.every_steps=1",
        ]  # fmt: skip

    return arguments


@pytest.fixture(scope="module")
def trained(cut, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("trained") / "run"
    assert main(cut(run_dir)) == 0
    return run_dir


def one_message(capsys, command):
    """What stands on standard error, which is one line that names the command."""
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith(f"dapo-jax {command}: ")
    return lines[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["loss.clip_ratio_hgih=0.3"], "loss.clip_ratio_high"),
        (["steps=many"], "steps: found 'many', needs"),
        (["batch.prompts_per_step=65"], "65 = 4 x 16 + 1"),
        (["model.source=shipped:quikstart"], "no model 'quikstart' is shipped; these are: quickstart"),
        (["data.source=arithmetik"], "did you mean 'arithmetic'?"),
        (["reward.grader=exat"], "did you mean 'exact'?"),
        (["data.eval_split=dev"], "has no split 'dev'"),
        (["sampling.slots=60"], "sampling.slots=60 must be a multiple"),
    ],
    ids=lambda value: value[0].split("=")[0] if isinstance(value, list) else "",
)
def test_a_configuration_error_is_one_message_and_status_2(arguments, message, capsys, tmp_path):
    run_dir = tmp_path / "run"
    assert main(["train", QUICKSTART, f"run_dir={run_dir}", *arguments]) == 2
    assert message in one_message(capsys, "train")
    assert not run_dir.exists()


def test_a_missing_file_is_one_message_and_names_the_nearest(capsys):
    assert main(["train", str(ROOT / "configs" / "quickstrat.yaml")]) == 2
    assert "quickstart.yaml?" in one_message(capsys, "train")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["eval", "shipped:quikstart"], "these are: quickstart"),
        (["eval", "no/such/folder"], "cannot read a model from"),
        (["eval", "shipped:quickstart", "--data", "arithmetik"], "did you mean 'arithmetic'"),
        (["eval", "shipped:quickstart", "--top-p", "1.5"], "eval.top_p: found 1.5"),
        (["eval", "shipped:quickstart", "eval.top_q=1"], "or `eval.top_p`"),
        (["eval", "shipped:quickstart", "--data", "gsm8k"], "name it in data.path"),
        (["eval", "shipped:quickstart", "--path", "nowhere.jsonl"], "there is no file or folder nowhere.jsonl"),
        (["data", "prepare", "gsm8k"], "name it in data.path"),
        (["data", "show", "gsn8k"], "did you mean 'gsm8k'?"),
        (["data", "show", "arithmetic", "--model", "no/such/folder"], "cannot read a tokenizer from"),
        (["sample", "shipped:quickstart", "--prompt", "1+x"], "character 'x'"),
        (["sample", "shipped:quickstart", "--prompt", "1", "--chat"], "no chat template"),
        (["sample", "shipped:quickstart", "--prompt", "1", "--system-prompt", "S"], "data.chat=true (--chat)"),
        (["sample", "shipped:quickstart", "--prompt", "1", "--chat-template-kwargs", '{"a": 1}'], "--chat"),
        (["sample", "shipped:quickstart", "--prompt", "1", "--stop", ""], "sampling.stop: found ['']"),
        (["eval", "shipped:quickstart", "sampling.stop_token_ids=[3, -1]"], "sampling.stop_token_ids: found [3, -1]"),
        (["eval", "shipped:quickstart", "--chat", "--prompts", "2"], "no chat template"),
        (["eval", "shipped:quickstart", "--prompt-template", "Q"], "data.prompt_template: found 'Q'"),
        (["eval", "shipped:quickstart", "data.source_options={a: 1}"], "data.source_options: found {'a': 1}"),
        (["sft", QUICKSTART], "quickstart.yaml"),
    ],
)  # fmt: skip
def test_other_commands_say_their_errors_the_same_way(arguments, message, capsys):
    assert main(arguments) == 2
    assert message in one_message(capsys, arguments[0])


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["trian"],
        ["train"],
        ["sample", "shipped:quickstart"],
        ["eval"],
        ["data"],
        ["data", "prepare"],
        ["eval", "x", "--kk", "2"],
        ["eval", "x", "--k", "2", "word"],
        ["sample", "x", "--prompt", "1", "seed=1"],
        ["data", "show", "gsm8k", "--on-bad-row", "ignore"],
        ["sample", "x", "--prompt", "1", "--chat-template-kwargs", "{"],
        ["sample", "x", "--prompt", "1", "--chat-template-kwargs", "[1]"],
    ],
)
def test_a_usage_error_is_status_2(arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert "usage: dapo-jax" in capsys.readouterr().err


def test_a_process_says_the_same(tmp_path):
    """From outside: the exit status, one line, no traceback."""
    command = [
        sys.executable,
        "-m",
        "dapo_jax.cli",
        "train",
        QUICKSTART,
        f"run_dir={tmp_path}/run",
        "stepz=3",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=dict(os.environ))
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert "steps" in done.stderr


def test_config_prints_yaml_that_loads_back_equal(capsys, tmp_path):
    assert main(["config", QUICKSTART, "seed=3", "loss.dual_clip=10.0"]) == 0
    (tmp_path / "printed.yaml").write_text(capsys.readouterr().out)
    expected = load_config(QUICKSTART, ["seed=3", "loss.dual_clip=10.0"])
    assert load_config(tmp_path / "printed.yaml") == expected


def test_config_prints_a_warm_starts_too(capsys):
    assert main(["config", str(ROOT / "configs" / "quickstart_sft.yaml"), "--sft"]) == 0
    assert "pairs_per_step: 512" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("grader", "counts"),
    [
        ("right", "of 8 groups 8 were all correct, 0 all wrong, 0 mixed"),
        ("wrong", "of 8 groups 0 were all correct, 8 all wrong, 0 mixed"),
    ],
)
def test_data_without_a_signal_is_one_message_with_counts_and_status_1(grader, counts, cut, capsys, tmp_path):
    """Four waves of two prompts, then it is over."""
    assert main(cut(tmp_path / "run", grader)) == 1
    message = one_message(capsys, "train")
    assert "found 0 of the 2 informative groups it needs in 4 waves" in message
    assert counts in message


def test_training_prints_where_it_got_and_where_things_are(trained, cut, capsys, tmp_path):
    assert main(cut(tmp_path / "run")) == 0
    out = capsys.readouterr().out
    assert re.search(
        r"^eval/arithmetic/avg@4: 0\.\d+ before \(step 0\), 0\.\d+ after step 2$", out, re.MULTILINE
    )
    assert str(tmp_path / "run") in out
    assert [line["step"] for line in read_metrics(tmp_path / "run" / "metrics.jsonl")] == [0, 1, 2]


def test_an_interrupted_run_is_resumed_from_the_command_line(trained, cut, graders, capsys, tmp_path):
    run_dir, stop = tmp_path / "run", graders.with_name("stop")
    stop.touch()
    try:
        # In this process: an interrupt reaches no worker.
        assert main([*cut(run_dir), "reward.workers=0"]) == 1
    finally:
        stop.unlink()
    assert one_message(capsys, "train") == "dapo-jax train: interrupted"
    assert main(cut(run_dir)) == 2
    assert "resume it with --resume" in one_message(capsys, "train")
    assert main([*cut(run_dir), "reward.workers=0", "--resume"]) == 0
    assert [line["step"] for line in read_metrics(run_dir / "metrics.jsonl")] == [0, 1, 2]


SMALL = ["--max-response-tokens", "6"]


def test_eval_takes_a_run_with_its_own_configuration_or_its_model_with_a_file(trained, capsys, tmp_path):
    assert main(["eval", str(trained), "--keep", str(tmp_path / "kept")]) == 0
    from_run = capsys.readouterr().out
    assert re.search(r"^arithmetic +[01]\.\d{3} ± 0\.\d{3} ", from_run, re.MULTILINE), from_run
    arguments = ["eval", str(trained / "model"), "--config", str(trained / "config.yaml")]
    assert main([*arguments, "--keep", str(tmp_path / "again")]) == 0
    # A model folder does not know after which step it was written, so its evaluation draws other numbers.
    assert capsys.readouterr().out.split()[:4] == from_run.split()[:4]
    kept, again = (
        read_rollouts(tmp_path / name / "arithmetic" / "step_000000.jsonl") for name in ("kept", "again")
    )
    assert len(kept) == len(again) == 8
    assert [row["prompt"] for row in kept] == [row["prompt"] for row in again]


def test_evals_options_are_keys_and_its_dataset_may_be_a_file(trained, capsys, tmp_path):
    (tmp_path / "own.jsonl").write_text('{"prompt": "3+3", "answer": "6"}\n')
    how = [
        "--k",
        "2",
        "--grader",
        "exact",
        "--prompt-template",
        "?{prompt}",
        "reward.answer_marker=",
        "--keep",
        str(tmp_path),
    ]
    assert main(["eval", str(trained), "--path", str(tmp_path / "own.jsonl"), *how]) == 0
    assert "avg@2" in capsys.readouterr().out
    rows = read_rollouts(tmp_path / "own" / "step_000000.jsonl")
    assert [row["prompt"] for row in rows] == ["?3+3"] * 2
    # Without a marker the whole response is the answer.
    assert all(row["extracted"] == (row["response"] or None) for row in rows)


def test_data_is_prepared_and_shown(trained, capsys, tmp_path):
    lines = ['{"q": "3+3", "a": "6"}', '{"q": "3+3", "a": "6"}', '{"q": "10+1", "a": "11"}', "{"]
    (tmp_path / "own.jsonl").write_text("\n".join(lines))
    told = ["jsonl", "--from", str(tmp_path / "own.jsonl"), "--options", '{"prompt": "q", "answer": "a"}']
    assert main(["data", "prepare", *told]) == 2
    assert "own.jsonl, line 4: not JSON" in one_message(capsys, "data")
    assert main(["data", "prepare", *told, "--on-bad-row", "skip"]) == 0
    said = "jsonl: 2 prompts of 4 rows (1 repeated; 1 bad: own.jsonl, line 4: not JSON"
    assert capsys.readouterr().out.startswith(f"train: {said}")
    how = [
        "--on-bad-row",
        "skip",
        "--model",
        str(trained / "model"),
        "--prompt-template",
        "?{prompt}",
        "-n",
        "1",
    ]
    assert main(["data", "show", *told, *how]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(said)
    assert "min 4 median 4 p95 4 p99 4 max 5" in shown
    assert "--- own.jsonl, line 1, 4 tokens, answer '6'\n?3+3\n" in shown
    assert "10+1" not in shown


def test_sample_prints_each_prompt_with_its_responses(trained, capsys):
    arguments = ["sample", str(trained), "--prompt", "1+2", "--prompt", "40+2", "-n", "2", *SMALL]
    assert main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if not line.startswith("    ")] == ["1+2", "40+2"]
    assert len(lines) == 6


@pytest.mark.slow
def test_the_shipped_model_is_sampled_and_evaluated(capsys):
    """It has seen sums: greedy, it ends its responses with an answer."""
    limit = ["--max-response-tokens", "48", "--temperature", "0"]
    assert main(["sample", "shipped:quickstart", "--prompt", "47+85", *limit]) == 0
    assert re.search(r"=\d+$", capsys.readouterr().out.strip())
    arguments = ["eval", "shipped:quickstart", "--k", "2", "--prompts", "16", "--slots", "16", *limit]
    assert main([*arguments, "--max-prompt-tokens", "8"]) == 0
    accuracy = float(re.search(r"^arithmetic +([\d.]+)", capsys.readouterr().out, re.MULTILINE)[1])
    assert accuracy > 0.1
