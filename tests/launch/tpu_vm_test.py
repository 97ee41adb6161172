"""launch/tpu_vm.sh with gcloud stubbed, and tpu_worker.sh in the home of a worker."""

import shutil
import stat

import pytest

from tests.launch.clients import ASYNC_GATHERS, TOKENS, printed

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


def test_a_run_is_not_given_up_when_gcloud_is_out_of_reach(laptop):
    laptop.scenario(describe=["NOT_FOUND", "ACTIVE", "ERROR", "ERROR", "ACTIVE"], follow=[255, 0])
    done = train(laptop)
    assert done.returncode == 0, done.stderr
    assert len(starts(laptop)) == 2
    assert verbs(laptop).count("create") == 1


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


def test_a_dry_run_prints_the_commands_of_a_run_and_executes_none(laptop):
    up = ["ACTIVE"]
    for command, *options in (("up",), ("status",), ("train", "--keep"), ("watch",), ("down",)):
        training = (*RUN, "reward.grader=rewards.py:brief") if command in ("train", "watch") else ()
        laptop.scenario(describe=["NOT_FOUND", *up] if command in ("up", "train") else up)
        before = len(laptop.commands())
        dry = laptop.launch("tpu_vm.sh", command, *POD, *options, *training, "--dry-run")
        assert dry.returncode == 0, dry.stderr
        assert len(laptop.commands()) == before
        done = laptop.launch("tpu_vm.sh", command, *POD, *options, *training)
        assert done.returncode == 0, done.stderr
        assert printed(dry.stdout) == laptop.commands()[before:], command
        assert len(laptop.commands()) > before


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
    ("typed", "named", "image"),
    [
        ("v4-64", "v4-64", "tpu-ubuntu2204-base"),
        ("v5e-8", "v5litepod-8", "v2-alpha-tpuv5-lite"),
        ("v5p-256", "v5p-256", "v2-alpha-tpuv5"),
        ("v6e-64", "v6e-64", "v2-alpha-tpuv6e"),
    ],
)
def test_each_generation_has_its_image(laptop, typed, named, image):
    more = ("--reserved", "--create-flag=--network=mine", "--project=p", "--dry-run")
    done = laptop.launch("tpu_vm.sh", "up", "--name", "pod", "--type", typed, "--zone", "z", *more)
    assert done.returncode == 0, done.stderr
    [words] = [words for words in printed(done.stdout) if "create" in words]
    assert words[:6] == ["gcloud", "compute", "tpus", "queued-resources", "create", "pod"]
    assert set(words[6:]) == {
        "--node-id=pod", f"--accelerator-type={named}", f"--runtime-version={image}", "--zone=z", "--reserved", "--quiet",
        "--network=mine", "--project=p",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--type=v5p:4x4x8"], "--type=v5p-256"),
        (["--type=v6e-63"], "v6e has 1, 4, 8, 16, 32, 64, 128 or 256 chips"),
        (["--name=Pod_1"], "--name=Pod_1"),
        (["--sopt"], "--sopt"),
        (["reward.grader=../mine.py:f"], "../mine.py"),
        (["data.source=gsm8k", "data.path=data/gsm8k"], "data/gsm8k, which CONFIG names; add --file"),
        (["sampling.slotz=3"], "sampling.slotz"),
        # v5p-256 has 128 chips, and each is a device.
        (["parallel.fsdp=256"], "need 256 devices, but --type=v5p-256 has 128"),
        (["parallel.tensor=3"], "need a multiple of 3 devices, but --type=v5p-256 has 128"),
        (["log.trackers=[wandb]"], "log.trackers=[wandb] needs WANDB_API_KEY"),
        (["run_dir=runs/pod"], "run_dir=runs/pod"),
    ],
)
def test_errors_end_the_command_before_anything_is_paid_for(laptop, words, message):
    done = train(laptop, *words)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert laptop.calls("gcloud") == []


@pytest.mark.parametrize(
    "words",
    [("--type=v5p-384", "parallel.fsdp=192"), ("--type=v5e-8", "parallel.tensor=2"), ("--type=v4-8", "parallel.fsdp=8")],
)  # fmt: skip
def test_meshes_that_fit_are_accepted(laptop, words):
    """v5p-384 has 192 devices. On v4 the number depends on the version of libtpu, so any is accepted."""
    done = train(laptop, *words, "--dry-run")
    assert done.returncode == 0, done.stderr
