"""The command line: its output, and its errors, each with one message and an exit status."""

import json
import os
import re
import shutil
import subprocess
import sys
from contextlib import redirect_stdout
from importlib.metadata import version
from io import StringIO
from pathlib import Path

import pytest

from dapo_jax.checkpoints.checkpointer import Checkpointer
from dapo_jax.cli import _parsed, main
from dapo_jax.config import ConfigError, EvaluateConfig, SftConfig, TrainConfig, load_config, to_yaml
from dapo_jax.parallel import gpu_settings
from dapo_jax.trackers import progress, read_metrics
from dapo_jax.trackers.rollout_log import read_rollouts
from tests.run.conftest import save_micro_model

ROOT = Path(__file__).parents[1]
QUICKSTART = str(ROOT / "configs" / "quickstart.yaml")
SOME = "data.train_split=train[:64]"
"""All prompts of a split are measured before a run, and under checks of types that takes seconds for thousands."""

GRADERS = '''
from pathlib import Path

def right(sample):
    return True

def wrong(sample):
    return False

def even(sample):
    """About half are right; stops the run at once if there is a file called `stop` in this folder."""
    if Path(__file__).with_name("stop").exists():
        raise KeyboardInterrupt
    return int(sample.tokens.sum()) % 2 == 0

def brief(sample):
    """The fewer tokens the better: a number of 0 or less."""
    return 1.0 - len(sample.tokens)
'''


@pytest.fixture(scope="module", autouse=True)
def home(tmp_path_factory):
    """A home of the tests' own, and a prepared dataset."""
    from dapo_jax.data import load_rows

    folder = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(folder))
        load_rows("arithmetic", "test[:1]")
        yield folder


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    save_micro_model(folder)
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
            "train", QUICKSTART, f"run_dir={run_dir}", "steps=2", f"model.source={model}", SOME,
            f"reward.grader={graders}:{grader}", "sampling.slots=8", "sampling.max_response_tokens=6",
            "reward.overlong.buffer_tokens=2", "dynamic_sampling.prompts_per_wave=2", "dynamic_sampling.max_waves=4",
            "batch.prompts_per_step=2", "batch.group_size=4", "batch.groups_per_update=1", "batch.row_tokens=14",
            "batch.rows_per_microbatch=8", "eval.prompts=2", "eval.samples_per_prompt=4", "checkpoint.every_steps=1",
        ]  # fmt: skip

    return arguments


@pytest.fixture(scope="module")
def printed(cut, tmp_path_factory):
    """The folder of a run, and its lines on standard output."""
    run_dir = tmp_path_factory.mktemp("trained") / "run"
    with redirect_stdout(StringIO()) as out:
        assert main(cut(run_dir)) == 0
    return run_dir, out.getvalue().splitlines()


@pytest.fixture(scope="module")
def trained(printed):
    return printed[0]


def python(*words, **how):
    """Runs a new Python in the checkout."""
    command = [sys.executable, *map(str, words)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False, **how)


def one_message(capsys, command):
    """Returns standard error, which is one line that names the command."""
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith(f"dapo-jax {command}: ")
    return lines[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["loss.clip_ratio_hgih=0.3"], "loss.clip_ratio_high"),
        (["batch.prompts_per_step=65"], "65 = 4 x 16 + 1"),
        (["data.eval_split=dev"], "has no split 'dev'"),
        (["sampling.slots=60"], "sampling.slots=60 must be a multiple"),
    ],
)
def test_a_configuration_error_is_one_message_and_status_2(arguments, message, model, capsys, tmp_path):
    run_dir = tmp_path / "run"
    assert main(["train", QUICKSTART, f"run_dir={run_dir}", f"model.source={model}", SOME, *arguments]) == 2
    assert message in one_message(capsys, "train")
    assert not run_dir.exists()


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        (["train", QUICKSTART, "run_dir={}/deep/run"], "run_dir="),
        (["convert", "shipped:quickstart", "{}/deep/out"], "target="),
        (["eval", "shipped:quickstart", "--keep", "{}/kept"], "keep="),
    ],
)
def test_a_place_that_is_read_only_is_one_message_before_anything_is_done(
    arguments, key, monkeypatch, tmp_path, capsys
):
    """Permissions alone do not stop root, who runs many containers, so the system's answer is replaced."""
    place, access = tmp_path / "place", os.access
    place.mkdir()
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != place and access(path, mode))
    assert main([argument.format(place) for argument in arguments]) == 2
    output = one_message(capsys, arguments[0])
    assert key in output
    assert f"cannot write to {place}: " in output
    assert not list(place.iterdir())


