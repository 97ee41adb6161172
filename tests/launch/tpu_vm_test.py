"""launch/tpu_vm.sh with gcloud stubbed; the commands for the workers run in folders that are their homes."""

import stat

import pytest

from tests.launch.clients import ASYNC_GATHERS, TOKENS, printed, verb

POD = ("--name=pod", "--type=v5p-256", "--zone=us-east5-a", "--poll=0")
RUN = ("configs/quickstart.yaml", "run_dir=gs://bucket/pod")
CREATED = ["describe", "create", "describe"]
COPIED = ["tar", "tar", "scp", "setup"]


def train(laptop, *more, **environment):
    return laptop.launch("tpu_vm.sh", "train", *POD, *RUN, *more, **environment)


def programs(laptop):
    """The arguments of every `dapo-jax train` on the workers, in order of their starts."""
    return [call["words"] for call in laptop.calls("dapo-jax")]


def test_train_requests_copies_starts_follows_and_deletes(laptop):
    laptop.scenario(states=[["WAITING_FOR_RESOURCES", "PROVISIONING", "ACTIVE"]], workers=2)
    done = train(laptop)
    assert done.returncode == 0, done.stderr
    waited = ["describe", "create", "describe", "describe", "describe"]
    assert laptop.verbs() == [*waited, *COPIED, "start", "follow", "delete"]
    assert programs(laptop) == [["train", *RUN]] * 2
    settings = {"DAPO_JAX_DISTRIBUTED": "1", "LIBTPU_INIT_ARGS": ASYNC_GATHERS}
    assert [call["environment"] for call in laptop.calls("dapo-jax")] == [settings] * 2
    assert "step 1 of start 0" in done.stdout
    assert "pod is WAITING_FOR_RESOURCES" in done.stderr
    assert not (laptop.folder / "created").exists()
    for words in laptop.commands():
        assert verb(words) in ("tar", "describe") or "--quiet" in words  # gcloud must not prompt


def test_a_preempted_run_is_recreated_and_resumed(laptop):
    laptop.scenario(states=[["ACTIVE"], ["WAITING_FOR_RESOURCES", "ACTIVE"]], runs=["preempted", 0])
    done = train(laptop, "--spot", "--restarts=0")
    assert done.returncode == 0, done.stderr
    again = ["describe", "describe", "delete", "create", "describe", "describe"]
    once = [*COPIED, "start", "follow"]
    assert laptop.verbs() == [*CREATED, *once, *again, *once, "delete"]
    assert programs(laptop) == [["train", *RUN], ["train", *RUN, "--resume"]]
    creates = [words for words in laptop.commands() if "create" in words]
    assert creates[0] == creates[1]
    assert "--spot" in creates[0]


# Slow: starts a slow process. `test_train_requests_copies_starts_follows_and_deletes` follows a run.
@pytest.mark.slow
def test_a_run_is_followed_while_its_process_is_not_yet_its_program(laptop):
    slow = laptop.folder / "far" / "setsid"
    slow.write_text("#!/bin/sh\nWORDS=\"$*\" exec sh -c 'sleep 0.5; exec /usr/bin/setsid $WORDS'\n")
    slow.chmod(0o755)
    done = train(laptop, "--restarts=0")
    assert done.returncode == 0, done.stderr
    assert laptop.verbs() == [*CREATED, *COPIED, "start", "follow", "delete"]


def test_a_status_of_2_is_not_retried_and_the_tpu_stays(laptop):
    laptop.scenario(runs=[2])
    done = train(laptop)
    assert done.returncode == 2
    assert laptop.verbs() == [*CREATED, *COPIED, "start", "follow"]
    assert "pod is still up" in done.stderr


def test_a_failure_is_resumed_on_the_same_tpu_until_restarts_are_used_up(laptop):
    laptop.scenario(runs=[134, 7])
    done = train(laptop, "--restarts=1")
    assert done.returncode == 7
    once = ["start", "follow"]
    again = ["describe", "describe", "describe", *COPIED, *once]
    assert laptop.verbs() == [*CREATED, *COPIED, *once, *again, "describe"]
    assert [words[-1] for words in programs(laptop)] == [RUN[-1], "--resume"]
    assert "2 failures, more than --restarts=1" in done.stderr


# Slow: starts the run three times. The tests of a preempted and of a failed run resume, too.
@pytest.mark.slow
def test_a_stop_is_no_failure_and_a_broken_connection_does_not_touch_the_run(laptop):
    laptop.scenario(runs=[75, 75, 0], drops=1)
    done = train(laptop, "--restarts=0")
    assert done.returncode == 0, done.stderr
    assert [words[-1] for words in programs(laptop)] == [RUN[-1], "--resume", "--resume"]


