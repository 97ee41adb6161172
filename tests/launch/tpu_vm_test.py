"""launch/tpu_vm.sh with gcloud stubbed; the commands for the workers run in folders that are their homes."""

import stat

import pytest

from tests.launch.clients import ASYNC_GATHERS, TOKENS, printed

POD = ("--name=pod", "--type=v5p-256", "--zone=us-east5-a", "--poll=0")
RUN = ("configs/quickstart.yaml", "run_dir=gs://bucket/pod")
CREATED = ["describe", "create", "describe"]
COPIED = ["tar", "tar", "scp", "setup"]


def train(laptop, *more, **environment):
    return laptop.launch("tpu_vm.sh", "train", *POD, *RUN, *more, **environment)


def verb(words):
    far = [word.removeprefix("--command=").split() for word in words if word.startswith("--command=")]
    if far:  # bash tpu_worker.sh VERB
        return far[0][2]
    return "tar" if words[0] == "tar" else words[4]


def verbs(laptop):
    return [verb(words) for words in laptop.commands()]


def programs(laptop):
    """The arguments of every `dapo-jax train` on the workers, in order of their starts."""
    return [call["words"] for call in laptop.calls("dapo-jax")]


def test_train_requests_copies_starts_follows_and_deletes(laptop):
    laptop.scenario(states=[["WAITING_FOR_RESOURCES", "PROVISIONING", "ACTIVE"]], workers=2)
    done = train(laptop)
    assert done.returncode == 0, done.stderr
    waited = ["describe", "create", "describe", "describe", "describe"]
    assert verbs(laptop) == [*waited, *COPIED, "start", "follow", "delete"]
    assert programs(laptop) == [["train", *RUN]] * 2
    settings = {"DAPO_JAX_DISTRIBUTED": "1", "LIBTPU_INIT_ARGS": ASYNC_GATHERS}
    assert [call["environment"] for call in laptop.calls("dapo-jax")] == [settings] * 2
    assert "step 1 of start 0" in done.stdout
    assert not (laptop.folder / "created").exists()
    for words in laptop.commands():
        assert verb(words) in ("tar", "describe") or "--quiet" in words  # gcloud must not prompt


def test_a_preempted_run_is_recreated_and_resumed(laptop):
    laptop.scenario(states=[["ACTIVE"], ["WAITING_FOR_RESOURCES", "ACTIVE"]], runs=["preempted", 0])
    done = train(laptop, "--spot", "--restarts=0")
    assert done.returncode == 0, done.stderr
    again = ["describe", "describe", "delete", "create", "describe", "describe"]
    once = [*COPIED, "start", "follow"]
    assert verbs(laptop) == [*CREATED, *once, *again, *once, "delete"]
    assert programs(laptop) == [["train", *RUN], ["train", *RUN, "--resume"]]
    creates = [words for words in laptop.commands() if "create" in words]
    assert creates[0] == creates[1]
    assert "--spot" in creates[0]


@pytest.mark.parametrize(
    ("scenario", "status", "message", "starts"),
    [
        ({"runs": [2]}, 2, "pod is still up", 1),
        ({"runs": [75, 7]}, 7, "1 failures, more than --restarts=0", 2),  # 75: stopped by a signal, and saved
        ({"states": [["ACTIVE", "DELETING"]]}, 1, "pod was deleted", 0),
    ],
)
def test_failures_are_resumed_until_restarts_are_used_up_and_the_tpu_stays(
    laptop, scenario, status, message, starts
):
    laptop.scenario(**scenario)
    done = train(laptop, "--restarts=0")
    assert done.returncode == status
    assert message in done.stderr
    assert [words[-1] for words in programs(laptop)] == [RUN[-1], "--resume"][:starts]
    assert verbs(laptop).count("create") == 1
    assert "delete" not in verbs(laptop)


def test_a_run_is_not_given_up_when_gcloud_is_out_of_reach(laptop):
    laptop.scenario(states=[["ACTIVE", "ERROR", "ERROR", "ACTIVE"]])
    done = train(laptop)
    assert done.returncode == 0, done.stderr
    assert verbs(laptop).count("create") == 1