def test_a_json_file_that_cannot_be_written_is_one_message(tmp_path):
    from dapo_jax.cli.arguments import write_json

    for place in (tmp_path / "nowhere" / "found.json", tmp_path):
        with pytest.raises(ConfigError, match=rf"--json {place}: .*cannot be written"):
            write_json(str(place), {})
    write_json(os.devnull, {})


@pytest.mark.parametrize("module", ["dapo_jax", "dapo_jax.cli"])
def test_the_module_is_the_command_and_names_its_version(module):
    assert python("-m", module, "--version").stdout == f"dapo-jax {version('dapo_jax')}\n"


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        (["sample", "m", "--prompt", "-", "--prompt", "-n+3", "-n", "2"], "prompt", ["-", "-n+3"]),
        (["sample", "m", "--prompt", "1", "--stop", "->", "--stop", "--x=1"], "stop", ["->", "--x=1"]),
        (["sample", "m", "--prompt", "1", "--temperature", "-1e-3"], "temperature", -1e-3),
        (["eval", "m", "--temperature", "-.5e1", "seed=1"], "temperature", "-.5e1"),
        (["plan", "c", "--json", "/dev/stdout"], "json", "-"),
    ],
)
def test_an_option_takes_the_next_word_even_if_it_begins_with_a_dash(words, name, value):
    assert getattr(_parsed(words), name) == value


@pytest.mark.parametrize("verb", ["prepare", "show"])
def test_a_file_or_folder_is_a_dataset(verb, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("own.jsonl").write_text('{"prompt": "1+1", "answer": "2"}\n')
    Path("hub", "data").mkdir(parents=True)
    shutil.copy("own.jsonl", "hub/data/train-00000-of-00001.jsonl")
    for source in ("own.jsonl", "hub", "./hub", str(tmp_path / "own.jsonl")):
        assert main(["data", verb, source]) == 0
        assert f"{source}: 1 prompts from 1 rows" in capsys.readouterr().out
    assert main(["data", verb, "owm.jsonl"]) == 2
    assert "owm.jsonl" in one_message(capsys, "data")


# Slow: starts a process. A platform without its plugin has the same message.
@pytest.mark.parametrize("platforms", ["cuda", pytest.param("nonsense", marks=pytest.mark.slow)])
def test_a_platform_that_is_not_here_is_one_message(platforms, tmp_path):
    words = ["-m", "dapo_jax.cli", "sample", "shipped:quickstart", "--prompt", "1"]
    done = python(*words, env=os.environ | {"JAX_PLATFORMS": platforms})
    [output] = [line for line in done.stderr.splitlines() if "dapo-jax" in line]
    assert done.returncode == 2
    assert f"JAX_PLATFORMS={platforms}: Unable to initialize backend" in output
    assert ("[cuda]" in output) is (platforms == "cuda" and bool(gpu_settings.missing_plugin()))
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("verb", ["prepare", "show"])
def test_the_remedies_of_data_are_its_options(verb, tmp_path, capsys):
    """Without a configuration no message names a key."""
    file, other = tmp_path / "data.jsonl", tmp_path / "other.jsonl"
    file.write_text('{"prompt": "1", "answer": ""}\n')
    other.write_text('{"question": "1", "answer": "2"}\n')
    read, unnamed = (["jsonl", "--from", str(path)] for path in (file, other))
    for arguments, remedy in ((["gsm8k"], "--from"), (read, "--on-bad-row skip"), (unnamed, "--options '{")):
        assert main(["data", verb, *arguments]) == 2
        output = one_message(capsys, "data")
        assert remedy in output
        assert "data." not in output.replace("data.jsonl", "")


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["train", QUICKSTART, "--steps", "5"], "a key is given without dashes: steps=5"),
        (["train", "--run-dir", "x", QUICKSTART], "run_dir=x"),
        (["train", QUICKSTART, "--learning-rate", "1e-6"], "optimizer.learning_rate=1e-6"),
        (["train", QUICKSTART, "--nonsense"], "KEY=VALUE"),
        (["tain", QUICKSTART], "did you mean 'train'?"),
        ([], "required: COMMAND"),
        (["train"], "the following arguments are required: config"),
        (["eval", "x", "--k", "2", "word"], "unrecognized arguments: word"),
        (["sample", "x", "--prompt", "1", "seed=1"], "unrecognized arguments: seed=1"),
        (["sample", "x", "--prompt", "--seed=3"], "argument --prompt: expected one argument"),
        (["sample", "x", "--prompt", "1", "--chat-template-kwargs", "[1]"], "'[1]' is not a JSON object"),
    ],
)
def test_an_unknown_argument_is_answered_with_a_remedy(arguments, hint, capsys):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    output = capsys.readouterr().err
    assert output.startswith("usage: dapo-jax")
    assert hint in output.splitlines()[-1]
    assert "key=value" not in output.splitlines()[-1]  # optional, although argparse lists it as missing


