"""launch/tpu_vm.sh with gcloud stubbed, and tpu_worker.sh in the home of a worker."""

import shutil
import stat

import pytest

from tests.launch.clients import ASYNC_GATHERS, TOKENS

POD = ("--name=pod", "--type=v5p-256", "--zone=us-east5-a", "--poll=0")
RUN = ("configs/quickstart.yaml", "run_dir=gs://bucket/pod")
CREATED = ["describe", "create", "describe"]
STARTED = ["scp", "setup", "start", "follow"]


def train(laptop, *more, **environment):
    return laptop.launch("tpu_vm.sh", "train", *POD, *RUN, *more, **environment)


def verbs(laptop):
    return [call["verb"] for call in laptop.calls("gcloud")]


def starts(laptop):
    """The arguments of every start of `dapo-jax train` on the workers."""
    commands = [word for call in laptop.calls("gcloud") for word in call["words"] if " start " in word]
    return [words.removeprefix("--command=bash tpu_worker.sh start ").split() for words in commands]


def test_train_requests_copies_starts_follows_and_deletes(laptop):
    laptop.scenario(describe=["NOT_FOUND", "WAITING_FOR_RESOURCES", "PROVISIONING", "ACTIVE"])
    done = train(laptop)
    assert done.returncode == 0, done.stderr
    waited = ["describe", "create", "describe", "describe", "describe"]
    assert verbs(laptop) == [*waited, *STARTED, "delete"]
    assert starts(laptop) == [list(RUN)]
    for call in laptop.calls("gcloud"):
        assert call["verb"] == "describe" or "--quiet" in call["words"]  # gcloud must not prompt
        assert "--worker=all" in call["words"] or call["verb"] not in STARTED
    [create] = [words for words in laptop.commands() if "create" in words]
    assert {"--accelerator-type=v5p-256", "--runtime-version=v2-alpha-tpuv5"} <= {*create}


def test_a_preempted_run_is_recreated_and_resumed(laptop):
    states = ["NOT_FOUND", "ACTIVE", "SUSPENDED", "SUSPENDED", "WAITING_FOR_RESOURCES", "ACTIVE"]
    laptop.scenario(describe=states, follow=[255, 0])
    done = train(laptop, "--spot", "--restarts=0")
    assert done.returncode == 0, done.stderr
    again = ["describe", "describe", "delete", "create", "describe", "describe"]
    assert verbs(laptop) == [*CREATED, *STARTED, *again, *STARTED, "delete"]
    assert starts(laptop) == [list(RUN), [*RUN, "--resume"]]
    creates = [words for words in laptop.commands() if "create" in words]
    assert creates[0] == creates[1]
    assert "--spot" in creates[0]


@pytest.mark.parametrize(
    ("follow", "later", "status", "message", "count"),
    [
        ([2], [], 2, "pod is still up", 1),
        ([75, 7], [], 7, "1 failures, more than --restarts=0", 2),  # 75: stopped by a signal, and saved
        ([1], ["DELETING"], 1, "pod was deleted", 1),
    ],
)
def test_failures_are_resumed_until_restarts_are_used_up_and_the_tpu_stays(
    laptop, follow, later, status, message, count
):
    laptop.scenario(follow=follow, describe=["NOT_FOUND", "ACTIVE", *later])
    done = train(laptop, "--restarts=0")
    assert done.returncode == status
    assert message in done.stderr
    assert [words[-1] for words in starts(laptop)] == [RUN[-1], "--resume"][:count]
    assert verbs(laptop).count("create") == 1
    assert "delete" not in verbs(laptop)