def test_tokens_reach_the_workers_and_nothing_else(laptop):
    laptop.scenario(workers=2)
    done = train(laptop, "--keep", **TOKENS)
    assert done.returncode == 0, done.stderr
    dry = train(laptop, "--dry-run", **TOKENS)
    assert "HF_TOKEN WANDB_API_KEY" in dry.stdout
    for call in laptop.calls("dapo-jax"):
        assert {name: call["environment"][name] for name in TOKENS} == TOKENS
    assert [call["modes"]["dapo_jax_tokens"] for call in laptop.calls("copied")] == [0o600]
    shown = done.stdout + done.stderr + dry.stdout + dry.stderr + str(laptop.commands())
    assert "SECRET" not in shown
    files = {path: path.read_bytes() for path in laptop.folder.rglob("*") if path.is_file()}
    having = [path for path, data in files.items() if b"hf_SECRET" in data or b"wandb_SECRET" in data]
    kept = [laptop.folder / "workers" / worker / "dapo_jax_run" / "tokens" for worker in "01"]
    assert sorted(set(having) - {laptop.folder / "calls.jsonl"}) == kept
    assert {stat.S_IMODE(path.stat().st_mode) for path in kept} == {0o600}


def test_the_configuration_its_rewards_and_named_files_are_on_every_worker(laptop):
    for name in ("my rewards/style.py", "data/math/train.jsonl", "unasked.txt"):
        (laptop.work / name).parent.mkdir(parents=True, exist_ok=True)
        (laptop.work / name).touch()
    laptop.scenario(workers=2)
    graders = 'reward.graders=[{grader: "trl:my rewards/style.py:f"}, {grader: "rewards.py:brief"}]'
    data = ("data.source=jsonl", "data.path=data/math/train.jsonl")
    done = train(laptop, graders, *data, "--file", "data/math")
    assert done.returncode == 0, done.stderr
    files = ["configs/quickstart.yaml", "data/math/train.jsonl", "my rewards/style.py", "rewards.py"]
    assert [call["files"] for call in laptop.calls("dapo-jax")] == [files, files]
    assert programs(laptop) == [["train", *RUN, graders, *data]] * 2


def test_a_dry_run_prints_the_commands_of_a_run_and_executes_none(laptop):
    """In an order in which each finds the TPU that it needs. A run that has ended can be watched, too."""
    for command, *options in (("train", "--keep"), ("status",), ("watch", "--keep"), ("down",), ("up",)):
        training = (*RUN, "reward.grader=rewards.py:brief") if command in ("train", "watch") else ()
        before = len(laptop.commands())
        dry = laptop.launch("tpu_vm.sh", command, *POD, *options, *training, "--dry-run")
        assert dry.returncode == 0, dry.stderr
        assert len(laptop.commands()) == before
        done = laptop.launch("tpu_vm.sh", command, *POD, *options, *training)
        assert done.returncode == 0, done.stderr
        assert printed(dry.stdout) == laptop.commands()[before:], command
        assert len(laptop.commands()) > before


def test_a_second_run_is_not_started_over_an_active_one(laptop):
    assert train(laptop, "--keep").returncode == 0
    laptop.scenario(held=True)
    home = laptop.folder / "workers" / "0"
    clean = {"HOME": str(home), "PATH": f"{laptop.folder / 'far'}:/usr/bin:/bin"}

    def worker(*words):
        return laptop.run("bash", str(home / "tpu_worker.sh"), *words, **clean)

    assert worker("start", *RUN).returncode == 0
    assert worker("start", *RUN, "--resume").returncode == 0
    assert "nothing is installed" in worker("setup", "gcs").stdout
    other = worker("start", "other.yaml")
    assert other.returncode == 2
    assert "another run is under way on this TPU: configs/quickstart.yaml" in other.stderr
    (laptop.folder / "released").touch()
    assert worker("follow").returncode == 0
    assert programs(laptop) == [["train", *RUN]] * 2


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
        (["log.wandb=true"], "log.wandb=true needs WANDB_API_KEY"),
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