def test_a_split_without_its_dataset_is_refused_by_name(capsys):
    assert main(["eval", "shipped:quickstart", "--split", "train"]) == 2
    assert re.search(
        r"--split: found 'train', needs --data or --path.*data\.eval_split", capsys.readouterr().err
    )


ESCAPE = {"prompt": "\x1b[2J\x1b]0;owned\x07\u202e1+1", "answer": "2\x9b31m"}


def test_control_characters_in_data_are_escaped(tmp_path, capsys, model):
    (tmp_path / "data.jsonl").write_text(json.dumps(ESCAPE) + "\n")
    read = ["jsonl", "--from", str(tmp_path / "data.jsonl")]
    assert main(["data", "show", *read]) == 0
    assert main(["sample", "shipped:quickstart", "--prompt", "\x1b[2J"]) == 2  # the message quotes the prompt
    (tmp_path / "data.jsonl").write_text(json.dumps({"\x1b[2J": 1}) + "\n")
    assert main(["data", "prepare", *read]) == 2
    output = "".join(capsys.readouterr())
    assert "\\x1b[2J\\x1b]0;owned\\x07\\u202e1+1" in output
    assert not set("\x1b\x07\x9b\u202e") & set(output)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["eval", "shipped:quikstart"], "no shipped model 'quikstart'; available: code_quickstart, quickstart"),
        (["eval", "shipped:quickstart", "--top-p", "1.5"], "eval.top_p: found 1.5"),
        (["eval", "shipped:quickstart", "--path", "nowhere.jsonl"], "there is no file or folder nowhere.jsonl"),
        (["data", "show", "arithmetic", "--model", "no/such/folder"], "cannot read a tokenizer from"),
        (["sample", "shipped:quickstart", "--prompt", "1", "--system-prompt", "S"], "data.chat=true (--chat)"),
        (["sft", QUICKSTART], "quickstart.yaml"),
    ],
)  # fmt: skip
def test_errors_of_other_commands_are_one_message(arguments, message, capsys):
    assert main(arguments) == 2
    assert message in one_message(capsys, arguments[0])


@pytest.mark.parametrize(
    ("name", "schema", "kind"),
    [
        ("smollm2_135m_arithmetic", TrainConfig, []),
        ("study/base_model_sft", SftConfig, ["--sft"]),
        ("aime_2024", EvaluateConfig, ["--eval"]),
    ],
)
def test_config_prints_changed_keys_as_a_file_of_the_same_configuration(name, schema, kind, capsys, tmp_path):
    given = ["seed=3", 'data.prompt_template=Q: {prompt}\n"no: yes"']
    assert main(["config", name, *given, "--changed", *kind]) == 0
    printed = tmp_path / "printed.yaml"
    printed.write_text(capsys.readouterr().out)
    expected = load_config(name, given, schema=schema)
    assert load_config(printed, schema=schema) == expected
    assert len(printed.read_text().splitlines()) < len(to_yaml(expected).splitlines()) / 2


