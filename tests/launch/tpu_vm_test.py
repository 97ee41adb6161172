"""launch/tpu_vm.sh with gcloud stubbed, and tpu_worker.sh in the home of a worker."""

import re
import shlex
import shutil
import stat
import time

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


SAMPLERS = ("--samplers=v6e-4:2", "--spot-samplers", "rollout.in_flight=64", "rollout.round_tokens=16")
ADDED = ("cluster.address=auto", "cluster.samplers=2", "cluster.resources={TPU: 4}")
ONE_HOST = ("--type=v6e-8", "parallel.fsdp=8", "batch.rows_per_microbatch=8")
HEAD = {"address": ["HEAD"]}


def machines(laptop, verb):
    """The names of the machines on which a verb ran, in order."""
    calls = [call["words"] for call in laptop.calls("gcloud") if call["verb"] == verb]
    return [next(word.rstrip(":") for word in words[4:] if word.startswith("pod")) for words in calls]


def remote(laptop, verb):
    """The arguments of a command of tpu_worker.sh in all of its calls."""
    commands = [word for call in laptop.calls("gcloud") for word in call["words"] if f" {verb} " in word]
    return [shlex.split(words.partition(f" {verb} ")[2]) for words in commands]


def test_sample_workers_are_requested_with_the_trainer_join_its_cluster_and_are_deleted(laptop):
    """The trainer has one host, so the cluster has 3 nodes."""
    laptop.scenario(describe=["NOT_FOUND", "NOT_FOUND", "NOT_FOUND", "ACTIVE"], **HEAD)
    dry = train(laptop, *ONE_HOST, *SAMPLERS, "--dry-run")
    assert dry.returncode == 0, dry.stderr
    assert laptop.commands() == []
    done = train(laptop, *ONE_HOST, *SAMPLERS, **TOKENS)
    assert done.returncode == 0, done.stderr
    assert printed(dry.stdout) == laptop.commands()
    three = ["pod", "pod-sampler-0", "pod-sampler-1"]
    assert machines(laptop, "create") == machines(laptop, "scp") == machines(laptop, "setup") == three
    assert machines(laptop, "ray") == three
    assert remote(laptop, "ray") == [["HEAD", "0"], ["HEAD", "4"], ["HEAD", "4"]]
    assert remote(laptop, "nodes") == [["HEAD", "3"]]
    assert remote(laptop, "setup") == [["gcs,hub,tpu,wandb,cluster"]] * 3
    [words] = remote(laptop, "start")
    assert words == [RUN[0], *ADDED, RUN[1], *ONE_HOST[1:], *SAMPLERS[2:]]
    assert machines(laptop, "delete") == [*three[1:], "pod"]
    creates = [set(words) for words in laptop.commands() if "create" in words]
    assert ["--spot" in words for words in creates] == [False, True, True]
    assert all("--accelerator-type=v6e-4" in words for words in creates[1:])
    # The token is in the file with the other tokens, the same for all machines, and in no command.
    kept = (laptop.folder / "copied" / "dapo_jax_tokens").read_text()
    [token] = re.findall("^RAY_AUTH_TOKEN=([0-9a-f]{64})$", kept, re.MULTILINE)
    assert "RAY_AUTH_MODE=token" in kept
    assert token not in str(laptop.commands()) + done.stdout + done.stderr


def test_lost_sample_workers_are_requested_again_while_the_run_continues(laptop):
    """The first is there, and the second was preempted."""
    laptop.scenario(describe=["ACTIVE", "SUSPENDED", "SUSPENDED", "ACTIVE"], **HEAD)
    done = laptop.launch("tpu_vm.sh", "samplers", *POD, *SAMPLERS[:2])
    assert done.returncode == 0, done.stderr
    assert (
        machines(laptop, "delete")
        == machines(laptop, "create")
        == machines(laptop, "ray")
        == ["pod-sampler-1"]
    )


def test_all_machines_are_deleted_although_one_cannot_be(laptop):
    laptop.scenario(delete=[1, 0, 0])
    done = laptop.launch("tpu_vm.sh", "down", *POD, *SAMPLERS[:2])
    assert done.returncode == 1, done.stderr
    assert machines(laptop, "delete") == ["pod-sampler-0", "pod-sampler-1", "pod"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--samplers=v6e-16", "--type=v6e-8"), "--samplers=v6e-16 has 4 hosts, but a sample worker has one; use for example v6e-4:4"),
        (("--samplers=v6e-4:3", "--type=v6e-16"), "3 must be a multiple of the 4 hosts of --type=v6e-16"),
        (("--samplers=v6e-5",), "--samplers=v6e-5 does not exist"),
        (("--samplers=v6e-4:x",), "--samplers=v6e-4:x needs a number"),
        (("--samplers=v6e-4", *ONE_HOST), "rollout.in_flight"),
    ],
)  # fmt: skip
def test_sample_workers_that_cannot_work_are_refused(laptop, words, message):
    done = train(laptop, *words)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert laptop.calls("gcloud") == []


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


def test_a_machine_keeps_a_node_of_ray_running_with_the_token(laptop, worker):
    """With another head, the former node ends. On the machine with the address of the head, the node is the head."""
    own = worker("address").stdout.strip()
    assert worker("setup", "cluster").returncode == 0
    tokens = laptop.folder / "copied" / "dapo_jax_run" / "tokens"
    tokens.write_text("RAY_AUTH_TOKEN=secret\n")

    def started(count):
        until = time.monotonic() + 30
        while len(calls := laptop.calls("ray")) < count and time.monotonic() < until:
            time.sleep(0.05)
        return calls[-1]

    try:
        for _ in range(2):  # gcloud repeats commands
            assert worker("ray", "10.0.0.7", "4").returncode == 0
        node = started(1)
        assert {"--address=10.0.0.7:6379", '--resources={"TPU": 4}', "--block"} <= set(node["words"])
        assert not any(word.startswith("--num-cpus") for word in node["words"])
        assert node["environment"]["RAY_AUTH_TOKEN"] == "secret"
        assert worker("ray", own, "0").returncode == 0
        head = started(3)  # after `ray stop`
        assert [call["words"][0] for call in laptop.calls("ray")] == ["start", "stop", "start"]
        wanted = {
            "--head",
            f"--node-ip-address={own}",
            "--num-cpus=0",
            "--num-gpus=0",
            '--resources={"TPU": 0}',
        }
        assert wanted <= set(head["words"])
        laptop.scenario(status=["Active:\n 1 node_5c\n", "Active:\n 1 node_5c\n 1 node_5d\n"])
        assert worker("nodes", own, "2").returncode == 0
        assert [call["words"][0] for call in laptop.calls("ray")].count("status") == 2
    finally:
        laptop.run("bash", "-c", f"kill -- -$(cat {tokens.with_name('ray.pid')})")


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