def test_tokens_are_copied_in_a_file_and_are_nowhere_else(laptop):
    done = train(laptop, "--keep", **TOKENS)
    assert done.returncode == 0, done.stderr
    dry = train(laptop, "--dry-run", **TOKENS)
    assert "HF_TOKEN WANDB_API_KEY" in dry.stdout
    assert "SECRET" not in done.stdout + done.stderr + dry.stdout + dry.stderr + str(laptop.commands())
    files = [path for path in laptop.folder.rglob("*") if path.is_file() and path.name != "calls.jsonl"]
    kept = laptop.folder / "copied" / "dapo_jax_tokens"
    assert [path for path in files if b"SECRET" in path.read_bytes()] == [kept]
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600


@pytest.fixture
def worker(laptop):
    """Runs tpu_worker.sh in the home of a worker, to which a run with files was copied."""
    for name in ("my rewards/style.py", "data/math/train.jsonl", "unasked.txt"):
        (laptop.work / name).parent.mkdir(parents=True, exist_ok=True)
        (laptop.work / name).touch()
    graders = 'reward.grader=[{grader: "trl:my rewards/style.py:f"}, {grader: "rewards.py:brief"}]'
    data = ("data.source=jsonl", "data.path=data/math/train.jsonl", "--file", "data/math")
    done = train(laptop, graders, *data, "--keep", **TOKENS)
    assert done.returncode == 0, done.stderr
    home = laptop.folder / "copied"
    (home / "dapo_jax_run" / "bin").mkdir(parents=True)
    shutil.copy(laptop.folder / "parts" / "uv", home / "dapo_jax_run" / "bin")
    return lambda *words: laptop.run("bash", home / "tpu_worker.sh", *words, HOME=str(home))


def test_a_worker_has_the_files_of_the_run_and_the_tokens(laptop, worker):
    """Also files that the configuration names. A worker's status is the status of the run."""
    assert worker("follow").returncode == 1, "nothing has run"
    for _ in range(2):  # gcloud repeats commands
        assert worker("setup", "gcs,tpu").returncode == 0
    laptop.scenario(**{"dapo-jax": [3]})
    assert worker("start", *RUN).returncode == 0
    assert worker("follow").returncode == 3
    (call,) = laptop.calls("dapo-jax")
    assert call["words"] == ["train", *RUN]
    files = ["configs/quickstart.yaml", "data/math/train.jsonl", "my rewards/style.py", "rewards.py"]
    assert call["files"] == files
    settings = {"DAPO_JAX_DISTRIBUTED": "1", "LIBTPU_INIT_ARGS": ASYNC_GATHERS}
    assert call["environment"] == settings | TOKENS
    assert [call["words"] for call in laptop.calls("uv")] == [["gcs,tpu"]] * 2


def test_a_second_run_is_not_started_over_an_active_one(laptop, worker):
    assert worker("setup", "gcs").returncode == 0
    laptop.scenario(held=True)
    assert worker("start", *RUN).returncode == 0
    assert worker("start", *RUN, "--resume").returncode == 0
    assert "nothing is installed" in worker("setup", "gcs").stdout
    other = worker("start", "other.yaml")
    assert other.returncode == 2
    assert "another run is under way on this TPU: configs/quickstart.yaml" in other.stderr
    (laptop.folder / "released").touch()
    assert worker("follow").returncode == 0
    assert [call["words"] for call in laptop.calls("dapo-jax")] == [["train", *RUN]]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--type=v6e-63"], "--type=v6e-63"),
        (["reward.grader=../mine.py:f"], "../mine.py"),
        (["data.source=gsm8k", "data.path=data/gsm8k"], "data/gsm8k"),
        (["sampling.slotz=3"], "sampling.slotz"),
        # v5p-256 has 128 chips, and each is a device.
        (["parallel.fsdp=256"], "need 256 devices, but --type=v5p-256 has 128"),
        (["log.trackers=[wandb]"], "log.trackers=[wandb] needs WANDB_API_KEY"),
        (["run_dir=runs/pod"], "run_dir=runs/pod"),
    ],
)
def test_errors_end_the_command_before_anything_is_paid_for(laptop, words, message):
    done = train(laptop, *words)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert laptop.calls("gcloud") == []