@pytest.mark.parametrize(
    ("grader", "counts"),
    [
        ("wrong", "of 8 groups, 0 were all correct, 8 all wrong, 0 mixed"),
        ("brief", "set dynamic_sampling.metric=score"),
    ],
)
def test_data_without_a_signal_is_one_message_with_counts_and_status_1(grader, counts, cut, capsys, tmp_path):
    """Four waves of two prompts, then it is over."""
    assert main(cut(tmp_path / "run", grader)) == 1
    message = one_message(capsys, "train")
    assert "found 0 of the 2 informative groups it needs" in message
    assert counts in message


def test_training_prints_the_scores_and_the_places(printed):
    run, out = printed
    lines = read_metrics(run / "metrics.jsonl")
    avg = "eval/arithmetic/avg@4"
    before, after = (f"{line[avg]:.3f} ± {line[f'{avg}_stderr']:.3f}" for line in (lines[0], lines[-1]))
    assert f"{avg}: {before} before (step 0), {after} after step 2" in out
    assert out[-3:] == [
        f"metrics, rollouts, evaluations, checkpoints and the trained model are in {run}",
        f"look inside:   dapo-jax report {run}",
        f"ask the model: dapo-jax sample {run} --prompt TEXT -n 4",
    ]
    assert [line["step"] for line in lines] == [0, 1, 2]


def test_a_run_resumed_with_another_k_compares_what_both_evaluations_have(
    trained, cut, capsys, tmp_path, monkeypatch
):
    """The run of two steps has avg@4 on file; avg@2 of step 3 is on its own, and the reward is in both."""
    run_dir = tmp_path / "run"
    shutil.copytree(trained, run_dir)
    monkeypatch.setattr(progress, "_QUIET_S", 0.0)
    assert main([*cut(run_dir), "steps=3", "eval.samples_per_prompt=2", "--resume"]) == 0
    out = capsys.readouterr().out
    found = re.findall(r"^eval/arithmetic/(.*?):( .*before \(step 0\),)? .*after step 3$", out, re.MULTILINE)
    assert [(name, bool(before)) for name, before in found] == [("avg@2", False), ("reward", True)]
    # Of the display: the first step of the resumed run is the third.
    assert set(re.findall(r"^step (\d)  sampling", out, re.MULTILINE)) == {"3"}


def test_libtpu_prints_nothing_where_there_is_no_tpu():
    pytest.importorskip("libtpu")
    if any(Path("/dev").glob("accel*")) or any(Path("/dev").glob("vfio/[0-9]*")):
        pytest.skip("there is a TPU")
    names = ("TPU_", "JAX_PLATFORMS", "ALLOW_MULTIPLE_LIBTPU_LOAD")
    plain = {name: value for name, value in os.environ.items() if not name.startswith(names)}
    done = python("-m", "dapo_jax.cli", "sample", "shipped:quickstart", "--prompt", "1+1=", env=plain)
    assert done.returncode == 0
    assert done.stderr == ""