# Slow: three launches. `test_a_deleted_tpu_is_not_created_again` has other answers of gcloud.
@pytest.mark.slow
def test_gcloud_out_of_reach_ends_the_first_request_but_not_a_run(laptop):
    laptop.scenario(states=[["ACTIVE", "ERROR", "ERROR", "ACTIVE"]], runs=[1, 0])
    done = train(laptop)
    assert done.returncode == 0, done.stderr
    assert "problem refreshing your tokens" in done.stderr
    (laptop.folder / "created").touch()
    laptop.scenario(states=[["ERROR"]])
    assert train(laptop).returncode == 1


def test_a_deleted_tpu_is_not_created_again(laptop):
    laptop.scenario(states=[["ACTIVE", "DELETING"]], runs=[1])
    done = train(laptop)
    assert done.returncode == 1
    assert "pod was deleted" in done.stderr
    assert laptop.verbs().count("create") == 1


# Slow: three launches. `test_a_preempted_run_is_recreated_and_resumed` deletes and creates.
@pytest.mark.slow
def test_a_failed_request_is_deleted_before_the_next(laptop):
    laptop.scenario(states=[["FAILED"], ["ACTIVE"]], refused=1)
    assert train(laptop).returncode == 1
    assert laptop.verbs() == ["describe", "create"]
    assert train(laptop).returncode == 1
    assert train(laptop).returncode == 0
    assert laptop.verbs()[5:8] == ["describe", "delete", "create"]


# Slow: three launches. tests/launch/scripts_test.py rejoins a run with `watch`, as the page of pods shows.
@pytest.mark.slow
def test_watch_rejoins_a_run_that_ended_and_deletes_the_tpu(laptop):
    assert train(laptop, "--keep").returncode == 0
    assert laptop.verbs()[-1] == "follow"
    done = laptop.launch("tpu_vm.sh", "watch", *POD, *RUN)
    assert done.returncode == 0, done.stderr
    assert laptop.verbs()[-3:] == ["describe", "follow", "delete"]
    assert len(programs(laptop)) == 1
    done = laptop.launch("tpu_vm.sh", "watch", *POD, *RUN)
    assert done.returncode == 2
    assert "there is no TPU --name=pod" in done.stderr
    assert laptop.verbs().count("create") == 1


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


# Slow: starts the run three times. The first test has the environment of the workers; tests/launch/gke_xpk_test.py has own flags.
@pytest.mark.slow
def test_own_flags_of_the_tpu_compiler_reach_the_workers(laptop):
    """Also an empty value, and after a preemption."""
    laptop.scenario(runs=["preempted", 0, 0])
    for mine in ("--xla_tpu_scoped_vmem_limit_kib=65536 --xla_x='a b'", ""):
        assert train(laptop, LIBTPU_INIT_ARGS=mine).returncode == 0
    found = [call["environment"]["LIBTPU_INIT_ARGS"] for call in laptop.calls("dapo-jax")]
    assert found == ["--xla_tpu_scoped_vmem_limit_kib=65536 --xla_x='a b'"] * 2 + [""]


def test_the_configuration_its_rewards_and_named_files_are_on_every_worker(laptop):
    (laptop.work / "my rewards").mkdir()
    (laptop.work / "my rewards" / "style.py").touch()
    (laptop.work / "data" / "math").mkdir(parents=True)
    (laptop.work / "data" / "math" / "train.jsonl").touch()
    (laptop.work / "unasked.txt").touch()
    laptop.scenario(workers=2)
    graders = 'reward.graders=[{grader: "trl:my rewards/style.py:f"}, {grader: "rewards.py:brief"}]'
    data = ("data.source=jsonl", "data.path=data/math/train.jsonl")
    done = train(laptop, graders, *data, "--file", "data/math")
    assert done.returncode == 0, done.stderr
    files = ["configs/quickstart.yaml", "data/math/train.jsonl", "my rewards/style.py", "rewards.py"]
    assert [call["files"] for call in laptop.calls("dapo-jax")] == [files, files]
    assert programs(laptop) == [["train", *RUN, graders, *data]] * 2


def test_a_dry_run_prints_the_commands_of_a_run_and_executes_none(laptop):
    """Every command, in an order in which each finds the TPU that it needs."""
    for command in ("up", "status", "train", "logs", "watch", "down"):
        training = (*RUN, "reward.grader=rewards.py:brief") if command in ("train", "watch") else ()
        if command == "train":
            assert laptop.launch("tpu_vm.sh", "down", *POD).returncode == 0
            training = (*training, "--keep")
        if command == "down":
            assert laptop.launch("tpu_vm.sh", "up", *POD).returncode == 0
        before = len(laptop.commands())
        dry = laptop.launch("tpu_vm.sh", command, *POD, *training, "--dry-run", **TOKENS)
        assert dry.returncode == 0, dry.stderr
        assert len(laptop.commands()) == before
        done = laptop.launch("tpu_vm.sh", command, *POD, *training, **TOKENS)
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