def test_a_library_that_exits_when_it_is_imported_does_not_pass_for_success(
    cut, capsys, tmp_path, monkeypatch
):
    (tmp_path / "skyrl_gym.py").write_text("import sys\nsys.exit(0)\n")
    monkeypatch.delitem(sys.modules, "skyrl_gym", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    words = [word for word in cut(tmp_path / "run") if not word.startswith("reward.grader")]
    assert main([*words, "environment.source=skyrl_gym:gsm8k"]) == 1
    assert "skyrl_gym.py, line 2, called sys.exit(0)" in one_message(capsys, "train")


def test_a_run_of_numbers_speaks_of_rewards_and_of_nothing_correct(cut, capsys, tmp_path):
    """Every score is 0 or less, so shares of correct responses would be 0.00 throughout, whatever is learnt."""
    run_dir = tmp_path / "run"
    settings = ["log.rollouts_every_steps=1", "checkpoint.every_steps=0", "eval.every_steps=1"]
    settings += ["dynamic_sampling.metric=score", "dynamic_sampling.max_waves=20"]
    assert main([*cut(run_dir, "brief"), *settings]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^eval/arithmetic/reward: -\S+ ± .* after step 2$", out, re.MULTILINE)
    assert re.search(r"^step 1/2  reward -\d", out, re.MULTILINE)
    text = (run_dir / "rollouts" / "step_000001.txt").read_text()
    assert not re.search("acc |avg@|pass@|correct|wrong", out + text)
    lines = read_metrics(run_dir / "metrics.jsonl")
    assert all(line["rollout/accuracy"] == 0.0 < line["rollout/scores_differ_frac"] for line in lines[1:])
    with Checkpointer(run_dir / "checkpoints", keep=9) as checkpointer:
        assert checkpointer.best()[1] == max(line["eval/arithmetic/reward"] for line in lines[1:])


def test_an_interrupted_run_is_resumed_from_the_command_line(trained, cut, graders, capsys, tmp_path):
    run_dir, stop = tmp_path / "run", graders.with_name("stop")
    stop.touch()
    try:
        # In this process: an interrupt reaches no worker.
        assert main([*cut(run_dir), "workers.count=0"]) == 1
    finally:
        stop.unlink()
    assert one_message(capsys, "train") == "dapo-jax train: interrupted"
    assert main(cut(run_dir)) == 2
    assert "resume it with --resume" in one_message(capsys, "train")
    assert main([*cut(run_dir), "workers.count=0", "--resume"]) == 0
    assert [line["step"] for line in read_metrics(run_dir / "metrics.jsonl")] == [0, 1, 2]


SMALL = ["--max-response-tokens", "6"]


def test_eval_takes_a_run_with_its_own_configuration_or_its_model_with_a_file(trained, capsys, tmp_path):
    assert main(["eval", str(trained), "--keep", str(tmp_path / "kept")]) == 0
    from_run = capsys.readouterr().out
    assert re.search(r"^arithmetic +[01]\.\d{3} ± 0\.\d{3} ", from_run, re.MULTILINE), from_run
    arguments = ["eval", str(trained / "model"), "--config", str(trained / "config.yaml")]
    assert main([*arguments, "--keep", str(tmp_path / "again")]) == 0
    # A model folder has no step, so its evaluation uses other random numbers.
    file = "arithmetic/step_000000.jsonl"
    kept, again = (
        [row["prompt"] for row in read_rollouts(tmp_path / name / file)] for name in ("kept", "again")
    )
    assert kept == again
    assert len(kept) == 8


def test_evals_options_are_keys_and_its_dataset_may_be_a_file(trained, capsys, tmp_path):
    (tmp_path / "own.jsonl").write_text('{"prompt": "3+3", "answer": "6"}\n')
    how = ["--k", "2", "--grader", "exact", "--prompt-template", "?{prompt}", "--keep", str(tmp_path)]
    how.append("reward.answer_marker=")
    assert main(["eval", str(trained), "--path", str(tmp_path / "own.jsonl"), *how]) == 0
    assert "avg@2" in capsys.readouterr().out
    rows = read_rollouts(tmp_path / "own" / "step_000000.jsonl")
    assert [row["prompt"] for row in rows] == ["?3+3"] * 2
    # Without a marker the whole response is the answer.
    assert all(row["extracted"] == (row["response"] or None) for row in rows)


def test_data_is_prepared_and_shown(trained, capsys, tmp_path):
    lines = ['{"q": "3+3", "a": "6"}', '{"q": "3+3", "a": "6"}', '{"q": "10+1", "a": "1_1"}', "{"]
    (tmp_path / "own.jsonl").write_text("\n".join(lines))
    given = ["jsonl", "--from", str(tmp_path / "own.jsonl"), "--options", '{"prompt": "q", "answer": "a"}']
    assert main(["data", "prepare", *given]) == 2
    assert "own.jsonl, line 4: not JSON" in one_message(capsys, "data")
    assert main(["data", "prepare", *given, "--on-bad-row", "skip"]) == 0
    output = "jsonl: 2 prompts from 4 rows (1 repeated; 1 bad: own.jsonl, line 4: not JSON"
    prepared = capsys.readouterr().out
    assert prepared.startswith(f"train: {output}")
    assert "train: 1 references that math cannot parse completely: '1_1' (own.jsonl, line 3)" in prepared
    how = ["--on-bad-row", "skip", "--model", f"{trained}/model", "--prompt-template", "?{prompt}", "-n", "1"]
    assert main(["data", "show", *given, *how]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(output)
    # The lengths are 4 and 5. A limit of 4 would keep half of the prompts, and only 5 keeps 95%.
    assert "min 4 median 5 p95 5 p99 5 max 5" in shown
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
